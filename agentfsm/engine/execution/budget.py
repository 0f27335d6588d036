"""What a run and the agents below it may still spend: held back before each request and call, settled after it.

The journals hold what was spent. A budget adds what they do not hold yet: requests and calls that are under way,
replies of a turn that is not committed, and what agents below have spent whose results have not come. So several
agents at once never spend together what only one of them could.

Tokens and money are held back for the longest answer that a request may get, on the budget of the run and on each one
above it. A request waits while one of these has no room for that beside what others have under way there; the last one
that fits may answer longer than was thought, and so a budget is exceeded by one answer at most. Whoever waits holds
nothing, and whoever holds something waits for its model only: somebody always goes on. Calls of tools are counted one
by one, so that their number is never exceeded at all.

A run that asks for a last answer keeps back what that may cost, from itself and from the agents below it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import anyio
import attrs

from agentfsm.core.calls import OpenCall, Phase
from agentfsm.core.errors import LimitError
from agentfsm.core.limits import LAST_ANSWER_SHARE, Limits, StopReason
from agentfsm.core.stops import find_reached_limit, format_calls_used, format_tokens_used, format_usd_used
from agentfsm.core.usage import Usage

if TYPE_CHECKING:
    from agentfsm.core.run import Run

PriceFunction = Callable[[Usage], float | None]
NO_USAGE: Final = Usage()


# Tokens and US dollars.
Amount = tuple[int, float]
# The same, held back for a request, and the tokens without what is added since others were exceeded.
Reservation = tuple[int, float, int]

NO_AMOUNT: Final[Amount] = (0, 0.0)


class RunSpending(NamedTuple):
    """What a run and the agents below it have spent."""

    run: Run
    """As it was then."""

    usage: Usage
    """Its own and theirs, as `calls`."""

    calls: int
    """Of tools; those that are under way count."""


class RunSource(Protocol):
    """What is driven: a journal, or whatever else has the newest state of a run."""

    @property
    def run(self) -> Run:
        """The run as it is now."""
        ...


def _zero_cost(_tokens: int) -> float:
    return 0.0


@attrs.define(eq=False, repr=False)
class _BudgetTree:
    """What the budgets of a run and of all agents below it share."""

    room_freed: anyio.Event | None = None
    """Set when a request is settled, for those who wait for room."""

    excess_tokens: int = 0
    """Tokens by which a request has exceeded what was held back for it, at most: what was counted too low, or a model
    that answers longer than it may. So much more is held back for each from then on.
    """


def _find_tree(budget: Budget) -> _BudgetTree:
    return _BudgetTree() if budget.parent is None else budget.parent.tree


def _list_ancestors(budget: Budget) -> tuple[Budget, ...]:
    return () if budget.parent is None else (budget.parent, *budget.parent.ancestors)


def _is_money_limited(budget: Budget) -> bool:
    return budget.limits.usd is not None or (budget.parent is not None and budget.parent.is_money_limited)


@attrs.define(eq=False, repr=False)
class Budget:
    """What one run may still spend, in this process."""

    limits: Limits
    source: RunSource
    """Has the newest state of the run."""

    parent: Budget | None = None
    """The budget of the run whose tool this one is."""

    reserves_last_answer: bool = False
    """Whether room is kept back for a last answer."""

    tree: _BudgetTree = attrs.field(init=False, default=attrs.Factory(_find_tree, takes_self=True))
    ancestors: tuple[Budget, ...] = attrs.field(init=False, default=attrs.Factory(_list_ancestors, takes_self=True))
    """Those above, the nearest first."""

    is_money_limited: bool = attrs.field(init=False, default=attrs.Factory(_is_money_limited, takes_self=True))
    """Whether this run, or one above it, is limited in money."""

    _kept_for_last: Amount = NO_AMOUNT
    """For the last answer."""

    _reserved: Amount = NO_AMOUNT
    """By requests that are under way, here and below."""

    _in_flight: int = 0
    """How many these are."""

    children: dict[str, RunSpending] = attrs.field(factory=dict)
    """What agents below have spent, by the ids of their runs, as far as it is not in this run's journal."""

    _unjournalled_usage: Usage = NO_USAGE
    """Spent by this run and not in its journal..."""

    _usage_version: int = -1
    """...as long as that is at this version."""

    warned_limits: frozenset[str] = frozenset()
    """Names of the limits that a warning was given for."""

    _open_calls: int = 0
    """Calls that have their place among those allowed, and no result in the journal."""

    @property
    def unjournalled_usage(self) -> Usage:
        """What the run's own requests have cost that its journal does not hold."""
        return self._unjournalled_usage if self.source.run.version == self._usage_version else NO_USAGE

    @property
    def usage(self) -> Usage:
        """What the run and the agents below it have spent on models."""
        run = self.source.run
        usage = run.usage + self._unjournalled_usage if run.version == self._usage_version else run.usage
        for below in self.children.values():
            usage += below.usage
        return usage

    @property
    def calls(self) -> int:
        """The calls of tools that the run and the agents below it have made, with those under way."""
        return (
            self.source.run.tool_call_count + self._open_calls + sum([below.calls for below in self.children.values()])
        )

    def restore(self, children: Sequence[RunSpending]) -> None:
        """Begin with what this run and those below it have spent already, in an earlier process or before a pause."""
        self._open_calls = len(
            [entry for entry in self.source.run.open if entry.phase not in (Phase.INTENDED, Phase.FINISHED)]
        )
        self.children.update({spent.run.id: spent for spent in children})
        self._report_to_parent()

    def _report_to_parent(self) -> None:
        if self.parent is not None:
            self.parent.record_child(RunSpending(self.source.run, self.usage, self.calls))

    def record_child(self, spent: RunSpending) -> None:
        """Take note of what a run below has spent, in all."""
        self.children[spent.run.id] = spent
        self._report_to_parent()

    def pop_child(self, run_id: str) -> RunSpending | None:
        """Forget what a run below has spent, and return it: its result brings it into this run's journal."""
        return self.children.pop(run_id, None)

    # Tokens and money.

    async def reserve(
        self,
        request_tokens: int,
        wanted_tokens: int,
        longest_tokens: int,
        price: PriceFunction,
        least_tokens: int = 1,
    ) -> tuple[int, Reservation]:
        """Hold back what a request may cost at most.

        Where others have requests under way that leave no room for that, this waits for them; it holds nothing
        meanwhile, also when it is cancelled.

        Args:
            request_tokens: Of the request, about.
            wanted_tokens: Of the answer that it shall have room for, 1 or more.
            longest_tokens: Of the longest answer that it may get where nothing caps it, `wanted_tokens` or more.
            price: Tells what a usage costs, US dollars.
            least_tokens: Of the shortest answer that it may be capped at, 1 to `wanted_tokens`.

        Returns:
            Tokens that the answer may have, `least_tokens` to `wanted_tokens` (which stands for no cap), and what was
            held back: give it to `settle`.

        Raises:
            LimitError: when nothing is left for an answer, or the price is unknown where money is limited.
        """
        cost = self._build_cost_function(request_tokens, longest_tokens, price) if self.is_money_limited else _zero_cost
        while True:
            granted, binding, kept_tokens = self._find_binding_limit(request_tokens, wanted_tokens, cost)
            if granted < least_tokens:
                raise binding.build_exhausted_error(request_tokens + kept_tokens + least_tokens - 1)
            needed = longest_tokens + self.tree.excess_tokens
            if self._has_room(request_tokens, needed, cost):
                break
            self.tree.room_freed = self.tree.room_freed or anyio.Event()
            await self.tree.room_freed.wait()
        held = request_tokens + needed, cost(needed), request_tokens + longest_tokens
        for budget in (self, *self.ancestors):
            budget._reserved = budget._reserved[0] + held[0], budget._reserved[1] + held[1]  # noqa: SLF001  one of its kind
            budget._in_flight += 1  # noqa: SLF001  as above
        return granted, held

    def reserve_last_answer(self, request_tokens: int, answer_tokens: int, price: PriceFunction) -> None:
        """Keep back what a last answer may cost after the request at hand: a request somewhat longer, and its answer.

        What it may cost beyond the request at hand is a fifth of the limit at most. Nothing is kept back from the first
        request, nor from the last.

        Args:
            request_tokens: Of the request at hand, about.
            answer_tokens: Of an answer; what the reply at hand and its results add is taken to be as much.
            price: As for `reserve`.
        """
        run, limits = self.source.run, self.limits
        if not self.reserves_last_answer or not run.turn or run.limit_reached is not None:
            self._kept_for_last = NO_AMOUNT
            return
        more = min(answer_tokens, int(LAST_ANSWER_SHARE / 2 * limits.tokens))
        usd = 0.0
        if self.is_money_limited:
            usd = price(Usage(input_tokens=request_tokens)) or 0.0
            whole = price(Usage(input_tokens=request_tokens + more, output_tokens=more)) or 0.0
            usd += min(whole - usd, LAST_ANSWER_SHARE * (limits.usd or inf))
        self._kept_for_last = request_tokens + 2 * more, usd

    def _find_binding_limit(
        self, request_tokens: int, wanted_tokens: int, cost: Callable[[int], float]
    ) -> tuple[int, Budget, int]:
        """Return how long an answer may be, if no other request were under way.

        Returns:
            The tokens of the answer, the budget that says so, and the tokens kept back there for last answers.
        """
        granted, binding, binding_kept, kept = wanted_tokens, self, 0, NO_AMOUNT
        for budget in (self, *self.ancestors):
            kept = kept[0] + budget._kept_for_last[0], kept[1] + budget._kept_for_last[1]  # noqa: SLF001  one of its kind
            room = budget._remaining_tokens(request_tokens, wanted_tokens, cost, kept)  # noqa: SLF001  as above
            if room < granted:
                granted, binding, binding_kept = room, budget, kept[0]
        return granted, binding, binding_kept

    def _has_room(self, request_tokens: int, needed_tokens: int, cost: Callable[[int], float]) -> bool:
        """Whether there is room beside the requests that are under way, on this budget and on all above."""
        kept = NO_AMOUNT
        for budget in (self, *self.ancestors):
            kept = kept[0] + budget._kept_for_last[0], kept[1] + budget._kept_for_last[1]  # noqa: SLF001  one of its kind
            if not budget._in_flight:  # noqa: SLF001  as above
                continue  # nobody to wait for
            held = budget._reserved[0] + kept[0], budget._reserved[1] + kept[1]  # noqa: SLF001  as above
            if budget._remaining_tokens(request_tokens, needed_tokens, cost, held) < needed_tokens:  # noqa: SLF001  as above
                return False
        return True

    def _remaining_tokens(
        self, request_tokens: int, wanted_tokens: int, cost: Callable[[int], float], held: Amount
    ) -> int:
        """Return how long an answer this budget allows beside what is held back; of money, up to `wanted_tokens`."""
        usage = self.usage
        room = self.limits.tokens - usage.input_tokens - usage.output_tokens - held[0] - request_tokens
        if self.limits.usd is None:
            return room
        return min(room, _affordable_tokens(self.limits.usd - (usage.cost_usd or 0.0) - held[1], wanted_tokens, cost))

    def _build_cost_function(
        self, request_tokens: int, longest_tokens: int, price: PriceFunction
    ) -> Callable[[int], float]:
        """Return what a request costs, by the length of its answer: a straight line through the longest and none."""
        alone = price(Usage(input_tokens=request_tokens))
        whole = price(Usage(input_tokens=request_tokens, output_tokens=longest_tokens))
        if alone is None or whole is None:
            raise LimitError(StopReason.COST_BUDGET, "the price of the model is unknown, so no money limit can be kept")
        return lambda tokens: alone + (whole - alone) * tokens / longest_tokens

    def build_exhausted_error(self, request_tokens: int) -> LimitError:
        """Return the error that says which budget leaves no room for an answer."""
        usage = self.usage
        rest = "the next request alone takes the rest"
        if usage.tokens + request_tokens >= self.limits.tokens or self.limits.usd is None:
            message = f"{format_tokens_used(usage.tokens, self.limits)}: {rest}, about {request_tokens:,} tokens"
            return LimitError(StopReason.TOKEN_BUDGET, message)
        return LimitError(StopReason.COST_BUDGET, f"{format_usd_used(usage.cost_usd or 0.0, self.limits)}: {rest}")

    def settle(self, held: Reservation, usage: Usage) -> None:
        """Put what a request did cost in the place of what was held back for it."""
        for budget in (self, *self.ancestors):
            reserved = budget._reserved  # noqa: SLF001  one of its kind
            budget._in_flight -= 1  # noqa: SLF001  as above
            rest = reserved[0] - held[0], reserved[1] - held[1]
            budget._reserved = rest if budget._in_flight else NO_AMOUNT  # noqa: SLF001  fractions may leave a crumb
        if (excess := usage.input_tokens + usage.output_tokens - held[2]) > self.tree.excess_tokens:
            self.tree.excess_tokens = excess
        version = self.source.run.version
        self._unjournalled_usage = self._unjournalled_usage + usage if version == self._usage_version else usage
        self._usage_version = version
        if self.parent is not None:
            self._report_to_parent()
        if self.tree.room_freed is not None:
            self.tree.room_freed.set()
            self.tree.room_freed = None

    # Calls of tools.

    def reset_open_calls(self) -> None:
        """Forget calls that have begun for a reply that never came."""
        self._open_calls = 0

    def try_start_call(self) -> bool:
        """Take a place for a call of a reply that is not whole yet; return whether there is one."""
        if self._remaining_calls() < 1:
            return False
        self._open_calls += 1
        self._report_to_parent()
        return True

    def admit_calls(self, waiting: Sequence[OpenCall]) -> Sequence[OpenCall]:
        """Take a place for each open call without a result, and return those for which there is none.

        What has begun keeps its place, whatever has been taken since; of the others, the first have what is left.
        """
        self._open_calls = len(waiting)
        over = -self._remaining_calls()
        if over <= 0:
            return ()
        refused = [entry for entry in waiting if entry.phase is Phase.INTENDED][-over:]
        self._open_calls -= len(refused)
        self._report_to_parent()
        return refused

    def _remaining_calls(self) -> int:
        """Return how many more calls there may be, here and on all budgets above."""
        if self.parent is None:
            return self.limits.tool_calls - self.calls
        self._report_to_parent()
        return min([budget.limits.tool_calls - budget.calls for budget in (self, *self.ancestors)])

    def record_call_finished(self) -> None:
        """Take note that a call has its result in the journal, where it counts."""
        self._open_calls -= 1
        if self.parent is not None:
            self._report_to_parent()

    def find_stop_reason(self) -> tuple[StopReason, str] | None:
        """Say why the run has to stop, with the number reached, or None."""
        if (
            stop := find_reached_limit(self.source.run, self.limits, reserves_last_answer=self.reserves_last_answer)
        ) is not None:
            return stop
        for budget in self.ancestors:  # whose tool calls may be used up: its agents stop with it
            if (calls := budget.calls) >= budget.limits.tool_calls:
                return (
                    StopReason.TOOL_BUDGET,
                    f"{format_calls_used(calls, budget.limits)}, by a run above and its agents",
                )
        return None

    def format_refusal(self) -> str:
        """Say why calls are not run, to the model."""
        tightest = min((self, *self.ancestors), key=lambda budget: budget.limits.tool_calls - budget.calls)
        allowed = tightest.limits.tool_calls
        whose = "run" if tightest is self else "run above and its agents"
        return (
            f"not run: this {whose} may make {allowed:,} tool calls in all, and no more are left. "
            "Call nothing more: answer with what you have, and say what is missing."
        )


def _affordable_tokens(left_usd: float, wanted_tokens: int, cost: Callable[[int], float]) -> int:
    """Return how long an answer the money allows: 0 where the request alone is too dear."""
    alone, whole = cost(0), cost(wanted_tokens)
    if whole <= left_usd:
        return wanted_tokens
    return int(wanted_tokens * (left_usd - alone) / (whole - alone)) if whole > alone < left_usd else 0
