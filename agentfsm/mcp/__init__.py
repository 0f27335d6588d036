"""MCP both ways: the tools of servers for an agent, and an agent or a registry as a server.

It needs the extra: `pip install agentfsm[mcp]`.
"""

from agentfsm.mcp.errors import MCPServerError
from agentfsm.mcp.server import MCPServer
from agentfsm.mcp.serving.offers import Argument, Prompt, Resource
from agentfsm.mcp.serving.service import MCPService
from agentfsm.mcp.trust.consent import Consent, Proposal, Wish
from agentfsm.mcp.trust.directory import Candidate, FoundServers, ServerDirectory
from agentfsm.mcp.trust.pins import MemoryPins, Pin, PinFile, Pins
from agentfsm.mcp.trust.sandbox import Sandbox

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
