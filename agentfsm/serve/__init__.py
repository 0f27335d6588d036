"""Serve agents over HTTP: start runs, follow their events, decide on their calls. Needs the extra "serve"."""

from agentfsm._plugins import require_extra

with require_extra("agentfsm.serve", "serve", "starlette", "uvicorn"):
    from agentfsm.serve.access import APIKeys, Caller
    from agentfsm.serve.app import GatewayApp, serve
    from agentfsm.serve.dialects.webhooks import IncomingWebhook, OutgoingWebhook, webhooks
    from agentfsm.serve.rate_limits import RateLimits

__all__ = ["APIKeys", "Caller", "GatewayApp", "IncomingWebhook", "OutgoingWebhook", "RateLimits", "serve", "webhooks"]
