"""A history that outgrows the window, through the agent: what is shown shrinks, what is kept does not."""

from __future__ import annotations

import pytest

from agentfsm import Agent, Limits, Settings, StopReason, SystemMessage, UserMessage, tool
from agentfsm.core.events import Compacted
from agentfsm.ports import Model, ProposedCall, Reply, Request, TokenCounter
from agentfsm.testing import ScriptedModel
from tests.support.checks import names, no_leases, sound, valid_history
from tests.support.word_counter import WordCounter

TASK = "count the stones on the beach"


@pytest.fixture(autouse=True)
def loads(monkeypatch):
    """Vocabularies are words here; the list tells for which models one was loaded."""
    asked: list[str] = []

    async def load(model_name: str) -> TokenCounter:
        asked.append(model_name)
        return WordCounter()

    monkeypatch.setattr("agentfsm.tokens.load_counter", load)
    return asked


@tool(read_only=True)
async def count(at: int, words: int = 60) -> str:
    """Count."""
    return f"stone {at} " * (words // 2)


class Counting(Model):
    """A model with a small window, which counts on and on."""

    name = "counting"
    window_tokens = 600

    def __init__(self, turns: int, words: int = 60) -> None:
        """Take how often it calls the tool, and how much it asks for."""
        self.turns = turns
        self.words = words
        self.requests: list[Request] = []

    async def reply(self, request: Request, emit: object = None) -> Reply:
        """Call, or be done."""
        self.requests.append(request)
        asked = len(self.requests)
        if asked > self.turns:
            return Reply(text="many stones")
        arguments = f'{{"at": {asked}, "words": {self.words}}}'
        return Reply(calls=(ProposedCall(id="x", name="count", arguments=arguments),))


def counting(store, turns: int, words: int = 60) -> tuple[Agent, Counting]:
    """An agent that counts."""
    model = Counting(turns, words)
    settings = Settings(max_tokens=50)
    return Agent(model, tools=[count], settings=settings, store=store, limits=Limits(tokens=10**9)), model


async def test_what_is_shown_shrinks_and_what_is_kept_does_not(store):
    """Each request shows the task, a note on the gap and whole turns; the history has everything."""
    agent, model = counting(store, 15)
    run = await agent.run(TASK)
    assert run.output == "many stones"
    assert run.cutoff > 0
    assert len(run.messages) == 2 + 2 * 15
    cut = [event for event in await agent.history(run.id) if isinstance(event, Compacted)]
    assert len(cut) >= 2
    assert [event.start for event in cut] == sorted({event.start for event in cut})
    assert all(event.tokens_after < event.tokens_before for event in cut)
    for request in model.requests:
        assert request.messages[0] == UserMessage(parts=run.header.prompt)
        valid_history(request.messages)
    last = model.requests[-1].messages
    assert isinstance(last[1], SystemMessage)
    assert "earlier messages removed" in last[1].text
    assert len(last) < 15
    await sound(agent, run)


async def test_a_cut_is_a_step_of_its_own(store):
    """It can be seen, loaded and resumed like any other, and is no turn."""
    agent, _ = counting(store, 15)
    seen = [run async for run in agent.steps(agent.start(TASK))]
    events = await agent.history(seen[-1].id)
    at = names(events).index("Compacted")
    assert [str(event.state) for event in seen if event.version in (at, at + 1)] == ["think", "think"]
    assert seen[-1].turn == 16
    for run in seen:
        assert await agent.load(run.id, at=run.version) == run


async def test_a_resumed_run_goes_on_with_its_window(store):
    """Another agent shows the same."""
    agent, _ = counting(store, 15)
    run = agent.start(TASK)
    while not run.cutoff:
        run = await agent.step(run)
    shown = run.shown
    other, fresh = counting(store, 0)
    done = await other.resume(run.id)
    assert done.output == "many stones"
    assert tuple(fresh.requests[0].messages) == shown
    assert done.cutoff == run.cutoff
    await sound(other, done)


async def test_a_short_run_loads_no_vocabulary(store, loads):
    """What fits in bytes fits in tokens, so nothing is loaded."""
    agent, _ = counting(store, 1, words=10)
    await agent.run(TASK)
    assert loads == []


async def test_a_vocabulary_is_loaded_once_in_a_driving_call(store, loads):
    """The tally keeps what it has counted with."""
    agent, _ = counting(store, 15)
    run = agent.start(TASK)
    run = await agent.finish(run)
    assert loads == ["counting"]


async def test_a_vocabulary_is_loaded_once_for_a_run_that_is_stepped(store, loads):
    """What was counted is kept between two steps."""
    agent, _ = counting(store, 15)
    run = agent.start(TASK)
    while not run.is_over:
        run = await agent.step(run)
    assert loads == ["counting"]


async def test_a_vocabulary_is_loaded_once_in_a_conversation(store, loads):
    """What was counted is kept for the run that goes on from this one."""
    agent, _ = counting(store, 15)
    for _ in range(2):
        await agent.run(TASK, session="beach")
    assert loads == ["counting"]


async def test_one_result_larger_than_the_window_does_not_stop_the_run(store):
    """It is shown as far as `shown_chars` goes, nothing is cut for ever, and the limits end what must end."""
    agent, model = counting(store, 4, words=1_200)
    run = await agent.run(TASK)
    assert run.stop_reason in (StopReason.COMPLETED, StopReason.MODEL_ERROR)
    assert len(model.requests) == 5
    assert names(await agent.history(run.id)).count("Compacted") <= 5
    await no_leases(store)


async def test_counts_are_kept_between_steps_for_a_bounded_number_of_runs(store):
    """A thousand runs stepped in turn do not pile up in the agent."""
    agent = Agent(ScriptedModel(), store=store)
    for _ in range(1_005 if type(store).__name__ == "MemoryStore" else 5):
        await agent.step(agent.start("go"))
    assert len(agent.driver._ledgers) <= 1_000


async def test_the_task_that_stays_in_sight_is_that_of_the_newest_run(store):
    """In a conversation each run has its own; what an agent has counted for the one before does not hold it."""
    agent, model = counting(store, 1)
    await agent.run("count the stones first", session="beach")
    model.requests.clear()
    model.turns = 12
    run = await agent.run("then count the shells", session="beach")
    assert any(isinstance(event, Compacted) for event in await agent.history(run.id))
    assert [m.text for m in model.requests[-1].messages if isinstance(m, UserMessage)] == ["then count the shells"]
    assert (await agent.with_(model=Counting(0)).replay(run.id)).is_faithful


@tool
async def send(to: int) -> str:
    """Send a stone."""
    return f"sent to {to}, with {'much ' * 60}care"


async def test_what_a_compaction_hides_and_has_happened_is_told(store):
    """The note lists the calls with effects that are not shown, with arguments and outcome; it stays the same."""

    class Sending(Counting):
        window_tokens = 1_500

        async def reply(self, request: Request, emit: object = None) -> Reply:
            self.requests.append(request)
            asked = len(self.requests)
            name = "count" if asked % 3 == 0 else "send"
            calls = (ProposedCall(id="x", name=name, arguments=f'{{"{"at" if name == "count" else "to"}": {asked}}}'),)
            return Reply(calls=calls) if asked <= self.turns else Reply(text="many stones")

    model = Sending(40)
    limits = Limits(tokens=10**9, turns=60)
    agent = Agent(model, tools=[count, send], settings=Settings(max_tokens=50), store=store, limits=limits)
    run = await agent.run(TASK)
    assert run.cutoff > 0
    sent = [at for at in range(1, 41) if at % 3]
    noted = set()
    for number, request in enumerate(model.requests):
        shown = [
            call.arguments for each in request.messages for call in getattr(each, "calls", ()) if call.name == "send"
        ]
        notes = [each.text for each in request.messages if isinstance(each, SystemMessage)]
        told = "\n".join(notes)
        hidden = [at for at in sent if at <= number and f'{{"to": {at}}}' not in shown]
        for at in hidden[-20:]:
            assert f'- send {{"to": {at}}}: done: sent to {at}' in told
        assert "count" not in told
        assert ("before these: send" in told) == (len(hidden) > 20)
        noted.add(told)
    cut = [event for event in await agent.history(run.id) if isinstance(event, Compacted)]
    assert len(noted) == len(cut) + 1  # the beginning of the requests changes with a compaction alone
    assert (await agent.load(run.id)).compacted_messages == run.compacted_messages
    later = await agent.run("Go on.", after=run)
    assert later.acted == run.acted
    assert all(event.tokens_after < event.tokens_before for event in cut)
