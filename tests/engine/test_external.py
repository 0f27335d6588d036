"""Calls whose result comes from outside: questions to the user, tools without a body, and waiting for input."""

from __future__ import annotations

import anyio
import pytest

from agentfsm import (
    Agent,
    ConflictError,
    InputKind,
    Limits,
    MisuseError,
    Outcome,
    PendingKind,
    Permissions,
    Rule,
    Run,
    State,
    StopReason,
    ask_user,
    tool,
    wait,
)
from agentfsm.core.effects import Wait
from agentfsm.core.events import ToolFinished
from agentfsm.stores import SQLiteStore
from agentfsm.testing import ScriptedModel, call, raw_call, say
from agentfsm.testing.conformance.helpers import list_claimable
from tests.support.checks import results_of, sound, texts, virtually
from tests.support.failing_stores import CrashingStore, WorkerKilled

WEEK_S = 7 * 86_400
ASKED = say("", call("ask_user", question="Which colour?"))


def asking(store, *script: object, **options: object) -> Agent:
    """An agent that may ask and wait: by default it asks once, and is done."""
    return Agent(ScriptedModel(*(script or (ASKED, "done"))), tools=[ask_user, wait], store=store, **options)


# Questions


async def test_a_question_waits_for_its_answer(store):
    """It is shown with its words, and the answer is the result of the call, with the name of who gave it."""
    agent = asking(store, ASKED, say("done", expect="blue"))
    run = await agent.run("paint it")
    [item] = run.pending
    assert (item.kind, item.run_id, item.call_id, item.tool) == (PendingKind.QUESTION, run.id, "t1.0", "ask_user")
    assert item.arguments == {"question": "Which colour?"}
    assert item.expires_at == pytest.approx(run.updated_at + WEEK_S, abs=60)
    assert run.effect == Wait(pending=(item,))
    assert await agent.resume(run.id) == run
    await agent.answer(run.id, "t1.0", "blue", by="ann")
    done = await agent.resume(run.id)
    assert done.output == "done"
    assert [(r.outcome, r.content) for r in results_of(done.messages)] == [(Outcome.DONE, "blue")]
    assert [event.by for event in await agent.history(run.id) if isinstance(event, ToolFinished)] == ["ann"]
    assert await store.inbox(run.id) == ()
    await sound(agent, done)


async def test_a_question_of_a_tool_that_only_reads_waits_while_the_reply_streams(store):
    """No call of it starts early, which could only fail: nobody has been asked yet."""

    @tool(external=True, read_only=True)
    def ask_customer(question: str) -> str:
        """Ask the customer."""
        raise AssertionError

    script = say("", call("ask_customer", question="Which account?"))
    agent = Agent(ScriptedModel(script, "done"), tools=[ask_customer], store=store)
    async with agent.stream("go") as stream:
        _ = [event async for event in stream]
    assert [item.tool for item in stream.run.pending] == ["ask_customer"]


async def test_an_answer_may_be_that_it_failed(store):
    """The model reads an error, and it counts as one."""
    agent = asking(store, ASKED, say("done", expect="the user has left"))
    run = await agent.run("go")
    await agent.answer(run.id, "t1.0", "the user has left", failed=True)
    done = await agent.resume(run.id)
    assert (done.output, [r.outcome for r in done.calls]) == ("done", [Outcome.FAILED])
    assert [fault.message for fault in done.errors] == ["the user has left"]


@pytest.mark.parametrize("taken", [False, True], ids=["waiting", "taken in"])
async def test_the_first_answer_counts(store, taken):
    """Who answers second is told who was first, before and after the run has taken it in."""
    agent = asking(store, ASKED, say("", call("ask_user", question="How big?")), "done")
    run = await agent.run("go")
    await agent.answer(run.id, "t1.0", "blue", by="ann")
    if taken:
        assert (await agent.resume(run.id)).pending[0].call_id == "t2.0"
    with pytest.raises(ConflictError, match=r"decided already.*ann"):
        await agent.answer(run.id, "t1.0", "red", by="bob")
    with pytest.raises(ConflictError, match="ann"):
        await agent.answer(run.id, "t1.0", "blue", failed=True, by="bob")
    run = await agent.resume(run.id)
    assert [r.content for r in results_of(run.messages)] == ["blue"]
    assert [item.call_id for item in run.pending] == ["t2.0"]


async def test_the_same_answer_twice_is_one(store):
    """A form that is sent twice is no conflict."""
    agent = asking(store)
    run = await agent.run("go")
    await agent.answer(run.id, "t1.0", "blue", by="ann")
    await agent.answer(run.id, "t1.0", "blue", by="ann")
    assert (await agent.resume(run.id)).output == "done"


def test_a_question_that_nobody_answers_ends_by_the_stores_clock():
    """At the very moment its time is up an answer is refused, and the model is told that nobody answered."""

    async def play(store, _clock):
        agent = asking(store, ASKED, say("done", expect="Nobody answered in time"))  # a clock that is years behind
        run = await agent.run("go")
        await anyio.sleep(WEEK_S - 1)
        assert await agent.resume(run.id) == run
        await anyio.sleep(1)
        with pytest.raises(ConflictError, match="time is up"):
            await agent.answer(run.id, "t1.0", "blue")
        done = await agent.resume(run.id)
        assert [r.outcome for r in done.calls] == [Outcome.TIMED_OUT]
        assert done.output == "done"
        with pytest.raises(ConflictError, match="it has a result already"):
            await agent.answer(run.id, "t1.0", "blue")

    virtually(play)


def test_an_answer_in_the_last_moment_counts_whenever_it_is_read():
    """It is the answer that has to come in time, not the worker."""

    async def play(store, clock):
        agent = asking(store, clock=clock)
        run = await agent.run("go")
        await anyio.sleep(WEEK_S - 0.001)
        await agent.answer(run.id, "t1.0", "blue")
        await anyio.sleep(WEEK_S)
        done = await agent.resume(run.id)
        assert [(r.outcome, r.content) for r in results_of(done.messages)] == [(Outcome.DONE, "blue")]

    virtually(play)


async def test_a_question_outlives_its_process(tmp_path):
    """Asked by one, answered by another, and gone on with by a third, each with a store of its own."""
    stores = [SQLiteStore(tmp_path / "runs.db") for _ in range(3)]
    first, second, third = [asking(each, *script) for each, script in zip(stores, ([ASKED], [], ["done"]), strict=True)]
    run = await first.run("go")
    await stores[0].aclose()
    await second.answer(run.id, "t1.0", "blue", by="ann")
    await stores[1].aclose()
    done = await third.resume(run.id)
    assert (done.output, results_of(done.messages)[0].content) == ("done", "blue")
    await stores[2].aclose()


async def test_several_questions_are_asked_at_once(store):
    """Each has its own answer, given in any order; the run goes on when all are there, with results in call order."""
    questions = [call("ask_user", question=each) for each in ("Colour?", "Size?", "Price?")]
    agent = asking(store, say("", *questions), "done")
    run = await agent.run("go")
    assert [item.arguments["question"] for item in run.pending] == ["Colour?", "Size?", "Price?"]
    await agent.answer(run.id, "t1.2", "low")
    run = await agent.resume(run.id)
    assert [item.call_id for item in run.pending] == ["t1.0", "t1.1"]
    await agent.answer(run.id, "t1.1", "big")
    await agent.answer(run.id, "t1.0", "blue")
    done = await agent.resume(run.id)
    assert [r.content for r in results_of(done.messages)] == ["blue", "big", "low"]
    await sound(agent, done)


async def test_a_question_beside_other_calls_holds_back_those_behind_it(store):
    """Calls before it run while it waits; those behind it run with the answer at hand."""
    did = []

    @tool
    async def write(at: str) -> str:
        """Write."""
        did.append(at)
        return f"wrote {at}"

    calls = [call("write", at="before"), *ASKED.calls, call("write", at="behind")]
    agent = Agent(ScriptedModel(say("", *calls), "done"), tools=[write, ask_user], store=store)
    run = await agent.run("go")
    assert (did, [item.call_id for item in run.pending]) == (["before"], ["t1.1"])
    await agent.answer(run.id, "t1.1", "blue")
    done = await agent.resume(run.id)
    assert did == ["before", "behind"]
    assert [r.content for r in results_of(done.messages)] == ["wrote before", "blue", "wrote behind"]
    await sound(agent, done)


async def test_an_answer_to_something_else_is_misuse(store):
    """Each kind of question has its own way to be answered, and the error names it."""

    @tool(requires_approval=True)
    async def pay() -> str:
        """Pay."""
        return "paid"

    agent = Agent(ScriptedModel(say("", call("pay"), *ASKED.calls)), tools=[pay, ask_user], store=store)
    run = await agent.run("go")
    with pytest.raises(MisuseError, match=r"approval of t1\.0 \(approve or reject it\)"):
        await agent.answer(run.id, "t1.0", "yes")
    with pytest.raises(MisuseError, match=r"question of t1\.1 \(answer it\)"):
        await agent.approve(run.id, "t1.1")
    with pytest.raises(MisuseError, match="waits for"):
        await agent.settle(run.id, "t1.1", result="blue")
    with pytest.raises(MisuseError, match="waits for"):
        await agent.answer(run.id, "t9.9", "blue")


async def test_a_run_that_ends_closes_its_questions(store):
    """Nothing was run: the call may be made again, and says so."""
    agent = asking(store)
    run = await agent.run("go")
    await agent.cancel(run.id)
    done = await agent.load(run.id)
    assert (done.stop_reason, [r.outcome for r in done.calls]) == (StopReason.CANCELLED, [Outcome.CANCELLED])
    with pytest.raises(ConflictError):
        await agent.answer(run.id, "t1.0", "blue")
    await sound(agent, done)


async def test_an_agent_without_the_tool_may_end_the_run_but_not_answer_for_it(store):
    """The open question names a tool that has to be there; a cancel needs none, and looks for no agent behind it."""
    run = await asking(store).run("go")
    without = Agent(ScriptedModel(), store=store)
    with pytest.raises(MisuseError, match="'ask_user'"):
        await without.resume(run.id)
    await without.cancel(run.id, by="ann")
    done = await without.load(run.id)
    assert done.stop_message == "cancelled by ann"
    await sound(without, done)


@pytest.mark.parametrize("written", [False, True], ids=["before", "after"])
async def test_a_worker_may_die_at_any_write_around_a_question(store, written):
    """The question is asked once more or not at all, the answer is not lost, and nothing else changes."""
    for at in range(1, 20):
        mortal, name = CrashingStore(store, at, written=written), f"run-{at}"
        dying = asking(mortal)
        try:
            run = await dying.run("go", id=name)
            await dying.answer(name, "t1.0", "blue")
            run = await dying.resume(name)
        except WorkerKilled:
            fresh = asking(store, *([ASKED] if not (await store.read(name)).events[1:] else []), "done")
            run = await fresh.resume(name)
            if run.is_waiting:
                await fresh.answer(name, "t1.0", "blue")
                run = await fresh.resume(name)
        assert (run.output, [r.content for r in results_of(run.messages)]) == ("done", ["blue"])
        if not mortal.dead:
            break
    assert at > 4


async def test_a_long_answer_is_shown_like_any_result(store):
    """A pasted book does not fill the window; the model may read on in it."""
    agent = asking(store, ASKED, say("done", expect=lambda request: "read_result" in [t.name for t in request.tools]))
    run = await agent.run("go")
    await agent.answer(run.id, "t1.0", "x" * 200_000)
    done = await agent.resume(run.id)
    assert (done.output, len(results_of(done.messages)[0].content), done.has_cut) == ("done", 200_000, True)


# External tools of one's own


async def test_a_tool_without_a_body_is_never_run(store):
    """Its description is shown, its patience may hang on the arguments, and its answer is what somebody posts."""

    @tool(
        external=True,
        describe=lambda a: f"Carries {a.what} to the third floor.",
        answer_expires_s=lambda a: 60.0 if a.what == "coffee" else 3_600.0,
    )
    def carry(what: str) -> str:
        """Let somebody carry something."""
        raise AssertionError(what)

    calls = [call("carry", what=each) for each in ("coffee", "desk")]
    agent = Agent(ScriptedModel(say("", *calls), "done"), tools=[carry], store=store)
    run = await agent.run("go")
    assert [item.description for item in run.pending] == [
        f"Carries {w} to the third floor." for w in ("coffee", "desk")
    ]
    patience = [item.expires_at - run.updated_at for item in run.pending]
    assert patience == pytest.approx([60, 3_600], abs=30)
    for item in run.pending:
        await agent.answer(run.id, item.call_id, "carried")
    assert (await agent.resume(run.id)).output == "done"


def test_no_patience_is_no_wait():
    """Where the time is up at once, the model is told so at once, and nobody waits."""

    async def play(store, clock):
        @tool(external=True, answer_expires_s=0)
        def look() -> str:
            """Look."""
            raise AssertionError

        agent = Agent(ScriptedModel(say("", call("look")), "done"), tools=[look], store=store, clock=clock)
        done = await agent.run("go")
        assert (done.output, [r.outcome for r in done.calls]) == ("done", [Outcome.TIMED_OUT])

    virtually(play)


def _raises(_arguments: object) -> float:
    raise ValueError("no idea")


@pytest.mark.parametrize(
    "patience",
    [_raises, lambda _: None, lambda _: "soon", lambda _: float("nan"), lambda _: float("inf"), lambda _: -5],
)
async def test_a_patience_that_cannot_be_told_is_the_usual_one(store, patience):
    """A function that breaks, or says what is no time, does not break the run: it waits as long as others do."""

    @tool(external=True, answer_expires_s=patience)
    def look() -> str:
        """Look."""
        raise AssertionError

    run = await Agent(ScriptedModel(say("", call("look"))), tools=[look], store=store).run("go")
    assert run.pending[0].expires_at == pytest.approx(run.updated_at + WEEK_S, abs=60)


@pytest.mark.parametrize("patience", [-1, float("inf"), float("nan"), "soon", True, None], ids=str)
def test_a_patience_that_makes_no_sense_is_misuse(patience):
    """What can be seen to be no time is refused when the tool is made."""
    with pytest.raises(MisuseError, match="answer_expires_s="):
        tool(name="look", external=True, answer_expires_s=patience)(lambda: "")


def test_what_runs_nothing_cannot_be_approved():
    """An external call that needs a yes would ask two people for one thing."""
    with pytest.raises(MisuseError, match="leave out requires_approval="):
        tool(name="look", external=True, requires_approval=True)(lambda: "")


# What is not asked


def rule(arguments: object) -> str | None:
    """A rule on questions."""
    return None if str(getattr(arguments, "question", "")).endswith("?") else "a question ends with '?'"


CHOOSY = tool(name="ask_user", external=True, validate=rule)(ask_user.function)


@pytest.mark.parametrize(
    ("asked", "outcome", "words"),
    [
        (call("ask_user"), Outcome.FAILED, "question"),
        (call("ask_user", question=5), Outcome.FAILED, "question"),
        (raw_call("ask_user", "[1]"), Outcome.FAILED, "JSON"),
        (call("ask_user", question="Tell me."), Outcome.FAILED, "ends with"),
    ],
    ids=["missing", "wrong", "malformed", "rule"],
)
async def test_invalid_arguments_ask_nobody(store, asked, outcome, words):
    """The model is told what is wrong; no person sees what could not be answered anyway."""
    agent = Agent(ScriptedModel(say("", asked), "done"), tools=[CHOOSY], store=store)
    done = await agent.run("go")
    [result] = results_of(done.messages)
    assert (done.output, result.outcome) == ("done", outcome)
    assert words in result.content


@pytest.mark.parametrize("rule", ["ask_user", Rule("ask_user", lambda a: "colour" in a.prepared)], ids=["tool", "call"])
async def test_what_is_not_permitted_asks_nobody(store, rule):
    """A call that will be refused is refused at once, whether for its tool or for its arguments."""
    agent = asking(store, permissions=Permissions(deny=(rule,)))
    done = await agent.run("go")
    assert (done.output, [r.outcome for r in done.calls]) == ("done", [Outcome.FAILED])


async def test_a_tool_that_is_not_there_now_asks_nobody(store):
    """One that is switched off between the reply and the call is skipped."""
    there = [True]

    @tool(external=True, enabled=lambda _ctx: there[0])
    def look() -> str:
        """Look."""
        raise AssertionError

    agent = Agent(ScriptedModel(say("", call("look")), "done"), tools=[look], store=store)
    run = agent.start("go")
    while run.state is not State.ACT:
        run = await agent.step(run)
    there[0] = False
    done = await agent.finish(run)
    assert (done.output, [r.outcome for r in done.calls]) == ("done", [Outcome.SKIPPED])


# In a sub-agent


def family(store, *script: object) -> Agent:
    """A caller with an agent that asks; a later process hands in the rest of its script."""
    child = Agent(ScriptedModel(*(script or (ASKED, "it is blue"))), tools=[ask_user, wait], name="painter")
    lines = [say("", call("painter", query="paint")), say("done", expect="it is blue")]
    return Agent(ScriptedModel(*(lines if not script else lines[1:])), tools=[child.as_tool()], store=store)


async def test_a_question_of_a_sub_agent_is_shown_by_its_caller(store):
    """The caller's run waits with it, names the run to answer in, and goes on after, also in another process."""
    run = await family(store).run("go", id="mine")
    [item] = run.pending
    assert (item.kind, item.run_id, item.call_id) == (PendingKind.QUESTION, "mine.t1.0", "t1.0")
    later = family(store, say("it is blue", expect="blue"))
    assert await later.resume("mine") == run
    await later.answer(item.run_id, item.call_id, "blue", by="ann")
    done = await later.resume("mine")
    assert done.output == "done"
    child = await later.load("mine.t1.0")
    assert results_of(child.messages)[0].content == "blue"
    await sound(later, done)


def test_a_question_of_a_sub_agent_ends_in_time():
    """Its caller goes on when the time is up, though nobody has said a word."""

    async def play(store, _clock):
        agent = family(store)
        run = await agent.run("go", id="mine")
        await anyio.sleep(WEEK_S)
        done = await agent.resume("mine")
        assert (run.is_waiting, done.output) == (True, "done")
        child = await agent.load("mine.t1.0")
        assert [r.outcome for r in child.calls] == [Outcome.TIMED_OUT]

    virtually(play)


async def test_a_sub_agent_that_waits_for_input_is_woken_by_it(store):
    """What is sent to the child's run, as the caller's pending names it, lets both go on."""
    agent = family(store, say("", call("wait", seconds=60, reason="mail")), say("it is blue", expect="blue mail"))
    agent = agent.with_(model=ScriptedModel(say("", call("painter", query="paint")), "done"))
    run = await agent.run("go", id="mine")
    [item] = run.pending
    assert (item.kind, item.run_id) == (PendingKind.INPUT, "mine.t1.0")
    await agent.send(item.run_id, "blue mail")
    assert (await agent.resume("mine")).output == "done"


# Waiting for input


def waits(store, *script: object, seconds: float = 600, **options: object) -> Agent:
    """An agent that waits once."""
    return asking(store, say("", call("wait", seconds=seconds, reason="mail")), *(script or ("done",)), **options)


async def test_a_wait_ends_with_what_comes_in(store):
    """The call says that something has come, and the message itself is read in the next OBSERVE."""
    agent = waits(store, say("done", expect="you have mail"))
    run = await agent.run("go")
    [item] = run.pending
    assert (item.kind, item.arguments) == (PendingKind.INPUT, {"seconds": 600, "reason": "mail"})
    assert await agent.resume(run.id) == run
    await agent.send(run.id, "you have mail", kind=InputKind.EVENT)
    done = await agent.resume(run.id)
    assert [r.outcome for r in done.calls] == [Outcome.DONE]
    assert (done.output, "come in" in results_of(done.messages)[0].content) == ("done", True)
    await sound(agent, done)


async def test_what_had_come_before_ends_a_wait_at_once(store):
    """Nobody waits for what is there already."""
    agent = waits(store, say("done", expect="early"))
    run = agent.start("go")
    while run.state is not State.ACT:
        run = await agent.step(run)
    await agent.send(run.id, "early")
    assert (await agent.finish(run)).output == "done"


def test_a_wait_ends_when_its_time_is_up():
    """The model is told that nothing came."""

    async def play(store, clock):
        agent = waits(store, say("done", expect="nothing has come in"), clock=clock)
        run = await agent.run("go")
        await anyio.sleep(599)
        assert await agent.resume(run.id) == run
        await anyio.sleep(1)
        done = await agent.resume(run.id)
        assert (done.output, [r.outcome for r in done.calls]) == ("done", [Outcome.DONE])

    virtually(play)


def test_a_wait_ends_with_a_timer():
    """A timer ends it when it is due and not before; it is then read as one."""

    async def play(store, clock):
        agent = waits(store, say("done", expect=lambda request: "[Timer] wake up" in texts(request)), clock=clock)
        run = await agent.run("go")
        await agent.send(run.id, "wake up", kind=InputKind.TIMER, at=clock.now() + 300)
        await anyio.sleep(299)
        assert await agent.resume(run.id) == run
        assert await list_claimable(store, "agent") == ()
        await anyio.sleep(1)
        assert await list_claimable(store, "agent") == (run.id,)
        assert (await agent.resume(run.id)).output == "done"

    virtually(play)


@pytest.mark.parametrize("seconds", [0, -1, 2_592_001, 1e300], ids=str)
async def test_a_wait_has_bounds(store, seconds):
    """Above 0 and up to 30 days: other waits are refused, and the model is told what is allowed."""
    done = await waits(store, say("done", expect="2592000"), seconds=seconds).run("go")
    assert (done.output, [r.outcome for r in done.calls]) == ("done", [Outcome.FAILED])


async def test_waiting_again_and_again_is_no_loop(store):
    """Whoever waits for something repeats it, and nothing is wrong with that."""
    lines = [say("", call("wait", seconds=60, reason="mail"))] * 8
    agent = asking(store, *lines, "done", limits=Limits(turns=30))
    run: Run = await agent.run("go")
    for number in range(8):
        assert run.pending[0].call_id == f"t{number + 1}.0"
        await agent.send(run.id, "not yet")
        run = await agent.resume(run.id)
    assert (run.output, run.loops) == ("done", 0)
