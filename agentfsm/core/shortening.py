"""Texts cut to a length, for error messages and for lines that a person or a model reads."""

from __future__ import annotations


def shorten(text: str, chars: int, *, with_length: bool = False) -> str:
    """Return a text, or its first characters and three dots.

    Args:
        text: The text.
        chars: The number of characters that are kept.
        with_length: Whether a text that is cut is followed by its length.
    """
    if len(text) <= chars:
        return text
    return f"{text[:chars]}..." + (f" ({len(text):,} characters)" if with_length else "")


def shorten_line(text: str, chars: int) -> str:
    """Return a text on one line, with single spaces, or what its first characters have of that and three dots."""
    line = " ".join(text[:chars].split())
    return line if len(text) <= chars else f"{line}..."
