"""OAuth for remote MCP servers: settings, stored tokens, authorization of requests, and logins of people."""
