"""What comes in while a run works: what is read first, what is held over, and what is not due yet."""

from __future__ import annotations

import anyio
import pytest

from agentfsm import Agent, InputKind, Priority, Settings, State
from agentfsm.core.events import Observed
from agentfsm.ports import Request
from agentfsm.testing import FunctionModel, ScriptedModel, say
from tests.support.checks import names, sound, texts, virtually

# Tokens: small, so that a few inputs fill it.
WINDOW = 4_000


class Small(ScriptedModel):
    """A model with a small window."""

    window_tokens = WINDOW


def small(store, *script: object, **options: object) -> Agent:
    return Agent(Small(*script), store=store, settings=Settings(max_tokens=500), **options)


async def observed(agent: Agent, run_id: str) -> list[list[str]]:
    """What each OBSERVE took in: the first word of each input."""
    events = [event for event in await agent.history(run_id) if isinstance(event, Observed)]
    return [[item.parts[0].text.split()[0] for item in event.inputs] for event in events]


async def test_the_most_urgent_is_read_first(store):
    """What is urgent goes before the rest, and among equals what came first."""
    agent = Agent(ScriptedModel("one", "two"), store=store)
    run = await agent.step(agent.start("go"))
    order = [Priority.LOW, Priority.NORMAL, Priority.HIGH, Priority.LOW, Priority.NORMAL, Priority.HIGH]
    for number, priority in enumerate(order):
        await agent.send(run.id, f"{number}", priority=priority)
    done = await agent.resume(run.id)
    assert await observed(agent, run.id) == [[], ["2", "5", "1", "4", "0", "3"]]
    assert await store.inbox(run.id) == ()
    await sound(agent, done)


async def test_what_does_not_fit_waits_for_the_next_look(store):
    """Half of the window's room is for what comes in at once; nothing is lost, and its order is kept."""
    seen = []

    def answer(request: Request) -> str:
        seen.append(texts(request))
        return "noted"

    model = FunctionModel(answer)
    model.window_tokens = WINDOW
    agent = Agent(model, store=store, settings=Settings(max_tokens=500))
    run = await agent.step(agent.start("go"))
    for number in range(6):
        await agent.send(run.id, f"{number} " + "word " * 400)
    await agent.send(run.id, "last " + "word " * 400, priority=Priority.LOW)
    await agent.send(run.id, "now", priority=Priority.HIGH)
    done = await agent.resume(run.id)
    taken = [inputs for inputs in await observed(agent, run.id) if inputs]
    assert len(taken) > 1
    assert [word for inputs in taken for word in inputs] == ["now", "0", "1", "2", "3", "4", "5", "last"]
    assert all(len(inputs) > 1 for inputs in taken[:-1]), "as many as fit, not one by one"
    assert (done.output, await store.inbox(run.id)) == ("noted", ())
    assert "last" in seen[-1]
    await sound(agent, done)


async def test_an_urgent_input_overtakes_what_was_held_over(store):
    """What waits for the next look waits by its urgency, not by its place."""
    said = []

    async def answer(_request: Request) -> str:
        if not said:
            await agent.send("mine", "urgent", priority=Priority.HIGH)
        said.append("noted")
        return "noted"

    model = FunctionModel(answer)
    model.window_tokens = WINDOW
    agent = Agent(model, store=store, settings=Settings(max_tokens=500))
    run = agent.start("go", id="mine")
    await store_created(agent, run)
    for number in range(4):
        await agent.send("mine", f"{number} " + "word " * 800)
    await agent.resume("mine")
    taken = [word for inputs in await observed(agent, "mine") for word in inputs]
    assert taken.index("urgent") == 1
    assert [word for word in taken if word != "urgent"] == ["0", "1", "2", "3"]


async def store_created(agent: Agent, run) -> None:
    """Create a run in the store, and let nobody drive it."""
    _, lease = await agent.store.create(run.header)
    await agent.store.release(lease).wait()


async def test_what_never_fits_comes_in_alone(store):
    """An input that is larger than its share is taken in by itself: waiting would make it no smaller."""
    agent = small(store, "one", "two", "three")
    run = await agent.step(agent.start("go"))
    await agent.send(run.id, "big " + "word " * 2_500)
    await agent.send(run.id, "small")
    done = await agent.resume(run.id)
    assert [inputs for inputs in await observed(agent, run.id) if inputs] == [["big"], ["small"]]
    assert done.is_over


async def test_the_very_first_look_takes_in_what_is_there(store):
    """What was sent before anybody drove the run is read with its prompt."""
    agent = Agent(ScriptedModel(say("done", expect="and this")), store=store)
    run = agent.start("go", id="mine")
    await store_created(agent, run)
    await agent.send("mine", "and this")
    done = await agent.resume("mine")
    assert [message.text for message in done.messages] == ["go", "and this", "done"]


def test_a_timer_is_read_when_it_is_due():
    """Before, it does not keep the run from going on, nor from ending; after, it is read like any other input."""

    async def play(store, clock):
        agent = Agent(ScriptedModel("one", "two", say("three", expect="[Timer] tea")), store=store, clock=clock)
        run = await agent.step(agent.start("go"))
        await agent.send(run.id, "tea", kind=InputKind.TIMER, at=clock.now() + 60)
        await agent.send(run.id, "now")
        run = await agent.step(run)
        assert run.state is State.REFLECT
        while run.state is not State.THINK:
            run = await agent.step(run)
        assert await observed(agent, run.id) == [[], ["now"]]
        await anyio.sleep(60)
        done = await agent.finish(run)
        assert (done.output, await observed(agent, run.id)) == ("three", [[], ["now"], ["tea"]])

    virtually(play)


async def test_a_timer_that_is_not_due_keeps_no_run_from_ending(store):
    """The answer is the answer, at once and without a look at the draft; whoever wants to wait says so."""
    agent = Agent(ScriptedModel("done"), store=store)
    run = await agent.step(agent.start("go"))
    await agent.send(run.id, "tea", kind=InputKind.TIMER, at=4e9)
    done = await agent.finish(run)
    assert (done.output, names(await agent.history(run.id))) == ("done", ["Observed", "AnswerGiven"])
    assert len(await store.inbox(run.id)) == 1


def test_a_timer_that_falls_due_at_the_last_moment_is_read():
    """It comes due while the model answers: the answer does not end the run before the timer was read."""

    async def play(store, clock):
        lines = [say("one", delay_s=61), say("two", expect="tea")]
        agent = Agent(ScriptedModel(*lines), store=store, clock=clock)
        run = await agent.step(agent.start("go"))
        await agent.send(run.id, "tea", kind=InputKind.TIMER, at=clock.now() + 60)
        done = await agent.finish(run)
        assert done.output == "two"

    virtually(play)


@pytest.mark.parametrize("at", [0.0, -5.0, 1.0])
async def test_a_time_that_has_passed_is_now(store, at):
    """A timer in the past is read at the next look."""
    agent = Agent(ScriptedModel("one", "two"), store=store)
    run = await agent.step(agent.start("go"))
    await agent.send(run.id, "late", at=at)
    await agent.resume(run.id)
    assert await observed(agent, run.id) == [[], ["late"]]


async def test_an_input_under_a_key_comes_in_once(store):
    """A webhook that is delivered twice is read once, also after it was taken in."""
    agent = Agent(ScriptedModel("one", "two", "three"), store=store)
    run = await agent.step(agent.start("go"))
    first = await agent.send(run.id, "paid", kind=InputKind.WEBHOOK, key="evt-1")
    assert await agent.send(run.id, "paid", kind=InputKind.WEBHOOK, key="evt-1") == first
    while run.state is not State.THINK or len(await observed(agent, run.id)) < 2:
        run = await agent.step(await agent.load(run.id))
    assert await agent.send(run.id, "paid", kind=InputKind.WEBHOOK, key="evt-1") == first
    done = await agent.finish(run)
    assert await observed(agent, done.id) == [[], ["paid"]]
