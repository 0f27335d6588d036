"""Serve agents over HTTP: start runs, follow their events, decide on their calls. Needs the extra "serve"."""

from agentfsm._lib.plugins import require_extra

with require_extra("agentfsm.serve", "serve", "starlette", "uvicorn"):
    from agentfsm.serve.access import APIKeys, Caller
    from agentfsm.serve.app import GatewayApp, serve
    from agentfsm.serve.dialects.webhooks import IncomingWebhook, OutgoingWebhook, webhooks
    from agentfsm.serve.errors import ErrorAnswer, add_error_handlers, explain_error
    from agentfsm.serve.rate_limits import RateLimits

__all__ = [
    "APIKeys",
    "Caller",
    "ErrorAnswer",
    "GatewayApp",
    "IncomingWebhook",
    "OutgoingWebhook",
    "RateLimits",
    "add_error_handlers",
    "explain_error",
    "serve",
    "webhooks",
]
