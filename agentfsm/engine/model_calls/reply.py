"""Send one request to a model and validate the reply, before a malformed one affects the run.

A model may be implemented by the user. Its mistakes raise `MisuseError`, which is not retried.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from inspect import isawaitable
from typing import TYPE_CHECKING, Any, Final

import anyio

from agentfsm._lib.concurrency import is_foreign_cancellation
from agentfsm.core.errors import MisuseError, ModelError, ModelReplyError, ModelUnavailableError
from agentfsm.core.usage import Usage
from agentfsm.ports.model import (
    MAX_REPLY_CALLS,
    USUAL_ARGUMENTS_CHARS,
    USUAL_TEXT_CHARS,
    CallChunk,
    FieldRules,
    FinishChunk,
    FinishReason,
    ProposedCall,
    Reply,
    TextChunk,
    ThinkingChunk,
    build_os_failure,
    check_call,
    check_fields,
    check_reply,
    find_reply_excess,
)

if TYPE_CHECKING:
    from agentfsm.ports.model import Emit, Model, Request

# The end of the name of a snapshot: a date or a number, such as -2024-08-06, -20241022, -0613, -002 or -20241022-v2-0.
_SNAPSHOT: Final = re.compile(r"-(\d{4}-\d{2}-\d{2}|\d{8}|\d{6}|\d{4}|\d{3})(-v\d+(-\d+)?)?")

# Placeholder until a model's `reply` has returned.
_NOT_CALLED: Final = object()


def find_other_model(asked: str, served: str) -> str:
    """Return the name of the model that replied if it is another than the snapshot that was asked; else "".

    A name without a snapshot, such as "gpt-5.4-mini", stands for any. Names that contain each other are the same:
    providers and gateways add prefixes, and some leave the date out.

    Args:
        asked: Name of the model that was asked.
        served: Name in the reply.
    """
    if served == asked:
        return ""
    first, second = (re.sub(r"[^a-z0-9]+", "-", each.lower()) for each in (asked, served))
    is_snapshot = (found := _SNAPSHOT.search(first)) is not None and found.end() == len(first)
    return served if is_snapshot and first not in second and second not in first else ""


async def fetch_reply(model: Model, request: Request, emit: Emit | None = None) -> Reply:
    """Send one request to a model.

    Raises:
        ModelError: if the request fails; a ModelReplyError if the reply is too large.
        MisuseError: if `reply` is not async, or returns or raises something invalid.
    """
    reply = await _call_model(model, request, emit)
    # Comparing classes is the fast path for each turn; anything else is checked in detail.
    if (
        reply.__class__ is not Reply
        or reply.text.__class__ is not str
        or reply.calls.__class__ is not tuple
        or reply.finish_reason.__class__ is not FinishReason
        or reply.native is not None
        or reply.model.__class__ is not str
        or reply.served_model.__class__ is not str
        or reply.response_id.__class__ is not str
        or reply.thinking.__class__ is not str
        or reply.hosted is not None
        or reply.tier is not None
        or reply.unanswered != ""
        or reply.cache_report is not None
    ):
        check_reply(f"{type(model).__name__}.reply", reply)
    if reply.usage is not None:
        _check_usage(model, "returned a Reply", reply.usage)
    # For a reply of usual size the slices are empty, and checking them needs no call.
    is_large: object = reply.native or reply.hosted or reply.calls[MAX_REPLY_CALLS:] or reply.text[USUAL_TEXT_CHARS:]
    for call in reply.calls:
        if call.__class__ is not ProposedCall or not (
            call.arguments.__class__ is call.name.__class__ is call.id.__class__ is str
        ):
            check_call(f"{type(model).__name__}.reply", call)
        is_large = is_large or call.arguments[USUAL_ARGUMENTS_CHARS:]
    if is_large and (over := find_reply_excess(reply)) is not None:
        raise ModelReplyError(
            f"The reply of {model.name!r} is too large ({over}) and is not used. Limit it with "
            "Settings(max_tokens=...), or say in the instructions how much is wanted at a time.",
            reply.usage,
        )
    return reply


async def _call_model(model: Model, request: Request, emit: Emit | None) -> Reply:
    asked: Any = _NOT_CALLED
    try:
        asked = model.reply(request, emit)
        reply: Reply = await asked  # or whatever a user's own returns
    except (ModelError, MisuseError) as error:
        if error.usage is not None:
            _check_usage(model, f"raised {type(error).__name__}", error.usage)
        raise
    except OSError as error:
        raise build_os_failure(model, error) from error
    except anyio.get_cancelled_exc_class() as cancellation:
        if not is_foreign_cancellation(cancellation):
            raise
        raise ModelUnavailableError(f"{model.name} waited for a task that other code cancelled") from cancellation
    except TypeError:
        if asked is _NOT_CALLED or isawaitable(asked):
            raise
        method, kind = f"{type(model).__name__}.reply", type(asked).__name__
        raise MisuseError(f"{method} returned {kind}, not an awaitable: write `async def reply`") from None
    else:
        return reply


def calculate_usd(model: Model, usage: Usage) -> float | None:
    """Return the cost of a usage in US dollars, according to the model.

    Raises:
        MisuseError: if the model returns an invalid price.
    """
    cost_usd = model.cost_usd(usage)
    if cost_usd is not None and not _is_price(cost_usd):
        problem = f"{type(model).__name__}.cost_usd returned {cost_usd!r:.100}"
        raise MisuseError(f"{problem}: return US dollars, 0 or more, or None if the price is unknown")
    return cost_usd


# Types of the fields of each kind of chunk, and a hint for a field of another type.
_TEXT_FIELDS: Final[FieldRules] = {"text": (str, "a text, or emit nothing where nothing came")}
_CHUNK_FIELDS: Final[Mapping[type, FieldRules]] = {
    TextChunk: _TEXT_FIELDS,
    ThinkingChunk: _TEXT_FIELDS,
    CallChunk: {
        "index": (int, "the place of the call in the reply, from 0"),
        "name": (str, "a text, '' if it was emitted before"),
        "arguments": (str, "a text, '' where nothing came"),
        "is_complete": (bool, "True with the last piece of the call"),
    },
    FinishChunk: {"reason": (FinishReason, "a FinishReason")},
}


def check_chunk(model: Model, chunk: object) -> None:
    """Validate a chunk of a reply.

    Raises:
        MisuseError: if it is not a valid chunk; the message shows a valid one.
    """
    action = f"{type(model).__name__}.reply emitted"
    fields = next((fields for kind, fields in _CHUNK_FIELDS.items() if isinstance(chunk, kind)), None)
    if fields is None:
        kinds = ", ".join(kind.__name__ for kind in _CHUNK_FIELDS)
        raise MisuseError(f"{action} {type(chunk).__name__}, which is not a chunk of a reply: emit one of {kinds}")
    check_fields(f"{action} a {type(chunk).__name__} whose", chunk, fields)


_TOKEN_FIELDS: Final = (
    "input_tokens",
    "output_tokens",
    "cached_tokens",
    "cache_write_tokens",
    "cache_write_1h_tokens",
    "reasoning_tokens",
)


def _check_usage(model: Model, said: str, usage: Usage) -> None:
    """Validate a usage before it is added to the run's: a negative count would refund the run's spending."""
    # This runs in each turn, so the usual case returns without a call. One that is negative makes all of them together
    # negative, and one of another type gives them its type, or cannot be joined.
    if usage.__class__ is Usage and usage.cost_usd is None:
        try:
            together = (
                usage.input_tokens
                | usage.output_tokens
                | usage.cached_tokens
                | usage.cache_write_tokens
                | usage.cache_write_1h_tokens
                | usage.reasoning_tokens
            )
            if together.__class__ is int and together >= 0:
                return
        except TypeError:
            pass  # named below
    action = f"{type(model).__name__}.reply {said}"
    if not isinstance(usage, Usage):
        give = "Usage(input_tokens=..., output_tokens=...), or None if the usage is unknown"
        raise MisuseError(f"{action} whose usage is of the type {type(usage).__name__}: give {give}")
    for name in _TOKEN_FIELDS:
        tokens = getattr(usage, name)
        if not isinstance(tokens, int) or tokens < 0:
            raise MisuseError(f"{action} whose usage has {name}={tokens!r:.100}: give a whole number, 0 or more")
    if usage.cost_usd is not None and not _is_price(usage.cost_usd):
        raise MisuseError(f"{action} whose usage has cost_usd={usage.cost_usd!r:.100}: give 0 or more, or None")


def _is_price(value: object) -> bool:
    return isinstance(value, int | float) and 0 <= value < math.inf
