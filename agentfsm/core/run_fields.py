"""The fields of a run: where it stands after so many events, without what it can do."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from agentfsm.core.calls import FailureRecord, OpenCall, parse_index
from agentfsm.core.errors import MisuseError
from agentfsm.core.events import LimitReached
from agentfsm.core.fingerprint import Fingerprint
from agentfsm.core.header import Header
from agentfsm.core.history import History, as_history
from agentfsm.core.limits import StopReason
from agentfsm.core.machine import START, State
from agentfsm.core.messages import AssistantMessage, Message
from agentfsm.core.pending import Pending
from agentfsm.core.segments import Segment
from agentfsm.core.usage import Usage
from agentfsm.core.value import Value
from agentfsm.core.verdict import Verdict


@attrs.frozen(kw_only=True, slots=False)
class RunFields(Value):
    """Where a run stands after `version` events.

    Not slotted: `Run.apply` copies its dict, a tenth of what evolve costs.
    """

    header: Header
    prior: History = attrs.field(factory=History, converter=as_history, repr=False)
    """The messages of the run that `header.after` names; never stored, read again by reference."""

    version: int = 0
    """How many events were applied."""

    state: State = START
    turn: int = 0
    """Model replies so far."""

    messages: History = attrs.field(factory=History, converter=as_history, repr=False)
    """The whole history, in order; every call has its result."""

    turns_before: int = 0
    """The highest turn number among the call ids of the history that the run goes on from; its own count on from there.
    """

    cutoff: int = 0
    """From here on the model is shown all messages as they are; 0 for all that there are."""

    segments: tuple[Segment, ...] = attrs.field(default=(), repr=False)
    """What it is shown of those before."""

    compacted_messages: tuple[Message, ...] = attrs.field(default=(), repr=False)
    """The same as messages, made once: they stay the same objects until the next compaction."""

    compacted_version: int = 0
    """The version that the newest compaction has made..."""

    compactions: int = 0
    """...and how many there were in a row with it."""

    reply: AssistantMessage | None = None
    """The assistant message whose calls are open."""

    open: tuple[OpenCall, ...] = ()
    """The calls of `reply`, in call order."""

    usage: Usage = Usage()
    unpriced: tuple[str, ...] = ()
    """The models that answered and whose price was not known, each once."""

    duration_s: float = 0.0
    """Active seconds."""

    tool_call_count: int = 0
    """Calls of tools that have a result, whatever it is, and those of the agents behind them; not what was skipped."""

    consecutive_errors: int = 0
    """Error turns in a row."""

    model_failures: tuple[FailureRecord, ...] = ()
    """Model calls that failed."""

    loops: int = 0
    """Loop findings so far."""

    disabled: tuple[str, ...] = ()
    """Tools withdrawn because of loops."""

    refusals: int = 0
    """Drafts that were refused, since input came."""

    verdict: Verdict | None = None
    """What a judge said of what REFLECT looks at now."""

    corrections: int = 0
    """How many times a judge had something done again, since input came."""

    limit_reached: LimitReached | None = None
    """The limit that stops the run: the next reply is the last, and is asked for without tools."""

    asks: str = ""
    """What a person is asked, where the run waits for input."""

    paused: Pending | None = None
    """Why the run rests between two steps; None while it does not."""

    fingerprint: Fingerprint | None = None
    """Of the agent that drives it; None where that is still what the header says."""

    offered: tuple[str, ...] | None = None
    """The tools chosen among many since input came; None where no choice was made."""

    has_cut: bool = False
    """Whether any result is longer than what the model is shown of it."""

    retries: Mapping[str, int] = attrs.field(factory=dict)
    """How many times calls were tried again, by tool."""

    stop_reason: StopReason | None = None
    stop_message: str = ""
    updated_at: float = 0.0
    """Seconds since 1970 of the newest event."""

    @property
    def id(self) -> str:
        """The run's id, unique in its store."""
        return self.header.id

    @property
    def recent_compactions(self) -> int:
        """How many compactions there were since anything else happened."""
        return self.compactions if self.compacted_version == self.version else 0

    @property
    def own_start(self) -> int:
        """Where the run's own messages start; those before are of what it goes on from."""
        return len(self.prior) + len(self.header.history)

    def open_call(self, call_id: str) -> OpenCall:
        """Return the open call of that id.

        Raises:
            MisuseError: when there is none.
        """
        return self.open[find_open_call_index(self, call_id)]


def find_open_call_index(run: RunFields, call_id: str) -> int:
    """Return where among the open calls the one of that id is.

    Raises:
        MisuseError: when it is not among them.
    """
    place = parse_index(call_id)
    if place < len(run.open) and run.open[place].call.id == call_id:
        return place
    for index, entry in enumerate(run.open):  # an id that was not made here
        if entry.call.id == call_id:
            return index
    ids = ", ".join(entry.call.id for entry in run.open) or "none"
    raise MisuseError(f"run {run.id} has no open call {call_id!r}; open calls: {ids}")
