"""At a terminal: the live tree, and questions that are answered there. A pseudo terminal stands for one."""

import os
import pty
import re
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from agentfsm import Pending, PendingKind
from agentfsm.cli import terminal as cli_terminal
from agentfsm.cli.session.prompts import ask_together, build_prompter
from tests.support.command_line import HANG_S


def effects(shell):
    return (shell.folder / "paid.txt").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("term", ["xterm", "dumb"])
def test_a_yes_at_the_terminal_lets_the_call_run(shell, terminal, term):
    """The question shows exactly what would be done, hidden characters spelt out; live or in plain lines."""
    screen = terminal("run", "app:payer", "Pay.", TERM=term)
    screen.wait_for("May it run? [y/n/e/s]")
    assert "pay (t1.0) asks for your approval" in screen.text
    assert '"account": "17\\u202e",' in screen.text
    assert '"cents": 5' in screen.text
    assert not (shell.folder / "paid.txt").exists()
    screen.type("?\n")
    screen.wait_for("May it run? [y/n/e/s]", times=2)
    assert "Ctrl-D  decide later: the run waits" in screen.text
    screen.type("y\n")
    assert screen.end() == 0
    assert "paid 5 to 17" in screen.text
    assert len(effects(shell)) == 1
    assert ("\x1b[" in screen.raw) == (term == "xterm")


@pytest.mark.parametrize("last", ["y", "n"])
def test_a_rule_for_the_session_is_shown_before_it_is_allowed(last):
    """An argument that the call has not is asked again; only a yes to the rule approves the call with it."""
    item = Pending(kind=PendingKind.APPROVAL, run_id="r", call_id="t1.0", tool="pay", arguments=PAID, digest="d")
    shown, given, decided = [], iter(["s", "amount", "to, n", last]), []
    screen = SimpleNamespace(
        err=shown.append, ask=lambda _: next(given), ask_choice=lambda _, choices, _help="": choices.get(next(given))
    )
    submission = build_prompter(screen, "r")(item)
    assert any(line.startswith('Rule: allow(pay, to="Ann", n=1)\n') for line in shown)
    if submission is not None:
        submission(SimpleNamespace(approve=lambda *words, **values: decided.append((words, values["allow"]))))
    assert decided == ([(("r", "t1.0"), ["to", "n"])] if last == "y" else [])


PAID = {"to": "Ann", "n": 1}


@pytest.mark.parametrize(
    ("typed", "approved", "rejected", "left"),
    [
        (["y"], [0, 1, 2], [], []),
        (["n", "no"], [], [0, 1, 2], []),
        (["s", "4", "1, 3"], [0, 2], [], [1]),
        (["o"], [], [], [0, 1, 2]),
        (["s", None], [], [], []),
        ([None], [], [], []),
    ],
)
def test_calls_of_one_tool_are_asked_about_together(typed, approved, rejected, left):
    """Each is shown to the letter; all, none or some of them may run, and the others are asked about one by one."""
    items = [
        Pending(kind=PendingKind.APPROVAL, run_id="r", call_id=f"t1.{n}", tool="pay", arguments={"n": n})
        for n in range(3)
    ]
    shown, given, decided = [], iter(typed), {"approve": (), "reject": ()}
    screen = SimpleNamespace(
        err=shown.append, ask=lambda _: next(given), ask_choice=lambda _, choices, _help="": choices.get(next(given))
    )
    submission, rest = ask_together(screen, items, "r")
    if submission is not None:
        submission(SimpleNamespace(decide=lambda **values: decided.update(values)))
    assert [f'{{\n  "n": {n}\n}}' in shown for n in range(3)] == [True] * 3
    assert [list(each) for each in (decided["approve"], decided["reject"], rest)] == [
        [items[n] for n in chosen] for chosen in (approved, rejected, left)
    ]


def test_a_no_at_the_terminal_is_told_to_the_model(shell, terminal):
    """With the reason, if one is given."""
    screen = terminal("run", "app:payer", "Pay.")
    screen.wait_for("May it run? [y/n/e/s]")
    screen.type("n\n")
    screen.wait_for("Reason, for the model")
    screen.type("too much\n")
    assert screen.end() == 0
    assert "not run: a person rejected it (too much)" in screen.text
    assert not (shell.folder / "paid.txt").exists()


def test_what_was_typed_before_the_question_is_no_answer(shell, terminal):
    """A yes that was typed ahead approves nothing: the question waits for one of its own."""
    screen = terminal("run", "app:payer", "Pay.")
    screen.type("y\n")
    screen.wait_for("May it run? [y/n/e/s]")
    screen.type("n\n")
    screen.wait_for("Reason, for the model")
    screen.type("too early\n")
    assert screen.end() == 0
    assert not (shell.folder / "paid.txt").exists()


def test_a_yes_is_to_what_was_shown(here, terminal):
    """A tool that has changed since is asked about again, with a word on why."""
    screen = terminal("run", "app:payer", "Pay.", "--id", "p")
    screen.wait_for("May it run? [y/n/e/s]")
    app = here.folder / "app.py"
    was = app.read_text(encoding="utf-8")
    app.write_text(was.replace('"""Pay."""', '"""Pay at once."""'), encoding="utf-8")
    here("resume", "p", code=3)  # by a worker with the new tool, which asks anew
    screen.type("y\n")
    screen.wait_for("May it run? [y/n/e/s]", times=2)
    assert "t1.0 was not approved: it has changed since it was shown" in screen.text
    assert not (here.folder / "paid.txt").exists()
    screen.type("y\n")
    assert screen.end() == 0


def test_a_pause_while_the_person_thinks(here, terminal):
    """It is kept: `resume` ends the pause that it found, and not one that comes later."""
    here("run", "app:payer", "Pay.", "--id", "p", code=3)
    here("pause", "p", "--by", "ann")
    screen = terminal("resume", "p")
    screen.wait_for("May it run? [y/n/e/s]")
    here("pause", "p", "--by", "bob")
    screen.type("y\n")
    assert screen.end() == 3
    assert "paused by bob" in screen.text
    assert not (here.folder / "paid.txt").exists()
    assert here("resume", "p") == "paid 5 to 17\n"


def test_a_question_is_answered_at_the_terminal(terminal):
    """What is typed is the answer; an empty line is none, and the question stays."""
    screen = terminal("run", "app:asker", "Ask.")
    screen.wait_for("Your answer:")
    assert "You are asked (t1.0):\nWhich colour?\nNo answer until " in screen.text
    screen.type("\n")
    screen.wait_for("Your answer:", times=2)
    screen.type("blue\n")
    assert screen.end() == 0
    assert screen.text.rstrip().endswith("blue")


def test_a_result_from_outside_may_wait(terminal):
    """A tool that asks no question shows what it was given, to the letter; Ctrl-D leaves it for later."""
    screen = terminal("run", "app:clerk", "Look.")
    screen.wait_for("Your answer:")
    assert "look_up (t1.0) needs its result from outside. Its exact arguments:" in screen.text
    assert '"question": "17\\u202e"' in screen.text
    screen.type("\x04")
    assert screen.end() == 3
    assert screen.text.count("Your answer:") == 1
    assert re.search(r"agentfsm answer \w+ t1\.0 TEXT\n", screen.text)


def test_what_a_sub_agent_asks_is_answered_here(shell, terminal):
    """The question says what it will do, hidden characters spelt out, and whose run asks; the caller goes on."""
    screen = terminal("run", "app:bank", "Pay.", "--id", "b")
    screen.wait_for("May it run? [y/n/e/s]")
    assert "transfer (t1.0 of run b.t1.0) asks for your approval." in screen.text
    assert 'Its own description: "Move 5 cents to Bob. \\u001b[31mred' in screen.text
    screen.type("y\n")
    assert screen.end() == 0
    assert effects(shell) == ["Bob 5"]
    assert "teller, run b.t1.0: 2 turns" in screen.text


def test_what_a_sub_agent_asks_may_wait(terminal):
    """Ctrl-D leaves it for later, and it is not asked again; the commands name both runs."""
    screen = terminal("run", "app:bank", "Pay.", "--id", "b")
    screen.wait_for("May it run? [y/n/e/s]")
    screen.type("\x04")
    assert screen.end() == 3
    assert "agentfsm approve b.t1.0 t1.0" in screen.text
    assert "then: agentfsm resume b\n" in screen.text
    assert screen.text.count("May it run?") == 1


def test_the_live_tree_shows_how_far_a_sub_agent_is(shell, terminal):
    """Below its call, while it runs."""
    screen = terminal("run", "app:sleeper", "Wait.")
    screen.wait_for("waiter, turn 1 of 3")
    os.killpg(screen.popen.pid, signal.SIGINT)
    assert screen.end() == 130


def test_ctrl_d_leaves_it_for_later(shell, terminal):
    """The run waits, and the commands are printed."""
    screen = terminal("run", "app:payer", "Pay.")
    screen.wait_for("May it run? [y/n/e/s]")
    screen.type("\x04")
    assert screen.end() == 3
    assert "agentfsm approve" in screen.text


def test_ctrl_c_at_the_question_leaves_the_run(shell, terminal):
    """Nothing is decided."""
    screen = terminal("run", "app:payer", "Pay.")
    screen.wait_for("May it run? [y/n/e/s]")
    os.killpg(screen.popen.pid, signal.SIGINT)
    assert screen.end() == 130
    assert "To continue: agentfsm resume" in screen.text
    assert "Traceback" not in screen.text


def test_ctrl_c_at_the_question_is_noticed_whoever_hears_it(monkeypatch):
    """A signal that another thread takes, or that comes right before the read, interrupts no read: it is awaited."""
    ours, theirs = pty.openpty()
    waits, over = threading.Event(), threading.Event()
    typed = []  # what only a line that was typed would have brought to light

    def fileno():
        waits.set()
        return theirs

    def interrupt():
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        if waits.wait(HANG_S):
            os.kill(os.getpid(), signal.SIGINT)
        if not over.wait(HANG_S):
            typed.append(os.write(ours, b"\n"))

    stdin = os.fdopen(theirs, closefd=False)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(fileno=fileno, readline=stdin.readline))
    thread = threading.Thread(target=interrupt)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            cli_terminal.Terminal().ask("May it run?")
        over.set()
        thread.join()
        assert not typed
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        stdin.close()
        os.close(ours)
        os.close(theirs)


def test_ctrl_c_while_it_runs_leaves_the_run(shell, terminal):
    """The live tree is taken off the screen first."""
    screen = terminal("run", "app:waiter", "Wait.")
    screen.wait_for("running waiting")
    os.killpg(screen.popen.pid, signal.SIGINT)
    assert screen.end() == 130
    assert "To continue: agentfsm resume" in screen.text
    assert screen.raw.rindex("\x1b[?25h") > screen.raw.rindex("\x1b[?25l")  # the cursor is back


@pytest.mark.parametrize(
    ("typed", "answer", "count"),
    [
        (("done", "it flew"), "it flew", 1),
        (("f", "it fell"), "it fell", 1),
        (("rerun",), "launched again", 2),
        (("later",), "agentfsm settle", 1),
    ],
)
def test_what_became_of_it_is_asked(shell, terminal, typed, answer, count):
    """After a kill in mid-call the person is told what is not known, and asked."""
    process = shell.start("run", "app:launcher", "Launch.")
    process.wait_for("t1.0 launch()")
    shell.until((shell.folder / "launched.txt").exists)
    process.kill()
    process.end()
    screen = terminal("resume", process.run_id)
    screen.wait_for("How did it end? [done/failed/rerun/later]")
    assert "It is unknown whether it took effect" in screen.text
    screen.type(f"{typed[0]}\n")
    for question, text in zip(("it return?", "it fail?"), typed[1:], strict=False):
        screen.wait_for(question if typed[0] == "done" else "How did it fail?")
        screen.type(f"{text}\n")
    assert screen.end() == (3 if typed == ("later",) else 0)
    assert answer in screen.text
    assert len((shell.folder / "launched.txt").read_text(encoding="utf-8").splitlines()) == count


def test_hostile_text_at_a_terminal(terminal):
    """In the live tree too: nothing to act on but what rich itself writes, and no markup read in it."""
    screen = terminal("run", "app:hostile", "Shout.")
    assert screen.end() == 0
    assert "red]0;title abc zero tag [/x] [bold]" in screen.text
    assert not set(screen.text) & set("\x1b\x07\u202e\u202c\u200b\U000e0041")
    assert "\x1b]" not in screen.raw


def test_the_live_tree_prints_closed_turns_once(terminal):
    """They scroll away; only the open turn is redrawn."""
    screen = terminal("run", "app:shopper", "Shop.")
    assert screen.end() == 0
    kept = screen.raw.rpartition("\x1b[?25h")[0]
    assert kept.count("done in") >= 1
    assert "done: 2 turns" in screen.text
    assert screen.text.rstrip().endswith("7")


def test_a_terminal_to_watch_but_none_to_answer(shell, terminal):
    """With stdin from elsewhere nobody is asked."""
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "agentfsm", "run", "app:payer", "Pay."],
        cwd=shell.folder,
        env=shell.env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=slave,
    )
    os.close(slave)
    seen = b""
    try:
        while data := os.read(master, 65536):
            seen += data
    except OSError:  # the other end is closed
        pass
    os.close(master)
    assert process.wait(HANG_S) == 3
    assert b"agentfsm approve" in seen
