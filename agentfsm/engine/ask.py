"""Asking the model: one request, retries where they can help, and ids for the calls that it chose."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import anyio
import attrs

from agentfsm.core.errors import LimitError, ModelReplyError, ModelUnavailableError
from agentfsm.core.limits import StopReason
from agentfsm.core.messages import ToolCall, Usage, clean
from agentfsm.engine.arguments import check_object, object_text
from agentfsm.engine.engine import ANSWER_TOKENS, Engine
from agentfsm.engine.log import redacted
from agentfsm.engine.stream import CallDelta, TextDelta
from agentfsm.ports import CallChunk, Chunk, Emit, FinishReason, Reply, Request, TextChunk
from agentfsm.tally import BYTES_PER_TOKEN

if TYPE_CHECKING:
    from agentfsm.core.effects import AskModel
    from agentfsm.core.run import Run
    from agentfsm.engine.journal import Journal
    from agentfsm.engine.tools import ToolRegistry
    from agentfsm.ports import ProposedCall, Settings
    from agentfsm.tally import Tally

FLAWS: Final = {
    FinishReason.LENGTH: "the answer was cut off at the length limit; allow more with Settings(max_tokens=...), or a "
    "larger token budget",
    FinishReason.CONTENT_FILTER: "the provider's content filter cut the answer off",
}
# Answers that must not be taken for whole ones, and that asking again would not mend.
MALFORMED_CHARS: Final = 2_000
# Of arguments that are no JSON object, kept for the record and shown to the model.
_NOT_IN_NAMES: Final = re.compile(r"[^a-zA-Z0-9_-]")


async def ask(engine: Engine, journal: Journal, effect: AskModel, tally: Tally) -> tuple[Reply, Usage]:
    """Ask until a usable reply comes, at most 1 + `Limits.model_retries` times; return it, and what it cost.

    Raises:
        LimitError: when the token budget leaves no room for an answer.
        ModelError: when the model cannot be asked; those that a retry may help only after the last one.
    """
    request = _request(engine, journal.run, effect, tally)
    if engine.log_prompts:
        journal.log.debug("prompt", turn=effect.turn, text=redacted(str(request.messages[-1:])))
    attempt, wasted = 1, Usage()
    while True:
        try:
            reply = await _attempt(engine, request, _emitter(journal, effect.turn, attempt))
        except (ModelUnavailableError, ModelReplyError) as error:
            wasted += _priced(engine, error.usage or Usage())
            error.usage = wasted
            if attempt > engine.limits.model_retries:
                raise
            wait_s = _wait_s(engine, error, attempt)
            kind = type(error).__name__
            journal.log.warning("model_retry", turn=effect.turn, attempt=attempt, wait_s=wait_s, error=kind)
            await anyio.sleep(wait_s)
            attempt += 1
        else:
            usage = _usage(engine, journal.run, reply, tally)
            return reply, usage + wasted if wasted.tokens else usage


def _request(engine: Engine, run: Run, effect: AskModel, tally: Tally) -> Request:
    definitions = engine.registry.definitions
    if run.disabled:
        definitions = tuple(each for each in definitions if each.name not in run.disabled)
    return Request(
        instructions=engine.instructions,
        messages=effect.messages,
        tools=definitions,
        settings=_capped(engine, run, tally),
        timeout_s=engine.limits.model_timeout_s,
    )


def _capped(engine: Engine, run: Run, tally: Tally) -> Settings:
    """Return the settings, with the answer capped by what the token budget leaves."""
    left = engine.limits.tokens - run.usage.tokens - tally.estimate(run.window)
    if left < 1:
        raise LimitError(
            StopReason.TOKEN_BUDGET,
            f"{run.usage.tokens:,} of {engine.limits.tokens:,} tokens used, and the next request alone takes the rest",
        )
    wanted = engine.settings.max_tokens or ANSWER_TOKENS
    return engine.settings if left >= wanted else attrs.evolve(engine.settings, max_tokens=left)


async def _attempt(engine: Engine, request: Request, emit: Emit | None) -> Reply:
    try:
        reply = await engine.model.reply(request, emit)
    except OSError as error:  # a model of the user's own, which does not translate it
        raise ModelUnavailableError(f"{engine.model.name} cannot be reached: {error}") from error
    if not reply.calls and not reply.text.strip() and reply.finish_reason not in FLAWS:
        raise ModelReplyError(f"{engine.model.name} gave an empty reply ({reply.finish_reason})", reply.usage)
    return reply


def _wait_s(engine: Engine, error: Exception, attempt: int) -> float:
    """Return how long to wait: what the server asked for, else doubled each time with jitter; never over the cap."""
    limits = engine.limits
    asked = getattr(error, "retry_after_s", None)
    backoff = limits.retry_wait_s * 2 ** (attempt - 1) * random.uniform(1.0, 1.5)  # noqa: S311  spreads, hides nothing
    return float(min(asked if asked is not None else backoff, limits.retry_wait_max_s))


def _usage(engine: Engine, run: Run, reply: Reply, tally: Tally) -> Usage:
    usage = reply.usage
    if usage is None:
        written = len(reply.text) + sum(len(call.name) + len(call.arguments) for call in reply.calls)
        asked = tally.estimate(run.window)
        usage = Usage(input_tokens=asked, output_tokens=max(1, written // BYTES_PER_TOKEN), estimated=True)
    return _priced(engine, usage)


def _priced(engine: Engine, usage: Usage) -> Usage:
    """Return the usage with its price, where one is asked for."""
    if engine.limits.usd is None or usage.cost_usd is not None or not usage.tokens:
        return usage
    return attrs.evolve(usage, cost_usd=engine.model.cost_usd(usage))


def _emitter(journal: Journal, turn: int, attempt: int) -> Emit | None:
    """Return what hands the model's chunks to the watcher; None where nobody watches, so that nothing is streamed."""
    listen, run = journal.listen, journal.run
    if listen is None:
        return None
    ids = run.turns_before + run.turn + 1

    def emit(chunk: Chunk) -> None:
        if isinstance(chunk, TextChunk):
            listen(TextDelta(run_id=run.id, turn=turn, attempt=attempt, text=chunk.text))
        else:
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


def mint(run: Run, proposed: Sequence[ProposedCall], registry: ToolRegistry) -> tuple[ToolCall, ...]:
    """Give the calls their ids and keys, and set aside arguments that are no JSON object."""
    turn = run.turns_before + run.turn + 1
    return tuple([_minted(run, f"t{turn}.{index}", call, registry) for index, call in enumerate(proposed)])


def _minted(run: Run, call_id: str, call: ProposedCall, registry: ToolRegistry) -> ToolCall:
    arguments = object_text(call.arguments)
    flaw = check_object(arguments)
    known = call.name in registry
    return ToolCall(
        id=call_id,
        name=call.name if known else _legal_name(call.name),
        invented=not known,
        arguments=arguments if flaw is None else "{}",
        key=f"{run.id}:{call_id}",
        provider_id=clean(call.id),
        malformed=None if flaw is None else f"{flaw}; it began: {clean(arguments[:MALFORMED_CHARS])}",
    )


def _legal_name(name: str) -> str:
    """Return an invented name in the letters that a provider takes back."""
    return _NOT_IN_NAMES.sub("_", name)[:64] or "unnamed"
