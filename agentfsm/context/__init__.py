"""What a model is shown: which messages of a history, and which of the tools."""

from agentfsm.compaction import Context
from agentfsm.context.importance import DropAcknowledgements, DropRepeatedErrors, PriorityRetention
from agentfsm.context.lexical import LexicalScorer
from agentfsm.context.selection import AllTools, AutoSelect, BySimilarity, TwoStage
from agentfsm.context.summary import Summarise
from agentfsm.context.trim import TrimResults
from agentfsm.context.window import Cut, SlidingWindow

__all__ = [
    "AllTools",
    "AutoSelect",
    "BySimilarity",
    "Context",
    "Cut",
    "DropAcknowledgements",
    "DropRepeatedErrors",
    "LexicalScorer",
    "PriorityRetention",
    "SlidingWindow",
    "Summarise",
    "TrimResults",
    "TwoStage",
]
