"""The picture of the machine, drawn from the table."""

from __future__ import annotations

from agentfsm.core.machine import START, TABLE, State


def _arrows() -> list[tuple[State, State, list[str]]]:
    """Return (from, to, events) with the events of one arrow together, in the table's order."""
    arrows: dict[tuple[State, State], list[str]] = {}
    for state, row in TABLE.items():
        for event, target in row.items():
            arrows.setdefault((state, target), []).append(event.__name__)
    return [(source, target, events) for (source, target), events in arrows.items()]


def mermaid() -> str:
    """Draw the table as a Mermaid state diagram."""
    lines = ["stateDiagram-v2", f"    [*] --> {START.upper()}"]
    lines += [f"    {s.upper()} --> {t.upper()}: {', '.join(events)}" for s, t, events in _arrows()]
    lines += [f"    {state.upper()} --> [*]" for state, row in TABLE.items() if not row]
    return "\n".join(lines)


def dot() -> str:
    """Draw the table for Graphviz."""
    lines = ["digraph agentfsm {", "    rankdir=LR"]
    lines += [f"    {state.upper()} [shape={'box' if row else 'doublecircle'}]" for state, row in TABLE.items()]
    lines += [f'    {s.upper()} -> {t.upper()} [label="{", ".join(events)}"]' for s, t, events in _arrows()]
    return "\n".join([*lines, "}"])


def text() -> str:
    """Write the table out as aligned text, a line an arrow."""
    rows = [(s.upper(), t.upper(), ", ".join(events)) for s, t, events in _arrows()]
    lines = [f"{source:<8} -> {target:<8} {events}" for source, target, events in rows]
    return "\n".join([*lines, *(f"{state.upper():<8}    (final)" for state, row in TABLE.items() if not row)])
