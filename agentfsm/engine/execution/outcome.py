"""The value that a handler returns: events for the step to commit."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import NamedTuple

from agentfsm.core.events import Event


class StepOutcome(NamedTuple):
    """Events that the step commits in one append, and the conditions of that append."""

    events: tuple[Event, ...]
    taken: Sequence[int] = ()
    """Numbers of the inbox rows that the same append removes."""

    otherwise: Callable[[], Awaitable[StepOutcome]] | None = None
    """Set for events that end the run only if nothing new is in the inbox: makes the outcome that is committed if
    something is.
    """

    scope: AbstractAsyncContextManager[object] | None = None
    """Context entered before the commit and left after it; calls that started while the reply streamed end in it."""
