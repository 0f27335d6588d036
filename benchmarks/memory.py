"""`python -m benchmarks.memory MODULE RUNS`: KiB that each of many runs takes, alive at once; for the rows to call.

What is printed is how far the peak of the process's resident memory rises above where it was after one run, divided by
the runs. All of it counts: tasks, timers, what a store in memory keeps, garbage that nobody has collected yet.
"""

from __future__ import annotations

import asyncio
import gc
import re
import sys
from importlib import import_module
from pathlib import Path

from benchmarks.contender import Contender
from benchmarks.rows import CROWD, at_once


def resident(which: str) -> int:
    """Return the KiB that are resident: "VmRSS" for now, "VmHWM" for the peak."""
    status = Path("/proc/self/status")
    assert status.exists(), "memory is read from /proc, which only Linux has"
    found = re.search(rf"{which}:\s+(\d+) kB", status.read_text())
    assert found is not None
    return int(found[1])


async def main(contender: Contender, runs: int) -> float:
    """Return KiB per run."""
    job = contender.runs(CROWD)
    await at_once(job, CROWD, 1)
    gc.collect()
    before = resident("VmRSS")
    await at_once(job, CROWD, runs)
    return (resident("VmHWM") - before) / runs


if __name__ == "__main__":
    print(asyncio.run(main(import_module(sys.argv[1]).contender(), int(sys.argv[2]))))
