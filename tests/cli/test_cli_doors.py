"""The same checks for what is said at the command line as at the doors of a server."""

import argparse
import io
import json
import sys

import anyio

from agentfsm.cli.command_table import COMMANDS
from agentfsm.cli.parser import build_parser
from agentfsm.cli.terminal import Terminal
from agentfsm.stores import SQLiteStore
from tests.support.doors import ESCAPED, HIDDEN, TOO_LONG, find_raw, read_store

# Commands with a text of these names that no run keeps: the arguments of an approved call are passed exactly, `load`
# only measures, and the others are searches, files and names.
SILENT = {
    "approve",
    "load",
    "runs",
    "memory search",
    "index search",
    "mcp prompt",
    "eval gate",
    "eval report",
    "eval calibrate",
}
SAYING = {
    "run": ("run", "app:adder", HIDDEN),
    "submit": ("submit", "app:adder", HIDDEN),
    "fork": ("fork", "DONE", "--at", "0", "--prompt", HIDDEN),
    "send": ("send", "PATIENT", HIDDEN),
    "reject": ("reject", "PAYER", "t1.0", "--message", HIDDEN),
    "answer": ("answer", "ASKER", "t1.0", HIDDEN),
    "settle": ("settle", "LOSER", "t1.0", "--result", HIDDEN),
    "settle as failed": ("settle", "LOSER 2", "t1.0", "--failed", HIDDEN),
    "pause": ("pause", "PATIENT", "--message", HIDDEN),
    "cancel": ("cancel", "PATIENT", "--message", HIDDEN),
    "feedback": ("feedback", "DONE", "--rating", "1", "--comment", HIDDEN),
    "schedule add": ("schedule", "add", "sums", "app:adder", HIDDEN, "--cron", "0 3 * * *"),
}
TEXTS = {"prompt", "text", "message", "result", "failed", "comment", "query", "arguments"}
LOSER = '''

@tool
def lose():
    """Break off."""
    raise OutcomeUnknownError("the line is dead")


loser = Agent(once("lose"), tools=[lose], name="loser")
'''


def list_commands(parser, path=""):
    """Yield the commands that take a text for a run."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                yield from list_commands(inner, f"{path} {name}".strip())
        elif action.dest in TEXTS and action.nargs != 0 and not path.startswith("prompts"):
            yield path


def read_texts(here):
    async def read():
        store = SQLiteStore(here.folder / ".agentfsm" / "runs.db")
        try:
            return await read_store(store)
        finally:
            await store.aclose()

    return anyio.run(read)


def test_each_command_that_says_something_is_listed():
    """A new one needs its line here, and so the checks."""
    assert set(list_commands(build_parser(*COMMANDS))) - SILENT == {name.partition(" as ")[0] for name in SAYING}


def test_what_is_typed_or_piped(here, monkeypatch):
    """Hidden characters are read as their escapes, in every text; what is too long is refused."""
    app = here.folder / "app.py"
    app.write_text(f"{app.read_text('utf-8')}\nfrom agentfsm import OutcomeUnknownError\n{LOSER}", "utf-8")
    ids = {name: here.run(f"app:{name.lower()}", code=3) for name in ("PATIENT", "PAYER", "ASKER", "LOSER")}
    ids |= {"LOSER 2": here.run("app:loser", code=3), "DONE": here.run("app:adder")}
    for place, (name, words) in enumerate(SAYING.items()):
        said = [ids.get(each, each).replace(HIDDEN, f"door {place}: {HIDDEN}.") for each in words]
        here(*said)
        if name == "schedule add":
            here("schedule", "backfill", "sums", "--from", "2026-03-28", "--to", "2026-03-29")
        if name == "run":
            here(*[TOO_LONG if HIDDEN in each else each for each in said], code=2)
            assert "1,000,000 characters at most" in here.err
    roles = [("user", "user"), ("assistant", "assistant"), ("system", "system")]
    history = [{"role": role, "content": f"{name}: {HIDDEN}."} for role, name in roles]
    (here.folder / "history.json").write_text(json.dumps(history), "utf-8")
    here("run", "app:adder", "go on", "--messages", "history.json")
    picture = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://10.0.0.1/a.png"}}]}]
    (here.folder / "history.json").write_text(json.dumps(picture), "utf-8")
    here("run", "app:adder", "go on", "--messages", "history.json", code=2)
    assert "https://" in here.err
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"chat: {HIDDEN}.\n"))
    here("chat", "app:storyteller")
    texts = read_texts(here)
    assert find_raw([text for text in texts if "Which colour?" not in text]) == []
    for place, name in enumerate(SAYING):
        assert any(f"door {place}: {ESCAPED}." in text for text in texts), name
    for name in ("user", "assistant", "system", "chat"):
        assert any(f"{name}: {ESCAPED}." in text for text in texts), name


def test_a_chat_with_a_run_that_waits_for_input(here, monkeypatch):
    """The next message is its input."""
    lines = iter(["Go.", f"late: {HIDDEN}.", None])
    monkeypatch.setattr(Terminal, "can_ask", True)
    monkeypatch.setattr(Terminal, "can_edit", False)
    monkeypatch.setattr(Terminal, "ask", lambda _terminal, _text: next(lines))
    here("chat", "app:patient")
    texts = read_texts(here)
    assert find_raw(texts) == []
    assert f"late: {ESCAPED}." in texts
