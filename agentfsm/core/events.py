"""Events: the closed set of facts that a journal consists of.

Each event moves the run along exactly one arrow of the table in `machine`. If an outcome can differ, there are two
events, so that the table alone decides the next state.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import StrEnum
from functools import partial
from typing import Any, TypeAlias

import attrs

from agentfsm.core.claims import Claim
from agentfsm.core.encoding import write_record, write_tagged
from agentfsm.core.header import FORMAT, Fingerprint
from agentfsm.core.history import Segment
from agentfsm.core.inbox import Input
from agentfsm.core.labels import Label, LabelSource, ToolKind
from agentfsm.core.limits import StopReason
from agentfsm.core.messages import AssistantMessage, ToolCall, ToolResult
from agentfsm.core.pending import Pending, PendingKind, Question
from agentfsm.core.recalled_items import RecalledItem
from agentfsm.core.usage import Purpose, TierChoice, Usage
from agentfsm.core.value import Value
from agentfsm.core.window_layers import WindowLayers


@attrs.frozen(kw_only=True)
class AnswerSource(Value):
    """The run whose answer a run repeats, from the answer cache."""

    run_id: str
    """Id of the run that gave the answer. It may have been deleted since."""

    at: float
    """Time at which that run ended, seconds since 1970."""

    labels: tuple[Label, ...] = ()
    """Labels of that run. This run has them as well."""


class PlanKind(StrEnum):
    """Purpose of a plan."""

    FORWARD = "forward"
    """It works towards the goal of the run: a first plan, or one that continues a finished one."""

    REPLAN = "replan"
    """It replaces a plan that could not be carried out, or whose results a judge refused."""

    COMPENSATION = "compensation"
    """It undoes the steps of a plan that have succeeded."""


class Action(StrEnum):
    """Next action after a judgement."""

    ACCEPT = "accept"
    RETRY_STEP = "retry_step"
    REPLAN = "replan"
    ESCALATE = "escalate"


@attrs.frozen(kw_only=True)
class Score(Value):
    """Score of one criterion."""

    criterion: str
    """Name of the criterion: "completeness", "correctness", "format", or one of your own."""

    score: int
    """Degree to which the criterion is met, from 1 (not at all) to 5 (fully)."""

    reason: str = ""
    """Reason for the score; empty if the judge gave none."""


@attrs.frozen(kw_only=True)
class Verdict(Value):
    """Verdict of a judge."""

    action: Action
    """Next action of the run."""

    scores: tuple[Score, ...] = ()
    """Scores by criterion, in the order of the rubric; empty if the judge gives none."""

    passed: bool | None = None
    """Whether the work passes as a whole, as the judge says; None if it does not say. The scores take precedence."""

    step: str = ""
    """Step to repeat, under the judge's name for it; empty for the whole answer."""

    note: str = ""
    """Change that is needed; or the reason why a person is asked, which is the question to that person if there are no
    scores.
    """


class GuardVerdict(StrEnum):
    """Verdict of a guard on a call, from the mildest to the strictest."""

    ALLOW = "allow"
    """The call may run, as far as guards are concerned."""

    ASK = "ask"
    """The call runs if a person approves it."""

    REFUSE = "refuse"
    """The call does not run. The model reads the reason."""

    @property
    def strictness(self) -> int:
        """Rank of the verdict, from 0; of several verdicts the strictest counts."""
        return _STRICTNESS[self]


_STRICTNESS = {verdict: rank for rank, verdict in enumerate(GuardVerdict)}


@attrs.frozen(kw_only=True)
class Event(Value):
    """Base class of all events. The journal sets these fields when it writes the event."""

    at: float = 0.0
    """Time of the event, seconds since 1970."""

    took_s: float = 0.0
    """Active seconds since the previous event, by the monotonic clock. Waiting for a person does not count."""

    def to_dict(self) -> dict[str, Any]:
        """Return the event as JSON values, in the form of the journal.

        The keys are the field names, without fields that have their default value. `is` has the name of the class.
        """
        write = partial(write_tagged, kinds=frozenset(EVENTS))
        fields: dict[str, Any] = json.loads(write_record(write, self, known_version=FORMAT))
        return fields


@attrs.frozen(kw_only=True)
class Observed(Event):
    """The inbox was read. The first such event also adds the prompt of the header to the history."""

    inputs: tuple[Input, ...] = ()


@attrs.frozen(kw_only=True)
class ToolsChosen(Event):
    """The model asked for tools. The calls have their ids and idempotency keys from this event on."""

    message: AssistantMessage
    usage: Usage = Usage()
    request: str = ""
    """Hash of the model request. All events that result from a request have it."""

    model: str = ""
    """Name of the model that replied, if it is not the agent's own, as with a Fallback or a Router; else empty."""

    filtered: tuple[str, ...] = ()
    """Decisions of guards by which the texts of the reply were replaced, without the data; empty if they are the
    model's.
    """

    tier: TierChoice | None = None
    """Tier that replied, and the reason, if the model is a `Tiered`; else None."""

    served_model: str = ""
    """Name of the model in the provider's reply, if that is another than the snapshot that was asked; else empty."""


@attrs.frozen(kw_only=True)
class AnswerGiven(Event):
    """The model gave an answer that needs no check."""

    message: AssistantMessage
    usage: Usage = Usage()
    request: str = ""
    model: str = ""
    filtered: tuple[str, ...] = ()
    tier: TierChoice | None = None
    served_model: str = ""
    answered_from: AnswerSource | None = None
    """Run whose answer this is, from the answer cache; None if the model was asked."""


@attrs.frozen(kw_only=True)
class AnswerDrafted(Event):
    """The model gave an answer that REFLECT has to check."""

    message: AssistantMessage
    usage: Usage = Usage()
    request: str = ""
    model: str = ""
    filtered: tuple[str, ...] = ()
    tier: TierChoice | None = None
    served_model: str = ""
    answered_from: AnswerSource | None = None
    purpose: Purpose | None = None
    """LAST_ANSWER for the last answer of a run that a limit stops, else None."""

    claims: tuple[Claim, ...] | None = None
    """Acts that the answer says were done, with the calls that did them; None if it has no list of them."""


@attrs.frozen(kw_only=True)
class ModelFaltered(Event):
    """The model request failed in spite of retries. The turn is an error turn."""

    error: str
    usage: Usage = Usage()
    """Usage of replies that could not be used."""

    request: str = ""
    purpose: Purpose | None = None
    """Purpose of the newest of these requests, if it was not a turn: LAST_ANSWER for the last answer of a run that a
    limit stops, or the purpose of a request beside the turns that was cut off with the run. None: a turn.
    """


@attrs.frozen(kw_only=True)
class AttemptFailed(Event):
    """An attempt at a model request failed and is retried, or a request was cut off. It does not count as a turn."""

    error: str
    usage: Usage = Usage()
    """Usage of the attempt: that which the provider reported, or an estimate if it may have been billed."""

    request: str = ""
    purpose: Purpose | None = None
    """Purpose of the request if it was not a turn; None: a turn."""

    tier: TierChoice | None = None
    """Tier of a `Tiered` that failed; None from other models."""


@attrs.frozen(kw_only=True)
class Compacted(Event):
    """Earlier messages were removed from or shortened in requests. The journal and `run.messages` keep them."""

    start: int
    """Index into `run.messages` of the first message after the layout."""

    tokens_before: int
    """Tokens of the messages shown before the compaction."""

    tokens_after: int
    """Tokens of the messages shown after it."""

    why: str
    """Reason for the compaction, and the policies that failed, for people."""

    head: tuple[Segment, ...] | None = None
    """Layout that replaces the messages before `start`. None in journals of format 2 and older: the task and a note."""

    policies: tuple[str, ...] = ()
    """Class names of the policies that changed something, in their order."""

    usage: Usage = Usage()
    """Usage of the requests for a summary, failed ones included."""

    purpose: Purpose | None = None
    """Purpose of these requests; None if there were none."""

    model: str = ""
    """Name of the model that was asked, if it is not the agent's own; else empty. Several are separated by commas."""


@attrs.frozen(kw_only=True)
class ToolsOffered(Event):
    """Tools were selected from many. The model is offered these until new input arrives."""

    tools: tuple[str, ...]
    """Names of the selected tools."""

    how: str
    """Method of the selection, for people."""

    usage: Usage = Usage()
    """Usage of the selection."""

    purpose: Purpose | None = None
    """Purpose of these requests; None if there were none."""

    model: str = ""
    """Name of the model that was asked, if it is not the agent's own; else empty. Several are separated by commas."""


@attrs.frozen(kw_only=True)
class Reminded(Event):
    """The reminder has changed: the note at the end of the requests from now on, which is not part of the history."""

    text: str
    """Text of the reminder; empty for none."""

    prompts: tuple[str, ...] = ()
    """Prompts that the text was rendered from, as "name@version#digest"."""


@attrs.frozen(kw_only=True)
class Recalled(Event):
    """The memory was searched for the newest input. The model reads the items found, if any."""

    query: str
    """The search, up to 1,000 characters."""

    items: tuple[RecalledItem, ...] = ()
    """The items found, best first."""

    fault: str = ""
    """Reason why the memory, or a part of it, was not searched, for people; empty if there was none."""

    usage: Usage = Usage()
    """Usage of the search, for embeddings."""

    purpose: Purpose | None = None
    """Purpose of that usage; None if there was none."""

    model: str = ""
    """Name of the model that made the embeddings; empty if there were none."""

    layers: WindowLayers | None = None
    """Shares of the window when the memory was searched; None if that failed."""

    left_out: int = 0
    """Number of items that matched, and had no room in the share of the memory."""

    profile: tuple[RecalledItem, ...] | None = None
    """The profile of the user, which stands at the beginning of each request from now on; None if it was not read, so
    that the run keeps the one that it has.
    """


@attrs.frozen(kw_only=True)
class Planned(Event):
    """A plan was made. It is a call, so that a person may have to approve it; its steps follow when it is accepted."""

    call: ToolCall
    """Call whose arguments are the plan, as `Plan.to_json` writes it."""

    reason: str = ""
    """Reason why an earlier plan was replaced, for people; empty for a first plan."""

    usage: Usage = Usage()
    """Usage of the requests for the plan."""

    purpose: Purpose | None = None
    """Purpose of these requests; None if there were none."""

    model: str = ""
    """Name of the model that was asked, if it is not the agent's own; else empty. Several are separated by commas."""

    request: str = ""
    """Hashes of what the planner was given, as those of a request: of the planner with its tools, and of the messages.
    """

    kind: PlanKind = PlanKind.FORWARD
    """Purpose of the plan."""

    continues: int = 0
    """Number of the plan that this one continues, replaces or undoes; 0 if it is the first for its input."""

    maker: str = ""
    """Kind of program that the plan belongs to: "flow", "each" or "until". Empty for the plan of a planner."""


@attrs.frozen(kw_only=True)
class PlanDropped(Event):
    """No plan could be made, or the plan was given up. The model goes on without."""

    reason: str
    """Reason, for the model and for people."""

    usage: Usage = Usage()
    """Usage of the requests for a plan."""

    purpose: Purpose | None = None
    """Purpose of these requests; None if there were none."""

    model: str = ""
    """Name of the model that was asked, if it is not the agent's own; else empty. Several are separated by commas."""


@attrs.frozen(kw_only=True)
class StepsReady(Event):
    """Steps of the accepted plan can start, because the steps that they depend on have succeeded."""

    calls: tuple[ToolCall, ...]
    """Calls of the steps, with their arguments bound to the results."""

    usage: Usage = Usage()
    """Usage of the request that confirmed the plan, if it is checked after each step."""

    purpose: Purpose | None = None
    """Purpose of these requests; None if there were none."""

    model: str = ""
    """Name of the model that was asked, if it is not the agent's own; else empty. Several are separated by commas."""


@attrs.frozen(kw_only=True)
class Guarded(Event):
    """The guards of the agent decided on a call, before it starts. The decision holds until a stricter one is made."""

    call_id: str
    verdict: GuardVerdict
    """Verdict on the call: the strictest of all guards."""

    rule: str = ""
    """Rule that gave it, as it is written in code; empty if no rule applied."""

    reason: str = ""
    """Reason for the verdict, for people and for the model; empty if no rule applied."""

    labels: tuple[LabelSource, ...] = ()
    """Labels of the run that the rule is about, each with its source. Labels of the call itself are not among them."""

    digest: str = ""
    """Hash of the tool and the arguments. The decision is valid only for these."""

    counts: bool = False
    """Whether the call counts toward a quota. It no longer does if it ends before its tool is tried."""

    first: str = ""
    """Name of the tool that must succeed before the call may run; empty if nothing the model can do permits it."""


@attrs.frozen(kw_only=True)
class ToolStarted(Event):
    """A call is about to run. The event is durable before the tool starts, unless the tool is read-only.

    The start of a read-only call, which has no effect, is written only if the call has no result: late, when it was cut
    off or waits for something, and from then on each time that it starts.
    """

    call_id: str
    repeatable: bool = False
    """Whether the tool declares that it may be run again (idempotent, or read-only)."""

    read_only: bool = False
    """Whether the tool declares that it has no effect."""

    since: float = 0.0
    """Time at which the call started, seconds since 1970, if its start is written late; 0 if that is `at`."""

    attempts: int = 1
    """Number of attempts by then, 1 or more. It is more than 1 only if the start is written late."""

    labels: tuple[Label, ...] = ()
    """Labels of what the call does, as its tool declares them: sends_out, irreversible."""

    kind: ToolKind = ToolKind.DIRECT
    """Whether the tool calls a function or an agent. In journals of format 4 and older, DIRECT for all."""

    on_unknown: str = ""
    """Policy that the tool declares for a call whose outcome is unknown: "rerun", "fail", "ask", or "check" for a
    function. Empty for the default: "rerun" if the call is repeatable, else "ask".
    """

    key: str = ""
    """Idempotency key that the tool gets from this start on, if it is another than the call's; else empty."""

    parameters: str = ""
    """Hash of the tool's parameters with their defaults. Empty for read-only tools, and in journals of format 4 and
    older.
    """


@attrs.frozen(kw_only=True)
class ToolCutOff(Event):
    """A started call was cut off because the execution of its run ended, and has no result."""

    call_id: str
    started_at: float
    """Time at which the call was started, seconds since 1970."""

    duration_s: float
    """Seconds from then until it was cut off."""

    undone: bool = False
    """Whether the newest start was recorded although the tool was then not called."""


@attrs.frozen(kw_only=True)
class ToolFinished(Event):
    """A call has its result."""

    result: ToolResult
    by: str = ""
    """Person who rejected or settled the call; else empty."""


@attrs.frozen(kw_only=True)
class ToolLost(Event):
    """The outcome of a call is unknown: its worker or its executor died. A person decides before it is repeated."""

    call_id: str
    reason: str = ""
    """Reason why the call is not simply run again, for people; empty if its tool declares that a person is asked."""

    lacks_tool: bool = False
    """Whether the call has not started, because the program has no tool of its name. It begins once a program has it.
    """


@attrs.frozen(kw_only=True)
class ToolPaused(Event):
    """A call waits for external input, and continues when that arrives."""

    call_id: str
    pending: tuple[Pending, ...]
    """Things that the call waits for: an answer, input, a task at a server, or decisions in the run of a sub-agent."""

    state: str | None = None
    """JSON text that the tool receives with the answers to its questions, or to look at its task; None if it has
    neither.
    """


@attrs.frozen(kw_only=True)
class InputGiven(Event):
    """A person answered the questions that a tool asked during its call.

    A paused call is made again with the answers. A call of an attended execution was not paused, and continues.
    """

    call_id: str
    by: str = ""
    answers: dict[str, Any]
    """Answers by the key of the question: an object that fits its schema, or None if the person declined. Empty if an
    attending person gave no answer.
    """

    questions: tuple[Question, ...] = ()
    """Questions that the attending person was asked while the call was running. Empty if the call was paused for them:
    `ToolPaused` has them then.
    """

    state: str | None = None
    """JSON text that the tool gets back with the answers if the call is made again, as in `ToolPaused`. None if the
    call was paused.
    """


@attrs.frozen(kw_only=True)
class ApprovalAsked(Event):
    """A call waits for approval."""

    call_id: str
    expires_at: float
    """Time at which the request expires and the call is rejected, seconds since 1970 by the store's clock."""

    description: str = ""
    """Effect of the call, as the tool describes it; empty if it does not."""

    digest: str = ""
    """Hash of the tool and the arguments. An approval is valid only for these."""

    error: str = ""
    """Reason why the last approval was not carried out; empty if the call was not approved before."""

    by: str = ""
    """Person who edited the arguments, so that another one has to approve them; empty if they were not edited."""

    arguments: str | None = None
    """Arguments that replace the model's, in the call and in the history; None if they were not edited."""

    key: str | None = None
    """Idempotency key of the edited call; None if the arguments were not edited."""

    tools: Mapping[str, str] = attrs.field(factory=dict)
    """For a plan, the digests of the tools that its steps use, by name: they are what the approval covers."""


@attrs.frozen(kw_only=True)
class ApprovalGiven(Event):
    """A person approved a call, or ordered a rerun of a call whose outcome is unknown."""

    call_id: str
    by: str = ""
    arguments: str | None = None
    """Arguments that replace the model's, in the call and in the history; None if the person did not change them."""

    key: str | None = None
    """Idempotency key of the changed call; None if the call keeps its key."""

    digest: str = ""
    """Hash of the tool and the arguments with which the call may run. Empty in journals of format 4 and older, which
    stands for the digest of the question.
    """

    allowance: str = ""
    """Allowance by which the person has decided beforehand, as `Allowance.name`; empty if on this very call."""


@attrs.frozen(kw_only=True)
class ToolsReturned(Event):
    """All calls of the turn have results. The messages of the turn are added to the history."""


@attrs.frozen(kw_only=True)
class Continued(Event):
    """The run continues with another turn."""

    note: str = ""
    """System note that the model reads before its next turn; empty for none."""

    loop: bool = False
    """Whether a loop was detected. `run.loops` counts them."""

    disabled: tuple[str, ...] = ()
    """Names of the tools that are withdrawn from now on."""

    refused: bool = False
    """Whether a draft was refused. `run.refusals` counts them."""

    is_last: bool = False
    """Whether the next reply is the last. Only in journals of format 3 and older; replaced by `LimitReached`."""

    asks: str = ""
    """Question for a person. If it is not empty, the run waits for input before it continues."""


@attrs.frozen(kw_only=True)
class Judged(Event):
    """A judge gave its verdict on the draft or on the results of the turn."""

    verdict: Verdict
    usage: Usage = Usage()
    """Usage of the judgement."""

    purpose: Purpose | None = None
    """Purpose of these requests; None if there were none."""

    model: str = ""
    """Name of the model that was asked, if it is not the agent's own; else empty. Several are separated by commas."""


@attrs.frozen(kw_only=True)
class Accepted(Event):
    """The draft is the answer."""

    findings: tuple[str, ...] = ()
    """Violations of rules that were found at the end of the run, each as a clause."""


@attrs.frozen(kw_only=True)
class LimitReached(Event):
    """A limit stops the run, and the model is asked for a last answer. All open calls are closed, as by `Failed`."""

    reason: StopReason
    message: str
    """Reason with the number reached, for people. The `Failed` after the last answer has the same."""

    note: str
    """System note that asks the model for its last answer."""


@attrs.frozen(kw_only=True)
class Failed(Event):
    """The run ended without an answer. All open calls are closed, so that the history stays valid."""

    reason: StopReason
    message: str
    """Reason with the number reached, for people."""

    findings: tuple[str, ...] = ()
    """Violations of rules that were found at the end of the run, each as a clause."""


@attrs.frozen(kw_only=True)
class ChildReported(Event):
    """A background run has begun, has ended, or waits for something from outside."""

    call_id: str
    """Id of the call that began it."""

    pending: tuple[Pending, ...] = ()
    """Things that it waits for; empty if it has begun or ended."""

    result: ToolResult | None = None
    """Result of its work; None if it has not ended."""


@attrs.frozen(kw_only=True)
class Paused(Event):
    """The run is paused between two steps until it is resumed."""

    by: str = ""
    message: str = ""
    kind: PendingKind = PendingKind.PAUSE
    """PAUSE if a person or a setting asked for it, CRASH if too many workers died while they executed the run."""


@attrs.frozen(kw_only=True)
class Resumed(Event):
    """The run continues after a pause, or with a changed agent."""

    fingerprint: Fingerprint | None = None
    """Fingerprint of the agent that continues; None if the agent has not changed."""

    changes: tuple[str, ...] = ()
    """Changes of the agent, for people."""

    renamed: Mapping[str, str] = attrs.field(factory=dict)
    """New names of tools by their names in the journal, for calls and steps of the plan that have not started."""


# Events that result from a model request.
Answered: TypeAlias = ToolsChosen | AnswerGiven | AnswerDrafted | ModelFaltered
# All events, in the order in which a run meets them.
EVENTS: tuple[type[Event], ...] = (
    Observed,
    ToolsChosen,
    AnswerGiven,
    AnswerDrafted,
    ModelFaltered,
    AttemptFailed,
    Compacted,
    ToolsOffered,
    Recalled,
    Reminded,
    Planned,
    PlanDropped,
    StepsReady,
    Guarded,
    ToolStarted,
    ToolCutOff,
    ToolFinished,
    ToolLost,
    ToolPaused,
    InputGiven,
    ApprovalAsked,
    ApprovalGiven,
    ToolsReturned,
    ChildReported,
    Judged,
    Continued,
    Accepted,
    Paused,
    Resumed,
    LimitReached,
    Failed,
)
