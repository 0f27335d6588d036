"""Keep the replies of a model, and give them again to exactly the same request.

It is meant for tests, evaluations and replays, in which the same requests come again. A reply from the cache is not a
new sample of the model: it does not show how often the model is right. For the answers of an agent to its users, see
`AnswerCache`.

The key of a reply is a hash of the request: the model, its address with the query, the instructions, the messages, the
tools, the settings and the form of the answer. Headers of the model are left out, because they may be secrets or differ
in each process: use another store for headers that change the replies. The replies are records of a store, so that a
file or a server keeps them.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final

import attrs

from agentfsm.core.errors import ConflictError, MisuseError, StoreError
from agentfsm.core.messages import AssistantMessage, Message, NativeReply, SystemMessage, ToolResult, UserMessage
from agentfsm.core.usage import Usage
from agentfsm.core.validation import COUNT, POSITIVE
from agentfsm.models.wrappers.base import CompositeModel, ask_model
from agentfsm.models.wrappers.fallback import Fallback
from agentfsm.models.wrappers.router import Router
from agentfsm.models.wrappers.tiered import Tiered
from agentfsm.ports.model import (
    CallChunk,
    FinishChunk,
    FinishReason,
    ProposedCall,
    Reply,
    TextChunk,
    ThinkingChunk,
    identify_model,
    to_mutable_json,
)
from agentfsm.ports.store import Clock, Store, SystemClock, ensure_store
from agentfsm.ports.stored import MAX_RECORD_BYTES

if TYPE_CHECKING:
    from agentfsm.core.messages import JSON
    from agentfsm.core.settings import Settings
    from agentfsm.ports.model import Emit, Model, Request
    from agentfsm.ports.stored import StoreRecord

# Kind of the records of replies.
KIND: Final = "reply_cache"
# Version of the form of a record, part of each key: another form finds none of the old records.
_FORM: Final = 2
# Seconds for which a reply is kept: a month, in which recordings of tests are made anew anyway.
REPLY_TTL_S: Final = 30 * 86_400.0
# Most replies that are kept: at some 5 KB each, 50 MB.
MAX_REPLIES: Final = 10_000
# Replies in a group that keeps its own bound. Counting them reads a group, and not the whole cache.
_GROUP_SIZE: Final = 32
# Finish reasons of replies that the same request may get again.
_KEPT_REASONS: Final = frozenset({FinishReason.STOP, FinishReason.TOOL_CALLS})
_log = logging.getLogger("agentfsm.models")
_HIT: Final = Usage(cached_replies=1)


class CachedModel(CompositeModel):
    """Model that asks another one, and gives its replies again to the same requests.

    Example: `CachedModel("openai:gpt-5.4-mini", SQLiteStore("replies.db"))`, with `Settings(temperature=0)`.

    A reply from the cache has no tokens and costs nothing: its usage is `Usage(cached_replies=1)`, which the journal
    records and `run.usage` adds up. Streamed, it comes in one piece for the text, and one for each call.

    Never kept are replies to requests with tools of the provider, which may have effects, and replies that were cut
    off, refused or paused. If the store fails, the model is asked as without a cache, and the log has a warning.

    Args:
        model: The model, or its string. A `Router` or a `Tiered` is refused, because its choice may depend on more than
            the request, and a `Fallback` as well, because the reply of a substitute would outlast the outage: wrap the
            models in them.
        store: Store that keeps the replies as records. The model does not close it.
        ttl_s: Seconds for which a reply is kept, above 0. Default 2,592,000 (30 days).
        max_replies: Most replies that are kept, 1 or more; the oldest of a group of 32 gives way to a new one. Default
            10,000.
        any_settings: Whether replies to requests whose settings leave the model free are kept as well: those without
            temperature=0 and without a seed.
        clock: Clock for `ttl_s`. Default: that of the system.

    Raises:
        MisuseError: when an argument is invalid.
    """

    def __init__(
        self,
        model: Model | str,
        store: Store,
        *,
        ttl_s: float = REPLY_TTL_S,
        max_replies: int = MAX_REPLIES,
        any_settings: bool = False,
        clock: Clock | None = None,
    ) -> None:
        POSITIVE.check("CachedModel", "ttl_s", ttl_s)
        COUNT.check("CachedModel", "max_replies", max_replies)
        super().__init__("", [model])
        if (chooser := _find_chooser(self.models[0])) is not None:
            raise MisuseError(
                f"CachedModel cannot wrap a {type(chooser).__name__}, whose choice may depend on more than the "
                "request: wrap each of its models instead"
            )
        self._store = ensure_store(store)
        self._ttl_s, self._any_settings = ttl_s, any_settings
        self._clock: Clock = clock or SystemClock()
        self._prefix_digits, self._group_size = _split(max_replies)
        self._identity = identify_model(self.models[0])

    async def reply(self, request: Request, emit: Emit | None = None) -> Reply:
        """Return the reply to this request from the cache, or ask the model and keep its reply; see `Model.reply`.

        Raises:
            MisuseError: if the settings leave the model free, and `any_settings` is False.
        """
        if request.hosted_tools:
            return await ask_model(self.models[0], request, emit)
        if not self._any_settings:
            _check_determined(request.settings)
        key = self._hash_request(request)
        record = await self._read(key)
        if record is not None and (kept := _decode_reply(record.value)) is not None:
            if emit is not None:
                _emit_reply(kept, emit)
            return kept
        reply = await ask_model(self.models[0], request, emit)
        has_effects = reply.hosted is not None or reply.unanswered
        if reply.finish_reason in _KEPT_REASONS and not reply.is_empty and not has_effects:
            await self._write(key, reply, record)
        return reply

    def _hash_request(self, request: Request) -> str:
        settings = attrs.asdict(attrs.evolve(request.settings, stream=False))  # streaming does not change the reply
        tools = [[each.name, each.description, each.parameters, each.strict] for each in request.tools]
        output = None if request.output is None else [request.output.name, request.output.schema]
        messages = [_DESCRIBED[type(message)](message) for message in request.messages]
        parts = [_FORM, self._identity, request.instructions, messages, tools, settings, output, request.is_plain]
        text = json.dumps(to_mutable_json(parts), sort_keys=True, default=str)
        return sha256(text.encode("utf-8", "surrogatepass")).hexdigest()

    async def _read(self, key: str) -> StoreRecord | None:
        try:
            return await self._store.read_record(KIND, key)
        except StoreError as error:
            _warn(error)
            return None

    async def _write(self, key: str, reply: Reply, before: StoreRecord | None) -> None:
        now = self._clock.now()
        value = _encode_reply(reply, now)
        if len(json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")) > MAX_RECORD_BYTES:
            return
        revision = 0 if before is None else before.revision
        try:
            await self._store.write_record(KIND, key, value, revision=revision, expires_at=now + self._ttl_s)
            kept = await self._store.list_records(KIND, prefix=key[: self._prefix_digits])
            # The oldest replies of a group that has more than its share are deleted.
            for record in sorted(kept, key=_read_time)[: max(len(kept) - self._group_size, 0)]:
                await self._store.delete_record(KIND, record.key, revision=record.revision)
        except ConflictError:  # another request has written the same reply
            return
        except StoreError as error:
            _warn(error)


def _split(max_replies: int) -> tuple[int, int]:
    """Return how many digits of a key name its group, and the most replies in a group."""
    digits = 0
    while 16 ** (digits + 1) * _GROUP_SIZE <= max_replies:
        digits += 1
    return digits, max_replies // 16**digits


def _read_time(record: StoreRecord) -> float:
    value: Any = record.value
    return float(value["at"]) if isinstance(value, dict) and isinstance(value.get("at"), int | float) else 0.0


def _check_determined(settings: Settings) -> None:
    if settings.temperature != 0 and settings.seed is None:
        raise MisuseError(
            "CachedModel keeps replies to requests with temperature=0 or a seed, because others are one of many "
            "samples: set Settings(temperature=0), or CachedModel(..., any_settings=True)"
        )


def _warn(error: StoreError) -> None:
    _log.warning("the reply cache cannot be used, the model is asked: %s", type(error).__name__)


# The parts of each message that a provider is sent. Ids of calls are those of agentfsm, which follow from the turn.


def _describe_assistant(message: AssistantMessage) -> object:
    calls = [[call.id, call.name, call.arguments] for call in message.calls]
    native = None if message.native is None else attrs.asdict(message.native)
    return ["assistant", message.text, calls, native, message.paused]


_DESCRIBED: Final[Mapping[type[Message], Callable[[Any], object]]] = {
    SystemMessage: lambda message: ["system", message.text],
    UserMessage: lambda message: ["user", [[type(part).__name__, attrs.asdict(part)] for part in message.parts]],
    AssistantMessage: _describe_assistant,
    ToolResult: lambda message: [
        "result",
        message.call_id,
        message.tool,
        message.outcome,
        message.text,
        [[type(part).__name__, attrs.asdict(part)] for part in message.parts],
    ],
}


def _find_chooser(model: Model) -> Model | None:
    """Return the model that chooses among several, the model itself or one in it; None if there is none."""
    if isinstance(model, Fallback | Router | Tiered):
        return model
    inner = model.models if isinstance(model, CompositeModel) else ()
    return next((found for each in inner if (found := _find_chooser(each)) is not None), None)


def _encode_reply(reply: Reply, at: float) -> dict[str, JSON]:
    return {
        "at": at,
        "text": reply.text,
        "calls": [[call.id, call.name, call.arguments] for call in reply.calls],
        "finish_reason": str(reply.finish_reason),
        "native": None if reply.native is None else attrs.asdict(reply.native),
        "model": reply.model,
        "thinking": reply.thinking,
    }


def _decode_reply(value: Any) -> Reply | None:
    """Return the reply of a record; None if the record is not one."""
    try:
        return Reply(
            text=value["text"],
            calls=tuple([ProposedCall(id=id_, name=name, arguments=text) for id_, name, text in value["calls"]]),
            finish_reason=FinishReason(value["finish_reason"]),
            native=None if value["native"] is None else NativeReply(**value["native"]),
            model=value["model"],
            thinking=value["thinking"],
            usage=_HIT,
        )
    except (KeyError, TypeError, ValueError):
        return None


def _emit_reply(reply: Reply, emit: Emit) -> None:
    if reply.thinking:
        emit(ThinkingChunk(reply.thinking))
    if reply.text:
        emit(TextChunk(reply.text))
    for index, call in enumerate(reply.calls):
        emit(CallChunk(index=index, name=call.name, arguments=call.arguments, is_complete=True))
    emit(FinishChunk(reason=reply.finish_reason))
