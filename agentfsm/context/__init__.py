"""Select the messages and the tools that a model request contains."""

from agentfsm.context.importance import DropAcknowledgements, DropRepeatedErrors, PriorityRetention
from agentfsm.context.selection import AllTools, AutoSelect, BySimilarity, TwoStage
from agentfsm.context.similarity import EmbeddingScorer, LexicalScorer
from agentfsm.context.summary import Summarise
from agentfsm.context.window import Cut, SlidingWindow, TrimResults
from agentfsm.ports.context import Context

__all__ = [
    "AllTools",
    "AutoSelect",
    "BySimilarity",
    "Context",
    "Cut",
    "DropAcknowledgements",
    "DropRepeatedErrors",
    "EmbeddingScorer",
    "LexicalScorer",
    "PriorityRetention",
    "SlidingWindow",
    "Summarise",
    "TrimResults",
    "TwoStage",
]
