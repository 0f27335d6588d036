"""MCP both ways: the tools of servers for an agent, and an agent or a registry as a server.

It needs the extra: `pip install agentfsm[mcp]`.
"""

from agentfsm.mcp.consent import Consent, Proposal, Wish
from agentfsm.mcp.directory import Candidate, FoundServers, ServerDirectory
from agentfsm.mcp.errors import MCPServerError
from agentfsm.mcp.pins import MemoryPins, Pin, PinFile, Pins
from agentfsm.mcp.sandbox import Sandbox
from agentfsm.mcp.serve import MCPService
from agentfsm.mcp.serve_offers import Argument, Prompt, Resource
from agentfsm.mcp.server import MCPServer

__all__ = [
    "Argument",
    "Candidate",
    "Consent",
    "FoundServers",
    "MCPServer",
    "MCPServerError",
    "MCPService",
    "MemoryPins",
    "Pin",
    "PinFile",
    "Pins",
    "Prompt",
    "Proposal",
    "Resource",
    "Sandbox",
    "ServerDirectory",
    "Wish",
]
