"""The tool execution queue: which calls may overlap, one call from its text to its result, all calls in order."""
