"""What `import agentfsm.mcp` loads: what calls servers, and not what serves, nor the command line."""

import subprocess
import sys

from tests.support.mcp_calls import environment

PROGRAM = """
import sys
import agentfsm.mcp

def loaded(*parts):
    return sorted({part for part in parts for name in sys.modules if name.startswith(part)})

assert not loaded("agentfsm.cli", "agentfsm.mcp.server."), loaded("agentfsm.cli", "agentfsm.mcp.server.")
assert all(hasattr(agentfsm.mcp, name) for name in agentfsm.mcp.__all__)
assert not hasattr(agentfsm.mcp, "Nothing")
assert not loaded("agentfsm.cli")
"""


def test_what_serves_is_loaded_when_it_is_asked_for():
    """Its names are there all the same, and it does without the command line."""
    subprocess.run([sys.executable, "-c", PROGRAM], env=environment(), check=True)
