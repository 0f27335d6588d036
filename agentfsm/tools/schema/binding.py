"""Types of bound arguments. Imports nothing heavy, unlike the two kinds of signatures that do the binding."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    from agentfsm.core.messages import JSON

# The validated arguments of a call, defaults included: `a.path`; `vars(a)` is the dict.
Arguments: TypeAlias = SimpleNamespace
# Positional and keyword arguments for the function. Arguments omitted by the model are absent, or copies of defaults.
BoundArguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]


class ToolSignature(Protocol):
    """Interface of a tool's function: its schema and the binding of arguments."""

    @property
    def description(self) -> str:
        """The docstring's short and long description, without its sections; may be empty."""
        ...

    @property
    def parameters(self) -> Mapping[str, JSON]:
        """JSON Schema of the arguments for the model."""
        ...

    @property
    def context_parameter(self) -> str | None:
        """Name of the first parameter if it takes the RunContext, which is passed by position; else None."""
        ...

    def bind(self, text: str) -> BoundArguments:
        """Convert the JSON text of the arguments to positional and keyword arguments.

        Raises:
            ArgumentsError: if they do not fit.
        """
        ...

    def to_namespace(self, bound: BoundArguments) -> Arguments:
        """Convert bound arguments to a namespace for the functions in tool options."""
        ...
