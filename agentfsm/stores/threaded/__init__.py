"""Shared parts of the stores that use a blocking driver in a thread of their own."""
