"""Mistakes that a newcomer makes, and that would otherwise pass in silence or end in a riddle."""

import logging
import subprocess
import sys
import threading

import anyio
import pytest

from agentfsm import Agent, MisuseError, tool
from agentfsm.agents import validation
from agentfsm.memory import Memory
from agentfsm.stores import MemoryStore, SQLiteStore
from agentfsm.stores.threaded import lease_table
from agentfsm.testing import ScriptedModel, call, say


@pytest.fixture(autouse=True)
def said(caplog):
    """The warnings, each of which is logged once in a process."""
    validation.warn_once.cache_clear()
    caplog.set_level(logging.WARNING)
    return caplog


MISTAKES = """
import threading, time
from agentfsm import Agent, MisuseError, tool
from agentfsm.memory import Memory
from agentfsm.stores import SQLiteStore
from agentfsm.stores.threaded import lease_table
from agentfsm.testing import ScriptedModel, call, say

lease_table.BLOCKED_LOG_S, lease_table.PROBE_INTERVAL_S = 0.02, 0.01
noticed = threading.Event()
log_block = lease_table.LeaseOwner._log_block
lease_table.LeaseOwner._log_block = lambda owner: (log_block(owner), noticed.set())

@tool(read_only=True)
async def nap() -> str:
    noticed.wait(30)
    return "awake"

model = ScriptedModel(say("", call("nap")), "Done.")
Agent(model, tools=[nap], memory=Memory(), name="diary", store=SQLiteStore("runs.db")).run_sync("go")
"""


def test_a_program_without_logging_reads_them_on_stderr(tmp_path):
    """Each mistake is one line there, since nobody else shows it to a newcomer."""
    done = subprocess.run(
        [sys.executable, "-c", MISTAKES], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True
    )
    assert [line[:40] for line in sorted(done.stderr.splitlines())] == [
        "agentfsm: a run of agent diary has no us",
        "agentfsm: the event loop stands still, b",
        "agentfsm: tool nap has no description, s",
    ]


def test_an_option_of_another_framework():
    """The error names the field that was meant."""
    with pytest.raises(TypeError, match="no field 'system_prompt'; did you mean 'instructions'"):
        Agent(ScriptedModel("x"), system_prompt="Be brief.")
    with pytest.raises(TypeError, match="no field 'instrctions'; did you mean 'instructions'"):
        Agent(ScriptedModel("x"), instrctions="Be brief.")


async def test_a_tool_without_a_docstring(said):
    """It is said once that the model knows only its name."""

    @tool(read_only=True)
    def find(word: str) -> str:
        return word

    @tool(read_only=True)
    def look(word: str) -> str:
        """Look a word up."""
        return word

    for _ in range(2):
        await Agent(ScriptedModel("x"), tools=[find, look], store=MemoryStore()).run("go")
    assert said.messages == [
        "tool find has no description, so the model knows only its name: give the function a docstring, or description="
    ]


async def test_a_memory_without_a_user(said, tmp_path):
    """It is said once that the memory has no part in the run; with a user nothing is said."""
    agent = Agent(
        ScriptedModel("x", "x"), memory=Memory(str(tmp_path / "memory.db")), name="diary", store=MemoryStore()
    )
    for _ in range(2):
        agent.start("go")
    agent.start("go", user="ann")
    [told] = said.messages
    assert told.startswith("a run of agent diary has no user, so its memory is neither searched nor filled: give user=")


async def test_an_async_tool_that_blocks(said, monkeypatch, tmp_path):
    """The warning of the loop watcher names the tool and the remedy."""
    monkeypatch.setattr(lease_table, "BLOCKED_LOG_S", 0.02)
    monkeypatch.setattr(lease_table, "PROBE_INTERVAL_S", 0.01)
    noticed = threading.Event()
    handler = logging.Handler()
    handler.emit = lambda record: noticed.set() if "tool nap blocks" in record.getMessage() else None
    logging.getLogger("agentfsm.stores").addHandler(handler)

    @tool(read_only=True)
    async def nap() -> str:
        """Block the loop until that is noticed."""
        while not noticed.wait(1.0):
            await anyio.lowlevel.checkpoint()
        return "awake"

    model = ScriptedModel(say("", call("nap")), "Done.")
    async with Agent(model, tools=[nap], store=SQLiteStore(tmp_path / "r.db")) as agent:
        await agent.run("go")
    logging.getLogger("agentfsm.stores").removeHandler(handler)
    assert any("make it a plain `def`, which runs in a thread" in text for text in said.messages)


def test_an_option_of_a_tool_that_is_misspelt_is_refused():
    """A safety flag that is not heard would be worse than none."""
    with pytest.raises(MisuseError, match=r"tool 'look' has no option readonly=: did you mean read_only=\?"):

        @tool(readonly=True)
        def look() -> str:
            """Look."""
            return ""
