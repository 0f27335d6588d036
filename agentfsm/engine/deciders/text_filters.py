"""Text filters of guards: the texts of a reply before it is recorded; only the filtered ones are kept and shown."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from agentfsm.core.claims import Claim
from agentfsm.core.json_text import dump_compact, list_leaves
from agentfsm.ports.guards import OutgoingText, filter_in_order
from agentfsm.streaming.stream import TextDelta, ThinkingDelta

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agentfsm.core.labels import Label
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
    decisions = list[str]()
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
    if received.claims:
        hidden = _find_hidden(execution, received.claims, labels)
        received.claims = tuple(
            [_hide_claim(each) if hidden[place] else each for place, each in enumerate(received.claims)]
        )
        decisions += filter(None, hidden)
    received.filtered = tuple(dict.fromkeys(decisions))
    if decisions:
        if not (received.calls or received.is_paused):
            received.native = None
        journal.log.warning("text_filtered", turn=run.turn + 1, decisions="; ".join(received.filtered))
    pass_texts(execution, received)


def _find_hidden(execution: Execution, claims: Sequence[Claim], labels: frozenset[Label]) -> list[str]:
    """Return the decision of guards on each claim, empty for none. Data may be cut into several values or claims."""
    run = execution.journal.run

    def decide(said: str) -> str:
        shown = OutgoingText(text=said, labels=labels, messages=run.messages, header=run.header)
        decided = filter_in_order(execution.config.guards, shown)
        return "" if decided is None else decided.describe()

    found = [decide(dump_compact([each.tool, each.arguments, each.fault])) for each in claims]
    left = [each for each, why in zip(claims, found, strict=True) if not why]
    values, names = [list_leaves([each.arguments for each in left], names=only) for only in (False, True)]
    parts = [[each.tool for each in left], values, names]
    whole = decide("\n".join([str(each) for part in parts for each in part])) if left else ""
    return [why or whole for why in found]


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
