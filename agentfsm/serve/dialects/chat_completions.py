"""OpenAI's chat completions: an agent is a model, and a conversation is a session.

The last message of the user is the prompt. In a conversation, which a header or the metadata name, the store has the
history, and that of the client is not read. Without one, the texts of the client are the history; its calls and their
results are left out, so that no client can claim them.
"""

from __future__ import annotations

import hashlib
import json
import time
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal

import anyio
import attrs
from pydantic import ConfigDict, Field
from starlette.responses import JSONResponse, Response

from agentfsm.agents.admission import check_part_count
from agentfsm.agents.agent_fields import new_id
from agentfsm.agents.decisions import HOW_TO_RESOLVE
from agentfsm.agents.run_reports import read_output
from agentfsm.core.errors import MisuseError
from agentfsm.core.machine import State
from agentfsm.core.messages import AssistantMessage, Message, TextPart, UserMessage
from agentfsm.core.pending import PendingKind
from agentfsm.models.openai.conversion import read_message_text
from agentfsm.ports.store import Filter
from agentfsm.serve.bodies import RequestBody
from agentfsm.serve.dialects.chat_tasks import answer_task
from agentfsm.serve.dialects.conversations import Turn, find_latest_run, say, was_said
from agentfsm.serve.dialects.replies import REPLIES, PieceFilter
from agentfsm.serve.endpoints import Endpoint, RouteGroup
from agentfsm.serve.event_stream import Ending
from agentfsm.serve.journal_feeds import to_json
from agentfsm.serve.queries import read_traceparent
from agentfsm.streaming.stream import TextDelta

if TYPE_CHECKING:
    from starlette.requests import Request

    from agentfsm.core.run import Run
    from agentfsm.journal.follow import JournalEvent
    from agentfsm.serve.access import Caller
    from agentfsm.serve.event_stream import RunEventStream
    from agentfsm.serve.gateway import Gateway
    from agentfsm.streaming.stream import StreamEvent

# Headers that name the conversation, in the order in which they count.
CONVERSATION_HEADERS: Final = ("x-conversation-id", "x-openwebui-chat-id")
# Seconds that an answer waits for the end of a run: OpenAI's client gives up then.
WAIT_S: Final = 600.0
# Seconds within which a request of OpenAI's client that says that it is a retry continues the run of the first one.
RETRY_WINDOW_S: Final = 900.0
# Runs of the caller among which that run is looked for.
MAX_RECENT_RUNS: Final = 50
# Key in the metadata of a run: the hash of its request.
REQUEST_HASH: Final = "openai_request"
# Types of errors, as in OpenAI's answers, by status.
_ERROR_TYPES: Final = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_MAX_NAME_CHARS: Final = 200
_SERVER_ERROR: Final = 500


def refuse_chat(status: int, code: str, text: str, headers: Any = None) -> Response:
    """Return the answer to a request that is refused, in OpenAI's form."""
    kind = "server_error" if status >= _SERVER_ERROR else _ERROR_TYPES.get(status, "invalid_request_error")
    return JSONResponse({"error": {"message": text, "type": kind, "param": None, "code": code}}, status, headers)


class StreamOptionsBody(RequestBody):
    """Options of a streamed answer."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="ignore", strict=True)

    include_usage: bool = False
    """Whether the stream ends with the usage of tokens."""


class ChatBody(RequestBody):
    """Request for a completion. Other fields of OpenAI's, such as `temperature` and `tools`, have no effect."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="ignore", strict=True)

    model: Annotated[str, Field(min_length=1, max_length=_MAX_NAME_CHARS)]
    """Name of the agent."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1, max_length=10_000)]
    """The conversation; the last message is the user's."""

    stream: bool | None = None
    """Whether the answer is streamed."""

    stream_options: StreamOptionsBody | None = None
    """Options of a streamed answer."""

    metadata: dict[str, Any] | None = None
    """Data of the client, stored with the run. `conversation` names the conversation."""

    n: Literal[1] | None = None
    """Number of answers: one."""


async def complete_chat(
    gateway: Gateway, request: Request, caller: Caller, body: ChatBody
) -> Response | RunEventStream:
    """Answer as OpenAI's chat completions: start a run, or continue the conversation."""
    if body.model not in gateway.agents:
        return refuse_chat(404, "model_not_found", f"there is no model {body.model!r}: see /v1/models")
    is_stream = body.stream is True
    if (task := answer_task(_read_texts(body.messages))) is not None:
        return _answer_text(body, new_id(), task, is_stream=is_stream)
    turn = await _take_turn(gateway, request, caller, body)
    if is_stream:
        options = body.stream_options or StreamOptionsBody()
        encoder = ChatEncoder(model=body.model, run_id=turn.run_id, includes_usage=options.include_usage)
        return await gateway.open_stream(turn.run_id, turn.versions, encoder)
    run = await _wait_with_client(gateway, request, turn.run_id)
    return _answer_run(body, run)


async def list_models(gateway: Gateway, _request: Request, _caller: Caller, _body: object) -> Response:
    """List the agents as OpenAI's models."""
    return JSONResponse({"object": "list", "data": [_build_model(name) for name in gateway.agents]})


async def get_model(gateway: Gateway, request: Request, _caller: Caller, _body: object) -> Response:
    """Return an agent as one of OpenAI's models."""
    name = request.path_params["model"]
    if name not in gateway.agents:
        return refuse_chat(404, "model_not_found", f"there is no model {name[:80]!r}: see /v1/models")
    return JSONResponse(_build_model(name))


def _build_model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "agentfsm"}


# From messages to a run.


async def _take_turn(gateway: Gateway, request: Request, caller: Caller, body: ChatBody) -> Turn:
    """Return the run that answers the request: that of an equal earlier request, the open one, or a new one."""
    prompt = _read_prompt(body.messages)
    conversation = _find_conversation(request, body)
    content = {"model": body.model, "messages": body.messages, "conversation": conversation}
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    key = request.headers.get("idempotency-key")
    if key is None and request.headers.get("x-stainless-retry-count", "0") != "0":
        earlier = await _find_request(gateway, caller, conversation, digest)
        if earlier is not None:
            return Turn(run_id=earlier, versions={})
    metadata = {**(body.metadata or {}), REQUEST_HASH: digest}
    if conversation is not None:
        return await say(
            gateway,
            caller,
            prompt,
            agent=body.model,
            session=conversation,
            key=key,
            metadata=metadata,
            request_hash=digest,
            answer=prompt,
            traceparent=read_traceparent(request),
        )
    started, _ = await gateway.start_run(
        caller,
        prompt,
        agent=body.model,
        messages=_read_history(body.messages[:-1]),
        metadata=metadata,
        key=key,
        traceparent=read_traceparent(request),
    )
    return Turn(run_id=started.id, versions={})


def _find_conversation(request: Request, body: ChatBody) -> str | None:
    named = [request.headers.get(name) for name in CONVERSATION_HEADERS]
    named.append((body.metadata or {}).get("conversation"))
    name = next((each for each in named if each), None)
    if name is not None and not (isinstance(name, str) and name.isprintable() and len(name) <= _MAX_NAME_CHARS):
        raise MisuseError(f"the name of a conversation must have 1 to {_MAX_NAME_CHARS} printable characters")
    return name


async def _find_request(gateway: Gateway, caller: Caller, conversation: str | None, digest: str) -> str | None:
    """Return the run that the same request of the caller started or was input of; None if there is none."""
    run = None if conversation is None else await find_latest_run(gateway, caller, conversation)
    if run is not None and await was_said(gateway.runs, run.id, digest):
        return run.id
    now = await gateway.runs.store.now()
    rows = await gateway.runs.list(
        Filter(user=caller.user, tenant=caller.tenant or "", purpose=""), limit=MAX_RECENT_RUNS
    )
    for row in rows:
        if row.created_at < now - RETRY_WINDOW_S:
            return None
        header = await gateway.runs.header(row.id)
        if caller.can_see(header) and header.metadata.get(REQUEST_HASH) == digest:
            return row.id
    return None


def _read_texts(messages: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Return the role and the text of each message; other parts are left out."""
    return [(str(each.get("role")), read_message_text(each.get("content"))) for each in messages]


def _read_prompt(messages: list[dict[str, Any]]) -> str:
    last = messages[-1]
    content = last.get("content")
    if last.get("role") != "user":
        raise MisuseError("the last message must be the user's")
    if isinstance(content, list) and any(isinstance(each, dict) and each.get("type") != "text" for each in content):
        raise MisuseError("messages of chat completions are read as text: AG-UI takes images and files")
    if isinstance(content, list):
        check_part_count(content)
    return read_message_text(content)


def _read_history(messages: list[dict[str, Any]]) -> list[Message]:
    """Return the texts of a client's history. Instructions, calls and results are left out."""
    history: list[Message] = []
    for role, text in _read_texts(messages):
        if text.strip() and role == "user":
            history.append(UserMessage(parts=(TextPart(text=text),)))
        elif text.strip() and role == "assistant":
            history.append(AssistantMessage(text=text))
    return history


# From a run to an answer.


async def _wait_with_client(gateway: Gateway, request: Request, run_id: str) -> Run:
    """Return the run once it is over or waits, or after `WAIT_S`. The wait ends if the client leaves."""
    async with anyio.create_task_group() as tasks:

        async def leave() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass
            tasks.cancel_scope.cancel()

        tasks.start_soon(leave)
        await gateway.wait_for(run_id, WAIT_S)
        tasks.cancel_scope.cancel()
    return await gateway.wait_for(run_id, 0)


def describe_waits(run: Run) -> str:
    """Return a text for a chat about the wait of a run, and how to decide."""
    lines = [f"[Run {run.id} waits]"]
    for item in run.pending:
        questions = " ".join(question.message for question in item.questions)
        what = questions or item.reason or item.description or json.dumps(item.arguments, ensure_ascii=False)
        name = f"{item.tool} ({item.call_id})" if item.call_id else "the run"
        how = "answer here" if item.kind in (PendingKind.QUESTION, PendingKind.INPUT) else HOW_TO_RESOLVE[item.kind]
        lines.append(f"- {item.kind} of {name}: {what}; {how}")
    return "\n".join(lines)


def _answer_run(body: ChatBody, run: Run) -> Response:
    if run.stop_reason is not None and run.state is not State.DONE:
        return refuse_chat(422, str(run.stop_reason), f"run {run.id} ended without an answer: {run.stop_message}")
    if run.state is State.DONE:
        output = read_output(run)
        text = output if isinstance(output, str) else json.dumps(output, ensure_ascii=False)
    elif run.is_waiting:
        text = describe_waits(run)
    else:
        text = f"[Run {run.id} goes on; see GET /v1/runs/{run.id}]"
    return _answer_text(body, run.id, text, usage=_build_usage(run))


def _build_usage(run: Run) -> dict[str, int]:
    tokens_in, tokens_out = run.usage.input_tokens, run.usage.output_tokens
    return {"prompt_tokens": tokens_in, "completion_tokens": tokens_out, "total_tokens": tokens_in + tokens_out}


def _answer_text(
    body: ChatBody, run_id: str, text: str, *, is_stream: bool = False, usage: dict[str, int] | None = None
) -> Response:
    if is_stream:
        encoder = ChatEncoder(model=body.model, run_id=run_id)
        content = encoder.write_text(text) + encoder.write_finish()
        return Response(content, media_type="text/event-stream")
    message = {"role": "assistant", "content": text, "refusal": None}
    choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}
    answer = {"id": f"chatcmpl-{run_id}", "object": "chat.completion", "created": int(time.time())}
    counted = usage or {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
    return JSONResponse(answer | {"model": body.model, "choices": [choice], "usage": counted})


@attrs.define(eq=False, repr=False, kw_only=True)
class ChatEncoder:
    """Encoder of chunks of a chat completion: the texts of the model, and at the end the wait of the run."""

    ends_at_wait = True
    folds = True

    model: str
    run_id: str
    includes_usage: bool = False
    """Whether the last chunk has the usage."""

    _run: Run | None = attrs.field(default=None, init=False)
    _pieces: PieceFilter = attrs.field(factory=PieceFilter, init=False)
    _created: int = attrs.field(factory=lambda: int(time.time()), init=False)
    _has_text: bool = attrs.field(default=False, init=False)
    _is_apart: bool = attrs.field(default=False, init=False)
    """Whether the next text begins a paragraph, because it is that of another reply."""

    def encode_start(self, run: Run | None) -> str:
        """Begin the message."""
        self._run = run
        return self._write_chunk({"role": "assistant", "content": ""})

    def encode_event(self, item: JournalEvent, run: Run | None, position: str) -> str:  # noqa: ARG002
        """Write the rest of a reply."""
        if run is None or item.run_id != self.run_id:
            return ""
        self._run, event, text = run, item.event, ""
        if isinstance(event, REPLIES):
            rest = self._pieces.finish(event.message.text)
            text = self.write_text(event.message.text, is_apart=True) if rest is None else self.write_text(rest)
            self._is_apart = self._has_text
        for piece, offset in self._pieces.take_early():
            text += self.encode_delta(piece, offset)
        return text

    def encode_delta(self, event: StreamEvent, offset: int) -> str:
        """Write a piece of text."""
        if self._run is None or getattr(event, "run_id", "") != self.run_id:
            return ""
        piece = self._pieces.accept(self._run, event, offset)
        return self.write_text(piece.text) if isinstance(piece, TextDelta) else ""

    def encode_end(self, run: Run | None, position: str) -> str:  # noqa: ARG002
        """Write the wait of the run, or why it failed, and the end."""
        assert run is not None  # noqa: S101  `folds` is set
        if run.state is State.ERROR:
            return self._write_error(str(run.stop_reason), f"run {run.id} ended without an answer: {run.stop_message}")
        text = self.write_text(describe_waits(run), is_apart=True) if run.is_waiting else ""
        return text + self.write_finish(_build_usage(run) if self.includes_usage else None)

    def encode_cut(self, ending: Ending) -> str:
        """Write an error, because a stream that only stopped would look like a whole answer."""
        return self._write_error(f"stream_{ending}", f"the stream ended; see GET /v1/runs/{self.run_id}")

    def write_text(self, text: str, *, is_apart: bool = False) -> str:
        """Write a text."""
        if not text:
            return ""
        gap = "\n\n" if self._has_text and (is_apart or self._is_apart) else ""
        self._has_text, self._is_apart = True, False
        return self._write_chunk({"content": gap + text})

    def write_finish(self, usage: dict[str, int] | None = None) -> str:
        """Write the end of the message."""
        text = self._write_chunk({}, "stop")
        if usage is not None:
            text += f"data: {to_json({**self._build_head(), 'choices': [], 'usage': usage})}\n\n"
        return f"{text}data: [DONE]\n\n"

    def _write_error(self, code: str, text: str) -> str:
        error = {"message": text, "type": "server_error", "param": None, "code": code}
        return f"data: {to_json({'error': error})}\n\n"

    def _write_chunk(self, delta: dict[str, Any], reason: str | None = None) -> str:
        choice = {"index": 0, "delta": delta, "finish_reason": reason, "logprobs": None}
        return f"data: {to_json({**self._build_head(), 'choices': [choice]})}\n\n"

    def _build_head(self) -> dict[str, Any]:
        head = {"id": f"chatcmpl-{self.run_id}", "object": "chat.completion.chunk", "created": self._created}
        return {**head, "model": self.model}


OPENAI: Final = RouteGroup(
    name="openai",
    endpoints=(
        Endpoint(
            method="POST",
            path="/v1/chat/completions",
            handler=complete_chat,
            scope="run",
            body=ChatBody,
            refuse=refuse_chat,
        ),
        Endpoint(method="GET", path="/v1/models", handler=list_models, refuse=refuse_chat),
        Endpoint(method="GET", path="/v1/models/{model}", handler=get_model, refuse=refuse_chat),
    ),
)
