"""Counts tokens with OpenAI's own vocabularies; the only file that loads tiktoken.

tiktoken downloads a vocabulary at its first use, without a time-out. So it is fetched once in a process, in a daemon
thread that can hold neither an event loop nor the exit, and whoever needs it waits for a bounded time. Where it cannot
be had, tokens are estimated and one warning says so.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final

import anyio
import attrs
import tiktoken

from agentfsm._concurrency import make_waker
from agentfsm.ports.model import TokenCounter
from agentfsm.tokens.estimate import EstimatedCounter

_log = logging.getLogger("agentfsm")

# For models that tiktoken does not know: OpenAI's newest, and the one that spends most of its entries on scripts
# other than Latin, so nearest to what other vendors use now.
FALLBACK_ENCODING: Final = "o200k_base"

# From the start of the fetch. The file is 3.6 MB: 10 s suffice on a line of 3 Mbit/s, and a run that waits longer for
# a count than for its answer is served better by an estimate.
WAIT_S: Final = 10.0

# tiktoken panics (a BaseException) on runs of a million spaces, and before its version 0.13 the time for one unbroken
# run grew with its square: 8,000 ideographs took 0.17 s, 2,000 take 0.011 s.
PIECE_CHARS: Final = 2_000

# Cut before a single space where there is one: no token of these vocabularies reaches across that place, so the count
# stays exact. A text without such a place is cut anyhow, which adds about one token per piece.
_PIECE: Final = re.compile(rf"(?s).{{1,{PIECE_CHARS}}}(?:\Z|(?<=\S)(?= \S))|.{{1,{PIECE_CHARS}}}")


@attrs.define(eq=False, repr=False, kw_only=True)
class TiktokenCounter(TokenCounter):
    """Counts with a vocabulary of tiktoken."""

    encoding: str
    exact: bool
    """False where the model is unknown to tiktoken and its vocabulary is assumed."""

    vocabulary: tiktoken.Encoding = attrs.field(repr=False)

    def count(self, text: str) -> int:
        """Count the tokens; special tokens count as the plain text they are written in, a lone surrogate as U+FFFD."""
        encode = self.vocabulary.encode_ordinary
        if len(text) <= PIECE_CHARS:
            return len(encode(text))
        return sum(len(encode(piece[0])) for piece in _PIECE.finditer(text))


@attrs.define(eq=False, repr=False)
class _VocabularyFetch:
    """One vocabulary on its way."""

    deadline: float
    """On the machine's monotonic clock, seconds: nobody waits longer than this."""

    result: Future[tiktoken.Encoding] = attrs.field(factory=Future)

    def run(self, fetch: Callable[[str], tiktoken.Encoding], encoding: str) -> None:
        """Fetch it, in a thread of its own."""
        try:
            self.result.set_result(fetch(encoding))
        except BaseException as error:  # noqa: BLE001  a download raises anything; the result carries it
            self.result.set_exception(error)

    async def wait(self) -> None:
        """Return when it has ended or the time is up; a cancelled wait leaves it to the others."""
        if self.result.done() or time.monotonic() >= self.deadline:
            return
        ended = anyio.Event()
        wake = make_waker(ended.set)
        self.result.add_done_callback(lambda _result: wake())
        with anyio.move_on_after(self.deadline - time.monotonic()):
            await ended.wait()

    @property
    def failure(self) -> str | None:
        """Why there is no vocabulary, or None where there is one.

        An error is told by its type only: the text of a network error may hold the address and password of a proxy.
        """
        if not self.result.done():
            return "no answer in time"
        error = self.result.exception()
        return None if error is None else type(error).__name__


@attrs.define(eq=False, repr=False, kw_only=True)
class Vocabularies:
    """The vocabularies of a process: each is fetched once, whoever asks and on whatever event loop."""

    fetch: Callable[[str], tiktoken.Encoding] = tiktoken.get_encoding
    """Takes the name of an encoding and blocks until it is there."""

    wait_s: float = WAIT_S
    """The longest that anybody waits for it, seconds."""

    _fetches: dict[str, _VocabularyFetch] = attrs.field(factory=dict, init=False)
    """By encoding. A failed one is kept: without a network, asking again would delay each run for nothing."""

    _warned: bool = attrs.field(default=False, init=False)
    _lock: threading.Lock = attrs.field(factory=threading.Lock, init=False)
    """Guards both, as event loops in several threads may ask."""

    async def load_counter(self, model_name: str) -> TokenCounter:
        """Load the counter for a model; see `load_counter`."""
        encoding, known = _resolve_encoding(model_name)
        fetch = self._start_fetch(encoding)
        await fetch.wait()
        if failure := fetch.failure:
            self._warn(encoding, failure)
            return EstimatedCounter()
        return TiktokenCounter(encoding=encoding, exact=known, vocabulary=fetch.result.result())

    def _start_fetch(self, encoding: str) -> _VocabularyFetch:
        with self._lock:
            fetch = self._fetches.get(encoding)
            if fetch is None:
                fetch = self._fetches[encoding] = _VocabularyFetch(time.monotonic() + self.wait_s)
                arguments = (self.fetch, encoding)
                threading.Thread(target=fetch.run, args=arguments, name="agentfsm-vocabulary", daemon=True).start()
            return fetch

    def _warn(self, encoding: str, failure: str) -> None:
        with self._lock:
            if self._warned:
                return
            self._warned = True
        _log.warning(
            "The vocabulary %s could not be loaded (%s), so tokens are estimated from now on. Allow "
            "https://openaipublic.blob.core.windows.net, or set TIKTOKEN_CACHE_DIR to a directory that holds it.",
            encoding,
            failure,
        )


def _resolve_encoding(model_name: str) -> tuple[str, bool]:
    """Return the name of a model's encoding, and whether tiktoken knows it."""
    try:
        return tiktoken.encoding_name_for_model(model_name), True
    except KeyError:
        return FALLBACK_ENCODING, False


_VOCABULARIES: Final = Vocabularies()


async def load_counter(model_name: str) -> TokenCounter:
    """Load the token counter for a model; it never fails.

    The vocabulary is fetched once in a process, however many runs ask for it and on however many event loops. A
    cancelled call is cancelled at once, and the fetch goes on for the others.

    Args:
        model_name: As the provider knows it. A name that tiktoken does not know gets o200k_base, and `exact` is False.

    Returns:
        A counter with the model's vocabulary; an estimate where that cannot be had within 10 s of the first call.
        A vocabulary that arrives later serves the calls after that.
    """
    return await _VOCABULARIES.load_counter(model_name)
