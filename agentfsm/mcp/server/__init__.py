"""MCP server: serve a registry of tools, or an agent."""
