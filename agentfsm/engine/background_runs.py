"""Background runs in one execution of the run that began them.

They are child runs: each has its own journal, and spends from the budget of its parent run. The execution of the parent
run executes them in tasks beside its own steps, and records their results in the parent's journal; nothing else does.
So a process that continues the parent run also continues its background runs, and each result is recorded once.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

import anyio
import attrs

from agentfsm.core import events as e
from agentfsm.core.calls import BackgroundRun
from agentfsm.core.errors import (
    ConflictError,
    IncompatibleProgramError,
    LeaseHeldError,
    ModelRetry,
    RunNotFoundError,
    StoreError,
)
from agentfsm.core.inbox import Cancel, InboxItem
from agentfsm.core.messages import ErrorType, Outcome, ToolResult
from agentfsm.core.run_ids import child_run_id
from agentfsm.engine.execution.child_runs import add_child_cost, build_missing_result
from agentfsm.engine.execution.drain import Drain
from agentfsm.engine.execution.parent import build_parent
from agentfsm.engine.execution.tool_access import build_context
from agentfsm.engine.execution.unattended import build_background_result, end_background_runs, wrap_background_call
from agentfsm.journal.load import is_wait_over
from agentfsm.tools.queue.result_text import count_shown_chars
from agentfsm.tools.run_context import CallPaused, ToolReturn

if TYPE_CHECKING:
    from anyio.abc import TaskGroup

    from agentfsm.core.pending import Pending
    from agentfsm.engine.execution.execution import Execution
    from agentfsm.engine.line import Line

# Seconds between two looks at what a run waits for, while its background runs are driven.
POLL_S: Final = 1.0
# Seconds between two attempts to take the lease of a background run that another owner has not given back yet.
LEASE_POLL_S: Final = 0.2


@attrs.define(eq=False, repr=False)
class BackgroundRuns:
    """The background runs of one execution."""

    execution: Execution
    line: Line
    _group: TaskGroup
    _drain: Drain
    _places: anyio.CapacityLimiter
    """Bounds the runs that are driven at once, as the calls that run at once."""

    _scopes: dict[str, anyio.CancelScope] = attrs.field(factory=dict)
    """Scopes of the runs that are driven now, by the id of the call."""

    _stopped: dict[str, ToolReturn | tuple[Pending, ...]] = attrs.field(factory=dict)
    """Results of those that have ended since, and what others wait for."""

    _blocked: dict[str, tuple[Pending, ...]] = attrs.field(factory=dict)
    """Those that wait for something from outside, and for what."""

    _changed: anyio.Event = attrs.field(factory=anyio.Event)
    """Set when one of them has stopped."""

    _error: BaseException | None = None

    # Between two steps of the parent run.

    async def advance(self, *, is_blocked: bool) -> bool:
        """Record what has stopped, and start what is new. Return whether the parent run has to look again.

        Args:
            is_blocked: Whether the parent run cannot go on by itself. Then this waits until a background run has
                stopped, or for a moment.
        """
        if self._error is not None:
            raise self._error
        journal = self.execution.journal
        if journal.run.paused is not None or journal.run.is_over or (self.execution.options.once and not is_blocked):
            return False
        if journal.has_unread_inbox:
            self._blocked.clear()
        if self._record():
            return is_blocked
        self.start()
        if not is_blocked or not self._scopes:
            return False
        changed = self._changed = anyio.Event()
        with journal.stop_active_time(), anyio.move_on_after(POLL_S):
            await changed.wait()
        await self._look_around()
        return True

    def retry(self, call_id: str) -> None:
        """Drive a background run again that waited, because something was sent to it."""
        self._blocked.pop(call_id, None)

    async def end(self) -> list[e.ChildReported]:
        """Cancel the background runs of a run that is about to end, and return what they did."""
        for scope in self._scopes.values():
            scope.cancel()
        with anyio.CancelScope(shield=True):
            while self._scopes:
                self._changed = anyio.Event()
                await self._changed.wait()
        self._stopped.clear()
        ended = await end_background_runs(self.execution.journal, self.execution.config.registry)
        return [self._build_report(each, result) for each, result in ended]

    # Driving

    def start(self) -> None:
        """Drive those that have not ended and do not wait."""
        for each in self.execution.journal.run.open_background:
            call_id = each.call.id
            if call_id not in self._scopes and call_id not in self._blocked and call_id not in self._stopped:
                self._scopes[call_id] = scope = anyio.CancelScope()
                self._group.start_soon(self._drive, each, scope)

    async def _drive(self, each: BackgroundRun, scope: anyio.CancelScope) -> None:
        call_id = each.call.id
        try:
            with scope:
                async with self._places:
                    self._stopped[call_id] = await self._run_until_blocked(each)
        except Exception as error:  # noqa: BLE001  the parent run raises it between two steps
            self._error = error
        finally:
            del self._scopes[call_id]
            self._changed.set()

    async def _run_until_blocked(self, each: BackgroundRun) -> ToolReturn | tuple[Pending, ...]:
        execution, journal = self.execution, self.execution.journal
        tool = execution.config.find_tool(each.call.name)
        assert tool is not None  # the program was checked  # noqa: S101
        assert tool.inner_agent is not None  # as above  # noqa: S101
        options = execution.options._replace(drain=self._drain)
        context = build_context(
            execution,
            call_id=each.call.id,
            idempotency_key=each.call.key,
            on_event=journal.on_event,
            parent=build_parent(execution, options),
        )
        while True:
            try:
                return await tool.inner_agent.drive_run(context)
            except CallPaused as pause:
                return pause.pending
            except RunNotFoundError:
                return build_missing_result(wrap_background_call(each))
            except LeaseHeldError:
                await anyio.sleep(LEASE_POLL_S)
            except (StoreError, IncompatibleProgramError):
                raise
            except Exception as error:  # a model of the user's that raises, for example
                journal.log.warning("background_run_failed", call=each.call.id, exc_info=error)
                ended = await tool.inner_agent.end_run(journal.store, journal.clock, journal.run.id, each.call.id)
                text = f"the agent failed ({type(error).__name__}). {ended.content}"
                return attrs.evolve(ended, outcome=Outcome.FAILED, content=text, error_type=ErrorType.AGENT)

    async def _look_around(self) -> None:
        """Notice what has come for the parent run. Drive those again for which a decision has come, or that are due."""
        store, journal = self.execution.journal.store, self.execution.journal
        await journal.look_at_inbox()
        now = await store.now() if self._blocked else 0.0
        for call_id, pending in tuple(self._blocked.items()):
            if any([await is_wait_over(store, item, now) for item in pending]):
                del self._blocked[call_id]

    # Reports

    def _record(self) -> bool:
        """Commit what has stopped. Return whether there was news."""
        journal, reports = self.execution.journal, list[e.ChildReported]()
        for call_id, end in self._stopped.items():
            each = journal.run.background[call_id]
            if isinstance(end, ToolReturn):
                reports.append(self._build_report(each, build_background_result(each, end)))
                continue
            self._blocked[call_id] = end
            if end != each.pending:
                reports.append(e.ChildReported(call_id=call_id, pending=end))
        self._stopped.clear()
        if reports:
            journal.commit(*reports)
        return bool(reports)

    def _build_report(self, each: BackgroundRun, result: ToolResult) -> e.ChildReported:
        execution, tool = self.execution, self.execution.config.find_tool(each.call.name)
        shown = None if tool is None else count_shown_chars(result.content, tool, execution.count_tokens)
        result = add_child_cost(execution, attrs.evolve(result, shown_chars=shown))
        for decide in self.line.on_child_result:
            result = decide(execution, result)
        return e.ChildReported(call_id=each.call.id, result=result)


@asynccontextmanager
async def open_background(execution: Execution, line: Line) -> AsyncIterator[None]:
    """Drive background runs during the block. At its end, those in progress stop between two of their steps."""
    failed: Exception | None = None
    async with anyio.create_task_group() as group:
        drain = Drain(group.cancel_scope, execution.options.drain)
        places = anyio.CapacityLimiter(execution.config.limits.parallel)
        execution.background = runs = BackgroundRuns(execution, line, group, drain, places)
        try:
            if not execution.options.once and execution.journal.run.paused is None:
                runs.start()
            yield
        except Exception as error:  # noqa: BLE001  raised below, outside of the group
            failed = error
            group.cancel_scope.cancel()
        else:
            drain.begin()
    if failed is not None:
        raise failed


async def post_to_child(execution: Execution, key: str, call_id: str, item: InboxItem) -> str:
    """Send an input or a cancellation to a background run, and return what became of it, for the model.

    Args:
        execution: The execution of the parent run.
        key: Idempotency key of the call that sends it.
        call_id: Id of the call that began the background run.
        item: The item.

    Raises:
        ModelRetry: if there is no such background run.
    """
    run, store, runs = execution.journal.run, execution.journal.store, execution.background
    each = run.background.get(call_id)
    if each is None:
        known = ", ".join(other.call.id for other in run.open_background) or "none"
        raise ModelRetry(f"there is no background run {call_id[:40]!r}; those that go on: {known}")
    if each.result is not None:
        return "It has ended already."
    try:
        await store.post(child_run_id(run.id, call_id), key, item)
    except (ConflictError, RunNotFoundError):
        return "It has ended already; its result comes as a message."
    if runs is not None:
        runs.retry(call_id)
    return "It is being cancelled; what it did comes as a message." if isinstance(item, Cancel) else "Sent."
