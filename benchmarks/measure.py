"""What a row is, and how it is measured."""

from __future__ import annotations

import dataclasses
import gc
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.contender import Contender

# Measurements of each that are thrown away: imports, caches, the adaptive interpreter.
WARM_UP = 3
# A pair that takes longer has warmed up by itself, and one of them is thrown away.
SLOW_S = 2.0
# Seconds after which a row is measured well enough, however few the pairs are: some take a minute each.
ENOUGH_S = 6.0

# Does the work once, checks that it was done, and returns the figure.
Sample = Callable[[], Awaitable[float]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table: one figure."""

    name: str
    case: str = ""
    # Where a row has several lines: which.
    what: str
    unit: str
    ready: Callable[[Contender], AbstractAsyncContextManager[Sample]]
    # Makes everything that is not measured, and takes it away afterwards.
    goal: float | None = None
    # None: it is there to be read.
    stretch: float | None = None
    absolute: bool = False
    # Whether goal and stretch are in the unit; else they are ratios to the floor.
    repeats: int = 30
    peers: bool = True
    # Whether the peers are measured as well.

    @property
    def id(self) -> str:
        """The name and the case."""
        return f"{self.name}:{self.case}" if self.case else self.name


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """Two sides that took turns."""

    floor: float
    # Medians, in the row's unit.
    own: float
    floor_spread: float
    # The middle half of the measurements, as a share of their median.
    own_spread: float
    ratio: float
    # How many times the floor: the median of the pairs' ratios, which bears with a machine that is slow for a while.
    pairs: int

    @property
    def more(self) -> float:
        """What it costs beyond the floor, in the unit."""
        return (self.ratio - 1) * self.floor


async def measure(row: Row, floor: Contender, contender: Contender) -> Measured:
    """Measure a row on the floor and on a contender."""
    async with row.ready(floor) as bare, row.ready(contender) as own:
        return await alternate(bare, own, row.repeats)


async def alternate(floor: Sample, own: Sample, repeats: int) -> Measured:
    """Let two sides take turns."""
    begun = time.perf_counter()
    await pair(floor, own)
    for _ in range(0 if time.perf_counter() - begun > SLOW_S else WARM_UP - 1):
        await pair(floor, own)
    pairs: list[tuple[float, float]] = []
    begun = time.perf_counter()
    while len(pairs) < repeats and (not pairs or time.perf_counter() - begun < ENOUGH_S):
        pairs.append(await pair(floor, own))
    below, above = [one for one, _ in pairs], [other for _, other in pairs]
    return Measured(
        floor=statistics.median(below),
        own=statistics.median(above),
        floor_spread=spread(below),
        own_spread=spread(above),
        ratio=statistics.median([other / one for one, other in pairs]),
        pairs=len(pairs),
    )


def spread(values: Sequence[float]) -> float:
    """Return the middle half of the values, as a share of their median."""
    if len(values) == 1:
        return 0.0
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / middle if middle else 0.0


async def pair(floor: Sample, own: Sample) -> tuple[float, float]:
    """Measure one after the other; what one leaves to the garbage collector is not charged to the other."""
    gc.collect()
    below = await floor()
    gc.collect()
    return below, await own()


def short(figure: float) -> str:
    """Return three digits, or all that stand before the point."""
    return f"{figure:,.0f}" if figure >= 100 else f"{figure:.3g}"


def machine() -> dict[str, Any]:
    """Return what the figures depend on."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]]),
        "python": platform.python_version(),
        "system": platform.platform(),
        "processor": processor(),
    }


def processor() -> str:
    """Return the processor by name, where the system tells."""
    told = Path("/proc/cpuinfo")
    lines = told.read_text().splitlines() if told.exists() else []
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    return f"{len(names)} x {names[0]}" if names else platform.processor() or platform.machine()
