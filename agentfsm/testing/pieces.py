"""What the wires of `LocalServer` share: the arguments of a scripted call, and texts in pieces."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def arguments_of(given: Mapping[str, Any] | str) -> str:
    """Return the arguments of a scripted call as text."""
    return given if isinstance(given, str) else json.dumps(dict(given), ensure_ascii=False)


def cut(text: str, size: int) -> list[str]:
    """Return the text in pieces of so many characters."""
    return [text[start : start + size] for start in range(0, len(text), size)]
