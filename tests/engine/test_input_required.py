"""A tool asks a person in the middle of its call: the call ends, the run is stored, the answer starts the next."""

from __future__ import annotations

from typing import Any

import anyio
import attrs
import pytest

from agentfsm import (
    Agent,
    ConflictError,
    ErrorType,
    InputRequired,
    MisuseError,
    Outcome,
    Pending,
    PendingKind,
    Question,
    Run,
    RunContext,
    State,
    Tool,
    ToolEvent,
    ToolEventType,
    ToolQueue,
    ToolRegistry,
    tool,
)
from agentfsm.core.calls import Phase
from agentfsm.core.events import InputGiven, ToolPaused
from agentfsm.stores import MemoryStore, SQLiteStore
from agentfsm.testing import ScriptedModel, call, say
from agentfsm.tools.question_validation import MAX_ANSWER_CHARS, MAX_QUESTIONS, MAX_ROUNDS, MAX_STATE_CHARS
from tests.support.checks import names, results_of, sound, virtually
from tests.support.streaming_models import STREAM, all_at_once, watched

TEXT = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 9}}, "required": ["name"]}
WHO = Question(key="who", message="Who travels?", schema=TEXT)
SURE = Question(key="sure", message="Shall I book it?")
PAY = Question(key="pay", message="Pay there.", url="https://pay.example.com/17")


class Desk:
    """A tool that asks before it books, and notes each attempt."""

    def __init__(self, *rounds: tuple[Question, ...], **options: Any) -> None:
        """Take what it asks, round by round, and the tool's options."""
        self.rounds = rounds or ((WHO,),)
        self.booked: list[dict[str, Any]] = []
        self.seen: list[tuple[int, Any, dict[str, Any], str]] = []

        async def book(ctx: RunContext[Any], to: str = "Rome") -> str:
            self.seen.append((ctx.attempt, ctx.state, dict(ctx.answers), ctx.idempotency_key))
            await anyio.lowlevel.checkpoint()
            for number, questions in enumerate(self.rounds):
                if any(each.key not in ctx.answers for each in questions):
                    raise InputRequired(*questions, state={"round": number})
            self.booked.append(dict(ctx.answers))
            return f"booked {to}"

        self.tool: Tool[..., Any] = tool(**options)(book)

    def agent(self, *replies: object, **options: Any) -> Agent:
        """A new agent with this tool."""
        script = replies or (say("", call("book")), "done")
        return Agent(ScriptedModel(*script), tools=[self.tool, *options.pop("tools", ())], **options)


# Once through


@pytest.mark.parametrize("options", [{}, {"idempotent": True}, {"read_only": True}], ids=["unsafe", "put", "look"])
async def test_the_answer_starts_the_next_attempt(store, options):
    """The run waits with the question; the next attempt has the answer and the state, under the same key."""
    desk = Desk(**options)
    agent = desk.agent(store=store)
    run = await agent.run("go")
    (item,) = run.pending
    assert (run.state, run.is_waiting, desk.booked) == (State.ACT, True, [])
    assert (item.kind, item.call_id, item.tool, item.arguments) == (PendingKind.QUESTION, "t1.0", "book", {})
    assert (item.description, item.questions) == ("Who travels?", (WHO,))
    assert item.expires_at is not None
    await agent.answer(run.id, "t1.0", {"name": "Ann"}, by="bob")
    done = await agent.resume(run.id)
    assert (done.output, desk.booked) == ("done", [{"who": {"name": "Ann"}}])
    (_, nothing, none, key), (_, state, answers, again) = desk.seen
    assert (nothing, none, state, answers, again) == (None, {}, {"round": 0}, {"who": {"name": "Ann"}}, key)
    asked, given = ["ToolStarted", "ToolPaused"], ["InputGiven", "ToolStarted", "ToolFinished"]
    assert names(await agent.history(run.id))[2:-2] == [*asked, *given, "ToolsReturned", "Continued"]
    assert (await agent.replay(run.id)).is_faithful
    await sound(agent, done)


async def test_the_answer_and_the_start_are_one_append():
    """No crash comes between what a person said and the word that the call runs on it."""
    store = Appends()
    desk = Desk()
    agent = desk.agent(store=store)
    run = await agent.run("go")
    await agent.answer(run.id, "t1.0", "Ann")
    (row,) = await store.inbox(run.id)
    await agent.resume(run.id)
    assert (["InputGiven", "ToolStarted"], (row.number,)) in store.appended
    assert await store.inbox(run.id) == ()


class Appends(MemoryStore):
    """Notes each append: its events, and the rows that it takes."""

    appended: list[tuple[list[str], tuple[int, ...]]]

    def append(self, lease, run, events, *, taken=(), final=False):
        """Write, and note it."""
        self.appended = [*getattr(self, "appended", []), (names(events), tuple(taken))]
        return super().append(lease, run, events, taken=taken, final=final)


async def test_it_is_asked_and_answered_and_done_in_different_processes(tmp_path):
    """They share nothing but the file."""
    path = tmp_path / "runs.db"
    desk = Desk()
    async with desk.agent(say("", call("book")), store=SQLiteStore(path)) as first:
        run = await first.run("go")
    async with Agent(ScriptedModel(), store=SQLiteStore(path)) as second:
        await second.answer(run.id, "t1.0", {"name": "Zoë 😀"}, by="ann")
    async with desk.agent("done", store=SQLiteStore(path)) as third:
        done = await third.resume(run.id)
        assert (done.output, desk.booked) == ("done", [{"who": {"name": "Zoë 😀"}}])
        await sound(third, done)


async def test_a_question_from_inside_of_a_task_group_is_asked(store):
    """As a tool asks whose client has one."""

    @tool
    async def book(ctx: RunContext[Any]) -> str:
        """Book."""
        async with anyio.create_task_group():
            if not ctx.answers:
                raise InputRequired(SURE)
        return "booked"

    agent = Agent(ScriptedModel(say("", call("book")), "done"), tools=[book], store=store)
    run = await agent.run("go")
    assert [item.kind for item in run.pending] == [PendingKind.QUESTION]
    await sound(agent, run)


async def test_what_a_call_did_before_it_asked_is_not_forgotten_when_the_run_ends(store):
    """The next run must not take it for undone."""
    charged = []

    @tool
    async def book(ctx: RunContext[Any]) -> str:
        """Book."""
        charged.append(ctx.attempt)
        raise InputRequired(SURE)

    agent = Agent(ScriptedModel(say("", call("book"))), tools=[book], store=store)
    run = await agent.run("go")
    await agent.cancel(run.id)
    over = await agent.load(run.id)
    assert charged == [1]
    assert over.messages[-1].outcome is Outcome.UNKNOWN
    await sound(agent, over)


async def test_several_questions_are_answered_at_once_by_their_keys(store):
    """One decision on one call, as everywhere; None declines one of them."""
    desk = Desk((WHO, SURE, PAY))
    agent = desk.agent(store=store)
    run = await agent.run("go")
    assert run.pending[0].description == "Who travels?\nShall I book it?\nPay there."
    for partly in ({"who": {"name": "Ann"}}, "Ann", None, {"who": {"name": "Ann"}, "sure": {}, "pay": {}, "more": {}}):
        with pytest.raises(MisuseError, match="'who', 'sure', 'pay': give a dict with an answer for each key"):
            await agent.answer(run.id, "t1.0", partly)
    await agent.answer(run.id, "t1.0", {"who": "Ann", "sure": {}, "pay": None})
    await agent.resume(run.id)
    assert desk.booked == [{"who": {"name": "Ann"}, "sure": {}, "pay": None}]


async def test_declining_is_an_answer(store):
    """The tool decides what comes of it."""
    desk = Desk((WHO, PAY))
    agent = desk.agent(store=store)
    run = await agent.run("go")
    with pytest.raises(MisuseError, match="both declined and answered"):
        await agent.answer(run.id, "t1.0", {"who": {"name": "Ann"}, "pay": {}}, declined=True)
    await agent.answer(run.id, "t1.0", declined=True)
    await agent.resume(run.id)
    assert desk.booked == [{"who": None, "pay": None}]


@pytest.mark.parametrize("question", [SURE, PAY], ids=["yes", "url"])
async def test_what_has_nothing_to_fill_in_is_agreed_to(store, question):
    """So the answer is empty."""
    desk = Desk((question,))
    agent = desk.agent(store=store)
    run = await agent.run("go")
    with pytest.raises(MisuseError, match="none: agree with"):
        await agent.answer(run.id, "t1.0", "yes")
    await agent.answer(run.id, "t1.0")
    await agent.resume(run.id)
    assert desk.booked == [{question.key: {}}]


# Answers that are none


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({}, "name: required, but missing"),
        (None, "name: required, but missing"),
        ({"name": 5}, "string"),
        ({"name": "much too long"}, "9 characters"),
        ({"name": "Ann", "age": 4}, "'age', which was not asked for"),
        (["Ann"], "has to be an object, not list"),
        ({"name": {1, 2}}, "plain JSON"),
        ({"name": float("nan")}, "plain JSON"),
        ({"name": "x" * MAX_ANSWER_CHARS}, "characters, more than"),
    ],
)
async def test_an_answer_that_does_not_fit_is_refused_and_nothing_is_lost(store, content, words):
    """It says what is wrong; the run waits as before."""
    desk = Desk()
    agent = desk.agent(store=store)
    run = await agent.run("go")
    with pytest.raises(MisuseError, match=words):
        await agent.answer(run.id, "t1.0", content)
    assert await store.inbox(run.id) == ()
    assert (await agent.resume(run.id)).pending == run.pending
    await agent.answer(run.id, "t1.0", "Ann")
    assert (await agent.resume(run.id)).output == "done"


async def test_the_first_word_wins(store):
    """Whoever comes second learns who was first, before the answer is taken and after."""
    desk = Desk((WHO,), (SURE,))
    agent = desk.agent(store=store)
    run = await agent.run("go")
    (item,) = run.pending
    await agent.answer(run.id, "t1.0", "Ann", by="ann")
    await agent.answer(run.id, "t1.0", "Ann", by="ann")  # again, after a lost connection
    with pytest.raises(ConflictError, match="'ann'"):
        await agent.answer(run.id, "t1.0", "Ann", by="bob")
    with pytest.raises(ConflictError, match="'ann'"):
        await agent.answer(run.id, "t1.0", "Cid", by="cid")
    with pytest.raises(ConflictError, match="'ann'"):
        await agent.answer(run.id, "t1.0", declined=True, by="cid")
    await agent.resume(run.id)
    with pytest.raises(ConflictError, match="has changed since it was shown"):
        await agent.answer(run.id, "t1.0", "Cid", by="cid", digest=item.digest)
    await agent.answer(run.id, "t1.0", by="dan")
    await agent.resume(run.id)
    with pytest.raises(ConflictError, match="by dan"):
        await agent.answer(run.id, "t1.0", by="cid")
    assert desk.booked == [{"who": {"name": "Ann"}, "sure": {}}]


async def test_words_for_other_waits_are_refused(store):
    """What ends one kind of wait ends no other."""
    agent = Desk().agent(store=store)
    run = await agent.run("go")
    for word in (agent.approve, agent.reject):
        with pytest.raises(MisuseError, match=r"question of t1\.0"):
            await word(run.id, "t1.0")
    with pytest.raises(MisuseError, match="declined=True"):
        await agent.answer(run.id, "t1.0", "no idea", failed=True)

    @tool(external=True)
    def weigh() -> str:
        """Weigh it."""
        raise AssertionError

    other = Agent(ScriptedModel(say("", call("weigh")), "done"), tools=[weigh], store=store)
    run = await other.run("go")
    for content, declined in ((None, True), (None, False), ({"a": 1}, False)):
        with pytest.raises(MisuseError, match="must be a string"):
            await other.answer(run.id, "t1.0", content, declined=declined)


def test_a_question_that_nobody_answers_in_time():
    """The call ends as every question does; a late answer is refused."""

    async def play(store, clock):
        desk = Desk(answer_expires_s=60)
        agent = desk.agent(store=store, clock=clock)
        run = await agent.run("go")
        await anyio.sleep(60)
        with pytest.raises(ConflictError, match="time is up"):
            await agent.answer(run.id, "t1.0", "Ann")
        done = await agent.resume(run.id)
        (result,) = results_of(done.messages)
        assert (result.outcome, desk.booked, done.output) == (Outcome.TIMED_OUT, [], "done")
        assert "Nobody answered in time" in result.content

    virtually(play)


# Rounds


async def test_a_tool_may_ask_again_and_keeps_what_it_was_told(store):
    """Each round sees the answers of all before it, and the newest state."""
    desk = Desk((WHO,), (SURE,), (PAY,))
    agent = desk.agent(store=store)
    run = await agent.run("go")
    digests = set()
    for content in ("Ann", {}, {}):
        digests.add(run.pending[0].digest)
        await agent.answer(run.id, "t1.0", content)
        run = await agent.resume(run.id)
    assert [len(answers) for _, _, answers, _ in desk.seen] == [0, 1, 2, 3]
    assert [state for _, state, _, _ in desk.seen] == [None, {"round": 0}, {"round": 1}, {"round": 2}]
    assert (run.output, len(digests)) == ("done", 3)
    await sound(agent, run)


async def test_a_tool_that_asks_for_ever_comes_to_an_end(store):
    """After so many rounds the call fails, with what the model can act upon."""

    @tool
    def nag() -> str:
        """Ask and ask."""
        raise InputRequired(SURE)

    agent = Agent(ScriptedModel(say("", call("nag")), "done"), tools=[nag], store=store)
    run = await agent.run("go")
    rounds = 0
    while run.is_waiting:
        rounds += 1
        await agent.answer(run.id, "t1.0")
        run = await agent.resume(run.id)
    (result,) = results_of(run.messages)
    assert (rounds, result.outcome, result.error_type) == (MAX_ROUNDS, Outcome.FAILED, ErrorType.TOOL)
    assert f"asked for input {MAX_ROUNDS} times" in result.content
    await sound(agent, run)


def test_the_same_question_in_the_same_moment_is_another_one():
    """An answer to the first round is none to the second, whatever the clock says."""

    async def play(store, clock):
        @tool
        async def nag(ctx: RunContext[Any]) -> str:
            """Ask the same twice."""
            if ctx.state == 2:
                return "enough"
            raise InputRequired(SURE, state=(ctx.state or 0) + 1)

        agent = Agent(ScriptedModel(say("", call("nag")), "done"), tools=[nag], store=store, clock=clock)
        run = await agent.run("go")
        for _ in range(2):
            await agent.answer(run.id, "t1.0")
            run = await agent.resume(run.id)
        assert run.output == "done"

    virtually(play)


@pytest.mark.parametrize(
    ("questions", "state", "words"),
    [
        ((), None, "ask 1 to"),
        ([attrs.evolve(SURE, key=f"k{n}") for n in range(MAX_QUESTIONS + 1)], None, "ask 1 to"),
        ((SURE, SURE), None, "same key"),
        (("who?",), None, "takes questions, not str"),
        ((attrs.evolve(SURE, key=""),), None, "its key"),
        ((attrs.evolve(SURE, key="\ud800"),), None, "its key"),
        ((attrs.evolve(SURE, message=" "),), None, "its message"),
        ((attrs.evolve(SURE, message="x" * 9_000),), None, "its message"),
        ((attrs.evolve(PAY, url="javascript:alert(1)"),), None, "http"),
        ((attrs.evolve(PAY, schema=TEXT),), None, "a url and a schema"),
        ((attrs.evolve(WHO, schema={"type": "array"}),), None, "its schema is invalid"),
        ((attrs.evolve(WHO, schema={"properties": {"a": {"type": "nonsense"}}}),), None, "its schema is invalid"),
        ((attrs.evolve(WHO, schema={"properties": {"a": {"type": "object"}}}),), None, "'a' in its schema"),
        ((attrs.evolve(WHO, schema={"properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": {}}}),), None, "'a' in"),
        ((attrs.evolve(WHO, schema={"properties": {}, "x": "x" * 30_000}),), None, "20,000 characters"),
        ((SURE,), {1, 2}, "plain JSON"),
        ((SURE,), "x" * MAX_STATE_CHARS, "more than"),
    ],
)
def test_what_cannot_be_asked_is_refused(questions, state, words):
    """It says what is wrong, to the author of the tool."""
    with pytest.raises(MisuseError, match=words):
        InputRequired(*questions, state=state)


async def test_half_characters_come_back_as_they_were(store):
    """The state is the tool's own; what people read is made fit to be stored."""

    @tool
    def odd(ctx: RunContext[Any]) -> str:
        """Ask oddly."""
        if not ctx.answers:
            raise InputRequired(attrs.evolve(SURE, message="so \ud800"), state="\ud800")
        return repr(ctx.state)

    agent = Agent(ScriptedModel(say("", call("odd")), "done"), tools=[odd], store=store)
    run = await agent.run("go")
    assert run.pending[0].questions[0].message == "so \ufffd"
    assert await agent.load(run.id) == run
    await agent.answer(run.id, "t1.0")
    assert results_of((await agent.resume(run.id)).messages)[0].content == r"'\ud800'"


async def test_what_a_tool_does_to_its_question_and_its_answers_stays_with_it(store):
    """They are copies: the run is what the journal says."""
    schema = {"type": "object", "properties": {"tags": {"type": "array", "items": {"type": "string"}}}}

    @tool(read_only=True)
    def meddle(ctx: RunContext[Any]) -> str:
        """Ask, and meddle."""
        if ctx.answers:
            ctx.answers["q"]["tags"].append("mine")
            return str(ctx.answers)
        asked = InputRequired(Question(key="q", message="Which?", schema=schema))
        schema["properties"] = {}
        raise asked

    agent = Agent(ScriptedModel(say("", call("meddle")), "done"), tools=[meddle], store=store)
    run = await agent.run("go")
    await agent.answer(run.id, "t1.0", {"tags": ["yours"]})
    done = await agent.resume(run.id)
    assert results_of(done.messages)[0].content == "{'q': {'tags': ['yours']}}"
    await sound(agent, done)


# Beside other calls


async def test_calls_beside_it_run_and_those_behind_it_wait(store):
    """What may overlap is done; what may not comes after the answer, in the model's order."""
    done_by: list[str] = []

    @tool(read_only=True)
    def look(at: str) -> str:
        """Look."""
        done_by.append(at)
        return at

    desk = Desk(read_only=True)
    script = [say("", call("look", at="a"), call("book"), call("look", at="b"), call("pay")), "done"]

    @tool
    def pay() -> str:
        """Pay."""
        done_by.append("pay")
        return "paid"

    agent = desk.agent(*script, tools=[look, pay], store=store)
    run = await agent.run("go")
    assert sorted(done_by) == ["a", "b"]
    assert [entry.phase for entry in run.open] == [Phase.FINISHED, Phase.PAUSED, Phase.FINISHED, Phase.INTENDED]
    await agent.answer(run.id, "t1.1", "Ann")
    done = await agent.resume(run.id)
    assert (done.output, done_by[2:]) == ("done", ["pay"])
    await sound(agent, done)


async def test_two_calls_ask_at_once(store):
    """Each waits for its own answer; the later one may be answered first."""
    desk = Desk(concurrency_safe=True)
    agent = desk.agent(say("", call("book", to="Rome"), call("book", to="Oslo")), "done", store=store)
    run = await agent.run("go")
    assert [item.call_id for item in run.pending] == ["t1.0", "t1.1"]
    await agent.answer(run.id, "t1.1", "Bob")
    run = await agent.resume(run.id)
    assert (desk.booked, run.is_waiting) == ([], True)
    await agent.answer(run.id, "t1.0", "Ann")
    done = await agent.resume(run.id)
    assert sorted(each["who"]["name"] for each in desk.booked) == ["Ann", "Bob"]
    await sound(agent, done)


async def test_an_approved_call_asks_and_is_not_approved_again(store):
    """The yes holds for the whole call, with what it asks on the way."""
    desk = Desk(requires_approval=True)
    agent = desk.agent(store=store)
    run = await agent.run("go")
    await agent.approve(run.id, "t1.0", arguments={"to": "Oslo"})
    run = await agent.resume(run.id)
    (item,) = run.pending
    assert (item.kind, item.arguments) == (PendingKind.QUESTION, {"to": "Oslo"})
    await agent.answer(run.id, "t1.0", "Ann")
    done = await agent.resume(run.id)
    assert (done.output, results_of(done.messages)[0].content) == ("done", "booked Oslo")
    await sound(agent, done)


@pytest.mark.parametrize("queued", [False, True])
async def test_a_read_only_tool_that_started_early_may_ask(store, queued):
    """Its pause is held back until the reply is in the journal, as a result would be."""
    desk = Desk(read_only=True)
    calls = [call("book"), *([call("book", to="Oslo")] if queued else [])]
    agent = Agent(all_at_once(*calls), tools=[desk.tool], store=store, settings=STREAM)
    events, run = await watched(agent)
    assert [item.call_id for item in run.pending] == ["t1.0", "t1.1"][: len(calls)]
    assert names(await agent.history(run.id))[1:4] == ["ToolsChosen", "ToolStarted", "ToolPaused"]
    told = [event.type for event in events if isinstance(event, ToolEvent) and event.call_id == "t1.0"]
    assert told == [ToolEventType.QUEUED, ToolEventType.STARTED, ToolEventType.PAUSED]
    for item in run.pending:
        await agent.answer(run.id, item.call_id, "Ann")
    done = await agent.resume(run.id)
    assert (done.output, len(desk.booked)) == ("done", len(calls))
    await sound(agent, done)


async def test_a_queue_by_itself_has_nobody_to_ask():
    """The call gets a result that says so."""
    queue = ToolQueue(ToolRegistry.of([Desk().tool]))
    run = await Desk().agent().run("go")
    (result,) = await queue.execute_all([run.open[0].call])
    assert (result.outcome, result.error_type) == (Outcome.FAILED, ErrorType.BLOCKED)


# The end of the run, a rest, a fork


async def test_a_run_that_is_cancelled_while_it_waits(store):
    """The history is closed; the answer comes too late."""
    agent = Desk().agent(store=store)
    run = await agent.run("go")
    await agent.answer(run.id, "t1.0", "Ann")
    await agent.cancel(run.id)
    ended = await agent.load(run.id)
    (result,) = results_of(ended.messages)
    assert (ended.state, result.outcome) == (State.ERROR, Outcome.UNKNOWN)
    with pytest.raises(ConflictError):
        await agent.answer(run.id, "t1.0", "Ann")
    await sound(agent, ended)


async def test_a_run_that_rests_takes_the_answer_when_it_is_resumed(store):
    """A pause keeps the question open, and the answer too."""
    desk = Desk()
    agent = desk.agent(store=store)
    run = await agent.run("go")
    await agent.pause(run.id)
    await agent.answer(run.id, "t1.0", "Ann")
    rests = await agent.load(run.id)
    assert [item.kind for item in rests.pending] == [PendingKind.PAUSE, PendingKind.QUESTION]
    assert (await agent.resume(run.id)).output == "done"
    assert desk.booked == [{"who": {"name": "Ann"}}]


@pytest.mark.parametrize("read_only", [True, False])
async def test_a_fork_of_a_run_that_waits(store, read_only):
    """What only looks asks anew, in the fork; of all else a person says what became of it, as of every open call."""
    desk = Desk((WHO,), (SURE,), read_only=read_only)
    agent = desk.agent(say("", call("book")), *["done"] * 2, store=store)
    run = await agent.run("go")
    await agent.answer(run.id, "t1.0", "Ann")
    run = await agent.resume(run.id)
    fork = await agent.finish(await agent.fork(run.id))
    if not read_only:
        (item,) = fork.pending
        assert (item.kind, item.run_id) == (PendingKind.OUTCOME, fork.id)
        await agent.settle(fork.id, "t1.0", rerun=True)
        fork = await agent.resume(fork.id)
    (item,) = fork.pending
    assert (item.kind, item.run_id, item.questions) == (PendingKind.QUESTION, fork.id, (SURE,))
    await agent.answer(fork.id, "t1.0")
    assert (await agent.resume(fork.id)).output == "done"
    assert desk.booked == [{"who": {"name": "Ann"}, "sure": {}}]
    await agent.answer(run.id, "t1.0")
    assert (await agent.resume(run.id)).output == "done"


# Agents as tools


async def test_an_agent_below_asks(store):
    """What it asks appears in its caller's `pending` with its own run's id, and both go on when it is answered."""
    desk = Desk((WHO,), (SURE,))
    clerk = desk.agent(say("", call("book")), "the clerk is through", name="clerk")
    boss = Agent(ScriptedModel(say("", call("clerk", query="go")), "done"), tools=[clerk.as_tool()], store=store)
    run = await boss.run("go")
    for question, content in ((WHO, "Ann"), (SURE, {})):
        (item,) = run.pending
        assert (item.run_id, item.call_id, item.questions) == (f"{run.id}.t1.0", "t1.0", (question,))
        with pytest.raises(MisuseError, match="does not wait for the question"):
            await boss.answer(run.id, "t1.0", content)
        await boss.answer(item.run_id, item.call_id, content, digest=item.digest)
        run = await boss.resume(run.id)
    assert (run.output, desk.booked) == ("done", [{"who": {"name": "Ann"}, "sure": {}}])
    assert all(event.state is None for event in await boss.history(run.id) if isinstance(event, ToolPaused))
    await sound(boss, run)


# Crash and resume


class Killed(BaseException):
    """The process is gone."""


class Mortal(MemoryStore):
    """A store whose process dies right before or after it wrote an event of a kind."""

    dies_before = dies_after = ""

    def append(self, lease, run, events, *, taken=(), final=False):
        """Write, and die if it was that."""
        if self.dies_before in names(events):
            self.dies_before = ""
            raise Killed
        commit = super().append(lease, run, events, taken=taken, final=final)
        if self.dies_after in names(events):
            self.dies_after = ""
            raise Killed
        return commit


async def _asked(options: dict[str, Any]) -> tuple[Mortal, Desk, Agent, Run]:
    store, desk = Mortal(), Desk(**options)
    agent = desk.agent(store=store)
    run = await agent.run("go")
    return store, desk, agent, run


@pytest.mark.parametrize("options", [{"read_only": True}, {"idempotent": True}, {}], ids=["look", "put", "unsafe"])
async def test_a_worker_that_dies_with_the_answer_in_hand(options):
    """The answer is in the journal: a rerun gets the same; what may not run unasked is asked about."""
    store, desk, agent, run = await _asked(options)
    await agent.answer(run.id, "t1.0", "Ann", by="bob")
    store.dies_after = "InputGiven"
    with pytest.raises(Killed):
        await agent.resume(run.id)
    assert desk.booked == []
    done = await agent.resume(run.id)
    if not options:
        (item,) = done.pending
        assert item.kind is PendingKind.OUTCOME
        await agent.settle(run.id, "t1.0", rerun=True)
        done = await agent.resume(run.id)
    assert (done.output, desk.booked) == ("done", [{"who": {"name": "Ann"}}])
    assert desk.seen[-1][1] == {"round": 0}
    assert len([e for e in await agent.history(run.id) if isinstance(e, InputGiven)]) == 1
    await sound(agent, done)


async def test_a_worker_that_dies_before_the_attempt_loses_no_answer():
    """It stays in the inbox until the append that starts the call."""
    store, desk, agent, run = await _asked({})
    await agent.answer(run.id, "t1.0", "Ann")
    store.dies_before = "InputGiven"
    with pytest.raises(Killed):
        await agent.resume(run.id)
    assert (len(await store.inbox(run.id)), len(desk.seen)) == (1, 1)
    assert (await agent.resume(run.id)).output == "done"
    assert desk.booked == [{"who": {"name": "Ann"}}]


async def test_a_worker_that_dies_when_the_question_was_written():
    """Whoever goes on finds the run waiting, and asks nothing twice."""
    store, desk = Mortal(), Desk()
    agent = desk.agent(store=store)
    store.dies_after = "ToolPaused"
    with pytest.raises(Killed):
        await agent.run("go", id="mine")
    run = await agent.resume("mine")
    assert ([item.questions for item in run.pending], len(desk.seen)) == ([(WHO,)], 1)


async def test_a_tool_that_is_refused_after_the_answer(store):
    """The call had begun before it asked: the answer is spent in the append that hands it to a person."""
    desk = Desk(enabled=lambda ctx: ctx.deps is not False)
    agent = desk.agent(store=store)
    run = await agent.run("go")
    await agent.answer(run.id, "t1.0", "Ann", by="bob")
    done = await agent.resume(run.id, deps=False)
    [item] = done.pending
    assert (item.kind, desk.booked) == (PendingKind.OUTCOME, [])
    assert "its tool is not available any more" in item.error
    assert [event.by for event in await agent.history(run.id) if isinstance(event, InputGiven)] == ["bob"]
    assert await store.inbox(run.id) == ()
    await agent.settle(run.id, "t1.0", failed="nothing was booked")
    assert (await agent.resume(run.id)).output == "done"
    assert await store.inbox(run.id) == ()


def test_a_worker_wakes_for_the_answer():
    """A run that waits is taken up when the answer is posted, by whoever works."""

    async def play(store, clock):
        desk = Desk()
        agent = desk.agent(store=store, clock=clock)
        await agent.submit("go", id="mine")
        await agent.worker(until_idle=True)
        assert (await agent.load("mine")).is_waiting
        await agent.answer("mine", "t1.0", "Ann")
        await agent.worker(until_idle=True)
        assert (await agent.load("mine")).output == "done"

    virtually(play)


def test_the_question_is_all_that_a_front_end_needs():
    """Everything to show and to send back is in `Pending`."""
    assert {"questions", "digest", "expires_at", "description"} <= {field.name for field in attrs.fields(Pending)}
