"""Text that somebody else wrote, made safe to show: nothing in it may move the cursor, hide, or turn around.

Terminal escapes repaint what a person has read, bidirectional marks reorder it, and zero-width and tag characters hide
words in it. What is shown for reading is stripped of them; what a person decides on is shown with each of them spelt
out, because it has to be exact.
"""

from __future__ import annotations

import json
import re
from typing import Final

from agentfsm.core.text_safety import HIDDEN_CHARS, escape_hidden

# Stands for what was cut off; plain ASCII, since it is shown on any terminal.
ELLIPSIS: Final = "..."

# Control sequences (ECMA-48, 5.4), removed whole: without its ESC one would leave "[31m" behind.
_CONTROL_SEQUENCES: Final = re.compile(r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]")


def strip_unsafe(text: str) -> str:
    """Return the text without what a terminal would act on or a reader would not see; line breaks and tabs stay."""
    return HIDDEN_CHARS.sub("", _CONTROL_SEQUENCES.sub("", text))


def one_line(text: str, width: int) -> str:
    """Return the beginning of the text, cleaned, on one line.

    Args:
        text: Any text.
        width: Characters at most, 4 or more.
    """
    # Eight times the width: room for what is stripped, and still bounded.
    line = " ".join(strip_unsafe(text[: width * 8]).split())
    return line if len(line) <= width else line[: width - len(ELLIPSIS)].rstrip() + ELLIPSIS


def format_exact_json(value: object) -> str:
    """Return the value as indented JSON in which every hidden character is spelt out, so that nothing is left out."""
    return escape_hidden(json.dumps(value, ensure_ascii=False, indent=2, default=str))
