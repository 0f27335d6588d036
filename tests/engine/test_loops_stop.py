"""Runs that go round in circles: a word, then the tools are withdrawn, then the end."""

from __future__ import annotations

from itertools import cycle, islice

import pytest

from agentfsm import Agent, InputKind, Limits, ModelRetry, Outcome, RunContext, State, StopReason, SystemMessage, tool
from agentfsm.core.events import Continued
from agentfsm.ports import ProposedCall, Reply
from agentfsm.testing import FunctionModel, ScriptedModel, call, raw_call, say
from tests.support.checks import results_of, sound, sound_run, texts


@tool(read_only=True)
async def look(at: str = "", n: int = 0) -> str:
    """Look."""
    return f"saw {at} {n}"


@tool(read_only=True)
async def hear(at: str = "") -> str:
    """Hear."""
    return f"heard {at}"


@tool(read_only=True)
async def same(n: int = 0) -> str:
    """Say the same whatever it is asked."""
    return "pending"


@tool(read_only=True, poll=True)
async def status(n: int = 0) -> str:
    """Tell how far the job is."""
    return "pending"


TOOLS = [look, hear, same, status]


def circling(store, *lines: object, **options: object) -> tuple[Agent, ScriptedModel]:
    """An agent whose model says these lines, over and over."""
    model = ScriptedModel(*islice(cycle(lines), 40))
    return Agent(model, tools=TOOLS, store=store, **options), model


def asks(name: str) -> Reply:
    """A reply that calls a tool, for a model that is a function."""
    return Reply(calls=(ProposedCall(id="x", name=name, arguments="{}"),))


def notes(run) -> list[str]:
    """The notes of the system in a run's history."""
    return [message.text for message in run.messages if isinstance(message, SystemMessage)]


async def test_equal_writes_of_one_reply_run_and_are_noted(store):
    """They may be meant, so each has its effect; the model and the log learn of it, and reads are no matter."""
    paid = []

    @tool
    async def pay(cents: int) -> str:
        """Pay."""
        paid.append(cents)
        return "paid"

    once = call("pay", cents=5)
    model = ScriptedModel(
        say("", once, once, call("look"), call("look"), raw_call("pay", '{ "cents":5}')),
        say("", once, call("pay", cents=6), call("pay"), call("pay")),
        "Paid.",
    )
    run = await Agent(model, tools=[pay, look], store=store).run("pay")
    assert paid == [5, 5, 5, 5, 6]
    [note] = notes(run)
    assert note.startswith("Note: your last reply had equal calls, and each of them was run: pay 3 times.")


async def test_the_same_call_climbs_the_ladder(store):
    """Three turns alike are nudged, the next one costs the tool, the next ends the run."""
    agent, model = circling(store, say("", call("look", at="x")))
    run = await agent.run("look")
    sound_run(run)
    assert (run.state, run.stop_reason, run.turn) == (State.ERROR, StopReason.LOOP_DETECTED, 5)
    assert "the same call of look 3 turns running" in run.stop_message
    assert "2 warnings" in run.stop_message
    offered = [[definition.name for definition in request.tools] for request in model.requests]
    assert ["look" in each for each in offered] == [True, True, True, True, False]
    assert all("hear" in each for each in offered)
    assert [result.outcome for result in results_of(run.messages)] == [*[Outcome.DONE] * 4, Outcome.SKIPPED]
    nudge, withdrawn = notes(run)
    assert "repeating yourself" in nudge
    assert "look may not be called any more" in withdrawn
    assert (run.loops, run.disabled) == (2, ("look",))
    assert "repeating yourself" in texts(model.requests[3])
    await sound(agent, run)


async def test_a_model_that_listens_goes_on(store):
    """The first finding is a word and no more: a run that then does something else is never stopped."""
    line = say("", call("look", at="x"))
    model = ScriptedModel(line, line, line, say("", call("hear", at="x"), expect="repeating yourself"), "done")
    agent = Agent(model, tools=TOOLS, store=store)
    run = await agent.run("look")
    assert (run.output, run.loops, run.disabled) == ("done", 1, ())
    await sound(agent, run)


async def test_arguments_in_another_order_are_the_same_call(store):
    """It is what is asked for that counts, not how it is written."""
    one, two = raw_call("look", '{"at": "x", "n": 1}'), raw_call("look", '{ "n":1,"at":"x" }')
    agent, _ = circling(store, say("", one), say("", two))
    run = await agent.run("look")
    assert (run.stop_reason, run.turn) == (StopReason.LOOP_DETECTED, 5)


async def test_two_turns_alike_are_a_retry(store):
    """Twice is no loop."""
    twice = [say("", call("look", at=str(n))) for n in (1, 1, 2, 2, 3, 3)]
    run = await Agent(ScriptedModel(*twice, "done"), tools=TOOLS, store=store).run("look")
    assert (run.output, run.loops, notes(run)) == ("done", 0, [])


@pytest.mark.parametrize("period", [2, 3, 4])
async def test_a_sequence_that_comes_again(store, period):
    """A B A B is found, and A B C, and A B C D; the next findings come with the next turns."""
    lines = [say("", call("look", at=str(n))) for n in range(period)]
    agent, _ = circling(store, *lines)
    run = await agent.run("look")
    assert (run.stop_reason, run.turn) == (StopReason.LOOP_DETECTED, 2 * period + 2)
    assert f"the same sequence of {period} turns (look) twice running" in run.stop_message
    await sound(agent, run)


async def test_both_tools_of_a_sequence_are_withdrawn(store):
    """Every tool that takes part is."""
    agent, _ = circling(store, say("", call("look")), say("", call("hear")))
    run = await agent.run("look")
    assert set(run.disabled) == {"look", "hear"}
    assert run.stop_reason is StopReason.LOOP_DETECTED


def refuse(answer: str) -> str:
    """Take no answer but one."""
    if answer != "43":
        raise ModelRetry(f"{answer} is wrong")
    return answer


@pytest.mark.parametrize(
    ("last_answer", "turn", "words"),
    [(False, 5, "the same reply 3 turns running, after 2 warnings"), (True, 6, "its last answer is in run.partial")],
)
async def test_the_same_answer_climbs_the_ladder(store, last_answer, turn, words):
    """One that was refused is given again: the model reads why, and that it repeats itself, and then it ends."""
    limits = Limits(answer_retries=20)
    agent, model = circling(store, "42", output_validators=[refuse], limits=limits, last_answer=last_answer)
    run = await agent.run("compute")
    assert (run.stop_reason, run.turn, run.disabled) == (StopReason.LOOP_DETECTED, turn, ())
    assert words in run.stop_message
    assert all("42 is wrong" in note for note in notes(run))
    assert ["It would be refused again" in note for note in notes(run)][:4] == [False, False, True, True]
    assert "give another answer" in texts(model.requests[3])
    assert run.refusals == 4
    await sound(agent, run)


async def test_an_answer_that_changes_is_no_loop(store):
    """Each is refused for itself, as often as the limit says; one that is said to repeat itself may still be right."""
    agent, _ = circling(store, "41", "40", output_validators=[refuse], limits=Limits(answer_retries=6))
    assert (await agent.run("compute")).stop_reason is StopReason.TOO_MANY_ERRORS
    model = ScriptedModel("42", "42", "42", say("43", expect="repeating yourself"))
    run = await agent.with_(model=model).run("compute")
    assert (run.output, run.loops) == ("43", 1)


async def test_the_same_words_before_other_calls_are_progress(store):
    """A phrase that is repeated is no loop while what is done goes on."""
    lines = [say("Let me look.", call("look", at=str(n))) for n in range(6)]
    run = await Agent(ScriptedModel(*lines, "done"), tools=TOOLS, store=store).run("look")
    assert (run.output, run.loops, notes(run)) == ("done", 0, [])


async def test_polling_is_exempt(store):
    """A tool whose job is to be asked again may be, as long as the other limits allow."""
    agent, _ = circling(store, say("", call("status")), limits=Limits(turns=15))
    run = await agent.run("wait")
    assert (run.stop_reason, run.turn, run.loops, notes(run)) == (StopReason.MAX_TURNS, 15, 0, [])


async def test_a_poll_beside_a_loop_hides_nothing(store):
    """The other calls of the turn still count."""
    agent, _ = circling(store, say("", call("look"), call("status")))
    run = await agent.run("look")
    assert run.stop_reason is StopReason.LOOP_DETECTED
    assert run.disabled == ("look",)


async def test_equal_results_of_different_calls_only_earn_a_word(store):
    """That looks like polling: the model is told, and nothing is ever withdrawn or stopped."""
    model = ScriptedModel(*[say("", call("same", n=n)) for n in range(12)], "done")
    agent = Agent(model, tools=TOOLS, store=store)
    run = await agent.run("look")
    assert (run.output, run.loops, run.disabled) == ("done", 0, ())
    assert notes(run) == ["Note: equal results of same 3 turns running, though the arguments differ."]
    assert "equal results" in texts(model.requests[3])
    assert "equal results" not in texts(model.requests[2])


async def test_calls_of_a_withdrawn_tool_are_no_errors(store):
    """They are answered without being run, and count for the loop alone."""
    agent, _ = circling(store, say("", call("look")), limits=Limits(errors=1))
    run = await agent.run("look")
    assert run.stop_reason is StopReason.LOOP_DETECTED
    assert run.consecutive_errors == 0
    assert "withdrawn" in results_of(run.messages)[-1].content


async def test_what_the_user_asks_again_is_no_loop(store):
    """The look back ends at the user's own words: who is asked three times looks three times."""
    agent: Agent

    @tool(read_only=True)
    async def check(ctx: RunContext[None]) -> str:
        """Check."""
        if asked < 4:
            await agent.send(ctx.run_id, "and now?")
        return f"seen {asked}"

    asked = 0

    def answer(request):
        nonlocal asked
        asked += 1
        return asks("check") if request.messages[-1].text == "and now?" or asked == 1 else "done"

    agent = Agent(FunctionModel(answer), tools=[check], store=store)
    run = await agent.run("look")
    assert (run.output, asked) == ("done", 5)
    assert (run.loops, notes(run)) == (0, [])


async def test_an_earlier_runs_loop_is_not_held_against_the_next(store):
    """A conversation that went round in circles once may call the tool again when the user asks for it."""
    agent, _ = circling(store, say("", call("look", at="x")))
    first = await agent.run("look", session="ann")
    assert first.stop_reason is StopReason.LOOP_DETECTED
    model = ScriptedModel(say("", call("look", at="x")), "done")
    second = await agent.with_(model=model).run("look once more", session="ann")
    assert (second.output, second.loops, second.disabled) == ("done", 0, ())
    assert notes(second) == notes(first)


async def test_other_input_between_the_turns_does_not_hide_a_loop(store):
    """A webhook that reports every second does not make the same call another one."""
    agent: Agent

    @tool(read_only=True)
    async def check(ctx: RunContext[None]) -> str:
        """Check."""
        await agent.send(ctx.run_id, "tick", kind=InputKind.TIMER)
        return "seen"

    model = FunctionModel(lambda _request: asks("check"))
    agent = Agent(model, tools=[check], store=store)
    run = await agent.run("look")
    assert run.stop_reason is StopReason.LOOP_DETECTED


async def test_the_journal_says_what_was_found(store):
    """The findings are facts of the journal, and fold to the same run."""
    agent, _ = circling(store, say("", call("look", at="x")))
    run = await agent.run("look")
    found = [event for event in await agent.history(run.id) if isinstance(event, Continued)]
    assert [(event.loop, event.disabled) for event in found] == [
        (False, ()),
        (False, ()),
        (True, ()),
        (True, ("look",)),
    ]


# The last answer


async def test_the_last_rung_may_ask_for_what_there_is(store):
    """Before it stops, a run asks once more, without tools; what comes is partial, and no answer."""
    lines = [say("", call("look", at="x"))] * 5
    model = ScriptedModel(*lines, say("It is near x.", expect="This is your last reply"))
    run = await Agent(model, tools=TOOLS, store=store, last_answer=True).run("Find it")
    assert (run.state, run.stop_reason) == (State.ERROR, StopReason.LOOP_DETECTED)
    assert "run.partial" in run.stop_message
    assert run.partial == "It is near x."
    assert model.requests[-1].tools == ()
    assert run.loops == 2
    sound_run(run)


@pytest.mark.parametrize("last", [say("", call("look", at="x")), say("", call("look", at="x"), call("hear"))])
async def test_last_words_that_are_calls_are_none(store, last):
    """A model that cannot stop calling is stopped, with nothing in hand and nothing called."""
    model = ScriptedModel(*[say("", call("look", at="x"))] * 5, last)
    run = await Agent(model, tools=TOOLS, store=store, last_answer=True).run("Find it")
    assert (run.stop_reason, run.partial) == (StopReason.LOOP_DETECTED, None)
    assert len(run.calls) == 5
    sound_run(run)


async def test_a_run_that_ends_otherwise_has_no_partial_answer(store):
    """Neither an answer nor a loop without the option leaves one."""
    agent, _ = circling(store, say("", call("look", at="x")))
    assert (await agent.run("Find it")).partial is None
    assert (await Agent(ScriptedModel("x"), last_answer=True).run("Find it")).partial is None
