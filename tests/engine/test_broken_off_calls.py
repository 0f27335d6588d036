"""Calls whose executor dies: it is unknown whether they had their effect, so the tool's `on_unknown` decides.

The executor is a function that raises `OutcomeUnknownError`, as users' tools may; sandboxes are in
tests/sandbox/test_killed_sandboxes.py and MCP servers in tests/mcp/test_killed_servers.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import anyio
import pytest

from agentfsm import (
    Agent,
    ErrorType,
    Found,
    InputRequired,
    Outcome,
    OutcomeUnknownError,
    PendingKind,
    Question,
    Run,
    RunContext,
    Tool,
    ToolCall,
    ToolEvent,
    ToolEventType,
    ToolQueue,
    ToolRegistry,
    ToolResult,
    tool,
)
from agentfsm.core.events import ToolLost
from agentfsm.flow import Flow, step
from agentfsm.stores import MemoryStore
from agentfsm.testing import ScriptedModel, VirtualClock, call, say
from agentfsm.tools.breaker import FAILURE_THRESHOLD, BreakerState
from tests.support.checks import keys_of, names, results_of, sound, starts_of, virtually

GONE = "the socket was closed"


class Bank:
    """Pays, and dies before it can say so, as often as it is told."""

    def __init__(self, deaths: int = 1, error: Exception | None = None) -> None:
        """Take how often it dies, and the error of that."""
        self.deaths = deaths
        self.error = error or OutcomeUnknownError(GONE)
        self.paid: list[str] = []

    def tool(self, **options: Any) -> Tool[..., Any]:
        """A tool that pays."""

        @tool(**options)
        async def pay(ctx: RunContext[Any], cents: int = 5) -> str:
            """Pay."""
            self.paid.append(ctx.idempotency_key)
            await anyio.lowlevel.checkpoint()
            if len(self.paid) <= self.deaths:
                raise self.error
            return f"paid {cents}"

        return pay


def payer(bank: Bank, store: Any, **options: Any) -> Agent:
    """An agent whose model pays once."""
    return Agent(ScriptedModel(say("", call("pay")), "done"), tools=[bank.tool(**options)], store=store)


async def begun(agent: Agent) -> Run:
    """Go on until the run is over or waits."""
    return await agent.finish(agent.start("go", id="mine"))


def played(bank: Bank, **options: Any) -> tuple[Run, ToolResult]:
    """Pay in virtual time, in which retries do not wait; return the run and its only result."""
    runs: list[Run] = []

    async def play(store: MemoryStore, clock: VirtualClock) -> None:
        agent = Agent(
            ScriptedModel(say("", call("pay")), "done"), tools=[bank.tool(**options)], store=store, clock=clock
        )
        runs.append(await agent.run("go"))
        await sound(agent, runs[0])

    virtually(play)
    (result,) = results_of(runs[0].messages)
    return runs[0], result


REPEATED = pytest.mark.parametrize(
    "options", [{"read_only": True}, {"idempotent": True}, {"on_unknown": "rerun"}], ids=str
)


@REPEATED
def test_a_call_that_may_be_repeated_is(options):
    """Under its key, as after a transient failure: the model reads the result, and nobody is asked."""
    bank = Bank(deaths=2)
    run, result = played(bank, **options)
    assert (result.outcome, result.content, result.attempts) == (Outcome.DONE, "paid 5", 3)
    assert set(bank.paid) == {keys_of(run)["t1.0"]}


@REPEATED
def test_a_call_that_dies_each_time_ends(options):
    """It is retried as after any failure. Then a read-only call has failed, and the outcome of others is unknown."""
    bank = Bank(deaths=9)
    _, result = played(bank, **options)
    assert (result.error_type, result.attempts, len(bank.paid)) == (ErrorType.UNAVAILABLE, 3, 3)
    reads = "read_only" in options
    assert (result.outcome, result.retryable) == (Outcome.FAILED if reads else Outcome.UNKNOWN, reads)
    assert GONE in result.content
    assert ("may have happened" in result.content) is not reads


def test_a_call_without_time_for_a_retry_ends():
    """The time of the call includes its retries."""
    bank = Bank()
    _, result = played(bank, idempotent=True, timeout_s=0.5)
    assert (result.outcome, len(bank.paid)) == (Outcome.UNKNOWN, 1)


async def test_fail_tells_the_model_that_nobody_knows(store):
    """With the reason, and what to check; the result is no error of the tool's."""
    bank = Bank()
    agent = payer(bank, store, on_unknown="fail")
    run = await begun(agent)
    (result,) = results_of(run.messages)
    assert (run.output, result.outcome, result.attempts) == ("done", Outcome.UNKNOWN, 1)
    assert result.content.startswith(f"outcome unknown: {GONE}. Its effect may have happened")
    assert run.consecutive_errors == 0
    await sound(agent, run)


@pytest.mark.parametrize("idempotent", [False, True])
async def test_ask_waits_for_a_person_with_the_reason(store, idempotent):
    """The journal has that the call is lost; a person who settles it is not asked again, and nothing is repeated."""
    bank = Bank()
    agent = payer(bank, store, on_unknown="ask", idempotent=idempotent)
    run = await begun(agent)
    (item,) = run.pending
    assert (item.kind, item.call_id, item.error) == (PendingKind.OUTCOME, "t1.0", GONE)
    assert [event.reason for event in await agent.history(run.id) if isinstance(event, ToolLost)] == [GONE]
    await agent.settle(run.id, "t1.0", result="paid, says the statement")
    run = await agent.resume(run.id)
    (result,) = results_of(run.messages)
    assert (result.outcome, result.content, len(bank.paid)) == (Outcome.DONE, "paid, says the statement", 1)
    await sound(agent, run)


@pytest.mark.parametrize("answer", ["failed", "rerun"])
async def test_a_person_may_say_that_it_failed_or_have_it_repeated(store, answer):
    """As for a call whose worker died; a rerun has the same key."""
    bank = Bank()
    agent = payer(bank, store)
    run = await begun(agent)
    await agent.settle(run.id, "t1.0", **({"failed": "it was not paid"} if answer == "failed" else {"rerun": True}))
    run = await agent.resume(run.id)
    (result,) = results_of(run.messages)
    assert result.outcome is (Outcome.FAILED if answer == "failed" else Outcome.DONE)
    assert bank.paid == [keys_of(run)["t1.0"]] * (1 if answer == "failed" else 2)
    assert starts_of(await agent.history(run.id), "t1.0") == len(bank.paid)


async def test_a_call_that_is_lost_again_waits_again(store):
    """A person who has it repeated is asked once more if it dies once more."""
    bank = Bank(deaths=2)
    agent = payer(bank, store)
    run = await begun(agent)
    await agent.settle(run.id, "t1.0", rerun=True)
    run = await agent.resume(run.id)
    assert [item.kind for item in run.pending] == [PendingKind.OUTCOME]
    assert names(await agent.history(run.id)).count("ToolLost") == 2


FINDINGS: list[tuple[Callable[..., Any], Outcome | None, int]] = [
    (lambda _ctx, _arguments: Found("paid, says the bank"), Outcome.DONE, 1),
    (lambda _ctx, _arguments: "fail", Outcome.UNKNOWN, 1),
    (lambda _ctx, _arguments: "ask", None, 1),
    (lambda _ctx, _arguments: 1 / 0, None, 1),
]


@pytest.mark.parametrize(("find", "outcome", "times"), FINDINGS, ids=["found", "fail", "ask", "raises"])
async def test_a_function_finds_the_outcome_out(store, find, outcome, times):
    """Its finding is the result, its word is followed, and if it fails a person is asked."""
    bank = Bank()
    agent = payer(bank, store, on_unknown=find)
    run = await begun(agent)
    assert [each.outcome for each in results_of(run.messages)] == ([] if outcome is None else [outcome])
    assert (run.is_waiting, len(bank.paid)) == (outcome is None, times)


def test_a_function_may_have_it_repeated():
    """It finds that nothing was paid; the second attempt tells that it was."""
    bank = Bank()
    asked: list[int] = []

    async def find(ctx: RunContext[Any], _arguments: Any) -> str:
        await anyio.lowlevel.checkpoint()
        asked.append(ctx.attempt)
        return "rerun"

    _, result = played(bank, on_unknown=find)
    assert (result.outcome, result.attempts, len(bank.paid), asked) == (Outcome.DONE, 2, 2, [1])


def test_finding_out_does_not_take_the_time_of_the_call():
    """A bank that is slow to say what it did is heard, whatever time the call had left."""
    bank = Bank()

    async def find(_ctx: RunContext[Any], _arguments: Any) -> Found:
        await anyio.sleep(4)
        return Found("paid")

    async def slow_death(ctx: RunContext[Any]) -> str:
        await anyio.sleep(4)
        bank.paid.append(ctx.idempotency_key)
        raise OutcomeUnknownError(GONE)

    bank.tool = lambda **options: tool(name="pay", **options)(slow_death)  # type: ignore[method-assign]
    _, result = played(bank, on_unknown=find, timeout_s=5)
    assert (result.outcome, result.content) == (Outcome.DONE, "paid")


async def test_the_stricter_of_the_recorded_and_the_present_policy_holds(store):
    """A call that began under "ask" is not repeated by itself, though its tool is idempotent now."""
    bank = Bank()

    def asking(**options: Any) -> Agent:
        @tool(**options)
        async def pay(ctx: RunContext[Any]) -> str:
            """Pay."""
            if not ctx.answers:
                raise InputRequired(Question(key="sure", message="Sure?"))
            bank.paid.append(ctx.idempotency_key)
            raise OutcomeUnknownError(GONE)

        return Agent(ScriptedModel(say("", call("pay")), "done"), tools=[pay], store=store)

    run = await begun(asking())
    agent = asking(idempotent=True)
    await agent.answer(run.id, "t1.0", {})
    run = await agent.resume(run.id)
    assert ([item.kind for item in run.pending], len(bank.paid)) == ([PendingKind.OUTCOME], 1)


async def test_a_plain_function_and_a_group_of_errors(store):
    """A thread dies with its exception like any function; one unknown outcome among the errors of a group counts."""

    @tool
    def pay() -> str:
        """Pay."""
        raise ExceptionGroup("both", [ValueError("a bug"), ExceptionGroup("in", [OutcomeUnknownError(GONE)])])

    agent = Agent(ScriptedModel(say("", call("pay"))), tools=[pay], store=store)
    (item,) = (await begun(agent)).pending
    assert item.error == f"ValueError: a bug; OutcomeUnknownError: {GONE}"


async def test_other_calls_of_the_reply_are_not_disturbed(store):
    """Those before the lost one, and those that overlap it, keep their results; the run ends once it is settled."""
    bank = Bank()

    @tool(read_only=True)
    async def look() -> str:
        """Look."""
        return "seen"

    model = ScriptedModel(say("", call("look"), call("pay"), call("look")), "done")
    agent = Agent(model, tools=[look, bank.tool()], store=store)
    run = await begun(agent)
    assert [item.call_id for item in run.pending] == ["t1.1"]
    await agent.settle(run.id, "t1.1", failed="not paid")
    run = await agent.resume(run.id)
    assert [each.outcome for each in results_of(run.messages)] == [Outcome.DONE, Outcome.FAILED, Outcome.DONE]
    await sound(agent, run)


async def test_in_a_run_below_the_call_waits_there(store):
    """The caller waits with the question of the run below; when it is settled there, both go on."""
    bank = Bank()
    inner = Agent(ScriptedModel(say("", call("pay")), "all paid"), tools=[bank.tool()], name="clerk", store=store)
    agent = Agent(ScriptedModel(say("", call("clerk", query="pay")), "done"), tools=[inner.as_tool()], store=store)
    run = await begun(agent)
    (item,) = run.pending
    assert (item.kind, item.run_id, item.call_id, item.error) == (PendingKind.OUTCOME, "mine.t1.0", "t1.0", GONE)
    await agent.settle(item.run_id, item.call_id, result="paid")
    run = await agent.resume(run.id)
    assert (run.output, len(bank.paid)) == ("done", 1)
    assert [each.content for each in results_of(run.messages)] == ["all paid"]


async def test_the_retries_of_a_step_do_not_hide_it(store):
    """A step of a flow that is to be asked about is not repeated because it has retries."""
    paid: list[int] = []

    @step(retry=2, idempotent=True, on_unknown="ask")
    async def pay() -> str:
        """Pay."""
        paid.append(1)
        raise OutcomeUnknownError(GONE)

    flow = Flow([pay], name="shop", store=store)
    run = await flow.finish(flow.start({}))
    assert [(item.kind, item.error) for item in run.pending] == [(PendingKind.OUTCOME, GONE)]
    assert paid == [1]


async def alone(*tools: Tool[..., Any], calls: int = 1) -> list[ToolResult]:
    """Call the tool in a queue without a run, in virtual time."""
    queue = ToolQueue(ToolRegistry.of(tools), clock=VirtualClock(), retries_per_tool=0)
    return await queue.execute_all([ToolCall(id=f"c{n}", name=tools[0].name, arguments="{}") for n in range(calls)])


@pytest.mark.parametrize(
    "options", [{}, {"on_unknown": "fail"}, {"idempotent": True}, {"on_unknown": lambda _c, _a: Found("")}], ids=str
)
async def test_a_queue_without_a_run_has_nobody_to_ask(options):
    """The outcome is unknown, and the text says why."""
    (result,) = await alone(Bank().tool(**options))
    assert (result.outcome, result.error_type) == (Outcome.UNKNOWN, ErrorType.UNAVAILABLE)
    assert result.content.startswith(f"outcome unknown: {GONE}.")


async def test_deaths_open_the_breaker():
    """Five in a row: the sixth call is refused, and nothing is paid."""
    bank = Bank(deaths=9)
    pay = bank.tool(concurrency_safe=False)
    results = await alone(pay, calls=FAILURE_THRESHOLD + 1)
    assert [each.error_type for each in results] == [ErrorType.UNAVAILABLE] * 5 + [ErrorType.CIRCUIT_OPEN]
    assert (pay.breaker.state, len(bank.paid)) == (BreakerState.OPEN, FAILURE_THRESHOLD)


async def test_deaths_that_a_person_is_asked_about_open_the_breaker(store):
    """Also if the call has no result yet, or its function has found one."""
    for options in ({}, {"on_unknown": lambda _ctx, _arguments: Found("paid")}):
        bank = Bank(deaths=9)
        pay = bank.tool(**options)
        for _ in range(FAILURE_THRESHOLD):
            agent = Agent(ScriptedModel(say("", call("pay")), "done"), tools=[pay], store=store)
            await agent.finish(agent.start("go"))
        assert pay.breaker.state is BreakerState.OPEN


@pytest.mark.parametrize("policy", ["ask", "fail", "found", "rerun by a person"])
async def test_a_paid_call_is_charged_once(store, policy):
    """It is charged when it has its result, from a tool or a person. A call that waits to be settled is not."""
    bank = Bank()
    options = {"on_unknown": {"fail": "fail", "found": lambda _ctx, _arguments: Found("paid")}.get(policy, "ask")}
    model = ScriptedModel(say("", call("pay")), "done")
    pay = bank.tool(cost_usd=0.5, **options)
    agent = Agent(model, tools=[pay], store=store)
    run = await begun(agent)
    if run.is_waiting:
        assert not run.usage.cost_usd
        await agent.settle(run.id, "t1.0", **({"rerun": True} if "rerun" in policy else {"result": "paid"}))
        run = await agent.resume(run.id)
    assert (run.output, run.usage.cost_usd) == ("done", 0.5)


async def test_the_death_is_logged_and_listeners_see_a_wait(store, caplog):
    """The traceback is in the log; the stream of the run says that the call waits."""
    agent = payer(Bank(), store)
    with caplog.at_level(logging.WARNING, logger="agentfsm"):
        async with agent.stream(agent.start("go")) as stream:
            seen = [event.type async for event in stream if isinstance(event, ToolEvent)]
    lines = [record.getMessage().split()[0] for record in caplog.records]
    assert lines == ["event=call_unknown", "event=tool_raised"]
    assert caplog.records[1].exc_info[0] is OutcomeUnknownError
    assert seen[:3] == [ToolEventType.QUEUED, ToolEventType.STARTED, ToolEventType.PAUSED]
