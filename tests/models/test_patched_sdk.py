"""Tools that patch the openai package see the requests, and what they answer is a reply."""

import functools

import openai
import pytest
from openai._base_client import AsyncAPIClient
from openai.resources.chat.completions import AsyncCompletions
from openai.resources.responses import AsyncResponses

from agentfsm import Agent, Settings, tool
from agentfsm.models import OpenAIChat, OpenAIResponses
from agentfsm.models.openai.create import is_patched
from agentfsm.testing import LocalServer, call, say

SCRIPT = [say("Looking.", call("look", place="Rome")), "It is sunny."]


@tool(read_only=True)
def look(place: str) -> str:
    """Look somewhere."""
    return f"sunny in {place}"


@pytest.fixture(params=[(OpenAIChat, AsyncCompletions), (OpenAIResponses, AsyncResponses)], ids=["chat", "responses"])
def kind(request):
    """An adapter, and the class of the SDK whose `create` makes its requests."""
    return request.param


@pytest.fixture(params=[False, True], ids=["whole", "streamed"])
def stream(request, anyio_backend_name):
    """Whether the replies are streamed."""
    if request.param and anyio_backend_name == "trio":
        pytest.skip(
            "the SDK's own stream leaves its generators to the garbage collector, which trio reports as an error"
        )
    return request.param


async def run_script(adapter, *, stream, **options):
    """Run the script on a server; return the run and the bodies that the server got."""
    with LocalServer(SCRIPT) as server:
        model = adapter("m", base_url=server.base_url, api_key="k", **options)
        settings = Settings(stream=stream, extra_body={"of_the_server": 1})
        async with Agent(model, tools=[look], settings=settings) as agent:
            run = await agent.run("How is Rome?")
        return run, [each.body for each in server.requests]


async def test_a_plain_model_sends_and_reads_the_same(kind, stream):
    """The bodies, the answer and the usage are those of the direct way."""
    adapter, _ = kind
    direct, bodies = await run_script(adapter, stream=stream)
    plain, plain_bodies = await run_script(adapter, stream=stream, plain=True)
    assert plain_bodies == bodies
    assert bodies[0]["of_the_server"] == 1
    assert (plain.output, plain.usage) == (direct.output, direct.usage)
    assert plain.output == "It is sunny."


async def test_a_tool_that_wraps_create_sees_each_request(kind, stream, monkeypatch):
    """As OpenTelemetry's instrumentation does, with the model and the messages as arguments."""
    adapter, resource = kind
    seen, own = [], resource.create

    @functools.wraps(own)
    async def create(self, **arguments):
        seen.append(arguments)
        return await own(self, **arguments)

    monkeypatch.setattr(resource, "create", create)
    run, _ = await run_script(adapter, stream=stream)
    assert run.output == "It is sunny."
    assert [each["model"] for each in seen] == ["m", "m"]
    assert all(each.get("messages") or each.get("input") for each in seen)
    assert seen[0]["tools"]


def test_a_proxy_that_looks_like_the_method_is_found(monkeypatch):
    """As wrapt makes them for OpenTelemetry: `isinstance` and `__code__` are those of the method."""

    class Proxy:
        def __init__(self, method):
            self.__wrapped__ = method

        @property
        def __class__(self):
            return type(self.__wrapped__)

        @property
        def __code__(self):
            return self.__wrapped__.__code__

    client = openai.AsyncOpenAI(api_key="k")
    assert not is_patched(client, "chat.completions")
    monkeypatch.setattr(AsyncCompletions, "create", Proxy(AsyncCompletions.create))
    assert is_patched(client, "chat.completions")
    assert not is_patched(client, "responses")


async def test_a_tool_that_replaces_request_answers_itself(monkeypatch):
    """As an evaluation does that lets its own model answer."""

    @functools.wraps(AsyncAPIClient.request)
    async def request(self, cast_to, options, **_):
        assert options.json_data["model"] == "m"
        message = {"role": "assistant", "content": "from the bridge"}
        return cast_to.model_validate(
            {
                "id": "1",
                "object": "chat.completion",
                "created": 1,
                "model": "m",
                "choices": [{"index": 0, "finish_reason": "stop", "message": message}],
                "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
            }
        )

    monkeypatch.setattr(AsyncAPIClient, "request", request)
    async with Agent(OpenAIChat("m", base_url="http://127.0.0.1:9/v1")) as agent:
        run = await agent.run("go")
    assert (run.output, run.usage.tokens) == ("from the bridge", 5)


@pytest.mark.parametrize("kind_of_error", [openai.OpenAIError, TypeError])
async def test_an_error_of_create_is_a_model_error(kind_of_error, monkeypatch):
    """With its text, also if it is a fault of the tool that patches the package."""

    async def create(self, **_):
        raise kind_of_error("the bridge is down")

    monkeypatch.setattr(AsyncCompletions, "create", create)
    async with Agent(OpenAIChat("m", base_url="http://127.0.0.1:9/v1")) as agent:
        run = await agent.run("go")
    assert run.stop_reason == "model_error"
    assert "the bridge is down" in run.stop_message
