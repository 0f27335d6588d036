"""The tool execution queue: planning, dispatch of one call, and scheduling of all calls."""
