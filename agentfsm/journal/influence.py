"""The persons who have shaped a call, from the journals: the rule of four eyes, for each door that approves.

A person shapes a call by a prompt, an input, an answer, the reason of a rejection or of a cancelled run below, edited
arguments or an edited plan, a recorded outcome, or a fork. A deed after the call was written did not shape it, unless
it is one to that call, and an approval that changes nothing shapes nothing. The deeds in a deleted run are unknown, so
a call that depends on it is not approved at all. If its id was used again, the run that has it now is a later one than
those that depend on the deleted run: it says nothing of them.
"""

from __future__ import annotations

import re
from math import inf
from typing import TYPE_CHECKING, Final

import attrs

from agentfsm.core import events as e
from agentfsm.core.errors import FourEyesError, RunNotFoundError
from agentfsm.core.limits import StopReason
from agentfsm.core.messages import Outcome, ToolResult
from agentfsm.core.pending import BARE_REJECTION
from agentfsm.core.run_ids import build_inner_id, child_run_id
from agentfsm.core.value import Value
from agentfsm.journal.audit import list_new_calls
from agentfsm.journal.load import read_header
from agentfsm.ports.store import Filter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agentfsm.core.header import Header
    from agentfsm.core.messages import ToolCall
    from agentfsm.ports.store import Store
    from agentfsm.ports.stored import StoredRun

# Limit of a query for the child runs of a run: more than any run has.
_MAX_CHILDREN: Final = 1_000_000


@attrs.frozen(kw_only=True)
class Influence(Value):
    """A deed by which a person has shaped a call."""

    person: str
    """Name of the person; empty if the deeds are not known, because the run was deleted."""

    deed: str
    """The deed: "gave the prompt", "sent input", "answered", "rejected", "cancelled", "edited", "settled", "forked" or
    "deleted".
    """

    run_id: str
    """Id of the run in which it was done: that of the call, an earlier one of its session, or one above or below it."""

    call_id: str = ""
    """Id of the call that it was done to; empty if it concerns the run."""


async def influence(store: Store, run_id: str, call_id: str) -> tuple[Influence, ...]:
    """Return the deeds by which persons have shaped a call of a run.

    These are the deeds in the run before the call was written, and those to the call itself; likewise in the runs above
    it, from which its prompt comes; and all deeds in the runs that it continues, and in the runs below it whose results
    it has. Deeds without a name, such as input from formats older than 5, are those of the user of the run. Each of
    these runs that the store no longer has is a deed of an unknown person.

    Args:
        store: Store of the runs.
        run_id: Id of the run.
        call_id: Id of the call.
    """
    found: dict[Influence, None] = {}
    todo: list[tuple[str, str | None, float]] = [(run_id, call_id, inf)]
    seen: set[tuple[str, str | None, float]] = set()
    while todo:
        if (step := todo.pop()) in seen:
            continue
        seen.add(step)
        try:
            stored = await _read_earlier(store, step[0], step[2])
        except RunNotFoundError:
            found[_deleted(step[0])] = None
            continue
        header = stored.header
        deeds, before, agents = _list_deeds(header, stored.events, step[1])
        if header.after is not None:
            todo.append((header.after, None, header.created_at))
        origins, lost_id = await _list_origins(store, header)
        if lost_id is not None:
            found[_deleted(lost_id)] = None
        below: dict[str, str] = {}
        for origin, shared in origins:
            if shared != stored.events[: len(shared)]:  # the fork has edits, which hide no word
                deeds += _list_deeds(origin, shared, step[1])[0]
            for person, deed in ((origin.user, "gave the prompt"), (origin.forked_by, "forked")):
                if person:
                    found[Influence(person=person, deed=deed, run_id=origin.id)] = None
            if (above := _find_call_above(origin)) is not None:
                todo.append(above)
            if not before:
                continue
            children = {row.id for row in await store.runs(Filter(parent=origin.id), limit=_MAX_CHILDREN)}
            for made in before:
                if (child := child_run_id(origin.id, made.id)) in children:
                    below[made.id] = child
                    todo.append((child, None, inf))
                todo += [(each, None, inf) for each in await _list_inner_runs(store, origin.id, made)]
        found |= dict.fromkeys([_deleted(child_run_id(header.id, each)) for each in agents if each not in below])
        found |= dict.fromkeys(deeds)
    return tuple(found)


async def _read_earlier(store: Store, run_id: str, before: float) -> StoredRun:
    """Return a run on which another one depends that was created at the time `before`.

    Raises:
        RunNotFoundError: if the store no longer has it, or its id was used again by a run that was created later.
    """
    stored = await store.read(run_id)
    if stored.header.created_at > before:
        raise RunNotFoundError(f"run {run_id!r} is another one than that which was deleted")
    return stored


def _deleted(run_id: str) -> Influence:
    return Influence(person="", deed="deleted", run_id=run_id)


async def check_four_eyes(store: Store, run_id: str, call_id: str, by: str) -> None:
    """Check that a person has not shaped a call that he decides on.

    Raises:
        FourEyesError: if he has, has no name, or a run that it depends on was deleted, so that this is not known.
    """
    if not by:
        raise FourEyesError("four eyes are asked for, so a decision needs the name of its author: give by=")
    own = next((each for each in await influence(store, run_id, call_id) if each.person in (by, "")), None)
    if own is not None and not own.person:
        raise _deleted_error(run_id, call_id, own.run_id)
    if own is not None:
        where = f" {own.call_id}" if own.call_id else ""
        raise FourEyesError(
            f"{by!r} may not decide on {call_id} of run {run_id}: {by!r} has shaped it ({own.deed}{where} in run "
            f"{own.run_id}); another person has to decide"
        )


async def check_not_approved(store: Store, run_id: str, call_id: str, by: str) -> None:
    """Check that a person who gives an answer, an outcome, input, an edit or a reason has not approved what it shapes.

    That is the call itself, the plan whose step it is, and each call above its run.

    Raises:
        FourEyesError: if he has, or a run above was deleted, so that this is not known.
    """
    at, call, before = run_id, call_id, inf
    while True:
        try:
            stored = await _read_earlier(store, at, before)
        except RunNotFoundError:
            raise _deleted_error(run_id, call_id, at) from None
        for event in stored.events:
            if not isinstance(event, e.ApprovalGiven) or event.by != by:
                continue
            if call and (event.call_id == call or call.startswith(f"{event.call_id}.")):
                raise FourEyesError(
                    f"{by!r} has approved {event.call_id} of run {at}, and may not give what it works with: another "
                    "person has to; a rejection or a cancellation needs no reason"
                )
        if (above := _find_call_above(stored.header)) is None:
            return
        at, call, before = above


def _deleted_error(run_id: str, call_id: str, lost_id: str) -> FourEyesError:
    return FourEyesError(
        f"run {lost_id} was deleted, or its id was used again, so it is not known who has shaped "
        f"{call_id or 'the work'} of run {run_id}: reject the call or cancel the run, and start a new one"
    )


def _find_call_above(header: Header) -> tuple[str, str, float] | None:
    """Return the run and the call that a run works for, and the latest time at which that run was created.

    None: no call has started the run.
    """
    if header.parent is not None:  # with which it is deleted
        return header.parent, header.id.removeprefix(f"{header.parent}."), inf
    if header.caller is not None:
        run_id, _, call_id = header.caller.rpartition("/")
        return run_id, call_id, header.created_at
    return None


def _list_deeds(
    header: Header, events: Sequence[e.Event], call_id: str | None
) -> tuple[list[Influence], list[ToolCall], list[str]]:
    """Return the deeds in a run that shape a call, or all if it is None, and the calls whose results it has.

    The last value is the ids of those calls that had a run of an agent.
    """
    found: list[Influence] = []
    agents: list[str] = []
    calls: dict[str, ToolCall] = {}
    closed: list[ToolCall] = []
    is_written = False

    def add(person: str | None, deed: str, call: str = "") -> None:
        if name := person or header.user:
            found.append(Influence(person=name, deed=deed, run_id=header.id, call_id=call))

    for event in events:
        match event:
            case e.ToolsChosen() | e.Planned() | e.StepsReady():
                written = {call.id: call for call in list_new_calls(event)}
                calls |= written
                is_written = is_written or call_id in written
            case e.Observed(inputs=inputs) if not is_written:
                for each in inputs:
                    add(each.by, "sent input")
            case e.ApprovalGiven(arguments=str() as text) | e.ApprovalAsked(arguments=str() as text):
                calls[event.call_id] = attrs.evolve(calls[event.call_id], arguments=text)
                if not is_written or event.call_id == call_id:
                    add(event.by, "edited", event.call_id)
            case e.InputGiven(answers=answers) if answers and (not is_written or event.call_id == call_id):
                add(event.by, "answered", event.call_id)
            case e.ToolFinished(result=result) if not is_written:
                closed.append(calls[result.call_id])
                if result.child is not None:
                    agents.append(result.call_id)
                if event.by and not (result.outcome is Outcome.REJECTED and result.content.startswith(BARE_REJECTION)):
                    add(event.by, "rejected" if result.outcome is Outcome.REJECTED else "settled", result.call_id)
            case e.ChildReported(result=ToolResult(child=child)) if child is not None and not is_written:
                agents.append(event.call_id)
            case e.Failed(reason=StopReason.CANCELLED, message=message):
                # "cancelled by NAME: REASON", which a run above may read. Both may have a colon.
                head = "cancelled by " if message.startswith("cancelled by ") else "cancelled"
                for place in [at.start() for at in re.finditer(": ", message)]:
                    add(message[len(head) : place], "cancelled")
    return found, closed, agents


async def _list_origins(store: Store, header: Header) -> tuple[list[tuple[Header, tuple[e.Event, ...]]], str | None]:
    """Return the header of a run, and those of the runs that it was forked from: it has their prompt and their results.

    Each comes with the events that the run has from it, as they were there. The second value is the id of one that the
    store no longer has, which ends the list.
    """
    found: list[tuple[Header, tuple[e.Event, ...]]] = [(header, ())]
    shared = header.forked_at
    while (origin := found[-1][0].forked_from) is not None:
        try:
            stored = await _read_earlier(store, origin, found[-1][0].created_at)
        except RunNotFoundError:
            return found, origin
        found.append((stored.header, tuple(stored.events[:shared])))
        shared = min(shared, stored.header.forked_at)
    return found, None


async def _list_inner_runs(store: Store, run_id: str, call: ToolCall) -> list[str]:
    """Return the ids of the runs that the function of a call has started without choosing their ids."""
    found: list[str] = []
    while True:
        inner = build_inner_id(run_id, call, len(found) + 1)
        try:
            await read_header(store, inner)
        except RunNotFoundError:
            return found
        found.append(inner)
