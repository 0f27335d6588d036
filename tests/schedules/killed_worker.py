"""A worker process that is killed at the moment when it has created the due run, and before it records that."""

import os
import signal
import sys

import anyio

from agentfsm import Agent
from agentfsm.stores import SQLiteStore
from agentfsm.testing import ScriptedModel


class Mortal(SQLiteStore):
    """Kills its process at the first write of a record."""

    async def write_record(self, *_args, **_options):
        os.kill(os.getpid(), signal.SIGKILL)


agent = Agent(ScriptedModel("done"), name="reporter", store=Mortal(sys.argv[1]))
anyio.run(agent.worker)
