"""Prompts as instructions of an agent: resolved once at the start of a run, and kept by the run."""

import pytest

from agentfsm import Agent, MisuseError, tool
from agentfsm.journal.diff import difference
from agentfsm.prompts import Prompts, PromptTemplate
from agentfsm.stores import MemoryStore
from agentfsm.testing import FunctionModel, call, say

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
