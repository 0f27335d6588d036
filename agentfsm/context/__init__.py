"""What of a history the model is shown."""

from agentfsm.context.window import SlidingWindow

__all__ = ["SlidingWindow"]
