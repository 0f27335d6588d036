"""Text filters of guards: the texts of a reply before it is recorded; only the filtered ones are kept and shown."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from agentfsm.core.claims import Claim
from agentfsm.core.json_text import dump_compact
from agentfsm.ports.guards import OutgoingText, filter_in_order
from agentfsm.streaming.stream import TextDelta, ThinkingDelta

if TYPE_CHECKING:
    from agentfsm.engine.execution.execution import Execution
    from agentfsm.engine.model_calls.received import ReceivedReply


def filter_texts(execution: Execution, received: ReceivedReply) -> None:
    """Have guards decide on the texts of a reply, and pass what they leave to the listeners.

    A text that was changed does not stay in the provider's form of the reply, unless the reply goes on: the provider
    then needs it back as it was.
    """
    journal, run = execution.journal, execution.journal.run
    if received.is_last and not received.text:
        return
    hosted = received.hosted
    labels = frozenset(run.labels).union(() if hosted is None else hosted.labels)
    decisions, claims = list[str](), list[Claim]()
    for name in ("text", "thinking"):
        if not (text := getattr(received, name)):
            continue
        outgoing = OutgoingText(text=text, labels=labels, messages=run.messages, hosted=hosted, header=run.header)
        if (decided := filter_in_order(execution.config.guards, outgoing)) is None:
            continue
        setattr(received, name, decided.text)
        decisions.append(decided.describe())
        if decided.is_withheld and name == "text":
            received.refusal = decided.describe()
    for claim in received.claims or ():
        said = dump_compact([claim.tool, claim.arguments, claim.fault])
        shown = OutgoingText(text=said, labels=labels, messages=run.messages, header=run.header)
        decided = filter_in_order(execution.config.guards, shown)
        claims.append(claim if decided is None else _hide_claim(claim))
        decisions += [] if decided is None else [decided.describe()]
    received.claims = None if received.claims is None else tuple(claims)
    received.filtered = tuple(dict.fromkeys(decisions))
    if decisions:
        if not (received.calls or received.is_paused):
            received.native = None
        journal.log.warning("text_filtered", turn=run.turn + 1, decisions="; ".join(received.filtered))
    pass_texts(execution, received)


def _hide_claim(claim: Claim) -> Claim:
    """Return a claim without the data that a guard filters. Of a call that was made, the journal has the arguments."""
    if claim.call_id:
        return attrs.evolve(claim, arguments={})
    return Claim(tool="[filtered]", arguments={}, fault="no call that was done fits it")


def pass_texts(execution: Execution, received: ReceivedReply) -> None:
    """Pass the texts of a reply to the listeners, who got no pieces of them."""
    journal, run = execution.journal, execution.journal.run
    if journal.on_event is not None:
        if received.thinking:
            journal.on_event(ThinkingDelta(run_id=run.id, turn=run.turn + 1, attempt=1, text=received.thinking))
        if received.text:
            journal.on_event(TextDelta(run_id=run.id, turn=run.turn + 1, attempt=1, text=received.text))
