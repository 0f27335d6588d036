"""Learn from runs that have ended: one episode from each, and the facts and preferences that it taught.

A cheap model reads a finished run and writes down the approach, the lessons and the facts, in a run of its own: the
extraction. The items follow from the two journals and the feedback alone, so a rebuild makes the same items and asks no
model. A model is not asked for facts that are recorded: outcome, tools and cost are read from the journal.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

import attrs

from agentfsm.core.errors import ArgumentsError
from agentfsm.core.header import Header, short_hash
from agentfsm.core.labels import DATA_LEVELS, Label, join_labels
from agentfsm.core.machine import State
from agentfsm.core.messages import AssistantMessage, MessageOrigin, TextPart, UserMessage
from agentfsm.core.run import Run
from agentfsm.core.run_ids import name_extraction
from agentfsm.core.text_safety import fence_untrusted, strip_unsafe
from agentfsm.core.value import Value
from agentfsm.ports.memory_items import ItemKind, ItemSource, MemoryItem, Namespace
from agentfsm.ports.stored import Feedback
from agentfsm.tools.schema.arguments import read_object

# Key of the metadata of an extraction run: whether its items wait for a person.
HELD_KEY: Final = "held"
# Facts that one run may leave. More of them are not facts worth keeping.
MAX_FACTS: Final = 10
MAX_LESSONS: Final = 5
# Characters of a task, an approach, a lesson or a fact that an item keeps.
MAX_TEXT_CHARS: Final = 500
# Characters of a conversation that the extraction reads, some 5,000 tokens: its beginning and its end.
MAX_TRANSCRIPT_CHARS: Final = 20_000
MAX_TURN_CHARS: Final = 2_000
# Ranges of the importance, in which the model's own estimate moves. Source: document G, 4.
SUCCESS_IMPORTANCE: Final = (0.7, 0.9)
FAILURE_IMPORTANCE: Final = (0.8, 1.0)
FEEDBACK_IMPORTANCE: Final = 0.9
PREFERENCE_IMPORTANCE: Final = 0.8
FACT_IMPORTANCE: Final = 0.5
# Estimate if the extraction gives none. Source: document G, 4.
UNKNOWN_IMPORTANCE: Final = 0.5


@attrs.frozen
class LearnedFact(Value):
    """A fact or a preference of the user that a run taught."""

    text: str
    """One sentence that is clear without the conversation."""

    kind: str = "fact"
    """"fact", or "preference" for how the user wants things done."""

    slot: str = ""
    """Subject that the text gives a value to, such as "home town"; empty if it takes the place of no earlier one."""


@attrs.frozen
class Learned(Value):
    """Answer of an extraction run."""

    approach: str = ""
    """Way in which the assistant went about the task, in one or two sentences."""

    lessons: list[str] = attrs.field(factory=list)
    """Advice for the next time; empty if nothing was learned."""

    facts: list[LearnedFact] = attrs.field(factory=list)
    """Facts and preferences of the user that hold beyond this task; only from words of the user."""

    importance: float = UNKNOWN_IMPORTANCE
    """Use of this for later tasks, from 0 to 1."""


def is_extraction(header: Header) -> bool:
    """Return whether a run is the extraction of another one."""
    return header.parent is not None and header.id == name_extraction(header.parent)


def leaves_episode(run: Run[Any]) -> bool:
    """Return whether a run is learned from: it is over, has a user, and is not the run of a sub-agent."""
    return run.is_over and bool(run.header.user) and run.header.parent is None


def is_untrusted(run: Run[Any]) -> bool:
    """Return whether a run has read something that is not trusted, so that its items wait for a person."""
    return Label.UNTRUSTED in run.labels


def describe_run(run: Run[Any]) -> str:
    """Return the record of a run for its extraction: its conversation, as data, and the tools with their outcomes."""
    lines = [_describe_message(message) for message in run.messages[run.own_start :]]
    lines += [f"outcome: {_name_outcome(run)}"]
    text = "\n".join(line for line in lines if line)
    if len(text) > MAX_TRANSCRIPT_CHARS:
        half = MAX_TRANSCRIPT_CHARS // 2
        text = f"{text[:half]}\n[...]\n{text[-half:]}"
    return fence_untrusted(text)


def _describe_message(message: object) -> str:
    match message:
        case UserMessage(origin=MessageOrigin.MEMORY):
            return ""  # it would be learned a second time
        case UserMessage(origin=MessageOrigin.PLAN):
            return f"results of a plan: {_shorten(message.text, MAX_TURN_CHARS)}"
        case UserMessage():
            return f"user: {_shorten(message.text, MAX_TURN_CHARS)}"
        case AssistantMessage():
            calls = "".join(
                f"\ncall of {call.name}: {_shorten(call.arguments, MAX_TEXT_CHARS)}" for call in message.calls
            )
            return (f"assistant: {_shorten(message.text, MAX_TURN_CHARS)}" if message.text else "") + calls
        case _:
            text, tool = getattr(message, "content", None), getattr(message, "tool", "")
            return f"result of {tool}: {_shorten(text, MAX_TEXT_CHARS)}" if isinstance(text, str) and tool else ""


def _shorten(text: str, chars: int) -> str:
    clean = " ".join(strip_unsafe(text).split())
    return clean if len(clean) <= chars else f"{clean[: chars - 3].rstrip()}..."


def read_learned(extraction: Run[Any]) -> Learned:
    """Return the answer of an extraction run, without parts of a wrong type; nothing if it failed."""
    if extraction.state is not State.DONE:
        return Learned()
    try:
        answer: dict[str, Any] = read_object(extraction.answer, json.loads)
    except ArgumentsError:
        return Learned()
    lessons, facts = answer.get("lessons"), answer.get("facts")
    importance = answer.get("importance")
    return Learned(
        approach=_as_text(answer.get("approach")),
        lessons=[text for each in _as_list(lessons)[:MAX_LESSONS] if (text := _as_text(each))],
        facts=[fact for each in _as_list(facts)[:MAX_FACTS] if (fact := _as_fact(each)) is not None],
        importance=min(1.0, max(0.0, importance)) if isinstance(importance, int | float) else UNKNOWN_IMPORTANCE,
    )


def _as_list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _as_text(value: object) -> str:
    return _shorten(value, MAX_TEXT_CHARS) if isinstance(value, str) else ""


def _as_fact(value: object) -> LearnedFact | None:
    if not isinstance(value, Mapping) or not (text := _as_text(value.get("text"))):
        return None
    kind = "preference" if value.get("kind") == "preference" else "fact"
    return LearnedFact(text, kind, _as_text(value.get("slot")).casefold())


def build_items(run: Run[Any], extraction: Run[Any], feedback: Sequence[Feedback]) -> list[MemoryItem]:
    """Return the items that a run leaves in the memory: the episode, its versions with feedback, and the facts.

    The result depends on the arguments alone, and an item keeps its id, so adding them again changes nothing. The items
    count as known from the end of the run on, so that a late extraction does not bring back forgotten ones.

    Args:
        run: The run, which is over.
        extraction: Its extraction, which is over.
        feedback: All feedback on the run, oldest first. Each adds a version of the episode that replaces the last one.
    """
    learned = read_learned(extraction)
    header, ended = run.header, run.updated_at
    level = run.data_level
    common: dict[str, Any] = {
        "namespace": Namespace(tenant=header.tenant or "", user=header.user or ""),
        "source": ItemSource(run_id=run.id, version=run.version),
        "labels": join_labels(run.labels.keys() - {*DATA_LEVELS, Label.USER_DATA}),
        "level": "internal" if level is None else level.value,
        "valid_from": ended,
        "held": bool(extraction.header.metadata.get(HELD_KEY)),
        "place": 1,
    }
    items = [_build_episode(run, learned, tuple(feedback[:count]), common) for count in range(len(feedback) + 1)]
    for number, fact in enumerate(learned.facts):
        is_preference = fact.kind == ItemKind.PREFERENCE
        items.append(
            MemoryItem(
                id=_name_item(run.header, f"fact {number}"),
                kind=ItemKind(fact.kind),
                text=fact.text,
                slot=fact.slot,
                importance=PREFERENCE_IMPORTANCE if is_preference else FACT_IMPORTANCE,
                recorded_at=ended,
                **common,
            )
        )
    return items


def _build_episode(
    run: Run[Any], learned: Learned, feedback: Sequence[Feedback], common: Mapping[str, Any]
) -> MemoryItem:
    number, outcome = len(feedback), _name_outcome(run)
    low, high = SUCCESS_IMPORTANCE if run.state is State.DONE else FAILURE_IMPORTANCE
    importance = round(low + (high - low) * learned.importance, 4)
    prompt = " ".join(part.text for part in run.header.prompt if isinstance(part, TextPart))
    task = _shorten(prompt, MAX_TEXT_CHARS) or "a task without text"
    tools = list(dict.fromkeys(call.name for call in run.calls))
    lines = [f"Task: {task}", f"Approach: {learned.approach or 'unknown'}", f"Outcome: {outcome}"]
    lines += [f"Lessons: {'; '.join(learned.lessons)}"] if learned.lessons else []
    lines += [
        f"Feedback: {each.rating} of 5. {_shorten(each.comment, MAX_TEXT_CHARS)}".rstrip() for each in feedback[-1:]
    ]
    return MemoryItem(
        id=_name_item(run.header, f"episode {number}"),
        kind=ItemKind.EPISODE,
        text="\n".join(lines),
        data={
            "task": task,
            "approach": learned.approach,
            "outcome": outcome,
            "lessons": [*learned.lessons],
            "tools": tools,
            "tokens": run.usage.tokens,
            "usd": run.usage.cost_usd,
            "rating": feedback[-1].rating if feedback else None,
        },
        replaces=_name_item(run.header, f"episode {number - 1}") if number else "",
        importance=max(importance, FEEDBACK_IMPORTANCE) if feedback else importance,
        recorded_at=max(run.updated_at, *(each.at for each in feedback)) if feedback else run.updated_at,
        **common,
    )


def _name_item(header: Header, part: str) -> str:
    """Return the id of an item: the same for the same run, and another for a later run with the same id."""
    return short_hash(f"{header.id}\n{header.nonce}\n{part}", 24)


def _name_outcome(run: Run[Any]) -> str:
    if run.state is State.DONE:
        return "success"
    return f"failure ({run.stop_reason}{f': {_shorten(run.stop_message, 200)}' if run.stop_message else ''})"
