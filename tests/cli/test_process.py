"""Real processes: signals, kills, pipes, and runs that go on in another process."""

import json
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from agentfsm.cli.terminal import Terminal


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_the_run(shell, number):
    """Once is enough: the drive is cancelled, and the command that goes on is printed; nothing has to end a pause."""
    process = shell.start("run", "app:waiter", "Wait.", "--json")
    process.wait_for("t1.0 waiting")
    process.popen.send_signal(number)
    assert process.end() == 130
    assert process.lines[-1].endswith(f"To continue: agentfsm resume {process.run_id}")
    assert "Traceback" not in process.err
    found = shell.json("show", process.run_id)
    assert (found["state"], found["pending"]) == ("act", [])
    assert process.out.strip().startswith("{")

    again = shell.start("resume", process.run_id)
    again.wait_for("t1.0 waiting")
    again.popen.send_signal(number)
    assert again.end() == 130


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_interrupt_ends_at_once(shell, number):
    """What does not end by the first is cut off, without a word of Python's; the run goes on from its journal."""
    process = shell.start("run", "app:stubborn", "Wait.")
    shell.until((shell.folder / "begun").exists)
    process.popen.send_signal(signal.SIGINT)
    shell.until((shell.folder / "told").exists)
    process.popen.send_signal(number)
    assert process.end() == 130
    assert process.lines[-1] == "ended at once: nothing that was acknowledged is lost"
    assert "Traceback" not in process.err
    assert shell.json("show", process.run_id)["state"] == "act"


def test_an_interrupt_while_the_module_loads(shell):
    """Nothing has begun, so there is nothing to go on with.

    One long sleep may begin right after the signal came, and Python 3.14 then sleeps to its end.
    """
    (shell.folder / "sleepy.py").write_text(
        "import sys, time\nprint('loading', file=sys.stderr, flush=True)\nwhile True:\n    time.sleep(0.01)\n",
        encoding="utf-8",
    )
    process = shell.start("run", "sleepy:agent", "x")
    process.wait_for("loading")
    process.popen.send_signal(signal.SIGINT)
    assert process.end() == 130
    assert process.lines[-1] == "interrupted"


@pytest.fixture
def launched(shell):
    """A run whose worker was killed inside a tool that makes no promise."""
    process = shell.start("run", "app:launcher", "Launch.")
    process.wait_for("t1.0 launch()")
    shell.until((shell.folder / "launched.txt").exists)
    process.kill()
    assert process.end() == -signal.SIGKILL
    return process.run_id


def effects(shell):
    return (shell.folder / "launched.txt").read_text(encoding="utf-8").splitlines()


def test_a_killed_call_is_never_silently_repeated(shell, launched):
    """The run waits, and the commands that settle it are printed."""
    waiting = shell("resume", launched, code=3)
    assert "t1.0: launch was running when its worker died" in waiting.err
    for way in ("--result TEXT", "--failed TEXT", "--rerun"):
        assert f"agentfsm settle {launched} t1.0 {way}" in waiting.err
    assert len(effects(shell)) == 1


@pytest.mark.parametrize(
    ("way", "answer"),
    [(("--result", "it flew"), "it flew\n"), (("--failed", "it fell"), "it fell\n")],
)
def test_a_person_settles_what_is_unknown(shell, launched, way, answer):
    """What the person says is the call's result; the tool does not run again."""
    shell("resume", launched, code=3)
    said = shell.json("settle", launched, "t1.0", *way, "--by", "ann")
    assert (said["decision"], said["by"]) == ("settle", "ann")
    assert shell("resume", launched).out == answer
    assert len(effects(shell)) == 1


def test_a_person_has_it_run_again(shell, launched):
    """Under the same key, so that the other side can tell."""
    shell("resume", launched, code=3)
    shell("settle", launched, "t1.0", "--rerun")
    assert shell("resume", launched).out == "launched again\n"
    first, second = effects(shell)
    assert first == second


def test_resume_waits_for_a_live_worker(shell):
    """It says so, and goes on as soon as the other one is gone."""
    first = shell.start("run", "app:waiter", "Wait.")
    first.wait_for("t1.0 waiting")
    second = shell.start("resume", first.run_id)
    second.wait_for("is executed by another worker: waiting for it")
    first.kill()
    first.end()
    second.wait_for("t1.0 waiting")
    second.popen.send_signal(signal.SIGINT)
    assert second.end() == 130


def test_cancel_reaches_a_live_worker(shell):
    """The one that drives the run ends it, soon."""
    process = shell.start("run", "app:waiter", "Wait.")
    process.wait_for("t1.0 waiting")
    assert "ends when its worker reads the request" in shell("cancel", process.run_id, "--by", "ann").err
    assert process.end() == 1
    assert "failed, cancelled: cancelled by ann" in process.err


def test_a_reader_that_goes_away(shell):
    """`agentfsm ... | head` is silent, and the exit code is still the run's."""
    command = [sys.executable, "-m", "agentfsm", "run", "app:talker", "Talk."]
    with subprocess.Popen(
        command, cwd=shell.folder, env=shell.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout.read(10) == b"x" * 10
        process.stdout.close()
        err = process.stderr.read().decode()
        assert process.wait() == 0
    assert "BrokenPipe" not in err
    assert "Traceback" not in err


def test_a_watcher_that_goes_away(shell):
    """A run whose stderr nobody reads any more still ends as it should."""
    command = [sys.executable, "-m", "agentfsm", "run", "app:shopper", "Shop."]
    with subprocess.Popen(
        command, cwd=shell.folder, env=shell.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        process.stderr.close()
        assert process.stdout.read() == b"7\n"
        assert process.wait() == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no disk here that is always full")
@pytest.mark.parametrize("form", ["", "--json"])
def test_a_disk_that_is_full(shell, form):
    """It is told in a line that the result was not written, and by the exit code."""
    line = f'exec "$0" -m agentfsm run app:adder "2 + 2" {form} >/dev/full'
    words = ["sh", "-c", line, sys.executable]
    done = subprocess.run(words, cwd=shell.folder, env=shell.env, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.endswith(
        "agentfsm: cannot write to stdout (No space left on device): the result is incomplete\n"
    )


@pytest.mark.parametrize(("closed", "out"), [("<&- >&-", ""), ("<&- 2>&-", "7\n"), ("<&- >&- 2>&-", "")])
def test_streams_that_were_closed_before_the_start(shell, closed, out):
    """A run whose supervisor gave it no streams ends as it should; what it would have said is said to nobody."""
    line = f'exec "$0" -m agentfsm run app:shopper "Shop." --id shop {closed}'
    words = ["sh", "-c", line, sys.executable]
    done = subprocess.run(words, cwd=shell.folder, env=shell.env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, out), done.stderr
    assert "Traceback" not in done.stderr
    assert shell.load("shop").answer == "7"


def test_what_other_programs_print_is_no_result(shell):
    """A module and a tool may start some, which inherit the streams; what they write goes to stderr."""
    (shell.folder / "shells.py").write_text(
        "import os\nfrom agentfsm import Agent, tool\nfrom app import once\nos.system('echo imported')\n"
        "@tool\ndef look() -> str:\n    'Look.'\n    os.system('echo called')\n    return 'seen'\n"
        "agent = Agent(once('look'), tools=[look])\n",
        encoding="utf-8",
    )
    process = shell("run", "shells:agent", "Look.", "--json")
    assert json.loads(process.out)["output"] == "seen"
    assert {"imported", "called"} <= set(process.lines)


def test_an_encoding_that_lacks_the_character(shell):
    """A question mark stands for it."""
    shell.env["PYTHONIOENCODING"] = "ascii"
    (shell.folder / "wide.py").write_text(
        "from agentfsm import Agent\nfrom agentfsm.testing.models import ScriptedModel\n"
        "agent = Agent(ScriptedModel('Grüße \U0001f44d'))\n",
        encoding="utf-8",
    )
    assert shell("run", "wide:agent", "Grüß.").out == "Gr??e ?\n"


def test_the_console_script_and_the_module_are_the_same(shell):
    """`agentfsm` and `python -m agentfsm`."""
    script = Path(sys.executable).with_name("agentfsm")
    done = subprocess.run([script, "graph"], capture_output=True, text=True, check=True, env=shell.env)
    assert done.stdout == shell("graph").out


def test_what_is_suggested_can_be_called(shell):
    """Where the shell does not find `agentfsm`, the command line is named as it was called: it can be pasted."""
    shell.env["PATH"] = "/usr/bin:/bin"
    suggested = shell("submit", "app:adder", "2 + 2").err.splitlines()[-1].partition(": ")[2]
    assert suggested == f"{shlex.quote(sys.executable)} -m agentfsm worker app:adder"


def test_importing_the_command_line_is_cheap(shell):
    """`agentfsm --help` loads no vendor."""
    code = (
        "import sys, agentfsm.cli; heavy = {'openai', 'httpx', 'httpx2', 'rich', 'tiktoken', 'pydantic', 'structlog'}; "
        "print(*sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=shell.env)
    assert done.stdout.strip() == ""


def test_nobody_answers_a_pipe(here):
    """A terminal is somebody at both ends: stdin to answer, stderr to be asked."""
    assert not Terminal().can_ask
