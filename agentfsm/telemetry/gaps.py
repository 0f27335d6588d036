"""Times during which no worker executed a run, found between two events of its journal."""

from __future__ import annotations

from typing import Any, Final

import attrs

from agentfsm.core.events import Event
from agentfsm.core.run import Run
from agentfsm.core.value import Value

# Shortest gap between two events that counts, seconds; shorter ones are the work of the engine between two events.
MIN_GAP_S: Final = 0.01
# Shortest time without any event, outside of a wait, that counts as an interruption: the worker was gone.
MIN_INTERRUPTION_S: Final = 1.0

QUEUE: Final = "queue"
INTERRUPTION: Final = "interruption"


@attrs.frozen(kw_only=True)
class Gap(Value):
    """A time during which no worker executed a run."""

    kind: str
    """"queue" before the first event; else the kinds of wait, such as "approval", separated by
    commas; or "interruption", after a crash or a shutdown of its worker.
    """

    started_at: float
    """Time at which it began, seconds since 1970."""

    ended_at: float
    """Time at which a worker went on, seconds since 1970."""

    @property
    def duration_s(self) -> float:
        """Seconds from its beginning to its end."""
        return self.ended_at - self.started_at


def find_gap(before: Run[Any], event: Event) -> Gap | None:
    """Return the time before an event during which no worker executed the run; None if there was no such time.

    Args:
        before: The run before the event.
        event: The event.
    """
    start, end = before.updated_at, event.at - event.took_s
    if end - start < MIN_GAP_S:
        return None
    if before.version == 0:
        kind = QUEUE
    elif pending := before.pending:
        kind = ",".join(dict.fromkeys(str(item.kind) for item in pending))
    elif end - start >= MIN_INTERRUPTION_S:
        kind = INTERRUPTION
    else:
        return None
    return Gap(kind=kind, started_at=start, ended_at=end)
