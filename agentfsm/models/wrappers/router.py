"""Route each request to one of several models, which a function of yours chooses."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from inspect import isawaitable
from typing import TYPE_CHECKING, TypeAlias

from agentfsm.core.errors import MisuseError, ModelError
from agentfsm.models.wrappers.base import CompositeModel, ask_model

if TYPE_CHECKING:
    from agentfsm.core.messages import Part
    from agentfsm.ports.model import Emit, Model, Reply, Request

# Returns the name of a model; a plain function must not block, an async one may wait.
ChooseModel: TypeAlias = "Callable[[Request], str | Awaitable[str]]"


class Router(CompositeModel):
    """Model that forwards each request to the model that a function names.

    Example: a cheap model for the first messages, and a strong one for long conversations.

        Router(
            lambda request: "cheap" if len(request.messages) < 10 else "strong",
            {"cheap": "openai:gpt-5.4-mini", "strong": "openai:gpt-5.4"},
        )

    The function is called for each attempt, with the whole request. A ModelError that it raises, for example because it
    asks a model itself, counts as the failure of the request.

    Args:
        choose: Function from a request to a name, plain or async.
        models: Models by name, or strings such as "openai:gpt-5.4-mini". The first one's tokenizer is used for all.

    Raises:
        MisuseError: when there are no models, or they have no common output mode.
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
            MisuseError: when the function fails, or returns an unknown name.
        """
        return await ask_model(await self._choose_model(request), request, emit)

    def unsupported_part(self, part: Part) -> str | None:
        """Return the reason why no model accepts this part, or None if at least one does."""
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
