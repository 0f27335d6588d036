"""Lists with filters, and what is removed for good."""

import time

import pytest


def ids(here, *words):
    return [run["id"] for run in here.json("runs", *words)["runs"]]


def test_runs_that_work_for_others_are_hidden(here):
    """Unless they are asked for; the limit counts what is shown."""
    here.run("app:adder", "1 + 1", "--id", "first")
    for number in range(3):
        here.run("app:boss", "--id", f"b{number}", "Pay Bob.", code=3)
    assert ids(here) == ["b2", "b1", "b0", "first"]
    assert ids(here, "--limit", "4") == ["b2", "b1", "b0", "first"]
    assert ids(here, "--limit", "2") == ["b2", "b1"]
    assert len(ids(here, "--all")) == 10
    assert len(ids(here, "--all", "--limit", "4")) == 4
    assert ids(here, "--parent", "b1") == ["b1.t1.0"]
    assert [line.split()[0] for line in here("runs").splitlines()[1:]] == ["b2", "b1", "b0", "first"]


def test_runs_are_filtered(here):
    """By agent, state, whether they wait, and when they began: the next page begins at the last line of this one."""
    here.run("app:adder", "2 + 2", "--id", "sum")
    here.run("app:asker", "Ask.", "--id", "q", code=3)
    here.run("app:failing", "Try.", "--id", "f", code=1)
    assert ids(here, "--agent", "asker") == ["q"]
    assert ids(here, "--state", "error") == ["f"]
    assert ids(here, "--waiting") == ["q"]
    assert ids(here, "--user", "ann") == []
    assert "no runs" in here.err
    found = here.json("runs", "--limit", "2")["runs"]
    assert ids(here, "--before", repr(found[-1]["created_at"])) == ["sum"]
    assert ids(here, "--before", "2001-01-31") == []
    here("runs", "--state", "asleep", code=2)
    here("runs", "--before", "once", code=2)


def test_a_run_is_removed_with_what_works_for_it(here):
    """How many that were is told."""
    here.run("app:boss", "--id", "b", "Pay Bob.", code=3)
    here.run("app:adder", "2 + 2", "--id", "sum")
    assert here("delete", "b") == "removed run b, and 2 runs of its sub-agents\n"
    assert ids(here, "--all") == ["sum"]
    assert here.json("delete", "sum") == {"removed": 1}
    here("delete", "sum", code=2)
    assert "holds no run 'sum'" in here.err


def test_a_session_is_removed_whole(here):
    """A run of it by itself is not, since the next one goes on from it."""
    for number in range(2):
        here.run("app:adder", f"sum {number}", "--id", f"s{number}", "--session", "s")
    here("delete", "s0", code=1)
    assert here("delete", "--session", "s") == "removed the session s, 2 runs\n"
    assert ids(here) == []
    here("delete", "--session", "s", code=2)
    assert "there is no run of the session 's'" in here.err


@pytest.mark.parametrize("words", [(), ("x", "--session", "s")])
def test_either_a_run_or_a_session(here, words):
    """Both, or none, is a mistake."""
    here.run("app:adder")
    here("delete", *words, code=2)
    assert "expected either the id of a run, or a session" in here.err


def test_old_runs_are_pruned(here):
    """What is over and has not changed since; what waits stays, however old it is."""
    here.run("app:adder", "2 + 2", "--id", "sum")
    here.run("app:asker", "Ask.", "--id", "q", code=3)
    assert here("prune", "--older-than", "30").startswith("removed 0 runs that ended before ")
    assert here.json("prune", "--before", "2001-01-31") == {"removed": 0}
    assert here("prune", "--before", repr(time.time() + 1)).startswith("removed 1 run that ended before ")
    assert ids(here) == ["q"]
    here.run("app:adder", "2 + 2", "--id", "sum")
    assert here.json("prune", "--older-than", "0") == {"removed": 1}


@pytest.mark.parametrize(
    "words", [(), ("--older-than", "-1"), ("--older-than", "x"), ("--before", "+2h"), ("--older-than", "inf")]
)
def test_what_is_old_has_to_be_said(here, words):
    """Nothing is removed by a slip."""
    here.run("app:adder", "2 + 2", "--id", "sum")
    here("prune", *words, code=2)
    assert ids(here) == ["sum"]


def test_the_room_of_removed_runs_is_given_back(here):
    """A file becomes smaller, and what is left can be read; a server's store is not compacted."""
    here.run("app:adder", "2 + 2", "--id", "kept")
    here.run("app:adder", "x" * 100_000, "--id", "gone")
    here("delete", "gone")
    size = (here.folder / ".agentfsm" / "runs.db").stat().st_size
    assert here("compact").endswith("bytes smaller\n")
    assert (here.folder / ".agentfsm" / "runs.db").stat().st_size < size - 90_000
    assert here.json("compact") == {"freed_bytes": 0}
    assert ids(here) == ["kept"]
    here("compact", "--store", "redis://localhost", code=2)
    assert "only a SQLite file can be compacted" in here.err
