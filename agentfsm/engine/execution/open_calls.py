"""The open calls of a run in one execution: what is known about them beside the journal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs

from agentfsm.core import events as e
from agentfsm.core.calls import OpenCall
from agentfsm.core.errors import MisuseError
from agentfsm.core.labels import Label, join_labels
from agentfsm.core.pending import Pending
from agentfsm.core.usage import Usage
from agentfsm.engine.execution.budget import NO_USAGE
from agentfsm.engine.execution.execution import Execution
from agentfsm.tools.queue.dispatch import QueueHost
from agentfsm.tools.queue.scheduler import Scheduler

if TYPE_CHECKING:
    from agentfsm.core.inbox import PostedItem
    from agentfsm.core.messages import ToolCall, ToolResult
    from agentfsm.engine.execution.allowances import Allowance
    from agentfsm.engine.execution.cost import SideSpending
    from agentfsm.engine.execution.run_spend import SpendReservation


@attrs.define(eq=False, repr=False)
class CallLedger:
    """What one execution knows about an open call, beside the journal. It is lost in a crash without harm."""

    has_started: bool = False
    """Whether an earlier execution had started the call, which runs again."""

    approval: PostedItem | Allowance | None = None
    """Approval or allowance of the call. The append that marks the call as started removes it from the inbox."""

    spent: Usage | None = None
    """Cost that the call has reported; None if it has reported none."""

    asked: SideSpending | None = None
    """Usage of the model requests that the call has made; None if it has made none."""

    labels: tuple[Label, ...] = ()
    """Labels that the function of the call has reported."""

    reserved_usd: float | None = None
    """Declared cost in US dollars for which the budget has made room; None if there is none."""

    reserved_spend: SpendReservation | None = None
    """Reservation in spending limits; None if there is none."""


@attrs.define(eq=False, repr=False)
class EndedCall:
    """The result of a call that is about to be committed."""

    result: ToolResult
    ledger: CallLedger | None = None
    """What the execution knows about the call; None if it knows nothing."""

    calls: OpenCalls | None = None
    """The open calls of the run; None if the result did not come from the tool of the call."""

    facts: list[e.Event] = attrs.field(factory=list)
    """Events that are committed before the result."""

    taken: list[int] = attrs.field(factory=list)
    """Numbers of the inbox rows that the same append removes."""

    ready: tuple[ToolCall, ...] = ()
    """Calls that can start after the result. They are committed in the same append."""


@attrs.define(eq=False, repr=False)
class OpenCalls(QueueHost):
    """The open calls of a run, as the features of its agent decide on them."""

    execution: Execution
    unfinished: int = 0
    """Number of calls of the turn without a result. The result that makes it 0 ends the turn."""

    ledgers: dict[str, CallLedger] = attrs.field(factory=dict)
    """What is known about open calls beside the journal, by call id; most calls have none."""

    session: Scheduler | None = None
    """Scheduler of the running steps of a plan, which takes further steps; None for calls of a reply."""

    last_waits: dict[str, tuple[Pending, ...]] = attrs.field(factory=dict)
    """Items that paused calls waited for when they were last resumed, by call id."""

    has_decided: bool = False
    """Whether ACT has decided in this execution, also on calls that an earlier one has decided on."""

    def record(self, *events: e.Event, taken: Sequence[int] = ()) -> None:
        """Commit events of calls. If no call is left without a result, the same append ends the turn."""
        ending = () if self.unfinished else (e.ToolsReturned(),)
        self.execution.journal.commit(*events, *ending, taken=taken)

    def find_entry(self, call: ToolCall) -> OpenCall:
        """Return the open call; if its reply is not in the journal yet, as it was requested."""
        try:
            return self.execution.journal.run.open_call(call.id)  # at once, also among thousands
        except MisuseError:
            return OpenCall(call=call)

    def open_ledger(self, call_id: str) -> CallLedger:
        """Return what is known about a call, for additions."""
        return self.ledgers.setdefault(call_id, CallLedger())

    def is_approved(self, call: ToolCall) -> bool:
        """Return whether the call has an approval or an allowance that its start consumes."""
        ledger = self.ledgers.get(call.id)
        return ledger is not None and ledger.approval is not None

    def add_cost(self, call_id: str, usd: float) -> None:
        """Add to the cost of a running call. What a thread reports after the end of its call is not recorded."""
        ledger = self.open_ledger(call_id)
        ledger.spent = (ledger.spent or NO_USAGE) + Usage(cost_usd=usd)

    def add_labels(self, call_id: str, labels: tuple[Label, ...]) -> None:
        """Add to the labels of a running call. What a thread adds after the end of its call is not recorded."""
        ledger = self.open_ledger(call_id)
        ledger.labels = join_labels(ledger.labels, labels)
