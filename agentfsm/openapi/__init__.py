"""Tools from an OpenAPI description: each operation of an HTTP API becomes a tool."""

from agentfsm.openapi.api_tools import APIError, APITools, tools_from_openapi

__all__ = ["APIError", "APITools", "tools_from_openapi"]
