"""One call, from its text to its result: the arguments, the checks, the attempts, the time.

Whatever a tool does, its call gets exactly one result. What is written here holds for every call, whoever asked for
it: a run by way of its `QueueHost`, or a queue that works by itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from inspect import isawaitable
from types import CoroutineType, GeneratorType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import anyio
import attrs
from anyio.lowlevel import checkpoint_if_cancelled

from agentfsm._concurrency import (
    in_copied_context,
    is_foreign_cancellation,
    start_in_thread,
    threadsafe_scheduler,
)
from agentfsm.core.errors import ArgumentsError, ModelRetry, RefusedError, StoreError
from agentfsm.core.messages import ErrorType, Media, Outcome, ToolCall, replace_surrogates
from agentfsm.core.tool_traits import ToolKind
from agentfsm.core.usage import AgentCost
from agentfsm.streaming.stream import StreamEvent, ToolEvent, ToolEventType
from agentfsm.tokens.ledger import estimate_tokens
from agentfsm.tools.breaker import Ticket
from agentfsm.tools.queue import result_text
from agentfsm.tools.queue.abandoned_threads import CallThread, find_abandoned
from agentfsm.tools.queue.transient import TransientFailure, classify_failure
from agentfsm.tools.run_context import CallPaused, RunContext, ToolReturn

if TYPE_CHECKING:
    from agentfsm.core.messages import ToolResult
    from agentfsm.limiter import Limiter, Permit
    from agentfsm.ports.store import Clock
    from agentfsm.tools.queue.plan import Access
    from agentfsm.tools.registry import ToolRegistry
    from agentfsm.tools.schema.binding import BoundArguments
    from agentfsm.tools.tool import Tool

# Seconds before the first retry, twice that before the second, where the service does not say: document C, 9.3.
RETRY_WAIT_S: Final = 1.0
# Attempts after the first where there were too many requests: more of them would not make them fewer.
RATE_LIMIT_RETRIES: Final = 1


class CallOutcome(NamedTuple):
    """How a call ended."""

    outcome: Outcome
    text: str
    error_type: ErrorType | None = None
    retryable: bool = False
    child: AgentCost | None = None
    parts: tuple[Media, ...] = ()


def failed_outcome(text: str, error_type: ErrorType, *, retryable: bool = False) -> CallOutcome:
    """Return the end of a call that has no result."""
    return CallOutcome(Outcome.FAILED, text, error_type, retryable)


class QueueHost:
    """What calls need of whom they work for. As it stands, it serves a queue that works by itself."""

    def find_tool(self, registry: ToolRegistry, name: str) -> Tool[..., Any] | None:
        """Return the tool of that name, or None."""
        return registry.get(name)

    def list_tool_names(self, registry: ToolRegistry) -> Sequence[str]:
        """Return the names to choose from, for a model that called a tool that there is not."""
        return registry.names

    def position_in_reply(self, call: ToolCall, index: int) -> int:  # noqa: ARG002  others need it
        """Return the call's place in the reply, given its place among the calls at hand."""
        return index

    def build_context(self, call: ToolCall, tool: Tool[..., Any], deadline: float) -> RunContext[Any]:  # noqa: ARG002  others need it
        """Make what a tool may know of its call; `deadline` is in seconds since 1970."""
        return RunContext(deps=None, call_id=call.id, idempotency_key=call.key, deadline=deadline)

    def check_available(self, tool: Tool[..., Any]) -> CallOutcome | None:  # noqa: ARG002  all tools are there
        """Say why no call of a tool can run, whatever its arguments, or None."""
        return None

    def check_permitted(self, call: ToolCall, tool: Tool[..., Any], bound: BoundArguments) -> CallOutcome | None:  # noqa: ARG002  nothing is refused here
        """Say why a valid call may not run, or None: the one place where that is decided."""
        return None

    async def on_start(self, call: ToolCall, tool: Tool[..., Any]) -> None:
        """Do what has to be done right before the tool of a valid call runs; what it raises stops the queue."""

    def on_tool_error(self, call: ToolCall, error: BaseException) -> None:
        """Take note of an exception with which a call has failed: whoever wrote the tool wants its traceback."""

    def on_result(self, result: ToolResult) -> None:
        """Take a result, as it comes."""

    def on_cut_off(self, job: ToolJob, duration_s: float) -> None:
        """Take note that a call was cut off together with the queue, and has no result."""

    def on_limit_wait_cut_off(self, job: ToolJob) -> None:
        """Take note that a call was cut off together with the queue while it waited for a limit of its tool or tag."""

    async def on_pause(self, job: ToolJob, pause: CallPaused) -> CallOutcome | None:  # noqa: ARG002  nobody can answer here
        """Take note that a call waits for what is outside; where that cannot be, say how the call ends instead."""
        return failed_outcome("it waits for a decision that nobody can give here", ErrorType.BLOCKED, retryable=True)

    async def end_interrupted_child(self, call: ToolCall, tool: Tool[..., Any], end: CallOutcome) -> CallOutcome:  # noqa: ARG002  nobody is known here
        """End an agent whose call has ended without a word of it; return how the call has ended then."""
        return end

    def count_tokens(self, text: str) -> int:
        """Return the tokens of a text, or about so many."""
        return estimate_tokens(text)


@attrs.define(eq=False, repr=False)
class ToolJob:
    """A call on its way."""

    index: int
    call: ToolCall
    tool: Tool[..., Any] | None
    access: Access
    limiters: tuple[Limiter, ...] = ()
    """What it has to pass before it runs."""

    permits: list[Permit] = attrs.field(factory=list)
    """Of those that it has passed, in their order."""

    bound: BoundArguments | ArgumentsError | None = None
    """Its arguments, where the plan had to look at them."""

    on_started: Callable[[], object] = lambda: None
    """Called when the tool begins."""

    started_at: float = 0.0
    """When it was taken up, seconds since 1970."""

    announced_attempts: int = 0
    """How many times the host was told that the tool is about to be called."""

    attempts: int = 0
    """How many times it was called."""

    abandoned_thread: CallThread | None = None
    """What a thread of it holds."""

    @property
    def kind(self) -> ToolKind | None:
        """What runs behind the tool; None where there is no such tool."""
        return None if self.tool is None else self.tool.kind

    @property
    def estimate_s(self) -> float | None:
        """Seconds that it usually takes, where the tool says so."""
        return None if self.tool is None else self.tool.estimate_s

    def start_permits(self) -> None:
        """Note that the tool begins: a rate counts the call from now on."""
        for limiter, permit in zip(self.limiters, self.permits, strict=True):
            limiter.start(permit)

    def bind(self, tool: Tool[..., Any]) -> BoundArguments:
        """Return the arguments, which fit the schema; they are read once. The rule is asked when the call runs.

        Raises:
            ArgumentsError: when they do not fit.
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
    """Runs single calls."""

    registry: ToolRegistry
    host: QueueHost
    clock: Clock
    owner: object
    """Whose calls these are: a thread that outlives its call blocks later ones of the same owner only."""

    timeout_s: float
    retries_per_tool: int
    retries_per_run: int
    retries: dict[str, int]
    """Retries so far, by tool."""

    on_event: Callable[[StreamEvent], None] | None
    """Where progress goes; None where nobody watches."""

    async def run_call(self, job: ToolJob) -> CallOutcome:
        """Run a call, and return how it ended.

        Raises:
            Paused: when it waits for what is outside of the run.
        """
        call, tool = job.call, job.tool
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
        if (refusal := self.host.check_permitted(call, tool, bound)) is not None:
            return refusal
        timeout_s = tool.timeout_s or self.timeout_s
        places = find_abandoned(self.owner)
        if places and (blocker := await _wait_for_abandoned(places, job.access, timeout_s)) is not None:
            return failed_outcome(result_text.blocked_text(blocker), ErrorType.BLOCKED, retryable=True)
        ticket = tool.breaker.admit(self.clock.monotonic())
        if not isinstance(ticket, Ticket):
            return failed_outcome(result_text.circuit_open_text(tool, ticket), ErrorType.CIRCUIT_OPEN, retryable=True)
        try:
            job.announced_attempts = 1
            await self.host.on_start(call, tool)
            job.on_started()
            end = await self._run_within_timeout(job, tool, bound, timeout_s)
        except BaseException:
            tool.breaker.discard(ticket)
            raise
        if end.error_type in _BREAKER_ERRORS:
            tool.breaker.record_failure(ticket, self.clock.monotonic())
        else:
            tool.breaker.record_success(ticket)
        return end

    async def _run_within_timeout(
        self, job: ToolJob, tool: Tool[..., Any], bound: BoundArguments, timeout_s: float
    ) -> CallOutcome:
        """Try within the time of the call."""
        if job.permits:
            job.start_permits()
        scope = anyio.CancelScope()
        # Nothing can be cut off before it waits, so the timer is set then: what never waits pays for none.
        tries = _RetryLoop(self, job, tool, bound, timeout_s, scope, anyio.current_time)
        end: CallOutcome | None = None
        with scope:
            end = await tries.run()
        if end is None:
            text = result_text.timeout_text(tool, timeout_s)
            end = CallOutcome(Outcome.TIMED_OUT, text, ErrorType.TIMEOUT, tool.read_only)
        if tool.kind is ToolKind.AGENT and end.child is None:
            return await self.host.end_interrupted_child(job.call, tool, end)
        return end

    def claim_retry(self, tool: Tool[..., Any], error: BaseException, attempt: int, *, rate_limited: bool) -> bool:
        """Whether a call that failed for a passing reason may be tried again now; counts it if so."""
        if not tool.repeatable and not isinstance(error, RefusedError):
            return False
        if rate_limited and attempt > RATE_LIMIT_RETRIES:
            return False
        own = self.retries.get(tool.name, 0)
        if own >= self.retries_per_tool or sum(self.retries.values()) >= self.retries_per_run:
            return False
        self.retries[tool.name] = own + 1
        return True


# What says that a service is down; wrong arguments, bugs and refusals say nothing of it.
_BREAKER_ERRORS: Final = frozenset({ErrorType.TIMEOUT, ErrorType.UNAVAILABLE, ErrorType.RATE_LIMITED})


@attrs.define(eq=False, repr=False)
class _RetryLoop:
    """The attempts at one call."""

    dispatcher: ToolDispatcher
    job: ToolJob
    tool: Tool[..., Any]
    bound: BoundArguments
    timeout_s: float
    scope: anyio.CancelScope
    current_time: Callable[[], float]
    """The event loop's time."""

    _run_context: RunContext[Any] | None = None
    """What the tool knows of its call, where it takes that."""

    async def run(self) -> CallOutcome:
        """Try until there is a result, or no retry is left."""
        while True:
            end = await self._attempt()
            if isinstance(end, CallOutcome):
                return end
            await anyio.sleep(end)
            self.job.announced_attempts += 1
            await self.dispatcher.host.on_start(self.job.call, self.tool)  # the run may have another owner by now

    def start_timer(self) -> None:
        """Set the timer, once."""
        if self.scope.deadline == float("inf"):
            self.scope.deadline = self.current_time() + self.timeout_s + self.tool.grace_s

    async def _attempt(self) -> CallOutcome | float:
        """Try once: return how it ended, or the seconds to wait before the next attempt."""
        try:
            value = await self._call_tool()
        except BaseException as error:  # noqa: BLE001  what a tool raises is its result, also the panic of a library in Rust
            return await self._handle_exception(_unwrap_group(error))
        if type(value) is ToolReturn:
            return CallOutcome(
                value.outcome, value.content, value.error_type, value.retryable, value.child, value.parts
            )
        text, parts = result_text.render_result(value)
        return CallOutcome(Outcome.DONE, text, parts=parts)

    async def _handle_exception(self, error: BaseException) -> CallOutcome | float:
        """Return the end that a tool's exception is, or the seconds to wait; raise what is not the tool's."""
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
        return await self._handle_failure(error)

    def _must_propagate(self, error: BaseException) -> bool:
        """Whether an error is not the tool's: a pause, somebody at the keyboard, or an agent's journal."""
        if isinstance(error, BaseExceptionGroup):
            return error.subgroup(KeyboardInterrupt) is not None
        if self.tool.kind is ToolKind.AGENT and (isinstance(error, StoreError) or not isinstance(error, Exception)):
            return True
        return isinstance(error, CallPaused | KeyboardInterrupt)

    async def _call_tool(self) -> Any:
        tool, (args, kwargs) = self.tool, self.bound
        if tool.takes_context:
            args = (self._next_context(), *args)
        self.job.attempts += 1
        if tool.is_async:
            value = await in_copied_context(tool.function(*args, **kwargs), self.start_timer)
            # Of a coroutine that was returned and not awaited nothing has run: it would be told as done.
            return await in_copied_context(value, self.start_timer) if type(value) is CoroutineType else value
        return await self._run_in_thread(partial(tool.function, *args, **kwargs))

    def _next_context(self) -> RunContext[Any]:
        if self._run_context is not None:
            self._run_context = attrs.evolve(self._run_context, attempt=self._run_context.attempt + 1)
            return self._run_context
        deadline = self.dispatcher.clock.now() + self.timeout_s
        known = self.dispatcher.host.build_context(self.job.call, self.tool, deadline)
        tell = self.dispatcher.on_event
        self._run_context = known if tell is None else self._report_events(known, tell)
        return self._run_context

    def _report_events(self, known: RunContext[Any], tell: Callable[[StreamEvent], None]) -> RunContext[Any]:
        """Return the same context, that tells progress until the call is given up; from any thread."""
        call, home, in_loop = self.job.call, threading.get_ident(), threadsafe_scheduler()

        def tell_open(event: ToolEvent) -> None:
            if not known.cancel_flag.is_set:
                tell(event)

        def report(message: str) -> None:
            event = ToolEvent(type=ToolEventType.PROGRESS, call_id=call.id, tool=call.name, message=message)
            if threading.get_ident() == home:
                tell_open(event)
            else:
                in_loop(partial(tell_open, event))

        return attrs.evolve(known, on_progress=report, on_event=tell)

    async def _run_in_thread(self, function: Callable[[], Any]) -> Any:
        """Run a plain function in a thread; a cancelled call leaves the thread behind, counted and with its place."""
        place = CallThread(self.tool.name, self.job.access)
        handed = start_in_thread(function, place.mark_ended)
        self.start_timer()
        try:
            value = await handed.wait()
        except BaseException:
            if not place.has_ended:  # it was not the function that has raised this
                place.mark_abandoned(self.dispatcher.owner)
                self.job.abandoned_thread = place
            raise
        return await in_copied_context(value) if _is_awaitable(value) else value

    async def _handle_failure(self, error: BaseException) -> CallOutcome | float:
        """Return the end that an exception is, or the seconds to wait before the next attempt."""
        await checkpoint_if_cancelled()  # unless that is how the tool took its end
        tool, passing = self.tool, classify_failure(error)
        if passing is None:
            self.dispatcher.host.on_tool_error(self.job.call, error)
            text, kind = result_text.failure_text(error, tool), ErrorType.TOOL
            return failed_outcome(text, kind, retryable=tool.read_only)
        wait_s = passing.retry_after_s if passing.retry_after_s is not None else RETRY_WAIT_S * self.job.attempts
        if self._has_time(wait_s) and self.dispatcher.claim_retry(
            tool, error, self.job.attempts, rate_limited=passing.rate_limited
        ):
            return wait_s
        if not isinstance(error, RefusedError):
            self.dispatcher.host.on_tool_error(self.job.call, error)
        return self._unavailable_outcome(error, passing)

    def _has_time(self, wait_s: float) -> bool:
        self.start_timer()
        return self.current_time() + wait_s < self.scope.deadline

    def _unavailable_outcome(self, error: BaseException, passing: TransientFailure) -> CallOutcome:
        tool = self.tool
        kind = ErrorType.RATE_LIMITED if passing.rate_limited else ErrorType.UNAVAILABLE
        text = result_text.unavailable_text(error, tool, self.job.attempts, passing.retry_after_s)
        retryable = tool.read_only or isinstance(error, RefusedError)
        return failed_outcome(text, kind, retryable=retryable)


def _is_awaitable(value: object) -> bool:
    """Whether a plain function has returned what is to be awaited; asks its type, since its attributes may raise."""
    return hasattr(type(value), "__await__") or (type(value) is GeneratorType and isawaitable(value))


def _unwrap_group(error: BaseException) -> BaseException:
    """Return the one error in a group: a task group around it makes no other error of it."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


async def _wait_for_abandoned(places: Sequence[CallThread], access: Access, timeout_s: float) -> str | None:
    """Wait for threads that the call must not overlap; return the name of one that does not end in time."""
    places = [place for place in places if not place.access.may_overlap(access)]
    with anyio.move_on_after(timeout_s):
        for place in places:
            await place.wait_ended()
        return None
    return next((place.name for place in places if not place.has_ended), None)
