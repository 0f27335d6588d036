"""The charge of each attempt at a model request: the table of docs/limits.md, on all three wires."""

from __future__ import annotations

import contextlib

import anyio
import attrs
import pytest

from agentfsm import (
    Agent,
    Limits,
    ModelReplyError,
    ModelUnavailableError,
    Purpose,
    Settings,
    Spend,
    StopReason,
    TextDelta,
    Usage,
    usage_by_purpose,
)
from agentfsm.core import events as e
from agentfsm.models import CachedModel, Fallback, Price, Tiered
from agentfsm.stores import MemoryStore
from agentfsm.testing import FunctionModel, LocalServer, ScriptedModel, WireReply, fail, say
from tests.support.model_wires import ANTHROPIC, CHAT, KEY, RESPONSES, forget_keys

PRICE = Price(input_usd_per_million=1, output_usd_per_million=1_000)
BILLED = Usage(input_tokens=20, output_tokens=5)
LONG = "word " * 2_000
LONG_TOKENS = 2_500
RETRIES = Limits(retry_wait_s=0.001)


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch, tmp_path):
    forget_keys(monkeypatch, tmp_path)


@contextlib.contextmanager
def served(wire, *lines):
    with LocalServer(list(lines)) as server:
        yield wire.kind("m", base_url=server.base_url, api_key=KEY, price=PRICE), server


def attempts_in(events):
    return [each for each in events if isinstance(each, e.AttemptFailed)]


ROWS = {
    "complete": (say("Rome.", usage=BILLED), BILLED, 0),
    "broken off": (WireReply(say(LONG, usage=BILLED), cut_after=100), None, 1),
    "refused, 429": (WireReply(status=429, headers={"retry-after": "0"}), Usage(), 1),
    "refused, 503": (WireReply(status=503, headers={"retry-after": "0"}), Usage(), 1),
    "unusable": (WireReply(say("", usage=BILLED)), BILLED, 1),
    "no usage": (WireReply(say(LONG), usage={"prompt_tokens": 0, "completion_tokens": 0}), None, 0),
}


@pytest.mark.parametrize("wire", [CHAT, RESPONSES, ANTHROPIC], ids=str)
@pytest.mark.parametrize("row", ROWS)
async def test_the_charge_of_an_attempt(wire, row):
    """An attempt that fails is an event with its charge, and neither a turn nor an error turn."""
    line, charge, failed = ROWS[row]
    after = [say("Rome.", usage=BILLED)] * failed
    with served(wire, line, *after) as (model, _):
        async with Agent(model, limits=RETRIES, settings=Settings(stream=True), store=MemoryStore()) as agent:
            run = await agent.run("The capital of Italy?")
            events = await agent.history(run.id)
    assert (run.stop_reason, run.turn, run.consecutive_errors) == (StopReason.COMPLETED, 1, 0)
    assert len(attempts_in(events)) == failed
    own = run.usage if not failed else attempts_in(events)[0].usage
    if charge is None:  # 100 chunks of 16 characters, of which some have none; or the whole reply
        assert own.estimated
        assert own.input_tokens > 0
        assert (300 <= own.output_tokens <= 400) if failed else own.output_tokens >= LONG_TOKENS
    else:
        assert (own.input_tokens, own.output_tokens, own.estimated) == (
            charge.input_tokens,
            charge.output_tokens,
            False,
        )
    paid = [each.usage for each in events if getattr(each, "usage", None)]
    assert run.usage == sum(paid, Usage())
    assert run.usage.cost_usd == pytest.approx(PRICE.cost_usd(run.usage))
    assert usage_by_purpose(events)[Purpose.TURN] == run.usage


@pytest.mark.parametrize("wire", [CHAT, RESPONSES, ANTHROPIC], ids=str)
async def test_limits_count_what_broke_off(wire):
    """The limits of the run, and those of many runs, stop before the third attempt."""
    broken = WireReply(say(LONG), cut_after=600)
    for limits, spend, reason in (
        (attrs.evolve(RETRIES, usd=4.0), (), StopReason.COST_BUDGET),
        (attrs.evolve(RETRIES, tokens=3_500), (), StopReason.TOKEN_BUDGET),
        (RETRIES, [Spend(per="day", usd=4.0)], StopReason.COST_BUDGET),
    ):
        with served(wire, *[broken] * 3, "Rome.") as (model, server):
            settings, store = Settings(stream=True, max_tokens=3_000), MemoryStore()
            async with Agent(model, limits=limits, spend=spend, settings=settings, store=store) as agent:
                run = await agent.run("Tell me of Rome.")
        assert run.stop_reason is reason
        assert len(server.requests) == 2
        assert run.usage.estimated
        assert 1.5 * LONG_TOKENS < run.usage.output_tokens <= 2 * LONG_TOKENS


@pytest.mark.parametrize("wire", [CHAT, RESPONSES, ANTHROPIC], ids=str)
async def test_a_request_that_is_cut_off_is_charged(wire):
    """Whether the run is cancelled, or only the task that executes it: the journal has it when the task has ended."""
    slow = WireReply(say(LONG), chunk_delay_s=0.002)
    with served(wire, slow, slow, "Rome.") as (model, _):
        agent = Agent(model, settings=Settings(stream=True), store=MemoryStore())
        async with agent:
            with anyio.CancelScope() as scope:
                await _execute(agent, "r1", lambda: _end(scope))
            run = await agent.load("r1")
            [attempt] = attempts_in(await agent.history("r1"))
            assert (run.state, run.usage) == ("think", attempt.usage)
            assert (attempt.usage.estimated, attempt.usage.output_tokens > 1) == (True, True)
            assert run.usage.cost_usd == pytest.approx(PRICE.cost_usd(run.usage))
            await _execute(agent, "r2", lambda: agent.cancel("r2"))
            run = await agent.load("r2")
            assert (run.stop_reason, run.usage.estimated) == (StopReason.CANCELLED, True)
            assert run.usage.output_tokens > 1
            run = await agent.resume("r1")
            assert (run.output, run.turn) == ("Rome.", 1)


async def _end(scope):
    scope.cancel()


async def _execute(agent, run_id, stop):
    """Execute a run to its end, and call `stop` when the first piece of its reply has arrived."""
    async with agent.stream("Tell me of Rome.", id=run_id) as stream:
        has_text = False
        async for event in stream:
            if isinstance(event, TextDelta) and not has_text:
                has_text = True
                await stop()


async def test_what_was_reported_before_a_cancellation_counts():
    """The usage of the stream itself, and that of models that were asked before within the same request."""

    async def hangs(request):
        asked.set()
        await anyio.sleep_forever()

    async def breaks(request):
        raise ModelUnavailableError("the connection broke")

    small = FunctionModel(lambda _: say("Perhaps Rome.", usage=Usage(input_tokens=1_000, output_tokens=500)))
    for model, least in (
        (Tiered({"small": small, "large": FunctionModel(hangs)}, choose=lambda _: "small", score=lambda *_: 0), 1_500),
        (Fallback(FunctionModel(breaks), FunctionModel(hangs)), 2),
    ):
        asked, agent = anyio.Event(), Agent(model, store=MemoryStore())
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda agent=agent: agent.run("The capital of Italy?", id="r"))
            await asked.wait()
            tasks.cancel_scope.cancel()
        usage = (await agent.load("r")).usage
        assert (usage.tokens >= least, usage.estimated) == (True, True)
        assert usage.output_tokens == 500 * (least > 2)


@pytest.mark.parametrize("wire", [CHAT, ANTHROPIC], ids=str)
async def test_a_stream_that_is_cut_off_after_its_usage_is_charged_it(wire):
    """Anthropic reports the input at the start; a usage at the end counts as it is."""
    line = WireReply(say(LONG, usage=BILLED), chunk_delay_s=0.002)
    with served(wire, line) as (model, _):
        agent = Agent(model, settings=Settings(stream=True), store=MemoryStore())
        async with agent:
            with anyio.CancelScope() as scope:
                await _execute(agent, "r", lambda: _end(scope))
            usage = (await agent.load("r")).usage
    assert usage.estimated
    assert (usage.input_tokens == BILLED.input_tokens) is (wire is ANTHROPIC)


@pytest.mark.parametrize(
    ("line", "input_tokens"),
    [
        (fail(ModelUnavailableError("silent for too long", retry_after_s=0)), 1),
        (fail(ModelReplyError("no JSON")), 1),
        (fail(ModelUnavailableError("overloaded", 0, status=529)), 0),
        (fail(ModelUnavailableError("refused", 0, is_unreachable=True)), 0),
    ],
    ids=["silent", "unusable", "status", "unreachable"],
)
async def test_an_attempt_without_a_report_is_charged_unless_it_was_free(line, input_tokens):
    """A model of the user's own reports no usage: its input counts if it may have been read."""
    agent = Agent(ScriptedModel(line, "Rome."), limits=RETRIES, store=MemoryStore())
    run = await agent.run("The capital of Italy?")
    [attempt] = attempts_in(await agent.history(run.id))
    assert (attempt.usage.input_tokens > 0, attempt.usage.estimated) == (input_tokens > 0, input_tokens > 0)
    assert attempt.usage.output_tokens == 0


async def test_the_substitute_of_a_model_that_broke_off_pays_for_both():
    """The attempt at the first model is charged at its price, within the reply of the second."""

    class Dear(FunctionModel):
        def cost_usd(self, usage):
            return usage.output_tokens * 1.0

    async def breaks(request):
        raise ModelUnavailableError("the connection broke")

    model = Fallback(Dear(breaks), ScriptedModel(say("Rome.", usage=BILLED)))
    run = await Agent(model, store=MemoryStore()).run("The capital of Italy?")
    assert run.output == "Rome."
    assert run.usage.input_tokens > BILLED.input_tokens
    assert run.usage.estimated


@pytest.mark.parametrize("wire", [CHAT, RESPONSES, ANTHROPIC], ids=str)
async def test_an_answer_of_a_cache_costs_nothing(wire):
    """Neither tokens nor money, and it is counted as such."""
    with served(wire, say("Rome.", usage=BILLED)) as (model, _):
        async with Agent(
            CachedModel(model, MemoryStore()), settings=Settings(temperature=0), store=MemoryStore()
        ) as agent:
            first, second = [await agent.run("The capital of Italy?") for _ in range(2)]
    assert (first.usage.tokens, second.usage.tokens, second.usage.cached_replies) == (BILLED.tokens, 0, 1)


async def test_a_provider_that_bills_more_than_is_counted_is_asked_within_the_limit():
    """The first request shows the excess; those that wait for it are reserved with it."""
    model = FunctionModel(lambda _: say("ok", usage=Usage(input_tokens=1_000, output_tokens=300)))
    model.cost_usd = lambda usage: usage.input_tokens * 2.5e-6 + usage.output_tokens * 1e-5
    agent = Agent(model, spend=[Spend(per="day", usd=0.1)], settings=Settings(max_tokens=400), store=MemoryStore())
    runs = []

    async def ask(number):
        runs.append(await agent.run(f"t{number}"))

    async with anyio.create_task_group() as tasks:
        for number in range(30):
            tasks.start_soon(ask, number)
    spent = sum(run.usage.cost_usd or 0.0 for run in runs)
    assert {run.stop_reason for run in runs} == {StopReason.COMPLETED, StopReason.COST_BUDGET}
    assert 0.08 < spent <= 0.1 + 0.0055
