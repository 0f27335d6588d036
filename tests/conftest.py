"""What all tests share: the servers that they need, and the worlds that they run in.

A world is an event loop and, for a test of the engine that takes one, a store. Both stand in the test's parameters:

    pytest tests/engine/test_parked.py                              # each case in two of its four worlds, in turns
    pytest tests/engine/test_parked.py -k "trio and sqlite"         # each case in this one
    pytest tests/engine/test_parked.py::test_a_person_resumes_it    # a test that is named in all of them
    EVERYWHERE=1 pytest tests/engine/test_parked.py                 # everything in all of them, as `make soak` does

A case is left out in half of its worlds only where neither `-k` nor a node id names it or a world; the rule is in
`tests/support/worlds.py`. `-m on_trio` and `-m "not on_trio"` halve a run without naming a world, for `make test`.
The last line of a run says how many were left out.
"""

import gc
import os
import shlex

import pytest
from hypothesis import HealthCheck, settings

from tests.support.memory_folder import MEMORY
from tests.support.worlds import LOOPS, are_named, left_out

pytest_plugins = ["tests.support.database_servers"]

if MEMORY is not None:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))  # where pytest makes `tmp_path`

# A slow machine is no bug.
ANY_MACHINE = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("suite", ANY_MACHINE, max_examples=40, derandomize=True)
settings.register_profile("soak", ANY_MACHINE, max_examples=1_000)
settings.load_profile("suite")
# The suite draws the same examples each time; `make soak` draws others, and many.

# How many cases a run left out in a world.
LEFT_OUT = pytest.StashKey[int]()


@pytest.fixture(params=LOOPS)
def anyio_backend(request):
    return request.param


def pytest_collection_modifyitems(config, items):
    """Leave out the worlds that are not needed, unless somebody asks for them."""
    for item in items:
        if hasattr(item, "callspec") and "trio" in item.callspec.params.values():
            item.add_marker("on_trio")
    if os.environ.get("EVERYWHERE") or are_named(config.args, config.option.keyword):
        return
    gone = left_out([item.nodeid for item in items])
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in gone])
    items[:] = [item for item in items if item.nodeid not in gone]
    config.stash[LEFT_OUT] = len(gone)


def pytest_collection_finish():
    """Spare each full collection of garbage the walk over modules and tests, which stay."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter, config):
    """Say what a run left out that runs elsewhere."""
    if gone := config.stash.get(LEFT_OUT, 0):
        words = shlex.join(config.invocation_params.args)
        terminalreporter.line(f"{gone} cases were left out in one of their worlds; all: EVERYWHERE=1 pytest {words}")
