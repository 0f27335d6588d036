"""Learn from runs that have ended: one episode from each, and the facts and preferences that it taught.

A cheap model reads a finished run, and what the memory knows already, and writes down the approach, the result, the
lessons and the facts, in a run of its own: the extraction. The items follow from the two journals and the feedback
alone, so a rebuild makes the same items and asks no model. A model is not asked for what is recorded: a short answer,
the end of the run, tools and cost are read from the journal.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, Final

import attrs

from agentfsm.core.errors import ArgumentsError
from agentfsm.core.header import Header, short_hash
from agentfsm.core.labels import DATA_LEVELS, Label, join_labels
from agentfsm.core.machine import State
from agentfsm.core.messages import AssistantMessage, MessageOrigin, TextPart, UserMessage
from agentfsm.core.recalled_items import write_item_text
from agentfsm.core.run import Run
from agentfsm.core.run_ids import name_extraction
from agentfsm.core.text_safety import fence_untrusted
from agentfsm.core.value import Value
from agentfsm.core.view_parts import ViewSource, find_source
from agentfsm.memory.equal_items import EQUAL_SLOT, clean_slot, confirm, name_slot, normalise_text
from agentfsm.ports.memory_items import ItemKind, ItemSource, MemoryItem, Namespace
from agentfsm.ports.stored import Feedback
from agentfsm.tokens.ledger import estimate_tokens
from agentfsm.tools.schema.arguments import read_object

# Key of the metadata of an extraction run: whether its items wait for a person.
HELD_KEY: Final = "held"
# Key of the metadata of an extraction run: the items that the memory had on the subjects of the run.
KNOWN_KEY: Final = "known"
# Such items that an extraction is shown at most, and the characters of each.
MAX_KNOWN: Final = 20
MAX_KNOWN_CHARS: Final = 1_000
# Facts that one run may leave. More of them are not facts worth keeping.
MAX_FACTS: Final = 10
# Places in its session for each second of time, so that the items of a run are beside each other, whenever they are
# derived.
PLACES: Final = 16
MAX_LESSONS: Final = 5
# What an extraction leaves out of the view of the run that it reads, and why. Its request has all else: messages, in
# which the calls stand. Earlier runs of a session are learned from by themselves.
_UNTAUGHT: Final = "it says how the agent works, not what was learned, and the journal need not have it"
LEAVES_OUT: Final[Mapping[ViewSource, str]] = {
    ViewSource.MEMORY: "it would be learned a second time",
    ViewSource.PROFILE: "it would be learned a second time",
    ViewSource.NOTE: "it holds for a turn, or repeats messages",
    **dict.fromkeys((ViewSource.TOOLS, ViewSource.AGENT, ViewSource.TOOL_SOURCES, ViewSource.GUARDS), _UNTAUGHT),
}
MAX_DECISIONS: Final = 5
# Tokens of a task, an approach, a decision, a lesson or a fact that an item keeps; some 100 words.
MAX_TEXT_TOKENS: Final = 170
# Tokens of the answer that an episode keeps. A longer one is kept in the words of the extraction.
MAX_ANSWER_TOKENS: Final = 300
# Tokens of the reason why a run stopped.
MAX_REASON_TOKENS: Final = 70
# Tokens of a conversation that the extraction reads, of words of the user in it, and of another message: the beginning
# and the end.
MAX_TRANSCRIPT_TOKENS: Final = 16_000
MAX_SAID_TOKENS: Final = 12_000
MAX_TURN_TOKENS: Final = 700
# Ranges of the importance, in which the model's own estimate moves. Source: document G, 4.
SUCCESS_IMPORTANCE: Final = (0.7, 0.9)
FAILURE_IMPORTANCE: Final = (0.8, 1.0)
FEEDBACK_IMPORTANCE: Final = 0.9
PREFERENCE_IMPORTANCE: Final = 0.8
FACT_IMPORTANCE: Final = 0.5
# Estimate if the extraction gives none. Source: document G, 4.
UNKNOWN_IMPORTANCE: Final = 0.5


class Action(StrEnum):
    """What a fact that a run taught does to the memory."""

    ADD = "add"
    """It is new."""

    UPDATE = "update"
    """It takes the place of a known item from now on."""

    DELETE = "delete"
    """A known item is not true any more, and nothing takes its place."""

    NONE = "none"
    """A known item says it already, and is confirmed."""


class TaskOutcome(StrEnum):
    """Outcome of a task. Source: document G, 3."""

    DONE = "done"
    PARTIAL = "partial"
    FAILED = "failed"


@attrs.frozen
class LearnedFact(Value):
    """A fact or a preference of the user that a run taught."""

    text: str
    """One sentence that is clear without the conversation."""

    kind: str = "fact"
    """"fact", or "preference" for how the user wants things done."""

    slot: str = ""
    """Subject that the text gives a value to, such as "home town"; empty if it takes the place of no earlier one."""

    action: str = "add"
    """"add", "update", "delete" or "none"."""

    item: int = 0
    """Number of the known item that is updated, deleted or confirmed, from 1; 0 for "add"."""


@attrs.frozen
class Learned(Value):
    """Answer of an extraction run."""

    approach: str = ""
    """Way in which the assistant went about the task, in one or two sentences."""

    answer: str = ""
    """Result of the task, in a few sentences."""

    outcome: str = ""
    """"done", "partial" or "failed"; empty if it is not known."""

    decisions: list[str] = attrs.field(factory=list)
    """Key decisions on the way, with their reasons."""

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
    """Return whether a run is learned from: it is over, has a user, is production, and not of a sub-agent."""
    header = run.header
    return run.is_over and bool(header.user) and header.parent is None and not header.purpose


def is_untrusted(run: Run[Any]) -> bool:
    """Return whether a run has read something that is not trusted, so that its items wait for a person."""
    return Label.UNTRUSTED in run.labels


def describe_run(run: Run[Any], known: Sequence[MemoryItem] = (), before: str = "") -> str:
    """Return the record of a run for its extraction: its conversation and outcome, and what the memory knows, as data.

    Args:
        run: The run, which is over.
        known: Items of the memory on its subjects, numbered from 1 in the record.
        before: What was said before and is learned from already, for the context.
    """
    messages = [message for message in run.messages[run.own_start :] if find_source(message) not in LEAVES_OUT]
    lines = [describe_message(message) for message in messages]
    lines += [f"end: {_name_end(run) or 'the task was finished'}"]
    text = shorten_text("\n".join(line for line in lines if line), MAX_TRANSCRIPT_TOKENS)
    slots = ["" if not item.slot or item.slot.startswith(EQUAL_SLOT) else f" (slot: {item.slot})" for item in known]
    items = [
        f"{number}. {item.kind.value}{slot}: {write_item_text(item.text)}"
        for number, (item, slot) in enumerate(zip(known, slots, strict=True), 1)
    ]
    context = f"Said before, learned from already: {fence_untrusted(before)}\n\n" if before else ""
    return (
        f"{context}The record: {fence_untrusted(text)}\n\nThe memory: {fence_untrusted(_join_lines(items) or 'empty')}"
    )


def _join_lines(lines: Sequence[str]) -> str:
    return "\n".join(lines)


def describe_message(message: object) -> str:
    """Return the lines for a message in the record of a run; empty if it says nothing."""
    match message:
        case UserMessage(origin=MessageOrigin.PLAN):
            return f"results of a plan: {_shorten_line(message.text, MAX_TURN_TOKENS)}"
        case UserMessage():
            return f"user: {_shorten_line(message.text, MAX_SAID_TOKENS)}"
        case AssistantMessage():
            calls = "".join(
                f"\ncall of {call.name}: {_shorten_line(call.arguments, MAX_TEXT_TOKENS)}" for call in message.calls
            )
            return (f"assistant: {_shorten_line(message.text, MAX_TURN_TOKENS)}" if message.text else "") + calls
        case _:
            text, tool = getattr(message, "content", None), getattr(message, "tool", "")
            is_result = isinstance(text, str) and tool
            return f"result of {tool}: {_shorten_line(str(text), MAX_TEXT_TOKENS)}" if is_result else ""


def _shorten_line(text: str, tokens: int) -> str:
    return shorten_text(write_item_text(text), tokens)


def shorten_text(text: str, tokens: int) -> str:
    """Return a text of about this number of tokens at most: two parts of three are its beginning, the rest its end."""
    short, kept = text, len(text)
    while kept > 3 and (size := estimate_tokens(short)) > tokens:
        kept = min(kept - 1, kept * tokens // size)
        short = f"{text[: kept * 2 // 3].rstrip()} [...] {text[len(text) - kept // 3 :].lstrip()}"
    return short


def read_learned(extraction: Run[Any]) -> Learned:
    """Return the answer of an extraction run, without parts of a wrong type; nothing if it failed."""
    if extraction.state is not State.DONE:
        return Learned()
    try:
        answer: dict[str, Any] = read_object(extraction.answer, json.loads)
    except ArgumentsError:
        return Learned()
    importance = answer.get("importance")
    return Learned(
        approach=_as_text(answer.get("approach")),
        answer=_as_text(answer.get("answer"), MAX_ANSWER_TOKENS),
        outcome=_as_text(answer.get("outcome")).casefold(),
        decisions=_as_texts(answer.get("decisions"), MAX_DECISIONS),
        lessons=_as_texts(answer.get("lessons"), MAX_LESSONS),
        facts=[fact for each in _as_list(answer.get("facts"))[:MAX_FACTS] if (fact := _as_fact(each)) is not None],
        importance=min(1.0, max(0.0, importance)) if isinstance(importance, int | float) else UNKNOWN_IMPORTANCE,
    )


def _as_list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _as_text(value: object, tokens: int = MAX_TEXT_TOKENS) -> str:
    return _shorten_line(value, tokens) if isinstance(value, str) else ""


def _as_texts(value: object, most: int) -> list[str]:
    return [text for each in _as_list(value)[:most] if (text := _as_text(each))]


def _as_fact(value: object) -> LearnedFact | None:
    if not isinstance(value, Mapping):
        return None
    text, action, item = _as_text(value.get("text")), _as_text(value.get("action")).casefold(), value.get("item")
    action = action if action in {*Action} else Action.ADD
    number = item if type(item) is int else int(item) if isinstance(item, str) and item.isdecimal() else 0
    if not text and (action not in {Action.DELETE, Action.NONE} or number < 1):
        return None
    kind = "preference" if value.get("kind") == "preference" else "fact"
    slot = clean_slot(_as_text(value.get("slot")).lstrip(EQUAL_SLOT))
    return LearnedFact(text, kind, slot, action, number)


def write_known(items: Sequence[MemoryItem]) -> list[dict[str, Any]]:
    """Return items as the metadata of an extraction run keep them, so that a rebuild needs no memory."""
    return [
        {
            "id": item.id,
            "kind": item.kind.value,
            "text": item.text,
            "slot": item.slot,
            "data": dict(item.data),
            "labels": [str(label) for label in item.labels],
            "level": item.level,
            "importance": item.importance,
            "valid_from": item.valid_from,
        }
        for item in items
    ]


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
    header, ended, session = run.header, run.updated_at, run.session or ""
    level = run.data_level
    common: dict[str, Any] = {
        "namespace": Namespace(tenant=header.tenant or "", user=header.user or ""),
        "source": ItemSource(run_id=run.id, version=run.version),
        "labels": join_labels(run.labels.keys() - {*DATA_LEVELS, Label.USER_DATA}),
        "level": "internal" if level is None else level.value,
        "valid_from": ended,
        "held": bool(extraction.header.metadata.get(HELD_KEY)),
        "session": session,
        "place": max(0, int(ended)) * PLACES,
    }
    items = [_build_episode(run, learned, tuple(feedback[:count]), common) for count in range(len(feedback) + 1)]
    return items + _build_facts(run, learned.facts, _as_list(extraction.header.metadata.get(KNOWN_KEY)), common)


def _build_facts(
    run: Run[Any], facts: Sequence[LearnedFact], metadata: Sequence[dict[str, Any]], common: Mapping[str, Any]
) -> list[MemoryItem]:
    """Return the items of facts: new ones, those that confirm known items, and those that end them.

    Of several facts about a known item or a slot, the last holds.
    """
    ended = run.updated_at
    known = [MemoryItem(**{**common, "recorded_at": ended, **fields}) for fields in metadata]
    numbers = {normalise_text(item.text): number for number, item in enumerate(known, 1)}
    items: list[MemoryItem] = []
    used, slots = set[int](), set[str]()
    for place, fact in reversed([*enumerate(facts)]):
        action, number = fact.action, fact.item
        if action == Action.ADD and (number := numbers.get(normalise_text(fact.text), 0)):
            action = Action.NONE
        if number in used and action != Action.UPDATE:
            continue
        old = known[number - 1] if 0 < number <= len(known) and number not in used else None
        used |= {number} if old is not None else set()
        slot = fact.slot or ("" if old is None or old.slot.startswith(EQUAL_SLOT) else old.slot)
        confirmed = old if action == Action.NONE else None
        text = fact.text if confirmed is None else confirmed.text
        if text and action != Action.DELETE and not (slot and slot in slots):
            slots.add(slot)
            kind = ItemKind(fact.kind) if confirmed is None else confirmed.kind
            new = MemoryItem(
                id=_name_item(run.header, f"fact {place}"),
                kind=kind,
                text=text,
                slot=slot or name_slot(kind, text, common["level"], common["labels"]),
                importance=PREFERENCE_IMPORTANCE if slot or kind is ItemKind.PREFERENCE else FACT_IMPORTANCE,
                recorded_at=ended,
                **{**common, "place": common["place"] + 1 + place},
            )
            items.append(new if confirmed is None else confirm(confirmed, new))
        takes_slot = action == Action.UPDATE and slot != "" and old is not None and old.slot == slot
        if old is not None and action in {Action.UPDATE, Action.DELETE} and not takes_slot:
            # An item of the same slot that is never true ends it; without a slot, a version that is true until now.
            closing = {"valid_from": ended} if old.slot else {"replaces": old.id}
            item_id = _name_item(run.header, f"end {place}")
            items.append(attrs.evolve(old, id=item_id, valid_to=ended, follows=old.id, **closing))
    return items


def _build_episode(
    run: Run[Any], learned: Learned, feedback: Sequence[Feedback], common: Mapping[str, Any]
) -> MemoryItem:
    number, outcome, end = len(feedback), _find_outcome(run, learned), _name_end(run)
    low, high = SUCCESS_IMPORTANCE if outcome is TaskOutcome.DONE else FAILURE_IMPORTANCE
    importance = round(low + (high - low) * learned.importance, 4)
    prompt = " ".join(part.text for part in run.header.prompt if isinstance(part, TextPart))
    task = _shorten_line(prompt, MAX_TEXT_TOKENS) or "a task without text"
    said = write_item_text((run.answer if run.state is State.DONE else run.partial) or "")
    is_short = estimate_tokens(said) <= MAX_ANSWER_TOKENS
    answer = said if is_short else learned.answer or shorten_text(said, MAX_ANSWER_TOKENS)
    tools = list(dict.fromkeys(call.name for call in run.calls))
    lines = [f"Task: {task}", f"Approach: {learned.approach or 'unknown'}"]
    lines += [f"Answer: {answer}"] if answer else []
    lines += [f"Outcome: {outcome}" + (f" ({end})" if end else "")]
    lines += [f"Decisions: {'; '.join(learned.decisions)}"] if learned.decisions else []
    lines += [f"Lessons: {'; '.join(learned.lessons)}"] if learned.lessons else []
    lines += [
        f"Feedback: {each.rating} of 5. {_shorten_line(each.comment, MAX_TEXT_TOKENS)}".rstrip()
        for each in feedback[-1:]
    ]
    return MemoryItem(
        id=name_episode(run.header, number),
        kind=ItemKind.EPISODE,
        text="\n".join(lines),
        data={
            "task": task,
            "approach": learned.approach,
            "answer": answer,
            "outcome": outcome.value,
            "end": end,
            "decisions": [*learned.decisions],
            "lessons": [*learned.lessons],
            "tools": tools,
            "tokens": run.usage.tokens,
            "usd": run.usage.cost_usd,
            "rating": feedback[-1].rating if feedback else None,
        },
        replaces=name_episode(run.header, number - 1) if number else "",
        importance=max(importance, FEEDBACK_IMPORTANCE) if feedback else importance,
        recorded_at=max(run.updated_at, *(each.at for each in feedback)) if feedback else run.updated_at,
        **common,
    )


def name_episode(header: Header, version: int = 0) -> str:
    """Return the id of the episode of a run; its versions, from 1, are those with feedback."""
    return _name_item(header, f"episode {version}")


def _name_item(header: Header, part: str) -> str:
    """Return the id of an item: the same for the same run, and another for a later run with the same id."""
    return short_hash(f"{header.id}\n{header.nonce}\n{part}", 24)


def _find_outcome(run: Run[Any], learned: Learned) -> TaskOutcome:
    """Return the outcome of a task: the word of the extraction, but a run that was stopped has not done its task."""
    said = TaskOutcome(learned.outcome) if learned.outcome in {*TaskOutcome} else None
    if run.state is State.DONE:
        return TaskOutcome.DONE if said is None else said
    if said is None or said is TaskOutcome.DONE:
        return TaskOutcome.PARTIAL if run.partial else TaskOutcome.FAILED
    return said


def _name_end(run: Run[Any]) -> str:
    """Return the reason why a run was stopped; empty if it was not."""
    if run.state is State.DONE:
        return ""
    told = _shorten_line(run.stop_message, MAX_REASON_TOKENS)
    return f"{run.stop_reason}: {told}" if told else f"{run.stop_reason}"
