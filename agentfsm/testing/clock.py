"""Run tests in virtual time, where hours pass without waiting. For trio, the memory store and async tools."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib import import_module
from typing import Final, TypeVar

import anyio

from agentfsm._lib.concurrency import virtual_time
from agentfsm.core.errors import MisuseError
from agentfsm.ports.store import Clock

T = TypeVar("T")

# Start of virtual time, in seconds since 1970: a day in January 2027.
EPOCH: Final = 1_800_000_000.0


class VirtualClock(Clock):
    """Clock that reads the event loop's time, which `run_virtual` lets jump."""

    def now(self) -> float:
        """Return the virtual time in seconds since 1970."""
        return EPOCH + anyio.current_time()

    def monotonic(self) -> float:
        """Return the event loop's time in seconds."""
        return anyio.current_time()


def run_virtual(function: Callable[[], Awaitable[T]]) -> T:
    """Run an async function on trio with a clock that jumps to the next deadline whenever all tasks wait.

    Give the agent `clock=VirtualClock()`. Rate limits of tools, tags and `Throttled`, and the pauses of `Fallback`
    follow virtual time automatically: calls before or after this function do not count for them. The clock does not
    wait for threads, so plain tools and SQLite cannot be used.

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
