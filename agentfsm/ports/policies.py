"""What the engine needs of tool selectors, scorers and judges."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Final, Protocol, TypeAlias

import attrs

from agentfsm.core.messages import JSON
from agentfsm.core.run import Run
from agentfsm.core.usage import Usage
from agentfsm.core.value import Value
from agentfsm.core.verdict import Verdict
from agentfsm.ports.model import Model, ToolDefinition


@attrs.frozen(kw_only=True)
class Selection(Value):
    """Which tools a model is offered, and how they were chosen."""

    tools: tuple[str, ...]
    """Names, in the order of registration: a request that offers the same tools again begins with the same bytes."""

    how: str
    """"all", "similarity", "two_stage" or a word of your own; after a colon, what went otherwise than planned."""

    usage: Usage = Usage()
    """What choosing cost."""


class Scorer(Protocol):
    """Tells how well texts fit a query."""

    async def scores(self, query: str, texts: Sequence[str]) -> Sequence[float]:
        """Return one number per text, in their order; higher is better, and the scale is free.

        Args:
            query: What is looked for, in the user's words.
            texts: One per thing. The first line is its name; they stay the same from one query to the next.

        Raises:
            Exception: of any kind, when it cannot tell; whoever asked then does without.
        """
        ...


# Asks the agent's own model, without tools: instructions and question in, answer and its cost out. Raises ModelError.
SelectorAsk: TypeAlias = Callable[[str, str], Awaitable[tuple[str, Usage]]]


class ToolSelector(Protocol):
    """Chooses the tools that a model is offered, once for each input of a user."""

    def wants(self, count: int) -> bool:
        """Tell whether so many tools have to be chosen among; where not, all are offered and `select` is not called."""
        ...

    async def select(self, task: str, tools: Sequence[ToolDefinition], ask: SelectorAsk) -> Selection:
        """Choose.

        Args:
            task: What the user wants, of any length.
            tools: All that there are, in the order of registration.
            ask: For choices that take a model's judgement; each call costs.

        Returns:
            Names of these tools, in their order.

        Raises:
            MisuseError: when it is set up wrongly. What the world does to it must not raise.
        """
        ...

    async def find(self, query: str, tools: Sequence[ToolDefinition]) -> Sequence[str]:
        """Find what the model looks for by `find_tools`, among the tools that it was not offered.

        Without a method of your own: the tools in whose name and description most words of the query stand.

        Args:
            query: In the model's words.
            tools: Those that it may use and does not see, in the order of registration.

        Returns:
            Names of these tools, the best first: 5 or so, since all of them are offered. None where nothing fits.
        """
        words = set(_WORD.findall(query.casefold()))
        hits = {tool.name: _count_hits(words, f"{tool.name} {tool.description}") for tool in tools}
        most = max(hits.values(), default=0)
        return [name for name, count in hits.items() if most and count == most][:MAX_FOUND_TOOLS]


# Tools that a search finds at most: as many as a model is shown where it picks from a list (Source: document E, 5.4).
MAX_FOUND_TOOLS: Final = 5


_WORD: Final = re.compile(r"[^\W_]+")


def _count_hits(words: Collection[str], text: str) -> int:
    return len(set(_WORD.findall(text.casefold())).intersection(words))


# Asks the judge's model: instructions, question and the JSON Schema of the answer in, its text out. Raises ModelError.
JudgeAsk: TypeAlias = Callable[[str, str, Mapping[str, JSON]], Awaitable[str]]


class Judge(Protocol):
    """Looks at answers, or at the results of tools, before the run goes on."""

    model: Model | None = None
    """Who is asked; None for the agent's own model."""

    answer_tokens: int = 1_000
    """The longest answer of that model."""

    def wants(self, run: Run) -> bool:
        """Tell whether what the run is about to reflect upon is to be judged: a draft, or the results of a turn."""
        ...

    async def judge(self, run: Run, ask: JudgeAsk) -> Verdict:
        """Judge it.

        Args:
            run: In REFLECT; its last message is the draft, or a tool's result.
            ask: For a model's judgement; each call costs.

        Raises:
            ModelError: when it cannot be judged; a person is then asked.
        """
        ...
