"""Executes the runs of an agent through DBOS, which adds priorities, rate limits and tenants to the queue of runs.

A run is one workflow with one step, which drives the run until it is over or waits. DBOS decides when and where, and
the effects depend on the journal with its lease. So a workflow that is started twice has no effect twice, and DBOS
stores a few rows per run instead of some per transition.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import anyio
import attrs
import sniffio

from agentfsm._lib.plugins import require_extra
from agentfsm.agents.worker import Worker
from agentfsm.core.errors import (
    ClosedError,
    LeaseHeldError,
    MisuseError,
    PartlyDoneError,
    RunNotFoundError,
    StoreError,
    TooNewError,
)
from agentfsm.core.validation import COUNT, NAME, NOT_NEGATIVE, SECONDS, ValueRule, is_number
from agentfsm.engines.dbos_supervisor import QueueSupervisor, build_status

with require_extra("agentfsm.engines.dbos", "dbos", "dbos", "sqlalchemy", "psycopg"):
    from dbos import DBOS, DBOSClient, DBOSPortableJSONSerializer, EnqueueOptions

    from agentfsm.engines.executor_locks import ExecutorLocks
    from agentfsm.stores.postgres.store import SCHEMA_NAME, PostgresStore

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from agentfsm.agents.agent import Agent
    from agentfsm.core.run import Run
    from agentfsm.ports.store import Lease

# Names under which DBOS stores the workflows. They must never change: rows with other names are not executed. The
# version too is fixed. By default it is a hash of the source, so that an upgrade would strand the runs in the queue.
APPLICATION: Final = "agentfsm"
WORKFLOW: Final = "agentfsm.drive"
VERSION: Final = "agentfsm-1"

# Partition of the runs without a tenant.
NO_TENANT: Final = "-"

# Seconds between two attempts to take a lease while the store is away.
STORE_PAUSE_S: Final = 0.5
# Seconds that a worker which stops waits until its runs have given back their leases.
STOP_S: Final = 10.0

# Seconds of these in which DBOS may record the outcomes of workflows that have just ended.
RECORD_S: Final = 1.0

RATE: Final = ValueRule(
    fits=lambda value: (
        isinstance(value, tuple) and len(value) == 2 and COUNT.fits(value[0]) and is_number(value[1]) and value[1] > 0
    ),
    wanted="a pair of a number of runs and seconds, such as (300, 60)",
)


@attrs.define(eq=False, repr=False, kw_only=True)
class DBOSEngine:
    """Queue and workers for the runs of one agent, on DBOS and PostgreSQL. Needs agentfsm[dbos] and asyncio.

    `submit` puts a run into the queue, and `work` executes the runs of the queue in this process. Any number of
    processes may do either. A run that waits for a decision, an answer, input or a time leaves the queue, and is put
    back when the wait ends. It does not matter who posted the decision: the engine, the agent, `Runs`, the gateway or
    the command line.

    All limits are DBOS's own. They are stored with the queue, so give all processes the same.

    Raises:
        MisuseError: when an option is invalid, or the store is not a `PostgresStore` and no `url` is given.
    """

    agent: Agent[Any] = attrs.field(kw_only=False)
    """The agent. Its store has the runs; its name selects them."""

    queue: str = attrs.field(
        default=attrs.Factory(lambda self: f"agentfsm-{self.agent.name}", takes_self=True), validator=NAME
    )
    """Name of the queue. Each agent needs a queue of its own, and all versions of it share that one, so that any of
    them continues the runs of the others. The runs of each release of a roll-out have a queue beside it, whose name
    ends in "@" and the release. Default: "agentfsm-" and the name of the agent.
    """

    worker_concurrency: int = attrs.field(default=100, validator=COUNT)
    """Maximum number of runs that one process executes at once. Default 100."""

    concurrency: int | None = attrs.field(default=None, validator=COUNT.or_none())
    """Maximum number of runs that all processes execute at once. None: no limit. This and the limits below hold for the
    runs without a release, and for those of each release by themselves.
    """

    limiter: tuple[int, float] | None = attrs.field(default=None, validator=RATE.or_none())
    """Maximum number of runs started within a period, as (runs, seconds). A run that goes on after a wait counts again.
    None: no limit.
    """

    tenant_concurrency: int | None = attrs.field(default=None, validator=COUNT.or_none())
    """Maximum number of runs of one tenant that all processes execute at once. Runs without a tenant share one. None:
    no limit.
    """

    tenant_limiter: tuple[int, float] | None = attrs.field(default=None, validator=RATE.or_none())
    """Like `limiter`, for each tenant. None: no limit."""

    priority: int | None = attrs.field(default=None, validator=COUNT.or_none())
    """Priority of runs that are submitted without one, from 1, the most urgent, to 2,147,483,647. None: before all
    others.
    """

    poll_s: float = attrs.field(default=0.25, validator=SECONDS)
    """Seconds between two looks of a process into the queue, above 0. Default 0.25. With 100 processes, use 1.0."""

    keep_s: float = attrs.field(default=86_400.0, validator=SECONDS)
    """Seconds for which DBOS keeps the rows of workflows that have ended. The journals stay. Default: one day. A run
    that waited longer goes on with the priority of the engine.
    """

    pool_size: int = attrs.field(default=5, validator=COUNT)
    """Maximum number of connections that DBOS opens for its pool in a process, 1 or more. Default 5."""

    url: str | None = attrs.field(default=None, repr=False, validator=NAME.or_none())
    """URL of the database for the tables of DBOS. None: that of the agent's `PostgresStore`. It must lead to the server
    or to a pooler that pools by session, because executors hold advisory locks.
    """

    schema: str = attrs.field(
        default=attrs.Factory(lambda self: f"{getattr(self.agent.store, 'schema', 'agentfsm')}_dbos", takes_self=True),
        validator=SCHEMA_NAME,
    )
    """Name of the schema of DBOS's tables, created at first use. Default: that of the `PostgresStore`, with "_dbos"
    appended, so "agentfsm_dbos".
    """

    _address: str = attrs.field(init=False, default="")
    _client: DBOSClient | None = attrs.field(init=False, default=None)
    _starting: anyio.Lock = attrs.field(init=False, factory=anyio.Lock)
    _scopes: dict[str, anyio.CancelScope] = attrs.field(init=False, factory=dict)
    """Scopes of the runs that this process executes, by run id."""

    _tasks: set[asyncio.Task[Any]] = attrs.field(init=False, factory=set)
    """Tasks of the workflows in this process. They last longer than their scopes: DBOS records the outcome."""

    _beside: set[str] = attrs.field(init=False, factory=set)
    """Ids of the runs in execution, without suspects."""

    _apart: anyio.Event | None = attrs.field(init=False, default=None)
    """Set when the suspect in execution has ended; None if there is none."""

    _room: anyio.CapacityLimiter = attrs.field(init=False)
    """Places for the runs in execution, `worker_concurrency` of them."""

    _dbos: DBOS | None = attrs.field(init=False, default=None)
    """DBOS in this process, while it works."""

    _is_stopping: bool = attrs.field(init=False, default=False)

    def __attrs_post_init__(self) -> None:
        store = self.agent.store
        if self.url is None and not isinstance(store, PostgresStore):
            raise MisuseError(
                f"DBOSEngine needs a PostgreSQL for the tables of DBOS, and the agent's store is a "
                f"{type(store).__name__}: give the agent store=PostgresStore(...), or the engine url='postgresql://...'"
            )
        url = self.url or store.url  # type: ignore[attr-defined]
        scheme, separator, rest = url.partition("://")
        if scheme not in ("postgresql", "postgres") or not separator:
            raise MisuseError("DBOSEngine(url=...): give 'postgresql://user:password@host:5432/database'")
        self._address = f"postgresql://{rest}"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connections of the engine. The agent and its store stay open."""
        client, self._client = self._client, None
        if client is not None:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(client.destroy)

    async def submit(
        self, prompt_or_run: Any, *, priority: int | None = None, delay_s: float | None = None, **start: Any
    ) -> Run[Any]:
        """Create a run in the store and put it into the queue. Both are durable when this returns.

        A second call with the same id and prompt returns the run of the first call and changes nothing; so repeat the
        call if it failed. If this process dies in between, the workers find the run and queue it.

        Args:
            prompt_or_run: The task, or a run that `agent.start` returned.
            priority: Priority in the queue, from 1, the most urgent; None for that of the engine.
            delay_s: Seconds before which the run is not started; None for at once.
            **start: As in `Agent.start`: `id=`, `session=`, `user=`, `tenant=` and others.

        Raises:
            ConflictError: when the id is that of a run with another prompt, or the session has a run that is not over.
            MisuseError: when an argument is invalid.
            PartlyDoneError: when the run was created, and not put into the queue; the message has its id.
        """
        COUNT.or_none().check("submit", "priority", priority)
        SECONDS.or_none().check("submit", "delay_s", delay_s)
        await self._connect()
        run = await self.agent.submit(prompt_or_run, **start)
        if not run.is_over:
            header = run.header
            try:
                await self._enqueue(
                    run.id, run.id, header.tenant, release=header.release, priority=priority, delay_s=delay_s
                )
            except Exception as error:
                raise PartlyDoneError(
                    f"run {run.id!r} is in the store, and was not put into the queue: {error}; the workers find it and "
                    f"queue it, without its priority and delay, unless submit is called again with id={run.id!r} before"
                ) from error
        return run

    async def work(self, *, deps: Any = None, until_idle: bool = False, drain_s: float = 0.0) -> None:
        """Execute the runs of the queue, until cancelled. One engine at a time can work in a process.

        These are the runs without a release, whichever version of the agent has begun them, and those of the release
        that is the version of this agent. Ready runs of other releases are put into the queues of these releases; if no
        process works on one of them, that is logged, once.

        A run that fails to execute is logged and tried again after a growing delay, 1 s to 7.5 min, as by
        `Agent.worker`. When this ends, the runs in execution give back their leases, and other processes go on with
        them.

        Args:
            deps: Dependencies of every run, or a function, plain or async, that takes the run and returns them.
            until_idle: Whether to return when no run is in the queue, delayed runs aside, and none is ready.
            drain_s: Seconds that model requests and calls in flight have to end after a cancellation, 0 or more. This
                process takes no further run from the queue meanwhile. Default 0: they are cut off.

        Raises:
            MisuseError: when it is not called on asyncio, or DBOS is in use in this process.
        """
        NOT_NEGATIVE.check("work", "drain_s", drain_s)
        driver = self.agent.driver
        await self.serve_worker(
            Worker(
                agent=self.agent,
                execute=driver.run_until_blocked,
                deps=deps,
                parallel=self.worker_concurrency,
                poll_s=self.poll_s,
                drain_s=drain_s,
            ),
            until_idle=until_idle,
        )

    async def serve_worker(self, worker: Worker, *, until_idle: bool) -> None:
        """Execute the runs of the queue by a worker, whose own loop is not used; implements `work`."""
        await self._connect()
        executor_id = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(6)}"
        queues = (self.queue, *[self._name_queue(release) for release in worker.releases])
        locks = ExecutorLocks(self._address, schema=self.schema, queues=queues, executor_id=executor_id)
        async with AsyncExitStack() as stack:
            stack.push_async_callback(_run_shielded, locks.close)
            await anyio.to_thread.run_sync(locks.renew)  # before the first workflow is taken
            self._is_stopping = False
            self._room = anyio.CapacityLimiter(self.worker_concurrency)
            self._configure(executor_id)
            stack.push_async_callback(_destroy)
            self._launch(worker, queues)
            stack.push_async_callback(self._stop_runs, worker)
            for queue in queues:
                await DBOS.register_queue_async(
                    queue,
                    worker_concurrency=self.worker_concurrency,
                    global_concurrency=self.concurrency,
                    limiter=_as_limiter(self.limiter),
                    partition_concurrency=self.tenant_concurrency,
                    partition_limiter=_as_limiter(self.tenant_limiter),
                    polling_interval_sec=self.poll_s,
                    on_conflict="always_update",
                )
            supervisor = QueueSupervisor(
                agent=self.agent,
                client=self._open_client,
                enqueue=self._enqueue,
                locks=locks,
                releases=frozenset(worker.releases),
                name_queue=self._name_queue,
                report_release=worker.report_release,
                poll_s=self.poll_s,
                keep_s=self.keep_s,
                count_busy=lambda: len(self._scopes),
            )
            await supervisor.run(until_idle=until_idle)

    def _configure(self, executor_id: str) -> None:
        self._dbos = DBOS(
            config={
                "name": APPLICATION,
                "system_database_url": self._address,
                "dbos_system_schema": self.schema,
                "sys_db_pool_size": self.pool_size,
                "application_version": VERSION,
                "executor_id": executor_id,
                "serializer": DBOSPortableJSONSerializer(),
                "log_level": "WARNING",
            }
        )
        if DBOS.executor_id != executor_id:
            raise MisuseError("DBOS is in use in this process: let DBOSEngine.work() have a process of its own")

    def _name_queue(self, release: str) -> str:
        """Return the name of the queue for the runs of a release; that of the agent for runs without one."""
        return f"{self.queue}@{release}" if release else self.queue

    def _launch(self, worker: Worker, queues: tuple[str, ...]) -> None:
        async def drive(run_id: str) -> dict[str, Any]:
            task = asyncio.current_task()
            assert task is not None  # noqa: S101  DBOS makes one for each workflow
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            return await DBOS.run_step_async({"name": "drive"}, partial(self._drive, worker, run_id))

        DBOS.workflow(name=WORKFLOW)(drive)
        DBOS.listen_queues(queues)
        DBOS.launch()  # in this thread, whose event loop DBOS then uses for the workflows

    async def _drive(self, worker: Worker, run_id: str) -> dict[str, Any]:
        """Execute a run until it is over or waits, and return its status for the row of the workflow.

        A run that another start executes leaves the queue at once. If the owner of that lease is dead, the supervisor
        queues the run again when the lease ends. So does one that only a newer agentfsm can read; it is queued again
        after a minute, for the workers of that version.
        """
        if run_id in self._scopes:
            return {"busy": "in this process"}
        with anyio.CancelScope() as scope:
            self._scopes[run_id] = scope
            try:
                if self._is_stopping:
                    scope.cancel()
                async with self._room:  # shared by the queues, each of which has the limit for itself
                    status = await self._execute(worker, run_id)
                    if not self._is_stopping or "failed" not in status:
                        return status
            except RunNotFoundError:
                return {"deleted": True}
            except TooNewError:
                worker.report_newer()
                return {"left": "to a newer agentfsm"}
            finally:
                del self._scopes[run_id]
        raise asyncio.CancelledError  # the workflow stays in the queue, for another process

    async def _execute(self, worker: Worker, run_id: str) -> dict[str, Any]:
        """Execute a run. One that may have killed its workers is executed while this process executes no other.

        So a death then counts against that run, which is paused after some, and the runs beside it go on.
        """
        while True:
            while self._apart is not None:
                await self._apart.wait()
            self._beside.add(run_id)
            try:
                lease = await self._take_lease(run_id)
                if lease is None:
                    return {"busy": "in another process"}
                if not lease.is_suspect:
                    return build_status(await worker.execute_safely(lease))
            finally:
                self._beside.discard(run_id)
            if self._apart is None:
                break
            await self.agent.store.release(lease).wait()  # another suspect was faster
        apart = self._apart = anyio.Event()
        try:
            while self._beside:  # noqa: ASYNC110  rare
                await anyio.sleep(0.05)
            return build_status(await worker.execute_safely(lease))
        finally:
            self.agent.store.release(lease)
            self._apart = None
            apart.set()

    async def _take_lease(self, run_id: str) -> Lease | None:
        """Return the lease of a run; None if another owner holds it. It waits while the store is away."""
        while True:
            try:
                return await self.agent.store.lease(run_id, durability=self.agent.driver.durability)
            except LeaseHeldError:
                return None
            except (ClosedError, RunNotFoundError, TooNewError):
                raise
            except StoreError:
                await anyio.sleep(STORE_PAUSE_S)

    async def _stop_runs(self, worker: Worker) -> None:
        """Drain the runs in execution, cancel the rest, and wait until they have given back their leases."""
        self._is_stopping = True
        if worker.drain_s > 0:
            for stop in () if self._dbos is None else self._dbos.background_thread_stop_events:
                stop.set()  # the threads that take workflows from the queues
            worker.drain()
            with anyio.move_on_after(worker.drain_s, shield=True):
                while self._scopes and not worker.is_cut_off:  # noqa: ASYNC110  only at the end of a process
                    await anyio.sleep(0.01)
            worker.end_drain()
        with anyio.move_on_after(STOP_S, shield=True):
            while self._scopes:
                for scope in self._scopes.values():
                    scope.cancel()
                await anyio.sleep(0.01)
            if self._tasks:
                await asyncio.wait(self._tasks, timeout=RECORD_S)
            for task in tuple(self._tasks):
                task.cancel()  # it waits for the outcome of another start
            await asyncio.gather(*self._tasks, return_exceptions=True)
        worker.report_cut_off()

    async def _connect(self) -> None:
        """Create the tables and the client of DBOS at the first call."""
        if sniffio.current_async_library() != "asyncio":
            raise MisuseError("DBOSEngine needs asyncio, because DBOS does: use Agent.submit and Agent.worker on trio")
        async with self._starting:
            if self._client is not None:
                return
            await anyio.to_thread.run_sync(partial(DBOS.migrate, self._address, schema=self.schema))
            self._client = DBOSClient(
                system_database_url=self._address,
                dbos_system_schema=self.schema,
                serializer=DBOSPortableJSONSerializer(),
                system_database_pool_size=2,
                application_name=APPLICATION,
                lazy=True,
            )

    @property
    def _open_client(self) -> DBOSClient:
        if self._client is None:
            raise ClosedError("the engine is closed")
        return self._client

    async def _enqueue(
        self,
        workflow_id: str,
        run_id: str,
        tenant: str | None,
        *,
        release: str,
        priority: int | None = None,
        delay_s: float | None = None,
    ) -> None:
        """Put a run into the queue of its release, under an id that is used once: a second call has no effect."""
        options = EnqueueOptions(
            workflow_name=WORKFLOW,
            queue_name=self._name_queue(release),
            workflow_id=workflow_id,
            app_version=VERSION,
            queue_partition_key=tenant or NO_TENANT,  # a queue without limits of tenants ignores it
        )
        if priority := priority or self.priority:
            options["priority"] = priority
        if delay_s is not None:
            options["delay_seconds"] = delay_s
        await self._open_client.enqueue_async(options, run_id)


def _as_limiter(rate: tuple[int, float] | None) -> Any:
    return None if rate is None else {"limit": rate[0], "period": rate[1]}


async def _destroy() -> None:
    """End DBOS in this process, and replace its executor, which it has made the default of the event loop."""
    await _run_shielded(partial(DBOS.destroy, destroy_registry=True))
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor())


async def _run_shielded(function: Any) -> None:
    with anyio.CancelScope(shield=True):
        await anyio.to_thread.run_sync(function)
