"""Rules over time over old journals: which calls they would have refused, before they are put to use."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import merge
from types import SimpleNamespace
from typing import TYPE_CHECKING, Final

import attrs

from agentfsm.core import events as e
from agentfsm.core.call_facts import list_call_facts
from agentfsm.core.calls import parse_arguments
from agentfsm.core.errors import ArgumentsError, MisuseError
from agentfsm.core.events import GuardVerdict
from agentfsm.core.plans import ENGINE_TOOLS
from agentfsm.core.run import Run, begin_run
from agentfsm.core.value import Value
from agentfsm.engine.execution.call_tree import CallTree
from agentfsm.journal.load import load_predecessor
from agentfsm.journal.run_list import RunIterator
from agentfsm.ports.guards import GuardedCall, ToolTraits
from agentfsm.ports.store import Filter

if TYPE_CHECKING:
    from agentfsm.core.messages import Outcome, ToolCall
    from agentfsm.ports.guards import CallGuard, GuardDecision
    from agentfsm.ports.store import Store
    from agentfsm.ports.stored import StoredRun
    from agentfsm.tools.registry import ToolRegistry

_MAX_CHILDREN: Final = 1_000_000


@attrs.frozen(kw_only=True)
class RuleFinding(Value):
    """A call that a rule would have refused or asked about, or what was due at the end of a run."""

    run_id: str
    """Id of the run."""

    call_id: str = ""
    """Id of the call; empty for the end of the run."""

    tool: str = ""
    """Name of the tool; empty for the end of the run."""

    at: float
    """Time of the decision: when the call was written or started, or when the run ended. Seconds since 1970."""

    verdict: GuardVerdict
    """Verdict on the call; REFUSE for the end of the run."""

    rule: str
    """The rule; for the end of the run, what was due."""

    reason: str
    """Reason, with what is missing."""

    outcome: Outcome | None = None
    """Outcome of the call; None if the call is open, or if the finding is about the end of the run."""


@attrs.frozen(kw_only=True)
class RuleReport(Value):
    """The check of rules over old journals."""

    runs: int
    """Number of runs that were read, those of sub-agents included."""

    calls: int
    """Number of calls that a rule was asked about."""

    findings: tuple[RuleFinding, ...]
    """Calls that the rules would have refused, or about which they would have asked. Runs are sorted from the newest to
    the oldest, and the findings of a run from the oldest to the newest.
    """


async def check_rules(
    store: Store, guards: Sequence[CallGuard], tools: ToolRegistry, where: Filter | None = None
) -> RuleReport:
    """Ask rules over time about the calls of old runs, each as its journal was when the call was written and started.

    Other calls are taken as they happened: that a rule had refused one of them changes nothing for those after it.

    Args:
        store: Store of the runs.
        guards: The guards of an agent; those that do not read calls are left out.
        tools: Tools of the agent, for the defaults of arguments. Calls of other tools are checked without.
        where: Selects the runs; those of sub-agents are checked with the run at their root.

    Raises:
        MisuseError: if no guard reads calls.
    """
    rules = [guard for guard in guards if guard.reads_calls()]
    if not rules:
        raise MisuseError("the agent has no rules over time: give some as guards=[before('pay', 'verify'), ...]")
    runs, calls, findings = 0, 0, list[RuleFinding]()
    async for summary in RunIterator(store, attrs.evolve(where or Filter(), parent="")):
        stored = await _read_tree(store, summary.id)
        check = _TreeCheck(rules, tools)
        await check.begin(store, stored)
        check.replay(stored)
        runs += len(stored)
        calls += len(check.asked)
        findings += check.list_findings()
    return RuleReport(runs=runs, calls=calls, findings=tuple(findings))


async def _read_tree(store: Store, run_id: str) -> list[StoredRun]:
    """Return a run and all runs below it."""
    found = [await store.read(run_id)]
    for row in await store.runs(Filter(parent=run_id), limit=_MAX_CHILDREN):
        found += await _read_tree(store, row.id)
    return found


@attrs.define(eq=False, repr=False)
class _Replayed:
    """A run at a moment of its journal."""

    run: Run


@attrs.define(eq=False, repr=False)
class _TreeCheck:
    """Replays the journals of a run and of the runs below it, side by side."""

    rules: Sequence[CallGuard]
    tools: ToolRegistry
    asked: set[tuple[str, str]] = attrs.field(factory=set)
    """Calls that a rule was asked about, as run and call."""

    _tree: CallTree = attrs.field(factory=CallTree)
    _runs: dict[str, _Replayed] = attrs.field(factory=dict)
    _found: dict[tuple[str, str], RuleFinding] = attrs.field(factory=dict)

    async def begin(self, store: Store, stored: Sequence[StoredRun]) -> None:
        """Take the runs at version 0, the root first, with the calls of the runs that it continues."""
        for each in stored:
            begun = begin_run(each.header, await load_predecessor(store, each.header))
            self._runs[each.header.id] = _Replayed(begun)
        root, *below = self._runs.values()
        self._tree.sources |= {each.run.id: each for each in below}
        await self._tree.add(store, root, ())

    def replay(self, stored: Sequence[StoredRun]) -> None:
        """Apply all events in the order of time, and ask the rules about each call."""
        root = stored[0].header.id
        journals = [[(event.at, each.header.id, event) for event in each.events] for each in stored]
        for at, run_id, event in merge(*journals, key=lambda each: each[0]):
            replayed = self._runs[run_id]
            started = _find_start(replayed.run, event)
            if started is not None:
                self._ask(replayed.run, [started], at)
            replayed.run = replayed.run.apply(event)
            if isinstance(event, e.ToolsChosen | e.StepsReady):
                new = event.message.calls if isinstance(event, e.ToolsChosen) else event.calls
                self._ask(replayed.run, new, at)
            if run_id == root and replayed.run.is_over:
                history = self._tree.view(replayed.run, now=at)
                for due in (text for rule in self.rules for text in rule.list_due(history)):
                    end = RuleFinding(run_id=root, at=at, verdict=GuardVerdict.REFUSE, rule=due, reason=due)
                    self._found[root, due] = end

    def _ask(self, run: Run, calls: Iterable[ToolCall], at: float) -> None:
        """Ask the rules about calls, in the order of their reply."""
        verdicts: list[tuple[str, GuardVerdict]] = []
        for call in calls:
            if call.malformed is not None or call.invented or call.name in ENGINE_TOOLS:
                continue
            decision = self._decide(run, call, at, verdicts)
            if decision is None:
                continue
            verdicts.append((call.id, decision.verdict))
            finding = RuleFinding(
                run_id=run.id,
                call_id=call.id,
                tool=call.name,
                at=at,
                verdict=decision.verdict,
                rule=decision.rule,
                reason=decision.reason,
            )
            known = self._found.get((run.id, call.id))
            if known is None or known.verdict.strictness < finding.verdict.strictness:
                self._found[run.id, call.id] = finding

    def _decide(
        self, run: Run, call: ToolCall, at: float, verdicts: Sequence[tuple[str, GuardVerdict]]
    ) -> GuardDecision | None:
        tool = self.tools.get(call.name)
        traits = ToolTraits(name=call.name) if tool is None else tool.traits
        header = run.header
        rules = self.rules if header.parent is None else [rule.for_sub_agent(header) for rule in self.rules]
        rules = [rule for rule in rules if rule.concerns(traits)]
        if not rules:
            return None
        self.asked.add((run.id, call.id))
        arguments = SimpleNamespace(**parse_arguments(call))
        if tool is not None:
            try:
                arguments = tool.to_namespace(tool.bind_and_check(call.arguments))
            except ArgumentsError:
                return None  # it was refused for that
        asked = GuardedCall(
            tool=traits,
            arguments=arguments,
            written=call.arguments,
            defaults={} if tool is None else tool.defaults,
            labels=run.labels,
            counted=run.counted,
            header=header,
            history=self._tree.view(run, call.id, now=at, decided=verdicts),
        )
        decisions = [each for rule in rules if (each := rule.decide(asked)) is not None]
        return max(decisions, key=lambda each: each.verdict.strictness, default=None)

    def list_findings(self) -> list[RuleFinding]:
        """Return what was found, with what became of the calls. An approved call needed no other answer."""
        facts = {
            (fact.run_id, fact.call_id): fact for each in self._runs.values() for fact in list_call_facts(each.run)
        }
        found: list[RuleFinding] = []
        for key, finding in self._found.items():
            fact = facts.get(key)
            if finding.verdict is GuardVerdict.ALLOW:
                continue
            if fact is not None and finding.verdict is GuardVerdict.ASK and fact.approved_by is not None:
                continue
            found.append(finding if fact is None else attrs.evolve(finding, outcome=fact.outcome))
        return sorted(found, key=lambda each: each.at)


def _find_start(run: Run, event: e.Event) -> ToolCall | None:
    """Return the call that an event starts, or ends without a recorded start."""
    if isinstance(event, e.ToolStarted):
        entry = run.open_call(event.call_id)
    elif isinstance(event, e.ToolFinished) and event.result.attempts and event.result.started_at:
        entry = run.open_call(event.result.call_id)
    else:
        return None
    return None if entry.attempts else entry.call
