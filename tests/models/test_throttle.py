"""`Throttled`: never more than its limits allow, in order, and nobody's place is lost."""

import random
import threading

import anyio
import pytest
from anyio.lowlevel import checkpoint
from hypothesis import given
from hypothesis import strategies as st

from agentfsm import Agent, MisuseError, ModelError, ModelUnavailableError, Settings, TextPart, Usage, UserMessage
from agentfsm._lib.limiter import MINUTE_S
from agentfsm.models import Fallback, Throttled
from agentfsm.models.wrappers.throttle import ThrottleStatistics
from agentfsm.ports import Model, OutputMode, Reply, Request, TextChunk
from agentfsm.testing import FunctionModel, ScriptedModel, run_virtual


def request_of(text="Hello", *, timeout_s=3_600.0, max_tokens=None):
    message = UserMessage(parts=(TextPart(text=text),))
    return Request(instructions="", messages=(message,), timeout_s=timeout_s, settings=Settings(max_tokens=max_tokens))


class Busy(Model):
    """Takes a while, and notes who is answered when."""

    name = "busy"

    def __init__(self, lasts_s=lambda: 1.0, usage=None):
        self.lasts_s, self.usage = lasts_s, usage
        self.now = self.most = 0
        self.began = []

    async def reply(self, request, emit=None):
        self.began.append((anyio.current_time(), request.messages[0].text))
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await anyio.sleep(self.lasts_s())
        finally:
            self.now -= 1
        return Reply(text="ok", usage=self.usage)


async def ask_all(model, count, **details):
    """Ask so often at once, in the order of the numbers."""
    async with anyio.create_task_group() as group:
        for number in range(count):
            group.start_soon(model.reply, request_of(str(number), **details))
            await anyio.wait_all_tasks_blocked()


def test_eight_runs_share_three_places():
    """Runs of an agent over one model are never answered more than three at once, and all are answered."""

    async def play():
        busy = Busy(lambda: random.Random(7).random())
        model = Throttled(busy, concurrency=3)
        agent = Agent(model)
        runs = []

        async def run():
            runs.append(await agent.run("hello"))

        async with anyio.create_task_group() as group:
            for _ in range(8):
                group.start_soon(run)
            await anyio.wait_all_tasks_blocked()
            assert (model.statistics().in_flight, model.statistics().waiting) == (3, 5)
        assert [one.output for one in runs] == ["ok"] * 8
        assert busy.most == 3
        assert model.statistics() == ThrottleStatistics(in_flight=0, waiting=0, requests=0, tokens=0, gave_up=0)

    run_virtual(play)


def test_first_come_first_served():
    """Those who wait go in the order in which they came."""

    async def play():
        busy = Busy()
        await ask_all(Throttled(busy, concurrency=2), 9)
        assert [text for _, text in sorted(busy.began)] == [str(number) for number in range(9)]

    run_virtual(play)


def test_no_minute_has_more_requests_than_allowed():
    """Not the first one either: a bucket that begins full would let twice as many go."""

    async def play():
        busy = Busy(lambda: 0.1)
        began = anyio.current_time()
        await ask_all(Throttled(busy, per_minute=4), 10)
        assert [round(at - began) for at, _ in busy.began] == [0] * 4 + [60] * 4 + [120] * 2

    run_virtual(play)


def test_tokens_are_counted_as_they_were():
    """A request goes when the minute has room for its estimate; what it did take counts for those behind it."""

    async def play():
        busy = Busy(lambda: 1.0, Usage(input_tokens=400, output_tokens=100))
        model = Throttled(busy, tokens_per_minute=1_000)
        for number in range(4):
            await model.reply(request_of(str(number)))
        assert [round(at - busy.began[0][0]) for at, _ in busy.began] == [0, 1, 60, 61]
        assert model.statistics().tokens == 1_000

    run_virtual(play)


def test_the_answer_is_counted_before_it_comes_where_its_length_is_known():
    """Ten requests of up to 500 tokens do not go at once where a minute allows 1,100."""

    async def play():
        busy = Busy(lambda: 300.0)
        await ask_all(Throttled(busy, tokens_per_minute=1_100), 4, max_tokens=500)
        assert [round(at - busy.began[0][0]) for at, _ in busy.began] == [0, 0, 60, 60]

    run_virtual(play)


def test_a_request_beyond_the_limit_goes_alone():
    """It would never go otherwise; those behind it wait until its minute is over."""

    async def play():
        busy = Busy(lambda: 1.0)
        model = Throttled(busy, tokens_per_minute=100)
        async with anyio.create_task_group() as group:
            for text in ("small", "x" * 4_000, "small"):
                group.start_soon(model.reply, request_of(text))
                await anyio.wait_all_tasks_blocked()
        assert [round(at - busy.began[0][0]) for at, _ in busy.began] == [0, 60, 120]

    run_virtual(play)


def test_a_request_that_was_not_answered_took_no_tokens():
    """Its estimate is taken back; as a request it counts."""

    async def play():
        def fails(_request):
            raise ModelUnavailableError("overloaded")

        model = Throttled(FunctionModel(fails), tokens_per_minute=1_000)
        with pytest.raises(ModelError):
            await model.reply(request_of(max_tokens=900))
        assert (model.statistics().requests, model.statistics().tokens, model.statistics().in_flight) == (1, 0, 0)

    run_virtual(play)


@pytest.mark.parametrize("who", [0, 1, 2], ids=["in flight", "first in line", "second in line"])
def test_who_is_cancelled_leaves_his_place(who):
    """Whether it was taken or waited for: those behind move up, and nothing stays counted."""

    async def play():
        busy = Busy()
        model = Throttled(busy, concurrency=1)
        scopes = [anyio.CancelScope() for _ in range(4)]

        async def ask(number):
            with scopes[number]:
                await model.reply(request_of(str(number)))

        began = anyio.current_time()
        async with anyio.create_task_group() as group:
            for number in range(4):
                group.start_soon(ask, number)
                await anyio.wait_all_tasks_blocked()
            scopes[who].cancel()
        answered = [text for _, text in busy.began if who == 0 or text != str(who)]
        assert answered == [str(number) for number in range(4) if who == 0 or number != who]
        assert anyio.current_time() - began == pytest.approx(3.0)
        assert (model.statistics().in_flight, model.statistics().waiting) == (0, 0)

    run_virtual(play)


def test_a_turn_that_does_not_come_in_time_is_an_overload():
    """It waits no longer than a model may be silent, and says what to do."""

    async def play():
        model = Throttled(Busy(lambda: 100.0), concurrency=1)
        async with anyio.create_task_group() as group:
            group.start_soon(model.reply, request_of())
            await anyio.wait_all_tasks_blocked()
            with pytest.raises(ModelUnavailableError, match=r"no turn .* in 30 seconds, .* 1 at once"):
                await model.reply(request_of(timeout_s=30.0))
            assert (model.statistics().gave_up, model.statistics().waiting) == (1, 0)
            group.cancel_scope.cancel()

    run_virtual(play)


def test_a_fallback_goes_round_a_line_that_is_too_long():
    """What waited in vain for the first model is answered by the next."""

    async def play():
        first = Throttled(Busy(lambda: 100.0), concurrency=1)
        model = Fallback(first, ScriptedModel("from the other"), monotonic=anyio.current_time)
        async with anyio.create_task_group() as group:
            group.start_soon(first.reply, request_of())
            await anyio.wait_all_tasks_blocked()
            assert (await model.reply(request_of(timeout_s=5.0))).text == "from the other"
            group.cancel_scope.cancel()

    run_virtual(play)


@given(
    st.lists(st.tuples(st.floats(0, 40), st.floats(0.01, 30), st.floats(0, 90)), min_size=1, max_size=12),
    st.integers(1, 4),
    st.integers(1, 4),
)
def test_whatever_comes_the_limits_hold(requests, concurrency, per_minute):
    """Requests that come, last and are cancelled at any time: both limits hold, and all that stay are answered."""

    async def play():
        busy = Busy()
        model = Throttled(busy, concurrency=concurrency, per_minute=per_minute)
        left = []

        async def ask(number, comes_s, lasts_s, patience_s):
            await anyio.sleep(comes_s)
            with anyio.move_on_after(patience_s if number % 2 else 10_000):
                busy.lasts_s = lambda: lasts_s
                await model.reply(request_of(str(number)))
                return
            left.append(number)

        async with anyio.create_task_group() as group:
            for number, request in enumerate(requests):
                group.start_soon(ask, number, *request)
        assert busy.most <= concurrency
        assert all(number % 2 for number in left)
        times = [at for at, _ in busy.began]
        assert all(
            later - earlier >= MINUTE_S - 1e-6 for earlier, later in zip(times, times[per_minute:], strict=False)
        )
        assert (model.statistics().in_flight, model.statistics().waiting) == (0, 0)

    run_virtual(play)


def test_the_limit_is_one_for_all_threads():
    """Requests of several event loops share the places, and wake each other."""
    together, barrier = [], threading.Barrier(4, timeout=20)

    class Counted(Model):
        name = "counted"
        now = 0

        async def reply(self, request, emit=None):
            self.now += 1
            together.append(self.now)
            await checkpoint()
            self.now -= 1
            return Reply(text="ok")

    model = Throttled(Counted(), concurrency=1)

    async def play():
        barrier.wait()
        async with anyio.create_task_group() as group:
            for _ in range(25):
                group.start_soon(model.reply, request_of())

    backends = ["asyncio", "trio"] * 2
    threads = [threading.Thread(target=anyio.run, args=(play,), kwargs={"backend": name}) for name in backends]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert together == [1] * 100


async def test_it_is_the_model_that_it_holds():
    """Its name, window, output modes, refusals, prices, chunks and end are those of the model."""

    class Inner(ScriptedModel):
        name, window_tokens, output_modes = "inner", 9_000, (OutputMode.JSON,)
        closed = False

        def unsupported_part(self, part):
            return "nothing goes"

        def cost_usd(self, usage):
            return 0.5

        async def aclose(self):
            self.closed = True

    inner = Inner("one two")
    model = Throttled(inner, per_minute=1)
    chunks = []
    await model.reply(request_of(), chunks.append)
    assert chunks[0] == TextChunk("one ")
    assert (model.name, model.window_tokens, model.output_modes) == ("inner", 9_000, (OutputMode.JSON,))
    assert (model.unsupported_part(TextPart(text="x")), model.cost_usd(Usage())) == ("nothing goes", 0.5)
    await model.aclose()
    assert inner.closed


@pytest.mark.parametrize("limits", [{}, {"concurrency": 0}, {"per_minute": -1}, {"tokens_per_minute": 0}])
def test_limits_that_cannot_be_are_refused(limits):
    """None at all, or one that would let nothing go."""
    with pytest.raises(MisuseError, match="1 or more"):
        Throttled(ScriptedModel(), **limits)
