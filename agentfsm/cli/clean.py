"""Text that somebody else wrote, made safe to show: nothing in it may move the cursor, hide, or turn around.

Terminal escapes repaint what a person has read, bidirectional marks reorder it, and zero-width and tag characters hide
words in it. What is shown for reading is stripped of them; what a person decides on is shown with each of them spelt
out, because it has to be exact.
"""

from __future__ import annotations

import json
import re
from typing import Final

CUT: Final = "..."
# Stands for what was cut off; plain ASCII, since it is shown on any terminal.

_SEQUENCES: Final = re.compile(r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]")
# Control sequences (ECMA-48, 5.4), removed whole: without its ESC one would leave "[31m" behind.
_HIDDEN: Final = (
    "\x00-\x08\x0b-\x1f\x7f-\x9f"  # controls but tab and line break
    "\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f"  # soft hyphen, joiners, fillers
    "\u200b-\u200f\u2028-\u202e\u2060-\u206f"  # zero width, bidirectional, separators of lines
    "\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb"  # fillers, variation selectors, byte order mark
    "\ud800-\udfff"  # halves of pairs, which no terminal takes
    "\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff"  # shorthand and musical controls, tags
)
# Unicode's Default_Ignorable_Code_Point, with the controls, the surrogates and the marks of annotations.
_HIDDEN_ONE: Final = re.compile(f"[{_HIDDEN}]")


def clean(text: str) -> str:
    """Return the text without what a terminal would act on or a reader would not see; line breaks and tabs stay."""
    return _HIDDEN_ONE.sub("", _SEQUENCES.sub("", text))


def one_line(text: str, width: int) -> str:
    """Return the beginning of the text, cleaned, on one line.

    Args:
        text: Any text.
        width: Characters at most, 4 or more.
    """
    line = " ".join(clean(text[: width * 8]).split())  # eight times: room for what is stripped, and still bounded
    return line if len(line) <= width else line[: width - len(CUT)].rstrip() + CUT


def exact_json(value: object) -> str:
    """Return the value as indented JSON in which every hidden character is spelt out, so that nothing is left out."""
    text = json.dumps(value, ensure_ascii=False, indent=2, default=str)
    return _HIDDEN_ONE.sub(lambda found: json.dumps(found[0])[1:-1], text)
