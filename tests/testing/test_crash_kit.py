"""The crash kit: what a life tells, where it can be killed, and what is said of it afterwards."""

from __future__ import annotations

import os
import signal
from functools import partial

import anyio
import pytest
from anyio.lowlevel import checkpoint

from agentfsm import MisuseError
from agentfsm.stores import SQLiteStore
from agentfsm.testing.conformance.helpers import LeasedRun, make_header
from agentfsm.testing.crash import ForkServer, connect, crash_point, report, wait_for_go

BACKENDS = pytest.mark.parametrize("backend", ["asyncio", "trio"])
loaded = []


def load():
    """Do once what each life would have to do."""
    loaded.append("loaded")


async def counting(to):
    """Tell each number, behind a crash point of its own."""
    for number in range(1, to + 1):
        crash_point("number")
        report(number)
        await checkpoint()


async def telling_what_is_loaded():
    """Tell what the process came with."""
    report((os.getpid(), loaded))


async def failing():
    """Break off."""
    await checkpoint()
    raise ValueError("out of paper")


async def failing_at_length():
    """Break off, with more to say than one word holds."""
    raise ValueError("重" * 3_000)


async def telling(size):
    """Tell a word of some length."""
    report(b"." * size)


async def leaving():
    """End without a word."""
    os._exit(3)


async def talking():
    """Tell a word for each that is heard."""
    for number in range(3):
        report(number)
        await wait_for_go()


async def writing(path):
    """Create a run in a file, and tell that it is there."""
    store = SQLiteStore(path, connect=connect)
    await LeasedRun.create(store, make_header("r1"))
    report("created")


@pytest.fixture(scope="module")
def fork_server():
    with ForkServer(load) as fork_server:
        yield fork_server


@BACKENDS
def test_a_life_is_what_it_told(fork_server, backend):
    """A life that is not killed has told everything, and says how many moments it had."""
    life = fork_server.run(counting, 3, backend=backend)
    assert life.reports == (1, 2, 3)
    assert not life.killed
    assert life.points["number"] == 3
    assert life.points["await"] > 3


@BACKENDS
def test_a_life_is_killed_at_the_moment_named(fork_server, backend):
    """At its n-th moment of a kind: what it told before is known, and nothing else happens."""
    life = fork_server.run(counting, 3, kill_at=("number", 3), backend=backend)
    assert life.reports == (1, 2)
    assert life.killed
    assert life.points == {}


@BACKENDS
def test_each_await_is_a_moment(fork_server, backend):
    """Killed at one await after another, a life gets further and further, and not past its end."""
    awaits = fork_server.run(counting, 3, backend=backend).points["await"]
    lives = [fork_server.run(counting, 3, kill_at=("await", at), backend=backend) for at in range(1, awaits + 2)]
    assert [life.killed for life in lives] == [True] * awaits + [False]
    told = [life.reports for life in lives]
    assert sorted(told) == told
    assert {(), (1,), (1, 2), (1, 2, 3)} == set(told)


def test_each_statement_and_commit_of_a_file_is_a_moment(fork_server, tmp_path):
    """With the kit's `connect`: killed behind the commit, the run is there, and nobody was told."""
    commits = fork_server.run(writing, str(tmp_path / "whole.db")).points["commit"]
    path = str(tmp_path / "runs.db")
    assert fork_server.run(writing, path, kill_at=("commit", commits - 1)).reports == ()
    assert anyio.run(partial(count, path)) == 0
    assert fork_server.run(writing, path, kill_at=("commit", 2)).reports == ()
    assert anyio.run(partial(count, path)) == 1
    assert fork_server.run(writing, path, kill_at=("statement", 1)).killed


async def count(path):
    """How many runs the file holds."""
    store = SQLiteStore(path)
    runs = await store.runs()
    await store.aclose()
    return len(runs)


def test_a_life_is_killed_from_outside(fork_server):
    """So many seconds after its first word, wherever it is then; one that ends before is not killed."""
    assert fork_server.run(talking, kill_after_s=0.0).killed
    assert not fork_server.run(counting, 1, kill_after_s=3600.0).killed


def test_a_life_is_spoken_to(fork_server):
    """It waits for a word, also while it is stopped."""
    living = fork_server.start(talking)
    for number in range(3):
        assert living.next_report() == number
        living.signal(signal.SIGSTOP)
        living.go()
        living.signal(signal.SIGCONT)
    assert living.end().reports == (0, 1, 2)
    with pytest.raises(EOFError):
        living.next_report()


def test_what_goes_wrong_in_a_life_is_told(fork_server):
    """An error comes with its traceback; an end without a word is none of its own."""
    with pytest.raises(AssertionError, match="out of paper"):
        fork_server.run(failing)
    with pytest.raises(AssertionError, match="status 3"):
        fork_server.run(leaving)
    with pytest.raises(MisuseError, match="one of asyncio, trio"):
        fork_server.run(counting, 1, backend="curio")


def test_a_moment_that_never_comes_is_told(fork_server, tmp_path):
    """A sweep over a kind that is misspelled, or that the store does not have, would end at once and find no fault."""
    with pytest.raises(AssertionError, match=r"'nummer'.*only of await, number"):
        fork_server.run(counting, 3, kill_at=("nummer", 1))
    with pytest.raises(AssertionError, match=r"connect=agentfsm\.testing\.crash\.connect"):
        fork_server.run(telling, 1, kill_at=("commit", 1))
    assert not fork_server.run(counting, 3, kill_at=("number", 4)).killed
    with pytest.raises(MisuseError, match="counted from 1"):
        fork_server.run(counting, 3, kill_at=("number", 0))


def test_a_word_arrives_whole_or_is_refused(fork_server):
    """What does not fit into one write is refused where it is told; a long traceback is cut to its end."""
    assert fork_server.run(telling, 3_900).reports == (b"." * 3_900,)
    with pytest.raises(AssertionError, match="report at most 4,000"):
        fork_server.run(telling, 4_000)
    with pytest.raises(AssertionError, match=r"重{900}\n$"):
        fork_server.run(failing_at_length)


def test_a_life_is_a_process_of_its_own_that_came_prepared(fork_server):
    """What was prepared is there, once, in each."""
    told = [fork_server.run(telling_what_is_loaded).reports[0] for _ in range(2)]
    assert [what for _pid, what in told] == [["loaded"], ["loaded"]]
    assert len({os.getpid(), *(pid for pid, _what in told)}) == 3


def test_nothing_lives_on():
    """When the kit is left, whatever still lives is killed."""
    with ForkServer() as fork_server:
        living = fork_server.start(talking)
        assert living.next_report() == 0
    with pytest.raises(EOFError):
        living.next_report()


def test_outside_of_a_life_nothing_happens():
    """Tools that have crash points, and tell, can be used anywhere."""
    crash_point("number")
    report("nobody hears")
