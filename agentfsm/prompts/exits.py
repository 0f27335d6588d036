"""Replies with a scratchpad, and answers that leave a task undone: a question, or a refusal.

Source: document F, 4.2 and 8.3.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal

import attrs

from agentfsm.core.errors import ModelRetry
from agentfsm.core.value import Value

# A scratchpad that is not closed extends to the end, so that no part of it is ever shown.
_SCRATCHPAD: Final = re.compile(r"<scratchpad>(.*?)(?:</scratchpad>|\Z)", re.DOTALL | re.IGNORECASE)
_ACTION: Final = re.compile(r"<action>(.*?)</action>", re.DOTALL | re.IGNORECASE)


@dataclass(frozen=True)
class Clarify:
    """Ask the user for missing information. Use this instead of guessing."""

    question: str
    """The question."""

    action: Literal["clarify"] = "clarify"
    """Always "clarify", which distinguishes the types of a union."""


@dataclass(frozen=True)
class Refuse:
    """Refuse the task. Use this if no allowed action fits."""

    reason: str
    """The reason."""

    action: Literal["refuse"] = "refuse"
    """Always "refuse", which distinguishes the types of a union."""


@attrs.frozen(kw_only=True)
class ScratchpadReply(Value):
    """A reply, split into reasoning and action."""

    scratchpad: str
    """The reasoning: for the log, never for the user. Empty if there is none."""

    action: str
    """The action or answer."""


def split_scratchpad(reply: str) -> ScratchpadReply:
    """Split a reply into the text in `<scratchpad>` and the text in `<action>`.

    Raises:
        ModelRetry: if the reply does not have exactly one action outside of its scratchpad.
    """
    thoughts = [found[1].strip() for found in _SCRATCHPAD.finditer(reply)]
    actions = _ACTION.findall(_SCRATCHPAD.sub("", reply))
    if len(actions) != 1:
        raise ModelRetry(f"the reply has {len(actions)} actions: write one <action>...</action> after </scratchpad>")
    return ScratchpadReply(scratchpad="\n\n".join(thoughts), action=actions[0].strip())


def take_action(reply: str) -> str:
    """Return the action of a reply. `Agent(output_validators=[take_action])` lets the model correct one without it.

    Raises:
        ModelRetry: if the reply does not have exactly one action outside of its scratchpad.
    """
    return split_scratchpad(reply).action
