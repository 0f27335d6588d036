"""The grammar of run ids: ids that agentfsm derives have forms of their own, which callers cannot choose.

The keys of inputs of a run share the forms of keys: `said~HASH` is that of a message which a client sends without one.

| form | run |
|---|---|
| `RUN.CALL`, such as `order-16.t2.0` or `order-16.p1.3` | of the agent that a call, or a step of a plan, calls |
| `RUN.CALL~N.HASH` | that the function of a call starts |
| `RUN.episode` | that extracts what is learned from a run |
| `NAME:2026-11-26T02:00Z` | of a time of a schedule |
| `key~HASH`, `hook~HASH` | for a key that a client chose, or a delivery of a webhook |

So the same start finds the same run however often it is repeated, and no caller can take that id before. A key is
hashed with its tenant and user: two users may choose the same one, and neither learns of the other's.
"""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final, NamedTuple

from agentfsm.core.header import short_hash

if TYPE_CHECKING:
    from agentfsm.core.messages import ToolCall

# Hexadecimal digits of the hash of the arguments: it tells a few calls apart, and the id stays short.
HASH_DIGITS: Final = 6
# Hexadecimal digits of the hash of a key. Clients choose keys, so no two may be found with the same hash.
KEY_DIGITS: Final = 32

_INNER_ID: Final = re.compile(r"(.+)\.([a-z]+[0-9.]+)~\d+\.[0-9a-f]{6}", re.DOTALL)
_KEY_ID: Final = re.compile(r"(key|hook|said)~[0-9a-f]{32}")
_RESERVED: Final = tuple(
    (re.compile(pattern, re.DOTALL), runs)
    for pattern, runs in (
        (_INNER_ID.pattern, "runs that the call of a tool starts"),
        (r".+\.(t\d+\.\d+|p\d+(\.\d+)?)", "runs of sub-agents"),
        (r".+\.episode", "runs that extract what is learned"),
        (r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}:\d{4}-\d\d-\d\dT\d\d:\d\dZ", "runs of schedules"),
        (_KEY_ID.pattern, "runs for the keys of clients"),
        (r"hook:[0-9a-f]{8}:[0-9a-f]{32}", "runs for webhooks, before version 0.3"),
    )
)


class DerivedId(str):
    """An id that agentfsm has derived. Only such an id may have a reserved form; a header has it as a plain str."""

    __slots__ = ()


class CallOfRun(NamedTuple):
    """A call, and the run that made it."""

    run_id: str
    call_id: str


def find_caller(run_id: str) -> CallOfRun | None:
    """Return the call whose function started a run, from the id of the run; None if its id is not made of a call."""
    found = _INNER_ID.fullmatch(run_id)
    return None if found is None else CallOfRun(found[1], found[2])


def find_reserved_form(run_id: str) -> str | None:
    """Return which runs have ids of this form, for people; None if the form is not reserved."""
    return next((runs for form, runs in _RESERVED if form.fullmatch(run_id)), None)


def is_reserved_key(key: str) -> bool:
    """Return whether a key of an input has the form of one that agentfsm derives, and is not derived."""
    return not isinstance(key, DerivedId) and _KEY_ID.fullmatch(key) is not None


def child_run_id(run_id: str, call_id: str) -> DerivedId:
    """Return the id of the child run of a call; equal for repeated calls."""
    return DerivedId(f"{run_id}.{call_id}")


def build_inner_id(run_id: str, call: ToolCall, number: int) -> DerivedId:
    """Return the id of a run that the function of a call starts, so that a repeated call finds it.

    Args:
        run_id: Id of the run that made the call.
        call: The call. Its arguments are hashed: a call that started early, of a reply that was then dropped, gives the
            same id as the call that the next reply requests.
        number: Number of the new run among those of the attempt, from 1, whatever their agents: an agent may be renamed
            between two attempts, and the run must be found then, too.
    """
    return DerivedId(f"{run_id}.{call.id}~{number}.{short_hash(call.arguments, HASH_DIGITS)}")


def name_extraction(run_id: str) -> DerivedId:
    """Return the id of the extraction of a run."""
    return DerivedId(f"{run_id}.episode")


def scheduled_run_id(name: str, at: float) -> DerivedId:
    """Return the id of a schedule's run, such as "nightly:2026-11-26T02:00Z". It has the time in UTC.

    Args:
        name: Name of the schedule.
        at: The time, seconds since 1970.
    """
    return DerivedId(f"{name}:{datetime.fromtimestamp(at, UTC):%Y-%m-%dT%H:%MZ}")


def build_key_id(key: str, *, tenant: str | None, user: str | None, hook: str = "") -> DerivedId:
    """Return the id of the run for a key that a client chose, or the key of an input of a run.

    Args:
        key: The key.
        tenant: Tenant of the client; None if it has none.
        user: User of the client; None if it has none.
        hook: Name of the webhook whose delivery has the key; empty for the key of a client.
    """
    owned = json.dumps([tenant, user, hook, key])
    return DerivedId(f"{'hook' if hook else 'key'}~{short_hash(owned, KEY_DIGITS)}")


def build_said_key(text: str) -> DerivedId:
    """Return the key of an input whose client sent none, from a text that no other input of its run has."""
    return DerivedId(f"said~{short_hash(text, KEY_DIGITS)}")


def former_key_id(key: str, *, hook: str = "") -> str | None:
    """Return the id that the run for a key had before version 0.3; None if it could have had none.

    Args:
        key: The key.
        hook: Name of the webhook whose delivery has the key; empty for the key of a client.
    """
    if hook:
        return f"hook:{short_hash(hook, 8)}:{short_hash(key, KEY_DIGITS)}"
    return None if find_reserved_form(key) else key
