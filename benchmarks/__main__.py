"""`python -m benchmarks [ROW ...]`: measure, print a table, and write it as JSON.

The floor and agentfsm take turns in one process, so that a machine that slows down slows both. What is printed is the
median of each and its spread (the middle half of the measurements), and the ratio of the medians. Absolute figures only
help to imagine it.

Two more: `python -m benchmarks durable [FOLDER]` measures what durability costs, and `python -m benchmarks selection`
how often the right tool is chosen, for which it needs the network.
"""

from __future__ import annotations

import asyncio
import json
import platform
import statistics
import sys
from pathlib import Path

import attrs

from benchmarks import durable, selection
from benchmarks.rows import Row, rows

OUT = Path(".agentfsm/bench.json")
WARM_UP = 3
# Measurements of each that are thrown away: imports, caches, the adaptive interpreter.


@attrs.frozen(kw_only=True)
class Measured:
    """A row, measured."""

    name: str
    what: str
    floor_us: float
    ours_us: float
    spread: float
    # The middle half of our measurements, as a share of their median.
    ratio: float
    goal: float


async def measure(row: Row) -> Measured:
    """Let the floor and agentfsm take turns."""
    floor: list[float] = []
    ours: list[float] = []
    for turn in range(WARM_UP + row.repeats):
        pair = await row.floor(), await row.ours()
        if turn >= WARM_UP:
            floor.append(pair[0])
            ours.append(pair[1])
    low, middle, high = statistics.quantiles(ours, n=4)
    base = statistics.median(floor)
    return Measured(
        name=row.name,
        what=row.what,
        floor_us=base,
        ours_us=middle,
        spread=(high - low) / middle,
        ratio=middle / base,
        goal=row.goal,
    )


def main(names: list[str]) -> int:
    """Measure the rows of these names, or all; or durability, or the selection of tools."""
    if names == ["selection"]:
        return selection.main()
    if names[:1] == ["durable"]:
        return durable.main(names[1:])
    chosen = [row for row in rows() if not names or row.name in names]
    if not chosen:
        known = ", ".join([*[row.name for row in rows()], "durable", "selection"])
        print(f"no row is called {', '.join(names)}; there are: {known}", file=sys.stderr)
        return 2
    print(f"Python {platform.python_version()}, {platform.machine()}; us, medians; ratio = agentfsm / floor\n")
    print(f"{'row':<9}{'floor':>10}{'agentfsm':>11}{'spread':>8}{'ratio':>8}{'goal':>7}   what")
    results = []
    for row in chosen:
        one = asyncio.run(measure(row))
        results.append(attrs.asdict(one))
        print(
            f"{one.name:<9}{one.floor_us:>10.2f}{one.ours_us:>11.2f}{one.spread:>8.0%}{one.ratio:>7.2f}x"
            f"{one.goal:>6g}x   {one.what}",
        )
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps(results, indent=2) + "\n")
    print(f"\nwritten to {OUT}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
