"""A reply as it is read: its texts, and its calls with an id and a key, and with repaired arguments if need be."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import attrs

from agentfsm.core.calls import build_idempotency_key
from agentfsm.core.claims import Claim
from agentfsm.core.json_text import normalise_arguments
from agentfsm.core.messages import HostedContent, NativeReply, ToolCall, replace_surrogates
from agentfsm.engine.execution.tool_access import find_engine_tool
from agentfsm.ports.model import FinishReason, ProposedCall, Reply
from agentfsm.tools.schema.arguments import check_object, repair_object

if TYPE_CHECKING:
    from agentfsm.engine.execution.execution import Execution

# Maximum of characters of invalid arguments that are recorded and shown to the model.
MALFORMED_CHARS: Final = 2_000
_ILLEGAL_NAME_CHARS: Final = re.compile(r"[^a-zA-Z0-9_-]")


@attrs.define(eq=False, repr=False)
class ReceivedReply:
    """A reply of the model that is being read."""

    reply: Reply
    """The reply as it came."""

    is_last: bool
    """Whether it is the last answer of a run that a limit has stopped."""

    text: str
    thinking: str
    calls: tuple[ProposedCall, ...]
    """Proposed calls that are run; none of an incomplete reply or of a last answer."""

    native: NativeReply | None
    """Content that the provider expects back; None without the calls that it belongs to."""

    hosted: HostedContent | None
    filtered: tuple[str, ...] = ()
    """Decisions that changed the texts, for the journal."""

    claims: tuple[Claim, ...] | None = None
    """Acts that the answer says were done; None if it has no list of them."""

    refusal: str = ""
    """Decision that withheld the answer, so that the run ends; empty if none did."""

    @property
    def is_paused(self) -> bool:
        """Whether the provider has paused in the middle of the turn."""
        return self.reply.finish_reason is FinishReason.PAUSED and not (self.calls or self.is_last)


def build_calls(execution: Execution, proposed: Sequence[ProposedCall], *, is_truncated: bool) -> tuple[ToolCall, ...]:
    """Return the calls of a reply, one or more; the last is set aside if the reply was cut off before its arguments.

    Otherwise empty arguments count as `{}`, and Anthropic itself writes `{}` for a call that was cut off. The tool
    would then run with its defaults, which the model did not choose.
    """
    calls = [build_call(execution, index, call) for index, call in enumerate(proposed)]
    if is_truncated and calls[-1].arguments == "{}" and calls[-1].malformed is None:
        calls[-1] = attrs.evolve(calls[-1], malformed="the reply was cut off at the length limit before they came")
    return tuple(calls)


def build_call(execution: Execution, index: int, proposed: ProposedCall) -> ToolCall:
    """Assign a call its id and key, repair its arguments if needed, and set aside invalid ones."""
    run = execution.journal.run
    call_id = f"t{run.turns_before + run.turn + 1}.{index}"
    known = (execution.config.registry.get(proposed.name) or find_engine_tool(execution, proposed.name)) is not None
    arguments = normalise_arguments(proposed.arguments)
    flaw, mended = check_object(arguments), None
    if flaw is not None:
        mended = repair_object(proposed.arguments)
    call = ToolCall(
        id=call_id,
        name=proposed.name if known else _ILLEGAL_NAME_CHARS.sub("_", proposed.name)[:64] or "unnamed",
        invented=not known,
        arguments=arguments if flaw is None else mended or "{}",
        provider_id=replace_surrogates(proposed.id),
        malformed=None
        if flaw is None or mended
        else f"{flaw}; it began: {replace_surrogates(arguments[:MALFORMED_CHARS])}",
        repaired=replace_surrogates(arguments[:MALFORMED_CHARS]) if mended else None,
    )
    object.__setattr__(call, "key", build_idempotency_key(run.header, call))  # not shared yet, so no copy is needed
    return call
