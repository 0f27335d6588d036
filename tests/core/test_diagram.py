"""The picture is the table: each drawing is parsed back into arrows."""

import re

from agentfsm import TABLE
from agentfsm.core import machine as diagram
from agentfsm.core.machine import START

ARROWS = {(s.upper(), t.upper(), kind.__name__) for s, row in TABLE.items() for kind, t in row.items()}
FINAL = {state.upper() for state, row in TABLE.items() if not row}


def parsed(lines, pattern):
    """Return the arrows of the lines that fit the pattern (from, to, events), each line once, and the other lines."""
    found, others = [], []
    for line in lines:
        if match := re.fullmatch(pattern, line.strip()):
            source, target, events = match.groups()
            found += [(source, target, event) for event in events.split(", ")]
        else:
            others.append(line.strip())
    assert len(found) == len(set(found))
    return set(found), others


def test_mermaid():
    """The Mermaid drawing has the table's arrows, one start, and an end for each final state."""
    arrows, others = parsed(diagram.mermaid().splitlines(), r"(\w+) --> (\w+): (.+)")
    assert arrows == ARROWS
    assert others == [
        "stateDiagram-v2",
        f"[*] --> {START.upper()}",
        *(f"{state} --> [*]" for state in ("DONE", "ERROR")),
    ]


def test_dot():
    """The Graphviz drawing has the table's arrows, and a double circle for each final state."""
    arrows, others = parsed(diagram.dot().splitlines(), r'(\w+) -> (\w+) \[label="(.+)"\]')
    assert arrows == ARROWS
    shapes = dict(re.fullmatch(r"(\w+) \[shape=(\w+)\]", line).groups() for line in others[2:-1])
    assert shapes == {s.upper(): "doublecircle" if s.upper() in FINAL else "box" for s in TABLE}
    assert (others[0], others[-1]) == ("digraph agentfsm {", "}")


def test_text():
    """The text has the table's arrows, a line for each pair of states, and names the final ones."""
    arrows, others = parsed(diagram.text().splitlines(), r"(\w+) +-> (\w+) +(.+)")
    assert arrows == ARROWS
    assert {line.split()[0] for line in others} == FINAL
    assert all(line.endswith("(final)") for line in others)
    assert len({line.index("->") for line in diagram.text().splitlines() if "->" in line}) == 1
