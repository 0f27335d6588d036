"""The recorded journals as a file: a line for each seed, then one for each run with its events, each with a short hash.

Events of one append are joined by "+". The last part counts what the seeds cover, by name.
"""

from __future__ import annotations

import base64
import hashlib
from collections import Counter
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Final

import attrs

from tests.recorded.cast import features_of
from tests.recorded.seeded_play import Line, play

FILE: Final = Path(__file__).parent / "journals.txt"
SEEDS: Final = range(300)
# Characters of the hash of an event, 6 bits each, and of a seed, 4 bits each.
EVENT_CHARS: Final = 3
SEED_CHARS: Final = 16
COVERS: Final = "covers"
TOP: Final = """\
# The journals of seeded runs, as tests/recorded plays them. Written by `python -m tests.recorded record`.
# Record again only where a change of behaviour is intended, and say so in the commit; look at the changed lines first.
# `python -m tests.recorded tell SEED` prints the events of a seed; do so in a checkout of both commits, and compare.
"""


@attrs.frozen
class Journals:
    """The journals of a seed."""

    runs: dict[str, tuple[Line, ...]]
    covered: Counter[str]

    def write(self, seed: int) -> list[str]:
        """Return the lines of the file."""
        whole = hashlib.sha256()
        rows: list[str] = []
        for run_id, lines in self.runs.items():
            for line in lines:
                whole.update(f"{run_id} {line.begins} {line.name} {line.text}\n".encode())
            marks = [f"{' ' if line.begins else '+'}{line.name}:{_mark(line.text)}" for line in lines]
            rows.append(f"  {run_id}{''.join(marks)}")
        return [f"{seed} {whole.hexdigest()[:SEED_CHARS]} {', '.join(features_of(seed))}", *rows]


def _mark(text: str) -> str:
    found = hashlib.sha256(text.encode()).digest()
    return base64.urlsafe_b64encode(found)[:EVENT_CHARS].decode()


@cache
def journals(seed: int) -> Journals:
    """Play a seed; once in a process."""
    world = play(seed)
    return Journals({run_id: tuple(lines) for run_id, lines in world.lines.items()}, world.covered)


def record(seeds: Iterable[int] = SEEDS) -> None:
    """Write the file."""
    rows, covered = [TOP.rstrip("\n")], Counter[str]()
    for seed in seeds:
        played = journals(seed)
        rows += played.write(seed)
        covered.update(played.covered)
    rows.append(COVERS)
    rows += [f"  {number} {name}" for name, number in sorted(covered.items())]
    FILE.write_text("\n".join(rows) + "\n")


@cache
def read() -> tuple[dict[int, list[str]], Counter[str]]:
    """Return the lines of each seed, and how often the seeds together cover each thing."""
    seeds: dict[int, list[str]] = {}
    covered = Counter[str]()
    current: list[str] | None = None
    for row in FILE.read_text().splitlines():
        if row.startswith("#"):
            continue
        if row == COVERS:
            current = None
        elif not row.startswith(" "):
            current = seeds[int(row.partition(" ")[0])] = [row]
        elif current is not None:
            current.append(row)
        else:
            number, _, name = row.strip().partition(" ")
            covered[name] = int(number)
    return seeds, covered


def difference(seed: int) -> str:
    """Return what differs first between the journals of a seed and those recorded; empty if nothing does."""
    played, recorded = journals(seed), read()[0].get(seed, [])
    now = played.write(seed)
    if now == recorded:
        return ""
    head = f"seed {seed} ({', '.join(features_of(seed))}): "
    if not recorded:
        return f"{head}it was not recorded"
    before = {row.split()[0]: row for row in recorded[1:]}
    for row in now[1:]:
        run_id = row.split()[0]
        if row != before.get(run_id):
            return head + _first_of(run_id, played.runs[run_id], _marks(row), _marks(before.get(run_id, "")))
    gone = [each for each in before if each not in played.runs]
    return f"{head}{f'the runs {gone} are gone' if gone else 'the order of its runs, or a hash, differs'}"


def _marks(row: str) -> list[str]:
    return row.strip().replace("+", " +").split()[1:]


def _first_of(run_id: str, lines: tuple[Line, ...], now: list[str], before: list[str]) -> str:
    at = next(
        (n for n, (one, two) in enumerate(zip(now, before, strict=False)) if one != two), min(len(now), len(before))
    )
    lead = " ".join(each.partition(":")[0] for each in before[max(0, at - 4) : at])
    was = before[at] if at < len(before) else "nothing"
    told = f"{now[at]}\n  {lines[at].text}" if at < len(now) else "nothing"
    return f"event {at + 1} of {run_id}, after {lead or 'its beginning'}\n  recorded: {was}\n  now: {told}"
