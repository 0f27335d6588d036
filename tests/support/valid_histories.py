"""Histories that a run may go on from, and a prompt with a picture."""

from __future__ import annotations

from collections.abc import Sequence

from agentfsm import ImagePart, TextPart, UserMessage
from agentfsm.core.messages import Message
from tests.support.checks import valid_history
from tests.support.wire_rules import check_wires

RUN, NEXT = "mine", "next"

# Low, so that it does not fill a small window by itself.
IMAGE = ImagePart(url="https://a.b/c.png", detail="low")


def taken(messages: Sequence[Message]) -> None:
    """Fail unless this history may be gone on from."""
    valid_history(messages)
    check_wires([*messages, UserMessage(parts=(TextPart(text="go on"),))])
