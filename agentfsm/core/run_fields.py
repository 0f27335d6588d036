"""The fields of a run, without its methods, so that the reducers can use them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import attrs

from agentfsm.core.calls import BackgroundRun, FailureRecord, OpenCall, parse_index
from agentfsm.core.claims import Claim, list_not_done
from agentfsm.core.errors import MisuseError
from agentfsm.core.events import AnswerSource, LimitReached, Verdict
from agentfsm.core.header import Fingerprint, Header
from agentfsm.core.history import History, Segment, as_history
from agentfsm.core.labels import Label, LabelSource, highest_level
from agentfsm.core.limits import StopReason
from agentfsm.core.machine import START, State
from agentfsm.core.messages import AssistantMessage, Message, SystemMessage, UserMessage
from agentfsm.core.notes import WORK_START, Note, describe_hidden_work
from agentfsm.core.pending import Pending
from agentfsm.core.plans import PlanProgress
from agentfsm.core.text_safety import FENCE_NOTE
from agentfsm.core.usage import Usage
from agentfsm.core.value import Value

# Time without a request after which providers forget its beginning, unless they are paid to keep it: 5 minutes at
# Anthropic, 5 to 10 minutes or more at OpenAI, 5 minutes or more at Cerebras.
FORGOTTEN_AFTER_S: Final = 300.0
# Explains the marks around results.
FENCE_MESSAGE: Final = SystemMessage(text=FENCE_NOTE)


@attrs.frozen(kw_only=True, slots=False)
class RunFields(Value):
    """Fields of a run after `version` events.

    Not slotted: `Run.apply` copies the instance dict, at a tenth of the cost of `attrs.evolve`.
    """

    header: Header
    prior: History = attrs.field(factory=History, converter=as_history, repr=False)
    """Messages of the run that `header.after` names. Not stored again; loaded from that run's journal."""

    version: int = 0
    """Number of events applied."""

    state: State = START
    turn: int = 0
    """Number of turns so far: model replies, and requests that failed in spite of retries."""

    messages: History = attrs.field(factory=History, converter=as_history, repr=False)
    """Whole history, oldest first. Every call has its result."""

    turns_before: int = 0
    """Highest turn number among the call ids of the history that the run continues. Ids of this run count on from it.
    """

    cutoff: int = 0
    """Index of the first message after the compacted ones; the model is shown the rest unchanged. 0: no compaction."""

    segments: tuple[Segment, ...] = attrs.field(default=(), repr=False)
    """Layout that replaces the messages before `cutoff`."""

    compacted_messages: tuple[Message, ...] = attrs.field(default=(), repr=False)
    """Messages that the layout renders to, built once for each compaction."""

    kept_notes: Mapping[int, SystemMessage] = attrs.field(factory=dict, repr=False)
    """Notes that stood at the end of earlier requests and stay where they were, by the index of the reply that follows,
    because its provider binds the reply to all that came before it. A compaction removes them.
    """

    compacted_version: int = 0
    """Version of the run after its newest compaction; 0 if there was none."""

    compactions: int = 0
    """Number of compactions in a row, without another event in between, that ended with the newest one."""

    acted: tuple[str, ...] = ()
    """Ids of the calls that may have had an effect, in the order of their starts, those of the runs that it continues
    included. A compaction lists those that it hides.
    """

    reply: AssistantMessage | None = None
    """Assistant message whose calls are open; None if there are none."""

    open: tuple[OpenCall, ...] = ()
    """Calls of `reply`, in call order; without a reply, those of the plan, in the order in which they became ready."""

    background: Mapping[str, BackgroundRun] = attrs.field(factory=dict)
    """Background runs that its calls have begun, by the id of the call."""

    plan: PlanProgress | None = None
    """Plans of the run, and the closed calls of their steps; None if none was made."""

    notes: Mapping[str, Note] = attrs.field(factory=dict)
    """Notes of the model, by their keys, oldest first; from its calls of the tool `note`."""

    usage: Usage = Usage()
    unpriced: tuple[str, ...] = ()
    """Names of the models that replied and whose price was unknown, each once."""

    tier: str = ""
    """Tier of the newest reply, if the model is a `Tiered`; else empty. Later turns keep to it, or to a higher one."""

    answered_from: AnswerSource | None = None
    """Run whose answer the newest reply is, from the answer cache; None if the model gave it."""

    duration_s: float = 0.0
    """Active time so far, seconds."""

    tool_call_count: int = 0
    """Number of tool calls with a result, those of sub-agents included. Skipped calls do not count."""

    consecutive_errors: int = 0
    """Number of consecutive error turns."""

    model_failures: tuple[FailureRecord, ...] = ()
    """Model requests that failed in spite of retries."""

    loops: int = 0
    """Number of loops detected so far."""

    disabled: tuple[str, ...] = ()
    """Names of the tools that were withdrawn because of loops."""

    refusals: int = 0
    """Number of drafts refused since the last input."""

    draft_claims: tuple[Claim, ...] | None = None
    """Acts that the newest draft of an answer says were done, with the calls that did them; None if it has no list of
    them.
    """

    draft_end: int = 0
    """Length of the history with that draft."""

    verdict: Verdict | None = None
    """Verdict on the draft or the results that REFLECT judges now; None if there is none yet."""

    corrections: int = 0
    """Number of times that a judge asked for a correction since the last input."""

    limit_reached: LimitReached | None = None
    """Limit that stops the run. The next reply is the last, and is requested without tools. None: no limit reached."""

    asks: str = ""
    """Question for a person, if the run waits for input; else empty."""

    paused: Pending | None = None
    """Pause of the run, with its reason; None if it is not paused."""

    fingerprint: Fingerprint | None = None
    """Fingerprint of the agent that executes the run now; None if it is still the one in the header."""

    offered: tuple[str, ...] | None = None
    """Names of the tools selected since the last input; None if no selection was made."""

    reminder: str = ""
    """Note at the end of each request, which is not part of the history; empty for none."""

    reminded_turn: int = -1
    """Number of turns when the reminder changed last; -1 if there never was one."""

    said: tuple[str, ...] = ()
    """Texts of the inputs of the user that were read, without those that their sender calls untrusted."""

    is_recalled: bool = False
    """Whether the memory was searched for the newest input."""

    waited_turn: int = -1
    """Number of turns when the run, or one that it continues, had last stood still for more than 5 minutes; -1 if
    never. Providers forget the beginning of a request in that time.
    """

    profile: UserMessage | None = None
    """Profile of the user, at the beginning of each request and not part of the history; None if there is none."""

    has_cut: bool = False
    """Whether the model is shown only a part of some result."""

    has_fenced: bool = False
    """Whether a result stands between marks, because it comes from outside. The history then explains the marks."""

    labels: Mapping[Label, LabelSource] = attrs.field(factory=dict)
    """Labels of all that the run has read and done, each with its first source."""

    counted: Mapping[str, int] = attrs.field(factory=dict)
    """Number of calls that count toward a quota, by tool name: those of this run, of its sub-agents, and of the runs
    that it continues.
    """

    retries: Mapping[str, int] = attrs.field(factory=dict)
    """Number of retries by tool name."""

    approvals: Mapping[str, str] = attrs.field(factory=dict)
    """Names of the persons who approved calls, by call id, those of the replies of the runs that it continues included.
    A name is empty if none was given.
    """

    earlier_steps: tuple[OpenCall, ...] = ()
    """Closed steps of the plans of the runs that it continues."""

    given: int = 0
    """Number of messages at the beginning of the whole history that a caller gave, and no journal has."""

    findings: tuple[str, ...] = ()
    """Violations of rules that were found at the end of the run, each as a clause, such as "the rule eventually(unlock,
    after=lock): ...".
    """

    stop_reason: StopReason | None = None
    stop_message: str = ""
    updated_at: float = 0.0
    """Time of the newest event, seconds since 1970."""

    @property
    def id(self) -> str:
        """Id of the run, unique in its store."""
        return self.header.id

    @property
    def claims(self) -> tuple[Claim, ...] | None:
        """Acts that the answer of a run that is over, or its last answer, says were done, with the calls that did them.

        None if it has no list of them.
        """
        is_answer = self.stop_reason is not None and self.draft_end == len(self.messages)
        return self.draft_claims if is_answer else None

    @property
    def not_done(self) -> tuple[Claim, ...]:
        """Those of `claims` that no call has done."""
        return list_not_done(self.claims or ())

    @property
    def data_level(self) -> Label | None:
        """Highest level of data that the run has read, by its labels; None if no level was declared."""
        return highest_level(self.labels)

    @property
    def recent_compactions(self) -> int:
        """Number of compactions since the last other event."""
        return self.compactions if self.compacted_version == self.version else 0

    @property
    def own_start(self) -> int:
        """Index of the run's first own message. All earlier messages come from the history that the run continues."""
        return len(self.prior) + len(self.header.history)

    @property
    def closed_steps(self) -> tuple[OpenCall, ...]:
        """Closed steps of the plans of this run and of those that it continues."""
        return self.earlier_steps if self.plan is None else (*self.earlier_steps, *self.plan.closed)

    @property
    def shown(self) -> Sequence[Message]:
        """Messages that the model is shown: the profile, then all, or the compacted ones and those added since."""
        if not self.cutoff and not self.kept_notes:
            return self.messages if self.profile is None else (self.profile, *self.messages)
        shown, start = [*self.compacted_messages], self.cutoff
        if self.profile is not None:
            shown.insert(0, self.profile)
        for index, note in self.kept_notes.items():
            shown += (*self.messages[start:index], note)
            start = index
        return (*shown, *self.messages[start:])

    @property
    def open_background(self) -> tuple[BackgroundRun, ...]:
        """Background runs that have not ended, as far as the run knows."""
        return tuple([each for each in self.background.values() if each.result is None])

    @property
    def untold_background(self) -> tuple[BackgroundRun, ...]:
        """Background runs that have ended, and whose results the model has not been told yet."""
        return tuple([each for each in self.background.values() if each.result is not None and not each.is_told])

    @property
    def hidden_work(self) -> str:
        """Notes, steps and explanation of the marks that a compaction hides, for the end of the next request."""
        if not self.cutoff or not (self.notes or self.plan is not None or self.has_fenced):
            return ""
        shown = self.shown
        marks = FENCE_NOTE if self.has_fenced and FENCE_MESSAGE not in shown else ""
        work = "\n\n".join(filter(None, (marks, describe_hidden_work(self.notes, self.plan, self.messages, shown))))
        # A note that stays where it was is repeated only after a change.
        before = next((note.text for note in [*self.kept_notes.values()][::-1] if WORK_START in note.text), "")
        return "" if work in before else work

    @property
    def closing_note(self) -> str:
        """Text at the end of the next request: hidden notes and steps, and the reminder."""
        return "\n\n".join(filter(None, (self.hidden_work, self.reminder)))

    def open_call(self, call_id: str) -> OpenCall:
        """Return the open call with that id.

        Raises:
            MisuseError: if there is none.
        """
        return self.open[find_open_call_index(self, call_id)]


def find_open_call_index(run: RunFields, call_id: str) -> int:
    """Return the index of the open call with that id.

    Raises:
        MisuseError: if there is none.
    """
    place = parse_index(call_id)
    if place < len(run.open) and run.open[place].call.id == call_id:
        return place
    for index, entry in enumerate(run.open):  # an id that another program assigned
        if entry.call.id == call_id:
            return index
    ids = ", ".join(entry.call.id for entry in run.open) or "none"
    raise MisuseError(f"run {run.id} has no open call {call_id!r}; open calls: {ids}")
