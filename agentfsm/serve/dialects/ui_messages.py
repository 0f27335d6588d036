"""UI messages of Vercel's `ai` SDK: pages with `useChat` start runs, follow them, and decide on their calls."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from starlette.responses import Response

from agentfsm.core.errors import MisuseError
from agentfsm.core.events import Observed
from agentfsm.core.messages import AudioPart, FilePart, ImagePart, Part, TextPart
from agentfsm.serve.bodies import RequestBody
from agentfsm.serve.dialects.ag_ui import ClientId, ResumeBody, answer_interrupts
from agentfsm.serve.dialects.conversations import find_latest_run, say
from agentfsm.serve.dialects.ui_message_encoder import WAIT_PART, UIMessageEncoder
from agentfsm.serve.endpoints import Endpoint, RouteGroup
from agentfsm.serve.event_stream import parse_position
from agentfsm.serve.queries import read_traceparent

if TYPE_CHECKING:
    from starlette.requests import Request

    from agentfsm.serve.access import Caller
    from agentfsm.serve.event_stream import RunEventStream, Versions
    from agentfsm.serve.gateway import Gateway

_HEADER: Final = (b"x-vercel-ai-ui-message-stream", b"v1")


class _PartBody(RequestBody):
    """Base of what the client returns of an answer, whose further fields are what the server sent."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="ignore", strict=True)


class ApprovalBody(_PartBody):
    """Decision of the user on a call."""

    id: str
    approved: bool | None = None
    reason: str | None = None


class AnswerPartBody(_PartBody):
    """A part of an answer, as far as it may hold a decision."""

    type: str
    id: str = ""
    data: Any = None
    state: str = ""
    toolCallId: str = ""  # noqa: N815  the protocol's name
    approval: ApprovalBody | None = None
    output: Any = None


_DECIDED: Final = TypeAdapter(list[AnswerPartBody])


class UIMessagesBody(RequestBody):
    """Request of `DefaultChatTransport`."""

    id: ClientId
    """Id of the chat: the caller's session of this name."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    """The chat. Only the last message is read, since the store has the others: a message of the user, or the answer
    whose calls the user has decided on.
    """

    trigger: Literal["submit-message", "regenerate-message"] = "submit-message"
    """Why the request is sent. A run is not made again, so `regenerate-message` is refused."""

    messageId: str | None = None  # noqa: N815  the protocol's name
    """Id of the message that is sent or decided on; that of the last message is read."""


async def send_message(gateway: Gateway, request: Request, caller: Caller, body: UIMessagesBody) -> RunEventStream:
    """Start or continue a run of a chat, and stream it to `useChat` until it is over or waits."""
    agent = gateway.find_agent(request.path_params["agent"]).name
    last = body.messages[-1]
    if body.trigger == "regenerate-message":
        raise MisuseError("an answer is not made again, since its effects would be: send a message, or fork the run")
    if last.get("role") == "assistant":
        answers = _read_decisions(last)
        if not answers:
            raise MisuseError("the last message is an answer without a new decision or result: send a user's message")
        run_id, versions = await answer_interrupts(gateway, caller, agent, answers)
        return await _open_stream(gateway, run_id, versions, continues=True)
    prompt, message_id, metadata = _read_message(last)
    turn = await say(
        gateway,
        caller,
        prompt,
        agent=agent,
        session=body.id,
        key=_build_key(body.id, message_id),
        metadata=metadata,
        answer=prompt[0].text if len(prompt) == 1 and isinstance(prompt[0], TextPart) else None,
        traceparent=read_traceparent(request),
    )
    versions = turn.versions or await _find_answer(gateway, turn.run_id)
    return await _open_stream(gateway, turn.run_id, versions)


def _build_key(chat: str, message_id: str) -> str | None:
    """Return the key of a message of a chat, whatever the characters of the ids; None without an id."""
    return hashlib.sha256(json.dumps([chat, message_id]).encode()).hexdigest() if message_id else None


async def resume_stream(gateway: Gateway, request: Request, caller: Caller, _body: object) -> RunEventStream | Response:
    """Stream the answer of a chat from its beginning, or after a position; 204 if there is none in the making."""
    agent = gateway.find_agent(request.path_params["agent"]).name
    run = await find_latest_run(gateway, caller, request.path_params["chat"])
    position = request.headers.get("last-event-id") or request.query_params.get("after", "")
    if run is None or run.header.agent != agent or (run.is_over and not position):
        return Response(status_code=204)
    if position:
        return await _open_stream(gateway, run.id, parse_position(position, run.id), continues=True)
    return await _open_stream(gateway, run.id, await _find_answer(gateway, run.id))


async def _open_stream(gateway: Gateway, run_id: str, versions: Versions, *, continues: bool = False) -> RunEventStream:
    stream = await gateway.open_stream(run_id, versions, UIMessageEncoder(continues=continues))
    stream.headers = (*stream.headers, _HEADER)
    return stream


async def _find_answer(gateway: Gateway, run_id: str) -> Versions:
    """Return the position right before a run read its newest input: what follows answers that."""
    events = (await gateway.runs.store.read(run_id)).events
    read = [index for index, event in enumerate(events) if isinstance(event, Observed) and event.inputs]
    if not read:
        return {}
    versions, above = {run_id: read[-1]}, [run_id]
    while above:
        for child in await gateway.runs.children(above.pop()):
            earlier = [
                each for each in (await gateway.runs.store.read(child.id)).events if each.at <= events[read[-1]].at
            ]
            versions[child.id] = len(earlier)
            above.append(child.id)
    return versions


def _read_message(message: dict[str, Any]) -> tuple[tuple[Part, ...], str, dict[str, Any]]:
    """Return the parts, the id and the metadata of the user's message.

    Raises:
        MisuseError: when it is not one, or has parts that a run cannot read.
    """
    parts, message_id, metadata = message.get("parts"), message.get("id", ""), message.get("metadata")
    if (
        message.get("role") != "user"
        or not isinstance(parts, list)
        or not all(isinstance(each, dict) for each in parts)
    ):
        raise MisuseError("the last message must be the user's, with `parts`, or an answer with decisions on its calls")
    if not isinstance(message_id, str) or not isinstance(metadata, dict | None):
        raise MisuseError("`id` of a message must be a text, and `metadata` an object")
    return tuple(_read_part(each) for each in parts), message_id, metadata or {}


def _read_part(part: dict[str, Any]) -> Part:
    kind, url, media = part.get("type"), part.get("url"), part.get("mediaType")
    if kind == "text" and isinstance(part.get("text"), str):
        return TextPart(text=part["text"])
    if kind != "file" or not isinstance(url, str) or not isinstance(media, str):
        raise MisuseError(f"a part of the type {str(kind)[:40]!r} cannot be read: send `text`, or `file` with a URL")
    if media.startswith("image/"):
        return ImagePart(url=url)
    if media.startswith("audio/"):
        return AudioPart(url=url)
    name = part.get("filename", "")
    return FilePart(url=url, name=name if isinstance(name, str) else "")


def _read_decisions(message: dict[str, Any]) -> list[ResumeBody]:
    """Return the decisions in an answer: approvals, and results that the page gave for what its newest wait is about.

    Raises:
        MisuseError: when a decision has not the form that the client gives it.
    """
    try:
        parts = _DECIDED.validate_python(message.get("parts"))
        approvals = [
            each.approval for each in parts if each.state == "approval-responded" and each.approval is not None
        ]
        waits = {each.data["toolCallId"]: each.id for each in parts if each.type == WAIT_PART and each.id}
        newest = {each.id.rpartition("/")[2] for each in approvals} or {
            each.rpartition("/")[2] for each in list(waits.values())[-1:]
        }
        answers = [
            ResumeBody(
                interruptId=each.id,
                status="resolved",
                payload={"approved": each.approved, "message": each.reason or ""},
            )
            for each in approvals
        ]
        for each in parts:
            wait = waits.get(each.toolCallId, "")
            if wait.rpartition("/")[2] in newest and each.state in ("output-available", "output-error") and wait:
                status: Any = "resolved" if each.state == "output-available" else "cancelled"
                answers.append(ResumeBody(interruptId=wait, status=status, payload=each.output))
    except (ValidationError, KeyError, TypeError):
        raise MisuseError("a decision of the last message cannot be read: send its parts as they are") from None
    return answers


_PATH: Final = "/v1/agents/{agent}/ui-messages"
UI_MESSAGES: Final = RouteGroup(
    name="ui-messages",
    endpoints=(
        Endpoint(method="POST", path=_PATH, handler=send_message, scope="run", body=UIMessagesBody),
        Endpoint(method="GET", path=f"{_PATH}/{{chat}}/stream", handler=resume_stream, query=("after",)),
    ),
)
