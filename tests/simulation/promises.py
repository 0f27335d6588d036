"""What was promised, read off the journals and the world when all is over."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import attrs
from world import CRASHES, UNSAFE

from agentfsm import AgentError, ErrorType, Outcome, PendingKind, Run, State, StopReason, ToolCall, ToolResult
from agentfsm.core import codec
from agentfsm.core import events as e
from agentfsm.core.calls import Phase
from agentfsm.core.inbox import Approve, Decision, GiveInput, Input, Rerun
from agentfsm.core.run import begin_run
from tests.support.checks import sound_run, valid_history

if TYPE_CHECKING:
    from shared_disk import Accepted
    from world import Attempt, World

# Errors that say that nothing was done.
NOT_RUN: Final = frozenset({ErrorType.ARGUMENTS, ErrorType.UNKNOWN_TOOL, ErrorType.BLOCKED, ErrorType.CIRCUIT_OPEN})
# Outcomes that say the same.
NO_EFFECT: Final = frozenset({Outcome.SKIPPED, Outcome.REJECTED})


@attrs.define(eq=False)
class Story:
    """One run as its journal tells it."""

    world: World
    events: list[e.Event]
    versions: list[Run]
    # After each event, from version 0.
    attempts: list[Attempt]
    rows: list[Accepted]

    @property
    def run(self) -> Run:
        """The run as it ended."""
        return self.versions[-1]

    def own(self) -> Iterator[tuple[Run, e.Event]]:
        """Yield what happened in this run itself, and the run right before it; not what a fork begins with."""
        for number in range(self.run.header.forked_at, len(self.events)):
            yield self.versions[number], self.events[number]

    def calls(self) -> dict[str, ToolCall]:
        """All calls, by id."""
        chosen = [event for event in self.events if isinstance(event, e.ToolsChosen)]
        return {call.id: call for event in chosen for call in event.message.calls}

    def results(self) -> dict[str, ToolResult]:
        """All results, by call id."""
        return {m.call_id: m for m in self.run.messages if isinstance(m, ToolResult)}


def broken_in(world: World) -> Iterator[str]:
    """Yield what does not hold."""
    stories = {}
    for run_id, record in world.disk._records.items():
        try:
            stories[run_id] = _story(world, run_id, record)
        except AgentError as error:
            yield f"P8: the journal of {run_id} cannot be folded: {error}"
    for run_id, story in stories.items():
        for check in CHECKS:
            for text in check(story):
                yield f"{text} ({run_id})"
    if not world.faults:  # where the disk fails, it is told to the log alone
        yield from (f"P12: {run_id} is open in {at}, where its call is over" for run_id, at in world.disk.left.items())
    yield from _keys(world)
    yield from _acknowledged(world, stories)


def _story(world: World, run_id: str, record: Any) -> Story:
    versions = [begin_run(record.run.header)]
    for event in record.events:
        versions.append(versions[-1].apply(event))
    attempts = [each for each in world.attempts if each.run_id == run_id]
    rows = [each for each in world.disk.accepted if each.run_id == run_id]
    return Story(world, record.events, versions, attempts, rows)


# P1


def _acknowledged(world: World, stories: dict[str, Story]) -> Iterator[str]:
    """What a driving call has returned is in the journal, as it was."""
    for run in world.returned:
        story = stories.get(run.id)
        if story is not None and story.run.header.nonce != run.header.nonce:
            continue  # of the run that had this id before
        if story is None or run.version >= len(story.versions) or story.versions[run.version] != run:
            yield f"P1: {run.id} v{run.version} was returned, and the journal says otherwise"


def _inputs_come_in(story: Story) -> Iterator[str]:
    """Input that a person was told is there comes in once; of a run that was answered none is left out."""
    seen = Counter(i.parts[0].text for _, event in story.own() if isinstance(event, e.Observed) for i in event.inputs)
    due = [row.row.item for row in story.rows if isinstance(row.row.item, Input) and row.row.item.due_at is None]
    if story.run.state is State.DONE:
        lost = [item.parts[0].text for item in due if item.parts[0].text not in seen]
        yield from (f"P1: {text!r} was posted and never read" for text in lost)
    yield from (f"P1: {text!r} was read {times} times" for text, times in seen.items() if times > 1)


# P2


def _starts(story: Story) -> Iterator[str]:
    """A call that may not be repeated starts once; again only when a person said so, or nothing was done."""
    calls, again = story.calls(), Counter[str]()
    started = {entry.call.id for entry in story.versions[story.run.header.forked_at].open}
    for run, event in story.own():
        if isinstance(event, e.ToolStarted) and calls[event.call_id].name in UNSAFE:
            entry = run.open_call(event.call_id)
            if event.call_id in started and entry.attempts and entry.phase is not Phase.APPROVED:
                again[event.call_id] += 1
            started.add(event.call_id)
    again.subtract(each.call_id for each in story.attempts if each.refused)
    for call_id, times in again.items():
        if times > 0:
            yield f"P2: {calls[call_id].name} {call_id} is started again, and nobody said so"


def _nothing_hidden(story: Story) -> Iterator[str]:
    """Whatever a tool did is told of: by a result that does not deny it, or as unknown."""
    calls, results = story.calls(), story.results()
    told = {event.call_id for event in story.events if isinstance(event, e.ToolLost)}
    told |= {event.result.call_id for event in story.events if isinstance(event, e.ToolFinished) and event.by}
    for attempt in story.attempts:
        if attempt.tool == "look" or not attempt.acted:
            continue
        what = f"{attempt.tool} {attempt.call_id}"
        if attempt.call_id not in calls:
            yield f"P2: {what} acted, and the journal knows no such call"
            continue
        result = results.get(attempt.call_id)
        if result is None:
            yield f"P2: {what} acted, and has no result"
        elif attempt.call_id not in told and attempt.tool in UNSAFE and _denies(result):
            yield f"P2: {what} acted, and its result says {result.outcome} {result.error_type}"


def _denies(result: ToolResult) -> bool:
    return result.outcome in (*NO_EFFECT, Outcome.CANCELLED) or result.error_type in NOT_RUN


def _done_is_done(story: Story) -> Iterator[str]:
    """What is told as done by the tool itself was done."""
    by = {event.result.call_id for event in story.events if isinstance(event, e.ToolFinished) and event.by}
    acted = {each.call_id for each in story.attempts if each.acted}
    fork = story.versions[story.run.header.forked_at]
    inherited = {result.call_id for result in fork.messages if isinstance(result, ToolResult)}
    inherited |= {entry.call.id for entry in fork.open}
    for call_id, result in story.results().items():
        mine = result.tool in UNSAFE | {"put", "stamp", "look"} and call_id not in by | inherited
        if mine and result.outcome is Outcome.DONE and call_id not in acted:
            yield f"P2: {result.tool} {call_id} is told as done and never acted"


# P3


def _keys(world: World) -> Iterator[str]:
    """One key for each effect, on every attempt; no two effects share one, but a fork's with those it inherited.

    A call may be two effects where it only reads: it begins before the reply is durable, and where that is lost the
    model may ask for something else in its place.
    """
    effects: dict[tuple[str, str], set[str]] = {}
    # By run and effect.
    for attempt in (*world.attempts, *world.buried):
        effect = f"{attempt.call_id} {attempt.tool} {json.dumps(attempt.arguments, sort_keys=True)}"
        effects.setdefault((attempt.run_id, effect), set()).add(attempt.key)
    sharing: dict[str, set[tuple[str, str]]] = {}
    # By key: the run that is the root of its forks, and the effect.
    for (run_id, effect), keys in effects.items():
        if len(keys) > 1:
            yield f"P3: {run_id} {effect} ran under {sorted(keys)}"
        for key in keys:
            sharing.setdefault(key, set()).add((_root(world, run_id), effect))
    for key, shared in sharing.items():
        if len(shared) > 1:
            yield f"P3: {key} stands for several effects: {sorted(shared)}"


def _root(world: World, run_id: str) -> str:
    """Return the run at the beginning of its forks."""
    records = world.disk._records
    while run_id in records and (source := records[run_id].run.header.forked_from) is not None:
        run_id = source
    return run_id


def _same_key_as_told(story: Story) -> Iterator[str]:
    keys = {call_id: call.key for call_id, call in story.calls().items()}
    keys |= {event.call_id: event.key for event in story.events if isinstance(event, e.ApprovalGiven) and event.key}
    for attempt in story.attempts:
        key = keys.get(attempt.call_id, attempt.key)
        if key != attempt.key and attempt.tool != "look":
            yield f"P3: {attempt.call_id} ran under {attempt.key}, and its key is {key}"


# P5, P8, P10


def _histories(story: Story) -> Iterator[str]:
    """Each version is a valid history, the end is what an end promises to be, and the journal can be read again."""
    before: object = None
    for run in story.versions:
        if run.messages is before:
            continue
        before = run.messages
        try:
            valid_history(run.messages)
        except AssertionError as error:
            yield f"P5: version {run.version}: {error}"
    try:
        sound_run(story.run)
    except AssertionError as error:
        yield f"P5: the end: {error}"
    header = story.run.header
    texts = [codec.encode_event(event, header) for event in story.events]
    if [codec.decode_event(text, header) for text in texts] != story.events:
        yield "P8: the journal comes back otherwise from the codec"


def _limits(story: Story) -> Iterator[str]:
    """No limit was passed unseen."""
    run = story.run
    if run.turn > 8:
        yield f"P10: {run.turn} turns"
    if run.is_over and run.stop_reason is StopReason.LOOP_DETECTED and run.loops < 2:
        yield "P10: stopped for a loop without a warning"


# P7


def _approvals(story: Story) -> Iterator[str]:
    """Each yes in the journal is one that was given in time, for exactly this, and is spent once."""
    rows = {row.row.item.by: row for row in story.rows if isinstance(row.row.item, Decision)}
    spent: Counter[str] = Counter()
    for run, event in story.own():
        if not isinstance(event, e.ApprovalGiven):
            continue
        spent[event.by] += 1
        row, entry = rows.get(event.by), run.open_call(event.call_id)
        item = None if row is None else row.row.item
        if row is None or item is None or not isinstance(item, Approve | Rerun) or item.call_id != event.call_id:
            yield f"P7: {event.call_id} runs on the word of {event.by!r}, who gave none"
        elif isinstance(item, Approve):
            if (
                entry.phase is not Phase.AWAITING_APPROVAL
                or item.digest != entry.digest
                or item.arguments != event.arguments
            ):
                yield f"P7: {event.by} said yes to something else than {event.call_id} is"
            if entry.expires_at is not None and row.at >= entry.expires_at:
                yield f"P7: {event.by} said yes to {event.call_id} when the time was up"
    yield from (f"P7: the yes of {by} was spent {times} times" for by, times in spent.items() if times > 1)


def _inputs(story: Story) -> Iterator[str]:
    """Each answer to a tool is one that was given in time, to these very questions, and is spent once."""
    rows = {row.row.item.by: row for row in story.rows if isinstance(row.row.item, GiveInput)}
    spent: Counter[str] = Counter()
    for run, event in story.own():
        if not isinstance(event, e.InputGiven):
            continue
        spent[event.by] += 1
        row, (item, *_) = rows.get(event.by), run.open_call(event.call_id).pending
        if row is None or row.row.item.answers != event.answers or row.row.item.digest != item.digest:
            yield f"P7: {event.call_id} was given what nobody has answered"
        elif item.expires_at is not None and row.at >= item.expires_at:
            yield f"P7: {event.by} answered {event.call_id} when the time was up"
    yield from (f"P7: the answer of {by} was spent {times} times" for by, times in spent.items() if times > 1)


def _decisions_count(story: Story) -> Iterator[str]:
    """A decision that was accepted is acted on, once, in a run that was not ended before; never after its time."""
    by = Counter(
        event.by
        for _, event in story.own()
        if isinstance(event, e.ApprovalGiven | e.InputGiven | e.ToolFinished) and event.by
    )
    for row in story.rows:
        item = row.row.item
        if not isinstance(item, Decision):
            continue
        if by[item.by] > 1:
            yield f"P7: the decision of {item.by} counts {by[item.by]} times"
        if not by[item.by] and story.run.state is State.DONE and not story.world.drifts:
            yield f"P7: the decision of {item.by} on {item.call_id} does not count"


def _asked_first(story: Story) -> Iterator[str]:
    """What a person has to let run does not run before, and runs with the arguments that were agreed on."""
    yes: Counter[str] = Counter()
    arguments: dict[str, str] = {call_id: call.arguments for call_id, call in story.calls().items()}
    for event in story.events:
        if isinstance(event, e.ApprovalGiven):
            yes[event.call_id] += 1
            arguments[event.call_id] = event.arguments or arguments[event.call_id]
    forked = {entry.call.id for entry in story.versions[story.run.header.forked_at].open}
    for attempt in story.attempts:
        call_id, n = attempt.call_id, attempt.arguments["n"]
        if (
            attempt.tool == "look" or call_id not in arguments
        ):  # it may begin before the reply that asks for it is whole
            continue
        is_asked = attempt.tool == "sign" or (attempt.tool == "stamp" and n % 2 == 0)
        if is_asked and not yes[call_id] and call_id not in forked:
            yield f"P7: {attempt.tool} {call_id} ran, and nobody said yes"
        if json.loads(arguments[call_id]).get("n") != n:
            yield f"P7: {attempt.tool} {call_id} ran with {n}, and not with {arguments[call_id]}"


# Parking


def _parked(story: Story) -> Iterator[str]:
    """A run is paused for the deaths of its owners only where it was alone with them: no other can be the reason."""
    times = sum(isinstance(event, e.Paused) and event.kind is PendingKind.CRASH for _, event in story.own())
    alone = story.world.disk.alone[story.run.id]
    if alone < times * CRASHES:
        yield f"P11: parked {times} times, and alone with an owner that died {alone} times"


CHECKS: Final = (
    _parked,
    _inputs_come_in,
    _starts,
    _nothing_hidden,
    _done_is_done,
    _same_key_as_told,
    _histories,
    _limits,
    _approvals,
    _inputs,
    _decisions_count,
    _asked_first,
)
