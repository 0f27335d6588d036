"""Find the runs that are ready and that no worker takes, from the store alone.

A store knows the runs that workers execute, and nothing of workers that execute none. So a run counts as stranded if it
has been ready for longer than a worker needs to find it, and no worker executes a run which shows that it could take
this one, too: one of the same agent, release and format. An idle worker that could take it would have taken it. A run
that rests because workers fail to execute it, or refuse it, is stranded, too.
"""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

import attrs

from agentfsm.core.machine import State
from agentfsm.core.value import Value
from agentfsm.engine.run_list import RunIterator
from agentfsm.ports.store import Filter, RunSummary, Store

# Seconds that a run is ready until it counts as stranded: 60 polls of a worker of the store, several leases.
STRANDED_S: Final = 60.0
# Runs of a page, since most of them are left out.
_PAGE: Final = 1_000

# Seconds of the longest rest of a run between two attempts to execute it; more than a worker chooses.
_LONGEST_REST_S: Final = 3_600.0

StrandedReason: TypeAlias = Literal["format", "release", "worker_died", "refused", "no_worker"]


@attrs.frozen(kw_only=True)
class StrandedRun(Value):
    """A run that is ready, and that no worker takes."""

    run: RunSummary
    """The run."""

    reason: StrandedReason
    """The reason: "format" (only a newer agentfsm reads its records), "release" (it belongs to a release of a
    roll-out), "worker_died" (its worker has died, and no other has looked for runs of the agent since), "refused" (the
    workers that took it refused or failed to execute it, and it rests before the next attempt) or "no_worker" (no
    worker executes a run of the agent).
    """

    since: float
    """Time since which the run is ready, seconds since 1970 by the store's clock; for "worker_died" and "refused", that
    of its newest event.
    """

    def __str__(self) -> str:
        run = self.run
        match self.reason:
            case "format":
                return (
                    f"its records have format {run.format}: start workers of the newer agentfsm that has written them"
                )
            case "release":
                return f"no worker has release {run.release!r} of agent {run.agent!r}: start one, or cancel the run"
            case "worker_died":
                return f"its worker has died, and no other looks for runs of agent {run.agent!r}: start one"
            case "refused":
                return (
                    f"workers of agent {run.agent!r} refuse it or fail to execute it, as their log says, and it rests "
                    "before the next attempt: start one whose program can continue it, or resume it by hand"
                )
            case "no_worker":
                return f"no worker executes runs of agent {run.agent!r}: start one"


async def find_stranded(
    store: Store, where: Filter, *, after_s: float = STRANDED_S, examined: int | None = None
) -> list[StrandedRun]:
    """Return the runs that are ready and that no worker takes, newest first.

    Args:
        store: The store.
        where: Filter of the runs; its `active_at` is not used.
        after_s: Seconds that a run must have been ready.
        examined: Maximum number of ready runs that are looked at, the newest first; None for all.
    """
    now = await store.now()
    by = now - after_s
    owned = RunIterator(store, Filter(agent=where.agent, active_at=0.0), _PAGE)
    executed = {(each.agent, each.release, each.format) async for each in owned if each.driven and each.parent is None}
    found: list[StrandedRun] = []
    count = 0
    async for run in RunIterator(store, attrs.evolve(where, active_at=now + _LONGEST_REST_S), _PAGE):
        if count == examined:
            break
        count += 1
        if run.driven or run.parent is not None or run.state in {State.DONE, State.ERROR}:
            continue
        since = run.ready_at
        has_died = since is None and run.worker is not None and not run.waiting
        is_resting = since is not None and since > now and not run.waiting
        if has_died or is_resting:
            since = run.updated_at
        if since is None or since > by:
            continue
        if not is_resting and any(
            agent == run.agent and run.release in {"", release} and newest_format >= run.format
            for agent, release, newest_format in executed
        ):
            continue
        reason: StrandedReason = "worker_died" if has_died else "refused" if is_resting else "no_worker"
        if run.is_too_new:
            reason = "format"
        elif run.release:
            reason = "release"
        found.append(StrandedRun(run=run, reason=reason, since=since))
    return found
