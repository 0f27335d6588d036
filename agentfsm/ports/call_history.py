"""History of calls, for rules over time: what a run and the runs around it have called, in the order of time.

It is read from runs as their journals make them, and adds no event. So a run that is continued elsewhere, after a crash
or an approval, has the same history. Each run is read once from its beginning, and then only what is new; each rule
keeps what it has made of the calls that it is about (`fold`), so that a decision does not read them all again.

Calls of one run are in the order of its turns, those of one reply and of other runs in the order of their ends. Of two
calls of different runs that ended at the same time, none is later.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import attrs

from agentfsm.core.call_facts import CallFact, iterate_closed_calls, list_open_calls
from agentfsm.core.calls import parse_turn
from agentfsm.core.events import GuardVerdict
from agentfsm.core.run_fields import RunFields
from agentfsm.core.value import Value


class Moment(NamedTuple):
    """Place of a call in the history."""

    at: float
    """Time of its end, seconds since 1970, not before the end of an earlier turn of its run."""

    run_id: str
    """Id of the run that has it, with the letter of its list: messages or steps of plans."""

    place: int
    """Its place in that list."""

    def is_after(self, other: Moment) -> bool:
        """Return whether it is certain that this call ended later."""
        return self.at > other.at or (self.at == other.at and self.run_id == other.run_id and self.place > other.place)


class CallReader(Protocol):
    """A rule that keeps a state over the calls of a history."""

    def reads(self, tool: str) -> bool:
        """Return whether calls of the tool change the state."""
        ...

    def begin(self) -> Any:
        """Return the state before any call."""
        ...

    def add(self, state: Any, fact: CallFact, moment: Moment) -> None:
        """Change the state by a closed call that is done, or may have happened.

        The calls come in any order, so the state depends on their moments only.
        """
        ...


@attrs.define(eq=False, repr=False)
class _Fold:
    """The state of a rule, and how many calls of each tool are in it."""

    reader: CallReader
    state: Any
    tools: int = -1
    """Number of tools that were called when `places` was made."""

    seen: int = 0
    """Number of calls that there were when the state was brought up to date."""

    places: dict[str, int] = attrs.field(factory=dict)
    """Number of calls that the state has, by the name of each tool that the rule reads."""


@attrs.define(eq=False, repr=False)
class CallLog:
    """Closed calls that happened, or may have, with the states of rules."""

    facts: list[CallFact] = attrs.field(factory=list)
    """All closed calls, also those that did not happen."""

    _by_tool: dict[str, list[tuple[CallFact, Moment]]] = attrs.field(factory=dict)
    _folds: dict[int, _Fold] = attrs.field(factory=dict)

    def add(self, fact: CallFact, moment: Moment) -> None:
        """Add a closed call."""
        self.facts.append(fact)
        if fact.is_done or fact.may_have_happened:
            self._by_tool.setdefault(fact.tool, []).append((fact, moment))

    def fold(self, reader: CallReader) -> Any:
        """Return the state of a rule after all calls. It is the same object for each call."""
        fold = self._folds.get(id(reader))
        if fold is None:
            fold = self._folds[id(reader)] = _Fold(reader, reader.begin())
        if fold.tools != len(self._by_tool):
            fold.seen = -1
            fold.tools = len(self._by_tool)
            fold.places |= {name: 0 for name in self._by_tool if name not in fold.places and reader.reads(name)}
        if fold.seen != len(self.facts):
            fold.seen = len(self.facts)
            for name, place in fold.places.items():
                calls = self._by_tool[name]
                if place < len(calls):
                    for fact, moment in calls[place:]:
                        reader.add(fold.state, fact, moment)
                    fold.places[name] = len(calls)
        return fold.state


@attrs.define(eq=False, repr=False)
class RunCalls:
    """The calls of one run: how far its closed calls are in a log, and those that are open."""

    run: RunFields
    _read: RunFields | None = None
    """The run as it was read the last time."""

    _messages: int = 0
    _steps: int = 0
    _turn: int = 0
    _floor: float = 0.0
    """Latest end of a call of an earlier turn."""

    _latest: float = 0.0
    _count: int = 0
    _in_background: list[tuple[CallFact, Moment]] = attrs.field(factory=list)
    """Calls of agents in the background that had not ended when they were read."""

    _open: tuple[RunFields, list[CallFact]] | None = None

    def read(self, log: CallLog) -> None:
        """Add the calls to the log that were closed since the last time."""
        run = self.run
        if run is self._read:
            return
        self._read = run
        if self._in_background:
            self._end_background(log)
        messages = len(run.messages)
        steps = len(run.earlier_steps) + (0 if run.plan is None else len(run.plan.closed))
        if messages == self._messages and steps == self._steps:
            return
        for fact in iterate_closed_calls(run, self._messages, self._steps):
            moment = self._place(fact)
            if fact.outcome is None:
                self._in_background.append((fact, moment))
            else:
                log.add(fact, moment)
        self._messages, self._steps = messages, steps

    def _place(self, fact: CallFact) -> Moment:
        turn = parse_turn(fact.call_id)
        self._count += 1
        if not turn:
            return Moment(fact.ended_at, f"{self.run.id}/p", self._count)
        if turn != self._turn:
            self._turn, self._floor = turn, self._latest
        at = max(fact.ended_at, self._floor)
        self._latest = max(self._latest, at)
        return Moment(at, self.run.id, self._count)

    def _end_background(self, log: CallLog) -> None:
        left: list[tuple[CallFact, Moment]] = []
        for fact, moment in self._in_background:
            result = self.run.background[fact.call_id].result
            if result is None:
                left.append((fact, moment))
                continue
            ended = attrs.evolve(fact, outcome=result.outcome, result=result.content, labels=result.labels)
            at = max(moment.at, result.completed_at)
            log.add(attrs.evolve(ended, may_have_happened=False, ended_at=at), moment._replace(at=at))
        self._in_background = left

    def list_open(self) -> list[CallFact]:
        """Return the open calls, also those that have their result, and agents in the background."""
        if self._open is None or self._open[0] is not self.run:
            self._open = self.run, [*list_open_calls(self.run), *[fact for fact, _ in self._in_background]]
        return self._open[1]


@attrs.frozen(kw_only=True)
class CallHistory(Value):
    """What a guard sees of the calls before the one that it decides on: read-only, and not to be kept.

    It has the calls of the run, of the runs that it continues (its session), of the runs above it, and of all runs
    below these.
    """

    log: CallLog = attrs.field(factory=CallLog, eq=False, repr=False)
    """Closed calls, with what rules have made of them."""

    beside: tuple[CallFact, ...] = ()
    """Open calls that come before: those that stand before it in the same reply and were not refused, steps of a plan
    that have started, and calls of other runs that have started or may start. Some have ended. One of the same reply
    is shown as open if it is done, since the model had not read its result.
    """

    following: tuple[CallFact, ...] = ()
    """Calls behind it in the same reply, or steps of a plan, that may start, because they were decided on before."""

    now: float = 0.0
    """Time of the decision, seconds since 1970."""

    run_id: str = ""
    """Id of the run that makes the call, or that is about to end."""

    @property
    def facts(self) -> Sequence[CallFact]:
        """All calls: the closed ones, then those `beside`."""
        return (*self.log.facts, *self.beside)

    def fold(self, reader: CallReader) -> Any:
        """Return what a rule has made of the closed calls."""
        return self.log.fold(reader)


@attrs.define(eq=False, repr=False)
class CallRecorder:
    """The calls of a run and the runs around it, read from their newest states."""

    log: CallLog = attrs.field(factory=CallLog)
    runs: dict[str, RunCalls] = attrs.field(factory=dict)

    def note(self, run: RunFields) -> None:
        """Take the newest state of a run, which may be known already."""
        if (known := self.runs.get(run.id)) is None:
            self.runs[run.id] = RunCalls(run)
        else:
            known.run = run

    def view(
        self, run: RunFields, call_id: str = "", *, now: float, decided: Iterable[tuple[str, GuardVerdict]] = ()
    ) -> CallHistory:
        """Return the history before a call of a run, or before its end.

        Args:
            run: The run, which was noted.
            call_id: Id of the call; empty for the end of the run.
            now: The time, seconds since 1970.
            decided: Verdicts on calls of the run that are not in its journal yet.
        """
        for calls in self.runs.values():
            calls.read(self.log)
        if len(self.runs) == 1 and len(run.open) == 1 and run.open[0].call.id == call_id and not run.background:
            return CallHistory(log=self.log, now=now, run_id=run.id)  # most calls
        verdicts = dict(decided)
        before: list[CallFact] = []
        following: list[CallFact] = []
        is_before = True
        for fact in self.runs[run.id].list_open():
            if fact.call_id == call_id:
                is_before = False
            elif fact.is_refused or verdicts.get(fact.call_id) is GuardVerdict.REFUSE:
                continue
            elif is_before or (run.reply is None and (fact.is_started or fact.outcome is not None)):
                is_unread = fact.is_done and run.reply is not None and call_id
                before.append(attrs.evolve(fact, outcome=None, may_have_happened=True) if is_unread else fact)
            elif fact.is_decided or fact.is_started or fact.outcome is not None:
                following.append(fact)
        others = [calls for key, calls in self.runs.items() if key != run.id]
        beside = [
            fact
            for calls in others
            for fact in calls.list_open()
            if fact.is_started or (fact.is_decided and not fact.is_refused)
        ]
        return CallHistory(log=self.log, beside=(*beside, *before), following=tuple(following), now=now, run_id=run.id)
