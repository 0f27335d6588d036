"""What all tests share: the servers that they need, and the worlds that they run in.

The core and the engine are tested on asyncio and on trio, with the memory store and with SQLite. A test that is made
for both loops and both stores sees each of them in two of these four worlds, chosen by its name. What stands around
them reaches an event loop by way of anyio and of the engine's own threads: each of its tests runs on one of the two.
All run in all of them where EVERYWHERE is set, as `make soak` does.
"""

import os
import re
from zlib import crc32

import pytest
from hypothesis import HealthCheck, settings

pytest_plugins = ["tests.support.database_servers"]

# A slow machine is no bug.
ANY_MACHINE = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("suite", ANY_MACHINE, max_examples=40, derandomize=True)
settings.register_profile("soak", ANY_MACHINE, max_examples=1_000)
settings.load_profile("suite")
# The suite draws the same examples each time; `make soak` draws others, and many.

LOOPS = ("asyncio", "trio")
STORES = ("memory", "sqlite")
ON_ONE_LOOP = ("tests/mcp/", "tests/models/", "tests/recordings/", "tests/stores/", "tests/test_")


@pytest.fixture(params=LOOPS)
def anyio_backend(request):
    return request.param


def pytest_collection_modifyitems(config, items):
    """Leave out the worlds that are not needed."""
    if os.environ.get("EVERYWHERE"):
        return
    known = {item.nodeid for item in items}
    left_out = [item for item in items if hasattr(item, "callspec") and is_left(item, known)]
    config.hook.pytest_deselected(items=left_out)
    gone = set(left_out)
    items[:] = [item for item in items if item not in gone]


def is_left(item, known):
    """Whether the same test is to run in other worlds that have between them what this one has, and does."""
    pairs = (LOOPS,) if item.nodeid.startswith(ON_ONE_LOOP) else (LOOPS, STORES)
    values = [value for value in item.callspec.params.values() if isinstance(value, str)]
    places = [pair.index(value) for pair in pairs for value in values if value in pair]
    if len(places) != len(pairs) or any(swapped(item.nodeid, pair) not in known for pair in pairs):
        return False
    name = with_words(item.nodeid, dict.fromkeys((word for pair in pairs for word in pair), ""))
    return (sum(places) + crc32(name.encode())) % 2 == 1


def swapped(nodeid, pair):
    """Return the id of a test with the other one of two loops, or stores."""
    one, other = pair
    return with_words(nodeid, {one: other, other: one})


def with_words(nodeid, words):
    """Return the id of a test with other words among its parameters."""
    return re.sub(rf"(?<=[\[-])({'|'.join(words)})(?=[\]-])", lambda word: words[word[0]], nodeid)
