"""Schemas of tools: from type hints or given as JSON Schema, and validation or repair of arguments."""
