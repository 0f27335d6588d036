"""Virtual time: hours pass in a test without waiting. For trio, the memory store and async tools."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib import import_module
from typing import Final, TypeVar

import anyio

from agentfsm._concurrency import virtual_time
from agentfsm.core.errors import MisuseError
from agentfsm.ports.store import Clock

T = TypeVar("T")

# Where virtual time begins, seconds since 1970: a day in January 2027, so that it cannot be taken for the real one.
EPOCH: Final = 1_800_000_000.0


class VirtualClock(Clock):
    """Reads the event loop's time, so that it jumps when `run_virtual` lets the loop jump."""

    def now(self) -> float:
        """Seconds since 1970, virtual."""
        return EPOCH + anyio.current_time()

    def monotonic(self) -> float:
        """Seconds of the event loop."""
        return anyio.current_time()


def run_virtual(function: Callable[[], Awaitable[T]]) -> T:
    """Run an async function on trio with a clock that jumps to the next deadline whenever all tasks wait.

    Give the agent `clock=VirtualClock()`. Limits per minute, of tools, tags and `Throttled`, and the rests of
    `Fallback` follow virtual time by themselves: what was called before this function or after it counts for no minute
    in it. Threads are not waited for: plain tools and SQLite do not belong here.

    Raises:
        MisuseError: when trio is not installed.
    """
    try:
        testing = import_module("trio.testing")
    except ImportError:
        raise MisuseError("virtual time needs trio: install agentfsm[trio]") from None
    clock = testing.MockClock(autojump_threshold=0)
    token = virtual_time.set(clock.current_time)
    try:
        return anyio.run(function, backend="trio", backend_options={"clock": clock})
    finally:
        virtual_time.reset(token)
