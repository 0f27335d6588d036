"""Control of an agent's runs by their ids, from any process, whoever executes them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from datetime import datetime
from math import inf
from typing import TYPE_CHECKING, Any

from agentfsm.agents.agent_fields import AgentFields
from agentfsm.core.inbox import InputKind, Priority
from agentfsm.core.plans import Plan
from agentfsm.core.run import A_co, Run
from agentfsm.ports.store import ALL_RUNS, Filter

if TYPE_CHECKING:
    from agentfsm.agents.runs import Prompt
    from agentfsm.core.events import Event
    from agentfsm.core.inbox import PostedItem
    from agentfsm.core.pending import Pending
    from agentfsm.journal.audit import AuditRecord
    from agentfsm.journal.follow import JournalEvent


class AgentControls(AgentFields[A_co]):
    """Methods of `Runs`, on the runs in the store of an agent.

    A run that they return has the agent's `output`, and input is refused that the agent's model does not support.
    """

    __slots__ = ()

    # Read runs.

    async def load(self, run_id: str, *, at: int | None = None) -> Run[A_co]:
        """Return a run from its journal: as it stands, or as it was at version `at`. See `Runs.load`."""
        return self.driver.attach_decoder(await self.runs.load(run_id, at=at))

    async def history(self, run_id: str) -> tuple[Event, ...]:
        """Return the events of a run's journal, oldest first. See `Runs.history`."""
        return await self.runs.history(run_id)

    async def audit(self, run_id: str) -> tuple[AuditRecord, ...]:
        """Return a record of each call of a run, oldest first. See `Runs.audit`."""
        return await self.runs.audit(run_id)

    def audits(self, where: Filter = ALL_RUNS, *, since: float = -inf) -> AsyncIterator[AuditRecord]:
        """Return a record of each call of all runs that a filter takes. See `Runs.audits`."""
        return self.runs.audits(where, since=since)

    def events(self, run_id: str, *, after: int = 0) -> AsyncIterator[JournalEvent]:
        """Return the events of a run's journal as they are written, by any process. See `Runs.events`."""
        return self.runs.events(run_id, after=after)

    async def wait(self, run_id: str) -> Run[A_co]:
        """Wait until a run that a worker executes is over or waits, and return it. See `Runs.wait`."""
        return self.driver.attach_decoder(await self.runs.wait(run_id))

    # Decide on calls, send input, pause and cancel.

    async def approve(
        self,
        run_id: str,
        call_id: str,
        *,
        by: str = "",
        arguments: Mapping[str, Any] | None = None,
        plan: Plan | None = None,
        digest: str | None = None,
        allow: Sequence[str] = (),
    ) -> None:
        """Approve a call, perhaps with edited `arguments`. It runs when the run is resumed. See `Runs.approve`.

        With `call_id="plan"` the plan that waits is approved, or the edited `plan` in its place. With `allow=["to"]`
        later calls like it, with the same value of `to`, run without this question in this session.
        """
        await self.runs.approve(run_id, call_id, by=by, arguments=arguments, plan=plan, digest=digest, allow=allow)

    async def reject(self, run_id: str, call_id: str, *, message: str = "", by: str = "") -> None:
        """Reject a call. It does not run, and the model reads the message. See `Runs.reject`."""
        await self.runs.reject(run_id, call_id, message=message, by=by)

    async def decide(
        self, *, approve: Iterable[Pending] = (), reject: Iterable[Pending] = (), message: str = "", by: str = ""
    ) -> None:
        """Decide on several items of `run.pending` together, each bound to what it shows. See `Runs.decide`."""
        await self.runs.decide(approve=approve, reject=reject, message=message, by=by)

    async def answer(
        self,
        run_id: str,
        call_id: str,
        content: str | Mapping[str, Any] | None = None,
        *,
        failed: bool = False,
        declined: bool = False,
        by: str = "",
        digest: str | None = None,
    ) -> None:
        """Give the result of a call that comes from outside, or the input that a tool asks for. See `Runs.answer`."""
        await self.runs.answer(run_id, call_id, content, failed=failed, declined=declined, by=by, digest=digest)

    async def settle(
        self,
        run_id: str,
        call_id: str,
        *,
        result: str | None = None,
        failed: str | None = None,
        rerun: bool = False,
        by: str = "",
    ) -> None:
        """Record the outcome of a call that was in flight when its worker died. See `Runs.settle`."""
        await self.runs.settle(run_id, call_id, result=result, failed=failed, rerun=rerun, by=by)

    async def send(
        self,
        run_id: str,
        content: Prompt,
        *,
        kind: InputKind | str = InputKind.USER,
        priority: Priority | str = Priority.NORMAL,
        at: datetime | float | None = None,
        key: str | None = None,
        labels: Iterable[str] = (),
        by: str = "",
    ) -> PostedItem:
        """Send a run more input that the model can take. The run reads it at its next OBSERVE. See `Runs.send`."""
        parts = self._check_prompt(content)
        return await self.runs.send(run_id, parts, kind=kind, priority=priority, at=at, key=key, labels=labels, by=by)

    async def pause(self, run_id: str, *, by: str = "", message: str = "") -> None:
        """Pause a run at its next boundary between two steps, until it is resumed. See `Runs.pause`."""
        await self.runs.pause(run_id, by=by, message=message)

    async def feedback(self, run_id: str, *, rating: int, comment: str = "", by: str = "") -> None:
        """Record a person's opinion of a run, from 1 (bad) to 5 (good). See `Runs.feedback`."""
        await self.runs.feedback(run_id, rating=rating, comment=comment, by=by)

    async def cancel(self, run_id: str, *, by: str = "", message: str = "") -> None:
        """End a run and the runs of its sub-agents. See `Runs.cancel`."""
        await self.runs.cancel(run_id, by=by, message=message)
