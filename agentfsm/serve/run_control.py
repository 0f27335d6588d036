"""Decisions and control of runs by their callers, with the checks of each, for all protocols."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from agentfsm.core.text_safety import escape_hidden
from agentfsm.serve.gateway import ForbiddenError

if TYPE_CHECKING:
    from agentfsm.core.inbox import Priority
    from agentfsm.runs import Prompt
    from agentfsm.serve.access import Caller
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
    arguments: Mapping[str, Any] | None = None,
) -> None:
    """Approve a call of a run, or of a sub-agent's run that it waits for, as the caller.

    Raises:
        RunNotFoundError: when there is no such run, or the caller may not see it.
        ForbiddenError: when the caller lacks the scope "approve".
        FourEyesError: when four eyes are asked for, and the caller has shaped the call.
        ConflictError: when the call was decided already, its time is up, or the digest differs.
        MisuseError: when the run does not wait for this, or the arguments do not fit.
    """
    header = await gateway.open_run(run_id, caller)
    check_scope(caller, "approve")
    waiting = await gateway.find_waiting_run(header, call_id)
    await gateway.decide_as(caller).approve(waiting, call_id, by=caller.user, arguments=arguments, digest=digest)


async def reject_call(gateway: Gateway, caller: Caller, run_id: str, call_id: str, *, message: str = "") -> None:
    """Reject a call of a run, as the caller.

    Raises:
        RunNotFoundError: as for `approve_call`.
        ForbiddenError: when the caller lacks the scope "approve".
        ConflictError: when the call was decided already, or its time is up.
        MisuseError: when the run does not wait for this.
    """
    header = await gateway.open_run(run_id, caller)
    check_scope(caller, "approve")
    waiting = await gateway.find_waiting_run(header, call_id)
    text = escape_hidden(message, keep_legitimate=True)
    await gateway.runs.reject(waiting, call_id, by=caller.user, message=text)


async def answer_call(
    gateway: Gateway,
    caller: Caller,
    run_id: str,
    call_id: str,
    content: str | Mapping[str, Any] | None,
    *,
    digest: str | None = None,
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
    waiting = await gateway.find_waiting_run(header, call_id)
    given = escape_hidden(content, keep_legitimate=True) if isinstance(content, str) else content
    await gateway.runs.answer(waiting, call_id, given, failed=failed, declined=declined, by=caller.user, digest=digest)


async def send_text(
    gateway: Gateway,
    caller: Caller,
    run_id: str,
    prompt: Prompt,
    *,
    key: str | None = None,
    priority: Priority | str = "normal",
) -> None:
    """Send a run input, as the caller.

    Raises:
        RunNotFoundError: as for `approve_call`.
        ForbiddenError: when the caller lacks the scope "run", or may not control the run.
        ConflictError: when the run is over, or its inbox is full.
        MisuseError: when the model of the run's agent does not take a part.
    """
    check_scope(caller, "run")
    header = await gateway.open_run(run_id, caller, is_control=True)
    gateway.check_parts(header, prompt)
    await gateway.runs.send(header.id, prompt, key=key, priority=priority, by=caller.user)


async def cancel_run(gateway: Gateway, caller: Caller, run_id: str, *, message: str = "") -> None:
    """End a run and the runs of its sub-agents, as the caller.

    Raises:
        RunNotFoundError: as for `approve_call`.
        ForbiddenError: when the caller lacks the scope "run", or may not control the run.
    """
    check_scope(caller, "run")
    header = await gateway.open_run(run_id, caller, is_control=True)
    await gateway.runs.cancel(header.id, by=caller.user, message=message)
