"""The agent that `agentfsm demo` runs."""

from agentfsm.cli.demo.demo_agent import agent

__all__ = ["agent"]
