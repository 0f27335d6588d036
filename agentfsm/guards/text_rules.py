"""Rules of guards about the form in which a model reads results."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import attrs

from agentfsm.core.labels import Label
from agentfsm.core.value import Value
from agentfsm.ports.guards import CallGuard

if TYPE_CHECKING:
    from agentfsm.ports.guards import GuardDecision, GuardedCall, ToolTraits


@attrs.frozen(kw_only=True)
class FenceRule(CallGuard, Value):
    """A rule by which the model reads untrusted results between marks, without hidden characters."""

    def __str__(self) -> str:
        return "fence_untrusted()"

    def concerns(self, tool: ToolTraits) -> bool:  # noqa: ARG002  it decides on no call
        """Return False: the rule decides on no call."""
        return False

    def decide(self, call: GuardedCall) -> GuardDecision | None:  # noqa: ARG002  as above
        """Return None: the rule decides on no call."""
        return None

    def fences(self, labels: Iterable[Label]) -> bool:
        """Return whether one of the labels is `untrusted`."""
        return Label.UNTRUSTED in labels


def fence_untrusted() -> FenceRule:
    """Return a rule by which the model reads results labelled `untrusted` between marks that they cannot close.

    The marks have a name that is random for each run. Hidden characters are left out, and a note explains the marks to
    the model. The journal has the result as it was.
    """
    return FenceRule()
