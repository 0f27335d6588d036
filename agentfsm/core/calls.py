"""The calls of a run: those of the open turn, as far as they are, and the record of those that are closed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Any, Final

import attrs

from agentfsm.core.fingerprint import short_hash
from agentfsm.core.header import Header
from agentfsm.core.messages import JSON, AssistantMessage, Message, Outcome, ToolCall, ToolResult
from agentfsm.core.pending import Pending
from agentfsm.core.value import Value


class Phase(StrEnum):
    """How far an open call is."""

    INTENDED = "intended"
    AWAITING_APPROVAL = "asked"
    APPROVED = "approved"
    RUNNING = "running"
    OUTCOME_UNKNOWN = "lost"
    PAUSED = "paused"
    FINISHED = "finished"


# What counts as an error of a tool.
ERROR_OUTCOMES: Final = frozenset({Outcome.FAILED, Outcome.TIMED_OUT})
# The phases in which somebody outside has to say something.
UNDECIDED_PHASES: Final = frozenset({Phase.AWAITING_APPROVAL, Phase.OUTCOME_UNKNOWN, Phase.PAUSED})


@attrs.frozen(kw_only=True)
class Inquiry(Value):
    """What the tool of an open call has asked people, and what it was told."""

    rounds: int = 0
    """How many times it has asked."""

    state: str = "null"
    """What it gets back, as JSON text; the newest counts."""

    answers: Mapping[str, Any] = attrs.field(factory=dict)
    """By the question's key, of all rounds: the answer, or None where it was declined."""


@attrs.frozen(kw_only=True, slots=False)
class OpenCall(Value):
    """A call of the turn that is not closed yet. Not slotted: many fields are written a third faster into a dict."""

    call: ToolCall
    phase: Phase = Phase.INTENDED
    attempts: int = 0
    """How many times its tool was tried, as far as the journal tells."""

    losses: int = 0
    """How many times its worker died, or gave it up, while it was under way."""

    started_at: float = 0.0
    """When it was last taken up, seconds since 1970; 0 where it never was."""

    duration_s: float = 0.0
    """How long it then ran, where it was cut off; 0 where that is not known."""

    read_only: bool = False
    """Whether its tool declared, when it started, that it has no effect."""

    expires_at: float | None = None
    description: str = ""
    """What it will do, for the person who approves it."""

    digest: str = ""
    """Of the tool and the arguments that the person is asked about."""

    error: str = ""
    """Why the last approval was not carried out, while the person is asked again."""

    pending: tuple[Pending, ...] = ()
    """What it waits for, in the phase PAUSED."""

    inquiry: Inquiry | None = None
    """None where its tool has asked nothing."""

    result: ToolResult | None = None
    """Present in the phase FINISHED only."""

    def build_result(self, outcome: Outcome, content: str) -> ToolResult:
        """Return a result that comes from elsewhere than the tool, with what is known of how the call has run."""
        return ToolResult(
            call_id=self.call.id,
            tool=self.call.name,
            outcome=outcome,
            content=content,
            index=parse_index(self.call.id),
            started_at=self.started_at,
            duration_s=self.duration_s,
            attempts=self.attempts,
        )


@attrs.frozen(kw_only=True)
class CallRecord(Value):
    """A closed call, for audit."""

    turn: int
    call_id: str
    name: str
    arguments: dict[str, JSON]
    outcome: Outcome
    duration_s: float


@attrs.frozen(kw_only=True)
class FailureRecord(Value):
    """Something that failed on the way."""

    turn: int
    source: str
    """"model", or the name of the tool."""

    message: str


def find_last_turn(messages: Iterable[Message]) -> int:
    """Return the highest turn number among the call ids of a history; 0 where there is none."""
    calls = (call for m in messages if isinstance(m, AssistantMessage) for call in m.calls)
    return max((parse_turn(call.id) for call in calls), default=0)


_TURN_PATTERN: Final = re.compile(r"t([0-9]{1,8})(?:\.|\Z)")
_INDEX_PATTERN: Final = re.compile(r"(?:.*\.)?([0-9]{1,8})", re.DOTALL)


def parse_turn(call_id: str) -> int:
    """Return the turn of a call, as its id tells it; 0 where that was not made here."""
    found = _TURN_PATTERN.match(call_id)
    return 0 if found is None else int(found[1])


def parse_index(call_id: str) -> int:
    """Return a call's place in its reply, as its id tells it; 0 where that was not made here."""
    found = _INDEX_PATTERN.fullmatch(call_id)
    return 0 if found is None else int(found[1])


# Hexadecimal digits of the hash in a key: it only has to tell apart what one call of one run was, or was going to be.
KEY_HASH_DIGITS: Final = 8


def build_idempotency_key(header: Header, call: ToolCall) -> str:
    """Return the idempotency key of a call of the run with that header: the nonce, the call's id, a hash of the effect.

    The nonce tells runs apart, also those that had the same id one after the other. The hash, of the tool's name and
    the arguments, tells apart what a model asked for in the same place of one run before and after the record of it was
    lost, by a power cut or a restored backup. A run of a format older than 4 has no nonce, and its id stands for it.
    """
    effect = short_hash(f"{call.name}\n{call.canonical}", KEY_HASH_DIGITS)
    return f"{header.nonce or header.id}:{call.id}:{effect}"


def replace_arguments(header: Header, call: ToolCall, arguments: str) -> ToolCall:
    """Return a call that has not started with other arguments: another effect, and so under another key."""
    edited = attrs.evolve(call, arguments=arguments)
    return attrs.evolve(edited, key=build_idempotency_key(header, edited))


def parse_arguments(call: ToolCall) -> dict[str, JSON]:
    """Return the call's arguments as a dict."""
    arguments: dict[str, JSON] = json.loads(call.arguments)
    return arguments
