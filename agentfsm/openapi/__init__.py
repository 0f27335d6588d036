"""Tools from an OpenAPI description: each operation of an HTTP API becomes a tool."""

from agentfsm.openapi.api_tools import APIError, tools_from_openapi

__all__ = ["APIError", "tools_from_openapi"]
