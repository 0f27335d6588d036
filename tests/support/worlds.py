"""Which of the worlds a test runs in: an event loop, and with it a store where the test takes one."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import product

LOOPS = ("asyncio", "trio")
STORES = ("memory", "sqlite")
# What stands around core and engine reaches an event loop only by way of anyio and of the engine's own threads.
ON_BOTH_LOOPS = ("tests/core/", "tests/engine/", "tests/crash/")


def are_named(args: Iterable[str], keyword: str) -> bool:
    """Whether somebody asks for a test by its node id, or for a world by `-k`: then nothing is left out.

    Args:
        args: The files, folders and node ids that pytest was given.
        keyword: What `-k` says.
    """
    asked = set(re.findall(r"\w+", keyword))
    return any("::" in arg for arg in args) or not asked.isdisjoint(LOOPS + STORES)


def left_out(nodeids: Sequence[str]) -> set[str]:
    """Return those that the normal run leaves out: half of the worlds of each case that is there in all of them.

    The cases of a file take turns: the first runs on asyncio with the memory store and on trio with SQLite, the second
    the other way about; or where one loop is enough, the first on asyncio and the second on trio.
    """
    files: defaultdict[str, defaultdict[str, dict[frozenset[str], str]]] = defaultdict(lambda: defaultdict(dict))
    for nodeid in nodeids:
        file, _, name = nodeid.partition("::")
        word = re.compile(rf"(?<=[\[-])({'|'.join(word for pair in _pairs(file) for word in pair)})(?=[\]-])")
        files[file][word.sub("", name)][frozenset(word.findall(name))] = nodeid
    found = set()
    for file, cases in files.items():
        there_are = set(map(frozenset, product(*_pairs(file))))
        whole = [worlds for worlds in cases.values() if worlds.keys() == there_are]
        for turn, worlds in enumerate(whole):
            found |= {nodeid for world, nodeid in worlds.items() if _place(world) % 2 != turn % 2}
    return found


def _pairs(file: str) -> tuple[tuple[str, str], ...]:
    return (LOOPS, STORES) if file.startswith(ON_BOTH_LOOPS) else (LOOPS,)


def _place(world: frozenset[str]) -> int:
    return len(world & {LOOPS[1], STORES[1]})
