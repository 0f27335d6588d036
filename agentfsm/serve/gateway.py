"""The gateway: the runs that a caller may start, see and control, and the worker that executes these runs."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import anyio
import attrs

from agentfsm._lib.newest import Newest
from agentfsm.agents.admission import admit, admit_messages
from agentfsm.agents.agent import WORKER_PARALLEL, WORKER_POLL_S, Agent
from agentfsm.agents.agent_fields import new_id
from agentfsm.agents.agent_starts import StartOptions
from agentfsm.agents.decisions import end_allowances
from agentfsm.agents.worker import Worker
from agentfsm.core.errors import (
    AgentError,
    ClosedError,
    ConflictError,
    LeaseLostError,
    MisuseError,
    RunNotFoundError,
)
from agentfsm.core.labels import Label, join_labels
from agentfsm.core.messages import AssistantMessage, HostedContent, ToolResult, as_parts
from agentfsm.core.run_ids import find_reserved_form
from agentfsm.engine.execution.options import ExecutionOptions
from agentfsm.journal.keyed_runs import MAX_KEY_CHARS, find_keyed_run, is_key
from agentfsm.ports.store import Filter
from agentfsm.schedules.due_runs import DueRuns
from agentfsm.serve.caller_limits import Admission
from agentfsm.serve.delta_hub import DeltaHub
from agentfsm.serve.errors import ForbiddenError
from agentfsm.serve.event_stream import RunEventStream, StreamEncoder, Versions
from agentfsm.serve.journal_feeds import JournalFeeds
from agentfsm.serve.metrics import RequestCounts, RunMetrics
from agentfsm.telemetry.totals import Totals
from agentfsm.tools.front_end import read_front_end
from agentfsm.tools.queue.result_text import describe_error

if TYPE_CHECKING:
    from anyio.abc import TaskGroup, TaskStatus

    from agentfsm.agents.runs import Prompt, Runs
    from agentfsm.core.header import Header
    from agentfsm.core.messages import Message
    from agentfsm.core.run import Run
    from agentfsm.core.settings import Settings
    from agentfsm.ports.store import RunSummary
    from agentfsm.releases import Rollout
    from agentfsm.serve.access import Caller
    from agentfsm.serve.continuation import Continuation

_log = logging.getLogger("agentfsm.serve")

# Seconds after which a store that does not answer counts as not ready.
READY_TIMEOUT_S: Final = 2.0
# Errors of executions that persons have asked for, of which the newest are kept.
MAX_FAILURES: Final = 1_000


@attrs.define(eq=False, repr=False, kw_only=True)
class Gateway:
    """The agents that are served, their runs, and the tasks of the server. Endpoints are functions that take it."""

    agents: Mapping[str, Agent[Any]]
    """Agents by name. They share one store. None: the runs of all agents can be read, and none is executed."""

    runs: Runs
    """Client for the runs in the store."""

    rollouts: Mapping[str, Rollout] = attrs.field(factory=dict)
    """Roll-outs by the name of their agent, which is then the base of the roll-out."""

    deps: Any = None
    """Dependencies of every run, or a function, plain or async, that takes the run and returns them."""

    parallel: int = WORKER_PARALLEL
    """Runs of each agent that this process executes at once. 0: none; workers execute them."""

    drain_s: float = 0.0
    """Seconds that model requests and calls in flight have to end when the server stops. 0: they are cut off."""

    admission: Admission = attrs.field(default=attrs.Factory(lambda self: Admission(runs=self.runs), takes_self=True))
    """Admits requests and new runs."""

    four_eyes: bool = False
    """Whether no user may approve or settle a call that it has shaped, and an edit needs a second approver."""

    front_end_tools: bool = True
    """Whether clients may give their runs tools that they carry out themselves."""

    continuation: Continuation | None = None
    """Continues a run on request, on a server without agents. None: not by this server."""

    hub: DeltaHub = attrs.field(factory=DeltaHub)
    """Passes on the text that models are writing."""

    feeds: JournalFeeds = attrs.field(
        default=attrs.Factory(lambda self: JournalFeeds(self.runs), takes_self=True), init=False
    )
    """Reads the journals that event streams follow."""

    counts: RequestCounts = attrs.field(factory=RequestCounts, init=False)
    """Counts for the metrics."""

    run_metrics: RunMetrics = attrs.field(
        default=attrs.Factory(lambda self: RunMetrics(self.runs.store), takes_self=True), init=False
    )
    """Metrics of the runs in the store."""

    totals: Totals = attrs.field(
        default=attrs.Factory(lambda self: Totals(self.runs.store), takes_self=True), init=False
    )
    """Totals of the store, which a server with agents keeps."""

    background: tuple[Callable[[Gateway], Coroutine[Any, Any, None]], ...] = ()
    """Tasks of the groups of endpoints, which run as long as the server."""

    streams: set[anyio.CancelScope] = attrs.field(factory=set, init=False)
    """Scopes of the open event streams, which the shutdown of the server cancels."""

    on_close: list[Callable[[], None]] = attrs.field(factory=list, init=False)
    """Called when the server begins to shut down, after the open event streams were ended."""

    _waits: set[anyio.CancelScope] = attrs.field(factory=set, init=False)
    """Scopes of the requests that wait for a run, which the shutdown of the server cancels."""

    _workers: list[Worker] = attrs.field(factory=list, init=False)
    """Workers that execute the runs, one for each agent."""

    _failures: Newest[str, str] = attrs.field(factory=lambda: Newest(MAX_FAILURES), init=False)
    """Error of the last execution that a person has asked for, by the id of its run."""

    _tasks: TaskGroup | None = attrs.field(default=None, init=False)
    """Tasks of the lifespan; None outside of it."""

    # Execution.

    @asynccontextmanager
    async def lifespan(self, _app: object) -> AsyncIterator[None]:
        """Execute runs. At the end active runs are released to the store, and the next server continues them."""
        async with anyio.create_task_group() as tasks:
            self._tasks = tasks
            for agent in self.agents.values() if self.parallel else ():
                tasks.start_soon(self._work, agent)
            tasks.start_soon(self.admission.count_tokens)
            if self.agents:  # a server that only shows a store does not begin to
                tasks.start_soon(self.totals.follow)
            for task in self.background:
                tasks.start_soon(task, self)
            try:
                yield
            finally:
                tasks.cancel_scope.cancel()
                self._tasks = None

    async def _work(self, agent: Agent[Any]) -> None:
        """Execute the runs of an agent, or of all releases of its roll-out."""
        options: Any = {"deps": self.deps, "parallel": self.parallel, "poll_s": WORKER_POLL_S}
        options["drain_s"] = self.drain_s
        if (rollout := self.rollouts.get(agent.name)) is None:
            worker = Worker(agent=agent, execute=self._execute, starter=DueRuns(agent), **options)
            self._workers.append(worker)
            await worker.run(until_idle=False)
        else:
            worker = rollout.build_worker(self._execute, **options)
            self._workers.append(worker)
            await rollout.run_worker(worker, until_idle=False)

    def end_drain(self) -> None:
        """Cut off the effects of runs that are still in flight."""
        for worker in self._workers:
            worker.end_drain()

    def close_streams(self) -> None:
        """End the event streams, whose clients connect to the next server, and answer the requests that wait."""
        for scope in (*self.streams, *self._waits):
            scope.cancel()
        for call in self.on_close:
            call()
        for worker in self._workers if self.drain_s else ():
            worker.drain()

    async def start_task(self, function: Callable[..., Coroutine[Any, Any, None]]) -> Any:
        """Start a task that runs until the end of the lifespan, and return what it reports as started.

        Args:
            function: Takes `task_status`.

        Raises:
            ClosedError: when the lifespan is not running.
        """
        if self._tasks is None:
            raise ClosedError("the server is not running: enter the app's lifespan")
        return await self._tasks.start(function)

    async def _execute(self, run: Run, options: ExecutionOptions) -> Run:
        if self.four_eyes:  # also those of a run from before they were asked for
            await end_allowances(self.runs.store, run.header)
        agent = self.find_release(run.header)
        self.counts.executions[agent.name] += 1
        self.counts.crashes[agent.name] += options.lease is not None and options.lease.abandoned
        try:
            with self.hub.listen(run.id) as listen:
                return await agent.driver.run_until_blocked(run, options._replace(on_event=listen))
        except LeaseLostError:
            self.counts.lost_leases[agent.name] += 1
            raise

    def resume(self, header: Header) -> None:
        """Begin to end the pause of a run, in a task of the server.

        Raises:
            ConflictError: when this server executes no runs.
            MisuseError: when the run is that of a sub-agent.
        """
        if self._tasks is None or not self.parallel:
            raise ConflictError("this server executes no runs: resume the run with `agentfsm resume`")
        if header.parent is not None:
            raise MisuseError(f"run {header.id!r} works for run {header.parent!r}: resume that one")
        self._tasks.start_soon(self._resume, self.find_release(header), header.id)

    async def execute_once(self, agent: Agent[Any], run: Run) -> None:
        """Execute a run in a task of the server until it is over or waits. Return when its first step is done.

        Raises:
            ClosedError: when the server is not running.
            AgentError: when the execution fails before that. Any other error is logged, and found by `find_failure`.
        """

        async def execute(*, task_status: TaskStatus[None]) -> None:
            has_begun = False
            self._failures.pop(run.id, None)

            def begin(_run: Run) -> None:
                nonlocal has_begun
                if not has_begun:
                    has_begun = True
                    task_status.started()

            try:
                deps = await self.resolve_deps(run)
                with self.hub.listen(run.id) as listen:
                    options = ExecutionOptions(deps=deps, resume=True, on_event=listen, on_run=begin)
                    await agent.driver.run_until_blocked(run, options)
                begin(run)
            except Exception as error:
                if isinstance(error, AgentError) and not has_begun:
                    raise
                self._failures[run.id] = describe_error(error)
                _log.warning("run %s was not continued: %s", run.id, error, exc_info=not isinstance(error, AgentError))
                begin(run)

        await self.start_task(execute)

    def find_release(self, header: Header) -> Agent[Any]:
        """Return the agent that executes a run: that of its release, if the agent has a roll-out."""
        rollout = self.rollouts.get(header.agent)
        return self.find_agent(header.agent) if rollout is None else rollout.find_agent(header.release)

    def find_failure(self, run_id: str) -> str:
        """Return the error that ended the last execution of a run by this server; empty if there is none."""
        own = (found for worker in self._workers if (found := worker.find_failure(run_id)))
        return self._failures.get(run_id) or next(own, "")

    async def _resume(self, agent: Agent[Any], run_id: str) -> None:
        try:
            run = await agent.load(run_id)
            await self._execute(run, ExecutionOptions(deps=await self.resolve_deps(run), resume=True))
        except AgentError as error:
            _log.warning("run %s was not resumed: %s", run_id, error)
        except Exception:  # noqa: BLE001  an error in the user's code must not stop the server
            _log.exception("run %s was not resumed", run_id)

    # Runs of callers.

    async def start_run(
        self,
        caller: Caller,
        prompt: Prompt,
        *,
        agent: str | None = None,
        session: str | None = None,
        after: Run | None = None,
        messages: Sequence[Message] = (),
        settings: Settings | None = None,
        metadata: Mapping[str, Any] = MappingProxyType({}),
        key: str | None = None,
        hook: str = "",
        traceparent: str = "",
        labels: Sequence[Label] = (),
    ) -> tuple[Run, bool]:
        """Start a run of a caller. Return it, and whether it is new.

        Args:
            caller: The caller: the run gets its user, tenant and roles.
            prompt: The task.
            agent: Name of the agent; None if the server has one.
            session: Name of a conversation of the caller.
            after: A run that is over and may be seen by the caller; this run continues its history.
            messages: A history to continue that is not in the store; only without a session. Its replies and results
                are untrusted, since what they were made of is unknown.
            settings: Settings of model requests; set fields override the agent's.
            metadata: Data of the caller's own, stored with the run.
            key: Key that the client chose, unique for its tenant and user. The second start with it returns the same
                run. None: a new run.
            hook: Name of the webhook whose delivery has the key; empty for the key of a client.
            traceparent: Span of the caller, for a server that is not traced itself; empty for none.
            labels: Labels of the task.

        Raises:
            MisuseError: when there is no such agent, the key is empty, too long or not printable, or the prompt or
                history is not admitted.
            ForbiddenError: when the metadata have tools of the client, and the server takes none.
            ConflictError: when the key is that of another run of the caller, such as one in another session or a fork,
                or the session has a run that is not over.
            LimitExceededError: when the caller has used its tokens, or has too many runs.
            OverloadedError: when too many runs wait for a worker.
        """
        chosen = self.find_agent(agent)
        if not self.front_end_tools and (found := read_front_end(metadata)) is not None and found[0]:
            raise ForbiddenError("this server takes no tools of its clients: leave out `tools`")
        prompt = admit(prompt, caller.user)
        messages = [_distrust(each) for each in admit_messages(messages, caller.user)]
        run_id, known = new_id(), None
        if key is not None:
            if not hook:
                check_key(key)
            run_id, known = await self.find_keyed_run(caller, key, hook=hook)
        session_id = None if session is None else caller.qualify_session(session)
        if known is not None and not _is_same_start(known, chosen, session_id):
            raise taken_key_error()
        options: StartOptions = {}
        if (rollout := self.rollouts.get(chosen.name)) is not None:
            chosen, options = await rollout.choose(
                user=caller.user,
                session=session_id,
                tenant=caller.tenant,
                id=run_id,
                roles=caller.roles,
                metadata=metadata,
            )
        tracer = chosen.driver.config.tracer
        current = "" if tracer is None else tracer.current_traceparent()
        run = chosen.start(
            prompt,
            id=run_id,
            session=session_id,
            after=after,
            messages=messages,
            settings=settings,
            user=caller.user,
            tenant=caller.tenant,
            release=options.get("release", ""),
            arms=options.get("arms"),
            roles=caller.roles,
            metadata=metadata,
            traceparent=current or traceparent,
            labels=labels,
        )
        if self._asks_four_eyes(caller):
            await end_allowances(self.runs.store, run.header)
        async with nullcontext() if known is not None else self.admission.admit_run(caller, chosen.name, run_id):
            needs_deps = chosen.driver.config.resolve_deferred is not None
            stored = await chosen.submit(run, deps=await self.resolve_deps(run) if needs_deps else None)
        if not _is_same_start(stored.header, chosen, session_id):  # another request was faster
            raise taken_key_error()
        return stored, stored.header.nonce == run.header.nonce  # of racing requests, the store has the header of one

    async def find_keyed_run(self, caller: Caller, key: str, *, hook: str = "") -> tuple[str, Header | None]:
        """Return the id of the run for a key of a caller, and its header; None if there is no such run."""
        return await find_keyed_run(self.runs.store, key, tenant=caller.tenant, user=caller.user, hook=hook)

    async def resolve_deps(self, run: Run) -> Any:
        """Return the dependencies of a run."""
        deps = self.deps(run) if callable(self.deps) else self.deps
        return await deps if isinstance(deps, Awaitable) else deps

    async def open_stream(self, run_id: str, versions: Versions, encoder: StreamEncoder) -> RunEventStream:
        """Return the response that streams the events of a run after the versions that the client has.

        Raises:
            MisuseError: when the runs have no such versions.
        """
        stream = RunEventStream(
            runs=self.runs,
            run_id=run_id,
            root_id=(await self.runs.root(run_id)).id,
            versions=versions,
            encoder=encoder,
            feeds=self.feeds,
            hub=self.hub,
            scopes=self.streams,
        )
        await stream.check()
        return stream

    # State of the server.

    async def is_ready(self) -> bool:
        """Return whether the store answers and the worker is running."""
        with anyio.move_on_after(READY_TIMEOUT_S):
            try:
                await self.runs.store.now()
            except AgentError as error:
                _log.warning("the server is not ready: %s", error)
                return False
            return self._tasks is not None
        return False

    async def count_waiting(self, agent: str, limit: int) -> int:
        """Return how many runs of an agent wait for a decision or for input, up to a limit."""
        return await self.runs.store.count(Filter(agent=agent, waiting=True, purpose=""), limit=limit)

    async def read_run_metrics(self) -> str:
        """Return the metrics of the runs in the store, in the text format of Prometheus."""
        releases = [arm for rollout in self.rollouts.values() for arm in rollout.arms.values()]
        return await self.run_metrics.format([*self.agents.values(), *releases])

    # Access.

    def find_agent(self, name: str | None) -> Agent[Any]:
        """Return an agent of the server; None stands for the only one.

        Raises:
            MisuseError: when there is no such agent.
        """
        if name is None and len(self.agents) == 1:
            return next(iter(self.agents.values()))
        if not self.agents:
            raise MisuseError("this server has no agents: start it with the agent, as module:agent")
        if name is None or name not in self.agents:
            raise MisuseError(f"name one of the server's agents as `agent`: {', '.join(self.agents)}")
        return self.agents[name]

    async def open_run(self, run_id: str, caller: Caller, *, is_control: bool = False) -> Header:
        """Return the header of a run that a caller names.

        Args:
            run_id: The id, as the caller gave it.
            caller: The caller.
            is_control: Whether the run is controlled: only its own user and administrators may.

        Raises:
            RunNotFoundError: when there is no such run, or the caller may not see it, so that it does not learn of it.
            ForbiddenError: when the caller may see but not control the run.
        """
        header = None
        if run_id.isprintable():
            with suppress(RunNotFoundError):
                header = await self.runs.header(run_id)
        if header is None or not caller.can_see(header) or not await self._is_served(header):
            raise RunNotFoundError(f"there is no run {run_id!r}")
        if is_control and header.user != caller.user and not caller.allows("admin"):
            raise ForbiddenError("this is another user's run: its own user or an administrator may do this")
        return header

    async def _is_served(self, header: Header) -> bool:
        root = header if header.parent is None or not self.agents else await self.runs.root(header.id)
        return not self.agents or root.agent in self.agents

    async def serves(self, row: RunSummary) -> bool:
        """Return whether a run of a list is that of an agent of the server, or of a sub-agent that one has called."""
        if row.parent is None or not self.agents:
            return not self.agents or row.agent in self.agents
        try:
            return (await self.runs.root(row.parent)).agent in self.agents
        except RunNotFoundError:  # deleted meanwhile
            return False

    def check_parts(self, header: Header, prompt: Prompt) -> None:
        """Check that the model of a run's agent takes each part of an input.

        Raises:
            MisuseError: when it does not.
        """
        if (agent := self.agents.get(header.agent)) is None:
            return  # a sub-agent, whose model is not known: it reads a note in place of the part
        for part in as_parts(prompt):
            if (why := agent.model.unsupported_part(part)) is not None:
                raise MisuseError(f"{agent.model.name} cannot take this: {why}")

    def _asks_four_eyes(self, caller: Caller) -> bool:
        return self.four_eyes or caller.four_eyes

    async def decide_as(self, caller: Caller, header: Header) -> Runs:
        """Return the client by which a caller decides on the calls of a run, or speaks to it.

        If four eyes are asked for, it is under them, and the allowances of the run end: what the caller does now may
        shape a call that an allowance would let through.
        """
        if not self._asks_four_eyes(caller):
            return self.runs
        await end_allowances(self.runs.store, header)
        return attrs.evolve(self.runs, four_eyes=True)

    async def find_waiting_run(
        self, header: Header, call_id: str, *, shown_run: str | None = None, digest: str | None = None
    ) -> str:
        """Return the id of the run that waits for a decision on a call: the run, or that of a sub-agent.

        Args:
            header: Header of the run that the caller names.
            call_id: Id of the call.
            shown_run: `run_id` of the item that the person saw; None if the client does not say.
            digest: Its digest, which tells calls with one id apart, too.

        Raises:
            MisuseError: when `shown_run` is no run of this one, or it is not said and several runs have such a call.
        """
        if shown_run == header.id:
            return header.id
        if shown_run is not None:
            if not shown_run.isprintable() or not await self._is_below(shown_run, header.id):
                raise MisuseError(
                    f"{shown_run[:80]!r} is no run of {header.id!r}: give the `run_id` of the pending item"
                )
            return shown_run
        found = [item for item in (await self.runs.load(header.id)).pending if item.call_id == call_id]
        as_shown = [item for item in found if digest and item.digest == digest]
        runs = list(dict.fromkeys([item.run_id for item in as_shown or found])) or [header.id]
        if len(runs) > 1:
            raise MisuseError(f"{call_id} is a call of {', '.join(runs)}: give the `run_id` of the pending item")
        return runs[0]

    async def _is_below(self, run_id: str, ancestor: str) -> bool:
        current: str | None = run_id
        try:
            while current is not None and current != ancestor:
                current = (await self.runs.header(current)).parent
        except RunNotFoundError:
            return False
        return current is not None

    async def wait_for(self, run_id: str, wait_s: float) -> Run:
        """Return a run once it is over or waits, after `wait_s` seconds or when the server stops at the latest."""
        if wait_s:
            with anyio.move_on_after(wait_s) as scope:
                self._waits.add(scope)
                try:
                    return self.attach_decoder(await self.runs.wait(run_id))
                finally:
                    self._waits.discard(scope)
        return self.attach_decoder(await self.runs.load(run_id))

    async def load(self, header: Header, at: int | None = None) -> Run:
        """Return a run, at a version; its agent parses its output.

        Raises:
            MisuseError: when the run does not have this version.
        """
        return self.attach_decoder(await self.runs.load(header.id, at=at))

    def attach_decoder(self, run: Run) -> Run:
        """Return a run whose agent parses its output."""
        agent = self.agents.get(run.header.agent)
        return run if agent is None else agent.driver.attach_decoder(run)


def _is_same_start(header: Header, agent: Agent[Any], session: str | None) -> bool:
    """Return whether a run is one that a request with its key would start, as far as its prompt does not tell."""
    is_here = header.session == session or find_reserved_form(header.id) is None  # a key of before version 0.3
    return is_here and (header.agent, header.forked_from) == (agent.name, None)


def _distrust(message: Message) -> Message:
    """Return a message of a client's history with the label `untrusted` if the user has not written it."""
    if isinstance(message, AssistantMessage):
        return attrs.evolve(message, hosted=HostedContent(labels=(Label.UNTRUSTED,)))
    if isinstance(message, ToolResult):
        return attrs.evolve(message, labels=join_labels(message.labels, (Label.UNTRUSTED,)))
    return message


def check_key(key: str) -> None:
    """Check a key of a request.

    Raises:
        MisuseError: when it is empty, too long or not printable.
    """
    if not is_key(key):
        raise MisuseError(f"a key (`Idempotency-Key`) must have 1 to {MAX_KEY_CHARS} printable characters")


def taken_key_error(name: str = "Idempotency-Key") -> ConflictError:
    """Return the error of a key, of the header or field `name`, that stands for another request."""
    return ConflictError(f"this `{name}` is taken: choose another one")
