"""Asking the model: one request, within the budget, and retries where they can help."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from inspect import isawaitable
from types import UnionType
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import anyio
import attrs

from agentfsm.core.errors import LimitError, MisuseError, ModelError, ModelReplyError, ModelUnavailableError
from agentfsm.core.messages import Usage
from agentfsm.engine.drive.budget import NO_USAGE, Budget
from agentfsm.engine.drive.engine import ANSWER_TOKENS, MAX_ANSWER_TOKENS, Engine
from agentfsm.engine.watch.log import redacted
from agentfsm.engine.watch.stream import CallDelta, TextDelta, ThinkingDelta, deltas
from agentfsm.ports import (
    CallChunk,
    Chunk,
    Emit,
    FinishReason,
    Model,
    ProposedCall,
    Reply,
    Request,
    TextChunk,
    ThinkingChunk,
)
from agentfsm.tally import BYTES_PER_TOKEN
from agentfsm.threads import is_foreign

if TYPE_CHECKING:
    from agentfsm.core.effects import AskModel
    from agentfsm.core.run import Run
    from agentfsm.core.settings import Settings
    from agentfsm.engine.drive.journal import Journal
    from agentfsm.engine.think.early import EarlyCalls
    from agentfsm.ports import ToolDefinition
    from agentfsm.tally import Tally

# Until a model's `reply` has returned.
_NOT_ASKED: Final = object()
# Answers that must not be taken for whole ones, and that asking again would not mend.
FLAWS: Final = {
    FinishReason.LENGTH: "the answer was cut off at the length limit; allow more with Settings(max_tokens=...), or a "
    "larger token budget",
    FinishReason.CONTENT_FILTER: "the provider's content filter cut the answer off",
}

# Choices that name no tool.
_MODES: Final = frozenset({"auto", "none", "required"})


@attrs.define(eq=False, repr=False)
class Question:
    """What the model is to be asked, and where what comes of it goes."""

    engine: Engine
    journal: Journal
    effect: AskModel
    tally: Tally
    budget: Budget
    tools: Sequence[ToolDefinition]
    digest: str
    # Of the request, for its record.
    settings: Settings
    # Of this turn.

    @property
    def is_streamed(self) -> bool:
        """Whether the reply is to come in pieces."""
        return self.journal.listen is not None or self.settings.stream


async def ask(question: Question, early: EarlyCalls | None = None) -> tuple[Reply, Usage]:
    """Ask until a usable reply comes, at most 1 + `Limits.model_retries` times; return it, and what it cost.

    Args:
        question: What to ask.
        early: Hears the reply while it streams.

    Raises:
        LimitError: when the token budget leaves no room for an answer.
        ModelError: when the model cannot be asked; those that a retry may help only after the last one.
    """
    engine, journal, effect = question.engine, question.journal, question.effect
    if engine.log_prompts:
        journal.log.debug("prompt", turn=effect.turn, text=redacted(str(effect.messages[-1:])))
    attempt, wasted = 1, NO_USAGE
    while True:
        if early is not None:
            early.begin()
        try:
            reply, usage = await _attempt(question, _emitter(question, attempt, early))
        except LimitError as error:
            error.usage = wasted
            raise
        except (ModelUnavailableError, ModelReplyError) as error:
            if early is not None:
                early.drop()
            wasted += error.usage or Usage()
            error.usage = wasted
            if attempt > engine.limits.model_retries:
                raise
            wait_s = _wait_s(engine, error, attempt)
            facts = {"wait_s": round(wait_s, 6), "error": type(error).__name__, "why": _why(error)}
            journal.log.warning("model_retry", turn=effect.turn, attempt=attempt, **facts)
            await anyio.sleep(wait_s)
            attempt += 1
        except ModelError as error:
            error.usage = wasted + (error.usage or Usage())
            raise
        else:
            return reply, usage + wasted if wasted.tokens else usage


def _why(error: ModelError) -> str:
    """Return why a model was not reached, for the log; what it said in place of a reply is kept out of there."""
    return redacted(str(error)) if isinstance(error, ModelUnavailableError) else "its reply is of no use"


async def _attempt(question: Question, emit: Emit | None) -> tuple[Reply, Usage]:
    """Ask once, with what it may cost held back; return the reply and what it did cost."""
    engine, budget = question.engine, question.budget
    asked = question.tally.estimate
    wanted = question.settings.max_tokens or ANSWER_TOKENS
    longest = question.settings.max_tokens or MAX_ANSWER_TOKENS
    least = min(1 + _thinking_tokens(question.settings), wanted) if question.settings.extra_body else 1
    granted, held = await budget.reserve(asked, wanted, longest, engine.model.cost_usd, least)
    usage = NO_USAGE
    try:
        request = _request(question, granted if granted < wanted else None)
        reply = _usable(engine, await reply_of(engine.model, request, emit))
        usage = _usage(question, reply)
    except ModelError as error:
        usage = error.usage = priced(engine, question.journal, engine.model, error.usage or Usage())
        raise
    finally:
        budget.settle(held, usage)
    return reply, usage


def _request(question: Question, cap_tokens: int | None) -> Request:
    engine, settings, answers = question.engine, question.settings, question.engine.answers
    choice = settings.tool_choice
    if choice is None and answers is not None and answers.is_call and not _may_think(settings):
        settings = attrs.evolve(settings, tool_choice="required")  # models that think may refuse to be forced
    if choice is not None and choice not in _MODES and all(choice != tool.name for tool in question.tools):
        settings = attrs.evolve(settings, tool_choice=None)  # a provider refuses the name of a tool that it has not got
    return Request(
        instructions=engine.instructions,
        messages=question.effect.messages,
        tools=question.tools,
        settings=settings if cap_tokens is None else attrs.evolve(settings, max_tokens=cap_tokens),
        output=None if answers is None else answers.output,
        timeout_s=engine.limits.model_timeout_s,
    )


def _may_think(settings: Settings) -> bool:
    """Whether the model is asked to think: by an effort, or in the words of Anthropic and others."""
    return settings.reasoning_effort is not None or "thinking" in settings.extra_body


def _thinking_tokens(settings: Settings) -> int:
    """Return how many tokens of an answer are for thinking: Anthropic refuses a cap that is not above them."""
    thinking = settings.extra_body.get("thinking")
    tokens = thinking.get("budget_tokens") if isinstance(thinking, Mapping) else None
    return tokens if isinstance(tokens, int) else 0


async def reply_of(model: Model, request: Request, emit: Emit | None = None) -> Reply:
    """Ask a model once.

    Raises:
        ModelError: when it cannot be asked, or was not reached.
        MisuseError: when its `reply` is not async, or returns no Reply as it has to be.
    """
    asked: Any = _NOT_ASKED
    try:
        asked = model.reply(request, emit)
        reply: Reply = await asked
    except OSError as error:  # a model of the user's own, which does not translate it
        raise ModelUnavailableError(f"{model.name} cannot be reached: {error}") from error
    except anyio.get_cancelled_exc_class() as cancellation:
        if not is_foreign(cancellation):
            raise
        raise ModelUnavailableError(f"{model.name} waited for a task that somebody else cancelled") from cancellation
    except TypeError:
        if asked is _NOT_ASKED or isawaitable(asked):
            raise
        what, kind = f"{type(model).__name__}.reply", type(asked).__name__
        raise MisuseError(f"{what} returned {kind} where it was not awaited: write `async def reply`") from None
    # Classes tell without a call, for each turn; what is not the very class is looked at more closely.
    if (
        reply.__class__ is not Reply
        or reply.text.__class__ is not str
        or reply.calls.__class__ is not tuple
        or reply.finish_reason.__class__ is not FinishReason
        or (reply.usage is not None and reply.usage.__class__ is not Usage)
    ):
        _check_reply(model, reply)
    for call in reply.calls:
        if call.__class__ is not ProposedCall or not (
            call.arguments.__class__ is call.name.__class__ is call.id.__class__ is str
        ):
            _check_call(model, call)
    return reply


# What the fields of a reply, and of each of its calls, have to be, and what to give where one is something else.
_Fields: TypeAlias = Mapping[str, tuple[type | UnionType, str]]
_REPLY: Final[_Fields] = {
    "text": (str, "'' where it says nothing"),
    "calls": (tuple | list, "a tuple of ProposedCall"),
    "finish_reason": (FinishReason, "a FinishReason, for example FinishReason.LENGTH for a reply that was cut off"),
    "usage": (Usage | None, "Usage(input_tokens=..., output_tokens=...), or None where nobody said"),
}
_CALL: Final[_Fields] = {"id": (str, "a text"), "name": (str, "a text"), "arguments": (str, "the JSON text")}


def _check_reply(model: Model, reply: object) -> None:
    """Refuse what is no reply, before the run stumbles over it.

    Raises:
        MisuseError: naming what is wrong, and what to give.
    """
    what = f"{type(model).__name__}.reply returned"
    if not isinstance(reply, Reply):
        raise MisuseError(f"{what} {type(reply).__name__}: return a Reply, for example Reply(text='...')")
    _check_fields(f"{what} a Reply whose", reply, _REPLY)


def _check_call(model: Model, call: object) -> None:
    """Refuse what is no call of a reply.

    Raises:
        MisuseError: naming what is wrong, and what to give.
    """
    what = f"{type(model).__name__}.reply returned a Reply with"
    if not isinstance(call, ProposedCall):
        raise MisuseError(f"{what} calls that are {type(call).__name__}: give a tuple of ProposedCall")
    _check_fields(f"{what} a call whose", call, _CALL)


def _check_fields(what: str, given: object, fields: _Fields) -> None:
    for name, (kind, wanted) in fields.items():
        value = getattr(given, name)
        if not isinstance(value, kind):
            raise MisuseError(f"{what} {name} is of the type {type(value).__name__}: give {wanted}")


def _usable(engine: Engine, reply: Reply) -> Reply:
    if not reply.calls and not reply.text.strip() and reply.finish_reason not in FLAWS:
        raise ModelReplyError(f"{engine.model.name} gave an empty reply ({reply.finish_reason})", reply.usage)
    return reply


def _wait_s(engine: Engine, error: Exception, attempt: int) -> float:
    """Return how long to wait: what the server asked for, else doubled each time with jitter; never over the cap."""
    limits = engine.limits
    asked = getattr(error, "retry_after_s", None)
    backoff = limits.retry_wait_s * 2 ** (attempt - 1) * random.uniform(1.0, 1.5)  # noqa: S311  spreads, hides nothing
    return float(min(asked if asked is not None else backoff, limits.retry_wait_max_s))


def _usage(question: Question, reply: Reply) -> Usage:
    usage = reply.usage
    if usage is None:
        written = len(reply.text) + sum(len(call.name) + len(call.arguments) for call in reply.calls)
        written = written if reply.native is None else max(written, len(reply.native.content))
        asked = question.tally.estimate
        usage = Usage(input_tokens=asked, output_tokens=max(1, written // BYTES_PER_TOKEN), estimated=True)
    return priced(question.engine, question.journal, question.engine.model, usage)


def priced(engine: Engine, journal: Journal, model: Model, usage: Usage) -> Usage:
    """Return the usage of one reply with its price; where that is not known, the log says so, once for each model."""
    usage = usage.priced(model.cost_usd)
    if usage.unpriced and engine.note_unpriced(model):
        journal.log.info("price_unknown", model=model.name)
    return usage


def _emitter(question: Question, attempt: int, early: EarlyCalls | None) -> Emit | None:
    """Return what takes the model's chunks; None where nothing needs to be streamed."""
    listen, run, turn = question.journal.listen, question.journal.run, question.effect.turn
    if not question.is_streamed:
        return None
    ids = run.turns_before + run.turn + 1
    text_delta = deltas(TextDelta, run.id, turn, attempt)

    def emit(chunk: Chunk) -> None:
        if isinstance(chunk, TextChunk):
            if listen is not None:
                listen(text_delta(chunk.text))
            return
        if isinstance(chunk, ThinkingChunk):
            if listen is not None:
                listen(ThinkingDelta(run_id=run.id, turn=turn, attempt=attempt, text=chunk.text))
            return
        if early is not None:
            early.hear(chunk)
        if listen is not None and isinstance(chunk, CallChunk):
            listen(_call_delta(run, turn, attempt, ids, chunk))

    return emit


def _call_delta(run: Run, turn: int, attempt: int, ids: int, chunk: CallChunk) -> CallDelta:
    return CallDelta(
        run_id=run.id,
        turn=turn,
        attempt=attempt,
        index=chunk.index,
        call_id=f"t{ids}.{chunk.index}",
        name=chunk.name,
        arguments=chunk.arguments,
    )
