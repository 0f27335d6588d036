"""How the tests of the adapters ask: a local server, a key that must never show, an environment without keys."""

from __future__ import annotations

import traceback
from typing import Any

import attrs
import pytest

from agentfsm import ModelError, TextPart, UserMessage
from agentfsm.models import Anthropic, OpenAIChat, OpenAIResponses
from agentfsm.ports import Chunk, Reply, Request
from agentfsm.testing import LocalServer, call

KEY = "sk-very-secret-key"
REQUEST = Request(instructions="Help.", messages=(UserMessage(parts=(TextPart(text="Hello"),)),))
CALLS = (call("weather", city="Rome"), call("clock", zone="Europe/Rome"))

both_ways = pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])


@attrs.frozen
class Wire:
    """One adapter, and how it is asked."""

    name: str
    kind: type[Any]
    vendor: str
    # As its names in the environment begin.

    def __str__(self) -> str:
        return self.name

    async def ask(
        self,
        say: Any,
        *,
        streamed: bool = False,
        request: Request = REQUEST,
        silence_s: float = 60.0,
        name: str = "m",
        **options: Any,
    ) -> tuple[Reply, list[Chunk], Any]:
        """Ask a server that says one thing; returns the reply, the chunks and what the server received."""
        chunks: list[Chunk] = []
        with LocalServer([say]) as server:
            model = self.kind(name, base_url=server.base_url, **{"api_key": KEY, **options})
            try:
                asked = attrs.evolve(request, timeout_s=silence_s)
                reply = await model.reply(asked, chunks.append if streamed else None)
            finally:
                await model.aclose()
        return reply, chunks, server.requests[0]

    async def failure(self, kind: type[ModelError], say: Any, **options: Any) -> Any:
        """Ask, and return the error of exactly that kind; it never shows the key."""
        with pytest.raises(ModelError) as caught:
            await self.ask(say, **options)
        assert type(caught.value) is kind, caught.value
        assert KEY not in "".join(traceback.format_exception(caught.value))
        return caught.value


CHAT = Wire("chat", OpenAIChat, "OPENAI")
RESPONSES = Wire("responses", OpenAIResponses, "OPENAI")
ANTHROPIC = Wire("anthropic", Anthropic, "ANTHROPIC")


def forget_keys(monkeypatch: pytest.MonkeyPatch, folder: Any) -> None:
    """Leave no key in the environment, nor a place on the disk where one might be."""
    for name in ("API_KEY", "BASE_URL", "ADMIN_KEY", "ORG_ID", "CUSTOM_HEADERS"):
        monkeypatch.delenv(f"OPENAI_{name}", raising=False)
    for name in ("API_KEY", "AUTH_TOKEN", "BASE_URL", "CUSTOM_HEADERS", "PROFILE"):
        monkeypatch.delenv(f"ANTHROPIC_{name}", raising=False)
    monkeypatch.setenv("ANTHROPIC_CONFIG_DIR", str(folder))
