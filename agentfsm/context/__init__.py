"""Select the messages and the tools that a model request contains."""

from agentfsm.context.embedding import EmbeddingScorer
from agentfsm.context.importance import DropAcknowledgements, DropRepeatedErrors, PriorityRetention
from agentfsm.context.lexical import LexicalScorer
from agentfsm.context.selection import AllTools, AutoSelect, BySimilarity, TwoStage
from agentfsm.context.summary import Summarise
from agentfsm.context.trim import TrimResults
from agentfsm.context.window import Cut, SlidingWindow
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
