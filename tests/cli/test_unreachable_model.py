"""A model server on this machine that does not run: the terminal says so at the first attempt, and what to start."""

import re
import socket

AGENT = """
from agentfsm import Agent, Limits
from agentfsm.models import OpenAIChat

limits = Limits(errors=1, model_retries=2, retry_wait_s=0.01)
agent = Agent(OpenAIChat("local", base_url="http://localhost:{port}/v1", api_key="x"), limits=limits)
"""


def test_the_first_attempt_says_what_to_start(here):
    """The first line has the address, the reason, the next step and the wait; the next has no advice."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (here.folder / "away.py").write_text(AGENT.format(port=port), encoding="utf-8")
    here.run("away:agent", code=1)
    first, second = [line for line in here.err.splitlines() if "Retrying" in line]
    reached = rf"warning: Cannot connect to 'local' at http://localhost:{port}/v1 \(connection refused\)\."
    advice = r"No server listens there: start the model server \(.*\), or correct base_url\."
    assert re.fullmatch(rf"{reached} {advice} Retrying in \d\.\d s\.", first)
    assert re.fullmatch(rf"{reached} Retrying in \d\.\d s\.", second)
