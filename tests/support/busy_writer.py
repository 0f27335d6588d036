"""A store's thread that is kept busy, so that jobs queue up behind it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from agentfsm.stores import SQLiteStore
from agentfsm.stores.threaded.group_commit import StoreJob

# A guard against a hang, not a bound: the thread takes the job in microseconds.
ENTERED_S = 20.0


def hold(store: SQLiteStore, *, writes: bool = True) -> threading.Event:
    """Keep the store's thread busy until the gate is opened; it is, when this returns, and has taken nothing else."""
    entered, gate = threading.Event(), threading.Event()

    def wait(_ledger: Any) -> bool:
        entered.set()
        return gate.wait(ENTERED_S)

    work: Callable[[Any], bool] = wait
    store._writer.submit(StoreJob(work, writes=writes))
    assert entered.wait(ENTERED_S)
    return gate
