"""OpenAI's Responses: a response is a run, and the one after it goes on with its history."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Final

import attrs
from pydantic import Field
from starlette.responses import JSONResponse, Response

from agentfsm.agents.agent_fields import new_id
from agentfsm.core.errors import RunNotFoundError
from agentfsm.core.messages import AssistantMessage
from agentfsm.models.openai.conversion import read_message_text
from agentfsm.serve.access import read_session_name
from agentfsm.serve.bodies import EmptyBody
from agentfsm.serve.dialects.answers import Answer, AnswerStatus, read_answer
from agentfsm.serve.dialects.chat_tasks import answer_task
from agentfsm.serve.dialects.openai_fields import KEPT, RESPONSES, RefusedFieldError
from agentfsm.serve.dialects.openai_items import check_item, check_message
from agentfsm.serve.dialects.openai_turns import (
    Asked,
    OpenAIBody,
    Said,
    answer_request,
    read_messages,
    refuse_openai,
    wait_with_client,
)
from agentfsm.serve.endpoints import Endpoint
from agentfsm.serve.journal_feeds import to_json
from agentfsm.serve.run_control import cancel_run

if TYPE_CHECKING:
    from starlette.requests import Request

    from agentfsm.core.header import Header
    from agentfsm.core.run import Run
    from agentfsm.core.usage import Usage
    from agentfsm.serve.access import Caller
    from agentfsm.serve.event_stream import RunEventStream
    from agentfsm.serve.gateway import Gateway

_RESPONSE_ID: Final = "resp_"
_MESSAGE_ID: Final = "msg_"
# Items of other turns, which are not read, as the calls of chat completions are not.
_CALL_ENDINGS: Final = ("_call", "_call_output", "reasoning")
# Parts of messages: the type that they have in chat completions, and the name of their text there.
_TEXT_PARTS: Final = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}


class ResponseBody(OpenAIBody):
    """Request for a response. docs/dialects.md has all fields of OpenAI's: each is honoured or refused."""

    input: Annotated[str, Field(min_length=1)] | Annotated[list[dict[str, Any]], Field(min_length=1, max_length=10_000)]
    """A text of the user, or messages; the last one is the user's."""

    instructions: str | None = None
    """Words of the user that stand before all messages."""

    previous_response_id: str | None = None
    """Id of the response after which the conversation goes on."""

    conversation: str | dict[str, Any] | None = None
    """Name of the conversation, or an object with it as `id`."""

    background: bool | None = None
    """Whether to answer at once, while the run works."""


async def create_response(
    gateway: Gateway, request: Request, caller: Caller, body: ResponseBody
) -> Response | RunEventStream:
    """Answer as OpenAI's Responses: start a run, or continue a response or a conversation."""
    return await answer_request(gateway, request, caller, body, api=RESPONSES, read=_read, begin=_begin)


async def _read(gateway: Gateway, caller: Caller, body: ResponseBody) -> Asked:
    items = await _read_items(gateway, caller, body)
    previous = await _find_previous(gateway, caller, body)
    conversation = _read_conversation_name(body.conversation)
    task = answer_task([(str(each.get("role")), read_message_text(each.get("content"))) for _, each in items])
    said = read_messages(items) if task is None else None
    if said is not None and (previous is not None or conversation is not None):
        said = _join_new(said)
    return Asked(
        said=said,
        task=task or "",
        conversation=conversation,
        previous=previous,
        in_background=body.background is True,
    )


async def _begin(gateway: Gateway, body: ResponseBody, run_id: str | None) -> ResponseWriter:
    if run_id is None:
        return ResponseWriter(head=_build_head(new_id(), body.model, time.time()))
    return ResponseWriter(head=_describe(await gateway.runs.header(run_id)))


async def get_response(gateway: Gateway, request: Request, caller: Caller, _body: object) -> Response:
    """Return a response, which is the state of its run."""
    header = await _open_response(gateway, caller, request.path_params["response_id"])
    if request.query_params.get("stream", "false") != "false":
        text = f"a response that was created is not streamed: see GET /v1/runs/{header.id}/events"
        return refuse_openai(400, "unsupported_parameter", text, param="stream")
    return _answer(await gateway.wait_for(header.id, 0))


async def cancel_response(gateway: Gateway, request: Request, caller: Caller, _body: object) -> Response:
    """Cancel the run of a response, and return the response once it is over."""
    header = await _open_response(gateway, caller, request.path_params["response_id"])
    await cancel_run(gateway, caller, header.id)
    return _answer(await wait_with_client(gateway, request, header.id))


async def delete_response(gateway: Gateway, request: Request, caller: Caller, _body: object) -> Response:
    """Delete the run of a response, which no worker executes, with the runs of its sub-agents."""
    response_id = request.path_params["response_id"]
    header = await _open_response(gateway, caller, response_id)
    await gateway.runs.delete(header.id)
    return JSONResponse({"id": response_id, "object": "response", "deleted": True})


async def _open_response(gateway: Gateway, caller: Caller, response_id: str) -> Header:
    """Return the header of the run of a response.

    Raises:
        RunNotFoundError: when there is no such response, or the caller may not see it.
    """
    try:
        if response_id.startswith(_RESPONSE_ID):
            return await gateway.open_run(response_id.removeprefix(_RESPONSE_ID), caller)
    except RunNotFoundError:
        pass
    raise RunNotFoundError(f"there is no response {response_id[:80]!r}")


# The messages.


async def _find_previous(gateway: Gateway, caller: Caller, body: ResponseBody) -> Run | None:
    """Return the run of `previous_response_id`.

    Raises:
        RefusedFieldError: when there is no such response of the caller.
    """
    name = "previous_response_id"
    if (response_id := body.previous_response_id) is None:
        return None
    if body.conversation is not None:
        raise RefusedFieldError(name, f"{name} and conversation are given: leave one of them out")
    try:
        header = await _open_response(gateway, caller, response_id)
    except RunNotFoundError as error:
        raise RefusedFieldError(name, f"{name} is refused: {error}") from None
    if header.user != caller.user or header.parent is not None:
        raise RefusedFieldError(name, f"{name} is refused: only who started a response goes on with it")
    return await gateway.runs.load(header.id)


def _read_conversation_name(given: str | dict[str, Any] | None) -> str | None:
    """Return the name of a conversation, which may be the only field of an object, as `id`; None if none is given.

    Raises:
        RefusedFieldError: when it is something else.
    """
    name = given.get("id") if isinstance(given, dict) and len(given) == 1 else given
    if given is not None and not (isinstance(name, str) and name):
        raise RefusedFieldError("conversation", "conversation is refused: give its name, or an object with it as `id`")
    return name if isinstance(name, str) else None


async def _read_items(gateway: Gateway, caller: Caller, body: ResponseBody) -> list[tuple[str, dict[str, Any]]]:
    """Return the messages of a request in the form of chat completions, with the path of each.

    Raises:
        RefusedFieldError: when an item is of another kind, or refers to no answer that the caller may see.
    """
    items: list[tuple[str, dict[str, Any]]] = []
    if body.instructions:
        items.append(("instructions", {"role": "developer", "content": body.instructions}))
    if isinstance(body.input, str):
        return [*items, ("input", {"role": "user", "content": body.input})]
    for place, item in enumerate(body.input):
        path, kind = f"input[{place}]", str(item.get("type", "message"))
        if kind == "message":
            check_message(RESPONSES, path, item)
            items.append((path, {**item, "content": _read_content(path, item.get("content"))}))
        elif kind == "item_reference":
            check_item(RESPONSES, path, kind, item)
            items.append((path, {"role": "assistant", "content": await _find_text(gateway, caller, path, item)}))
        elif kind.endswith(_CALL_ENDINGS):
            items.append((path, {"role": "tool"}))
        else:
            raise RefusedFieldError(path, f"{path} is refused: an item of the type {kind[:40]!r}: send messages")
    return items


async def _find_text(gateway: Gateway, caller: Caller, path: str, item: Mapping[str, Any]) -> str:
    name = str(item.get("id"))
    try:
        header = await gateway.open_run(name.removeprefix(_MESSAGE_ID), caller)
    except RunNotFoundError:
        raise RefusedFieldError(path, f"{path} is refused: there is no message {name[:80]!r}") from None
    return read_answer(await gateway.load(header)).text


def _read_content(path: str, content: Any) -> Any:
    """Return the content of a message in the form of chat completions."""
    if not isinstance(content, list):
        return content
    parts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind in _TEXT_PARTS:
            name = _TEXT_PARTS[kind]
            parts.append({"type": name, name: part.get(name)})
        elif kind == "input_image" and part.get("image_url") is not None:
            detail = part.get("detail") or "auto"
            parts.append({"type": "image_url", "image_url": {"url": part["image_url"], "detail": detail}})
        elif kind == "input_file" and part.get("file_url") and part.get("file_data"):
            raise RefusedFieldError(path, f"{path} is refused: a file with file_url and file_data: send one of them")
        elif kind == "input_file" and (url := part.get("file_url") or part.get("file_data")) is not None:
            parts.append({"type": "file", "file": {"file_data": url, "filename": part.get("filename") or ""}})
        else:
            raise RefusedFieldError(
                path,
                f"{path} is refused: a part of the type {str(kind)[:40]!r}: send input_text, input_image with "
                "image_url, or input_file with file_data or file_url; files are not kept here",
            )
    return parts


def _join_new(said: Said) -> Said:
    """Return all messages as one, because the store has those before them.

    Raises:
        RefusedFieldError: when there are replies among them.
    """
    if any(isinstance(each, AssistantMessage) for each in said.history):
        text = "input is refused: the store has the replies of this conversation, send only the new messages"
        raise RefusedFieldError("input", text)
    parts = [part for each in said.history for part in getattr(each, "parts", ())]
    return attrs.evolve(said, prompt=(*parts, *said.prompt), history=())


# From a run to a response.

_STATUSES: Final = {
    AnswerStatus.DONE: "completed",
    AnswerStatus.WAITING: "completed",
    AnswerStatus.CUT_OFF: "incomplete",
    AnswerStatus.WORKING: "in_progress",
    AnswerStatus.CANCELLED: "cancelled",
    AnswerStatus.FAILED: "failed",
}


def _answer(run: Run) -> Response:
    return JSONResponse(_build_document(_describe(run.header), read_answer(run), is_formed=False))


def _describe(header: Header) -> dict[str, Any]:
    """Return the fields of a response that its run begins with."""
    head = _build_head(header.id, header.agent, header.created_at)
    settings, session = header.settings, read_session_name(header.session)
    if settings is not None:
        head |= {"temperature": settings.temperature, "top_p": settings.top_p, "max_output_tokens": settings.max_tokens}
        head["reasoning"] = {"effort": settings.reasoning_effort, "summary": None}
    if session is not None:
        head["conversation"] = {"id": session}
    elif header.after is not None:
        head["previous_response_id"] = f"{_RESPONSE_ID}{header.after}"
    head["metadata"] = {name: each for name, each in header.metadata.items() if not name.startswith(KEPT)}
    return head


def _build_head(run_id: str, model: str, created_at: float) -> dict[str, Any]:
    return {
        "id": f"{_RESPONSE_ID}{run_id}",
        "object": "response",
        "created_at": int(created_at),
        "model": model,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "store": True,
        "tool_choice": "auto",
        "tools": [],
        "truncation": "auto",
    }


def _build_document(head: Mapping[str, Any], answer: Answer, *, is_formed: bool) -> dict[str, Any]:
    """Return the response."""
    is_refusal = is_formed and answer.status is AnswerStatus.WAITING
    has_text = answer.text and answer.status is not AnswerStatus.WORKING
    output = [_build_message(head, answer.text, is_refusal=is_refusal)] if has_text else []
    return _finish(head, answer, output)


def _finish(head: Mapping[str, Any], answer: Answer, output: list[dict[str, Any]]) -> dict[str, Any]:
    document = {**head, "status": _STATUSES[answer.status], "output": output, "usage": _build_usage(answer.usage)}
    if answer.status is AnswerStatus.CUT_OFF:
        document["incomplete_details"] = {"reason": "max_output_tokens"}
    elif answer.error:
        text = f"{answer.error} ({answer.code})"
        document["error"] = {"type": "server_error", "code": "server_error", "message": text, "param": None}
    return document


def _build_usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.input_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            "cache_write_tokens": usage.cache_write_tokens,
        },
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.tokens,
    }


def _build_part(text: str, *, is_refusal: bool) -> dict[str, Any]:
    if is_refusal:
        return {"type": "refusal", "refusal": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _build_message(
    head: Mapping[str, Any], text: str | None, *, is_refusal: bool = False, status: str = "completed"
) -> dict[str, Any]:
    """Return the message of a response; without content if the text is None."""
    content = [] if text is None else [_build_part(text, is_refusal=is_refusal)]
    item_id = f"{_MESSAGE_ID}{head['id'].removeprefix(_RESPONSE_ID)}"
    return {"id": item_id, "type": "message", "role": "assistant", "status": status, "content": content}


@attrs.define(eq=False, repr=False, kw_only=True)
class ResponseWriter:
    """Writes an answer as the events of a response with one message, which begins with its first text."""

    head: Mapping[str, Any]
    """Fields of the response that its run begins with."""

    _number: int = attrs.field(default=0, init=False)
    _text: str = attrs.field(default="", init=False)
    _is_refusal: bool = attrs.field(default=False, init=False)

    def build_response(self, answer: Answer, *, is_formed: bool) -> Response:
        """Return the whole response."""
        return JSONResponse(_build_document(self.head, answer, is_formed=is_formed))

    def write_start(self) -> str:
        """Write the response, without an answer."""
        response = {**self.head, "status": "in_progress", "output": [], "usage": None}
        return self._write("response.created", response=response) + self._write(
            "response.in_progress", response=response
        )

    def write_text(self, text: str, *, is_refusal: bool = False) -> str:
        """Write a text, before the first one the beginning of the message."""
        begin = ""
        if not self._text:
            self._is_refusal = is_refusal
            item = _build_message(self.head, None, status="in_progress")
            begin = self._write("response.output_item.added", output_index=0, item=item)
            part = _build_part("", is_refusal=is_refusal)
            begin += self._write("response.content_part.added", **self._place(item), part=part)
        self._text += text
        place = self._place(_build_message(self.head, None))
        if self._is_refusal:
            return begin + self._write("response.refusal.delta", **place, delta=text)
        return begin + self._write("response.output_text.delta", **place, delta=text, logprobs=[])

    def write_end(self, answer: Answer) -> str:
        """Write the end of the message and the whole response."""
        text, output = "", []
        if self._text:
            status = "incomplete" if answer.status is AnswerStatus.CUT_OFF else "completed"
            item = _build_message(self.head, self._text, is_refusal=self._is_refusal, status=status)
            output, place = [item], self._place(item)
            if self._is_refusal:
                text = self._write("response.refusal.done", **place, refusal=self._text)
            else:
                text = self._write("response.output_text.done", **place, text=self._text, logprobs=[])
            text += self._write("response.content_part.done", **place, part=item["content"][0])
            text += self._write("response.output_item.done", output_index=0, item=item)
        document = _finish(self.head, answer, output)
        kind = document["status"] if document["status"] in ("completed", "incomplete") else "failed"
        return text + self._write(f"response.{kind}", response=document)

    def write_error(self, code: str, text: str) -> str:
        """Write an error, which ends the stream."""
        return self._write("error", code=code, message=text, param=None)

    def _place(self, item: Mapping[str, Any]) -> dict[str, Any]:
        return {"item_id": item["id"], "output_index": 0, "content_index": 0}

    def _write(self, kind: str, **fields: Any) -> str:
        event = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return f"event: {kind}\ndata: {to_json(event)}\n\n"


_RESPONSE: Final = f"{RESPONSES}/{{response_id}}"
RESPONSE_ENDPOINTS: Final = (
    Endpoint(
        method="POST",
        path=RESPONSES,
        handler=create_response,
        scope="run",
        body=ResponseBody,
        refuse=refuse_openai,
    ),
    Endpoint(method="GET", path=_RESPONSE, handler=get_response, query=("stream",), refuse=refuse_openai),
    Endpoint(method="DELETE", path=_RESPONSE, handler=delete_response, scope="admin", refuse=refuse_openai),
    Endpoint(
        method="POST",
        path=f"{_RESPONSE}/cancel",
        handler=cancel_response,
        scope="run",
        body=EmptyBody,
        refuse=refuse_openai,
    ),
)
