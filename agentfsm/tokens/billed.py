"""By how much a model bills more input than is counted here, as running figures, so that reservations suffice.

A provider may add a prompt of its own, count tools otherwise or have another vocabulary. The count of the next request
is raised by the smaller of two figures from earlier requests: the largest excess, and the largest share. The first
holds for what is added to each request, the second for a vocabulary, and the smaller one overrates neither a long nor a
short request.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

import anyio
import attrs
from anyio.lowlevel import current_token

if TYPE_CHECKING:
    from agentfsm.ports.model import Model

# Share of the largest figures that is left after another request.
_DECAY: Final = 0.9


@attrs.define(eq=False)
class BilledExcess:
    """Figures of one model in this process."""

    tokens: float = 0.0
    """Largest excess of a recent request, tokens; a little less after each later one."""

    share: float = 0.0
    """Largest excess of a recent request, as a share of the tokens that were counted."""

    is_known: bool = False
    """Whether a request has ended."""

    _first: dict[Any, anyio.Event] = attrs.field(factory=dict, init=False)
    """By event loop, the event at the end of the request that is asked alone, as long as nothing is known."""

    def record(self, counted: int, billed: int) -> None:
        """Record the input tokens of a request, as they were counted and as they were billed."""
        more = max(billed - counted, 0)
        self.tokens = max(more, _DECAY * self.tokens)
        self.share = max(more / max(counted, 1), _DECAY * self.share)

    def correct(self, counted: int) -> int:
        """Return the tokens to reserve for a request of so many counted ones."""
        return counted + math.ceil(min(self.tokens, self.share * counted))

    def try_begin_first(self) -> bool:
        """Return whether this is the first request to the model in this event loop: call `end_first` after it."""
        loop = current_token()
        if loop in self._first:
            return False
        self._first[loop] = anyio.Event()
        return True

    async def wait_for_first(self) -> None:
        """Wait for the end of the first request."""
        if (first := self._first.get(current_token())) is not None:
            await first.wait()

    def end_first(self) -> None:
        """Let the requests go on that wait for the first one, whether or not it has shown something."""
        self.is_known = True
        self._first.pop(current_token()).set()


_FIGURES: Final[WeakKeyDictionary[Model, BilledExcess]] = WeakKeyDictionary()


def find_billed_excess(model: Model) -> BilledExcess:
    """Return the figures of a model, shared by all agents that use it; figures of its own if it cannot be shared."""
    try:
        return _FIGURES.setdefault(model, BilledExcess())
    except TypeError:  # a class of the user's without a hash or weak references
        return BilledExcess()
