"""What all tests share: the servers that they need, and the event loops that they run on.

The core and the engine are tested on asyncio and on trio. What stands around them reaches an event loop by way of anyio
and of the engine's own threads: each of its tests runs on one of the two, chosen by its name, and on both where
BOTH_LOOPS is set, as `make soak` does.
"""

import os
import re
from zlib import crc32

import pytest
from hypothesis import HealthCheck, settings

pytest_plugins = ["servers"]

# A slow machine is no bug.
ANY_MACHINE = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("suite", ANY_MACHINE, max_examples=40, derandomize=True)
settings.register_profile("soak", ANY_MACHINE, max_examples=1_000)
settings.load_profile("suite")
# The suite draws the same examples each time; `make soak` draws others, and many.

LOOPS = ("asyncio", "trio")
ON_ONE = ("tests/mcp/", "tests/models/", "tests/recordings/", "tests/stores/", "tests/test_")


@pytest.fixture(params=LOOPS)
def anyio_backend(request):
    return request.param


def pytest_collection_modifyitems(config, items):
    """Leave out one of the two where one is enough."""
    if os.environ.get("BOTH_LOOPS"):
        return
    known = {item.nodeid for item in items}
    left_out = {item.nodeid for item in items if item.nodeid.startswith(ON_ONE) and is_left(item, known)}
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in left_out])
    items[:] = [item for item in items if item.nodeid not in left_out]


def is_left(item, known):
    """Whether the same test is to run on the other event loop, and does."""
    loop = item.callspec.params.get("anyio_backend") if hasattr(item, "callspec") else None
    if loop not in LOOPS:
        return False
    before, _, behind = re.split(rf"(?<=[\[-])({loop})(?=[\]-])", item.nodeid, maxsplit=1)
    (other,) = set(LOOPS) - {loop}
    return before + other + behind in known and LOOPS[crc32((before + behind).encode()) % 2] == other
