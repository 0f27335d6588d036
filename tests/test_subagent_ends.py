"""An agent's run ends with the call that it serves, however that ends; and its caller reads what may have happened."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from agentfsm import (
    Agent,
    ConflictError,
    ErrorType,
    Limits,
    MisuseError,
    ModelError,
    ModelUnavailableError,
    Outcome,
    Run,
    RunContext,
    Runs,
    State,
    StopReason,
    StoreError,
    ToolResult,
    tool,
)
from agentfsm.agents.subagent import GRACE_S
from agentfsm.core.run_ids import DerivedId
from agentfsm.ports import Emit, Model, Reply, Request
from agentfsm.stores import MemoryStore, SQLiteStore
from agentfsm.testing import ScriptedModel, call, fail, say
from agentfsm.testing.conformance.helpers import list_claimable
from tests.support.checks import HANG_S, no_leases, results_of, sound, virtually
from tests.support.failing_stores import lose_run

CHILD, LEAF = "mine.t1.0", "mine.t1.0.t1.0"


@pytest.fixture(params=["memory", "sqlite"])
async def store(request, tmp_path):
    """A store, closed afterwards; no run in it may be leased then."""
    made = MemoryStore() if request.param == "memory" else SQLiteStore(tmp_path / "runs.db")
    yield made
    await no_leases(made)
    await made.aclose()


def asks(name: str) -> ScriptedModel:
    """A caller's model, that asks an agent and then is done."""
    return ScriptedModel(say("", call(name, query="go")), "done")


def the_result(run: Run) -> ToolResult:
    """The only result of a run."""
    (result,) = results_of(run.messages)
    return result


class Bank:
    """Where it is paid."""

    def __init__(self) -> None:
        self.paid: list[int] = []
        self.inside = anyio.Event()

    def slow(self, **options: bool):
        """A tool that needs longer for its end than an agent is given."""

        @tool(name="pay", **options)
        async def pay(cents: int) -> str:
            """Pay."""
            self.paid.append(cents)
            try:
                await anyio.sleep_forever()
            finally:
                with anyio.CancelScope(shield=True):
                    await anyio.sleep(2 * GRACE_S)
            return "paid"

        return pay

    def stuck(self):
        """A tool that never comes back."""

        @tool(name="pay")
        async def pay(cents: int) -> str:
            """Pay."""
            self.paid.append(cents)
            self.inside.set()
            await anyio.sleep_forever()
            return "paid"

        return pay

    def asking(self):
        """A tool that a person has to allow."""

        @tool(name="pay", requires_approval=True)
        async def pay(cents: int) -> str:
            """Pay."""
            self.paid.append(cents)
            return "paid"

        return pay


def clerk(made) -> Agent:
    """An agent that pays."""
    return Agent(ScriptedModel(say("", call("pay", cents=5)), "through"), tools=[made], name="clerk")


def family(store, made, *, deep: bool = False) -> Agent:
    """A caller of an agent that pays; or of one that asks the one that does."""
    child = clerk(made)
    if deep:
        child = Agent(asks("clerk"), tools=[child.as_tool()], name="chief")
    return Agent(asks(child.name), tools=[child.as_tool()], store=store, name="boss")


# Its call ends before it has said anything.


@pytest.mark.parametrize("deep", [False, True], ids=["child", "grandchild"])
def test_an_agent_that_is_cut_off_is_ended(deep):
    """Nobody would drive its run any more; what it was doing is neither hidden nor said to be repeatable."""

    async def story(store, clock) -> tuple[Run, list[Run], list[int]]:
        bank = Bank()
        child = clerk(bank.slow())
        if deep:
            child = Agent(asks("clerk"), tools=[child.as_tool()], name="chief")
        tools = [child.as_tool(timeout_s=0.3)]
        agent = Agent(asks(child.name), tools=tools, store=store, clock=clock)
        run = await agent.run("go", id="mine")
        below = [await agent.load(name) for name in [CHILD, LEAF][: 1 + deep]]
        for each in (run, *below):
            await sound(agent, each)
        return run, below, bank.paid

    run, below, paid = virtually(story)
    result = the_result(run)
    assert (result.outcome, result.error_type, result.retryable) == (Outcome.UNKNOWN, ErrorType.TIMEOUT, False)
    assert result.content.startswith("no result within 0.3 s")
    assert f"check before repeating: {'clerk' if deep else 'pay'}." in result.content
    assert "may be called again" not in result.content
    assert [each.stop_reason for each in below] == [StopReason.CANCELLED] * len(below)
    assert below[-1].calls[0].outcome is Outcome.UNKNOWN
    assert result.child is not None
    assert (run.output, paid) == ("done", [5])
    assert run.usage.tokens == 45 + 15 * deep


def test_a_reading_agent_that_is_cut_off_may_be_called_again():
    """It has changed nothing; its run is ended all the same."""

    async def story(store, clock) -> tuple[Run, Run]:
        made = Bank().slow(read_only=True)
        agent = Agent(asks("clerk"), tools=[clerk(made).as_tool(timeout_s=0.3)], store=store, clock=clock)
        run = await agent.run("go", id="mine")
        return run, await agent.load(CHILD)

    run, below = virtually(story)
    assert "It may be called again" in the_result(run).content
    assert the_result(run).retryable
    assert below.stop_reason is StopReason.CANCELLED


async def test_an_agent_that_breaks_is_ended(store):
    """A bug in its own code is a result, and leaves no run behind; what it did before is not said to be repeatable."""

    def check(_answer: str) -> None:
        raise KeyError("a bug")

    @tool
    async def pay(cents: int) -> str:
        """Pay."""
        return f"paid {cents}"

    child = clerk(pay).with_(output_validators=[check])
    run = await Agent(asks("clerk"), tools=[child.as_tool()], store=store).run("go", id="mine")
    result = the_result(run)
    assert (result.outcome, result.error_type, result.retryable) == (Outcome.FAILED, ErrorType.TOOL, False)
    assert "KeyError: 'a bug'" in result.content
    assert "check before you call it again" in result.content
    assert result.child is not None
    assert result.child.tool_calls == ("pay",)
    assert (await child.with_(store=store).load(CHILD)).stop_reason is StopReason.CANCELLED
    assert run.output == "done"


@pytest.mark.parametrize("deep", [False, True], ids=["child", "grandchild"])
@pytest.mark.parametrize("how", ["stopped", "failed", "limit"])
async def test_what_an_agent_has_done_before_it_ended_is_told(store, how, deep):
    """Whoever called it reads nothing else of its calls, and would have the same done again, under other keys."""

    @tool
    async def pay(ctx: RunContext[None], cents: int) -> str:
        """Pay."""
        if how == "stopped" and ctx.call_id == "t1.1":
            await agent.cancel(ctx.run_id)
            await anyio.sleep_forever()
        return f"paid {cents}"

    reply = say("", *[call("pay", cents=cents) for cents in ([5] if how == "failed" else [5, 6])])
    end = fail(ModelError("refused")) if how == "failed" else "through"
    child = Agent(ScriptedModel(reply, end), tools=[pay], name="clerk")
    made = child.as_tool(turns=1 if how == "limit" else 3)
    if deep:
        made = Agent(ScriptedModel(say("", call("clerk", query="go"))), tools=[made], name="chief").as_tool(turns=1)
    agent = Agent(asks("chief" if deep else "clerk"), tools=[made], store=store)
    run = await agent.run("go", id="mine")
    await sound(agent, run)
    below = the_result(await agent.load(CHILD) if deep else run).content
    assert ("It had done: pay (2 times)." if how == "limit" else "It had done: pay.") in below
    assert ("check before repeating: pay." in below) == (how == "stopped")
    assert not deep or "It had done: clerk in part." in the_result(run).content


async def test_an_agent_that_was_through_before_it_broke_has_answered(store):
    """Its answer is in its journal, whatever came after."""
    child = clerk(Bank().stuck()).with_(model=ScriptedModel("through"))
    made = child.as_tool()
    whole = made.function

    async def broken(*args, **kwargs):
        await whole(*args, **kwargs)
        raise KeyError("a bug")

    made.function = broken
    run = await Agent(asks("clerk"), tools=[made], store=store).run("go", id="mine")
    assert (the_result(run).outcome, the_result(run).content) == (Outcome.DONE, "through")


def test_an_agent_that_cannot_be_ended_in_time_ends_the_driving_call():
    """The store does not answer: the call stays open, and is taken up where it was."""

    class Hanging(MemoryStore):
        hangs = True

        async def post(self, run_id, key, item, *, before=None):
            """Never return, for an agent's run."""
            if self.hangs and run_id == CHILD:
                await anyio.sleep_forever()
            return await super().post(run_id, key, item, before=before)

    async def story(_store, clock) -> tuple[Run, list[int]]:
        store, bank = Hanging(clock=clock), Bank()
        agent = Agent(asks("clerk"), tools=[clerk(bank.slow()).as_tool(timeout_s=0.3)], store=store, clock=clock)
        with pytest.raises(StoreError, match="resume its caller"):
            await agent.run("go", id="mine")
        store.hangs = False
        return await agent.resume("mine"), bank.paid

    run, paid = virtually(story)
    assert [(item.run_id, item.tool) for item in run.pending] == [(CHILD, "pay")]
    assert paid == [5]


# Its caller ends.


async def left_at_work(agent: Agent, bank: Bank) -> None:
    """Leave a family behind whose worker has died while it paid."""
    with anyio.fail_after(HANG_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(agent.finish, agent.start("go", id="mine"))
            await bank.inside.wait()
            tasks.cancel_scope.cancel()


@pytest.mark.parametrize("deep", [False, True], ids=["child", "grandchild"])
async def test_a_caller_that_is_cancelled_without_its_tools_hides_nothing(store, deep):
    """Its agent was at work: that one ends with it, and its call is not said to be repeatable."""
    bank = Bank()
    agent = family(store, bank.stuck(), deep=deep)
    await left_at_work(agent, bank)
    stranger = Agent(ScriptedModel(), store=store)
    await stranger.cancel("mine")
    run = await stranger.load("mine")
    await sound(stranger, run)
    result = the_result(run)
    assert (run.stop_reason, result.outcome) == (StopReason.CANCELLED, Outcome.UNKNOWN)
    assert f"so check before repeating: {'clerk' if deep else 'pay'}." in result.content
    assert run.usage.tokens == (45 if deep else 30)
    for name in [CHILD, LEAF][: 1 + deep]:
        assert (await stranger.load(name)).stop_reason is StopReason.CANCELLED


async def test_a_caller_that_is_cancelled_without_its_tools_has_the_answer_that_is_there(store):
    """Its agent was through, which its own journal does not know yet."""
    child = clerk(Bank().asking())
    agent = Agent(asks("clerk"), tools=[child.as_tool()], store=store)
    await agent.run("go", id="mine")
    await agent.approve(CHILD, "t1.0")
    await child.with_(store=store).resume(CHILD)
    await Agent(ScriptedModel(), store=store).cancel("mine")
    result = the_result(await agent.load("mine"))
    assert (result.outcome, result.content) == (Outcome.DONE, "through")


async def test_an_agent_that_ends_while_it_is_told_to_has_answered():
    """The word comes too late, and that is no fault."""
    child = clerk(Bank().asking())

    class Late(MemoryStore):
        async def post(self, run_id, key, item, *, before=None):
            """Post what comes for the agent when it is through."""
            if (run_id, key) == (CHILD, "cancel"):
                await child.with_(store=self).resume(CHILD)
            return await super().post(run_id, key, item, before=before)

    agent = Agent(asks("clerk"), tools=[child.as_tool()], store=Late())
    await agent.run("go", id="mine")
    await agent.approve(CHILD, "t1.0")
    await agent.cancel("mine")
    result = the_result(await agent.load("mine"))
    assert (result.outcome, result.content) == (Outcome.DONE, "through")


async def test_an_agent_that_cannot_be_told_to_end_is_not_said_to_be_repeatable():
    """The store fails for the agent's run alone: its caller ends, and knows nothing of it."""

    class Faulty(MemoryStore):
        async def post(self, run_id, key, item, *, before=None):
            """Fail for the agent."""
            if (run_id, key) == (CHILD, "cancel"):
                raise StoreError("disk full")
            return await super().post(run_id, key, item, before=before)

    bank = Bank()
    agent = family(Faulty(), bank.stuck())
    await left_at_work(agent, bank)
    await agent.cancel("mine")
    run = await agent.load("mine")
    assert (run.stop_reason, the_result(run).outcome) == (StopReason.CANCELLED, Outcome.UNKNOWN)
    assert "Check before you repeat" in the_result(run).content
    assert run.usage.tokens == 30


# It is cancelled, or deleted, while its caller waits for it.


@pytest.mark.parametrize("deep", [False, True], ids=["child", "grandchild"])
async def test_a_waiting_agent_that_is_cancelled_wakes_its_callers(store, deep):
    """A worker goes on with the run at the top, which nobody has to resume."""
    bank = Bank()
    agent = family(store, bank.asking(), deep=deep)
    await agent.submit("go", id="mine")
    await agent.worker(until_idle=True)
    assert (await agent.load("mine")).is_waiting
    await agent.cancel(LEAF if deep else CHILD, by="ann")
    await agent.worker(until_idle=True)
    run = await agent.load("mine")
    assert (run.output, bank.paid) == ("done", [])
    assert await list_claimable(store, "boss") == ()


@pytest.mark.parametrize("deep", [False, True], ids=["child", "grandchild"])
async def test_a_waiting_agent_whose_run_is_lost_is_not_begun_anew(store, deep):
    """Nobody knows any more what it did: its caller is told so, and goes on."""
    bank = Bank()
    agent = family(store, bank.asking(), deep=deep)
    await agent.run("go", id="mine")
    await lose_run(store, LEAF if deep else CHILD)
    run = await agent.resume("mine")
    await sound(agent, run)
    above = await agent.load(CHILD) if deep else run
    assert the_result(above).outcome is Outcome.UNKNOWN
    assert "no longer in the store" in the_result(above).content
    assert (run.output, bank.paid) == ("done", [])
    assert {line.id for line in await store.runs()} == {"mine", CHILD} - (set() if deep else {CHILD})


async def test_a_waiting_agent_is_not_deleted_by_itself(store):
    """Nor is one below it; with the caller, it is."""
    agent = family(store, Bank().asking(), deep=True)
    await agent.run("go", id="mine")
    for run_id, caller in ((CHILD, "mine"), (LEAF, CHILD)):
        with pytest.raises(ConflictError, match=f"works for run '{caller}'"):
            await agent.runs.delete(run_id)
    assert await agent.runs.delete("mine") == 3
    assert await store.runs() == ()


async def test_an_agent_whose_worker_is_gone_is_not_deleted_by_itself(store):
    """Its caller, resumed, would call it again, and it would pay again; as it is, it goes on behind the payment."""
    paid: list[int] = []
    inside = anyio.Event()

    @tool
    async def pay(cents: int) -> str:
        """Pay."""
        paid.append(cents)
        return "paid"

    @tool(read_only=True)
    async def rest() -> str:
        """Rest, the first time."""
        if not inside.is_set():
            inside.set()
            await anyio.sleep_forever()
        return "rested"

    model = ScriptedModel(say("", call("pay", cents=5)), say("", call("rest")), "through")
    child = Agent(model, tools=[pay, rest], name="clerk")
    agent = Agent(asks("clerk"), tools=[child.as_tool()], store=store, name="boss")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(agent.finish, agent.start("go", id="mine"))
        await inside.wait()
        tasks.cancel_scope.cancel()
    with pytest.raises(ConflictError, match="works for run 'mine'"):
        await agent.runs.delete(CHILD)
    run = await agent.resume("mine")
    await sound(agent, run)
    assert (run.output, the_result(run).outcome, paid) == ("done", Outcome.DONE, [5])
    assert await agent.runs.delete(CHILD) == 1


async def test_a_caller_of_a_lost_agent_can_be_cancelled(store):
    """The call is not said to be repeatable."""
    agent = family(store, Bank().asking())
    await agent.run("go", id="mine")
    await lose_run(store, CHILD)
    await agent.cancel("mine")
    run = await agent.load("mine")
    assert (run.state, the_result(run).outcome) == (State.ERROR, Outcome.UNKNOWN)


# Its id.


async def test_the_id_of_a_caller_may_be_as_long_as_any(store):
    """The ids of the agents below are longer, and are no matter of whoever chose it."""
    agent = family(store, Bank().asking(), deep=True)
    run = await agent.run("go", id="m" * 200)
    (item,) = run.pending
    assert item.run_id == f"{run.id}.t1.0.t1.0"
    await agent.approve(item.run_id, item.call_id)
    assert (await agent.resume(run.id)).output == "done"
    with pytest.raises(MisuseError, match="1 to 200"):
        agent.start("go", id="m" * 201)
    with pytest.raises(ConflictError):
        await agent.cancel(run.id)


@pytest.mark.parametrize("read_only", [False, True], ids=["writes", "reads"])
@pytest.mark.parametrize("how", ["fails", "is too slow"])
async def test_a_call_that_broke_off_is_told_of(store, how, read_only):
    """An agent that fails later has heard that its payment may have happened, and so does its caller."""

    @tool(name="pay", read_only=read_only, timeout_s=0.05)
    async def pay(cents: int) -> str:
        """Pay."""
        if how == "fails":
            raise OSError(f"{cents} on the way, and the line is dead")
        await anyio.sleep_forever()
        return "paid"

    model = ScriptedModel(say("", call("pay", cents=5)), fail(ModelError("gone")))
    child = Agent(model, tools=[pay], name="clerk")
    with anyio.fail_after(HANG_S):
        run = await Agent(asks("clerk"), tools=[child.as_tool()], store=store).run("go")
    said = the_result(run)
    assert said.error_type is ErrorType.AGENT
    assert ("check before repeating: pay." in said.content) is not read_only


# One whose model is away


class Away(Model):
    """A model whose server is away, in these words of it."""

    name = "away"

    def __init__(self, retry_after_s: float | None = None) -> None:
        """Take what the server asks to wait."""
        self.requests = 0
        self.retry_after_s = retry_after_s

    async def reply(self, request: Request, emit: Emit | None = None) -> Reply:
        """Fail."""
        self.requests += 1
        raise ModelUnavailableError("away cannot be reached: connection refused", retry_after_s=self.retry_after_s)


@pytest.mark.parametrize(
    ("limits", "retry_after_s", "requests", "longest_s"),
    [
        (Limits(), None, 2, 1.5),
        (Limits(errors=5), None, 2, 1.5),
        (Limits(), 5.0, 2, 5.0),
        (Limits(), 60.0, 1, 0.0),
        (Limits(model_retries=0), None, 3, 0.0),
        (Limits(model_retries=1, errors=2, retry_wait_s=0.1), None, 4, 0.3),
    ],
    ids=["default", "errors", "retry-after", "too late", "no retries", "own"],
)
def test_a_specialist_whose_model_is_away_is_given_up_soon(limits, retry_after_s, requests, longest_s):
    """One retry, within its time (document C, 9.3), unless its own limits say how often; its caller reads why."""

    async def story(store, clock) -> tuple[Run, int]:
        away = Away(retry_after_s)
        expert = Agent(away, name="expert", limits=limits)
        model = ScriptedModel(
            say("", call("expert", query="find out")),
            say("I could not ask.", expect="away cannot be reached: connection refused). Go on without it"),
        )
        agent = Agent(model, tools=[expert.as_tool()], store=store, clock=clock)
        run = await agent.run("go")
        await sound(agent, run)
        return run, away.requests

    run, asked = virtually(story)
    assert (run.output, asked) == ("I could not ask.", requests)
    assert run.duration_s <= longest_s
    (result,) = results_of(run.messages)
    assert (result.outcome, result.error_type, result.attempts) == (Outcome.FAILED, ErrorType.AGENT, 1)


@pytest.fixture
def asking(store) -> Agent:
    """An agent of somebody else, whose runs wait for a person."""
    script = ScriptedModel(say("", call("pay", cents=7)), "paid")
    return Agent(script, tools=[Bank().asking()], store=store, name="other")


async def snapshot(agent: Agent, run_id: str) -> tuple[Any, ...]:
    """Return all that a store holds of a run."""
    return await agent.load(run_id), await agent.history(run_id), await agent.store.inbox(run_id)


@pytest.mark.parametrize("prompt", ["go", "another job"])
@pytest.mark.parametrize("state", ["new", "waiting", "driven", "over"])
async def test_an_agent_does_not_work_in_a_run_that_has_its_id_by_chance(store, asking, state, prompt):
    """As before version 0.3. The call fails and says why; the other run is not driven, cancelled or counted."""
    bank = Bank()
    helper = clerk(bank.stuck()).with_(model=ScriptedModel("through"))
    agent = Agent(asks("clerk"), tools=[helper.as_tool(prompt=lambda _: "go")], store=store)
    if state == "new":
        await asking.submit(prompt, id=DerivedId(CHILD), user="bob")
    else:
        await asking.run(prompt, id=DerivedId(CHILD), user="bob")
    if state == "over":
        await asking.cancel(CHILD)
    before = await snapshot(asking, CHILD)
    lease = await store.lease(CHILD) if state == "driven" else None
    run = await agent.run("go", id="mine")
    await sound(agent, run)
    result = the_result(run)
    assert (run.output, result.outcome, result.error_type) == ("done", Outcome.FAILED, ErrorType.AGENT)
    assert f"needs the id '{CHILD}'" in result.content
    assert run.usage.tokens == 2 * 15, "what the other run spent is not counted"
    if lease is not None:
        await store.release(lease).wait()
    assert await snapshot(asking, CHILD) == before


@pytest.mark.parametrize("knows_tools", [False, True], ids=["store only", "with its agent"])
@pytest.mark.parametrize("state", ["waiting", "over"])
async def test_a_cancel_leaves_a_run_that_has_the_id_of_an_agent_by_chance(store, asking, state, knows_tools):
    """It is not taken for the run of a call: it goes on, and its end is not told as that of the call."""
    bank = Bank()
    await asking.run("another job", id=DerivedId(CHILD))
    if state == "over":
        await asking.cancel(CHILD)
    before = await snapshot(asking, CHILD)
    agent = clerk(bank.stuck()).with_(store=store)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(agent.finish, agent.start("go", id="mine"))
        await bank.inside.wait()
        tasks.cancel_scope.cancel()
    await (agent if knows_tools else Runs(store)).cancel("mine")
    run = await agent.load("mine")
    await sound(agent, run)
    assert (run.stop_reason, the_result(run).outcome) == (StopReason.CANCELLED, Outcome.UNKNOWN)
    assert "cut off" in the_result(run).content
    assert await snapshot(asking, CHILD) == before


async def test_a_run_does_not_take_up_the_run_of_an_agent_that_has_its_id(store):
    """Also with the same prompt it is another's: it works for its caller."""
    agent = family(store, Bank().asking())
    await agent.run("go", id="mine")
    before = await snapshot(agent, CHILD)
    with pytest.raises(ConflictError, match="is a child run of 'mine'"):
        await agent.run(before[0].header.prompt, id=DerivedId(CHILD))
    assert await snapshot(agent, CHILD) == before
