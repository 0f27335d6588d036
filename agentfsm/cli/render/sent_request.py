"""Write the request that a model got in a turn as lines for a terminal."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

from agentfsm.core.messages import AssistantMessage
from agentfsm.core.text_safety import strip_unsafe
from agentfsm.core.usage import format_usd

if TYPE_CHECKING:
    from agentfsm.engine.sent_request import SentPart, SentRequest


def format_sent_request(found: SentRequest) -> Iterator[str]:
    """Yield the lines: what it costs and why, what has changed, the settings, and the parts in their order."""
    usage = found.usage
    reported = "estimated" if usage.estimated else "as the provider reports"
    yield (
        f"turn {found.turn}: {usage.input_tokens:,} tokens in ({usage.cached_tokens:,} from the cache), "
        f"{usage.output_tokens:,} out, {reported}; {usage.format_cost()}; estimate of the parts: {found.tokens:,}"
    )
    if found.gap:
        yield f"note: {found.gap}"
    for share in found.shares:
        usd = "" if share.usd is None else f"  {format_usd(share.usd, estimated=True)}"
        yield f"  {share.kind:<12} {share.share:>5.0%}  about {share.tokens:,} tokens{usd}"
    yield "largest:"
    for index in found.largest:
        yield f"  {_describe_part(found.parts[index])}"
    if found.broken_at is not None:
        yield f"the beginning of the request before ends at: {found.broken_at}"
    if found.loss is not None:
        yield f"read anew: {found.loss.tokens:,} tokens, because {found.loss.reason}"
    for part in found.removed:
        yield f"- {_describe_part(part)}"
    for name, value in (found.settings or {}).items():
        mark = "*" if name in found.changed_settings else " "
        yield strip_unsafe(f"{mark} {name}: {json.dumps(value, default=str)}")
    for part in found.parts:
        yield ""
        yield f"{'+' if part.is_new else '='} {_describe_part(part)}"
        for item in part.items:
            yield strip_unsafe(f"    from {item.source or 'the memory'}: {item.kind} {item.id}, score {item.score:.2f}")
        yield strip_unsafe("\n".join(f"    {line}" for line in _read_part(part).splitlines()))


def _describe_part(part: SentPart) -> str:
    """Return a part in a few words: "result of search: about 41,000 tokens, sent in 7 turns"."""
    sent = f", sent in {part.turns} turns" if part.turns > 1 else ""
    return strip_unsafe(f"{part.name}: about {part.tokens:,} tokens{sent}")


def _read_part(part: SentPart) -> str:
    message = part.message
    if message is None:
        return (
            part.text if part.schema is None else f"{part.text}\n{json.dumps(part.schema, ensure_ascii=False)}".strip()
        )
    if isinstance(message, AssistantMessage):
        return "\n".join([message.text, *[f"{call.name}({call.arguments})" for call in message.calls]]).strip()
    return message.text
