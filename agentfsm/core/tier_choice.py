"""Choice of a tier by a `Tiered` model."""

from __future__ import annotations

from typing import Final

import attrs

from agentfsm.core.usage import Spending
from agentfsm.core.value import Value

# Reason of a choice that keeps the tier of the turn before.
KEPT: Final = "kept"


@attrs.frozen(kw_only=True)
class TierChoice(Value):
    """Choice of a tier by `Tiered`, as the journal records it."""

    name: str
    """Name of the tier that replied."""

    reason: str
    """Reason for the choice: "default", "rule", "classifier", "kept" for that of the turn before, "purpose summary", or
    "escalated from small: refusal".
    """

    spent: tuple[Spending, ...] = ()
    """Parts of the usage of this reply that other models took: the classifier, and the tiers below whose replies were
    not used, also in earlier attempts. The rest of it is that of the model that replied.
    """
