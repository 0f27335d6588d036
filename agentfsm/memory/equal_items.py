"""Items that say the same: equal facts and preferences share a slot, so one of them holds, and counts the others.

All functions are pure.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Collection, Iterable, Sequence
from typing import Final

import attrs

from agentfsm.core.header import short_hash
from agentfsm.core.labels import Label
from agentfsm.core.recalled_items import write_item_text
from agentfsm.memory.ranking import DAY_S, Recollection
from agentfsm.ports.memory_items import ItemKind, MemoryItem

# First character of the slots of equal texts.
EQUAL_SLOT: Final = "="
# Key of the data of an item: how often it was said.
CONFIRMED: Final = "confirmed"
# Importance that an item gains when it is said again, so that what is said often becomes a part of the profile.
CONFIRMED_IMPORTANCE: Final = 0.1
# Times that an item counts as said at most.
MAX_CONFIRMED: Final = 1_000_000
# Factor by which the score of an item in the profile shrinks with each day: half after some ten weeks.
PROFILE_DECAY: Final = 0.99

_SEPARATORS: Final = re.compile(r"[\s_-]+")
# Marks at the ends of a sentence, which do not change what it says. Others may: "C++", "-5", "50 %".
_ENDS: Final = " \t\n.,;:!?\u3002\uff0c\uff1b\uff1a\uff01\uff1f\u3001\u061f\u0964\"'\u201c\u201d\u2018\u2019"


def normalise_text(text: str) -> str:
    """Return a text without what does not change its meaning: case, width, spaces, and marks at its ends."""
    return write_item_text(unicodedata.normalize("NFKC", text)).casefold().strip(_ENDS)


def clean_slot(slot: str) -> str:
    """Return a slot in the form in which slots are compared: "Home_Town" and "home town" are one."""
    return " ".join(_SEPARATORS.split(slot.casefold())).strip()


def read_confirmed(item: MemoryItem) -> int:
    """Return how often an item was said, 1 or more."""
    count = item.data.get(CONFIRMED)
    return min(count, MAX_CONFIRMED) if isinstance(count, int) and count >= 1 else 1


def name_slot(kind: ItemKind, text: str, level: str, labels: Collection[Label]) -> str:
    """Return the slot of a text that is given no other: equal items of an owner share it, so that one of them holds."""
    return EQUAL_SLOT + short_hash("\n".join([kind, level, *sorted(labels), normalise_text(text)]), 24)


def confirm(old: MemoryItem, new: MemoryItem) -> MemoryItem:
    """Return `new`, which says the same as `old`, so that it counts both and holds in its place.

    It is true since `old` is, and if the texts are equal it has the old one, so that a profile stays the same.
    """
    return attrs.evolve(
        new,
        text=old.text if normalise_text(old.text) == normalise_text(new.text) else new.text,
        slot=old.slot or new.slot,
        data={**old.data, **new.data, CONFIRMED: read_confirmed(old) + 1},
        follows=old.id,
        importance=min(1.0, max(new.importance, round(old.importance + CONFIRMED_IMPORTANCE, 4))),
        level=old.level,
        labels=old.labels,
        valid_from=old.valid_from,
    )


def find_same(items: Collection[MemoryItem], ids: Collection[str], now: float) -> set[str]:
    """Return the ids of what is to be forgotten with items: all that has their words, before and after them.

    That is what corrects, confirms or ends them, and equal texts. With the item that holds in a slot its earlier values
    go: they would hold again. What is held says nothing of others.

    Args:
        items: All items of the owner.
        ids: Ids of some of them, which may be gone.
        now: Time at which a value of a slot holds, seconds since 1970.
    """
    names = {item.id: {*item.origins, _name_text(item)} for item in items}
    held = {item.id for item in items if item.held}
    values, corrected = _by_slot(items), {item.replaces for item in items if not item.held}
    found, more = set[str](), {*ids}
    while not more <= found:
        found |= more
        said = found.union(*[names.get(each, ()) for each in found - held])
        more = {item_id for item_id, own in names.items() if not said.isdisjoint(own)}
        for group in values.values():
            begun = [each for each in group if each.valid_from <= now and not each.held and each.id not in corrected]
            if begun and begun[-1].id in found:
                more |= {each.id for each in group[: group.index(begun[-1])]}
    return found


def _name_text(item: MemoryItem) -> str:
    return item.id if item.kind is ItemKind.DOCUMENT else f"text {normalise_text(item.text)}"


def find_earlier(items: Collection[MemoryItem], ids: Collection[str], now: float) -> set[str]:
    """Return the ids of items with those of all that they correct, confirm or take the place of."""
    known, values = {item.id: item for item in items}, _by_slot(items)
    found, todo = {*ids}, [*ids]
    while todo:
        if (item := known.get(todo.pop())) is not None and not item.held:
            group = values.get(item.slot, []) if item.valid_from <= now else []
            earlier = {each.id for each in group[: group.index(item)]} if group else set[str]()
            new = (earlier | item.origins & known.keys()) - found
            found |= new
            todo += new
    return found


def _by_slot(items: Iterable[MemoryItem]) -> dict[str, list[MemoryItem]]:
    """Return the items of each slot; of those that have begun the last one holds."""
    slots: dict[str, list[MemoryItem]] = {}
    for item in sorted(items, key=lambda each: (each.valid_from, each.recorded_at, each.id)):
        if item.slot:
            slots.setdefault(item.slot, []).append(item)
    return slots


def leave_out_equal(scored: Iterable[Recollection]) -> list[Recollection]:
    """Return one entry for each text, at the place of its best one: the item that was recorded last."""
    first: dict[str, Recollection] = {}
    for entry in scored:
        best = first.setdefault(normalise_text(entry.item.text), entry)
        if (entry.item.recorded_at, entry.item.id) > (best.item.recorded_at, best.item.id):
            first[normalise_text(entry.item.text)] = attrs.evolve(best, item=entry.item)
    return [*first.values()]


def is_shown(item: MemoryItem, shown: str) -> bool:
    """Return whether a normalised text has the text of an item in it, as words of its own."""
    text = normalise_text(item.text)
    return text in shown and re.search(rf"(?<!\w){re.escape(text)}(?!\w)", shown) is not None


def rank_profile(items: Sequence[MemoryItem], now: float) -> list[Recollection]:
    """Return the items of a profile, the most important, newest and most confirmed first; equal ones are one.

    Their order depends on the items only: a later `now` changes all scores by the same factor.
    """
    scored: list[Recollection] = []
    for item in items:
        age, confirmed = max(0.0, now - item.recorded_at) / DAY_S, read_confirmed(item)
        score = item.importance * (1 + math.log2(confirmed)) * PROFILE_DECAY**age
        why = {"importance": item.importance, "recency": PROFILE_DECAY**age, CONFIRMED: float(confirmed)}
        scored.append(Recollection(item=item, score=score, why=why))
    return leave_out_equal(sorted(scored, key=lambda entry: (-entry.score, entry.item.id)))
