"""Sandboxes for tools: their functions run in processes of their own, with few rights. Tools for code and for files."""

from agentfsm.sandbox.file_tools import build_file_tools
from agentfsm.sandbox.function_sandbox import Sandbox, build_python_tool
from agentfsm.sandbox.levels import Availability, Isolation, find_isolation

__all__ = ["Availability", "Isolation", "Sandbox", "build_file_tools", "build_python_tool", "find_isolation"]
