"""What only its provider understands goes back to the server that wrote it, and to no other that speaks its wire."""

from __future__ import annotations

import json

import pytest

from agentfsm import Agent, AssistantMessage, Settings, tool
from agentfsm.models import Anthropic, Fallback, OpenAIChat, OpenAIResponses
from agentfsm.stores import MemoryStore
from agentfsm.testing import LocalServer, WireReply, call, say

# Each adapter, and the words by which a request shows what another server has thought.
ADAPTERS = [
    pytest.param(Anthropic, '"signature"', id="anthropic"),
    pytest.param(OpenAIResponses, '"encrypted_content"', id="responses"),
]

each_adapter = pytest.mark.parametrize(("adapter", "thought"), ADAPTERS)


@tool(read_only=True)
async def look(at: str) -> str:
    """Look there."""
    return f"saw {at}"


def natives(run):
    """Return whose the native replies of a run are."""
    return [each.native.provider for each in run.messages if isinstance(each, AssistantMessage) and each.native]


@each_adapter
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
async def test_a_model_that_steps_in_is_not_sent_what_another_has_sealed(adapter, thought, streamed):
    """A fallback on the same wire gets text and calls; the first, when it is back, gets its own thinking again."""
    first = [WireReply(say("", call("look", at="a")), thinking="Hm."), WireReply(status=529), say("Back.")]
    with LocalServer(first) as one, LocalServer([WireReply("Seen.", thinking="So.")]) as two:
        model = Fallback(adapter("m", base_url=one.base_url), adapter("m", base_url=two.base_url), rest_s=1e-6)
        async with Agent(model, tools=[look], settings=Settings(stream=streamed), store=MemoryStore()) as agent:
            run = await agent.run("Look.")
            again = await agent.run("And now?", after=run)
        await model.aclose()
    assert (run.output, again.output) == ("Seen.", "Back.")
    (asked,) = two.requests
    assert thought not in json.dumps(asked.body)
    assert "saw a" in json.dumps(asked.body)
    assert json.dumps(one.requests[-1].body).count(thought) == 1
    assert len(set(natives(run))) == 2


@each_adapter
async def test_a_conversation_goes_on_with_the_model_of_another_server(adapter, thought):
    """Another agent, by `with_`, goes on from what was said, and not from what was thought."""
    with LocalServer([WireReply("Hello.", thinking="Hm.")]) as one, LocalServer([say("Yes.")]) as two:
        async with Agent(adapter("m", base_url=one.base_url), store=MemoryStore()) as agent:
            run = await agent.run("Hi.")
            other = agent.with_(model=adapter("m", base_url=two.base_url))
            assert (await other.run("Go on.", after=run)).output == "Yes."
            await agent.model.aclose()
            await other.model.aclose()
    assert natives(run)
    assert thought not in json.dumps(two.requests[0].body)
    assert "Hello." in json.dumps(two.requests[0].body)


@pytest.mark.parametrize(
    ("adapter", "base_url", "provider"),
    [
        (Anthropic, None, "anthropic"),
        (Anthropic, "https://api.anthropic.com:443/v1", "anthropic"),
        (Anthropic, "https://api.moonshot.ai/anthropic", "anthropic of api.moonshot.ai"),
        (OpenAIResponses, None, "openai-responses"),
        (OpenAIResponses, "https://me.openai.azure.com/openai/v1", "openai-responses of me.openai.azure.com"),
        (OpenAIResponses, "http://localhost:8000/v1", "openai-responses of localhost:8000"),
        (OpenAIChat, None, "chat completions of api.openai.com"),
        (OpenAIChat, "https://api.deepseek.com", "chat completions of api.deepseek.com"),
    ],
)
def test_a_provider_is_a_server(adapter, base_url, provider, monkeypatch):
    """At the vendor's own address its name stands alone, as in journals from before."""
    for name in ("ANTHROPIC_BASE_URL", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    assert adapter("m", base_url=base_url, api_key="none-at-all")._provider_id == provider
