"""Claims: the calls behind what an answer says was done are found. Without them, it goes back to the model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from agentfsm.core import events as e
from agentfsm.core.call_facts import list_call_facts
from agentfsm.core.claimed_calls import bind_claims, list_unclaimed
from agentfsm.core.claims import Claim, list_not_done
from agentfsm.engine.deciders.output import REFUSAL_NOTE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from agentfsm.core.effects import Reflect
    from agentfsm.core.messages import JSON
    from agentfsm.engine.execution.execution import Execution
    from agentfsm.engine.model_calls.received import ReceivedReply

_NOT_DONE: Final = "it claims what was not done:\n{claims}\nDo it first, or say that it was not done."
_LEFT_OUT: Final = "it does not claim these calls, which are done:\n{calls}"


def read_claims(execution: Execution, received: ReceivedReply) -> None:
    """Split an answer from its claims, and find the calls of these."""
    spec = execution.config.output_spec
    assert spec is not None  # as the line has it  # noqa: S101
    if received.calls or received.is_paused or (found := spec.split(received.text)) is None:
        return

    def find_defaults(name: str) -> Mapping[str, JSON]:
        tool = execution.config.find_tool(name)
        return {} if tool is None else tool.defaults

    received.text, claims = found
    received.claims = bind_claims(claims, list_call_facts(execution.journal.run), find_defaults)


def claim_nothing(execution: Execution) -> tuple[Claim, ...] | None:
    """Return the claims of an answer that the model of the run has not written: none, if answers have to have some."""
    spec = execution.config.output_spec
    return None if spec is None or spec.claims is None else ()


async def check_claims(execution: Execution, _effect: Reflect) -> e.Continued | None:
    """Return the objection to a draft that claims what was not done, or leaves out what it has to claim.

    After the last correction there is none: the answer is given, and its claims have the mark.
    """
    journal, spec = execution.journal, execution.config.output_spec
    assert spec is not None  # as the line has it  # noqa: S101
    run, is_complete = journal.run, spec.claims is not None and spec.claims.complete
    not_done = list_not_done(run.draft_claims or ())
    left_out = list_unclaimed(run) if is_complete else ()
    reasons = []
    if not_done:
        reasons.append(_NOT_DONE.format(claims="\n".join([f"- {each}: {each.fault}" for each in not_done])))
    if left_out:
        reasons.append(_LEFT_OUT.format(calls="\n".join([f"- {each.tool} ({each.call_id})" for each in left_out])))
    if not reasons:
        return None
    is_given = run.refusals >= execution.config.limits.answer_retries
    journal.log.warning("not_done_claimed", turn=run.turn, refusals=run.refusals, is_given=is_given)
    if is_given:
        return None
    note = REFUSAL_NOTE.format(why=" And ".join(reasons), how=spec.correction_hint)
    return e.Continued(note=note, refused=True)
