"""What several agents spend together: never more than the run whose tools they are was given, and nobody hangs."""

from __future__ import annotations

from functools import partial

import anyio
import attrs
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from agentfsm import Agent, LimitError, Limits, Outcome, Run, Settings, StopReason, ToolCall, Usage, tool
from agentfsm.core.calls import OpenCall
from agentfsm.ports import Emit, FinishReason, Model, ProposedCall, Reply, Request
from agentfsm.testing import FunctionModel, ScriptedModel, call, say
from tests.support.checks import HANG_S, fresh, results_of, valid_history, virtually

# Per token.
ASKED_USD, ANSWER_USD = 0.001, 0.003


@attrs.define
class Till:
    """What was paid, counted outside of any run."""

    tokens: int = 0
    usd: float = 0.0

    def pay(self, usage: Usage) -> None:
        """Count a bill."""
        self.tokens += usage.tokens
        self.usd += price(usage)


def price(usage: Usage) -> float:
    """US dollars for a usage."""
    return usage.input_tokens * ASKED_USD + usage.output_tokens * ANSWER_USD


@attrs.frozen
class Bill:
    """What a reply costs, if nobody caps it, and what it is."""

    asked: int = 5
    # Fewer than any question here is counted for.
    answer: int = 5
    delay_s: float = 0.0
    empty: bool = False
    # A reply that cannot be used, and is paid for all the same.
    calls: tuple[str, ...] = ()


class Costly(Model):
    """A model that answers as it is told to, never longer than it may, and bills it."""

    name = "costly"

    def __init__(self, till: Till, *bills: Bill) -> None:
        """Take the bills in order; after the last, short answers."""
        self.till = till
        self.bills = list(bills)

    async def reply(self, request: Request, emit: Emit | None = None) -> Reply:
        """Answer."""
        bill = self.bills.pop(0) if self.bills else Bill()
        await anyio.sleep(bill.delay_s)
        cap = request.settings.max_tokens
        cut = cap is not None and cap < bill.answer
        usage = Usage(input_tokens=bill.asked, output_tokens=cap if cut else bill.answer)
        self.till.pay(usage)
        if bill.empty:
            return Reply(text="", usage=usage)
        if cut:
            return Reply(text="cut", usage=usage, finish_reason=FinishReason.LENGTH)
        calls = tuple(
            ProposedCall(id=f"c{n}", name=name, arguments='{"query": "go on, then"}')
            for n, name in enumerate(bill.calls)
        )
        return Reply(text="" if calls else "fine", calls=calls, usage=usage)

    def cost_usd(self, usage: Usage) -> float:
        """US dollars for this usage."""
        return price(usage)


BILLS = st.lists(
    st.builds(
        Bill,
        asked=st.integers(1, 5),
        answer=st.integers(1, 3_000),
        delay_s=st.sampled_from([0.0, 0.1, 0.2, 0.5]),
        empty=st.sampled_from([False, False, False, True]),
    ),
    max_size=4,
)
# Each child: what it is billed, and the same of a child of its own.
FAMILY = st.lists(st.tuples(BILLS, st.none() | BILLS), min_size=1, max_size=6)


def family(till: Till, shape: list, limits: Limits) -> Agent:
    """A coordinator with children that all work at once, and grandchildren."""
    small = Limits(retry_wait_s=0.1, retry_wait_max_s=0.1)
    tools = []
    for index, (bills, below) in enumerate(shape):
        helpers, script = [], bills
        if below is not None:
            helper = Agent(Costly(till, *below), name=f"helper{index}", limits=small)
            helpers.append(helper.as_tool())
            script = [Bill(calls=(f"helper{index}",)), *bills]
        child = Agent(Costly(till, *script), name=f"child{index}", tools=helpers, limits=small)
        tools.append(child.as_tool())
    asked = Bill(calls=tuple(made.name for made in tools))
    return Agent(Costly(till, asked), tools=tools, limits=limits, name="coordinator")


async def play(shape: list, limits: Limits, store, clock) -> tuple[Run, Till, Agent]:
    """Let a family work, and return what came of it."""
    till = Till()
    agent = family(till, shape, limits).with_(store=store, clock=clock)
    with anyio.fail_after(3_600):
        run = await agent.run("go on, all of you")
    valid_history(run.messages)
    assert Outcome.TIMED_OUT not in {result.outcome for result in results_of(run.messages)}, "somebody waited for ever"
    return run, till, agent


@given(FAMILY, st.integers(300, 20_000))
@example([([Bill(answer=800, empty=True)] * 3, None)] * 2, 1_000)
def test_children_in_parallel_never_overspend_tokens(shape, tokens):
    """However many there are and whatever each uses: together they stay within the caller's tokens, and all end."""
    limits = Limits(tokens=tokens, retry_wait_s=0.1, retry_wait_max_s=0.1)
    run, till, _ = virtually(partial(play, shape, limits))
    assert till.tokens <= tokens
    assert run.usage.tokens == till.tokens, "each token is counted once"


@given(FAMILY, st.floats(1.0, 40.0))
@example([([Bill(answer=800, empty=True)] * 3, None)] * 2, 3.0)
def test_children_in_parallel_never_overspend_money(shape, usd):
    """The same for US dollars."""
    limits = Limits(tokens=10**9, usd=usd, retry_wait_s=0.1, retry_wait_max_s=0.1)
    run, till, agent = virtually(partial(play, shape, limits))
    assert till.usd <= usd * (1 + 1e-9)
    assert run.usage.cost_usd == pytest.approx(till.usd)
    assert agent.cost(run).usd == pytest.approx(till.usd)


@given(FAMILY)
def test_a_rich_family_is_not_held_up(shape):
    """Where there is enough for all, every child gives its answer."""
    bold = [([attrs.evolve(b, empty=False) for b in bills], below) for bills, below in shape]
    run, till, _ = virtually(partial(play, bold, Limits(tokens=10**9)))
    assert {result.outcome for result in results_of(run.messages)} == {Outcome.DONE}
    assert run.usage.tokens == till.tokens


LIMITS = {
    "tokens": Limits(tokens=6_000),
    "usd": Limits(tokens=10**9, usd=20.0),
}


@pytest.mark.parametrize("kind", LIMITS)
def test_siblings_wait_for_each_others_reservations(kind):
    """What is left would do for one long answer at a time; the answers are short, so both are given, in full."""
    shape = [([Bill(delay_s=1.0)], None), ([Bill(delay_s=1.0)], None), ([Bill(delay_s=1.0)], None)]
    run, _, _ = virtually(partial(play, shape, LIMITS[kind]))
    assert [result.outcome for result in results_of(run.messages)] == [Outcome.DONE] * 3
    assert run.duration_s == pytest.approx(3.0)


async def test_a_small_limit_of_its_own_waits_for_nobody():
    """What a sibling holds back from the common budget does not matter to a child that has little anyway."""
    small_asked = anyio.Event()

    async def patient(_request: Request) -> Reply:
        await small_asked.wait()
        return Reply(text="patient", usage=Usage(input_tokens=5, output_tokens=5))

    def small(_request: Request) -> Reply:
        small_asked.set()
        return Reply(text="small", usage=Usage(input_tokens=5, output_tokens=5))

    first = Agent(FunctionModel(patient), name="patient").as_tool()
    second = Agent(FunctionModel(small), name="small", limits=Limits(tokens=1_000)).as_tool()
    asked = say("", call("patient", query="x"), call("small", query="x"))
    with anyio.fail_after(HANG_S):
        run = await Agent(ScriptedModel(asked, "done"), tools=[first, second]).run("go")
    assert [result.content for result in results_of(run.messages)] == ["patient", "small"]


def test_retries_are_paid_from_the_budget_too():
    """Each attempt is held back before it is made: replies that cannot be used do not spend twice what is there."""

    async def story(store, clock) -> tuple[Run, Till]:
        till = Till()
        wasteful = [Bill(answer=900, empty=True)] * 4
        agent = Agent(Costly(till, *wasteful), limits=Limits(tokens=1_000), store=store, clock=clock)
        return await agent.run("go on, then"), till

    run, till = virtually(story)
    assert till.tokens <= 1_000
    assert run.stop_reason is StopReason.TOKEN_BUDGET
    assert run.usage.tokens == till.tokens


def test_the_error_names_the_budget_that_ran_out():
    """A child whose caller is poor is not told of its own, large limit."""

    async def story(store, clock) -> Run:
        till = Till()
        child = Agent(Costly(till), name="child", instructions="Think. " * 500)
        greedy = Bill(answer=900, calls=("child",))
        limits = Limits(tokens=1_200)
        agent = Agent(Costly(till, greedy), tools=[child.as_tool()], limits=limits, clock=clock, store=store)
        return await agent.run("go on, then")

    run = virtually(story)
    (result,) = results_of(run.messages)
    assert result.outcome is Outcome.FAILED
    assert "of 1,200 tokens" in result.content
    assert "200,000" not in result.content


def test_an_unknown_price_is_refused_before_the_request():
    """Where the caller's money is limited, a child of which nobody knows the price asks nothing."""

    async def story(store, clock) -> tuple[Run, ScriptedModel]:
        model = ScriptedModel("never asked")
        agent = Agent(
            Costly(Till(), Bill(calls=("child",))),
            tools=[Agent(model, name="child").as_tool()],
            limits=Limits(usd=100.0),
            store=store,
            clock=clock,
        )
        return await agent.run("go"), model

    run, model = virtually(story)
    (result,) = results_of(run.messages)
    assert result.outcome is Outcome.FAILED
    assert "price of the model is unknown" in result.content
    assert model.requests == []


@tool(read_only=True, requires_approval=True)
async def ask_first(query: str) -> str:
    """Look at something that a person has to allow."""
    return f"seen: {query}"


def test_what_a_waiting_child_spent_counts_after_a_restart():
    """A later driving call knows from the child's journal what is gone, before the child itself goes on."""

    async def story(store, clock) -> tuple[Run, Till]:
        till = Till()

        def worker(sibling: Bill, tokens: int) -> Agent:
            first = Bill(answer=600, calls=("ask_first",))
            waiting = Agent(Costly(till, first), name="waiting", tools=[ask_first], settings=Settings(max_tokens=700))
            busy = Agent(Costly(till, sibling), name="busy", settings=Settings(max_tokens=1_800))
            return Agent(
                Costly(till, Bill(calls=("busy", "waiting"))),
                tools=[busy.as_tool(), waiting.as_tool()],
                settings=Settings(max_tokens=100),
                limits=Limits(tokens=tokens),
                store=store,
                clock=clock,
            )

        with anyio.move_on_after(5):  # the process ends: one child waits for a person, the other for its model
            await worker(Bill(delay_s=3_600), 3_000).run("go on, both", id="mine")
        assert till.tokens == 615
        return await worker(Bill(answer=1_800), 2_300).resume("mine"), till

    run, till = virtually(story)
    assert run.is_waiting
    assert 615 < till.tokens <= 2_300


def test_what_a_child_in_flight_spent_counts_after_a_restart():
    """The same where both were at work when the process ended: the first one that asks again knows of the other."""

    async def story(store, clock) -> tuple[Run, Till]:
        till = Till()

        @tool(read_only=True)
        async def look(query: str) -> str:
            """Look."""
            await anyio.sleep(3_600 if till.tokens < 700 else 0)
            return query

        def worker(sibling: Bill, tokens: int) -> Agent:
            first = Bill(answer=600, calls=("look",))
            other = Agent(Costly(till, first), name="other", tools=[look], settings=Settings(max_tokens=700))
            busy = Agent(Costly(till, sibling), name="busy", settings=Settings(max_tokens=1_800))
            return Agent(
                Costly(till, Bill(calls=("busy", "other"))),
                tools=[busy.as_tool(), other.as_tool()],
                settings=Settings(max_tokens=100),
                limits=Limits(tokens=tokens),
                store=store,
                clock=clock,
            )

        with anyio.move_on_after(5):
            await worker(Bill(delay_s=3_600), 3_000).run("go on, both", id="mine")
        assert till.tokens == 615
        return await worker(Bill(answer=1_800), 2_300).resume("mine"), till

    _, till = virtually(story)
    assert 615 < till.tokens <= 2_300


def test_what_a_grandchild_spent_is_not_counted_twice_after_a_restart():
    """It is done, and what it spent stands in its caller's journal, though that waits in the same turn."""

    async def story(store, clock) -> tuple[Run, Till]:
        till, short = Till(), Settings(max_tokens=100)

        def worker(sibling: Bill) -> Agent:
            done = Agent(Costly(till, Bill(answer=1_000)), name="done", settings=Settings(max_tokens=1_000))
            gate = Agent(Costly(till, Bill(calls=("ask_first",))), name="gate", tools=[ask_first], settings=short)
            helpers = [done.as_tool(), gate.as_tool()]
            asked = Bill(calls=("done", "gate"))
            middle = Agent(Costly(till, asked), name="middle", tools=helpers, settings=short)
            busy = Agent(Costly(till, sibling), name="busy", settings=Settings(max_tokens=800))
            return Agent(
                Costly(till, Bill(calls=("busy", "middle"))),
                tools=[busy.as_tool(), middle.as_tool()],
                settings=short,
                limits=Limits(tokens=2_400),
                store=store,
                clock=clock,
            )

        with anyio.move_on_after(5):
            await worker(Bill(delay_s=3_600)).run("go on, both", id="mine")
        assert till.tokens == 10 + 10 + 10 + 1_005
        return await worker(Bill(answer=800)).resume("mine"), till

    run, till = virtually(story)
    assert run.is_waiting
    assert till.tokens == 1_035 + 805
    result = run.open[0].result
    assert result is not None
    assert result.outcome is Outcome.DONE


def test_what_a_child_spent_counts_once_when_it_goes_on_in_the_same_driving_call():
    """Approved while a sibling still works, it is taken up again at once, and its spending is not held twice."""

    async def story(store, clock) -> Run:
        till = Till()
        waiting = Agent(Costly(till, Bill(answer=600, calls=("ask_first",))), name="waiting", tools=[ask_first])
        busy = Agent(Costly(till, Bill(delay_s=20.0)), name="busy")
        agent = Agent(
            Costly(till, Bill(calls=("waiting", "busy"))),
            tools=[waiting.as_tool(), busy.as_tool()],
            limits=Limits(tokens=1_200),
            store=store,
            clock=clock,
        )

        async def decide() -> None:
            await anyio.sleep(5)
            await agent.approve("mine.t1.0", "t1.0")

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(decide)
            return await agent.run("go on, both", id="mine")

    run = virtually(story)
    assert [result.outcome for result in results_of(run.messages)] == [Outcome.DONE] * 2
    assert run.output == "fine"


async def test_a_cancelled_request_gives_back_what_it_held():
    """And whoever waits for it goes on."""
    root = fresh(Limits(tokens=1_000))
    first, second = (fresh(Limits(), f"root.t1.{n}", root) for n in range(2))
    granted, held = await first.reserve(10, 900, 900, lambda _: None)
    assert granted == 900
    got: list[int] = []

    async def ask() -> None:
        got.append((await second.reserve(10, 900, 900, lambda _: None))[0])

    with anyio.fail_after(HANG_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await anyio.wait_all_tasks_blocked()
            assert got == []
            first.settle(held, Usage())
    assert got == [900]


async def test_nothing_to_wait_for_is_a_refusal():
    """Where nobody has a request under way, too little is too little, and says which number was reached."""
    root = fresh(Limits(tokens=100))
    with pytest.raises(LimitError, match="100") as caught:
        await root.reserve(100, 1, 1, lambda _: None)
    assert caught.value.reason == StopReason.TOKEN_BUDGET
    money = fresh(Limits(usd=0.01, tokens=110))  # tokens for just the shortest answer
    with pytest.raises(LimitError, match=r"of .* used") as caught:
        await money.reserve(100, 10, 10, price, least_tokens=10)
    assert caught.value.reason == StopReason.COST_BUDGET
    free, _ = await fresh(Limits(usd=0.01)).reserve(5, 100, 100, lambda _: 0.0)
    assert free == 100


def test_calls_that_are_refused_take_no_place():
    """What cannot run is not counted, here and above: another agent may have what becomes free."""
    root = fresh(Limits(tool_calls=3))
    below = fresh(Limits(), "root.t1.0", root)
    waiting = [OpenCall(call=ToolCall(id=f"t1.{n}", name="look", arguments="{}")) for n in range(5)]
    assert list(below.admit_calls(waiting)) == waiting[3:]
    assert (below.calls, root.calls) == (3, 3)
