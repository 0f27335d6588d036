"""Parts of a model request, by their sources."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

import attrs

from agentfsm.core.labels import Label
from agentfsm.core.messages import Message, MessageOrigin, UserMessage
from agentfsm.core.value import Value


class ViewSource(StrEnum):
    """Source of a part of a request."""

    TOOLS = "tools"
    """Definitions of the tools, those of the provider included."""

    AGENT = "agent"
    """Instructions of the agent, with the form of its answer."""

    TOOL_SOURCES = "tool sources"
    """Instructions of the servers from which tools come."""

    GUARDS = "guards"
    """Instructions that guards add for this run."""

    PROFILE = "profile"
    """What the memory keeps of the user, which each request has."""

    HISTORY = "history"
    """Messages of the user and the model, and results of tools."""

    MEMORY = "memory"
    """Items that were recalled."""

    PLAN = "plan"
    """Results of a plan."""

    NOTE = "note"
    """The note at the end: notes and steps that a compaction hides, and the reminder."""


def find_source(message: Message) -> ViewSource:
    """Return the source of a message."""
    return _SOURCES.get(message.origin, ViewSource.HISTORY) if isinstance(message, UserMessage) else ViewSource.HISTORY


_SOURCES: Final = {MessageOrigin.MEMORY: ViewSource.MEMORY, MessageOrigin.PLAN: ViewSource.PLAN}


@attrs.frozen(kw_only=True)
class ViewPart(Value):
    """A part of a request, from one source."""

    source: ViewSource
    """Source of the part."""

    text: str = attrs.field(repr=False)
    """The part as text; of messages, that which a model reads of them."""

    tokens: int
    """Tokens of the part, in the unit of the counter in use."""

    labels: tuple[Label, ...] = ()
    """Labels of the data: of a result, its own; of an input and recalled items, those that the run has not from a call;
    of replies and the note, which may repeat all else, those of the run.
    """

    prefix: str = ""
    """Digest of the request from its beginning to the end of this part: 8 hexadecimal digits. If two requests have the
    same digest, the second may reuse the first one's entry in the provider's cache, and thinking that is bound to it.
    """


@attrs.frozen(kw_only=True)
class FixedParts(Value):
    """The parts that all requests of an agent with the same tools have: the tools, then the instructions."""

    parts: tuple[ViewPart, ...]
    """The parts, in the order of the request."""

    instructions: str
    """The instructions as they are sent."""

    tools_tokens: int
    """Tokens of the tools."""

    instructions_tokens: int
    """Tokens of the instructions."""

    digest: str
    """Hash of the agent's part of a request with the agent's own settings; empty if a function returns them."""
