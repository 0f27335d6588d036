"""Usage of model requests that gave no reply: that which was reported, else an estimate if they may have been billed.

A provider bills what it has read and written, also if the connection breaks or the request is cancelled, and then
reports no usage. A missing report is therefore not read as zero, unless it is known that the model was not asked.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

import anyio
import attrs
from anyio.lowlevel import current_token

from agentfsm.core.errors import ModelReplyError, ModelUnavailableError
from agentfsm.core.usage import Usage
from agentfsm.ports.model import CallChunk, FinishChunk
from agentfsm.tokens.ledger import BYTE_COUNTER, BYTES_PER_TOKEN, count_message
from agentfsm.tokens.tool_prompts import count_tools

if TYPE_CHECKING:
    from agentfsm.ports.model import Chunk, Model, Request

# Average of English, code and Chinese, which a model writes; see `BYTES_PER_TOKEN`.
_BYTES_PER_WRITTEN_TOKEN: Final = 4


def estimate_request_tokens(request: Request) -> int:
    """Estimate the tokens of a request without a vocabulary: instructions, tools and messages."""
    asked = BYTE_COUNTER.count(request.instructions) + count_tools(request.tools, BYTE_COUNTER)
    asked += sum([count_message(message, BYTE_COUNTER) for message in request.messages])
    return asked // BYTES_PER_TOKEN


def estimate_written_tokens(size_bytes: int) -> int:
    """Estimate the tokens of a text of so many bytes that a model has written."""
    return -(-size_bytes // _BYTES_PER_WRITTEN_TOKEN)


def count_chunk_bytes(chunk: Chunk) -> int:
    """Return the bytes of text, thinking or arguments in a chunk of a reply."""
    if isinstance(chunk, FinishChunk):
        return 0
    return BYTE_COUNTER.count(chunk.arguments if isinstance(chunk, CallChunk) else chunk.text)


def attach_usage(error: BaseException, usage: Usage) -> None:
    """Set the usage of an error or a cancellation, which passes it on to those that called.

    Some classes of cancellations refuse attributes, so it goes past them.
    """
    error.__dict__["usage"] = usage


def find_failed_usage(error: BaseException, request_tokens: int, received_bytes: int) -> Usage:
    """Return the usage of an attempt that ended with an error or a cancellation, without a price of its own.

    Args:
        error: The error. Its `usage`, if it has one, counts; an estimated one without a price lacks the output.
        request_tokens: Tokens of the request as they were counted here.
        received_bytes: Bytes of text, thinking and arguments that were streamed.
    """
    reported: Usage | None = getattr(error, "usage", None)
    written = estimate_written_tokens(received_bytes)
    if reported is not None and not received_bytes:
        return reported
    if reported is not None:
        lacks_output = reported.estimated and reported.cost_usd is None and not reported.unpriced
        return attrs.evolve(reported, output_tokens=max(reported.output_tokens, written)) if lacks_output else reported
    if not received_bytes and not _may_have_been_billed(error):
        return Usage()
    return Usage(input_tokens=request_tokens, output_tokens=written, estimated=True)


def _may_have_been_billed(error: BaseException) -> bool:
    """Return whether a model may have worked on a request of which nothing has arrived."""
    if isinstance(error, ModelUnavailableError):  # a response with an error status is free of charge
        return error.status is None and not error.is_unreachable
    return isinstance(error, ModelReplyError) or not isinstance(error, Exception)  # or it was cut off


# Share of the largest figures that is left after another request.
_DECAY: Final = 0.9


@attrs.define(eq=False)
class BilledExcess:
    """Figures of one model in this process."""

    tokens: float = 0.0
    """Largest excess of a recent request, tokens; a little less after each later one."""

    share: float = 0.0
    """Largest excess of a recent request, as a share of the tokens that were counted."""

    is_known: bool = False
    """Whether a request has ended."""

    _first: dict[Any, anyio.Event] = attrs.field(factory=dict, init=False)
    """By event loop, the event at the end of the request that is asked alone, as long as nothing is known."""

    def record(self, counted: int, billed: int) -> None:
        """Record the input tokens of a request, as they were counted and as they were billed."""
        more = max(billed - counted, 0)
        self.tokens = max(more, _DECAY * self.tokens)
        self.share = max(more / max(counted, 1), _DECAY * self.share)

    def correct(self, counted: int) -> int:
        """Return the tokens to reserve for a request of so many counted ones."""
        return counted + math.ceil(min(self.tokens, self.share * counted))

    def try_begin_first(self) -> bool:
        """Return whether this is the first request to the model in this event loop: call `end_first` after it."""
        loop = current_token()
        if loop in self._first:
            return False
        self._first[loop] = anyio.Event()
        return True

    async def wait_for_first(self) -> None:
        """Wait for the end of the first request."""
        if (first := self._first.get(current_token())) is not None:
            await first.wait()

    def end_first(self) -> None:
        """Let the requests go on that wait for the first one, whether or not it has shown something."""
        self.is_known = True
        self._first.pop(current_token()).set()


_FIGURES: Final[WeakKeyDictionary[Model, BilledExcess]] = WeakKeyDictionary()


def find_billed_excess(model: Model) -> BilledExcess:
    """Return the figures of a model, shared by all agents that use it; figures of its own if it cannot be shared."""
    try:
        return _FIGURES.setdefault(model, BilledExcess())
    except TypeError:  # a class of the user's without a hash or weak references
        return BilledExcess()
