"""OpenAI's chat completions, and every other server that speaks the same wire."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentfsm.models import chat_wire
from agentfsm.models.openai_api import OpenAIModel
from agentfsm.models.wire import billed

if TYPE_CHECKING:
    from agentfsm.core.messages import Part, Usage
    from agentfsm.models.wire import Assembly, Written
    from agentfsm.ports import Reply, Request


class OpenAIChat(OpenAIModel):
    """A model behind OpenAI's chat completions, for example `OpenAIChat("gpt-4o")`.

    Any server that speaks the same wire will do: `OpenAIChat("qwen3", base_url="http://localhost:11434/v1")`. The
    arguments, and what is opened and closed when, are told by `OpenAIModel`.
    """

    path = "/chat/completions"
    wire = "a chat completion"
    provider = "chat completions"

    def unsupported_part(self, part: Part) -> str | None:
        """Say why the model cannot take this part of a message or of a result; None where it can."""
        return chat_wire.refuses(part)

    def _written(self) -> Written:
        return chat_wire.memory(self._provider, self.unsupported_part)

    def _body(self, request: Request, written: Written, *, streamed: bool) -> bytes:
        # OpenAI's reasoning models refuse the older max_tokens; everybody else knows it, and some (Mistral) refuse the
        # newer name.
        limit_field = "max_completion_tokens" if self.is_openai else "max_tokens"
        return chat_wire.encode(request, model=self.name, limit_field=limit_field, streamed=streamed, written=written)

    def _decoded(self, data: bytes) -> Reply:
        return chat_wire.decode(data, provider=self._provider)

    def _billed(self, data: bytes) -> Usage | None:
        return billed(data, chat_wire.usage_in)

    def _assembly(self) -> Assembly:
        return chat_wire.ChatAssembly(provider=self._provider)
