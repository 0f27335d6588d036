"""What happened: the closed set of facts that a journal is made of.

Each event moves the run by exactly one arrow of the table in `machine`. Where an outcome can differ there are two
events, so that the table alone decides what comes next.
"""

from __future__ import annotations

import json
from functools import partial
from typing import Any, TypeAlias

import attrs

from agentfsm.core.encoding import write_record, write_tagged
from agentfsm.core.fingerprint import Fingerprint
from agentfsm.core.header import FORMAT
from agentfsm.core.inbox import Input
from agentfsm.core.limits import StopReason
from agentfsm.core.messages import AssistantMessage, ToolResult
from agentfsm.core.pending import Pending, PendingKind
from agentfsm.core.segments import Segment
from agentfsm.core.usage import Usage
from agentfsm.core.value import Value
from agentfsm.core.verdict import Verdict


@attrs.frozen(kw_only=True)
class Event(Value):
    """What all events say, since every fact has a time. The journal writes it."""

    at: float = 0.0
    """Seconds since 1970."""

    took_s: float = 0.0
    """Active seconds since the event before it, monotonic; waiting for a person does not count."""

    def to_dict(self) -> dict[str, Any]:
        """Return the event as JSON values, in the form of the journal.

        Its fields come under their names, without those that have their default, and its class under `is`.
        """
        write = partial(write_tagged, kinds=frozenset(EVENTS))
        fields: dict[str, Any] = json.loads(write_record(write, self, known_version=FORMAT))
        return fields


@attrs.frozen(kw_only=True)
class Observed(Event):
    """The inbox was read. The first one also takes in the prompt, which stands in the header."""

    inputs: tuple[Input, ...] = ()


@attrs.frozen(kw_only=True)
class ToolsChosen(Event):
    """The model asked for tools. From here on the calls have their ids and keys."""

    message: AssistantMessage
    usage: Usage = Usage()
    request: str = ""
    """Hash of what the model was asked, as for all that comes of a request."""

    model: str = ""
    """Who answered, where it was not the model that the agent names: one behind a Fallback or a Router."""


@attrs.frozen(kw_only=True)
class AnswerGiven(Event):
    """The model answered, and nothing has to check it."""

    message: AssistantMessage
    usage: Usage = Usage()
    request: str = ""
    model: str = ""


@attrs.frozen(kw_only=True)
class AnswerDrafted(Event):
    """The model answered, and something has to be looked at before that counts."""

    message: AssistantMessage
    usage: Usage = Usage()
    request: str = ""
    model: str = ""


@attrs.frozen(kw_only=True)
class ModelFaltered(Event):
    """The model could not be asked, retries included; the turn is an error turn."""

    error: str
    usage: Usage = Usage()
    """What replies cost that could not be used."""

    request: str = ""


@attrs.frozen(kw_only=True)
class Compacted(Event):
    """Earlier messages left the context window, or are shown in short; the journal and `run.messages` keep them."""

    start: int
    """From here on the messages are shown whole, as an index into `run.messages`."""

    tokens_before: int
    tokens_after: int
    """Of the messages shown, before and after."""

    why: str
    """For people: what there was too much of, and which policy could not do its part."""

    head: tuple[Segment, ...] | None = None
    """What is shown of the messages before `start`; None, in journals of format 2 and older, for the task and a note.
    """

    policies: tuple[str, ...] = ()
    """Those that changed something, in their order, by the names of their classes."""

    usage: Usage = Usage()
    """What asking for a summary cost, also where none came of it."""


@attrs.frozen(kw_only=True)
class ToolsOffered(Event):
    """Among many tools, those that the model is told of from here on; until new input arrives."""

    tools: tuple[str, ...]
    how: str
    """How they were chosen."""

    usage: Usage = Usage()
    """What choosing cost."""


@attrs.frozen(kw_only=True)
class ToolStarted(Event):
    """A call is about to run. Durable before the tool's first instruction, unless the tool is read-only.

    A read-only call has no effect, so its start is written only where a result alone would not tell of it: late, when
    it was cut off or waits for something, and from then on each time that it starts.
    """

    call_id: str
    repeatable: bool = False
    """Whether the tool declares that it may be run again (idempotent, or read-only)."""

    read_only: bool = False
    """Whether the tool declares that it has no effect."""

    since: float = 0.0
    """When the call was taken up, seconds since 1970, where its start is written late; 0 where that is `at`."""

    attempts: int = 1
    """How many times the tool was tried by then, 1 or more; more than 1 only where it is written late."""


@attrs.frozen(kw_only=True)
class ToolCutOff(Event):
    """A call that had started was cut off together with the work on its run, and has no result."""

    call_id: str
    started_at: float
    """When it was taken up, seconds since 1970."""

    duration_s: float
    undone: bool = False
    """Whether its newest start came to nothing: it was written, and then the tool was not called."""


@attrs.frozen(kw_only=True)
class ToolFinished(Event):
    """A call has its result."""

    result: ToolResult
    by: str = ""
    """Who decided, where a person rejected or settled it."""


@attrs.frozen(kw_only=True)
class ToolLost(Event):
    """A call was in flight when its worker died, and may not be repeated unasked: a person has to say how it ended."""

    call_id: str


@attrs.frozen(kw_only=True)
class ToolPaused(Event):
    """A call waits for something outside of the run, and is taken up again when that is there."""

    call_id: str
    pending: tuple[Pending, ...]
    """What it waits for: an answer, input, or decisions in the run of a sub-agent."""

    state: str | None = None
    """JSON text that the tool gets back with the answers to its questions; None where it has asked none."""


@attrs.frozen(kw_only=True)
class InputGiven(Event):
    """A person has answered what a tool asked in the middle of its call: the call is made again."""

    call_id: str
    by: str = ""
    answers: dict[str, Any]
    """By the question's key: an object that fits its schema, or None where the person declined."""


@attrs.frozen(kw_only=True)
class ApprovalAsked(Event):
    """A call waits for a yes."""

    call_id: str
    expires_at: float
    """Seconds since 1970 by the store's clock; no answer by then is a no."""

    description: str = ""
    """What the call will do, where the tool says so."""

    digest: str = ""
    """Of the tool and the arguments that are asked about: a yes holds for nothing else."""

    error: str = ""
    """Why the last approval was not carried out; empty where the call was not approved before."""


@attrs.frozen(kw_only=True)
class ApprovalGiven(Event):
    """A person said yes."""

    call_id: str
    by: str = ""
    arguments: str | None = None
    """The arguments in their place, where the person changed them: they are what runs and what the history says."""

    key: str | None = None
    """The idempotency key of the changed call; None where the call keeps the key that it was proposed with."""


@attrs.frozen(kw_only=True)
class ToolsReturned(Event):
    """Every call of the turn has its result; the turn's messages enter the history."""


@attrs.frozen(kw_only=True)
class Continued(Event):
    """The run goes on."""

    note: str = ""
    """What the model shall be told before its next turn, if anything."""

    loop: bool = False
    """Whether a loop was found: the findings add up."""

    disabled: tuple[str, ...] = ()
    """Tools withdrawn from here on."""

    refused: bool = False
    """Whether a draft was refused: the refusals of a run add up."""

    is_last: bool = False
    """Whether the next reply is the last; only in journals of format 3 and older, where `LimitReached` says it now."""

    asks: str = ""
    """What a person is asked; the run then waits for input before it goes on."""


@attrs.frozen(kw_only=True)
class Judged(Event):
    """A judge has looked at the draft, or at the results of the turn."""

    verdict: Verdict
    usage: Usage = Usage()
    """What judging cost."""


@attrs.frozen(kw_only=True)
class Accepted(Event):
    """The draft is the answer."""


@attrs.frozen(kw_only=True)
class LimitReached(Event):
    """A limit stops the run, and the model is asked for one last answer. Closes every open call, as `Failed` does."""

    reason: StopReason
    message: str
    """For people, as in the `Failed` that follows the last answer."""

    note: str
    """What the model is told."""


@attrs.frozen(kw_only=True)
class Failed(Event):
    """The run is over without an answer. It closes every open call, so that the history stays valid."""

    reason: StopReason
    message: str
    """For people: what happened, with the number reached."""


@attrs.frozen(kw_only=True)
class Paused(Event):
    """The run rests between two steps until somebody resumes it."""

    by: str = ""
    message: str = ""
    kind: PendingKind = PendingKind.PAUSE
    """PAUSE where a person or a setting asked for it, CRASH where too many workers died while they drove it."""


@attrs.frozen(kw_only=True)
class Resumed(Event):
    """The run goes on, after a pause or with an agent that is not what it was."""

    fingerprint: Fingerprint | None = None
    """Of the agent that goes on, where it has changed."""

    changes: tuple[str, ...] = ()
    """What has changed since, for people."""


# What comes of a request to the model.
Answered: TypeAlias = ToolsChosen | AnswerGiven | AnswerDrafted | ModelFaltered
# All of them, in the order in which a run meets them.
EVENTS: tuple[type[Event], ...] = (
    Observed,
    ToolsChosen,
    AnswerGiven,
    AnswerDrafted,
    ModelFaltered,
    Compacted,
    ToolsOffered,
    ToolStarted,
    ToolCutOff,
    ToolFinished,
    ToolLost,
    ToolPaused,
    InputGiven,
    ApprovalAsked,
    ApprovalGiven,
    ToolsReturned,
    Judged,
    Continued,
    Accepted,
    Paused,
    Resumed,
    LimitReached,
    Failed,
)
