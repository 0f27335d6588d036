"""Supervision of the queues of an agent: runs that have fallen out of their queue are put back.

One executor of an agent supervises at a time. It resumes the workflows of executors that are dead, and queues runs that
are ready and not in their queue: their wait has ended, they failed and may be tried again, their worker died, or their
submitter died before it queued them. All this is read from the store, so no decision is lost, and it does not matter
who made it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import anyio
import attrs

from agentfsm._lib.concurrency import make_waker
from agentfsm.agents.extras import create_due_runs
from agentfsm.core.errors import StoreError
from agentfsm.ports.store import Filter, RunSummary

if TYPE_CHECKING:
    from dbos import DBOSClient

    from agentfsm.agents.agent import Agent
    from agentfsm.core.run import Run
    from agentfsm.engines.executor_locks import ExecutorLocks

_log = logging.getLogger("agentfsm.engines")

# Seconds between two looks at the other executors.
WATCH_S: Final = 0.5
# Seconds after a reconnection during which an executor does not judge others, which may be reconnecting as well.
SETTLE_S: Final = 2.0
# Seconds between two looks at the workflows in execution, even if no executor has vanished.
RECHECK_S: Final = 10.0
# Seconds between two looks for runs to queue, at least; and the least ratio of the pauses to the looks.
SWEEP_S: Final = 0.25
REST_RATIO: Final = 10
# Seconds within which the submitter of a run queues it.
SUBMIT_S: Final = 2.0
# Seconds after which a run is queued again that a workflow has left as it was.
RETRY_S: Final = 60
# Seconds between two removals of ended workflows, and workflows of one removal.
CLEAN_S: Final = 10.0
CLEAN_BATCH: Final = 1_000
# Runs that are looked up at once.
PAGE: Final = 500

IN_QUEUE: Final = ("ENQUEUED", "PENDING", "DELAYED")
ENDED: Final = ("SUCCESS", "ERROR", "CANCELLED", "MAX_RECOVERY_ATTEMPTS_EXCEEDED")


def build_status(run: Run[Any] | None) -> dict[str, Any]:
    """Return the outcome of a workflow: the state of the run, the reason of its end, and its waits."""
    if run is None:
        return {"failed": "see the log of the executor; the run is tried again"}
    waits = [{"kind": str(item.kind), "call": item.call_id, "tool": item.tool} for item in run.pending]
    status = {"state": str(run.state), "stop_reason": run.stop_reason and str(run.stop_reason), "waiting": waits}
    return {name: value for name, value in status.items() if value}


@attrs.define(eq=False, repr=False, kw_only=True)
class QueueSupervisor:
    """Holds the locks of one executor, and supervises the queue while it has the lock for that."""

    agent: Agent[Any]
    client: DBOSClient
    enqueue: Callable[..., Awaitable[None]]
    """`DBOSEngine._enqueue`."""

    locks: ExecutorLocks
    releases: frozenset[str]
    """Releases whose runs this process executes, as well as those without a release."""

    name_queue: Callable[[str], str]
    """Returns the name of the queue for the runs of a release; of the agent's for an empty name."""

    report_release: Callable[[str], None]
    """`Worker.report_release`, which logs that the runs of a release are left to other workers, once."""

    poll_s: float
    keep_s: float
    count_busy: Callable[[], int]
    """Returns the number of runs that this process executes."""

    _queues: set[str] = attrs.field(init=False)
    """Queues that are supervised: those of this process, and of the releases of which ready runs were seen."""

    _locking: anyio.Lock = attrs.field(factory=anyio.Lock, init=False)
    """Held while the locks are used, since their methods are called one at a time."""

    _changed: anyio.Event = attrs.field(factory=anyio.Event, init=False)
    """Set when a run may have become ready."""

    def __attrs_post_init__(self) -> None:
        self._queues = {self.name_queue(release) for release in ("", *self.releases)}

    def wake(self) -> None:
        """Look for ready runs now."""
        self._changed.set()

    async def run(self, *, until_idle: bool) -> None:
        """Supervise until cancelled, or with `until_idle` until nothing is left to do."""
        unsubscribe = self.agent.store.subscribe(f"agent:{self.agent.name}", make_waker(self.wake))
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._watch_executors)
                await self._keep_queue(until_idle=until_idle)
                tasks.cancel_scope.cancel()
        finally:
            unsubscribe()

    # Dead executors.

    async def _watch_executors(self) -> None:
        alive: frozenset[int] = frozenset()
        settled_at, recheck_at, clean_at = 0.0, 0.0, 0.0
        while True:
            try:
                was_connected, was_supervisor = self.locks.is_connected, self.locks.is_supervisor
                before, alive = alive, await self._renew_locks()
                now = time.monotonic()
                if not was_connected:
                    settled_at = now + SETTLE_S
                if not was_supervisor:
                    recheck_at = 0.0
                if self.locks.is_supervisor and now >= settled_at and (before - alive or now >= recheck_at):
                    recheck_at = 0.0  # again, if the next line fails
                    await self._resume_orphans()
                    recheck_at = now + RECHECK_S
                if self.locks.is_supervisor and now >= clean_at:
                    clean_at = now + (0 if await self._remove_ended() else CLEAN_S)
            except Exception as error:  # noqa: BLE001  of the server or its driver: it may recover
                reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
                _log.warning("executors are not watched, and are tried again: %s", reason)
            await anyio.sleep(WATCH_S)

    async def _renew_locks(self) -> frozenset[int]:
        async with self._locking:
            return await anyio.to_thread.run_sync(self.locks.renew)

    async def _find_served(self, queues: Collection[str]) -> frozenset[str]:
        """Return those of some queues that an executor works on."""
        if not queues:
            return frozenset()
        async with self._locking:
            return await anyio.to_thread.run_sync(self.locks.find_served, queues)

    async def _resume_orphans(self) -> None:
        """Put the workflows of dead executors back into the queue.

        An executor has its lock before its first workflow. So one that is found in a workflow, and afterwards has no
        lock, has died or is cut off. If it is alive after all, its runs are started twice, which their leases permit.
        """
        pending = await self.client.list_workflows_async(
            status="PENDING", queue_name=[*self._queues], load_input=False, load_output=False
        )
        alive = await self._renew_locks()
        orphans = [each for each in pending if self.locks.hash_executor(each.executor_id) not in alive]
        if orphans:
            gone = sorted({each.executor_id or "" for each in orphans})
            _log.warning("%d runs of executors that are gone are resumed: %s", len(orphans), ", ".join(gone))
        for queue in {each.queue_name for each in orphans}:
            ids = [each.workflow_id for each in orphans if each.queue_name == queue]
            await self.client.resume_workflows_async(ids, queue_name=queue)

    async def _remove_ended(self) -> bool:
        """Remove a batch of workflows that ended long ago. Return whether there may be more."""
        before = datetime.fromtimestamp(time.time() - self.keep_s, UTC).isoformat()
        old = await self.client.list_workflows_async(
            status=list(ENDED),
            queue_name=[*self._queues],
            completed_before=before,
            limit=CLEAN_BATCH,
            load_input=False,
            load_output=False,
        )
        if old:
            await self.client.delete_workflows_async([each.workflow_id for each in old])
        return len(old) == CLEAN_BATCH

    # Runs that are ready and not in the queue.

    async def _keep_queue(self, *, until_idle: bool) -> None:
        full_at, due_runs = 0.0, create_due_runs(self.agent)
        while True:
            self._changed = anyio.Event()
            if self.locks.is_supervisor or until_idle:
                try:
                    await due_runs.create()
                    await self.agent.store.claim(self.agent.name, limit=0)  # frees the runs of dead owners
                    await self._queue_ready(waiting=True)
                    if (begun := time.monotonic()) >= full_at:
                        found = await self._queue_ready(waiting=None)
                        full_at = time.monotonic() + REST_RATIO * (time.monotonic() - begun)
                        if until_idle and not found and await self._is_idle():
                            return
                except StoreError as error:  # it may recover; the journals are safe meanwhile
                    _log.warning("the store failed to return runs, and is polled again: %s", error)
            await anyio.sleep(SWEEP_S)
            with anyio.move_on_after(self.poll_s):
                await self._changed.wait()

    async def _is_idle(self) -> bool:
        busy = await self.client.list_workflows_async(
            status=["ENQUEUED", "PENDING"],
            queue_name=[self.name_queue(release) for release in ("", *self.releases)],
            limit=1,
            load_input=False,
            load_output=False,
        )
        return not busy and not self.count_busy()

    async def _queue_ready(self, *, waiting: bool | None) -> int:
        """Queue the runs that are ready and not in their queue. Return the number of those that this process may take.

        A release whose queue no executor works on is logged, once: its runs wait for a worker that has it.
        """
        now, count = await self.agent.store.now(), 0
        page: list[RunSummary] = []
        others: dict[str, str] = {}
        async for summary in self.agent.runs.iterate(
            Filter(agent=self.agent.name, waiting=waiting, ready_by=now, purpose="")
        ):
            page.append(summary)
            if summary.release and summary.release not in self.releases:
                others[self.name_queue(summary.release)] = summary.release
            elif not summary.is_too_new:
                count += 1
            if len(page) == PAGE:
                await self._queue_missing(page, now)
                page.clear()
        await self._queue_missing(page, now)
        self._queues.update(others)
        for queue in others.keys() - await self._find_served(others):
            self.report_release(others[queue])
        return count

    async def _queue_missing(self, page: Sequence[RunSummary], now: float) -> None:
        """Queue those of some ready runs that are not in the queue.

        The id of a workflow has the version of the run and the time since which it is ready, so that one change of the
        run queues it once, no matter how many supervisors see it. A run that is in another queue than its own, as after
        a change of `queue`, is moved to its own unless an executor works on that one.
        """
        if not page:
            return
        ids = {each.id: _workflow_ids(each, now) for each in page}
        found = {
            each.workflow_id: each
            for each in await self.client.list_workflows_async(
                workflow_ids=[name for names in ids.values() for name in names], load_input=False, load_output=False
            )
        }
        elsewhere: dict[tuple[str, str], list[str]] = {}
        for each in page:
            first, again, later = ids[each.id]
            known = [found[name] for name in ids[each.id] if name in found]
            if not known and now - each.created_at < SUBMIT_S:
                continue
            if waiting := [workflow for workflow in known if workflow.status in IN_QUEUE]:
                queue = self.name_queue(each.release)
                for workflow in waiting:
                    if workflow.queue_name != queue and workflow.status != "DELAYED":  # that one is moved at its time
                        elsewhere.setdefault((workflow.queue_name or "", queue), []).append(workflow.workflow_id)
                continue
            if later in found:
                continue
            submitted = found.get(first)
            await self.enqueue(
                later if again in found else again,
                each.id,
                each.tenant,
                release=each.release,
                priority=submitted.priority if submitted else None,
            )
        served = await self._find_served({there for there, _ in elsewhere})
        for (there, queue), names in elsewhere.items():
            if there not in served:
                _log.warning("%d runs in queue %r, which no worker works on, are moved to %r", len(names), there, queue)
                await self.client.resume_workflows_async(names, queue_name=queue)


def _workflow_ids(run: RunSummary, now: float) -> tuple[str, str, str]:
    """Return the ids of the workflow of the submission, of the one for a ready run, and of a repetition of that."""
    again = f"{run.id}#{run.version}@{round((run.ready_at or 0) * 1000)}"
    return run.id, again, f"{again}+{int(now // RETRY_S)}"
