"""Decisions on the calls of a run: posted to the run's inbox, and applied by the worker that executes the run.

The first decision on a call counts. The same decision by the same person is accepted again. Any other decision is
refused, and the error names the person who decided first.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from inspect import isawaitable
from typing import TYPE_CHECKING, Any, Final

import attrs

from agentfsm.agents.validation import as_text, to_plain_json
from agentfsm.core.calls import Phase
from agentfsm.core.errors import (
    ArgumentsError,
    ConflictError,
    FourEyesError,
    MisuseError,
    PartlyDoneError,
    RunNotFoundError,
    StoreError,
    TooNewError,
)
from agentfsm.core.events import GuardVerdict
from agentfsm.core.inbox import Approve, Decision, GiveInput, Reject, Rerun, Settle, Wake
from agentfsm.core.json_text import round_timestamp
from agentfsm.core.messages import Outcome, replace_surrogates
from agentfsm.core.pending import Answer, Elicit, Pending, PendingKind
from agentfsm.core.plans import PLAN_TOOL, Plan
from agentfsm.core.run import Run
from agentfsm.engine.deciders.plan_tools import find_tool_flaws
from agentfsm.engine.execution.allowances import (
    ALLOWANCES,
    LIFETIME_S,
    MAX_ALLOWANCES,
    MAX_RULE_CHARS,
    Allowance,
    build_key,
    build_prefix,
    build_record,
    find_root,
    format_rule,
    read_allowance,
)
from agentfsm.journal.audit import audit_run_tree, build_audit
from agentfsm.journal.influence import check_four_eyes, check_not_approved
from agentfsm.journal.load import load_run, read_header
from agentfsm.journal.run_list import RunIterator
from agentfsm.ports.store import Filter
from agentfsm.stores.rules import decided_already_error
from agentfsm.tools.attendance import Attendant
from agentfsm.tools.callback_errors import log_callback_error
from agentfsm.tools.question_validation import validate_answer

if TYPE_CHECKING:
    from agentfsm.core.header import Header
    from agentfsm.ports.store import Store
    from agentfsm.tools.registry import ToolRegistry
    from agentfsm.tools.tool import Tool

# Instruction to a person for each kind of wait.
HOW_TO_RESOLVE: Final = {
    PendingKind.APPROVAL: "approve or reject it",
    PendingKind.OUTCOME: "settle it",
    PendingKind.QUESTION: "answer it",
    PendingKind.LOGIN: "log in",
    PendingKind.TASK: "it goes on by itself",
    PendingKind.INPUT: "send the run input",
    PendingKind.PAUSE: "resume the run",
    PendingKind.CRASH: "find out why its workers died, then resume the run",
}


async def find_pending(
    store: Store, run_id: str, call_id: str, kind: PendingKind, *, digest: str | None = None
) -> tuple[Run, Pending]:
    """Return the run, and its wait for a decision of this kind on a call.

    Args:
        store: Store of the run.
        run_id: Id of the run.
        call_id: Id of the call.
        kind: Kind of the wait.
        digest: `Pending.digest` of the call or question that the person saw; None skips the check.

    Raises:
        RunNotFoundError: when the store has no such run.
        ConflictError: when the call was decided already, or the digest differs.
        MisuseError: when the run does not wait for this decision.
    """
    run = await load_run(store, run_id)
    return run, await _find_pending_in(store, run, call_id, kind, digest)


async def find_question(store: Store, run_id: str, call_id: str, *, digest: str | None) -> tuple[Run, Pending]:
    """Return the run, and its wait for an answer or a login; raises as `find_pending`."""
    run = await load_run(store, run_id)
    waits = {(item.run_id, item.call_id): item.kind for item in run.pending}
    is_login = waits.get((run_id, call_id)) is PendingKind.LOGIN
    return run, await _find_pending_in(
        store, run, call_id, PendingKind.LOGIN if is_login else PendingKind.QUESTION, digest
    )


async def _find_pending_in(store: Store, run: Run, call_id: str, kind: PendingKind, digest: str | None) -> Pending:
    run_id = run.id
    if call_id == "plan":
        call_id = next((item.call_id for item in run.pending if item.tool == PLAN_TOOL), call_id)
    for item in run.pending:
        if (item.run_id, item.call_id, item.kind) == (run_id, call_id, kind):
            if digest not in (None, item.digest):
                done = "approved" if kind is PendingKind.APPROVAL else "answered"
                raise ConflictError(f"{call_id} was not {done}: it has changed since it was shown, look at it again")
            return item
    gone = (Phase.APPROVED, Phase.RUNNING, Phase.FINISHED)
    phases = {entry.call.id: entry.phase for entry in run.open if entry.phase in gone}
    if run.paused is None and call_id in phases.keys() | {record.call_id for record in run.calls}:
        why = _explain_gone_wait(await _find_decider(store, run_id, call_id, kind), phases.get(call_id))
        raise ConflictError(f"run {run_id!r} does not wait for the {kind} of {call_id} any more: {why}")
    waits = ", ".join(_format_wait(item, run_id) for item in run.pending) or "nothing"
    state = run.state.upper()
    raise MisuseError(f"run {run_id!r} ({state}) does not wait for the {kind} of {call_id!r}; it waits for: {waits}")


def _explain_gone_wait(decided_by: str | None, phase: Phase | None) -> str:
    """Return the reason why a call cannot be decided on now; `phase` is None if its turn is over."""
    if decided_by is not None:
        return f"it was decided already{f' by {decided_by}' if decided_by else ''}"
    if phase is Phase.RUNNING:
        return (
            "a worker executes it; wait for its result, or cancel the run; if that worker died, repeat this once its "
            "lease has ended, or resume the run"
        )
    return "it has a result already"


# Descriptions of the waits of a run itself, in contrast to those of its calls.
_RUN_WAITS = {
    PendingKind.PAUSE: "the end of its pause",
    PendingKind.CRASH: "the end of its pause after crashes",
    PendingKind.INPUT: "input",
}


def _format_wait(item: Pending, run_id: str) -> str:
    wait = f"{item.kind} of {item.call_id}" if item.call_id else _RUN_WAITS[item.kind]
    return f"{wait}{'' if item.run_id == run_id else f' in run {item.run_id}'} ({HOW_TO_RESOLVE[item.kind]})"


async def _find_decider(store: Store, run_id: str, call_id: str, kind: PendingKind) -> str | None:
    """Return the name of the person who made this decision on a call, "" if not given; None without a decision."""
    stored = await store.read(run_id)
    [record] = [each for each in build_audit(stored.header, stored.events) if each.call_id == call_id]
    if record.decision:
        return record.decided_by
    if kind is PendingKind.APPROVAL:
        return record.approved_by
    given = record.rerun_by if kind is PendingKind.OUTCOME else record.informed_by
    return given[-1] if given else None


async def post_decision(store: Store, run: Run, item: Pending, decision: Decision) -> None:
    """Post a decision, and wake the callers of the run.

    Raises:
        ConflictError: when another person decided first, even the same, or the time is up.
    """
    posted = await store.post(run.id, _build_key(run, item), decision, before=item.expires_at)
    await wake_callers(store, run.id, run.header.parent, posted.key)
    if isinstance(posted.item, Decision) and posted.item.by != decision.by:
        raise decided_already_error(run.id, posted)


async def post_decisions(store: Store, decisions: Sequence[tuple[Pending, Approve | Reject]]) -> None:
    """Post decisions on several calls. Nothing is posted unless each call waits as it was shown.

    Args:
        store: Store of the runs.
        decisions: The calls as they were shown, in any runs, and the decision on each.

    Raises:
        MisuseError: when a run does not wait for one of the decisions; nothing is posted.
        ConflictError: when one call was decided already, or has changed since it was shown; nothing is posted.
        PartlyDoneError: when another decision came first, or the store failed, after some were posted.
    """
    runs: dict[str, Run] = {}
    calls = [(item.run_id, item.call_id) for item, _ in decisions]
    if twice := next((call_id for run_id, call_id in calls if calls.count((run_id, call_id)) > 1), None):
        raise MisuseError(f"{twice} is given twice: a call is either approved or rejected")
    waits: list[Pending] = []
    for item, _ in decisions:
        if (run := runs.get(item.run_id)) is None:
            run = runs[item.run_id] = await load_run(store, item.run_id)
        waits.append(await _find_pending_in(store, run, item.call_id, PendingKind.APPROVAL, item.digest))
    for index, (item, (_, decision)) in enumerate(zip(waits, decisions, strict=True)):
        try:
            await post_decision(store, runs[item.run_id], item, decision)
        except StoreError as error:
            count = index + isinstance(error, PartlyDoneError)  # its own post is in the inbox
            if not count:
                raise
            names = [each.call_id for each in waits]
            done, left = ", ".join(names[:count]), ", ".join(names[count:]) or "no other"
            raise PartlyDoneError(
                f"the decisions on {done} are recorded, those on {left} are not: {error}; load the run again, and "
                "decide on the calls that still wait"
            ) from error


def build_approval(item: Pending, arguments: Mapping[str, Any] | None, *, by: str) -> Approve:
    """Build the approval of a call.

    Args:
        item: The wait for the approval.
        arguments: Arguments that replace the model's; None to keep those.
        by: Name of the person who approves.

    Raises:
        MisuseError: when the arguments are not JSON.
    """
    edited = None if arguments is None else json.dumps(to_plain_json(arguments, "arguments"), ensure_ascii=False)
    return Approve(call_id=item.call_id, by=by, arguments=edited, digest=item.digest)


def build_allowance(
    run: Run, root: Header, item: Pending, names: Sequence[str], arguments: Mapping[str, Any] | None, *, by: str
) -> Allowance:
    """Build the allowance that is given with the approval of a call, without its times.

    Args:
        run: The run of the call.
        root: Header of the run at the top of its callers.
        item: The wait for the approval.
        names: Arguments whose values have to be equal in the calls that it covers.
        arguments: Arguments that replace the model's; None for those of the item.
        by: Name of the person who approves.

    Raises:
        MisuseError: as `describe_allowance`, or when the rule is too long to be read.
    """
    rule = describe_allowance(item, names, arguments).partition("\n")[0]
    if len(rule) > MAX_RULE_CHARS:
        raise MisuseError(
            f"allow={list(names)}: the rule has {len(rule):,} characters, more than the {MAX_RULE_CHARS:,} "
            "that a person can read: name an argument with a shorter value, or approve each call"
        )
    given = item.arguments if arguments is None else to_plain_json(arguments, "arguments")
    entry = run.open_call(item.call_id)
    asked = entry.guarded if entry.guarded is not None and entry.guarded.verdict is GuardVerdict.ASK else None
    return Allowance(
        id=f"{run.id}/{item.call_id}",
        tool=item.tool,
        arguments={name: given[name] for name in names},
        asked_by="" if asked is None else asked.rule,
        reason="" if asked is None else asked.reason,
        agent=run.header.agent,
        session=root.session,
        by=by,
        shown=entry.call.arguments,
        digest=item.digest,
        nonce=run.header.nonce,
    )


def describe_allowance(item: Pending, names: Sequence[str], arguments: Mapping[str, Any] | None = None) -> str:
    """Return the rule of an allowance on its first line, and below it the calls that it covers, for the person.

    Args:
        item: The wait for the approval with which it is given.
        names: Arguments whose values have to be equal, one or more.
        arguments: Arguments that replace those of the item, if the person has edited them.

    Raises:
        MisuseError: when an argument is not one of the call, none is named, or the call is a plan.
    """
    given = item.arguments if arguments is None else arguments
    if item.tool == PLAN_TOOL or not item.digest:
        raise MisuseError(f"allow= covers calls of a tool, and {item.call_id} is not such a call: approve it by itself")
    if isinstance(names, str) or not names or any(name not in given for name in names):
        known = ", ".join(given) or "none, so that each call has to be approved"
        raise MisuseError(f"allow={names!r}: name one or more arguments of {item.call_id}, which has: {known}")
    others = ", ".join([name for name in given if name not in names])
    whatever = f", whatever its other arguments ({others})," if others else ""
    asked = "the rule that asked about this one, and of the tool itself" if item.reason else "the tool itself"
    return (
        f"{format_rule(item.tool, {name: given[name] for name in names})}\n"
        f"Each later call of {item.tool} with {'these values' if len(names) > 1 else 'this value'}{whatever} runs "
        f"without a question of {asked}: in this session, or in this run if it has no session, for "
        f"{LIFETIME_S / 86_400:g} days, until it is revoked or the tool changes. Other rules still ask, and a call "
        "that is refused does not run."
    )


async def write_allowance(store: Store, root: Header, allowance: Allowance) -> None:
    """Record an allowance; the same one again changes nothing.

    Raises:
        ConflictError: when the call has another one, or it was revoked.
    """
    now, key = await store.now(), build_key(root, allowance.id)
    known = await store.read_record(ALLOWANCES, key)
    if known is None:
        made = attrs.evolve(allowance, at=round_timestamp(now), expires_at=round_timestamp(now + LIFETIME_S))
        await store.write_record(ALLOWANCES, key, build_record(made), revision=0, expires_at=made.expires_at)
    elif (found := read_allowance(known)) is None or found.name != allowance.name or found.revoked_by is not None:
        raise ConflictError(f"{allowance.id} has an allowance already: list the allowances of the run")


async def revoke_allowance(store: Store, allowance_id: str, *, by: str) -> Allowance:
    """End an allowance, and return it. The first person who revokes it is recorded.

    Raises:
        RunNotFoundError: when its run was deleted, so that it has ended.
        MisuseError: when there is none with the id.
    """
    root = await find_root(store, await read_header(store, allowance_id.rpartition("/")[0]))
    key = build_key(root, allowance_id)
    while (record := await store.read_record(ALLOWANCES, key)) is not None:
        if (found := read_allowance(record)) is None:
            raise TooNewError(f"the allowance {allowance_id} was written by a newer agentfsm: revoke it with that one")
        if found.revoked_by is not None:
            return found
        revoked = build_record(attrs.evolve(found, revoked_by=by))
        try:
            await store.write_record(ALLOWANCES, key, revoked, revision=record.revision, expires_at=record.expires_at)
        except ConflictError:  # revoked by another person at the same moment
            continue
    raise MisuseError(f"there is no allowance {allowance_id!r}, or it has ended: list the allowances of the run")


async def end_allowances(store: Store, header: Header) -> None:
    """Revoke the allowances that hold for a run, because four eyes are asked for: each call is decided on by itself."""
    try:
        prefix = build_prefix(await find_root(store, header))
        records = await store.list_records(ALLOWANCES, prefix=prefix, limit=MAX_ALLOWANCES)
    except MisuseError:  # the store keeps no records, so there are none
        return
    for each in map(read_allowance, records):
        if each is not None and each.revoked_by is None:
            with suppress(MisuseError, RunNotFoundError):  # it has ended by itself
                await revoke_allowance(store, each.id, by="four eyes")


async def list_allowances(store: Store, run_id: str) -> tuple[Allowance, ...]:
    """Return the allowances of a run and its session, revoked ones included, oldest first, with their uses.

    Raises:
        RunNotFoundError: when the store has no such run.
    """
    root = await find_root(store, await read_header(store, run_id))
    records = await store.list_records(ALLOWANCES, prefix=build_prefix(root), limit=MAX_ALLOWANCES)
    found = sorted([each for each in map(read_allowance, records) if each is not None], key=lambda each: each.at)
    if not found:
        return ()
    runs = [root.id]
    if root.session is not None:
        where = Filter(session=root.session, user=root.user, tenant=root.tenant)
        runs = [line.id async for line in RunIterator(store, where) if line.parent is None]
    used = Counter([record.allowance for each in runs for record in await audit_run_tree(store, each)])
    return tuple([attrs.evolve(each, used=used[each.name]) for each in found])


async def apply_four_eyes(store: Store, item: Pending, approval: Approve, *, allow: Sequence[str] = ()) -> Approve:
    """Return an approval as four eyes allow it: one that edits the arguments only edits them, for a second approver.

    Raises:
        FourEyesError: when the person has shaped the call that he approves as it is, gives no name, allows later calls,
            which he could shape, or edits a call below one that he has approved.
    """
    if allow:
        raise FourEyesError("with four eyes each call is decided on by itself: approve it without allow=")
    if approval.arguments is not None and json.loads(approval.arguments) != item.arguments and approval.by:
        await check_not_approved(store, item.run_id, item.call_id, approval.by)
        return attrs.evolve(approval, edit_only=True)
    await check_four_eyes(store, item.run_id, item.call_id, approval.by)
    return attrs.evolve(approval, arguments=None)


def read_edited_plan(item: Pending, plan: Plan, arguments: object, tools: ToolRegistry) -> dict[str, Any]:
    """Return an edited plan as the arguments of the call that carries it out.

    The tools of its steps are checked if there are any at hand.

    Raises:
        MisuseError: when the call is not a plan, or arguments are given as well.
    """
    if item.tool != PLAN_TOOL or arguments is not None:
        raise MisuseError(f"plan= replaces the plan that waits, and {item.call_id} calls {item.tool}: give arguments=")
    if not isinstance(plan, Plan):
        raise MisuseError(f"plan= must be a Plan, not {type(plan).__name__}: Plan.from_json reads one")
    flaws = plan.find_flaws(range(1, plan.steps[0].id)) if plan.steps else ["it has no steps"]
    if flaws := [*flaws, *(find_tool_flaws(plan, tools) if len(tools) else ())]:
        raise MisuseError(f"the plan was not approved: {'; '.join(flaws)}")
    return plan.to_json()


def check_edited_arguments(approval: Approve, tool: Tool[..., Any] | None) -> None:
    """Validate the edited arguments of an approval, if there are any and the tool is known.

    Raises:
        MisuseError: when the arguments do not fit the tool.
    """
    if approval.arguments is None or tool is None:
        return
    try:
        tool.bind_and_check(approval.arguments)
    except ArgumentsError as error:
        raise MisuseError(f"{approval.call_id} was not approved: {error}") from None


def build_settlement(call_id: str, result: str | None, failed: str | None, *, rerun: bool, by: str) -> Settle | Rerun:
    """Build the decision on a call whose outcome is unknown: a result, a failure or a rerun.

    Raises:
        MisuseError: when not exactly one of the three is given, or a text is not a string.
    """
    if (result is not None) + (failed is not None) + bool(rerun) != 1:
        raise MisuseError("settle takes exactly one of result='...', failed='...' and rerun=True")
    if rerun:
        return Rerun(call_id=call_id, by=by)
    if failed is not None:
        return Settle(call_id=call_id, by=by, outcome=Outcome.FAILED, content=as_text(failed, "failed"))
    return Settle(call_id=call_id, by=by, outcome=Outcome.DONE, content=as_text(result, "result"))


def build_answer(item: Pending, content: Any, *, failed: bool, declined: bool, by: str) -> Settle | GiveInput:
    """Build the result of a call that comes from outside, or the answer to the questions of a tool.

    Args:
        item: The wait for the answer.
        content: The text of the result; or the answer to the tool, as for `build_input`.
        failed: Whether the result is an error.
        declined: Whether the person declines to answer the tool.
        by: Name of the person who answers.

    Raises:
        MisuseError: when the answer does not fit the wait.
    """
    if item.questions:
        if failed:
            raise MisuseError(
                f"failed=True does not answer the question that the tool of {item.call_id} asks: give content, or "
                "declined=True"
            )
        return build_input(item, content, declined=declined, by=by)
    if declined or not isinstance(content, str):
        raise MisuseError(f"the result of {item.call_id} must be a string: give content, with failed=True for an error")
    outcome = Outcome.FAILED if failed else Outcome.DONE
    return Settle(call_id=item.call_id, by=by, outcome=outcome, content=replace_surrogates(content))


def build_input(item: Pending, content: Any, *, declined: bool, by: str) -> GiveInput:
    """Build the answer to the questions that a tool asked during its call.

    Args:
        item: The wait for the answer.
        content: The answer to a single question; or a dict of answers by question key, where None declines a question.
        declined: Whether the person declines all questions.
        by: Name of the person who answers.

    Raises:
        MisuseError: when the answer does not fit the questions.
    """
    keys = [question.key for question in item.questions]
    if declined and content is not None:
        raise MisuseError(f"{item.call_id} cannot be both declined and answered: give declined=True or content")
    if declined:
        return GiveInput(call_id=item.call_id, by=by, answers=dict.fromkeys(keys), digest=item.digest)
    parts = {keys[0]: content} if len(keys) == 1 else content
    if not isinstance(parts, Mapping) or set(parts) != set(keys):
        names = ", ".join(map(repr, keys))
        raise MisuseError(f"{item.call_id} asks {names}: give a dict with an answer for each key; None declines one")
    answers = {
        each.key: None if len(keys) > 1 and parts[each.key] is None else validate_answer(each, parts[each.key])
        for each in item.questions
    }
    return GiveInput(call_id=item.call_id, by=by, answers=answers, digest=item.digest)


def as_attendant(elicit: Elicit | None) -> Attendant | None:
    """Return a function that asks through an `elicit=` callback of a user, and validates the answer; None for None.

    A callback that fails, or returns what does not fit the questions, is logged and counts as no answer.

    Raises:
        MisuseError: when the callback is not a function.
    """
    if elicit is None:
        return None
    if not callable(elicit):
        raise MisuseError(f"elicit= must be a function that takes a Pending and returns an Answer, not {elicit!r}")

    async def ask(item: Pending) -> GiveInput | None:
        try:
            answer = elicit(item)
            if isawaitable(answer):
                answer = await answer
            return None if answer is None else _build_attended_input(item, answer)
        except Exception as error:  # noqa: BLE001  the tool learns that no answer came
            log_callback_error("elicit", item.tool, "its question counts as not answered", error)
            return None

    return ask


def _build_attended_input(item: Pending, answer: Answer) -> GiveInput:
    if not isinstance(answer, Answer):
        raise MisuseError(f"elicit= must return an Answer, or None for no answer, not {answer!r}")
    by = as_text(answer.by, "by")
    return build_input(item, answer.content, declined=answer.content is None, by=by)


async def wake_callers(
    store: Store,
    run_id: str,
    parent: str | None,
    why: str,
    *,
    again: str = "repeat the call, which posts nothing twice",
) -> None:
    """Wake the callers of a run, all the way up, because the run received a post.

    Args:
        store: Store of the runs.
        run_id: Id of the run that received the post.
        parent: Id of the run's caller; None if it has none.
        why: Key of the post.
        again: Advice for the case that a caller could not be woken.

    Raises:
        PartlyDoneError: if the store fails; the post is in the inbox of the run.
    """
    while parent is not None:
        try:
            await store.post(parent, f"wake:{run_id}:{why}", Wake(run_id=run_id))
            parent = (await read_header(store, parent)).parent
        except (RunNotFoundError, ConflictError):  # the caller was deleted or is over, so it does not wait
            return
        except StoreError as error:
            raise PartlyDoneError(
                f"the post is in the inbox of run {run_id!r}, and its caller {parent!r} was not woken: {error}; {again}"
            ) from error


def _build_key(run: Run, item: Pending) -> str:
    """Build the inbox key of a decision, so that the store accepts one decision per wait."""
    if item.kind is PendingKind.OUTCOME:
        return f"outcome:{item.call_id}:{run.open_call(item.call_id).losses}"
    # The time distinguishes two waits with the same digest: a tool may change and change back.
    return (
        f"{item.kind}:{item.call_id}:{item.digest}:{item.expires_at}" if item.digest else f"{item.kind}:{item.call_id}"
    )
