"""Play pairs of programs again, and tell all that happens in them: `python -m tests.changed [POSTGRES_URL] SEED...`."""

from __future__ import annotations

import sys

from tests.changed.change_play import backend_of, play, show, store_of


def tell(line: str) -> None:
    """Write a line."""
    sys.stdout.write(f"{line}\n")


def main(words: list[str]) -> int:
    """Play each seed on the loop and the store that belong to it; return 1 where a promise was broken."""
    broken, postgres = False, next((word for word in words if not word.isdecimal()), "")
    for seed in [int(word) for word in words if word.isdecimal()]:
        with store_of(seed, postgres) as store:
            world = play(seed, store, backend_of(seed), tell)
        tell(show(world))
        broken = broken or bool(world.wrong)
    return int(broken)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
