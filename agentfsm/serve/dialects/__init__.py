"""Protocols of other clients over the gateway's streams: AG-UI, OpenAI's chat completions, MCP, and webhooks."""
