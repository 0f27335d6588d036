"""Recall on LoCoMo: `python -m benchmarks recall locomo PATH`.

PATH is `data/locomo10.json` of github.com/snap-research/LoCoMo: ten long dialogues of two people, with questions and
the turns that answer them (Maharana et al., ACL 2024; CC BY-NC 4.0, so it is not a part of this repository). Each
dialogue is one user's memory, stored as in real use: an item for each turn, "speaker: text" and the caption of a
picture, with the session and the time of the dialogue. It is asked a day after the last turn. The weights of the search
were tuned on the first five dialogues.

Compared with it is `search_fts5`, what a developer writes in an hour without this package.
"""

from __future__ import annotations

import json
import re
import sqlite3
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import attrs

from agentfsm.memory import Memory
from agentfsm.ports.embedder import Embedder
from agentfsm.ports.memory_items import MemoryItem, Namespace

FIRST: Final = (5, 10, 20)
TUNED: Final = 5
DAY_S: Final = 86_400.0
# The set's kinds of questions. Those of the last ask for what was never said, and name the turn that misleads.
KINDS: Final = {4: "one turn", 1: "several turns", 2: "time", 3: "conclusion", 5: "never said"}
WORD: Final = re.compile(r"\w+")
STOP: Final = frozenset(
    WORD.findall(
        "a an the of to in on at for and or is are was were be been do does did has have had what when where which who "
        "whom whose why how with from by her his their its that this it she he they"
    )
)


@attrs.frozen
class Clock:
    """A clock that stands still."""

    time: float

    def now(self) -> float:
        """Return the time, seconds since 1970."""
        return self.time


@attrs.frozen
class Dialogue:
    """A dialogue: its turns, and its questions with the ids of the turns that answer them and their kind."""

    name: str
    items: tuple[MemoryItem, ...]
    questions: tuple[tuple[str, frozenset[str], int], ...]


def read(path: Path) -> Iterator[Dialogue]:
    """Yield the dialogues of the set, or of another one of its shape."""
    for sample in json.loads(path.read_text()):
        talk, name = sample["conversation"], str(sample["sample_id"])
        items: list[MemoryItem] = []
        for number in range(1, 1 + max(int(key.split("_")[1]) for key in talk if key.startswith("session_"))):
            for turn in talk.get(f"session_{number}", []):
                day = talk[f"session_{number}_date_time"]
                at = datetime.strptime(day, "%I:%M %p on %d %B, %Y").replace(tzinfo=UTC).timestamp()
                caption = f" [image: {turn['blip_caption']}]" if turn.get("blip_caption") else ""
                items.append(
                    MemoryItem(
                        id=turn["dia_id"],
                        namespace=Namespace(user=name),
                        text=f"{turn['speaker']}: {turn['text']}{caption}",
                        session=f"session {number}",
                        valid_from=at,
                        recorded_at=at,
                    )
                )
        ids = {item.id for item in items}
        asked = [
            (each["question"], frozenset(re.findall(r"D\d+:\d+", " ".join(each["evidence"]))) & ids, each["category"])
            for each in sample["qa"]
        ]
        yield Dialogue(name, tuple(items), tuple(question for question in asked if question[1]))


def search_fts5(items: Sequence[MemoryItem]) -> Callable[[str], list[str]]:
    """Return a search by SQLite's FTS5: stems, the date, and two turns before and after, joined by reciprocal rank."""
    db = sqlite3.connect(":memory:")
    for table in ("turns", "windows"):
        db.execute(f"CREATE VIRTUAL TABLE {table} USING fts5 (text, tokenize='porter unicode61')")
    for place, item in enumerate(items):
        near = [each for each in items[max(0, place - 2) : place + 3] if each.session == item.session]
        day = f" {datetime.fromtimestamp(item.valid_from, UTC):%d %B %Y}"
        db.execute("INSERT INTO turns (rowid, text) VALUES (?, ?)", (place, item.text + day))
        window = " ".join(each.text for each in near) + day
        db.execute("INSERT INTO windows (rowid, text) VALUES (?, ?)", (place, window))

    def search(query: str) -> list[str]:
        words = WORD.findall(query.casefold())
        match = " OR ".join(f'"{word}"' for word in [each for each in words if each not in STOP] or words)
        scores: dict[int, float] = defaultdict(float)
        for table in ("turns", "windows"):
            sql = f"SELECT rowid FROM {table} WHERE {table} MATCH ? ORDER BY rank LIMIT 200"  # noqa: S608
            for rank, (place,) in enumerate(db.execute(sql, (match,)), 61):
                scores[place] += 1 / rank
        return [items[place].id for place in sorted(scores, key=scores.__getitem__, reverse=True)]

    return search


async def measure(path: str, embedder: Embedder | None) -> dict[str, dict[tuple[bool, int, int], list[float]]]:
    """Return for each way to search its recall of each question: by tuned or not, kind, and number of first items."""
    shares: dict[str, dict[tuple[bool, int, int], list[float]]] = defaultdict(lambda: defaultdict(list))
    for number, dialogue in enumerate(read(Path(path))):
        with tempfile.TemporaryDirectory() as folder:
            options: dict[str, Any] = {"clock": Clock(dialogue.items[-1].recorded_at + DAY_S)}
            words = Memory(Path(folder) / "memory.db", **options).for_(user=dialogue.name)
            await words.index.add(dialogue.items)
            script = search_fts5(dialogue.items)

            async def ask_script(query: str, script: Callable[[str], list[str]] = script) -> list[str]:
                return script(query)

            ways: dict[str, Callable[[str], Awaitable[list[str]]]] = {"script": ask_script, "text": _ask(words)}
            if embedder is not None:
                both = Memory(words.index, embedder=embedder, **options).for_(user=dialogue.name)
                await both.reindex()
                ways["text and vectors"] = _ask(both)
            for query, true, kind in dialogue.questions:
                for name, search in ways.items():
                    ids = await search(query)
                    for first in FIRST:
                        share = len(true.intersection(ids[:first])) / len(true)
                        shares[name][number < TUNED, kind, first].append(share)
            await words.aclose()
    return shares


def _ask(memory: Memory) -> Callable[[str], Awaitable[list[str]]]:
    async def ask(query: str) -> list[str]:
        return [entry.item.id for entry in await memory.recall(query, k=max(FIRST))]

    return ask


def show(shares: dict[str, dict[tuple[bool, int, int], list[float]]]) -> None:
    """Print a table: dialogues that were tuned on and others, kinds of questions, and ways to search."""
    print(f"recall in %{'':<40}" + "".join(f"{f'@{first}':>8}" for first in FIRST))
    for tuned in (True, False):
        for title, kinds in (("all but never said", {1, 2, 3, 4}), *[(KINDS[kind], {kind}) for kind in KINDS]):
            for name, found in shares.items():
                rows = [[share for kind in kinds for share in found.get((tuned, kind, first), [])] for first in FIRST]
                if rows[0]:
                    cells = "".join(f"{100 * statistics.fmean(row):8.1f}" for row in rows)
                    print(f"{'tuned' if tuned else 'other'}  {title:<20}{len(rows[0]):>5}  {name:<18}{cells}")
