"""Connections to servers: their thread, transports, limits and errors."""
