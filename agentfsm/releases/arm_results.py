"""Results of the arms of a roll-out, from the journals of their runs."""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncIterator
from statistics import fmean
from typing import Final

import attrs

from agentfsm.core.errors import CorruptError, RunNotFoundError, TooNewError
from agentfsm.core.limits import StopReason
from agentfsm.core.machine import State
from agentfsm.core.run import begin_run
from agentfsm.core.value import Value
from agentfsm.journal.load import read_header
from agentfsm.journal.run_list import RunIterator
from agentfsm.ports.store import Filter, RunSummary, Store
from agentfsm.prompts import wilson_interval
from agentfsm.releases.rollback_rules import RunOutcome
from agentfsm.releases.rollout_log import RolloutControl, RolloutPlan
from agentfsm.stores.rules import FINAL_STATES
from agentfsm.telemetry.measurements import RUN_DURATION, measure_run

_log = logging.getLogger("agentfsm.releases")

# Newest runs of a release that are looked at: they decide any difference that matters.
MAX_RUNS: Final = 2_000
# Runs per page of a list.
_PAGE: Final = 500
# Seconds without an event after which a run that no worker has is stalled, and one that is tried again is bad.
# A worker polls every second or so, and the first tries are a few seconds apart.
_STALLED_S: Final = 60.0


@attrs.frozen(kw_only=True)
class ArmResults(Value):
    """Results of an arm since the start of the roll-out, whatever its weights were, over its newest 2,000 runs."""

    arm: str
    """Name of the arm."""

    release: str
    """Version of its release."""

    weight: float
    """Percent of the users."""

    open: int
    """Runs of its release that are not over, whenever they began, with forks and the holdout. The release is needed
    until there are none.
    """

    stalled: int
    """Those of them without an event for 60 s that wait for no input and that no worker has: there are too few workers
    with the release, or each execution raises an error, and the log of the worker has it.
    """

    runs: int
    """Runs that are over, without cancelled ones."""

    failed: int
    """Those of them that did not complete."""

    failure_interval: tuple[float, float] | None
    """Interval that contains the real share of failures with a confidence of 95 %; None without runs."""

    usd: float | None
    """Mean cost in US dollars of the runs with a known price; None if there are none."""

    unpriced: int
    """Number of ended runs without a known price, which `usd` leaves out."""

    seconds: float | None
    """Mean time of a run in seconds, without waits for people; None without runs."""

    rating: float | None
    """Mean rating, from 1 to 5; None without ratings."""

    ratings: int
    """Number of rated runs."""


@attrs.frozen(kw_only=True)
class _KnownRun(Value):
    """The part of a run that was read."""

    arm: str
    """Arm of the run; empty if it takes no part."""

    version: int = -1
    """Version of the run that the outcome was read from; -1 before. A run whose first event is not stored yet has 0."""

    rating: int | None = None
    """Rating at that time."""

    outcome: RunOutcome | None = None
    """Outcome of the run; None if it was cancelled."""


class OutcomeReader:
    """Reads the outcomes of the runs of a roll-out. A journal is read once its run is over, and again if it changes."""

    def __init__(self, name: str, store: Store) -> None:
        """Name the roll-out and its store, without I/O."""
        self._name = name
        self._store = store
        self._known: dict[str, _KnownRun] = {}

    async def read(self, plan: RolloutPlan, *, failing_at: float | None = None) -> dict[str, tuple[RunOutcome, ...]]:
        """Return the outcomes of the runs of a plan that are over, by arm, newest first, without cancelled ones.

        They are those of each arm since the time in `plan.since`, of its newest 2,000 runs.

        Args:
            plan: The plan.
            failing_at: The time, to include open runs whose executions have raised errors for 60 s; None for none.
        """
        ended: dict[str, tuple[RunOutcome, ...]] = {}
        known: dict[str, _KnownRun] = {}
        for arm, since in plan.since.items():
            runs = {
                each.id: await self._look_up(each)
                async for each in self._iter_runs(plan, arm, since)
                if each.state in FINAL_STATES or (failing_at is not None and _is_failing(each, failing_at))
            }
            known |= runs
            ended[arm] = tuple([each.outcome for each in runs.values() if each.arm == arm and each.outcome is not None])
        self._known = known
        return ended

    async def _iter_runs(self, plan: RolloutPlan, arm: str, since: float) -> AsyncIterator[RunSummary]:
        where = Filter(agent=plan.agent, release=plan.releases[arm], purpose="")
        count = 0
        async for each in RunIterator(self._store, where, _PAGE):
            if each.created_at < since or count >= MAX_RUNS:
                return
            count += 1
            if each.parent is None:
                yield each

    async def _look_up(self, summary: RunSummary) -> _KnownRun:
        known = self._known.get(summary.id)
        try:
            if known is None:
                header = await read_header(self._store, summary.id)
                known = _KnownRun(arm="" if header.forked_from else header.arms.get(self._name, ""))
            is_new = (known.version, known.rating) != (summary.version, summary.rating)
            if known.arm and is_new:
                known = await self._read_outcome(summary, known.arm)
        except RunNotFoundError:  # deleted meanwhile
            known = _KnownRun(arm="")
        except (CorruptError, TooNewError) as error:  # the other runs of the arm count
            _log.warning("roll-out %r: run %s cannot be read, and counts for no arm: %s", self._name, summary.id, error)
            known = _KnownRun(arm="")
        return known

    async def _read_outcome(self, summary: RunSummary, arm: str) -> _KnownRun:
        stored = await self._store.read(summary.id)
        run = begin_run(stored.header).fold(stored.events)
        measured = measure_run(stored.header, stored.events)
        seconds = sum(each.value for each in measured if each.metric == RUN_DURATION.name)
        outcome = RunOutcome(
            run_id=run.id,
            arm=arm,
            failed=run.stop_reason is not StopReason.COMPLETED,
            usd=None if run.usage.unpriced else run.usage.cost_usd,
            seconds=seconds if run.is_over else math.inf,
            rating=summary.rating,
            created_at=stored.header.created_at,
        )
        is_cancelled = run.stop_reason is StopReason.CANCELLED
        return _KnownRun(
            arm=arm, version=summary.version, rating=summary.rating, outcome=None if is_cancelled else outcome
        )


def _is_failing(run: RunSummary, now: float) -> bool:
    """Return whether a run is open and only waits to be tried again, which a worker delays after an error."""
    is_delayed = not run.waiting and run.ready_at is not None and run.ready_at > now
    return is_delayed and run.updated_at < now - _STALLED_S


async def _list_open(store: Store, agent: str, release: str) -> list[RunSummary]:
    """Return the open runs of a release that no other run called. One that changes its state now may be missing."""
    states = [state for state in State if state not in FINAL_STATES]
    filters = [Filter(agent=agent, release=release, state=state, purpose="") for state in states]
    found = {each.id: each for where in filters async for each in RunIterator(store, where, _PAGE)}
    return [each for each in found.values() if each.parent is None]


async def read_results(control: RolloutControl) -> tuple[ArmResults, ...]:
    """Return the results of each arm of a roll-out since its start; empty if it was never started."""
    log = await control.log()
    if not log:
        return ()
    plan, store = log[-1].plan, control.store
    began = next(each.at for each in log if each.plan.salt == plan.salt)  # each start has a salt of its own
    since = dict.fromkeys(plan.releases, began)
    outcomes = await OutcomeReader(control.name, store).read(attrs.evolve(plan, since=since))
    silent_since = await store.now() - _STALLED_S
    results = []
    for arm, release in plan.releases.items():
        open_runs = await _list_open(store, plan.agent, release) if release else []
        results.append(_summarise(plan, arm, outcomes[arm], open_runs, silent_since))
    return tuple(results)


def _summarise(
    plan: RolloutPlan, arm: str, outcomes: tuple[RunOutcome, ...], open_runs: list[RunSummary], silent_since: float
) -> ArmResults:
    failed = sum(each.failed for each in outcomes)
    ratings = [each.rating for each in outcomes if each.rating is not None]
    prices = [each.usd for each in outcomes if each.usd is not None]
    idle = [each for each in open_runs if not (each.waiting or each.driven)]
    return ArmResults(
        arm=arm,
        release=plan.releases[arm],
        weight=plan.weights[arm],
        open=len(open_runs),
        stalled=sum(each.updated_at < silent_since for each in idle),
        runs=len(outcomes),
        failed=failed,
        failure_interval=wilson_interval(failed, len(outcomes)) if outcomes else None,
        usd=fmean(prices) if prices else None,
        unpriced=len(outcomes) - len(prices),
        seconds=fmean(each.seconds for each in outcomes) if outcomes else None,
        rating=fmean(ratings) if ratings else None,
        ratings=len(ratings),
    )
