"""Serve agents over HTTP: start runs, follow their events, decide on their calls. Needs the extra "serve"."""

from agentfsm.serve.access import APIKeys, Caller
from agentfsm.serve.app import GatewayApp, serve
from agentfsm.serve.rate_limits import RateLimits

__all__ = ["APIKeys", "Caller", "GatewayApp", "RateLimits", "serve"]
