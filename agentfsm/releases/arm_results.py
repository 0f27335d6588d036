"""Results of the arms of a roll-out, from the journals of their runs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from statistics import fmean
from typing import Final

import attrs

from agentfsm.core.errors import RunNotFoundError
from agentfsm.core.limits import StopReason
from agentfsm.core.run import begin_run
from agentfsm.core.value import Value
from agentfsm.engine.execution.journal import read_header
from agentfsm.engine.run_list import RunIterator
from agentfsm.ports.store import Filter, RunSummary, Store
from agentfsm.prompts import wilson_interval
from agentfsm.releases.rollback_rules import RunOutcome
from agentfsm.releases.rollout_log import RolloutControl, RolloutPlan
from agentfsm.stores.rules import FINAL_STATES
from agentfsm.telemetry.measurements import RUN_DURATION, measure_run

# Newest runs of a release that are looked at: they decide any difference that matters.
MAX_RUNS: Final = 2_000
# Runs per page of a list.
_PAGE: Final = 500


@attrs.frozen(kw_only=True)
class ArmResults(Value):
    """Results of an arm since it has had weight, over its newest 2,000 runs."""

    arm: str
    """Name of the arm."""

    release: str
    """Version of its release."""

    weight: float
    """Percent of the users."""

    open: int
    """Runs that are not over."""

    runs: int
    """Runs that are over, without cancelled ones."""

    failed: int
    """Those of them that did not complete."""

    failure_interval: tuple[float, float] | None
    """Interval that contains the real share of failures with a confidence of 95 %; None without runs."""

    usd: float | None
    """Mean cost of a run in US dollars; None if no price is known."""

    seconds: float | None
    """Mean time of a run in seconds, without waits for people; None without runs."""

    rating: float | None
    """Mean rating, from 1 to 5; None without ratings."""

    ratings: int
    """Number of rated runs."""


@attrs.frozen(kw_only=True)
class RolloutOutcomes(Value):
    """The runs of a roll-out."""

    ended: Mapping[str, tuple[RunOutcome, ...]]
    """Outcomes of the runs that are over by arm, newest first, without cancelled ones."""

    open: Mapping[str, int]
    """Number of runs that are not over by arm."""

    def summarise(self, plan: RolloutPlan) -> tuple[ArmResults, ...]:
        """Return the results of each arm of the plan, in its order."""
        return tuple([_summarise(plan, arm, self.ended.get(arm, ()), self.open.get(arm, 0)) for arm in plan.releases])


def _summarise(plan: RolloutPlan, arm: str, outcomes: tuple[RunOutcome, ...], count: int) -> ArmResults:
    failed = sum(each.failed for each in outcomes)
    ratings = [each.rating for each in outcomes if each.rating is not None]
    prices = [each.usd for each in outcomes if each.usd is not None]
    return ArmResults(
        arm=arm,
        release=plan.releases[arm],
        weight=plan.weights[arm],
        open=count,
        runs=len(outcomes),
        failed=failed,
        failure_interval=wilson_interval(failed, len(outcomes)) if outcomes else None,
        usd=fmean(prices) if prices else None,
        seconds=fmean(each.seconds for each in outcomes) if outcomes else None,
        rating=fmean(ratings) if ratings else None,
        ratings=len(ratings),
    )


@attrs.frozen(kw_only=True)
class _KnownRun(Value):
    """The part of a run that was read."""

    arm: str
    """Arm of the run; empty if it takes no part."""

    version: int = 0
    """Version of the run that the outcome was read from."""

    rating: int | None = None
    """Rating at that time."""

    outcome: RunOutcome | None = None
    """Outcome of the run; None if it is open or was cancelled."""


class OutcomeReader:
    """Reads the outcomes of the runs of a roll-out. A journal is read once its run is over, and again if it changes."""

    def __init__(self, name: str, store: Store) -> None:
        """Name the roll-out and its store, without I/O."""
        self._name = name
        self._store = store
        self._known: dict[str, _KnownRun] = {}

    async def read(self, plan: RolloutPlan) -> RolloutOutcomes:
        """Return the outcomes of the runs of a plan: of each arm since it has had weight, the newest 2,000."""
        ended: dict[str, tuple[RunOutcome, ...]] = {}
        open_runs: dict[str, int] = {}
        known: dict[str, _KnownRun] = {}
        for arm, since in plan.since.items():
            runs = [await self._look_up(each) async for each in self._iter_runs(plan, arm, since)]
            known |= {each.id: found for each, found in runs}
            own = [(each, found) for each, found in runs if found.arm == arm]
            ended[arm] = tuple([found.outcome for _, found in own if found.outcome is not None])
            open_runs[arm] = sum(each.state not in FINAL_STATES for each, _ in own)
        self._known = known
        return RolloutOutcomes(ended=ended, open=open_runs)

    async def _iter_runs(self, plan: RolloutPlan, arm: str, since: float) -> AsyncIterator[RunSummary]:
        where = Filter(agent=plan.agent, release=plan.releases[arm])
        count = 0
        async for each in RunIterator(self._store, where, _PAGE):
            if each.created_at < since or count >= MAX_RUNS:
                return
            count += 1
            if each.parent is None:
                yield each

    async def _look_up(self, summary: RunSummary) -> tuple[RunSummary, _KnownRun]:
        known = self._known.get(summary.id)
        try:
            if known is None:
                header = await read_header(self._store, summary.id)
                known = _KnownRun(arm="" if header.forked_from else header.arms.get(self._name, ""))
            is_new = (known.version, known.rating) != (summary.version, summary.rating)
            if known.arm and summary.state in FINAL_STATES and is_new:
                known = await self._read_outcome(summary, known.arm)
        except RunNotFoundError:  # deleted meanwhile
            known = _KnownRun(arm="")
        return summary, known

    async def _read_outcome(self, summary: RunSummary, arm: str) -> _KnownRun:
        stored = await self._store.read(summary.id)
        run = begin_run(stored.header).fold(stored.events)
        measured = measure_run(stored.header, stored.events)
        outcome = RunOutcome(
            run_id=run.id,
            arm=arm,
            failed=run.stop_reason is not StopReason.COMPLETED,
            usd=None if run.usage.unpriced else run.usage.cost_usd,
            seconds=sum(each.value for each in measured if each.metric == RUN_DURATION.name),
            rating=summary.rating,
            created_at=stored.header.created_at,
        )
        is_cancelled = run.stop_reason is StopReason.CANCELLED
        return _KnownRun(
            arm=arm, version=summary.version, rating=summary.rating, outcome=None if is_cancelled else outcome
        )


async def read_results(control: RolloutControl) -> tuple[ArmResults, ...]:
    """Return the results of each arm of a roll-out; empty if it was never started.

    They are those since the arm has had weight; for an arm that has lost it, since it had got it.
    """
    log = await control.log()
    if not log:
        return ()
    plan = log[-1].plan
    since = {arm: at for change in log for arm, at in change.plan.since.items() if arm in plan.releases}
    outcomes = await OutcomeReader(control.name, control.store).read(attrs.evolve(plan, since=since))
    return outcomes.summarise(plan)
