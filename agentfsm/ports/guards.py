"""Protocol of guards: rules that decide on each call before it starts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Protocol

import attrs

from agentfsm.core.guarding import GuardVerdict
from agentfsm.core.header import Header
from agentfsm.core.labels import EFFECT_LABELS, Label, LabelSource
from agentfsm.core.value import Value


@attrs.frozen(kw_only=True)
class ToolTraits(Value):
    """Traits of a tool that rules are about."""

    name: str
    """Name of the tool."""

    labels: tuple[Label, ...] = ()
    """Labels that the tool declares."""

    @property
    def effects(self) -> frozenset[Label]:
        """Labels of the effects of a call, which count from its start."""
        return EFFECT_LABELS.intersection(self.labels)


@attrs.frozen(kw_only=True)
class GuardedCall(Value):
    """A call that a guard decides on: it could run now, and has not started."""

    tool: ToolTraits
    """Traits of the tool that is called."""

    arguments: SimpleNamespace
    """Validated arguments, defaults included."""

    labels: Mapping[Label, LabelSource]
    """Labels that the run had when the call was written, each with its first source. Results of other calls of the same
    reply are not among them, because the model had not read them.
    """

    counted: Mapping[str, int]
    """Number of calls before this one that count toward a quota, by tool name: of the session, sub-agents included."""

    header: Header
    """Header of the run, with the user, the roles and the clearance."""


@attrs.frozen(kw_only=True)
class GuardDecision(Value):
    """Decision of a guard on a call, with its reason."""

    verdict: GuardVerdict
    """The verdict."""

    rule: str
    """Rule that gave the verdict, as it is written in code."""

    reason: str
    """Reason for the verdict: a clause for people and for the model."""

    labels: tuple[LabelSource, ...] = ()
    """Labels of the run that the rule is about, each with its source."""


class CallGuard(Protocol):
    """Decides on calls before they start.

    Its methods are pure functions of their arguments: the decision is committed to the journal and not made again.
    """

    def concerns(self, tool: ToolTraits) -> bool:
        """Return whether a rule can concern calls of the tool. No other call is decided on.

        Calls of such a tool do not start before the reply that requests them is complete.
        """
        ...

    def counts(self, tool: ToolTraits) -> bool:  # noqa: ARG002  a guard without quotas
        """Return whether calls of the tool count toward a quota. Default: none does."""
        return False

    def decide(self, call: GuardedCall) -> GuardDecision | None:
        """Return the decision on a call; None if no rule applies, so that the call may run."""
        ...

    def find_unreachable(self, tools: Sequence[ToolTraits]) -> Sequence[str]:  # noqa: ARG002  a single rule
        """Return a text for each rule that never asks, because another one allows all its calls. Default: none."""
        return ()

    def check_data(self, labels: Iterable[Label], header: Header) -> GuardDecision | None:  # noqa: ARG002  as above
        """Return the refusal if a run must not read data with these labels, else None. Default: None.

        A result with such data is withheld from the model. A run that has read it, from its prompt for example, ends
        with the stop reason GUARD before the model is asked again.
        """
        return None
