"""Adapter for OpenAI's chat completions and compatible servers."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, cast

from agentfsm.core.errors import ModelError
from agentfsm.models.openai import chat_wire
from agentfsm.models.openai.client import OpenAIModel
from agentfsm.models.openai.dialects import Dialect, find_dialect
from agentfsm.models.openai.local_windows import ask_window
from agentfsm.models.wire import read_billed_usage

if TYPE_CHECKING:
    import openai

    from agentfsm.core.messages import Part
    from agentfsm.core.settings import Settings
    from agentfsm.core.usage import Usage
    from agentfsm.models.wire import EncodingCache, StreamAssembler
    from agentfsm.ports.model import Emit, OutputMode, Reply, Request


class OpenAIChat(OpenAIModel):
    """Model of OpenAI's chat completions, for example `OpenAIChat("gpt-5.4-mini")`.

    Compatible servers work as well: `OpenAIChat("qwen3", base_url="http://localhost:11434/v1")`. `OpenAIModel`
    describes the arguments, `AdapterModel` the life of its connections.
    """

    resource = "chat.completions"
    path = "/chat/completions"
    expected_reply = "a chat completion"
    provider = "chat completions"

    asks_window: bool = False
    """Whether the server is asked for the window of its loaded model once, after the next reply, which sets
    `window_tokens`. vLLM, SGLang, Ollama, llama.cpp and LM Studio say it. Default False; True for "ollama:" and
    "vllm:".
    """

    @cached_property
    def _dialect(self) -> Dialect:
        return find_dialect(self.host, self.profile)

    def _list_output_modes(self) -> tuple[OutputMode, ...]:
        return self._dialect.output_modes or super()._list_output_modes()

    def unsupported_settings(self, settings: Settings) -> str | None:
        """Return the setting that the server or the model does not have, and a remedy; None if they have all."""
        choice = settings.tool_choice
        if choice in {None, "auto", "none"} or self._dialect.forces_tools:
            return super().unsupported_settings(settings)
        return f"{self.host} cannot force a call: leave out Settings(tool_choice={choice!r})"

    def unsupported_part(self, part: Part) -> str | None:
        """Return the reason why the model does not support this part of a message or result; None if it does."""
        return chat_wire.unsupported_part(part)

    async def reply(self, request: Request, emit: Emit | None = None) -> Reply:
        """Ask once, without retries; see `Model.reply`."""
        reply = await super().reply(request, emit)
        if self.asks_window:
            self.asks_window = False
            connection = await self._get_client()
            found = await ask_window(cast("openai.AsyncOpenAI", connection.client), self.base_url, self.name)
            self.window_tokens: int = found or self.window_tokens
        return reply

    def _make_encoding_cache(self) -> EncodingCache:
        return chat_wire.build_encoding_cache(self._provider_id, self.unsupported_part, self._dialect)

    def _encode_request(self, request: Request, encoding_cache: EncodingCache, *, streamed: bool) -> bytes:
        if request.tools and not self._dialect.takes_tools:
            raise ModelError(f"{self.host} has no tools: leave out tools=[...], or use a model of another provider")
        # OpenAI's reasoning models refuse the older max_tokens, also behind a gateway; other servers know it, and some
        # (Mistral) refuse the newer name.
        limit_field = "max_completion_tokens" if self.is_openai or self.profile.limits_thinking else "max_tokens"
        return chat_wire.encode(
            request,
            model=self.name,
            limit_field=limit_field,
            streamed=streamed,
            encoding_cache=encoding_cache,
            dialect=self._dialect,
            cache_key=request.cache_key if self._takes_cache_key or self._dialect.takes_cache_key else "",
        )

    def _decode(self, data: bytes) -> Reply:
        return chat_wire.decode(data, provider=self._provider_id, dialect=self._dialect)

    def _read_billed_usage(self, data: bytes) -> Usage | None:
        return read_billed_usage(data, chat_wire.read_usage)

    def _make_assembler(self) -> StreamAssembler:
        return chat_wire.ChatStreamAssembler(provider=self._provider_id, dialect=self._dialect)
