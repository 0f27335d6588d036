"""The reservation of one request: in the budgets of the run, and in spending limits over all runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from agentfsm.engine.execution.budget import PriceFunction, Reservation
from agentfsm.engine.execution.spend_windows import FullWindow

if TYPE_CHECKING:
    from agentfsm.core.usage import Purpose, Usage
    from agentfsm.engine.execution.execution import Execution
    from agentfsm.engine.execution.run_spend import SpendReservation


class RequestReservation(NamedTuple):
    """What is reserved for one request."""

    granted: int
    """Permitted tokens of the answer."""

    held: Reservation
    """Reservation in the budget."""

    spend: SpendReservation | None = None
    """Reservation in spending limits; None without such limits."""


async def reserve_request(
    execution: Execution, asked: int, wanted: int, longest: int, price: PriceFunction, *, least: int = 1
) -> RequestReservation:
    """Reserve the largest cost of a request in the budgets and in spending limits; wait while one has no room.

    A waiting request holds no reservation, also when it is cancelled. The arguments are those of `Budget.reserve`.

    Raises:
        LimitError: if nothing is left for an answer, or the price is unknown and money is limited.
        StoreError: if the store of a spending limit cannot be reached.
    """
    budget, spend = execution.budget, execution.budget.spend
    full: FullWindow | None = None
    while True:
        granted, held = await budget.reserve(asked, wanted, longest, price, least)
        if spend is None:
            return RequestReservation(granted, held)
        try:
            cost = budget.build_cost_function(asked, longest, price)
            reserved = await spend.reserve(cost, granted, longest if granted == wanted else granted, least, full)
        except BaseException:
            budget.give_back(held)
            raise
        if not isinstance(reserved, FullWindow):
            return RequestReservation(reserved.granted, held, reserved)
        full = reserved
        budget.give_back(held)
        await spend.wait_for_room(full)


def give_request_back(execution: Execution, reserved: RequestReservation) -> None:
    """Remove the reservations of a request that was not sent."""
    execution.budget.give_back(reserved.held)
    if reserved.spend is not None and execution.budget.spend is not None:
        execution.budget.spend.give_back(reserved.spend)


async def settle_request(
    execution: Execution, reserved: RequestReservation, usage: Usage, paid: Usage | None, purpose: Purpose | None = None
) -> None:
    """Replace the reservations of a request by its actual cost.

    Args:
        execution: The execution that pays.
        reserved: The reservations.
        usage: Usage that is not in the journal yet.
        paid: Usage that counts in spending limits; None if it is unknown: the reserved amount counts.
        purpose: Purpose of a side request; None for a turn.
    """
    execution.budget.settle(reserved.held, usage, purpose)
    if reserved.spend is not None and execution.budget.spend is not None:
        await execution.budget.spend.settle(reserved.spend, paid)
