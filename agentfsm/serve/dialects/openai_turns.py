"""From a request in OpenAI's form to the run that answers it: an agent is a model, and a conversation is a session.

In a conversation the store has the history, and that of the client is not read. Without one, the client's messages are
the history; its calls and their results are left out, so that no client can claim them. The words of `system` and
`developer` messages count as the user's, because a client has the rights of its user, and not those of the author of
the agent.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Protocol, TypeVar

import anyio
import attrs
from pydantic import ConfigDict, Field
from starlette.responses import JSONResponse, Response

from agentfsm.agents.admission import check_part_count
from agentfsm.core.errors import ConflictError, MisuseError
from agentfsm.core.messages import AssistantMessage, Message, Part, TextPart, UserMessage
from agentfsm.core.value import Value
from agentfsm.models.openai.conversion import from_openai
from agentfsm.ports.store import Filter
from agentfsm.serve.bodies import RequestBody
from agentfsm.serve.dialects.answers import Answer, AnswerEncoder, AnswerWriter, read_answer, write_answer
from agentfsm.serve.dialects.conversations import Turn, find_latest_run, say, was_said
from agentfsm.serve.dialects.openai_fields import KEPT, RefusedFieldError, RequestTerms, read_terms
from agentfsm.serve.queries import read_traceparent

if TYPE_CHECKING:
    from starlette.requests import Request

    from agentfsm.core.run import Run
    from agentfsm.serve.access import Caller
    from agentfsm.serve.event_stream import RunEventStream
    from agentfsm.serve.gateway import Gateway

# Headers that name the conversation, in the order in which they count.
CONVERSATION_HEADERS: Final = ("x-conversation-id", "x-openwebui-chat-id")
# Seconds that an answer waits for the end of a run: OpenAI's client gives up then.
WAIT_S: Final = 600.0
# Seconds within which a request of OpenAI's client that says that it is a retry continues the run of the first one.
RETRY_WINDOW_S: Final = 900.0
# Runs of the caller among which that run is looked for.
MAX_RECENT_RUNS: Final = 50
# Keys in the metadata of a run: the hashes of its request, and of the instructions that its conversation has read.
REQUEST_HASH: Final = f"{KEPT}request"
INSTRUCTIONS_HASH: Final = f"{KEPT}instructions"
# Types of errors, as in OpenAI's answers, by status.
_ERROR_TYPES: Final = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_MAX_NAME_CHARS: Final = 200
_INVALID: Final = 422
_SERVER_ERROR: Final = 500


def refuse_openai(status: int, code: str, text: str, headers: Any = None, *, param: str | None = None) -> Response:
    """Return the answer to a request that is refused, in OpenAI's form."""
    if (status, code) == (_INVALID, "invalid"):  # a body of a wrong form, for which OpenAI has 400
        status, param = 400, text.partition(":")[0]
    kind = "server_error" if status >= _SERVER_ERROR else _ERROR_TYPES.get(status, "invalid_request_error")
    return JSONResponse({"error": {"message": text, "type": kind, "param": param, "code": code}}, status, headers)


class OpenAIBody(RequestBody):
    """Fields that both endpoints read. All others are checked against the table of fields."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="allow", strict=True)

    model: Annotated[str, Field(min_length=1, max_length=_MAX_NAME_CHARS)]
    """Name of the agent."""

    stream: bool | None = None
    """Whether the answer is streamed."""

    metadata: dict[str, Any] | None = None
    """Data of the client, stored with the run. `conversation` names the conversation."""


@attrs.frozen(kw_only=True)
class Said(Value):
    """The messages of a request."""

    prompt: tuple[Part, ...]
    """The last message, which is the user's."""

    speaker: str = ""
    """Name of who said it, which stands before it unless it answers a question; empty if it has none."""

    history: tuple[Message, ...] = ()
    """The messages before it."""

    opening: tuple[Part, ...] = ()
    """Instructions between these and the prompt."""

    instructions: str = ""
    """All instructions, those of the history included."""

    @property
    def words(self) -> tuple[Part, ...]:
        """The prompt, after the name of its speaker."""
        return (*_name_speaker(self.speaker), *self.prompt)

    @property
    def answer(self) -> str | None:
        """The prompt as the answer to a question; None if it is not a text."""
        texts = [part.text for part in self.prompt if isinstance(part, TextPart)]
        return "\n".join(texts) if len(texts) == len(self.prompt) else None


def _name_speaker(name: str) -> tuple[TextPart, ...]:
    return (TextPart(text=f"{name}:"),) if name else ()


def read_messages(messages: Iterable[tuple[str, Mapping[str, Any]]]) -> Said:
    """Read the messages of a request.

    Args:
        messages: Path of each message in the request, and the message as in chat completions.

    Raises:
        RefusedFieldError: when a message cannot be read, or the last one is not the user's.
    """
    history: list[Message] = []
    instructions: list[str] = []
    before: list[Part] = []  # words that stand before those of the next message of the user
    prompt: tuple[Part, ...] = ()
    opening: tuple[Part, ...] = ()
    role, path, speaker = None, "messages", ""
    for path, fields in messages:
        role = fields.get("role")
        if role in ("tool", "function"):
            continue
        speaker = fields.get("name") or ""
        if not isinstance(speaker, str):
            raise RefusedFieldError(f"{path}.name", f"{path}.name is refused: it must be a text")
        try:
            content = {name: fields[name] for name in ("role", "content", "refusal") if name in fields}
            [message, *_] = from_openai([content]) or [None]
        except MisuseError as error:
            raise RefusedFieldError(path, f"{path} is refused: {str(error).removeprefix('messages[0]: ')}") from None
        prompt, named = (), _name_speaker(speaker)
        if isinstance(message, UserMessage):
            prompt, opening, before = message.parts, tuple(before), []
            history.append(attrs.evolve(message, parts=(*opening, *named, *prompt)))
        elif isinstance(message, AssistantMessage):
            text = "\n".join([*[part.text for part in named], message.text])
            history.append(attrs.evolve(message, text=text))
        elif message is not None:
            text = "\n".join([*[part.text for part in named], getattr(message, "text", "")])
            instructions.append(text)
            before.append(TextPart(text=text))
    if role != "user":
        raise RefusedFieldError(path, f"{path} is refused: the last message must be the user's")
    if not prompt:
        raise RefusedFieldError(path, f"{path} is refused: it is empty")
    check_part_count(prompt)
    return Said(
        prompt=prompt,
        speaker=speaker,
        history=tuple(history[:-1]),
        opening=opening,
        instructions="\n\n".join(instructions),
    )


def find_conversation(request: Request, body: OpenAIBody, named: object = None) -> str | None:
    """Return the name of the conversation of a request; None if it has none.

    Raises:
        MisuseError: when it is not a name.
    """
    names = [named, *[request.headers.get(name) for name in CONVERSATION_HEADERS]]
    names.append((body.metadata or {}).get("conversation"))
    name = next((each for each in names if each), None)
    if name is None or (isinstance(name, str) and name.isprintable() and len(name) <= _MAX_NAME_CHARS):
        return name
    raise MisuseError(f"the name of a conversation must have 1 to {_MAX_NAME_CHARS} printable characters")


async def take_turn(
    gateway: Gateway,
    request: Request,
    caller: Caller,
    *,
    body: OpenAIBody,
    terms: RequestTerms,
    said: Said,
    conversation: str | None = None,
    previous: Run | None = None,
) -> Turn:
    """Return the run that answers a request: that of an equal earlier request, the open one, or a new one.

    Args:
        gateway: The gateway.
        request: The request.
        caller: The caller.
        body: Its body.
        terms: What it asks for.
        said: Its messages; in a conversation the history is not read.
        conversation: Name of the conversation.
        previous: The run after which the conversation goes on, instead of its name.

    Raises:
        ConflictError: when the open run of the conversation waits for something else, or has other terms.
    """
    content = {**body.model_dump(), "conversation": conversation}
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    key = request.headers.get("idempotency-key")
    latest = previous if conversation is None else await find_latest_run(gateway, caller, conversation)
    if key is None and request.headers.get("x-stainless-retry-count", "0") != "0":
        earlier = await _find_request(gateway, caller, latest, digest)
        if earlier is not None:
            return Turn(run_id=earlier, versions={})
    metadata = {**(body.metadata or {}), **terms.kept, REQUEST_HASH: digest}
    if conversation is None and previous is None:
        started, _ = await gateway.start_run(
            caller,
            (*said.opening, *said.words),
            agent=body.model,
            messages=said.history,
            settings=terms.settings,
            metadata=metadata,
            key=key,
            traceparent=read_traceparent(request),
        )
        return Turn(run_id=started.id, versions={})
    prompt = said.words
    if said.instructions:
        metadata[INSTRUCTIONS_HASH] = hashlib.sha256(said.instructions.encode()).hexdigest()
        known = None if key is None else (await gateway.find_keyed_run(caller, key))[1]
        if known is not None and known.metadata.get(REQUEST_HASH) == digest:
            return Turn(run_id=known.id, versions={})
        has_read = latest is not None and latest.header.metadata.get(INSTRUCTIONS_HASH) == metadata[INSTRUCTIONS_HASH]
        if latest is not None and not latest.is_over and not has_read:
            raise ConflictError(
                f"run {latest.id!r} of this conversation goes on, with the instructions of its first message: send the "
                "same ones, or leave them out, until it is over"
            )
        if not has_read:
            prompt = (TextPart(text=said.instructions), *prompt)
    return await say(
        gateway,
        caller,
        prompt,
        agent=body.model,
        session=conversation,
        after=previous,
        settings=terms.settings,
        key=key,
        metadata=metadata,
        request_hash=digest,
        answer=said.answer,
        traceparent=read_traceparent(request),
    )


async def _find_request(gateway: Gateway, caller: Caller, latest: Run | None, digest: str) -> str | None:
    """Return the run that the same request of the caller started or was input of; None if there is none."""
    if latest is not None and await was_said(gateway.runs, latest.id, digest):
        return latest.id
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


class TurnWriter(AnswerWriter, Protocol):
    """Writes the answer to a request as events, or whole."""

    def build_response(self, answer: Answer, /, *, is_formed: bool) -> Response:
        """Return the whole answer."""
        ...


@attrs.frozen(kw_only=True)
class Asked(Value):
    """What a request says, and where it goes on."""

    said: Said | None
    """Its messages; None for a front end's own request, which is answered without a run."""

    task: str = ""
    """The answer to such a request."""

    conversation: str | None = None
    """Name of the conversation, as far as the messages have it."""

    previous: Run | None = None
    """The run after which it goes on, instead of a conversation."""

    in_background: bool = False
    """Whether to answer before the run is over."""


_Body = TypeVar("_Body", bound=OpenAIBody)


async def answer_request(
    gateway: Gateway,
    request: Request,
    caller: Caller,
    body: _Body,
    *,
    api: str,
    read: Callable[[Gateway, Caller, _Body], Awaitable[Asked]],
    begin: Callable[[Gateway, _Body, str | None], Awaitable[TurnWriter]],
) -> Response | RunEventStream:
    """Answer a request, whole or as events.

    Args:
        gateway: The gateway.
        request: The request.
        caller: The caller.
        body: Its body.
        api: Path of the endpoint.
        read: Reads what the request says.
        begin: Returns the writer of the answer, for the id of the run; for None of a new answer without a run.
    """
    if body.model not in gateway.agents:
        return refuse_openai(404, "model_not_found", f"there is no model {body.model!r}: see /v1/models", param="model")
    try:
        terms = read_terms(api, gateway.agents[body.model], body.model_dump(exclude_unset=True))
        asked = await read(gateway, caller, body)
    except RefusedFieldError as error:
        return refuse_openai(400, "unsupported_parameter", str(error), param=error.param)
    if asked.said is None:
        writer, answer = await begin(gateway, body, None), Answer(text=asked.task)
        if body.stream:
            return Response(write_answer(writer, answer), media_type="text/event-stream")
        return writer.build_response(answer, is_formed=False)
    turn = await take_turn(
        gateway,
        request,
        caller,
        body=body,
        terms=terms,
        said=asked.said,
        conversation=find_conversation(request, body, asked.conversation) if asked.previous is None else None,
        previous=asked.previous,
    )
    writer = await begin(gateway, body, turn.run_id)
    if body.stream:
        encoder = AnswerEncoder(
            run_id=turn.run_id, writer=writer, decode=gateway.attach_decoder, is_formed=terms.is_formed
        )
        return await gateway.open_stream(turn.run_id, turn.versions, encoder)
    if asked.in_background:
        run = await gateway.wait_for(turn.run_id, 0)
    else:
        run = await wait_with_client(gateway, request, turn.run_id)
    return writer.build_response(read_answer(run), is_formed=terms.is_formed)


async def wait_with_client(gateway: Gateway, request: Request, run_id: str) -> Run:
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
