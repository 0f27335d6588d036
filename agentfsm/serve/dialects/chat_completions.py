"""OpenAI's chat completions: an agent is a model, and a conversation is a session."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any, Final

import attrs
from pydantic import Field
from starlette.responses import JSONResponse, Response

from agentfsm.agents.agent_fields import new_id
from agentfsm.models.openai.conversion import read_message_text
from agentfsm.serve.bodies import RequestBody
from agentfsm.serve.dialects.answers import Answer, AnswerStatus
from agentfsm.serve.dialects.chat_tasks import answer_task
from agentfsm.serve.dialects.openai_fields import CHAT
from agentfsm.serve.dialects.openai_items import check_message
from agentfsm.serve.dialects.openai_turns import Asked, OpenAIBody, answer_request, read_messages, refuse_openai
from agentfsm.serve.dialects.responses import RESPONSE_ENDPOINTS
from agentfsm.serve.endpoints import Endpoint, RouteGroup
from agentfsm.serve.journal_feeds import to_json

if TYPE_CHECKING:
    from starlette.requests import Request

    from agentfsm.core.usage import Usage
    from agentfsm.serve.access import Caller
    from agentfsm.serve.event_stream import RunEventStream
    from agentfsm.serve.gateway import Gateway


class StreamOptionsBody(RequestBody):
    """Options of a streamed answer."""

    include_usage: bool | None = None
    """Whether the stream ends with the usage of tokens."""

    include_obfuscation: bool | None = None
    """Whether pieces are padded: they are not."""


class ChatBody(OpenAIBody):
    """Request for a completion. docs/dialects.md has all fields of OpenAI's: each is honoured or refused."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1, max_length=10_000)]
    """The conversation; the last message is the user's."""

    stream_options: StreamOptionsBody | None = None
    """Options of a streamed answer."""


async def complete_chat(
    gateway: Gateway, request: Request, caller: Caller, body: ChatBody
) -> Response | RunEventStream:
    """Answer as OpenAI's chat completions: start a run, or continue the conversation."""
    return await answer_request(gateway, request, caller, body, api=CHAT, read=_read, begin=_begin)


async def _read(_gateway: Gateway, _caller: Caller, body: ChatBody) -> Asked:
    items = [(f"messages[{place}]", each) for place, each in enumerate(body.messages)]
    for path, each in items:
        if each.get("role") not in ("tool", "function"):
            check_message(CHAT, path, each)
    task = answer_task([(str(each.get("role")), read_message_text(each.get("content"))) for each in body.messages])
    return Asked(said=read_messages(items) if task is None else None, task=task or "")


async def _begin(_gateway: Gateway, body: ChatBody, run_id: str | None) -> ChatWriter:
    options = body.stream_options
    has_usage = options is not None and options.include_usage is True
    return ChatWriter(model=body.model, run_id=run_id or new_id(), includes_usage=has_usage)


async def list_models(gateway: Gateway, _request: Request, _caller: Caller, _body: object) -> Response:
    """List the agents as OpenAI's models."""
    return JSONResponse({"object": "list", "data": [_build_model(name) for name in gateway.agents]})


async def get_model(gateway: Gateway, request: Request, _caller: Caller, _body: object) -> Response:
    """Return an agent as one of OpenAI's models."""
    name = request.path_params["model"]
    if name not in gateway.agents:
        return refuse_openai(404, "model_not_found", f"there is no model {name[:80]!r}: see /v1/models")
    return JSONResponse(_build_model(name))


def _build_model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "agentfsm"}


# From an answer to a completion.

_FINISH: Final = {AnswerStatus.CUT_OFF: "length"}
_FAILED: Final = (AnswerStatus.FAILED, AnswerStatus.CANCELLED)


def _build_usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.input_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": usage.tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


@attrs.define(eq=False, repr=False, kw_only=True)
class ChatWriter:
    """Writes an answer as a completion, or as its chunks."""

    model: str
    run_id: str
    includes_usage: bool = False
    """Whether the last chunk has the usage."""

    _created: int = attrs.field(factory=lambda: int(time.time()), init=False)

    def build_response(self, answer: Answer, *, is_formed: bool) -> Response:
        """Return the whole completion, or the error of a run that failed."""
        if answer.status in _FAILED:
            return refuse_openai(422, answer.code, answer.error)
        has_form = not is_formed or answer.status in (AnswerStatus.DONE, AnswerStatus.CUT_OFF)
        message = {"role": "assistant", "content": answer.text if has_form else None}
        message["refusal"] = None if has_form else answer.text
        reason = _FINISH.get(answer.status, "stop")
        choice = {"index": 0, "message": message, "finish_reason": reason, "logprobs": None}
        head = self._build_head("chat.completion")
        return JSONResponse({**head, "choices": [choice], "usage": _build_usage(answer.usage)})

    def write_start(self) -> str:
        """Write the role."""
        return self._write_chunk({"role": "assistant", "content": ""})

    def write_text(self, text: str, *, is_refusal: bool = False) -> str:
        """Write a text."""
        return self._write_chunk({"refusal" if is_refusal else "content": text})

    def write_end(self, answer: Answer) -> str:
        """Write the end of the message, or the error of a run that failed."""
        if answer.status in _FAILED:
            return self.write_error(answer.code, answer.error)
        text = self._write_chunk({}, _FINISH.get(answer.status, "stop"))
        if self.includes_usage:
            last = {**self._build_head(), "choices": [], "usage": _build_usage(answer.usage)}
            text += f"data: {to_json(last)}\n\n"
        return f"{text}data: [DONE]\n\n"

    def write_error(self, code: str, text: str) -> str:
        """Write an error, which ends the stream."""
        error = {"message": text, "type": "server_error", "param": None, "code": code}
        return f"data: {to_json({'error': error})}\n\n"

    def _write_chunk(self, delta: dict[str, Any], reason: str | None = None) -> str:
        choice = {"index": 0, "delta": delta, "finish_reason": reason, "logprobs": None}
        return f"data: {to_json({**self._build_head(), 'choices': [choice]})}\n\n"

    def _build_head(self, kind: str = "chat.completion.chunk") -> dict[str, Any]:
        return {"id": f"chatcmpl-{self.run_id}", "object": kind, "created": self._created, "model": self.model}


OPENAI: Final = RouteGroup(
    name="openai",
    endpoints=(
        Endpoint(method="POST", path=CHAT, handler=complete_chat, scope="run", body=ChatBody, refuse=refuse_openai),
        *RESPONSE_ENDPOINTS,
        Endpoint(method="GET", path="/v1/models", handler=list_models, refuse=refuse_openai),
        Endpoint(method="GET", path="/v1/models/{model}", handler=get_model, refuse=refuse_openai),
    ),
)
