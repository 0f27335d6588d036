"""Client for the runs in a store: read them, decide on their calls, send them input, pause, cancel and delete them.

The client works without an agent, a model or an API key. A worker that has the agent continues the run afterwards.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from datetime import datetime
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, Final, Self

import attrs

from agentfsm.agents.decisions import (
    apply_four_eyes,
    build_allowance,
    build_answer,
    build_approval,
    build_settlement,
    check_edited_arguments,
    find_pending,
    find_question,
    list_allowances,
    post_decision,
    post_decisions,
    read_edited_plan,
    revoke_allowance,
    wake_callers,
    write_allowance,
)
from agentfsm.agents.validation import (
    CLOCK,
    FILTER,
    TOOLS_BY_AGENT,
    as_text,
    check_call_id,
)
from agentfsm.core.errors import ConflictError, MisuseError, PartlyDoneError, RunNotFoundError, StoreError
from agentfsm.core.header import Header
from agentfsm.core.inbox import Approve, Cancel, Input, InputKind, Pause, Priority, Reject
from agentfsm.core.json_text import round_timestamp
from agentfsm.core.labels import as_labels, join_labels
from agentfsm.core.messages import Part, as_parts
from agentfsm.core.pending import PendingKind
from agentfsm.core.plans import Plan
from agentfsm.core.run import Run
from agentfsm.core.run_ids import is_reserved_key
from agentfsm.core.validation import BOOL, COUNT, COUNT_OR_ZERO, NAME, SECONDS, STRING
from agentfsm.engine.execution.allowances import Allowance, find_root
from agentfsm.engine.execution.unattended import NO_TOOLS, apply_stop_requests, give_up_cut_off_call
from agentfsm.journal.audit import AuditTrail, audit_run_tree
from agentfsm.journal.follow import JournalFollower, wait_until_blocked
from agentfsm.journal.influence import Influence, check_four_eyes, check_not_approved, influence
from agentfsm.journal.load import EndedRuns, load_run, read_header
from agentfsm.journal.run_list import STRANDED_S, RunIterator, StrandedRun, find_stranded
from agentfsm.journal.run_status import RunStatus, read_status
from agentfsm.ports.store import (
    ALL_RUNS,
    DURABILITY,
    RUN_ORDER,
    STORE,
    TIMESTAMP,
    Clock,
    Durability,
    Filter,
    RunOrder,
    RunSummary,
    Store,
    SystemClock,
)
from agentfsm.ports.stored import Feedback
from agentfsm.stores.rules import check_run_id
from agentfsm.tools.executing_call import current_call, list_passed_labels, report_read_run
from agentfsm.tools.registry import ToolRegistry

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from types import TracebackType

    from agentfsm.core.events import Event
    from agentfsm.core.inbox import PostedItem
    from agentfsm.core.pending import Pending
    from agentfsm.journal.audit import AuditRecord
    from agentfsm.journal.follow import JournalEvent

Prompt = str | Part | tuple[Part, ...] | list[Part]
# Limit of a query for all children of a run: more than any run has.
_MAX_CHILDREN: Final = 1_000_000


@attrs.frozen(eq=False, repr=False)
class Runs:
    """A client for the runs in a store: `runs = Runs(SQLiteStore("runs.db")); await runs.approve(run_id, call_id)`.

    All methods work from any process, whether or not a worker executes the run. Decisions, input and requests are
    durable when the call returns. A worker that executes the run applies a cancel or a pause within seconds; without
    such a worker, the client applies it at once.

    Raises:
        MisuseError: when a field has the wrong type.
    """

    store: Store = attrs.field(validator=STORE)
    """Store of the runs. `aclose` closes it."""

    tools: Mapping[str, ToolRegistry] = attrs.field(factory=dict, kw_only=True, validator=TOOLS_BY_AGENT)
    """Tools by agent name, if known. With them, `approve` validates edited arguments at once instead of when a worker
    executes the call, and `cancel` knows which calls only read. Default: none.
    """

    clock: Clock = attrs.field(factory=SystemClock, kw_only=True, validator=CLOCK)
    """Clock for the timestamps of cancels and pauses that this client applies. Default: the clock of the system."""

    durability: Durability = attrs.field(default="full", kw_only=True, validator=DURABILITY)
    """Durability of the client's appends to a journal, as in `Agent.durability`. Default: "full"."""

    four_eyes: bool = attrs.field(default=False, kw_only=True, validator=BOOL)
    """Whether a person who has shaped a call may neither approve nor settle it: by the prompt, an input, an answer, the
    reason of a rejection, an edit, a recorded outcome or a fork, as `influence` lists them. An edit then needs a second
    person, who approves the edited call. Default False.
    """

    ended_runs: EndedRuns = attrs.field(factory=dict, kw_only=True)
    """Cache of runs that are over, by id, so that a conversation need not be read from its beginning each time."""

    # Read runs.

    async def load(self, run_id: str, *, at: int | None = None) -> Run:
        """Return a run from its journal.

        Args:
            run_id: The run.
            at: The version to return; None for the newest.

        Raises:
            RunNotFoundError: when the store has no such run.
            MisuseError: when the run does not have this version.
        """
        check_run_id(run_id)
        run = await load_run(self.store, run_id, at, self.ended_runs)
        report_read_run(run)
        return run

    async def header(self, run_id: str) -> Header:
        """Return the header of a run: its prompt, its agent and the options of its start. No events are read.

        Raises:
            RunNotFoundError: when the store has no such run.
        """
        check_run_id(run_id)
        return await read_header(self.store, run_id)

    async def root(self, run_id: str) -> Header:
        """Return the header of the root run: follow the callers of a run up. A run without a caller is its own root.

        Raises:
            RunNotFoundError: when the store has no such run.
        """
        header = await self.header(run_id)
        while header.parent is not None:
            header = await self.header(header.parent)
        return header

    async def status(self, run_id: str) -> RunStatus:
        """Return the status of a run in one word: running, idle, queued, waiting, paused, done or failed.

        It follows from the lease, which a process that executes the run holds, and from the journal.

        Raises:
            RunNotFoundError: when the store has no such run.
        """
        status, _why = await read_status(self.store, await self.load(run_id))
        return status

    async def children(self, run_id: str) -> tuple[RunSummary, ...]:
        """Return the runs of the sub-agents that a run has called, newest first; empty if the run does not exist."""
        check_run_id(run_id)
        return await self.store.runs(Filter(parent=run_id), limit=_MAX_CHILDREN)

    async def list(
        self, where: Filter = ALL_RUNS, *, limit: int = 100, subagents: bool = True, order: RunOrder = "newest"
    ) -> tuple[RunSummary, ...]:
        """Return the first runs that match a filter, by default the newest; `iterate` returns all of them.

        Args:
            where: Filter of the runs.
            limit: Maximum number of runs, 1 or more.
            subagents: Whether to include the runs of sub-agents.
            order: "newest", or "cost" or "duration" for the dearest or the longest of the runs that are over.

        Raises:
            MisuseError: when an argument has the wrong type, or `limit` is below 1.
        """
        FILTER.check("list", "where", where)
        COUNT.check("list", "limit", limit)
        RUN_ORDER.check("list", "order", order)
        roots = where if subagents or where.parent is not None else attrs.evolve(where, parent="")
        return await self.store.runs(roots, limit=limit, order=order)

    def iterate(self, where: Filter = ALL_RUNS) -> AsyncIterator[RunSummary]:
        """Return all runs that match a filter, newest first, each once: `async for summary in runs.iterate(): ...`.

        The store is read page by page, so that a list of any length needs little memory. Runs that begin after the
        first page was read may be missing.

        Args:
            where: Filter of the runs.

        Raises:
            MisuseError: when `where` is not a Filter.
        """
        FILTER.check("iterate", "where", where)
        return RunIterator(self.store, where)

    async def list_stranded(self, where: Filter = ALL_RUNS, *, after_s: float = STRANDED_S) -> tuple[StrandedRun, ...]:
        """Return the runs that are ready and that no worker takes, newest first, each with the reason.

        A store knows the runs that workers execute, and not the workers that are idle. So a run is listed if it has
        been ready for a while, and no worker executes a run of the same agent, release and format. A run that waits for
        a person is not ready, and a long queue is not listed while a worker works on it. A run that an engine delays
        is listed too, because the store does not know of the delay.

        Args:
            where: Filter of the runs; its `active_at` is not used.
            after_s: Seconds that a run must have been ready, above 0.

        Raises:
            MisuseError: when an argument has the wrong type.
        """
        FILTER.check("list_stranded", "where", where)
        SECONDS.check("list_stranded", "after_s", after_s)
        return tuple(await find_stranded(self.store, where, after_s=after_s))

    async def history(self, run_id: str) -> tuple[Event, ...]:
        """Return the events of a run's journal, oldest first; event number n made version n.

        Raises:
            RunNotFoundError: when the store has no such run.
        """
        check_run_id(run_id)
        stored = await self.store.read(run_id)
        if current_call() is not None:
            await self.load(run_id)  # the call gets the labels of the run
        return stored.events

    def events(self, run_id: str, *, after: int = 0) -> AsyncIterator[JournalEvent]:
        """Return the events of a run's journal as they are written: `async for item in runs.events(run_id): ...`.

        Any process may execute the run; that process does no work for the iterator. The iteration ends with the run.
        While the run waits for a person, or no worker executes it, the iterator waits too. It is safe to break out of
        the loop or to cancel the task at any time. The store wakes the iterator if it can. The iterator also polls
        every second, and every 0.1 s while it finds events that the store did not announce, as with a SQLite file that
        another process writes.

        Args:
            run_id: The run.
            after: The version to begin after: 0 for all events, or the `version` of the last item to continue.

        Raises:
            RunNotFoundError: by the iteration, when the run does not exist or was deleted, even if a new run has its
                id.
            MisuseError: when `after` is not a version, or, by the iteration, is above the version of the run.
        """
        check_run_id(run_id)
        COUNT_OR_ZERO.check("events", "after", after)
        on_read = None if current_call() is None else partial(self.load, run_id)
        return JournalFollower(self.store, run_id, after, on_read)

    async def wait(self, run_id: str) -> Run:
        """Wait until a run that a worker executes is over or waits for a person, input or a time, and return it.

        A posted decision counts before a worker has read it: after `approve` this waits for the outcome. If no worker
        executes the run, this waits forever, even after a `cancel` whose worker died before it applied it, and after a
        minute logs a warning that says how the run continues; set a bound with `anyio.fail_after`.

        Raises:
            RunNotFoundError: when the run does not exist or was deleted, even if a new run has its id.
        """
        check_run_id(run_id)
        run = await wait_until_blocked(self.store, run_id, self.ended_runs)
        report_read_run(run)
        return run

    async def audit(self, run_id: str) -> tuple[AuditRecord, ...]:
        """Return a record of each call of a run, oldest first: who asked for it, who approved it, how it ended.

        The records are read from the journal. The calls of a sub-agent follow the call of the sub-agent.

        Raises:
            RunNotFoundError: when the store has no such run.
        """
        check_run_id(run_id)
        records = await audit_run_tree(self.store, run_id)
        if current_call() is not None:
            await self.load(run_id)
        return records

    async def influence(self, run_id: str, call_id: str) -> tuple[Influence, ...]:
        """Return the deeds by which persons have shaped a call of a run: they may not decide on it under four eyes.

        They are read from the journals of the run and of those that it continues, calls or was called by.
        """
        check_call_id(run_id, call_id)
        return await influence(self.store, run_id, call_id)

    def audits(self, where: Filter = ALL_RUNS, *, since: float = -inf) -> AsyncIterator[AuditRecord]:
        """Return the calls of all runs that match a filter, each once: `async for record in runs.audits(): ...`.

        The newest run comes first, and each run's calls in their order. The store is read page by page. The run of a
        sub-agent is listed by itself, not with its caller.

        Args:
            where: Filter of the runs.
            since: Seconds since 1970: runs that ended before this time are left out.

        Raises:
            MisuseError: when an argument has the wrong type.
        """
        FILTER.check("audits", "where", where)
        TIMESTAMP.check("audits", "since", since)
        return AuditTrail(self.store, RunIterator(self.store, where), since)

    # Decide on calls. The first decision on a call counts.

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
        """Approve a call. It runs when the run is resumed.

        Edited arguments are validated at once if `tools` has the tools of the run's agent. Otherwise the worker that
        executes the call validates them: if they do not fit, the call does not run, and the run asks for approval
        again, with the reason in `Pending.error`.

        Args:
            run_id: `Pending.run_id`: the run, or the run of its sub-agent that waits.
            call_id: `Pending.call_id`; "plan" for the plan that waits.
            by: Name of the person who approves.
            arguments: Arguments, as plain JSON, that replace the model's, in the history too. None: the model's.
            plan: Plan that replaces the one that waits; only with the call id of a plan. None: the plan as it is.
            digest: `Pending.digest` of the call that the person saw; the approval of a different call is refused.
                None: the call as it is now.
            allow: Names of arguments: later calls of the tool in this session in which each of them has the same value
                run without this question; see `Allowance`. It needs `digest`, and the person has to have seen the rule:
                `agentfsm.agents.decisions.describe_allowance(item, allow)` returns it with the calls that it covers.

        Raises:
            MisuseError: when the run has no such call, the arguments are not JSON or do not fit the tool, or `allow`
                names no arguments of the call.
            ConflictError: when the call was decided already, its time is up, or the digest differs.
            PartlyDoneError: when the call is approved, and the allowance could not be recorded.
            FourEyesError: when `four_eyes` is set, and the person has shaped the call, gives no name, or uses `allow`.
        """
        check_call_id(run_id, call_id)
        run, item = await find_pending(self.store, run_id, call_id, PendingKind.APPROVAL, digest=digest)
        tools = self._find_tools(run.header)
        if plan is not None:
            arguments = read_edited_plan(item, plan, arguments, tools)
        approval = build_approval(item, arguments, by=by)
        check_edited_arguments(approval, tools.get(item.tool))
        if self.four_eyes:
            approval = await apply_four_eyes(self.store, item, approval, allow=allow)
        if not allow:
            return await post_decision(self.store, run, item, approval)
        if digest is None:
            raise MisuseError("allow= needs digest=, the digest of the call that the person was shown with the rule")
        root = await find_root(self.store, run.header)
        allowance = build_allowance(run, root, item, allow, arguments, by=by)
        await post_decision(self.store, run, item, approval)
        try:
            await write_allowance(self.store, root, allowance)
        except StoreError as error:
            raise PartlyDoneError(
                f"{item.call_id} is approved, and {allowance.rule} was not recorded, so that later calls are asked "
                f"about: {error}"
            ) from error
        return None

    async def allowances(self, run_id: str) -> tuple[Allowance, ...]:
        """Return the allowances that hold for a run or its session, oldest first, also the revoked ones.

        The journals of the session are read, to count the calls that each has let through.

        Raises:
            RunNotFoundError: when the store has no such run.
            MisuseError: when the store keeps no records.
        """
        check_run_id(run_id)
        return await list_allowances(self.store, run_id)

    async def revoke(self, allowance_id: str, *, by: str = "") -> Allowance:
        """End an allowance, and return it: from now on its calls are asked about again. Calls that run go on.

        Args:
            allowance_id: `Allowance.id`.
            by: Name of the person who revokes it. The first one is recorded.

        Raises:
            RunNotFoundError: when the run with the approved call was deleted, so that the allowance has ended.
            MisuseError: when there is no such allowance.
        """
        return await revoke_allowance(self.store, as_text(allowance_id, "allowance_id"), by=as_text(by, "by"))

    async def reject(self, run_id: str, call_id: str, *, message: str = "", by: str = "") -> None:
        """Reject a call. It does not run, and the model reads the reason.

        Args:
            run_id: `Pending.run_id`.
            call_id: `Pending.call_id`.
            message: The reason, for the model.
            by: Name of the person who rejects.

        Raises:
            MisuseError: when the run has no such call.
            ConflictError: when the call was decided already, or its time is up.
            FourEyesError: when `four_eyes` is set, and the person gives a reason who has approved a call above.
        """
        check_call_id(run_id, call_id)
        run, item = await find_pending(self.store, run_id, call_id, PendingKind.APPROVAL)
        if self.four_eyes and message:
            await check_not_approved(self.store, run_id, call_id, by)
        await post_decision(
            self.store, run, item, Reject(call_id=item.call_id, by=by, message=as_text(message, "message"))
        )

    async def decide(
        self, *, approve: Iterable[Pending] = (), reject: Iterable[Pending] = (), message: str = "", by: str = ""
    ) -> None:
        """Decide on several calls together, as they were shown: `await runs.decide(approve=run.pending, by="ann")`.

        Each approval is bound to the digest of its call, and is a decision and an event of its own. Calls that are
        given in neither list go on waiting. Nothing is recorded unless all of the given calls wait as they were shown.

        Args:
            approve: Items of `run.pending` that may run, in any runs.
            reject: Items of `run.pending` that must not run.
            message: The reason of the rejections, for the model.
            by: Name of the person who decides.

        Raises:
            MisuseError: when an item is given twice, or its run does not wait for an approval of it.
            ConflictError: when one of the calls was decided already, or has changed since it was shown.
            PartlyDoneError: when another decision or a fault of the store came in between; it names both parts.
            FourEyesError: when `four_eyes` is set, and the person has shaped a call to approve, gives no name, or
                rejects with a reason and has approved a call above.
        """
        text, approved, rejected = as_text(message, "message"), list(approve), list(reject)
        if self.four_eyes:
            for item in approved:
                await check_four_eyes(self.store, item.run_id, item.call_id, by)
            for item in rejected if text else ():
                await check_not_approved(self.store, item.run_id, item.call_id, by)
        decisions: list[tuple[Pending, Approve | Reject]] = [
            *[(item, build_approval(item, None, by=by)) for item in approved],
            *[(item, Reject(call_id=item.call_id, by=by, message=text)) for item in rejected],
        ]
        await post_decisions(self.store, decisions)

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
        `InputRequired` is an object that fits the question's schema, or text if the schema is a single string. Several
        questions are answered together, by key. The tool is then called again. A login has no answer: without content
        the tool looks again whether the user has logged in, and with `declined` it learns that the user will not.

        Args:
            run_id: `Pending.run_id`.
            call_id: `Pending.call_id`.
            content: The result, which the model reads; or the answer to the tool, None if the schema has no fields.
                Among several answers, None declines a question.
            failed: Whether a result is an error.
            declined: Whether the person declines to answer the tool.
            by: Name of the person who answers.
            digest: `Pending.digest` of the question that the person saw; the answer to a different question is
                refused. None: the question as it is now.

        Raises:
            MisuseError: when the run does not wait for this answer, or the answer does not fit; nothing is posted.
            ConflictError: when the question was answered already, its time is up, or the digest differs.
        """
        check_call_id(run_id, call_id)
        run, item = await find_question(self.store, run_id, call_id, digest=digest)
        if item.kind is PendingKind.LOGIN and content is not None:
            raise MisuseError(f"{call_id} waits for a login, and answers are in the journal: log in, or enter the key")
        if self.four_eyes:
            await check_not_approved(self.store, run_id, call_id, by)
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
        """Record the outcome of a call that was in flight when its worker died, or was cut off by the end of a drain.

        Args:
            run_id: `Pending.run_id`.
            call_id: `Pending.call_id`.
            result: Result of the call, if it succeeded.
            failed: Error of the call, if it failed.
            rerun: Whether to run the call again, with the same idempotency key.
            by: Name of the person who decides.

        Raises:
            MisuseError: when not exactly one of `result`, `failed` and `rerun` is given, or the run has no such call.
            ConflictError: when the outcome was recorded already, or a worker executes the run.
            FourEyesError: when `four_eyes` is set, and the person has shaped the call, or gives no name.
        """
        check_call_id(run_id, call_id)
        decision = build_settlement(call_id, result, failed, rerun=rerun, by=by)
        try:
            run, item = await find_pending(self.store, run_id, call_id, PendingKind.OUTCOME)
        except ConflictError:
            if not await give_up_cut_off_call(self.store, run_id, call_id, clock=self.clock):
                raise
            run, item = await find_pending(self.store, run_id, call_id, PendingKind.OUTCOME)
        if self.four_eyes:
            await check_four_eyes(self.store, run_id, call_id, by)
            await check_not_approved(self.store, run_id, call_id, by)
        await post_decision(self.store, run, item, decision)

    # Send input, pause and cancel.

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
        """Send a run more input. The run reads it at its next OBSERVE.

        Args:
            run_id: A run that is not over.
            content: Text or parts. The client does not know the run's model: a part that the model does not support is
                replaced by a note when the run reads the input. `Agent.send` refuses such a part at once.
            kind: Kind of the input: the user's words, or a note of the system.
            priority: Order in which waiting inputs are read.
            at: Earliest time at which the input is read, as a datetime with a time zone or seconds since 1970. It does
                not keep a run from ending.
            key: Key of the input, unique in the run: a second input with the same key is ignored.
            labels: Labels of the content, such as "untrusted" for a mail. An event and a webhook are untrusted anyway.
                In the function of a tool, those of its run and `user_data` are added: the user has not written it.
            by: Name of the person who sends it.

        Returns:
            The row of the inbox; if the key was used before, the earlier row.

        Raises:
            PartlyDoneError: when the input was posted to the run of a sub-agent, and its caller could not be woken; the
                message has the key with which to repeat the call.
            ConflictError: when the run is over, or its inbox is full (1,000 posts).
            MisuseError: when the kind or priority is unknown, `at` is not a time, or `key` has the form of a key
                that agentfsm derives; nothing is posted.
        """
        check_run_id(run_id)
        STRING.or_none().check("send", "key", key)
        if key is not None and is_reserved_key(key):
            raise MisuseError(f"send(key={key!r}): keys of this form are derived by agentfsm: choose another one")
        passed = join_labels(as_labels(labels), list_passed_labels())
        item = Input(kind=kind, parts=as_parts(content), priority=priority, due_at=at, labels=passed, by=by)
        if self.four_eyes:
            await check_not_approved(self.store, run_id, "", by)
        key, parent = key or secrets.token_hex(8), (await self.header(run_id)).parent
        posted = await self.store.post(run_id, f"input:{key}", item)
        again = f"repeat the call with key={key!r}, which posts nothing twice"
        await wake_callers(self.store, run_id, parent, posted.key, again=again)
        return posted

    async def pause(self, run_id: str, *, by: str = "", message: str = "") -> None:
        """Pause a run at its next boundary between two steps, until it is resumed.

        A worker that executes the run, also in another process, reads the request within seconds; model and tool calls
        in flight end first. If that worker dies before it reads the request, the next worker of the run applies it.

        Args:
            run_id: A run that is not over.
            by: Name of the person who pauses the run.
            message: The reason, for people.

        Raises:
            ConflictError: when the run is over.
            MisuseError: when the run is that of a sub-agent: pause its caller instead.
            PartlyDoneError: when the request was recorded, and could not be applied at once.
        """
        parent = (await self.header(run_id)).parent
        if parent is not None:
            raise MisuseError(f"run {run_id!r} works for run {parent!r}: pause that one")
        await self.store.post(run_id, f"pause:{secrets.token_hex(8)}", Pause(by=by, message=message))
        await self._apply_posted(run_id)

    async def cancel(self, run_id: str, *, by: str = "", message: str = "") -> None:
        """End a run and the runs of its sub-agents: at once if no worker executes it, else within seconds.

        The request is durable. If the worker dies before it reads the request, the run ends when the next worker takes
        it, by `agent.resume`, or by a second `cancel` after the dead worker's lease has expired. A run with a task at
        an MCP server ends at once only if `tools` has its tool, which ends the task; else a worker ends both.

        Args:
            run_id: The run.
            by: Name of the person who cancels the run.
            message: The reason, for people, and for the model of a run above.

        Raises:
            ConflictError: when the run is over, unless it was cancelled.
            PartlyDoneError: when the request was recorded, and could not be applied at once.
            FourEyesError: when `four_eyes` is set, and the person gives a reason who has approved a call above.
        """
        parent = (await self.header(run_id)).parent
        if self.four_eyes and message:
            await check_not_approved(self.store, run_id, "", by)
        posted = await self.store.post(run_id, "cancel", Cancel(by=by, message=message))
        await self._apply_posted(run_id)
        await wake_callers(self.store, run_id, parent, posted.key)

    async def _apply_posted(self, run_id: str) -> None:
        """Apply the request that was just posted, if no worker executes the run."""
        try:
            tools = self._find_tools(await self.header(run_id))
            await apply_stop_requests(self.store, run_id, clock=self.clock, tools=tools, durability=self.durability)
        except StoreError as error:
            raise PartlyDoneError(
                f"the request is recorded in run {run_id!r}, and its next worker applies it; it was not applied at "
                f"once: {error}"
            ) from error

    def _find_tools(self, header: Header) -> ToolRegistry:
        return self.tools.get(header.agent, NO_TOOLS)

    # Feedback.

    async def feedback(self, run_id: str, *, rating: int, comment: str = "", by: str = "") -> None:
        """Record a person's opinion of a run, durably, also if the run is over. It is deleted with the run.

        It is not a part of the journal, and the model does not read it. `list(Filter(max_rating=2))` returns the runs
        whose newest feedback is bad, and followers of the store read the run again.

        Args:
            run_id: The run.
            rating: From 1 (bad) to 5 (good); for thumbs, 1 and 5.
            comment: The reasons, up to 10,000 characters.
            by: Name of the person, or "judge:" and the name of a judge, whose ratings are apart in metrics.

        Raises:
            RunNotFoundError: when the store has no such run.
            MisuseError: when an argument is invalid.
        """
        check_run_id(run_id)
        feedback = Feedback(rating=rating, comment=comment, by=by, at=round_timestamp(await self.store.now()))
        await self.store.add_feedback(run_id, secrets.token_hex(8), feedback)

    async def list_feedback(self, run_id: str) -> tuple[Feedback, ...]:
        """Return the feedback on a run, oldest first.

        Raises:
            RunNotFoundError: when the store has no such run.
        """
        check_run_id(run_id)
        return await self.store.list_feedback(run_id)

    # Delete runs.

    async def delete(self, run_id: str) -> int:
        """Delete a run that no worker executes, with the runs of its sub-agents. Return the number of deleted runs.

        Raises:
            RunNotFoundError: when the store has no such run.
            ConflictError: when a worker executes one of these runs; when another run continues one of them (a session
                is deleted whole); when the caller of the run is not over, because it would repeat the work; or when the
                function of a call has started the run, and the run of that call still exists.
        """
        if (caller := (await self.header(run_id)).caller) is not None:
            with suppress(RunNotFoundError):
                above = await self.header(caller.rpartition("/")[0])
                raise ConflictError(f"run {run_id!r} works for a call of run {above.id!r}: delete that one first")
        count = 1 + await self._count_descendants(run_id)
        await self.store.delete(run_id)
        return count

    async def _count_descendants(self, run_id: str) -> int:
        children = await self.children(run_id)
        return len(children) + sum([await self._count_descendants(each.id) for each in children])

    async def delete_session(self, session: str) -> int:
        """Delete all runs of a session, with the runs of their sub-agents. Return the number of deleted runs.

        Raises:
            MisuseError: when `session` is empty or not a string.
            ConflictError: when a worker executes one of these runs, or a run outside the session continues one of
                them. No run is deleted then.
        """
        NAME.check("delete_session", "session", session)
        return await self.store.delete_session(session)

    async def prune(self, before: float, *, unread: bool = False) -> int:
        """Delete the runs that are over and have not changed since a time. Return the number of deleted runs.

        A session is deleted whole, once all of its runs qualify. A run that another run continues stays as long as that
        run does, and the runs of sub-agents stay as long as their callers. A run that a follower has not read stays.

        Args:
            before: The time, in seconds since 1970.
            unread: Whether to delete also runs that a follower has not read.

        Raises:
            MisuseError: when `before` is not such a number. No run is deleted then.
        """
        return await self.store.prune(before, unread=unread)

    # Cleanup.

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
