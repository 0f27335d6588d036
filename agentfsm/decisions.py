"""What anybody may say to a run, from any process: it is posted to the run's inbox, and who drives the run acts on it.

The first decision on a call counts. The same decision by the same person is accepted again; anything else is refused,
and the error says who decided first.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from agentfsm._validation import as_text, to_plain_json
from agentfsm.core.audit_records import build_audit
from agentfsm.core.calls import Phase
from agentfsm.core.errors import ArgumentsError, ConflictError, MisuseError, RunNotFoundError
from agentfsm.core.inbox import Approve, Decision, GiveInput, Rerun, Settle, Wake
from agentfsm.core.messages import Outcome, replace_surrogates
from agentfsm.core.pending import Pending, PendingKind
from agentfsm.core.run import Run
from agentfsm.engine.execution.journal import load_run, read_header
from agentfsm.stores.rules import decided_already_error
from agentfsm.tools.question_validation import validate_answer

if TYPE_CHECKING:
    from agentfsm.ports.store import Store
    from agentfsm.tools.tool import Tool

# What ends each kind of wait.
HOW_TO_RESOLVE: Final = {
    PendingKind.APPROVAL: "approve or reject it",
    PendingKind.OUTCOME: "settle it",
    PendingKind.QUESTION: "answer it",
    PendingKind.INPUT: "send the run something",
    PendingKind.PAUSE: "resume the run",
    PendingKind.CRASH: "see what its workers died of, then resume the run",
}


async def find_pending(
    store: Store, run_id: str, call_id: str, kind: PendingKind, *, digest: str | None = None
) -> tuple[Run, Pending]:
    """Return the run, and what it waits for.

    Args:
        store: Where it lives.
        run_id: The run.
        call_id: The call that is decided on.
        kind: What is decided of it.
        digest: Of what was shown to whoever decides; None: whatever the run asks now.

    Raises:
        RunNotFoundError: when the store holds no such run.
        ConflictError: when it was decided already, or something else is asked than was shown.
        MisuseError: when the run waits for nothing of that kind.
    """
    run = await load_run(store, run_id)
    for item in run.pending:
        if (item.run_id, item.call_id, item.kind) == (run_id, call_id, kind):
            if digest not in (None, item.digest):
                done = "approved" if kind is PendingKind.APPROVAL else "answered"
                raise ConflictError(f"{call_id} was not {done}: it is not what was shown, look at it again")
            return run, item
    gone = (Phase.APPROVED, Phase.RUNNING, Phase.FINISHED)
    phases = {entry.call.id: entry.phase for entry in run.open if entry.phase in gone}
    if run.paused is None and call_id in phases.keys() | {record.call_id for record in run.calls}:
        why = _explain_gone_wait(await _find_decider(store, run_id, call_id, kind), phases.get(call_id))
        raise ConflictError(f"run {run_id!r} waits for no {kind} of {call_id} any more: {why}")
    waits = ", ".join(_format_wait(item, run_id) for item in run.pending) or "nothing"
    state = run.state.upper()
    raise MisuseError(f"run {run_id!r} ({state}) waits for no {kind} of {call_id!r}; it waits for: {waits}")


def _explain_gone_wait(decided_by: str | None, phase: Phase | None) -> str:
    """Return why a call is not decided on now; `phase` is None where its turn is over."""
    if decided_by is not None:
        return f"it was decided already{f' by {decided_by}' if decided_by else ''}"
    if phase is Phase.RUNNING:
        return "it is running; wait for its result, or cancel the run; if its worker died, resume the run first"
    return "it has a result already"


# What a run itself may wait for, and not one of its calls.
_RUN_WAITS = {
    PendingKind.PAUSE: "the end of its pause",
    PendingKind.CRASH: "the end of its pause after crashes",
    PendingKind.INPUT: "input",
}


def _format_wait(item: Pending, run_id: str) -> str:
    what = f"{item.kind} of {item.call_id}" if item.call_id else _RUN_WAITS[item.kind]
    return f"{what}{'' if item.run_id == run_id else f' in run {item.run_id}'} ({HOW_TO_RESOLVE[item.kind]})"


async def _find_decider(store: Store, run_id: str, call_id: str, kind: PendingKind) -> str | None:
    """Return who has decided this of a call, empty where no name was given; None where no one has."""
    stored = await store.read(run_id)
    [record] = [each for each in build_audit(stored.header, stored.events) if each.call_id == call_id]
    if record.decision:
        return record.decided_by
    if kind is PendingKind.APPROVAL:
        return record.approved_by
    given = record.rerun_by if kind is PendingKind.OUTCOME else record.informed_by
    return given[-1] if given else None


async def post_decision(store: Store, run: Run, item: Pending, decision: Decision) -> None:
    """Post a decision, and wake the runs that wait for the one it is about.

    Raises:
        ConflictError: when another was first, also with the same decision, or the time is up.
    """
    posted = await store.post(run.id, _build_key(run, item), decision, before=item.expires_at)
    await wake_callers(store, run.id, run.header.parent, posted.key)
    if isinstance(posted.item, Decision) and posted.item.by != decision.by:
        raise decided_already_error(run.id, posted)


def build_approval(item: Pending, arguments: Mapping[str, Any] | None, *, by: str) -> Approve:
    """Return the approval of a call.

    Args:
        item: The question.
        arguments: A person's arguments, in place of the model's; None to keep the model's.
        by: Who approves.

    Raises:
        MisuseError: when the arguments are no JSON.
    """
    edited = None if arguments is None else json.dumps(to_plain_json(arguments, "arguments"), ensure_ascii=False)
    return Approve(call_id=item.call_id, by=by, arguments=edited, digest=item.digest)


def check_edited_arguments(approval: Approve, tool: Tool[..., Any] | None) -> None:
    """Validate the edited arguments of an approval, if there are any and the tool is known.

    Raises:
        MisuseError: when they do not fit the tool.
    """
    if approval.arguments is None or tool is None:
        return
    try:
        tool.bind_and_check(approval.arguments)
    except ArgumentsError as error:
        raise MisuseError(f"{approval.call_id} was not approved: {error}") from None


def build_settlement(call_id: str, result: str | None, failed: str | None, *, rerun: bool, by: str) -> Settle | Rerun:
    """Return what became of a call, in exactly one of three words.

    Raises:
        MisuseError: when it is none of them or several, or one is no text.
    """
    if (result is not None) + (failed is not None) + bool(rerun) != 1:
        raise MisuseError("settle takes exactly one of result='...', failed='...' and rerun=True")
    if rerun:
        return Rerun(call_id=call_id, by=by)
    if failed is not None:
        return Settle(call_id=call_id, by=by, outcome=Outcome.FAILED, content=as_text(failed, "failed"))
    return Settle(call_id=call_id, by=by, outcome=Outcome.DONE, content=as_text(result, "result"))


def build_answer(item: Pending, content: Any, *, failed: bool, declined: bool, by: str) -> Settle | GiveInput:
    """Return the result of a call that comes from outside, or the answer to what a tool has asked in its call.

    Args:
        item: What was asked.
        content: The text of the result; or the answer to the tool, as `answered` takes it.
        failed: Whether the result is an error.
        declined: Whether a person does not want to answer the tool.
        by: Who says so.

    Raises:
        MisuseError: when it does not fit what was asked; nothing is posted.
    """
    if item.questions:
        if failed:
            raise MisuseError(f"{item.call_id} asks in the middle of its call: give the content, or declined=True")
        return build_input(item, content, declined=declined, by=by)
    if declined or not isinstance(content, str):
        raise MisuseError(f"the result of {item.call_id} is text: give the content, with failed=True if there is none")
    outcome = Outcome.FAILED if failed else Outcome.DONE
    return Settle(call_id=item.call_id, by=by, outcome=outcome, content=replace_surrogates(content))


def build_input(item: Pending, content: Any, *, declined: bool, by: str) -> GiveInput:
    """Return the answer to what a tool has asked in the middle of its call, if it is one.

    Args:
        item: What was asked.
        content: The answer to the only question, or to several by their keys, where None declines one.
        declined: Whether all of them are declined.
        by: Who says so.

    Raises:
        MisuseError: when it does not fit; it says what is wrong, and nothing is posted.
    """
    keys = [question.key for question in item.questions]
    if declined and content is not None:
        raise MisuseError(f"{item.call_id} is declined or answered: give declined=True or the content, and not both")
    if declined:
        return GiveInput(call_id=item.call_id, by=by, answers=dict.fromkeys(keys), digest=item.digest)
    parts = {keys[0]: content} if len(keys) == 1 else content
    if not isinstance(parts, Mapping) or set(parts) != set(keys):
        names = ", ".join(map(repr, keys))
        raise MisuseError(f"{item.call_id} has asked {names}: answer them all, by key; None declines one")
    answers = {
        each.key: None if len(keys) > 1 and parts[each.key] is None else validate_answer(each, parts[each.key])
        for each in item.questions
    }
    return GiveInput(call_id=item.call_id, by=by, answers=answers, digest=item.digest)


async def wake_callers(store: Store, run_id: str, parent: str | None, why: str) -> None:
    """Wake the runs that wait for one, since something has come to it.

    Args:
        store: Where they live.
        run_id: The run that something has come to.
        parent: The run that calls it, if any.
        why: The key of what has come.
    """
    while parent is not None:
        try:
            await store.post(parent, f"wake:{run_id}:{why}", Wake(run_id=run_id))
            parent = (await read_header(store, parent)).parent
        except (RunNotFoundError, ConflictError):  # it is gone, or over: nobody there waits any more
            return


def _build_key(run: Run, item: Pending) -> str:
    """Return the key under which one decision on this very question can be posted."""
    if item.kind is PendingKind.OUTCOME:
        return f"outcome:{item.call_id}:{run.open_call(item.call_id).losses}"
    # The time tells two questions of one digest apart: a tool may change, and change back.
    return (
        f"{item.kind}:{item.call_id}:{item.digest}:{item.expires_at}" if item.digest else f"{item.kind}:{item.call_id}"
    )
