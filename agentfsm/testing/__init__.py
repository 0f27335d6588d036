"""The testing kit: models that follow a script, virtual time, a local server that speaks OpenAI's wire.

`agentfsm.testing.conformance`, the kit for stores of your own, is imported by itself, since it needs pytest.
"""

from agentfsm.testing.clock import VirtualClock, run_virtual
from agentfsm.testing.fake_llm.script import Say
from agentfsm.testing.fake_llm.server import LocalServer
from agentfsm.testing.models import FunctionModel, ScriptedModel, call, fail, raw_call, say

__all__ = [
    "FunctionModel",
    "LocalServer",
    "Say",
    "ScriptedModel",
    "VirtualClock",
    "call",
    "fail",
    "raw_call",
    "run_virtual",
    "say",
]
