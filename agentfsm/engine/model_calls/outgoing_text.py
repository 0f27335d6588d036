"""Have guards decide on the texts of a reply before it is recorded: only the filtered texts are kept and shown."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import attrs

from agentfsm.ports.guards import OutgoingText
from agentfsm.streaming.stream import TextDelta, ThinkingDelta

if TYPE_CHECKING:
    from agentfsm.core.messages import AssistantMessage
    from agentfsm.engine.execution.execution import Execution
    from agentfsm.ports.guards import FilteredText


class FilteredReply(NamedTuple):
    """A reply as guards leave it."""

    message: AssistantMessage
    """The reply, with the texts that the guards leave."""

    filtered: tuple[str, ...]
    """Their decisions, for the journal; empty if the reply is unchanged."""

    refusal: str
    """The decision that withheld the text; empty if none did."""


def filter_reply(execution: Execution, message: AssistantMessage) -> FilteredReply:
    """Return a reply as the guards leave it, and pass its texts to the listeners.

    A text that was changed does not stay in the provider's form of the reply, unless the reply goes on: the provider
    then needs it back as it was.
    """
    text, thinking = [_decide(execution, message, each) for each in (message.text, message.thinking)]
    decisions = tuple(dict.fromkeys([each.describe() for each in (text, thinking) if each is not None]))
    if decisions:
        is_over = not (message.calls or message.paused)
        message = attrs.evolve(
            message,
            text=message.text if text is None else text.text,
            thinking=message.thinking if thinking is None else thinking.text,
            native=None if is_over else message.native,
        )
        run = execution.journal.run
        execution.journal.log.warning("text_filtered", turn=run.turn + 1, decisions="; ".join(decisions))
    journal = execution.journal
    if journal.on_event is not None:  # who listens got no pieces of the texts
        run_id, turn = journal.run.id, journal.run.turn + 1
        if message.thinking:
            journal.on_event(ThinkingDelta(run_id=run_id, turn=turn, attempt=1, text=message.thinking))
        if message.text:
            journal.on_event(TextDelta(run_id=run_id, turn=turn, attempt=1, text=message.text))
    return FilteredReply(message, decisions, "" if text is None or not text.is_withheld else text.describe())


def _decide(execution: Execution, message: AssistantMessage, text: str) -> FilteredText | None:
    """Return the decision of all guards on a text of a reply; None if it stays as it is."""
    run, hosted = execution.journal.run, message.hosted
    if not text:
        return None
    outgoing = OutgoingText(
        text=text,
        labels=frozenset(run.labels).union(() if hosted is None else hosted.labels),
        messages=run.messages,
        hosted=hosted,
        header=run.header,
    )
    return execution.config.guard_texts(outgoing)
