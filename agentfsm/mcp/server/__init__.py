"""The other half: a registry of tools, or an agent, as an MCP server."""
