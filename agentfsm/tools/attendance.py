"""Ask the person who attends a run during a tool call, which continues with the answer.

An execution is attended if its driving call has `elicit=`. Time that a person takes to answer is not the call's: while
a question is open, the time limits of the call and of its run do not count.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import attrs

from agentfsm.core.inbox import GiveInput
from agentfsm.core.pending import Pending, Question
from agentfsm.core.value import Value

# Asks the attending person, and returns the validated answers; None if the person gave none.
Attendant: TypeAlias = Callable[[Pending], Awaitable[GiveInput | None]]
# Stops a clock for the duration of a block.
ClockStop: TypeAlias = Callable[[], AbstractContextManager[object]]


@attrs.frozen(kw_only=True)
class AttendedQuestions(Value):
    """Questions of a running call to the attending person."""

    questions: tuple[Question, ...]
    """The questions, which are answered together."""

    state: str
    """JSON text that the tool gets back with the answers if the call is made again."""

    attempt: int
    """Number of the current attempt at the call, from 1."""


@attrs.frozen(eq=False, repr=False)
class Attendance:
    """Access of one call to the person who attends its run."""

    attendant: Attendant
    """Asks the person, with the clocks of the call and its run stopped."""

    record: Callable[[Attendant, AttendedQuestions], Awaitable[Mapping[str, Any] | None]]
    """Asks the questions of the call's tool through the attendant, and commits the answers to the journal."""

    async def ask(self, asked: AttendedQuestions) -> Mapping[str, Any] | None:
        """Ask the questions of the call's tool. The answers are durable when this returns them.

        Returns:
            The answers by key, with None for a declined question; or None if the person gave none, or the tool has
            asked too often.
        """
        return await self.record(self.attendant, asked)

    def with_clock(self, stop: ClockStop) -> Attendance:
        """Return an attendance that also stops another clock while the person is asked."""
        attendant = self.attendant

        async def ask_stopped(item: Pending) -> GiveInput | None:
            with stop():
                return await attendant(item)

        return attrs.evolve(self, attendant=ask_stopped)
