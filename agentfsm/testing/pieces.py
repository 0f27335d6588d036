"""What the wires of `LocalServer` share: arguments as text, and text in pieces."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def arguments_text(given: Mapping[str, Any] | str) -> str:
    """Return the arguments of a call as a model writes them; a text as it is."""
    return given if isinstance(given, str) else json.dumps(dict(given), ensure_ascii=False)


def cut(text: str, size: int) -> list[str]:
    """Return a text in pieces of at most so many characters; none for an empty one."""
    return [text[start : start + size] for start in range(0, len(text), size)]
