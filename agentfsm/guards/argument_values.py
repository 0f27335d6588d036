"""Values in the arguments of a call, at any depth."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def iter_leaves(value: Any) -> Iterator[Any]:
    """Yield the texts, numbers and other plain values in arguments, at any depth; None is left out."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from iter_leaves(each)
    elif isinstance(value, list | tuple | set | frozenset):
        for each in value:
            yield from iter_leaves(each)
    elif hasattr(value, "__dict__"):
        yield from iter_leaves(vars(value))
    elif value is not None:
        yield value
