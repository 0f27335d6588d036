"""What the arguments of a call are bound to. Loads nothing, unlike the two kinds of signatures that do the binding."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    from agentfsm.core.messages import JSON

# The validated arguments of a call, defaults included: `a.path`; `vars(a)` is the dict.
Arguments: TypeAlias = SimpleNamespace
# The same as the function is called with: by position and by name. What the model left out is absent.
BoundArguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]


class ToolSignature(Protocol):
    """What a tool has to know of its function."""

    @property
    def description(self) -> str:
        """The docstring's short and long description, without its sections; may be empty."""
        ...

    @property
    def parameters(self) -> Mapping[str, JSON]:
        """The JSON Schema of the arguments, as the model is told it."""
        ...

    @property
    def context_parameter(self) -> str | None:
        """The first parameter where it takes the RunContext, which is passed by position."""
        ...

    def bind(self, text: str) -> BoundArguments:
        """Turn the arguments' JSON text into what the function is called with.

        Raises:
            ArgumentsError: when they do not fit.
        """
        ...

    def to_namespace(self, bound: BoundArguments) -> Arguments:
        """Turn that into what a declaration's function is given."""
        ...
