"""One thread that does what many coroutines ask for, in groups.

A commit costs a wait for the disk, however much it holds. So one thread takes everything that is queued, does it in one
transaction, commits once and wakes each waiter. While it waits for the disk the next group gathers: the busier the
store, the larger the groups and the cheaper each job.

The thread knows nothing of SQL: it works on a `TransactionBackend`.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from contextlib import suppress
from copy import copy
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Generic, Protocol, Self, TypeVar

import attrs

from agentfsm._concurrency import ThreadWaiter, notify_all
from agentfsm.core.errors import AgentError, ClosedError, StoreError
from agentfsm.core.value import Value
from agentfsm.stores.subscriptions import Subscriptions, agent_topic, run_topic
from agentfsm.stores.threaded.lease_table import PROBE_INTERVAL_S

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator
    from contextlib import AbstractContextManager

    from agentfsm.ports.store import Durability
    from agentfsm.stores.threaded.lease_table import LeaseTable

T = TypeVar("T")
D = TypeVar("D", bound="TransactionBackend")

# Jobs in one transaction at most, so that the first of them does not wait for ever: 1,000 take about 25 ms.
MAX_GROUP_JOBS = 1_000
# Jobs that may wait. Appends do not block, so a disk that hangs has to be noticed here: some 100 MB of records.
MAX_QUEUED_JOBS = 100_000
# Seconds without a job after which the backend is maintained: a pause that a row of quick appends does not have.
MAINTENANCE_DELAY_S = 0.25
# Seconds after which it is tidied all the same, so that what has to be tidied stays small under unbroken load.
MAX_MAINTENANCE_DELAY_S = 5.0
# Seconds for which a lasting job is tried again while the store is locked: a person who left a transaction open in a
# shell has come back to it by then.
MAX_LOCKED_S = 600.0
# Seconds between two tries, in which other jobs may come.
RETRY_INTERVAL_S = 0.1
# Seconds without a job after which the thread ends, if nothing is held; starting another costs less than 1 ms.
IDLE_TIMEOUT_S = 5.0

_log = logging.getLogger("agentfsm.stores")


class TransactionBackend(Protocol):
    """What the thread works on. Only the thread calls it."""

    leases: LeaseTable
    """The leases that have to be renewed."""

    def transaction(
        self, *, write: bool, durability: Durability, runs: Collection[str]
    ) -> AbstractContextManager[None]:
        """Return a block that is committed as a whole, or not at all when it raises; it is about these runs."""
        ...

    def wait_to_retry(self, error: Exception) -> bool:
        """Wait a little where the error will pass; return whether the same jobs shall be done again.

        Whether a commit that broke off was made is then not known: the backend finds out job by job.
        """
        ...

    def is_lock_error(self, error: Exception) -> bool:
        """Whether nothing but a lock on the whole store is in the way, which may last and will end."""
        ...

    def is_job_error(self, error: Exception) -> bool:
        """Whether one job brought the error about, so that its neighbours may do without it."""
        ...

    def translate_error(self, error: Exception) -> AgentError:
        """Return what callers are told of an error that is none of ours: what, why, what next."""
        ...

    def renew_leases(self) -> None:
        """Renew the leases that are held by event loops that run, and let go of those that were dropped."""
        ...

    def maintain(self) -> None:
        """Do what is better done when nobody waits."""
        ...

    @property
    def poll_interval_s(self) -> float:
        """Seconds between two looks for changes by other processes while anybody subscribes; infinity for no looks."""
        ...

    def has_changed(self) -> bool:
        """Whether another process may have changed something since the last look."""
        ...

    def close(self) -> None:
        """Let go of everything; the next transaction opens it again."""
        ...


class StoreJob(Generic[T, D]):
    """A piece of work for the thread, and the way back to who waits for it.

    `work` raises an AgentError to refuse, before it has written anything. Any number of coroutines may wait, or none;
    a cancelled wait leaves the job alone.
    """

    __slots__ = (
        "_done",
        "_error",
        "_on_failure",
        "_value",
        "_waiters",
        "_work",
        "durability",
        "notify_agent",
        "retry_if_locked",
        "run_id",
        "writes",
    )

    def __init__(
        self,
        work: Callable[[D], T],
        *,
        run_id: str = "",
        writes: bool = True,
        on_failure: Callable[[D, AgentError], None] | None = None,
        durability: Durability = "full",
        notify_agent: str | None = None,
        retry_if_locked: bool = False,
    ) -> None:
        """Make a job.

        Args:
            work: The work, as a function of the backend.
            run_id: The run that it is about, if it is one.
            writes: Whether it needs a transaction that may write.
            on_failure: Called in the thread if the job failed from outside; not if it was refused.
            durability: What it survives once it is done.
            notify_agent: The name of the agent whose workers may take the run after it; empty for an agent whose name
                is not known, None where no worker is concerned.
            retry_if_locked: Whether it is tried again for `MAX_LOCKED_S` while the store is locked, since it says what
                has happened; other jobs are refused then.
        """
        self.run_id = run_id
        self.writes = writes
        self.durability = durability
        self.notify_agent = notify_agent
        self.retry_if_locked = retry_if_locked
        self._work: Callable[[D], T] | None = work
        self._on_failure = on_failure
        self._waiters: list[ThreadWaiter] = []
        self._done = False
        self._value: T = None  # type: ignore[assignment]  # until the work has returned
        self._error: AgentError | None = None

    @classmethod
    def done(cls, value: T) -> Self:
        """Return a job that is done already."""
        job = cls(lambda _desk: value)
        job._value = value
        job.finish()
        return job

    @property
    def is_done(self) -> bool:
        """Whether its outcome is known."""
        return self._done

    async def wait(self) -> T:
        """Return what the work returned once that is committed, or raise its error."""
        if not self._done:
            bell = ThreadWaiter()
            self._waiters.append(bell)
            if not self._done:  # ended in between, it may not have seen this bell
                await bell.event.wait()
        if self._error is not None:
            raise copy(self._error) from self._error.__cause__  # raised itself, it would hold the waiter's frames
        return self._value

    def attempt(self, backend: D) -> None:
        """Do the work inside a transaction; it is asked again when a neighbour spoilt that."""
        assert self._work is not None  # noqa: S101  only a job that is done has none
        self._error = None
        try:
            self._value = self._work(backend)
        except AgentError as error:
            self._error = error.with_traceback(None)
        except Exception:
            raise
        except BaseException as error:  # the thread is not the job's to end
            raise RuntimeError(f"a job tried to end the thread: {error!r}") from error

    def record_failure(self, backend: D, error: AgentError) -> None:
        """Give the job an error that is not its own word."""
        self._value = None  # type: ignore[assignment]  # it was rolled back; a lease ends with it
        self._error = error
        if self._on_failure is not None:
            self._on_failure(backend, error)

    def abort(self, error: AgentError) -> None:
        """Give the job an error, unless its outcome is known; nobody but who waits is told."""
        if not self._done:
            self._error = error

    def finish(self) -> list[ThreadWaiter]:
        """Let its outcome be known; return the bells of those who wait for it."""
        self._work = self._on_failure = None  # what they hold need not live as long as the outcome
        self._done = True
        return self._waiters


def _find_changed_topics(jobs: Iterable[StoreJob[Any, D]]) -> Iterator[str]:
    """Yield the topics under which these jobs may have changed something."""
    for job in jobs:
        if job.run_id:
            yield run_topic(job.run_id)
        if job.notify_agent is not None:
            yield agent_topic(job.notify_agent)


def finish_jobs(jobs: Iterable[StoreJob[Any, D]]) -> None:
    """End jobs, and tell everybody who waits for one of them."""
    notify_all([bell for job in jobs for bell in job.finish()])


@attrs.frozen(kw_only=True)
class StoreStatistics(Value):
    """What a store's thread has done so far in this process, and what it is at."""

    commits: int
    """Transactions of jobs that were committed."""

    jobs: int
    """Writes done, refused and failed ones included."""

    largest_group: int
    """Writes in one transaction, at most."""

    leases: int
    """Held now."""

    queued: int
    """Jobs that wait now."""


class GroupCommitWriter(Generic[D]):
    """A daemon thread that serves one backend; it starts with the first job and ends when nothing is left to do."""

    def __init__(self, backend: D) -> None:
        self.backend = backend
        self.subscriptions = Subscriptions()
        # Sent after each commit.
        self._queue: SimpleQueue[StoreJob[Any, D] | None] = SimpleQueue()
        self._lock = threading.Lock()
        # Guards the start and the end of the thread, so that no job is queued for one that has just gone.
        self._thread: threading.Thread | None = None
        self._closing = False
        self._close_job = StoreJob[None, D](lambda _desk: None)
        self._commits = self._jobs = self._largest_group = 0
        self._worked_at = self._renewed_at = self._probed_at = self._polled_at = self._maintained_at = 0.0
        # Monotonic seconds: the last job, renewal, question to the event loops, look for changes, tidying.
        self._needs_maintenance = False
        self._deferred: list[StoreJob[Any, D]] = []
        # Lasting jobs that the store was locked for, oldest first.
        self._locked_since: float | None = None
        # Monotonic seconds: when the first of them was put off.
        self._in_progress: list[StoreJob[Any, D]] = []
        # Taken from the queue, and maybe not settled yet.
        self._fatal_error: StoreError | None = None
        # Why the thread died, where it did.

    def submit(self, job: StoreJob[T, D]) -> None:
        """Queue a job; never blocks.

        Raises:
            ClosedError: after `close`.
            StoreError: when the queue is full, the thread has died, or none can be started.
        """
        if self._queue.qsize() >= MAX_QUEUED_JOBS:
            raise StoreError(
                f"{MAX_QUEUED_JOBS:,} jobs wait for the store already, so this one was refused: see why it hangs"
            )
        with self._lock:
            if self._closing:
                raise ClosedError(
                    "the store is closed: it was closed with an agent that was given it (`async with agent`), or by "
                    "`aclose`; make a new one, or close agents that share a store only at the end"
                )
            if self._fatal_error is not None:
                raise copy(self._fatal_error)
            if self._thread is None:
                self._start()  # first: a job that was refused shall not be done later
            self._queue.put(job)

    async def close(self) -> None:
        """Do what is queued, let go of the backend and end the thread. A cancelled close goes on by itself."""
        with self._lock:
            first, self._closing = not self._closing, True
            thread = self._thread
            if thread is None:
                finish_jobs([self._close_job])
            elif first:
                self._queue.put(None)
        await self._close_job.wait()
        if thread is not None:
            thread.join()  # it has nothing left to do but to return

    def statistics(self) -> StoreStatistics:
        """Return what was done so far."""
        return StoreStatistics(
            commits=self._commits,
            jobs=self._jobs,
            largest_group=self._largest_group,
            leases=len(self.backend.leases),
            queued=self._queue.qsize() + len(self._deferred),
        )

    def _start(self) -> None:
        self._worked_at = self._maintained_at = time.monotonic()
        thread = threading.Thread(target=self._run, name="agentfsm-writer", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            raise StoreError(f"no thread can be started: {error}; see to the limits of this process") from error
        self._thread = thread

    def _run(self) -> None:
        try:
            while not self._stop_if_idle():
                self._run_once()
        except BaseException as error:  # noqa: BLE001  whatever it is, nobody may wait for a thread that is gone
            self._die(error)

    def _die(self, error: BaseException) -> None:
        """Fail all that wait, refuse what comes, and let go of the backend, which may keep others out."""
        _log.critical("the store's thread died", exc_info=error)
        told = StoreError(
            f"the store's thread died by a fault of its own ({error!r}): please report it; then make a new store and "
            "resume the runs"
        )
        with self._lock:
            self._fatal_error, self._thread = told, None
            self._in_progress += self._deferred
            while not self._queue.empty():
                self._in_progress += filter(None, [self._queue.get()])
            for job in self._in_progress:
                job.abort(told)
            finish_jobs([*self._in_progress, *([self._close_job] if self._closing else [])])
            self._in_progress = []
        self._run_quietly(self.backend.close)

    def _run_once(self) -> None:
        """Do what is queued, or what is due."""
        group = self._next_group()
        if not self.backend.leases:
            self._renewed_at = time.monotonic()
        if group:
            self._serve(group)
            self._in_progress = []
            self._worked_at = time.monotonic()
        self._run_upkeep()

    def _next_group(self) -> list[StoreJob[Any, D]]:
        """Return what is queued, oldest first; wait for it, but no longer than until some upkeep is due."""
        jobs: list[StoreJob[Any, D] | None] = []
        with suppress(Empty):
            jobs.append(self._queue.get(timeout=RETRY_INTERVAL_S if self._deferred else self._next_timeout_s()))
        while len(jobs) < MAX_GROUP_JOBS and not self._queue.empty():
            jobs.append(self._queue.get())
        self._in_progress = [*self._deferred, *filter(None, jobs)]
        self._deferred = []
        return self._in_progress

    def _next_timeout_s(self) -> float:
        holdings = self.backend.leases
        due = self._worked_at + IDLE_TIMEOUT_S
        if holdings:
            due = min(self._renewed_at + holdings.renew_interval_s, self._probed_at + PROBE_INTERVAL_S)
        if self._needs_maintenance:
            due = min(due, self._worked_at + MAINTENANCE_DELAY_S)
        if self.subscriptions.topics:
            due = min(due, self._polled_at + self.backend.poll_interval_s)
        return max(0.0, due - time.monotonic())

    def _serve(self, group: list[StoreJob[Any, D]]) -> None:
        writes = [job for job in group if job.writes]
        reads = [job for job in group if not job.writes]
        if reads and self._locked_since is not None:  # a lock keeps out who writes
            self._transact(reads, write=False)
            reads = []
        if writes:
            self._needs_maintenance = True
            self._jobs += len(writes)
            self._transact(writes, write=True)
        if reads:
            self._transact(reads, write=False)

    def _transact(self, jobs: list[StoreJob[Any, D]], *, write: bool) -> None:
        """Do the jobs in one transaction; where one of them spoils it, each in one of its own."""
        while True:
            try:
                durability: Durability = "full" if any(job.durability == "full" for job in jobs) else "normal"
                runs = {job.run_id for job in jobs if job.run_id}
                with self.backend.transaction(write=write, durability=durability, runs=runs):
                    for job in jobs:
                        job.attempt(self.backend)
            except Exception as error:  # noqa: BLE001  whatever it is, everybody who waits has to hear of it
                if self.backend.wait_to_retry(error):
                    continue
                self._fail(jobs, error, write=write)
                return
            break
        if write:
            self._locked_since = None
            self._commits += 1
            self._largest_group = max(self._largest_group, len(jobs))
        finish_jobs(jobs)
        if write and self.subscriptions.topics:
            self.subscriptions.notify(_find_changed_topics(jobs))

    def _fail(self, jobs: list[StoreJob[Any, D]], error: Exception, *, write: bool) -> None:
        if len(jobs) > 1 and self.backend.is_job_error(error):
            for job in jobs:
                self._run_upkeep()  # a job may wait long for a lock of its own, and leases are held meanwhile
                self._transact([job], write=write)
            return
        lasting = [job for job in jobs if job.retry_if_locked]
        if lasting and self.backend.is_lock_error(error) and self._may_defer():
            _log.warning(
                "%d writes of runs wait until the store can be written: %s", len(lasting), self._as_agent_error(error)
            )
            self._deferred += lasting
            self._jobs -= len(lasting)
            jobs = [job for job in jobs if not job.retry_if_locked]
        for job in jobs:
            job.record_failure(self.backend, self._as_agent_error(error))
        finish_jobs(jobs)

    def _may_defer(self) -> bool:
        now = time.monotonic()
        self._locked_since = now if self._locked_since is None else self._locked_since
        return now < self._locked_since + MAX_LOCKED_S and not self._closing

    def _run_upkeep(self) -> None:
        now = time.monotonic()
        holdings = self.backend.leases
        if holdings and now >= self._probed_at + PROBE_INTERVAL_S:
            self._probed_at = now
            if holdings.probe(now):
                self._renewed_at = -math.inf
        if holdings and now >= self._renewed_at + holdings.renew_interval_s:
            self._renewed_at = now
            self._run_quietly(self.backend.renew_leases)
        if self.subscriptions.topics and now >= self._polled_at + self.backend.poll_interval_s:
            self._polled_at = now
            self._run_quietly(self._poll_changes)
        if self._needs_maintenance and (
            now >= self._worked_at + MAINTENANCE_DELAY_S or now >= self._maintained_at + MAX_MAINTENANCE_DELAY_S
        ):
            self._needs_maintenance, self._maintained_at = False, now
            self._run_quietly(self.backend.maintain)

    def _poll_changes(self) -> None:
        if self.backend.has_changed():
            self.subscriptions.notify(list(self.subscriptions.topics))

    def _stop_if_idle(self) -> bool:
        """Whether nothing is left to do; then the backend is let go of, and the next job starts a new thread."""
        watches = bool(self.subscriptions.topics) and self.backend.poll_interval_s < math.inf
        idle = not self.backend.leases and not watches and time.monotonic() >= self._worked_at + IDLE_TIMEOUT_S
        if not (self._closing or idle) or self._deferred or not self._queue.empty():
            return False
        self._run_quietly(self.backend.close)  # not under the lock: it may take long, and `submit` must not wait
        with self._lock:
            if not self._queue.empty():
                return False
            self._thread = None
            if self._closing:
                finish_jobs([self._close_job])
            return True

    def _run_quietly(self, act: Callable[[], None]) -> None:
        """Do upkeep: nobody waits for it, so its failure is logged, and the thread lives on."""
        try:
            act()
        except Exception as error:  # noqa: BLE001  as above
            _log.warning("the store's upkeep (%s) failed: %s", act.__name__, self._as_agent_error(error))

    def _as_agent_error(self, error: Exception) -> AgentError:
        """Return the error that callers are told."""
        if isinstance(error, AgentError):
            return error
        told = self.backend.translate_error(error)
        told.__cause__ = error
        return told
