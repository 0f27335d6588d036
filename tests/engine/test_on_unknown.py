"""A call that was in flight when its worker died: what its tool says is to be done about it, and what is found out."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Any

import anyio
import pytest

from agentfsm import Agent, Found, Limits, MisuseError, Outcome, PendingKind, RunContext
from agentfsm.core.events import ApprovalGiven, ToolCutOff, ToolFinished, ToolLost, ToolStarted
from agentfsm.testing import ScriptedModel, call, say
from agentfsm.tools.tool import Arguments
from tests.support.checks import keys_of, names, results_of, sound, starts_of, virtually
from tests.support.failing_stores import CrashingStore, WorkerKilled
from tests.support.unknown_outcomes import Bank, crashed, recovered


async def test_rerun_runs_it_again_under_its_key(store):
    """Whoever says so may be repeated, though it is neither read-only nor called idempotent."""
    run, bank, agent = await recovered(store, on_unknown="rerun")
    assert [(r.outcome, r.content) for r in results_of(run.messages)] == [(Outcome.DONE, "paid Ann 5")]
    assert bank.paid == [keys_of(run)["t1.0"]] * 2
    assert starts_of(await agent.history(run.id), "t1.0") == 2
    await sound(agent, run)


@pytest.mark.parametrize("idempotent", [False, True])
async def test_fail_tells_the_model_that_nobody_knows(store, idempotent):
    """The call ends with the outcome unknown, the model is told to check, and nothing is repeated."""
    run, bank, agent = await recovered(store, on_unknown="fail", idempotent=idempotent)
    (result,) = results_of(run.messages)
    assert (run.output, result.outcome, bank.paid) == ("done", Outcome.UNKNOWN, [keys_of(run)["t1.0"]])
    assert "may have happened" in result.content
    assert run.consecutive_errors == 0
    assert [event.by for event in await agent.history(run.id) if isinstance(event, ToolFinished)] == ["on_unknown"]
    await sound(agent, run)


async def test_ask_waits_for_a_person_whatever_else_is_declared(store):
    """A tool that may be repeated under its key may still want to be asked about."""
    run, bank, agent = await recovered(store, on_unknown="ask", idempotent=True)
    assert [(item.kind, item.call_id) for item in run.pending] == [(PendingKind.OUTCOME, "t1.0")]
    assert bank.paid == [keys_of(run)["t1.0"]]
    await agent.settle(run.id, "t1.0", result="paid, says the statement")
    assert (await agent.resume(run.id)).output == "done"
    assert bank.paid == [keys_of(run)["t1.0"]]


def finding(what: object, *, plain: bool) -> Callable[..., Any]:
    """Return a function that finds out just that, plain or async; an exception is raised."""

    def find(_ctx: RunContext[Any], _arguments: Arguments) -> Any:
        if isinstance(what, Exception):
            raise what
        return what

    async def find_slowly(ctx: RunContext[Any], arguments: Arguments) -> Any:
        await anyio.lowlevel.checkpoint()
        return find(ctx, arguments)

    return find if plain else find_slowly


KIND = pytest.mark.parametrize("plain", [True, False], ids=["plain", "async"])


@KIND
@pytest.mark.parametrize(
    ("word", "outcomes", "times"),
    [("rerun", [Outcome.DONE], 2), ("fail", [Outcome.UNKNOWN], 1), ("ask", [], 1)],
)
async def test_a_function_may_say_any_of_the_words(store, plain, word, outcomes, times):
    """What it says of this call holds as if it had been declared of all."""
    run, bank, _ = await recovered(store, on_unknown=finding(word, plain=plain))
    assert [r.outcome for r in results_of(run.messages)] == outcomes
    assert len(bank.paid) == times
    assert run.is_waiting == (word == "ask")


@KIND
async def test_a_function_may_find_the_result(store, plain):
    """What was done is the result, as if the worker had lived to record it; nobody is asked and nothing runs again."""
    run, bank, agent = await recovered(store, on_unknown=finding(Found({"cents": 5}), plain=plain))
    assert [(r.outcome, r.content) for r in results_of(run.messages)] == [(Outcome.DONE, '{"cents":5}')]
    assert (run.output, bank.paid) == ("done", [keys_of(run)["t1.0"]])
    events = await agent.history(run.id)
    assert [event.by for event in events if isinstance(event, ToolFinished)] == ["on_unknown"]
    assert starts_of(events, "t1.0") == 1
    await sound(agent, run)


async def test_a_plain_function_may_return_what_is_to_be_awaited(store):
    """As a lambda around an async function does."""
    find = finding(Found("paid"), plain=False)

    def plain(ctx: RunContext[Any], arguments: Arguments) -> Any:
        return find(ctx, arguments)

    run, bank, _ = await recovered(store, on_unknown=plain)
    (result,) = results_of(run.messages)
    assert (result.outcome, result.content, len(bank.paid)) == (Outcome.DONE, "paid", 1)


async def test_a_long_result_that_is_found_is_shown_like_any_other(store):
    """The model is shown no more of it than of the tool's own results; the whole is kept."""
    run, _, _ = await recovered(store, on_unknown=finding(Found("x" * 200_000), plain=True))
    (result,) = results_of(run.messages)
    assert (len(result.content), run.has_cut) == (200_000, True)
    assert len(result.text) < 100_000


async def test_the_function_knows_the_call(store):
    """It is given the call's run, key and attempt, the caller's `deps`, and the arguments with their defaults."""
    bank = Bank()

    def find(ctx: RunContext[Any], arguments: Arguments) -> Found:
        bank.asked.append((ctx, arguments))
        return Found("paid")

    await crashed(store, bank, on_unknown=find)
    agent = Agent(ScriptedModel("done"), tools=[bank.tool(on_unknown=find)], store=store)
    run = await agent.resume("mine", deps="the bank's client")
    [(ctx, arguments)] = bank.asked
    assert (ctx.run_id, ctx.call_id, ctx.idempotency_key, ctx.attempt) == ("mine", "t1.0", keys_of(run)["t1.0"], 1)
    assert (ctx.deps, ctx.turn) == ("the bank's client", 1)
    assert vars(arguments) == {"to": "Ann", "cents": 5}


NONSENSE = [ValueError("the bank is closed"), None, "maybe", "", True, 5, ["rerun"], {"rerun": True}, Found]


@KIND
@pytest.mark.parametrize("answer", NONSENSE, ids=str)
async def test_a_function_that_cannot_tell_leaves_it_to_a_person(store, plain, answer):
    """One that raises, or says what is no word of these, has found out nothing: it is not guessed what it meant."""
    run, bank, _ = await recovered(store, on_unknown=finding(answer, plain=plain))
    assert [item.kind for item in run.pending] == [PendingKind.OUTCOME]
    assert bank.paid == [keys_of(run)["t1.0"]]


@KIND
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_function_that_meets_a_cancelled_task_leaves_it_to_a_person(store, plain):
    """On asyncio that is a failure of what it asked, and not the end of the driving call: that would never end well."""

    def find(_ctx: RunContext[Any], _arguments: Arguments) -> Any:
        raise asyncio.CancelledError

    async def find_slowly(_ctx: RunContext[Any], _arguments: Arguments) -> Any:
        asking = asyncio.ensure_future(asyncio.sleep(1))
        asking.cancel()
        return await asking

    run, bank, _ = await recovered(store, on_unknown=find if plain else find_slowly)
    assert [item.kind for item in run.pending] == [PendingKind.OUTCOME]
    assert bank.paid == [keys_of(run)["t1.0"]]


async def test_a_function_that_raises_is_logged_by_its_error(store, caplog):
    """Whoever looks after the run sees that it could not find out; why stands below the line, in its traceback."""
    bank = Bank()
    find = finding(ValueError("secret"), plain=True)
    await crashed(store, bank, on_unknown=find)
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="agentfsm"):
        await Agent(ScriptedModel(), tools=[bank.tool(on_unknown=find)], store=store).resume("mine")
    lines = [record.getMessage() for record in caplog.records]
    assert [line.split()[0] for line in lines] == ["event=on_unknown_failed", "event=call_unknown"]
    assert not any("secret" in line for line in lines)
    assert caplog.records[0].exc_info[0] is ValueError


def test_a_function_that_hangs_is_cut_off():
    """It has as long as the call itself would have; then a person is asked."""

    async def play(store, clock):
        async def hang(_ctx: RunContext[Any], _arguments: Arguments) -> str:
            await anyio.sleep_forever()
            raise AssertionError

        for options, longest in (({"timeout_s": 7.0}, 7), ({}, 30)):
            bank = Bank()
            run_id = await crashed(store, bank, on_unknown=hang, **options)
            pay = bank.tool(on_unknown=hang, **options)
            agent = Agent(ScriptedModel(), tools=[pay], store=store, clock=clock, limits=Limits(tool_timeout_s=30))
            since = anyio.current_time()
            run = await agent.resume(run_id)
            assert anyio.current_time() - since == longest
            assert [item.kind for item in run.pending] == [PendingKind.OUTCOME]
            await store.delete(run_id)

    virtually(play)


async def test_a_plain_function_that_hangs_is_left_behind(store):
    """The event loop goes on without its thread, and a person is asked."""
    leave = threading.Event()

    def hang(_ctx: RunContext[Any], _arguments: Arguments) -> str:
        leave.wait()
        return "rerun"

    try:
        run, bank, _ = await recovered(store, on_unknown=hang, timeout_s=0.01)
    finally:
        leave.set()
    assert [item.kind for item in run.pending] == [PendingKind.OUTCOME]
    assert bank.paid == [keys_of(run)["t1.0"]]


async def test_what_was_found_out_is_found_out_once(store):
    """A worker that dies before it could record what it found asks again; one that has recorded it does not."""
    bank, found = Bank(), []

    def find(ctx: RunContext[Any], _arguments: Arguments) -> Found:
        found.append(ctx.call_id)
        return Found("paid")

    await crashed(store, bank, on_unknown=find)
    for at, written in ((1, False), (1, True)):
        dying = CrashingStore(store, at, written=written)
        with pytest.raises(WorkerKilled):
            await Agent(ScriptedModel(), tools=[bank.tool(on_unknown=find)], store=dying).resume("mine")
    agent = Agent(ScriptedModel("done"), tools=[bank.tool(on_unknown=find)], store=store)
    run = await agent.resume("mine")
    assert (run.output, found, bank.paid) == ("done", ["t1.0"] * 2, [keys_of(run)["t1.0"]])
    assert names(await agent.history("mine")).count("ToolFinished") == 1


async def test_the_edited_arguments_are_those_that_are_asked_about(store):
    """Where a person changed the arguments before the call ran, its function is given what did run."""
    bank = Bank()

    def find(ctx: RunContext[Any], arguments: Arguments) -> Found:
        bank.asked.append((ctx, arguments))
        return Found("paid")

    options = {"on_unknown": find, "requires_approval": True}
    dying = CrashingStore(store, 1_000, written=False)
    first = Agent(ScriptedModel(say("", call("pay", to="Ann"))), tools=[bank.tool(dying, **options)], store=dying)
    await first.run("go", id="mine")
    await first.approve("mine", "t1.0", arguments={"to": "Bob", "cents": 7})
    with pytest.raises(WorkerKilled):
        await first.resume("mine")
    run = await Agent(ScriptedModel("done"), tools=[bank.tool(**options)], store=store).resume("mine")
    assert run.output == "done"
    assert [vars(arguments) for _, arguments in bank.asked] == [{"to": "Bob", "cents": 7}]


@pytest.mark.parametrize("policy", ["maybe", "", None, 5, True, ["ask"]], ids=str)
def test_a_policy_that_makes_no_sense_is_misuse(policy):
    """The error names the tool, what was given, and what can be."""
    with pytest.raises(MisuseError, match=r"'pay'\(on_unknown=.* 'rerun', 'fail', 'ask' or a function"):
        Bank().tool(on_unknown=policy)


def test_a_read_only_tool_has_no_policy():
    """It runs again, whatever became of it; a word on that would say nothing, or be ignored."""
    with pytest.raises(MisuseError, match="read-only"):
        Bank().tool(read_only=True, on_unknown="ask")


@pytest.mark.parametrize(("options", "policy"), [({}, "ask"), ({"idempotent": True}, "rerun")], ids=str)
def test_without_a_word_only_what_may_be_repeated_is(options, policy):
    """What the author does not say is not assumed."""
    assert Bank().tool(**options).on_unknown == policy


async def test_a_rerun_that_did_not_begin_is_decided_on_anew(store):
    """The person's word is spent on a start that was taken back: the question that follows can be answered."""
    _, bank, agent = await recovered(store)
    await agent.settle("mine", "t1.0", rerun=True, by="ann")
    (row,) = await store.inbox("mine")
    run, lease = await agent.load("mine"), await store.lease("mine")
    events = (
        ApprovalGiven(call_id="t1.0", by="ann"),
        ToolStarted(call_id="t1.0", repeatable=False),
        ToolCutOff(call_id="t1.0", started_at=1.0, duration_s=0.0, undone=True),
        ToolLost(call_id="t1.0"),
    )
    assert await store.append(lease, run.fold(events), events, taken=[row.number]).wait()
    await store.release(lease).wait()
    await agent.settle("mine", "t1.0", rerun=True, by="bob")
    run = await agent.resume("mine")
    assert (run.is_over, bank.paid) == (True, [bank.paid[0]] * 2)
