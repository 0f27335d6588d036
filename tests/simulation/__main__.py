"""Play worlds again, and tell everything that happens in them: `python tests/simulation [NAME=NUMBER...] SEED...`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # as pytest does, for `tests.support`

from play import play


def tell(line: str) -> None:
    """Write a line."""
    sys.stdout.write(f"{line}\n")


def main(words: list[str]) -> int:
    """Play each seed in a world with these fields; return 1 where a promise was broken."""
    broken, given = False, {name: float(value) for name, _, value in (word.partition("=") for word in words) if value}
    for seed in (word for word in words if "=" not in word):
        tell(f"seed {seed}")
        world = play(int(seed), tell, **given)
        for run_id, record in world.disk._records.items():
            run = record.run
            tell(f"{run_id}: {run.state}, {run.stop_reason}, version {run.version}, turn {run.turn}")
        broken = broken or bool(world.wrong)
    return int(broken)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
