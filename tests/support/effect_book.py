"""Effects of flows as lines of a file, which outlives the processes that have them."""

from __future__ import annotations

import json
import os
from pathlib import Path

from agentfsm import Found, RunContext
from agentfsm.testing.crash import crash_point


class EffectBook:
    """A file of effects: each key has its effect once, with a crash point before and after it."""

    def __init__(self, folder: str) -> None:
        self.path = Path(folder, "effects")

    def read(self) -> dict[str, str]:
        """Return the effects that have happened, by key.

        Raises:
            AssertionError: if a key has had two.
        """
        lines = [json.loads(line) for line in self.path.read_text().splitlines()] if self.path.exists() else []
        found = dict[str, str](lines)
        assert len(found) == len(lines)
        return found

    def act(self, key: str, effect: str) -> None:
        """Have the effect of a key, unless it has happened."""
        if key in self.read():
            return
        crash_point("effect")
        with self.path.open("a") as file:
            file.write(json.dumps([key, effect]) + "\n")
            file.flush()
            os.fsync(file.fileno())
        crash_point("effect")

    def look_up(self, ctx: RunContext[None], _arguments: object) -> Found | str:
        """Return the result of a call that has happened: its key."""
        return Found(ctx.idempotency_key) if ctx.idempotency_key in self.read() else "rerun"
