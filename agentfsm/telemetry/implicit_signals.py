"""Signs of a person's dissatisfaction that need no vote: most people give none."""

from __future__ import annotations

from difflib import SequenceMatcher
from typing import Final

from agentfsm.core.header import Header
from agentfsm.core.messages import TextPart

# Signals, as labels of the metric.
ASKED_AGAIN: Final = "asked_again"
EDITED: Final = "edited"
STOPPED: Final = "cancelled"

# Time within which an alike question counts as asked again, seconds.
ASKED_AGAIN_S: Final = 600.0
# Similarity from which two questions are alike, 0 to 1, and the characters that are compared.
MIN_SIMILARITY: Final = 0.75
MAX_COMPARED_CHARS: Final = 500


def is_asked_again(previous: Header, header: Header) -> bool:
    """Return whether a run was given nearly the same question as the one before it in its session, within 10 minutes.

    Args:
        previous: Header of the run that it continues.
        header: Header of the run.
    """
    if not 0 <= header.created_at - previous.created_at <= ASKED_AGAIN_S:
        return False
    before, now = _read_question(previous), _read_question(header)
    return bool(before and now) and SequenceMatcher(None, before, now, autojunk=False).ratio() >= MIN_SIMILARITY


def _read_question(header: Header) -> str:
    text = " ".join([part.text for part in header.prompt if isinstance(part, TextPart)])
    return " ".join(text.casefold().split())[:MAX_COMPARED_CHARS]
