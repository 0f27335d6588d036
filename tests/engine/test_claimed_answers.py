"""Answers that name the calls behind what they say was done, and what becomes of those that name others."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import suppress
from fractions import Fraction
from random import Random

import attrs
import pytest
from pydantic import BaseModel

from agentfsm import (
    Agent,
    AnswerCache,
    CallDelta,
    Claim,
    Claims,
    Limits,
    MisuseError,
    ModelRetry,
    Outcome,
    RunContext,
    RunNotFoundError,
    State,
    StopReason,
    TextDelta,
    tool,
)
from agentfsm.core import events as e
from agentfsm.core.claimed_calls import describe_claims
from agentfsm.flow import Flow, agent_step
from agentfsm.guards import Guard, exit_filter
from agentfsm.models import Fallback
from agentfsm.planning import Planner
from agentfsm.ports import OutputMode
from agentfsm.reflection import Reflector
from agentfsm.testing import ScriptedModel, call, fail, say
from tests.support.checks import sound, texts
from tests.support.failing_stores import CrashingStore, WorkerKilled

FIVE = {"score": 5}
ACCEPTED = json.dumps({"evaluation": {"completeness": FIVE, "correctness": FIVE, "format": FIVE}, "action": "accept"})
BODY = "Dear Ann, " * 40


@tool
async def send(to: str, body: str = "", urgent: bool = False) -> str:
    """Send a mail."""
    if to == "nobody":
        raise RuntimeError("no such address")
    return "sent"


@tool(read_only=True)
async def look(place: str = "here") -> str:
    """Look around."""
    return place


@tool(requires_approval=True)
async def pay(cents: float, details: dict[str, object] | None = None) -> str:
    """Pay."""
    return "paid"


TOOLS = [send, look, pay]
SEND_ANN = call("send", to="Ann")
ANN = ("send", {"to": "Ann"})


def claiming(result, *claims):
    """Return the line of a model that answers with claims."""
    named = [{"tool": name, "arguments": arguments} for name, arguments in claims]
    return say("", call("final_answer", result=result, claims=named))


def agent_of(*lines, claims=None, retries=0, **options):
    limits = Limits(answer_retries=retries)
    options = {"tools": TOOLS, "limits": limits, **options}
    return Agent(ScriptedModel(*lines), claims=claims or Claims(), **options)


def faults_of(run):
    return [claim.fault for claim in run.claims]


async def test_an_answer_without_its_call_goes_back_and_is_marked_at_last(store):
    """The model reads what is missing. If it acts, the answer is true; if it only repeats itself, it has the mark."""
    lie = claiming("I have sent it to Ann.", ANN)
    agent = agent_of(lie, say("", SEND_ANN), lie, retries=2, store=store)
    run = await agent.run("Send Ann a mail.")
    assert (run.output, run.claims, run.not_done) == ("I have sent it to Ann.", (claim_of("t2.0"),), ())
    assert run.messages[2].text == (
        "Your answer was refused: it claims what was not done:\n"
        '- send({"to":"Ann"}): no call of this tool is done\n'
        "Do it first, or say that it was not done.\n"
        "Call final_answer with a corrected one."
    )
    await sound(agent, run)
    agent = agent_of(lie, lie, retries=1, store=store)
    run = await agent.run("Send Ann a mail.")
    assert (run.state, run.output, run.turn) == (State.DONE, "I have sent it to Ann.", 2)
    assert run.not_done == run.claims == (claim_of("", "no call of this tool is done"),)
    await sound(agent, run)


def claim_of(call_id, fault=""):
    return Claim(tool="send", arguments={"to": "Ann"}, call_id=call_id, fault=fault)


@pytest.mark.parametrize(
    ("made", "claims", "faults"),
    [
        ([SEND_ANN], [ANN], [""]),
        ([SEND_ANN], [], []),
        ([SEND_ANN], [("send", {"to": "Ann", "body": "", "urgent": False})], [""]),
        ([SEND_ANN], [("send", {"to": "Bob"})], ["the call t1.0 differs in to"]),
        ([SEND_ANN], [("send", {"to": "Ann "})], ["the call t1.0 differs in to"]),
        ([SEND_ANN], [("send", {"to": "Ann", "urgent": 0})], ["the call t1.0 differs in urgent"]),
        ([SEND_ANN], [("send", {"to": "Ann", "cc": "Bob"})], ["the call t1.0 differs in cc"]),
        ([SEND_ANN], [ANN, ANN], ["", "it was done fewer times than is claimed"]),
        ([SEND_ANN, SEND_ANN], [ANN, ANN], ["", ""]),
        ([SEND_ANN], [("mail", {"to": "Ann"})], ["no call of this tool is done"]),
        ([call("send", to="nobody")], [("send", {"to": "nobody"})], ["its call t1.0 failed"]),
        ([call("send", to="nobody")], [("send", {"to": "Ann"})], ["no call of this tool is done"]),
        ([call("send", to="Ann", body=BODY)], [ANN], [""]),
        ([call("send", to="Ann", body=BODY)], [("send", {"to": "Ann", "body": ""})], ["the call t1.0 differs in body"]),
        ([call("send", to="Ann", body="Hi")], [ANN], ["the call t1.0 differs in body"]),
        (  # the first claim takes the call that the second does not need
            [call("send", to="Ann", body=BODY), call("send", to="Ann", body=BODY + "Bob")],
            [ANN, ("send", {"to": "Ann", "body": BODY})],
            ["", ""],
        ),
    ],
)
async def test_a_claim_is_true_if_a_call_with_its_arguments_is_done(made, claims, faults):
    """Arguments are equal as JSON with the defaults of the tool; each call stands for one claim."""
    run = await agent_of(say("", *made), claiming("Done.", *claims)).run("go")
    assert faults_of(run) == faults


async def test_numbers_and_objects_are_compared_as_json():
    """5 is 5.0, the order of members does not count, and what a person has edited is what was done."""
    details = {"to": ["A", {"iban": 1}], "note": None}
    made = say("", call("pay", cents=5, details=details))
    turned = {"note": None, "to": ["A", {"iban": 1.0}]}
    claims = [("pay", {"details": turned, "cents": 7.0}), ("pay", {"cents": 5, "details": details})]
    agent = agent_of(made, claiming("Paid.", *claims))
    run = await agent.run("go")
    await agent.approve(run.id, "t1.0", by="ann", arguments={"cents": 7, "details": details})
    run = await agent.resume(run.id)
    assert faults_of(run) == ["", "the call t1.0 differs in cents"]


async def test_an_answer_without_a_list_goes_back():
    """A text alone, and a list of another form, do not fit; the run ends as for any answer that does not."""
    wrong = say("", call("final_answer", result="Sent.", claims=[{"tool": "send"}]))
    agent = agent_of("Sent.", wrong, retries=1)
    run = await agent.run("go")
    assert (run.stop_reason, run.claims) == (StopReason.TOO_MANY_ERRORS, None)
    notes = texts(agent.driver.config.model.requests[-1])
    assert "the answer is not a JSON object" in notes
    assert "claims[0].arguments: required" in run.stop_message


class Note(BaseModel):
    """What was written."""

    note: str


class Receipt(BaseModel):
    """What was paid."""

    cents: int


@pytest.mark.parametrize("mode", [OutputMode.TOOL, OutputMode.JSON, OutputMode.PROMPT])
@pytest.mark.parametrize(
    ("kind", "written", "value", "text"),
    [
        (str, '"Done."', "Done.", "Done."),
        (Receipt, '{"cents": 3}', Receipt(cents=3), '{"cents": 3}'),
        (list[float], "[1.50, 2]", [1.5, 2.0], '{"result": [1.50, 2]}'),
        (Receipt | str, '"none"', "none", '{"result": "none"}'),
    ],
)
async def test_each_type_of_answer_in_each_mode(mode, kind, written, value, text):
    """The run has the answer as one without claims: the list stands beside it, in the journal."""
    whole = f'{{"claims": [{{"tool": "send", "arguments": {{"to": "Ann"}}}}], "result": {written}}}'
    line = say("", call("final_answer", **json.loads(whole))) if mode is OutputMode.TOOL else f"```json\n{whole}\n```"
    model = ScriptedModel(*[say("", SEND_ANN), line] * 2)
    model.output_modes = tuple(OutputMode)
    agent = Agent(model, tools=TOOLS, output_type=kind, output_mode=mode, claims=Claims())
    run = await agent.run("go")
    assert (run.output, faults_of(run)) == (value, [""])
    assert run.answer == text or mode is OutputMode.TOOL  # whose arguments the script writes
    async with agent.stream("go") as stream:
        seen = [event async for event in stream]
    deltas = [each for each in seen if isinstance(each, TextDelta | CallDelta)]
    if mode is OutputMode.TOOL:
        assert "claims" in "".join(each.arguments for each in deltas if isinstance(each, CallDelta))
    else:
        assert [each.text for each in deltas if isinstance(each, TextDelta) and each.text] == [text]
    assert stream.partial == (value.model_dump() if isinstance(value, Receipt) else value)


async def test_no_mode_that_needs_a_closed_schema():
    """Arguments may be anything, which structured output cannot express: the answer is a call then."""
    model = ScriptedModel()
    model.output_modes = tuple(OutputMode)
    agent = Agent(model, claims=Claims(), output_type=Receipt)
    assert agent.driver.config.output_spec.tool is not None
    with pytest.raises(MisuseError, match="need the output_mode"):
        Agent(model, claims=Claims(), output_mode="schema")
    with pytest.raises(MisuseError, match=r"claims=.*Claims\(\), or None"):
        Agent(model, claims=True)
    with pytest.raises(MisuseError, match="with claims, 'final_answer'"):
        Agent(model, claims=Claims(), tools=[tool(look.function, name="final_answer", read_only=True)])


async def test_a_complete_answer_names_all_that_was_changed():
    """By default an answer may leave calls out; a call that only reads never has to be named."""
    acts = say("", SEND_ANN, call("look"), call("send", to="nobody"))
    run = await agent_of(acts, claiming("Hello."), retries=1).run("go")
    assert (run.turn, run.claims) == (2, ())
    agent = agent_of(acts, claiming("Hello."), claiming("Sent.", ANN), retries=1, claims=Claims(complete=True))
    run = await agent.run("go")
    assert (run.turn, faults_of(run)) == (3, [""])
    assert "it does not claim these calls, which are done:\n- send (t1.0)\n" in texts(agent.model.requests[-1])


async def test_the_steps_of_a_plan_are_calls():
    """An answer names them as any other, and a person sees what it leaves out."""
    steps = [{"id": n, "tool": "send", "arguments": {"to": name}} for n, name in enumerate(("Ann", "Bob"), 1)]
    plan = json.dumps({"steps": steps})
    run = await agent_of(plan, claiming("Sent.", ANN), planner=Planner()).run("go")
    assert describe_claims(run) == {
        "claims": [{"tool": "send", "arguments": {"to": "Ann"}, "call_id": "p1.1", "fault": ""}],
        "unclaimed": [{"call_id": "p1.2", "tool": "send"}],
    }
    plain = await Agent(ScriptedModel("Hello.")).run("go")
    assert (plain.not_done, describe_claims(plain)) == ((), {"claims": None, "unclaimed": []})


async def test_earlier_runs_of_a_conversation_count_and_given_messages_do_not():
    """What an earlier run has done is in its journal. A history of the caller's is in none."""
    agent = agent_of(say("", SEND_ANN), claiming("Sent.", ANN), claiming("I sent it before.", ANN))
    first = await agent.run("go", session="s")
    second = await agent.run("and?", session="s")
    assert [claim.call_id for claim in (*first.claims, *second.claims)] == ["t1.0", "t1.0"]
    given = await agent_of(claiming("I sent it before.", ANN)).run("and?", messages=first.messages)
    assert faults_of(given) == ["no call of this tool is done"]


async def test_a_fork_knows_the_calls_that_it_has_copied():
    """A fork from before the call has not made it."""
    agent = agent_of(say("", SEND_ANN), claiming("Sent.", ANN), claiming("Sent.", ANN))
    run = await agent.run("go")
    after = await agent.finish(await agent.fork(run.id))
    agent = agent.with_(model=ScriptedModel(claiming("Sent.", ANN)))
    before = await agent.finish(await agent.fork(run.id, at=1))
    assert (faults_of(after), faults_of(before)) == ([""], ["no call of this tool is done"])


async def test_the_last_answer_of_a_stopped_run_is_marked_as_well(store):
    """It is not sent back, since no turn is left."""
    agent = agent_of(say("", SEND_ANN), claiming("Sent.", ANN, ANN), last_answer=True, store=store)
    run = await agent.with_(limits=Limits(turns=2)).run("go")
    assert (run.stop_reason, run.partial) == (StopReason.MAX_TURNS, "Sent.")
    assert faults_of(run) == ["", "it was done fewer times than is claimed"]
    await sound(agent, run)
    below = agent_of(say("", SEND_ANN), claiming("Sent.", ANN, ANN), last_answer=True, name="mailer").as_tool(turns=2)
    agent = agent_of(say("", call("mailer", query="go")), claiming("Hello."), tools=[below], store=store)
    [made] = (await agent.run("go")).calls
    assert made.outcome is Outcome.FAILED


async def test_a_draft_that_was_refused_is_no_answer():
    """What it says was not done may have been done since, so a run that a limit stops then has no mark of it."""
    agent = agent_of(claiming("Sent.", ANN), say("", SEND_ANN), retries=2)
    run = await agent.with_(limits=Limits(turns=2)).run("go")
    assert (run.stop_reason, run.partial, run.claims, run.not_done) == (StopReason.MAX_TURNS, "Sent.", None, ())


async def test_answers_that_no_model_has_written_claim_nothing():
    """A stop condition and the answer cache give texts of code; an answer that claims acts is not kept."""
    agent = agent_of(say("", SEND_ANN), stop_when=[lambda run: "That is all." if run.calls else False])
    run = await agent.run("go")
    assert (run.output, run.claims) == ("That is all.", ())
    peek = tool(look.function, name="peek", read_only=True, cacheable=True)
    for claims, turns in (([], [2, 1]), ([("peek", {})], [2, 2])):
        lines = (say("", call("peek")), claiming("Seen.", *claims)) * 2
        agent = agent_of(*lines, tools=[peek], answer_cache=AnswerCache(ttl_s=60))
        runs = [await agent.run("look", user="ann") for _ in turns]
        assert [(run.output, run.turn) for run in runs] == [("Seen.", turn) for turn in turns]


async def test_a_sub_agent_that_did_not_do_it_has_failed():
    """The caller's model reads it, its claim of the call is refused, and a flow does not go on."""
    mailer = agent_of(*[claiming("Sent to Ann.", ANN)] * 2, name="mailer")
    ask = ("mailer", {"query": "Send it."})
    agent = agent_of(say("", call(*ask[:1], **ask[1])), claiming("Sent.", ask), tools=[mailer.as_tool()])
    run = await agent.run("go")
    [made] = run.messages[2:3]
    told = '[the agent mailer says what was not done: send({"to":"Ann"}): no call of this tool is done]\nSent to Ann.'
    assert (made.outcome, made.content, faults_of(run)) == (Outcome.FAILED, told, ["its call t1.0 failed"])
    flow = await Flow([agent_step(mailer, name="mail", prompt="Send it.")]).run({})
    assert (flow.stop_reason, "says what was not done" in flow.stop_message) == (StopReason.STEP_FAILED, True)


async def test_validators_see_the_calls(store):
    """With arguments, outcomes, results and approvers: a rule of your own about what was done."""
    seen = []

    async def is_paid(ctx: RunContext[None], answer: str) -> None:
        seen.append([(each.tool, each.arguments, each.outcome, each.result, each.approved_by) for each in ctx.calls])
        assert ctx.run is not None
        if ctx.run.turn < 3:
            raise ModelRetry("look again")

    script = ScriptedModel(say("", call("pay", cents=5)), "Paid.", "Paid.")
    agent = Agent(script, tools=TOOLS, output_validators=[is_paid], store=store)
    run = await agent.run("go")
    await agent.approve(run.id, "t1.0", by="ann")
    run = await agent.resume(run.id)
    assert run.output == "Paid."
    assert seen == [[("pay", {"cents": 5}, Outcome.DONE, "paid", "ann")]] * 2
    assert RunContext(deps=None).calls == ()


async def test_another_model_may_answer():
    """A model that stands in for another has the same form."""
    line = claiming("Sent.", ANN)
    model = Fallback(ScriptedModel(say("", SEND_ANN), fail(ConnectionError("down"))), ScriptedModel(line))
    run = await Agent(model, tools=TOOLS, claims=Claims(), limits=Limits(model_retries=0)).run("go")
    assert (run.output, faults_of(run)) == ("Sent.", [""])


async def test_a_guard_filters_what_a_claim_says(store):
    """The arguments of a claim leave the run as its text does."""
    lie = claiming("Sent.", ("send", {"to": "13800138000"}), ANN)
    agent = agent_of(say("", SEND_ANN), lie, guards=[Guard(exit_filter())], store=store)
    run = await agent.run("go")
    hidden, kept = run.claims
    assert (hidden.tool, hidden.arguments, hidden.call_id, kept) == ("[filtered]", {}, "", claim_of("t1.0"))
    assert "13800138000" not in repr((run, await agent.history(run.id)))
    await sound(agent, run)


SECRETS = ('pa"ss\\word-77', "first line\nsecond line", "Schlüssel\t-77", "correct-horse-77")


@pytest.mark.parametrize("secret", SECRETS)
async def test_a_known_secret_stands_in_no_claim(secret):
    """However JSON writes it, in whatever part of a claim, and cut into two of them."""
    one, other = secret[:9], secret[9:]
    lies = [[("send", {"to": secret})], [("send", {"to": [{secret: 1}]})], [(secret, {})]]
    if secret == SECRETS[-1]:
        lies += [[("send", {"to": one, "body": other})], [("send", {"to": one}), ("send", {"to": other})]]
        lies += [[(one, {}), (other, {})], [("send", {one: 1}), ("send", {other: 2})]]
    agent = agent_of(*[claiming("Sent.", *each) for each in lies], guards=[exit_filter(secrets=[secret])])
    for each in lies:
        run = await agent.run("go")
        assert [(claim.tool, claim.arguments) for claim in run.claims] == [("[filtered]", {})] * len(each)


async def test_a_known_secret_stands_in_no_value_of_an_answer():
    """An answer of a type is JSON, in which the signs of a secret are escaped."""
    lines = [say("", call("final_answer", note=secret)) for secret in SECRETS]
    agent = Agent(ScriptedModel(*lines), output_type=Note, guards=[exit_filter(secrets=SECRETS)])
    assert [(await agent.run("go")).output.note for _ in SECRETS] == ["[SECRET_REDACTED]"] * len(SECRETS)


@pytest.mark.parametrize("written", [True, False])
async def test_a_kill_at_any_append_changes_nothing(store, written):
    """The run that goes on has the claims of one that was never killed, and each call is made once."""
    lie = claiming("Sent twice.", ANN, ANN)
    judge = Reflector(model=ScriptedModel(*[ACCEPTED] * 99))
    agent = agent_of(*[lie] * 99, retries=1, reflector=judge, store=store)
    for at in range(1, 100):
        mortal, run_id = CrashingStore(store, at, written=written), f"run-{at}"
        with suppress(WorkerKilled):
            await agent.with_(store=mortal).run("go", id=run_id)
        try:
            run = await agent.resume(run_id)
        except RunNotFoundError:
            continue
        assert (run.state, run.turn) == (State.DONE, 2)
        assert faults_of(run) == ["no call of this tool is done"] * 2
        assert (await agent.replay(run_id)).is_faithful
        if not mortal.dead:
            break


# Journals that differ from what their answers claim.

# A claim may leave out a long text, so calls that differ in it alone are the same here.
OMITTED = ("body",)
NAMES = ("Ann", "Bob", " Ann", "ann", "Ánn", "5", "")


def draw_call(draw):
    """Return a call that succeeds, with values that are easily confused."""
    if draw.random() < 0.5:
        values = {"to": draw.choice(NAMES), "body": draw.choice(("", "Hi", BODY)), "urgent": draw.random() < 0.5}
        return "send", {name: each for name, each in values.items() if name == "to" or draw.random() < 0.6}
    inner = {"a": draw.choice((1, 1.5, True, None, "1")), "b": [draw.choice(NAMES), {"c": draw.choice((0, False))}]}
    return "post", {"cents": draw.choice((1, 2, 2.5, 10**17)), "details": inner}


def rewrite(value, draw):
    """Return a JSON value as another model may write it: members in another order, 5 as 5.0."""
    if isinstance(value, dict):
        names = draw.sample(list(value), len(value))
        return {name: rewrite(value[name], draw) for name in names}
    if isinstance(value, list):
        return [rewrite(each, draw) for each in value]
    is_whole = type(value) is int and abs(value) < 2**53
    return float(value) if is_whole and draw.random() < 0.5 else value


def rewrite_claim(name, arguments, draw):
    """Return a true claim of a call: defaults and long texts may be there or not."""
    given = {"body": "", "urgent": False, **arguments} if name == "send" and draw.random() < 0.5 else arguments
    kept = {key: each for key, each in given.items() if each != BODY or draw.random() < 0.5}
    return name, rewrite(kept, draw)


def identify(name, arguments, left_out=()):
    """Return what a call is in the eyes of the test: all its arguments with the defaults, numbers by their values."""
    whole = {"body": "", "urgent": False, **arguments} if name == "send" else arguments

    def spell(value):
        if isinstance(value, dict):
            return sorted((key, spell(each)) for key, each in value.items())
        if isinstance(value, list):
            return [spell(each) for each in value]
        return (type(value).__name__, value) if isinstance(value, bool | str | None) else ("number", Fraction(value))

    return name, repr(spell({key: each for key, each in whole.items() if key not in left_out}))


def mutate(events, turn, draw):
    """Return the journal with another story of the call of a turn, and what that call is now, if it is still done."""
    events = list(events)
    chosen = [place for place, event in enumerate(events) if isinstance(event, e.ToolsChosen)][turn]
    ended = next(place for place in range(chosen, len(events)) if isinstance(events[place], e.ToolFinished))
    made = events[chosen].message.calls[0]
    match draw.choice(("dropped", "failed", "altered")):
        case "dropped":
            start = chosen - 1  # with the `Observed` before it
            end = next(place for place in range(ended, len(events)) if isinstance(events[place], e.Continued)) + 1
            return [*events[:start], *events[end:]], None
        case "failed":
            outcome = draw.choice([each for each in Outcome if each is not Outcome.DONE])
            result = attrs.evolve(events[ended].result, outcome=outcome)
            events[ended] = attrs.evolve(events[ended], result=result)
            return events, None
        case _:
            was = identify(made.name, json.loads(made.arguments), OMITTED)
            found = (draw_call(draw) for _ in range(1_000))
            name, arguments = next(each for each in found if each[0] == made.name and identify(*each, OMITTED) != was)
            changed = attrs.evolve(made, arguments=json.dumps(arguments))
            message = attrs.evolve(events[chosen].message, calls=(changed,))
            events[chosen] = attrs.evolve(events[chosen], message=message)
            return events, (name, arguments)


@tool
async def post(cents: float, details: dict[str, object]) -> str:
    """Post."""
    return "posted"


@pytest.mark.parametrize("count", [25, pytest.param(1_000, marks=pytest.mark.soak)])
async def test_no_false_claim_passes_and_no_true_one_is_refused(count):
    """Of journals in which one call was dropped, has failed or had other arguments, after an answer that was true."""
    false, true = Counter(), Counter()
    for seed in range(count):
        draw = Random(seed)
        made = [draw_call(draw) for _ in range(draw.randint(1, 6))]
        script = [say("", call(name, **arguments)) for name, arguments in made]
        claims = [rewrite_claim(*each, draw) for each in made]
        agent = agent_of(*script, claiming("Done.", *claims), tools=[send, post])
        whole = await agent.run("go")
        true[faults_of(whole) == [""] * len(made)] += 1
        place = draw.randrange(len(made))
        events, now = mutate((await agent.history(whole.id))[:-2], place, draw)
        left = [each for index, each in enumerate(made) if index != place] + ([] if now is None else [now])
        header = attrs.evolve(whole.header, id=f"mutated-{seed}")
        _, lease = await agent.store.create(header, events=tuple(events))
        await agent.store.release(lease).wait()
        run = await agent.with_(model=ScriptedModel(claiming("Done.", *claims))).resume(header.id)
        assert run.state is State.DONE
        done = Counter([identify(*each, OMITTED) for each in left])
        said = Counter([identify(*each, OMITTED) for each in claims])
        passed = Counter([identify(c.tool, c.arguments, OMITTED) for c in run.claims if c.call_id])
        false[all(passed[each] <= done[each] for each in passed)] += 1
        true["refused"] += sum((Counter({each: min(said[each], done[each]) for each in said}) - passed).values())
        true["given"] += sum(min(said[each], done[each]) for each in said)
    assert false == {True: count}
    assert true[True] == count
    assert true["refused"] <= 0.02 * true["given"]
