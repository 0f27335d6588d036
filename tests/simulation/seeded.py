"""An event loop in which nothing is left to chance but a seed: trio in virtual time, with its own dice thrown by us.

Trio's names for this are private. They stand here and nowhere else, and `test_simulation.py` sees that two runs of a
seed are the same to the bit, in one process and in two.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Awaitable, Callable, Iterator, MutableSequence
from contextlib import contextmanager
from typing import TypeVar

import trio

import agentfsm.agents.agent_starts as starts
from agentfsm.testing import run_virtual

T = TypeVar("T")

_run = trio._core._run


class _InOrder(random.Random):
    """Leaves the ready tasks as they are: the oldest goes first."""

    def shuffle(self, x: MutableSequence[object]) -> None:
        """Turn them round, since trio begins at the end."""
        x.reverse()


def run_seeded(function: Callable[[], Awaitable[T]], seed: int, *, in_order: bool = False) -> T:
    """Run an async function in virtual time; the seed decides which of several ready tasks goes first.

    The package's own dice (waits before a retry, a worker's rest, the nonces of runs) are thrown by the same seed.

    Args:
        function: The function.
        seed: Throws everything.
        in_order: Whether the oldest of the ready tasks goes first, whatever the seed.
    """
    with _deterministic(seed, _InOrder() if in_order else _run._r):
        _run._r.seed(seed)
        random.seed(seed)
        return run_virtual(function)


@contextmanager
def _deterministic(seed: int, order: random.Random) -> Iterator[None]:
    """Have trio sort its ready tasks before it shuffles them, and nobody write logs, which cost more than the runs."""
    before, dice, log = _run._ALLOW_DETERMINISTIC_SCHEDULING, random.getstate(), logging.getLogger("agentfsm")
    own, _run._r = _run._r, order
    nonces = random.Random(seed)
    level, log.level = log.level, logging.CRITICAL + 1
    log.manager._clear_cache()
    _run._ALLOW_DETERMINISTIC_SCHEDULING = True
    urandom, starts.urandom = starts.urandom, nonces.randbytes
    try:
        yield
    finally:
        starts.urandom = urandom
        _run._ALLOW_DETERMINISTIC_SCHEDULING, _run._r = before, own
        random.setstate(dice)
        log.level = level
        log.manager._clear_cache()


def at_once(coroutine: Awaitable[T]) -> T:
    """Return what a coroutine returns that never waits."""
    try:
        coroutine.send(None)  # type: ignore[attr-defined]
    except StopIteration as end:
        return end.value
    raise AssertionError("it waited")
