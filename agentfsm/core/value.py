"""Base class of values, with equality, hash and repr by their fields.

attrs would generate and compile these methods for each class, which adds 21 % to the instructions of `import agentfsm`
under callgrind (1,082 instead of 893 million).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from operator import attrgetter
from typing import Any

import attrs


class Value:
    """Base of frozen attrs classes. The options `eq` and `repr` of fields apply as in attrs."""

    __slots__ = ()

    def __init_subclass__(cls) -> None:
        """Copy the methods into the class itself, because attrs does not generate methods that it finds there."""
        super().__init_subclass__()
        for name in ("__eq__", "__hash__", "__repr__"):
            if name not in vars(cls):
                setattr(cls, name, getattr(Value, name))

    def __eq__(self, other: object) -> bool:
        return _compared_fields(self) == _compared_fields(other) if type(other) is type(self) else NotImplemented

    def __hash__(self) -> int:
        return hash((type(self), _compared_fields(self)))

    def __repr__(self) -> str:
        return f"{type(self).__qualname__}({', '.join(_iter_repr_fields(self))})"


def _compared_fields(value: Any) -> object:
    """Return the fields that take part in comparisons."""
    kind: Any = type(value)
    return _build_getter(kind)(value)


@cache
def _build_getter(kind: Any) -> Callable[[Any], object]:
    names = [field.name for field in attrs.fields(kind) if field.eq]
    return attrgetter(*names) if names else lambda _value: ()


def _iter_repr_fields(value: Any) -> Iterator[str]:
    for field in attrs.fields(type(value)):
        if field.repr:
            text = repr if field.repr is True else field.repr
            yield f"{field.name}={text(getattr(value, field.name))}"
