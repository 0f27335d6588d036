"""Requirements of servers that OpenAI does not have: ids, the order of roles, signatures, names of settings."""

import json
import random

import pytest
from mistral_common.exceptions import MistralCommonException
from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.protocol.instruct.validator import ValidationMode, get_validator
from mistral_common.tokens.tokenizers.base import TokenizerVersion

from agentfsm import (
    Agent,
    AssistantMessage,
    ImagePart,
    Outcome,
    Settings,
    SystemMessage,
    TextPart,
    ToolCall,
    ToolResult,
    UserMessage,
    tool,
)
from agentfsm.models import OpenAIChat, find_profile
from agentfsm.models.openai.chat_wire import build_encoding_cache, encode
from agentfsm.models.openai.dialects import OPENAI, find_dialect, to_mistral_id
from agentfsm.ports import Request
from agentfsm.stores import MemoryStore
from agentfsm.testing import LocalServer, call, say
from tests.support.wire_rules import MISTRAL, MISTRAL_ID, check_mistral, openai_of

ASK = UserMessage(parts=(TextPart(text="Look."),))
GEMINI = find_dialect("generativelanguage.googleapis.com", find_profile("gemini-3-flash"))


# From the first one with tools to the newest one of 2025.
VALIDATED = [TokenizerVersion.v3, TokenizerVersion.v7, TokenizerVersion.v11, TokenizerVersion.v13]


def check_by_mistral(messages, version, tools=None):
    """Check a request as Mistral's own package does before it serves one."""
    request = ChatCompletionRequest.from_openai(messages, tools, model="m")
    get_validator(version, ValidationMode.serving).validate_request(request)


def turn(number, *, calls=1, parts=(), separator="."):
    """A turn of calls, with their results."""
    ids = [f"t{number}{separator}{each}" for each in range(calls)]
    asked = tuple(ToolCall(id=each, name="look", arguments="{}") for each in ids)
    results = [
        ToolResult(call_id=each, tool="look", outcome=Outcome.DONE, content="seen", parts=tuple(parts)) for each in ids
    ]
    return [AssistantMessage(calls=asked), *results]


def roles(messages):
    return [message["role"] for message in messages]


def test_ids_are_those_that_mistral_takes():
    """An id keeps its hash, an id of its form is left alone, and different ids stay different."""
    ids = [f"t{turn}.{number}" for turn in range(200) for number in range(100)] + ["call_" + "x" * 35, "é\ud800"]
    mapped = [to_mistral_id(each) for each in ids]
    assert all(MISTRAL_ID.fullmatch(each) for each in mapped)
    assert len(set(mapped)) == len(ids)
    assert to_mistral_id("D681PevKs") == "D681PevKs"
    assert to_mistral_id("t1.0") == to_mistral_id("t1.0") == "p3uKzt8kd"


def test_a_result_has_the_id_of_its_call():
    """Calls and results are mapped alike, whole replies as well as their portions."""
    messages = openai_of([ASK, *turn(1, calls=300)], dialect=MISTRAL)
    check_mistral(messages)
    asked = [each["id"] for message in messages for each in message.get("tool_calls", ())]
    assert asked == [message["tool_call_id"] for message in messages if message["role"] == "tool"]


def test_what_follows_a_result_is_of_the_assistant():
    """A picture among the results, input while tools run and a note come after a word of the assistant."""
    image = ImagePart(url="https://a.test/x.png")
    note = SystemMessage(text="Be brief.")
    messages = openai_of([ASK, *turn(1, parts=[image]), *turn(2), ASK, *turn(3), note, ASK, note], dialect=MISTRAL)
    check_mistral(messages)
    assert messages[-3:] == [
        {"role": "user", "content": "<system>Be brief.</system>"},
        {"role": "user", "content": "Look."},
        {"role": "system", "content": "Be brief."},
    ]
    assert roles(messages).count("assistant") == 3 + 3
    assert len(roles(openai_of([ASK, *turn(1), *turn(2)], dialect=MISTRAL))) == 5


@pytest.mark.parametrize("version", VALIDATED)
def test_the_package_of_mistral_accepts_the_messages(version):
    """Random histories as a run makes them, with results of parallel calls, pictures, notes and input in between."""
    rng = random.Random(11)
    image = ImagePart(url="https://a.test/x.png")
    for _ in range(40):
        messages = [ASK]
        for number in range(8):
            parts = rng.choice([[], [], [image]])
            turns = [[ASK], [SystemMessage(text="n"), ASK], turn(number, calls=rng.choice([1, 3]), parts=parts)]
            messages += rng.choice([*turns, [AssistantMessage(text="x"), ASK]])
        check_by_mistral(openai_of(messages, "Help.", MISTRAL), version)


@pytest.mark.parametrize("version", VALIDATED[:-1])
def test_the_package_of_mistral_refuses_ids_of_a_run(version):
    """The check finds the fault that the dialect removes; that of the newest version accepts any id."""
    with pytest.raises(MistralCommonException, match=r"t1\.0"):
        check_by_mistral(openai_of([ASK, *turn(1)]), version)


@pytest.mark.parametrize("version", VALIDATED[:-1])
def test_the_package_of_mistral_refuses_a_note_after_a_result(version):
    """That of the newest version accepts one."""
    messages = [ASK, *turn("000000", separator="x"), SystemMessage(text="n"), ASK]
    assert MISTRAL_ID.fullmatch(messages[2].call_id)
    with pytest.raises(MistralCommonException, match="role"):
        check_by_mistral(openai_of(messages), version)


@pytest.mark.parametrize("dialect", [MISTRAL, GEMINI], ids=["mistral", "gemini"])
def test_a_growing_history_is_written_as_a_whole_one(dialect):
    """What was written before is reused only where nothing of it depends on what follows."""
    rng = random.Random(7)
    for _ in range(30):
        cache, messages = build_encoding_cache(dialect=dialect), [ASK]
        for number in range(12):
            messages += rng.choice([[ASK], [SystemMessage(text="n")], turn(number), [AssistantMessage(text="x"), ASK]])
            request = Request(instructions="Help.", messages=tuple(messages))
            written = encode(request, model="m", limit_field="n", streamed=False, encoding_cache=cache)
            assert json.loads(written)["messages"] == openai_of(messages, "Help.", dialect)


def test_calls_without_a_signature_say_so_to_gemini():
    """The call of another model has none: Gemini 3 refuses the first call of a message without one."""
    (_, asked, *_) = openai_of([ASK, *turn(1, calls=2)], dialect=GEMINI)
    signature = {"google": {"thought_signature": "skip_thought_signature_validator"}}
    assert [each.get("extra_content") for each in asked["tool_calls"]] == [signature, None]
    assert openai_of([ASK, AssistantMessage(text="x"), ASK], dialect=GEMINI) == openai_of(
        [ASK, AssistantMessage(text="x"), ASK]
    )


def test_older_models_of_gemini_get_no_signature():
    """They require none, and their own are sent back."""
    history = [ASK, *turn(1)]
    for name in ("gemini-2.5-flash", "models/gemini-1.5-pro", "gemini-2.0-flash"):
        dialect = find_dialect("generativelanguage.googleapis.com", find_profile(name))
        assert openai_of(history, dialect=dialect) == openai_of(history)
    assert find_dialect("generativelanguage.googleapis.com", find_profile("gemini-flash-latest")) == GEMINI


def test_a_signature_of_its_own_is_all_that_gemini_gets():
    """Parallel calls of Gemini have a signature at the first one, and none is added."""
    model = OpenAIChat(
        "gemini-3-flash", base_url="https://generativelanguage.googleapis.com/v1beta/openai", api_key="x"
    )
    extra = {"google": {"thought_signature": "CvwB"}}
    calls = [{"id": each, "function": {"name": "look", "arguments": "{}"}} for each in "ab"]
    calls[0]["extra_content"] = extra
    reply = model._decode(json.dumps({"choices": [{"message": {"tool_calls": calls}}]}).encode())
    (asked, *results) = turn(1, calls=2)
    request = Request(
        instructions="", messages=(ASK, AssistantMessage(calls=asked.calls, native=reply.native), *results)
    )
    body = json.loads(model._encode_request(request, model._make_encoding_cache(), streamed=False))
    assert [each.get("extra_content") for each in body["messages"][1]["tool_calls"]] == [extra, None]


@pytest.mark.parametrize(
    ("host", "fields"),
    [("api.mistral.ai", {"random_seed"}), ("api.groq.com", {"seed", "stream_options"})],
)
def test_mistral_gets_the_fields_that_it_knows(host, fields):
    """It refuses others with 422, and sends the usage of a stream without being asked."""
    model = OpenAIChat("mistral-small", base_url=f"https://{host}/v1", api_key="x")
    request = Request(instructions="", messages=(ASK,), settings=Settings(seed=7, max_tokens=5))
    body = json.loads(model._encode_request(request, model._make_encoding_cache(), streamed=True))
    assert body.keys() - {"model", "messages"} == fields | {"max_tokens", "stream"}


@pytest.mark.parametrize(
    ("host", "model", "maps_ids"),
    [
        ("api.mistral.ai", "mistral-small-latest", True),
        ("api.mistral.ai", "ft:my-own", True),
        ("codestral.mistral.ai", "codestral-latest", True),
        ("gpu7", "mistralai/Devstral-Small-2507", True),
        ("openrouter.ai", "mistralai/mistral-medium-3.1", True),
        ("notmistral.ai", "m", False),
        ("api.openai.com", "gpt-4o", False),
        ("localhost", "qwen3", False),
    ],
)
def test_a_dialect_goes_by_host_and_model(host, model, maps_ids):
    """Mistral's models have their rules at other servers as well, which check requests with Mistral's package."""
    dialect = find_dialect(host, find_profile(model))
    assert next(dialect.adapt([{"role": "tool", "tool_call_id": "t1.0"}]))["tool_call_id"] == (
        "p3uKzt8kd" if maps_ids else "t1.0"
    )
    assert dialect.takes_reasoning == (host in {"gpu7", "localhost", "openrouter.ai"})
    assert (find_dialect("api.openai.com", find_profile("gpt-4o")) is OPENAI) is True


async def test_a_run_with_tools_goes_on_with_mistral():
    """The second turn has the ids that it takes, and the run keeps its own."""

    @tool
    async def look(at: str) -> str:
        """Look there."""
        return f"saw {at}"

    with LocalServer([say("", call("look", at="a"), call("look", at="b")), say("Seen.")]) as server:
        async with Agent(
            OpenAIChat("ministral-8b", base_url=server.base_url), tools=[look], store=MemoryStore()
        ) as agent:
            run = await agent.run("Look.")
            await agent.model.aclose()
    body = server.requests[1].body
    check_mistral(body["messages"])
    check_by_mistral(body["messages"], TokenizerVersion.v13, body["tools"])
    assert (run.output, [each.id for each in run.messages[1].calls]) == ("Seen.", ["t1.0", "t1.1"])
