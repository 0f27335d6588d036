"""What if: drive stored runs again with another agent, in the world that their journals have recorded.

Nothing is touched outside: calls are answered from the record, and no tool that may act is called. Each run is a fork
in a store of its own in memory, which ends with it. What comes out is what the other agent would have done.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import attrs

from agentfsm.agents.subagent import find_inner_agent
from agentfsm.core.errors import MisuseError, RunNotFoundError
from agentfsm.core.header import WHAT_IF
from agentfsm.core.limits import StopReason
from agentfsm.core.run import Run, begin_run
from agentfsm.core.settings import Settings
from agentfsm.core.usage import Usage
from agentfsm.core.validation import COUNT, COUNT_OR_ZERO, POSITIVE, require_choice
from agentfsm.engine.deciders.recorded_world import list_program_tools
from agentfsm.engine.execution.cost import calculate_run_cost
from agentfsm.engine.execution.recorded_world import Evidence, RecordedWorld
from agentfsm.engine.execution.tool_access import may_act
from agentfsm.evals.evaluation_runner import EvaluationLimitError, Purse, execute_all
from agentfsm.evals.recorded_agents import enter_world
from agentfsm.evals.scorers import add_usd
from agentfsm.evals.what_if_report import Action, ActionDifference, Measured, OtherArguments, Trial, WhatIfReport
from agentfsm.journal.load import fold_events, load_predecessor, read_header
from agentfsm.journal.recorded_run import list_closed_calls, load_recorded_run
from agentfsm.ports.store import Filter
from agentfsm.stores import MemoryStore
from agentfsm.tools.executing_call import reach_nothing

if TYPE_CHECKING:
    from agentfsm.agents.agent import Agent
    from agentfsm.agents.runnable_agent import RunnableAgent
    from agentfsm.core.messages import ToolCall
    from agentfsm.ports.model import Model
    from agentfsm.ports.store import RunSummary, Store

# Runs below a what-if run, and runs that it continues, that are kept at most.
_KEPT_RUNS: Final = 1_000
# Runs at a time.
PARALLEL: Final = 8

Reads: TypeAlias = Literal["recorded", "live"]
_READS: Final = require_choice("recorded", "live")


async def whatif(
    candidate: Agent[Any],
    runs: Iterable[str | Run[Any] | RunSummary],
    *,
    source: Store | None = None,
    at: int = 0,
    read: Reads = "recorded",
    repeats: int = 1,
    control: Agent[Any] | None = None,
    usd: float | None = None,
    keep: Store | None = None,
    deps: Any = None,
    parallel: int = PARALLEL,
    on_estimate: Callable[[float | None], None] | None = None,
    on_trial: Callable[[Trial], None] | None = None,
) -> WhatIfReport:
    """Drive stored runs again with another agent, without an effect, and report what it would have done otherwise.

    A call with the tool and the arguments of a recorded one gets its result, at any depth; answers of people are part
    of the results. No tool is called that may act, and nothing is written to a store, a memory, a cache or a limit.

    Args:
        candidate: The agent. Its models are asked.
        runs: The runs, lines of `runs.list`, or ids; all of them over. One that is named twice counts once.
        source: Store of the runs; by default that of the candidate. It is only read.
        at: Version of the runs from which they are driven again; 0 for the start. If calls were open then, it is the
            version before these.
        read: Calls of read-only tools that the record does not have: "recorded" gives them no result, "live" makes
            them.
        repeats: Trials of each run, 1 or more: models vary.
        control: The agent as it is now. It is tried in the same way, and its differences are the noise floor.
        usd: US dollars that all of it may cost. None: no limit.
        keep: Store that gets the what-if runs once they are over, for people who want to look at them. It may be any
            but that of the candidate and the source. None: they are gone.
        deps: Dependencies of each run, or a function of the recorded run that returns them.
        parallel: Maximum of runs at a time, 1 or more.
        on_estimate: Called before the first request with the US dollars that all of it is likely to cost; None if a
            price is unknown. Raise an error to stop.
        on_trial: Called with each trial, for progress.

    Raises:
        MisuseError: if an argument is wrong, a run is not over, there is a limit in US dollars and a price is unknown,
            or a function of an agent starts a run.
        RunNotFoundError: if the store has no such run.
        EvaluationLimitError: if the limit in US dollars is reached; `results` has the trials until then.
    """
    COUNT.check("whatif", "repeats", repeats)
    COUNT.check("whatif", "parallel", parallel)
    COUNT_OR_ZERO.check("whatif", "at", at)
    POSITIVE.or_none().check("whatif", "usd", usd)
    _READS.check("whatif", "read", read)
    ids = [*dict.fromkeys(each if isinstance(each, str) else each.id for each in runs)]
    agents = [candidate] if control is None else [candidate, control]
    for each in [below for agent in agents for below in _iter_agents(agent)]:
        if isinstance(settings := each.driver.config.settings, Settings):
            settings.check_withheld()
    store = candidate.store if source is None else source
    if keep is not None and (keep is candidate.store or await _is_same_store(keep, store, ids)):
        raise MisuseError("whatif(keep=...): give a store of its own, since that of the runs is only read")
    trier = _Trier(source=store, at=at, reads_live=read == "live", keep=keep, deps=deps)
    jobs = [(each, run_id, repeat) for run_id in ids for each in range(len(agents)) for repeat in range(1, repeats + 1)]
    used = {run_id: await trier.measure(run_id) for run_id in ids}
    unreadable = tuple([run_id for run_id, usage in used.items() if usage is None])
    jobs = [job for job in jobs if used[job[1]] is not None]
    expected = add_usd([_price(agents[each], used[run_id]) for each, run_id, _repeat in jobs])
    if on_estimate is not None:
        on_estimate(expected)
    purse = None if usd is None else Purse(limit=usd, jobs=len(jobs), expected=expected)

    async def act(job: tuple[int, str, int]) -> Trial:
        index, run_id, repeat = job
        return await trier.try_run(agents[index], run_id, repeat, is_control=index > 0)

    try:
        trials = await execute_all(act, jobs, parallel, purse, on_trial)
    except EvaluationLimitError as error:
        done = f"{len(error.results)} of {len(jobs)} trials were made, and more would exceed usd={usd:g}"
        raise EvaluationLimitError(error.results, f"{done}: give a higher one, or fewer runs") from None
    return WhatIfReport(
        agent=candidate.name,
        version=candidate.version,
        model=candidate.model.name,
        at=datetime.now(UTC).isoformat(timespec="seconds"),
        read=read,
        repeats=repeats,
        trials=tuple([each for each in trials if not each.is_control]),
        control=tuple([each for each in trials if each.is_control]),
        unreadable=unreadable,
        estimated_usd=expected,
    )


@attrs.frozen(kw_only=True, eq=False)
class _Trier:
    """Drives runs again."""

    source: Store
    at: int
    reads_live: bool
    keep: Store | None
    deps: Any

    async def measure(self, run_id: str) -> Usage | None:
        """Return the usage of a run; None if it continues one that is no longer in the store.

        Raises:
            RunNotFoundError: if the store has no such run.
            MisuseError: if it is not over.
        """
        stored = await self.source.read(run_id)
        try:
            before = await load_predecessor(self.source, stored.header)
        except RunNotFoundError:
            return None
        run = await fold_events(begin_run(stored.header, before), stored.events)
        if not run.is_over:
            raise MisuseError(f"run {run_id!r} is not over, so what it will do is not known: leave it out")
        return run.usage

    async def try_run(self, agent: Agent[Any], run_id: str, repeat: int, *, is_control: bool) -> Trial:
        """Drive a run again, and compare it with the record."""
        record = await load_recorded_run(self.source, run_id)
        store = MemoryStore(clock=agent.clock)
        at = await self._copy(store, run_id)
        deps = self.deps(record.run) if callable(self.deps) else self.deps
        evidence = Evidence(record=record)
        world = RecordedWorld(evidence=evidence, record=record, reads_live=self.reads_live)
        trial_agent = enter_world(agent.with_(store=store, pause_before=(), **world.cut_off(agent.memory)), world)
        with reach_nothing(record.run.header):
            fork = await trial_agent.fork(run_id, at=at, withhold=True, deps=deps)
            if at:
                world.skip_inputs(fork.turn)
            run = await trial_agent.finish(fork, deps=deps)
        if self.keep is not None:
            await _keep_runs(store, self.keep, run)
        configs = [each.driver.config for each in _iter_agents(agent)]
        acting = {tool.name for config in configs for tool in config.registry if may_act(tool)} | evidence.acting
        own = set[str]().union(*[list_program_tools(config) for config in configs])
        copied = {call.id for call in list_closed_calls(fork)}
        driven = [each for each in record.calls if each.call.id not in copied]
        below = [each for first in driven if first.below is not None for each in first.below.iter_calls()]
        recorded = [
            each for each in (*driven, *below) if not (each.is_agent or each.is_refused or each.call.name in own)
        ]
        seen = evidence.seen.values()
        unread = [each for each in seen if not (each.acts or each.is_recorded or each.is_live)]
        # The memory of the trial is another one, and stands in the hash of the configuration.
        now = attrs.evolve(run.header.fingerprint, config=agent.fingerprint.config)
        # What a flow would have done after a step without a result is not known.
        is_cut_short = run.stop_reason is StopReason.STEP_FAILED and any(
            each.acts and not each.is_recorded for each in seen
        )
        return Trial(
            is_cut_short=is_cut_short,
            run_id=run_id,
            repeat=repeat,
            is_control=is_control,
            effects=_compare(
                [each.call for each in recorded if each.has_acted or each.call.name in acting],
                [each.call for each in seen if each.acts],
                is_whole=not is_cut_short,
            ),
            reads=_compare(
                [each.call for each in recorded if not (each.has_acted or each.call.name in acting)],
                [each.call for each in seen if not each.acts],
                is_whole=not is_cut_short,
            ),
            outside=tuple([_as_action(each.call) for each in unread]),
            live=len([each for each in seen if each.is_live]),
            before_end=_describe_end(record.run),
            after_end=_describe_end(run),
            agent_changes=now.changes_since(record.run.header.fingerprint),
            before=_measure(record.run),
            after=_measure(run, agent.model),
            unrecalled=evidence.unrecalled,
            unread_inputs=world.unread_inputs,
        )

    async def _copy(self, store: MemoryStore, run_id: str) -> int:
        """Copy the beginning of a run, with the runs that it continues; return the version at which it is forked."""
        chain = [await self.source.read(run_id)]
        while (after := chain[-1].header.after) is not None:
            chain.append(await self.source.read(after))
        run = begin_run(chain[0].header, await load_predecessor(self.source, chain[0].header))
        at = 0
        for event in chain[0].events[: self.at]:
            run = run.apply(event)
            at = at if run.open or run.open_background or run.is_over else run.version
        for each in reversed(chain):
            header = attrs.evolve(each.header, session=None, purpose=WHAT_IF)
            events = each.events[:at] if each is chain[0] else each.events
            _header, lease = await store.create(header, events=events)
            await store.release(lease).wait()
        return at


async def _is_same_store(keep: Store, source: Store, ids: Iterable[str]) -> bool:
    """Return whether a store has the runs of another one: two names may lead to the same one."""
    if keep is source:
        return True
    for run_id in ids:
        try:
            if await read_header(keep, run_id) == await read_header(source, run_id):
                return True
        except RunNotFoundError:
            pass
    return False


async def _keep_runs(store: MemoryStore, keep: Store, run: Run[Any]) -> None:
    """Copy a what-if run that is over, with those below it and those that it continues; oldest first."""
    if not run.is_over:
        return
    for line in reversed(await store.runs(Filter(over=True), limit=_KEPT_RUNS)):
        stored = await store.read(line.id)
        try:
            await read_header(keep, line.id)
        except RunNotFoundError:
            _header, lease = await keep.create(stored.header, events=stored.events)
            await keep.release(lease).wait()


def _iter_agents(agent: RunnableAgent, seen: tuple[object, ...] = ()) -> Iterator[RunnableAgent]:
    """Yield an agent and those below it; `seen` are the tools on the way."""
    yield agent
    for tool in agent.driver.config.registry:
        inner = find_inner_agent(tool)
        if inner is not None and tool not in seen:
            yield from _iter_agents(inner, (*seen, tool))


def _compare(before: Iterable[ToolCall], after: Iterable[ToolCall], *, is_whole: bool) -> ActionDifference:
    """Return the difference of two lists of calls: equal ones first, then those of one tool in their order.

    If the second list is not whole, those that it lacks may have come later.
    """
    left: dict[str, list[ToolCall]] = defaultdict(list)
    new: dict[str, list[ToolCall]] = defaultdict(list)
    same = 0
    for call in before:
        left[call.name].append(call)
    for call in after:
        twin = next((each for each in left[call.name] if each.canonical == call.canonical), None)
        if twin is None:
            new[call.name].append(call)
        else:
            left[call.name].remove(twin)
            same += 1
    other = [pair for name, calls in new.items() for pair in zip(left[name], calls, strict=False)]
    lacking = [call for name, calls in left.items() for call in calls[len(new.get(name, ())) :]]
    return ActionDifference(
        same=same,
        other=tuple([_describe_other(first, second) for first, second in other]),
        more=tuple([_as_action(call) for name, calls in new.items() for call in calls[len(left[name]) :]]),
        fewer=tuple([_as_action(call) for call in lacking]) if is_whole else (),
    )


def _describe_other(before: ToolCall, after: ToolCall) -> OtherArguments:
    first, second = [
        {name: json.dumps(value, sort_keys=True) for name, value in json.loads(call.arguments).items()}
        for call in (before, after)
    ]
    fields = tuple([name for name in {**first, **second} if first.get(name) != second.get(name)])
    return OtherArguments(tool=after.name, before=before.arguments, after=after.arguments, fields=fields)


def _as_action(call: ToolCall) -> Action:
    return Action(tool=call.name, arguments=call.arguments)


def _describe_end(run: Run[Any]) -> str:
    if run.stop_reason is not None:
        return str(run.stop_reason)
    return f"waits for {', '.join([str(item.kind) for item in run.pending])}" if run.pending else str(run.state)


def _price(agent: Agent[Any], used: Usage | None) -> float | None:
    """Return the US dollars of a run if the agent needs as many tokens as the recorded one."""
    tokens = used or Usage()
    return agent.model.cost_usd(Usage(input_tokens=tokens.input_tokens, output_tokens=tokens.output_tokens))


def _measure(run: Run[Any], model: Model | None = None) -> Measured:
    cost = calculate_run_cost(run, model)
    return Measured(turns=run.turn, tokens=cost.usage.tokens, usd=cost.usd)
