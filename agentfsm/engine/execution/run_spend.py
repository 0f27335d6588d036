"""Spending limits of a run: those of its agent and of the agents that call it, over all runs of a window."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final, TypeAlias
from uuid import uuid4

import anyio
import attrs

from agentfsm.core.errors import AgentError, LimitError
from agentfsm.core.limits import Spend, SpendWindow, StopReason
from agentfsm.core.usage import Usage, format_usd
from agentfsm.engine.execution.journal import Journal, create_shield
from agentfsm.engine.execution.spend_windows import (
    AddAmount,
    CountRefusal,
    FullWindow,
    ReserveAmount,
    SettleAmount,
    SharedWindow,
    WindowRecord,
    share_window,
)
from agentfsm.streaming.stream import BudgetWarning

if TYPE_CHECKING:
    from agentfsm.core.header import Header

# Seconds between two looks at a window without room: the shortest wait, which doubles up to the longest.
_FIRST_WAIT_S: Final = 0.05
_LAST_WAIT_S: Final = 1.0

# Spending limits with the header of the run whose agent has them.
OwnedSpend: TypeAlias = "tuple[Spend, Header]"


@attrs.define(eq=False)
class SpendReservation:
    """The reservation of a request or call in all windows that it counts in."""

    id: str
    windows: tuple[tuple[SharedWindow, tuple[Spend, ...]], ...]
    granted: int
    """Permitted tokens of the answer."""


@attrs.define(eq=False, repr=False)
class RunSpend:
    """The spending limits that apply to one execution of a run."""

    journal: Journal
    limits: tuple[OwnedSpend, ...]
    """Limits of the agent, and of the agents above it."""

    _token: str = attrs.field(init=False, factory=lambda: uuid4().hex[:12])
    """Part of the ids of the reservations that distinguishes this execution from earlier ones."""

    _count: int = 0
    """Number of reservations so far."""

    awaited: SpendWindow | None = None
    """Window that a request waits for, or waited for when it was cut off."""

    _used: dict[str, SharedWindow] = attrs.field(init=False, factory=dict)
    """Windows that were used, by key."""

    async def reserve(
        self, cost: Callable[[int], float], wanted: int, longest: int, least: int = 1, full: FullWindow | None = None
    ) -> SpendReservation | FullWindow:
        """Reserve the largest cost of a request in all windows, or in none.

        Args:
            cost: Returns the cost of an answer of this many tokens, US dollars.
            wanted: Tokens of the answer to make room for, 1 or more.
            longest: Tokens of the longest possible answer without a cap, `wanted` or more.
            least: Lowest acceptable cap of the answer, 1 to `wanted`.
            full: The window that had no room in the attempt before; None for the first attempt.

        Returns:
            The reservation; or the window to pass to `wait_for_room` before the next attempt, if only requests in
            progress leave no room. Then nothing is reserved.

        Raises:
            LimitError: if nothing is left for an answer.
            StoreError: if the store cannot be reached; the request must not be sent.
        """
        held, self.awaited = self._start_reservation(wanted), None
        # The window without room first, so that a request that waits for it reserves nothing elsewhere.
        order = held.windows if full is None else sorted(held.windows, key=lambda each: each[0] is not full.shared)
        try:
            for index, (shared, spends) in enumerate(order):
                limit, settled = min(spends, key=lambda spend: spend.usd), shared.settled
                change = self._build_change(held.id, limit, cost)
                change.wanted, change.least = held.granted, min(least, held.granted)
                change.longest = longest if held.granted == wanted else held.granted
                await shared.change(change)
                if change.granted is not None:
                    held.granted = change.granted
                elif change.may_wait:
                    for other, _ in order[:index]:  # durable before the wait, since the request was not sent
                        await other.change(SettleAmount(id=held.id, usd=0.0, was_sent=False))
                        other.wake()
                    wait_s = _FIRST_WAIT_S if full is None else min(2 * full.wait_s, _LAST_WAIT_S)
                    return FullWindow(shared, settled, index > 0, wait_s)
                else:
                    shared.change_later(CountRefusal())
                    raise LimitError(StopReason.COST_BUDGET, _format_refusal(shared.window, change))  # noqa: TRY301
        except BaseException as error:
            self.give_back(held)
            if isinstance(error, LimitError):
                await self.flush()
            raise
        return held

    async def wait_for_room(self, full: FullWindow) -> None:
        """Wait until there may be room in a window."""
        self.awaited = full.shared.window
        if full.has_collided:  # two requests that have reserved in different windows must not repeat it in step
            await anyio.sleep(random.uniform(0, full.wait_s))  # noqa: S311  spreads, hides nothing
        await full.shared.wait(full.settled, full.wait_s)

    async def reserve_call(self, usd: float) -> SpendReservation | str:
        """Reserve the cost of a tool call; return the reason, for the model, if a window has no room for it.

        Reservations of requests in progress count as spent.

        Raises:
            StoreError: if the store cannot be reached; the call must not be made.
        """
        held = self._start_reservation(1)
        for shared, spends in held.windows:
            limit = min(spends, key=lambda spend: spend.usd)
            change = self._build_change(held.id, limit, lambda _tokens: usd)
            change.is_call = True
            try:
                await shared.change(change)
            except BaseException:
                self.give_back(held)
                raise
            if change.granted is None:
                self.give_back(held)
                shared.change_later(CountRefusal())
                await self.flush()
                return _format_refusal(shared.window, change)
        return held

    def _start_reservation(self, granted: int) -> SpendReservation:
        """Return an empty reservation in the windows of this moment, in the order of their keys."""
        self._count += 1
        now, found = self.journal.clock.now(), dict[str, tuple[SpendWindow, list[Spend]]]()
        for spend, header in self.limits:
            window = spend.find_window(header, now)
            found.setdefault(window.key, (window, []))[1].append(spend)
        windows = []
        for key, (window, spends) in sorted(found.items()):
            shared = self._used[key] = share_window(self.journal.store, window)
            windows.append((shared, tuple(spends)))
        return SpendReservation(f"{self._owner}{self._token}.{self._count}", tuple(windows), granted)

    @property
    def _owner(self) -> str:
        return f"{self.journal.run.id}#"

    def _build_change(self, name: str, limit: Spend, cost: Callable[[int], float]) -> ReserveAmount:
        return ReserveAmount(
            id=name,
            owner=self._owner,
            execution=f"{self._owner}{self._token}.",
            limit_usd=limit.usd,
            now=self.journal.clock.now(),
            cost=cost,
        )

    def give_back(self, held: SpendReservation) -> None:
        """Remove the reservations of a request that was not sent, with the next write: they may have been written."""
        for shared, _ in held.windows:
            shared.change_later(SettleAmount(id=held.id, usd=0.0, was_sent=False))

    async def settle(self, held: SpendReservation, usage: Usage | None) -> None:
        """Replace the reservation of a request by its actual cost.

        If the store cannot be reached, the change is made with a later write of this process; if there is none, the
        reserved amount counts.

        Args:
            held: The reservation.
            usage: Usage of the request; None if it is unknown because the request was cut off: it counts in full.
        """
        usd = _find_cost(usage)
        changes = [(shared, self._build_settlement(held.id, usd, shared, spends)) for shared, spends in held.windows]
        if isinstance(sys.exception(), GeneratorExit):  # the coroutine was closed: awaiting is impossible
            for shared, change in changes:
                shared.change_later(change)
            return
        for shared, change in changes:
            try:
                with create_shield() as scope:
                    await shared.change(change)
            except AgentError as error:
                shared.change_later(change)
                self.journal.log.warning("spend_not_settled", error=type(error).__name__)
            else:
                if scope.cancelled_caught:
                    shared.change_later(change)
                    self.journal.log.warning("spend_not_settled", error="timeout")
        for shared, _ in changes:  # when all have room
            shared.wake()

    def settle_call(self, held: SpendReservation, usage: Usage | None) -> None:
        """Replace the reservation of a call by its actual cost, with the next write of a window.

        Args:
            held: The reservation.
            usage: Usage of the call; None if it was cut off: the reserved amount counts.
        """
        usd = _find_cost(usage)
        for shared, spends in held.windows:
            shared.change_later(self._build_settlement(held.id, usd, shared, spends))
            shared.wake()

    def add(self, usage: Usage) -> None:
        """Count a cost that was not reserved, because it is known only now."""
        if not usage.cost_usd:
            return
        held = self._start_reservation(1)
        for shared, spends in held.windows:
            settle = partial(shared.change_later, self._build_settlement(held.id, usage.cost_usd, shared, spends))
            now = self.journal.clock.now()
            shared.change_later(AddAmount(id=held.id, usd=usage.cost_usd, now=now, settle=settle))

    async def flush(self) -> None:
        """Write the changes that wait for a write, shielded and with a time limit. Failures are logged."""
        if isinstance(sys.exception(), GeneratorExit):  # the coroutine was closed: awaiting is impossible
            return
        for shared in self._used.values():
            try:
                with create_shield():
                    await shared.flush()
            except AgentError as error:
                self.journal.log.warning("spend_not_settled", error=type(error).__name__)

    def _build_settlement(
        self, name: str, usd: float | None, shared: SharedWindow, spends: Sequence[Spend]
    ) -> SettleAmount:
        limits = tuple([(spend.usd, spend.usd * spend.warn_at) for spend in spends])
        return SettleAmount(id=name, usd=usd, limits=limits, on_reached=partial(self._warn, shared.window))

    def _warn(self, window: SpendWindow, used: float, limit_usd: float) -> None:
        journal, which = self.journal, f"usd of {window.describe()}"
        journal.log.warning(
            "spend_warning", which=which, used=round(used, 6), limit=limit_usd, resets=window.format_end()
        )
        if journal.on_event is not None:
            turn = journal.run.turn
            journal.on_event(BudgetWarning(run_id=journal.run.id, turn=turn, limit=which, used=used, of=limit_usd))


def build_run_spend(limits: Sequence[Spend], journal: Journal, parent: RunSpend | None) -> RunSpend | None:
    """Return the spending limits of a run: those of its agent, and of the agents above it; None if none is about it."""
    above = () if parent is None else parent.limits
    header = journal.run.header
    own = [(spend, header) for spend in limits if spend.purpose in {None, header.purpose}]
    return RunSpend(journal, (*above, *own)) if above or own else None


def _find_cost(usage: Usage | None) -> float | None:
    """Return the cost of a usage in US dollars; None if it is unknown."""
    if usage is None or (usage.cost_usd is None and usage.tokens):
        return None
    return usage.cost_usd or 0.0


def _format_refusal(window: SpendWindow, change: ReserveAmount) -> str:
    record: WindowRecord = change.record
    reserved = record.reserved_usd
    text = f"{format_usd(record.spent_usd)} of {format_usd(change.limit_usd)} spent for {window.describe()}"
    if reserved:
        text += f", {format_usd(reserved)} reserved for requests in progress"
    return f"{text}; the next one may cost {format_usd(change.usd)}; the limit resets at {window.format_end()}"
