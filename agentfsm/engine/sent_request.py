"""Rebuild the request that a model got in a turn: its parts, their tokens and costs, what is new since the turn before.

The journal has the messages, and hashes of the rest. Tools, instructions and settings are those of the agent as it is
now; the hash says whether they were the same then.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import attrs

from agentfsm._lib.fairness import StepThrottle
from agentfsm.core import events as e
from agentfsm.core.codec import message_to_json
from agentfsm.core.errors import MisuseError
from agentfsm.core.messages import AssistantMessage, Message, SystemMessage, TextPart, ToolResult, UserMessage
from agentfsm.core.run import Run, begin_run
from agentfsm.core.usage import Usage
from agentfsm.core.value import Value
from agentfsm.core.view_parts import ViewSource, find_source
from agentfsm.engine.model_calls.view import build_view
from agentfsm.engine.replay import build_replay
from agentfsm.journal.cache_losses import CacheLoss, list_cache_losses, read_agent_hash
from agentfsm.journal.load import load_predecessor
from agentfsm.ports.model import to_mutable_json
from agentfsm.tokens.estimate import EstimatedCounter
from agentfsm.tokens.ledger import MESSAGE_TOKENS, TokenLedger, count_media, count_message, read_text
from agentfsm.tokens.tool_prompts import count_tools

if TYPE_CHECKING:
    from agentfsm.core.recalled_items import RecalledItem
    from agentfsm.engine.execution.config import EngineConfig
    from agentfsm.engine.execution.execution import Execution
    from agentfsm.ports.model import Request
    from agentfsm.ports.store import Store

Price: TypeAlias = Callable[[Usage], float | None]

_COUNTER: Final = EstimatedCounter()
# Parts that are named as the largest.
LARGEST: Final = 5


class SentKind(StrEnum):
    """Kind of a part of a request."""

    TOOLS = "tools"
    INSTRUCTIONS = "instructions"
    HISTORY = "history"
    RESULTS = "results"
    RECALLED = "recalled"
    PLAN = "plan"
    NOTE = "note"
    MEDIA = "media"
    """Images, files and recordings, which are inside of messages and results."""

    ANSWER = "answer"
    """The reply to the request."""


@attrs.frozen(kw_only=True)
class SentPart(Value):
    """A part of a request."""

    kind: SentKind
    name: str
    """Name of the tool, source of the instructions, or role of the message; "result of search" for a result."""

    text: str = attrs.field(default="", repr=False)
    """Description of the tool, or text of the instructions or the note; empty for messages."""

    schema: Mapping[str, Any] | None = None
    """Parameters of a tool, or the declaration of a tool of the provider; else None."""

    is_hosted: bool = False
    """Whether the provider executes the tool."""

    strict: bool = False
    """Whether the provider constrains the calls of the tool to its schema."""

    message: Message | None = None
    """The message; None for other parts."""

    items: tuple[RecalledItem, ...] = ()
    """Items of the memory that the message is made of, with their sources."""

    tokens: int
    """Tokens of the part, estimated."""

    media_tokens: int = 0
    """Part of these that is images, files and recordings."""

    turns: int = 0
    """Number of requests up to this one that had the message; 0 for other parts, and for notes."""

    is_new: bool = False
    """Whether the request before did not have it."""

    cached_tokens: int = 0
    """Tokens that the provider has read from its cache, if what it reports was the beginning of the request."""

    usd: float | None = None
    """US dollars of the part, as a share of what the input has cost; None if its price is unknown."""


@attrs.frozen(kw_only=True)
class SentShare(Value):
    """The tokens and the cost of all parts of one kind in a request."""

    kind: SentKind
    tokens: int
    """Tokens, estimated; those of the answer are the provider's, if it reports them."""

    usd: float | None
    share: float
    """Share of the cost of the turn, 0 to 1; of its tokens if the price is unknown."""


@attrs.frozen(kw_only=True)
class SentRequest(Value):
    """The request that a model got in a turn."""

    turn: int
    run: Run = attrs.field(repr=False)
    """The run as it was before the reply."""

    event: e.Answered
    """Event with the reply."""

    is_as_sent: bool | None
    """Whether tools, instructions and settings are those that were sent; False if the agent was changed since. None if
    that is unknown, because the agent is not known here or the journal has no hash.
    """

    gap: str
    """Why tools, instructions or settings are missing or may differ, for people; empty if they are as sent."""

    parts: tuple[SentPart, ...]
    """The parts in the order in which a provider reads them."""

    removed: tuple[SentPart, ...]
    """Parts of the request before that this one has not."""

    settings: Mapping[str, Any] | None
    """Settings that were set, with the model, the form of the answer, and marks for the cache; None if unknown."""

    changed_settings: tuple[str, ...]
    """Names of the settings that differ from those of the request before."""

    broken_at: str | None
    """Name of the first part of the request before that this one has not at its place, so that a cache of the provider
    ends before it; None if all of it is the beginning of this one, or there is none before.
    """

    loss: CacheLoss | None
    """Tokens of the provider's cache that this request could not use, with the cause; None if no such loss is known."""

    usage: Usage
    """Usage of the turn, as the provider reports it; `usage.estimated` says that it does not."""

    shares: tuple[SentShare, ...]
    """Tokens and cost by kind, in the order of the request, the answer last."""

    @property
    def tokens(self) -> int:
        """Tokens of all parts, estimated."""
        return sum(part.tokens for part in self.parts)

    @property
    def largest(self) -> tuple[int, ...]:
        """Indexes of the largest parts, the largest first."""
        order = sorted(range(len(self.parts)), key=lambda index: -self.parts[index].tokens)
        return tuple(order[:LARGEST])


@attrs.frozen
class _Snapshot(Value):
    run: Run
    event: e.Answered
    parts: tuple[SentPart, ...]
    settings: Mapping[str, Any] | None
    shape: str
    """Hash of the agent's part; empty if the agent is not known."""


async def read_sent_request(
    store: Store, run_id: str, turn: int | None = None, *, config: EngineConfig | None = None, deps: Any = None
) -> SentRequest:
    """Return the request that a model got in a turn.

    Args:
        store: The store of the journal.
        run_id: The id of the run.
        turn: Number of the turn, from 1; None for the newest.
        config: Configuration of the agent. None: tools and settings stay unknown.
        deps: Dependencies for the tools' `enabled` functions.

    Raises:
        MisuseError: if the run has no such turn.
        RunNotFoundError: if the store has no such run.
    """
    stored = await store.read(run_id)
    run = begin_run(stored.header, await load_predecessor(store, stored.header))
    replies = sum(isinstance(event, e.Answered) for event in stored.events)
    wanted = replies if turn is None else turn
    if not 1 <= wanted <= replies:
        raise MisuseError(f"turn={wanted}: the run has no reply of a model in this turn; its newest turn is {replies}")
    drive = (
        None
        if config is None
        else build_replay(config, store, run, deps, TokenLedger(_COUNTER, own_start=run.own_start))
    )
    starts: list[int] = []  # length of the history at each request
    recalled: dict[int, tuple[RecalledItem, ...]] = {}
    profile: tuple[RecalledItem, ...] = ()
    compacted_turn = 0
    taken: list[_Snapshot] = []
    for event in stored.events:
        await StepThrottle.enter()
        if isinstance(event, e.Answered):
            starts.append(len(run.messages))
            if run.turn + 1 in {wanted - 1, wanted}:
                known = {**recalled, id(run.profile): profile}
                moving = _list_moving_parts(run, _count_turns(run, starts, compacted_turn), known)
                taken.append(_take_snapshot(drive, run, event, moving))
            if run.turn + 1 == wanted:
                break
        before, run = run, run.apply(event)
        if isinstance(event, e.Compacted):
            compacted_turn = run.turn
        elif isinstance(event, e.Recalled):
            profile = profile if event.profile is None else event.profile
            if len(run.messages) > len(before.messages):
                recalled[id(run.messages[-1])] = event.items
    losses = [each for each in list_cache_losses(stored.events[: run.version + 1]) if each.turn == wanted]
    price = None if config is None else config.model.cost_usd
    return _compare(taken, losses[0] if losses else None, price)


def _take_snapshot(drive: Execution | None, run: Run, event: e.Answered, moving: Sequence[SentPart]) -> _Snapshot:
    if drive is None:
        return _Snapshot(run, event, (*_list_instructions(run.header.instructions or ""), *moving), None, "")
    drive.journal.run = run
    drive.ledger.update(run)
    view = build_view(drive)
    request = view.render(run.shown)
    parts = (*_list_tools(request), *_list_instructions(request.instructions), *moving)
    return _Snapshot(run, event, parts, _write_settings(request, drive.config, event), read_agent_hash(view.digest))


def _list_tools(request: Request) -> Iterator[SentPart]:
    for tool in request.tools:
        yield SentPart(
            kind=SentKind.TOOLS,
            name=tool.name,
            text=tool.description,
            schema=to_mutable_json(tool.parameters),
            strict=tool.strict,
            tokens=count_tools((tool,), _COUNTER),
        )
    for hosted in request.hosted_tools:
        own = {"provider": to_mutable_json(hosted.describe())}
        yield SentPart(kind=SentKind.TOOLS, name=hosted.name, schema=own, is_hosted=True, tokens=0)


def _list_instructions(text: str) -> Iterator[SentPart]:
    if text:
        tokens = _COUNTER.count(text) + MESSAGE_TOKENS
        yield SentPart(kind=SentKind.INSTRUCTIONS, name="instructions", text=text, tokens=tokens)


_KINDS: Final = {
    ViewSource.MEMORY: SentKind.RECALLED,
    ViewSource.PROFILE: SentKind.RECALLED,
    ViewSource.PLAN: SentKind.PLAN,
}


def _list_moving_parts(
    run: Run, turns: Mapping[int, int], recalled: Mapping[int, tuple[RecalledItem, ...]]
) -> list[SentPart]:
    parts = []
    for message in run.shown:
        source = ViewSource.PROFILE if message is run.profile else find_source(message)
        is_result = isinstance(message, ToolResult)
        media: Sequence[Any] = message.parts if isinstance(message, UserMessage | ToolResult) else ()
        parts.append(
            SentPart(
                kind=SentKind.RESULTS if is_result else _KINDS.get(source, SentKind.HISTORY),
                name=_name_message(message, source),
                message=message,
                items=recalled.get(id(message), ()),
                tokens=count_message(message, _COUNTER),
                media_tokens=sum([count_media(part) for part in media if not isinstance(part, TextPart)]),
                turns=turns.get(id(message), 0),
            )
        )
    if note := run.closing_note if run.cutoff else run.reminder:
        tokens = _COUNTER.count(note) + MESSAGE_TOKENS
        parts.append(SentPart(kind=SentKind.NOTE, name="reminder", text=note, tokens=tokens))
    return parts


def _name_message(message: Message, source: ViewSource) -> str:
    if isinstance(message, ToolResult):
        return f"result of {message.tool}"
    if isinstance(message, AssistantMessage):
        return "assistant"
    return str(source) if source is not ViewSource.HISTORY else "note" if isinstance(message, SystemMessage) else "user"


def _count_turns(run: Run, starts: Sequence[int], compacted_turn: int) -> dict[int, int]:
    """Return how many requests had each message of this one: those since it was added, or since it was compacted."""
    turns = {id(message): len(starts) - compacted_turn for message in run.compacted_messages}
    for index, message in enumerate(run.messages):
        turns[id(message)] = len(starts) - bisect_right(starts, index)
    return turns


def _write_settings(request: Request, config: EngineConfig, event: e.Answered) -> dict[str, Any]:
    """Return what is set of a request, beside its parts."""
    output = request.output
    asked = {
        "model": config.model.name,
        "replied": getattr(event, "model", ""),
        "served_model": getattr(event, "served_model", ""),
        **attrs.asdict(request.settings),
        "response_format": None if output is None else {"name": output.name, "schema": to_mutable_json(output.schema)},
        "timeout_s": request.timeout_s,
        "purpose": str(request.purpose),
        "cache_key": request.cache_key,
        "cache_ends_before": request.passing,
        "cache_keep_longer": request.keep_longer,
    }
    return {name: value for name, value in asked.items() if value not in (None, False, "", (), {}, 0)}


def _key(part: SentPart) -> tuple[object, ...]:
    text = part.text if part.message is None else read_text(part.message)
    return part.kind, part.name, text, repr(part.schema), part.strict


def _compare(taken: Sequence[_Snapshot], loss: CacheLoss | None, price: Price | None) -> SentRequest:
    now, before = taken[-1], taken[0] if len(taken) > 1 else None
    keys = [_key(part) for part in now.parts]
    old_keys = [] if before is None else [_key(part) for part in before.parts]
    known, present = set(old_keys), set(keys)
    old_parts = () if before is None else before.parts
    places = zip(old_keys, [*keys, *[None] * len(old_keys)], old_parts, strict=False)
    broken = next((part for old, new, part in places if old != new and part.kind is not SentKind.NOTE), None)
    parts = [
        attrs.evolve(part, is_new=before is not None and key not in known)
        for part, key in zip(now.parts, keys, strict=True)
    ]
    settings, old_settings = now.settings or {}, {} if before is None else before.settings or {}
    names = dict.fromkeys((*settings, *old_settings)) if before is not None else {}
    is_as_sent = now.shape == read_agent_hash(now.event.request) if now.shape and now.event.request else None
    priced, shares = _share(parts, now.event.usage, price)
    return SentRequest(
        turn=now.run.turn + 1,
        run=now.run,
        event=now.event,
        is_as_sent=is_as_sent,
        gap=_explain_gap(now, is_as_sent=is_as_sent),
        parts=tuple(priced),
        removed=tuple([part for part, key in zip(old_parts, old_keys, strict=True) if key not in present]),
        settings=now.settings,
        changed_settings=tuple([name for name in names if settings.get(name) != old_settings.get(name)]),
        broken_at=None if broken is None else broken.name,
        loss=loss,
        usage=now.event.usage,
        shares=tuple(shares),
    )


def _explain_gap(now: _Snapshot, *, is_as_sent: bool | None) -> str:
    if not now.shape:
        return f"agent {now.run.header.agent!r} is not known here, so its tools and settings are missing"
    if is_as_sent is False:
        return "the agent was changed since: tools, instructions and settings are those that it has now"
    return "" if is_as_sent else "the journal has no hash of this request, so tools and settings may have been others"


def _share(parts: Sequence[SentPart], usage: Usage, price: Price | None) -> tuple[list[SentPart], list[SentShare]]:
    """Distribute the tokens that the provider reports, and their cost, over the parts."""
    estimated = sum([part.tokens for part in parts])
    scale = usage.input_tokens / estimated if usage.input_tokens and estimated else 1.0
    input_tokens = usage.input_tokens or estimated
    cached_price, input_usd, output_usd = _find_prices(usage, input_tokens, price)
    left, weights, priced = float(usage.cached_tokens), [], []
    for part in parts:
        tokens = part.tokens * scale
        cached = min(left, tokens)
        left -= cached
        weights.append(tokens - cached + cached * cached_price)
        priced.append(attrs.evolve(part, cached_tokens=round(cached)))
    if input_usd is not None:
        unit = input_usd / (sum(weights) or 1.0)
        priced = [attrs.evolve(part, usd=weight * unit) for part, weight in zip(priced, weights, strict=True)]
    total_usd = None if input_usd is None or output_usd is None else input_usd + output_usd
    total_tokens = (input_tokens + usage.output_tokens) or 1

    def share(kind: SentKind, tokens: float, sent: float, usd: float | None) -> SentShare:
        portion = usd / total_usd if usd is not None and total_usd else sent / total_tokens
        return SentShare(kind=kind, tokens=round(tokens), usd=usd, share=portion)

    shares = []
    for kind in SentKind:
        portions = [(part, portion) for part in priced if (portion := _find_portion(part, kind))]
        if portions:
            tokens = sum([part.tokens * portion for part, portion in portions])
            usd = None if input_usd is None else sum([(part.usd or 0.0) * portion for part, portion in portions])
            shares.append(share(kind, tokens, tokens * scale, usd))
    if usage.output_tokens:
        shares.append(share(SentKind.ANSWER, usage.output_tokens, usage.output_tokens, output_usd))
    return priced, shares


def _find_portion(part: SentPart, kind: SentKind) -> float:
    """Return how much of a part is of a kind, 0 to 1: its media are of a kind of their own."""
    media = part.media_tokens / part.tokens if part.tokens else 0.0
    return media if kind is SentKind.MEDIA else 1 - media if kind is part.kind else 0.0


def _find_prices(usage: Usage, tokens: int, price: Price | None) -> tuple[float, float | None, float | None]:
    """Return the price of a cached token as a share of others, and the cost of the input and of the output."""
    if price is None or usage.cost_usd is None:
        return 1.0, None, None
    output = price(Usage(output_tokens=usage.output_tokens))
    if output is None or output > usage.cost_usd:
        return 1.0, None, None
    fresh = price(Usage(input_tokens=tokens))
    cached = price(Usage(input_tokens=tokens, cached_tokens=tokens))
    return (cached / fresh if fresh and cached is not None else 1.0), usage.cost_usd - output, output


def build_request_document(found: SentRequest, *, is_admin: bool = True) -> dict[str, Any]:
    """Return a request as JSON values.

    Args:
        found: The request.
        is_admin: Whether instructions, options of the provider's tools and further fields of the request are shown, and
            what a provider expects back of a reply, which has its text from before a filter.
    """
    settings = dict(found.settings or {})
    if not is_admin:
        settings.pop("extra_body", None)
    return {
        "turn": found.turn,
        "version": found.run.version + 1,
        "is_compacted": bool(found.run.cutoff),
        "messages": [_write_message(part.message, is_admin=is_admin) for part in found.parts if part.message],
        "offered": None if found.run.offered is None else list(found.run.offered),
        "hash": found.event.request or None,
        "is_as_sent": found.is_as_sent,
        "gap": found.gap,
        "parts": [_write_part(part, is_admin=is_admin) for part in found.parts],
        "removed": [_write_part(part, is_admin=is_admin) for part in found.removed],
        "largest": list(found.largest),
        "settings": None if found.settings is None else settings,
        "changed_settings": [name for name in found.changed_settings if is_admin or name != "extra_body"],
        "cache": {
            "broken_at": found.broken_at,
            "lost_tokens": 0 if found.loss is None else found.loss.tokens,
            "reason": "" if found.loss is None else found.loss.reason,
        },
        "tokens": found.tokens,
        "usage": attrs.asdict(found.usage),
        "shares": [attrs.asdict(share) for share in found.shares],
    }


def _write_part(part: SentPart, *, is_admin: bool) -> dict[str, Any]:
    is_hidden = not is_admin and part.kind is SentKind.INSTRUCTIONS
    return {
        "kind": part.kind,
        "name": part.name,
        "text": None if is_hidden else part.text,
        "schema": None if part.is_hosted and not is_admin else part.schema,
        "strict": part.strict,
        "message": None if part.message is None else _write_message(part.message, is_admin=is_admin),
        "items": [attrs.asdict(item) for item in part.items],
        "tokens": part.tokens,
        "media_tokens": part.media_tokens,
        "turns": part.turns,
        "is_new": part.is_new,
        "cached_tokens": part.cached_tokens,
        "usd": part.usd,
    }


def _write_message(message: Message, *, is_admin: bool) -> dict[str, Any]:
    document: dict[str, Any] = message_to_json(message)
    if not is_admin:
        document.pop("native", None)
    return document
