"""Allowances: a person lets later calls that are like an approved one run without the question, for one session.

An allowance is a record of the store beside the runs, so it holds in all runs of its session and can be revoked between
two of them. Each call that it covers has an `ApprovalGiven` that names it, in the append with the start of the call.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import attrs

from agentfsm.core.calls import OpenCall, parse_arguments
from agentfsm.core.errors import MisuseError, StoreError
from agentfsm.core.events import Guarded, GuardVerdict
from agentfsm.core.header import Header, short_hash
from agentfsm.core.messages import JSON, ToolCall
from agentfsm.core.text_safety import format_exact_json
from agentfsm.core.value import Value
from agentfsm.journal.load import read_header

if TYPE_CHECKING:
    from agentfsm.engine.execution.execution import Execution
    from agentfsm.ports.store import Store
    from agentfsm.ports.stored import StoreRecord

# Returns the digest of a call as it is shown to a person, given the question of a guard.
DigestCall: TypeAlias = Callable[[ToolCall, Guarded | None], str]

ALLOWANCES: Final = "allowance"
# Seconds for which an allowance holds, as long as an approval waits by default.
LIFETIME_S: Final = 7 * 24 * 3_600.0
# Maximum of characters of a rule: a person has to read it.
MAX_RULE_CHARS: Final = 1_000
# Maximum of allowances of a session that count.
MAX_ALLOWANCES: Final = 1_000


def format_rule(tool: str, arguments: Mapping[str, JSON]) -> str:
    """Return the rule of an allowance as it is shown and recorded: `allow(pay, to="Ann")`."""
    values = [f", {name}={format_exact_json(value)}" for name, value in arguments.items()]
    return f"allow({tool}{''.join(values)})"


@attrs.frozen(kw_only=True)
class Allowance(Value):
    """A person's decision that later calls like an approved one need no question of their own in this session.

    It covers a call of the same tool of the same agent whose named arguments are equal, for the same user. It answers
    the question of the guard's rule that asked about the approved call, and that of the tool's own `requires_approval`.
    Questions of other rules and of plans, refusals and permissions are as without it. It ends if it is revoked, if the
    tool changes, after seven days, and when the run with the approved call is deleted.
    """

    id: str
    """Approved call with which it was given, as "RUN/CALL"."""

    tool: str
    """Name of the tool."""

    arguments: Mapping[str, JSON]
    """Values that arguments of a covered call have to have, by name; one or more."""

    asked_by: str = ""
    """Rule of a guard that asked about the approved call, as it is written in code; empty if only the tool asked."""

    reason: str = ""
    """Reason of that rule, as it was shown."""

    agent: str = ""
    """Name of the agent whose calls it covers."""

    session: str | None = None
    """Session in which it holds; None: in the run alone, with those of its sub-agents."""

    by: str = ""
    """Name of the person who gave it; empty if not given."""

    at: float = 0.0
    """Time at which it was given, seconds since 1970 by the store's clock."""

    expires_at: float = 0.0
    """Time at which it ends, seconds since 1970 by the store's clock."""

    revoked_by: str | None = None
    """Name of the person who revoked it, empty if not given; None while it holds."""

    used: int = 0
    """Number of calls that it has let through, from the journals."""

    shown: str = attrs.field(default="{}", repr=False)
    """Arguments of the approved call as they were shown, as JSON text; with `digest` they identify the tool."""

    digest: str = ""
    """Digest of the approved call as it was shown."""

    nonce: str = ""
    """Nonce of the run with the approved call."""

    @property
    def rule(self) -> str:
        """The rule as it was shown: `allow(pay, to="Ann")`."""
        return format_rule(self.tool, self.arguments)

    @property
    def name(self) -> str:
        """The rule with the call at which it was given, as the journal names it."""
        return f"{self.rule} of {self.id}"

    def covers(self, agent: str, entry: OpenCall, digest: DigestCall) -> bool:
        """Return whether it answers the question about a call that has not started.

        Args:
            agent: Name of the agent.
            entry: The call.
            digest: Digest of a call as it is shown now, for the call that was approved: the tool may have changed.
        """
        guarded = entry.guarded
        if guarded is not None and guarded.verdict is GuardVerdict.ASK and guarded.rule != self.asked_by:
            return False
        if self.revoked_by is not None or (self.agent, self.tool) != (agent, entry.call.name):
            return False
        given = parse_arguments(entry.call)
        if any(name not in given or _write(given[name]) != _write(value) for name, value in self.arguments.items()):
            return False
        asked = Guarded(call_id=entry.call.id, verdict=GuardVerdict.ASK, rule=self.asked_by, reason=self.reason)
        shown = attrs.evolve(entry.call, arguments=self.shown)
        return digest(shown, asked if self.asked_by else None) == self.digest


def _write(value: object) -> str:
    """Return a value as text, which is another one for each of `1`, `1.0`, `"1"` and `true`."""
    return json.dumps(value, sort_keys=True)


async def find_root(store: Store, header: Header) -> Header:
    """Return the header of the run at the top of the callers of a run.

    Raises:
        RunNotFoundError: if one of them was deleted.
    """
    while header.parent is not None:
        header = await read_header(store, header.parent)
    return header


def build_prefix(root: Header) -> str:
    """Return the beginning of the keys of the allowances that hold for a run without a caller.

    Users and tenants have their own, also in a session of the same name.
    """
    scope = ["session", root.session] if root.session is not None else ["run", root.id]
    return f"{short_hash(json.dumps([*scope, root.tenant, root.user]), _KEY_DIGITS)}/"


# Hexadecimal digits of both halves of a key, which other users must not be able to meet.
_KEY_DIGITS: Final = 32


def build_key(root: Header, allowance_id: str) -> str:
    """Return the key of an allowance of a run without a caller."""
    return f"{build_prefix(root)}{short_hash(allowance_id, _KEY_DIGITS)}"


def read_allowance(record: StoreRecord) -> Allowance | None:
    """Return the allowance in a record; None if a newer agentfsm has written it, with conditions that are not known."""
    fields: dict[str, Any] = {**record.value} if isinstance(record.value, Mapping) else {}
    return Allowance(**fields) if fields.keys() <= attrs.fields_dict(Allowance).keys() else None


def build_record(allowance: Allowance) -> dict[str, JSON]:
    """Return an allowance as the value of a record."""
    return attrs.asdict(allowance, filter=lambda field, _: field.name != "used")


def build_document(allowance: Allowance) -> dict[str, JSON]:
    """Return an allowance as it is shown to people and programs."""
    fields = ("id", "rule", "tool", "arguments", "asked_by", "agent", "by", "at", "expires_at", "revoked_by", "used")
    return {name: getattr(allowance, name) for name in fields}


async def find_allowance(execution: Execution, entry: OpenCall, digest: DigestCall) -> Allowance | None:
    """Return the allowance that answers the question about a call that has not started; None if there is none.

    A store without records has no allowances.
    """
    journal = execution.journal
    store, header = journal.store, journal.run.header
    try:
        root = await find_root(store, header)
        records = await store.list_records(ALLOWANCES, prefix=build_prefix(root), limit=MAX_ALLOWANCES)
    except MisuseError:
        return None
    except StoreError as error:  # a person is asked
        journal.log.warning("allowances_not_read", error=type(error).__name__)
        return None
    for allowance in map(read_allowance, records):
        if allowance is not None and allowance.covers(header.agent, entry, digest) and await _is_kept(store, allowance):
            return allowance
    return None


async def _is_kept(store: Store, allowance: Allowance) -> bool:
    """Return whether the run with the approved call is in the store, and can be read."""
    try:
        return (await read_header(store, allowance.id.rpartition("/")[0])).nonce == allowance.nonce
    except StoreError:
        return False
