"""Resolve command-line arguments to stores, agents, runs and MCP servers."""
