"""Workers as processes of their own: runs that one submits, another drives and is killed over, and a third answers."""

import signal
from pathlib import Path

import pytest


def voyages(shell):
    path = shell.folder / "sailed.txt"
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def at_work(shell, target, *words):
    """Start a worker, and return it when it works."""
    process = shell.start("worker", target, "--poll", "0.05", *words)
    process.wait_for("executing runs of")
    return process


def test_a_run_passes_through_four_processes(shell, here):
    """Submitted by one, taken over from one that is killed in mid-call, answered by a third, ended by the second."""
    submitted = shell("submit", "app:envoy", "Go.", "--id", "e")
    assert submitted.out == "e\n"
    assert "submitted; any worker of the agent executes it: agentfsm worker app:envoy\n" in submitted.err + "\n"
    first = at_work(shell, "app:envoy")
    shell.until(lambda: len(voyages(shell)) == 1)
    first.kill()
    assert first.end() == -signal.SIGKILL

    second = at_work(shell, "app:envoy", "--json")
    line = second.wait_for("run e ")
    assert line.startswith("run e waiting: t2.0: Which port? (no answer until ")
    assert len(voyages(shell)) == 2
    assert len(set(voyages(shell))) == 1  # under the same key
    here("answer", "e", "t2.0", "Bergen", "--by", "ann")  # this process is the fourth
    assert second.wait_for("run e ").startswith("run e done: 3 turns, ")
    second.popen.send_signal(signal.SIGTERM)
    assert second.end() == 0
    assert second.lines[-1] == "stopped: any worker continues the open runs"
    assert '"runs": {\n    "done": 1,\n    "failed": 0,\n    "waiting": 1\n  }' in second.out
    assert here("resume", "e") == "Bergen\n"
    assert "       answered by ann\n" in here("show", "e")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_worker_that_is_told_to_end_gives_its_leases_back(shell, here, number):
    """In mid-call, once is enough; nobody has to wait for a lease to end, and nothing was paused."""
    here("submit", "app:envoy", "Go.", "--id", "e")
    worker = at_work(shell, "app:envoy", "--drain", "0")
    shell.until(lambda: len(voyages(shell)) == 1)
    worker.popen.send_signal(number)
    assert worker.end() == 0
    assert "Traceback" not in worker.err
    (found,) = here.json("runs")["runs"]
    assert (found["driven"], found["waiting"]) == (False, False)


def test_a_signal_drains_a_worker(shell, here):
    """The call in flight ends, the run is released, and the signal that comes too late for it cuts nothing off."""
    here("submit", "app:harbour", "Look.", "--id", "h")
    worker = at_work(shell, "app:harbour")
    shell.until(lambda: here.json("runs")["runs"][0]["state"] == "act")
    worker.popen.send_signal(signal.SIGTERM)
    worker.wait_for("stopping: effects in flight have 25 s to end; another signal cuts them off")
    (shell.folder / "tide").touch()
    assert worker.end() == 0
    assert worker.lines[-1] == "stopped: any worker continues the open runs"
    (found,) = here.json("runs")["runs"]
    assert (found["driven"], found["waiting"]) == (False, False)
    assert here("resume", "h") == "high\n"


def test_a_second_signal_ends_the_drain(shell, here):
    """The run is released all the same, and the line says which one was cut off."""
    here("submit", "app:envoy", "Go.", "--id", "e")
    worker = at_work(shell, "app:envoy", "--drain", "1000")
    shell.until(lambda: len(voyages(shell)) == 1)
    worker.popen.send_signal(signal.SIGTERM)
    worker.wait_for("stopping: effects in flight have 1000 s to end")
    worker.popen.send_signal(signal.SIGTERM)
    assert worker.end() == 0
    assert "the drain is over, and runs were cut off within a step (1): e; " in worker.err
    (found,) = here.json("runs")["runs"]
    assert (found["driven"], found["waiting"]) == (False, False)


def test_a_pause_reaches_whoever_drives(shell, here):
    """The call under way ends first; then the run rests, and no worker moves it on before somebody resumes it."""
    process = shell.start("run", "app:harbour", "Look.")
    process.wait_for("t1.0 get_tide()")
    here("pause", process.run_id, "--by", "ann")
    assert f"run {process.run_id} pauses when its worker reads the request. To continue: " in here.err
    (shell.folder / "tide").touch()
    assert process.end() == 3
    assert process.lines[-3:] == ["waiting:", "  paused by ann", f"then: agentfsm resume {process.run_id}"]
    assert "t1.0 done in" in process.err
    here("send", process.run_id, "Hurry.")
    assert here.json("worker", "app:harbour", "--until-idle")["runs"]["waiting"] == 0
    assert f"run {process.run_id}" not in here.err
    assert here("resume", process.run_id) == "high\n"


def test_a_worker_until_nothing_is_left(here):
    """It drives what is due and ends; what ended, stopped and waits is told apart."""
    for number in range(3):
        here("submit", "app:asker", f"Ask {number}.", "--id", f"q{number}")
    here("answer", "q0", "t1.0", "blue", code=2)  # it has not asked yet
    found = here.json("worker", "app:asker", "--until-idle", "--parallel", "2")
    assert found == {"agent": "asker", "runs": {"done": 0, "failed": 0, "waiting": 3}}
    here("answer", "q1", "t1.0", "blue")
    assert here("worker", "app:asker", "--until-idle") == ""
    (line,) = [line for line in here.err.splitlines() if line.startswith("run ")]
    assert line.startswith("run q1 done: 2 turns, ")
    here("submit", "app:shaky", "Try.", "--id", "s")
    found = here.json("worker", "app:shaky", "--until-idle")
    assert found["runs"] == {"done": 0, "failed": 1, "waiting": 0}
    assert "run s failed, model_error: the model is out of order" in here.err


def test_a_run_that_cannot_be_driven(here):
    """The worker says why and where, drives the others, and ends as a command that failed."""
    here("submit", "app:moody", "Break.", "--id", "bad")
    here("submit", "app:moody", "2 + 2", "--id", "good")
    here("worker", "app:moody", "--until-idle", code=1)
    line = (here.folder / "app.py").read_text(encoding="utf-8").splitlines().index("        raise KeyError(prompt)") + 1
    assert f"error: run bad was not executed: KeyError: 'Break.' (app.py:{line})\n" in here.err
    assert here("resume", "good") == "Four.\n"


def test_a_run_of_another_agent_by_the_same_name_is_left_alone(here):
    """The worker says why, and drives its own."""
    here("submit", "app:rival", "2 + 2", "--id", "p")
    here("submit", "app:adder", "2 + 2", "--id", "own")
    here("worker", "app:adder", "--until-idle", code=1)
    assert "run p was not executed: the run belongs to app:rival, which has the same name as app:adder" in here.err
    assert here.json("show", "p")["version"] == 0
    assert here("resume", "own") == "Four.\n"


def test_a_submission_is_made_once(here):
    """The same id and prompt is the same run; another prompt is refused; the document is that of any run."""
    for _ in range(2):
        assert here.json("submit", "app:adder", "2 + 2", "--id", "sum", "--metadata", "team=red")["state"] == "observe"
    here("submit", "app:adder", "3 + 3", "--id", "sum", code=1)
    assert here.json("show", "sum")["metadata"] == {"team": "red"}
    assert here("resume", "sum") == "Four.\n"


def test_a_worker_of_an_agent_with_a_store_of_its_own(here):
    """The commands name the agent where only it can open the store."""
    here("submit", "app:shelved", "Pay.", "--id", "w")
    assert "worker app:shelved\n" in here.err
    assert here.json("submit", "app:shelved", "Pay.", "--id", "w")["resume"] == "agentfsm resume w --agent app:shelved"
    here("worker", "app:shelved", "--until-idle")
    assert "in the agent's own store; stop with Ctrl-C" in here.err
    assert 'run w waiting: t1.0: may pay(account="17\\u202e", cents=5) run? (no answer until ' in here.err


def test_a_store_that_is_named_goes_before_the_agents_own(here):
    """It was passed by without a word, and the runs were elsewhere."""
    here("submit", "app:own", "Pay.", "--id", "w", "--store", "other.db")
    assert [run["id"] for run in here.json("runs", "--store", "other.db")["runs"]] == ["w"]
    assert not Path("own.db").exists()
    here("submit", "app:own", "Pay.", "--id", "w")
    assert Path("own.db").exists()


@pytest.mark.parametrize("words", [("--parallel", "0"), ("--poll", "0"), ("--poll", "nan"), ("--poll", "often")])
def test_what_a_worker_cannot_do(here, words):
    """An error of usage."""
    here("worker", "app:adder", *words, code=2)
    assert f"argument {words[0]}: " in here.err
