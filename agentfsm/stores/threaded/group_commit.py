"""Group commit: one thread that executes the jobs of many coroutines in shared transactions.

A commit waits for the disk, whatever its size. So one thread executes all queued jobs in one transaction, commits once
and wakes each waiter. Meanwhile the next group gathers: the busier the store, the larger the groups and the cheaper
each job.

The thread does not depend on SQL: it works on a `TransactionBackend`.
"""

from __future__ import annotations

import logging
import math
import selectors
import socket
import threading
import time
from contextlib import suppress
from copy import copy
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Generic, Protocol, Self, TypeVar

import attrs

from agentfsm._lib.concurrency import ThreadWaiter, notify_all
from agentfsm.core.errors import AgentError, StoreError
from agentfsm.core.value import Value
from agentfsm.stores.rules import store_closed_error
from agentfsm.stores.subscriptions import Subscriptions, agent_topic, run_topic
from agentfsm.stores.threaded.lease_table import PROBE_INTERVAL_S

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator
    from contextlib import AbstractContextManager

    from agentfsm.ports.store import Durability
    from agentfsm.stores.threaded.lease_table import LeaseTable

T = TypeVar("T")
D = TypeVar("D", bound="TransactionBackend")

# Maximum jobs in one transaction, which limits the wait of the first: 1,000 take about 25 ms.
MAX_GROUP_JOBS = 1_000
# Maximum queued jobs: some 100 MB of records. Appends do not block, so this limit detects a disk that hangs.
MAX_QUEUED_JOBS = 100_000
# Seconds without a job after which the backend is maintained. Quick appends in a row have shorter pauses.
MAINTENANCE_DELAY_S = 0.25
# Maximum seconds between two maintenances under continuous load, so that the work of each stays small.
MAX_MAINTENANCE_DELAY_S = 5.0
# Seconds that jobs with `retry_if_locked` are retried while the store is locked, for example by a transaction that was
# left open in a shell.
MAX_LOCKED_S = 600.0
# Seconds between two retries; other jobs are executed meanwhile.
RETRY_INTERVAL_S = 0.1
# Seconds without a job after which the thread ends, if it holds no leases. Starting another takes less than 1 ms.
IDLE_TIMEOUT_S = 5.0

_log = logging.getLogger("agentfsm.stores")


class TransactionBackend(Protocol):
    """The database that the thread works on. Only the thread calls it."""

    leases: LeaseTable
    """The leases that have to be renewed."""

    def transaction(
        self, *, write: bool, durability: Durability, runs: Collection[str]
    ) -> AbstractContextManager[None]:
        """Return a context manager for a transaction on these runs, which is rolled back if the block raises."""
        ...

    def wait_to_retry(self, error: Exception) -> bool:
        """Wait a little if the error is transient. Return whether to execute the same jobs again.

        An interrupted commit may have succeeded: the backend then checks each job.
        """
        ...

    def is_lock_error(self, error: Exception) -> bool:
        """Return whether the only cause is a lock on the whole store, which may last but will end."""
        ...

    def is_job_error(self, error: Exception) -> bool:
        """Return whether a single job caused the error, so that the others of its group can be executed without it."""
        ...

    def translate_error(self, error: Exception) -> AgentError:
        """Return the AgentError that reports a foreign error to callers, with its cause and a remedy."""
        ...

    def renew_leases(self) -> None:
        """Renew the leases of event loops that run, and release those that were dropped."""
        ...

    def maintain(self) -> None:
        """Perform maintenance that is best done while the store is idle."""
        ...

    @property
    def poll_interval_s(self) -> float:
        """Seconds between two polls for changes by other processes while there are subscriptions; infinity for none."""
        ...

    def has_changed(self) -> bool:
        """Return whether another process may have changed something since the last poll."""
        ...

    def close(self) -> None:
        """Release all resources; the next transaction reopens them."""
        ...


class Announcements(Protocol):
    """Receives what a server announces on the connection of the backend. Only the thread calls it."""

    def fileno(self) -> int:
        """Return the descriptor that is readable when the server has announced something; -1 for no connection."""
        ...

    def receive(self) -> None:
        """Notify the subscribers of what has arrived. A lost connection is no error."""
        ...


class StoreJob(Generic[T, D]):
    """A unit of work for the thread, and its result.

    `work` refuses by raising an AgentError before it writes. Any number of coroutines may wait for the result. A
    cancelled wait does not affect the job.
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
        """Create a job.

        Args:
            work: Function that does the work on the backend.
            run_id: Id of the run that the job is about, if it is about one.
            writes: Whether the job needs a transaction that may write.
            on_failure: Called in the thread if the job failed for an external reason; not called for a refusal.
            durability: Durability of the job's writes.
            notify_agent: Name of the agent whose workers may claim the run afterwards; empty if the name is not known,
                None if no worker needs to be notified.
            retry_if_locked: Whether to retry for `MAX_LOCKED_S` while the store is locked, for jobs that record past
                events; other jobs then fail.
        """
        self.run_id: str = run_id
        self.writes: bool = writes
        self.durability = durability
        self.notify_agent: str | None = notify_agent
        self.retry_if_locked: bool = retry_if_locked
        self._work: Callable[[D], T] | None = work
        self._on_failure = on_failure
        self._waiters: list[ThreadWaiter] = []
        self._done = False
        self._value: T = None  # type: ignore[assignment]  # until the work has returned
        self._error: AgentError | None = None

    @classmethod
    def done(cls, value: T) -> Self:
        """Return a job that is already done."""
        job = cls(lambda _backend: value)
        job._value = value
        job.finish()
        return job

    @property
    def is_done(self) -> bool:
        """True if the outcome of the job is known."""
        return self._done

    async def wait(self) -> T:
        """Wait for the commit. Return the result of the work, or raise its error."""
        if not self._done:
            waiter = ThreadWaiter()
            self._waiters.append(waiter)
            if not self._done:  # if it ended in between, the thread may not have seen this waiter
                await waiter.event.wait()
        if self._error is not None:
            raise copy(self._error) from self._error.__cause__  # the original would keep the waiter's frames alive
        return self._value

    def attempt(self, backend: D) -> None:
        """Do the work inside a transaction; called again if another job made the transaction fail."""
        assert self._work is not None  # noqa: S101  only a finished job has none
        self._error = None
        try:
            self._value = self._work(backend)
        except AgentError as error:
            self._error = error.with_traceback(None)
        except Exception:
            raise
        except BaseException as error:  # a job must not end the thread
            raise RuntimeError(f"a job tried to end the thread: {error!r}") from error

    def record_failure(self, backend: D, error: AgentError) -> None:
        """Set an error that the work itself did not raise."""
        self._value = None  # type: ignore[assignment]  # it was rolled back; drops the lease, if it is one
        self._error = error
        if self._on_failure is not None:
            self._on_failure(backend, error)

    def abort(self, error: AgentError) -> None:
        """Set an error unless the outcome is known. Only waiters see it; `on_failure` is not called."""
        if not self._done:
            self._error = error

    def finish(self) -> list[ThreadWaiter]:
        """Publish the outcome. Return the waiters to notify."""
        self._work = self._on_failure = None  # release the objects that they refer to
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
    """Finish jobs and notify their waiters."""
    notify_all([waiter for job in jobs for waiter in job.finish()])


@attrs.frozen(kw_only=True)
class StoreStatistics(Value):
    """Statistics of a store's thread in this process."""

    commits: int
    """Number of committed transactions."""

    jobs: int
    """Number of write jobs so far, including refused and failed ones."""

    largest_group: int
    """Largest number of write jobs in one transaction."""

    leases: int
    """Number of leases held now."""

    queued: int
    """Number of jobs that wait now."""


class GroupCommitWriter(Generic[D]):
    """A daemon thread that serves one backend; it starts with the first job and ends when nothing is left to do."""

    def __init__(self, backend: D) -> None:
        self.backend = backend
        # Notified after each commit.
        self.subscriptions: Subscriptions = Subscriptions()
        # None if the server announces nothing on the backend's connection.
        self.announcements: Announcements | None = None
        # Ends a wait for announcements: the thread reads from the first, and others write to the second.
        self._wakers: tuple[socket.socket, socket.socket] | None = None
        # Whether the thread waits for them.
        self._is_asleep = False
        # None in the queue means that the writer is being closed.
        self._queue: SimpleQueue[StoreJob[Any, D] | None] = SimpleQueue()
        # Guards the start and the end of the thread, so that no job is queued for a thread that has just ended.
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closing = False
        self._close_job = StoreJob[None, D](lambda _backend: None)
        self._commits = self._jobs = self._largest_group = 0
        # Times of the last job, lease renewal, probe of event loops, poll and maintenance, monotonic seconds.
        self._worked_at = self._renewed_at = self._probed_at = self._polled_at = self._maintained_at = 0.0
        self._needs_maintenance = False
        # Jobs to retry because the store was locked, oldest first.
        self._deferred: list[StoreJob[Any, D]] = []
        # Time when the first of them was deferred, monotonic seconds.
        self._locked_since: float | None = None
        # Jobs taken from the queue; some may not be finished yet.
        self._in_progress: list[StoreJob[Any, D]] = []
        # Error that ended the thread.
        self._fatal_error: StoreError | None = None

    def submit(self, job: StoreJob[T, D]) -> None:
        """Queue a job; never blocks.

        Raises:
            ClosedError: after `close`.
            StoreError: if the queue is full, or the thread has died or cannot be started.
        """
        if self._queue.qsize() >= MAX_QUEUED_JOBS:
            raise StoreError(
                f"{MAX_QUEUED_JOBS:,} jobs wait for the store already, so this one was refused: check whether its disk "
                "or server hangs"
            )
        with self._lock:
            if self._closing:
                raise store_closed_error()
            if self._fatal_error is not None:
                raise copy(self._fatal_error)
            if self._thread is None:
                self._start()  # before the job is queued: if it fails, the job must not be executed later
            self._put(job)

    def _put(self, job: StoreJob[Any, D] | None) -> None:
        self._queue.put(job)
        if self._is_asleep and self._wakers is not None:
            self._is_asleep = False
            self._wakers[1].send(b".")

    async def close(self) -> None:
        """Execute the queued jobs, close the backend and end the thread. A cancelled close continues in the thread."""
        with self._lock:
            first, self._closing = not self._closing, True
            thread = self._thread
            if thread is None:
                finish_jobs([self._close_job])
            elif first:
                self._put(None)
        await self._close_job.wait()
        if thread is not None:
            thread.join()  # returns at once: the thread has finished its work

    def statistics(self) -> StoreStatistics:
        """Return the statistics so far."""
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
            raise StoreError(f"no thread can be started: {error}; check the limits of this process") from error
        self._thread = thread

    def _run(self) -> None:
        try:
            while not self._stop_if_idle():
                group = self._next_group()
                if not self.backend.leases:
                    self._renewed_at = time.monotonic()
                if group:
                    self._serve(group)
                    self._in_progress = []
                    self._worked_at = time.monotonic()
                self._run_upkeep()
        except BaseException as error:  # noqa: BLE001  no caller may wait for a dead thread
            self._die(error)

    def _die(self, error: BaseException) -> None:
        """Fail all waiting jobs, refuse new ones, and close the backend, which may block others."""
        _log.critical("the store's thread died", exc_info=error)
        fatal_error = StoreError(
            f"the store's thread died because of a bug in it ({error!r}): please report it; then create a new store "
            "and resume the runs"
        )
        with self._lock:
            self._fatal_error = fatal_error
            self._forget_thread()
            self._in_progress += self._deferred
            while not self._queue.empty():
                self._in_progress += filter(None, [self._queue.get()])
            for job in self._in_progress:
                job.abort(fatal_error)
            finish_jobs([*self._in_progress, *([self._close_job] if self._closing else [])])
            self._in_progress = []
        self._run_quietly(self.backend.close)

    def _next_group(self) -> list[StoreJob[Any, D]]:
        """Wait for queued jobs until some upkeep is due. Return them, oldest first."""
        jobs: list[StoreJob[Any, D] | None] = []
        timeout_s = RETRY_INTERVAL_S if self._deferred else self._next_timeout_s()
        if self.announcements is not None:
            self._await_announcements(self.announcements, timeout_s)
            timeout_s = 0.0
        with suppress(Empty):
            jobs.append(self._queue.get(timeout=timeout_s))
        while len(jobs) < MAX_GROUP_JOBS and not self._queue.empty():
            jobs.append(self._queue.get())
        self._in_progress = [*self._deferred, *filter(None, jobs)]
        self._deferred = []
        return self._in_progress

    def _await_announcements(self, announcements: Announcements, timeout_s: float) -> None:
        """Wait for a job or an announcement, and receive what was announced."""
        if self._wakers is None:
            self._wakers = socket.socketpair()
        waker, descriptor = self._wakers[0], announcements.fileno()
        self._is_asleep = True
        if self._queue.empty():  # else it may have been queued by one who did not see that this thread sleeps
            with selectors.DefaultSelector() as selector:  # no `select`, whose descriptors are below 1,024
                selector.register(waker, selectors.EVENT_READ)
                if descriptor >= 0:
                    selector.register(descriptor, selectors.EVENT_READ)
                if waker.fileno() in {key.fd for key, _events in selector.select(timeout_s)}:
                    waker.recv(1)
        self._is_asleep = False
        announcements.receive()

    def _next_timeout_s(self) -> float:
        leases = self.backend.leases
        due = self._worked_at + IDLE_TIMEOUT_S
        if leases:
            due = min(self._renewed_at + leases.renew_interval_s, self._probed_at + PROBE_INTERVAL_S)
        if self._needs_maintenance:
            due = min(due, self._worked_at + MAINTENANCE_DELAY_S)
        if self.subscriptions.topics:
            due = min(due, self._polled_at + self.backend.poll_interval_s)
        return max(0.0, due - time.monotonic())

    def _serve(self, group: list[StoreJob[Any, D]]) -> None:
        writes = [job for job in group if job.writes]
        reads = [job for job in group if not job.writes]
        if reads and self._locked_since is not None:  # a lock delays writes only, so reads go first
            self._transact(reads, write=False)
            reads = []
        if writes:
            self._needs_maintenance = True
            self._jobs += len(writes)
            self._transact(writes, write=True)
        if reads:
            self._transact(reads, write=False)

    def _transact(self, jobs: list[StoreJob[Any, D]], *, write: bool) -> None:
        """Execute the jobs in one transaction; if one of them makes it fail, each in its own transaction."""
        while True:
            try:
                durability: Durability = "full" if any(job.durability == "full" for job in jobs) else "normal"
                runs = {job.run_id for job in jobs if job.run_id}
                with self.backend.transaction(write=write, durability=durability, runs=runs):
                    for job in jobs:
                        job.attempt(self.backend)
            except Exception as error:  # noqa: BLE001  all waiters must get an outcome
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
                self._run_upkeep()  # a job may wait long for a lock, and leases must be renewed meanwhile
                self._transact([job], write=write)
            return
        retryable = [job for job in jobs if job.retry_if_locked]
        if retryable and self.backend.is_lock_error(error) and self._may_defer():
            _log.warning(
                "%d writes of runs wait until the store can be written: %s", len(retryable), self._as_agent_error(error)
            )
            self._deferred += retryable
            self._jobs -= len(retryable)
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
        leases = self.backend.leases
        if leases and now >= self._probed_at + PROBE_INTERVAL_S:
            self._probed_at = now
            if leases.probe(now):
                self._renewed_at = -math.inf
        if leases and now >= self._renewed_at + leases.renew_interval_s:
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
        """Close the backend and return True if no work is left; the next job then starts a new thread."""
        watches = bool(self.subscriptions.topics) and self.backend.poll_interval_s < math.inf
        idle = not self.backend.leases and not watches and time.monotonic() >= self._worked_at + IDLE_TIMEOUT_S
        if not (self._closing or idle) or self._deferred or not self._queue.empty():
            return False
        self._run_quietly(self.backend.close)  # without the lock: this may take long, and `submit` must not wait
        with self._lock:
            if not self._queue.empty():
                return False
            self._forget_thread()
            if self._closing:
                finish_jobs([self._close_job])
            return True

    def _forget_thread(self) -> None:
        self._thread = None
        for each in self._wakers or ():
            each.close()
        self._wakers = None

    def _run_quietly(self, act: Callable[[], None]) -> None:
        """Perform upkeep. A failure is only logged, since no caller waits for it."""
        try:
            act()
        except Exception as error:  # noqa: BLE001  as above
            _log.warning("the store's upkeep (%s) failed: %s", act.__name__, self._as_agent_error(error))

    def _as_agent_error(self, error: Exception) -> AgentError:
        """Return the error to raise to callers."""
        if isinstance(error, AgentError):
            return error
        translated = self.backend.translate_error(error)
        translated.__cause__ = error
        return translated
