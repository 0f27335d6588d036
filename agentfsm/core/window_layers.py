"""Shares of the context window: for instructions, memory, history, and a reserve for tools and the answer.

Source: document G, 7 and 8: more than 40 % of memory adds cost and little quality.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Final, NamedTuple

import attrs

from agentfsm.core.value import Value


class TaskKind(StrEnum):
    """Kind of the tasks of an agent, by what it works with."""

    SIMPLE = "simple"
    """It has no tools: the conversation matters most."""

    MEDIUM = "medium"
    """It has tools."""

    COMPLEX = "complex"
    """It has a planner: it needs more of what is known."""


@attrs.frozen(kw_only=True)
class WindowLayers(Value):
    """Tokens of the window for each layer. History may use what the others leave."""

    instructions: int = 0
    """Tokens for the instructions."""

    memory: int = 0
    """Tokens for working memory and recalled items."""

    history: int = 0
    """Tokens for the messages."""

    reserve: int = 0
    """Tokens for the definitions of tools and the answer."""


@attrs.frozen(kw_only=True)
class WindowDemand(Value):
    """Needs of a run, which share the window when its memory is searched."""

    window_tokens: int
    """Size of the window of the model, tokens."""

    task: TaskKind = TaskKind.MEDIUM
    """Kind of the task."""

    instructions_tokens: int = 0
    """Tokens of the instructions."""

    reserve_tokens: int = 0
    """Tokens of the definitions of tools and of the longest answer."""

    working_tokens: int = 0
    """Tokens of the working memory at the end of the request."""

    messages: int = 0
    """Number of messages of the history."""

    has_documents: bool = False
    """Whether parts of documents match the input, so that the task needs knowledge."""


class Shares(NamedTuple):
    """Percents of the window for each layer."""

    instructions: int
    memory: int
    history: int
    reserve: int


SHARES: Final[Mapping[TaskKind, Shares]] = {
    TaskKind.SIMPLE: Shares(15, 15, 45, 25),
    TaskKind.MEDIUM: Shares(20, 30, 30, 20),
    TaskKind.COMPLEX: Shares(15, 40, 25, 20),
}
# Messages from which on a history is long.
LONG_HISTORY: Final = 30


class Move(NamedTuple):
    """Percents that move from one layer to another under a condition."""

    applies: Callable[[WindowDemand], bool]
    source: str
    target: str
    percent: int


MOVES: Final = (
    Move(lambda demand: demand.has_documents, "history", "memory", 10),
    Move(lambda demand: demand.messages > LONG_HISTORY, "reserve", "history", 5),
)


def share_window(demand: WindowDemand) -> WindowLayers:
    """Return the tokens of each layer, together at most the window.

    Instructions and reserve have at least what they need, at the expense of memory and history, by their shares.
    """
    percents = SHARES[demand.task]._asdict()
    for move in MOVES:
        if move.applies(demand):
            percents[move.source] -= move.percent
            percents[move.target] += move.percent
    tokens = {name: demand.window_tokens * percent // 100 for name, percent in percents.items()}
    tokens["instructions"] = max(tokens["instructions"], demand.instructions_tokens)
    tokens["reserve"] = max(tokens["reserve"], demand.reserve_tokens)
    left = max(0, demand.window_tokens - tokens["instructions"] - tokens["reserve"])
    if tokens["memory"] + tokens["history"] > left:
        tokens["memory"] = left * percents["memory"] // (percents["memory"] + percents["history"])
        tokens["history"] = left - tokens["memory"]
    return WindowLayers(**tokens)
