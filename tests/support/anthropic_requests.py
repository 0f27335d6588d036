"""How the tests of `Anthropic` ask: a local server, a key that must never show, an environment without keys."""

import traceback

import attrs
import pytest

from agentfsm.core.errors import ModelError
from agentfsm.core.messages import TextPart, UserMessage
from agentfsm.models.anthropic import Anthropic
from agentfsm.ports import Request
from agentfsm.testing.server import LocalServer

KEY = "sk-ant-very-secret-key"
REQUEST = Request(instructions="Help.", messages=(UserMessage(parts=(TextPart(text="Hello"),)),))

both_ways = pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])


def forget_keys(monkeypatch, folder):
    """Leave no key in the environment, nor a place on the disk where one might be."""
    for name in ("API_KEY", "AUTH_TOKEN", "BASE_URL", "CUSTOM_HEADERS", "PROFILE"):
        monkeypatch.delenv(f"ANTHROPIC_{name}", raising=False)
    monkeypatch.setenv("ANTHROPIC_CONFIG_DIR", str(folder))


async def ask(say, *, streamed=False, request=REQUEST, silence_s=60.0, **options):
    """Ask a server that says one thing; returns the reply, the chunks and what the server received."""
    chunks = []
    with LocalServer([say]) as server:
        model = Anthropic("m", base_url=server.base_url, **{"api_key": KEY, **options})
        try:
            asked = attrs.evolve(request, timeout_s=silence_s)
            reply = await model.reply(asked, chunks.append if streamed else None)
        finally:
            await model.aclose()
    return reply, chunks, server.requests[0]


async def failure(kind, say, **options):
    """Ask, and return the error of exactly that kind; it never shows the key."""
    with pytest.raises(ModelError) as caught:
        await ask(say, **options)
    assert type(caught.value) is kind, caught.value
    assert KEY not in "".join(traceback.format_exception(caught.value))
    return caught.value
