"""`agentfsm chat`: a conversation at a terminal and through a pipe."""

import io
import signal
import sys

import pytest


@pytest.fixture
def pipe(here, monkeypatch):
    """A function that runs a command with a text as its input, and returns its stdout."""

    def run(*words, text, code=0):
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        return here(*words, code=code)

    return run


def runs(here, *words):
    return here.json("runs", *words)["runs"]


def test_a_conversation_through_a_pipe(here, pipe):
    """Each line is a message of one session: answers on stdout, the session and the way to continue on stderr."""
    out = pipe("chat", "app:storyteller", "--session", "s", text="One.\n\nTwo.\n/cost\n/nothing\n")
    err = here.err
    assert out == "Heard: One. (1)\nHeard: Two. (3)\n"
    assert "session s\n" in err
    assert "2 messages, " in err
    assert "There is no command /nothing" in err
    assert "agentfsm chat app:storyteller --session s" in err
    assert len(runs(here, "--session", "s")) == 2


def test_a_pipe_approves_nothing(here, pipe):
    """Piped input cannot approve a call: the chat exits with code 3 and prints the commands that decide."""
    assert pipe("chat", "app:storyteller", text="Pay.\ny\n", code=3) == ""
    assert "agentfsm approve " in here.err
    assert not (here.folder / "paid.txt").exists()


def test_a_flow_takes_no_messages(here):
    """The error says what to use instead."""
    here("chat", "app:pipeline", code=2)
    assert (
        "app:pipeline is a flow, which takes inputs by name and no messages: use agentfsm run app:pipeline" in here.err
    )
    here("chat", "app:adder", "--continue", code=2)
    assert "no session with the agent 'adder'" in here.err


@pytest.mark.parametrize("term", ["xterm", "dumb"])
def test_ctrl_c_ends_the_reply_and_not_the_chat(here, shell, terminal, term):
    """The text written so far stays on the screen, the history stays valid, and the agent answers the next message."""
    screen = terminal("chat", "app:storyteller", "--session", "s", TERM=term)
    screen.wait_for("/help lists the commands")
    screen.type("Tell.\r")
    screen.wait_for("upon")
    screen.popen.send_signal(signal.SIGINT)
    screen.wait_for("cancelled. /retry sends the message again.")
    screen.type("Next.\r")
    screen.wait_for("Heard: Next. (2)")
    (shell.folder / "told").touch()
    screen.type("/sessions\r")
    screen.wait_for("2 messages")
    shell.until(lambda: screen.type("\x04") or screen.popen.poll() is not None)  # what comes before the prompt is lost
    assert screen.end() == 0
    assert "To continue: " in screen.text
    assert [run["stop_reason"] for run in runs(here)] == ["completed", "cancelled"]


def test_a_killed_chat_continues_in_the_middle_of_a_reply(here, shell, terminal):
    """An approved payment was made before the kill: the next process finishes the same run, and pays nothing again."""
    screen = terminal("chat", "app:storyteller")
    screen.wait_for("/help lists the commands")
    screen.type("Pay.\r")
    screen.wait_for("May it run? [y/n/e/s]")
    screen.type("e\r")
    screen.wait_for('"cents": 5}')
    screen.type("\x7f" * len("5}") + "70}\r")
    shell.until((shell.folder / "returned").exists)
    shell.until(lambda: runs(here)[0]["state"] == "think")  # the result is durable, so no person is asked about it
    screen.popen.kill()
    screen.end()
    (shell.folder / "told").touch()
    screen = terminal("chat", "app:storyteller", "--continue")
    screen.wait_for("The last reply was not finished. It continues.")
    screen.wait_for("paid 70 to Bob")
    screen.wait_for("done: 2 turns")
    screen.type("/retry\r")
    screen.wait_for("The reply called pay, and a new one may do so again. Replace it? [y/n]")
    screen.type("n\r")
    screen.wait_for("> ", times=2)
    screen.type("/exit\r")
    assert screen.end() == 0
    assert (shell.folder / "paid.txt").read_text(encoding="utf-8") == "Bob 70\n"
    assert len(runs(here)) == 1


def test_an_answer_is_replaced_in_a_branch(here, pipe):
    """`/retry` answers the message again from before it; the earlier answer stays in its own session."""
    text = "One.\nTwo.\n/retry\nThree.\n/history\n"
    answers = pipe("chat", "app:storyteller", "--session", "s", text=text).splitlines()
    assert answers[:4] == ["Heard: One. (1)", "Heard: Two. (3)", "Heard: Two. (3)", "Heard: Three. (5)"]
    assert len(runs(here, "--session", "s")) == len(runs(here, "--session", "s~2")) == 2


def test_leaving_a_question_for_later(here, terminal):
    """Ctrl-D at a question leaves the reply unfinished; it is asked again by `/retry`, and `/cancel` ends it."""
    screen = terminal("chat", "app:storyteller", "--session", "s")
    screen.wait_for("/help lists the commands")
    screen.type("Pay.\r")
    screen.wait_for("May it run? [y/n/e/s]")
    screen.type("\x04")
    screen.wait_for("/retry goes on with the reply and asks again, and /cancel ends it.")
    screen.type("Hello?\r")
    screen.wait_for("and /cancel ends it.", times=2)
    screen.type("/retry\r")
    screen.wait_for("May it run? [y/n/e/s]", times=2)
    screen.type("\x04")
    screen.wait_for("and /cancel ends it.", times=3)
    screen.type("/cancel\r")
    screen.wait_for("failed, cancelled")
    screen.type("/exit\r")
    assert screen.end() == 0
    assert not (here.folder / "paid.txt").exists()
