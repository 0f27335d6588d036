"""Attempts to get out of a sandbox, by both ways of isolation, as root and as an ordinary user."""

import fcntl
import json
import sys
from contextlib import nullcontext
from functools import cache

import anyio
import pytest

from agentfsm.ports import SandboxEnd
from agentfsm.sandbox import Isolation, Sandbox, find_isolation
from tests.support import sandbox_functions
from tests.support.database_servers import debian
from tests.support.sandbox_escapes import LEVELS, outside, try_escapes, without_bubblewrap
from tests.support.unprivileged import ROOT, run_unprivileged

# Attempts that lead to the same wherever they are made.
EXPECTED = {
    "fork": "EPERM",
    "program": "EPERM",
    "gigabyte": "MemoryError",
    "shared_memory": "ENOMEM",
    "memfd": "EPERM",
    "full_tmp": "ENOSPC",
    "secret": "ENOENT",
    "secret_by_link": "ENOENT",
    "secret_by_swap": "ENOENT",
    "descriptors": "4",  # the standard ones, and the pipe of the result
    "read": "a note",
    "write": "1",
    "write_read": "EROFS",
    "change_mode": "EROFS",
    "write_system": "EROFS",
    "write_root": "EROFS",
    "processes": "ENOENT",
    "parent_environment": "ENOENT",
    "kill_parent": "ESRCH",
    "trace_parent": "EPERM",
    "abstract_socket": "EACCES",
    "file_socket": "EACCES",
    "docker": "EACCES",
    "tcp": "EACCES",
    "udp": "EACCES",
    "netlink": "EACCES",
    "vsock": "EACCES",
    "dns": "gaierror",
    "new_user_namespace": "EPERM",
    "keyring": "EPERM",
    "io_uring": "EPERM",
    "mount": "EPERM",
    "message_queue": "EPERM",
    "pair": "2",
    "thread": "ran",
}
OWN_ENVIRONMENT = {
    *("HOME", "LANG", "MALLOC_ARENA_MAX", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "PATH", "PYTHONHASHSEED"),
    *("PWD", "TMPDIR"),
}


@pytest.fixture(params=LEVELS)
def level(request):
    """Give a level of isolation, used by the sandboxes of the test; skip where the machine does not allow it."""
    debian("bwrap", "bubblewrap")
    with without_bubblewrap() if request.param is Isolation.NAMESPACES else nullcontext():
        available = find_isolation()
        if available.isolation is not request.param:
            pytest.skip(f"no sandbox by {request.param.value} here: {available.description}")
        yield request.param


def check(found, level):
    assert {name: found[name] for name in EXPECTED} == EXPECTED
    assert found["write_program"] in {"EACCES", "EROFS"}  # by the mode of the file, or by the mount
    assert found["level"] == level
    assert found["user"] != 0
    assert set(found["environment"]) <= OWN_ENVIRONMENT


async def test_what_a_function_cannot_do(level, monkeypatch):
    """No way out of the sandbox leads anywhere, and what is allowed works."""
    monkeypatch.setenv("OPENAI_API_KEY", "hush")
    found = await try_escapes()
    check(found, level)
    assert found["owner"] == found["user"]


@cache
def attempts_of_a_user():
    """Return what an ordinary user's attempts led to, by level."""
    return json.loads(run_unprivileged("tests.support.sandbox_escapes"))


@pytest.mark.parametrize("isolation", LEVELS)
def test_an_ordinary_user_has_the_same_sandbox(isolation):
    """Neither root nor a setuid program is needed."""
    debian("bwrap", "bubblewrap")
    found = attempts_of_a_user()[isolation]
    if isinstance(found, str):
        pytest.skip(f"no sandbox by {isolation.value} for users here: {found}")
    check(found, isolation)
    assert found["uid"] == found["user"] != 0
    assert found["bomb"] <= 10


async def test_a_fork_bomb_is_bounded(level):
    """Processes that may be started cannot be started without end; all are gone with the call."""
    ended = await Sandbox(processes=8, seconds=20).run(sandbox_functions.fork_bomb, (), {})
    assert ended.end is SandboxEnd.DONE
    assert 1 <= ended.value <= 10  # two of the sandbox's own may be among the processes


@pytest.fixture
def lock():
    """Give a file that a function in a sandbox may lock."""
    with outside() as (place, *_):
        yield place / "write" / "lock"


def is_free(lock):
    """Return whether no process holds the lock."""
    with lock.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


async def test_a_process_left_behind_does_not_hold_up_the_call(level, lock):
    """A child that keeps the output open, in a session of its own, ends with the function."""
    sandbox = Sandbox(processes=4, write=[lock.parent])
    ended = await sandbox.run(sandbox_functions.leave_a_process, (str(lock),), {})
    assert (ended.end, ended.value) == (SandboxEnd.DONE, "left")
    assert lock.read_text() == "locked"
    assert is_free(lock)


async def test_the_time_is_up(level, lock):
    """A function that does not return is ended, and what it printed is in the report."""
    sandbox = Sandbox(seconds=1.0, write=[lock.parent])
    ended = await sandbox.run(sandbox_functions.sleep, (str(lock),), {})
    assert (ended.end, ended.level) == (SandboxEnd.TIMED_OUT, level)
    assert "no result within 1 s" in ended.error
    assert not lock.exists() or is_free(lock)  # a busy machine may not have come to it


async def test_a_cancelled_call_has_ended(level, lock):
    """When the cancellation has been delivered, no process of the call is left."""
    async with anyio.create_task_group() as group:
        group.start_soon(Sandbox(write=[lock.parent]).run, sandbox_functions.sleep, (str(lock),), {})
        while not lock.exists() or lock.read_text() != "locked":  # noqa: ASYNC110  written by another process
            await anyio.sleep(0.01)
        assert not is_free(lock)
        group.cancel_scope.cancel()
    assert is_free(lock)


KILLED = """
import sys, anyio
from agentfsm.sandbox import Sandbox
from tests.support import sandbox_functions
anyio.run(Sandbox(write=[sys.argv[1]]).run, sandbox_functions.sleep, (sys.argv[2],), {})
"""


async def test_a_sandbox_ends_with_a_process_that_is_killed(lock):
    """Nothing of a call goes on when the process of its agent has been killed."""
    if find_isolation().isolation is None:
        pytest.skip(f"no sandbox here: {find_isolation().description}")
    words = [sys.executable, "-c", KILLED, str(lock.parent), str(lock)]
    async with await anyio.open_process(words, cwd=ROOT) as process:
        while not lock.exists() or lock.read_text() != "locked":  # noqa: ASYNC110  written by another process
            await anyio.sleep(0.01)
        process.kill()
        await process.wait()
    while not is_free(lock):  # noqa: ASYNC110  of processes that are not ours
        await anyio.sleep(0.01)
