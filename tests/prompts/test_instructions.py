"""Prompts as instructions of an agent: resolved once at the start of a run, and kept by the run."""

from functools import wraps

import pytest
from anyio.lowlevel import checkpoint

from agentfsm import Agent, MisuseError, RunContext, RunNotFoundError, difference, tool
from agentfsm.prompts import Layer, Prompts, PromptTemplate, assemble, compose
from agentfsm.stores import MemoryStore
from agentfsm.testing import FunctionModel, ScriptedModel, call, say

WHO = {"by": "ann", "why": "test"}


class Seen:
    """A model that keeps the instructions of its requests: it calls `look` once, and answers."""

    def __init__(self):
        self.instructions = []
        self.model = FunctionModel(self.reply)

    def reply(self, request):
        self.instructions.append(request.instructions)
        is_first = len([each for each in request.messages if hasattr(each, "calls")]) == 0
        return say("", call("look")) if is_first else say("done")


@pytest.fixture
def prompts(tmp_path):
    """Two versions of a prompt."""
    (tmp_path / "billing").mkdir()
    for version in ("1.0", "2.0"):
        (tmp_path / "billing" / f"{version}.md").write_text(f"+++\n+++\nVersion {version}.")
    return Prompts(tmp_path)


@tool(read_only=True)
def look() -> str:
    """Look up an invoice."""
    return "17"


async def test_a_moved_label_changes_no_run_in_flight(prompts):
    """The next turn, a resume by another agent and a replay use the text of the start; a new run the new version."""
    seen, store = Seen(), MemoryStore()
    agent = Agent(seen.model, tools=[look], instructions=prompts["billing"], store=store)
    prompts.activate("billing", "1.0", **WHO)
    run = agent.start("What do I owe?")
    while not seen.instructions:
        run = await agent.step(run)
    prompts.activate("billing", "2.0", **WHO)
    again = Agent(seen.model, tools=[look], instructions=prompts["billing"], store=store)
    old = await again.resume(run.id)
    assert seen.instructions == ["Version 1.0."] * 2
    assert (await again.replay(run.id)).is_faithful
    assert old.header.instructions == "Version 1.0."
    assert old.fingerprint is None, "the agent has not changed for this run"
    new = await again.run("What do I owe?")
    assert seen.instructions[2:] == ["Version 2.0."] * 2
    assert new.header.fingerprint.prompts == {"billing": prompts["billing", "2.0"].reference.partition("@")[2]}
    words = " ".join(difference(old, new).agent)
    assert "prompt billing 1.0#" in words
    assert "-> 2.0#" in words


async def test_a_function_of_the_header(prompts):
    """It is asked once, with the user and the metadata of the run."""
    greeting = PromptTemplate(name="hi", version="1.0", text="Hello {{user}}.", variables={"user": "untrusted"})
    seen, asked = Seen(), []

    def choose(header):
        asked.append((header.user, header.metadata))
        return greeting.render(user=header.user)

    agent = Agent(seen.model, tools=[look], instructions=choose)
    run = await agent.run("Hi", user="ann", metadata={"plan": "free"})
    assert asked == [("ann", {"plan": "free"})]
    assert seen.instructions == [str(greeting.render(user="ann"))] * 2
    assert run.header.fingerprint.prompts == {"hi": f"1.0#{greeting.digest}"}
    fork = await agent.fork(run.id, at=1)
    assert fork.header.instructions == run.header.instructions


async def test_an_assembled_prompt_is_the_request_of_an_agent():
    """As it stands, or for each run; within its budget, and with the versions of its prompts."""
    role = PromptTemplate(name="role", version="1.0", text="You help {{user}}.", variables={"user": "text"})

    def of(header):
        layers = compose({"Role": role}, user=header.user)
        return assemble([*layers, Layer(title="Known", text="Ann pays by card.\n" * 500)], budget=300)

    seen = Seen()
    agent = Agent(seen.model, tools=[look], instructions=of)
    run = await agent.run("Hi", user="Ann")
    made = of(run.header)
    assert [each.title for each in made.shortened] == ["Known"]
    assert (await agent.with_(instructions=made).run("Hi")).header.fingerprint.prompts == {"role": f"1.0#{role.digest}"}
    assert run.header.fingerprint.prompts == {"role": f"1.0#{role.digest}"}
    assert seen.instructions == [made] * 4
    assert type(run.header.instructions) is str


async def test_a_run_of_another_version_of_the_agent(prompts):
    """A run that recorded no instructions gets those of the agent that goes on with it, and records the change."""
    seen, store = Seen(), MemoryStore()
    before = Agent(seen.model, tools=[look], instructions="Plain.", store=store)
    run = before.start("Hi")
    while not seen.instructions:
        run = await before.step(run)
    ended = await before.with_(instructions=prompts["billing"]).resume(run.id)
    assert seen.instructions == ["Plain.", "Version 2.0."]
    assert "billing" in ended.fingerprint.prompts


async def test_the_form_of_the_answer_is_added():
    """As it is to text."""
    seen = Seen()
    model = FunctionModel(lambda request: seen.instructions.append(request.instructions) or say("1"))
    await Agent(model, instructions=lambda _header: "Count.", output_type=int, output_mode="prompt").run("?")
    assert seen.instructions[0].startswith("Count.\n\n")


def of_context(ctx: RunContext[dict[str, str]]) -> str:
    """Greet the person of the context."""
    return f"{ctx.deps['greeting']} {ctx.user}."


async def of_both(ctx: RunContext[dict[str, str]], header) -> str:
    """Greet the person of the header, after a wait."""
    await checkpoint()
    return f"{ctx.deps['greeting']} {header.user}."


async def of_header(header) -> str:
    """Greet the person, after a wait."""
    await checkpoint()
    return f"Hello {header.user}."


@pytest.mark.parametrize("instructions", [of_context, of_both, of_header])
@pytest.mark.parametrize("way", ["run", "submit", "fork"])
async def test_functions_of_the_context_are_resolved_once_before_the_run_is_stored(instructions, way):
    """Also async ones; later turns, a resume and a replay have the text that the run recorded."""
    seen, asked, deps = Seen(), [], {"greeting": "Hello"}

    @wraps(instructions)
    async def note(*given):
        asked.append(given)
        text = instructions(*given)
        return text if isinstance(text, str) else await text

    agent = Agent(seen.model, tools=[look], instructions=note)
    if way == "run":
        run = await agent.run("Hi", user="ann", deps=deps)
    else:
        run = await agent.submit("Hi", user="ann", deps=deps)
        if way == "fork":
            run = await agent.fork(run.id, deps=deps)
            assert len(asked) == 2
        run = await agent.resume(run.id)
    assert (run.header.instructions, seen.instructions) == ("Hello ann.", ["Hello ann."] * 2)
    assert len(asked) == (2 if way == "fork" else 1)
    assert run.fingerprint is None
    assert (await agent.replay(run.id)).is_faithful


async def test_a_sub_agent_asks_with_the_context_of_its_own_run():
    """With the dependencies of its caller."""
    seen, deps = Seen(), {"greeting": "Hello"}
    inner = Agent(seen.model, tools=[look], instructions=of_context, name="inner")
    outer = Agent(
        FunctionModel(lambda r: say("", call("inner", query="go")) if len(r.messages) == 1 else say("done")),
        tools=[inner.as_tool(description="Help.")],
    )
    await outer.run("Hi", user="ann", deps=deps)
    assert seen.instructions == ["Hello ann."] * 2


async def test_an_async_function_for_a_run_of_another_version_of_the_agent():
    """It is asked in each execution, since the run has recorded no instructions."""
    seen, store = Seen(), MemoryStore()
    before = Agent(seen.model, tools=[look], instructions="Plain.", store=store)
    run = before.start("Hi", user="ann")
    while not seen.instructions:
        run = await before.step(run)
    await before.with_(instructions=of_both).resume(run.id, deps={"greeting": "Hello"})
    assert seen.instructions == ["Plain.", "Hello ann."]


async def test_an_async_function_that_returns_no_text():
    """Nothing is stored."""

    async def nothing(_header):
        return None

    agent = Agent(FunctionModel(lambda _request: say("x")), instructions=nothing)
    with pytest.raises(MisuseError, match="returned NoneType: return text"):
        await agent.run("Hi", id="r")
    with pytest.raises(RunNotFoundError):
        await agent.load("r")


@pytest.mark.parametrize(
    ("instructions", "message"),
    [
        (PromptTemplate(name="a", version="1", text="{{x}}", variables={"x": "text"}), r"render\(x=...\)"),
        (lambda _header: None, "returned NoneType: return text"),
    ],
)
def test_instructions_that_cannot_be_resolved(instructions, message):
    """At start, before the run is stored."""
    with pytest.raises(MisuseError, match=message):
        Agent(FunctionModel(lambda _request: say("x")), instructions=instructions).start("Hi")


@pytest.mark.parametrize("wrong", [3, None, str])
def test_other_values_are_refused(wrong):
    """When the agent is made."""
    with pytest.raises(MisuseError, match="instructions="):
        Agent(FunctionModel(lambda _request: say("x")), instructions=wrong)


async def test_a_function_without_parameters_gives_the_text():
    """For instructions and reminders."""
    agent = Agent(model := ScriptedModel("Hi."), instructions=lambda: "Be brief.", reminder=lambda: "It is late.")
    await agent.run("hello")
    [request] = model.requests
    assert (request.instructions, request.messages[-1].text) == ("Be brief.", "It is late.")
