"""Tools: their options and schemas, permissions, and the state that all runs of the process share per tool."""
