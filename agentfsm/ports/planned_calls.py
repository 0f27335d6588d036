"""The calls of a plan or a flow before it is carried out, for rules that no order of its steps could obey."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import attrs

from agentfsm.core.value import Value

if TYPE_CHECKING:
    from agentfsm.core.plans import PlanStep


@attrs.frozen(kw_only=True)
class PlannedCall(Value):
    """A step of a plan, as rules see it."""

    tool: str
    """Name of the tool."""

    where: str
    """The step in words, such as "step 2 (pay)"."""

    after: tuple[int, ...]
    """Places of the calls that end before this one starts, the next ones only."""

    earlier: frozenset[int]
    """Places of all calls that end before this one starts."""

    is_certain: bool
    """Whether it is carried out whenever the steps before it succeed."""

    may_call: bool
    """Whether it may call other tools, because it is an agent, a goal or a repetition."""

    values: Mapping[str, str]
    """Texts of its arguments by name. Those of results and inputs begin with "$", all others with "="."""


def plan_calls(
    steps: Sequence[PlanStep], *, agents: Collection[str] = (), conditional: Collection[str] = ()
) -> tuple[PlannedCall, ...]:
    """Return the calls of the steps of a plan.

    Args:
        steps: The steps.
        agents: Names of the tools that may call others.
        conditional: Names of the tools of steps that may be skipped.
    """
    places = {step.id: place for place, step in enumerate(steps)}
    following = {  # a step that waits for any of several starts before the others end
        step.id: tuple([places[each] for each in step.after if each in places])
        for step in steps
        if step.join != "any" or len(step.after) == 1
    }
    earlier: dict[int, frozenset[int]] = {}

    def find_earlier(number: int) -> frozenset[int]:
        if number not in earlier:
            after = following.get(number, ())
            earlier[number] = frozenset(after)  # in a circle, which is refused elsewhere
            earlier[number] = frozenset(after).union(*[find_earlier(steps[place].id) for place in after])
        return earlier[number]

    return tuple(
        [
            PlannedCall(
                tool=step.tool,
                where=f"step {step.id} ({step.tool})" if step.tool else f"step {step.id}",
                after=following.get(step.id, ()),
                earlier=find_earlier(step.id),
                is_certain=step.tool not in conditional,
                may_call=bool(step.goal) or step.tool in agents,
                values={name: _write_value(value) for name, value in step.arguments.items()},
            )
            for step in steps
        ]
    )


def _write_value(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    return f"${text}" if isinstance(value, dict | list) and '"$' in text else f"={text}"


def format_path(calls: Sequence[PlannedCall], first: int, last: int) -> str:
    """Return the steps from one to a later one, by the shortest way: "step 1 (lock) -> step 2 (pay)"."""
    ways = {last: [last]}
    todo = [last]
    for place in todo:
        for before in calls[place].after:
            if before not in ways:
                ways[before] = [before, *ways[place]]
                todo.append(before)
    return " -> ".join([calls[place].where for place in ways.get(first, [first, last])])
