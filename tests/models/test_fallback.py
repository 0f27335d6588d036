"""`Fallback`: which failure another model answers for, which goes up, and how long a model rests."""

from types import SimpleNamespace

import anyio
import pytest
from anyio.lowlevel import checkpoint

from agentfsm import (
    Agent,
    ContextTooLongError,
    ImagePart,
    Limits,
    MisuseError,
    ModelError,
    ModelReplyError,
    ModelUnavailableError,
    Settings,
    StopReason,
    TextDelta,
    TextPart,
    Usage,
    UserMessage,
)
from agentfsm.models import Anthropic, Fallback, OpenAIChat, OpenAIResponses, Price, Throttled
from agentfsm.ports import Model, OutputMode, Reply, Request, TextChunk
from agentfsm.testing import LocalServer, ScriptedModel, WireReply, fail, run_virtual, say

REQUEST = Request(instructions="", messages=(UserMessage(parts=(TextPart(text="Hello"),)),))
OVERLOADED = fail(ModelUnavailableError("overloaded", status=529))


def limited(wait_s=None):
    """Return a line that says that the model is asked too often."""
    return fail(ModelUnavailableError("slow down", wait_s, status=429))


class Named(ScriptedModel):
    """A scripted model with a name of its own, and a price."""

    def __init__(self, name, *script, usd=None, modes=None, window=128_000, refusal=None):
        super().__init__(*script)
        self.name, self.usd, self.refusal, self.window_tokens = name, usd, refusal, window
        self.output_modes = modes or Model.output_modes
        self.closed = 0

    def cost_usd(self, usage):
        return None if self.usd is None else usage.tokens * self.usd

    def unsupported_part(self, part):
        return self.refusal

    async def aclose(self):
        self.closed += 1


class Times:
    """A clock that is set by hand."""

    def __init__(self):
        self.now = 1_000.0
        self.slept = []

    def __call__(self):
        return self.now

    async def sleep(self, seconds):
        """Let the time pass."""
        self.slept.append(seconds)
        self.now += seconds
        await checkpoint()


@pytest.fixture
def times():
    return Times()


async def asked(fallback, emit=None):
    """Ask, and return which model answered; or the error, where none did."""
    try:
        return (await fallback.reply(REQUEST, emit)).model
    except ModelError as error:
        return error


@pytest.mark.parametrize(
    "failure",
    [
        ModelUnavailableError("overloaded", status=529),
        ModelUnavailableError("no place", status=503),
        ModelUnavailableError("silent for too long"),
        ConnectionRefusedError("nobody listens"),
        ModelUnavailableError("much too often", 3_600.0, status=429),
    ],
    ids=["529", "503", "silence", "connection", "long rate limit"],
)
async def test_the_next_model_answers_for_one_that_is_out(failure):
    """Overload, outage and a limit that lasts an hour are no reason to wait: the next one is asked at once."""
    big, small = Named("big", fail(failure)), Named("small", "from the small one")
    reply = await Fallback(big, small).reply(REQUEST)
    assert (reply.text, reply.model) == ("from the small one", "small")
    assert (len(big.requests), len(small.requests)) == (1, 1)


@pytest.mark.parametrize(
    "failure",
    [ModelError("bad request"), ContextTooLongError("too long"), MisuseError("no JSON"), ModelReplyError("garbled")],
    ids=lambda failure: type(failure).__name__,
)
async def test_a_fault_of_ours_shows(failure):
    """A bad request, a long history, a bug or one odd reply goes up as it is, and no other model is asked."""
    big, small = Named("big", fail(failure), "well"), Named("small")
    fallback = Fallback(big, small)
    with pytest.raises(type(failure)) as caught:
        await fallback.reply(REQUEST)
    assert caught.value is failure
    assert await asked(fallback) == "big"


async def test_a_model_that_failed_rests(times):
    """It is not asked again until its rest is over; then one request tries it, and if it answers it is the first."""
    big = Named("big", OVERLOADED, "well", "well")
    fallback = Fallback(big, Named("small", *["ok"] * 9), rest_s=30, monotonic=times)
    assert [await asked(fallback) for _ in range(3)] == ["small"] * 3
    assert [one.rests_s for one in fallback.statistics()] == [30, 0]
    times.now += 29.9
    assert await asked(fallback) == "small"
    times.now += 0.2
    assert [await asked(fallback) for _ in range(2)] == ["big", "big"]
    big_one, small_one = fallback.statistics()
    assert (big_one.answered, big_one.failed, big_one.rests_s) == (2, 1, 0)
    assert (small_one.answered, small_one.failed) == (4, 0)


def test_a_rest_goes_by_virtual_time():
    """By itself, so that a test of an outage takes no time."""

    async def play():
        fallback = Fallback(Named("big", OVERLOADED, "well"), Named("small", "ok", "ok"), rest_s=30)
        names = [await asked(fallback)]
        for _ in range(2):
            await anyio.sleep(20)
            names.append(await asked(fallback))
        return names

    assert run_virtual(play) == ["small", "small", "big"]


async def test_each_failed_trial_doubles_the_rest_up_to_a_cap(times):
    """30, 60, 120, 240 and 480 seconds, and never more."""
    big = Named("big", *[OVERLOADED] * 7)
    fallback = Fallback(big, Named("small", *["ok"] * 9), monotonic=times)
    rests = []
    for _ in range(7):
        assert await asked(fallback) == "small"
        rests.append(fallback.statistics()[0].rests_s)
        times.now += rests[-1]
    assert rests == [30, 60, 120, 240, 480, 480, 480]


async def test_a_crowd_that_fails_at_once_is_one_failure(times):
    """Twenty requests that were under way when the model broke make it rest for 30 seconds, not for 480."""

    class Slow(Named):
        async def reply(self, request, emit=None):
            await anyio.wait_all_tasks_blocked()
            raise ModelUnavailableError("overloaded", status=529)

    fallback = Fallback(Slow("big"), Named("small", *["ok"] * 20), monotonic=times)
    async with anyio.create_task_group() as group:
        for _ in range(20):
            group.start_soon(asked, fallback)
    assert fallback.statistics()[0].rests_s == 30
    assert fallback.statistics()[1].answered == 20


async def test_a_late_failure_says_nothing_of_a_model_that_is_well_again(times):
    """A request that hung through the outage and fails when it is over does not make the model rest once more."""
    gate = anyio.Event()

    class Hangs(Named):
        async def reply(self, request, emit=None):
            try:
                return await super().reply(request, emit)
            except TimeoutError:
                await gate.wait()
                raise ModelUnavailableError("silent for too long") from None

    fallback = Fallback(
        Hangs("big", fail(TimeoutError()), OVERLOADED, "well"), Named("small", "1", "2"), monotonic=times
    )
    async with anyio.create_task_group() as group:
        group.start_soon(asked, fallback)
        await anyio.wait_all_tasks_blocked()
        assert await asked(fallback) == "small"
        times.now += 30
        assert await asked(fallback) == "big"
        gate.set()
    assert [(one.failed, one.rests_s) for one in fallback.statistics()] == [(2, 0), (0, 0)]


async def test_only_one_request_tries_a_model_after_its_rest(times):
    """While it is tried, the others ask the next model: a trial may end in a long silence."""
    gate = anyio.Event()

    class Tried(Named):
        async def reply(self, request, emit=None):
            reply = await super().reply(request, emit)
            await gate.wait()
            return reply

    big = Tried("big", OVERLOADED, "well")
    fallback = Fallback(big, Named("small", *["ok"] * 9), monotonic=times)
    answers = [await asked(fallback)]

    async def ask():
        answers.append(await asked(fallback))

    times.now += 30
    async with anyio.create_task_group() as group:
        group.start_soon(ask)
        await anyio.wait_all_tasks_blocked()
        for _ in range(3):
            await ask()
        gate.set()
    assert answers == ["small"] * 4 + ["big"]


async def test_a_cancelled_trial_is_followed_by_another(times):
    """It says nothing of the model: after one more rest the next request tries it."""
    gate = anyio.Event()

    class Hung(Named):
        async def reply(self, request, emit=None):
            reply = await super().reply(request, emit)
            await gate.wait()
            return reply

    fallback = Fallback(Hung("big", OVERLOADED, "lost", "well"), Named("small", "ok", "ok"), monotonic=times)
    await asked(fallback)
    times.now += 30
    with anyio.move_on_after(0):
        await fallback.reply(REQUEST)
    assert await asked(fallback) == "small"
    times.now += 30
    gate.set()
    assert await asked(fallback) == "big"


async def test_when_all_are_out_the_error_names_all_and_all_are_asked_again(times):
    """Each is asked once; a rest is no ban where nobody else is left, and does not grow by being asked."""
    big, small = Named("big", OVERLOADED, OVERLOADED, OVERLOADED), Named("small", OVERLOADED, OVERLOADED, "ok")
    fallback = Fallback(big, small, monotonic=times)
    for _ in range(2):
        error = await asked(fallback)
        assert type(error) is ModelUnavailableError
        assert str(error) == "none of 2 models could answer. big: overloaded small: overloaded"
    assert [one.rests_s for one in fallback.statistics()] == [30, 30]
    assert await asked(fallback) == "small"


async def test_a_short_rate_limit_is_waited_for_once(times):
    """The error goes up with its wait; a model that is still limited after it gives way to the next."""
    big = Named("big", limited(2.0), limited(2.0), limited(2.0))
    fallback = Fallback(big, Named("small", "ok"), monotonic=times)
    for _ in range(2):  # the second is another run, before the wait is over
        error = await asked(fallback)
        assert (error.status, error.retry_after_s) == (429, 2.0)
    times.now += 2.0
    assert await asked(fallback) == "small"
    assert fallback.statistics()[0].rests_s == 30


async def test_patience_is_a_setting(times):
    """With none, a rate limit is an outage."""
    fallback = Fallback(Named("big", limited(0.5)), Named("small", "ok"), patience_s=0, monotonic=times)
    assert await asked(fallback) == "small"


async def test_a_provider_may_ask_for_a_longer_rest(times):
    """A rest is as long as the provider says, up to the cap."""
    fallback = Fallback(Named("big", limited(100.0)), Named("small", "ok"), monotonic=times)
    assert await asked(fallback) == "small"
    assert fallback.statistics()[0].rests_s == 100


async def test_the_second_useless_reply_in_a_row_makes_a_model_rest(times):
    """Both go up, so that the engine asks again: the same model after the first, the next one after the second."""
    garbled = fail(ModelReplyError("a page of HTML"))
    big = Named("big", garbled, "well", garbled, garbled)
    fallback = Fallback(big, Named("small", "ok"), monotonic=times)
    kinds = [answer if isinstance(answer := await asked(fallback), str) else type(answer) for _ in range(5)]
    assert kinds == [ModelReplyError, "big", ModelReplyError, ModelReplyError, "small"]


class Breaks(Named):
    """Shows a piece of its reply and breaks off, so many times; then it answers."""

    def __init__(self, name, times):
        super().__init__(name, *["whole"] * 9)
        self.breaks = times

    async def reply(self, request, emit=None):
        if not self.breaks:
            return await super().reply(request, emit)
        self.breaks -= 1
        emit(TextChunk("half of it"))
        raise ModelUnavailableError("the stream broke off")


@pytest.mark.parametrize(("after_text", "answer"), [(False, "big"), (True, "small")])
async def test_nothing_is_mixed_into_a_text_that_was_shown(after_text, answer):
    """The error goes up; the next attempt asks the same model, or where it may rest, the next one."""
    fallback = Fallback(Breaks("big", 1), Named("small", "ok"), after_text=after_text)
    shown = []
    assert isinstance(await asked(fallback, shown.append), ModelUnavailableError)
    assert shown == [TextChunk("half of it")]
    assert await asked(fallback, shown.append) == answer


async def test_the_text_of_another_model_replaces_what_was_shown():
    """Whoever watches the run sees the attempt grow, and only the new text is the answer."""
    fallback = Fallback(Breaks("big", 9), Named("small", "all of it is here"), after_text=True)
    agent = Agent(fallback, limits=Limits(retry_wait_s=0.001))
    async with agent.stream("hello") as stream:
        texts = [(event.attempt, event.text) async for event in stream if isinstance(event, TextDelta)]
        run = stream.run
    assert run.output == "all of it is here"
    assert texts[0] == (1, "half of it")
    assert "".join(text for attempt, text in texts if attempt == 2) == "all of it is here"


async def test_each_reply_is_billed_by_the_model_that_gave_it():
    """Its own price counts, not that of the first; and what a useless reply cost is billed by the same rule."""
    paid = ModelReplyError("garbled", Usage(input_tokens=10))
    fallback = Fallback(Named("big", OVERLOADED, usd=1.0), Named("small", "ok", fail(paid), usd=0.25))
    assert (await fallback.reply(REQUEST)).usage == Usage(input_tokens=10, output_tokens=5, cost_usd=3.75)
    with pytest.raises(ModelReplyError):
        await fallback.reply(REQUEST)
    assert paid.usage.cost_usd == 2.5


async def test_what_a_model_was_paid_that_failed_is_not_lost():
    """It is on the bill of the reply that another gave, and of the error where none did."""
    costly = ModelUnavailableError("broke off")
    costly.usage = Usage(input_tokens=100)
    fallback = Fallback(Named("big", fail(costly), usd=1.0), Named("small", "ok", usd=0.0))
    assert (await fallback.reply(REQUEST)).usage == Usage(input_tokens=110, output_tokens=5, cost_usd=100.0)
    fallback = Fallback(Named("big", fail(costly), usd=1.0), Named("small", OVERLOADED, usd=0.0))
    assert (await asked(fallback)).usage == Usage(input_tokens=100, cost_usd=100.0)


async def test_a_reply_without_a_price_says_so():
    """The price of the others does not take its place."""
    fallback = Fallback(Named("big", OVERLOADED, usd=1.0), Named("local", "ok"))
    usage = (await fallback.reply(REQUEST)).usage
    assert (usage.cost_usd, usage.unpriced) == (None, True)


def test_it_promises_what_each_of_its_models_can_do():
    """The smallest window, the shared output modes, the dearest price, and no part that one of them refuses."""
    modes = (OutputMode.SCHEMA, OutputMode.TOOL, OutputMode.PROMPT)
    big = Named("big", usd=1.0, modes=modes, window=1_000_000)
    small = Named("small", usd=0.5, modes=(OutputMode.PROMPT, OutputMode.TOOL), window=8_000, refusal="no pictures")
    fallback = Fallback(big, small)
    assert (fallback.name, fallback.window_tokens) == ("big else small", 8_000)
    assert fallback.output_modes == (OutputMode.TOOL, OutputMode.PROMPT)
    assert fallback.unsupported_part(ImagePart(url="https://example.com/a.png")) == "no pictures"
    assert fallback.cost_usd(Usage(input_tokens=10)) == 10
    assert Fallback(big, Named("local")).cost_usd(Usage(input_tokens=10)) is None
    assert Fallback(big, Named("other")).unsupported_part(TextPart(text="hello")) is None


@pytest.mark.parametrize(
    "make",
    [
        lambda: Fallback(Named("alone")),
        lambda: Fallback(Named("a"), Named("b"), rest_s=0),
        lambda: Fallback(Named("a"), Named("b"), rest_s=float("nan")),
        lambda: Fallback(Named("a"), Named("b"), patience_s=-1),
        lambda: Fallback(Named("a", modes=(OutputMode.TOOL,)), Named("b", modes=(OutputMode.PROMPT,))),
        lambda: Fallback("nobody:x", Named("b")),
    ],
    ids=["alone", "no rest", "nan", "patience", "modes", "name"],
)
def test_what_cannot_be_right_is_refused(make):
    """One model, a rest of nothing, models that share no output mode: MisuseError where it is made."""
    with pytest.raises(MisuseError):
        make()


async def test_all_are_closed():
    """Also when one cannot be: its error is raised in the end."""

    class Stuck(Named):
        async def aclose(self):
            raise OSError("stuck")

    last = Named("last")
    with pytest.raises(OSError, match="stuck"):
        await Fallback(Stuck("first"), last).aclose()
    assert last.closed == 1


# Document C, 9.3, through a whole run and a socket.


@pytest.fixture
def pair(times, monkeypatch):
    """Return what runs an agent over two models of a server, by what the server says to each request."""
    monkeypatch.setattr(
        "agentfsm.engine.model_calls.request.anyio",
        SimpleNamespace(sleep=times.sleep, get_cancelled_exc_class=anyio.get_cancelled_exc_class),
    )

    async def run(*says):
        with LocalServer(says) as server:
            price = {"big": Price(input_usd_per_million=3, output_usd_per_million=15), "small": PRICE}
            models = [OpenAIChat(name, base_url=server.base_url, api_key="k", price=price) for name in ("big", "small")]
            async with Agent(Fallback(*models, monotonic=times)) as agent:
                run = await agent.run("hello")
                return run, [request.body["model"] for request in server.requests], agent.cost(run)

    return run


PRICE = Price(input_usd_per_million=1, output_usd_per_million=5)
USAGE = {"prompt_tokens": 1_000, "completion_tokens": 200, "total_tokens": 1_200}


async def test_an_overloaded_model_is_replaced_by_a_smaller_one(pair, times):
    """529: the small model answers the very same attempt, at its own price, and nobody waits."""
    run, models, cost = await pair(
        WireReply(status=529, error={"message": "Overloaded", "code": "overloaded_error"}),
        WireReply("fine", usage=USAGE),
    )
    assert (run.output, models, times.slept) == ("fine", ["big", "small"], [])
    assert cost.usd == run.usage.cost_usd == pytest.approx(0.002)


async def test_a_rate_limit_is_waited_for_as_told(pair, times):
    """429 with Retry-After 2: the same model is asked again after two seconds."""
    run, models, cost = await pair(
        WireReply(status=429, headers={"retry-after": "2"}, error="Slow down"), WireReply("fine", usage=USAGE)
    )
    assert (run.output, models, times.slept) == ("fine", ["big", "big"], [2.0])
    assert cost.usd == pytest.approx(0.006)


async def test_a_bad_request_ends_the_run(pair):
    """400: the small model is not asked to answer what the big one could not read."""
    run, models, _ = await pair(WireReply(status=400, error="bad tool"), say("never"))
    assert (run.stop_reason, models) == ("model_error", ["big"])
    assert "bad tool" in run.stop_message


async def test_a_fallback_may_stand_in_another():
    """The innermost model that answered is named, and its price counts."""
    inner = Fallback(Named("a", OVERLOADED), Named("b", OVERLOADED))
    outer = Fallback(inner, Named("c", say("ok"), usd=0.5))
    reply = await outer.reply(REQUEST)
    assert (reply.model, reply.usage.cost_usd) == ("c", 7.5)
    assert outer.name == "a else b else c"


async def test_a_model_that_told_no_usage_is_counted_by_the_engine():
    """The reply has none then, so that the engine estimates it."""

    class Silent(Named):
        async def reply(self, request, emit=None):
            return Reply(text="ok")

    assert (await Fallback(Named("a", OVERLOADED), Silent("b")).reply(REQUEST)).usage is None


@pytest.mark.parametrize("behind", [Anthropic, OpenAIResponses])
async def test_a_setting_that_one_of_them_has_no_word_for_is_refused_at_once(behind):
    """And not on the day when the first is out and the other has to answer; nobody is asked."""
    with LocalServer([]) as server:
        model = Fallback(OpenAIChat("m", base_url=server.base_url), behind("n", base_url=server.base_url))
        with pytest.raises(MisuseError, match="seed"):
            Agent(Throttled(model, concurrency=1), settings=Settings(seed=7))
        run = await Agent(Throttled(model, concurrency=1), settings=lambda _: Settings(seed=7)).run("Hello")
        await model.aclose()
    assert (run.stop_reason, server.requests) == (StopReason.MODEL_ERROR, ())
    assert "seed" in run.stop_message
    assert model.unsupported_settings(Settings(temperature=1.0)) is None
    assert Throttled(model, concurrency=1).unsupported_settings(Settings(seed=7)) is not None


# Refusals that move on, if the caller says so


def http_error(status, **error):
    return WireReply(status=status, error={"message": "No.", **error})


TOO_LONG = http_error(400, code="context_length_exceeded")


@pytest.mark.parametrize(
    ("refusal", "line"),
    [
        ("api_key", http_error(401)),
        ("permission", http_error(403)),
        ("not_found", http_error(404)),
        ("quota", http_error(402)),
        ("quota", http_error(429, code="insufficient_quota")),
        ("bad_request", http_error(422)),
        ("context_too_long", TOO_LONG),
    ],
)
@pytest.mark.parametrize("streamed", [False, True])
async def test_a_refusal_that_is_listed_moves_on(refusal, line, streamed):
    """The next model answers where the refusal is listed, and is not asked where others are."""
    others = {"api_key", "permission", "not_found", "quota", "bad_request", "context_too_long"} - {refusal}
    with LocalServer(lambda _body: line) as refusing, LocalServer(lambda _body: say("Here.")) as answering:
        first = OpenAIChat("first", base_url=refusing.base_url)
        second = OpenAIChat("second", base_url=answering.base_url)
        model = Fallback(first, second, on=[refusal])
        reply = await model.reply(REQUEST, [].append if streamed else None)
        assert (reply.text, reply.model) == ("Here.", "second")
        asked = len(refusing.requests)
        await model.reply(REQUEST)
        # A key is refused again, a shorter history or another request may not be.
        assert len(refusing.requests) - asked == (refusal in {"context_too_long", "bad_request"})
        with pytest.raises(ModelError) as caught:
            await Fallback(first, second, on=others).reply(REQUEST)
        assert (caught.value.refusal, type(caught.value)) != (None, ModelUnavailableError)
        await model.aclose()


@pytest.mark.parametrize(
    ("failures", "kind"),
    [
        ([ContextTooLongError("long"), ContextTooLongError("long")], ContextTooLongError),
        ([ModelError("key", refusal="api_key"), ModelError("gone", refusal="not_found")], ModelError),
        ([ModelError("key", refusal="api_key"), ModelUnavailableError("down")], ModelUnavailableError),
    ],
)
async def test_a_retry_helps_if_one_was_unavailable(failures, kind):
    """If all have refused, the error says so: a history that is too long is compacted, and nothing is asked again."""
    models = [Named(f"m{number}", fail(error)) for number, error in enumerate(failures)]
    with pytest.raises(ModelError, match="none of 2 models could answer") as caught:
        await Fallback(*models, on=["api_key", "not_found", "context_too_long"]).reply(REQUEST)
    assert type(caught.value) is kind


@pytest.mark.parametrize("on", ["api_key", ["401"], [401], 401, [None]])
def test_an_unknown_refusal_is_refused(on):
    """The error lists those that there are."""
    with pytest.raises(MisuseError, match=r"on=.*: give a list of some of api_key, bad_request"):
        Fallback(Named("a"), Named("b"), on=on)
