"""Who presses Ctrl-C ends a program as any other: by KeyboardInterrupt, on trio too, which wraps it in a group."""

import os

import pytest

from tests.support.warm_python import WarmPython

PYTHON = WarmPython("-W", "error")

PROGRAM = """
import os, signal, sys
import anyio
from agentfsm import Agent, tool
from agentfsm.ports import Claim
from agentfsm.stores import MemoryStore
from agentfsm.testing import ScriptedModel, call, say

# Who was started in the background of a shell ignores it, and so would we.
signal.signal(signal.SIGINT, signal.default_int_handler)

def press():
    os.kill(os.getpid(), signal.SIGINT)

class Pressing(MemoryStore):
    async def claim(self, agent, *, limit, durability="full", suspects=False, releases=None):
        press()
        return Claim()

@tool(read_only=True)
async def nap(at: int) -> str:
    "Nap."
    if at:
        press()
    await anyio.sleep(3600)

agent = Agent(ScriptedModel(say("", call("nap", at=0), call("nap", at=1))), tools=[nap], store=Pressing())
caller = Agent(ScriptedModel(say("", call("child", query="x"))), tools=[agent.as_tool(name="child", description="x")])

async def stream():
    async with agent.stream("x") as events:
        async for _ in events:
            pass

what = {"run": lambda: agent.run("x"), "worker": agent.worker, "stream": stream, "below": lambda: caller.run("x")}
try:
    anyio.run(what[sys.argv[1]], backend=sys.argv[2])
except KeyboardInterrupt as error:
    print(type(error).__name__)
"""


@pytest.mark.parametrize("what", ["run", "worker", "stream", "below"])
def test_ctrl_c_is_a_keyboard_interrupt(what, anyio_backend_name, tmp_path):
    """Whatever is under way: `except KeyboardInterrupt` would pass a group by."""
    words = ("-c", PROGRAM, what, anyio_backend_name)
    assert PYTHON.run(words, tmp_path, dict(os.environ)) == (0, "KeyboardInterrupt\n", "")
