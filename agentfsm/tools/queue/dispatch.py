"""Run one tool call: arguments, checks, attempts and timeout.

Whatever a tool does, its call gets exactly one result. This applies to every call, whether a run makes it through its
`QueueHost` or a stand-alone queue.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import Context, copy_context
from functools import partial
from inspect import isawaitable
from types import CoroutineType, GeneratorType
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import anyio
import attrs
from anyio.lowlevel import checkpoint_if_cancelled

from agentfsm._lib.concurrency import (
    drive,
    is_foreign_cancellation,
    make_scope,
    make_waker,
    start_in_thread,
    threadsafe_scheduler,
)
from agentfsm.core.errors import (
    ArgumentsError,
    IncompatibleProgramError,
    ModelRetry,
    OutcomeUnknownError,
    RefusedError,
    StoreError,
    ToolError,
)
from agentfsm.core.labels import Label, ToolKind
from agentfsm.core.messages import CHUNK_CHARS, ErrorType, Media, Outcome, ToolCall, replace_surrogates
from agentfsm.core.usage import AgentCost
from agentfsm.ports.tool_sandbox import SandboxEnd, SandboxOutcome
from agentfsm.streaming.stream import StreamEvent, ToolEvent, ToolEventType
from agentfsm.tokens.ledger import estimate_tokens
from agentfsm.tools.breaker import Ticket
from agentfsm.tools.executing_call import ExecutingCall, executing_call
from agentfsm.tools.queue import result_text
from agentfsm.tools.queue.call_order import Access
from agentfsm.tools.queue.transient import TransientFailure, classify_failure
from agentfsm.tools.run_context import CallPaused, RunContext, ToolReturn

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from agentfsm._lib.limiter import Limiter, Permit
    from agentfsm.core.messages import ToolResult
    from agentfsm.ports.store import Clock
    from agentfsm.tools.registry import ToolRegistry
    from agentfsm.tools.schema.binding import BoundArguments
    from agentfsm.tools.tool import Tool

_LOCK = threading.Lock()
_ABANDONED: dict[object, list[CallThread]] = {}


@attrs.define(eq=False, repr=False)
class CallThread:
    """A thread that runs a call, and the resources that it uses."""

    name: str
    """Name of the tool."""

    access: Access
    """Resources that the call uses."""

    has_ended: bool = attrs.field(default=False, init=False)
    _owner: object = attrs.field(default=None, init=False)
    _callbacks: list[Callable[[], object]] = attrs.field(factory=list, init=False)

    def mark_abandoned(self, owner: object) -> None:
        """Register the thread as abandoned: the call is over, but its thread still runs."""
        with _LOCK:
            if not self.has_ended:
                self._owner = owner
                _ABANDONED.setdefault(owner, []).append(self)

    def mark_ended(self) -> None:
        """Record that the thread has ended; called from the thread itself."""
        with _LOCK:
            self.has_ended = True
            waiting, self._callbacks = self._callbacks, []
            if (places := _ABANDONED.get(self._owner)) is not None and self in places:
                places.remove(self)
                if not places:
                    del _ABANDONED[self._owner]
        for wake in waiting:
            wake()

    def on_end(self, wake: Callable[[], object]) -> None:
        """Call `wake` from the thread when it ends; at once if it has ended."""
        with _LOCK:
            if not self.has_ended:
                self._callbacks.append(wake)
                return
        wake()

    async def wait_ended(self) -> None:
        """Wait until the thread has ended; usable on any event loop."""
        ended = anyio.Event()
        self.on_end(make_waker(ended.set))
        await ended.wait()


def find_abandoned(owner: object) -> tuple[CallThread, ...]:
    """Return the threads of this owner that still run."""
    return tuple(_ABANDONED.get(owner, ())) if _ABANDONED else ()


# Seconds before the first retry, twice that before the second, if the service states no wait: document C, 9.3.
RETRY_WAIT_S: Final = 1.0
# Maximum of retries after a rate limit error: more of them would only add requests.
RATE_LIMIT_RETRIES: Final = 1


class CallOutcome(NamedTuple):
    """Outcome of a call, with the text and the parts of its result."""

    outcome: Outcome
    text: str
    error_type: ErrorType | None = None
    retryable: bool = False
    child: AgentCost | None = None
    parts: tuple[Media, ...] = ()
    labels: tuple[Label, ...] = ()
    sandbox: str = ""
    background: bool = False


def failed_outcome(text: str, error_type: ErrorType, *, retryable: bool = False) -> CallOutcome:
    """Build the outcome of a call that failed."""
    return CallOutcome(Outcome.FAILED, text, error_type, retryable)


class QueueHost:
    """The interface between calls and their run. This base class serves a stand-alone queue."""

    activate_span: Callable[[ToolCall], AbstractContextManager[object]] | None = None
    """Function that returns what makes the span of a call current in its task; None if calls are not traced."""

    def find_tool(self, registry: ToolRegistry, name: str) -> Tool[..., Any] | None:
        """Return the tool of that name, or None."""
        return registry.get(name)

    def has_started(self, call: ToolCall) -> bool:  # noqa: ARG002  a queue without a run has no journal
        """Return whether the journal has a start of the call, before this execution of it."""
        return False

    def list_tool_names(self, registry: ToolRegistry) -> Sequence[str]:
        """Return the names of the available tools, for a model that called an unknown tool."""
        return registry.names

    def position_in_reply(self, call: ToolCall, index: int) -> int:  # noqa: ARG002  others need it
        """Return the call's position in the reply, given its index in the queue."""
        return index

    def build_context(self, call: ToolCall, tool: Tool[..., Any], deadline: float) -> RunContext[Any]:  # noqa: ARG002  others need it
        """Build the context of a call; `deadline` is a Unix time in seconds."""
        return RunContext(deps=None, call_id=call.id, idempotency_key=call.key, deadline=deadline)

    def build_login_context(self, call: ToolCall, tool: Tool[..., Any]) -> RunContext[Any]:
        """Build the context in which the login of a call is checked, before its start."""
        return self.build_context(call, tool, float("inf"))

    def begin_attempt(self, call: ToolCall) -> ExecutingCall | None:  # noqa: ARG002  no run is behind the call
        """Return the call as the runs see it that its function starts; None if no run is behind the call."""
        return None

    def check_available(self, tool: Tool[..., Any]) -> CallOutcome | None:  # noqa: ARG002  all tools are there
        """Return the refusal if no call of the tool can run, whatever its arguments, else None."""
        return None

    def check_permitted(self, call: ToolCall, tool: Tool[..., Any], bound: BoundArguments) -> CallOutcome | None:  # noqa: ARG002  nothing is refused here
        """Return the refusal of a valid call, or None. This is the only place that decides it."""
        return None

    async def reserve_spend(self, call: ToolCall, tool: Tool[..., Any]) -> CallOutcome | None:  # noqa: ARG002  a queue without a run has no limits
        """Reserve the cost of a permitted call in spending limits; return the refusal without room, else None."""
        return None

    async def on_start(self, call: ToolCall, tool: Tool[..., Any]) -> None:
        """Prepare the start of a valid call, right before its tool runs. An exception stops the queue."""

    def list_labels(self, tool: Tool[..., Any], call: ToolCall) -> tuple[Label, ...]:
        """Return the labels of a call that was tried."""
        return tool.list_labels(call)

    def mask_error(self, text: str) -> str:
        """Return the text of a tool's error without secrets, before anything else reads it."""
        return result_text.mask_secrets(text)

    def on_tool_error(self, call: ToolCall, error: BaseException) -> None:
        """Record an exception with which a call has failed, for its traceback."""

    def build_shown(self, result: ToolResult) -> ToolResult:
        """Return a result as listeners may see it. It has not been passed to `on_result` yet."""
        return result

    def on_result(self, result: ToolResult) -> None:
        """Receive the result of a call, in the order of completion."""

    def on_cut_off(self, job: ToolJob, duration_s: float) -> None:
        """Record that a call was cut off with the queue and has no result."""

    def on_limit_wait_cut_off(self, job: ToolJob) -> None:
        """Record that a call was cut off with the queue while it waited for a limit of its tool or tag."""

    async def on_refused(self, job: ToolJob, end: CallOutcome) -> CallOutcome | None:  # noqa: ARG002  the calls of a queue without a run have never started before
        """Return the outcome of a call that is refused before its tool runs; None if it gets no result now."""
        return end

    async def on_broken_off(self, job: ToolJob, end: CallOutcome, reason: str) -> CallOutcome | Literal["rerun"] | None:  # noqa: ARG002  a queue without a run cannot ask a person
        """Apply the tool's policy to a call that broke off in its attempt, so that its outcome is unknown.

        Args:
            job: The call.
            end: The outcome if the model has to read that it is unknown.
            reason: Reason why the call broke off, for people.

        Returns:
            The outcome; "rerun" if the call may be repeated; None if it gets no result now.
        """
        return "rerun" if job.tool is not None and job.tool.on_unknown == "rerun" else end

    async def on_pause(self, job: ToolJob, pause: CallPaused) -> CallOutcome | None:  # noqa: ARG002  a queue without a run cannot pause
        """Record that a call is paused on external input.

        Return a CallOutcome instead if this host cannot pause calls.
        """
        return failed_outcome("it needs a decision, and no person can give it here", ErrorType.BLOCKED, retryable=True)

    async def end_interrupted_child(self, call: ToolCall, tool: Tool[..., Any], end: CallOutcome) -> CallOutcome:  # noqa: ARG002  a queue without a run has no child runs
        """End the child run of a subagent call that was interrupted; return the call's final outcome."""
        return end

    def count_tokens(self, text: str) -> int:
        """Return the number of tokens of a text, or an estimate."""
        return estimate_tokens(text)


@attrs.define(eq=False, repr=False)
class ToolJob:
    """A call in the queue, and its state."""

    index: int
    call: ToolCall
    tool: Tool[..., Any] | None
    access: Access
    limiters: tuple[Limiter, ...] = ()
    """Limiters that the call must pass before it runs."""

    permits: list[Permit] = attrs.field(factory=list)
    """Permits of the limiters passed so far, in their order."""

    bound: BoundArguments | ArgumentsError | None = None
    """The bound arguments, or the error that they raised; None until they are first needed."""

    refusal: CallOutcome | None = None
    """Reason why the call is not run, if that is known before; None if it may run."""

    on_started: Callable[[], object] | None = None
    """Called when the tool starts."""

    started_at: float = 0.0
    """Unix time in seconds at which the call was taken up."""

    announced_attempts: int = 0
    """Number of times that the host was notified of an upcoming attempt."""

    attempts: int = 0
    """Number of times that the tool was called."""

    broke_off: bool = False
    """Whether the last attempt broke off, so that its outcome is unknown."""

    abandoned_thread: CallThread | None = None
    """Thread of the call that still runs after the call has ended."""

    @property
    def kind(self) -> ToolKind | None:
        """Kind of the tool; None for an unknown tool."""
        return None if self.tool is None else self.tool.kind

    @property
    def estimate_s(self) -> float | None:
        """Usual seconds of a call, if the tool declares them."""
        return None if self.tool is None else self.tool.estimate_s

    def bind(self, tool: Tool[..., Any]) -> BoundArguments:
        """Return the bound arguments, parsed once and valid for the schema. The `validate` rule is checked later.

        Raises:
            ArgumentsError: if they do not fit.
        """
        if self.bound is None:
            try:
                self.bound = tool.bind(self.call.arguments)
            except ArgumentsError as error:
                self.bound = error
        if isinstance(self.bound, ArgumentsError):
            raise self.bound
        return self.bound


@attrs.define(eq=False, repr=False, kw_only=True)
class ToolDispatcher:
    """Decides whether calls may run, and holds the settings and counts of the queue that they run with."""

    registry: ToolRegistry
    host: QueueHost
    clock: Clock
    owner: object
    """Owner of the calls, usually a run id. A thread that outlives its call blocks only later calls of the same
    owner.
    """

    timeout_s: float
    retries_per_tool: int
    retries_per_run: int
    retries: dict[str, int]
    """Number of retries so far, by tool name."""

    on_event: Callable[[StreamEvent], None] | None
    """Function that receives progress events; None without a listener."""

    async def admit(self, job: ToolJob) -> CallOutcome | AdmittedCall:
        """Check a call. Return it ready to run, or its outcome if it is refused.

        Raises:
            CallPaused: if it waits for external input.
        """
        if job.refusal is not None:
            return job.refusal
        call = job.call
        tool = job.tool
        if tool is None:
            return failed_outcome(
                result_text.unknown_tool_text(call.name, self.host.list_tool_names(self.registry)),
                ErrorType.UNKNOWN_TOOL,
            )
        if (absence := self.host.check_available(tool)) is not None:
            return absence
        if call.malformed is not None:
            return failed_outcome(
                result_text.malformed_arguments_text(call.malformed), ErrorType.ARGUMENTS, retryable=True
            )
        try:
            bound = job.bind(tool)
            tool.check_rule(bound)
        except ArgumentsError as error:
            return failed_outcome(replace_surrogates(str(error)), ErrorType.ARGUMENTS, retryable=True)
        if tool.start_rule is not None:  # it sets the key of the call, or gives its outcome if it need not start
            ctx = self.host.build_context(call, tool, self.clock.now())
            decided = tool.start_rule(ctx, tool.to_namespace(bound), has_started=self.host.has_started(call))
            if isinstance(decided, str):
                job.call = call = attrs.evolve(call, key=decided)
            elif decided is not None:
                return _read_returned(decided)
        if (refusal := self.host.check_permitted(call, tool, bound)) is not None:
            return refusal
        if tool.cost_usd is not None and (refusal := await self.host.reserve_spend(call, tool)) is not None:
            return refusal
        if tool.login is not None:
            try:
                await tool.login.require(self.host.build_login_context(call, tool))
            except ToolError as error:
                text = self.host.mask_error(replace_surrogates(str(error)))
                return failed_outcome(text, ErrorType.UNAVAILABLE, retryable=True)
        timeout_s = tool.timeout_s or self.timeout_s
        places = find_abandoned(self.owner)
        if places and (blocker := await _wait_for_abandoned(places, job.access, timeout_s)) is not None:
            return failed_outcome(result_text.blocked_text(blocker), ErrorType.BLOCKED, retryable=True)
        ticket = tool.breaker.admit(self.clock.monotonic())
        if not isinstance(ticket, Ticket):
            return failed_outcome(result_text.circuit_open_text(tool, ticket), ErrorType.CIRCUIT_OPEN, retryable=True)
        return AdmittedCall(self, job, tool, bound, timeout_s, ticket)


# Errors that suggest that the service is down; wrong arguments, bugs and refusals do not. A function in a sandbox has
# none: the time of one call says nothing of the next. The death of its process counts, as that of any executor.
_BREAKER_ERRORS: Final = frozenset({ErrorType.TIMEOUT, ErrorType.UNAVAILABLE, ErrorType.RATE_LIMITED})


@attrs.define(eq=False, repr=False)
class AdmittedCall:
    """A call that has passed all checks. It has to be run at once, since it holds a ticket of the circuit breaker."""

    dispatcher: ToolDispatcher
    job: ToolJob
    tool: Tool[..., Any]
    bound: BoundArguments
    timeout_s: float
    """Seconds for all attempts, without the grace of the tool."""

    ticket: Ticket
    """Ticket of the tool's circuit breaker."""

    _scope: anyio.CancelScope = attrs.field(factory=make_scope, init=False)
    """Cancels the call when its time is over. The deadline is set when the function first waits, since only then it can
    be cancelled: a call that never waits pays for no timer.
    """

    _run_context: RunContext[Any] | None = attrs.field(default=None, init=False)
    """Context of the current attempt, if the tool takes one."""

    _open_stops: int = attrs.field(default=0, init=False)
    """Number of blocks in progress that stop the timer."""

    _time_left_s: float = attrs.field(default=0.0, init=False)
    """Seconds that the timer had left when it was stopped."""

    async def run(self) -> CallOutcome | None:
        """Call the function until there is a result, no retry is left, or the time is over.

        Return None if there is no result now, because the call broke off and a person has to find out its outcome.

        Raises:
            CallPaused: if the call waits for external input.
        """
        job, tool, (args, kwargs) = self.job, self.tool, self.bound
        host, breaker = self.dispatcher.host, tool.breaker
        outcome: CallOutcome | None = None
        try:
            job.announced_attempts = 1
            await host.on_start(job.call, tool)
            if job.on_started is not None:
                job.on_started()
            if job.permits:
                for limiter, permit in zip(job.limiters, job.permits, strict=True):
                    limiter.start(permit)  # a rate limit counts the call from now on
            with self._scope if host.activate_span is None else _nest(self._scope, host.activate_span(job.call)):
                while True:
                    executing: ExecutingCall | None = None
                    value: Any
                    try:
                        given = (self._next_context(), *args) if tool.takes_context else args
                        job.attempts += 1
                        context = copy_context()
                        if tool.sandbox is None and (executing := host.begin_attempt(job.call)) is not None:
                            context.run(executing_call.set, executing)
                        if tool.sandbox is not None:
                            sandboxed = tool.sandbox.run(tool.function, given, kwargs)
                            value = await drive(sandboxed, self._start_timer, context=context)
                        elif tool.is_async:
                            value = await drive(tool.function(*given, **kwargs), self._start_timer, context=context)
                            # A returned coroutine that is not awaited has not run, but would be reported as done.
                            if type(value) is CoroutineType:
                                value = await drive(value, self._start_timer, context=context)
                        else:
                            value = await self._run_in_thread(partial(tool.function, *given, **kwargs), context)
                    except BaseException as error:  # noqa: BLE001  every exception of a tool is its result, even a panic in Rust
                        end = self._mask(await self._handle_exception(_unwrap_group(error)))
                    else:
                        if type(value) is ToolReturn:
                            end = _read_returned(value)
                        elif type(value) is SandboxOutcome and value.end is not SandboxEnd.DONE:
                            end = self._mask(await self._handle_sandbox_failure(value))
                        else:
                            level = ""
                            if type(value) is SandboxOutcome:
                                value, level = value.value, value.level
                            if type(value) is str and value[CHUNK_CHARS:]:  # unchanged: the queue has a thread for it
                                end = CallOutcome(Outcome.DONE, value, sandbox=level)
                            else:
                                text, parts = result_text.render_result(value, tool)
                                end = CallOutcome(Outcome.DONE, text, parts=parts, sandbox=level)
                    finally:
                        if executing is not None and job.abandoned_thread is None:
                            executing.is_over = True
                    if end is None or isinstance(end, CallOutcome):
                        outcome = end
                        break
                    await anyio.sleep(end)
                    job.announced_attempts += 1
                    await host.on_start(job.call, tool)  # the run may have a new owner
            if self._scope.cancelled_caught:
                text = result_text.timeout_text(tool, self.timeout_s)
                outcome = CallOutcome(Outcome.TIMED_OUT, text, ErrorType.TIMEOUT, tool.read_only)
            if tool.kind is ToolKind.AGENT and outcome is not None and outcome.child is None and not outcome.background:
                outcome = await host.end_interrupted_child(job.call, tool, outcome)
        except BaseException:
            breaker.discard(self.ticket)
            raise
        if outcome is None or job.broke_off or (outcome.error_type in _BREAKER_ERRORS and tool.sandbox is None):
            breaker.record_failure(self.ticket, self.dispatcher.clock.monotonic())
        else:
            breaker.record_success(self.ticket)
        return outcome

    def _start_timer(self) -> None:
        """Set the deadline, once; not while the timer is stopped, in which the function may wait for the first time."""
        if self._scope.deadline == float("inf") and not self._open_stops:
            self._scope.deadline = anyio.current_time() + self.timeout_s + self.tool.grace_s

    @contextmanager
    def _stop_timer(self) -> Iterator[None]:
        """Stop the timer of the call while a person is asked. Blocks may overlap."""
        self._start_timer()
        if not self._open_stops:
            self._time_left_s, self._scope.deadline = self._scope.deadline - anyio.current_time(), float("inf")
        self._open_stops += 1
        try:
            yield
        finally:
            self._open_stops -= 1
            if not self._open_stops:
                self._scope.deadline = anyio.current_time() + self._time_left_s

    def _mask(self, end: CallOutcome | float | None) -> CallOutcome | float | None:
        """Return the outcome of an attempt that failed, without secrets in its text."""
        if not isinstance(end, CallOutcome) or end.outcome is Outcome.DONE:
            return end
        return end._replace(text=self.dispatcher.host.mask_error(end.text))

    async def _handle_sandbox_failure(self, ended: SandboxOutcome) -> CallOutcome | float | None:
        """Return the outcome of a call that did not end well in its sandbox, the seconds to wait, or None."""
        tool, error, level = self.tool, replace_surrogates(ended.error), ended.level
        if ended.end is SandboxEnd.RETRY:
            return failed_outcome(error, ErrorType.RETRY, retryable=True)._replace(sandbox=level)
        if ended.end is SandboxEnd.LOST:
            lost = OutcomeUnknownError(error)
            lost.add_note(replace_surrogates(ended.trace))
            end = await self._handle_broken_off(lost)
            return end._replace(sandbox=level) if isinstance(end, CallOutcome) else end
        self.dispatcher.host.on_tool_error(self.job.call, ToolError(f"{error}\n{replace_surrogates(ended.trace)}"))
        if ended.end is SandboxEnd.NOT_STARTED:
            return failed_outcome(result_text.not_sandboxed_text(error), ErrorType.UNAVAILABLE, retryable=True)
        text = result_text.sandbox_failure_text(error, tool)
        if ended.end is SandboxEnd.TIMED_OUT:
            return CallOutcome(Outcome.TIMED_OUT, text, ErrorType.TIMEOUT, tool.read_only, sandbox=level)
        return failed_outcome(text, ErrorType.TOOL, retryable=tool.read_only)._replace(sandbox=level)

    async def _handle_exception(self, error: BaseException) -> CallOutcome | float | None:
        """Return the outcome for a tool's exception, the seconds to wait, or None; re-raise other exceptions."""
        if isinstance(error, GeneratorExit):  # the coroutine was closed, perhaps after its event loop
            raise error
        if isinstance(error, ModelRetry):
            return failed_outcome(result_text.retry_text(error), ErrorType.RETRY, retryable=True)
        if isinstance(error, anyio.get_cancelled_exc_class()) and not is_foreign_cancellation(error):
            if self._run_context is not None:
                self._run_context.cancel_flag.is_set = True
            raise error
        if self._must_propagate(error):
            raise error
        await checkpoint_if_cancelled()  # the tool may have converted its cancellation
        if isinstance(error, OutcomeUnknownError) or (
            isinstance(error, BaseExceptionGroup) and error.subgroup(OutcomeUnknownError) is not None
        ):
            return await self._handle_broken_off(error)
        tool, passing = self.tool, classify_failure(error)
        if passing is None:
            self.dispatcher.host.on_tool_error(self.job.call, error)
            text, kind = result_text.failure_text(error, tool), ErrorType.TOOL
            return failed_outcome(text, kind, retryable=tool.read_only)
        wait_s = passing.retry_after_s if passing.retry_after_s is not None else RETRY_WAIT_S * self.job.attempts
        if self._claim_retry(error, wait_s, rate_limited=passing.rate_limited):
            return wait_s
        if not isinstance(error, RefusedError):
            self.dispatcher.host.on_tool_error(self.job.call, error)
        return self._unavailable_outcome(error, passing)

    def _must_propagate(self, error: BaseException) -> bool:
        """Return whether an error is not the tool's own: a pause, a KeyboardInterrupt, or one of a run below."""
        if isinstance(error, BaseExceptionGroup):
            return error.subgroup(KeyboardInterrupt) is not None
        if self.tool.kind is ToolKind.AGENT and (
            isinstance(error, StoreError | IncompatibleProgramError) or not isinstance(error, Exception)
        ):
            return True
        return isinstance(error, CallPaused | KeyboardInterrupt)

    def _next_context(self) -> RunContext[Any]:
        """Return the context of the next attempt. Its progress callbacks work until the call is cancelled."""
        if self._run_context is not None:
            self._run_context = attrs.evolve(self._run_context, attempt=self._run_context.attempt + 1)
            return self._run_context
        call, on_event = self.job.call, self.dispatcher.on_event
        deadline = self.dispatcher.clock.now() + self.timeout_s
        known = self.dispatcher.host.build_context(call, self.tool, deadline)
        if known.attendance is not None:
            known = attrs.evolve(known, attendance=known.attendance.with_clock(self._stop_timer))
        self._run_context = known
        if on_event is None:
            return known
        home, in_loop = threading.get_ident(), threadsafe_scheduler()

        def emit(event: ToolEvent) -> None:
            if not known.cancel_flag.is_set:
                on_event(event)

        def report(message: str) -> None:
            event = ToolEvent(type=ToolEventType.PROGRESS, call_id=call.id, tool=call.name, message=message)
            if threading.get_ident() == home:
                emit(event)
            else:
                in_loop(partial(emit, event))

        self._run_context = attrs.evolve(known, on_progress=report, on_event=on_event)
        return self._run_context

    async def _run_in_thread(self, function: Callable[[], Any], context: Context) -> Any:
        """Run a plain function in a thread. A cancelled call leaves the thread running, registered as abandoned."""
        place = CallThread(self.tool.name, self.job.access)
        handed = start_in_thread(function, place.mark_ended, context=context.copy())
        self._start_timer()
        try:
            value = await handed.wait()
        except BaseException:
            if not place.has_ended:  # not raised by the function
                place.mark_abandoned(self.dispatcher.owner)
                self.job.abandoned_thread = place
            raise
        return await drive(value, context=context) if _is_awaitable(value) else value

    async def _handle_broken_off(self, error: BaseException) -> CallOutcome | float | None:
        """Follow the tool's policy for a call whose outcome is unknown, because its executor died."""
        tool, host = self.tool, self.dispatcher.host
        reason = host.mask_error(result_text.describe_broken_off(error))
        unknown = CallOutcome(Outcome.UNKNOWN, result_text.broken_off_text(reason, tool), ErrorType.UNAVAILABLE)
        with self._stop_timer():  # the function that finds the outcome out has a time of its own
            found = await host.on_broken_off(self.job, unknown, reason)
        wait_s = RETRY_WAIT_S * self.job.attempts
        if found == "rerun" and self._claim_retry(error, wait_s, rate_limited=False):
            return wait_s
        self.job.broke_off = True
        host.on_tool_error(self.job.call, error)
        if found != "rerun":
            return found
        return (
            self._unavailable_outcome(error, TransientFailure(None, rate_limited=False)) if tool.read_only else unknown
        )

    def _claim_retry(self, error: BaseException, wait_s: float, *, rate_limited: bool) -> bool:
        """Return whether the call may be tried again after a wait; count the retry if so.

        The policy of the tool has allowed it already for a call that broke off.
        """
        tool, queue = self.tool, self.dispatcher
        self._start_timer()
        if anyio.current_time() + wait_s >= self._scope.deadline:
            return False
        if not tool.repeatable and not isinstance(error, RefusedError | OutcomeUnknownError):
            return False
        if rate_limited and self.job.attempts > RATE_LIMIT_RETRIES:
            return False
        own = queue.retries.get(tool.name, 0)
        if own >= queue.retries_per_tool or sum(queue.retries.values()) >= queue.retries_per_run:
            return False
        queue.retries[tool.name] = own + 1
        return True

    def _unavailable_outcome(self, error: BaseException, passing: TransientFailure) -> CallOutcome:
        tool = self.tool
        kind = ErrorType.RATE_LIMITED if passing.rate_limited else ErrorType.UNAVAILABLE
        text = result_text.unavailable_text(error, tool, self.job.attempts, passing.retry_after_s)
        retryable = tool.read_only or isinstance(error, RefusedError)
        return failed_outcome(text, kind, retryable=retryable)


@contextmanager
def _nest(outer: AbstractContextManager[object], inner: AbstractContextManager[object]) -> Iterator[None]:
    """Enter two context managers as one."""
    with outer, inner:
        yield


def _read_returned(value: ToolReturn) -> CallOutcome:
    return CallOutcome(
        value.outcome,
        value.content,
        value.error_type,
        value.retryable,
        value.child,
        value.parts,
        value.labels,
        background=value.background,
    )


def _is_awaitable(value: object) -> bool:
    """Return whether a plain function has returned an awaitable; checks its type, since its attributes may raise."""
    return hasattr(type(value), "__await__") or (type(value) is GeneratorType and isawaitable(value))


def _unwrap_group(error: BaseException) -> BaseException:
    """Return the only error in a group: a task group around an error does not change its meaning."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


async def _wait_for_abandoned(places: Sequence[CallThread], access: Access, timeout_s: float) -> str | None:
    """Wait for threads that the call must not overlap. Return the tool's name of one that does not end in time."""
    places = [place for place in places if not place.access.may_overlap(access)]
    with anyio.move_on_after(timeout_s):
        for place in places:
            await place.wait_ended()
        return None
    return next((place.name for place in places if not place.has_ended), None)
