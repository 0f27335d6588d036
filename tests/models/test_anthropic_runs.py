"""Whole runs with `Anthropic`: calls in parallel, an error, thinking that survives a restart, and what each costs."""

import json
from itertools import pairwise

import anyio
import pydantic
import pytest

from agentfsm import Agent, Limits, MisuseError, Settings, State, StopReason, tool
from agentfsm.models import Anthropic, Fallback, Price, Throttled
from agentfsm.planning import Planner
from agentfsm.stores import SQLiteStore
from agentfsm.testing import LocalServer, WireReply, call, say
from agentfsm.testing.fake_llm.anthropic import SIGNATURE
from tests.support.model_wires import forget_keys
from tests.support.wire_rules import check_anthropic_body

THOUGHT = {"type": "thinking", "thinking": "Two cities.", "signature": SIGNATURE}
TALK = (
    WireReply(say("Let me see.", call("weather", city="Rome"), call("weather", city="?")), thinking="Two cities."),
    WireReply(say("", call("pay", amount=3)), thinking="Now pay."),
    say("Sunny, and paid."),
)
both_ways = pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch, tmp_path):
    forget_keys(monkeypatch, tmp_path)


@tool(read_only=True)
async def weather(city: str) -> str:
    """Tell the weather."""
    if city == "?":
        message = "no such city"
        raise ValueError(message)
    return "sunny"


@tool(requires_approval=True)
async def pay(amount: int) -> str:
    """Pay."""
    return f"paid {amount}"


def agent(server, store=None, *, streamed=False, limits=None):
    model = Anthropic("claude-opus-5", base_url=server.base_url, price=PRICE)
    settings = Settings(stream=streamed, reasoning_effort="high")
    tools = [weather, pay]
    options = {} if store is None else {"store": store}
    return Agent(model, tools=tools, instructions="Be brief.", settings=settings, limits=limits or Limits(), **options)


PRICE = Price(input_usd_per_million=5, output_usd_per_million=25)


@both_ways
async def test_a_run_is_gone_on_with_by_another_process_and_thinks_on(tmp_path, streamed):
    """What was thought before a pause is read from the disk and goes back whole, with arguments that a person gave."""
    pytest.importorskip("apsw")
    with LocalServer(TALK) as server:
        async with agent(server, SQLiteStore(tmp_path / "runs.db"), streamed=streamed) as first:
            waiting = await first.run("What is the weather?", id="trip")
            assert [item.tool for item in waiting.pending] == ["pay"]
        async with agent(server, SQLiteStore(tmp_path / "runs.db"), streamed=streamed) as second:
            await second.approve("trip", waiting.pending[0].call_id, arguments={"amount": 2})
            run = await second.resume("trip")
    assert run.output == "Sunny, and paid."
    bodies = [received.body for received in server.requests]
    for body in bodies:
        check_anthropic_body(body)
        assert (body["thinking"], body["output_config"]) == ({"type": "adaptive"}, {"effort": "high"})
    last = bodies[-1]["messages"]
    assert [message["role"] for message in last] == ["user", "assistant", "user", "assistant", "user"]
    assert last[1]["content"] == [
        THOUGHT,
        {"type": "text", "text": "Let me see."},
        {"type": "tool_use", "id": "t1-d0", "name": "weather", "input": {"city": "Rome"}},
        {"type": "tool_use", "id": "t1-d1", "name": "weather", "input": {"city": "?"}},
    ]
    assert [block.get("is_error", False) for block in last[2]["content"]] == [False, True]
    assert last[3]["content"] == [
        {"type": "thinking", "thinking": "Now pay.", "signature": SIGNATURE},
        {"type": "tool_use", "id": "t2-d0", "name": "pay", "input": {"amount": 2}},
    ]


@both_ways
async def test_each_request_says_again_what_the_one_before_said(streamed):
    """So that the provider reads it from its cache: message by message, but for the marks."""
    talk = [WireReply(say("", *[call("weather", city=str(n))] * 3), thinking="Hm.") for n in range(4)]
    with LocalServer([*talk, say("done")]) as server:
        async with agent(server, streamed=streamed) as asking:
            await asking.run("go")
    bodies = [received.body for received in server.requests]
    assert len(bodies) == 5
    for before, after in pairwise(bodies):
        count = len(before["messages"])
        assert without_marks(after["messages"][:count]) == without_marks(before["messages"])
        assert after["system"] == before["system"]
        assert after["tools"] == before["tools"]
        # The mark at the end of the one is the second last of the other.
        assert "cache_control" in before["messages"][-1]["content"][-1]
        assert "cache_control" in after["messages"][count - 1]["content"][-1]


def without_marks(messages):
    return [
        [{key: value for key, value in block.items() if key != "cache_control"} for block in message["content"]]
        for message in messages
    ]


async def test_a_model_without_tools_goes_on_with_a_run_that_had_some():
    """Another agent takes the conversation over, and the provider takes its calls."""
    with LocalServer([TALK[0], say("Sunny."), say("Short: sunny.")]) as server:
        async with agent(server) as asking:
            run = await asking.run("What is the weather?")
        model = Anthropic("claude-opus-5", base_url=server.base_url)
        async with Agent(model) as summing:
            short = await summing.run("Shorter.", messages=run.messages)
    assert short.output == "Short: sunny."
    check_anthropic_body(server.requests[-1].body)
    assert server.requests[-1].body["tool_choice"] == {"type": "none"}


async def test_what_a_run_costs_takes_in_the_cache():
    """Tokens read from the cache are part of the input."""
    usage = {"input_tokens": 100, "cache_read_input_tokens": 900, "output_tokens": 10}
    with LocalServer([WireReply("x", usage=usage)]) as server:
        async with agent(server, limits=Limits(usd=1.0)) as asking:
            run = await asking.run("go")
    assert (run.usage.input_tokens, run.usage.cached_tokens) == (1_000, 900)
    assert run.usage.cost_usd == pytest.approx((1_000 * 5 + 10 * 25) / 1e6)


@both_ways
async def test_an_overload_is_waited_out(streamed):
    """Also one that comes in the middle of a stream, with status 200."""
    error = '{"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}'
    torn = WireReply(raw=f"event: error\ndata: {error}\n\n") if streamed else WireReply(status=529)
    with LocalServer([torn, say("done")]) as server:
        async with agent(server, streamed=streamed, limits=Limits(retry_wait_s=0.001)) as asking:
            with anyio.fail_after(30):
                assert (await asking.run("go")).output == "done"


async def test_an_answer_that_a_filter_cut_off_is_no_answer():
    """The run ends with the reason, and nothing that was said until then is taken for its output."""
    with LocalServer([WireReply("First, take", refusal="Not this.")]) as server:
        async with agent(server) as asking:
            run = await asking.run("go")
    assert "content filter" in run.stop_message
    assert run.state is State.ERROR


# What the API answers with 400


class Tree(pydantic.BaseModel):
    label: str
    children: list["Tree"] = []


GROWN = {"result": {"label": "oak", "children": [{"label": "leaf", "children": []}]}}
THINKS = Settings(extra_body={"thinking": {"type": "enabled", "budget_tokens": 4096}})


@pytest.mark.parametrize("wrapped", [None, Throttled, Fallback])
async def test_an_answer_that_holds_its_own_kind_is_asked_for_as_a_call(wrapped):
    """Anthropic holds no model to a schema that refers to itself: the next way is taken; asking for it is an error."""
    with LocalServer([say("", call("final_answer", **GROWN))]) as server:
        model = Anthropic("claude-opus-5", base_url=server.base_url)
        if wrapped is not None:
            model = Fallback(model, model) if wrapped is Fallback else Throttled(model, concurrency=1)
        async with Agent(model, output_type=Tree) as grower:
            run = await grower.run("Draw the tree.")
        await model.aclose()
        with pytest.raises(MisuseError, match="does not support recursive schemas; leave output_mode out"):
            Agent(model, output_type=Tree, output_mode="schema")
    assert run.output == Tree(label="oak", children=[Tree(label="leaf")])
    body = server.requests[0].body
    assert ("output_config" in body, [each["name"] for each in body["tools"]]) == (False, ["final_answer"])
    assert body["tool_choice"] == {"type": "any"}


async def test_a_model_that_is_told_to_think_is_not_forced_to_call():
    """Thinking may not be enabled when tool_choice forces tool use, however it was enabled."""
    with LocalServer([say("", call("final_answer", result={"1": 2}))]) as server:
        model = Anthropic("claude-opus-5", base_url=server.base_url)
        async with Agent(model, output_type=dict[int, int], settings=THINKS) as counter:
            assert (await counter.run("Count.")).output == {1: 2}
        await model.aclose()
    body = server.requests[0].body
    assert (body["thinking"]["type"], "tool_choice" in body) == ("enabled", False)


@pytest.mark.parametrize(
    ("limits", "reason"),
    [(Limits(tokens=4_000), StopReason.TOKEN_BUDGET), (Limits(usd=0.1), StopReason.COST_BUDGET)],
)
async def test_a_budget_that_leaves_no_more_than_the_thinking_is_used_up(limits, reason):
    """`max_tokens` must be greater than `thinking.budget_tokens`: a cap below that is not sent."""
    with LocalServer([]) as server:
        thinker = Agent(Anthropic("m", base_url=server.base_url, price=PRICE), settings=THINKS, limits=limits)
        run = await thinker.run("Think.")
        await thinker.model.aclose()
    assert (run.stop_reason, server.requests) == (reason, ())


async def test_a_budget_that_leaves_more_than_the_thinking_caps_the_answer():
    """By one token at least."""
    settings = Settings(max_tokens=8_000, extra_body=THINKS.extra_body)
    with LocalServer([say("So.")]) as server:
        thinker = Agent(
            Anthropic("m", base_url=server.base_url), settings=settings, limits=Limits(tokens=4_200), instructions="x"
        )
        assert (await thinker.run("Think.")).output == "So."
        await thinker.model.aclose()
    assert 4_096 < server.requests[0].body["max_tokens"] < 4_200


async def test_a_plan_and_a_reminder_between_thoughts():
    """The results of steps come as a note of the user's side, so each thought stays with the call that it led to."""
    steps = [{"id": n, "tool": "weather", "arguments": {"city": city}} for n, city in enumerate(("Rome", "Oslo"), 1)]
    script = (
        WireReply(say(json.dumps({"steps": steps}))),
        WireReply(say("", call("weather", city="Bergen")), thinking="One more."),
        WireReply(say("Sunny everywhere."), thinking="Done."),
        WireReply(say('{"steps": []}')),
        say("Yes."),
    )
    with LocalServer(script) as server:
        model = Anthropic("claude-opus-5", base_url=server.base_url, price=PRICE)
        settings = Settings(reasoning_effort="high")
        planned = Agent(
            model, tools=[weather], planner=Planner(), settings=settings, reminder=lambda r: f"Turn {r.turn}."
        )
        run = await planned.run("Where is it sunny?")
        again = await planned.run("Sure?", after=run)
        bodies = [request.body for request in server.requests]
        await model.aclose()
    assert (run.output, again.output) == ("Sunny everywhere.", "Yes.")
    for body in bodies:
        check_anthropic_body(body)
    first, second, last = bodies[1], bodies[2], bodies[4]
    assert [block["type"] for block in first["messages"][0]["content"]] == ["text", "text", "text"]
    assert "[Plan] Results" in first["messages"][0]["content"][1]["text"]
    assert second["messages"][1]["content"][0] == {**THOUGHT, "thinking": "One more."}
    asked = [
        block["id"]
        for body in bodies
        for each in body["messages"]
        for block in each["content"]
        if isinstance(block, dict) and block["type"] == "tool_use"
    ]
    assert not [each for each in asked if each.startswith("p")]
    assert last["messages"][1]["content"][0] == {**THOUGHT, "thinking": "One more."}
