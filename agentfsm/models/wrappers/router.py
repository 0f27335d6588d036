"""A model that is a choice among models: a function of yours says for each request which one answers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from inspect import isawaitable
from typing import TYPE_CHECKING, TypeAlias

from agentfsm.core.errors import MisuseError, ModelError
from agentfsm.models.wrappers.base import CompositeModel, ask_model

if TYPE_CHECKING:
    from agentfsm.core.messages import Part
    from agentfsm.ports.model import Emit, Model, Reply, Request

# Names a model; a plain function must not block, an async one may wait.
ChooseModel: TypeAlias = "Callable[[Request], str | Awaitable[str]]"


class Router(CompositeModel):
    """Asks the model that a function names.

    Example: a cheap model for the beginning, a strong one when it takes longer.

        Router(
            lambda request: "cheap" if len(request.messages) < 10 else "strong",
            {"cheap": "openai:gpt-4o-mini", "strong": "openai:gpt-4o"},
        )

    The function is asked for each attempt anew, and sees the whole request. What it raises as a ModelError, say where
    it asks a model itself, counts as the failure of the request.

    Args:
        choose: Plain or async, from a request to a name.
        models: By name; models, or strings such as "openai:gpt-4o". The first one's tokenizer counts for all.

    Raises:
        MisuseError: when there is no model, or they share no way to be held to the form of an answer.
    """

    def __init__(self, choose: ChooseModel, models: Mapping[str, Model | str]) -> None:
        if not models:
            raise MisuseError("Router has no models: give them by the names that the function returns")
        super().__init__(" or ", models.values())
        self._choose = choose
        self._by_name = dict(zip(models, self.models, strict=True))

    async def reply(self, request: Request, emit: Emit | None = None) -> Reply:
        """Ask the model that the function names; see `Model.reply`.

        Raises:
            MisuseError: when the function fails, or names no model of the router.
        """
        return await ask_model(await self._choose_model(request), request, emit)

    def unsupported_part(self, part: Part) -> str | None:
        """Say why no model can take this part; where one can, it is for the function to choose it."""
        reasons = [model.unsupported_part(part) for model in self.models]
        return None if None in reasons else reasons[0]

    async def _choose_model(self, request: Request) -> Model:
        try:
            named = self._choose(request)
            name = await named if isawaitable(named) else named
        except ModelError:
            raise
        except Exception as error:
            raise MisuseError(
                f"the function of the router failed ({type(error).__name__}: {error}): it has to name a model for any "
                "request"
            ) from error
        model = self._by_name.get(name) if isinstance(name, str) else None
        if model is None:
            there = ", ".join(repr(each) for each in self._by_name)
            raise MisuseError(f"the function of the router named {name!r:.100}: it has to return one of {there}")
        return model
