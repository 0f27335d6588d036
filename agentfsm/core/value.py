"""Base class of values, with equality, hash and repr by their fields.

attrs would generate and compile these methods for each class, which adds 21 % to the instructions of `import agentfsm`
under callgrind (1,082 instead of 893 million).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from operator import attrgetter
from typing import Any, Generic, Self, TypeVar, overload

import attrs

T = TypeVar("T")


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


class cached(Generic[T]):  # noqa: N801  it is used as a decorator, like property
    """Property of a slotted attrs class that is computed once for each object, and kept in the slot `_NAME`.

    The slot is declared by a base class. For `functools.cached_property`, attrs gives a slotted class a `__getattr__`,
    with which each read of any attribute takes 55 instead of 13 ns on Python 3.11.
    """

    def __init__(self, compute: Callable[[Any], T]) -> None:
        """Take the method that computes the value."""
        self.compute = compute
        self.slot = f"_{compute.__name__}"
        self.__doc__ = compute.__doc__

    @overload
    def __get__(self, item: None, kind: type) -> Self: ...

    @overload
    def __get__(self, item: object, kind: type | None = None) -> T: ...

    def __get__(self, item: Any, kind: type | None = None) -> T | Self:
        """Return the value of an object; of a class, the descriptor itself."""
        if item is None:
            return self
        try:
            found: T = getattr(item, self.slot)
        except AttributeError:
            found = self.compute(item)
            object.__setattr__(item, self.slot, found)
        return found

    def __set__(self, item: Any, value: T) -> None:
        """Set the value of an object, which is then not computed."""
        object.__setattr__(item, self.slot, value)
