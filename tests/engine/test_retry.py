"""Asking the model again: when, how often, and after what wait. All in virtual time."""

from __future__ import annotations

import asyncio

import anyio
import pytest

from agentfsm import (
    Agent,
    AgentError,
    CallDelta,
    ContextTooLongError,
    Limits,
    ModelError,
    ModelReplyError,
    ModelUnavailableError,
    State,
    StopReason,
    StreamEvent,
    TextDelta,
    tool,
)
from agentfsm.ports import Emit, Model, Reply, Request, TextChunk
from agentfsm.streaming.stream import RunStream
from agentfsm.testing import FunctionModel, ScriptedModel, call, fail, say
from tests.support.checks import names, sound, virtually


class Timed(ScriptedModel):
    """A scripted model that notes when it was asked."""

    def __init__(self, *script: object) -> None:
        """Take the script."""
        super().__init__(*script)
        self.times: list[float] = []

    async def reply(self, request: Request, emit: Emit | None = None) -> Reply:
        """Note the time, and follow the script."""
        self.times.append(anyio.current_time())
        return await super().reply(request, emit)

    @property
    def waits(self) -> list[float]:
        """Seconds between two questions."""
        return [later - earlier for earlier, later in zip(self.times, self.times[1:], strict=False)]


OVERLOAD = fail(ModelUnavailableError("529 overloaded"))


def test_a_model_that_nobody_reaches_is_given_up_after_error_turns_of_attempts():
    """The arithmetic of docs/models.md: 3 * (1 + 3) attempts in 21 to 31.5 seconds; or the first failure is the end."""

    async def play(store, clock):
        model = Timed(*[OVERLOAD] * 12)
        run = await Agent(model, store=store, clock=clock).run("hello")
        assert (run.stop_reason, len(model.times)) == (StopReason.TOO_MANY_ERRORS, 12)
        assert 21 <= run.duration_s <= 31.5
        model = Timed(OVERLOAD)
        run = await Agent(model, store=store, clock=clock, limits=Limits(errors=1, model_retries=0)).run("hello")
        assert (run.stop_reason, len(model.times), run.duration_s) == (StopReason.TOO_MANY_ERRORS, 1, 0)

    virtually(play)


def test_the_wait_doubles_and_spreads():
    """1, 2 and 4 seconds, and up to half of that by chance, so that a crowd spreads out."""
    seen: list[list[float]] = []

    async def play(store, clock):
        model = Timed(OVERLOAD, OVERLOAD, OVERLOAD, "done")
        agent = Agent(model, store=store, clock=clock)
        run = await agent.run("hello")
        assert (run.output, run.turn, run.errors) == ("done", 1, ())
        assert names(await agent.history(run.id)) == ["Observed", *["AttemptFailed"] * 3, "AnswerGiven"]
        assert run.duration_s == pytest.approx(sum(model.waits))
        seen.append(model.waits)
        await sound(agent, run)

    for _ in range(40):
        virtually(play)
    for index, least in enumerate((1.0, 2.0, 4.0)):
        waits = [waits[index] for waits in seen]
        assert all(least <= wait <= 1.5 * least for wait in waits)
        assert max(waits) - min(waits) > 0.1 * least


def test_the_waits_are_settings_and_capped():
    """`retry_wait_s` is the first wait, `retry_wait_max_s` the longest, and `model_retries` how often."""

    async def play(store, clock):
        model = Timed(*[OVERLOAD] * 8, "done")
        limits = Limits(model_retries=8, retry_wait_s=0.5, retry_wait_max_s=5)
        agent = Agent(model, limits=limits, store=store, clock=clock)
        assert (await agent.run("hello")).output == "done"
        assert 0.5 <= model.waits[0] <= 0.75
        assert model.waits[-4:] == [pytest.approx(5)] * 4

    virtually(play)


@pytest.mark.parametrize(("asked", "waited"), [(0.0, 0.0), (7.5, 7.5), (3_600.0, 60.0)])
def test_retry_after_is_honoured_and_capped(asked, waited):
    """The server's own wait counts, exactly, up to the cap."""

    async def play(store, clock):
        model = Timed(fail(ModelUnavailableError("429", retry_after_s=asked)), "done")
        assert (await Agent(model, store=store, clock=clock).run("hello")).output == "done"
        assert model.waits == [pytest.approx(waited)]

    virtually(play)


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_model_whose_own_task_was_cancelled_is_asked_again():
    """On asyncio that looks like our own end, and is the model's."""

    async def answer(_request: Request) -> Reply:
        if not asked:
            asked.append("once")
            await cancelled_elsewhere()
        return Reply(text="done")

    asked: list[str] = []
    run = await Agent(FunctionModel(answer), limits=Limits(retry_wait_s=1e-9)).run("hello")
    assert run.output == "done"
    assert asked == ["once"]


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_validator_whose_own_task_was_cancelled_is_an_error_and_no_silent_end():
    """The run stands where it was, and whoever drives it hears of it, also where events end."""

    async def check(_answer: str) -> None:
        await cancelled_elsewhere()

    agent = Agent(ScriptedModel("draft", "draft"), output_validators=[check])
    with pytest.raises(AgentError, match="stopped in REFLECT"):
        await agent.run("hello", id="r")
    assert (await agent.load("r")).state is State.REFLECT
    with pytest.raises(AgentError, match="stopped in REFLECT"):
        await heard(agent.stream("hello"))


async def heard(stream: RunStream[str]) -> list[StreamEvent]:
    """Return the events of a stream."""
    async with stream:
        return [event async for event in stream]


async def cancelled_elsewhere() -> None:
    """Await what somebody else has cancelled."""
    task = asyncio.ensure_future(asyncio.sleep(1))
    task.cancel()
    await task


@pytest.mark.parametrize("retries", [0, 1, 3])
def test_after_the_last_attempt_the_turn_is_an_error_turn(retries):
    """1 + `model_retries` attempts make a turn; its failure is a fact, and the next turn asks again."""

    async def play(store, clock):
        model = Timed(*[OVERLOAD] * (retries + 1), "done")
        agent = Agent(model, limits=Limits(model_retries=retries), store=store, clock=clock)
        run = await agent.run("hello")
        assert (run.output, run.turn) == ("done", 2)
        events = await agent.history(run.id)
        assert names(events) == ["Observed", *["AttemptFailed"] * retries, "ModelFaltered", "AnswerGiven"]
        assert all("529 overloaded" in event.error for event in events[1:-1])
        assert len(model.times) == retries + 2

    virtually(play)


@pytest.mark.parametrize("error", [ModelError("400"), ContextTooLongError("too long")], ids=repr)
def test_what_cannot_be_mended_is_asked_once(error):
    """A refusal for good is not asked again."""

    async def play(store, clock):
        model = Timed(fail(error), "never")
        run = await Agent(model, store=store, clock=clock).run("hello")
        assert (run.state, run.stop_reason) == (State.ERROR, StopReason.MODEL_ERROR)
        assert len(model.times) == 1
        assert run.duration_s == 0

    virtually(play)


@pytest.mark.parametrize(
    "line",
    [say(""), say(" \n\t"), fail(ModelReplyError("HTML instead of JSON")), fail(ConnectionResetError("reset by peer"))],
    ids=["empty", "blank", "unusable", "reset"],
)
def test_what_a_second_try_may_mend_is_asked_again(line):
    """An empty reply, one that cannot be read, and a connection lost are retried like an overload."""

    async def play(store, clock):
        model = Timed(line, "done")
        run = await Agent(model, store=store, clock=clock).run("hello")
        assert (run.output, run.turn) == ("done", 1)
        assert 1 <= model.waits[0] <= 1.5

    virtually(play)


@pytest.mark.parametrize(
    "error",
    [OSError("no route to host"), TimeoutError("too slow"), ConnectionError("refused")],
    ids=repr,
)
def test_an_os_error_of_a_users_own_model_counts_as_unavailable(error):
    """Its text is kept for the record, with the model's name."""

    async def play(store, clock):
        model = Timed(*[fail(error)] * 2, "done")
        run = await Agent(model, limits=Limits(model_retries=1), store=store, clock=clock).run("hello")
        assert run.output == "done"
        (fault,) = run.errors
        assert (fault.source, fault.turn) == ("model", 1)
        assert str(error) in fault.message
        assert "scripted" in fault.message

    virtually(play)


class Patient(Model):
    """A model of the user's own: it gives up after the silence that the request allows."""

    name = "patient"

    def __init__(self, *delays: float) -> None:
        """Take the seconds that each attempt lasts."""
        self.delays = list(delays)
        self.times: list[float] = []
        self.allowed: list[float] = []

    async def reply(self, request: Request, emit: Emit | None = None) -> Reply:
        """Answer after a while, or give up."""
        self.times.append(anyio.current_time())
        self.allowed.append(request.timeout_s)
        with anyio.fail_after(request.timeout_s):
            await anyio.sleep(self.delays.pop(0))
        return Reply(text="done")


def test_an_attempt_that_takes_too_long_is_given_up_and_repeated():
    """`model_timeout_s` reaches the model, and bounds one attempt, not the turn."""

    async def play(store, clock):
        model = Patient(100, 100, 9)
        agent = Agent(model, limits=Limits(model_timeout_s=10), store=store, clock=clock)
        run = await agent.run("hello")
        assert (run.output, run.turn) == ("done", 1)
        assert model.allowed == [10.0] * 3
        first, second, third = model.times
        assert 11 <= second - first <= 11.5
        assert 12 <= third - second <= 13

    virtually(play)


def test_a_model_that_never_answers_stops_the_run():
    """Three turns without an answer are enough, and each silence counts as the run's time."""

    async def play(store, clock):
        model = Patient(*[100] * 3)
        limits = Limits(model_timeout_s=10, model_retries=0)
        run = await Agent(model, limits=limits, store=store, clock=clock).run("hello")
        assert run.stop_reason is StopReason.TOO_MANY_ERRORS
        assert [fault.source for fault in run.errors] == ["model"] * 3
        assert run.duration_s == pytest.approx(30)

    virtually(play)


def test_a_model_that_ignores_its_timeout_is_cut_by_the_runs_time():
    """A model of the user's own that hangs cannot hang the run."""

    async def play(store, clock):
        model = Timed(say("late", delay_s=10_000))
        run = await Agent(model, limits=Limits(seconds=20), store=store, clock=clock).run("hello")
        assert run.stop_reason is StopReason.TIMEOUT
        assert run.duration_s == pytest.approx(20)

    virtually(play)


def test_the_end_of_the_runs_time_cuts_a_wait():
    """A retry that would come too late is not waited for."""

    async def play(store, clock):
        model = Timed(*[fail(ModelUnavailableError("429", retry_after_s=50.0))] * 3)
        run = await Agent(model, limits=Limits(seconds=20), store=store, clock=clock).run("hello")
        assert run.stop_reason is StopReason.TIMEOUT
        assert run.duration_s == pytest.approx(20)
        assert len(model.times) == 1

    virtually(play)


def test_a_cancel_cuts_a_wait():
    """Whoever ends the run does not wait for the model to come back."""

    async def play(store, clock):
        model = Timed(*[fail(ModelUnavailableError("429", retry_after_s=50.0))] * 3)
        agent = Agent(model, store=store, clock=clock)
        ends = []

        async def run() -> None:
            ends.append(await agent.run("hello", id="mine"))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run)
            await anyio.sleep(7)
            await agent.cancel("mine")
        assert ends[0].stop_reason is StopReason.CANCELLED
        assert anyio.current_time() == pytest.approx(7)

    virtually(play)


@tool(read_only=True)
async def look() -> str:
    """Look."""
    return "seen"


class Stuttering(Model):
    """A model whose stream dies half way, twice."""

    name = "stuttering"
    attempts = 0

    async def reply(self, request: Request, emit: Emit | None = None) -> Reply:
        """Say half of the answer, then the whole."""
        self.attempts += 1
        assert emit is not None
        emit(TextChunk(text=f"half {self.attempts}"))
        if self.attempts % 3:
            raise ModelUnavailableError("the stream died")
        emit(TextChunk(text=" whole"))
        return Reply(text=f"half {self.attempts} whole")


def test_deltas_say_which_attempt_they_belong_to():
    """A watcher replaces the text of a failed attempt by that of the next."""

    async def play(store, clock):
        agent = Agent(Stuttering(), store=store, clock=clock)
        async with agent.stream("hello") as stream:
            deltas = [event async for event in stream if isinstance(event, TextDelta)]
        assert [(delta.attempt, delta.text) for delta in deltas] == [
            (1, "half 1"),
            (2, "half 2"),
            (3, "half 3"),
            (3, " whole"),
        ]
        newest = "".join(delta.text for delta in deltas if delta.attempt == 3)
        assert newest == stream.run.output

    virtually(play)


def test_call_deltas_name_the_call_that_will_be_run():
    """The ids in the deltas are those of the history, also after a turn that faltered."""

    async def play(store, clock):
        model = Timed(OVERLOAD, OVERLOAD, say("", call("look"), call("look")), OVERLOAD, "done")
        agent = Agent(model, tools=[look], limits=Limits(model_retries=1), store=store, clock=clock)
        async with agent.stream("hello") as stream:
            deltas = [event async for event in stream if isinstance(event, CallDelta)]
        assert [delta.call_id for delta in deltas if delta.name] == ["t2.0", "t2.1"]
        assert [record.call_id for record in stream.run.calls] == ["t2.0", "t2.1"]
        assert {delta.attempt for delta in deltas} == {1}
        assert "".join(delta.arguments for delta in deltas) == "{}{}"
        await sound(agent, stream.run)

    virtually(play)


def test_nothing_of_a_retry_is_in_the_history():
    """The model is asked the same again, and what failed leaves no message."""

    async def play(store, clock):
        model = Timed(OVERLOAD, say("", call("look")), OVERLOAD, "done")
        agent = Agent(model, tools=[look], store=store, clock=clock)
        run = await agent.run("hello")
        one, two, three, four = model.requests
        assert one == two
        assert three == four
        assert len(run.messages) == 4

    virtually(play)
