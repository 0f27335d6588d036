"""What a served tool asks a person in the middle of its call (`InputRequired`), put to the client."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import mcp.types as m

from agentfsm.core.errors import MisuseError
from agentfsm.core.pending import Question
from agentfsm.core.text_safety import strip_unsafe
from agentfsm.mcp.server.input_requests import (
    ElicitParams,
    InputBroker,
    InputNotGivenError,
    InterruptedCall,
    RequestContext,
)
from agentfsm.tools.question_validation import validate_answer


async def collect_answers(
    broker: InputBroker,
    ctx: RequestContext,
    call_state: InterruptedCall,
    replies: Mapping[str, Any],
    *,
    tool: str,
    expires_s: float,
) -> m.InputRequiredResult | InterruptedCall:
    """Return the call with the answers to what its tool has asked, or the questions that are on their way.

    Args:
        broker: Puts them to people.
        ctx: Of the request.
        call_state: How far the call has come.
        replies: What the client brings along, by the question's key; what was not asked is passed over.
        tool: The tool's name.
        expires_s: Seconds for which an answer counts.

    Raises:
        UnansweredError: when they cannot be put, are dismissed, or an answer does not fit.
    """
    lead = f"{tool} was not finished"
    told = _add_answers(call_state, replies, lead)
    if not told.questions:
        return told
    requests = {question.key: _to_elicit_params(question) for question in told.questions}
    said = await broker.request_input(ctx, told, requests, lead=lead, expires_s=expires_s)
    return said if isinstance(said, m.InputRequiredResult) else _add_answers(told, said, lead)


def _to_elicit_params(question: Question) -> ElicitParams:
    if question.url:
        return m.ElicitRequestURLParams(message=strip_unsafe(question.message), url=question.url)
    schema = {"type": "object", "properties": {}, **(question.schema or {})}
    return m.ElicitRequestFormParams(message=strip_unsafe(question.message), requested_schema=schema)


def _add_answers(call_state: InterruptedCall, replies: Mapping[str, Any], lead: str) -> InterruptedCall:
    """Return the call with those answers that are there; the other questions stay."""
    given = {key: reply for key, reply in replies.items() if isinstance(reply, m.ElicitResult)}
    answers = {
        each.key: _parse_answer(each, given[each.key], lead) for each in call_state.questions if each.key in given
    }
    return attrs.evolve(
        call_state,
        questions=tuple(question for question in call_state.questions if question.key not in answers),
        inquiry=attrs.evolve(call_state.inquiry, answers={**call_state.inquiry.answers, **answers}),
    )


def _parse_answer(question: Question, reply: m.ElicitResult, lead: str) -> dict[str, Any] | None:
    """Return what the tool is told: an object, or None where it was declined."""
    if reply.action == "cancel":
        raise InputNotGivenError(f"{lead}: the question {question.key!r} was dismissed. Do not try it again unasked.")
    if reply.action == "decline":
        return None
    try:
        return validate_answer(question, None if question.url else reply.content)
    except MisuseError as error:
        raise InputNotGivenError(f"{lead}: {error}. Call it again to have a person asked anew.") from error
