"""Decisions and control of runs by their callers, with the checks of each, for all protocols."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from agentfsm.agents.admission import admit, admit_answer
from agentfsm.core.inbox import InputKind
from agentfsm.core.pending import Pending, PendingKind
from agentfsm.serve.errors import ForbiddenError

if TYPE_CHECKING:
    from agentfsm.agents.runs import Prompt
    from agentfsm.core.inbox import PostedItem, Priority
    from agentfsm.core.labels import Label
    from agentfsm.core.run_ids import DerivedId
    from agentfsm.serve.access import Caller
    from agentfsm.serve.bodies import ShownCall
    from agentfsm.serve.gateway import Gateway


def check_scope(caller: Caller, scope: str) -> None:
    """Check that a caller has a scope.

    Raises:
        ForbiddenError: when it does not.
    """
    if not caller.allows(scope):
        raise ForbiddenError(f"this needs a key with the scope {scope!r}")


async def approve_call(
    gateway: Gateway,
    caller: Caller,
    run_id: str,
    call_id: str,
    *,
    digest: str,
    shown_run: str | None = None,
    arguments: Mapping[str, Any] | None = None,
    allow: Sequence[str] = (),
) -> None:
    """Approve a call of a run, or of a sub-agent's run that it waits for, as the caller; perhaps with later ones.

    `shown_run` is the `run_id` of the pending item, here and below: calls of several sub-agents may have one id.

    Raises:
        RunNotFoundError: when there is no such run, or the caller may not see it.
        ForbiddenError: when the caller lacks the scope "approve".
        FourEyesError: when four eyes are asked for, and the caller has shaped the call.
        ConflictError: when the call was decided already, its time is up, or the digest differs.
        MisuseError: when the run does not wait for this, or the arguments do not fit.
    """
    header = await gateway.open_run(run_id, caller)
    check_scope(caller, "approve")
    waiting = await gateway.find_waiting_run(header, call_id, shown_run=shown_run, digest=digest)
    runs = await gateway.decide_as(caller, header)
    await runs.approve(waiting, call_id, by=caller.user, arguments=arguments, digest=digest, allow=allow)


async def reject_call(
    gateway: Gateway, caller: Caller, run_id: str, call_id: str, *, shown_run: str | None = None, message: str = ""
) -> None:
    """Reject a call of a run, as the caller.

    Raises:
        RunNotFoundError: as for `approve_call`.
        ForbiddenError: when the caller lacks the scope "approve".
        ConflictError: when the call was decided already, or its time is up.
        MisuseError: when the run does not wait for this.
    """
    header = await gateway.open_run(run_id, caller)
    check_scope(caller, "approve")
    waiting = await gateway.find_waiting_run(header, call_id, shown_run=shown_run)
    text = admit_answer(message, caller.user)
    await (await gateway.decide_as(caller, header)).reject(waiting, call_id, by=caller.user, message=text)


async def decide_calls(
    gateway: Gateway,
    caller: Caller,
    run_id: str,
    *,
    approve: Sequence[ShownCall],
    reject: Sequence[ShownCall],
    message: str = "",
) -> None:
    """Decide on several calls of a run, or of the runs of sub-agents that it waits for, as the caller.

    Raises:
        RunNotFoundError: as for `approve_call`.
        ForbiddenError: as for `approve_call`.
        ConflictError: when one was decided already, its time is up, or its digest differs: nothing is decided.
        MisuseError: when the run does not wait for one of them.
    """
    header = await gateway.open_run(run_id, caller)
    check_scope(caller, "approve")

    async def find(shown: ShownCall) -> Pending:
        waiting = await gateway.find_waiting_run(header, shown.call_id, shown_run=shown.run_id, digest=shown.digest)
        return Pending(kind=PendingKind.APPROVAL, run_id=waiting, call_id=shown.call_id, digest=shown.digest)

    text = admit_answer(message, caller.user)
    yes, no = [[await find(each) for each in shown] for shown in (approve, reject)]
    await (await gateway.decide_as(caller, header)).decide(approve=yes, reject=no, message=text, by=caller.user)


async def answer_call(
    gateway: Gateway,
    caller: Caller,
    run_id: str,
    call_id: str,
    content: str | Mapping[str, Any] | None,
    *,
    digest: str | None = None,
    shown_run: str | None = None,
    failed: bool = False,
    declined: bool = False,
) -> None:
    """Answer a question of a run, as the caller.

    Raises:
        RunNotFoundError: as for `approve_call`.
        ConflictError: when it was answered already, its time is up, or the digest differs.
        MisuseError: when the run does not wait for this, or the answer does not fit.
    """
    header = await gateway.open_run(run_id, caller)
    waiting = await gateway.find_waiting_run(header, call_id, shown_run=shown_run, digest=digest)
    given = admit_answer(content, caller.user)
    await (await gateway.decide_as(caller, header)).answer(
        waiting, call_id, given, failed=failed, declined=declined, by=caller.user, digest=digest
    )


async def send_text(
    gateway: Gateway,
    caller: Caller,
    run_id: str,
    prompt: Prompt,
    *,
    key: DerivedId | None = None,
    priority: Priority | str = "normal",
    kind: InputKind = InputKind.USER,
    labels: Sequence[Label] = (),
) -> PostedItem:
    """Send a run input, as the caller, once for each key. Return the input of the key: the first one.

    Raises:
        RunNotFoundError: as for `approve_call`.
        ForbiddenError: when the caller lacks the scope "run", or may not control the run.
        ConflictError: when the run is over, or its inbox is full.
        MisuseError: when a part is not admitted, or the model of the run's agent does not take it.
    """
    check_scope(caller, "run")
    header = await gateway.open_run(run_id, caller, is_control=True)
    parts = admit(prompt, caller.user)
    gateway.check_parts(header, parts)
    return await (await gateway.decide_as(caller, header)).send(
        header.id, parts, key=key, priority=priority, kind=kind, labels=labels, by=caller.user
    )


async def cancel_run(gateway: Gateway, caller: Caller, run_id: str, *, message: str = "") -> None:
    """End a run and the runs of its sub-agents, as the caller.

    Raises:
        RunNotFoundError: as for `approve_call`.
        ForbiddenError: when the caller lacks the scope "run", or may not control the run.
    """
    check_scope(caller, "run")
    header = await gateway.open_run(run_id, caller, is_control=True)
    text = admit_answer(message, caller.user)
    await (await gateway.decide_as(caller, header)).cancel(header.id, by=caller.user, message=text)
