"""Values in the arguments of a call, at any depth."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def iter_leaves(value: Any, *, has_keys: bool = False) -> Iterator[Any]:
    """Yield the texts, numbers and other plain values in arguments, at any depth; None is left out.

    Args:
        value: The arguments.
        has_keys: Whether the keys of objects are among them; names of arguments and fields are not.
    """
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            if has_keys:
                yield key
            yield from iter_leaves(each, has_keys=has_keys)
    elif isinstance(value, list | tuple | set | frozenset):
        for each in value:
            yield from iter_leaves(each, has_keys=has_keys)
    elif hasattr(value, "__dict__"):
        yield from iter_leaves(list(vars(value).values()), has_keys=has_keys)
    elif value is not None:
        yield value
