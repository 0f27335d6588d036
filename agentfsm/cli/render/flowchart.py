"""Draw an agent or a run as a flowchart, for Mermaid or Graphviz, and the plans of a run as text."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import attrs

from agentfsm.cli.render.formatting import NOTE_CHARS
from agentfsm.cli.render.pending import format_wait
from agentfsm.cli.resolve.agent_target import find_wrapped_agent
from agentfsm.core.events import Planned
from agentfsm.core.machine import START, State, next_state
from agentfsm.core.plans import JOINS, Plan
from agentfsm.core.text_safety import one_line
from agentfsm.core.value import Value
from agentfsm.flow import Flow, Step, StepStatus
from agentfsm.flow.flow_plan import read_step_status

if TYPE_CHECKING:
    from agentfsm.agents.agent import Agent
    from agentfsm.core.events import Event
    from agentfsm.core.run import Run
    from agentfsm.tools.tool import Tool

# Shapes of nodes: opening and closing bracket in Mermaid, name in Graphviz.
ROUND: Final = ("([", "])", "ellipse")
BOX: Final = ("[", "]", "box")
CYLINDER: Final = ("[(", ")]", "cylinder")
# Marks the current state of a run.
CURRENT_STATE: Final = ("[[", "]]", "doubleoctagon")


@attrs.frozen(kw_only=True)
class FlowchartNode(Value):
    """A node: a shape with lines of text."""

    lines: tuple[str, ...]
    shape: tuple[str, str, str] = BOX
    fill: str = ""
    """Colour of the background, as "#rrggbb"; empty for none."""


@attrs.frozen(kw_only=True)
class Flowchart(Value):
    """Nodes and the arrows between them."""

    nodes: tuple[FlowchartNode, ...]
    arrows: tuple[tuple[int, int, tuple[str, ...]], ...]
    """Index of the source node, index of the target node, lines of the label."""


def render_mermaid(chart: Flowchart) -> str:
    """Return the chart as a Mermaid flowchart."""
    lines = ["flowchart LR"]
    for number, node in enumerate(chart.nodes):
        opening, closing, _ = node.shape
        lines.append(f'    n{number}{opening}"{_escape_mermaid(node.lines)}"{closing}')
        lines += [f"    style n{number} fill:{node.fill},color:#000"] if node.fill else []
    for source, target, beside in chart.arrows:
        label = f'|"{_escape_mermaid(beside)}"|' if beside else ""
        lines.append(f"    n{source} -->{label} n{target}")
    return "\n".join(lines)


def render_dot(chart: Flowchart) -> str:
    """Return the chart in the DOT language of Graphviz."""
    lines = ["digraph agentfsm {", "    rankdir=LR"]
    for number, node in enumerate(chart.nodes):
        fill = f', style=filled, fillcolor="{node.fill}"' if node.fill else ""
        lines.append(f'    n{number} [label="{_escape_dot(node.lines)}", shape={node.shape[2]}{fill}]')
    for source, target, beside in chart.arrows:
        label = f' [label="{_escape_dot(beside)}"]' if beside else ""
        lines.append(f"    n{source} -> n{target}{label}")
    return "\n".join([*lines, "}"])


RENDERERS: Final[Mapping[str, Callable[[Flowchart], str]]] = {"mermaid": render_mermaid, "dot": render_dot}

# Characters that need no escape in quoted text of Mermaid, besides letters and digits.
_MERMAID_SAFE: Final = frozenset(" _-.,:/()")

# Graphviz interprets backslashes and HTML entities in quoted text.
_DOT_ESCAPES: Final = str.maketrans({"\\": "\\\\", '"': '\\"', "&": "&amp;"})


def _escape_mermaid(lines: Iterable[str]) -> str:
    return "<br/>".join(
        "".join(
            each if each.isalnum() or each in _MERMAID_SAFE else f"#{ord(each)};" for each in one_line(line, NOTE_CHARS)
        )
        for line in lines
    )


def _escape_dot(lines: Iterable[str]) -> str:
    return r"\n".join(one_line(line, NOTE_CHARS).translate(_DOT_ESCAPES) for line in lines)


def draw_agent(agent: Agent[Any]) -> Flowchart:
    """Draw an agent: its tools with their declarations, its sub-agents and its sources of tools. A flow: its steps.

    A source that is not connected yet, such as an MCP server, is drawn without its tools and is not started.
    """
    if not isinstance(agent, Flow):
        return _AgentDrawing().draw(agent)
    place = {step.name: number for number, step in enumerate(agent.ordered_steps)}
    nodes = [FlowchartNode(lines=(step.name, *_describe_step(step))) for step in agent.ordered_steps]
    arrows = [  # from a step to each that depends on it
        (place[name], place[step.name], () if step.join == "all_success" else (step.join,))
        for step in agent.ordered_steps
        for name in step.depends_on
    ]
    return Flowchart(nodes=tuple(nodes), arrows=tuple(arrows))


def _describe_step(step: Step) -> Iterator[str]:
    if step.description:
        yield step.description
    elif (inner := find_wrapped_agent(step.tool)) is not None:
        yield f"agent {inner.name}"
    yield from describe_marks(step.tool)
    if step.when is not None:
        yield "may be skipped"
    if step.compensate is not None:
        yield f"undone by {step.compensate.name}"


@attrs.define(eq=False, repr=False)
class _AgentDrawing:
    nodes: list[FlowchartNode] = attrs.field(factory=list)
    arrows: list[tuple[int, int, tuple[str, ...]]] = attrs.field(factory=list)
    _agents: dict[int, int] = attrs.field(factory=dict)
    """Node of each agent by `id(agent)`, so that a shared sub-agent is drawn once."""

    def draw(self, agent: Agent[Any]) -> Flowchart:
        self._add_agent(agent)
        return Flowchart(nodes=tuple(self.nodes), arrows=tuple(self.arrows))

    def _add_agent(self, agent: Agent[Any]) -> int:
        if id(agent) in self._agents:
            return self._agents[id(agent)]
        node = self._agents[id(agent)] = self._add_node(agent.name, agent.model.name, shape=ROUND)
        from_sources = {tool.name for source in agent.tools.sources for tool in source.tools}
        for tool in agent.tools:
            if tool.name not in from_sources:
                self._add_tool(node, tool)
        for source in agent.tools.sources:
            kind = type(source).__name__
            below = self._add_node(str(getattr(source, "name", kind)), kind, shape=CYLINDER)
            self.arrows.append((node, below, ()))
            for tool in source.tools:
                self._add_tool(below, tool)
        return node

    def _add_tool(self, above: int, tool: Tool[..., Any]) -> None:
        marks, place = describe_marks(tool), len(self.arrows)
        if (inner := find_wrapped_agent(tool)) is None:
            self.arrows.append((above, self._add_node(tool.name, *marks), ()))
        else:  # in front of the arrows of the sub-agent
            self.arrows.insert(place, (above, self._add_agent(inner), (tool.name, *marks)))

    def _add_node(self, *lines: str, shape: tuple[str, str, str] = BOX) -> int:
        self.nodes.append(FlowchartNode(lines=lines, shape=shape))
        return len(self.nodes) - 1


def describe_marks(tool: Tool[..., Any]) -> tuple[str, ...]:
    """Return one line with the declarations of a tool that decide when its calls run; empty without declarations."""
    approval = tool.requires_approval
    marks = {
        "read-only": tool.read_only,
        "idempotent": tool.idempotent and find_wrapped_agent(tool) is None,
        "answered from outside": tool.waits_for is not None,
        "needs approval": approval is True,
        "may need approval": callable(approval),
    }
    line = ", ".join(mark for mark, is_set in marks.items() if is_set)
    return (line,) if line else ()


def draw_run(run: Run[Any], events: Iterable[Event]) -> Flowchart:
    """Draw a run: the states that it visited, the number of times that each event occurred, and its current state.

    Args:
        run: The run after the events.
        events: Its journal from the first event.
    """
    state, taken, seen = START, Counter[tuple[State, State, str]](), {START: 0}
    for event in events:
        before, state = state, next_state(state, event)
        seen.setdefault(state, len(seen))
        taken[before, state, type(event).__name__] += 1
    beside: dict[tuple[int, int], list[str]] = {}
    for (source, target, name), times in taken.items():
        beside.setdefault((seen[source], seen[target]), []).append(f"{name} {times}")
    position = [
        f"turn {run.turn}",
        *(f"waits for {format_wait(item, run.id)}" for item in run.pending if run.is_waiting),
    ]
    if run.stop_reason is not None:
        position = [f"turn {run.turn}, {run.stop_reason}"]
    nodes = [
        FlowchartNode(lines=(each.upper(), *position), shape=CURRENT_STATE)
        if each is state
        else FlowchartNode(lines=(each.upper(),))
        for each in seen
    ]
    arrows = [(source, target, tuple(lines)) for (source, target), lines in beside.items()]
    return Flowchart(nodes=tuple(nodes), arrows=tuple(arrows))


# Backgrounds on which black text is readable.
_FILLS: Final = {
    StepStatus.PENDING: "",
    StepStatus.RUNNING: "#cfe3ff",
    StepStatus.WAITING: "#ffe9b8",
    StepStatus.SUCCESS: "#cdeccf",
    StepStatus.SKIPPED: "#e6e6e6",
    StepStatus.FAILED: "#ffd1cf",
    StepStatus.NOT_RUN: "#e6e6e6",
}


def draw_plans(run: Run[Any], events: Iterable[Event]) -> Flowchart:
    """Draw the steps of all plans of a run, each with its status.

    Args:
        run: The run after the events.
        events: Its journal from the first event.
    """
    plans = [Plan.from_json(json.loads(event.call.arguments)) for event in events if isinstance(event, Planned)]
    if run.plan is not None and run.plan.plan is not None:
        plans[-1] = run.plan.plan  # a person may have edited it
    closed = () if run.plan is None else run.plan.closed
    calls = {entry.call.id: entry for entry in (*closed, *run.open)}
    nodes: list[FlowchartNode] = []
    arrows: list[tuple[int, int, tuple[str, ...]]] = []
    for number, plan in enumerate(plans, 1):
        is_past = run.is_over or number < len(plans)
        places = {step.id: len(nodes) + place for place, step in enumerate(plan.steps)}
        for step in plan.steps:
            join = () if step.join == JOINS[0] else (step.join,)
            arrows += [(places[each], places[step.id], join) for each in step.after if each in places]
            entry = calls.get(f"p{number}.{step.id}")
            unstarted = StepStatus.NOT_RUN if is_past else StepStatus.PENDING
            status = unstarted if entry is None else read_step_status(entry)
            title = step.tool or step.question or step.goal
            nodes.append(FlowchartNode(lines=(title, status.replace("_", " ")), fill=_FILLS[status]))
    return Flowchart(nodes=tuple(nodes), arrows=tuple(arrows))
