"""Why runs stop: every reason that an agent can reach, with the number reached in its message."""

from __future__ import annotations

from functools import partial

import anyio
import pytest

from agentfsm import (
    Agent,
    AssistantMessage,
    ContextTooLongError,
    Limits,
    MisuseError,
    ModelError,
    ModelReplyError,
    Outcome,
    Run,
    RunContext,
    RunError,
    Settings,
    State,
    StopReason,
    Usage,
    tool,
)
from agentfsm.core.events import AnswerDrafted
from agentfsm.ports import FinishReason, Model, ProposedCall, Reply, Request
from agentfsm.testing import FunctionModel, ScriptedModel, VirtualClock, call, fail, run_virtual, say
from tests.support.checks import HANG_S, names, results_of, sound, sound_run, virtually


@tool(read_only=True)
async def look(at: str = "") -> str:
    """Look."""
    return f"saw {at}"


@tool(read_only=True)
async def broken(at: str = "") -> str:
    """Break."""
    raise RuntimeError(f"broken at {at}")


@tool
async def pay(at: str = "") -> str:
    """Pay."""
    return f"paid {at}"


def looking_on(count: int = 30, **details: object) -> ScriptedModel:
    """A model that goes on looking, each time at something else."""
    return ScriptedModel(*[say("", call("look", at=str(number)), **details) for number in range(count)])


def ended(run: Run, reason: StopReason, message: str) -> None:
    """Fail unless the run ended in ERROR for that reason, with that in its message."""
    sound_run(run)
    assert (run.state, run.stop_reason) == (State.ERROR, reason)
    assert message in run.stop_message
    with pytest.raises(RunError, match=str(reason)) as caught:
        _ = run.output
    assert message in str(caught.value)
    assert caught.value.run is run


# Turns, tokens, money


async def test_max_turns(store):
    """After so many replies the run stops, with all results of the last one."""
    model = looking_on()
    agent = Agent(model, tools=[look], limits=Limits(turns=3), store=store)
    run = await agent.run("look around")
    ended(run, StopReason.MAX_TURNS, "3 of 3 turns")
    assert (run.turn, len(model.requests), len(results_of(run.messages))) == (3, 3, 3)
    await sound(agent, run)


async def test_the_last_turn_may_answer(store):
    """A limit is what may be used: an answer in the last turn counts."""
    agent = Agent(ScriptedModel(say("", call("look")), "done"), tools=[look], limits=Limits(turns=2), store=store)
    assert (await agent.run("look")).output == "done"


async def test_limits_are_the_agents_and_counters_the_runs(store):
    """A run that is half done goes on under the limits of the agent that takes it over."""
    agent = Agent(looking_on(), tools=[look], limits=Limits(turns=5), store=store)
    run = agent.start("look")
    while run.turn < 2:
        run = await agent.step(run)
    run = await agent.with_(limits=Limits(turns=2)).finish(run)
    ended(run, StopReason.MAX_TURNS, "2 of 2 turns")


async def test_token_budget_counts_what_the_provider_says(store):
    """Input and output of all replies are added up, and the sum is in the message."""
    model = looking_on(usage=Usage(input_tokens=900, output_tokens=100))
    agent = Agent(model, tools=[look], limits=Limits(tokens=2_500), store=store)
    run = await agent.run("look around")
    ended(run, StopReason.TOKEN_BUDGET, "2,000 of 2,500 tokens")
    assert (run.turn, run.usage.tokens) == (2, 2_000)  # the first has shown that the third would be too long


async def test_an_answer_is_capped_by_what_the_budget_leaves():
    """`max_tokens` of each request is what is left, and what was asked for where that is less."""
    model = looking_on(usage=Usage(input_tokens=600, output_tokens=200))
    agent = Agent(model, tools=[look], limits=Limits(tokens=2_000), settings=Settings(max_tokens=1_500))
    await agent.run("look around")
    caps = [request.settings.max_tokens for request in model.requests]
    assert caps[0] == 1_500
    assert 500 < caps[1] <= 600  # 2,000 less 800 for the first, and 600 or more for the input of this one
    assert len(caps) == 2


async def test_settings_are_left_alone_while_the_budget_is_wide():
    """Nothing is capped that needs no cap."""
    model = ScriptedModel("done")
    settings = Settings(temperature=0.5)
    await Agent(model, settings=settings).run("hello")
    assert model.requests[0].settings == settings


async def test_a_request_that_leaves_no_room_for_an_answer_is_not_sent(store):
    """Below one token of answer the run stops without asking, and the message has the numbers."""
    model = looking_on(usage=Usage(input_tokens=80, output_tokens=10))
    agent = Agent(model, tools=[look], limits=Limits(tokens=100), instructions="Look well.", store=store)
    run = await agent.run("look around " * 5)
    ended(run, StopReason.TOKEN_BUDGET, "of 100 tokens")
    assert len(model.requests) <= 1
    await sound(agent, run)


class Priced(Model):
    """A model at one US dollar per million tokens, which goes on looking."""

    name = "priced"

    def __init__(self, *script: object) -> None:
        """Take a script."""
        self.inner = ScriptedModel(*script)

    async def reply(self, request: Request, emit: object = None) -> Reply:
        """Follow the script."""
        return await self.inner.reply(request)

    def cost_usd(self, usage: Usage) -> float:
        """Tell the price."""
        return usage.tokens / 1_000_000


async def test_cost_budget(store):
    """Money is added up over the replies, and the message has the sum."""
    lines = [say("", call("look", at=str(n)), usage=Usage(input_tokens=90_000, output_tokens=10_000)) for n in range(9)]
    agent = Agent(Priced(*lines), tools=[look], limits=Limits(usd=0.25, tokens=10_000_000), store=store)
    run = await agent.run("look around")
    ended(run, StopReason.COST_BUDGET, "$0.20 of $0.25 used")
    assert run.usage.cost_usd == pytest.approx(0.2)  # the first has shown that the third would be too dear
    assert run.turn == 2


async def test_a_cost_that_the_provider_tells_is_taken(store):
    """A price on the reply itself goes before the table."""
    agent = Agent(Priced(say("done", usage=Usage(input_tokens=1, cost_usd=0.2))), limits=Limits(usd=1.0), store=store)
    assert (await agent.run("hello")).usage.cost_usd == pytest.approx(0.2)


async def test_usd_with_a_model_of_unknown_price_is_misuse(store):
    """It is refused before anything is stored or asked."""
    model = ScriptedModel("done")
    agent = Agent(model, limits=Limits(usd=1.0), store=store)
    for drive in (agent.run("hello"), agent.step(agent.start("hello")), agent.finish(agent.start("hello"))):
        with pytest.raises(MisuseError, match="price"):
            await drive
    assert await store.runs() == ()
    assert not model.requests


async def test_an_agent_without_a_price_can_still_look_and_cancel(store):
    """A run that is over is returned as it is, and a request for the end is obeyed: neither costs anything."""
    agent = Agent(ScriptedModel("done"), store=store)
    over, live = await agent.run("one"), await agent.step(agent.start("two"))
    unpriced = agent.with_(limits=Limits(usd=1.0))
    assert await unpriced.resume(over.id) == over
    await unpriced.cancel(live.id)
    assert (await agent.load(live.id)).stop_reason is StopReason.CANCELLED


async def test_usage_that_nobody_told_is_estimated(store):
    """Where the provider says nothing the tokens are counted here, and marked."""
    agent = Agent(ScriptedModel(say("four words of answer", usage=None)), store=store)
    usage = (await agent.run("hello")).usage
    assert usage.estimated
    assert usage.input_tokens > 0
    assert usage.output_tokens > 0


async def test_a_reply_that_cannot_be_used_costs_all_the_same(store):
    """An empty reply was paid for, so it counts."""
    agent = Agent(
        ScriptedModel(say("", usage=Usage(input_tokens=100, output_tokens=7)), "done"),
        limits=Limits(retry_wait_s=1e-9),
        store=store,
    )
    run = await agent.run("hello")
    assert run.output == "done"
    assert run.usage.tokens == 107 + 15


# Time


def test_a_deadline_cuts_a_model_call():
    """The run's seconds end a call in flight, and the run says how long it took."""

    async def play(store, clock):
        agent = Agent(
            ScriptedModel(say("late", delay_s=50)),
            limits=Limits(seconds=10, model_timeout_s=60),
            store=store,
            clock=clock,
        )
        run = await agent.run("hello")
        ended(run, StopReason.TIMEOUT, "10.0 of 10.0 seconds")
        assert run.turn == 0
        assert run.duration_s == pytest.approx(10)
        await sound(agent, run)

    virtually(play)


def test_a_deadline_cuts_tools_in_flight():
    """A call in flight is closed as what it is: unknown where it may have had an effect, cancelled elsewhere."""

    @tool(read_only=True)
    async def read() -> str:
        """Read."""
        await anyio.sleep(100)
        return "never"

    @tool
    async def write() -> str:
        """Write."""
        await anyio.sleep(100)
        return "never"

    async def play(store, clock):
        for slow, outcome in ((read, Outcome.SKIPPED), (write, Outcome.UNKNOWN)):
            script = ScriptedModel(say("", call("look"), call(slow.name), call("look", at="behind"), call("pay")))
            limits = Limits(seconds=10, tool_timeout_s=60)
            agent = Agent(script, tools=[look, pay, slow], limits=limits, store=store, clock=clock)
            run = await agent.run("hello")
            ended(run, StopReason.TIMEOUT, "10.0 of 10.0 seconds")
            assert run.duration_s == pytest.approx(10)
            outcomes = [result.outcome for result in results_of(run.messages)]
            assert outcomes[0] is Outcome.DONE
            assert outcomes[1] in (outcome, Outcome.CANCELLED)
            assert outcomes[3] is Outcome.SKIPPED
            await sound(agent, run)

    virtually(play)


def test_the_deadline_says_how_many_calls_waited_for_a_limit():
    """The time of the run passes while they wait, so a larger limit may be the remedy as well."""

    @tool(read_only=True, per_minute=2)
    async def search(at: str) -> str:
        """Search."""
        return at

    async def play() -> Run:
        model = ScriptedModel(say("", *[call("search", at=str(number)) for number in range(5)]))
        return await Agent(model, tools=[search], limits=Limits(seconds=10), clock=VirtualClock()).run("look")

    run = run_virtual(play)
    ended(run, StopReason.TIMEOUT, "10.0 of 10.0 seconds used, and running work was cut off")
    assert "while calls waited for a limit of their tool or tag (3); set a larger seconds=" in run.stop_message


def test_time_adds_up_over_the_steps():
    """Several effects below the limit each are above it together; days between the steps are not."""

    @tool(read_only=True)
    async def slow(at: str) -> str:
        """Take 4 seconds."""
        await anyio.sleep(4)
        return at

    async def play(store, clock):
        model = ScriptedModel(*[say("", call("slow", at=str(n)), delay_s=1) for n in range(9)])
        agent = Agent(model, tools=[slow], limits=Limits(seconds=12), store=store, clock=clock)
        run = agent.start("hello")
        while not run.is_over:
            run = await agent.step(run)
            await anyio.sleep(86_400)
        ended(run, StopReason.TIMEOUT, "12.0 of 12.0 seconds")
        assert run.duration_s == pytest.approx(12)
        assert run.turn == 3

    virtually(play)


def test_waiting_for_a_person_takes_no_time():
    """Three days of silence before an approval are none of the run's seconds."""

    @tool(requires_approval=True)
    async def ask() -> str:
        """Ask."""
        await anyio.sleep(2)
        return "ok"

    async def play(store, clock):
        model = ScriptedModel(say("", call("ask"), delay_s=1), say("done", delay_s=1))
        agent = Agent(model, tools=[ask], limits=Limits(seconds=5), store=store, clock=clock)
        run = await agent.run("hello")
        await anyio.sleep(3 * 86_400)
        await agent.approve(run.id, "t1.0")
        run = await agent.resume(run.id)
        assert run.output == "done"
        assert run.duration_s == pytest.approx(4)

    virtually(play)


def test_a_tool_is_told_the_deadline_that_will_cut_it_off():
    """`ctx.deadline` is the nearer one of the call's own time-out and the run's end."""
    seen: list[float] = []

    @tool(timeout_s=30)
    async def check(ctx: RunContext[None]) -> str:
        """Check."""
        seen.append(ctx.deadline)
        await anyio.sleep(4)
        return f"ok {len(seen)}"

    async def play(store, clock):
        model = ScriptedModel(say("", call("check")), say("", call("check")), "done")
        agent = Agent(model, tools=[check], limits=Limits(seconds=33), store=store, clock=clock)
        begin = clock.now()
        assert (await agent.run("hello")).output == "done"
        assert seen == [pytest.approx(begin + 30), pytest.approx(begin + 33)]

    virtually(play)


# Errors


async def test_three_error_turns_in_a_row(store):
    """Turns whose calls all failed add up; the message has the number and the last error."""
    model = ScriptedModel(*[say("", call("broken", at=str(n)), call("missing", n=n)) for n in range(9)])
    agent = Agent(model, tools=[broken], store=store)
    run = await agent.run("break")
    ended(run, StopReason.TOO_MANY_ERRORS, "3 error turns in a row")
    assert run.consecutive_errors == 3
    assert len(run.errors) == 6
    assert [fault.turn for fault in run.errors] == [1, 1, 2, 2, 3, 3]
    await sound(agent, run)


async def test_one_success_resets_the_count(store):
    """A turn in which one call succeeds is no error turn."""
    bad, good = call("broken"), call("look", at="x")
    lines = [say(str(n), bad, call("broken", at=str(n))) for n in range(5)]
    lines[2] = say("half", bad, good)
    model = ScriptedModel(*lines, "ok")
    run = await Agent(model, tools=[broken, look], store=store).run("try")
    assert run.output == "ok"


async def test_a_model_that_falters_three_turns(store):
    """A reply that cannot be had is an error turn after its retries, and three of them stop the run."""
    model = ScriptedModel(*[fail(ModelReplyError(f"no JSON {n}")) for n in range(9)])
    limits = Limits(model_retries=1, retry_wait_s=1e-9)
    agent = Agent(model, limits=limits, store=store)
    run = await agent.run("hello")
    ended(run, StopReason.TOO_MANY_ERRORS, "3 error turns in a row")
    assert "no JSON 5" in run.stop_message
    assert len(model.requests) == 6
    assert names(await agent.history(run.id)) == ["Observed", *["AttemptFailed", "ModelFaltered"] * 3, "Failed"]
    assert [fault.source for fault in run.errors] == ["model"] * 3


@pytest.mark.parametrize("error", [ModelError("401: no such key"), ContextTooLongError("130,000 tokens")], ids=repr)
async def test_model_error(store, error):
    """What asking again cannot mend ends the run at once, with the provider's words."""
    model = ScriptedModel(say("", call("look", at="x")), fail(error))
    agent = Agent(model, tools=[look], store=store)
    run = await agent.run("hello")
    ended(run, StopReason.MODEL_ERROR, str(error))
    assert len(model.requests) == 2
    await sound(agent, run)


async def test_what_was_paid_before_a_model_error_counts(store):
    """Replies that could not be used, and then a refusal for good: what they cost is in the journal."""
    wasted = say("", usage=Usage(input_tokens=100, output_tokens=7))
    refused = ModelError("401: no such key")
    agent = Agent(ScriptedModel(wasted, wasted, fail(refused)), limits=Limits(retry_wait_s=1e-9), store=store)
    run = await agent.run("hello")
    ended(run, StopReason.MODEL_ERROR, "401")
    assert run.usage.tokens == 2 * 107
    await sound(agent, run)


@pytest.mark.parametrize("how", ["the time is up", "somebody cancels"])
def test_what_was_paid_before_the_end_counts(how):
    """A run that is cut off between two attempts at the model has paid for the first."""

    async def play(store, clock):
        wasted = say("", usage=Usage(input_tokens=100, output_tokens=7))
        limits = Limits(seconds=10, retry_wait_s=50.0)
        agent = Agent(ScriptedModel(wasted, "too late"), limits=limits, store=store, clock=clock)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(agent.run, "hello", id="mine"))
            await anyio.sleep(5)
            if how == "somebody cancels":
                await agent.cancel("mine")
            await anyio.sleep(20)
        run = await agent.load("mine")
        assert run.stop_reason in (StopReason.TIMEOUT, StopReason.CANCELLED)
        assert run.usage.tokens == 107
        await sound(agent, run)

    virtually(play)


async def test_a_bug_in_a_model_is_not_absorbed(store):
    """An error that no model should raise is the caller's, and the run can be resumed."""
    agent = Agent(ScriptedModel(fail(ZeroDivisionError("a bug")), "done"), store=store)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        await agent.run("hello", id="mine")
    assert (await agent.load("mine")).state is State.THINK
    assert (await agent.resume("mine")).output == "done"


@pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.CONTENT_FILTER])
async def test_a_cut_answer_is_no_answer(store, reason):
    """An answer that was cut off ends in ERROR, and what there is of it stays in the history."""
    agent = Agent(ScriptedModel(say("The first half of", finish_reason=reason)), store=store)
    run = await agent.run("hello")
    ended(run, StopReason.MODEL_ERROR, "cut")
    assert run.messages[-1] == AssistantMessage(text="The first half of")
    events = await agent.history(run.id)
    assert names(events) == ["Observed", "AnswerDrafted", "Failed"]
    assert isinstance(events[1], AnswerDrafted)
    assert run.usage.tokens == 15
    await sound(agent, run)


async def test_an_empty_answer_at_the_length_limit_is_not_asked_for_again(store):
    """A model that thought until its limit says nothing the second time either; the run ends and says why."""
    model = ScriptedModel(say("", finish_reason=FinishReason.LENGTH), "too late")
    run = await Agent(model, limits=Limits(retry_wait_s=1e-9), store=store).run("hello")
    ended(run, StopReason.MODEL_ERROR, "length limit")
    assert len(model.requests) == 1


# Cancelled


async def test_cancelled_says_who_and_why(store):
    """The end that somebody asked for names them, and closes what was open."""

    @tool(requires_approval=True)
    async def ask() -> str:
        """Ask."""
        return "ok"

    agent = Agent(ScriptedModel(say("", call("look"), call("ask"), call("pay"))), tools=[look, ask, pay], store=store)
    run = await agent.run("hello")
    await agent.cancel(run.id, by="ann", message="not today")
    run = await agent.load(run.id)
    ended(run, StopReason.CANCELLED, "cancelled by ann: not today")
    assert [r.outcome for r in run.calls] == [Outcome.DONE, Outcome.SKIPPED, Outcome.SKIPPED]
    await sound(agent, run)


async def test_a_limit_that_is_reached_while_calls_wait_for_approval(store):
    """The run waits for the person first; after their answer the limit ends it with a valid history."""

    @tool(requires_approval=True)
    async def ask() -> str:
        """Ask."""
        return "ok"

    agent = Agent(ScriptedModel(say("", call("ask"), call("ask"))), tools=[ask], limits=Limits(turns=1), store=store)
    run = await agent.run("hello")
    assert run.is_waiting
    await agent.approve(run.id, "t1.0")
    await agent.reject(run.id, "t1.1")
    run = await agent.resume(run.id)
    ended(run, StopReason.MAX_TURNS, "1 of 1 turns")
    assert [r.outcome for r in run.calls] == [Outcome.DONE, Outcome.REJECTED]
    await sound(agent, run)


@pytest.mark.parametrize(
    "options",
    [
        {"turns": 0},
        {"tokens": -1},
        {"seconds": float("inf")},
        {"seconds": float("nan")},
        {"usd": 0},
        {"parallel": 0},
        {"model_retries": -1},
        {"tool_timeout_s": float("inf")},
    ],
    ids=str,
)
def test_limits_are_finite(options):
    """There is no 'unlimited'."""
    with pytest.raises(MisuseError, match=next(iter(options))):
        Limits(**options)


async def test_a_model_that_never_answers_is_stopped(store):
    """Going round for ever is impossible, whatever the model does."""

    def answer(request: Request) -> Reply:
        arguments = f'{{"at": "{len(request.messages)}"}}'
        return Reply(calls=(ProposedCall(id="x", name="look", arguments=arguments),))

    with anyio.fail_after(HANG_S):
        run = await Agent(FunctionModel(answer), tools=[look], store=store).run("hello")
    ended(run, StopReason.MAX_TURNS, "20 of 20")


def test_the_reasons_are_complete():
    """Each reason but those that later parts bring is reached by a test here, in loops or in budget_calls."""
    later = {
        StopReason.COMPLETED,
        StopReason.GUARD,
        StopReason.STEP_FAILED,
        StopReason.STOP_CONDITION,
        StopReason.PARKED,
    }
    assert set(StopReason) - later == {
        StopReason.MAX_TURNS,
        StopReason.TOKEN_BUDGET,
        StopReason.COST_BUDGET,
        StopReason.TOOL_BUDGET,
        StopReason.TIMEOUT,
        StopReason.TOO_MANY_ERRORS,
        StopReason.LOOP_DETECTED,
        StopReason.MODEL_ERROR,
        StopReason.CANCELLED,
    }
