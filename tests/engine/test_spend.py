"""Spending limits: shared by all runs of a window, reserved before each request, and settled after it."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress

import anyio
import pytest

from agentfsm import (
    Agent,
    CorruptError,
    ErrorType,
    Limits,
    MisuseError,
    ModelReplyError,
    Outcome,
    RunContext,
    Settings,
    Spend,
    StopReason,
    StoreError,
    Usage,
    tool,
)
from agentfsm.core.limits import SPEND_RECORDS
from agentfsm.ports import Model, Reply, StoreRecord
from agentfsm.reflection import RUBRIC, Reflector
from agentfsm.stores import MemoryStore
from agentfsm.telemetry import read_spend
from agentfsm.testing import ScriptedModel, call, fail, say
from tests.support.checks import Wrapped, results_of, virtually

DAY = Spend(per="day", usd=1.0)
# An answer of at most 10 tokens, a cent each.
SHORT = Settings(max_tokens=10)


class Priced(ScriptedModel):
    """A scripted model whose output costs a cent per token, and whose input is free."""

    def cost_usd(self, usage):
        return usage.output_tokens * 0.01


def answer(tokens, text="done", **more):
    return say(text, usage=Usage(input_tokens=1, output_tokens=tokens), **more)


def agent_of(store, *replies, spend=DAY, settings=SHORT, **fields):
    return Agent(Priced(*replies), store=store, spend=spend, settings=settings, **fields)


async def read_windows(store):
    """Return the values of all windows."""
    return [record.value for record in await store.list_records(SPEND_RECORDS)]


async def read_window(store):
    (window,) = await read_windows(store)
    return window


async def test_a_limit_may_be_about_one_purpose(store):
    """Then only its runs and those of their sub-agents count and are refused; one without a purpose is about all."""
    inner = Agent(Priced(*[answer(10)] * 9), store=store, settings=SHORT, name="inner")
    asks = say("", call("inner", query="?"), usage=Usage(output_tokens=10))
    calls = [asks, asks, answer(10), asks]
    limits = [
        Spend(per="day", usd=0.6),
        Spend(per="day", usd=0.2, purpose="eval"),
        Spend(per="month", usd=9, purpose=""),
    ]
    agent = agent_of(store, *calls, spend=limits, tools=[inner.as_tool()])
    first = await agent.run("1", purpose="eval")
    assert first.stop_reason is StopReason.COST_BUDGET
    assert "$0.20 of $0.20 spent for the agent agent for eval on" in first.stop_message
    assert (await agent.run("2")).stop_reason is StopReason.COMPLETED
    third = await agent.run("3")
    assert third.stop_reason is StopReason.COST_BUDGET
    assert "of $0.60 spent for the agent agent on" in third.stop_message
    spent = {each.window.purpose: each.spent_usd for each in await read_spend(store)}
    assert spent == pytest.approx({None: 0.6, "eval": 0.2, "": 0.4})


async def test_all_runs_of_a_window_share_its_limit(store):
    """Of several agents objects and processes with the same store. The refusal names the limit, and when it resets."""
    agent, other = agent_of(store, answer(10), answer(60)), agent_of(store, answer(35), answer(1))
    assert (await agent.run("1")).usage.cost_usd == 0.1
    assert (await other.run("2")).usage.cost_usd == pytest.approx(0.35)
    over = await agent.run("3")  # an answer of 60 tokens, although 10 were the cap
    assert over.output == "done"
    window = await read_window(store)
    assert window["spent_usd"] == pytest.approx(1.05)  # the request over the limit is counted
    refused = await other.run("4")
    assert refused.stop_reason is StopReason.COST_BUDGET
    assert "$1.05 of $1.00 spent for the agent agent on 20" in refused.stop_message
    assert " (UTC); the next one may cost $0.10; the limit resets at 20" in refused.stop_message
    window = await read_window(store)
    assert (window["requests"], window["refused"], window["reserved"]) == (3, 1, {})


async def test_the_answer_is_capped_to_what_is_left():
    """As for the limit of a run: the model may write less, and a request that would not fit is not sent."""
    caps = []

    class Capped(Priced):
        async def reply(self, request, emit=None):
            caps.append(request.settings.max_tokens)
            return await super().reply(request, emit)

    store = MemoryStore()
    agent = Agent(Capped(answer(10), answer(5)), store=store, spend=Spend(per="month", usd=0.15), settings=SHORT)
    await agent.run("1")
    await agent.run("2")
    assert caps == [10, 5]
    assert (await agent.run("3")).stop_reason is StopReason.COST_BUDGET
    assert caps == [10, 5]


async def test_users_and_tenants_have_windows_of_their_own():
    """And a run counts in each window that its agent limits."""
    store = MemoryStore()
    limits = [Spend(per="day", scope="user", usd=0.2), Spend(per="day", scope="tenant", usd=0.5), DAY]
    agent = agent_of(store, *[answer(10)] * 9, spend=limits)
    for user, tenant in [("ann", "a"), ("ann", "a"), ("ann", "b"), ("bob", "a"), ("bob", "a"), (None, None)]:
        assert (await agent.run("x", user=user, tenant=tenant)).stop_reason is StopReason.COMPLETED
    over = await agent.run("x", user="ann", tenant="a")
    assert "the user ann of the tenant a" in over.stop_message
    spent = {(each["scope"], each["tenant"], each["subject"]): each["spent_usd"] for each in await read_windows(store)}
    assert spent == {
        ("agent", "", "agent"): pytest.approx(0.6),
        ("tenant", "", ""): pytest.approx(0.1),
        ("tenant", "", "a"): pytest.approx(0.4),
        ("tenant", "", "b"): pytest.approx(0.1),
        ("user", "", ""): pytest.approx(0.1),
        ("user", "a", "ann"): pytest.approx(0.2),
        ("user", "a", "bob"): pytest.approx(0.2),
        ("user", "b", "ann"): pytest.approx(0.1),
    }
    assert all(not each["reserved"] for each in await read_windows(store))


def test_a_window_ends():
    """The next day has the whole amount again."""

    async def play(store, clock):
        agent = agent_of(store, answer(10), answer(10), spend=Spend(per="day", usd=0.1), clock=clock)
        await agent.run("1")
        assert (await agent.run("2")).stop_reason is StopReason.COST_BUDGET
        await anyio.sleep(86_400)
        assert (await agent.run("3")).output == "done"

    virtually(play)


async def test_the_warning_is_given_once_per_window(store, caplog):
    """By the process whose request reaches the share, to its log and its stream."""
    agents = [agent_of(store, *[answer(10)] * 6) for _ in range(2)]
    warnings = []
    for index in range(10):
        async with agents[index % 2].stream("x") as events:
            warnings += [(index, each.limit, each.used) async for each in events if hasattr(each, "limit")]
    ((index, limit, used),) = warnings
    assert (index, used) == (7, pytest.approx(0.8))
    assert limit.startswith("usd of the agent agent on ")
    assert len([line for line in caplog.messages if "spend_warning" in line]) == 1


async def test_failed_and_side_requests_count(store):
    """A reply of no use, its retry, and the request of a judge."""
    scores = {name: {"score": 5, "reason": "good"} for name in RUBRIC}
    verdict = json.dumps({"evaluation": scores, "action": "accept", "retry_details": {}})
    useless = fail(ModelReplyError("garbled", Usage(input_tokens=1, output_tokens=4)))
    judge = Reflector(model=Priced(answer(3, verdict)), answer_tokens=10)
    agent = agent_of(store, useless, answer(5), limits=Limits(retry_wait_s=0.001), reflector=judge)
    run = await agent.run("x")
    assert run.output == "done"
    assert (await read_window(store))["spent_usd"] == pytest.approx(run.usage.cost_usd) == pytest.approx(0.12)


async def test_sub_agents_spend_from_the_limits_of_their_callers(store):
    """Once, also if both have the same limit; and from their own."""
    user = Spend(per="day", scope="user", usd=5)
    child = agent_of(store, answer(7), name="child", spend=user)
    calls = say("", call("child", query="?"), usage=Usage(output_tokens=2))
    parent = agent_of(store, calls, answer(3), name="parent", spend=[DAY, user], tools=[child.as_tool()])
    run = await parent.run("x", user="ann")
    spent = {(each["scope"], each["subject"]): each["spent_usd"] for each in await read_windows(store)}
    assert run.usage.cost_usd == pytest.approx(0.12)
    assert spent == {("agent", "parent"): pytest.approx(0.12), ("user", "ann"): pytest.approx(0.12)}


async def test_calls_of_tools_count(store):
    """Declared costs before the call, which is refused without room; reported costs after it."""
    made = []

    @tool(cost_usd=0.4)
    async def look_up() -> str:
        """Look up."""
        made.append("look_up")
        return "found"

    @tool
    async def measure(ctx: RunContext[None]) -> str:
        """Measure."""
        ctx.add_cost(0.05)
        return "9"

    free = say("", call("look_up"), call("look_up"), call("look_up"), usage=Usage())
    agent = agent_of(store, free, say("", call("measure"), usage=Usage()), answer(2), tools=[look_up, measure])
    run = await agent.run("x")
    results = results_of(run.messages)
    assert [each.outcome for each in results] == [Outcome.DONE, Outcome.DONE, Outcome.SKIPPED, Outcome.DONE]
    assert results[2].error_type is ErrorType.BUDGET
    assert "$0.80 reserved" in results[2].content or "$0.80 of $1.00" in results[2].content
    window = await read_window(store)
    assert made == ["look_up"] * 2
    assert window["spent_usd"] == pytest.approx(run.usage.cost_usd) == pytest.approx(0.87)
    assert window["reserved"] == {}


class Silent(Priced):
    """A model that never answers."""

    def __init__(self):
        super().__init__()
        self.asked = anyio.Event()

    async def reply(self, request, emit=None):
        self.asked.set()
        await anyio.sleep_forever()


async def cut_off(store, run_id="r"):
    """Cancel the task of a run while its model is asked."""
    model = Silent()
    async with anyio.create_task_group() as group:
        group.start_soon(lambda: Agent(model, store=store, spend=DAY, settings=SHORT).run("x", id=run_id))
        await model.asked.wait()
        group.cancel_scope.cancel()


async def test_a_request_that_was_cut_off_counts_in_full(store):
    """Nobody knows what it has cost: the provider may have billed the whole answer."""
    await cut_off(store)
    window = await read_window(store)
    assert (window["spent_usd"], window["reserved"]) == (pytest.approx(0.1), {})


class Dying(Wrapped):
    """A store whose process is gone after a number of writes of records: nothing is written any more."""

    def __init__(self, inner, writes):
        self.inner, self.left = inner, writes

    async def write_record(self, *args, **more):
        if not self.left:
            raise StoreError("gone")
        self.left -= 1
        return await self.inner.write_record(*args, **more)


async def test_the_reservation_of_a_dead_process_counts_when_its_run_goes_on(store):
    """Once, with the reserved amount: the provider may have billed the request, which is repeated."""
    await cut_off(Dying(store, 1))
    window = await read_window(store)
    assert (window["spent_usd"], [usd for usd, _ in window["reserved"].values()]) == (0.0, [pytest.approx(0.1)])
    other = agent_of(store, answer(5), answer(5))
    assert (await other.run("beside")).output == "done"
    assert len((await read_window(store))["reserved"]) == 1
    assert (await other.resume("r")).output == "done"
    window = await read_window(store)
    assert (window["spent_usd"], window["requests"], window["reserved"]) == (pytest.approx(0.2), 3, {})


async def test_nothing_is_sent_while_the_records_cannot_be_written(store):
    """The run fails as it does when the store is down, and can be resumed."""
    model = Priced(answer(4))
    agent = Agent(model, store=store, spend=DAY, settings=SHORT)
    with pytest.raises(StoreError, match="gone"):
        await agent.with_(store=Dying(store, 0)).run("x", id="r")
    assert await read_windows(store) == []
    assert (await agent.resume("r")).output == "done"
    assert (await read_window(store))["spent_usd"] == pytest.approx(0.04)


async def test_a_model_without_a_price_is_refused():
    """Before anything is sent or stored."""
    agent = Agent(ScriptedModel("x"), spend=DAY)
    with pytest.raises(MisuseError, match=r"Agent\(spend=\.\.\.\) needs a price"):
        await agent.run("x")
    assert not await agent.runs.list()


@pytest.mark.parametrize(
    ("spend", "text"),
    [([DAY, Spend(per="day", usd=2)], "two limits for each agent per day"), (5, "give Spend"), ([5], "give Spend")],
)
def test_wrong_limits_are_refused(spend, text):
    """With the reason."""
    with pytest.raises(MisuseError, match=text):
        Agent(Priced("x"), spend=spend)


class Slow(Model):
    """Answers after a second with one token, and counts the answers in progress."""

    name = "slow"

    def __init__(self):
        self.open = self.most = self.answers = 0

    def cost_usd(self, usage):
        return usage.output_tokens * 0.01

    async def reply(self, request, emit=None):
        self.open += 1
        self.most = max(self.most, self.open)
        await anyio.sleep(1)
        self.open -= 1
        self.answers += 1
        return Reply(text="done", usage=Usage(input_tokens=1, output_tokens=1))


class Counting(Wrapped):
    """A store that counts the calls for records."""

    def __init__(self, inner):
        self.inner, self.calls = inner, []

    async def read_record(self, *args):
        self.calls.append("read")
        return await self.inner.read_record(*args)

    async def write_record(self, *args, **more) -> StoreRecord:
        self.calls.append("write")
        await anyio.sleep(0.005)
        return await self.inner.write_record(*args, **more)


def test_runs_side_by_side_wait_for_room_and_share_writes():
    """Fifty runs at a limit that has room for five largest answers at once, and for all their real costs."""

    async def play(store, clock):
        counting = Counting(store)
        model = Slow()
        agent = Agent(model, store=counting, clock=clock, spend=Spend(per="day", usd=0.59), settings=SHORT)
        async with anyio.create_task_group() as group:
            for index in range(50):
                group.start_soon(agent.run, f"{index}")
        window = await read_window(store)
        assert (model.answers, window["requests"], window["refused"]) == (50, 50, 0)
        assert window["spent_usd"] == pytest.approx(0.5)
        assert 2 <= model.most <= 5
        assert counting.calls.count("write") <= 100  # one for each request and one after it, or fewer

    virtually(play)


def test_processes_that_write_at_once_all_get_on():
    """Two stores in front of one, as two processes have: conflicts are retried."""

    async def play(store, clock):
        fronts = [Counting(store), Counting(store)]
        model = Slow()
        agents = [Agent(model, store=each, clock=clock, spend=DAY, settings=SHORT) for each in fronts]
        async with anyio.create_task_group() as group:
            for index in range(50):
                group.start_soon(agents[index % 2].run, f"{index}")
        window = await read_window(store)
        assert (window["spent_usd"], window["reserved"]) == (pytest.approx(0.5), {})
        assert len(fronts[0].calls) + len(fronts[1].calls) <= 400

    virtually(play)


def test_a_dead_process_is_not_waited_for_without_end():
    """Its reservation counts as spent after some minutes, and the message says what is reserved."""

    async def play(store, clock):
        agent = agent_of(store, answer(1), spend=Spend(per="day", usd=0.1), clock=clock)
        started = await agent_of(store, answer(1), clock=clock).run("makes the window")
        assert started.output == "done"
        (record,) = await store.list_records(SPEND_RECORDS)
        dead = {**record.value, "reserved": {"dead#1.1": [0.08, clock.now()]}}
        await store.write_record(SPEND_RECORDS, record.key, dead, revision=record.revision)
        before = clock.now()
        run = await agent.with_(limits=Limits(seconds=1_000)).run("x")
        assert (run.output, clock.now() - before) == ("done", pytest.approx(300, abs=5))  # an answer of one token

    virtually(play)


TWO_WINDOWS = [DAY, Spend(per="month", scope="tenant", usd=0.15)]


class Stopped(Wrapped):
    """A store whose process stops: from then on no record is written."""

    def __init__(self, inner):
        self.inner, self.is_over = inner, False

    async def write_record(self, *args, **more):
        if self.is_over:
            raise StoreError("gone")
        return await self.inner.write_record(*args, **more)


def test_a_request_that_waits_has_reserved_nothing():
    """In no window, so nothing counts that was not sent: also if its process dies again and again while it waits."""

    async def play(store, clock):
        limits = {"spend": TWO_WINDOWS, "clock": clock}
        await agent_of(store, answer(1), **limits).run("makes the windows", tenant="a")
        record = max(await store.list_records(SPEND_RECORDS), key=lambda each: each.key)  # of the tenant, the last one
        busy = {**record.value, "reserved": {"other#1.1": [0.1, clock.now()]}}
        await store.write_record(SPEND_RECORDS, record.key, busy, revision=record.revision)
        for index in range(3):
            process = Stopped(store)
            agent = agent_of(process, answer(1), **limits)
            async with anyio.create_task_group() as group:
                if index:
                    group.start_soon(agent.resume, "r")
                else:
                    group.start_soon(lambda waits=agent: waits.run("x", id="r", tenant="a"))
                await anyio.sleep(10)
                process.is_over = True
                group.cancel_scope.cancel()
            windows = {each["scope"]: (each["spent_usd"], [*each["reserved"]]) for each in await read_windows(store)}
            assert windows == {"agent": (0.01, []), "tenant": (0.01, ["other#1.1"])}
        written = await store.read_record(SPEND_RECORDS, record.key)
        await store.write_record(SPEND_RECORDS, record.key, record.value, revision=written.revision)
        assert (await agent_of(store, answer(1), **limits).resume("r")).output == "done"
        assert [each["spent_usd"] for each in await read_windows(store)] == [pytest.approx(0.02)] * 2

    virtually(play)


def test_requests_that_wait_for_one_tenant_do_not_hold_up_another():
    """The window of the agent has room for all that is in progress, and for one more."""

    async def play(store, clock):
        ended = []
        agent = Agent(
            Slow(), store=store, clock=clock, spend=[Spend(per="day", usd=0.55), TWO_WINDOWS[1]], settings=SHORT
        )

        async def work(tenant):
            await agent.run("x", tenant=tenant)
            ended.append((tenant, clock.now() - before))

        await agent.run("x", tenant="b")  # the first request to a model is sent alone
        ended.clear()
        async with anyio.create_task_group() as group:
            before = clock.now()
            for tenant in "aaaaa":
                group.start_soon(work, tenant)
            await anyio.sleep(0.5)
            group.start_soon(work, "b")
        took = [seconds for tenant, seconds in ended if tenant == "b"]
        assert (took, len(ended)) == ([pytest.approx(1.5, abs=0.1)], 6)

    virtually(play)


def test_requests_that_need_room_in_several_full_windows_all_get_on():
    """Of two processes, whose requests reserve in different orders after they have waited."""

    async def play(store, clock):
        tenant, user = (Spend(per="day", scope="tenant", usd=0.35), Spend(per="day", scope="user", usd=0.25))
        limits = [Spend(per="day", usd=0.55), tenant, user]
        model = Slow()
        agents = [
            Agent(model, store=Counting(store), clock=clock, spend=limits, settings=SHORT, limits=Limits(seconds=900))
            for _ in range(2)
        ]
        async with anyio.create_task_group() as group:
            for index in range(30):
                who = {"tenant": f"{index % 3}", "user": f"{index % 5}"}
                group.start_soon(lambda agent=agents[index % 2], who=who: agent.run("x", **who))
        assert model.answers == 30
        assert all((each["reserved"], each["refused"]) == ({}, 0) for each in await read_windows(store))

    virtually(play)


def test_a_run_whose_time_is_up_while_it_waits_names_the_window():
    """So that it is clear which limit is too low."""

    async def play(store, clock):
        agent = Agent(Silent(), store=store, clock=clock, spend=TWO_WINDOWS, settings=SHORT)
        async with anyio.create_task_group() as group:
            group.start_soon(lambda: agent.run("x", tenant="a"))
            await agent.model.asked.wait()
            run = await agent.with_(limits=Limits(seconds=5)).run("y", tenant="a")
            group.cancel_scope.cancel()
        assert run.stop_reason is StopReason.TIMEOUT
        assert "a request waited for room in the spending limit of the tenant a in 20" in run.stop_message

    virtually(play)


class Unsure(Wrapped):
    """A store whose connection breaks once after a write of a record, which was made."""

    def __init__(self, inner, after):
        self.inner, self.left = inner, after

    async def write_record(self, *args, **more):
        written = await self.inner.write_record(*args, **more)
        self.left -= 1
        if not self.left:
            raise StoreError("no answer")
        return written


async def test_a_write_with_an_unknown_outcome_counts_once(store):
    """It is repeated, and changes nothing if it was made: a reservation, a settlement, and the cost of a call."""

    @tool
    async def measure(ctx: RunContext[None]) -> str:
        """Measure."""
        ctx.add_cost(0.05)
        return "9"

    with pytest.raises(StoreError, match="no answer"):
        await agent_of(Unsure(store, 1), answer(4)).run("x")
    window = await read_window(store)
    assert (window["spent_usd"], window["requests"], window["reserved"]) == (0.0, 0, {})
    for after in range(2, 7):
        script = say("", call("measure"), usage=Usage(output_tokens=2)), answer(3)
        agent = agent_of(Unsure(store, after), *script, tools=[measure], spend=Spend(per="day", usd=50))
        before = (await read_window(store))["spent_usd"]
        with suppress(StoreError):  # where it is a reservation
            await agent.run("x", id=f"r{after}")
        resumed = await agent.resume(f"r{after}")
        window = await read_window(store)
        assert window["spent_usd"] - before == pytest.approx(resumed.usage.cost_usd) == pytest.approx(0.1)
        assert window["reserved"] == {}


async def test_a_damaged_record_is_not_overwritten(store):
    """The run fails, and nothing is spent."""
    agent = agent_of(store, answer(1))
    await agent.run("x")
    (record,) = await store.list_records(SPEND_RECORDS)
    await store.write_record(SPEND_RECORDS, record.key, {"spent_usd": "much"}, revision=record.revision)
    with pytest.raises(CorruptError, match="cannot be read"):
        await agent_of(store, answer(1)).run("x")


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_coroutine_that_is_closed_counts_its_request():
    """It cannot write any more; the next write of its event loop does."""
    store, model = MemoryStore(), Silent()
    driving = Agent(model, store=store, spend=DAY, settings=SHORT).run("x", id="r")
    while not model.asked.is_set():
        wish = driving.send(None)
        if wish is None:
            await asyncio.sleep(0)
        elif not model.asked.is_set():
            wish._asyncio_future_blocking = False
            await asyncio.wait([wish])
    driving.close()
    assert list((await read_window(store))["reserved"]) != []
    assert (await agent_of(store, answer(5)).run("another")).output == "done"
    window = await read_window(store)
    assert (window["spent_usd"], window["reserved"]) == (pytest.approx(0.15), {})
