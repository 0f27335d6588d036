"""Effects: the next step of a run, as data. The engine performs `run.effect` and returns an event."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import attrs

from agentfsm.core.events import Verdict
from agentfsm.core.messages import Message, ToolCall
from agentfsm.core.pending import Pending
from agentfsm.core.value import Value


@attrs.frozen(kw_only=True)
class ReadInbox(Value):
    """OBSERVE: read the inbox."""


@attrs.frozen(kw_only=True)
class AskModel(Value):
    """THINK: ask the model for the next reply."""

    turn: int
    """Number of the turn, from 1."""

    messages: Sequence[Message]
    """Messages that the model is shown: a valid history."""


@attrs.frozen(kw_only=True)
class RunTools(Value):
    """ACT: run these calls."""

    calls: tuple[ToolCall, ...]
    """Calls in the model's order; empty if only the end of the turn is left to record."""


@attrs.frozen(kw_only=True)
class Reflect(Value):
    """REFLECT: decide whether to continue, accept the draft or stop."""

    draft: str | None
    """Answer to judge; None after tool calls, and for a reply that the provider paused."""

    verdict: Verdict | None = None
    """Verdict that a judge has already given; None if there is none."""

    is_paused: bool = False
    """Whether the provider paused the reply, which the next turn continues."""


@attrs.frozen(kw_only=True)
class Wait(Value):
    """Wait for something from outside."""

    pending: tuple[Pending, ...]
    """Things that the run waits for."""


Effect: TypeAlias = ReadInbox | AskModel | RunTools | Reflect | Wait
