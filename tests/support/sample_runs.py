"""Small builders for the core's tests: calls, results, events, and a run in every state and phase."""

import json

import attrs

from agentfsm import (
    AssistantMessage,
    Outcome,
    Pending,
    PendingKind,
    Question,
    Run,
    State,
    StopReason,
    SystemMessage,
    TextPart,
    ToolCall,
    ToolResult,
    Usage,
    UserMessage,
)
from agentfsm.core import events as e
from agentfsm.core.calls import BackgroundRun
from agentfsm.core.header import Fingerprint, Header
from agentfsm.core.inbox import Input
from agentfsm.core.recalled_items import RecalledItem
from agentfsm.core.run import begin_run
from agentfsm.guards import GuardVerdict
from agentfsm.planning import Plan, PlanStep
from agentfsm.reflection import Action, Verdict

PROMPT = (TextPart(text="What is the weather in Beijing?"),)
TASK = UserMessage(parts=PROMPT)
USAGE = Usage(input_tokens=10, output_tokens=2)
REMEMBERED = RecalledItem(id="m1", kind="fact", text="Ann drinks tea.", score=0.9, valid_from=0.0)


def header(**changes):
    return Header(**{"id": "r1", "prompt": PROMPT, "created_at": 100.0} | changes)


def call(number=0, turn=1, name="search", arguments="{}"):
    call_id = f"t{turn}.{number}"
    return ToolCall(id=call_id, name=name, arguments=arguments, key=f"r1:{call_id}")


def result(call_id="t1.0", outcome=Outcome.DONE, content="ok", name="search", **fields):
    return ToolResult(call_id=call_id, tool=name, outcome=outcome, content=content, **fields)


def chosen(count=1, turn=1, text="", **fields):
    """Return the event of a turn with so many calls."""
    calls = tuple(call(number, turn, **fields) for number in range(count))
    return e.ToolsChosen(message=AssistantMessage(text=text, calls=calls), usage=USAGE)


def finished(call_id="t1.0", outcome=Outcome.DONE, content="ok", **fields):
    return e.ToolFinished(result=result(call_id, outcome, content, **fields))


def round_trip(turn, outcome=Outcome.DONE, content="ok", **fields):
    """Return the events of one turn with one call, from THINK to OBSERVE."""
    return [
        chosen(turn=turn, **fields),
        finished(f"t{turn}.0", outcome, content),
        e.ToolsReturned(),
        e.Continued(),
    ]


def answer(text="Sunny."):
    return AssistantMessage(text=text)


def failed(reason=StopReason.CANCELLED, message="by ann"):
    return e.Failed(reason=reason, message=message)


def observing():
    return begin_run(header())


def thinking(**changes):
    return begin_run(header(**changes)).apply(e.Observed())


def acting(*events, count=1):
    """Return a run with so many open calls, after these events."""
    return thinking().apply(chosen(count)).fold(events)


ASKED = e.ApprovalAsked(call_id="t1.0", expires_at=500.0)
APPROVED = e.ApprovalGiven(call_id="t1.0", by="ann")
STARTED = e.ToolStarted(call_id="t1.0")
READING = e.ToolStarted(call_id="t1.0", repeatable=True, read_only=True, since=7.0, attempts=2)
CUT = e.ToolCutOff(call_id="t1.0", started_at=7.0, duration_s=2.5)
UNDONE = e.ToolCutOff(call_id="t1.0", started_at=7.0, duration_s=2.5, undone=True)
LOST = e.ToolLost(call_id="t1.0")
# What a sub-agent waits for, in its own run.
WAITED = Pending(
    kind=PendingKind.APPROVAL,
    run_id="r1.t1.0",
    call_id="t1.0",
    tool="pay",
    arguments={"cents": 5},
    description="Pays 5 cents.",
    expires_at=500.0,
)
PAUSED = e.ToolPaused(call_id="t1.0", pending=(WAITED,))
QUESTION = Question(
    key="who",
    message="Who pays?",
    schema={"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
)
# A tool that asks a person in the middle of its call.
INQUIRED = e.ToolPaused(
    call_id="t1.0",
    pending=(
        Pending(
            kind=PendingKind.QUESTION,
            run_id="r1",
            call_id="t1.0",
            tool="pay",
            description="Who pays?",
            expires_at=500.0,
            digest="d1",
            questions=(QUESTION,),
        ),
    ),
    state='{"cents": 5}',
)
GIVEN = e.InputGiven(call_id="t1.0", by="ann", answers={"who": {"name": "Ann"}})
# The same, of a person who attends the call, which goes on.
ATTENDED = attrs.evolve(GIVEN, questions=(QUESTION,), state='{"cents": 5}')

# A run that an earlier call has left in the background.
BEGUN = BackgroundRun(call=call(turn=9, name="research"))

# The fingerprint of an agent that is not what it was.
CHANGED = Fingerprint(instructions="0a1b2c3d", model="gpt-4o", tools={"search": "4e5f6071"})

PLAN = Plan(
    steps=(
        PlanStep(id=1, tool="pay", arguments={"cents": 5}),
        PlanStep(id=2, question="Is that much?", after=(1,)),
        PlanStep(id=3, tool="pay", arguments={"cents": {"$step": 1}}, after=(1, 2), description="again"),
    ),
    analysis="two payments",
)
PLANNED = e.Planned(
    call=ToolCall(id="p1", name="agentfsm.plan", arguments=json.dumps(PLAN.to_json()), key="r1:p1"),
    reason="step 3 failed",
    usage=USAGE,
)

# One event of every type; each names the call that the runs below have open.
SAMPLES = {
    e.Observed: e.Observed(inputs=(Input(parts=PROMPT),)),
    e.ToolsChosen: chosen(),
    e.AnswerGiven: e.AnswerGiven(message=answer(), usage=USAGE),
    e.AnswerDrafted: e.AnswerDrafted(message=answer(), usage=USAGE),
    e.ModelFaltered: e.ModelFaltered(error="overloaded"),
    e.AttemptFailed: e.AttemptFailed(error="the connection broke", usage=USAGE),
    e.Judged: e.Judged(verdict=Verdict(action=Action.ACCEPT)),
    e.Compacted: e.Compacted(start=0, tokens_before=9, tokens_after=8, why="full"),
    e.ToolsOffered: e.ToolsOffered(tools=("search",), how="by their words", usage=USAGE),
    e.Reminded: e.Reminded(text="No refunds today.", prompts=("today@1.0#0123456789ab",)),
    e.Recalled: e.Recalled(query="tea", items=(REMEMBERED,), usage=USAGE),
    e.Planned: PLANNED,
    e.PlanDropped: e.PlanDropped(reason="no plan was made", usage=USAGE),
    e.StepsReady: e.StepsReady(calls=(ToolCall(id="p1.1", name="pay", arguments='{"cents": 5}', key="r1:p1.1"),)),
    e.Guarded: e.Guarded(call_id="t1.0", verdict=GuardVerdict.ALLOW),
    e.ToolStarted: STARTED,
    e.ToolCutOff: CUT,
    e.ToolFinished: finished(),
    e.ToolLost: LOST,
    e.ToolPaused: PAUSED,
    e.InputGiven: GIVEN,
    e.ApprovalAsked: ASKED,
    e.ApprovalGiven: APPROVED,
    e.ToolsReturned: e.ToolsReturned(),
    e.ChildReported: e.ChildReported(call_id=BEGUN.call.id, pending=(WAITED,)),
    e.Continued: e.Continued(note="go on"),
    e.Accepted: e.Accepted(),
    e.Paused: e.Paused(by="ann"),
    e.Resumed: e.Resumed(fingerprint=CHANGED, changes=("other instructions",)),
    e.LimitReached: e.LimitReached(reason=StopReason.TIMEOUT, message="9 of 9 s", note="your last reply"),
    e.Failed: failed(),
}

# What has to have happened in ACT before an event makes sense there.
BEFORE = {
    e.ToolCutOff: (STARTED,),
    e.ToolFinished: (STARTED,),
    e.ToolLost: (STARTED,),
    e.ToolPaused: (STARTED,),
    e.InputGiven: (STARTED, INQUIRED),
    e.ApprovalGiven: (ASKED,),
    e.ToolsReturned: (finished(),),
}


def run_in(state, before=()) -> Run:
    """Return a run in the state, with a background run; in ACT after these events."""
    return attrs.evolve(_run_in(state, before), background={BEGUN.call.id: BEGUN})


def _run_in(state, before) -> Run:
    match state:
        case State.OBSERVE:
            return observing()
        case State.THINK:
            return thinking()
        case State.ACT:
            return acting(*before)
        case State.REFLECT:
            return thinking().apply(SAMPLES[e.AnswerDrafted])
        case State.DONE:
            return thinking().apply(SAMPLES[e.AnswerGiven])
    return thinking().apply(failed())


def sound_history(messages):
    """Fail unless each call has exactly one result, in call order, right behind its message, and no result is alone."""
    waiting = []
    for message in messages:
        if waiting:
            assert isinstance(message, ToolResult)
            assert (message.call_id, message.tool) == (waiting[0].id, waiting[0].name)
            waiting = waiting[1:]
        elif isinstance(message, AssistantMessage):
            waiting = list(message.calls)
        else:
            assert isinstance(message, SystemMessage | UserMessage)
    assert not waiting
