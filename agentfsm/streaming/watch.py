"""Deliver committed events to watchers: functions that observe runs live, each in a thread of its own.

A watcher cannot change, delay or fail a run. It may lag behind by `BACKLOG` commits; further ones are dropped and
counted until it has caught up. What must not be lost follows the journal in the store instead (`Store.follow`).
"""

from __future__ import annotations

import atexit
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from inspect import iscoroutinefunction, signature
from typing import TYPE_CHECKING, Any, Final, TypeAlias
from weakref import WeakSet

import attrs

from agentfsm.core.errors import MisuseError, ensure_printable
from agentfsm.core.validation import shorten_repr

if TYPE_CHECKING:
    from agentfsm.core.events import Event
    from agentfsm.core.run import Run

Watcher: TypeAlias = "Callable[[Run[Any], Sequence[Event]], object]"
"""Function that observes runs. It receives the run after a commit, and the events of the commit."""

# Commits that wait for a watcher: some seconds of a hundred runs, and a few MB at most.
BACKLOG: Final = 1_000
# Seconds for which a thread without work waits for more before it ends.
_IDLE_S: Final = 1.0
# Seconds that closing an agent, or the end of the process, waits for watchers.
FLUSH_S: Final = 5.0

_log = logging.getLogger("agentfsm.watch")
_outlets: WeakSet[Outlet] = WeakSet()


@attrs.define(eq=False, repr=False)
class Outlet:
    """Queue and thread of one watcher, shared by all runs of an agent and of its variants."""

    watcher: Watcher
    dropped: int = 0
    """Number of commits that the watcher was not given, because it lagged behind."""

    failed: int = 0
    """Number of commits for which the watcher raised an exception."""

    _backlog: deque[tuple[Run[Any], Sequence[Event]]] = attrs.field(factory=deque, init=False)
    _changed: threading.Condition = attrs.field(factory=threading.Condition, init=False)
    """Guards the fields; notified when the backlog changes, and when the watcher returns."""

    _is_running: bool = attrs.field(default=False, init=False)
    _is_busy: bool = attrs.field(default=False, init=False)

    def __attrs_post_init__(self) -> None:
        _outlets.add(self)

    @property
    def name(self) -> str:
        """Name of the watcher, for the log."""
        return str(getattr(self.watcher, "__qualname__", type(self.watcher).__qualname__))

    def put(self, run: Run[Any], events: Sequence[Event]) -> None:
        """Hand over a commit. It never waits for the watcher."""
        with self._changed:
            if len(self._backlog) >= BACKLOG:
                self.dropped += 1
                is_first = self.dropped == 1
            else:
                is_first = False
                self._backlog.append((run, events))
                self._changed.notify_all()
            if not self._is_running:
                self._is_running = True
                threading.Thread(target=self._deliver, name=f"agentfsm-watch-{self.name}", daemon=True).start()
        if is_first:
            _log.warning("the watcher %s lags behind by %d commits; further ones are dropped", self.name, BACKLOG)

    def _deliver(self) -> None:
        while (item := self._take()) is not None:
            try:
                self.watcher(*item)
            except BaseException as error:  # noqa: BLE001  a watcher changes nothing, whatever it raises
                self.failed += 1
                if self.failed == 1:
                    _log.warning(
                        "the watcher %s has failed; further failures are counted only",
                        self.name,
                        exc_info=ensure_printable(error),
                    )
            del item
            with self._changed:
                self._is_busy = False
                self._changed.notify_all()

    def _take(self) -> tuple[Run[Any], Sequence[Event]] | None:
        """Wait for the next commit; None if none has come for a while, and the thread has to end."""
        with self._changed:
            if not self._backlog:
                self._changed.wait_for(lambda: bool(self._backlog), _IDLE_S)
            if not self._backlog:
                self._is_running = False
                return None
            self._is_busy = True
            return self._backlog.popleft()

    def flush(self, timeout_s: float = FLUSH_S) -> None:
        """Wait, in this thread, until the watcher has received everything, or the time is up."""
        with self._changed:
            is_done = self._changed.wait_for(lambda: not self._backlog and not self._is_busy, timeout_s)
            left = len(self._backlog) + self._is_busy
        if not is_done:
            _log.warning("the watcher %s has not taken %d commits within %g s", self.name, left, timeout_s)
        if self.dropped or self.failed:
            _log.warning("the watcher %s: %d commits dropped, %d failed", self.name, self.dropped, self.failed)


@atexit.register
def _flush_all() -> None:
    """Flush at the end of the process, which would otherwise end the threads in the middle."""
    for outlet in list(_outlets):
        if outlet._backlog or outlet._is_busy:  # noqa: SLF001  one of its module
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
    if not callable(watcher) or isinstance(watcher, type):
        raise MisuseError(f"Agent(watch=[{shorten_repr(watcher)}]): give a function of a run and its new events")
    if iscoroutinefunction(watcher) or iscoroutinefunction(type(watcher).__call__):
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
