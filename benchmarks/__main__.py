"""`python -m benchmarks [ROW ...]`: measure agentfsm against a bare loop, print a table, and write it as JSON.

The floor and agentfsm take turns in one process. What is printed is the median of each, the spread of ours (the
middle half of the measurements), and the median of the ratios. Absolute figures only help to imagine it, except in the
lines whose goal has a unit. The tool declares `read_only=True`. The column "bare" has the figure that goals refer to
for a bare `@tool`, whose calls run one by one. A row is a name ("crowd") or a name with a case ("crowd:cpu").

Further words, each by itself: `peers` measures the other frameworks, `growth` what long runs and many of them cost,
`lists` what a page of a list of 100,000 runs costs, `options` what each option costs, `plans` the tokens of plans,
`dialogues` whether recorded dialogues may run in parallel, `graded` which faults of a model an evaluation sees,
`retail` which of an agent that serves simulated users by a policy, without a network, `traces` what live traces cost,
`totals` what reports on many runs cost, `upgrades` how long 10,000 open runs are compared with a release, `what_if` how
long what-if runs take, `studio` how long its pages take to show, `recall` how well and how fast a
memory is searched, `selection` how often the right tool is chosen, and `api_tools` how an agent with the 1,222 tools
of GitHub's API fares, all for which they need the network, and `injections` which attacks of agentdojo succeed under a
guard, `direct_harm` which of our own, `searches` and `questions` how often guards ask in ordinary work, and
`detection` which of their texts a list finds.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.measure import Row, machine, short
from benchmarks.one import chosen, entries

OUT = Path(".agentfsm/bench.json")
OTHERS = (
    "peers",
    "growth",
    "lists",
    "claims",
    "options",
    "plans",
    "dialogues",
    "graded",
    "retail",
    "recall",
    "selection",
    "api_tools",
    "engines",
    "event_streams",
    "open_streams",
    "starts",
    "injections",
    "detection",
    "direct_harm",
    "searches",
    "questions",
    "totals",
    "traces",
    "upgrades",
    "what_if",
    "studio",
)
HEAD = (
    f"{'row':<16}{'floor':>9}{'agentfsm':>10} {'unit':<6}{'spread':>6}{'ratio':>8}{'bare':>12}{'goal':>13}"
    f"{'stretch':>11}     what"
)


def line(row: Row, entry: dict[str, Any], bare: dict[str, Any]) -> str:
    """Return a line of the table."""
    if why := entry.get("failed") or entry.get("not_offered"):
        return f"{row.id:<16}{why}"
    figure = reached(row, entry)
    mark = "" if row.goal is None else "yes" if figure is not None and figure <= row.goal else "NO"
    return (
        f"{row.id:<16}{entry['floor']:>9.4g}{entry['own']:>10.4g} {row.unit:<6}{entry['own_spread']:>6.0%}"
        f"{entry['ratio']:>7.2f}x{wanted(row, reached(row, bare)) or 'fails':>12}"
        f"{wanted(row, row.goal):>13}{wanted(row, row.stretch):>11} {mark:<4}{row.what}"
    )


def reached(row: Row, entry: dict[str, Any]) -> float | None:
    """Return the figure that a goal refers to, None where there is none."""
    figure: float | None = entry.get("own" if row.absolute else "ratio")
    return figure


def wanted(row: Row, figure: float | None) -> str:
    """Return a goal with its unit."""
    return "" if figure is None else f"{short(figure)}{' ' + row.unit if row.absolute and row.unit != 'x' else 'x'}"


def measured(names: list[str]) -> int:
    """Measure the rows of these names, or all."""
    rows = chosen(names)
    told = machine()
    print(f"Python {told['python']}, {told['processor']}; medians; ratio = agentfsm / floor\n\n{HEAD}", flush=True)
    found = []
    for row, entry, bare in zip(rows, entries("benchmarks.ours", rows), entries("benchmarks.bare", rows), strict=True):
        print(line(row, entry, bare), flush=True)
        about = {"what": row.what, "goal": row.goal, "stretch": row.stretch, "absolute": row.absolute}
        found += [{**entry, **about}, {**bare, **about}]
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps({**told, "rows": found}, indent=2) + "\n")
    print(f"\nwritten to {OUT}")
    return int(any("failed" in entry for entry in found))


def main(words: list[str]) -> int:
    """Measure what is named."""
    if words[:1] and words[0] in OTHERS:
        other: Callable[..., int] = import_module(f"benchmarks.{words[0]}").main
        return other(*words[1:])
    return measured(words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
