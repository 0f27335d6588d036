"""Choose the tools that a model is offered: all, those most similar to the task, or those that the model names.

A model chooses badly among many tools, and each definition costs 100 to 500 tokens in every request (Source: document
E, 5.3 and 9.2). So up to 20 are offered whole; beyond, the words of the task choose 20; and where there are more than
50, the model first reads one line about each tool and names the few whose full definitions it needs.

A failing scorer or model does not make the selection fail: it falls back to the next best method, and `Selection.how`
records this.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, Final

import attrs

from agentfsm.context.similarity import LexicalScorer
from agentfsm.core.errors import MisuseError, ModelError
from agentfsm.core.messages import JSON
from agentfsm.core.usage import Usage
from agentfsm.core.validation import COUNT, COUNT_OR_ZERO
from agentfsm.ports.model import ToolDefinition
from agentfsm.ports.policies import MAX_FOUND_TOOLS, PaidScores, Scorer, Selection, SelectorAsk, ToolSelector
from agentfsm.tokens.ledger import BYTE_COUNTER
from agentfsm.tools.queue.result_text import describe_error

# Number of tools up to which a model chooses well among all; with more, it needs a selection (Source: document E, 9.1).
SIMILAR_ABOVE: Final = 20
# Number of tools above which only the two stages work well (Source: document E, 5.4 and 9.1).
TWO_STAGE_ABOVE: Final = 50
# Number of offered tools: the largest among which a model chooses well, because an omitted tool cannot be called.
# Measured (`make bench ROW=selection`): of the right tools among 50, 200, 500 and 1,427, the first 20 contain 98.0,
# 97.8, 96.8 and 95.6 %, the first 10 have 97.7, 97.2, 96.1 and 93.0 %, the first 5 have 97.6, 96.6, 94.4 and 90.1 %.
# These tasks mention everything that they need. The later steps of a long task do not, which favours 20.
DEFAULT_TOP: Final = 20
# Number of tools that stage two offers: 3 to 5 (Source: document E, 5.4).
DEFAULT_PICKS: Final = 5
# Number of offered tools if scores do not rank them: OpenAI refuses a request with more.
MAX_UNCHOSEN: Final = 128
# Maximum of bytes of the list of summaries: about 10,000 tokens, the most for 20 full definitions (Source: document E,
# 9.2). A longer list would cost more than it saves. About 280 tools fit.
STAGE_ONE_BYTES: Final = 40_000
# Characters of a task that are read, half from its beginning and half from its end: instructions for a pasted document
# are there.
TASK_CHARS: Final = 8_000
# Characters of a tool that are compared; a definition of 500 tokens has 2,000.
TEXT_CHARS: Final = 8_000
# Characters of an error's text in `how`, which every journal stores.
_REASON_CHARS: Final = 200

_DIRECTIONS: Final = """\
You choose the tools for an assistant that is about to work on a task; it will see only those that you choose.
Do not work on the task yourself. Answer with nothing but a JSON list of names, the most useful first, for example
["first_name", "second_name"]. Name every tool that the task may need, but at most {picks}.

The tools, as name(parameters; ? marks what may be left out): what it does
{lines}"""

# A possible name. "get.v2" is one piece, so that it does not match "get". The number of a list item is not part of it.
_NAME_TOKEN: Final = re.compile(r"(?:\d+\.)?([A-Za-z0-9_-]+(?:[./][A-Za-z0-9_-]+)*)")
_JSON_LIST: Final = re.compile(r"\[[^\[\]]*\]")
_MARKED_NAME: Final = re.compile(r"`[^`\n]+`|\"[^\"\n]+\"|\*\*[^*\n]+\*\*")
_BRACKETS: Final = re.compile(r"\([^()]*\)")
# Separator between a name and the remark about it.
_REMARK_SEPARATOR: Final = re.compile(r":| [-–—] ")  # noqa: RUF001  models write such dashes


@attrs.frozen
class AllTools(ToolSelector):
    """Offer all tools, without a limit."""

    def wants(self, count: int) -> bool:  # noqa: ARG002  no number is too many
        """Return False: no selection is needed."""
        return False

    async def select(self, task: str, tools: Sequence[ToolDefinition], ask: SelectorAsk) -> Selection:  # noqa: ARG002  the result is always the same
        """Return all tools."""
        return _build_selection(tools, "all")


@attrs.frozen(kw_only=True)
class BySimilarity(ToolSelector):
    """Offer the tools whose text is most similar to the task.

    If the scorer fails or rates all tools the same, the first 128 tools are offered.
    """

    top: int = attrs.field(default=DEFAULT_TOP, validator=COUNT)
    """Number of tools to offer, 1 or more. Default 20: models still choose well among that many."""

    scorer: Scorer = attrs.field(factory=LexicalScorer)
    """Scorer that rates each tool's similarity to the task. Default: by shared words."""

    def wants(self, count: int) -> bool:
        """Return whether there are more tools than `top`."""
        return count > self.top

    async def select(self, task: str, tools: Sequence[ToolDefinition], ask: SelectorAsk) -> Selection:  # noqa: ARG002  asks no model
        """Return the most similar tools, in the order of registration; ties go to the earlier registered."""
        if not self.wants(len(tools)):
            return _build_selection(tools, "all")
        order, flaw, usage = await self.rank(task, tools)
        if flaw:
            few = len(tools) <= MAX_UNCHOSEN
            how = f"{'all' if few else f'the first {MAX_UNCHOSEN}'}: {flaw}"
            return _build_selection(tools[:MAX_UNCHOSEN], how, usage)
        return _build_selection([tools[place] for place in sorted(order[: self.top])], "similarity", usage)

    async def rank(self, task: str, tools: Sequence[ToolDefinition]) -> tuple[Sequence[int], str, Usage]:
        """Rank the tools by similarity to the task.

        Returns:
            The indexes of all tools, the most similar first, and "". If the scores rank nothing: the indexes in their
            original order, and the reason. Then the usage of the scorer.
        """
        scores, flaw, usage = await self._score(task, tools)
        places = range(len(tools))
        return (places, flaw, usage) if flaw else (sorted(places, key=lambda place: -scores[place]), "", usage)

    async def find(self, query: str, tools: Sequence[ToolDefinition]) -> Sequence[str]:
        """Return the names most similar to the query: of few tools all, of many only those above the lowest score."""
        scores, flaw, _usage = await self._score(query, tools)
        few = len(tools) <= MAX_FOUND_TOOLS
        if flaw:
            return [tool.name for tool in tools] if few else []
        order = sorted(range(len(tools)), key=lambda place: -scores[place])
        return [tools[place].name for place in order[:MAX_FOUND_TOOLS] if few or scores[place] > min(scores)]

    async def _score(self, task: str, tools: Sequence[ToolDefinition]) -> tuple[Sequence[float], str, Usage]:
        """Return the scores of all tools and "", or the reason why they rank nothing; and the usage of the scorer."""
        try:
            found = await self.scorer.scores(_excerpt_task(task), [_tool_text(tool) for tool in tools])
            paid = found if isinstance(found, PaidScores) else PaidScores(scores=tuple(found), usage=Usage())
            scores = list(map(float, paid.scores))
        except MisuseError:
            raise
        except Exception as error:  # noqa: BLE001  a scorer may fail in any way, and the run goes on without
            return (
                (),
                f"the scorer raised {describe_error(error)[:_REASON_CHARS]}",
                getattr(error, "usage", None) or Usage(),
            )
        return scores, _find_flaw(scores, len(tools)), paid.usage


def _find_flaw(scores: Sequence[float], count: int) -> str:
    """Return the reason why the scores rank nothing, or ""."""
    if len(scores) != count:
        return f"the scorer gave {len(scores)} scores for {count} tools"
    if any(map(math.isnan, scores)):
        return "the scorer gave NaN"
    return "" if len(set(scores)) > 1 else "no tool is nearer to the task than another"


@attrs.frozen(kw_only=True)
class TwoStage(ToolSelector):
    """Let the model name the tools that it needs, from one line about each.

    This costs one more model call. If it fails or names no tool, `similarity` chooses.
    """

    picks: int = attrs.field(default=DEFAULT_PICKS, validator=COUNT)
    """Maximum of tools that the model may name, 1 or more. Default 5."""

    similarity: BySimilarity = BySimilarity()
    """Fallback selector. It also shortens the list of summaries if the list is too long for one request."""

    def wants(self, count: int) -> bool:
        """Return whether there are more tools than the model may name."""
        return count > self.picks

    async def select(self, task: str, tools: Sequence[ToolDefinition], ask: SelectorAsk) -> Selection:
        """Return the tools that the model named, in the order of registration."""
        listed, shortlist_usage = await self._build_shortlist(task, tools)
        lines = "\n".join(tool.summary for tool in listed)
        try:
            reply, usage = await ask(
                _DIRECTIONS.format(picks=self.picks, lines=lines), f"The task:\n{_excerpt_task(task)}"
            )
        except ModelError as error:
            why = f"the model could not be asked: {describe_error(error)[:_REASON_CHARS]}"
            return await self._fall_back(why, shortlist_usage + (error.usage or Usage()), task, tools, ask)
        usage += shortlist_usage
        named = _find_names(reply, {tool.name for tool in listed})[: self.picks]
        if not named:
            return await self._fall_back("the model named none", usage, task, tools, ask)
        how = "two_stage" if len(listed) == len(tools) else f"two_stage: among {len(listed)} of {len(tools)}"
        return _build_selection([tool for tool in listed if tool.name in named], how, usage)

    async def find(self, query: str, tools: Sequence[ToolDefinition]) -> Sequence[str]:
        """Find tools by similarity: the query already comes from the model."""
        return await self.similarity.find(query, tools)

    async def _build_shortlist(
        self, task: str, tools: Sequence[ToolDefinition]
    ) -> tuple[Sequence[ToolDefinition], Usage]:
        """Return the tools whose summaries the model reads: all, or the most similar ones that fit the size limit."""
        sizes = [BYTE_COUNTER.count(tool.summary) + 1 for tool in tools]
        if sum(sizes) <= STAGE_ONE_BYTES:
            return tools, Usage()
        order, _flaw, usage = await self.similarity.rank(task, tools)
        ends = accumulate(sizes[place] for place in order)
        kept = sorted(place for place, end in zip(order, ends, strict=True) if end <= STAGE_ONE_BYTES)
        return [tools[place] for place in kept], usage

    async def _fall_back(
        self, why: str, usage: Usage, task: str, tools: Sequence[ToolDefinition], ask: SelectorAsk
    ) -> Selection:
        """Choose by similarity, and add the reason to `Selection.how`."""
        other = await self.similarity.select(task, tools, ask)
        how = f"{other.how}{';' if ':' in other.how else ':'} {why}"
        return attrs.evolve(other, how=how, usage=usage + other.usage)


@attrs.frozen(kw_only=True)
class AutoSelect(ToolSelector):
    """Offer all tools if they are few, choose by similarity among more, and in two stages among many."""

    similar_above: int = attrs.field(default=SIMILAR_ABOVE, validator=COUNT_OR_ZERO)
    """Largest number of tools that are all offered; above it, similarity chooses. Default 20."""

    two_stage_above: int = attrs.field(default=TWO_STAGE_ABOVE, validator=COUNT_OR_ZERO)
    """Largest number of tools among which similarity chooses; above it, two stages do. Default 50."""

    similarity: BySimilarity = BySimilarity()
    """Selector for the middle range, and fallback of the two stages."""

    picks: int = attrs.field(default=DEFAULT_PICKS, validator=COUNT)
    """Maximum of tools that the model may name in the first of two stages, 1 or more. Default 5."""

    def wants(self, count: int) -> bool:
        """Return whether there are too many tools to offer all."""
        return count > min(self.similar_above, self.two_stage_above)

    async def select(self, task: str, tools: Sequence[ToolDefinition], ask: SelectorAsk) -> Selection:
        """Choose by the method for this number of tools."""
        selector: ToolSelector = AllTools()
        if len(tools) > self.two_stage_above:
            selector = TwoStage(picks=self.picks, similarity=self.similarity)
        elif len(tools) > self.similar_above:
            selector = self.similarity
        return await selector.select(task, tools, ask)

    async def find(self, query: str, tools: Sequence[ToolDefinition]) -> Sequence[str]:
        """Find tools by similarity."""
        return await self.similarity.find(query, tools)


def _build_selection(tools: Sequence[ToolDefinition], how: str, usage: Usage = Usage()) -> Selection:
    return Selection(tools=tuple([tool.name for tool in tools]), how=how, usage=usage)


def _excerpt_task(task: str) -> str:
    """Return the task, or its head and tail if it is long."""
    half = TASK_CHARS // 2
    return task if len(task) <= TASK_CHARS else f"{task[:half]}\n[...]\n{task[-half:]}"


def _tool_text(tool: ToolDefinition) -> str:
    """Return a tool's text for scoring: name, description, and its parameters' names, descriptions and values."""
    return "\n".join((tool.name, tool.description, *_iter_schema_texts(tool.parameters)))[:TEXT_CHARS]


def _iter_schema_texts(schema: Mapping[str, JSON]) -> Iterator[str]:
    """Yield the texts in a schema, at any depth. Iterative, since a deep schema would exceed the recursion limit."""
    nodes: list[Any] = [schema]
    while nodes:
        node = nodes.pop()
        if isinstance(node, Mapping):
            if isinstance(named := node.get("properties"), Mapping):
                yield from named
            if isinstance(said := node.get("description"), str):
                yield said
            if isinstance(values := node.get("enum"), list | tuple):
                yield from (value for value in values if isinstance(value, str))
            nodes.extend(node.values())
        elif isinstance(node, list | tuple):
            nodes.extend(node)


def _find_names(reply: str, known: Collection[str]) -> list[str]:
    """Return the known names in a reply, in its order: from a JSON list, from marked words, or line by line.

    Of several lists, the last one is the answer. Names are matched exactly, never guessed.
    """
    for part in (*reversed(_JSON_LIST.findall(reply)), " ".join(_MARKED_NAME.findall(reply))):
        if found := _match_names(part, known):
            return found
    names: list[str] = []
    for line in _BRACKETS.sub("", reply).splitlines():
        # The names at the beginning of the line, without those in the remarks after them.
        names += next((found for part in _REMARK_SEPARATOR.split(line) if (found := _match_names(part, known))), [])
    return list(dict.fromkeys(names))


def _match_names(text: str, known: Collection[str]) -> list[str]:
    pieces = (piece if piece in known else piece.strip("-_") for piece in _NAME_TOKEN.findall(text))
    return list(dict.fromkeys(piece for piece in pieces if piece in known))
