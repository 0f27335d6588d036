"""Asking the model: one request, within the budget, and retries where they can help."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

import anyio
import attrs

from agentfsm._http import parse_wait_s
from agentfsm.core.errors import LimitError, MisuseError, ModelError, ModelReplyError, ModelUnavailableError
from agentfsm.core.messages import Usage
from agentfsm.engine.drive.budget import NO_USAGE
from agentfsm.engine.drive.engine import ANSWER_TOKENS, MAX_ANSWER_TOKENS, Engine
from agentfsm.engine.think.reply import check_chunk, reply_of, usd_of
from agentfsm.ports import CallChunk, Chunk, FinishChunk, FinishReason, Reply, Request, TextChunk, ThinkingChunk
from agentfsm.streaming.log import redact
from agentfsm.streaming.stream import CallDelta, Listener, TextDelta, ThinkingDelta, build_delta_factory
from agentfsm.tokens.ledger import BYTES_PER_TOKEN

if TYPE_CHECKING:
    from agentfsm.core.effects import AskModel
    from agentfsm.core.limits import Limits
    from agentfsm.core.settings import Settings
    from agentfsm.engine.drive.drive import Drive
    from agentfsm.engine.drive.journal import Journal
    from agentfsm.engine.think.early import EarlyCalls
    from agentfsm.ports import Model, ToolDefinition

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

    drive: Drive
    effect: AskModel
    tools: Sequence[ToolDefinition]
    digest: str
    # Of the request, for its record.
    settings: Settings
    # Of this turn.

    @property
    def is_streamed(self) -> bool:
        """Whether the reply is to come in pieces."""
        return self.drive.journal.listen is not None or self.settings.stream


async def ask(question: Question, early: EarlyCalls | None = None) -> tuple[Reply, Usage]:
    """Ask until a usable reply comes, as often as the limits allow; return it, and what it cost.

    Args:
        question: What to ask.
        early: Hears the reply while it streams.

    Raises:
        LimitError: when the token budget leaves no room for an answer.
        ModelError: when the model cannot be asked; those that a retry may help only after the last one.
    """
    engine, journal, effect = question.drive.engine, question.drive.journal, question.effect
    if engine.log_prompts:
        journal.log.debug("prompt", turn=effect.turn, text=redact(str(effect.messages[-1:])))
    attempt, wasted = 1, NO_USAGE
    while True:
        if early is not None:
            early.begin()
        try:
            reply, usage = await _attempt(question, _Pieces.of(question, attempt, early))
        except LimitError as error:
            error.usage = wasted
            raise
        except (ModelUnavailableError, ModelReplyError) as error:
            if early is not None:
                early.drop()
            wasted += error.usage or Usage()
            error.usage = wasted
            wait_s = _wait_s(engine, error, attempt)
            if not _may_retry(journal, engine.limits, attempt, wait_s):
                raise
            facts = {"wait_s": round(wait_s, 6), "error": type(error).__name__, "why": _why(error)}
            journal.log.warning("model_retry", turn=effect.turn, attempt=attempt, **facts)
            await anyio.sleep(wait_s)
            attempt += 1
        except ModelError as error:
            error.usage = wasted + (error.usage or Usage())
            raise
        else:
            return reply, usage + wasted if wasted.tokens else usage


def _may_retry(journal: Journal, limits: Limits, attempt: int, wait_s: float) -> bool:
    """Whether to ask again after a wait. A last answer is asked for once.

    A run that works for another does not wait beyond its time: its caller learns at once that nothing will come.
    """
    run = journal.run
    if run.limit_reached is not None or attempt > limits.max_model_retries(run):
        return False
    return not limits.fails_fast(run) or journal.used_s + wait_s < limits.seconds


def _why(error: ModelError) -> str:
    """Return why a model was not reached, for the log; what it said in place of a reply is kept out of there."""
    return redact(str(error)) if isinstance(error, ModelUnavailableError) else "its reply is of no use"


async def _attempt(question: Question, pieces: _Pieces | None) -> tuple[Reply, Usage]:
    """Ask once, with what it may cost held back; return the reply and what it did cost."""
    drive, engine, settings = question.drive, question.drive.engine, question.settings
    wanted = settings.max_tokens or ANSWER_TOKENS
    longest = settings.max_tokens or MAX_ANSWER_TOKENS
    # Anthropic refuses a cap that is not above what is for thinking.
    least = min(1 + settings.thinking_tokens, wanted) if settings.extra_body else 1
    price = partial(usd_of, engine.model)
    if drive.engine.last_answer:
        drive.budget.keep_for_last(drive.tally.request_tokens, wanted, price)
    granted, held = await drive.budget.reserve(drive.tally.request_tokens, wanted, longest, price, least)
    usage = NO_USAGE
    try:
        request = _request(question, granted if granted < wanted else None)
        reply = _usable(engine, await reply_of(engine.model, request, None if pieces is None else pieces.take))
        usage = _usage(question, reply)
    except ModelError as error:
        usage = error.usage = priced(drive, engine.model, error.usage or Usage())
        raise
    finally:
        drive.budget.settle(held, usage)
        if pieces is not None:
            pieces.is_over = True
    return reply, usage


def _request(question: Question, cap_tokens: int | None) -> Request:
    engine, settings, answers = question.drive.engine, question.settings, question.drive.engine.answers
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


def _usable(engine: Engine, reply: Reply) -> Reply:
    if not reply.calls and not reply.text.strip() and reply.finish_reason not in FLAWS:
        raise ModelReplyError(f"{engine.model.name} gave an empty reply ({reply.finish_reason})", reply.usage)
    return reply


def _wait_s(engine: Engine, error: Exception, attempt: int) -> float:
    """Return how long to wait: what the server asked for, else doubled each time with jitter; never over the cap."""
    limits = engine.limits
    given = getattr(error, "retry_after_s", None)
    asked = None if given is None else parse_wait_s(given)  # a model of the user's own may say anything
    backoff = limits.retry_wait_s * 2 ** (attempt - 1) * random.uniform(1.0, 1.5)  # noqa: S311  spreads, hides nothing
    return min(backoff if asked is None else asked, limits.retry_wait_max_s)


def _usage(question: Question, reply: Reply) -> Usage:
    drive, usage = question.drive, reply.usage
    if usage is None:
        written = len(reply.text) + sum(len(call.name) + len(call.arguments) for call in reply.calls)
        written = written if reply.native is None else max(written, len(reply.native.content))
        asked = drive.tally.request_tokens
        usage = Usage(input_tokens=asked, output_tokens=max(1, written // BYTES_PER_TOKEN), estimated=True)
    return priced(drive, drive.engine.model, usage)


def priced(drive: Drive, model: Model, usage: Usage) -> Usage:
    """Return the usage of one reply with its price; where that is not known, the log says so, once for each model."""
    usage = usage.with_price(partial(usd_of, model))
    if usage.unpriced and drive.engine.note_unpriced(model):
        drive.journal.log.info("price_unknown", model=model.name)
    return usage


@attrs.define(eq=False, repr=False)
class _Pieces:
    """Where the pieces of one attempt's reply go: to whoever watches, and to calls that start early."""

    question: Question
    attempt: int
    early: EarlyCalls | None
    listen: Listener | None
    text_delta: Callable[[str], TextDelta]
    is_over: bool = False
    # Whether the reply has ended: what comes later would stand in the next one.

    @classmethod
    def of(cls, question: Question, attempt: int, early: EarlyCalls | None) -> _Pieces | None:
        """Return what takes them; None where nothing needs to be streamed."""
        if not question.is_streamed:
            return None
        journal = question.drive.journal
        text_delta = build_delta_factory(TextDelta, journal.run.id, question.effect.turn, attempt)
        return cls(question, attempt, early, journal.listen, text_delta)

    def take(self, chunk: Chunk) -> None:
        """Take the next piece.

        Raises:
            MisuseError: when it is none, or the reply has ended.
        """
        if self.is_over:
            what = f"{type(self.question.drive.engine.model).__name__}.reply"
            raise MisuseError(f"{what} emitted a piece after it had ended: wait for all that emits before it returns")
        if isinstance(chunk, TextChunk) and chunk.text.__class__ is str:  # nearly all
            if self.listen is not None:
                self.listen(self.text_delta(chunk.text))
            return
        check_chunk(self.question.drive.engine.model, chunk)
        if self.early is not None:
            self.early.hear(chunk)
        if self.listen is not None and not isinstance(chunk, FinishChunk):
            self.listen(self._delta(chunk))

    def _delta(self, chunk: TextChunk | ThinkingChunk | CallChunk) -> TextDelta | ThinkingDelta | CallDelta:
        run, turn = self.question.drive.journal.run, self.question.effect.turn
        match chunk:
            case TextChunk():
                return self.text_delta(chunk.text)
            case ThinkingChunk():
                return ThinkingDelta(run_id=run.id, turn=turn, attempt=self.attempt, text=chunk.text)
            case CallChunk():
                return CallDelta(
                    run_id=run.id,
                    turn=turn,
                    attempt=self.attempt,
                    index=chunk.index,
                    call_id=f"t{run.turns_before + run.turn + 1}.{chunk.index}",
                    name=chunk.name,
                    arguments=chunk.arguments,
                )
