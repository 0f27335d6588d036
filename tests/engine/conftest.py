"""Stores to test with, and the check after every test that nothing was left behind."""

from __future__ import annotations

import asyncio
from importlib.util import find_spec

import pytest
import trio

from agentfsm.stores import MemoryStore
from agentfsm.streaming.detached_task import TASK_NAME
from tests.support.checks import busy_threads, no_leases, settled

STORES = ["memory", *(["sqlite"] if find_spec("agentfsm.stores.sqlite.store") else [])]


@pytest.fixture(params=STORES)
async def store(request, tmp_path):
    """A store, closed afterwards; no run in it may be leased then."""
    if request.param == "memory":
        made = MemoryStore()
    else:
        from agentfsm.stores import SQLiteStore  # noqa: PLC0415  only where there is one

        made = SQLiteStore(tmp_path / "runs.db")
    yield made
    await no_leases(made)
    await made.aclose()


def _tasks(backend: str) -> int:
    if backend == "trio":  # trio's own tasks, which come and go, are no descendants of ours
        root = trio.lowlevel.current_root_task()
        return _descendants(trio.lowlevel.current_task()) + (0 if root is None else _executions(root))
    return len([task for task in asyncio.all_tasks() if not task.done()])


def _descendants(task: trio.lowlevel.Task) -> int:
    children = [child for nursery in task.child_nurseries for child in nursery.child_tasks]
    return len(children) + sum(map(_descendants, children))


def _executions(task: trio.lowlevel.Task) -> int:
    children = [child for nursery in task.child_nurseries for child in nursery.child_tasks]
    return sum(child.name == TASK_NAME for child in children) + sum(map(_executions, children))


@pytest.fixture
async def _no_tasks_left(anyio_backend_name):
    before = _tasks(anyio_backend_name)
    yield
    assert _tasks(anyio_backend_name) == before, "a task outlived the test"


@pytest.fixture(autouse=True)
def nothing_left(request):
    """No task and no thread of a run is alive when its test is over."""
    if "anyio_backend" in request.fixturenames:
        request.getfixturevalue("_no_tasks_left")
    yield
    settled(lambda: busy_threads() <= 0)
