"""Calls of a run: the open calls with their phases, and records of closed calls."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Any, Final

import attrs

from agentfsm.core.events import Guarded
from agentfsm.core.header import Header, short_hash
from agentfsm.core.labels import ToolKind
from agentfsm.core.messages import (
    JSON,
    AssistantMessage,
    ErrorType,
    Message,
    Outcome,
    SystemMessage,
    ToolCall,
    ToolResult,
)
from agentfsm.core.pending import Pending
from agentfsm.core.value import Value


class Phase(StrEnum):
    """Phase of an open call."""

    INTENDED = "intended"
    AWAITING_APPROVAL = "asked"
    APPROVED = "approved"
    RUNNING = "running"
    OUTCOME_UNKNOWN = "lost"
    PAUSED = "paused"
    FINISHED = "finished"


# Error types of calls whose tool was running.
_TOOL_ERROR_TYPES: Final = (ErrorType.TOOL, ErrorType.TIMEOUT, ErrorType.UNAVAILABLE, ErrorType.RATE_LIMITED)
# Outcomes that count as errors of a tool.
ERROR_OUTCOMES: Final = frozenset({Outcome.FAILED, Outcome.TIMED_OUT})
# Phases that end only by a decision or input from outside.
UNDECIDED_PHASES: Final = frozenset({Phase.AWAITING_APPROVAL, Phase.OUTCOME_UNKNOWN, Phase.PAUSED})
# Policies for a call whose outcome is unknown, the strictest last. "check" is a function that finds the outcome out.
POLICIES: Final = ("rerun", "check", "fail", "ask")


@attrs.frozen(kw_only=True)
class Inquiry(Value):
    """Questions that the tool of an open call asked people, and their answers."""

    rounds: int = 0
    """Number of times that the tool asked."""

    state: str = "null"
    """JSON text that the tool gets back with the answers, from its newest request."""

    answers: Mapping[str, Any] = attrs.field(factory=dict)
    """Answers of all rounds by the key of the question; None for a question that was declined."""

    has_task: bool = False
    """Whether the state is that of a task at a server."""


@attrs.frozen(kw_only=True, slots=False)
class OpenCall(Value):
    """A call of the open turn. Not slotted, because writing many fields into a dict is a third faster."""

    call: ToolCall
    phase: Phase = Phase.INTENDED
    attempts: int = 0
    """Number of attempts, as far as the journal records them."""

    losses: int = 0
    """Number of times that its worker or its executor died, or the worker gave up the call, while it ran."""

    started_at: float = 0.0
    """Time of the last start, seconds since 1970; 0 if it never started."""

    duration_s: float = 0.0
    """Seconds from that start until the call was cut off; 0 if unknown or not cut off."""

    read_only: bool = False
    """Whether its tool was declared read-only at each start."""

    kind: ToolKind = ToolKind.DIRECT
    """Whether its tool called a function or an agent when the call started."""

    lacks_tool: bool = False
    """Whether the call has not started and waits, in the phase OUTCOME_UNKNOWN, for a program that has its tool."""

    on_unknown: str = ""
    """Strictest of `POLICIES` that its tool declared at the starts since a person decided; empty if it never started.
    """

    parameters: str = ""
    """Hash of the parameters that its tool had at these starts, defaults included; empty if not known."""

    approved: str = ""
    """Hash of the tool and the arguments that a person has approved; empty if none was needed."""

    expires_at: float | None = None
    """Time at which the approval request expires, seconds since 1970; None if there is none."""

    description: str = ""
    """Effect of the call, for the person who approves it."""

    digest: str = ""
    """Hash of the tool and the arguments that the person decides on."""

    error: str = ""
    """Reason why the last approval was not carried out, or why the call is not run again, while a person is asked; else
    empty.
    """

    pending: tuple[Pending, ...] = ()
    """Things that the call waits for in the phase PAUSED."""

    guarded: Guarded | None = None
    """Decision of the guards on the call; None if no rule can concern it, or they have not decided yet."""

    inquiry: Inquiry | None = None
    """Questions of the tool and their answers, or its task at a server; None if it has neither."""

    result: ToolResult | None = None
    """Result of the call in the phase FINISHED, else None."""

    @property
    def has_task(self) -> bool:
        """Whether the call has begun a task at a server: made again, it looks at that one and begins no other."""
        return self.inquiry is not None and self.inquiry.has_task

    @property
    def may_have_acted(self) -> bool:
        """Whether the call has started and its tool may have had an effect, so that no record may deny that it ran."""
        return self.attempts > 0 and (not self.read_only or self.kind is ToolKind.AGENT)  # or its child run is open

    def build_result(self, outcome: Outcome, content: str) -> ToolResult:
        """Build a result that does not come from the tool, with the call's start, duration and attempts."""
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
class BackgroundRun(Value):
    """The run of an agent that a call began and left in the background."""

    call: ToolCall
    """The call that began it. The id of the run is made of the ids of the calling run and of this call."""

    pending: tuple[Pending, ...] = ()
    """Things that it waited for when it was last executed; empty while it goes on, and at its end."""

    result: ToolResult | None = None
    """Result of its work, with its cost and its labels; None until it has ended."""

    is_told: bool = False
    """Whether the model of the calling run has the result in its history."""

    @property
    def note(self) -> SystemMessage:
        """The result as the model of the calling run reads it."""
        text = "" if self.result is None else self.result.text
        return SystemMessage(text=f"[Background run {self.call.id}] {text}")


def stricter_policy(one: str, other: str) -> str:
    """Return the stricter of two `POLICIES` for a call whose outcome is unknown."""
    return max(one, other, key=POLICIES.index)


@attrs.frozen(kw_only=True)
class CallRecord(Value):
    """Record of a closed call."""

    turn: int
    """Number of the turn of the call, from 1; 0 for a step of a plan."""

    call_id: str
    name: str
    arguments: dict[str, JSON]
    outcome: Outcome
    duration_s: float


@attrs.frozen(kw_only=True)
class FailureRecord(Value):
    """Record of a failed model request or tool call."""

    turn: int
    source: str
    """Source of the failure: "model", or the name of the tool."""

    message: str


def may_have_happened(result: ToolResult) -> bool:
    """Return whether the effect of a call is unknown; False for one that may simply be repeated."""
    broke = result.error_type in _TOOL_ERROR_TYPES and not result.retryable and result.child is None
    return broke or result.outcome is Outcome.UNKNOWN


def format_names(names: Iterable[str]) -> str:
    """Return each name once, with its count."""
    return ", ".join([name if times == 1 else f"{name} ({times} times)" for name, times in Counter(names).items()])


def find_last_turn(messages: Iterable[Message]) -> int:
    """Return the highest turn number among the call ids of a history; 0 if there is none."""
    calls = (call for m in messages if isinstance(m, AssistantMessage) for call in m.calls)
    return max((parse_turn(call.id) for call in calls), default=0)


_TURN_PATTERN: Final = re.compile(r"t([0-9]{1,8})(?:\.|\Z)")
_INDEX_PATTERN: Final = re.compile(r"(?:.*\.)?([0-9]{1,8})", re.DOTALL)


def parse_turn(call_id: str) -> int:
    """Return the turn in a call id; 0 if agentfsm did not assign the id."""
    found = _TURN_PATTERN.match(call_id)
    return 0 if found is None else int(found[1])


def parse_index(call_id: str) -> int:
    """Return the position in the reply in a call id, from 0; 0 if agentfsm did not assign the id."""
    found = _INDEX_PATTERN.fullmatch(call_id)
    return 0 if found is None else int(found[1])


# Hexadecimal digits of the hash in a key: it distinguishes only the few versions of one call of one run.
KEY_HASH_DIGITS: Final = 8


def build_idempotency_key(header: Header, call: ToolCall) -> str:
    """Return the idempotency key of a call of the run with that header: the nonce, the call's id, a hash of the effect.

    The nonce distinguishes runs, also runs that used the same id one after the other. The hash of the tool's name and
    the arguments distinguishes calls with the same id if the record of the first was lost by a power cut or a restored
    backup. A run of a format older than 4 has no nonce, so its id is used.
    """
    effect = short_hash(f"{call.name}\n{call.canonical}", KEY_HASH_DIGITS)
    return f"{header.nonce or header.id}:{call.id}:{effect}"


def replace_arguments(header: Header, call: ToolCall, arguments: str) -> ToolCall:
    """Return a call that has not started, with other arguments. It gets another key, because its effect is another."""
    edited = attrs.evolve(call, arguments=arguments)
    return attrs.evolve(edited, key=build_idempotency_key(header, edited))


def parse_arguments(call: ToolCall) -> dict[str, JSON]:
    """Return the call's arguments as a dict."""
    arguments: dict[str, JSON] = json.loads(call.arguments)
    return arguments
