"""What has to happen next, as data: `run.effect` says it, the engine does it and hands back an event."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import attrs

from agentfsm.core.messages import Message, ToolCall
from agentfsm.core.pending import Pending
from agentfsm.core.value import Value
from agentfsm.core.verdict import Verdict


@attrs.frozen(kw_only=True)
class ReadInbox(Value):
    """OBSERVE: take in what has arrived."""


@attrs.frozen(kw_only=True)
class AskModel(Value):
    """THINK: ask for the next reply."""

    turn: int
    """The number that the reply will have, from 1."""

    messages: Sequence[Message]
    """What the model is shown: a valid history."""


@attrs.frozen(kw_only=True)
class RunTools(Value):
    """ACT: run these calls."""

    calls: tuple[ToolCall, ...]
    """In the model's order; empty where only the end of the turn is left to record."""


@attrs.frozen(kw_only=True)
class Reflect(Value):
    """REFLECT: go on, accept or stop."""

    draft: str | None
    """The answer to judge, or None after tools."""

    verdict: Verdict | None = None
    """What a judge has said of it already."""


@attrs.frozen(kw_only=True)
class Wait(Value):
    """Nothing can be done before something has come from outside."""

    pending: tuple[Pending, ...]


Effect: TypeAlias = ReadInbox | AskModel | RunTools | Reflect | Wait
