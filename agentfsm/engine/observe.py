"""OBSERVE: take in the inputs that the window has room for, most urgent first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import attrs

from agentfsm.core import events as e
from agentfsm.core.inbox import PRIORITY_ORDER, Input, InputKind, PostedItem
from agentfsm.core.messages import Part, TextPart, describe_media, media_kind, replace_surrogates
from agentfsm.engine.execution.outcome import StepOutcome
from agentfsm.engine.model_calls.view import measure_room
from agentfsm.engine.stop_requests import find_requested_stop
from agentfsm.tokens.ledger import BYTE_COUNTER, BYTES_PER_TOKEN, count_message
from agentfsm.tools.queue.media import format_omitted_part

if TYPE_CHECKING:
    from agentfsm.core.effects import ReadInbox
    from agentfsm.engine.execution.execution import Execution
    from agentfsm.engine.tool_calls.host import ToolCalls

# Maximum share of the window's room for inputs taken at once; the rest is left for the history.
INPUT_SHARE: Final = 0.5


async def observe(execution: Execution, _effect: ReadInbox, calls: ToolCalls) -> StepOutcome:
    """Read the inbox, and return the inputs that are taken."""
    rows, deciders = await execution.journal.read_inbox(), calls.line.on_inputs
    for decide in deciders:
        if (end := decide(execution, None)) is not None:
            return end
    if not rows:
        return StepOutcome((e.Observed(),))
    if (stop := await find_requested_stop(execution, rows)) is not None:
        return stop
    taken = _select_inputs(execution, rows)
    inputs = tuple([_omit_unsupported_parts(execution, row.item) for row in taken if isinstance(row.item, Input)])
    observed, numbers = e.Observed(inputs=inputs), [row.number for row in taken]
    for decide in deciders:
        if (end := decide(execution, observed)) is not None:
            return end._replace(taken=numbers)
    return StepOutcome((observed,), numbers)


def _select_inputs(execution: Execution, rows: Sequence[PostedItem]) -> list[PostedItem]:
    """Return the rows that are taken now: inputs that fit into half of the window, at least one, and all other rows.

    The remaining inputs wait for the next OBSERVE. Other rows are taken in any case: there is nothing to decide here.
    """
    inputs = [(row, row.item) for row in rows if isinstance(row.item, Input)]
    ledger, settings = execution.ledger, execution.config.resolve_settings(execution.journal.run)
    inputs.sort(key=lambda pair: PRIORITY_ORDER[pair[1].priority])
    unit = BYTES_PER_TOKEN if ledger.counter is BYTE_COUNTER else 1
    room = measure_room(execution, settings) * INPUT_SHARE * unit
    fitting: list[PostedItem] = []
    for row, item in inputs:
        room -= count_message(item.message, ledger.counter)
        if room < 0 and fitting:
            break
        fitting.append(row)
    return fitting + [row for row in rows if not isinstance(row.item, Input)]


def _omit_unsupported_parts(execution: Execution, item: Input) -> Input:
    """Return an input in which a text replaces each part that the model cannot take.

    `Agent.send` refuses such a part, but `Runs.send` does not know the model. A request with the part would fail and
    end the run.
    """
    if item.kind is not InputKind.USER:  # the model reads the parts of all others as text
        return item
    parts: list[Part] = []
    for part in item.parts:
        if isinstance(part, TextPart) or (why := execution.config.model.unsupported_part(part)) is None:
            parts.append(part)
            continue
        execution.journal.log.warning("part_left_out", kind=media_kind(part), why=why)
        omitted = format_omitted_part(media_kind(part), describe_media(part), why)
        parts.append(TextPart(text=replace_surrogates(omitted)))
    return item if tuple(parts) == item.parts else attrs.evolve(item, parts=tuple(parts))
