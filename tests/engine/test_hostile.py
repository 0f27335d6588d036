"""Replies and prompts that no sane model or person writes: each has a place, and the history stays valid."""

from __future__ import annotations

import json

import anyio
import pytest

from agentfsm import Agent, AssistantMessage, Limits, ModelUnavailableError, Outcome, StopReason, TextPart, Usage, tool
from agentfsm.ports import Emit, FinishReason, Model, ProposedCall, Reply, Request
from agentfsm.ports.model import MAX_REPLY_CALLS
from agentfsm.stores import MemoryStore
from agentfsm.testing import FunctionModel, ScriptedModel, call, fail, say
from tests.support.checks import HANG_S, calls_of, results_of, sound

SURROGATE = "\ud83d"


@tool(read_only=True)
async def look(at: str = "") -> str:
    """Look."""
    return f"saw {at}"


@tool
async def pay(cents: int = 0) -> str:
    """Pay."""
    return f"paid {cents}"


def proposing(*calls: ProposedCall, text: str = "", **options: object) -> FunctionModel:
    """A model that proposes these calls once, and then is done."""

    def answer(request: Request) -> Reply:
        if len(request.messages) > 1:
            return Reply(text="done")
        return Reply(text=text, calls=calls, **options)

    return FunctionModel(answer)


async def test_half_characters_in_a_reply_are_replaced(store):
    """What the model wrote goes back on the wire, and no wire takes half of a pair."""
    model = proposing(
        ProposedCall(id=f"x{SURROGATE}", name=f"look{SURROGATE}", arguments=f'{{"at": "{SURROGATE}"}}'),
        text=f"let me {SURROGATE} look",
    )
    agent = Agent(model, tools=[look], store=store)
    run = await agent.run("go")
    assert run.output == "done"
    for message in run.messages:
        message.text.encode()
    for asked in calls_of(run.messages):
        json.dumps([asked.id, asked.name, asked.arguments, asked.provider_id], ensure_ascii=False).encode()
    await sound(agent, run)


async def test_half_characters_in_a_prompt_are_replaced(store):
    """The same for what a user says, at the start and later, and the id still finds the run."""
    agent = Agent(FunctionModel(lambda r: f"re: {r.messages[-1].text.encode().decode()}"), store=store)
    run = await agent.run(f"one {SURROGATE}", id="mine")
    assert run.output.startswith("re: one ")
    assert await agent.run(f"one {SURROGATE}", id="mine") == run
    other = await agent.step(agent.start([TextPart(text=f"two {SURROGATE}")], metadata={"a": SURROGATE}))
    await agent.send(other.id, f"three {SURROGATE}")
    done = await agent.finish(other)
    assert done.output.startswith("re: three ")
    await sound(agent, done)


async def test_the_same_provider_id_twice_makes_two_calls(store):
    """Our own ids tell them apart."""
    same = ProposedCall(id="same", name="pay", arguments='{"cents": 1}')
    agent = Agent(proposing(same, same, ProposedCall(id="", name="pay", arguments="{}")), tools=[pay], store=store)
    run = await agent.run("go")
    assert [asked.id for asked in calls_of(run.messages)] == ["t1.0", "t1.1", "t1.2"]
    assert len({asked.key for asked in calls_of(run.messages)}) == 3
    assert [result.outcome for result in results_of(run.messages)] == [Outcome.DONE] * 3
    await sound(agent, run)


PLENTY = Limits(seconds=10_000, tokens=10_000_000, tool_calls=3_000)


async def test_hundreds_of_calls_in_one_reply(store):
    """They are run, a few at a time, and each has its result."""
    calls = [ProposedCall(id="x", name="look", arguments=f'{{"at": "{n}"}}') for n in range(MAX_REPLY_CALLS)]
    agent = Agent(proposing(*calls), tools=[look], store=store, limits=PLENTY)
    with anyio.fail_after(6 * HANG_S):
        run = await agent.run("go")
    assert run.output == "done"
    assert [result.content for result in results_of(run.messages)] == [f"saw {n}" for n in range(MAX_REPLY_CALLS)]


async def test_calls_win_over_a_finish_reason_that_contradicts_them(store):
    """Text and calls together are a turn with calls, whatever the provider says about its end."""
    for reason in (FinishReason.STOP, FinishReason.TOOL_CALLS):
        model = proposing(ProposedCall(id="x", name="look", arguments="{}"), text="Looking.", finish_reason=reason)
        run = await Agent(model, tools=[look], store=store).run("go")
        assert run.output == "done"
        assert run.messages[1].text == "Looking."


async def test_calls_that_were_cut_off_are_told_as_broken(store):
    """A reply cut inside the arguments runs what is whole, and answers what is not with the reason."""
    model = proposing(
        ProposedCall(id="a", name="pay", arguments='{"cents": 5}'),
        ProposedCall(id="b", name="pay", arguments='{"cents": 50'),
        finish_reason=FinishReason.LENGTH,
    )
    agent = Agent(model, tools=[pay], store=store)
    run = await agent.run("go")
    assert [result.outcome for result in results_of(run.messages)] == [Outcome.DONE, Outcome.FAILED]
    assert "EOF" in results_of(run.messages)[1].content
    await sound(agent, run)


@pytest.mark.parametrize("text", ["", "\n{}\n"])
async def test_a_call_that_was_cut_off_before_its_arguments_does_not_run_by_its_defaults(store, text):
    """What the model would have chosen is not known; of a reply that is whole, no arguments are as good as none."""
    erased = []

    @tool
    async def erase(path: str = "/") -> str:
        """Erase."""
        erased.append(path)
        return "erased"

    cut = ProposedCall(id="b", name="erase", arguments=text)
    whole = ProposedCall(id="a", name="erase", arguments=text)
    model = proposing(whole, cut, finish_reason=FinishReason.LENGTH)
    agent = Agent(model, tools=[erase], store=store)
    run = await agent.run("go")
    assert erased == ["/"]
    assert "cut off at the length limit" in results_of(run.messages)[1].content
    await sound(agent, run)


async def test_calls_that_a_content_filter_cut_off_do_not_run(store):
    """The provider took the reply back: it ends the run as an answer does that it filters."""
    model = proposing(
        ProposedCall(id="a", name="pay", arguments='{"cents": 5}'),
        text="Let me pay.",
        finish_reason=FinishReason.CONTENT_FILTER,
    )
    agent = Agent(model, tools=[pay], store=store)
    run = await agent.run("go")
    assert run.stop_reason is StopReason.MODEL_ERROR
    assert "content filter" in run.stop_message
    assert run.messages[-1] == AssistantMessage(text="Let me pay.")
    await sound(agent, run)


async def test_a_refusal_is_an_answer(store):
    """What the model says instead of an answer is what it says."""
    agent = Agent(ScriptedModel(say("I cannot help with that.", finish_reason=FinishReason.REFUSAL)), store=store)
    assert (await agent.run("go")).output == "I cannot help with that."


# What failed attempts cost


async def test_wasted_replies_count_when_the_turn_falters(store):
    """Two empty replies were paid for, although in the end the model could not be reached."""
    empty = say("", usage=Usage(input_tokens=100, output_tokens=1))
    model = ScriptedModel(empty, empty, fail(ModelUnavailableError("529", status=529)), "done")
    limits = Limits(model_retries=2, retry_wait_s=1e-9)
    run = await Agent(model, limits=limits, store=store).run("go")
    assert run.output == "done"
    assert run.usage.tokens == 2 * 101 + 15


async def test_wasted_replies_of_one_error_object_are_not_counted_twice(store):
    """A reply that is empty three times over costs three times, and no more."""
    empty = say("", usage=Usage(input_tokens=100, output_tokens=0))
    limits = Limits(model_retries=3, retry_wait_s=1e-9)
    run = await Agent(ScriptedModel(empty, empty, empty, "done"), limits=limits, store=store).run("go")
    assert run.usage.tokens == 3 * 100 + 15


class Priced(Model):
    """A model at one US dollar per thousand tokens, whose every other reply is empty."""

    name = "priced"
    asked = 0

    async def reply(self, request: Request, emit: Emit | None = None) -> Reply:
        """Answer, or not."""
        self.asked += 1
        calls = (ProposedCall(id="x", name="look", arguments=f'{{"at": "{self.asked}"}}'),)
        usage = Usage(input_tokens=1_000, output_tokens=0)
        return Reply(usage=usage) if self.asked % 2 else Reply(calls=calls, usage=usage)

    def cost_usd(self, usage: Usage) -> float:
        """Tell the price."""
        return usage.tokens / 1_000


async def test_wasted_replies_cost_money_too(store):
    """The budget counts what was paid, not only what was usable."""
    limits = Limits(usd=6.5, retry_wait_s=1e-9)
    run = await Agent(Priced(), tools=[look], limits=limits, store=store).run("go")
    assert run.stop_reason is StopReason.COST_BUDGET
    assert run.usage.cost_usd == pytest.approx(6.0)  # the first has shown that the seventh would be too dear
    assert run.turn == 3


async def test_usage_beyond_all_bounds_is_a_number(store):
    """A provider that claims the impossible ends the run, and the store holds the figure."""
    huge = Usage(input_tokens=10**30, output_tokens=0)
    agent = Agent(ScriptedModel(say("", call("look"), usage=huge)), tools=[look], store=store)
    run = await agent.run("go")
    assert run.stop_reason is StopReason.TOKEN_BUDGET
    assert (await agent.load(run.id)).usage.tokens == 10**30


def test_an_agent_can_be_used_from_many_event_loops_in_turn():
    """Each `run_sync` has a loop of its own; nothing of the first is used in the second."""
    agent = Agent(ScriptedModel(*["done"] * 20), store=MemoryStore())
    assert {agent.run_sync("go").output for _ in range(20)} == {"done"}
