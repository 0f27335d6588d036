"""What callers hand to an agent: what is wrong is refused where it comes in, with what to give instead."""

from __future__ import annotations

import inspect
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import anyio
import pytest

from agentfsm import (
    Agent,
    ConflictError,
    DuplicateToolError,
    InputKind,
    MisuseError,
    Priority,
    Run,
    Settings,
    State,
    Usage,
    tool,
)
from agentfsm.context import Summarise
from agentfsm.ports import Emit, Model, Reply, Request
from agentfsm.reflection import Action, Judge, JudgeAsk, Reflector, Verdict
from agentfsm.stores import MemoryStore, SQLiteStore
from agentfsm.testing import FunctionModel, ScriptedModel, call, say

# A guard against a hang, not a bound.
HANG_S = 20.0


@tool(read_only=True)
def search(query: str) -> str:
    """Search."""
    return query


@tool(requires_approval=True)
def pay(cents: int) -> str:
    """Pay."""
    return f"paid {cents}"


@pytest.fixture(params=["memory", "sqlite"])
async def store(request, tmp_path):
    """A store of each kind that needs no server."""
    made = MemoryStore() if request.param == "memory" else SQLiteStore(tmp_path / "runs.db")
    yield made
    await made.aclose()


# Ids.

ASKED: dict[str, Any] = {
    "resume": lambda agent, odd: agent.resume(odd),
    "load": lambda agent, odd: agent.load(odd),
    "history": lambda agent, odd: agent.history(odd),
    "events": lambda agent, odd: anext(agent.events(odd)),
    "wait": lambda agent, odd: agent.wait(odd),
    "audit": lambda agent, odd: agent.audit(odd),
    "fork": lambda agent, odd: agent.fork(odd),
    "replay": lambda agent, odd: agent.replay(odd),
    "approve": lambda agent, odd: agent.approve(odd, "t1.0"),
    "reject": lambda agent, odd: agent.reject(odd, "t1.0"),
    "answer": lambda agent, odd: agent.answer(odd, "t1.0", "yes"),
    "settle": lambda agent, odd: agent.settle(odd, "t1.0", rerun=True),
    "send": lambda agent, odd: agent.send(odd, "x"),
    "pause": lambda agent, odd: agent.pause(odd),
    "feedback": lambda agent, odd: agent.feedback(odd, rating=5),
    "cancel": lambda agent, odd: agent.cancel(odd),
}


def test_every_method_that_takes_an_id_is_asked():
    """A new one is checked here, too."""
    public = [(name, method) for name, method in inspect.getmembers(Agent, inspect.isfunction) if name[0] != "_"]
    assert {name for name, method in public if "run_id" in method.__code__.co_varnames[:2]} == ASKED.keys()


@pytest.mark.parametrize("ask", ASKED.values(), ids=ASKED)
async def test_a_run_is_no_id(store, ask):
    """Who gives a Run is told to give its id, and nobody else on the store hears of it."""
    agent = Agent(ScriptedModel("a", "b"), store=store)
    run = await agent.run("x")
    with anyio.fail_after(HANG_S):
        with pytest.raises(MisuseError, match=r"give run\.id, not a Run"):
            await ask(agent, run)
        for odd in (17, None, [run.id]):
            with pytest.raises(MisuseError, match=r"give run\.id, not"):
                await ask(agent, odd)
        assert (await agent.run("y")).output == "b"


@pytest.mark.parametrize("rung", ["step", "finish", "steps"])
async def test_a_prompt_is_no_run(rung):
    """The rungs that go on with a run say how to begin one."""
    with pytest.raises(MisuseError, match=rf"agent\.{rung} takes a Run.*agent\.{rung}\(agent\.start"):
        await getattr(Agent(ScriptedModel()), rung)("hello")


# What else the verbs take.

ODD: dict[str, tuple[Any, str]] = {
    "at": (lambda agent, run: agent.load(run.id, at="2"), "has no version '2': its versions are 0 to 3"),
    "at of a fork": (lambda agent, run: agent.fork(run.id, at=2.5), "has no version 2.5"),
    "edit": (lambda agent, run: agent.fork(run.id, edit=[run]), "a dict of events by their versions, not list"),
    "version": (lambda agent, run: agent.fork(run.id, edit={"2": run}), "there is no '2' to edit"),
    "call": (lambda agent, run: agent.approve(run.id, run.pending[0]), "give the call_id of an item of run.pending"),
    "rerun": (lambda agent, run: agent.settle(run.id, "t1.0", rerun=None), "exactly one of"),
    "parallel": (
        lambda agent, _run: agent.worker(parallel="3"),
        r"worker\(parallel='3'\): give a whole number, 1 or more",
    ),
    "poll_s": (
        lambda agent, _run: agent.worker(poll_s=None),
        r"poll_s=None\): give a finite number of seconds",
    ),
}


@pytest.mark.parametrize(("ask", "match"), ODD.values(), ids=ODD)
async def test_what_a_verb_cannot_take_is_said_by_its_name(store, ask, match):
    """It is no TypeError out of the depths, and the run stays as it was."""
    agent = Agent(ScriptedModel(say("", call("pay", cents=5)), "paid"), tools=[pay], store=store)
    run = await agent.run("x")
    with anyio.fail_after(HANG_S), pytest.raises(MisuseError, match=match):
        await ask(agent, run)
    assert await agent.load(run.id) == run


def test_what_a_verb_that_is_not_awaited_cannot_take_is_said_too():
    """These are asked at once."""
    agent: Any = Agent(ScriptedModel())
    for ask, match in (
        (lambda: agent.cost("run-1"), r"agent\.cost\(await agent\.load\(run_id\)\)"),
        (lambda: agent.audits("ann"), r"give a Filter, for example Filter\(user='ann'\)"),
        (lambda: agent.audits(since="2026-01-31"), "give seconds since 1970"),
        (lambda: agent.as_tool(turns="3"), r"turns='3'\): give a whole number"),
        (lambda: agent.as_tool(timeout_s=0), r"timeout_s=0\): give a finite number of seconds above 0"),
        (lambda: agent.as_tool(name=3), "a tool cannot be called 3"),
        (lambda: tool(search), r"'search' is a tool already; .*\(search\.function\)"),
    ):
        with pytest.raises(MisuseError, match=match):
            ask()


# Inputs.


@pytest.mark.parametrize(
    ("odd", "match"),
    [
        ({"kind": "usr"}, r"kind='usr': give one of 'user', 'event'"),
        ({"kind": 3}, "kind=3: give one of"),
        ({"priority": "hi"}, r"priority='hi': give one of 'high', 'normal', 'low'"),
        ({"priority": 99}, "priority=99"),
        ({"at": datetime(2030, 1, 1)}, "give a datetime with its time zone"),  # noqa: DTZ001  that is the mistake
        ({"at": "tomorrow"}, "at='tomorrow'"),
        ({"at": True}, "at=True"),
        ({"at": float("nan")}, "at=nan"),
    ],
    ids=repr,
)
async def test_an_input_that_no_run_could_read_is_not_posted(store, odd, match):
    """It is refused before anything is posted, so that the run stays as good as it was."""
    agent = Agent(ScriptedModel("done"), store=store)
    run = await agent.submit("q")
    with pytest.raises(MisuseError, match=match):
        await agent.send(run.id, "x", **odd)
    assert await store.inbox(run.id) == ()
    assert (await agent.resume(run.id)).output == "done"


async def test_an_input_in_plain_words_is_what_it_says(store):
    """Texts stand for kinds and priorities, and a datetime for its seconds, in the store, too."""
    agent = Agent(ScriptedModel("done"), store=store)
    run = await agent.submit("q")
    at = datetime.now(UTC) + timedelta(hours=1)
    await agent.send(run.id, "x", kind="timer", priority="high", at=at)
    (row,) = await store.inbox(run.id)
    item: Any = row.item
    assert (item.kind, item.priority, item.due_at) == (InputKind.TIMER, Priority.HIGH, at.timestamp())
    assert isinstance(item.kind, InputKind)
    assert isinstance(item.priority, Priority)


@pytest.mark.parametrize("odd", [{"by": 3}, {"message": 3}], ids=repr)
async def test_who_says_something_is_a_text(store, odd):
    """A record that could not be read again is not written."""
    agent = Agent(ScriptedModel("done"), store=store)
    run = await agent.submit("q")
    for ask in (agent.pause, agent.cancel):
        with pytest.raises(MisuseError, match=r"=3\): give a string"):
            await ask(run.id, **odd)
    assert (await agent.resume(run.id)).output == "done"


# The agent.


class Bare:
    """A model that is none: its author has read that two attributes are enough."""

    name = "bare"

    async def reply(self, request: Request, emit: Emit | None = None) -> Reply:
        """Answer."""
        return Reply(text="x")


class Nameless(Model):
    """A model without a name."""

    async def reply(self, request: Request, emit: Emit | None = None) -> Reply:
        """Answer."""
        return Reply(text="x")


@pytest.mark.parametrize(
    ("model", "match"),
    [
        (None, "NoneType is not a model"),
        (ScriptedModel, r"ScriptedModel is a class.*write ScriptedModel\(\.\.\.\)"),
        (Bare(), "Bare is not a model, since it has no window_tokens.*subclass of agentfsm.ports.Model"),
        (Nameless(), "Nameless is not a model, since it has no name:"),
    ],
    ids=repr,
)
def test_what_is_no_model_is_refused(model, match):
    """It is said what it lacks, and what to give."""
    with pytest.raises(MisuseError, match=match):
        Agent(model)


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"store": "runs.db"}, r"Agent\(store='runs.db'\): give a store, for example SQLiteStore\('runs.db'\)"),
        ({"store": SQLiteStore}, r"Agent\(store=SQLiteStore\)"),
        ({"permissions": "write"}, r"Permissions\(level='write'\)"),
        ({"limits": {"turns": 3}}, r"Limits\(turns=3\)"),
        ({"settings": {"temperature": 0}}, r"Settings\(temperature=0\)"),
        ({"settings": Settings}, r"settings=Settings\): give Settings"),
        ({"last_answer": "no"}, r"last_answer='no'\): give True or False"),
        ({"instructions": None}, "one string"),
        ({"instructions": ["a", "b"]}, "one string"),
        ({"tools": search}, r"tools=\[search\]"),
        ({"tools": len}, r"tools=\[len\]"),
        ({"tools": "search"}, "tools"),
        ({"tools": None}, "tools"),
        ({"output_validators": print}, r"\[check\]"),
        ({"output_validators": None}, r"\[check\]"),
        ({"reflector": ScriptedModel()}, r"Reflector\(model=\.\.\.\)"),
        ({"reflector": "openai:gpt-4o"}, r"Reflector\(model=\.\.\.\)"),
        ({"selector": "all"}, "ToolSelector"),
        ({"clock": 3}, "Clock"),
        ({"name": 3}, "a string that is not empty"),
        ({"name": ""}, "a string that is not empty"),
        ({"version": 2}, "a string"),
        ({"new_id": "x"}, "a function"),
        ({"durability": "safe"}, "'full' or 'normal'"),
        ({"pause_before": None}, "expected a set of states; valid values: act, observe"),
        ({"pause_before": State.ACT}, "a set of states"),
        ({"pause_before": {"done"}}, "a run that is over cannot pause"),
        ({"context": None}, "not a context policy"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_field_of_a_wrong_type_is_refused(fields, match):
    """The agent is not made, and the error shows what to give."""
    with pytest.raises(MisuseError, match=match):
        Agent(ScriptedModel("x"), **fields)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"after": "run-id"}, r"await agent\.load\(run_id\)"),
        ({"user": 42}, r"start\(user=42\): give a string"),
        ({"session": 3}, r"session=3\): give a string that is not empty, or None"),
        ({"session": ""}, r"session=''\): give a string that is not empty"),
        ({"roles": "clerk"}, r"roles=\['clerk'\]"),
        ({"roles": 3}, r"roles=\[3\]"),
        ({"parent": "run-id"}, r"parent='run-id'\): give the run itself"),
        ({"settings": {"temperature": 0}}, r"Settings\(temperature=0\)"),
        ({"messages": "hello"}, "a list of messages"),
        ({"messages": 3}, "a list of messages"),
    ],
    ids=repr,
)
async def test_an_option_of_a_wrong_type_begins_no_run(store, options, match):
    """It is refused alike, whatever the store."""
    with pytest.raises(MisuseError, match=match):
        await Agent(ScriptedModel("x"), store=store).run("hello", **options)


async def test_none_stands_for_what_is_left_out():
    """All that `start` takes may be None, as its types say."""
    agent = Agent(ScriptedModel("x"))
    options: dict[str, Any] = dict.fromkeys(("id", "after", "session", "messages", "user", "settings", "metadata"))
    assert (await agent.run("hello", **options)).output == "x"
    assert agent.start("hello", settings=Settings(temperature=0.0)).header.history == ()


# Tools.


def test_an_agent_is_no_tool_by_itself():
    """It is made one by a word, which the error says."""
    other = Agent(ScriptedModel("x"), name="other")
    for tools in ([other], other):
        with pytest.raises(MisuseError, match=r"not Agent: write agent\.as_tool"):
            Agent(ScriptedModel("x"), tools=tools)


def test_an_agent_does_not_change():
    """What it is made of is read once: a field that is set would be obeyed by half of it."""
    agent = Agent(ScriptedModel())
    with pytest.raises(MisuseError, match=r"agent = agent\.with_\(instructions=\.\.\.\)"):
        agent.instructions = "Be brief."
    assert agent.instructions == ""
    assert agent.with_(instructions="Be brief.").instructions == "Be brief."


def test_tools_that_come_together_are_unpacked():
    """What `MCPServer.load` returns are several servers."""
    with pytest.raises(MisuseError, match=r"not tuple: unpack it, for example tools=\[\*MCPServer\.load"):
        Agent(ScriptedModel("x"), tools=[(search,)])


def test_two_agents_of_one_name_are_told_apart_where_they_become_tools():
    """The error shows the option that there is."""
    tools = [Agent(ScriptedModel("x")).as_tool(), Agent(ScriptedModel("y")).as_tool()]
    with pytest.raises(DuplicateToolError, match=r"with as_tool\(name='agent_2'\)"):
        Agent(ScriptedModel("x"), tools=tools)


# What functions and judges return.


async def test_what_is_no_verdict_is_said_to_be_none():
    """A judge of one's own is told what it has to return."""

    class Mine:
        model, answer_tokens = None, 100

        def wants(self, _run: object) -> bool:
            return True

        async def judge(self, _run: object, _ask: Any) -> Any:
            return True

    with pytest.raises(MisuseError, match=r"Mine\.judge returned bool: return a Verdict"):
        await Agent(ScriptedModel("x"), reflector=Mine()).run("hello")


async def test_what_are_no_settings_is_said_to_be_none():
    """So is a function that tells them for each turn."""
    told: Any = lambda _run: {"temperature": 0}  # noqa: E731  a function as users write it
    with pytest.raises(MisuseError, match=r"settings= returned dict: return Settings\(\.\.\.\)"):
        await Agent(ScriptedModel("x"), settings=told).run("hello")


async def test_a_function_model_speaks_lines_of_a_script():
    """What `say` makes is as good as a reply or a text; anything else is refused."""
    lines = iter([say("", call("search", query="x")), say("found")])
    run = await Agent(FunctionModel(lambda _request: next(lines)), tools=[search]).run("hello")
    assert (run.output, [record.name for record in run.calls]) == ("found", ["search"])
    odd: Any = lambda _request: 3  # noqa: E731  a function as users write it
    with pytest.raises(MisuseError, match=r"the function returned int: return a Reply, say\(\.\.\.\) or a text"):
        await Agent(FunctionModel(odd)).run("hello")


async def test_an_id_that_is_made_is_looked_at_like_one_that_is_given():
    """`new_id=uuid4` makes no texts: the run went its way under an id that nobody could load."""
    for made, match in ((uuid4, "must be a string, not UUID: give str"), (lambda: "", "1 to 200 printable")):
        odd_id: Any = made
        with pytest.raises(MisuseError, match=match):
            await Agent(ScriptedModel("x"), new_id=odd_id).run("hello")
    assert (await Agent(ScriptedModel("x"), new_id=lambda: str(uuid4())).run("hello")).is_over


# What is told in one line, and where.


@pytest.mark.parametrize("made", [Reflector, Summarise])
def test_a_name_is_no_model_below_the_agent(made):
    """What may not know the adapters says who does; what is a model is taken."""
    with pytest.raises(MisuseError, match=r"give agentfsm\.models\.resolve\('openai:gpt-4o'\)"):
        made(model="openai:gpt-4o")
    model = ScriptedModel()
    assert made(model=model).model is model


async def test_a_second_decision_is_told_what_the_first_one_was(store):
    """It names the call, the deed and who did it."""
    calls = [call("pay", cents=each) for each in (1, 2)]
    agent = Agent(ScriptedModel(say("", *calls)), tools=[pay], store=store)
    run = await agent.run("hello")
    await agent.approve(run.id, "t1.0", by="me")
    with pytest.raises(ConflictError, match=r": t1\.0 was approved already by 'me'$"):
        await agent.reject(run.id, "t1.0", by="you")
    await agent.reject(run.id, "t1.1", by="you")
    with pytest.raises(ConflictError, match=r": t1\.1 was rejected already by 'you'$"):
        await agent.approve(run.id, "t1.1")


@pytest.mark.parametrize("said", [False, True, "no"], ids=repr)
async def test_a_validator_does_not_answer_by_what_it_returns(said):
    """Nobody would hear it: it is told to raise; the value itself, and nothing, are as good as nothing."""
    agent = Agent(
        ScriptedModel(say("", call("final_answer", result=1))), output_type=int, output_validators=[lambda _: said]
    )
    with pytest.raises(MisuseError, match=rf"returned {said!r}: raise ModelRetry"):
        await agent.run("hello")
    for fine in (lambda value: value, lambda _value: None):
        model = ScriptedModel(say("", call("final_answer", result=1)))
        assert (await Agent(model, output_type=int, output_validators=[fine]).run("hello")).output == 1


async def test_an_answer_that_is_no_object_is_told_the_object():
    """A type that is none is wrapped, and the error shows how."""
    run = await Agent(ScriptedModel("[1]", "[1]", "[1]"), output_type=list[int]).run("hello")
    assert 'send one such as {"result": ...}' in run.messages[2].text


async def test_a_repr_is_one_line():
    """It says what a person looks for; values stay comparable."""
    agent = Agent(ScriptedModel(say("", call("pay", cents=1))), tools=[search, pay], name="clerk")
    run = await agent.run("hello", id="r1")
    assert repr(agent) == "<Agent clerk scripted, tools: search, pay>"
    assert repr(Agent(ScriptedModel())) == "<Agent agent scripted, tools: none>"
    assert repr(pay) == "<Tool pay(cents)>"
    assert repr(run) == "<Run r1 ACT, turn 1, waits for approval of pay (t1.0)>"
    assert repr(agent.start("x", id="r2")) == "<Run r2 OBSERVE, turn 0>"
    assert repr(await Agent(ScriptedModel("a")).run("x", id="r3")) == "<Run r3 DONE, turn 1, completed>"
    assert run == await agent.load("r1")


async def test_a_judge_of_ones_own_is_two_methods():
    """Which model it asks, and how long that answers, need not be said."""

    class Strict(Judge):
        def wants(self, run: Run) -> bool:
            return True

        async def judge(self, run: Run, ask: JudgeAsk) -> Verdict:
            said = await ask("Judge.", run.messages[-1].text, {"type": "object"})
            return Verdict(action=Action.ACCEPT if said == "fine" else Action.ESCALATE)

    run = await Agent(ScriptedModel("an answer", "fine"), reflector=Strict()).run("hello")
    assert run.output == "an answer"


@pytest.mark.parametrize("fault", [ValueError("odd"), None], ids=repr)
async def test_what_a_judge_has_cost_before_it_broke_is_kept(store, fault):
    """Its fault is raised; the run waits for a person, and knows what was paid."""

    class Broken(Judge):
        def wants(self, run: Run) -> bool:
            return True

        async def judge(self, run: Run, ask: JudgeAsk) -> Any:
            await ask("Judge.", "an answer", {"type": "object"})
            if fault is not None:
                raise fault

    usage = Usage(input_tokens=70, output_tokens=7)
    model = ScriptedModel("an answer", say("fine", usage=usage))
    agent = Agent(model, reflector=Broken(), store=store)
    with pytest.raises((ValueError, MisuseError), match=r"odd|return a Verdict"):
        await agent.run("hello", id="r1")
    run = await agent.resume("r1")
    assert run.usage.tokens >= usage.tokens
    (item,) = run.pending
    assert "It could not be judged" in item.description


def test_a_history_of_other_things_is_told_the_names():
    """The messages can be imported from where the error says."""
    odd: Any = [{"role": "user", "content": "x"}]
    with pytest.raises(MisuseError, match=r"\(UserMessage, AssistantMessage, SystemMessage, ToolResult\), not dict"):
        Agent(ScriptedModel()).start("x", messages=odd)
