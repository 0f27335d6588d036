"""A server of the handshake revision asks in the middle of a call: the person at the terminal answers inside it."""

import os
import signal
from pathlib import Path

import pytest

from tests.support import warm_python
from tests.support.terminal import Terminal

SEATS = Path(__file__).parents[1] / "support" / "seat_server.py"
AGENT = """
from agentfsm.mcp import MCPServer
desk = MCPServer.stdio({python!r}, {words!r}, name="desk", confirm=False)
seats = Agent(once("desk__reserve"), tools=[desk], name="seats")
"""
ASKED = "asks, and the call waits"


@pytest.fixture
def log(shell):
    """Where the server notes what it has done."""
    path = shell.folder / "log"
    with (shell.folder / "app.py").open("a", encoding="utf-8") as app:
        python, *words = warm_python.MCP.command(str(SEATS), str(path))
        app.write(AGENT.format(python=python, words=words))
    return path


@pytest.fixture
def screen(shell, log):
    """The function that runs the agent at a terminal, until its server asks."""
    started = []

    def run():
        started.append(Terminal(shell, "run", "app:seats", "Go."))
        started[-1].wait_for("Will you answer? [y/n]")
        assert ASKED in started[-1].text
        return started[-1]

    yield run
    for each in started:
        if each.popen.poll() is None:
            each.popen.kill()
            each.end()


def test_the_answer_is_given_inside_the_call(screen, log):
    """The seat is reserved once."""
    shown = screen()
    shown.type("y\n")
    shown.wait_for("name (string, required):")
    shown.type("Ann\n")
    assert shown.end() == 0
    assert "a seat for Ann" in shown.text
    assert log.read_text().split() == ["reserved", "answer:Ann"]


@pytest.mark.parametrize(("typed", "heard"), [("n\n", "decline"), ("\x04", "cancel")], ids=["no", "ctrl-d"])
def test_no_answer_is_given(screen, log, typed, heard):
    """The call goes on without."""
    shown = screen()
    shown.type(typed)
    assert shown.end() == 0
    assert log.read_text().split() == ["reserved", f"answer:{heard}"]


def test_ctrl_c_at_the_question(screen, log):
    """The call is cancelled, and its outcome is unknown: it is not made again by itself."""
    shown = screen()
    os.killpg(shown.popen.pid, signal.SIGINT)
    assert shown.end() == 130
    assert "agentfsm resume" in shown.text
    assert log.read_text().split()[0] == "reserved"
    assert "answer:Ann" not in log.read_text()


def test_without_a_terminal_the_question_is_refused(shell, log):
    """As for a worker; the reason is on the screen and in the result."""
    shell("run", "app:seats", "Go.")
    assert log.read_text().split() == ["reserved", "answer:cancel"]
