"""OpenAI's Responses API, for models that think between their calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentfsm.models.openai import responses_wire
from agentfsm.models.openai.client import OPENAI_HOSTS, OpenAIModel
from agentfsm.models.openai.responses_hosted import unsupported_hosted_tool
from agentfsm.models.profiles import Thinking
from agentfsm.models.wire import read_billed_usage

if TYPE_CHECKING:
    from agentfsm.core.hosted_tools import HostedTool
    from agentfsm.core.messages import Part
    from agentfsm.core.settings import Settings
    from agentfsm.core.usage import Usage
    from agentfsm.models.wire import EncodingCache, StreamAssembler
    from agentfsm.ports.model import Reply, Request


class OpenAIResponses(OpenAIModel):
    """Model of OpenAI's Responses API, for example `OpenAIResponses("gpt-6-luna")`.

    Nothing is stored at OpenAI: each request has the whole history. Reasoning is received encrypted and sent back, so
    that the model continues it after a tool's result. OpenAI's built-in tools are given as
    `Settings(extra_body={"tools": [...]})`, which replaces the agent's tools. For a model without reasoning whose name
    does not show that (a deployment at Azure), give `extra_body={"include": []}`. `OpenAIModel` describes the
    arguments, `AdapterModel` the life of its connections.
    """

    resource = "responses"
    path = "/responses"
    expected_reply = "a finished response"
    provider = responses_wire.PROVIDER
    official_host = OPENAI_HOSTS[0]

    def unsupported_part(self, part: Part) -> str | None:
        """Return the reason why the model does not support this part of a message or result; None if it does."""
        return responses_wire.unsupported_part(part)

    def unsupported_settings(self, settings: Settings) -> str | None:
        """Return the reason why the API does not support one of the settings; None if it supports all."""
        return responses_wire.unsupported_settings(settings, self.name) or super().unsupported_settings(settings)

    def unsupported_hosted_tool(self, tool: HostedTool) -> str | None:
        """Return the reason why the API does not have this tool or one of its options; None if it has."""
        return unsupported_hosted_tool(tool)

    def _make_encoding_cache(self) -> EncodingCache:
        return responses_wire.build_encoding_cache(self._provider_id, self.unsupported_part)

    def _encode_request(self, request: Request, encoding_cache: EncodingCache, *, streamed: bool) -> bytes:
        thinks = self.profile.thinking is not Thinking.NONE
        takes_key = self._takes_cache_key or self.host.endswith(".x.ai")  # of others, its documents do not tell
        return responses_wire.encode(
            request,
            model=self.name,
            streamed=streamed,
            include_reasoning=thinks,
            encoding_cache=encoding_cache,
            cache_key=request.cache_key if takes_key else "",
            compared_id=self._find_compared_id(request),
        )

    def _decode(self, data: bytes) -> Reply:
        return responses_wire.decode(data, provider=self._provider_id, reports_cache=self._reports_cache)

    def _read_billed_usage(self, data: bytes) -> Usage | None:
        return read_billed_usage(data, responses_wire.read_usage)

    def _make_assembler(self) -> StreamAssembler:
        return responses_wire.ResponsesStreamAssembler(provider=self._provider_id, reports_cache=self._reports_cache)
