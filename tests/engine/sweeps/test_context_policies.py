"""Policies for the context through the agent: long runs, summaries and what they cost, providers that say no."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import pairwise

import anyio
import pytest

from agentfsm import (
    Agent,
    ContextTooLongError,
    Limits,
    MisuseError,
    ModelReplyError,
    ModelUnavailableError,
    Settings,
    State,
    StopReason,
    Usage,
    UserMessage,
    tool,
)
from agentfsm.context import Context, PriorityRetention, SlidingWindow, Summarise, TrimResults
from agentfsm.core.events import Compacted
from agentfsm.core.history import Span, Summarised
from agentfsm.models.openai.chat_wire import encode
from agentfsm.ports import CompactionBudget, ContextPolicy, Emit, MessageGroup, Model, ProposedCall, Reply, Request
from agentfsm.testing import FunctionModel
from agentfsm.tokens.ledger import count_message
from agentfsm.tokens.tool_prompts import count_tools
from tests.support.checks import names, no_leases, sound, valid_history
from tests.support.wire_rules import check_wires
from tests.support.word_counter import WordCounter

TASK = "survey the coast"
WIDE = Limits(turns=1_000, tokens=10**9, tool_calls=1_000)
COST = Usage(input_tokens=100, output_tokens=20, unpriced=True)


class Counted(WordCounter):
    """Counts words, and how often it was asked to."""

    times_asked = 0

    def count(self, text: str) -> int:
        """Count."""
        self.times_asked += 1
        return super().count(text)


@pytest.fixture(autouse=True)
def counter(monkeypatch):
    """Vocabularies are words here."""
    words = Counted()

    async def load(_model_name: str) -> Counted:
        return words

    monkeypatch.setattr("agentfsm.tokens.load_counter", load)
    return words


@tool(read_only=True)
async def look(at: int, words: int, listed: bool) -> object:
    """Look."""
    return [{"stone": f"{at}.{n}", "kind": "granite"} for n in range(words // 4)] if listed else f"stone-{at} " * words


class Surveyor(Model):
    """Looks on and on, at a lot each time; every third result is a list."""

    name = "surveyor"

    def __init__(
        self, turns: int, words: int = 100, window: int = 1_500, refuses: Callable[[Request], bool] | None = None
    ):
        """Take how often it looks, how much it sees, and which requests are too long for it."""
        self.turns, self.words, self.window_tokens = turns, words, window
        self.refuses_request = refuses or (lambda _request: False)
        self.requests: list[Request] = []
        self.at = 0

    async def reply(self, request: Request, emit: Emit | None = None) -> Reply:
        """Look, or be done."""
        self.requests.append(request)
        if self.refuses_request(request):
            raise ContextTooLongError("the request has too many tokens")
        self.at += 1
        if self.at > self.turns:
            return Reply(text="surveyed", usage=COST)
        told = json.dumps({"at": self.at, "words": self.words, "listed": self.at % 3 == 0})
        return Reply(calls=(ProposedCall(id="x", name="look", arguments=told),), usage=COST)


def agent_of(model: Model, store: object = None, **options: object) -> Agent:
    """An agent with this model."""
    kept = {} if store is None else {"store": store}
    return Agent(model, tools=[look], settings=Settings(max_tokens=50), **{"limits": WIDE, **kept, **options})


async def compactions(agent: Agent, run_id: str) -> list[Compacted]:
    """What left the window, and how."""
    return [event for event in await agent.history(run_id) if isinstance(event, Compacted)]


class Scribe:
    """Summarises, and keeps what it was asked."""

    def __init__(self, text: str = "so far all went well", usage: Usage | None = COST, error: Exception | None = None):
        """Take what it says, what that costs, and how it fails."""
        self.text, self.usage, self.error = text, usage, error
        self.requests: list[Request] = []
        self.model = FunctionModel(self.reply)

    def reply(self, request: Request) -> Reply:
        """Summarise."""
        self.requests.append(request)
        if self.error is not None:
            raise self.error
        return Reply(text=self.text, usage=self.usage)


# Long runs


def test_400_turns_stay_within_a_small_window(counter):
    """With outputs of 2,000 words: valid at every call, within the window, and late turns count as early ones do."""
    anyio.run(_survey, counter)


async def _survey(counter: Counted) -> None:
    model = Surveyor(400, words=2_000, window=16_000)
    asked = []

    def note(_request: Request) -> bool:
        asked.append(counter.times_asked)
        return False

    model.refuses_request = note
    agent = agent_of(model)
    run = await agent.run(TASK)
    assert (run.output, run.turn, len(model.requests)) == ("surveyed", 401, 401)
    plain = WordCounter()
    for request in model.requests:
        check_wires(request.messages, "x")
        tokens = sum(count_message(message, plain) for message in request.messages)
        assert tokens + count_tools(request.tools, plain) + 50 <= 16_000
        assert request.messages[0] == UserMessage(parts=run.header.prompt)
    early, late = asked[200] - asked[100], asked[400] - asked[300]
    assert late <= 1.05 * early
    cut = await compactions(agent, run.id)
    assert 400 * 2_000 / 16_000 / 2 < len(cut) < 150
    assert len(json.dumps([str(event.head) for event in cut])) < 1_000 * len(cut)
    assert all(event.tokens_after <= 0.5 * 0.75 * 16_000 for event in cut)
    assert (await agent.replay(run.id)).is_faithful


async def test_between_compactions_a_request_begins_with_the_last_ones_bytes(store):
    """The provider's cache is lost when the journal says so, and never else."""
    model = Surveyor(60)
    agent = agent_of(model, store)
    run = await agent.run(TASK)
    bodies = [encode(each, model="m", limit_field="n", streamed=False) for each in model.requests]
    texts = [body[body.index(b'"messages":[') : body.index(b'],"tools"')] for body in bodies]
    lost = sum(not after.startswith(before) for before, after in pairwise(texts))
    assert lost == len(await compactions(agent, run.id)) > 3
    await sound(agent, run)


async def test_a_summary_reads_each_message_once_in_a_long_run(store):
    """However many there are: each goes on from the one before."""
    scribe = Scribe()
    model = Surveyor(120)
    agent = agent_of(model, store, context=[Summarise(model=scribe.model), SlidingWindow()])
    run = await agent.run(TASK)
    assert len(scribe.requests) > 5
    read = "".join(request.messages[-1].text for request in scribe.requests)
    for at in range(1, 121):
        assert read.count(f'look({{\\"at\\": {at},') <= 1
        assert read.count(f"stone-{at} stone-{at}") <= 60
    assert read.count('"So far') == 0
    assert (
        sum('The record so far: "so far' in request.messages[-1].text for request in scribe.requests)
        == len(scribe.requests) - 1
    )
    cut = await compactions(agent, run.id)
    counts = [entry.count for event in cut for entry in event.head or () if isinstance(entry, Summarised)]
    assert counts == sorted(counts)
    assert all(event.policies[0] == "Summarise" for event in cut)
    assert (await agent.replay(run.id)).is_faithful
    await sound(agent, run)


async def test_what_a_run_was_summarised_to_is_what_the_next_one_is_shown(store):
    """A conversation goes on from the summary, shown as it was, and nothing is summarised twice."""
    scribe, first, second = Scribe(), Surveyor(25), Surveyor(25)
    context = [Summarise(model=scribe.model), SlidingWindow()]
    before = await agent_of(first, store, context=context).run(TASK, session="coast")
    summaries = len(scribe.requests)
    agent = agent_of(second, store, context=context)
    run = await agent.run("and the hills", session="coast")
    shown = second.requests[0].messages
    assert tuple(shown[: len(before.shown)]) == before.shown
    assert [message.text for message in shown[len(before.shown) :]] == ["and the hills"]
    assert run.messages[: len(before.messages)] == before.messages
    assert len(scribe.requests) > summaries > 0
    read = "".join(request.messages[-1].text for request in scribe.requests)
    assert all(read.count(f'look({{\\"at\\": {at},') <= 2 for at in range(1, 26))  # by either run once
    assert (await agent.load(run.id)).shown == run.shown
    assert (await agent.replay(run.id)).is_faithful
    valid_history(run.shown)
    third = await agent.run("and the lake", session="coast")  # counted on from the second, and not anew
    assert third.shown[: len(run.shown)] == run.shown
    assert (await agent.replay(third.id)).is_faithful
    await sound(agent, run)


async def test_a_run_resumed_at_any_place_shows_the_same(store):
    """Another process makes the same of the journal, and asks the same."""
    context = [TrimResults(chars=200), Summarise(model=Scribe().model), SlidingWindow()]
    agent = agent_of(Surveyor(25), store, context=context)
    run = await agent.run(TASK)
    events = await agent.history(run.id)
    for version in range(1, run.version):
        if isinstance(events[version - 1], Compacted):
            halfway = await agent.load(run.id, at=version)
            fork = await agent.fork(run.id, at=version)
            fresh = Surveyor(0)
            other = agent_of(fresh, store, context=context)
            await other.finish(fork)
            assert tuple(fresh.requests[0].messages) == halfway.shown
    assert (await agent_of(Surveyor(0), store).replay(run.id)).is_faithful


# Trimmed results


async def test_the_next_run_of_a_conversation_can_read_on_as_well(store):
    """Where the history that it goes on from shows less than there is, it has the tool for it."""
    agent = agent_of(Surveyor(14), store, context=TrimResults(chars=60))
    await agent.run(TASK, session="coast")
    model = Surveyor(1)
    run = await agent_of(model, store, context=TrimResults(chars=60)).run("and the hills", session="coast")
    assert [definition.name for definition in model.requests[0].tools] == ["look", "read_result"]
    assert any(isinstance(entry, Span) and entry.chars == 60 for entry in run.segments)


async def test_what_is_shortened_can_be_read_on(store):
    """From the compaction on the model has the tool for it."""
    model = Surveyor(14)
    agent = agent_of(model, store, context=TrimResults(chars=60))
    run = await agent.run(TASK)
    (cut, *_) = await compactions(agent, run.id)
    assert any(isinstance(entry, Span) and entry.chars == 60 for entry in cut.head)
    told = [[definition.name for definition in request.tools] for request in model.requests]
    assert told[0] == ["look"]
    assert told[-1] == ["look", "read_result"]
    assert not any("earlier messages" in message.text for message in model.requests[-1].messages)


# Summaries: what they cost, and how they fail


async def test_a_summary_is_paid_for(store):
    """In the event, in the run's usage, and out of the run's budget."""
    scribe = Scribe()
    agent = agent_of(Surveyor(25), store, context=[Summarise(model=scribe.model), SlidingWindow()])
    run = await agent.run(TASK)
    cut = await compactions(agent, run.id)
    assert [event.usage for event in cut] == [COST] * len(scribe.requests)
    assert run.usage.tokens == (26 + len(cut)) * COST.tokens
    for request in scribe.requests:
        assert request.tools == ()
        assert 1 <= request.settings.max_tokens < 600


async def test_the_agents_own_model_summarises_by_default(store):
    """Short, without tools, and with its own settings else."""

    def both(request: Request) -> Reply:
        return Reply(text="in short", usage=COST) if not request.tools else Reply(calls=(call_of(request),), usage=COST)

    def call_of(request: Request) -> ProposedCall:
        told = json.dumps({"at": len(request.messages), "words": 100, "listed": False})
        return ProposedCall(id="x", name="look", arguments=told)

    model = FunctionModel(both)
    model.window_tokens = 1_500
    limits = Limits(turns=20, tokens=10**9)
    agent = agent_of(model, store, context=[Summarise(), SlidingWindow()], limits=limits)
    run = await agent.run(TASK)
    assert run.stop_reason is StopReason.MAX_TURNS
    assert any(isinstance(entry, Summarised) and entry.text == "in short" for entry in run.segments)


@pytest.mark.parametrize(
    ("scribe", "words", "paid"),
    [
        (Scribe(error=ModelUnavailableError("503 overloaded", status=503)), "Summarise: 503 overloaded", 0),
        (Scribe(error=ModelReplyError("cut off", COST)), "Summarise: cut off", COST.tokens),
        (Scribe(text=" "), "Summarise: it gave an empty reply", COST.tokens),
        (Scribe(error=ConnectionRefusedError("refused")), "Summarise: function cannot be reached: refused", 0),
    ],
)
async def test_a_summary_that_fails_leaves_the_work_to_the_rules(store, scribe, words, paid):
    """The run goes on, and the journal says why there is none, and what was paid for it all the same."""
    agent = agent_of(Surveyor(25), store, context=[Summarise(model=scribe.model), SlidingWindow()])
    run = await agent.run(TASK)
    assert run.output == "surveyed"
    cut = await compactions(agent, run.id)
    assert {event.policies for event in cut} == {("SlidingWindow",)}
    assert all(words in event.why for event in cut)
    assert sum(event.usage.tokens for event in cut) == len(cut) * paid


async def test_a_summary_keeps_to_the_budget(store):
    """Where nobody knows what it would cost, or there is nothing left for it, it is not asked for."""

    class Cheap(Surveyor):
        def cost_usd(self, usage: Usage) -> float | None:
            return usage.tokens * 1e-9

    scribe = Scribe()
    context = [Summarise(model=scribe.model), SlidingWindow()]
    agent = agent_of(Cheap(25), store, context=context, limits=Limits(turns=100, tokens=10**9, usd=1.0))
    run = await agent.run(TASK)
    assert run.output == "surveyed"
    assert scribe.requests == []
    for event in await compactions(agent, run.id):
        assert (
            "; Summarise: the budget has no room for a question beside the run: the price of the model is unknown"
            in event.why
        )
        assert (event.policies, event.usage) == (("SlidingWindow",), Usage())


async def test_what_was_paid_in_vain_is_in_the_journal_once_a_turn(store):
    """A summary that fails, and no policy behind it: the run asks all the same, and does not turn in circles."""
    scribe = Scribe(text=" ")
    model = Surveyor(14)
    agent = agent_of(model, store, context=Summarise(model=scribe.model))
    *_, run = [run async for run in agent.steps(agent.start(TASK))]
    cut = await compactions(agent, run.id)
    assert len(cut) == len(scribe.requests) > 1
    assert all((event.policies, event.start, event.tokens_after) == ((), 0, event.tokens_before) for event in cut)
    assert run.usage.tokens == (15 + len(cut)) * COST.tokens
    assert run.output == "surveyed"
    await sound(agent, run)


async def test_the_model_of_a_summary_is_closed_with_the_agent():
    """Also where closing the agent's own fails."""
    closed = []

    class Closing(FunctionModel):
        async def aclose(self) -> None:
            closed.append(self)
            raise OSError("already gone")

    first, second, third = (Closing(lambda _request: "x") for _ in range(3))
    agent = agent_of(first, context=[Summarise(model=second), SlidingWindow(), Summarise(model=third), Summarise()])
    with pytest.raises(OSError, match="already gone"):
        await agent.aclose()
    assert set(closed) == {first, second, third}


# A provider that counts otherwise


def longer_than(words: int) -> Callable[[Request], bool]:
    """Refuse requests of more words."""
    return lambda request: sum(len(message.text.split()) for message in request.messages) > words


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_request_that_the_provider_finds_too_long_is_tried_again_shorter(store, streamed):
    """Our count said that it fits; half of it does."""
    model = Surveyor(12, window=100_000, refuses=longer_than(500))
    agent = agent_of(model, store).with_(settings=Settings(max_tokens=50, stream=streamed))
    run = await agent.run(TASK)
    assert run.output == "surveyed"
    cut = await compactions(agent, run.id)
    assert len(cut) >= 2
    assert {event.why for event in cut} == {"the request has too many tokens"}
    assert len(model.requests) == 13 + len(cut)
    assert (await agent.replay(run.id)).is_faithful
    await sound(agent, run)


async def test_a_request_that_stays_too_long_ends_the_run(store):
    """It is made shorter twice, and no more than that."""
    model = Surveyor(12, window=100_000)
    model.refuses_request = lambda request: len(model.requests) > 5
    agent = agent_of(model, store)
    run = await agent.run(TASK)
    assert (run.stop_reason, run.stop_message) == (StopReason.MODEL_ERROR, "the request has too many tokens")
    assert names(await agent.history(run.id))[-3:] == ["Compacted", "Compacted", "Failed"]
    assert len(model.requests) == 8
    await no_leases(store)


async def test_where_nothing_can_go_the_run_ends_at_once(store):
    """The task and the newest are all there is."""
    model = Surveyor(1, refuses=lambda _request: True)
    run = await agent_of(model, store).run(TASK)
    assert run.stop_reason is StopReason.MODEL_ERROR
    assert len(model.requests) == 1


# Policies of a user's own


class Forgetful(ContextPolicy):
    """Does what it is told to the groups."""

    def __init__(self, change: Callable[[Sequence[MessageGroup]], Sequence[MessageGroup]]) -> None:
        """Take it."""
        self.change = change

    async def compact(self, groups: Sequence[MessageGroup], room: CompactionBudget) -> Sequence[MessageGroup]:
        """Do it."""
        return self.change(groups)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda groups: groups[1:], "Forgetful dropped the task or the newest group"),
        (lambda groups: groups[:-1], "Forgetful dropped the task or the newest group"),
        (lambda groups: [], "Forgetful dropped the task or the newest group"),
        (lambda groups: [*groups, groups[0]], "was not given, or not in their order, or one twice"),
        (lambda groups: [groups[0], groups[2], groups[1], *groups[3:]], "or not in their order"),
    ],
)
async def test_a_policy_that_breaks_its_promise_is_told_so(change, words):
    """It is a bug in the program, and no fault of the world."""
    agent = agent_of(Surveyor(30), context=Forgetful(change))
    with pytest.raises(MisuseError, match=words):
        await agent.run(TASK)


async def test_a_policy_of_ones_own_is_all_it_takes(store):
    """Every second group goes; what it did stands in the journal under its name."""
    keep = Forgetful(lambda groups: [g for n, g in enumerate(groups) if n % 2 == 0 or g.is_newest])
    agent = agent_of(Surveyor(30), store, context=[keep, PriorityRetention()])
    run = await agent.run(TASK)
    cut = await compactions(agent, run.id)
    assert cut[0].policies[0] == "Forgetful"
    assert run.output == "surveyed"
    await sound(agent, run)


async def test_a_policy_is_not_asked_once_there_is_room(store):
    """It may cost a question to a model, or drop what need not go."""
    asked: list[object] = []
    last = Forgetful(lambda groups: asked.append(groups) or groups)
    run = await agent_of(Surveyor(30), store, context=[SlidingWindow(), last]).run(TASK)
    assert run.cutoff > 0
    assert asked == []


def test_a_context_is_given_in_three_ways():
    """One policy, several, or with a share of its own."""
    model = Surveyor(0)
    default = agent_of(model).context
    assert [type(policy) for policy in default.policies] == [TrimResults, SlidingWindow]
    assert default.share == 0.75
    assert agent_of(model, context=SlidingWindow()).context == Context([SlidingWindow()])
    assert agent_of(model, context=(TrimResults(), SlidingWindow())).context == default
    assert agent_of(model, context=Context([SlidingWindow()], share=0.5)).context.share == 0.5
    with pytest.raises(MisuseError, match="is not a context policy"):
        agent_of(model, context=SlidingWindow)


async def test_a_pause_right_behind_a_compaction_changes_nothing(store):
    """Whoever takes it up again asks what would have been asked."""
    model = Surveyor(14)
    agent = agent_of(model, store)
    run = agent.start(TASK)
    while not run.cutoff:
        run = await agent.step(run)
    await agent.pause(run.id)
    run = await agent.load(run.id)
    assert run.is_waiting
    fresh = Surveyor(0)
    done = await agent_of(fresh, store).resume(run.id)
    assert done.state is State.DONE
    assert tuple(fresh.requests[0].messages) == run.shown
