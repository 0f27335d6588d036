"""OpenAI's Responses API, for models that think between their calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from agentfsm.models import responses_wire
from agentfsm.models.openai_api import OPENAI_HOSTS, OpenAIModel
from agentfsm.models.windows import family_of
from agentfsm.models.wire import billed

if TYPE_CHECKING:
    from agentfsm.core.messages import Part, Usage
    from agentfsm.core.settings import Settings
    from agentfsm.models.wire import Assembly, Written
    from agentfsm.ports import Reply, Request

# Beginnings of the names of models that do not think. OpenAI answers 400 to those of them that are asked for thinking.
_THINKS_NOT: Final = ("chatgpt", "gpt-3.5", "gpt-4", "gpt-5-chat")


class OpenAIResponses(OpenAIModel):
    """A model behind OpenAI's Responses API, for example `OpenAIResponses("gpt-5")`.

    Nothing is stored at OpenAI: each request carries the whole history, and what the model thought comes sealed and
    goes back with it, so that it thinks on after a tool's result. Tools of OpenAI's own are passed as
    `Settings(extra_body={"tools": [...]})`, which stand in place of the agent's. For a model that does not think,
    under a name that does not say so (a deployment at Azure), pass `extra_body={"include": []}`. The arguments, and
    what is opened and closed when, are told by `OpenAIModel`.
    """

    path = "/responses"
    wire = "a finished response"
    provider = responses_wire.PROVIDER
    home = OPENAI_HOSTS[0]

    def unsupported_part(self, part: Part) -> str | None:
        """Say why the model cannot take this part of a message or of a result; None where it can."""
        return responses_wire.refuses(part)

    def unsupported_settings(self, settings: Settings) -> str | None:
        """Say which of the settings the wire has no field for; None where it has one for all."""
        return responses_wire.refuses_settings(settings, self.name)

    def _written(self) -> Written:
        return responses_wire.memory(self._provider, self.unsupported_part)

    def _body(self, request: Request, written: Written, *, streamed: bool) -> bytes:
        thinks = not family_of(self.name).startswith(_THINKS_NOT)
        return responses_wire.encode(request, model=self.name, streamed=streamed, thinks=thinks, written=written)

    def _decoded(self, data: bytes) -> Reply:
        return responses_wire.decode(data, provider=self._provider)

    def _billed(self, data: bytes) -> Usage | None:
        return billed(data, responses_wire.usage_in)

    def _assembly(self) -> Assembly:
        return responses_wire.ResponsesAssembly(provider=self._provider)
