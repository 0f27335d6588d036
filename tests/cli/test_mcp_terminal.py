"""MCP servers at a terminal: a person is shown what they are before anything starts, and asked."""

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from tests.support.terminal import Terminal

SERVER = Path(__file__).with_name("plain_server.py.txt")
NOTE = {"name": "note", "description": "Note it.", "inputSchema": {"type": "object", "properties": {}}}
QUESTION = "Do you approve this? [y/n]"
DETAILS = "Do you approve this? [y/n, d: details]"


@pytest.fixture
def screen(shell):
    """The function that runs an agent with a server of notes at a terminal, in a folder that is its home."""
    (shell.folder / "server.py").write_text(SERVER.read_text(encoding="utf-8"), encoding="utf-8")
    (shell.folder / "tools.json").write_text(json.dumps([NOTE]), encoding="utf-8")
    found = {"notes": {"command": sys.executable, "args": ["server.py"], "confirm": False}}
    (shell.folder / "servers.json").write_text(json.dumps({"mcpServers": found}), encoding="utf-8")
    with (shell.folder / "app.py").open("a", encoding="utf-8") as app:
        app.write('\nscribe = Agent(once("notes__note"), name="scribe")\n')
    started = []

    def run():
        words = ("run", "app:scribe", "Note.", "--mcp", "servers.json")
        started.append(Terminal(shell, *words, HOME=str(shell.folder)))
        started[-1].wait_for(QUESTION)
        assert f"command:   {sys.executable} server.py" in started[-1].text
        return started[-1]

    yield run
    for each in started:
        if each.popen.poll() is None:
            each.popen.kill()
            each.end()


def test_two_times_yes_and_the_run_begins(screen):
    """To how it is started, and to its tools; then the agent uses them."""
    shown = screen()
    shown.type("y\n")
    shown.wait_for(DETAILS)
    assert "  note(): Note it." in shown.text
    assert '"description": "Note it."' not in shown.text
    shown.type("d\n")
    shown.wait_for(DETAILS, times=2)
    assert '"description": "Note it."' in shown.text
    assert "run " not in shown.text.splitlines()
    shown.type("yes\n")
    assert shown.end() == 0
    assert "note was given {}" in shown.text


def test_a_no_starts_nothing(screen, shell):
    """There is no process and no run; the command that asks again is told."""
    shown = screen()
    shown.type("n\n")
    assert shown.end() == 1
    assert "'notes' was not started" in shown.text
    assert "agentfsm mcp approve" in shown.text
    assert not (shell.folder / ".agentfsm" / "runs.db").exists()


def test_ctrl_c_at_the_question(screen, shell):
    """It ends at once, without another line typed."""
    shown = screen()
    os.killpg(shown.popen.pid, signal.SIGINT)
    assert shown.end() == 130
    assert not (shell.folder / ".agentfsm" / "runs.db").exists()
