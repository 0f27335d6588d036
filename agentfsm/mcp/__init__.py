"""MCP both ways: the tools of servers for an agent, and an agent or a registry as a server.

It needs the extra: `pip install agentfsm[mcp]`.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from agentfsm._lib.pins import MemoryPins, Pin, PinFile, Pins, PinsError
from agentfsm._lib.plugins import require_extra

with require_extra("agentfsm.mcp", "mcp", "mcp", "httpcore2", "uvicorn"):
    from agentfsm.logins.oauth_settings import OAuth
    from agentfsm.logins.token_store import KeyringTokens, MemoryTokens, TokenFile, TokenStore
    from agentfsm.mcp.client.directory import Candidate, FoundServers, ServerDirectory
    from agentfsm.mcp.client.mcp_server import MCPServer
    from agentfsm.mcp.connection.server_sandbox import ServerSandbox
    from agentfsm.mcp.errors import LoginRequiredError, MCPServerError
    from agentfsm.mcp.trust.consent import Consent, Proposal, Wish

if TYPE_CHECKING:
    from agentfsm.mcp.server.resources import Argument, Prompt, Resource
    from agentfsm.mcp.server.service import ClientLimits, MCPService

__all__ = [
    "Argument",
    "Candidate",
    "ClientLimits",
    "Consent",
    "FoundServers",
    "KeyringTokens",
    "LoginRequiredError",
    "MCPServer",
    "MCPServerError",
    "MCPService",
    "MemoryPins",
    "MemoryTokens",
    "OAuth",
    "Pin",
    "PinFile",
    "Pins",
    "PinsError",
    "Prompt",
    "Proposal",
    "Resource",
    "ServerDirectory",
    "ServerSandbox",
    "TokenFile",
    "TokenStore",
    "Wish",
]


_SERVER_MODULES = {
    "Argument": "resources",
    "ClientLimits": "service",
    "MCPService": "service",
    "Prompt": "resources",
    "Resource": "resources",
}


def __getattr__(name: str) -> object:
    if name in _SERVER_MODULES:  # loaded on first use: a client of servers does not need the modules that serve
        with require_extra(f"agentfsm.mcp.{name}", "mcp", "mcp", "httpcore2", "uvicorn"):
            return getattr(import_module(f"agentfsm.mcp.server.{_SERVER_MODULES[name]}"), name)
    raise AttributeError(f"module 'agentfsm.mcp' has no attribute {name!r}")
