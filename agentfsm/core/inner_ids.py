"""Ids of the runs that the function of a call starts: `RUN.CALL~N.HASH`, so that a repeated call finds them.

N counts the runs that an attempt at the call starts, whatever their agents: an agent may be renamed between two
attempts, and the run must be found then, too. The hash is that of the call's arguments: a call that started
early, of a reply that was then dropped, has the same id as the call that the next reply requests. No other run has an
id of this form.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, NamedTuple

from agentfsm.core.fingerprint import short_hash

if TYPE_CHECKING:
    from agentfsm.core.messages import ToolCall

# Hexadecimal digits of the hash of the arguments: it tells a few calls apart, and the id stays short.
HASH_DIGITS: Final = 6
_INNER_ID: Final = re.compile(r"(.+)\.([a-z]+[0-9.]+)~\d+\.[0-9a-f]{6}")


class CallOfRun(NamedTuple):
    """A call, and the run that made it."""

    run_id: str
    call_id: str


def find_caller(run_id: str) -> CallOfRun | None:
    """Return the call whose function started a run, from the id of the run; None if its id is not made of a call."""
    found = _INNER_ID.fullmatch(run_id)
    return None if found is None else CallOfRun(found[1], found[2])


def build_inner_id(run_id: str, call: ToolCall, number: int) -> str:
    """Return the id of a run that the function of a call starts.

    Args:
        run_id: Id of the run that made the call.
        call: The call.
        number: Number of the new run among those of the attempt, from 1.
    """
    return f"{run_id}.{call.id}~{number}.{short_hash(call.arguments, HASH_DIGITS)}"
