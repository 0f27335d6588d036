"""Client for the runs in a store: read them, decide on their calls, send them input, pause, cancel and delete them.

It needs no agent, no model and no API key. A worker that has the agent goes on with the run afterwards.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Mapping
from datetime import datetime
from math import inf
from typing import TYPE_CHECKING, Any, Final, Self

import attrs

from agentfsm._validation import (
    CLOCK,
    DURABILITY,
    FILTER,
    TOOLS_BY_AGENT,
    as_text,
    check_call_id,
)
from agentfsm.core.errors import MisuseError
from agentfsm.core.header import Header
from agentfsm.core.inbox import Cancel, Input, InputKind, Pause, Priority, Reject
from agentfsm.core.messages import Part, as_parts
from agentfsm.core.pending import PendingKind
from agentfsm.core.run import Run
from agentfsm.core.validation import COUNT, COUNT_OR_ZERO, NAME, STRING
from agentfsm.decisions import (
    build_answer,
    build_approval,
    build_settlement,
    check_edited_arguments,
    find_pending,
    post_decision,
    wake_callers,
)
from agentfsm.engine.audit import AuditTrail, audit_run_tree
from agentfsm.engine.execution.journal import EndedRuns, load_run, read_header
from agentfsm.engine.follow import JournalFollower, wait_until_blocked
from agentfsm.engine.run_list import RunIterator
from agentfsm.engine.unattended import NO_TOOLS, apply_stop_requests
from agentfsm.ports.store import (
    ALL_RUNS,
    STORE,
    TIMESTAMP,
    Clock,
    Durability,
    Filter,
    RunSummary,
    Store,
    SystemClock,
)
from agentfsm.stores.rules import check_run_id
from agentfsm.tools.registry import ToolRegistry

if TYPE_CHECKING:
    from types import TracebackType

    from agentfsm.core.audit_records import AuditRecord
    from agentfsm.core.events import Event
    from agentfsm.core.inbox import PostedItem
    from agentfsm.engine.follow import JournalEvent

Prompt = str | Part | tuple[Part, ...] | list[Part]
# More agents than any run calls.
_MAX_CHILDREN: Final = 1_000_000


@attrs.frozen(eq=False, repr=False)
class Runs:
    """A client for the runs in a store: `runs = Runs(SQLiteStore("runs.db")); await runs.approve(run_id, call_id)`.

    Everything here works from any process, whether or not a worker drives the run. What is posted is durable when the
    call returns. Where a worker drives the run, it applies a cancel or a pause within seconds; where none does, the
    client applies it at once.

    Raises:
        MisuseError: when a field is of a wrong type.
    """

    store: Store = attrs.field(validator=STORE)
    """`aclose` closes it."""

    tools: Mapping[str, ToolRegistry] = attrs.field(factory=dict, kw_only=True, validator=TOOLS_BY_AGENT)
    """Tools by the name of their agent, where agents are at hand. With them, `approve` validates edited arguments at
    once instead of when a worker takes up the call, and `cancel` knows which calls only read.
    """

    clock: Clock = attrs.field(factory=SystemClock, kw_only=True, validator=CLOCK)
    """For the times in the journal of a run that this client cancels or pauses."""

    durability: Durability = attrs.field(default="full", kw_only=True, validator=DURABILITY)
    """Of what this client appends to a journal."""

    ended_runs: EndedRuns = attrs.field(factory=dict, kw_only=True)
    """Runs at hand that are over, by id, so that a conversation is not read from its beginning each time."""

    # Reading.

    async def load(self, run_id: str, *, at: int | None = None) -> Run:
        """Return a run from its journal.

        Args:
            run_id: The run.
            at: The version to return; None for the newest.

        Raises:
            RunNotFoundError: when the store holds no such run.
            MisuseError: when the run has no such version.
        """
        check_run_id(run_id)
        return await load_run(self.store, run_id, at, self.ended_runs)

    async def header(self, run_id: str) -> Header:
        """Return the header of a run: what it was started with. No events are read.

        Raises:
            RunNotFoundError: when the store holds no such run.
        """
        check_run_id(run_id)
        return await read_header(self.store, run_id)

    async def root(self, run_id: str) -> Header:
        """Return the header of the run at the top: of the run's caller, its caller's caller and so on, or its own.

        Raises:
            RunNotFoundError: when the store holds no such run.
        """
        header = await self.header(run_id)
        while header.parent is not None:
            header = await self.header(header.parent)
        return header

    async def children(self, run_id: str) -> tuple[RunSummary, ...]:
        """Return the runs of the agents that a run has called, newest first; none where there is no such run."""
        check_run_id(run_id)
        return await self.store.runs(Filter(parent=run_id), limit=_MAX_CHILDREN)

    async def list(
        self, where: Filter = ALL_RUNS, *, limit: int = 100, subagents: bool = True
    ) -> tuple[RunSummary, ...]:
        """Return the newest runs that a filter takes, newest first; `iterate` returns all of them.

        Args:
            where: Which runs to return.
            limit: How many at most, 1 or more.
            subagents: Whether to include the runs of agents that other runs have called.

        Raises:
            MisuseError: when an argument is of a wrong type, or `limit` is below 1.
        """
        FILTER.check("list", "where", where)
        COUNT.check("list", "limit", limit)
        size = limit
        while True:
            page = await self.store.runs(where, limit=size)
            shown = [each for each in page if subagents or each.parent is None]
            if len(shown) >= limit or len(page) < size:
                return tuple(shown[:limit])
            size *= 4  # read again from the start: no run can slip in between two pages

    def iterate(self, where: Filter = ALL_RUNS) -> AsyncIterator[RunSummary]:
        """Return all runs that a filter takes, newest first, each once: `async for summary in runs.iterate(): ...`.

        The store is read page by page, so that a list of any length needs little memory. Runs that begin after the
        first page was read may be missing.

        Args:
            where: Which runs to return.

        Raises:
            MisuseError: when `where` is not a Filter.
        """
        FILTER.check("iterate", "where", where)
        return RunIterator(self.store, where)

    async def history(self, run_id: str) -> tuple[Event, ...]:
        """Return the events of a run's journal, oldest first; event number n made version n.

        Raises:
            RunNotFoundError: when the store holds no such run.
        """
        check_run_id(run_id)
        return (await self.store.read(run_id)).events

    def events(self, run_id: str, *, after: int = 0) -> AsyncIterator[JournalEvent]:
        """Return the events of a run's journal as they are written: `async for item in runs.events(run_id): ...`.

        Any process may drive the run; watching it costs that process nothing. The iteration ends with the run. While
        the run waits for a person, or no worker drives it, the iterator waits too. It is safe to break out of the loop
        or to cancel the task at any time. The store wakes the iterator where it can. The iterator also polls each
        second, and each 0.1 s while it finds events that the store did not announce, as with a SQLite file that
        another process writes.

        Args:
            run_id: The run.
            after: The version to begin after: 0 for all events, `item.version` of the last one seen to go on.

        Raises:
            RunNotFoundError: by the iteration, when the store holds no such run, or no longer, also where its id was
                used again.
            MisuseError: when `after` is no version, or the iteration finds that the run has not come to it.
        """
        check_run_id(run_id)
        COUNT_OR_ZERO.check("events", "after", after)
        return JournalFollower(self.store, run_id, after)

    async def wait(self, run_id: str) -> Run:
        """Return a run that a worker drives, once it is over or waits for a person, for input or for a time.

        A posted decision counts before a worker has read it: after `approve` this waits for the outcome. If no worker
        drives the run, this waits for ever, also for a run whose worker died before it applied a `cancel`; set a bound
        with `anyio.fail_after`.

        Raises:
            RunNotFoundError: when the store holds no such run, or no longer, also where its id was used again.
        """
        check_run_id(run_id)
        return await wait_until_blocked(self.store, run_id, self.ended_runs)

    async def audit(self, run_id: str) -> tuple[AuditRecord, ...]:
        """Return a record of each call of a run, oldest first: who asked for it, who approved it, how it ended.

        The records are read from the journal. The calls of an agent that is a tool follow the call that it served.

        Raises:
            RunNotFoundError: when the store holds no such run.
        """
        check_run_id(run_id)
        return await audit_run_tree(self.store, run_id)

    def audits(self, where: Filter = ALL_RUNS, *, since: float = -inf) -> AsyncIterator[AuditRecord]:
        """Return the calls of all runs that a filter takes, each once: `async for record in runs.audits(): ...`.

        The newest run comes first, and each run's calls in their order; the store is read page by page. A run of an
        agent that is a tool is one among the others here.

        Args:
            where: Which runs to read, of any agent and user.
            since: Seconds since 1970: runs that were over before are left out.

        Raises:
            MisuseError: when one of the two is of a wrong type.
        """
        FILTER.check("audits", "where", where)
        TIMESTAMP.check("audits", "since", since)
        return AuditTrail(self.store, RunIterator(self.store, where), since)

    # Decisions. The first one on a call counts.

    async def approve(
        self,
        run_id: str,
        call_id: str,
        *,
        by: str = "",
        arguments: Mapping[str, Any] | None = None,
        digest: str | None = None,
    ) -> None:
        """Approve a call. It runs when the run is resumed.

        Edited arguments are validated at once where `tools` has the tools of the run's agent. Otherwise the worker
        that takes up the call validates them: if they do not fit, the call does not run, and the run asks for the
        approval again, with the reason in `Pending.error`.

        Args:
            run_id: The run, as `run.pending` names it: a sub-agent's own, where that waits.
            call_id: The call.
            by: Who approves it.
            arguments: Run the call with these in place of the model's own, as plain JSON; the history then says the
                same.
            digest: The `Pending.digest` of what was shown to the person: approval of anything else is refused. None:
                whatever the run asks now.

        Raises:
            MisuseError: when the run has no such call, or the arguments are no JSON or do not fit its tool.
            ConflictError: when it was decided already, the time is up, or it is another call than was shown.
        """
        check_call_id(run_id, call_id)
        run, item = await find_pending(self.store, run_id, call_id, PendingKind.APPROVAL, digest=digest)
        approval = build_approval(item, arguments, by=by)
        check_edited_arguments(approval, self._find_tools(run.header).get(item.tool))
        await post_decision(self.store, run, item, approval)

    async def reject(self, run_id: str, call_id: str, *, message: str = "", by: str = "") -> None:
        """Reject a call. It does not run, and the model reads why.

        Args:
            run_id: The run, as `run.pending` names it.
            call_id: The call.
            message: The reason, for the model.
            by: Who rejects it.

        Raises:
            MisuseError: when the run has no such call.
            ConflictError: when it was decided already, or the time is up.
        """
        check_call_id(run_id, call_id)
        run, item = await find_pending(self.store, run_id, call_id, PendingKind.APPROVAL)
        await post_decision(self.store, run, item, Reject(call_id=call_id, by=by, message=as_text(message, "message")))

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
        """Answer a question: give the result of a call that comes from outside, or the input that a tool asks for.

        The result of `ask_user`, or of a tool with `external=True`, is text. The input that a tool asks for with
        `InputRequired` is an object that fits the question's schema, or plain text where that is one string; several
        questions are answered at once, by their keys. The tool is then called again.

        Args:
            run_id: The run, as `run.pending` names it.
            call_id: The call.
            content: The result, which the model reads; or the answer to the tool, None where there is nothing to fill
                in. Of several answers, None declines one.
            failed: Whether a result is an error.
            declined: Whether the person declines to answer the tool.
            by: Who answers.
            digest: The `Pending.digest` of what was shown to the person: an answer to anything else is refused. None:
                whatever the call asks now.

        Raises:
            MisuseError: when the run waits for no such answer, or it does not fit the question; nothing is lost.
            ConflictError: when it was answered already, the time is up, or something else is asked than was shown.
        """
        check_call_id(run_id, call_id)
        run, item = await find_pending(self.store, run_id, call_id, PendingKind.QUESTION, digest=digest)
        await post_decision(self.store, run, item, build_answer(item, content, failed=failed, declined=declined, by=by))

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
        """Record the outcome of a call that was in flight when its worker died.

        Args:
            run_id: The run.
            call_id: The call.
            result: The call was done, and returned this.
            failed: The call failed in this way.
            rerun: Run the call again, under the same idempotency key.
            by: Who says so.

        Raises:
            MisuseError: when not exactly one of the three is given, or the run has no such call.
            ConflictError: when it was decided already.
        """
        check_call_id(run_id, call_id)
        decision = build_settlement(call_id, result, failed, rerun=rerun, by=by)
        run, item = await find_pending(self.store, run_id, call_id, PendingKind.OUTCOME)
        await post_decision(self.store, run, item, decision)

    # Input, and the end or a rest of a run.

    async def send(
        self,
        run_id: str,
        content: Prompt,
        *,
        kind: InputKind | str = InputKind.USER,
        priority: Priority | str = Priority.NORMAL,
        at: datetime | float | None = None,
        key: str | None = None,
    ) -> PostedItem:
        """Send a run more input. The run reads it at its next OBSERVE.

        Args:
            run_id: A run that is not over.
            content: Text or parts. No model is known here, so a part that the run's model cannot take is not refused:
                the run leaves it out of its journal when it reads the input, and a text in its place says so to the
                model. `Agent.send` refuses it at once.
            kind: The user's own words, or a note of the system.
            priority: The order of inputs, where several wait.
            at: A datetime with its time zone, or seconds since 1970, before which the input is not read: a timer. It
                does not keep a run from ending.
            key: Unique in the run: a second input of the same key is not taken in again.

        Returns:
            The row of the inbox: the first one of that key.

        Raises:
            ConflictError: when the run is over, or 1,000 posts wait in its inbox: it has to take some in first.
            MisuseError: when there is no such kind or priority, or `at` is no time; nothing was posted.
        """
        check_run_id(run_id)
        STRING.or_none().check("send", "key", key)
        item = Input(kind=kind, parts=as_parts(content), priority=priority, due_at=at)
        posted = await self.store.post(run_id, f"input:{key or secrets.token_hex(8)}", item)
        await wake_callers(self.store, run_id, (await self.header(run_id)).parent, posted.key)
        return posted

    async def pause(self, run_id: str, *, by: str = "", message: str = "") -> None:
        """Pause a run at its next boundary between two steps, until it is resumed.

        A worker that drives the run stops there, within seconds where that is another process; a call to a model or a
        tool that is under way ends first. If that worker dies before it has seen the request, the next one that takes
        the run pauses it.

        Args:
            run_id: A run that is not over.
            by: Who pauses it.
            message: The reason, for people.

        Raises:
            ConflictError: when the run is over.
            MisuseError: when it works for another run, which is the one to pause.
        """
        parent = (await self.header(run_id)).parent
        if parent is not None:
            raise MisuseError(f"run {run_id!r} works for run {parent!r}: pause that one")
        await self.store.post(run_id, f"pause:{secrets.token_hex(8)}", Pause(by=by, message=message))
        await self._apply_posted(run_id)

    async def cancel(self, run_id: str, *, by: str = "", message: str = "") -> None:
        """End a run and the runs of the agents below it: at once if no worker drives it, else within seconds.

        The request is durable. If the worker dies before it has seen it, the run ends when the next worker takes it, or
        by `agent.resume`, or by a second `cancel` once the dead worker's lease has ended.

        Args:
            run_id: The run.
            by: Who cancels it.
            message: The reason, for people.

        Raises:
            ConflictError: when the run is over, and not because it was cancelled.
        """
        check_run_id(run_id)
        posted = await self.store.post(run_id, "cancel", Cancel(by=by, message=message))
        await self._apply_posted(run_id)
        await wake_callers(self.store, run_id, (await self.header(run_id)).parent, posted.key)

    async def _apply_posted(self, run_id: str) -> None:
        """Apply the request that was just posted, if no worker drives the run."""
        tools = self._find_tools(await self.header(run_id))
        await apply_stop_requests(self.store, run_id, clock=self.clock, tools=tools, durability=self.durability)

    def _find_tools(self, header: Header) -> ToolRegistry:
        return self.tools.get(header.agent, NO_TOOLS)

    # Removal.

    async def delete(self, run_id: str) -> int:
        """Remove a run that no worker drives, with the runs of agents below it; return how many runs that were.

        Raises:
            RunNotFoundError: when the store holds no such run.
            ConflictError: when it, or one below it, is driven, or another run goes on from one of them (sessions are
                deleted whole), or it works for another run that is not over and would do its work again.
        """
        count = 1 + await self._count_descendants(run_id)
        await self.store.delete(run_id)
        return count

    async def _count_descendants(self, run_id: str) -> int:
        children = await self.children(run_id)
        return len(children) + sum([await self._count_descendants(each.id) for each in children])

    async def delete_session(self, session: str) -> int:
        """Remove all runs of a session, with the runs of agents below them; return how many runs that were.

        Raises:
            MisuseError: when `session` is empty or not a string.
            ConflictError: when one of them is driven, or a run outside goes on from one; none is removed then.
        """
        NAME.check("delete_session", "session", session)
        return await self.store.delete_session(session)

    async def prune(self, before: float) -> int:
        """Remove runs that are over and have not changed since a time; return how many runs that were.

        A session is removed whole, when all of its runs may be; a run from which another goes on stays as long as that
        one, and runs of agents stay as long as their callers.

        Args:
            before: Seconds since 1970.

        Raises:
            MisuseError: when it is no such number; nothing is removed.
        """
        return await self.store.prune(before)

    # Life.

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the store."""
        await self.store.aclose()
