"""Random walks: whatever legal events a run's own effect can lead to, the promises about every run hold."""

from collections import Counter
from itertools import pairwise

import attrs
from hypothesis import event as note
from hypothesis import given
from hypothesis import strategies as st
from sample_runs import INQUIRED, TASK, WAITED, answer, call, header, result, sound_history

from agentfsm.core import events as e
from agentfsm.core.calls import UNDECIDED, Phase
from agentfsm.core.codec import decode_event, encode_event
from agentfsm.core.effects import AskModel, ReadInbox, Reflect, RunTools, Wait
from agentfsm.core.fingerprint import Fingerprint
from agentfsm.core.inbox import Input, InputKind
from agentfsm.core.limits import StopReason
from agentfsm.core.machine import TABLE, State
from agentfsm.core.messages import AgentCost, AssistantMessage, Outcome, SystemMessage, TextPart, ToolResult, Usage
from agentfsm.core.run import begin
from agentfsm.core.verdict import Action, Verdict
from agentfsm.core.view import plain_layout, view

text = st.text(max_size=12)
usage = st.builds(
    Usage,
    input_tokens=st.integers(0, 9_999),
    output_tokens=st.integers(0, 9_999),
    cost_usd=st.none() | st.integers(0, 9).map(float),
)
stamp = st.fixed_dictionaries({"at": st.floats(0, 2**32), "took_s": st.integers(0, 600).map(float)})
inputs = st.lists(
    st.builds(Input, kind=st.sampled_from(InputKind), parts=st.tuples(st.builds(TextPart, text=text))), max_size=2
).map(tuple)
some_inputs = st.tuples(
    st.builds(Input, kind=st.sampled_from(InputKind), parts=st.tuples(st.builds(TextPart, text=text)))
)
outcomes = st.sampled_from(Outcome)
reasons = st.sampled_from([reason for reason in StopReason if reason is not StopReason.COMPLETED])
thoughts = st.sampled_from(
    [e.ToolsChosen, e.ToolsChosen, e.AnswerDrafted, e.ModelFaltered, e.Compacted, e.ToolsOffered]
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
_LAYOUT = plain_layout(3, task=0)
WHOLE = attrs.evolve(begin(header(id="r0")), messages=_SAID)
# What a run may go on from: nothing, a run, and one whose history a compaction has shortened.
EARLIER = (None, WHOLE, attrs.evolve(WHOLE, window=3, layout=_LAYOUT, head=view(_LAYOUT, _SAID)))
GIVEN = (SystemMessage(text="rules"), AssistantMessage(calls=(call(turn=2),)), result("t2.0"))


def ask(run, draw):
    """Draw what may come of asking the model, short of an answer that ends the run."""
    kind = draw(thoughts)
    if kind is e.ModelFaltered:
        return kind(error=draw(text), usage=draw(usage))
    if kind is e.ToolsOffered:
        return kind(tools=draw(disabled), how=draw(text), usage=draw(usage))
    if kind is e.Compacted:
        starts = [n for n, m in enumerate(run.messages) if n >= run.window and not isinstance(m, ToolResult)]
        return kind(start=draw(st.sampled_from(starts)), tokens_before=2, tokens_after=1, why=draw(text))
    turn = run.turns_before + run.turn + 1
    calls = tuple(call(number, turn, name) for number, name in enumerate(draw(names)))
    said = AssistantMessage(text=draw(text), calls=calls if kind is e.ToolsChosen else ())
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
    )
    return e.ToolFinished(result=ending, by=draw(text))


def work(run, draw, calls):
    """Draw what may come of running calls: any of them moves; where none is left, the turn ends."""
    if not calls:
        return e.ToolsReturned()
    asked = draw(st.sampled_from(calls))
    match run.entry(asked.id).phase, draw(st.integers(0, 2)):
        case Phase.INTENDED, 0:
            return draw(st.sampled_from([asks(asked.id, draw), paused(asked.id), e.ToolLost(call_id=asked.id)]))
        case Phase.RUNNING, 0:
            lost = e.ToolLost(call_id=asked.id)
            return draw(st.sampled_from([lost, paused(asked.id), inquired(asked.id), cut(asked.id, draw)]))
        case ((Phase.INTENDED | Phase.APPROVED | Phase.RUNNING), 1):
            flags = st.fixed_dictionaries({"repeatable": st.booleans(), "read_only": st.booleans()})
            return e.ToolStarted(call_id=asked.id, **draw(flags))
    return ended(asked, draw)


def cut(call_id, draw):
    return e.ToolCutOff(call_id=call_id, started_at=1.0, duration_s=2.0, undone=draw(st.booleans()))


def asks(call_id, draw):
    return e.ApprovalAsked(call_id=call_id, expires_at=9.0, digest=draw(text))


def paused(call_id):
    return e.ToolPaused(call_id=call_id, pending=(WAITED,))


def inquired(call_id):
    return attrs.evolve(INQUIRED, call_id=call_id)


def decide(run, draw):
    """Draw what may come of what a person decides, here or in the run of a sub-agent."""
    entry = draw(st.sampled_from([entry for entry in run.open if entry.phase in UNDECIDED]))
    asked = entry.call
    if entry.phase is Phase.ASKED and not draw(st.integers(0, 3)):
        return asks(asked.id, draw)  # its tool has changed
    if entry.phase is Phase.PAUSED and entry.waits == INQUIRED.pending and draw(st.booleans()):
        return e.InputGiven(call_id=asked.id, by=draw(text), answers=draw(answers))
    if entry.phase is Phase.PAUSED:
        return draw(
            st.sampled_from([e.ToolStarted(call_id=asked.id), paused(asked.id), ended(asked, draw, most_attempts=1)])
        )
    if draw(st.booleans()):
        return e.ApprovalGiven(call_id=asked.id, by=draw(text), arguments=draw(edited))
    said_no = Outcome.REJECTED if entry.phase is Phase.ASKED else Outcome.FAILED
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


# What holds after every event.


def results_in(events):
    return [event.result for event in events if isinstance(event, e.ToolFinished)]


def check_counts(run, events):
    """The version counts events, turns count replies, time and usage add up."""
    replies = (e.ToolsChosen, e.AnswerGiven, e.AnswerDrafted, e.ModelFaltered)
    assert run.version == len(events)
    assert run.turn == sum(isinstance(event, replies) for event in events)
    assert run.duration_s == sum(event.took_s for event in events)
    paid = [event.usage for event in events if isinstance(event, (*replies, e.ToolsOffered, e.Judged))]
    below = [result.child.usage for result in results_in(events) if result.child]
    assert run.usage == sum([*paid, *below], Usage())
    assert run.updated_at == events[-1].at


def check_histories(run, _events):
    """The history is valid now, as the model is shown it, and if the run were stopped this moment."""
    sound_history(run.messages)
    sound_history(run.shown)
    if not run.is_over:
        sound_history(run.apply(e.Failed(reason=StopReason.CANCELLED, message="")).messages)


def check_calls(run, events):
    """Every call that was chosen is open or closed, in order, under an id of its own."""
    chosen = [asked.id for event in events if isinstance(event, e.ToolsChosen) for asked in event.message.calls]
    recorded = [record.call_id for record in run.calls]
    assert [*recorded, *(entry.call.id for entry in run.open)] == chosen
    everywhere = [asked.id for m in run.messages if isinstance(m, AssistantMessage) for asked in m.calls]
    before = everywhere[: len(everywhere) - len(recorded)]
    assert len({*before, *chosen}) == len(before) + len(chosen)
    assert all(1 <= record.turn <= run.turn for record in run.calls)


def check_state(run, _events):
    """State, effect, stop reason and open calls tell the same story."""
    assert run.is_over == (run.state in {State.DONE, State.ERROR}) == (run.effect is None)
    assert run.is_over == (run.stop_reason is not None)
    assert (run.state is State.DONE) == (run.stop_reason is StopReason.COMPLETED)
    assert bool(run.open) == (run.state is State.ACT) == (run.reply is not None)
    assert not run.is_waiting or run.pending
    if run.state is State.DONE:
        assert run.output == run.messages[-1].text


def check_reflection(run, events):
    """Refusals and corrections are counted since input came; a verdict holds until the run goes on."""
    since = [event for event in events if not isinstance(event, e.Paused | e.Resumed)]
    heard = [index for index, event in enumerate(since) if isinstance(event, e.Observed) and event.inputs]
    since = since[heard[-1] + 1 if heard else 0 :]
    assert run.refusals == sum(isinstance(event, e.Continued) and event.refused for event in since)
    sent_back = {Action.RETRY_STEP, Action.REPLAN}
    judged = [a for a, b in pairwise(since) if isinstance(a, e.Judged) and isinstance(b, e.Continued)]
    assert run.corrections == sum(event.verdict.action in sent_back for event in judged)
    assert bool(run.asks) == bool(since and isinstance(since[-1], e.Continued) and since[-1].asks)
    if run.verdict is not None and not run.is_over:
        assert isinstance(since[-1], e.Judged)


def check_inquiries(run, events):
    """What people have answered is there for the next attempt, whatever happens to the call meanwhile."""
    for entry in run.open:
        if entry.phase is Phase.FINISHED:
            continue
        asked = [event for event in events if isinstance(event, e.ToolPaused) and event.call_id == entry.call.id]
        rounds = sum(event.state is not None for event in asked)
        given = [event for event in events if isinstance(event, e.InputGiven) and event.call_id == entry.call.id]
        told = {key: value for event in given for key, value in event.answers.items()}
        assert (entry.inquiry is None) == (rounds == 0)
        assert entry.inquiry is None or (entry.inquiry.rounds, dict(entry.inquiry.answers)) == (rounds, told)


def check_errors(run, _events):
    """Errors come by turn, and there are as many as turns failed in a row."""
    assert all(a.turn <= b.turn for a, b in pairwise(run.errors))
    assert run.consecutive_errors <= len(run.errors)


def check_marks(run, events):
    """What is counted and marked on the way is what the results and choices say."""
    retries = Counter()
    for each in results_in(events):
        retries[each.tool] += each.attempts - 1
    assert run.retries == +retries
    assert run.has_cut == any(each.cut for each in results_in(events))
    rests = [event for event in events if isinstance(event, e.Paused | e.Resumed | e.Failed)][-1:]
    assert (run.paused is not None) == bool(rests and isinstance(rests[0], e.Paused))
    known = [event.fingerprint for event in events if isinstance(event, e.Resumed) and event.fingerprint]
    assert run.fingerprint == (known[-1] if known else None)
    last = [event for event in events if isinstance(event, e.ToolsOffered) or getattr(event, "inputs", ())][-1:]
    assert run.offered == next((event.tools for event in last if isinstance(event, e.ToolsOffered)), None)


CHECKS = (
    check_counts,
    check_histories,
    check_calls,
    check_state,
    check_errors,
    check_marks,
    check_reflection,
    check_inquiries,
)


@given(
    data=st.data(),
    steps=st.integers(0, 30),
    before=st.sampled_from(EARLIER),
    history=st.sampled_from([(), GIVEN]),
)
def test_whatever_happens_the_promises_hold(data, steps, before, history):
    """After every event of a random legal run all checks hold, and the journal read back folds to the same run."""
    first = run = replayed = begin(header(history=history), before)
    events = []
    while not run.is_over:
        event = (going_on if len(events) < steps else ending)(run, data.draw)
        event = attrs.evolve(event, **data.draw(stamp))
        target = TABLE[run.state][type(event)]
        run = run.apply(event)
        events.append(event)
        assert run.state is target
        read = decode_event(encode_event(event, first.header), first.header)
        assert read == event
        replayed = replayed.apply(read)
        assert replayed == run
        for check in CHECKS:
            check(run, events)
    assert first.fold(events) == run
    for kind in {type(event).__name__ for event in events}:
        note(kind)
