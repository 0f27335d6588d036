"""Deliver committed events to watchers: functions that observe runs live, each in a thread of its own.

A watcher cannot change, delay or fail a run. It may lag behind by 1,000 commits; further ones are dropped and counted
until it has caught up. What must not be lost follows the journal in the store instead (`Store.follow`).
"""

from __future__ import annotations

import atexit
import logging
from collections.abc import Callable, Iterable, Sequence
from inspect import signature
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias, runtime_checkable
from weakref import WeakSet

import attrs

from agentfsm.core.errors import MisuseError, ensure_printable
from agentfsm.core.validation import shorten_repr
from agentfsm.streaming import callbacks
from agentfsm.streaming.callbacks import CallbackDispatcher, is_async_callable

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from agentfsm.core.events import Event
    from agentfsm.core.header import Header
    from agentfsm.core.run import Run
    from agentfsm.core.trace_context import TraceContext
    from agentfsm.ports.model import Model, Reply, Request

Watcher: TypeAlias = "Callable[[Run[Any], Sequence[Event]], object] | RunTracer"
"""Function that observes runs: it receives the run after a commit, and the events of the commit. Or an object that
traces them.
"""

# Seconds that closing an agent, or the end of the process, waits for watchers.
FLUSH_S: Final = 5.0
# Seconds for which the commits of a tracer are collected: its spans are sent every few seconds anyway.
BATCH_S: Final = 0.25

_log = logging.getLogger("agentfsm.watch")
_outlets: WeakSet[Outlet] = WeakSet()


def _build_dispatcher(outlet: Outlet) -> CallbackDispatcher:
    # The methods refer to the outlet: its commits are delivered and flushed also after the agent is gone.
    name = f"agentfsm-watch-{outlet.name}"
    batch_s = 0.0 if outlet.tracer is None else BATCH_S
    call, log = outlet._call, outlet._log_error  # noqa: SLF001  of this module
    return CallbackDispatcher(call, thread_name=name, on_error=log, batch_s=batch_s)


@runtime_checkable
class RunTracer(Protocol):
    """An observer that makes a distributed trace of runs: `Telemetry`."""

    def watch_commit(self, before: Run[Any], run: Run[Any], events: Sequence[Event]) -> None:
        """Observe a commit, in the thread of the watcher.

        Args:
            before: The run before it.
            run: The run after it.
            events: Its events.
        """
        ...

    def flush(self, timeout_s: float) -> None:
        """Export what was observed, within some seconds. Closing the agent, and the end of the process, call it."""
        ...

    def current_traceparent(self) -> str:
        """Return the span that is current in the calling task, as the value of `traceparent`; empty if there is none.

        A run that is started without a trace becomes a part of it.
        """
        ...

    def activate(self, header: Header, context: TraceContext) -> AbstractContextManager[object]:
        """Make a span of a run current in the calling task, so that what is traced in there is below it."""
        ...

    def observe_request(
        self, context: TraceContext, model: Model, request: Request, outcome: Reply | BaseException
    ) -> None:
        """Observe a model request that has ended, in its task, which it must not delay. Its commit follows.

        Args:
            context: Span of the request.
            model: The model that was asked.
            request: The request.
            outcome: The reply, or the exception of the request.
        """
        ...


@attrs.define(eq=False, repr=False)
class Outlet:
    """Queue and thread of one watcher, shared by all runs of an agent and of its variants."""

    watcher: Watcher
    _dispatcher: CallbackDispatcher = attrs.field(init=False, default=attrs.Factory(_build_dispatcher, takes_self=True))

    def __attrs_post_init__(self) -> None:
        _outlets.add(self)

    @property
    def name(self) -> str:
        """Name of the watcher, for the log."""
        return str(getattr(self.watcher, "__qualname__", type(self.watcher).__qualname__))

    @property
    def tracer(self) -> RunTracer | None:
        """The watcher, if it traces runs; else None."""
        return self.watcher if isinstance(self.watcher, RunTracer) else None

    @property
    def dropped(self) -> int:
        """Number of commits that the watcher was not given, because it lagged behind."""
        return self._dispatcher.dropped

    @property
    def failed(self) -> int:
        """Number of commits for which the watcher raised an exception."""
        return self._dispatcher.failed

    def put(self, before: Run[Any], run: Run[Any], events: Sequence[Event]) -> None:
        """Hand over a commit. It never waits for the watcher."""
        if self._dispatcher.put((before, run, events)) == 1:
            _log.warning(
                "the watcher %s lags behind by %d commits; further ones are dropped",
                self.name,
                callbacks.MAX_BUFFERED_EVENTS,
            )

    def _call(self, commit: tuple[Run[Any], Run[Any], Sequence[Event]]) -> object:
        before, run, events = commit
        if self.tracer is None:
            return self.watcher(run, events)  # type: ignore[operator]
        self.tracer.watch_commit(before, run, events)
        return None

    def _log_error(self, error: BaseException) -> None:
        if self.failed == 1:
            text = "the watcher %s has failed; further failures are counted only"
            _log.warning(text, self.name, exc_info=ensure_printable(error))

    def flush(self, timeout_s: float = FLUSH_S) -> None:
        """Wait, in this thread, until the watcher has received everything, or the time is up."""
        if left := self._dispatcher.drain_in_thread(timeout_s):
            _log.warning("the watcher %s has not taken %d commits within %g s", self.name, left, timeout_s)
        if self.dropped or self.failed:
            _log.warning("the watcher %s: %d commits dropped, %d failed", self.name, self.dropped, self.failed)
        if isinstance(self.watcher, RunTracer):
            self.watcher.flush(timeout_s)


@atexit.register
def _flush_all() -> None:
    """Flush at the end of the process, which would otherwise end the threads in the middle."""
    for outlet in list(_outlets):
        if outlet._dispatcher.is_behind or isinstance(outlet.watcher, RunTracer):  # noqa: SLF001  of this module
            outlet.flush()


def build_outlets(watchers: Iterable[Watcher | Outlet]) -> tuple[Outlet, ...]:
    """Return the outlets of an agent's watchers, each watcher once.

    Raises:
        MisuseError: if one is not a plain function of two arguments.
    """
    if callable(watchers) or isinstance(watchers, str) or not isinstance(watchers, Iterable):
        raise MisuseError(f"Agent(watch={shorten_repr(watchers)}): give a list of functions, also for a single one")
    outlets: list[Outlet] = []
    for each in watchers:
        outlet = each if isinstance(each, Outlet) else Outlet(_check_watcher(each))
        if all(outlet.watcher != other.watcher for other in outlets):
            outlets.append(outlet)
    return tuple(outlets)


def _check_watcher(watcher: Any) -> Watcher:
    if isinstance(watcher, RunTracer) and not isinstance(watcher, type):
        return watcher
    if not callable(watcher) or isinstance(watcher, type):
        raise MisuseError(f"Agent(watch=[{shorten_repr(watcher)}]): give a function of a run and its new events")
    if is_async_callable(watcher):
        raise MisuseError(
            f"Agent(watch=[{shorten_repr(watcher)}]): a thread calls it, which cannot await: give a plain function"
        )
    try:
        signature(watcher).bind(None, ())
    except TypeError:
        raise MisuseError(
            f"Agent(watch=[{shorten_repr(watcher)}]): it is called with a run and its new events: give a function of "
            "two arguments, as def watch(run, events)"
        ) from None
    except ValueError:  # a function of C without a signature
        pass
    return watcher  # type: ignore[no-any-return]
