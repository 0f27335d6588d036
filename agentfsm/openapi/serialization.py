"""Write values into requests in the styles of OpenAPI.

Names and values are encoded before they are joined, so a separator in a value is not taken for one of the style. A
null, and an array or object without members, is undefined and left out.

Source: OpenAPI 3.2.0, tables "Style Values" and "Style Examples", and appendices C to E; RFC 6570, 3.2.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any, Final
from urllib.parse import quote

# Characters between percent signs that are encoded already.
_TRIPLE: Final = re.compile(r"(%[0-9A-Fa-f]{2})")
# Reserved characters that mean nothing in a query and in a form. The others have to be encoded there.
_HARMLESS: Final = ":/?@!$'()*,;"


def to_text(value: Any) -> str:
    """Return a value as text: a string as it is, all else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))


def encode(text: str) -> str:
    """Percent-encode all but unreserved characters, for paths, queries, forms and cookies."""
    return quote(text, safe="")


def encode_reserved(text: str) -> str:
    """Percent-encode for `allowReserved`: reserved characters and encoded ones stay."""
    parts = _TRIPLE.split(text)
    return "".join(part if _TRIPLE.fullmatch(part) else quote(part, safe=_HARMLESS) for part in parts)


def to_pairs(
    name: str, value: Any, *, style: str, explode: bool, encode: Callable[[str], str]
) -> list[tuple[str, str]]:
    """Return the names and values that a value becomes in a query, a cookie or a form.

    `deepObject` is defined for objects of scalars. Nested values follow Stripe: `a[b][c]=1`, `a[0]=x`.
    """
    if style == "deepObject" and isinstance(value, list | Mapping):
        return list(_iter_nested(encode(name), value, encode))
    if isinstance(value, Mapping):
        pairs = [(encode(key), encode(to_text(each))) for key, each in value.items() if each is not None]
        if explode:
            return pairs
        texts = [*chain.from_iterable(pairs)]
    elif isinstance(value, list):
        texts = [encode(to_text(each)) for each in value if each is not None]
        if explode:
            return [(encode(name), text) for text in texts]
    else:
        texts = [] if value is None else [encode(to_text(value))]
    separator = {"spaceDelimited": encode(" "), "pipeDelimited": encode("|")}.get(style, ",")
    return [(encode(name), separator.join(texts))] if texts else []


def _iter_nested(name: str, value: Any, encode: Callable[[str], str]) -> Iterator[tuple[str, str]]:
    if isinstance(value, list | Mapping):
        for key, each in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _iter_nested(f"{name}{encode('[')}{encode(str(key))}{encode(']')}", each, encode)
    elif value is not None:
        yield name, encode(to_text(value))


def to_segment(name: str, value: Any, *, style: str, explode: bool, encode: Callable[[str], str]) -> str:
    """Return the text that a value becomes in a path or a header: of style `simple`, `label` or `matrix`."""
    lead = {"label": ".", "matrix": ";"}.get(style, "")
    named = False
    if isinstance(value, Mapping):
        pairs = [(encode(key), encode(to_text(each))) for key, each in value.items() if each is not None]
        parts = [f"{key}={text}" for key, text in pairs] if explode else [",".join(chain.from_iterable(pairs))]
        named = explode
    elif isinstance(value, list):
        texts = [encode(to_text(each)) for each in value if each is not None]
        parts = texts if explode else [",".join(texts)]
    else:
        parts = [encode(to_text(value))]
    if style == "matrix" and not named:
        parts = [f"{encode(name)}={part}" if part else encode(name) for part in parts]
    return lead + (lead or ",").join(parts)
