"""The reservation of one request: in the budgets of the run, and in spending limits over all runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from agentfsm.engine.execution.budget import PriceFunction, Reservation
from agentfsm.engine.execution.spend_windows import FullWindow

if TYPE_CHECKING:
    from agentfsm.core.usage import Usage
    from agentfsm.engine.execution.execution import Execution
    from agentfsm.engine.execution.run_spend import SpendReservation


# What is reserved for one request: the permitted tokens of the answer, the reservation in the budget, and that in
# spending limits, None without such limits. A plain tuple, since each turn makes one.
RequestReservation: TypeAlias = "tuple[int, Reservation, SpendReservation | None]"


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
            return granted, held, None
        try:
            cost = budget.build_cost_function(asked, longest, price)
            reserved = await spend.reserve(cost, granted, longest if granted == wanted else granted, least, full)
        except BaseException:
            budget.give_back(held)
            raise
        if not isinstance(reserved, FullWindow):
            return reserved.granted, held, reserved
        full = reserved
        budget.give_back(held)
        await spend.wait_for_room(full)


def give_request_back(execution: Execution, reserved: RequestReservation) -> None:
    """Remove the reservations of a request that was not sent."""
    _, held, reserved_spend = reserved
    execution.budget.give_back(held)
    if reserved_spend is not None and execution.budget.spend is not None:
        execution.budget.spend.give_back(reserved_spend)


async def settle_spend(execution: Execution, reserved_spend: SpendReservation, paid: Usage | None) -> None:
    """Replace the reservation of a request in spending limits; None: its usage is unknown, so that all of it counts."""
    if execution.budget.spend is not None:
        await execution.budget.spend.settle(reserved_spend, paid)
