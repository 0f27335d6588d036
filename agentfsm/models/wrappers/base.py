"""What models that are made of models share: they promise what each of them can do, and say which one answered."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import attrs

from agentfsm.core.errors import MisuseError, ModelError
from agentfsm.core.usage import Usage
from agentfsm.models.model_names import resolve_model
from agentfsm.ports.model import Emit, Model, Reply, Request

if TYPE_CHECKING:
    from agentfsm.core.messages import JSON, Part
    from agentfsm.core.settings import Settings


class CompositeModel(Model):
    """A model that wraps one model or several, one of which answers each request.

    Args:
        separator: Stands between their names in the name of them all. That begins with the name of the first, so tokens
            are counted as that one counts.
        models: At least one; models, or strings such as "openai:gpt-4o".

    Raises:
        MisuseError: when they share no way to be held to the form of an answer; or as from `resolve_model`.
    """

    def __init__(self, separator: str, models: Iterable[Model | str]) -> None:
        self.models = tuple(map(resolve_model, models))
        self.name = separator.join(model.name for model in self.models)
        self.window_tokens = min(model.window_tokens for model in self.models)
        first, *others = self.models
        self.output_modes = tuple(
            [mode for mode in first.output_modes if all(mode in model.output_modes for model in others)]
        )
        if not self.output_modes:
            raise MisuseError(f"the models of {self.name!r} share no output mode: leave out the one that differs")

    def unsupported_part(self, part: Part) -> str | None:
        """Say why one of the models cannot take this part: any of them may have to answer."""
        return next((why for model in self.models if (why := model.unsupported_part(part)) is not None), None)

    def unsupported_settings(self, settings: Settings) -> str | None:
        """Say which of the settings one of the models has no word for: any of them may have to answer."""
        return next((why for model in self.models if (why := model.unsupported_settings(settings)) is not None), None)

    def unsupported_schema(self, schema: Mapping[str, JSON]) -> str | None:
        """Say why one of the models cannot be held to this schema: any of them may have to answer."""
        return next((why for model in self.models if (why := model.unsupported_schema(schema)) is not None), None)

    def prepare(self) -> None:
        """Prepare all of them."""
        for model in self.models:
            model.prepare()

    def cost_usd(self, usage: Usage) -> float | None:
        """US dollars for the usage of one reply at most: by the dearest model; None where one has no known price.

        It serves to hold money back before a reply. A reply itself is billed by the model that gave it.
        """
        costs = [model.cost_usd(usage) for model in self.models]
        known = [cost for cost in costs if cost is not None]
        return max(known) if len(known) == len(costs) else None

    async def aclose(self) -> None:
        """Close all of them, also when one cannot be closed; the first error is raised then."""
        errors: list[Exception] = []
        for model in self.models:
            try:
                await model.aclose()
            except Exception as error:  # noqa: BLE001  it is raised when all are closed
                errors.append(error)
        if errors:
            raise errors[0]


async def ask_model(model: Model, request: Request, emit: Emit | None) -> Reply:
    """Ask a model once; its reply, or what a useless one was paid, bears its price and its name.

    Raises:
        ModelError: as from `Model.reply`.
    """
    try:
        reply = await model.reply(request, emit)
    except ModelError as error:
        if error.usage is not None:
            error.usage = error.usage.with_price(model.cost_usd)  # which nobody above it can know
        raise
    usage = None if reply.usage is None else reply.usage.with_price(model.cost_usd)
    return attrs.evolve(reply, usage=usage, model=reply.model or model.name)
