"""Serve agents over HTTP: start runs, follow their events, decide on their calls. Needs the extra "serve"."""

from agentfsm.serve.access import APIKeys, Caller
from agentfsm.serve.app import GatewayApp, serve

__all__ = ["APIKeys", "Caller", "GatewayApp", "serve"]
