"""Servers with OpenAI's API: prefixes, Azure's addresses, and tokens that a function provides."""

import json
import threading

import pytest

from agentfsm import Agent, MisuseError, Settings, TextPart, UserMessage
from agentfsm.models import OpenAIChat, resolve
from agentfsm.models.openai.providers import PROVIDERS
from agentfsm.ports.model import Model, Request
from agentfsm.testing import LocalServer

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
