"""Estimate token counts without a vocabulary."""

from __future__ import annotations

import re
from typing import Final

import attrs

from agentfsm.ports.model import TokenCounter

_PIECE: Final = re.compile(
    r"[A-Z]?[a-z]{1,6}|[A-Z]{1,3}"  # words, six letters a token; camelCase breaks where a vocabulary breaks it
    r"|[0-9]{1,3}| (?=[0-9])"  # the vocabularies hold every number up to 999, and none with a space before it
    r"|[^\sA-Za-z0-9\x80-\U0010ffff]{1,2}"  # ASCII signs
    r"|[^\x00-\x7f]"  # one character of any other script
    r"|[^\S ]\s{0,15}| {2,16}"  # indentation and line ends; a single space belongs to the word behind it
)
# Emoji and rare ideographs, four bytes each: counted once more, as most take two tokens or more.
_ASTRAL: Final = re.compile(r"[\U00010000-\U0010ffff]")


@attrs.frozen
class EstimatedCounter(TokenCounter):
    """Counts pieces of text that resemble tokens.

    The usual "four characters a token" gives 0.4 to 0.6 of the true count for JSON, hexadecimal and logs, which tools
    often return. Measured against o200k_base, this count divided by the true one is:

        English 1.13 to 1.19, Markdown in Chinese 1.30, Chinese prose 1.32, Python 1.19, JavaScript 1.12,
        JSON 1.01 to 1.32, logs 1.08, hexadecimal 0.96, base64 0.81, Japanese 1.13, Korean 1.33, emoji 1.05;
        far above for some alphabets (Russian 3.3, Hindi 2.9, Arabic 2.3, Thai 1.9), and below for scripts that
        the vocabulary itself spells byte by byte (Ethiopic 0.50, ideographs beyond the basic plane 0.50).

    Against cl100k_base, ASCII text is within 0.03 of these figures, Chinese prose is at 0.95, Korean 0.80, emoji 0.66.
    """

    encoding: str = attrs.field(default="estimate: 6 letters, 3 digits, 2 signs or 1 other character", init=False)
    """Description of the estimate: the pieces that count as one token."""

    exact: bool = attrs.field(default=False, init=False)
    """Always False, since no vocabulary is used."""

    def count(self, text: str) -> int:
        """Return the estimated tokens of the text, at most its number of bytes."""
        pieces = len(_PIECE.findall(text))
        return pieces if text.isascii() else pieces + len(_ASTRAL.findall(text))
