"""Verdicts of guards, the rules that decide before a call starts whether it may run."""

from __future__ import annotations

from enum import StrEnum


class GuardVerdict(StrEnum):
    """Verdict of a guard on a call, from the mildest to the strictest."""

    ALLOW = "allow"
    """The call may run, as far as guards are concerned."""

    ASK = "ask"
    """The call runs if a person approves it."""

    REFUSE = "refuse"
    """The call does not run. The model reads the reason."""

    @property
    def strictness(self) -> int:
        """Rank of the verdict, from 0; of several verdicts the strictest counts."""
        return _STRICTNESS[self]


_STRICTNESS = {verdict: rank for rank, verdict in enumerate(GuardVerdict)}
