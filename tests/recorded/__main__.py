"""Record the journals again, or print those of seeds: `python -m tests.recorded record`, `... tell SEED...`."""

from __future__ import annotations

import sys

from tests.recorded.cast import features_of
from tests.recorded.recording import record
from tests.recorded.seeded_play import play


def main(words: list[str]) -> int:
    """Do what is asked for; return 2 where it is not understood."""
    match words:
        case ["record"]:
            record()
        case ["tell", *seeds] if seeds:
            for seed in map(int, seeds):
                sys.stdout.write(f"seed {seed}: {', '.join(features_of(seed))}\n")
                play(seed, lambda line: sys.stdout.write(f"{line}\n"))
        case _:
            sys.stderr.write(f"{__doc__}\n")
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
