"""The promises, checked against the journals, the audit and the book of effects."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from agentfsm import AuditRecord, ErrorType, Outcome, Run, StopReason, ToolResult
from agentfsm.core import events as e
from agentfsm.core.calls import Phase
from agentfsm.core.events import PlanKind
from agentfsm.core.labels import ToolKind
from tests.support.checks import sound_run

if TYPE_CHECKING:
    from tests.changed.change_play import Effect, Read, World

# Outcomes and words that say that nothing was done.
DENIALS: Final = frozenset({Outcome.SKIPPED, Outcome.REJECTED})
DENYING: Final = re.compile(r"not run|nothing was|\S+ (function )?was not (called|run|made)|.* never ran")


def broken_at(world: World, found: Read) -> Iterator[str]:
    """Yield what does not hold when a process has ended."""
    for run_id, (run, events) in found.items():
        try:
            sound_run(run)
        except AssertionError as error:
            yield f"7: {run_id} is not sound: {error}"
        yield from _told(world, run, events)
        parent = run.header.parent
        if parent is not None and not run.is_over:
            caller, call_id = found[parent][0], run_id.removeprefix(f"{parent}.")
            if caller.is_over or call_id in results_of(caller):
                what = "is over" if caller.is_over else f"has a result of {call_id}"
                yield f"3: {run_id} is open, and {parent} {what}"
    yield from _repeated(world)


def _told(world: World, run: Run, events: Sequence[e.Event]) -> Iterator[str]:
    """Whatever had started is not told as not run, and no missing tool is told as a result, which ends its call."""
    results, started = results_of(run), starts_of(events)
    agents = {each.call_id for each in events if isinstance(each, e.ToolStarted) and each.kind is ToolKind.AGENT}
    for call_id, result in results.items():
        times = world.cut.get((run.id, call_id), 0)
        below = f"{run.id}.{call_id}."  # the journal of an agent says what it did, which may be nothing
        may_have_acted = call_id not in agents or any(f"{each.run_id}.".startswith(below) for each in world.book)
        if times and may_have_acted and (run.id, call_id) not in world.decided:
            yield from _hidden(run.id, result, times)
        if "which this agent does not have" in result.content:
            yield f"6: {run.id} {call_id} has a tool that is missing as its result"
    world.cut |= {(run.id, each): times for each, times in started.items() if times > 0 and each not in results}


def starts_of(events: Sequence[e.Event]) -> Counter[str]:
    """Return how many times each call was started, as far as it is not read-only."""
    times: Counter[str] = Counter()
    for event in events:
        if isinstance(event, e.ToolStarted) and not event.read_only:
            times[event.call_id] += 1
        elif isinstance(event, e.ToolCutOff) and event.undone:
            times[event.call_id] -= 1
    return times


def results_of(run: Run) -> dict[str, ToolResult]:
    """Return all results of a run, by call."""
    entries = (*run.open, *(() if run.plan is None else run.plan.closed))
    return {each.call_id: each for each in run.messages if isinstance(each, ToolResult)} | {
        entry.call.id: entry.result for entry in entries if entry.result is not None
    }


def _hidden(run_id: str, result: ToolResult, times: int) -> Iterator[str]:
    """Whatever had started is not told as not run, and its attempts count."""
    what = f"{result.tool} {run_id} {result.call_id}"
    if result.outcome in DENIALS or (denies(result.content) and "may have" not in result.content):
        yield f"2: {what} had started, and its result says {result.outcome}: {result.content[:120]!r}"
    elif not result.attempts:
        yield f"2: {what} was started {times} times, and its result tells of no attempt"


def denies(text: str) -> bool:
    """Whether a text says that nothing was done."""
    return DENYING.match(text) is not None


def _repeated(world: World) -> Iterator[str]:
    """Each effect happens once, unless its declarations or a person allow more."""
    last: dict[tuple[Any, ...], tuple[int, Effect]] = {}
    for at, effect in enumerate(world.book):
        is_repeated = effect.unit.id in world.repeated
        which = (effect.unit.id, effect.run_id, effect.item) if is_repeated else (effect.unit.id,)
        place, before = last.get(which, (0, None))
        last[which] = (at, effect)
        if before is None:
            continue
        what = f"{effect.unit.id} ({effect.unit.name} {effect.run_id} {effect.call_id})"
        by_person = _by_person(world, effect, place, at)
        if before.call != effect.call and not by_person:
            yield f"1: {what} happened before as {before.unit.name} {before.run_id} {before.call_id}"
        elif not by_person and not (_repeatable(before) and _repeatable(effect)):
            yield f"1: {what} happened twice, and its declarations forbid it"
        elif before.call == effect.call and (before.key, before.arguments) != (effect.key, effect.arguments):
            yield f"1: {what} was repeated as {effect.key} {effect.arguments}, and not {before.key} {before.arguments}"
    for at, effect in enumerate(world.book):  # a call that was carried out by one kind of thing, and then by another
        for place, before in enumerate(world.book[:at]):
            one, other = (f"{each.run_id}.{each.call_id}." for each in (before, effect))
            is_within = one != other and (one.startswith(other) or other.startswith(one))
            if before.unit.id == effect.unit.id and is_within and not _by_person(world, effect, place, at):
                yield f"1: {before.unit.id} happened as {one}, and again as {other}"


def _by_person(world: World, effect: Effect, place: int, at: int) -> bool:
    """Whether a person has had a unit run again between two places of the book."""
    return any(place < seen <= at and unit == effect.unit.id for seen, unit in world.reruns)


def _repeatable(effect: Effect) -> bool:
    unit = effect.unit
    return unit.on_unknown == "rerun" or (not unit.on_unknown and (unit.idempotent or bool(unit.key)))


def broken_in(world: World, found: Read, audit: Sequence[AuditRecord]) -> Iterator[str]:
    """Yield what does not hold in the end."""
    yield from _arguments(world)
    yield from _compensations(world, found)
    yield from _approved(world, found)
    told = {(each.run_id, each.call_id): each for each in audit}
    for effect in world.book:
        what = f"{effect.unit.name} {effect.run_id} {effect.call_id}"
        record = told.get(effect.call)
        if record is None:
            yield f"5: {what} acted, and the audit does not name it"
            continue
        if record.key != effect.key:
            yield f"5: {what} was sent the key {effect.key}, and the audit has {record.key}"
        text = record.result or ""
        is_told = record.status in (Outcome.DONE, Outcome.UNKNOWN, Outcome.TIMED_OUT) or isinstance(
            record.status, Phase
        )
        if not is_told and effect.call not in world.decided and "may have" not in text:
            yield f"5: {what} acted, and the audit says {record.status}: {text[:120]!r}"


def _arguments(world: World) -> Iterator[str]:
    """The parameter with the name of a step has its result, and no other's."""
    for effect in world.book:
        for name, value in effect.arguments.items():
            if (unit := world.ids.get(name)) is not None:
                allowed = world.below[unit]
                for text in _texts(value):
                    if text.partition(":")[0] not in allowed:
                        yield f"4: {effect.unit.name} {effect.run_id} {effect.call_id} took {value!r} as {name}"


def _approved(world: World, found: Read) -> Iterator[str]:
    """A call that needs an approval in the program that runs it has been approved by a person."""
    for effect in world.book:
        _, events = found[effect.run_id]
        yes = {event.call_id for event in events if isinstance(event, e.ApprovalGiven)}
        if effect.unit.asks and not yes & {effect.call_id, effect.call_id.partition(".")[0]}:
            yield f"8: {effect.unit.name} {effect.run_id} {effect.call_id} acted, and no person was asked"


def _texts(value: Any) -> Iterator[str]:
    """Yield the texts in a result; those of flows are JSON objects, also as text."""
    if isinstance(value, str):
        try:
            inside = json.loads(value)
        except ValueError:
            yield value
        else:
            yield from _texts(inside)
    elif isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from _texts(each)


def _compensations(world: World, found: Read) -> Iterator[str]:
    """Only what succeeded is undone, and only by what undoes it."""
    done = {
        world.ids.get(result.tool)
        for run, _ in found.values()
        for result in results_of(run).values()
        if result.outcome is Outcome.DONE
    }
    for effect in world.book:
        step = world.undone.get(effect.unit.id)
        if step is not None and step not in done:
            yield f"1: {effect.unit.name} {effect.run_id} {effect.call_id} undid {step}, which did not succeed"
    for run_id, (run, events) in found.items():
        undoing = [event for event in events if isinstance(event, e.Planned) and event.kind is PlanKind.COMPENSATION]
        plans = [event.call.id for event in undoing]
        for event in events:
            for call in event.calls if isinstance(event, e.StepsReady) else ():
                is_step = world.ids.get(call.name, "x") not in world.undone and call.name in world.ids
                if call.id.partition(".")[0] in plans and is_step and "compensate" not in call.name:
                    yield f"1: {call.name} {run_id} {call.id} is a step, and was planned as a compensation"
        has_ended_badly = bool(undoing) or run.stop_reason is StopReason.STEP_FAILED
        if has_ended_badly and not any(_has_failed(each) for each in results_of(run).values()):
            yield f"1: {run_id} was undone or has failed, and no step of it had"


def _has_failed(result: ToolResult) -> bool:
    return result.outcome is not Outcome.DONE and result.error_type is not ErrorType.CONDITION
