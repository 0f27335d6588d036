"""`python -m benchmarks.one MODULE [ROW ...]`: measure one contender against the floor, a JSON object for each row.

MODULE has a function `contender()`, for example `benchmarks.ours` or `benchmarks.peers.NAME`. ROW is a name ("crowd")
or a name with a case ("crowd:cpu"). Each row has a process of its own, so that none begins with what another left
behind, and one that fails, never ends or takes its process along becomes an entry with the reason:
`{"row": ..., "failed": ...}`, or `{"row": ..., "not_offered": ...}` where the framework has no such thing.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import version
from typing import Any

from benchmarks.contender import NotOfferedError
from benchmarks.floor import Floor
from benchmarks.measure import Row, measure
from benchmarks.rows import rows

# Seconds for a row: among the peers there are crowds that take a minute, and some that never end.
LIMIT_S = 180.0
# Measure in this process; the last argument is a row's id.
HERE = "--here"


def chosen(names: list[str]) -> list[Row]:
    """Return the rows of these names, or all.

    Raises:
        SystemExit: when a name is unknown.
    """
    known = rows()
    if unknown := set(names) - {row.name for row in known} - {row.id for row in known}:
        ids = ", ".join(dict.fromkeys(row.name for row in known))
        sys.exit(f"no row is called {', '.join(sorted(unknown))}; there are: {ids}")
    return [row for row in known if not names or row.name in names or row.id in names]


def entries(module: str, wanted: list[Row], python: str = sys.executable) -> Iterator[dict[str, Any]]:
    """Measure each row in a process of its own, of that Python, and give what it came to."""
    for row in wanted:
        command = [python, "-m", "benchmarks.one", HERE, module, row.id]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)  # noqa: S603
        except subprocess.TimeoutExpired:
            yield {"row": row.id, "failed": f"did not end within {LIMIT_S:.0f} s"}
            continue
        lines = done.stdout.splitlines()
        if done.returncode == 0 and lines:
            yield json.loads(lines[-1])
        else:
            last = (done.stderr.strip().splitlines() or [f"ended with {done.returncode}"])[-1]
            yield {"row": row.id, "failed": last}


def here(module: str, row: Row) -> dict[str, Any]:
    """Measure a row in this process."""
    contender = import_module(module).contender()
    told = {
        "row": row.id,
        "contender": contender.name,
        "versions": {each: version(each) for each in contender.packages},
    }
    try:
        found = asyncio.run(measure(row, Floor(), contender))
    except NotOfferedError as error:
        return {**told, "not_offered": str(error)}
    except Exception as error:  # noqa: BLE001  what a peer dies of is what is to be told
        traceback.print_exc()
        words = str(error).strip().splitlines()
        return {**told, "failed": f"{type(error).__name__}: {words[0] if words else ''}"}
    return {**told, "unit": row.unit, **dataclasses.asdict(found)}


def main(words: list[str]) -> None:
    """Measure, and print a line for each row as it is there."""
    if words[:1] == [HERE]:
        _, module, row_id = words
        [row] = [row for row in rows() if row.id == row_id]
        print(json.dumps(here(module, row)), flush=True)
        os._exit(0)  # threads that a failed peer left behind would hold the process, and its reason with it
    if not words:
        sys.exit(__doc__)
    module, *names = words
    for entry in entries(module, chosen(names)):
        print(json.dumps(entry), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
