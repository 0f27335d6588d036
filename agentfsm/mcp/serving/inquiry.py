"""What a served tool asks a person in the middle of its call (`InputRequired`), put to the client."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import mcp.types as m

from agentfsm.core.clean import strip_unsafe
from agentfsm.core.effects import Question
from agentfsm.core.errors import MisuseError
from agentfsm.mcp.serving.asking import Asked, Asking, Context, UnansweredError, Underway
from agentfsm.tools.question_validation import validate_answer


async def inquired(
    asking: Asking, ctx: Context, underway: Underway, replies: Mapping[str, Any], *, tool: str, expires_s: float
) -> m.InputRequiredResult | Underway:
    """Return the call with the answers to what its tool has asked, or the questions that are on their way.

    Args:
        asking: Puts them to people.
        ctx: Of the request.
        underway: How far the call has come.
        replies: What the client brings along, by the question's key; what was not asked is passed over.
        tool: The tool's name.
        expires_s: Seconds for which an answer counts.

    Raises:
        UnansweredError: when they cannot be put, are dismissed, or an answer does not fit.
    """
    lead = f"{tool} was not finished"
    told = _told(underway, replies, lead)
    if not told.questions:
        return told
    requests = {question.key: _request(question) for question in told.questions}
    said = await asking.put(ctx, told, requests, lead=lead, expires_s=expires_s)
    return said if isinstance(said, m.InputRequiredResult) else _told(told, said, lead)


def _request(question: Question) -> Asked:
    if question.url:
        return m.ElicitRequestURLParams(message=strip_unsafe(question.message), url=question.url)
    schema = {"type": "object", "properties": {}, **(question.schema or {})}
    return m.ElicitRequestFormParams(message=strip_unsafe(question.message), requested_schema=schema)


def _told(underway: Underway, replies: Mapping[str, Any], lead: str) -> Underway:
    """Return the call with those answers that are there; the other questions stay."""
    given = {key: reply for key, reply in replies.items() if isinstance(reply, m.ElicitResult)}
    answers = {each.key: _answer(each, given[each.key], lead) for each in underway.questions if each.key in given}
    return attrs.evolve(
        underway,
        questions=tuple(question for question in underway.questions if question.key not in answers),
        inquiry=attrs.evolve(underway.inquiry, answers={**underway.inquiry.answers, **answers}),
    )


def _answer(question: Question, reply: m.ElicitResult, lead: str) -> dict[str, Any] | None:
    """Return what the tool is told: an object, or None where it was declined."""
    if reply.action == "cancel":
        raise UnansweredError(f"{lead}: the question {question.key!r} was dismissed. Do not try it again unasked.")
    if reply.action == "decline":
        return None
    try:
        return validate_answer(question, None if question.url else reply.content)
    except MisuseError as error:
        raise UnansweredError(f"{lead}: {error}. Call it again to have a person asked anew.") from error
