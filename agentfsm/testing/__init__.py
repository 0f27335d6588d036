"""Testing kit: scripted models, virtual time, and a local server that imitates model providers.

`agentfsm.testing.conformance`, the test suite for custom stores, is imported separately, since it needs pytest.
"""

from agentfsm.testing.clock import VirtualClock, run_virtual
from agentfsm.testing.embedders import HashEmbedder
from agentfsm.testing.fake_llm.script import WireReply
from agentfsm.testing.fake_llm.server import LocalServer
from agentfsm.testing.models import FunctionModel, ScriptedModel, call, fail, raw_call, say

__all__ = [
    "FunctionModel",
    "HashEmbedder",
    "LocalServer",
    "ScriptedModel",
    "VirtualClock",
    "WireReply",
    "call",
    "fail",
    "raw_call",
    "run_virtual",
    "say",
]
