"""Budgets of a run and its child runs: amounts are reserved before each request and call, and settled after it.

The journals hold the recorded spending. A budget adds the amounts not recorded yet: requests and calls in progress,
replies of an uncommitted turn, and spending of child runs whose results have not arrived. So concurrent agents cannot
together spend more than the limit.

Tokens and money are reserved for the longest permitted answer of a request, on the budget of the run and on each one
above it. A request waits while one of these has no room beside the other reservations. A request that fits may answer
longer than estimated, so a budget is exceeded by one answer at most. A waiting request holds no reservation, and a
request with a reservation waits only for its model, so deadlocks cannot occur. The cost of a tool call in progress
counts as spent: the call may itself wait for a request, so no request waits for it. Tool calls are counted one by one,
so their limit is never exceeded.

A run that requests a last answer reserves its cost, from itself and from the child runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

import anyio
import attrs

from agentfsm.core.calls import OpenCall, Phase
from agentfsm.core.errors import LimitError
from agentfsm.core.limits import LAST_ANSWER_SHARE, Limits, StopReason
from agentfsm.core.reducers import add_counts
from agentfsm.core.stops import find_reached_limit, format_calls_used, format_tokens_used, format_usd_used
from agentfsm.core.usage import Purpose, Usage, format_usd
from agentfsm.engine.execution.spend_windows import find_affordable_tokens

if TYPE_CHECKING:
    from agentfsm.core.run import Run
    from agentfsm.engine.execution.call_tree import CallTree, RunSource
    from agentfsm.engine.execution.forked_calls import ForkedCalls
    from agentfsm.engine.execution.run_spend import RunSpend

PriceFunction = Callable[[Usage], float | None]
NO_USAGE: Final = Usage()


# Tokens and US dollars.
Amount = tuple[int, float]
# A reservation for a request: tokens and US dollars, and its tokens without the addition made since other requests
# exceeded theirs.
Reservation: TypeAlias = "tuple[int, float, int]"

NO_AMOUNT: Final[Amount] = (0, 0.0)
# Ten calls of 0.1 US dollars fit a limit of 1, although floats add up to a little more.
_ROUNDING_USD: Final = 1e-9


class RunSpending(NamedTuple):
    """Spending of a run and its child runs."""

    run: Run
    """The run at the time of the record."""

    usage: Usage
    """Usage of the run and its child runs, recorded together with `calls`."""

    calls: int
    """Number of tool calls, including those in progress."""

    counted: Mapping[str, int]
    """Number of calls that count toward a quota, by tool name."""


def _zero_cost(_tokens: int) -> float:
    return 0.0


@attrs.define(eq=False, repr=False)
class _BudgetTree:
    """State shared by the budgets of a run and all its descendants."""

    room_freed: anyio.Event | None = None
    """Set when a request is settled, for requests that wait for room."""

    excess_tokens: int = 0
    """Largest number of tokens by which a request has exceeded its reservation, because of an estimate that was too low
    or a model that ignores its cap. Each later reservation is increased by it.
    """

    forked_calls: ForkedCalls | None = None
    """Calls under a quota in the forks of the session; None until a guard has decided on such a call."""

    calls: CallTree = attrs.field(init=False)
    """Calls of these runs; not set before a rule over time reads them, so that others pay nothing."""


def _find_tree(budget: Budget) -> _BudgetTree:
    return _BudgetTree() if budget.parent is None else budget.parent.tree


def _list_ancestors(budget: Budget) -> tuple[Budget, ...]:
    return () if budget.parent is None else (budget.parent, *budget.parent.ancestors)


def _is_money_limited(budget: Budget) -> bool:
    if budget.limits.usd is not None or budget.spend is not None:
        return True
    return budget.parent is not None and budget.parent.is_money_limited


@attrs.define(eq=False, repr=False)
class Budget:
    """The remaining budget of one run, in this process."""

    limits: Limits
    source: RunSource
    """Source of the latest state of the run."""

    parent: Budget | None = None
    """Budget of the parent run; None for a run without one."""

    reserves_last_answer: bool = False
    """Whether the cost of a last answer is reserved."""

    spend: RunSpend | None = None
    """Spending limits over all runs; None if there are none."""

    tree: _BudgetTree = attrs.field(init=False, default=attrs.Factory(_find_tree, takes_self=True))
    ancestors: tuple[Budget, ...] = attrs.field(init=False, default=attrs.Factory(_list_ancestors, takes_self=True))
    """Budgets of the ancestors, the nearest first."""

    is_money_limited: bool = attrs.field(init=False, default=attrs.Factory(_is_money_limited, takes_self=True))
    """Whether this run or an ancestor has a money limit, or a spending limit over all runs."""

    _kept_for_last: Amount = NO_AMOUNT
    """Amount reserved for the last answer."""

    _reserved: Amount = NO_AMOUNT
    """Amount reserved for requests in progress, here and in descendants."""

    _in_flight: int = 0
    """Number of these requests."""

    _costly_calls: tuple[int, float] = (0, 0.0)
    """Number of tool calls in progress that cost money, here and in descendants, and their US dollars."""

    children: dict[str, RunSpending] = attrs.field(factory=dict)
    """Spending of child runs by run id, as far as it is not in this run's journal."""

    _unjournalled_usage: Usage = NO_USAGE
    """Usage of this run that is not in its journal; valid while the run's version is `_usage_version`."""

    _usage_version: int = -1
    """Version of the run for which `_unjournalled_usage` is valid."""

    unjournalled_purpose: Purpose | None = None
    """Purpose of the newest side request in `unjournalled_usage`; None if the newest request was a turn."""

    warned_limits: frozenset[str] = frozenset()
    """Names of the limits for which a warning was emitted."""

    _open_calls: int = 0
    """Number of admitted calls without a result in the journal."""

    @property
    def unjournalled_usage(self) -> Usage:
        """Usage of the run's own requests that is not in its journal."""
        return self._unjournalled_usage if self.source.run.version == self._usage_version else NO_USAGE

    @property
    def usage(self) -> Usage:
        """Model usage of the run and its child runs."""
        run = self.source.run
        usage = run.usage + self._unjournalled_usage if run.version == self._usage_version else run.usage
        for below in self.children.values():
            usage += below.usage
        return usage

    @property
    def calls(self) -> int:
        """Number of tool calls of the run and its child runs, including those in progress."""
        return (
            self.source.run.tool_call_count + self._open_calls + sum([below.calls for below in self.children.values()])
        )

    def restore(self, children: Sequence[RunSpending]) -> None:
        """Restore the spending of this run and its child runs from an earlier process or before a pause."""
        self._open_calls = len(
            [entry for entry in self.source.run.open if entry.phase not in (Phase.INTENDED, Phase.FINISHED)]
        )
        self.children.update({spent.run.id: spent for spent in children})
        self._report_to_parent()

    def _report_to_parent(self) -> None:
        if self.parent is not None:
            self.parent.record_child(RunSpending(self.source.run, self.usage, self.calls, self._own_counted_calls))

    def record_child(self, spent: RunSpending) -> None:
        """Record the total spending of a child run."""
        self.children[spent.run.id] = spent
        self._report_to_parent()

    def pop_child(self, run_id: str) -> RunSpending | None:
        """Remove and return the spending of a child run: its result records it in this run's journal."""
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
        """Reserve the maximum cost of a request.

        If requests in progress leave no room for it, wait for them. A waiting request holds no reservation, also when
        it is cancelled.

        Args:
            request_tokens: The estimated tokens of the request.
            wanted_tokens: The tokens of the answer to make room for, 1 or more.
            longest_tokens: The tokens of the longest possible answer without a cap, `wanted_tokens` or more.
            price: Function that returns the cost of a usage, US dollars.
            least_tokens: The lowest acceptable cap of the answer, 1 to `wanted_tokens`.

        Returns:
            The permitted tokens of the answer, `least_tokens` to `wanted_tokens` (which stands for no cap), and the
            reservation to pass to `settle` or `give_back`.

        Raises:
            LimitError: if nothing is left for an answer, or the price is unknown and money is limited.
        """
        cost = self.build_cost_function(request_tokens, longest_tokens, price) if self.is_money_limited else _zero_cost
        while True:
            granted, binding, kept_tokens = self._find_binding_limit(request_tokens, wanted_tokens, cost)
            if granted < least_tokens:
                raise binding.build_exhausted_error(request_tokens + kept_tokens + least_tokens - 1)
            needed = longest_tokens + self.tree.excess_tokens
            # Alone, as most requests are, it waits for no other.
            if not (self._in_flight or self.ancestors) or self._has_room(request_tokens, needed, cost):
                break
            self.tree.room_freed = self.tree.room_freed or anyio.Event()
            await self.tree.room_freed.wait()
        held = request_tokens + needed, cost(needed), request_tokens + longest_tokens
        for budget in (self, *self.ancestors):
            budget._reserved = budget._reserved[0] + held[0], budget._reserved[1] + held[1]  # noqa: SLF001  one of its kind
            budget._in_flight += 1  # noqa: SLF001  as above
        return granted, held

    def reserve_last_answer(self, request_tokens: int, answer_tokens: int, price: PriceFunction) -> None:
        """Reserve the cost of a last answer after the next request: a slightly longer request, and its answer.

        The part beyond the cost of the next request is at most a fifth of the limit. Nothing is reserved before the
        first and the last request.

        Args:
            request_tokens: Estimated tokens of the next request.
            answer_tokens: Tokens of an answer. The next reply and its results are assumed to add as much.
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
        """Return the longest possible answer, ignoring requests in progress.

        Returns:
            The tokens of the answer, the budget that limits it, and the tokens reserved there for last answers.
        """
        granted, binding, binding_kept, kept = wanted_tokens, self, 0, NO_AMOUNT
        for budget in (self, *self.ancestors):
            kept = kept[0] + budget._kept_for_last[0], kept[1] + budget._kept_for_last[1]  # noqa: SLF001  one of its kind
            held = kept[0], kept[1] + budget._costly_calls[1]  # noqa: SLF001  as above
            room = budget._remaining_tokens(request_tokens, wanted_tokens, cost, held)  # noqa: SLF001  as above
            if room < granted:
                granted, binding, binding_kept = room, budget, kept[0]
        return granted, binding, binding_kept

    def _has_room(self, request_tokens: int, needed_tokens: int, cost: Callable[[int], float]) -> bool:
        """Return whether this budget and all above have room beside the requests in progress."""
        kept = NO_AMOUNT
        for budget in (self, *self.ancestors):
            kept = kept[0] + budget._kept_for_last[0], kept[1] + budget._kept_for_last[1]  # noqa: SLF001  one of its kind
            if not budget._in_flight:  # noqa: SLF001  as above
                continue  # no request to wait for
            held_usd = budget._reserved[1] + budget._costly_calls[1] + kept[1]  # noqa: SLF001  as above
            held = budget._reserved[0] + kept[0], held_usd  # noqa: SLF001  as above
            if budget._remaining_tokens(request_tokens, needed_tokens, cost, held) < needed_tokens:  # noqa: SLF001  as above
                return False
        return True

    def _remaining_tokens(
        self, request_tokens: int, wanted_tokens: int, cost: Callable[[int], float], held: Amount
    ) -> int:
        """Return the longest answer that this budget permits beside the reservations; for money, up to the wanted."""
        usage = self.usage
        room = self.limits.tokens - usage.input_tokens - usage.output_tokens - held[0] - request_tokens
        if self.limits.usd is None:
            return room
        return min(
            room, find_affordable_tokens(self.limits.usd - (usage.cost_usd or 0.0) - held[1], wanted_tokens, cost)
        )

    def build_cost_function(
        self, request_tokens: int, longest_tokens: int, price: PriceFunction
    ) -> Callable[[int], float]:
        """Return a function of an answer's length that returns the request's cost, interpolated linearly."""
        alone = price(Usage(input_tokens=request_tokens))
        whole = price(Usage(input_tokens=request_tokens, output_tokens=longest_tokens))
        if alone is None or whole is None:
            raise LimitError(StopReason.COST_BUDGET, "the price of the model is unknown, so no money limit can be kept")
        return lambda tokens: alone + (whole - alone) * tokens / longest_tokens

    def build_exhausted_error(self, request_tokens: int) -> LimitError:
        """Build the error that names the budget without room for an answer."""
        usage = self.usage
        rest = "the next request alone takes the rest"
        if usage.tokens + request_tokens >= self.limits.tokens or self.limits.usd is None:
            message = f"{format_tokens_used(usage.tokens, self.limits)}: {rest}, about {request_tokens:,} tokens"
            return LimitError(StopReason.TOKEN_BUDGET, message)
        return LimitError(StopReason.COST_BUDGET, f"{format_usd_used(usage, self.limits)}: {rest}")

    def settle(self, held: Reservation | None, usage: Usage, purpose: Purpose | None = None) -> None:
        """Replace the reservation of a request by its actual cost, and wake the requests that wait for room.

        Args:
            held: The reservation; None if there is none.
            usage: Usage that is not in the journal yet.
            purpose: Purpose of a side request; None for others.
        """
        if (
            held is not None
            and (excess := usage.input_tokens + usage.output_tokens - held[2]) > self.tree.excess_tokens
        ):
            self.tree.excess_tokens = excess
        version = self.source.run.version
        self._unjournalled_usage = self._unjournalled_usage + usage if version == self._usage_version else usage
        self._usage_version = version
        self.unjournalled_purpose = purpose
        if self.parent is not None:
            self._report_to_parent()
        self.give_back(held)

    def give_back(self, held: Reservation | None) -> None:
        """Remove the reservation of a request, and wake the requests that wait for room."""
        if held is not None:
            for budget in (self, *self.ancestors):
                reserved = budget._reserved  # noqa: SLF001  one of its kind
                budget._in_flight -= 1  # noqa: SLF001  as above
                rest = reserved[0] - held[0], reserved[1] - held[1]
                budget._reserved = rest if budget._in_flight else NO_AMOUNT  # noqa: SLF001  avoids rounding residues
        if self.tree.room_freed is not None:
            self.tree.room_freed.set()
            self.tree.room_freed = None

    # Calls of tools.

    def try_reserve_cost(self, usd: float) -> bool:
        """Reserve the cost of a tool call; return whether this budget and all above have room for it.

        It does not wait for requests in progress: their reservations count as spent.
        """
        kept_usd = 0.0
        for budget in (self, *self.ancestors):
            kept_usd += budget._kept_for_last[1]  # noqa: SLF001  one of its kind
            left = budget._remaining_usd() - kept_usd  # noqa: SLF001  as above
            if usd > left + _ROUNDING_USD:
                return False
        for budget in (self, *self.ancestors):
            calls, reserved_usd = budget._costly_calls  # noqa: SLF001  as above
            budget._costly_calls = calls + 1, reserved_usd + usd  # noqa: SLF001  as above
        return True

    def _remaining_usd(self) -> float:
        """Return the money left beside the reservations; infinite without a limit."""
        if self.limits.usd is None:
            return inf
        return self.limits.usd - (self.usage.cost_usd or 0.0) - self._reserved[1] - self._costly_calls[1]

    def settle_cost(self, reserved_usd: float, usage: Usage) -> None:
        """Replace the reserved cost of a tool call by its actual cost."""
        for budget in (self, *self.ancestors):
            calls, usd = budget._costly_calls  # noqa: SLF001  one of its kind
            budget._costly_calls = (calls - 1, usd - reserved_usd) if calls > 1 else (0, 0.0)  # noqa: SLF001  as above
        self.settle(None, usage)

    def format_cost_refusal(self, name: str, usd: float) -> str:
        """Return the text for the model about a call that costs more than is left."""
        left = max(0.0, min(budget._remaining_usd() for budget in (self, *self.ancestors)))  # noqa: SLF001  one of its kind
        return (
            f"not run: a call of {name} costs {format_usd(usd)}, and {format_usd(left)} are left for this run. "
            "Use a cheaper way, or answer with what you have and say what is missing."
        )

    @property
    def counted_calls(self) -> Mapping[str, int]:
        """Number of calls that count toward a quota, by tool name, in the run at the root and all runs below it.

        With `tree.forked_calls`, also those in other forks of the session.
        """
        own, forked = self.root_counted_calls, self.tree.forked_calls
        return own if forked is None else forked.count_all(own)

    @property
    def root_counted_calls(self) -> Mapping[str, int]:
        """Number of these calls in the run at the root and all runs below it."""
        self.report_counted_calls()
        return (self.ancestors or (self,))[-1]._own_counted_calls  # noqa: SLF001  one of its kind

    def report_counted_calls(self) -> None:
        """Report calls that were just counted in the run to the budgets above."""
        if self.parent is not None:
            self._report_to_parent()

    @property
    def _own_counted_calls(self) -> Mapping[str, int]:
        """Number of these calls of this run and its child runs."""
        counted = self.source.run.counted
        for below in self.children.values():
            counted = add_counts(counted, below.counted)
        return counted

    def reset_open_calls(self) -> None:
        """Forget calls that were started for a reply that failed."""
        self._open_calls = 0

    def try_start_call(self) -> bool:
        """Reserve a call of a reply that is still incomplete; return whether one is left."""
        if self._remaining_calls() < 1:
            return False
        self._open_calls += 1
        self._report_to_parent()
        return True

    def admit_calls(self, waiting: Sequence[OpenCall]) -> Sequence[OpenCall]:
        """Reserve a call for each open call without a result, and return those for which none is left.

        Started calls keep their reservation, whatever was reserved since; of the others, the first get the rest.
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
        """Return the number of calls left, here and on all budgets above."""
        if self.parent is None:
            return self.limits.tool_calls - self.calls
        self._report_to_parent()
        return min([budget.limits.tool_calls - budget.calls for budget in (self, *self.ancestors)])

    def record_call_finished(self) -> None:
        """Record that a call has its result in the journal, which counts it from now on."""
        self._open_calls -= 1
        if self.parent is not None:
            self._report_to_parent()

    def find_stop_reason(self) -> tuple[StopReason, str] | None:
        """Return the reason why the run has to stop, with the number reached, or None."""
        if (
            stop := find_reached_limit(self.source.run, self.limits, reserves_last_answer=self.reserves_last_answer)
        ) is not None:
            return stop
        for budget in self.ancestors:  # a used-up call limit of an ancestor stops its child runs
            if (calls := budget.calls) >= budget.limits.tool_calls:
                return (
                    StopReason.TOOL_BUDGET,
                    f"{format_calls_used(calls, budget.limits)}, by a run above and its agents",
                )
        return None

    def format_refusal(self) -> str:
        """Return the text for the model about calls refused by the budget."""
        tightest = min((self, *self.ancestors), key=lambda budget: budget.limits.tool_calls - budget.calls)
        allowed = tightest.limits.tool_calls
        whose = "run" if tightest is self else "run above and its agents"
        return (
            f"not run: this {whose} may make {allowed:,} tool calls in all, and no more are left. "
            "Call nothing more: answer with what you have, and say what is missing."
        )
