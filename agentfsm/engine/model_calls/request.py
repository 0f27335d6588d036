"""Send one model request, within the budget, and retry it if that can help."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final

import anyio
import attrs

from agentfsm._lib.retry_after import parse_wait_s
from agentfsm.core import events as e
from agentfsm.core.errors import (
    LimitError,
    MisuseError,
    ModelError,
    ModelReplyError,
    ModelUnavailableError,
    ReasoningRefusedError,
)
from agentfsm.core.trace_context import event_context
from agentfsm.core.usage import Usage
from agentfsm.engine.execution.budget import NO_USAGE
from agentfsm.engine.execution.config import ANSWER_TOKENS, MAX_ANSWER_TOKENS, EngineConfig
from agentfsm.engine.execution.reservations import (
    RequestReservation,
    give_request_back,
    reserve_request,
    settle_spend,
)
from agentfsm.engine.model_calls.reply import calculate_usd, check_chunk, fetch_reply
from agentfsm.journal.cache_losses import MIN_LOST_TOKENS
from agentfsm.ports.model import CallChunk, Chunk, FinishChunk, FinishReason, Reply, TextChunk, ThinkingChunk
from agentfsm.streaming.log import redact
from agentfsm.streaming.stream import CallDelta, Listener, TextDelta, ThinkingDelta, build_delta_factory
from agentfsm.tokens.billing import count_chunk_bytes, estimate_written_tokens, find_failed_usage
from agentfsm.tokens.ledger import BYTE_COUNTER

if TYPE_CHECKING:
    from agentfsm.core.effects import AskModel
    from agentfsm.core.limits import Limits
    from agentfsm.core.settings import Settings
    from agentfsm.core.usage import TierChoice
    from agentfsm.core.view_parts import FixedParts
    from agentfsm.engine.execution.execution import Execution
    from agentfsm.engine.execution.journal import Journal
    from agentfsm.engine.model_calls.eager_calls import EagerCalls
    from agentfsm.engine.model_calls.view import View
    from agentfsm.ports.model import Model

# Finish reasons of incomplete answers that a retry would not improve.
UNUSABLE_ANSWERS: Final = {
    FinishReason.LENGTH: "the answer was cut off at the length limit; allow more with Settings(max_tokens=...), or a "
    "larger token budget",
    FinishReason.CONTENT_FILTER: "the provider's content filter cut the answer off",
}


@attrs.define(eq=False, repr=False)
class PreparedRequest:
    """The next model request of a run, and the destination of its reply."""

    execution: Execution
    effect: AskModel
    holds_texts: bool = False
    """Whether texts are passed to listeners only when the reply is complete."""

    digest: str = ""
    """Hash of the request, for the journal; empty until it is sent."""

    view: View = attrs.field(init=False)
    """All that the request shows the model; set by the last decider before it is sent."""

    tier: TierChoice | None = None
    """Tier with which a retry begins; None in the first attempt, and for models other than `Tiered`."""

    is_plain: bool = False
    """Whether the reasoning of earlier replies is left out, since the provider refused it in an attempt before."""

    counted_tokens: int = 0
    """Tokens of the request as they were counted, without corrections."""

    @property
    def is_streamed(self) -> bool:
        """Whether the reply is streamed."""
        return self.execution.journal.on_event is not None or self.view.settings.stream


async def ask_model(prepared: PreparedRequest, eager: EagerCalls | None = None) -> tuple[Reply, Usage]:
    """Send the request until a usable reply comes, within the limits; return the reply and its usage.

    Args:
        prepared: The request.
        eager: Receives the chunks while the reply streams.

    Raises:
        LimitError: if the token budget has no room for an answer.
        ModelError: if the request fails; a transient failure only after the last retry.
    """
    engine, journal, effect = prepared.execution.config, prepared.execution.journal, prepared.effect
    view = prepared.view
    prepared.digest = view.digest
    if engine.log_prompts:
        journal.log.debug("prompt", turn=effect.turn, text=redact(str(effect.messages[-1:])))
    attempt, is_streamed = 1, journal.on_event is not None or view.settings.stream
    while True:
        if eager is not None:
            eager.begin_attempt()
        try:
            receiver = _ChunkReceiver.for_attempt(prepared, attempt, eager) if is_streamed else None
            return await _attempt_once(prepared, receiver)
        except (ModelUnavailableError, ModelReplyError, ReasoningRefusedError) as error:
            if eager is not None:
                eager.discard()
            prepared.tier = error.tier or prepared.tier
            if isinstance(error, ReasoningRefusedError):
                if prepared.is_plain:
                    raise
                prepared.is_plain, wait_s = True, 0.0
            elif not _should_retry(journal, engine.limits, attempt, wait_s := _retry_wait_s(engine, error, attempt)):
                raise
            # The log does not hold the model's own text.
            why = "its reply is of no use" if isinstance(error, ModelReplyError) else redact(str(error))
            facts = {"wait_s": round(wait_s, 6), "error": type(error).__name__, "why": why}
            notice = _describe_unreachable(error, wait_s) if attempt == 1 else ""
            journal.log.warning("model_retry", notice=notice, turn=effect.turn, attempt=attempt, **facts)
            # Not waited for: the next attempt may begin before it is durable.
            journal.commit(
                e.AttemptFailed(
                    error=str(error),
                    usage=error.usage or NO_USAGE,
                    request=prepared.digest,
                    tier=error.tier,
                )
            )
            await anyio.sleep(wait_s)
            attempt += 1


def _should_retry(journal: Journal, limits: Limits, attempt: int, wait_s: float) -> bool:
    """Return whether to retry after a wait. A last answer is requested only once.

    A child run does not wait beyond its time limit, so that its caller learns of the failure at once.
    """
    run = journal.run
    if run.limit_reached is not None or attempt > limits.max_model_retries(run.header):
        return False
    return not limits.fails_fast(run.header) or journal.active_s + wait_s < limits.seconds


def _describe_unreachable(error: ModelError, wait_s: float) -> str:
    """Return the notice that the model cannot be reached, for programs that do not configure logging; else empty."""
    if not isinstance(error, ModelUnavailableError) or not error.is_unreachable:
        return ""
    return f"agentfsm: {redact(str(error)).partition('. ')[0]}; retrying in {wait_s:.1f} s"


async def _reserve(prepared: PreparedRequest, settings: Settings, wanted: int) -> tuple[RequestReservation, bool]:
    """Reserve the largest cost of a request, raised by what the model has billed beyond the counts of earlier ones.

    Under a limit on money, the first request to a model is sent alone, since it shows whether that happens.

    Returns:
        The reservation, and whether this is the first request.
    """
    drive = prepared.execution
    budget, ledger, billed = drive.budget, drive.ledger, drive.config.billed
    longest = settings.max_tokens or MAX_ANSWER_TOKENS
    # Anthropic refuses a cap that is not above the tokens for thinking.
    least = min(1 + settings.thinking_tokens, wanted) if settings.extra_body else 1
    price = partial(calculate_usd, drive.config.model)
    while True:
        asked = ledger.request_tokens
        prepared.counted_tokens = asked - ledger.correction_tokens
        if billed.tokens:
            asked = max(asked, billed.correct(prepared.counted_tokens))
        if drive.config.last_answer:
            budget.reserve_last_answer(asked, wanted, price)
        try:
            reserved = await reserve_request(drive, asked, wanted, longest, price, least=least)
        except LimitError:
            if drive.config.model.takes_tokens:
                raise
            reserved = await reserve_request(drive, 0, 1, 1, price)
        if not budget.is_money_limited or (billed.is_known and billed.correct(prepared.counted_tokens) <= asked):
            return reserved, False
        if not billed.is_known and billed.try_begin_first():
            return reserved, True
        give_request_back(drive, reserved)
        await billed.wait_for_first()


async def _attempt_once(prepared: PreparedRequest, receiver: _ChunkReceiver | None) -> tuple[Reply, Usage]:
    """Send the request once, with its maximum cost reserved; return the reply and its actual usage."""
    drive, engine, view = prepared.execution, prepared.execution.config, prepared.view
    wanted = view.settings.max_tokens or ANSWER_TOKENS
    (granted, held, held_spend), is_first = await _reserve(prepared, view.settings, wanted)
    usage, paid, observe = None, None, None
    try:
        cap = granted if granted < wanted else None
        request = view.render(prepared.effect.messages, cap_tokens=cap, is_plain=prepared.is_plain, tier=prepared.tier)
        receive = None if receiver is None else receiver.receive
        if engine.tracer is None:
            reply = await fetch_reply(engine.model, request, receive)
        else:
            run = drive.journal.run
            span = event_context(run.header, run.version + 1)  # the reply will be that version
            observe = partial(engine.tracer.observe_request, span, engine.model, request)
            with engine.tracer.activate(run.header, span):
                reply = await fetch_reply(engine.model, request, receive)
        if engine.log_prompts:
            wished = [(call.name, call.arguments) for call in reply.calls]
            text, calls = redact(reply.text), redact(str(wished))
            drive.journal.log.debug("reply", turn=prepared.effect.turn, text=text, calls=calls)
        reply = _check_not_empty(engine, reply)
        usage = _resolve_usage(prepared, reply)
    except BaseException as error:
        received = 0 if receiver is None else receiver.received_bytes
        usage = price_usage(drive, engine.model, find_failed_usage(error, drive.ledger.request_tokens, received))
        if isinstance(error, ModelError):
            error.usage = usage
        # All that was reserved counts in spending limits if the request was cut off and nothing of the reply was seen.
        paid = None if receiver is None and not isinstance(error, Exception) else usage
        if observe is not None:
            observe(error)
        raise
    else:
        paid = usage
        if observe is not None:
            observe(reply)
        return reply, usage
    finally:
        if is_first:
            engine.billed.end_first()
        if receiver is not None:
            receiver.is_closed = True
        drive.budget.settle(held, usage or NO_USAGE)
        if held_spend is not None:
            await settle_spend(drive, held_spend, paid)


def _check_not_empty(config: EngineConfig, reply: Reply) -> Reply:
    if reply.calls or reply.text.strip() or not reply.is_empty or reply.finish_reason in UNUSABLE_ANSWERS:
        return reply  # the first two are nearly all, and save a call in each turn
    raise ModelReplyError(f"{config.model.name} gave an empty reply ({reply.finish_reason})", reply.usage)


def _retry_wait_s(config: EngineConfig, error: Exception, attempt: int) -> float:
    """Return the seconds to wait: those that the server requests, else doubled each time with jitter; capped."""
    limits = config.limits
    given = getattr(error, "retry_after_s", None)
    asked = None if given is None else parse_wait_s(given)  # a model of the user's own may say anything
    backoff = limits.retry_wait_s * 2 ** (attempt - 1) * random.uniform(1.0, 1.5)  # noqa: S311  spreads, hides nothing
    return min(backoff if asked is None else asked, limits.retry_wait_max_s)


def _resolve_usage(prepared: PreparedRequest, reply: Reply) -> Usage:
    drive, usage = prepared.execution, reply.usage
    if usage is None:
        texts = [reply.text, *[call.name + call.arguments for call in reply.calls]]
        size = sum(map(BYTE_COUNTER.count, texts))
        size = size if reply.native is None else max(size, len(reply.native.content))
        asked = drive.ledger.request_tokens
        usage = Usage(input_tokens=asked, output_tokens=max(1, estimate_written_tokens(size)), estimated=True)
    else:
        ledger, billed = drive.ledger, drive.config.billed
        has_excess = usage.input_tokens > prepared.counted_tokens or billed.tokens
        if (has_excess or ledger.counter is not BYTE_COUNTER) and _is_of_one_request(reply, usage):
            billed.record(prepared.counted_tokens, usage.input_tokens)
            if ledger.counter is not BYTE_COUNTER:
                ledger.calibrate(usage.input_tokens)
        before, ledger.answered = ledger.answered, (prepared.view.fixed, usage.input_tokens)
        if before is not None and before[0] is not prepared.view.fixed and not ledger.has_logged_loss:
            _log_cache_loss(prepared, reply, usage, *before)
    return price_usage(drive, drive.config.model, usage)


def _log_cache_loss(prepared: PreparedRequest, reply: Reply, usage: Usage, before: FixedParts, tokens: int) -> None:
    """Log that a run has changed the beginning of its requests, if the provider had to read them anew for it.

    A compaction has a log record of its own, and `list_cache_losses` finds all losses in the journal.
    """
    journal, parts = prepared.execution.journal, prepared.view.fixed.parts
    lost = min(tokens, usage.input_tokens) - usage.cached_tokens
    has_cache = usage.cached_tokens or usage.cache_write_tokens or journal.run.usage.cached_tokens
    if parts[-1].prefix == before.parts[-1].prefix or lost < MIN_LOST_TOKENS or not has_cache:
        return
    known = {part.prefix for part in before.parts}
    cause = next((part.source for part in parts if part.prefix not in known), parts[-1].source)
    prepared.execution.ledger.has_logged_loss = True
    told = {} if reply.cache_report is None else {"reported": reply.cache_report.reason}
    journal.log.warning("prompt_cache_lost", turn=prepared.effect.turn, changed=str(cause), tokens=lost, **told)


def _is_of_one_request(reply: Reply, usage: Usage) -> bool:
    """Return whether a usage has the tokens of this request, once."""
    return reply.hosted is None and not usage.cached_replies and (reply.tier is None or not reply.tier.spent)


def price_usage(execution: Execution, model: Model, usage: Usage) -> Usage:
    """Return the usage of one reply with its price. If the price is unknown, log that once per model."""
    usage = usage.with_price(partial(calculate_usd, model))
    if usage.unpriced and execution.config.mark_unpriced(model):
        execution.journal.log.info("price_unknown", model=model.name)
    return usage


@attrs.define(eq=False, repr=False)
class _ChunkReceiver:
    """Receives the chunks of one attempt's reply, and passes them to listeners and to early calls."""

    prepared: PreparedRequest
    attempt: int
    eager: EagerCalls | None
    on_event: Listener | None
    make_text_delta: Callable[[str], TextDelta]
    is_closed: bool = False
    """Whether the reply has ended; later chunks would appear in the next reply."""

    received_bytes: int = 0
    """Bytes of text, thinking and arguments so far."""

    @classmethod
    def for_attempt(cls, prepared: PreparedRequest, attempt: int, eager: EagerCalls | None) -> _ChunkReceiver:
        """Return the receiver of an attempt."""
        journal = prepared.execution.journal
        text_delta = build_delta_factory(TextDelta, journal.run.id, prepared.effect.turn, attempt)
        on_event = None if prepared.holds_texts else journal.on_event
        return cls(prepared, attempt, eager, on_event, text_delta)

    def receive(self, chunk: Chunk) -> None:
        """Process the next chunk.

        Raises:
            MisuseError: if it is not a chunk, or the reply has ended.
        """
        if self.is_closed:
            method = f"{type(self.prepared.execution.config.model).__name__}.reply"
            raise MisuseError(
                f"{method} emitted a chunk after it had ended: await all emitting tasks before it returns"
            )
        if isinstance(chunk, TextChunk) and chunk.text.__class__ is str:  # nearly all
            self.received_bytes += BYTE_COUNTER.count(chunk.text)
            if self.on_event is not None:
                self.on_event(self.make_text_delta(chunk.text))
            return
        check_chunk(self.prepared.execution.config.model, chunk)
        self.received_bytes += count_chunk_bytes(chunk)
        if self.eager is not None:
            self.eager.feed(chunk)
        if self.on_event is None or isinstance(chunk, FinishChunk):
            return
        if not isinstance(chunk, CallChunk) or chunk.name or chunk.arguments:  # else it only ends a call
            self.on_event(self._build_delta(chunk))

    def _build_delta(self, chunk: TextChunk | ThinkingChunk | CallChunk) -> TextDelta | ThinkingDelta | CallDelta:
        run, turn = self.prepared.execution.journal.run, self.prepared.effect.turn
        match chunk:
            case TextChunk():
                return self.make_text_delta(chunk.text)
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
