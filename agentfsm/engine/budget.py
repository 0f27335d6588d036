"""What a run and the agents below it may still spend: held back before each request, settled after it.

The journals hold what was spent. A budget adds what they do not hold yet: requests that are under way, replies of a
turn that is not committed, and what agents below have spent whose results have not come. So several agents at once
never spend together what only one of them could.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import anyio
import attrs

from agentfsm.core.errors import LimitError
from agentfsm.core.limits import Limits, StopReason
from agentfsm.core.messages import Usage

if TYPE_CHECKING:
    from agentfsm.core.run import Run

Price = Callable[[Usage], float | None]
Amount = tuple[int, float]
# Tokens and US dollars.

NOTHING: Final[Amount] = (0, 0.0)


def _for_nothing(_tokens: int) -> float:
    return 0.0


@attrs.define(eq=False, repr=False)
class _Family:
    """What the budgets of a run and of all agents below it share."""

    news: anyio.Event | None = None
    # Set when a request is settled, for those who wait for room.


def _family_of(budget: Budget) -> _Family:
    return _Family() if budget.above is None else budget.above.family


def _ancestors_of(budget: Budget) -> tuple[Budget, ...]:
    return () if budget.above is None else (budget.above, *budget.above.ancestors)


def _counts_money(budget: Budget) -> bool:
    return budget.limits.usd is not None or (budget.above is not None and budget.above.counts_money)


@attrs.define(eq=False, repr=False)
class Budget:
    """What one run may still spend, in this process."""

    limits: Limits
    run: Callable[[], Run]
    # Tells the newest state of the run.
    above: Budget | None = None
    # The budget of the run whose tool this one is.
    family: _Family = attrs.field(init=False, default=attrs.Factory(_family_of, takes_self=True))
    ancestors: tuple[Budget, ...] = attrs.field(init=False, default=attrs.Factory(_ancestors_of, takes_self=True))
    # Those above, the nearest first.
    counts_money: bool = attrs.field(init=False, default=attrs.Factory(_counts_money, takes_self=True))
    # Whether this run, or one above it, is limited in money.
    _reserved: Amount = NOTHING
    # By requests that are under way, here and below.
    _below: dict[str, Amount] = attrs.field(factory=dict)
    # What agents below have spent, by the ids of their runs, as far as it is not in this run's journal.
    _unwritten: Amount = NOTHING
    # Spent by this run and not in its journal...
    _version: int = -1
    # ...as long as that is at this version.

    @property
    def spent(self) -> Amount:
        """What the run and the agents below it have spent."""
        run = self.run()
        tokens, usd = run.usage.tokens, run.usage.cost_usd or 0.0
        if run.version == self._version:
            tokens, usd = tokens + self._unwritten[0], usd + self._unwritten[1]
        for below in self._below.values():
            tokens, usd = tokens + below[0], usd + below[1]
        return tokens, usd

    def open(self, below: dict[str, Amount]) -> None:
        """Begin with what this run and those below it have spent already, in an earlier process or before a pause."""
        self._below.update(below)
        self._tell()

    def _tell(self) -> None:
        if self.above is not None:
            self.above.note(self.run().id, self.spent)

    def note(self, run_id: str, spent: Amount) -> None:
        """Take note of what a run below has spent, in all."""
        self._below[run_id] = spent
        self._tell()

    def returned(self, run_id: str) -> None:
        """Forget what a run below has spent: its result has brought it into this run's journal."""
        self._below.pop(run_id, None)

    async def reserve(self, asked_tokens: int, wanted_tokens: int, price: Price) -> tuple[int, Amount]:
        """Hold back what a request may cost at most.

        Where it could have more if others had not requests under way, this waits for them.

        Args:
            asked_tokens: Of the request, about.
            wanted_tokens: Of the longest answer, 1 or more.
            price: Tells what a usage costs, US dollars.

        Returns:
            Tokens that the answer may have, 1 to `wanted_tokens`, and what was held back: give it to `settle`.

        Raises:
            LimitError: when nothing is left for an answer, or the price is unknown where money is limited.
        """
        cost = self._cost_of(asked_tokens, wanted_tokens, price) if self.counts_money else _for_nothing
        while True:
            granted, binding = self._room(asked_tokens, wanted_tokens, cost, beside_others=True)
            if granted == wanted_tokens:
                break
            if granted >= self._room(asked_tokens, wanted_tokens, cost, beside_others=False)[0]:
                break
            self.family.news = self.family.news or anyio.Event()
            await self.family.news.wait()
        if granted < 1:
            raise binding.exhausted(asked_tokens)
        held = asked_tokens + granted, cost(granted)
        for budget in (self, *self.ancestors):
            budget._reserved = budget._reserved[0] + held[0], budget._reserved[1] + held[1]  # noqa: SLF001  one of its kind
        return granted, held

    def _room(
        self,
        asked_tokens: int,
        wanted_tokens: int,
        cost: Callable[[int], float],
        *,
        beside_others: bool,
    ) -> tuple[int, Budget]:
        """Return how long an answer may be, and the budget that says so; with or without what others hold back."""
        granted, binding = wanted_tokens, self
        for budget in (self, *self.ancestors):
            tokens, usd = budget.spent
            held = budget._reserved if beside_others else NOTHING  # noqa: SLF001  one of its kind
            room = budget.limits.tokens - tokens - held[0] - asked_tokens
            if budget.limits.usd is not None:
                room = min(room, _affordable(budget.limits.usd - usd - held[1], wanted_tokens, cost))
            if room < granted:
                granted, binding = room, budget
        return granted, binding

    def _cost_of(self, asked_tokens: int, wanted_tokens: int, price: Price) -> Callable[[int], float]:
        """Return what a request costs, by the length of its answer: a straight line through the longest and none."""
        alone = price(Usage(input_tokens=asked_tokens))
        whole = price(Usage(input_tokens=asked_tokens, output_tokens=wanted_tokens))
        if alone is None or whole is None:
            raise LimitError(StopReason.COST_BUDGET, "the price of the model is unknown, so no money limit can be kept")
        return lambda tokens: alone + (whole - alone) * tokens / wanted_tokens

    def exhausted(self, asked_tokens: int) -> LimitError:
        """Return the error that says which budget leaves no room for an answer."""
        tokens, usd = self.spent
        if tokens + asked_tokens >= self.limits.tokens or self.limits.usd is None:
            message = f"{tokens:,} of {self.limits.tokens:,} tokens used, and the next request alone takes the rest"
            return LimitError(StopReason.TOKEN_BUDGET, message)
        message = f"{usd:.4g} of {self.limits.usd:.4g} US dollars used, and the next request alone takes the rest"
        return LimitError(StopReason.COST_BUDGET, message)

    def settle(self, held: Amount, usage: Usage) -> None:
        """Put what a request did cost in the place of what was held back for it."""
        for budget in (self, *self.ancestors):
            budget._reserved = budget._reserved[0] - held[0], budget._reserved[1] - held[1]  # noqa: SLF001  one of its kind
        version = self.run().version
        before = self._unwritten if version == self._version else NOTHING
        self._unwritten = before[0] + usage.tokens, before[1] + (usage.cost_usd or 0.0)
        self._version = version
        self._tell()
        if self.family.news is not None:
            self.family.news.set()
            self.family.news = None


def _affordable(left_usd: float, wanted_tokens: int, cost: Callable[[int], float]) -> int:
    """Return how long an answer the money allows: 0 where the request alone is too dear."""
    alone, whole = cost(0), cost(wanted_tokens)
    if whole <= left_usd:
        return wanted_tokens
    return int(wanted_tokens * (left_usd - alone) / (whole - alone)) if whole > alone < left_usd else 0
