"""Steps of random walks: what may happen next in a run, drawn from all that its own effect can lead to."""

import attrs
from hypothesis import strategies as st

from agentfsm import (
    AgentCost,
    AssistantMessage,
    InputKind,
    Label,
    Outcome,
    Purpose,
    StopReason,
    SystemMessage,
    TextPart,
    ToolResult,
    Usage,
)
from agentfsm.core import events as e
from agentfsm.core.calls import UNDECIDED_PHASES, Phase
from agentfsm.core.effects import AskModel, ReadInbox, Reflect, RunTools, Wait
from agentfsm.core.header import Fingerprint
from agentfsm.core.history import default_segments, render_segments
from agentfsm.core.inbox import Input
from agentfsm.core.labels import LabelSource, as_labels
from agentfsm.core.plans import PLAN_TOOL, PlanProgress, build_plan_call
from agentfsm.core.recalled_items import RecalledItem
from agentfsm.core.run import begin_run
from agentfsm.core.usage import Spending
from agentfsm.guards import GuardVerdict
from agentfsm.models import HostedContent
from agentfsm.planning import Plan, PlanStep
from agentfsm.reflection import Action, Verdict
from tests.support.sample_runs import ATTENDED, INQUIRED, TASK, WAITED, answer, call, header, result

text = st.text(max_size=12)

usage = st.builds(
    Usage,
    input_tokens=st.integers(0, 9_999),
    output_tokens=st.integers(0, 9_999),
    cost_usd=st.none() | st.integers(0, 9).map(float),
)

stamp = st.fixed_dictionaries({"at": st.floats(0, 2**32), "took_s": st.integers(0, 600).map(float)})

labels = st.just(()) | st.frozensets(st.sampled_from(Label), max_size=3).map(as_labels)

one_input = st.builds(
    Input, kind=st.sampled_from(InputKind), parts=st.tuples(st.builds(TextPart, text=text)), labels=labels
)

inputs = st.lists(one_input, max_size=2).map(tuple)

some_inputs = st.tuples(one_input)

spent = st.just(()) | st.tuples(st.builds(Spending, purpose=st.sampled_from(Purpose), usage=usage))

outcomes = st.sampled_from(Outcome)

reasons = st.sampled_from([reason for reason in StopReason if reason is not StopReason.COMPLETED])

thoughts = st.sampled_from(
    [
        *(e.ToolsChosen, e.ToolsChosen, e.AnswerDrafted, e.ModelFaltered, e.Compacted, e.ToolsOffered, e.Reminded),
        *(e.AttemptFailed, e.Planned, e.PlanDropped, e.StepsReady, e.Recalled),
    ]
)

names = st.lists(st.sampled_from("xyz"), min_size=1, max_size=4)

costs = st.builds(AgentCost, agent=text, run_id=text, usage=usage, usd=st.none(), turns=st.just(1))

answers = st.dictionaries(st.sampled_from("ab"), st.none() | st.just({"name": "x"}), max_size=2)

edited = st.none() | st.just('{"edited": true}')

disabled = st.lists(st.sampled_from("xyz"), max_size=2).map(tuple)

continued = st.builds(
    e.Continued,
    note=text,
    loop=st.booleans(),
    disabled=disabled,
    refused=st.booleans(),
    is_last=st.booleans(),
    asks=st.sampled_from(["", "", "what now?"]),
)

agents = st.none() | st.builds(Fingerprint, instructions=text, model=text)

_SAID = (TASK, AssistantMessage(calls=(call(turn=4),)), result("t4.0"), answer())

_LAYOUT = default_segments(3, task=0)

_PRIVATE = LabelSource(label=Label.PRIVATE, run_id="r0", version=4, call_id="t4.0", name="search")

WHOLE = attrs.evolve(begin_run(header(id="r0")), messages=_SAID, labels={Label.PRIVATE: _PRIVATE})

# What a run may go on from: nothing, a run, and one whose history a compaction has shortened.
EARLIER = (
    None,
    WHOLE,
    attrs.evolve(WHOLE, cutoff=3, segments=_LAYOUT, compacted_messages=render_segments(_LAYOUT, _SAID)),
)

GIVEN = (SystemMessage(text="rules"), AssistantMessage(calls=(call(turn=2),)), result("t2.0"))


def new_calls(event):
    """Return the calls that an event opens: those of a reply, a plan, or steps of a plan."""
    match event:
        case e.ToolsChosen():
            return event.message.calls
        case e.Planned():
            return (event.call,)
        case e.StepsReady():
            return event.calls
    return ()


def ask(run, draw):
    """Draw what may come of asking the model, short of an answer that ends the run."""
    kind = draw(thoughts)
    if kind in (e.ModelFaltered, e.AttemptFailed):
        return kind(error=draw(text), usage=draw(usage))
    if kind is e.StepsReady and run.plan is not None and (ready := run.plan.build_ready_calls(run.header)):
        return kind(calls=ready, usage=draw(usage))
    if kind is e.Recalled:
        found = (RecalledItem(id="m", kind="fact", text=draw(text), score=1.0, valid_from=0.0),)
        items, profile = draw(st.sampled_from([(), found])), draw(st.sampled_from([None, (), found]))
        return kind(query=draw(text), items=items, profile=profile, usage=draw(usage))
    if kind in (e.PlanDropped, e.StepsReady):
        return e.PlanDropped(reason=draw(text), usage=draw(usage))
    if kind is e.Planned:
        progress = run.plan or PlanProgress()
        first = progress.next_id
        steps = (PlanStep(id=first, tool="x"), PlanStep(id=first + 1, tool="y", after=(first,)))
        planned = build_plan_call(run.header, progress.number + 1, Plan(steps=steps))
        return kind(call=planned, usage=draw(usage))
    if kind is e.Reminded:
        return kind(text=draw(text))
    if kind is e.ToolsOffered:
        return kind(tools=draw(disabled), how=draw(text), usage=draw(usage))
    if kind is e.Compacted:
        starts = [n for n, m in enumerate(run.messages) if n >= run.cutoff and not isinstance(m, ToolResult)]
        return kind(start=draw(st.sampled_from(starts)), tokens_before=2, tokens_after=1, why=draw(text))
    turn = run.turns_before + run.turn + 1
    calls = tuple(call(number, turn, name) for number, name in enumerate(draw(names)))
    hosted = draw(st.none() | st.builds(HostedContent, labels=labels))
    said = AssistantMessage(text=draw(text), calls=calls if kind is e.ToolsChosen else (), hosted=hosted)
    return kind(message=said, usage=draw(usage))


def ended(asked, draw, outcomes=outcomes, most_attempts=3):
    """Draw how a call ended; what a person decides is no attempt of its tool."""
    outcome = draw(outcomes)
    ending = ToolResult(
        call_id=asked.id,
        tool=asked.name,
        outcome=outcome,
        content=draw(text),
        attempts=draw(st.integers(1, most_attempts)),
        shown_chars=draw(st.none() | st.integers(0, 12)),
        child=draw(st.none() | costs),
        spent=draw(spent),
        labels=draw(labels),
    )
    return e.ToolFinished(result=ending, by=draw(text))


def work(run, draw, calls):
    """Draw what may come of running calls: any of them moves; where none is left, the turn ends."""
    steps = () if run.plan is None or run.reply is not None else run.plan.build_ready_calls(run.header, run.open)
    if steps and draw(st.booleans()):
        return e.StepsReady(calls=steps)
    if not calls:
        return e.ToolsReturned()
    asked = draw(st.sampled_from(calls))
    match run.open_call(asked.id).phase, draw(st.integers(0, 2)):
        case Phase.INTENDED, 0:
            moves = [asks(asked.id, draw), guarded(asked.id, draw), paused(asked.id), e.ToolLost(call_id=asked.id)]
            return draw(st.sampled_from(moves))
        case Phase.RUNNING, 0:
            lost = e.ToolLost(call_id=asked.id)
            asking = [inquired(asked.id), attended(asked.id, draw)]
            return draw(st.sampled_from([lost, paused(asked.id), *asking, cut(asked.id, draw)]))
        case ((Phase.INTENDED | Phase.APPROVED | Phase.RUNNING), 1):
            flags = st.fixed_dictionaries({"repeatable": st.booleans(), "read_only": st.booleans()})
            return e.ToolStarted(call_id=asked.id, labels=draw(labels), **draw(flags))
    return ended(asked, draw)


def cut(call_id, draw):
    return e.ToolCutOff(call_id=call_id, started_at=1.0, duration_s=2.0, undone=draw(st.booleans()))


def guarded(call_id, draw):
    return e.Guarded(call_id=call_id, verdict=draw(st.sampled_from(GuardVerdict)), counts=draw(st.booleans()))


def asks(call_id, draw):
    return e.ApprovalAsked(call_id=call_id, expires_at=9.0, digest=draw(text))


def paused(call_id):
    return e.ToolPaused(call_id=call_id, pending=(WAITED,))


def inquired(call_id):
    return attrs.evolve(INQUIRED, call_id=call_id)


def attended(call_id, draw):
    return attrs.evolve(ATTENDED, call_id=call_id, by=draw(text), answers=draw(answers))


def decide(run, draw):
    """Draw what may come of what a person decides, here or in the run of a sub-agent."""
    entry = draw(st.sampled_from([entry for entry in run.open if entry.phase in UNDECIDED_PHASES]))
    asked = entry.call
    if entry.phase is Phase.AWAITING_APPROVAL and not draw(st.integers(0, 3)):
        return asks(asked.id, draw)  # its tool has changed
    if entry.phase is Phase.PAUSED and entry.pending == INQUIRED.pending and draw(st.booleans()):
        return e.InputGiven(call_id=asked.id, by=draw(text), answers=draw(answers))
    if entry.phase is Phase.PAUSED:
        return draw(
            st.sampled_from([e.ToolStarted(call_id=asked.id), paused(asked.id), ended(asked, draw, most_attempts=1)])
        )
    if draw(st.booleans()):
        # An edited plan is a plan, which the engine has checked.
        arguments = None if asked.name == PLAN_TOOL else draw(edited)
        return e.ApprovalGiven(call_id=asked.id, by=draw(text), arguments=arguments)
    said_no = Outcome.REJECTED if entry.phase is Phase.AWAITING_APPROVAL else Outcome.FAILED
    return ended(asked, draw, st.just(said_no), most_attempts=1)


def resting(run, draw):
    """Draw what may come between two steps in any state: a pause, its end, another agent."""
    resumed = e.Resumed(fingerprint=draw(agents), changes=draw(disabled))
    return resumed if run.paused else draw(st.sampled_from([resumed, e.Paused(by=draw(text), message=draw(text))]))


def going_on(run, draw):
    """Draw what may happen next without ending the run, as its own effect has it."""
    if run.paused or not draw(st.integers(0, 9)):
        return resting(run, draw)
    if not draw(st.integers(0, 19)):
        return e.LimitReached(reason=draw(reasons), message=draw(text), note=draw(text))
    match run.effect:
        case ReadInbox():
            return e.Observed(inputs=draw(inputs))
        case AskModel():
            return ask(run, draw)
        case RunTools(calls=calls):
            return work(run, draw, calls)
        case Wait() if run.asks:
            return e.Observed(inputs=draw(some_inputs))
        case Wait():
            return decide(run, draw)
        case Reflect(verdict=None) if not draw(st.integers(0, 3)):
            return e.Judged(verdict=Verdict(action=draw(st.sampled_from(Action)), note=draw(text)), usage=draw(usage))
        case Reflect():
            return draw(continued)
    raise AssertionError(run.effect)


def ending(run, draw):
    """Draw what ends the run here: the answer where one can be given, and a failure anywhere."""
    if draw(st.integers(0, 3)):
        match run.effect:
            case AskModel():
                return e.AnswerGiven(message=AssistantMessage(text=draw(text)), usage=draw(usage))
            case Reflect(draft=str()):
                return e.Accepted()
    return e.Failed(reason=draw(reasons), message=draw(text))
