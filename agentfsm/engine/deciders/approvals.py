"""Settle open calls before any call runs: questions to people, their decisions, and calls of crashed workers.

The store's clock is read before the inbox, and the store refuses decisions after their deadline. So if the deadline has
passed and the inbox has no decision, none can follow; a decision in the inbox was made in time, whenever it is read.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from math import inf, nextafter
from typing import TYPE_CHECKING, Any, Final

import attrs

from agentfsm.core import events as e
from agentfsm.core.calls import UNDECIDED_PHASES, OpenCall, Phase, parse_arguments, replace_arguments
from agentfsm.core.errors import ArgumentsError
from agentfsm.core.events import GuardVerdict
from agentfsm.core.header import short_hash
from agentfsm.core.inbox import (
    Approve,
    Decision,
    GiveInput,
    InboxItem,
    Input,
    PostedItem,
    Reject,
    Rerun,
    Settle,
)
from agentfsm.core.labels import join_labels
from agentfsm.core.messages import JSON, ErrorType, Outcome, ToolCall, ToolResult, replace_surrogates
from agentfsm.core.pending import BARE_REJECTION, NOT_STARTED, Pending, PendingKind, Question
from agentfsm.core.plans import PLAN_TOOL, list_plan_calls
from agentfsm.core.value import Value
from agentfsm.engine.deciders.guards import decide_call, find_guarded_tools, is_asked_only_by, needs_approval_by_guard
from agentfsm.engine.deciders.started_calls import build_settled_result, settle_cut_off_call
from agentfsm.engine.execution.allowances import Allowance, find_allowance
from agentfsm.engine.execution.child_runs import build_missing_result, has_child_run, waits_on_child
from agentfsm.engine.execution.config import EngineConfig
from agentfsm.engine.execution.cost import calculate_call_cost
from agentfsm.engine.execution.execution import Execution
from agentfsm.engine.execution.task_waits import is_task_due, waits_for_task
from agentfsm.engine.execution.tool_access import check_available, check_permitted, find_engine_tool
from agentfsm.engine.execution.unattended import end_child_run
from agentfsm.journal.load import is_wait_over
from agentfsm.tools import callback_errors
from agentfsm.tools.queue import result_text
from agentfsm.tools.queue.dispatch import CallOutcome, QueueHost, failed_outcome
from agentfsm.tools.queue.result_text import NOT_UNASKED, build_decided_result
from agentfsm.tools.schema.binding import Arguments, BoundArguments
from agentfsm.tools.tool import ANSWER_EXPIRES_S, DIGEST_CHARS, Tool

if TYPE_CHECKING:
    from agentfsm.core.run import Run
    from agentfsm.engine.execution.open_calls import CallLedger, EndedCall, OpenCalls

# Maximum of characters of a tool's description of a call: a sentence, not a whole letter.
DESCRIPTION_CHARS: Final = 2_000
_OTHER_NOW: Final = "the tool, its description of this call, its cost, or the reason of a guard is another now"


@attrs.frozen
class _InboxSnapshot(Value):
    """The inbox items for open calls, and the store's time before they were read."""

    now: float
    decisions: dict[str, PostedItem]
    """Inbox rows by call id."""

    has_input: bool


@attrs.frozen
class Decisions(Value):
    """Decisions and results for open calls, settled before any call runs."""

    events: tuple[e.Event, ...]
    taken: tuple[int, ...]
    """Numbers of the inbox rows that the events consume."""

    approvals: dict[str, PostedItem | Allowance]
    """Approvals, and allowances that answer a question before it is asked, by call id. The append that marks the call
    as started consumes them.
    """

    resumable: frozenset[str]
    """Ids of paused calls that may continue."""


async def ask_about_calls(calls: OpenCalls, ready: Sequence[ToolCall]) -> Sequence[ToolCall]:
    """Settle the open calls that may not run at once, and return those that may run now."""
    execution = calls.execution
    run, asking = execution.journal.run, execution.config.registry.interactive_tools
    if run.plan is None or not (run.reply is None or run.plan.guards_calls):
        for entry in run.open:
            if entry.phase is not Phase.INTENDED or entry.call.name in asking:
                break
            if entry.guarded is not None and needs_approval_by_guard(entry):
                break
        else:
            return ready
    decisions = await _decide_open_calls(calls)
    if decisions.events:
        calls.record(*decisions.events, taken=decisions.taken)
    run = execution.journal.run
    for ledger in calls.ledgers.values():
        ledger.approval = None
    for call_id, approval in decisions.approvals.items():
        calls.open_ledger(call_id).approval = approval
    for entry in run.open:
        if entry.attempts:
            calls.open_ledger(entry.call.id).has_started = True
    waiting = [entry for entry in run.open if entry.phase is not Phase.FINISHED]
    calls.unfinished = len(waiting)
    execution.budget.admit_calls(waiting)  # some may have their result now
    return _list_ready_calls(run, decisions)


def _list_ready_calls(run: Run, decisions: Decisions) -> tuple[ToolCall, ...]:
    """Return the calls that may run now: those before the first one that still needs a decision.

    The steps of a plan do not depend on their order.
    """
    ready: list[ToolCall] = []
    for entry in run.open:
        row = decisions.approvals.get(entry.call.id)
        if entry.phase in UNDECIDED_PHASES and row is None and entry.call.id not in decisions.resumable:
            if run.reply is None or waits_for_task(entry):  # the others have begun beside a task, too
                continue
            break
        if entry.phase is not Phase.FINISHED:
            decision = row.item if isinstance(row, PostedItem) else row
            ready.append(entry.call if decision is None else edit_call(run, entry.call, decision))
    return tuple(ready)


def admit_ready_steps(calls: OpenCalls, steps: Sequence[ToolCall]) -> Sequence[ToolCall]:
    """Return the steps about which no person has to be asked."""
    run, config = calls.execution.journal.run, calls.execution.config
    known = [(call, config.find_tool(call.name)) for call in steps]
    return [
        call
        for call, tool in known
        if tool is not None and not tool.is_interactive and not differs_from_plan(run, tool, call)
    ]


def check_asked_by_guard(
    calls: OpenCalls, call: ToolCall, tool: Tool[..., Any], _bound: BoundArguments
) -> CallOutcome | None:
    """Refuse a call about which a guard wants a person to be asked, and about which none was, or about another one."""
    entry, config = calls.find_entry(call), calls.execution.config
    if call.name not in find_guarded_tools(config) or not needs_approval_by_guard(entry) or calls.is_approved(call):
        return None
    return None if entry.approved == digest_call(config, tool, call, entry.guarded) else _refuse_unasked(entry)


def check_asked(calls: OpenCalls, call: ToolCall, tool: Tool[..., Any], bound: BoundArguments) -> CallOutcome | None:
    """Refuse a call that needs an approval that it does not have: a person was not asked, or about another one."""
    config, run = calls.execution.config, calls.execution.journal.run
    must_ask = run.plan is not None and (is_outside_plan(run) or differs_from_plan(run, tool, call))
    if not (tool.is_interactive or must_ask) or calls.is_approved(call):
        return None
    entry = run.open_call(call.id)
    is_new = entry.phase is Phase.INTENDED or entry.lacks_tool
    if not is_new and (tool.waits_for is not None or entry.approved == digest_call(config, tool, call, entry.guarded)):
        return None
    if tool.waits_for is None and not must_ask and not needs_approval(tool, tool.to_namespace(bound)):
        return None
    return _refuse_unasked(entry)


def _refuse_unasked(entry: OpenCall) -> CallOutcome:
    text = f"{entry.call.name} needs an approval in this program"
    if not entry.may_have_acted:
        text = f"{entry.call.name} needs an approval that was not requested: call it again to request it."
    return failed_outcome(text, ErrorType.BLOCKED, retryable=True)


def consume_decision(execution: Execution, ledger: CallLedger | None, call_id: str) -> tuple[list[e.Event], list[int]]:
    """Consume the approval of a call: return its event, and its inbox row."""
    if ledger is None or ledger.approval is None:
        return [], []
    row, ledger.approval = ledger.approval, None
    if isinstance(row, Allowance):
        return [build_approval(execution, execution.journal.run.open_call(call_id), row)], []
    if isinstance(row.item, GiveInput):
        return [e.InputGiven(call_id=call_id, by=row.item.by, answers=row.item.answers)], [row.number]
    if not isinstance(row.item, Approve | Rerun):
        return [], []
    return [build_approval(execution, execution.journal.run.open_call(call_id), row.item)], [row.number]


def consume_unused(execution: Execution, ended: EndedCall) -> None:
    """Consume the approval of a call that could not run."""
    facts, taken = consume_decision(execution, ended.ledger, ended.result.call_id)
    ended.facts[:0] = facts
    ended.taken += taken


async def _decide_open_calls(calls: OpenCalls) -> Decisions:
    """Settle open calls before any call runs, and return the outcome."""
    execution, last_waits = calls.execution, calls.last_waits
    arrived = await _read_decisions(execution)
    events: list[e.Event] = []
    taken: list[int] = []
    approvals: dict[str, PostedItem | Allowance] = {}
    resumable: set[str] = set()
    for entry in execution.journal.run.open:
        call_id = entry.call.id
        row = arrived.decisions.get(call_id)
        if row is not None and _permits_run(execution, entry, row):
            question = _ask_again(execution, entry, row, arrived.now)
            if question is not None:
                events.append(question)
                taken.append(row.number)
            elif waits := _begin_approved_wait(execution, entry, row, arrived.now):
                events += waits
                taken.append(row.number)
            else:
                approvals[call_id] = row
        elif waits_on_child(execution.journal.run, entry):
            journal = execution.journal
            if not await has_child_run(journal.store, journal.run.id, call_id):  # it would repeat everything
                ended = build_missing_result(entry)
                events.append(e.ToolFinished(result=build_decided_result(entry, ended.outcome, ended.content)))
                taken += [row.number] if row is not None else []
            elif last_waits.get(call_id) != entry.pending and await _is_child_unblocked(execution, entry, arrived.now):
                last_waits[call_id] = entry.pending
                resumable.add(call_id)
        elif row is None and entry.lacks_tool and not is_missing_step(execution, entry):
            if (event := _request_decision(execution, entry, arrived.now)) is not None:
                events.append(event)
            else:
                resumable.add(call_id)
        elif row is None and (await _is_logged_in(execution, entry) or is_task_due(entry, arrived.now)):
            resumable.add(call_id)
        elif row is not None and isinstance(row.item, Settle) and entry.phase in _SETTLED_PHASES:
            events.append(await _settle(execution, entry, row.item))
            taken.append(row.number)
        elif (event := await _resolve_open_call(execution, entry, row, arrived, calls)) is not None:
            allowance = await _find_allowance(execution, entry) if isinstance(event, e.ApprovalAsked) else None
            if allowance is not None:
                approvals[call_id] = allowance
                continue
            events.append(event)
            taken += [row.number] if row is not None else []
    return Decisions(tuple(events), tuple(taken), approvals, frozenset(resumable))


async def _read_decisions(execution: Execution) -> _InboxSnapshot:
    journal = execution.journal
    now = await journal.store.now()
    undecided = [entry for entry in journal.run.open if entry.phase in UNDECIDED_PHASES]
    late = any(item.expires_at is not None and now >= item.expires_at for item in journal.run.pending)
    rows = await journal.read_inbox(force=late) if undecided else ()  # a refusal by timeout requires a fresh read
    decisions = {row.item.call_id: row for row in rows if isinstance(row.item, Decision)}
    has_input = any(isinstance(row.item, Input) for row in rows)
    if journal.run.background and journal.run.untold_background:  # OBSERVE tells their results
        has_input = True
    return _InboxSnapshot(now, decisions, has_input)


# Child runs.


async def _is_child_unblocked(execution: Execution, entry: OpenCall, now: float) -> bool:
    """Return whether the first item that the agent behind a paused call waits for was decided, or is due."""
    if execution.options.resume and any(item.kind is PendingKind.CRASH for item in entry.pending):
        return True
    tool, names = execution.config.find_tool(entry.call.name), execution.options.renamed
    inner = None if tool is None else tool.inner_agent
    missing = [names.get(item.tool, item.tool) for item in entry.pending if item.lacks_tool]
    if inner is not None and any(inner.has_tool(name, ()) for name in missing):
        return True
    first = {item.run_id: item for item in reversed(entry.pending)}
    return any([await is_wait_over(execution.journal.store, each, now) for each in first.values()])


# One call.


async def _is_logged_in(execution: Execution, entry: OpenCall) -> bool:
    """Return whether the user has the login that a call waits for.

    A user may log in after the check of the call and before its wait is recorded. Such a login wakes no run.
    """
    if entry.phase is not Phase.PAUSED or entry.pending[0].kind is not PendingKind.LOGIN:
        return False
    tool, header = execution.config.find_tool(entry.call.name), execution.journal.run.header
    return (
        tool is not None
        and tool.login is not None
        and await tool.login.is_ready(tenant=header.tenant, user=header.user)
    )


def _permits_run(execution: Execution, entry: OpenCall, row: PostedItem) -> bool:
    """Return whether a person has approved the call as it is now."""
    if isinstance(row.item, Approve):
        return (
            entry.phase is Phase.AWAITING_APPROVAL
            and row.item.digest == entry.digest
            and not has_changed(execution.config, entry)
        )
    if isinstance(row.item, GiveInput):
        return entry.phase is Phase.PAUSED and row.item.digest == entry.pending[0].digest
    return (
        isinstance(row.item, Rerun) and entry.phase is Phase.OUTCOME_UNKNOWN and not is_missing_step(execution, entry)
    )


async def _resolve_open_call(
    execution: Execution, entry: OpenCall, row: PostedItem | None, arrived: _InboxSnapshot, host: QueueHost
) -> e.Event | None:
    """Return the event to record for an open call before any call runs, if any."""
    now = arrived.now
    is_late = entry.expires_at is not None and now >= entry.expires_at
    match entry.phase, row.item if row is not None else None:
        case (Phase.INTENDED, _) | (Phase.OUTCOME_UNKNOWN, Rerun()) if is_missing_step(execution, entry):
            reason = (
                f"{NOT_STARTED}: this program has no tool {entry.call.name!r}; settle it, resume with a program that "
                "has it, or with renamed= (--renamed OLD=NEW) if it only has another name"
            )
            return e.ToolLost(call_id=entry.call.id, reason=reason, lacks_tool=True)
        case Phase.INTENDED, _:
            return _request_decision(execution, entry, now)
        case Phase.RUNNING, _:
            return await settle_cut_off_call(execution, entry, host)
        case Phase.AWAITING_APPROVAL, Reject(by=by, message=message):
            why = f"{BARE_REJECTION[:-1]} ({message})." if message else BARE_REJECTION
            return e.ToolFinished(result=_build_rejection(entry, why), by=by)
        case Phase.AWAITING_APPROVAL, None if is_late:
            return e.ToolFinished(
                result=_build_rejection(entry, "not run: a person was asked, and no answer came in time.")
            )
        case Phase.AWAITING_APPROVAL, _ if row is not None or has_changed(execution.config, entry):
            return _request_decision_again(execution, entry, row, now)
        case Phase.PAUSED, None:
            end = _resolve_wait(entry, arrived)
            if end is not None and entry.has_task:  # the server asks in vain
                await end_child_run(execution.journal, execution.config.find_tool(entry.call.name), entry)
            return end
    return None


async def _find_allowance(execution: Execution, entry: OpenCall) -> Allowance | None:
    """Return the allowance that answers a new question about a call. Those that a plan raises are always asked."""
    run, tool = execution.journal.run, execution.config.find_tool(entry.call.name)
    if entry.phase is not Phase.INTENDED or tool is None or tool.waits_for is not None:
        return None
    if entry.call.name == PLAN_TOOL or is_outside_plan(run) or differs_from_plan(run, tool, entry.call):
        return None
    found = await find_allowance(execution, entry, partial(digest_call, execution.config, tool))
    return found if found is not None and is_asked_only_by(execution, tool, entry, found.asked_by) else None


_SETTLED_PHASES: Final = frozenset({Phase.OUTCOME_UNKNOWN, Phase.PAUSED})


async def _settle(execution: Execution, entry: OpenCall, decision: Settle) -> e.ToolFinished:
    """Return the result that a person has recorded. The child run of the call, if it has one, is ended first."""
    tool = execution.config.find_tool(entry.call.name)
    ended = await end_child_run(execution.journal, tool, entry)
    content, is_value = decision.content, execution.journal.run.reply is None and decision.outcome is Outcome.DONE
    if ended is not None and not is_value:  # the result of a step is read by others, as it is
        content = f"{content}\n{ended.content}".lstrip()
    result = build_settled_result(execution, entry, decision.outcome, content)
    if ended is not None:
        result = attrs.evolve(result, child=ended.child, labels=join_labels(result.labels, ended.labels))
    return e.ToolFinished(result=result, by=decision.by)


def _request_decision(execution: Execution, entry: OpenCall, now: float) -> e.Event | None:
    """Return the items that a call waits for before it counts; None if there are none, or it will be refused."""
    call = entry.call
    tool = None if call.invented else execution.config.find_tool(call.name)
    run = execution.journal.run
    if tool is None:
        return None
    must_ask = is_outside_plan(run) or needs_approval_by_guard(entry) or differs_from_plan(run, tool, call)
    if not (tool.is_interactive or must_ask):
        return None
    arguments = _bind_if_runnable(execution, tool, call)
    if arguments is None:
        return None
    if tool.waits_for is not None and not needs_approval_by_guard(entry):
        return _begin_wait(execution.journal.run, tool, call, arguments, now)
    asks = must_ask or needs_approval(tool, arguments)
    return _build_approval_request(execution.config, tool, entry, arguments, now) if asks else None


def is_missing_step(execution: Execution, entry: OpenCall) -> bool:
    """Return whether this is a step of a plan that has not started, and whose tool is not in this program."""
    run, name = execution.journal.run, entry.call.name
    if run.reply is not None or entry.attempts:
        return False
    return execution.config.find_tool(name) is None and find_engine_tool(execution, name) is None


def _begin_wait(
    run: Run, tool: Tool[..., Any], call: ToolCall, arguments: Arguments, now: float
) -> e.ToolPaused | None:
    """Return the event for a call whose result comes from outside; None for any other call."""
    if tool.waits_for is None:
        return None
    waits = Pending(
        kind=tool.waits_for,
        run_id=run.id,
        call_id=call.id,
        tool=call.name,
        arguments=vars(arguments),
        description=describe_call(tool, arguments),
        expires_at=now + answer_lifetime_s(tool, arguments),
    )
    return e.ToolPaused(call_id=call.id, pending=(waits,))


def _begin_approved_wait(execution: Execution, entry: OpenCall, row: PostedItem, now: float) -> list[e.Event]:
    """Return the events for an approved call whose result comes from outside; none for any other call."""
    run, tool = execution.journal.run, execution.config.find_tool(entry.call.name)
    if tool is None or tool.waits_for is None or not isinstance(row.item, Approve):
        return []
    call = edit_call(run, entry.call, row.item)
    wait = (
        None
        if (found := _bind_if_runnable(execution, tool, call)) is None
        else _begin_wait(run, tool, call, found, now)
    )
    return [] if wait is None else [build_approval(execution, entry, row.item), wait]


def edit_call(run: Run, call: ToolCall, decision: InboxItem | Allowance) -> ToolCall:
    """Return a call as approved, with the arguments as edited by a person."""
    edited = decision.arguments if isinstance(decision, Approve) else None
    return call if edited is None else replace_arguments(run.header, call, edited)


def build_approval(execution: Execution, entry: OpenCall, decision: Approve | Rerun | Allowance) -> e.ApprovalGiven:
    """Return the event by which a call spends a person's approval."""
    call = edit_call(execution.journal.run, entry.call, decision)
    tool = execution.config.find_tool(call.name)
    digest = "" if tool is None else digest_call(execution.config, tool, call, entry.guarded)
    allowance = decision.name if isinstance(decision, Allowance) else ""
    fact = e.ApprovalGiven(call_id=call.id, by=decision.by, digest=digest, allowance=allowance)
    if not isinstance(decision, Approve) or decision.arguments is None:
        return fact
    return attrs.evolve(fact, arguments=call.arguments, key=call.key)


def digest_call(config: EngineConfig, tool: Tool[..., Any], call: ToolCall, guarded: e.Guarded | None) -> str:
    """Return the hash of all that an approval of a call covers.

    That is the tool, the arguments, the tool's description of this call, its cost, the reason of a guard that asks, and
    the tools of a plan.
    """
    own = tool.digest_call(call)
    shown: dict[str, JSON] = {**digest_plan_tools(config, call)}
    if not shown and (said := _describe_and_price(tool, call)) is not None:
        shown["call"] = said
    if guarded is not None and guarded.verdict is GuardVerdict.ASK:
        shown["guard"] = [guarded.rule, guarded.reason]
    return short_hash(f"{own}\n{json.dumps(shown, sort_keys=True)}", DIGEST_CHARS) if shown else own


def digest_plan_tools(config: EngineConfig, call: ToolCall) -> dict[str, str]:
    """Return the digests of the tools that the steps of a plan use, by name; empty for any other call.

    A step whose arguments are known already has an entry of its own, for its description and its cost.
    """
    digests: dict[str, str] = {}
    for step in list_plan_calls(call):
        if (tool := config.registry.get(step.name)) is None:
            continue
        digests[tool.name] = _digest_shown(tool)
        if (said := _describe_and_price(tool, step)) is not None:
            digests[_name_step(step)] = short_hash(json.dumps(said), DIGEST_CHARS)
    return digests


def _digest_shown(tool: Tool[..., Any]) -> str:
    """Return the digest of a tool, with whether it describes its calls, and its price if all calls have the same."""
    price = "varies" if callable(tool.cost_usd) else tool.cost_usd
    if tool.describe is None and price is None:
        return tool.digest
    return short_hash(f"{tool.digest}\n{tool.describe is not None} {price}", DIGEST_CHARS)


def _name_step(call: ToolCall) -> str:
    return f"{call.name}({short_hash(call.canonical, DIGEST_CHARS)})"  # no tool has such a name


def _describe_and_price(tool: Tool[..., Any], call: ToolCall) -> JSON:
    """Return a tool's description of a call, and the cost in US dollars; None if it has neither, or cannot run."""
    if (tool.describe is None and tool.cost_usd is None) or call.malformed is not None:
        return None
    try:
        arguments = tool.to_namespace(tool.bind(call.arguments))
    except ArgumentsError:
        return None
    return [describe_call(tool, arguments), None if tool.cost_usd is None else calculate_call_cost(tool, arguments)]


def differs_from_plan(run: Run, tool: Tool[..., Any], call: ToolCall) -> bool:
    """Return whether a tool, its description of this call or its cost has changed since a person approved the plan."""
    plan = run.plan
    if plan is None or run.reply is not None or not plan.is_approved:
        return False
    now = _digest_shown(tool)
    if plan.approved_tools.get(tool.name, now) != now:
        return True
    shown = plan.approved_tools.get(_name_step(call))
    return shown is not None and shown != short_hash(json.dumps(_describe_and_price(tool, call)), DIGEST_CHARS)


def is_outside_plan(run: Run) -> bool:
    """Return whether the open calls are outside a plan that a person has approved, so that each needs an approval."""
    return run.plan is not None and run.plan.guards_calls and run.reply is not None


def _build_approval_request(
    config: EngineConfig, tool: Tool[..., Any], entry: OpenCall, arguments: Arguments, now: float
) -> e.ApprovalAsked:
    return e.ApprovalAsked(
        call_id=entry.call.id,
        expires_at=now + tool.approval_expires_s,
        description=describe_call(tool, arguments),
        digest=digest_call(config, tool, entry.call, entry.guarded),
        tools=digest_plan_tools(config, entry.call),
    )


def _request_decision_again(execution: Execution, entry: OpenCall, row: PostedItem | None, now: float) -> e.Event:
    """Return the event for a call about which a person would be shown something else than when asked."""
    call, tool = entry.call, execution.config.find_tool(entry.call.name)
    arguments = None if tool is None else _bind_if_runnable(execution, tool, call)
    if tool is not None and arguments is not None:
        by = f" by {row.item.by}" if row is not None and isinstance(row.item, Approve) and row.item.by else ""
        error = "" if row is None else f"not run as approved{by}: {_OTHER_NOW}"
        asked = _build_approval_request(execution.config, tool, entry, arguments, now)
        return attrs.evolve(asked, error=replace_surrogates(error))
    content = "not run: the tool has changed since a person was asked about this call. Call it again, as it is now."
    return e.ToolFinished(result=build_decided_result(entry, Outcome.SKIPPED, content))


def _ask_again(execution: Execution, entry: OpenCall, row: PostedItem, now: float) -> e.ApprovalAsked | None:
    """Return the repeated question if edited arguments cannot be used, or another person has to approve them.

    None if the call may run. The arguments may have been edited without the agent at hand, so that they were not
    validated. A guard may refuse them, which no approval changes.
    """
    decision, tool = row.item, execution.config.find_tool(entry.call.name)
    if not isinstance(decision, Approve) or decision.arguments is None or (tool is None and not decision.edit_only):
        return None
    call = edit_call(execution.journal.run, entry.call, decision)
    flaw = "this program has no such tool" if tool is None else _find_flaw_of_edit(execution, tool, call)
    if flaw is None and not decision.edit_only:
        return None
    asked = e.ApprovalAsked(
        call_id=entry.call.id,
        # Later than the last deadline, even if the clock has not advanced: the deadline distinguishes the two
        # questions.
        expires_at=max(
            now + (tool.approval_expires_s if tool is not None else 0.0), nextafter(entry.expires_at or 0.0, inf)
        ),
        description=entry.description,
        digest=entry.digest,
    )
    by = f" by {decision.by}" if decision.by else ""
    if tool is None or flaw is not None:
        if tool is not None and not entry.digest:  # a question of format 1 has none
            asked = attrs.evolve(asked, digest=digest_call(execution.config, tool, entry.call, entry.guarded))
        text = f"not run as {'edited' if decision.edit_only else 'approved'}{by}: {flaw}"
        return attrs.evolve(asked, error=replace_surrogates(text[:DESCRIPTION_CHARS]))
    return attrs.evolve(
        asked,
        description=describe_call(tool, tool.to_namespace(tool.bind_and_check(call.arguments))),
        digest=digest_call(execution.config, tool, call, entry.guarded),
        tools=digest_plan_tools(execution.config, call),
        error=replace_surrogates(f"the arguments were edited{by}: another person has to approve the call"),
        by=decision.by,
        arguments=call.arguments,
        key=call.key,
    )


def _find_flaw_of_edit(execution: Execution, tool: Tool[..., Any], call: ToolCall) -> str | None:
    """Return the reason why a call cannot run with edited arguments; None if it can."""
    try:
        tool.bind_and_check(call.arguments)
    except ArgumentsError as error:
        return str(error)
    if tool.name not in find_guarded_tools(execution.config):
        return None
    decided = decide_call(execution, call)
    return decided.reason if decided is not None and decided.verdict is GuardVerdict.REFUSE else None


def _bind_if_runnable(execution: Execution, tool: Tool[..., Any], call: ToolCall) -> Arguments | None:
    """Return the arguments of a call that could run; None if it will be refused even when approved."""
    if call.malformed is not None or check_available(execution, tool) is not None:
        return None
    try:
        bound = tool.bind_and_check(call.arguments)
    except ArgumentsError:
        return None
    return None if check_permitted(execution, tool, bound) is not None else tool.to_namespace(bound)


def has_changed(config: EngineConfig, entry: OpenCall) -> bool:
    """Return whether a person would be shown something else about the call than when asked."""
    tool = config.find_tool(entry.call.name)
    return (
        bool(entry.digest) and tool is not None and digest_call(config, tool, entry.call, entry.guarded) != entry.digest
    )


def needs_approval(tool: Tool[..., Any], arguments: Arguments) -> bool:
    """Return whether a call with these arguments needs an approval."""
    if isinstance(tool.requires_approval, bool):
        return tool.requires_approval
    try:
        return bool(tool.requires_approval(arguments))
    except Exception as error:  # noqa: BLE001  a failing check does not waive the approval
        callback_errors.log_callback_error("requires_approval", tool.name, "a person is asked", error)
        return True


def describe_call(tool: Tool[..., Any], arguments: Arguments) -> str:
    """Return the tool's description of a call for the approver, or an empty text."""
    if tool.describe is None:
        return ""
    try:
        return replace_surrogates(str(tool.describe(arguments))[:DESCRIPTION_CHARS])
    except (Exception, SystemExit) as error:  # noqa: BLE001  the person still sees the tool and its arguments
        callback_errors.log_callback_error("describe", tool.name, "only the arguments are shown", error)
        return f"(its description failed: {result_text.describe_error(error)})"


def _build_rejection(entry: OpenCall, why: str) -> ToolResult:
    return build_decided_result(entry, Outcome.REJECTED, f"{why} {NOT_UNASKED}")


# Calls whose result comes from outside.


def build_pending_question(
    run: Run,
    tool: Tool[..., Any],
    call: ToolCall,
    questions: tuple[Question, ...],
    *,
    kind: PendingKind = PendingKind.QUESTION,
    rounds: int,
    now: float,
) -> Pending:
    """Return the items that a call waits for after its tool has asked a person.

    Args:
        run: The run of the call.
        tool: The tool that asks.
        call: The call in which it asks.
        questions: The questions.
        kind: QUESTION or LOGIN.
        rounds: The number of times it has asked before.
        now: The Unix time in seconds by the store's clock.
    """
    arguments = tool.to_namespace(tool.bind(call.arguments))
    asked = [rounds, *map(attrs.asdict, questions)]
    return Pending(
        kind=kind,
        run_id=run.id,
        call_id=call.id,
        tool=call.name,
        arguments=parse_arguments(call),
        description="\n".join([each.message for each in questions])[:DESCRIPTION_CHARS],
        expires_at=now + answer_lifetime_s(tool, arguments),
        digest=short_hash(json.dumps(asked, sort_keys=True), DIGEST_CHARS),
        questions=questions,
    )


def answer_lifetime_s(tool: Tool[..., Any], arguments: Arguments) -> float:
    """Return the seconds for which an answer to a tool's question is accepted."""
    if not callable(tool.answer_expires_s):
        return tool.answer_expires_s
    try:
        seconds = float(tool.answer_expires_s(arguments))
    except Exception as error:  # noqa: BLE001  the default applies
        callback_errors.log_callback_error(
            "answer_expires_s", tool.name, f"an answer counts for {ANSWER_EXPIRES_S:g} s", error
        )
        return ANSWER_EXPIRES_S
    return seconds if 0 <= seconds < inf else ANSWER_EXPIRES_S


def _resolve_wait(entry: OpenCall, arrived: _InboxSnapshot) -> e.ToolFinished | None:
    """Return the result of a call that waits for an answer or for input, if that has come or its time is up."""
    [item] = entry.pending
    if item.kind is PendingKind.TASK:
        return None
    is_late = item.expires_at is not None and arrived.now >= item.expires_at
    if item.kind is PendingKind.INPUT and (arrived.has_input or is_late):
        content = "Something has come in; it follows." if arrived.has_input else "The time is up; nothing has come in."
        return e.ToolFinished(result=build_decided_result(entry, Outcome.DONE, content))
    if not is_late:
        return None
    content = "Nobody answered in time. Go on without, and say what you assumed; do not ask the same again."
    if entry.attempts:
        content += " The call had begun before it asked: what it did then may have happened, so check before repeating."
    return e.ToolFinished(result=build_decided_result(entry, Outcome.TIMED_OUT, content))
