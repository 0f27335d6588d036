"""What a model is shown: which messages of a history, and which of the tools."""

from agentfsm.context.lexical import LexicalScorer
from agentfsm.context.selection import AllTools, AutoSelect, BySimilarity, TwoStage
from agentfsm.context.window import SlidingWindow

__all__ = ["AllTools", "AutoSelect", "BySimilarity", "LexicalScorer", "SlidingWindow", "TwoStage"]
