"""MCP both ways: the tools of servers for an agent, and an agent or a registry as a server.

It needs the extra: `pip install agentfsm[mcp]`.
"""

from agentfsm.mcp.errors import MCPServerError
from agentfsm.mcp.server import MCPServer

__all__ = ["MCPServer", "MCPServerError"]
