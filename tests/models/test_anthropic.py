"""`Anthropic` against a local server: replies, keys, connections."""

import json
import traceback

import attrs
import httpx
import pytest

from agentfsm import AudioPart, MisuseError, ModelError, Settings, Usage, UserMessage
from agentfsm.models import Anthropic, Price
from agentfsm.models.anthropic.model import ANTHROPIC_URL
from agentfsm.ports import (
    FinishChunk,
    FinishReason,
    OutputMode,
    Request,
    TextChunk,
    ThinkingChunk,
    ToolDefinition,
)
from agentfsm.testing import LocalServer, WireReply, say
from tests.support.model_wires import ANTHROPIC, KEY, REQUEST, both_ways, forget_keys

ask = ANTHROPIC.ask


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch, tmp_path):
    forget_keys(monkeypatch, tmp_path)


# Replies


@both_ways
async def test_text_arrives(streamed):
    """Streamed or not, the reply is the same, with its usage; the stream's chunks add up to it."""
    text = "It is sunny in Rome, and 20 degrees warm."
    reply, chunks, received = await ask(say(text), streamed=streamed)
    assert (reply.text, reply.finish_reason) == (text, FinishReason.STOP)
    assert reply.usage.output_tokens == 5
    assert "".join(chunk.text for chunk in chunks if isinstance(chunk, TextChunk)) == (text if streamed else "")
    assert chunks[-1:] == ([FinishChunk(reason=FinishReason.STOP)] if streamed else [])
    assert received.headers["authorization"] == f"Bearer {KEY}"
    assert received.headers["content-type"] == "application/json"
    assert received.headers["anthropic-version"]


@both_ways
async def test_thinking_arrives(streamed):
    """It is kept for the way back, and heard where the reply is streamed."""
    reply, chunks, _ = await ask(WireReply("So.", thinking="Rome, then."), streamed=streamed)
    assert reply.native.provider.startswith("anthropic of 127.0.0.1:")
    assert [block["type"] for block in json.loads(reply.native.content)] == ["thinking", "text"]
    heard = "".join(chunk.text for chunk in chunks if isinstance(chunk, ThinkingChunk))
    assert heard == ("Rome, then." if streamed else "")


@both_ways
async def test_usage_is_read_or_missing(streamed):
    """What the cache held and took in is counted; where the server says nothing, there is no usage."""
    usage = {"input_tokens": 2, "output_tokens": 3, "cache_read_input_tokens": 8, "cache_creation_input_tokens": 5}
    reply, _, _ = await ask(WireReply("x", usage=usage), streamed=streamed)
    assert reply.usage == Usage(input_tokens=15, output_tokens=3, cached_tokens=8, cache_write_tokens=5)
    usage["cache_creation"] = {"ephemeral_5m_input_tokens": 1, "ephemeral_1h_input_tokens": 4}
    reply, _, _ = await ask(WireReply("x", usage=usage), streamed=streamed)
    assert reply.usage is not None
    assert (reply.usage.cache_write_tokens, reply.usage.cache_write_1h_tokens) == (5, 4)
    reply, _, _ = await ask(say("x", usage=None), streamed=streamed)
    assert reply.usage is None


@both_ways
async def test_a_refusal_arrives(streamed):
    """A refusal is a reply with a reason of its own."""
    reply, _, _ = await ask(WireReply(refusal="Not this."), streamed=streamed)
    assert (reply.text, reply.finish_reason) == ("Not this.", FinishReason.REFUSAL)


@both_ways
async def test_the_request_carries_tools_and_settings(streamed):
    """Tools, settings, headers and marks reach the server."""
    tool = ToolDefinition(name="weather", description="", parameters={"type": "object"})
    settings = Settings(max_tokens=9, tool_choice="weather")
    request = Request(instructions="", messages=REQUEST.messages, tools=(tool,), settings=settings)
    _, _, received = await ask(say("x"), streamed=streamed, request=request, headers={"x-team": "blue"})
    assert (received.body["model"], received.body["max_tokens"]) == ("m", 9)
    assert received.body["tool_choice"] == {"type": "tool", "name": "weather"}
    assert received.headers["x-team"] == "blue"
    assert received.body.get("stream", False) is streamed
    assert "cache_control" in json.dumps(received.body)
    _, _, received = await ask(say("x"), streamed=streamed, request=request, cache=False)
    assert "cache_control" not in json.dumps(received.body)


async def test_what_cannot_be_sent_is_said_before_anything_is():
    """A recording and a seed have no words on this wire."""
    with LocalServer([]) as server:
        model = Anthropic("m", base_url=server.base_url)
        recording = UserMessage(parts=(AudioPart.of(b"x"),))
        assert "recordings" in model.unsupported_part(recording.parts[0])
        for request in (
            attrs.evolve(REQUEST, messages=(recording,)),
            attrs.evolve(REQUEST, settings=Settings(seed=1)),
        ):
            with pytest.raises(ModelError):
                await model.reply(request)
        await model.aclose()
    assert server.requests == ()


def test_the_best_way_to_the_form_of_an_answer_is_a_schema():
    """And JSON without one is none of its ways."""
    assert Anthropic.output_modes == (OutputMode.SCHEMA, OutputMode.TOOL, OutputMode.PROMPT)


# Construction


def test_without_a_key_there_is_no_model(tmp_path):
    """Anthropic wants a key, and what its own tools left on the disk is not looked for."""
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "default.json").write_text('{"authentication": {"type": "user_oauth"}}')
    with pytest.raises(MisuseError, match="ANTHROPIC_API_KEY nor ANTHROPIC_AUTH_TOKEN"):
        Anthropic("claude-opus-5")


@pytest.mark.parametrize(
    ("environment", "options", "sent"),
    [
        ({"ANTHROPIC_API_KEY": "key-key"}, {}, "key-key"),
        ({"ANTHROPIC_AUTH_TOKEN": "token"}, {}, "token"),
        ({"ANTHROPIC_API_KEY": "key-key", "ANTHROPIC_AUTH_TOKEN": "token"}, {}, "key-key"),
        ({"ANTHROPIC_API_KEY": "key-key", "ANTHROPIC_AUTH_TOKEN": "token"}, {"api_key": "mine"}, "mine"),
        ({"ANTHROPIC_AUTH_TOKEN": "token"}, {"api_key": "mine"}, "mine"),
        ({}, {}, "none"),
    ],
)
async def test_the_key_is_what_was_passed_else_the_environments(monkeypatch, environment, options, sent):
    """A key goes before a token, and a server of one's own needs neither."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    _, _, received = await ask(say("x"), **{"api_key": None, **options})
    assert received.headers["authorization"] == f"Bearer {sent}"


@pytest.mark.parametrize(("name", "options"), [("API_KEY", {"api_key"}), ("AUTH_TOKEN", {"auth_token"})])
def test_a_token_is_passed_as_one(monkeypatch, name, options):
    """The package may send the two in different ways."""
    monkeypatch.setenv(f"ANTHROPIC_{name}", "secret")
    assert Anthropic("m")._client_options.keys() & {"api_key", "auth_token"} == options


@pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/"])
async def test_the_address_is_taken_with_its_version_and_without(monkeypatch, end):
    """People copy either, and the environment may hold it."""
    with LocalServer([say("x")]) as server:
        monkeypatch.setenv("ANTHROPIC_BASE_URL", server.base_url.removesuffix("/v1") + end)
        model = Anthropic("m")
        assert (await model.reply(REQUEST)).text == "x"
        await model.aclose()


@pytest.mark.parametrize(
    "options",
    [
        {"base_url": "localhost:8000"},
        {"base_url": "http://"},
        {"base_url": "http://[::1"},
        {"base_url": f"me:{KEY}@a.test"},
        {"api_key": f"{KEY}\n"},
        {"api_key": f"{KEY}é"},
        {"headers": {"x-token": f"{KEY}\r\n"}},
        {"api_key": KEY, "window_tokens": 0},
        {"api_key": KEY, "name": " "},
    ],
)
def test_arguments_that_cannot_be_right_are_refused(options):
    """Each is refused when the model is made, and no message shows a secret."""
    name = options.pop("name", "m")
    with pytest.raises(MisuseError) as caught:
        Anthropic(name, **{"base_url": "http://a.test", **options})
    assert KEY not in "".join(traceback.format_exception(caught.value))


async def test_a_client_of_the_other_library_is_refused():
    """Anthropic's package speaks with httpx2 only."""
    async with httpx.AsyncClient() as client:
        with pytest.raises(MisuseError, match=r"httpx\.AsyncClient.*httpx2\.AsyncClient"):
            Anthropic("m", api_key=KEY, http_client=client)


def test_a_price_goes_before_the_list():
    """A price that was passed is used; without one the public list, which knows no server of one's own."""
    usage = Usage(input_tokens=1_000_000)
    price = Price(input_usd_per_million=3, output_usd_per_million=4)
    assert Anthropic("m", api_key=KEY, price=price).cost_usd(usage) == pytest.approx(3.0)
    assert Anthropic("m", base_url="http://localhost:8000").cost_usd(usage) is None
    pytest.importorskip("genai_prices")
    assert Anthropic("claude-sonnet-4-5", api_key=KEY).cost_usd(Usage(input_tokens=1_000)) == pytest.approx(0.003)
    assert Anthropic("m", api_key=KEY)._base_url.startswith(ANTHROPIC_URL)


@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        ("claude-haiku-4-5", 200_000),
        ("claude-opus-4-5-20251101", 200_000),
        ("claude-opus-4-6", 1_000_000),
        ("claude-sonnet-5-5", 1_000_000),
        ("claude-next", 200_000),
    ],
)
def test_windows_go_by_the_family(name, tokens):
    """What is not known has the smaller one."""
    assert Anthropic(name, api_key=KEY).window_tokens == tokens


def test_a_window_that_is_passed_counts_for_more():
    """It is the user who knows what the account has."""
    assert Anthropic("claude-haiku-4-5", api_key=KEY, window_tokens=5).window_tokens == 5
