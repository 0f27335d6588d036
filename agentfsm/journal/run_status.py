"""The status of a run: from its lease, which a process that executes it holds, and from its journal."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING

from agentfsm.core.events import Paused
from agentfsm.core.machine import State
from agentfsm.ports.store import Filter, RunSummary, Store

if TYPE_CHECKING:
    from agentfsm.core.run import Run


class RunStatus(StrEnum):
    """Status of a run in one word."""

    RUNNING = "running"
    """A process executes it: it holds a lease that has not expired."""

    IDLE = "idle"
    """It has begun and could continue, and no process executes it: the last one has ended, or has died."""

    QUEUED = "queued"
    """It waits for a process that begins it, or that applies a decision, input or deadline."""

    WAITING = "waiting"
    """It waits for a decision, an answer, input, or a task at a server."""

    PAUSED = "paused"
    """It is paused until it is resumed."""

    DONE = "done"
    """It has ended with an answer."""

    FAILED = "failed"
    """It has ended without one, for the reason in `stop_reason`."""


def find_status(row: RunSummary, now: float, *, is_paused: bool) -> RunStatus:
    """Return the status of a run.

    Args:
        row: The run in a list.
        now: Time of the store, seconds since 1970.
        is_paused: Whether the run is paused; a row does not have this.
    """
    if row.state in {State.DONE, State.ERROR}:
        return RunStatus.DONE if row.state is State.DONE else RunStatus.FAILED
    if is_paused:
        return RunStatus.PAUSED
    is_ready = row.ready_at is not None and row.ready_at <= now
    if row.waiting and not is_ready:
        return RunStatus.WAITING
    if row.driven:
        return RunStatus.RUNNING
    has_begun = row.version or row.worker is not None
    return RunStatus.QUEUED if row.waiting or not has_begun else RunStatus.IDLE


def find_past_status(run: Run) -> RunStatus:
    """Return the status that a run had at its version, from its journal alone: one that could continue was running."""
    if run.is_over:
        return RunStatus.DONE if run.state is State.DONE else RunStatus.FAILED
    if run.paused is not None:
        return RunStatus.PAUSED
    return RunStatus.WAITING if run.is_waiting else RunStatus.RUNNING


async def list_statuses(store: Store, rows: Sequence[RunSummary]) -> list[RunStatus]:
    """Return the status of each run of a list. Of those that wait, the last event is read: a pause is one."""
    now = await store.now() if rows else 0.0
    found = []
    for row in rows:
        last = (await store.read(row.id, row.version - 1)).events if row.waiting else ()
        found.append(find_status(row, now, is_paused=bool(last) and isinstance(last[-1], Paused)))
    return found


async def read_status(store: Store, run: Run, resume: str = "") -> tuple[RunStatus, str]:
    """Return the status of a run that was just loaded, and the text of `explain_standstill`."""
    rows = () if run.is_over else await store.runs(Filter(id=run.id), limit=1)
    if not rows:  # over, or deleted meanwhile
        return find_past_status(run), ""
    now = await store.now() if rows[0].waiting else 0.0  # the status of others does not depend on it
    status = find_status(rows[0], now, is_paused=run.paused is not None)
    return status, explain_standstill(rows[0], status, resume)


def explain_standstill(row: RunSummary, status: RunStatus, resume: str = "") -> str:
    """Return why no process executes a run, and how it continues; empty unless it is idle or queued.

    Args:
        row: The run in a list.
        status: Its status.
        resume: Command line that resumes it. Empty: one without a store and an agent.
    """
    if status not in {RunStatus.IDLE, RunStatus.QUEUED}:
        return ""
    if row.is_too_new:
        return f"only a newer agentfsm can execute it: its records have format {row.format}"
    if row.parent is not None:
        return f"run {row.parent} has called it, and continues it when that one is executed"
    why = "no process executes it"
    if row.worker is not None:
        why = "the process that executed it has died"
    elif status is RunStatus.QUEUED:
        why = "no process has taken it yet"
    command = f"agentfsm resume {shlex.quote(row.id)}"
    release = f" with release {row.release}" if row.release else ""
    return f"{why}: a worker of agent {row.agent}{release} continues it, or `{resume or command}`"
