"""Diagrams of the machine, drawn from its table."""

from __future__ import annotations

from agentfsm.core.machine import START, TABLE, State


def _arrows() -> list[tuple[State, State, list[str]]]:
    """Return (from, to, events) for each arrow, in the order of the table."""
    arrows: dict[tuple[State, State], list[str]] = {}
    for state, row in TABLE.items():
        for event, target in row.items():
            arrows.setdefault((state, target), []).append(event.__name__)
    return [(source, target, events) for (source, target), events in arrows.items()]


def mermaid() -> str:
    """Return the table as a Mermaid state diagram."""
    lines = ["stateDiagram-v2", f"    [*] --> {START.upper()}"]
    lines += [f"    {s.upper()} --> {t.upper()}: {', '.join(events)}" for s, t, events in _arrows()]
    lines += [f"    {state.upper()} --> [*]" for state, row in TABLE.items() if not row]
    return "\n".join(lines)


def dot() -> str:
    """Return the table in the DOT language of Graphviz."""
    lines = ["digraph agentfsm {", "    rankdir=LR"]
    lines += [f"    {state.upper()} [shape={'box' if row else 'doublecircle'}]" for state, row in TABLE.items()]
    lines += [f'    {s.upper()} -> {t.upper()} [label="{", ".join(events)}"]' for s, t, events in _arrows()]
    return "\n".join([*lines, "}"])


def text() -> str:
    """Return the table as aligned text, one line for each arrow."""
    rows = [(s.upper(), t.upper(), ", ".join(events)) for s, t, events in _arrows()]
    lines = [f"{source:<8} -> {target:<8} {events}" for source, target, events in rows]
    return "\n".join([*lines, *(f"{state.upper():<8}    (final)" for state, row in TABLE.items() if not row)])
