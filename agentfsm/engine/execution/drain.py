"""Draining: the end of an execution between two effects, so that its process can stop and cut off none of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import anyio
import attrs


@attrs.define(eq=False, repr=False)
class Drain:
    """Ends the execution of a run, with the child runs that it waits for, as soon as no effect of theirs is in flight.

    An effect is a step of the engine, or a call in ACT. The call of an agent is none: the steps of its run are. No
    further effect begins once the drain has begun. The execution is then cancelled between two effects, which leaves
    the run as after any step: another worker continues it, and no outcome is unknown.
    """

    scope: anyio.CancelScope
    """Scope around the execution of the root run, which is cancelled at the end."""

    above: Drain | None = None
    """Drain of the execution that this one is a part of, which counts the same effects; None if there is none."""

    has_begun: bool = attrs.field(default=False, init=False)
    """Whether the execution is to end."""

    effects: int = attrs.field(default=0, init=False)
    """Number of effects in flight."""

    def begin(self) -> None:
        """Begin no further effect, and end the execution when those in flight have ended."""
        self.has_begun = True
        self._end_if_idle()

    async def enter(self) -> None:
        """Count an effect that begins. During a drain this waits for the end of the execution."""
        if self.has_begun:
            self._end_if_idle()
            await anyio.sleep_forever()
        if self.above is not None:
            await self.above.enter()
        self.effects += 1

    def leave(self) -> None:
        """Count an effect that has ended."""
        self.effects -= 1
        if self.above is not None:
            self.above.leave()
        if self.has_begun:
            self._end_if_idle()

    @contextmanager
    def left(self) -> Iterator[None]:
        """Do not count an effect during the block, which waits for others that are counted themselves."""
        self.leave()
        try:
            yield
        finally:
            self._resume()

    def _resume(self) -> None:
        self.effects += 1
        if self.above is not None:
            self.above._resume()  # noqa: SLF001  one of its kind

    def _end_if_idle(self) -> None:
        if not self.effects:
            self.scope.cancel()
