"""The tool execution queue: batches by concurrency safety, barriers, results in call order, failures isolated.

Neighbouring calls of concurrency-safe tools form a batch and run together. A call of any other tool waits for all
before it, runs alone, and holds all behind it. Whatever a tool does, its call gets exactly one result.
Source: document C, after the queue of Claude Code.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial
from inspect import isawaitable
from typing import Any, Final

import anyio
import attrs
from anyio.lowlevel import checkpoint_if_cancelled

from agentfsm.core.errors import ArgumentsError, MisuseError, ModelRetry
from agentfsm.core.messages import Outcome, ToolCall, ToolResult
from agentfsm.engine.log import LOGGER
from agentfsm.engine.places import Place, left_behind
from agentfsm.engine.render import failure_text, malformed_text, result_text, retry_text, timeout_text, unknown_text
from agentfsm.engine.stream import ToolEvent, ToolEventType
from agentfsm.engine.tools import RunContext, Tool, ToolRegistry
from agentfsm.ports import Clock, SystemClock
from agentfsm.threads import in_thread, is_foreign, isolated

LIMIT: Final = 20
# Calls in flight at once: a model seldom asks for more, and most services bear it.
TIMEOUT_S: Final = 30.0
# Seconds for a call whose tool sets none.

ContextOf = Callable[[ToolCall, float], RunContext[Any]]
Starting = Callable[[ToolCall, Tool[..., Any]], Awaitable[None]]
Finished = Callable[[ToolResult], None]
_End = tuple[Outcome, str, int | None]
# How a call ended: outcome, whole text, and how many characters of it are shown (None for all).


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first error of a group; a caller of the queue handles one error, batch or not."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _plain_context(call: ToolCall, deadline: float) -> RunContext[Any]:
    return RunContext(deps=None, call_id=call.id, idempotency_key=call.key, deadline=deadline)


@attrs.frozen(kw_only=True)
class QueueStatistics:
    """The inside of a queue, at one moment."""

    running: int
    # Calls in flight.
    abandoned: int
    # Threads of plain functions that outlived their calls and still run.
    missed: int
    # Events that a listener failed to take.


def _at_least_one(_queue: object, _attribute: object, value: int) -> None:
    if value < 1:
        raise MisuseError(f"ToolQueue(limit={value}) could run nothing: give 1 or more calls in flight at once")


@attrs.define(eq=False, kw_only=True)
class ToolQueue:
    """Runs the calls of a reply. Serves an agent, or by itself: `await ToolQueue(registry).execute_all(calls)`."""

    registry: ToolRegistry = attrs.field(kw_only=False)
    limit: int = attrs.field(default=LIMIT, validator=_at_least_one)
    # Calls in flight at once, 1 or more.
    owner: object = attrs.field(factory=object)
    # Whose calls these are: a thread that outlives its call blocks later ones of the same owner only. A run's id.
    timeout_s: float = TIMEOUT_S
    clock: Clock = attrs.field(factory=SystemClock)
    disabled: Callable[[], Collection[str]] = tuple
    # Tells the names of the tools that are withdrawn.
    context: ContextOf = _plain_context
    # Makes the RunContext of a call, from it and its deadline (seconds since 1970).
    starting: Starting | None = None
    # Awaited right before the tool of a valid call runs, if that may have an effect or was approved; what it raises
    # stops the queue.
    finished: Finished | None = None
    # Called with each result, as they come.
    listen: Callable[[ToolEvent], None] | None = None
    _missed: int = attrs.field(default=0, init=False)
    _running: int = attrs.field(default=0, init=False)

    def statistics(self) -> QueueStatistics:
        """Return what runs now."""
        return QueueStatistics(running=self._running, abandoned=len(left_behind(self.owner)), missed=self._missed)

    async def execute_all(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        """Run the calls and return their results, in call order.

        When it is cancelled, calls in flight are cancelled and no other starts; results handed to `finished` before
        that stand.
        """
        if self.listen is not None:
            for position, call in enumerate(calls):
                self._tell(ToolEventType.QUEUED, call, position=position)
        results: list[ToolResult] = []
        for batch in self.batches(calls) if len(calls) > 1 else [calls]:
            if results:
                await checkpoint_if_cancelled()  # tools that never wait give no other chance to stop
            results += [await self._one(batch[0])] if len(batch) == 1 else await self._together(batch)
        if self.listen is not None:
            self._hand_out(ToolEvent(type=ToolEventType.DRAINED))
        return results

    def batches(self, calls: Sequence[ToolCall]) -> list[list[ToolCall]]:
        """Return the calls in the groups in which they run: those of a group together, the groups one by one."""
        groups: list[list[ToolCall]] = []
        open_group = False
        for call in calls:
            tool = self.registry.get(call.name)
            safe = tool is None or tool.concurrency_safe
            if safe and open_group:
                groups[-1].append(call)
            else:
                groups.append([call])
            open_group = safe
        return groups

    async def _together(self, batch: Sequence[ToolCall]) -> list[ToolResult]:
        """Run a batch with as many workers as may run at once, each taking the next call: cheaper than a task each."""
        results: dict[int, ToolResult] = {}
        waiting = iter(enumerate(batch))

        async def work() -> None:
            for index, call in waiting:
                await checkpoint_if_cancelled()
                results[index] = await self._one(call)

        try:
            async with anyio.create_task_group() as tasks:
                for _ in range(min(self.limit, len(batch))):
                    tasks.start_soon(work)
        except BaseExceptionGroup as group:  # what `starting` raised, or what no tool may raise
            raise _first(group) from None
        return [results[index] for index in range(len(batch))]

    async def _one(self, call: ToolCall) -> ToolResult:
        """Run one call; an exception of its tool is a result."""
        started = self.clock.monotonic()
        self._running += 1
        try:
            outcome, content, shown = await self._attempt(call)
        finally:
            self._running -= 1
        result = ToolResult(
            call_id=call.id,
            name=call.name,
            outcome=outcome,
            content=content,
            duration_s=self.clock.monotonic() - started,
            shown_chars=shown,
        )
        if self.finished is not None:
            self.finished(result)
        if self.listen is not None:
            self._tell_end(call, result)
        return result

    async def _attempt(self, call: ToolCall) -> _End:
        tool = self.registry.get(call.name)
        if tool is None:
            return Outcome.FAILED, unknown_text(call.name, self.registry), None
        if call.name in self.disabled():
            return Outcome.SKIPPED, f"{call.name} is withdrawn for the rest of this run; go on without it", None
        if call.malformed is not None:
            return Outcome.FAILED, malformed_text(call.malformed), None
        try:
            args, kwargs = tool.bind(call.arguments)
        except ArgumentsError as error:
            return Outcome.FAILED, str(error), None
        timeout_s = tool.timeout_s or self.timeout_s
        places = left_behind(self.owner)
        if places and (blocker := await self._blocker(places, tool, timeout_s)) is not None:
            return Outcome.FAILED, f"blocked: {blocker} is still running from an earlier call; try again later", None
        if self.starting is not None and (tool.requires_approval or not tool.read_only):
            await self.starting(call, tool)
        if self.listen is not None:
            self._tell(ToolEventType.STARTED, call)
        if tool.takes_context:
            args = (self.context(call, self.clock.now() + timeout_s), *args)
        return await self._invoke(tool, args, kwargs, timeout_s)

    async def _invoke(
        self,
        tool: Tool[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout_s: float,
    ) -> _End:
        value: object = None
        try:
            with anyio.CancelScope() as scope:
                # Nothing can be cut off before it waits, so the timer is set then: what never waits pays for none.
                arm = partial(_arm, scope, timeout_s)
                if tool.is_async:
                    value = await isolated(tool.function(*args, **kwargs), arm)
                else:
                    value = await self._threaded(tool, partial(tool.function, *args, **kwargs), arm)
        except ModelRetry as hint:
            return _shown(Outcome.FAILED, retry_text(hint), tool)
        except (Exception, SystemExit) as error:  # noqa: BLE001  whatever a tool raises is its result
            await checkpoint_if_cancelled()  # unless that is how it took its end
            return _shown(Outcome.FAILED, failure_text(error, tool), tool)
        except BaseExceptionGroup as group:
            await checkpoint_if_cancelled()
            if group.subgroup(KeyboardInterrupt) is not None:
                raise
            return _shown(Outcome.FAILED, failure_text(group, tool), tool)
        except anyio.get_cancelled_exc_class() as cancellation:
            if not is_foreign(cancellation):
                raise
            return _shown(Outcome.FAILED, failure_text(cancellation, tool), tool)
        if scope.cancelled_caught:
            return Outcome.TIMED_OUT, timeout_text(tool, timeout_s), None
        return _shown(Outcome.DONE, result_text(value), tool)

    async def _threaded(self, tool: Tool[..., Any], function: Callable[[], Any], arm: Callable[[], None]) -> Any:
        """Run a plain function in a thread; a cancelled call leaves the thread behind, counted and with its place."""
        place = Place(tool.name, shared=tool.concurrency_safe)
        handed = in_thread(function, place.give_up)
        arm()
        try:
            value = await handed.wait()
        except anyio.get_cancelled_exc_class():
            place.keep_for(self.owner)
            raise
        return await isolated(value) if isawaitable(value) else value

    async def _blocker(self, places: Sequence[Place], tool: Tool[..., Any], timeout_s: float) -> str | None:
        """Wait for threads that the tool must not overlap; return the name of one that does not end in time."""
        places = [place for place in places if not (place.shared and tool.concurrency_safe)]
        with anyio.move_on_after(timeout_s):
            for place in places:
                await place.given_up()
            return None
        return next((place.name for place in places if not place.is_free), None)

    def _tell(self, kind: ToolEventType, call: ToolCall, **details: Any) -> None:
        self._hand_out(ToolEvent(type=kind, call_id=call.id, tool=call.name, **details))

    def _tell_end(self, call: ToolCall, result: ToolResult) -> None:
        if result.outcome is Outcome.DONE:
            self._tell(ToolEventType.COMPLETED, call, duration_s=result.duration_s, success=True)
        else:
            self._tell(ToolEventType.ERROR, call, duration_s=result.duration_s, message=result.content)

    def _hand_out(self, event: ToolEvent) -> None:
        """Tell the listener; one that raises changes nothing but the count of what it missed."""
        if self.listen is None:
            return
        try:
            self.listen(event)
        except Exception:  # noqa: BLE001  a watcher breaks nothing
            self._missed += 1
            LOGGER.exception("a listener of the tool queue failed")


def _arm(scope: anyio.CancelScope, timeout_s: float) -> None:
    scope.deadline = anyio.current_time() + timeout_s


def _shown(outcome: Outcome, text: str, tool: Tool[..., Any]) -> _End:
    return outcome, text, tool.shown_chars if len(text) > tool.shown_chars else None
