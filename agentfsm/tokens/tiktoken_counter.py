"""Count tokens with OpenAI's vocabularies; the only module that imports tiktoken.

tiktoken downloads a vocabulary at its first use, without a timeout. It is therefore fetched once per process, in a
daemon thread that blocks neither an event loop nor the exit, and callers wait for a limited time. If the fetch fails,
tokens are estimated and one warning is logged.
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

from agentfsm._lib.concurrency import make_waker
from agentfsm.ports.model import TokenCounter
from agentfsm.tokens.estimate import EstimatedCounter

_log = logging.getLogger("agentfsm")

# Encoding of models that tiktoken does not know: OpenAI's newest. It has the most entries for scripts other than Latin,
# so it is closest to the vocabularies of other providers.
FALLBACK_ENCODING: Final = "o200k_base"

# Seconds to wait from the start of the fetch. The file has 3.6 MB: 10 s suffice at 3 Mbit/s, and a run that would wait
# longer for a count than for its answer is better off with an estimate.
WAIT_S: Final = 10.0

# tiktoken panics (a BaseException) on runs of a million spaces, and before its version 0.13 the time for one unbroken
# run grew with its square: 8,000 ideographs took 0.17 s, 2,000 take 0.011 s.
PIECE_CHARS: Final = 2_000

# Text is cut before a single space if possible: no token of these vocabularies spans that place, so the count is exact.
# A text without such a place is cut anywhere, which adds about one token per piece.
_PIECE: Final = re.compile(rf"(?s).{{1,{PIECE_CHARS}}}(?:\Z|(?<=\S)(?= \S))|.{{1,{PIECE_CHARS}}}")


@attrs.define(eq=False, repr=False, kw_only=True)
class TiktokenCounter(TokenCounter):
    """Counter with a vocabulary of tiktoken."""

    encoding: str
    """Name of the encoding."""

    exact: bool
    """Whether tiktoken knows the model; if not, its vocabulary is assumed."""

    vocabulary: tiktoken.Encoding = attrs.field(repr=False)
    """The loaded vocabulary."""

    def count(self, text: str) -> int:
        """Count the tokens. Special tokens count as plain text, a lone surrogate as U+FFFD."""
        encode = self.vocabulary.encode_ordinary
        if len(text) <= PIECE_CHARS:
            return len(encode(text))
        return sum(len(encode(piece[0])) for piece in _PIECE.finditer(text))


@attrs.define(eq=False, repr=False)
class _VocabularyFetch:
    """Fetch of one vocabulary."""

    deadline: float
    """Monotonic time, in seconds, at which all waiting ends."""

    result: Future[tiktoken.Encoding] = attrs.field(factory=Future)
    """The vocabulary, or the error of the fetch."""

    def run(self, fetch: Callable[[str], tiktoken.Encoding], encoding: str) -> None:
        """Fetch the vocabulary. It runs in its own thread."""
        try:
            self.result.set_result(fetch(encoding))
        except BaseException as error:  # noqa: BLE001  a download may raise anything; the result holds it
            self.result.set_exception(error)

    async def wait(self) -> None:
        """Wait until the fetch ends or the deadline passes. Cancelling the wait does not cancel the fetch."""
        if self.result.done() or time.monotonic() >= self.deadline:
            return
        ended = anyio.Event()
        wake = make_waker(ended.set)
        self.result.add_done_callback(lambda _result: wake())
        with anyio.move_on_after(self.deadline - time.monotonic()):
            await ended.wait()

    @property
    def failure(self) -> str | None:
        """Reason why there is no vocabulary; None if there is one.

        Of an error it has only the type: the text of a network error may contain the address and password of a proxy.
        """
        if not self.result.done():
            return "no answer in time"
        error = self.result.exception()
        return None if error is None else type(error).__name__


@attrs.define(eq=False, repr=False, kw_only=True)
class Vocabularies:
    """Vocabularies of a process. Each is fetched once for all callers and event loops."""

    fetch: Callable[[str], tiktoken.Encoding] = tiktoken.get_encoding
    """Blocking function from the name of an encoding to its vocabulary."""

    wait_s: float = WAIT_S
    """Longest wait for a vocabulary, in seconds from the start of its fetch."""

    _fetches: dict[str, _VocabularyFetch] = attrs.field(factory=dict, init=False)
    """Fetches by encoding. A failed one is kept: without a network, each further fetch would only delay a run."""

    _warned: bool = attrs.field(default=False, init=False)
    """Whether the warning was logged."""

    _lock: threading.Lock = attrs.field(factory=threading.Lock, init=False)
    """Guards both fields, since event loops run in several threads."""

    async def load_counter(self, model_name: str) -> TokenCounter:
        """Load the counter for a model; see `load_counter`."""
        try:
            encoding, known = tiktoken.encoding_name_for_model(model_name), True
        except KeyError:
            encoding, known = FALLBACK_ENCODING, False
        with self._lock:
            fetch = self._fetches.get(encoding)
            if fetch is None:
                fetch = self._fetches[encoding] = _VocabularyFetch(time.monotonic() + self.wait_s)
                arguments = (self.fetch, encoding)
                threading.Thread(target=fetch.run, args=arguments, name="agentfsm-vocabulary", daemon=True).start()
        await fetch.wait()
        if failure := fetch.failure:
            self._warn(encoding, failure)
            return EstimatedCounter()
        return TiktokenCounter(encoding=encoding, exact=known, vocabulary=fetch.result.result())

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


_VOCABULARIES: Final = Vocabularies()


async def load_counter(model_name: str) -> TokenCounter:
    """Load the token counter for a model, without raising errors.

    The vocabulary is fetched once per process, for all runs and event loops. A cancelled call ends at once, and the
    fetch continues for the others.

    Args:
        model_name: Name of the model at the provider. For a name that tiktoken does not know, the counter uses
            o200k_base and `exact` is False.

    Returns:
        A counter with the model's vocabulary, or an estimate if it does not arrive within 10 s of the first call. Calls
        after its arrival use it.
    """
    return await _VOCABULARIES.load_counter(model_name)
