"""Whole runs against servers that fail in every way, over a real socket: they go on, or stop for a reason that is told.

Whatever happens, every request holds a history that the provider takes, and a call that is not safe to repeat is made
once.
"""

from __future__ import annotations

import json
import logging
import re
from typing import Any
from urllib.parse import urlsplit

import attrs
import httpx2
import pytest

from agentfsm import Agent, Limits, Settings, StopReason, tool
from agentfsm.models import Anthropic, Fallback, OpenAIChat, OpenAIResponses, Price
from agentfsm.stores import MemoryStore
from agentfsm.testing import LocalServer, WireReply, call, say
from tests.support.checks import names, results_of, sound
from tests.support.spoiling_proxy import Spoil, SpoilingProxy
from tests.support.wire_rules import check_anthropic_body, check_openai, check_responses, check_wires

# Each adapter, and what its provider takes as the body of a request.
ADAPTERS = [
    pytest.param(OpenAIChat, lambda body: check_openai(body["messages"]), id="chat"),
    pytest.param(OpenAIResponses, lambda body: check_responses(body["input"]), id="responses"),
    pytest.param(Anthropic, check_anthropic_body, id="anthropic"),
]

NOTE = "for the taxi from the station, and back " * 20
# Long, so that an answer can be spoilt in its middle.
FAREWELL = "That was all, and it took a while. " * 40
# Bytes: behind the headers and before the end of either answer, streamed or not.
MIDDLE = 900

both_ways = pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
each_adapter = pytest.mark.parametrize(("adapter", "check"), ADAPTERS)


@attrs.define(eq=False)
class Bad:
    """A brain that asks for one call and then says farewell; at each of the two turns it fails first."""

    troubles: tuple[WireReply, ...] = ()
    # How it fails, in order, before it answers.
    for_good: WireReply | None = None
    # How it fails once the call is done, again and again.
    bodies: list[dict[str, Any]] = attrs.field(factory=list)
    # What it was asked.
    _waiting: dict[bool, list[WireReply]] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._waiting = {is_done: list(self.troubles) for is_done in (False, True)}

    def __call__(self, body: dict[str, Any]) -> WireReply:
        self.bodies.append(body)
        is_done = "receipt 1" in json.dumps(body)
        if self._waiting[is_done]:
            return self._waiting[is_done].pop(0)
        if is_done and self.for_good is not None:
            return self.for_good
        return say(FAREWELL) if is_done else say("", call("charge", cents=700, note=NOTE))


@attrs.define(eq=False)
class Till:
    """Counts what is charged."""

    charged: list[int] = attrs.field(factory=list)

    def tool(self) -> Any:
        """Return what charges, which must not be done twice."""

        @tool
        async def charge(cents: int, note: str) -> str:
            """Charge the customer."""
            self.charged.append(cents)
            return f"receipt {len(self.charged)}"

        return charge


async def played(adapter, check, bad, *, streamed=False, plan=(), **limits):
    """Run an agent against a bad server; returns the run, and fails unless all that was asked is in order."""
    till, usual = Till(), {"model_retries": 8, "retry_wait_s": 0.001, "retry_wait_max_s": 0.002}
    with LocalServer(bad) as server, SpoilingProxy(urlsplit(server.base_url).port, list(plan)) as proxy:
        agent = Agent(
            adapter("m", base_url=proxy.base_url, api_key="sk-none-at-all"),
            tools=[till.tool()],
            instructions="Be brief.",
            settings=Settings(stream=streamed),
            limits=Limits(**{**usual, **limits}),
            store=MemoryStore(),
        )
        run = await agent.run("Charge for the taxi.")
        await agent.model.aclose()
        assert proxy.spoilt == len(plan)
        assert proxy.plan == []
    for body in bad.bodies:
        check(body)
    check_wires(run.messages[: 1 + 2 * len(till.charged)])
    assert till.charged == [700] * ("charge" in [result.tool for result in results_of(run.messages)])
    await sound(agent, run)
    return run, names(await agent.history(run.id))


TROUBLES = {
    "500": [WireReply(status=500)],
    "529": [WireReply(status=529)],
    "429": [WireReply(status=429)],
    "one after the other": [WireReply(status=status) for status in (429, 500, 529, 503, 408)],
    "a page": [WireReply(html=True)],
    "nothing": [WireReply(raw="")],
    "half of JSON": [WireReply(raw='{"id": ')],
    "an event of no JSON": [WireReply(raw="data: {oops\n\n")],
    "an empty reply": [say("")],
    "a blank reply": [say(" \n")],
    "a cut": [WireReply(FAREWELL, cut_after=4)],
    "a cut call": [WireReply(say("", call("charge", cents=1, note=NOTE)), cut_after=4)],
    "everything": [
        WireReply(status=500),
        WireReply(html=True),
        WireReply(FAREWELL, cut_after=9),
        WireReply(raw=""),
        WireReply(status=429),
    ],
}


@each_adapter
@both_ways
@pytest.mark.parametrize("troubles", TROUBLES.values(), ids=TROUBLES.keys())
async def test_a_run_goes_on_after_trouble_that_passes(adapter, check, streamed, troubles):
    """Each answer is asked for again until it comes, and nothing of the trouble is left in the run."""
    bad = Bad(tuple(troubles))
    run, events = await played(adapter, check, bad, streamed=streamed)
    assert (run.output, run.stop_reason) == (FAREWELL, StopReason.COMPLETED)
    assert len(bad.bodies) == 2 * (len(troubles) + 1)
    assert events.count("ToolFinished") == 1
    assert run.errors == ()


SPOILS = {
    "ends at once": Spoil("end"),
    "ends in the middle": Spoil("end", MIDDLE),
    "breaks in the middle": Spoil("reset", MIDDLE),
    "breaks in the headers": Spoil("reset", 20),
    "is a page of a proxy": Spoil(
        "end",
        instead=b"HTTP/1.1 502 Bad Gateway\r\ncontent-type: text/html\r\ncontent-length: 11\r\n\r\n<p>Gone</p>",
    ),
    "is no HTTP": Spoil("end", instead=b"\x15\x03\x01\x00\x02\x02\x28"),
}


@each_adapter
@both_ways
@pytest.mark.parametrize("spoil", SPOILS.values(), ids=SPOILS.keys())
async def test_a_run_goes_on_after_an_answer_that(adapter, check, streamed, spoil):
    """Whatever the network leaves of an answer, it is not taken for one, and the next attempt is."""
    # The first answer twice, then the second one twice.
    run, events = await played(adapter, check, Bad(), streamed=streamed, plan=[spoil, spoil])
    assert (run.output, run.stop_reason) == (FAREWELL, StopReason.COMPLETED)
    assert events.count("ToolFinished") == 1


@each_adapter
async def test_a_run_goes_on_after_a_stream_that_ends_quietly(adapter, check):
    """A stream that is cut off as if it were over is not taken for a whole answer, nor for a whole call."""
    plan = [Spoil("quiet", after) for after in (2_000, 3_000, 4_000)]
    run, events = await played(adapter, check, Bad(), streamed=True, plan=plan)
    assert (run.output, run.stop_reason) == (FAREWELL, StopReason.COMPLETED)
    assert events.count("ToolFinished") == 1


@each_adapter
@both_ways
@pytest.mark.parametrize("after", [0, MIDDLE])
async def test_a_run_goes_on_after_silence(adapter, check, streamed, after):
    """A server that is half dead, from the start or in the middle, is given up after `model_timeout_s`."""
    spoil = Spoil("silence", after)
    run, _ = await played(adapter, check, Bad(), streamed=streamed, plan=[spoil], model_timeout_s=0.3)
    assert (run.output, run.stop_reason) == (FAREWELL, StopReason.COMPLETED)


# Trouble that stays


@each_adapter
@both_ways
@pytest.mark.parametrize(
    ("line", "words"),
    [
        (WireReply(status=500), "is unavailable (500"),
        (WireReply(status=529), "is unavailable (529"),
        (WireReply(status=429, headers={"retry-after": "86400"}), "is unavailable (429"),
        (WireReply(html=True), "check that base_url leads to a server that speaks this API"),
        (say(""), "gave an empty reply"),
    ],
    ids=["500", "529", "429", "a page", "an empty reply"],
)
async def test_a_run_stops_after_trouble_that_stays(adapter, check, streamed, line, words):
    """The run gives up after its retries, says what the server did, and keeps the call that it made."""
    bad = Bad(for_good=line)
    run, events = await played(adapter, check, bad, streamed=streamed, model_retries=2, errors=2)
    assert run.stop_reason is StopReason.TOO_MANY_ERRORS
    assert words in run.errors[-1].message
    assert len(bad.bodies) == 1 + 2 * (1 + 2)  # the call; and two turns of an attempt and its retries
    assert (events.count("ToolFinished"), len(run.errors)) == (1, 2)


@each_adapter
@both_ways
@pytest.mark.parametrize("status", [400, 401, 403, 404])
async def test_a_run_stops_at_once_where_it_is_refused(adapter, check, streamed, status):
    """What is refused for good is not asked again, and the reason has the server's words."""
    bad = Bad(for_good=WireReply(status=status, error="No, never."))
    run, events = await played(adapter, check, bad, streamed=streamed)
    assert run.stop_reason is StopReason.MODEL_ERROR
    assert "No, never." in run.stop_message
    assert (len(bad.bodies), events.count("ToolFinished")) == (2, 1)


# How long to wait


@each_adapter
@pytest.mark.parametrize(
    ("asked", "waited"),
    [
        ("0", 0.0),
        ("-5", 0.0),
        ("0.001", 0.001),
        ("86400", 0.002),
        ("1e300", 0.002),
        ("9" * 300, 0.002),
        ("Fri, 31 Dec 9999 23:59:59 GMT", 0.002),
        ("Mon, 01 Jan 1990 00:00:00 GMT", 0.0),
        ("9" * 400, None),
        ("inf", None),
        ("nan", None),
        ("Fri, 31 Dec 99999 23:59:59 GMT", None),
        ("soon", None),
    ],
)
async def test_the_wait_is_what_the_server_asks_for_up_to_a_cap(adapter, check, caplog, asked, waited):
    """A Retry-After of any size is waited for, but never longer than `retry_wait_max_s`; nonsense is not looked at."""
    caplog.set_level(logging.WARNING, logger="agentfsm")
    bad = Bad((WireReply(status=429, headers={"retry-after": asked}),))
    await played(adapter, check, bad)
    waits = [float(text) for text in re.findall(r"event=model_retry.* wait_s=([^ ]+)", caplog.text)]
    assert len(waits) == 2
    for wait in waits:
        assert 0.001 <= wait <= 0.0015 if waited is None else wait == pytest.approx(waited)


def events(*each):
    """Return a stream of these events, which ends behind them."""
    return "".join(f"data: {json.dumps(event)}\n\n" for event in each)


BILL = {"input_tokens": 100_000, "output_tokens": 7}
CHAT_BILL = {"prompt_tokens": 100_000, "completion_tokens": 7}
FAILED = {"status": "failed", "error": {"code": "server_error", "message": "oops"}, "usage": BILL}
STARTED = {"type": "message_start", "message": {"usage": BILL}}
OVERLOADED = {"type": "error", "error": {"type": "overloaded_error", "message": "busy"}}
ODD = {"status": "incomplete", "incomplete_details": {"reason": "mood"}, "output": [], "usage": BILL}
CALLER = {"status": "completed", "output": [{"type": "shell_call", "call_id": "c"}], "usage": BILL}
BILLED = {
    "anthropic, cut off": (Anthropic, True, events(STARTED)),
    "anthropic, overloaded in the middle": (Anthropic, True, events(STARTED, OVERLOADED)),
    "anthropic, no JSON in the middle": (Anthropic, True, events(STARTED) + "data: {oops\n\n"),
    "anthropic, no content": (Anthropic, False, json.dumps({"type": "message", "usage": BILL})),
    "responses, failed at the end": (OpenAIResponses, True, events({"type": "response.failed", "response": FAILED})),
    "responses, failed": (OpenAIResponses, False, json.dumps(FAILED)),
    "responses, incomplete": (OpenAIResponses, False, json.dumps(ODD)),
    "responses, a call for the caller": (OpenAIResponses, False, json.dumps(CALLER)),
    "chat, cut off": (OpenAIChat, True, events({"choices": [{"delta": {"content": "x"}}], "usage": CHAT_BILL})),
    "chat, an error": (OpenAIChat, True, events({"error": {"message": "busy", "code": 503}, "usage": CHAT_BILL})),
    "chat, no choice": (OpenAIChat, False, json.dumps({"choices": [], "usage": CHAT_BILL})),
}


@pytest.mark.parametrize("name", BILLED)
async def test_what_a_failed_attempt_was_billed_counts(name):
    """The provider says what it has read and written before it fails: the run's limits see it, and end the retries."""
    adapter, streamed, raw = BILLED[name]
    with LocalServer([WireReply(raw=raw)] * 4) as server:
        price = Price(input_usd_per_million=3, output_usd_per_million=15)
        agent = Agent(
            adapter("m", base_url=server.base_url, price=price),
            settings=Settings(stream=streamed),
            limits=Limits(usd=0.50, tokens=1_000_000, retry_wait_s=0.001),
            store=MemoryStore(),
        )
        run = await agent.run("Hello.")
        await agent.model.aclose()
    asked = len(server.requests)
    assert asked == (1 if "caller" in name else 2)  # which no retry would mend
    assert (run.usage.input_tokens, run.usage.output_tokens) == (100_000 * asked, 7 * asked)
    assert run.usage.cost_usd == pytest.approx(0.300105 * asked)
    assert run.stop_reason is (StopReason.MODEL_ERROR if "caller" in name else StopReason.COST_BUDGET)


async def test_a_failed_attempt_of_a_fallback_is_billed_at_its_own_price():
    """What the first was paid before it broke off is in the usage of the reply that the second gave."""
    dear, cheap = (Price(input_usd_per_million=usd, output_usd_per_million=0) for usd in (10, 1))
    with (
        LocalServer([WireReply(raw=events(STARTED, OVERLOADED))]) as one,
        LocalServer([WireReply("ok", usage=BILL)]) as two,
    ):
        model = Fallback(
            Anthropic("a", base_url=one.base_url, price=dear), Anthropic("b", base_url=two.base_url, price=cheap)
        )
        run = await Agent(model, settings=Settings(stream=True), store=MemoryStore()).run("Hello.")
        await model.aclose()
    assert (run.output, run.usage.input_tokens) == ("ok", 200_000)
    assert run.usage.cost_usd == pytest.approx(1.1)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("adapter", [OpenAIChat, OpenAIResponses, Anthropic])
async def test_an_unexpected_error_of_the_client_ends_the_run(adapter, streamed):
    """It never leaves `agent.run` as it is, and shows no key."""
    key = "sk-very-secret-key"

    class Failing(httpx2.AsyncByteStream):
        async def __aiter__(self):
            message = f"no attribute of {key}"
            yield b"x"
            raise AttributeError(message)

    transport = httpx2.MockTransport(lambda _request: httpx2.Response(200, stream=Failing()))
    async with httpx2.AsyncClient(transport=transport) as client:
        model = adapter("m", base_url="http://a.test/v1", api_key=key, http_client=client)
        async with Agent(model, settings=Settings(stream=streamed), store=MemoryStore()) as agent:
            run = await agent.run("go")
    assert run.stop_reason == "model_error"
    assert "unexpected error" in run.stop_message
    assert "AttributeError: no attribute of ***; in test_bad_servers.py, line" in run.stop_message
