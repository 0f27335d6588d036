"""Checks and errors that all stores share."""

from __future__ import annotations

import json
import math
import sys
from typing import TYPE_CHECKING, Any, Final

import attrs

from agentfsm.core.errors import ClosedError, ConflictError, CorruptError, LeaseLostError, MisuseError, TooNewError
from agentfsm.core.header import FORMAT
from agentfsm.core.inbox import Approve, GiveInput, Input, Settle, decision_word
from agentfsm.core.json_text import encode_json
from agentfsm.core.limits import StopReason
from agentfsm.core.machine import State
from agentfsm.core.messages import TextPart
from agentfsm.core.run import Run
from agentfsm.core.run_ids import find_caller
from agentfsm.core.validation import COUNT, COUNT_OR_ZERO, ValueRule, is_number, shorten_repr
from agentfsm.core.value import Value
from agentfsm.ports.store import ORDER_FIELDS, RunOrder, RunSummary
from agentfsm.ports.stored import (
    MAX_KEY_CHARS,
    MAX_RECORD_BYTES,
    QUOTA_WINDOW_S,
    RECORD_KEY,
    RECORD_KEY_PART,
    RECORD_KIND,
    StoreRecord,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from agentfsm.core.header import Header
    from agentfsm.core.inbox import InboxItem, PostedItem
    from agentfsm.ports.store import Filter
    from agentfsm.ports.stored import QuotaUse

# The end of a message about a run that another worker executes.
LEASE_HELD_ADVICE: Final = (
    "is being driven by another worker; wait for it, or take it over by agent.resume(run_id, takeover=True) if that "
    "one hangs"
)
FINAL_STATES: Final = frozenset({State.DONE, State.ERROR})
# Format of runs from tables that did not record it: no agentfsm that used such tables wrote a newer one.
UNRECORDED_FORMAT: Final = 4
# Versions of tables and keys are numbers such as 601, for 6.1: major version 6 with one minor change. A minor change
# only adds what an older agentfsm does without, so that one keeps working. Versions below 100 are older than this rule.
MINOR_VERSIONS: Final = 100
# Seconds. Long enough for a server that restarts, and for most failovers; a managed one takes 10 to 30 seconds.
PATIENCE_S: Final = 30.0
# Characters of the prompt in a list of runs: a line or two.
PROMPT_CHARS: Final = 200
# Expired records that a write of a record with an expiry deletes, so that a cache needs no `prune`.
EXPIRED_PER_WRITE: Final = 10
# Maximum posts that wait in the inbox of one run; further input is refused. Each turn reads all of them, at 0.1 ms.
MAX_INBOX_ROWS: Final = 1_000
# The indexes of lists, newest first, in SQLite and PostgreSQL. Those of all runs have columns that never change. The
# others have few runs, and enough columns to find those of a user, an agent and a tenant among them.
_WHOSE: Final = 'agent, "user", tenant'
_ORDER_AND_WHOSE: Final = f"created_at, number, {_WHOSE}"
LIST_INDEXES: Final[Mapping[str, str]] = {
    "runs_by_user": "runs ((coalesce(\"user\", '')), created_at, number, agent, tenant)",
    "runs_by_agent": "runs (agent, created_at, number, tenant, release)",
    "runs_waiting": f"runs ({_ORDER_AND_WHOSE}) WHERE waiting",
    "runs_not_over": f"runs ({_ORDER_AND_WHOSE}, ready_at) WHERE stop_reason IS NULL",
    "runs_failed": f"runs ({_ORDER_AND_WHOSE}) WHERE stop_reason <> 'completed'",
    "runs_rated": f"runs ({_ORDER_AND_WHOSE}, rating) WHERE rating IS NOT NULL",
}
# Those of searches and of the other orders: all that a filter may want of a run that is over, but its text, is compared
# in them, without reading its row. Costs and durations are written once a run is over, so that an append changes none.
SEARCH_INDEXES: Final[Mapping[str, str]] = {
    "runs_listed": f"runs ({_ORDER_AND_WHOSE}, parent, purpose, release, stop_reason, cost_usd, duration_s)",
    **{
        f"runs_by_{name.partition('_')[0]}": f"runs ({name}, id, {_WHOSE}, created_at, parent, purpose, release, "
        f"stop_reason) WHERE {name} IS NOT NULL"
        for name in ORDER_FIELDS.values()
    },
}
# The conditions of the fields of `Filter` that are not compared for equality with a column of their name.
_CONDITIONS: Final[Mapping[str, str]] = {
    "before": "created_at < ?",
    "since": "created_at >= ?",
    "max_rating": "rating <= ?",
    **{f"min_{name}": f"{{sign}}{name} >= ?" for name in ORDER_FIELDS.values()},
    **{f"max_{name}": f"{{sign}}{name} <= ?" for name in ORDER_FIELDS.values()},
    "ready_by": "ready_at <= ?",
    "active_at": "(owner IS NOT NULL OR ready_at <= ?) AND stop_reason IS NULL",
}


@attrs.frozen
class ListSyntax(Value):
    """How a database writes the conditions of a list."""

    match: str
    """Condition for the runs that have all words of a query, which is its value."""

    write_query: Callable[[str], str]
    """Returns the query of the database for a text; empty if it has no words."""

    plus: str = ""
    """"+" for SQLite, which knows nothing of the values: a column with it is not searched in an index, so that the
    index remains that has the runs of the filter in the order of a list, and few others.
    """


# The fields of `Filter` that few runs have, whatever the value.
_RARE: Final = frozenset({"max_rating", "active_at"})
# The fields of a summary that are columns of a database; the others follow from the lease.
SUMMARY_COLUMNS: Final = tuple(
    [field.name for field in attrs.fields(RunSummary) if field.name not in ("driven", "worker")]
)


def check_run_id(run_id: object) -> None:
    """Check that a value can be the id of a run, before it is looked up.

    Raises:
        MisuseError: if it is not a str.
    """
    if not isinstance(run_id, str):
        given = f"a Run ({run_id.id!r} here)" if isinstance(run_id, Run) else f"{run_id!r:.80}"
        raise MisuseError(f"expected the id of a run, a string: give run.id, not {given}")


def check_format(run_id: str, found: int) -> None:
    """Refuse a run whose records this agentfsm may not be able to read, before its lease is taken.

    Raises:
        TooNewError: if a newer agentfsm has written some of them.
    """
    if found > FORMAT:
        raise TooNewError(
            f"run {run_id!r} has records of a newer agentfsm (format {found}, and this one reads up to {FORMAT}): "
            "upgrade agentfsm, or leave the run to workers of that version",
        )


def check_major_version(place: str, found: int, known: int) -> None:
    """Refuse tables or keys of a newer major version, before anything is written.

    Args:
        place: What holds them, for the message.
        found: Their version, which an older agentfsm may have written too.
        known: The version of this agentfsm.

    Raises:
        TooNewError: if this agentfsm does not know their major version.
    """
    if found // MINOR_VERSIONS > known // MINOR_VERSIONS:
        raise TooNewError(
            f"{place} was upgraded by a newer agentfsm (its version is {format_version(found)}, this one knows up to "
            f"{known // MINOR_VERSIONS}.x): upgrade agentfsm",
        )


def format_version(version: int) -> str:
    """Return the version of tables or keys as text, for example "6.1"."""
    major, minor = divmod(version, MINOR_VERSIONS)
    return f"{major}.{minor}" if major else str(version)


def check_same_prompt(stored: Header, header: Header) -> None:
    """Refuse a second run with the same id; the same prompt means the same run.

    Raises:
        ConflictError: if the run in the store has another prompt; for a run that the function of a call starts, also if
            it is of another agent.
    """
    call = find_caller(header.id)
    if call is not None and (stored.prompt, stored.agent) != (header.prompt, header.agent):
        other = "another prompt" if stored.agent == header.agent else f"agent {stored.agent!r}, not {header.agent!r}"
        raise ConflictError(
            f"run {header.id!r} exists with {other}: call {call.call_id} of run {call.run_id} started it before it was "
            "repeated. A repeated call resumes its runs if it starts the same agents in the same order and with the "
            "same prompts; give id= to tell apart those for which this does not hold"
        )
    if stored.prompt != header.prompt:
        raise ConflictError(f"run {header.id!r} exists with another prompt; choose another id")


def continue_session(header: Header, last: tuple[str, str] | None) -> Header:
    """Return the header with the session's last run in `after`. The runs before that one are over.

    Args:
        header: Header of the new run.
        last: Id and state of the session's last run; None if the session is new, or the run has no session.

    Raises:
        ConflictError: if the session's last run is not over, or a new session was to begin after another run.
    """
    if last is None:
        return header
    run_id, state = last
    if header.after not in (None, run_id):
        raise ConflictError(
            f"session {header.session!r} has runs, so it cannot begin after run {header.after}: name another session"
        )
    if state not in FINAL_STATES:
        raise ConflictError(
            f"session {header.session!r} has a run that is not over: {run_id}; before the next one starts, go on "
            f"with it by agent.resume({run_id!r}), or end it by agent.cancel({run_id!r})",
        )
    return attrs.evolve(header, after=run_id)


def store_closed_error() -> ClosedError:
    """Build the error for the use of a store after `aclose`."""
    return ClosedError(
        "the store is closed: `aclose` was called on it, or on an agent that uses it (`async with agent`); create a "
        "new store, or close agents that share a store only at the end of the program"
    )


def missing_predecessor_error(header: Header) -> ConflictError:
    """Build the error for a run whose `after` run does not exist in this store."""
    return ConflictError(
        f"run {header.id!r} cannot go on from run {header.after!r}, which this store does not hold: it was deleted or "
        "pruned, or is in another store; pass its messages instead of after=: messages=first.messages",
    )


def resolve_duplicate_post(run_id: str, winner: PostedItem, item: InboxItem) -> PostedItem:
    """Return the first post of a key if the second one is equivalent.

    Raises:
        ConflictError: if it differs; the message names the author of the first.
    """
    if _comparison_key(winner.item) == _comparison_key(item):
        return winner
    raise decided_already_error(run_id, winner)


def decided_already_error(run_id: str, winner: PostedItem) -> ConflictError:
    """Build the error for a post whose key is taken; the message contains the earlier decision and its author."""
    first = winner.item
    decision = f"{getattr(first, 'call_id', '') or 'it'} was {decision_word(first)} already"
    content = f", as {first.content[:PROMPT_CHARS]!r}" if isinstance(first, Settle) else ""
    return ConflictError(f"run {run_id!r}: {decision} by {getattr(first, 'by', '') or 'an unnamed author'!r}{content}")


def check_not_over(run_id: str, state: str, stop_reason: str | None) -> None:
    """Refuse a post to a run that is over.

    Raises:
        ConflictError: if it is over.
    """
    if state in FINAL_STATES:
        raise ConflictError(f"run {run_id!r} is over ({stop_reason}): it takes no more input")


def check_deadline(run_id: str, before: float | None, now: float) -> None:
    """Refuse a post after its deadline.

    Raises:
        ConflictError: if the deadline has passed.
    """
    if before is not None and now >= before:
        raise ConflictError(f"run {run_id!r}: the time is up: this came after its deadline, and was not accepted")


def check_inbox_capacity(run_id: str, item: InboxItem, waiting: int) -> None:
    """Refuse more input for a run whose inbox is full. Decisions are always accepted.

    Args:
        run_id: Id of the run.
        item: The item to post.
        waiting: Number of inbox rows that are not consumed yet, including timers.

    Raises:
        ConflictError: if the inbox is full.
    """
    if waiting >= MAX_INBOX_ROWS and isinstance(item, Input):
        raise ConflictError(
            f"run {run_id!r} has {waiting:,} posts waiting in its inbox, and takes no more input until it has consumed "
            "some: execute it by a worker or agent.resume(), then send again; or put more into one input",
        )


def next_expiry(run: Run) -> float | None:
    """Return the next deadline of the calls that a run waits for, seconds since 1970; None if there is none.

    A step that waits for a program with its tool is due at once: any worker may have it.
    """
    if run.paused is None and any(item.lacks_tool for item in run.pending):
        return run.updated_at
    times = [item.expires_at for item in run.pending if item.expires_at is not None]
    return min(times) if times and run.paused is None else None


def check_prune_time(before: object) -> None:
    """Check the time given to `prune`, before anything is removed.

    Raises:
        MisuseError: if it is not a valid time.
    """
    if isinstance(before, bool) or not isinstance(before, int | float) or math.isnan(before):
        raise MisuseError(
            f"prune({before!r:.80}): give seconds since 1970, for example time.time() - 30 * 86400, or "
            "moment.timestamp() of a datetime",
        )


def missing_follower_error(name: str) -> MisuseError:
    """Build the error for a follower that does not exist, or no longer."""
    return MisuseError(
        f"this store has no follower {name!r}: it was dropped; `store.follow({name!r})` creates it again"
    )


def follower_lost_error(name: str) -> LeaseLostError:
    """Build the error for a follower that another process holds."""
    return LeaseLostError(
        f"follower {name!r} was dropped, or taken by another process, because this one did not call the store for "
        "`lease_s` seconds: the delivery comes again there; raise lease_s in store.follow(...)"
    )


def suspect_group_size(previous_size: int) -> int:
    """Return the size of the next group of suspects, given the number of runs that their dead owner executed."""
    return max(1, previous_size // 2)


def successor_exists_error(run_id: str, successor: str) -> ConflictError:
    """Build the error for the deletion of a run that another run goes on from."""
    return ConflictError(
        f"run {successor!r} goes on from run {run_id!r} and needs its history: delete run {successor!r} first, or the "
        "whole session",
    )


def caller_open_error(run_id: str, caller: str) -> ConflictError:
    """Build the error for the deletion of a subagent's run whose caller is not over."""
    return ConflictError(
        f"run {run_id!r} works for run {caller!r}, which is not over and would repeat the work: cancel it "
        f"instead, or delete run {caller!r}, which removes both",
    )


def _comparison_key(item: InboxItem) -> tuple[object, ...]:
    """Return the parts of a post that make it equivalent to another, without author and wording."""
    match item:
        case Settle():
            return Settle, item.outcome, item.content
        case Approve():
            return Approve, item.arguments, item.edit_only
        case GiveInput():
            return GiveInput, json.dumps(item.answers, sort_keys=True), item.digest
    return (type(item),)


def preview_prompt(header: Header) -> str:
    """Return the beginning of the prompt's text."""
    text = " ".join(part.text for part in header.prompt if isinstance(part, TextPart))
    return text[:PROMPT_CHARS]


def build_summary(run: Run, *, driven: bool, ready_at: float | None, rating: int | None = None) -> RunSummary:
    """Build the summary of a run."""
    return RunSummary(
        id=run.id,
        agent=run.header.agent,
        session=run.session,
        user=run.header.user,
        parent=run.header.parent,
        state=run.state,
        stop_reason=run.stop_reason,
        waiting=run.is_waiting,
        driven=driven,
        turn=run.turn,
        version=run.version,
        tokens=run.usage.tokens,
        created_at=run.created_at,
        updated_at=run.updated_at,
        prompt=preview_prompt(run.header),
        ready_at=ready_at,
        rating=rating,
        cost_usd=run.usage.cost_usd if run.is_over else None,
        duration_s=run.duration_s if run.is_over else None,
        tenant=run.header.tenant,
        release=run.header.release,
        purpose=run.header.purpose,
    )


def sort_summaries(lines: Iterable[RunSummary], order: RunOrder, after: tuple[float, str] | None) -> list[RunSummary]:
    """Return the runs in the order of a list, from the one after `after` on; see `Store.runs`.

    Args:
        lines: The runs, of which those created last at the same time come first.
        order: Order of the list.
        after: Value of the order, and id, of the run after which the list begins.
    """
    if (column := ORDER_FIELDS.get(order)) is None:
        return sorted(lines, key=lambda line: line.created_at, reverse=True)
    keyed = [((getattr(line, column), line.id), line) for line in lines if getattr(line, column) is not None]
    taken = [(key, line) for key, line in keyed if after is None or key < after]
    return [line for _key, line in sorted(taken, key=lambda pair: pair[0], reverse=True)]


def wants_open(where: Filter) -> bool:
    """Return whether a filter matches only runs that are not over, by more than who has them or when they wait."""
    is_open = where.over is False or where.ready_by is not None
    return is_open or where.state not in {None, State.DONE, State.ERROR}


def build_list(
    where: Filter, syntax: ListSyntax, order: RunOrder, after: tuple[float, str] | None
) -> tuple[str, list[Any]]:
    """Return the WHERE and the ORDER BY clause of a list, with `?` for each value, and the values; see `Store.runs`.

    Args:
        where: The filter of the runs.
        syntax: Syntax of the database.
        order: Order of the list.
        after: Value of the order, and id, of the run after which the list begins.
    """
    clause, values = build_condition(where, syntax, order=order)
    if (column := ORDER_FIELDS.get(order)) is None:
        return f"{clause} ORDER BY created_at DESC, number DESC", values
    clause = f"{clause} AND {column} IS NOT NULL" if clause else f"WHERE {column} IS NOT NULL"
    if after is not None:
        clause, values = f"{clause} AND ({column}, id) < (?, ?)", [*values, *after]
    return f"{clause} ORDER BY {column} DESC, id DESC", values


def build_condition(
    where: Filter, syntax: ListSyntax, *, order: RunOrder = "newest", is_list: bool = True
) -> tuple[str, list[Any]]:
    """Return the WHERE clause of a filter, with `?` for each value, and the values. It may be empty.

    Args:
        where: The filter.
        syntax: Syntax of the database.
        order: Order of the list.
        is_list: False for a number, for which an index in another order may be better.
    """
    wanted = {name: value for name, value in attrs.asdict(where).items() if value is not None}
    is_open = wants_open(where)
    is_failed = where.state is State.ERROR or where.stop_reason not in {None, StopReason.COMPLETED}
    is_rare = is_open or where.waiting or is_failed or not wanted.keys().isdisjoint(_RARE)
    common = () if is_rare else ("user",) if order in ORDER_FIELDS else ("user", "agent", "tenant")
    leads = ("id", "session", "parent", *common)
    lead = next((name for name in leads if wanted.get(name)), None if is_rare else "user")
    plus = syntax.plus
    if not is_list and is_open:
        lead, plus = None, ""
    tests: list[str] = []
    values: list[Any] = []
    for name, value in wanted.items():
        sign = "" if name == lead else plus
        if name in {"tenant", "parent"} and not value:
            tests.append(f"{sign}{name} IS NULL")
        elif name == "text":
            query = syntax.write_query(value)
            tests.append(syntax.match if query else "1 = 0")
            values += [query] if query else []
        elif name == "over":
            tests.append("stop_reason IS NOT NULL" if value else "stop_reason IS NULL")
        elif name == "waiting":
            tests.append("waiting" if value else "NOT waiting")
        else:
            column = "coalesce(\"user\", '')" if name == "user" else f'"{name}"'
            tests.append(_CONDITIONS.get(name, "{sign}{column} = ?").format(sign=sign, column=column))
            values.append(str(value) if isinstance(value, str) else value)  # not enums
    # What the others imply, to name an index.
    if is_failed:
        tests.append("stop_reason <> 'completed'")
    elif is_open and (is_list or where.ready_by is None):
        tests.append("stop_reason IS NULL")
    return (f"WHERE {' AND '.join(tests)}" if tests else ""), values


def check_quotas(uses: Sequence[QuotaUse], used: Mapping[str, Mapping[int, int]], now: float) -> float:
    """Return 0 if the amounts may be taken, else the seconds after which to try again.

    Args:
        uses: The amounts to take.
        used: Amounts that were taken, by the name of the quota and the second.
        now: Current time in seconds.
    """
    return max([_wait_for_quota(use, used.get(use.name, {}), now) for use in uses], default=0.0)


def _wait_for_quota(use: QuotaUse, used: Mapping[int, int], now: float) -> float:
    counted = {second: amount for second, amount in used.items() if second > now - QUOTA_WINDOW_S}
    excess = sum(counted.values()) + use.amount - use.limit
    for second in sorted(counted):
        if excess <= 0:
            break
        excess -= counted[second]
        if excess <= 0:
            return max(second + QUOTA_WINDOW_S - now, 0.001)
    return 0.0 if excess <= 0 else float(QUOTA_WINDOW_S)


_EXPIRY: Final = ValueRule(
    fits=lambda value: value is None or (is_number(value) and math.isfinite(value)),
    wanted="seconds since 1970 by the store's clock (await store.now()), or None for never",
)


def check_record_key(method: str, kind: object, key: object, revision: object = 0) -> None:
    """Check the kind, the key and the revision of a record, before the store is asked.

    Raises:
        MisuseError: if the kind, the key or the revision is invalid.
    """
    RECORD_KIND.check(method, "kind", kind)
    RECORD_KEY.check(method, "key", key)
    COUNT_OR_ZERO.check(method, "revision", revision)


def check_record_list(kind: object, prefix: object, after: object, limit: object) -> None:
    """Check the arguments of `list_records`.

    Raises:
        MisuseError: if one of them is invalid.
    """
    RECORD_KIND.check("list_records", "kind", kind)
    RECORD_KEY_PART.check("list_records", "prefix", prefix)
    RECORD_KEY_PART.check("list_records", "after", after)
    COUNT.check("list_records", "limit", limit)


def encode_record(value: object, expires_at: object) -> str:
    """Return the value of a record as JSON text, and check its size and its expiry.

    Raises:
        MisuseError: if it is not plain JSON, or too large, or the expiry is not a time.
    """
    _EXPIRY.check("write_record", "expires_at", expires_at)
    try:
        text = encode_json(value)
        size = len(text.encode())
    except (TypeError, ValueError, RecursionError) as error:
        raise MisuseError(f"write_record(value={shorten_repr(value)}): give plain JSON ({error})") from None
    if size > MAX_RECORD_BYTES:
        raise MisuseError(
            f"write_record: the value has {size:,} bytes as JSON, and a record up to {MAX_RECORD_BYTES:,}: split it, "
            "or keep it elsewhere and its address here"
        )
    return text


def end_of_prefix(prefix: str) -> str:
    """Return a string that follows all keys of records with this prefix, in the order of code points."""
    return prefix + chr(sys.maxunicode) * (MAX_KEY_CHARS + 1)


def parse_record(kind: str, key: str, value: str | bytes, revision: int, expires_at: float | None) -> StoreRecord:
    """Build a record from its columns.

    Raises:
        CorruptError: if the value is damaged.
    """
    try:
        parsed = json.loads(value)
    except ValueError as error:
        raise CorruptError(
            f"record {key!r} of kind {kind!r} cannot be read ({error}): restore a backup, or delete the record"
        ) from None
    return StoreRecord(kind=kind, key=key, value=parsed, revision=revision, expires_at=expires_at)


def record_conflict_error(kind: str, key: str, revision: int) -> ConflictError:
    """Build the error for a record that has another revision than the caller expected."""
    reason = f"does not have revision {revision}, so it was changed or deleted" if revision else "exists"
    return ConflictError(f"record {key!r} of kind {kind!r} {reason}: read it again, and decide again")


def parse_summary(values: Mapping[str, Any], *, driven: bool, worker: str | None = None) -> RunSummary:
    """Build a summary from the columns of a database.

    A reason to stop that only a newer agentfsm knows is left out, so that its runs are listed.

    Raises:
        CorruptError: if they contain values that this version of agentfsm does not know.
    """
    reason = values["stop_reason"]
    if values["format"] > FORMAT and reason not in {*StopReason}:
        reason = None
    try:
        known = {
            "state": State(values["state"]),
            "stop_reason": reason and StopReason(reason),
            "waiting": bool(values["waiting"]),
        }
    except ValueError as error:
        raise CorruptError(f"run {values['id']!r}: {error}; restore a backup, or upgrade agentfsm") from None
    return RunSummary(**{**values, **known}, driven=driven, worker=worker)
