"""The MCP client: tools, resources and prompts of other servers."""
