"""Claims: what an answer says was done. `claimed_calls` finds the calls that did it.

An answer with claims names a call, by its tool and its arguments, for each act that it says was done. No text is read.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import attrs

from agentfsm.core.json_text import dump_compact
from agentfsm.core.shortening import shorten
from agentfsm.core.validation import BOOL
from agentfsm.core.value import Value

# Maximum of characters of a claim's arguments that are shown.
SHOWN_CHARS: Final = 200


@attrs.frozen(kw_only=True)
class Claims(Value):
    """Requirement that answers name a call for each act that they say was done: `Agent(..., claims=Claims())`.

    Args:
        complete: Whether an answer has to name every call of the run that may have changed something and is done.

    Raises:
        MisuseError: when a value is of a wrong type.
    """

    complete: bool = attrs.field(default=False, validator=BOOL)
    """Whether an answer has to name every call of the run that may have changed something and is done. By default it
    may leave some out, since what it does not mention is not wrong; `agentfsm audit --claims` lists them.
    """


@attrs.frozen(kw_only=True)
class Claim(Value):
    """One act that an answer says was done."""

    tool: str
    """Name of the tool, as the model wrote it."""

    arguments: dict[str, Any]
    """Arguments as the model wrote them. Empty if a guard has filtered them."""

    call_id: str = ""
    """Id of the call that did it, in this run or one that it continues; empty if no call did."""

    fault: str = ""
    """Reason why no call did it, for the model and for people; empty if one did."""

    def __str__(self) -> str:
        return f"{self.tool}({shorten(dump_compact(self.arguments), SHOWN_CHARS)})"


def list_not_done(claims: Iterable[Claim]) -> tuple[Claim, ...]:
    """Return the claims that no call has done."""
    return tuple([claim for claim in claims if not claim.call_id])


def format_claims(claims: Iterable[Claim]) -> str:
    """Return the acts that were not done, with the reasons, in one line."""
    return "; ".join([f"{claim}: {claim.fault}" for claim in claims])
