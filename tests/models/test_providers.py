"""Servers with OpenAI's API: prefixes, Azure's addresses, and tokens that a function provides."""

import json
import re
import threading

import httpx2
import pytest
from pydantic import BaseModel

from agentfsm import Agent, MisuseError, Settings, TextPart, UserMessage, tool
from agentfsm.models import OpenAIChat, resolve
from agentfsm.models.openai.providers import PROVIDERS
from agentfsm.ports import Model, Request
from agentfsm.testing import LocalServer, ScriptedModel, call, say
from tests.support.doc_tables import read_table

VARIABLES = [*(each for provider in PROVIDERS.values() for each in provider.key_variables), "OPENAI_BASE_URL"]
DEPLOYMENT = "https://name.openai.azure.com/openai/deployments/gpt?api-version=2024-10-21"


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    for name in [*VARIABLES, *(each.url_variable for each in PROVIDERS.values() if each.url_variable)]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-openai-itself")


@pytest.mark.parametrize("prefix", sorted(PROVIDERS))
def test_a_prefix_has_an_address_and_a_key(prefix, monkeypatch):
    """From one table; the key of OpenAI goes nowhere else."""
    provider = PROVIDERS[prefix]
    monkeypatch.setenv(provider.key_variables[0], "key-of-the-provider")
    if provider.url_variable:
        monkeypatch.setenv(provider.url_variable, "https://own.openai.azure.com/")
    model = resolve(f"{prefix}:some/model")
    assert isinstance(model, OpenAIChat)
    assert model.name == "some/model"
    wanted = f"https://own.openai.azure.com{provider.url_suffix}" if provider.url_variable else provider.base_url
    assert model._client_options["base_url"] == wanted
    assert model._client_options["api_key"] == "key-of-the-provider"


@pytest.mark.parametrize("prefix", ["ollama", "vllm"])
def test_a_server_on_this_machine_needs_no_key(prefix):
    """It does not get that of OpenAI either."""
    assert resolve(f"{prefix}:qwen3")._client_options["api_key"] == "none"


@pytest.mark.parametrize(
    ("name", "message"),
    [("groq:llama", "there is no API key for Groq: set GROQ_API_KEY"), ("azure:gpt", "set AZURE_OPENAI_ENDPOINT")],
)
def test_a_missing_key_or_address_is_named(name, message):
    """With the variable to set."""
    with pytest.raises(MisuseError, match=message):
        resolve(name)


def test_a_classic_deployment_of_azure_is_supported():
    """The query goes with each request, and the key in a header of its own."""
    options = OpenAIChat("gpt", base_url=DEPLOYMENT, api_key="key-of-azure")._client_options
    assert options["base_url"] == DEPLOYMENT.partition("?")[0]
    assert options["default_query"] == {"api-version": "2024-10-21"}
    assert options["default_headers"] == {"api-key": "key-of-azure"}


@pytest.mark.parametrize(
    ("url", "message"),
    [
        (DEPLOYMENT.partition("?")[0], r"append \?api-version="),
        ("https://name.openai.azure.com/", "use https://name.openai.azure.com/openai/v1"),
    ],
)
def test_an_address_that_azure_does_not_know_is_refused(url, message):
    """Here, and not as a 404 of the first request."""
    with pytest.raises(MisuseError, match=message):
        OpenAIChat("gpt", base_url=url, api_key="key-of-azure")


@pytest.mark.parametrize(
    ("name", "url", "field"),
    [
        ("gpt-4o", "https://name.services.ai.azure.com/openai/v1", "max_completion_tokens"),
        ("openai/gpt-5-mini", "https://gateway.example/v1", "max_completion_tokens"),
        ("o3", "https://gateway.example/v1", "max_completion_tokens"),
        ("openai/gpt-6", "https://gateway.example/v1", "max_completion_tokens"),
        ("gpt-oss-20b", "https://gateway.example/v1", "max_tokens"),
        ("olmo", "https://gateway.example/v1", "max_tokens"),
    ],
)
async def test_the_limit_of_a_reply_has_the_name_that_the_model_takes(name, url, field):
    """Reasoning models of OpenAI refuse the older one, whatever stands before them."""
    model = OpenAIChat(name, base_url=url, api_key="k")
    request = Request(
        instructions="", messages=(UserMessage(parts=(TextPart(text="hi"),)),), settings=Settings(max_tokens=7)
    )
    body = json.loads(model._encode_request(request, model._make_encoding_cache(), streamed=False))
    assert body[field] == 7


async def run_with(api_key) -> tuple[Model, list[str]]:
    """Run two requests with a key; return the model and the keys that the server got."""
    with LocalServer(["one", "two"]) as server:
        model = OpenAIChat("m", base_url=server.base_url, api_key=api_key)
        async with Agent(model) as agent:
            assert [(await agent.run("go")).output for _ in range(2)] == ["one", "two"]
        return model, [each.headers["authorization"] for each in server.requests]


async def test_a_function_provides_the_token():
    """Before each request, plain in a thread or async."""
    threads = []

    def provide() -> str:
        threads.append(threading.current_thread())
        return f"token-{len(threads)}"

    _, keys = await run_with(provide)
    assert keys == ["Bearer token-1", "Bearer token-2"]
    assert threading.current_thread() not in threads

    async def provide_later() -> str:
        return "token-of-a-service"

    model, keys = await run_with(provide_later)
    assert keys == ["Bearer token-of-a-service"] * 2
    assert "token-of-a-service" not in model._build_failure("echo token-of-a-service").detail


@pytest.mark.parametrize("provide", [lambda: 1 / 0, lambda: None, lambda: "line\nbreak"])
async def test_a_function_that_fails_ends_the_run_with_the_reason(provide):
    """It is a model error, not a raw exception of the function."""
    with LocalServer(["never"]) as server:
        async with Agent(OpenAIChat("m", base_url=server.base_url, api_key=provide)) as agent:
            run = await agent.run("go")
        assert not server.requests
    assert run.stop_reason == "model_error"
    assert "the function given as api_key failed" in run.stop_message


# The page of the docs. Its tables name each prefix, and what of a provider was tried.

CELLS = {"recorded", "published", "local", "-"}


def read_rows(first: str) -> dict[str, list[str]]:
    """Return the rows of the table of docs/models.md whose header begins with that cell: prefix -> the other cells."""
    return {re.sub(r"[`:]", "", row[0]): row[1:] for row in read_table("models.md", first)}


def test_the_docs_have_each_provider_with_its_address_and_key():
    """As the registry has it, and no other."""
    rows = read_rows("prefix")
    assert list(rows) == sorted(PROVIDERS)
    for prefix, provider in PROVIDERS.items():
        address, key = rows[prefix]
        assert all(f"`{each}`" in address for each in (provider.base_url, provider.url_variable) if each)
        assert all(f"`{each}`" in key for each in provider.key_variables)


def test_the_docs_say_of_each_provider_what_was_tried():
    """In four words; only local tests are claimed of those without recordings."""
    rows = read_rows("tried")
    own = {"openai", "openai-responses", "anthropic", "google"}
    assert set(rows) == {*PROVIDERS, *own}
    assert {cell for cells in rows.values() for cell in cells} <= CELLS
    assert all("-" not in rows[prefix][:4] for prefix in set(PROVIDERS) - {"perplexity"})  # as tried below
    recorded = {prefix for prefix, cells in rows.items() if "recorded" in cells}
    assert recorded == {"openai", "openai-responses", "anthropic", "azure", "deepseek", "vllm"}


# Each provider's own requests, as a service behind its address gets them.


@tool(read_only=True)
def look(place: str) -> str:
    """Look somewhere."""
    return f"sunny in {place}"


def build_service(seen, replies):
    """Return an HTTP client behind which each address answers with the next message, whole or as a stream."""

    def answer(request: httpx2.Request) -> httpx2.Response:
        body = json.loads(request.content)
        seen.append((str(request.url), request.headers["authorization"], body))
        message = {"role": "assistant", **replies.pop(0)}
        choice = {"index": 0, "finish_reason": "tool_calls" if message.get("tool_calls") else "stop"}
        if not body.get("stream"):
            return httpx2.Response(200, json={"choices": [{**choice, "message": message}]})
        event = json.dumps({"choices": [{**choice, "delta": message}]})
        return httpx2.Response(
            200, content=f"data: {event}\n\ndata: [DONE]\n\n", headers={"content-type": "text/event-stream"}
        )

    return httpx2.AsyncClient(transport=httpx2.MockTransport(answer))


async def talk(prefix, replies, prompt="How is Rome?", name="some/model", messages=(), **options):
    """Run an agent at the provider's own address; returns the run and the requests."""
    seen = []
    url = PROVIDERS[prefix].base_url or "https://own.openai.azure.com/openai/v1"
    async with build_service(seen, list(replies)) as client:
        model = OpenAIChat(name, base_url=url, api_key="key", http_client=client)
        async with Agent(model, **options) as agent:
            return await agent.run(prompt, messages=messages), seen


CALL = {
    "index": 0,
    "id": "call12345",
    "type": "function",
    "function": {"name": "look", "arguments": '{"place": "Rome"}'},
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prefix", sorted(set(PROVIDERS) - {"perplexity"}))
async def test_a_call_and_an_answer_at_each_address(prefix, stream):
    """With the key of the provider, the field that limits a reply there, and reasoning as the server wants it back."""
    first = {"content": None, "tool_calls": [CALL], "reasoning_content": "I have to look."}
    settings = Settings(max_tokens=9, stream=stream)
    run, seen = await talk(prefix, [first, {"content": "sunny"}], tools=[look], settings=settings)
    assert run.output == "sunny"
    (url, key, one), (_, _, two) = seen
    assert url.startswith(PROVIDERS[prefix].base_url or "https://own.openai.azure.com/openai/v1")
    assert key == "Bearer key"
    new = prefix in {"azure", "cerebras", "moonshot"}
    assert ("max_completion_tokens" in one, "max_tokens" in one) == (new, not new)
    assert two["messages"][1]["reasoning_content"] == "I have to look."
    assert two["messages"][2]["tool_call_id"] == two["messages"][1]["tool_calls"][0]["id"]


async def test_perplexity_gets_sides_that_alternate():
    """Calls of another model are texts there, and so are their results; messages of one side are joined."""
    first = await Agent(ScriptedModel(say("", call("look", place="Rome")), "sunny"), tools=[look]).run("How is Rome?")
    run, [(url, _, body)] = await talk(
        "perplexity",
        [{"content": "ok"}],
        "And Oslo?",
        messages=[*first.messages, UserMessage(parts=(TextPart(text="Hm."),))],
    )
    assert (url, run.output) == ("https://api.perplexity.ai/chat/completions", "ok")
    assert [each["role"] for each in body["messages"]] == ["user", "assistant"] * 2 + ["user"]
    assert 'look({"place":"Rome"})' in body["messages"][1]["content"].replace(": ", ":")
    assert "sunny in Rome" in body["messages"][2]["content"]
    assert [part["text"] for part in body["messages"][4]["content"]] == ["Hm.", "And Oslo?"]


async def test_perplexity_refuses_tools_with_a_remedy():
    """Before a request."""
    run, seen = await talk("perplexity", [], tools=[look])
    assert not seen
    assert "leave out tools" in run.stop_message


class Place(BaseModel):
    """A place."""

    name: str


@pytest.mark.parametrize(
    ("prefix", "kind"), [("perplexity", "json_schema"), ("zai", "json_object"), ("moonshot", "json_object")]
)
async def test_a_typed_answer_needs_no_forced_call_there(prefix, kind):
    """These servers refuse a call that is forced, or have no calls."""
    run, [(_, _, body)] = await talk(prefix, [{"content": '{"name": "Rome"}'}], output_type=Place)
    assert run.output == Place(name="Rome")
    assert body["response_format"]["type"] == kind
    assert not {"tools", "tool_choice"} & body.keys()


WINDOWS = {
    "vLLM": {"/v1/models": {"data": [{"id": "other", "max_model_len": 9}, {"id": "m", "max_model_len": 40_960}]}},
    "Ollama": {
        "/v1/models": {"data": [{"id": "m:latest", "owned_by": "library"}]},
        "/api/ps": {"models": [{"name": "m:latest", "context_length": 4_096}]},
    },
    "llama.cpp": {
        "/v1/models": {"data": [{"id": "m", "meta": {"n_ctx_train": 131_072}}]},
        "/props": {"default_generation_settings": {"n_ctx": 8_192}},
    },
    "LM Studio": {
        "/v1/models": {"data": [{"id": "m"}]},
        "/api/ps": {"error": "Unexpected endpoint"},
        "/props": {"error": "Unexpected endpoint"},
        "/api/v0/models": {"data": [{"id": "m", "loaded_context_length": 16_384, "max_context_length": 131_072}]},
    },
    "none": {"/v1/models": {"data": [{"id": "m", "max_model_len": "long"}]}, "/api/ps": [1], "/props": {}},
}


@pytest.mark.parametrize(
    ("server", "window"),
    [("vLLM", 40_960), ("Ollama", 4_096), ("llama.cpp", 8_192), ("LM Studio", 16_384), ("none", 128_000)],
)
async def test_a_server_of_ones_own_is_asked_for_its_window(server, window, monkeypatch):
    """Once, after the first reply, so that nothing waits for it; a server that does not say it changes nothing."""
    asked = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        path = request.url.path
        asked.append(path)
        if path == "/v1/chat/completions":
            return httpx2.Response(200, json={"choices": [{"message": {"content": "hi"}, "finish_reason": "stop"}]})
        found = WINDOWS[server].get(path)
        return httpx2.Response(404, text="no") if found is None else httpx2.Response(200, json=found)

    async with httpx2.AsyncClient(transport=httpx2.MockTransport(answer)) as client:
        model = OpenAIChat("m", base_url="http://localhost:8000/v1", http_client=client)
        model.asks_window = True
        async with Agent(model) as agent:
            assert model.window_tokens == 128_000
            assert [(await agent.run("go")).output for _ in range(2)] == ["hi", "hi"]
    assert model.window_tokens == window
    assert len(set(asked)) == len(asked) - 1
    assert [asked[0], asked[-1]] == ["/v1/chat/completions"] * 2


def test_only_servers_of_ones_own_are_asked(monkeypatch):
    """By their prefixes; a window that is given stays."""
    monkeypatch.setenv("GROQ_API_KEY", "k")
    assert [resolve(name).asks_window for name in ("ollama:m", "vllm:m", "groq:m")] == [True, True, False]
    assert not OpenAIChat("m", base_url="http://localhost:8000/v1").asks_window


def test_a_forced_call_is_refused_where_the_server_refuses_it():
    """When the agent is made."""
    model = OpenAIChat("glm-5.1", base_url="https://api.z.ai/api/paas/v4", api_key="k")
    with pytest.raises(MisuseError, match="cannot force a call"):
        Agent(model, tools=[look], settings=Settings(tool_choice="required"))


def test_the_prefix_of_a_service_that_has_ended_says_so():
    """With the remedy."""
    with pytest.raises(MisuseError, match="was retired on 30 July 2026"):
        resolve("github:openai/gpt-5")
