"""Protocols of tool selectors, scorers, judges and planners."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final, Literal, Protocol, TypeAlias

import attrs

from agentfsm.core.events import Verdict
from agentfsm.core.messages import JSON
from agentfsm.core.plans import Plan
from agentfsm.core.run import Run
from agentfsm.core.usage import Usage
from agentfsm.core.value import Value
from agentfsm.ports.model import Model, ToolDefinition


@attrs.frozen(kw_only=True)
class Selection(Value):
    """The tools that a model is offered, and how they were chosen."""

    tools: tuple[str, ...]
    """Names of the tools in the order of registration, so that requests with the same tools begin with the same bytes.
    """

    how: str
    """Method of selection: "all", "similarity", "two_stage" or a custom word. After a colon, a deviation from the plan.
    """

    usage: Usage = Usage()
    """Tokens that the selection used. Default none."""


@attrs.frozen(kw_only=True)
class PaidScores(Value):
    """Scores that cost tokens."""

    scores: tuple[float, ...]
    """One number per text, in their order; higher is better."""

    usage: Usage
    """Tokens that the scores cost."""


class Scorer(Protocol):
    """Rates how well texts match a query."""

    async def scores(self, query: str, texts: Sequence[str]) -> Sequence[float] | PaidScores:
        """Return one number per text, in their order; higher is better, and the scale is free.

        A scorer that asks a model returns them as `PaidScores`.

        Args:
            query: The search, in the user's words.
            texts: One text per item. Its first line is the name of the item. The texts stay the same between queries.

        Raises:
            Exception: of any type, if it cannot rate the texts; the caller then continues without scores.
        """
        ...


SelectorAsk: TypeAlias = Callable[[str, str], Awaitable[tuple[str, Usage]]]
"""Function that asks the agent's own model without tools. It takes instructions and a question, and returns the answer
and its usage. The model is also shown the instructions, messages, recalled items and the reminder of the run. Raises
ModelError.
"""


class ToolSelector(Protocol):
    """Chooses the tools that a model is offered, once for each user input."""

    def wants(self, count: int) -> bool:
        """Return whether to select among `count` tools. If False, all are offered and `select` is not called."""
        ...

    async def select(self, task: str, tools: Sequence[ToolDefinition], ask: SelectorAsk) -> Selection:
        """Choose the tools to offer for a task.

        Args:
            task: The user's input, of any length.
            tools: All available tools, in the order of registration.
            ask: Asks the agent's model, for choices that need judgement; each call costs tokens.

        Returns:
            A selection of these tools, in their order.

        Raises:
            MisuseError: if the selector is set up wrongly. External failures must not raise.
        """
        ...

    async def find(self, query: str, tools: Sequence[ToolDefinition]) -> Sequence[str]:
        """Find tools for a `find_tools` call of the model, among the tools that it was not offered.

        The default returns the tools whose name and description contain the most words of the query.

        Args:
            query: The search, in the model's words.
            tools: The permitted tools that the model does not see, in the order of registration.

        Returns:
            Names of these tools, best first: about 5, since all of them are offered. Empty if none matches.
        """
        words = set(_WORD.findall(query.casefold()))
        texts = {tool.name: f"{tool.name} {tool.description}".casefold() for tool in tools}
        hits = {name: len(words.intersection(_WORD.findall(text))) for name, text in texts.items()}
        most = max(hits.values(), default=0)
        return [name for name, count in hits.items() if most and count == most][:MAX_FOUND_TOOLS]


# Maximum tools that a search returns: as many as a model is shown to pick from a list (Source: document E, 5.4).
MAX_FOUND_TOOLS: Final = 5


_WORD: Final = re.compile(r"[^\W_]+")


JudgeAsk: TypeAlias = Callable[[str, str, Mapping[str, JSON]], Awaitable[str]]
"""Function that asks the judge's model. It takes instructions, a question and the JSON Schema of the answer, and
returns the text of the answer. Before them, the model is shown the run as the agent's own model is: instructions,
messages with the results of tools, recalled items, the reminder, a line about each tool. Raises ModelError.
"""


class Judge(Protocol):
    """Judges answers or tool results before the run continues."""

    model: Model | None = None
    """The model that `ask` uses; None for the agent's own model."""

    answer_tokens: int = 1_000
    """Maximum tokens of that model's answer. Default 1,000."""

    def wants(self, run: Run) -> bool:
        """Return whether to judge the draft, or the tool results of the turn, that the run is about to reflect on."""
        ...

    async def judge(self, run: Run, ask: JudgeAsk) -> Verdict:
        """Judge the draft or the tool results.

        Args:
            run: A run in REFLECT; its last message is the draft or a tool result.
            ask: Asks the judge's model; each call costs tokens.

        Raises:
            ModelError: if no judgement is possible; a person is then asked.
        """
        ...


PlanAsk: TypeAlias = Callable[[str, str], Awaitable[str]]
"""Function that asks the planner's model. It takes instructions and a question, and returns the text of the answer.
Before them, the model is shown the run as the agent's own model is, but for the tools. Raises ModelError.
"""


@attrs.frozen(kw_only=True)
class PlanRequest(Value):
    """Request for a plan."""

    run: Run
    """The run, in THINK."""

    tools: tuple[ToolDefinition, ...]
    """Tools that steps can call."""

    results: Mapping[int, JSON]
    """Results of the steps that have succeeded, by id, which the new plan may refer to."""

    next_id: int
    """Smallest id for a step of the new plan."""

    failure: str = ""
    """Reason why the current plan cannot go on, or a judge wants another one; empty for a first plan."""

    may_keep: bool = False
    """Whether the current plan can go on, so that the planner may keep it."""

    find_flaws: Callable[[Plan], Sequence[str]]
    """Returns all flaws of a plan; a plan with flaws cannot be used."""


@attrs.frozen(kw_only=True)
class PlanEnd(Value):
    """End of a run whose answer follows from the results of its plan."""

    answer: str = ""
    """The answer; empty if the run failed."""

    failure: str = ""
    """Reason why the run failed, for people; empty if it did not."""


class PlanMaker(Protocol):
    """Makes plans, whose steps run without asking the agent's model."""

    model: Model | None = None
    """The model that `ask` and the questions of plans use; None for the agent's own model."""

    instructions: str = ""
    """Rules for plans, beside the instructions of the agent."""

    examples: Mapping[str, Plan] = MappingProxyType({})
    """Good plans by the request that they are for."""

    answer_tokens: int = 2_000
    """Maximum tokens of that model's answer. Default 2,000."""

    max_steps: int = 8
    """Maximum of steps of a plan."""

    mode: Literal["plan", "hybrid"] = "plan"
    """Steps that a plan may have: "plan", calls and questions; "hybrid", also goals."""

    goal_turns: int = 5
    """Maximum of turns for a goal, its answer included."""

    goal_timeout_s: float = 120.0
    """Maximum of seconds for a goal."""

    review: bool | Callable[[Plan], bool] = False
    """Whether a person has to approve a plan before it runs, or a function that decides it."""

    review_expires_s: float = 604_800.0
    """Seconds until a plan that was not approved is rejected."""

    replan: Literal["on_failure", "each_step", "never"] = "on_failure"
    """Occasions for a new plan."""

    replans: int = 3
    """Maximum of new plans after the first, since the last input."""

    fixed: bool = False
    """Whether the plan belongs to the program: input does not replace it, and no person is asked for another one."""

    maker: str = ""
    """Kind of program that the plan belongs to, if `fixed`: "flow", "each" or "until". A run is not continued by a
    program of another kind.
    """

    frozen: bool = False
    """Whether results cannot lead to further calls: after the plan, the model is offered no tools."""

    @property
    def input_schema(self) -> Mapping[str, JSON] | None:
        """JSON Schema of the prompt, if it is the text of a JSON object, as that of a flow. None: it is any prompt."""
        return None

    def wants(self, run: Run) -> bool:
        """Return whether to make a plan for the newest input."""
        ...

    async def plan(self, request: PlanRequest, ask: PlanAsk) -> Plan | None:
        """Make a plan without flaws.

        Args:
            request: The run, its tools and results.
            ask: Asks the planner's model; each call costs tokens.

        Returns:
            The plan; None if no plan is needed, or the current one is kept.

        Raises:
            ModelError: if the model cannot be asked.
            MisuseError: if no usable plan resulted. The agent then goes on without a plan.
        """
        ...

    def conclude(self, run: Run) -> PlanEnd | None:  # noqa: ARG002  a default for those that leave it to the model
        """Return the end of a run in which no step of the plan can start.

        The default returns None: a new plan is made if steps have failed, and else the agent's model answers. If
        `fixed`, None asks for the next plan in any case, while `replans` allows one.
        """
        return None
