"""Differences between two runs: two versions of one run, or a run and its fork."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import attrs

from agentfsm.core.calls import Phase
from agentfsm.core.header import Fingerprint
from agentfsm.core.labels import join_labels
from agentfsm.core.messages import AssistantMessage, Message, ToolResult
from agentfsm.core.run import Run
from agentfsm.core.value import Value

# Fields that are compared beside the history and the open calls.
_COMPARED_FIELDS: Final = (
    "version",
    "state",
    "turn",
    "stop_reason",
    "stop_message",
    "loops",
    "disabled",
    "offered",
)


@attrs.frozen(kw_only=True)
class Difference(Value):
    """Differences between a first and a second run."""

    shared: int
    """Number of messages that both histories begin with."""

    removed: tuple[Message, ...]
    """Messages of the first run after the shared ones."""

    added: tuple[Message, ...]
    """Messages of the second run after the shared ones."""

    changed: Mapping[str, tuple[Any, Any]]
    """Values that differ, by field name, as (first, second)."""

    calls: Mapping[str, tuple[Phase | None, Phase | None]]
    """Phases of open calls that differ, by call id, as (first, second); None if the call is not open."""

    agent: tuple[str, ...]
    """Changes from the first run's agent to the second's, a few words each."""

    def __bool__(self) -> bool:
        """Return whether there is any difference."""
        return bool(self.removed or self.added or self.changed or self.calls or self.agent)

    def lines(self) -> list[str]:
        """Return the differences for people, one per line. "-" marks messages of the first run, "+" of the second."""
        facts = [f"  {name}: {before} -> {after}" for name, (before, after) in self.changed.items()]
        calls = [
            f"  call {call_id}: {before or '-'} -> {after or '-'}" for call_id, (before, after) in self.calls.items()
        ]
        kept = [f"  {self.shared} messages in common"] if self.removed or self.added else []
        gone = [f"- {_format_message(message)}" for message in self.removed]
        agent = [f"  agent: {words}" for words in self.agent]
        return agent + facts + calls + kept + gone + [f"+ {_format_message(message)}" for message in self.added]


def difference(before: Run, after: Run) -> Difference:
    """Compare two runs: `difference(await agent.load(a), await agent.load(b))`."""
    shared = next(
        (i for i, pair in enumerate(zip(before.messages, after.messages, strict=False)) if pair[0] != pair[1]),
        min(len(before.messages), len(after.messages)),
    )
    facts = {name: (getattr(before, name), getattr(after, name)) for name in _COMPARED_FIELDS}
    facts["window"] = before.cutoff, after.cutoff
    facts["tokens"] = before.usage.tokens, after.usage.tokens
    facts["release"] = before.header.release, after.header.release
    facts["labels"] = tuple(map(str, join_labels(before.labels))), tuple(map(str, join_labels(after.labels)))
    facts["arms"] = dict(before.header.arms), dict(after.header.arms)
    facts["fingerprint"] = _current_fingerprint(before), _current_fingerprint(after)
    phases = [{entry.call.id: entry.phase for entry in run.open} for run in (before, after)]
    ids = dict.fromkeys([*phases[0], *phases[1]])
    calls = {call_id: (phases[0].get(call_id), phases[1].get(call_id)) for call_id in ids}
    return Difference(
        shared=shared,
        removed=before.messages[shared:],
        added=after.messages[shared:],
        changed={name: pair for name, pair in facts.items() if pair[0] != pair[1]},
        agent=_current_fingerprint(after).changes_since(_current_fingerprint(before)),
        calls={call_id: pair for call_id, pair in calls.items() if pair[0] is not pair[1]},
    )


def _current_fingerprint(run: Run) -> Fingerprint:
    return run.fingerprint or run.header.fingerprint


def _format_message(message: Message) -> str:
    """Return a message on one line."""
    kind = type(message).__name__.removesuffix("Message").lower()
    if isinstance(message, ToolResult):
        return f"{message.tool} ({message.call_id}, {message.outcome}): {message.text!r}"
    if isinstance(message, AssistantMessage) and message.calls:
        calls = ", ".join(f"{call.name}({call.arguments})" for call in message.calls)
        return f"{kind}: {message.text!r} {calls}"
    return f"{kind}: {message.text!r}"
