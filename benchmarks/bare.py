"""agentfsm as a contender whose tool is a bare `@tool`, which declares nothing.

So each call is taken for an effect that may not be made twice: it runs alone, and its start is on the disk before its
first instruction. `benchmarks.ours` is the same with `read_only=True`.
"""

from __future__ import annotations

from benchmarks.contender import Contender
from benchmarks.ours import Ours


class Bare(Ours):
    """agentfsm with a tool that declares nothing."""

    name = "agentfsm, bare `@tool`"
    read_only = False


def contender() -> Contender:
    """Return it."""
    return Bare()
