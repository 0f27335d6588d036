"""Play pairs of programs again, and tell all that happens in them: `python -m tests.changed SEED...`."""

from __future__ import annotations

import sys

from tests.changed.play import backend_of, play, show, store_of


def tell(line: str) -> None:
    """Write a line."""
    sys.stdout.write(f"{line}\n")


def main(seeds: list[str]) -> int:
    """Play each seed on the loop and the store that belong to it; return 1 where a promise was broken."""
    broken = False
    for seed in map(int, seeds):
        with store_of(seed) as store:
            world = play(seed, store, backend_of(seed), tell)
        tell(show(world))
        broken = broken or bool(world.wrong)
    return int(broken)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
