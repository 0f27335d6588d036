"""Pictures of an agent and of a run, as Mermaid flowcharts or for Graphviz."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

import attrs

from agentfsm.cli.plain import NOTE_CHARS
from agentfsm.cli.target import agent_behind
from agentfsm.cli.waits import wish
from agentfsm.core.clean import one_line
from agentfsm.core.machine import START, State, next_state
from agentfsm.core.value import Value

if TYPE_CHECKING:
    from agentfsm.agent import Agent
    from agentfsm.core.events import Event
    from agentfsm.core.run import Run
    from agentfsm.tools.tool import Tool

# Shapes of nodes: the brackets of Mermaid, and the name that Graphviz has for it.
ROUND: Final = ("([", "])", "ellipse")
BOX: Final = ("[", "]", "box")
STORE: Final = ("[(", ")]", "cylinder")
# Where a run stands.
BOLD: Final = ("[[", "]]", "doubleoctagon")


@attrs.frozen(kw_only=True)
class Node(Value):
    """A node of the picture: a shape with lines of text."""

    lines: tuple[str, ...]
    shape: tuple[str, str, str] = BOX


@attrs.frozen(kw_only=True)
class Picture(Value):
    """Nodes and the arrows between them."""

    nodes: tuple[Node, ...]
    arrows: tuple[tuple[int, int, tuple[str, ...]], ...]
    # From and to, as indexes of nodes, and the lines beside the arrow.


def mermaid(picture: Picture) -> str:
    """Write a picture as a Mermaid flowchart."""
    lines = ["flowchart LR"]
    for number, node in enumerate(picture.nodes):
        opening, closing, _ = node.shape
        lines.append(f'    n{number}{opening}"{_in_mermaid(node.lines)}"{closing}')
    for source, target, beside in picture.arrows:
        label = f'|"{_in_mermaid(beside)}"|' if beside else ""
        lines.append(f"    n{source} -->{label} n{target}")
    return "\n".join(lines)


def dot(picture: Picture) -> str:
    """Write a picture for Graphviz."""
    lines = ["digraph agentfsm {", "    rankdir=LR"]
    for number, node in enumerate(picture.nodes):
        lines.append(f'    n{number} [label="{_in_dot(node.lines)}", shape={node.shape[2]}]')
    for source, target, beside in picture.arrows:
        label = f' [label="{_in_dot(beside)}"]' if beside else ""
        lines.append(f"    n{source} -> n{target}{label}")
    return "\n".join([*lines, "}"])


DRAW: Final[Mapping[str, Callable[[Picture], str]]] = {"mermaid": mermaid, "dot": dot}

# What stands for itself in a quoted text of Mermaid; all else is written by its number.
_PLAIN: Final = frozenset(" _-.,:/()")

# Graphviz reads backslashes and the entities of HTML in a quoted text.
_ESCAPED: Final = str.maketrans({"\\": "\\\\", '"': '\\"', "&": "&amp;"})


def _in_mermaid(lines: Iterable[str]) -> str:
    return "<br/>".join(
        "".join(each if each.isalnum() or each in _PLAIN else f"#{ord(each)};" for each in one_line(line, NOTE_CHARS))
        for line in lines
    )


def _in_dot(lines: Iterable[str]) -> str:
    return r"\n".join(one_line(line, NOTE_CHARS).translate(_ESCAPED) for line in lines)


def of_agent(agent: Agent[Any]) -> Picture:
    """Return the picture of an agent: its tools, what they declare, the agents behind them, its sources of tools.

    A source that was not asked yet, such as an MCP server, is drawn without its tools; nothing is started for it.
    """
    return _Drawing().of(agent)


@attrs.define(eq=False, repr=False)
class _Drawing:
    nodes: list[Node] = attrs.field(factory=list)
    arrows: list[tuple[int, int, tuple[str, ...]]] = attrs.field(factory=list)
    _agents: dict[int, int] = attrs.field(factory=dict)
    # The node of each agent, by its identity: an agent that several call is drawn once.

    def of(self, agent: Agent[Any]) -> Picture:
        self._agent(agent)
        return Picture(nodes=tuple(self.nodes), arrows=tuple(self.arrows))

    def _agent(self, agent: Agent[Any]) -> int:
        if id(agent) in self._agents:
            return self._agents[id(agent)]
        node = self._agents[id(agent)] = self._add(agent.name, agent.model.name, shape=ROUND)
        from_sources = {tool.name for source in agent.tools.sources for tool in source.tools}
        for tool in agent.tools:
            if tool.name not in from_sources:
                self._tool(node, tool)
        for source in agent.tools.sources:
            kind = type(source).__name__
            below = self._add(str(getattr(source, "name", kind)), kind, shape=STORE)
            self.arrows.append((node, below, ()))
            for tool in source.tools:
                self._tool(below, tool)
        return node

    def _tool(self, above: int, tool: Tool[..., Any]) -> None:
        marks, place = marks_of(tool), len(self.arrows)
        if (inner := agent_behind(tool)) is None:
            self.arrows.append((above, self._add(tool.name, *marks), ()))
        else:  # before the arrows of the agent behind it
            self.arrows.insert(place, (above, self._agent(inner), (tool.name, *marks)))

    def _add(self, *lines: str, shape: tuple[str, str, str] = BOX) -> int:
        self.nodes.append(Node(lines=lines, shape=shape))
        return len(self.nodes) - 1


def marks_of(tool: Tool[..., Any]) -> tuple[str, ...]:
    """Return what a tool declares that decides whether and when its calls run, a line if there is anything."""
    approval = tool.requires_approval
    marks = {
        "read-only": tool.read_only,
        "idempotent": tool.idempotent and agent_behind(tool) is None,
        "answered from outside": tool.waits_for is not None,
        "needs approval": approval is True,
        "may need approval": callable(approval),
    }
    said = ", ".join(mark for mark, holds in marks.items() if holds)
    return (said,) if said else ()


def of_run(run: Run[Any], events: Iterable[Event]) -> Picture:
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
        Node(lines=(each.upper(), *_where(run)), shape=BOLD) if each is state else Node(lines=(each.upper(),))
        for each in seen
    ]
    arrows = [(source, target, tuple(lines)) for (source, target), lines in beside.items()]
    return Picture(nodes=tuple(nodes), arrows=tuple(arrows))


def _where(run: Run[Any]) -> list[str]:
    """Return what there is to say of a run where it stands."""
    if run.stop_reason is not None:
        return [f"turn {run.turn}, {run.stop_reason}"]
    return [f"turn {run.turn}", *(f"waits for {wish(item, run.id)}" for item in run.pending if run.is_waiting)]
