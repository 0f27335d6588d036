"""Sandboxes for tools: their functions run in processes of their own, with limits and without our rights."""

from agentfsm.sandbox.function_sandbox import Sandbox
from agentfsm.sandbox.levels import Availability, Isolation, find_isolation

__all__ = ["Availability", "Isolation", "Sandbox", "find_isolation"]
