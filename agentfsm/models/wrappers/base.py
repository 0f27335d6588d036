"""Base class of models that wrap others: it supports what all of them support, and names the one that answered."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import attrs

from agentfsm.core.errors import MisuseError
from agentfsm.core.usage import Usage
from agentfsm.models.model_names import resolve_model
from agentfsm.ports.model import (
    Chunk,
    Emit,
    Model,
    OutputMode,
    Reply,
    Request,
    build_os_failure,
)
from agentfsm.tokens.billing import (
    attach_usage,
    count_chunk_bytes,
    estimate_request_tokens,
    find_failed_usage,
)

if TYPE_CHECKING:
    from agentfsm.core.hosted_tools import HostedTool
    from agentfsm.core.messages import JSON, Part
    from agentfsm.core.settings import Settings


class CompositeModel(Model):
    """Model that wraps one or more models, one of which answers each request.

    Args:
        separator: Text between the models' names in the common name. That name begins with the first model's name, so
            the first model's tokenizer counts for all.
        models: Models, or strings such as "openai:gpt-5.4-mini"; at least one.

    Raises:
        MisuseError: if the models have no common output mode; or as from `resolve_model`.
    """

    def __init__(self, separator: str, models: Iterable[Model | str]) -> None:
        self.models: tuple[Model, ...] = tuple(map(resolve_model, models))
        self.name: str = separator.join(model.name for model in self.models)
        self.window_tokens: int = min(model.window_tokens for model in self.models)
        first, *others = self.models
        self.output_modes: tuple[OutputMode, ...] = tuple(
            [mode for mode in first.output_modes if all(mode in model.output_modes for model in others)]
        )
        if not self.output_modes:
            raise MisuseError(f"the models of {self.name!r} have no common output mode: leave out the one that differs")

    def unsupported_part(self, part: Part) -> str | None:
        """Return the reason why a model does not support this part: any of the models may have to answer."""
        return next((why for model in self.models if (why := model.unsupported_part(part)) is not None), None)

    def unsupported_settings(self, settings: Settings) -> str | None:
        """Return the reason why a model does not support a setting: any of the models may have to answer."""
        return next((why for model in self.models if (why := model.unsupported_settings(settings)) is not None), None)

    def unsupported_hosted_tool(self, tool: HostedTool) -> str | None:
        """Return the reason why a model does not have this tool: any of the models may have to answer."""
        return next((why for model in self.models if (why := model.unsupported_hosted_tool(tool)) is not None), None)

    def unsupported_schema(self, schema: Mapping[str, JSON]) -> str | None:
        """Return the reason why a model cannot enforce this schema: any of the models may have to answer."""
        return next((why for model in self.models if (why := model.unsupported_schema(schema)) is not None), None)

    def prepare(self) -> None:
        """Prepare all models."""
        for model in self.models:
            model.prepare()

    def cost_usd(self, usage: Usage) -> float | None:
        """Return the highest cost of one reply in US dollars, at any model's price; None if a price is unknown.

        It reserves money before a reply. The reply itself is priced by the model that gave it.
        """
        costs = [model.cost_usd(usage) for model in self.models]
        known = [cost for cost in costs if cost is not None]
        return max(known) if len(known) == len(costs) else None

    async def aclose(self) -> None:
        """Close all models, even if closing one fails; then raise the first error."""
        errors: list[Exception] = []
        for model in self.models:
            try:
                await model.aclose()
            except Exception as error:  # noqa: BLE001  raised after all are closed
                errors.append(error)
        if errors:
            raise errors[0]


async def ask_model(model: Model, request: Request, emit: Emit | None) -> Reply:
    """Ask a model once, and add its price to the usage of the reply or of the error, and its name to the reply.

    Raises:
        ModelError: as from `Model.reply`; it always has a usage.
    """
    relay = emit if emit is None or isinstance(emit, ChunkRelay) else ChunkRelay(emit)
    before = 0 if relay is None else relay.received_bytes
    try:
        reply = await model.reply(request, relay)
    except BaseException as error:
        failure = build_os_failure(model, error) if isinstance(error, OSError) else error
        received = 0 if relay is None else relay.received_bytes - before
        usage = find_failed_usage(failure, estimate_request_tokens(request), received)
        attach_usage(failure, usage.with_price(model.cost_usd))  # callers do not know which model answered
        if failure is error:
            raise
        raise failure from error
    priced = None if reply.usage is None else reply.usage.with_price(model.cost_usd)
    return attrs.evolve(reply, usage=priced, model=reply.model or model.name)


class ChunkRelay:
    """Passes chunks on, and counts them."""

    __slots__ = ("_emit", "has_chunks", "received_bytes")

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self.has_chunks = False
        self.received_bytes = 0
        """Bytes of text, thinking and arguments so far."""

    def __call__(self, chunk: Chunk) -> None:
        """Pass a chunk on."""
        self.has_chunks = True
        self.received_bytes += count_chunk_bytes(chunk)
        self._emit(chunk)
