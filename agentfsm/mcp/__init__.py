"""MCP both ways: the tools of servers for an agent, and an agent or a registry as a server.

It needs the extra: `pip install agentfsm[mcp]`.
"""

from agentfsm.mcp.errors import MCPServerError
from agentfsm.mcp.serve import MCPService
from agentfsm.mcp.serve_offers import Argument, Prompt, Resource
from agentfsm.mcp.server import MCPServer

__all__ = ["Argument", "MCPServer", "MCPServerError", "MCPService", "Prompt", "Resource"]
