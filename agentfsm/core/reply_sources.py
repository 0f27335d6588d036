"""Source of a repeated reply: the run whose answer is repeated."""

from __future__ import annotations

import attrs

from agentfsm.core.labels import Label
from agentfsm.core.value import Value


@attrs.frozen(kw_only=True)
class AnswerSource(Value):
    """The run whose answer a run repeats, from the answer cache."""

    run_id: str
    """Id of the run that gave the answer. It may have been deleted since."""

    at: float
    """Time at which that run ended, seconds since 1970."""

    labels: tuple[Label, ...] = ()
    """Labels of that run. This run has them as well."""
