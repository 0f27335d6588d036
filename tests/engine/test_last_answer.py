"""What a run that a limit stopped hands back: `run.partial`, and with `last_answer=True` one last answer."""

from __future__ import annotations

import anyio
import attrs
import pytest

from agentfsm import (
    Agent,
    AssistantMessage,
    Limits,
    ModelRetry,
    ModelUnavailableError,
    Outcome,
    Run,
    State,
    StopReason,
    Usage,
    tool,
)
from agentfsm.core.events import Failed, LimitReached, ModelFaltered
from agentfsm.core.stops import find_reached_limit
from agentfsm.ports import Emit, Model, ProposedCall, Reply, Request
from agentfsm.testing import FunctionModel, ScriptedModel, call, fail, say
from tests.support.checks import results_of, sound, sound_run, texts, virtually

SO_FAR = "So far: three of five. Two are missing."


@tool(read_only=True)
async def look(at: int = 0) -> str:
    """Look."""
    return f"saw {at}"


@tool(read_only=True)
async def broken(at: int = 0) -> str:
    """Break."""
    raise RuntimeError(f"broken at {at}")


@tool
async def hang(at: int = 0) -> str:
    """Never end."""
    await anyio.sleep_forever()
    return "never"


class Working(Model):
    """Calls a tool as long as it is offered one, at 600 tokens and 600 micro-dollars a reply, then says what it has."""

    name = "working"

    def __init__(self, calls: str = "look") -> None:
        """Take the name of the tool."""
        self.calls = calls
        self.requests: list[Request] = []

    async def reply(self, request: Request, emit: Emit | None = None) -> Reply:
        """Call, or answer."""
        self.requests.append(request)
        usage = Usage(input_tokens=500, output_tokens=100)
        if not request.tools:
            return Reply(text=SO_FAR, usage=usage)
        arguments = f'{{"at": {len(self.requests)}}}'
        return Reply(calls=(ProposedCall(id="c", name=self.calls, arguments=arguments),), usage=usage)

    def cost_usd(self, usage: Usage) -> float:
        """A dollar for a million tokens."""
        return usage.tokens / 1_000_000


def ended(run: Run, reason: StopReason, turns: int) -> None:
    """Fail unless the run ended for that reason with the last answer in hand, within that many turns."""
    sound_run(run)
    assert (run.state, run.stop_reason, run.partial, run.turn) == (State.ERROR, reason, SO_FAR, turns)
    assert run.stop_message.endswith("its last answer is in run.partial")


@pytest.mark.parametrize(
    ("calls", "limits", "reason", "turns"),
    [
        ("look", {"turns": 4}, StopReason.MAX_TURNS, 4),
        ("look", {"tokens": 4_000}, StopReason.TOKEN_BUDGET, 5),
        ("look", {"usd": 0.004}, StopReason.COST_BUDGET, 5),
        ("look", {"tool_calls": 3}, StopReason.TOOL_BUDGET, 4),
        ("broken", {"errors": 2}, StopReason.TOO_MANY_ERRORS, 3),
    ],
)
async def test_every_limit_leaves_room_for_a_last_answer(store, calls, limits, reason, turns):
    """It is asked for without tools, the reason stays the limit's, and no limit is exceeded by it."""
    model = Working(calls)
    agent = Agent(model, tools=[look, broken], limits=Limits(**limits), store=store, last_answer=True)
    run = await agent.run("look around")
    ended(run, reason, turns)
    bounds = agent.limits
    assert run.turn <= bounds.turns
    assert run.usage.tokens <= bounds.tokens
    assert bounds.usd is None or (run.usage.cost_usd or 0.0) <= bounds.usd
    assert [bool(request.tools) for request in model.requests] == [*[True] * (turns - 1), False]
    told = texts(model.requests[-1])
    assert f"This run has to stop ({reason}). This is your last reply" in told
    *_, reached, _, failed = await agent.history(run.id)
    assert isinstance(reached, LimitReached)
    assert isinstance(failed, Failed)
    assert (reached.reason, failed.reason) == (reason, reason)
    await sound(agent, run)


async def test_a_run_of_one_turn_keeps_none_back(store):
    """Where there is one turn it is for the work."""
    model = Working()
    run = await Agent(model, tools=[look], limits=Limits(turns=1), store=store, last_answer=True).run("look")
    assert (run.stop_reason, run.turn, len(model.requests)) == (StopReason.MAX_TURNS, 1, 1)
    assert model.requests[0].tools


def test_time_is_kept_back_from_the_start():
    """A call that hangs is cut off a fifth before the end, closed in the history, and the model says what it has."""

    async def story(store, clock) -> tuple[Run, list[Request]]:
        model = Working("hang")
        agent = Agent(model, tools=[hang], limits=Limits(seconds=20), store=store, clock=clock, last_answer=True)
        run = await agent.run("look")
        await sound(agent, run)
        return run, model.requests

    run, requests = virtually(story)
    ended(run, StopReason.TIMEOUT, 2)
    assert run.duration_s == pytest.approx(16.0)
    assert [result.outcome for result in results_of(run.messages)] == [Outcome.UNKNOWN]
    assert "the effect may have happened" in texts(requests[-1])


def test_a_last_answer_that_is_too_slow_ends_within_the_limit():
    """Its own time ends with the limit of the run, and the first reason stands."""

    async def answer(request: Request) -> Reply:
        if not request.tools:
            await anyio.sleep_forever()
        return Reply(text="Let me see.", calls=(ProposedCall(id="c", name="look", arguments="{}"),))

    async def story(store, clock) -> Run:
        limits = Limits(seconds=20, turns=2)
        agent = Agent(FunctionModel(answer), tools=[look], limits=limits, store=store, clock=clock, last_answer=True)
        run = await agent.run("look")
        await sound(agent, run)
        return run

    run = virtually(story)
    assert (run.stop_reason, run.partial) == (StopReason.MAX_TURNS, "Let me see.")
    assert run.stop_message.endswith("no last answer came within 20.0 seconds")
    assert run.duration_s == pytest.approx(20.0)


FLAWS = {
    "away": lambda: fail(ModelUnavailableError("the server is away")),
    "empty": lambda: say(""),
    "calls": lambda: say("", call("look")),
}


@pytest.mark.parametrize("flaw", FLAWS)
async def test_a_last_answer_that_fails_ends_with_the_first_reason(store, flaw):
    """It is asked for once, without retries: the limit is what ended the run."""
    model = ScriptedModel(say("One moment.", call("look")), FLAWS[flaw]())
    agent = Agent(model, tools=[look], limits=Limits(turns=2), store=store, last_answer=True)
    run = await agent.run("look")
    assert (run.state, run.stop_reason, run.partial) == (State.ERROR, StopReason.MAX_TURNS, "One moment.")
    assert run.stop_message.startswith("1 of 2 turns used")
    assert len(model.requests) == 2
    assert len(run.calls) == 1
    assert isinstance((await agent.history(run.id))[-2], ModelFaltered)
    await sound(agent, run)


async def test_a_budget_that_results_have_used_up_ends_without_one(store):
    """What the calls of the turn brought may leave no room: the limit is kept all the same."""

    @tool(read_only=True)
    async def read() -> str:
        """Read a long text."""
        return "word " * 4_000

    model = ScriptedModel(say("Reading.", call("read")))
    agent = Agent(model, tools=[read], limits=Limits(tokens=3_000), store=store, last_answer=True)
    run = await agent.run("read it")
    assert (run.stop_reason, run.partial, len(model.requests)) == (StopReason.TOKEN_BUDGET, "Reading.", 1)
    assert "no room was left for a last answer" in run.stop_message
    await sound(agent, run)


async def test_another_process_asks_for_the_last_answer(store):
    """That a limit was reached is in the journal: whoever goes on with the run then asks, whatever limits it has."""
    agent = Agent(Working(), tools=[look], limits=Limits(turns=2), store=store, last_answer=True)
    run = agent.start("look")
    while run.limit_reached is None:
        run = await agent.step(run)
    other = Agent(model := Working(), tools=[look], store=store)
    run = await other.resume(run.id)
    ended(run, StopReason.MAX_TURNS, 2)
    assert [request.tools for request in model.requests] == [()]
    assert (await other.replay(run.id)).is_faithful


async def test_a_refused_answer_is_asked_for_once_more(store):
    """An agent whose answers have a type is asked in its form, and what comes is not checked."""

    def refuse(answer: list[int]) -> list[int]:
        raise ModelRetry("it is incomplete")

    model = ScriptedModel('{"result": [1]}', '{"result": [2]}', say('{"result": [3]}', expect="it is incomplete"))
    agent = Agent(
        model,
        output_type=list[int],
        output_mode="tool",
        output_validators=[refuse],
        limits=Limits(answer_retries=1),
        store=store,
        last_answer=True,
    )
    run = await agent.run("count")
    assert (run.stop_reason, run.partial) == (StopReason.TOO_MANY_ERRORS, '{"result": [3]}')
    assert [tool.name for tool in model.requests[-1].tools] == ["final_answer"]
    await sound(agent, run)


async def test_a_coordinator_reads_the_last_answer_of_its_specialist(store):
    """A specialist that a limit or a loop stopped hands over what it has."""
    expert = Agent(Working(), tools=[look], name="expert", last_answer=True)
    model = ScriptedModel(say("", call("expert", query="count")), say("done", expect=SO_FAR))
    run = await Agent(model, tools=[expert.as_tool()], store=store).run("count")
    assert run.output == "done"
    (result,) = results_of(run.messages)
    assert (result.outcome, "This is what it had so far" in result.content) == (Outcome.DONE, True)


async def test_the_last_text_is_handed_back_without_asking(store):
    """Every run in ERROR has the last text of its own that the model gave; before the end there is none."""
    model = ScriptedModel("Hello.", say("First I look.", call("look")), say("", call("look", at=1)), say("x"))
    agent = Agent(model, tools=[look], limits=Limits(turns=2), store=store)
    first = await agent.run("hello", session="ann")
    assert (first.output, first.partial) == ("Hello.", None)
    run = await agent.run("look", session="ann")
    assert (run.stop_reason, run.partial) == (StopReason.MAX_TURNS, "First I look.")
    model = ScriptedModel(say("", call("look")))
    run = await agent.with_(model=model, limits=Limits(turns=1)).run("look", session="ann")
    assert (run.stop_reason, run.partial) == (StopReason.MAX_TURNS, None)


def test_no_part_of_the_work_is_kept_back_unless_it_is_asked_for():
    """What is kept back is a fifth of the seconds, 30 at most, and a turn where there is a second."""
    assert (Limits().last_answer_s, Limits(seconds=20).last_answer_s) == (30.0, 4.0)
    run = attrs.evolve(Agent(ScriptedModel()).start("x"), turn=19, messages=(AssistantMessage(text="x"),))
    assert find_reached_limit(run, Limits()) is None
    reached = find_reached_limit(run, Limits(), reserves_last_answer=True)
    assert reached is not None
    assert reached[0] is StopReason.MAX_TURNS
    assert find_reached_limit(attrs.evolve(run, turn=0), Limits(turns=1), reserves_last_answer=True) is None
