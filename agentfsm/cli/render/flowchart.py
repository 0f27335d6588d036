"""Pictures of an agent and of a run, as Mermaid flowcharts or for Graphviz."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

import attrs

from agentfsm.cli.render.formatting import NOTE_CHARS
from agentfsm.cli.render.pending import format_wait
from agentfsm.cli.resolve.agent_target import find_wrapped_agent
from agentfsm.core.machine import START, State, next_state
from agentfsm.core.text_safety import one_line
from agentfsm.core.value import Value

if TYPE_CHECKING:
    from agentfsm.agent import Agent
    from agentfsm.core.events import Event
    from agentfsm.core.run import Run
    from agentfsm.tools.tool import Tool

# Shapes of nodes: the brackets of Mermaid, and the name that Graphviz has for it.
ROUND: Final = ("([", "])", "ellipse")
BOX: Final = ("[", "]", "box")
CYLINDER: Final = ("[(", ")]", "cylinder")
# Where a run stands.
CURRENT_STATE: Final = ("[[", "]]", "doubleoctagon")


@attrs.frozen(kw_only=True)
class FlowchartNode(Value):
    """A node of the picture: a shape with lines of text."""

    lines: tuple[str, ...]
    shape: tuple[str, str, str] = BOX


@attrs.frozen(kw_only=True)
class Flowchart(Value):
    """Nodes and the arrows between them."""

    nodes: tuple[FlowchartNode, ...]
    arrows: tuple[tuple[int, int, tuple[str, ...]], ...]
    """From and to, as indexes of nodes, and the lines beside the arrow."""


def render_mermaid(chart: Flowchart) -> str:
    """Write a picture as a Mermaid flowchart."""
    lines = ["flowchart LR"]
    for number, node in enumerate(chart.nodes):
        opening, closing, _ = node.shape
        lines.append(f'    n{number}{opening}"{_escape_mermaid(node.lines)}"{closing}')
    for source, target, beside in chart.arrows:
        label = f'|"{_escape_mermaid(beside)}"|' if beside else ""
        lines.append(f"    n{source} -->{label} n{target}")
    return "\n".join(lines)


def render_dot(chart: Flowchart) -> str:
    """Write a picture for Graphviz."""
    lines = ["digraph agentfsm {", "    rankdir=LR"]
    for number, node in enumerate(chart.nodes):
        lines.append(f'    n{number} [label="{_escape_dot(node.lines)}", shape={node.shape[2]}]')
    for source, target, beside in chart.arrows:
        label = f' [label="{_escape_dot(beside)}"]' if beside else ""
        lines.append(f"    n{source} -> n{target}{label}")
    return "\n".join([*lines, "}"])


RENDERERS: Final[Mapping[str, Callable[[Flowchart], str]]] = {"mermaid": render_mermaid, "dot": render_dot}

# What stands for itself in a quoted text of Mermaid; all else is written by its number.
_MERMAID_SAFE: Final = frozenset(" _-.,:/()")

# Graphviz reads backslashes and the entities of HTML in a quoted text.
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
    """Return the picture of an agent: its tools, what they declare, the agents behind them, its sources of tools.

    A source that was not asked yet, such as an MCP server, is drawn without its tools; nothing is started for it.
    """
    return _AgentDrawing().draw(agent)


@attrs.define(eq=False, repr=False)
class _AgentDrawing:
    nodes: list[FlowchartNode] = attrs.field(factory=list)
    arrows: list[tuple[int, int, tuple[str, ...]]] = attrs.field(factory=list)
    _agents: dict[int, int] = attrs.field(factory=dict)
    """The node of each agent, by its identity: an agent that several call is drawn once."""

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
        else:  # before the arrows of the agent behind it
            self.arrows.insert(place, (above, self._add_agent(inner), (tool.name, *marks)))

    def _add_node(self, *lines: str, shape: tuple[str, str, str] = BOX) -> int:
        self.nodes.append(FlowchartNode(lines=lines, shape=shape))
        return len(self.nodes) - 1


def describe_marks(tool: Tool[..., Any]) -> tuple[str, ...]:
    """Return what a tool declares that decides whether and when its calls run, a line if there is anything."""
    approval = tool.requires_approval
    marks = {
        "read-only": tool.read_only,
        "idempotent": tool.idempotent and find_wrapped_agent(tool) is None,
        "answered from outside": tool.waits_for is not None,
        "needs approval": approval is True,
        "may need approval": callable(approval),
    }
    said = ", ".join(mark for mark, holds in marks.items() if holds)
    return (said,) if said else ()


def draw_run(run: Run[Any], events: Iterable[Event]) -> Flowchart:
    """Return the picture of a run: the states that it was in, how often each event led on, and where it stands.

    Args:
        run: The run after the events.
        events: Its journal, from the first.
    """
    state, taken, seen = START, Counter[tuple[State, State, str]](), {START: 0}
    for event in events:
        before, state = state, next_state(state, event)
        seen.setdefault(state, len(seen))
        taken[before, state, type(event).__name__] += 1
    beside: dict[tuple[int, int], list[str]] = {}
    for (source, target, name), times in taken.items():
        beside.setdefault((seen[source], seen[target]), []).append(f"{name} {times}")
    nodes = [
        FlowchartNode(lines=(each.upper(), *_describe_position(run)), shape=CURRENT_STATE)
        if each is state
        else FlowchartNode(lines=(each.upper(),))
        for each in seen
    ]
    arrows = [(source, target, tuple(lines)) for (source, target), lines in beside.items()]
    return Flowchart(nodes=tuple(nodes), arrows=tuple(arrows))


def _describe_position(run: Run[Any]) -> list[str]:
    """Return what there is to say of a run where it stands."""
    if run.stop_reason is not None:
        return [f"turn {run.turn}, {run.stop_reason}"]
    return [f"turn {run.turn}", *(f"waits for {format_wait(item, run.id)}" for item in run.pending if run.is_waiting)]
