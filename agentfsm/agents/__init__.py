"""Agents: their options and runs, workers, sub-agents, and the decisions of persons on runs."""
