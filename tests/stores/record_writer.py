"""A process that counts in records by compare-and-set, until it is killed, and prints each count that was acknowledged.

It is called as `python record_writer.py KIND ADDRESS SCHEMA`.
"""

import sys

import anyio

from agentfsm import ConflictError
from agentfsm.stores import PostgresStore, RedisStore, SQLiteStore

MAKERS = {
    "sqlite": lambda address, _schema: SQLiteStore(address),
    "postgres": lambda address, schema: PostgresStore(address, schema=schema),
    "redis": lambda address, _schema: RedisStore(address, accept_loss="everything"),
}


async def add(store, key, name):
    """Add one to the count of a writer; return it."""
    while True:
        found = await store.read_record("count", key)
        counts = {} if found is None else found.value
        counts[name] = counts.get(name, 0) + 1
        try:
            await store.write_record("count", key, counts, revision=0 if found is None else found.revision)
        except ConflictError:
            continue
        return counts[name]


async def count(store, name, keys, times, say=lambda *_words: None):
    """Count in each record, all at once."""

    async def count_in(key):
        for _ in range(times):
            say(key, await add(store, key, name))

    async with anyio.create_task_group() as group:
        for key in keys:
            group.start_soon(count_in, key)


def say(*words):
    """Print a line that the parent reads at once."""
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    kind, address, schema = sys.argv[1:]
    anyio.run(count, MAKERS[kind](address, schema), "child", ("y", "x"), 1_000_000, say)
