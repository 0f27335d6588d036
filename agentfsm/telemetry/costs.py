"""Costs of the runs in a store, from their journals: sums, spending limits, and forecasts."""

from __future__ import annotations

from calendar import monthrange
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime, tzinfo
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

import attrs

from agentfsm.core.errors import MisuseError, RunNotFoundError
from agentfsm.core.limits import SPEND_RECORDS, SPEND_SCOPES, SpendScope, SpendWindow, load_zone
from agentfsm.core.usage import Purpose, Usage
from agentfsm.core.validation import COUNT, NOT_NEGATIVE, require_choice
from agentfsm.core.value import Value
from agentfsm.engine.execution.spend_windows import WindowRecord
from agentfsm.engine.model_calls.view import measure_fixed_parts
from agentfsm.journal.cache_losses import list_cache_losses
from agentfsm.journal.load import read_root_agent
from agentfsm.journal.run_list import RunIterator
from agentfsm.ports.store import ALL_RUNS, Filter
from agentfsm.telemetry.measurements import iter_costs
from agentfsm.telemetry.totals import (
    COSTS,
    HOUR_S,
    LOST,
    USAGE,
    USER_COSTS,
    CellTable,
    add_fields,
    build_usage,
    find_first,
    iter_span,
    read_series,
    read_status,
)

if TYPE_CHECKING:
    from agentfsm.agents.runnable_agent import RunnableAgent
    from agentfsm.core.header import Header
    from agentfsm.ports.store import Store
    from agentfsm.ports.stored import StoredRun, StoreRecord
    from agentfsm.telemetry.totals import TotalsStatus

CostGroup = Literal["agent", "model", "purpose", "user", "day", "tenant"]
COST_GROUPS: Final[tuple[CostGroup, ...]] = get_args(CostGroup)

DAY_S: Final = 86_400.0
# Records of windows per page.
_WINDOWS_PAGE: Final = 500
# Runs of an agent that an estimate is measured from.
SAMPLED_RUNS: Final = 100
# Growth of a request per turn, and length of a reply, in tokens, where no run was recorded: the example of document H,
# 4.2, in which five turns have 8,200 tokens of input and 900 of output beside 400 of instructions.
ASSUMED_ADDED_TOKENS: Final = 413.0
ASSUMED_REPLY_TOKENS: Final = 180.0
# Where an agent's name is unknown, or a run has no user.
_NONE: Final = "(none)"


@attrs.frozen(kw_only=True)
class CostRow(Value):
    """Costs of one agent, model, purpose, user, day or tenant."""

    name: str
    """Name of the agent, model or purpose; id of the user or tenant; or the day, as "2026-11-26". For runs that are not
    production, their purpose, such as "eval".
    """

    usage: Usage
    """Tokens and known US dollars. `usage.unpriced` says that the price of some tokens was unknown."""

    runs: int
    """Number of runs with a part in it, those of sub-agents counted on their own."""

    @property
    def usd(self) -> float:
        """US dollars whose price was known."""
        return self.usage.cost_usd or 0.0


@attrs.frozen(kw_only=True)
class CostReport(Value):
    """Costs of the runs in a store over a time. Sub-agents are in the rows of their own runs."""

    since: float
    """Beginning of the time, seconds since 1970: the given one, else the first cost."""

    until: float
    """End of the time, seconds since 1970."""

    by: CostGroup
    """Meaning of the rows."""

    rows: tuple[CostRow, ...]
    """The rows: days in their order, others from the most expensive on."""

    total: Usage
    """Sum of all rows."""

    production: Usage
    """Part of it that is of production, the only one that goes on at its rate; evaluations are begun by hand."""

    runs: int
    """Number of runs with costs."""

    is_whole: bool
    """Whether all runs were read; else only the newest ones, and the rate says nothing."""

    is_from_totals: bool = False
    """Whether the sums are those of the totals: `since` is then the beginning of an hour, and a run counts in the rows
    of the hour of its first cost.
    """

    uncounted: int = 0
    """Number of runs that were released since the totals were counted: their newest costs may be missing."""

    unreadable: int = 0
    """Number of runs whose costs the totals lack, because their journals could not be read."""

    pruned_before: float | None = None
    """Time before which runs were removed whose costs the totals have kept, seconds since 1970; None if none were."""

    lost_tokens: int = 0
    """Part of the input that was read anew, because runs had broken the provider's prompt cache or waited for too long;
    `list_cache_losses` has the causes.
    """

    lost_as_reported: Mapping[str, int] = attrs.field(factory=dict)
    """Part of these by the reason that the provider gives, in its word."""

    @property
    def usd(self) -> float:
        """US dollars of all rows whose price was known."""
        return self.total.cost_usd or 0.0

    @property
    def days(self) -> float:
        """Length of the time in days."""
        return (self.until - self.since) / DAY_S

    @property
    def usd_per_day(self) -> float | None:
        """US dollars of production in a day, at the rate of this time; None if `forecast_gap` says why."""
        return None if self.forecast_gap else (self.production.cost_usd or 0.0) / self.days

    @property
    def forecast_gap(self) -> str:
        """Why nothing can be forecast from these costs; empty if they have a rate."""
        if not self.is_whole:
            return "only the newest runs were read"
        if self.production.unpriced:
            return "the price of some tokens is unknown"
        if self.days < 1:
            return "the costs are of less than a day"
        return ""

    def forecast_month(self, tz: str = "UTC") -> tuple[int, float | None]:
        """Return the days of the current month, and the US dollars in it at the rate of this time; None without one."""
        today = datetime.fromtimestamp(self.until, load_zone(tz))
        days = monthrange(today.year, today.month)[1]
        return days, None if self.usd_per_day is None else self.usd_per_day * days


@attrs.frozen(kw_only=True)
class SpendStatus(Value):
    """A window of spending limits at this moment."""

    window: SpendWindow
    spent_usd: float
    """US dollars for requests and calls that are over."""

    reserved_usd: float
    """US dollars reserved for requests in progress, and for those of processes that have died."""

    limits_usd: tuple[float, ...]
    """Limits of the agents that have used the window, US dollars, the lowest first."""

    requests: int
    """Number of requests and calls that are over."""

    refused: int
    """Number of requests and calls that were refused."""


@attrs.define(eq=False)
class _CostSum:
    usage: Usage = Usage()
    runs: int = 0


async def read_costs(
    store: Store,
    *,
    by: CostGroup = "agent",
    since: float | None = None,
    where: Filter = ALL_RUNS,
    tz: str = "UTC",
    limit: int | None = None,
    agents: Collection[str] | None = None,
) -> CostReport:
    """Return the costs of runs: from the totals of the store if it has them, else from the journals, run by run.

    Costs of runs that are not production are in a row of their own, of whatever the rows are: that of their purpose,
    such as "eval".

    Args:
        store: The store.
        by: Meaning of the rows.
        since: Time from which costs count, seconds since 1970; None for all. Journals of runs without an event since
            then are not read.
        where: The runs. The totals know their `agent`, `user` and `tenant`; for other fields the journals are read.
        tz: Time zone of the days. In the totals, an hour with a midnight in it belongs to the day in which it begins.
        limit: Maximum of journals to read, the newest, 1 or more; None for all.
        agents: Names of agents whose runs count, with those of their sub-agents; None: all do.

    Raises:
        MisuseError: if an argument is invalid.
        StoreError: if a journal cannot be read.
    """
    require_choice(*COST_GROUPS).check("read_costs", "by", by)
    COUNT.or_none().check("read_costs", "limit", limit)
    zone, until = load_zone(tz), await store.now()
    is_known = where == Filter(agent=where.agent, user=where.user, tenant=where.tenant)
    if is_known and (status := await read_status(store)) is not None and status.is_whole:
        return await _read_totals(store, status, by=by, since=since, where=where, zone=zone, agents=agents)
    sums: dict[str, _CostSum] = {}
    reported: dict[str, int] = {}
    total, production, read, runs, first, oldest, is_whole, lost = Usage(), Usage(), 0, 0, until, until, True, 0
    async for summary in RunIterator(store, where):
        oldest = summary.created_at
        if since is not None and summary.updated_at < since:
            continue
        if read == limit:
            is_whole = False
            break
        parts: dict[str, Usage] = {}
        if (stored := await _read_journal(store, summary.id)) is None:
            continue
        if agents is not None and await read_root_agent(store, stored.header) not in agents:
            continue
        read += 1
        own = stored.events[stored.header.forked_at :]
        for loss in list_cache_losses(own):
            if since is None or loss.at >= since:
                lost += loss.tokens
                if loss.reported:
                    reported[loss.reported] = reported.get(loss.reported, 0) + loss.tokens
        of = stored.header
        for _, at, purpose, model, usage in iter_costs(stored):
            if since is not None and at < since:
                continue
            first = min(first, at)
            day = datetime.fromtimestamp(at, zone).strftime("%Y-%m-%d")
            name = _name_row(by, of, model, purpose, day)
            parts[name] = parts.get(name, Usage()) + usage
            production = production if of.purpose else production + usage
        runs += bool(parts)
        for name, usage in parts.items():
            found = sums.setdefault(name, _CostSum())
            found.usage, found.runs, total = found.usage + usage, found.runs + 1, total + usage
    begin = since if since is not None and oldest < since else first  # a rate is that of the time with runs
    return CostReport(
        since=begin,
        until=until,
        by=by,
        rows=_list_rows(by, sums),
        total=total,
        production=production,
        runs=runs,
        is_whole=is_whole,
        lost_tokens=lost,
        lost_as_reported=reported,
    )


def _list_rows(by: CostGroup, sums: Mapping[str, _CostSum]) -> tuple[CostRow, ...]:
    rows = [CostRow(name=name, usage=each.usage, runs=each.runs) for name, each in sums.items()]
    rows.sort(key=(lambda row: row.name) if by == "day" else (lambda row: (-row.usd, -row.usage.tokens, row.name)))
    return tuple(rows)


async def _read_totals(
    store: Store,
    status: TotalsStatus,
    *,
    by: CostGroup,
    since: float | None,
    where: Filter,
    zone: tzinfo,
    agents: Collection[str] | None,
) -> CostReport:
    """Add up the costs in the totals of a store."""

    def fits(agent: str, root: str, tenant: str, user: str) -> bool:
        return (
            (where.agent is None or agent == where.agent)
            and (where.tenant is None or tenant == where.tenant)
            and (where.user is None or user == where.user)
            and (agents is None or root in agents)
        )

    places: dict[tuple[str, str], int] = {}  # of the sums of each purpose and name
    sums: dict[str, list[int]] = {}
    reported: dict[str, int] = {}
    has_users = by == "user" or where.user is not None
    count = {"model": "runs_of_model", "purpose": "runs_of_purpose", "day": "runs_of_day"}.get(by, "runs")
    until = await store.now()
    levels = USER_COSTS if has_users else COSTS
    oldest = await find_first(store, status.generation, levels, lambda of: fits(of.agent, of.root, of.tenant, of.user))
    begin = until if oldest is None else max(oldest, 0 if since is None else since // HOUR_S * HOUR_S)
    if by == "day":
        levels = levels[: 2 if zone is load_zone("UTC") else 1]
    async for record in iter_span(store, status.generation, levels, begin if begin != oldest else 0.0):
        table = CellTable.read(record.value)
        of_users = {"agent": table.agents, "tenant": table.tenants, "user": table.users}.get(by)
        day = datetime.fromtimestamp(table.at, zone).strftime("%Y-%m-%d") if by == "day" else ""
        targets: list[tuple[int, int]] = []  # rows, and the places of their sums
        subjects = zip(table.agents, table.roots, table.tenants, table.users, strict=True)
        for row, (subject, purpose, series) in enumerate(zip(subjects, table.purposes, table.series, strict=True)):
            if not fits(*subject):
                continue
            kind, *labels = read_series(series)
            if kind == USAGE:
                name = of_users[row] if of_users is not None else day or labels[by == "purpose"]
                targets.append((row, places.setdefault((purpose, name), len(places))))
            elif kind == LOST:
                reported[labels[0]] = reported.get(labels[0], 0) + table.fields["n"][row]
        for field, column in table.fields.items():
            if field[:4] == "runs" and field not in {"runs", count}:
                continue
            added = sums.setdefault(field, [])
            added += [0] * (len(places) - len(added))
            for row, place in targets:
                added[place] += column[row]
    by_name: dict[str, dict[str, int]] = {}
    total: dict[str, int] = {}
    production: dict[str, int] = {}
    for (purpose, name), place in places.items():
        each = {field: added[place] for field, added in sums.items() if len(added) > place}
        add_fields(by_name.setdefault(purpose or name or _NONE, {}), each)
        add_fields(total, each)
        if not purpose:
            add_fields(production, each)
    rows = {name: _CostSum(build_usage(each), each.get(count, 0)) for name, each in by_name.items()}
    return CostReport(
        since=begin,
        until=until,
        by=by,
        rows=_list_rows(by, rows),
        total=build_usage(total),
        production=build_usage(production),
        runs=total.get("runs", 0),
        is_whole=True,
        is_from_totals=True,
        uncounted=status.uncounted,
        unreadable=status.unreadable,
        pruned_before=status.pruned_before or None,
        lost_tokens=sum(reported.values()),
        lost_as_reported={reason: tokens for reason, tokens in reported.items() if reason},
    )


async def _read_journal(store: Store, run_id: str) -> StoredRun | None:
    """Return the journal of a run; None if it was removed after it was listed."""
    try:
        return await store.read(run_id)
    except RunNotFoundError:
        return None


def _name_row(by: CostGroup, of: Header, model: str, purpose: str, day: str) -> str:
    """Return the name of the row of a cost: that of the purpose of the run if it is not production."""
    names = {"model": model, "purpose": str(purpose), "day": day}
    return of.purpose or names.get(by) or getattr(of, by, "") or _NONE


async def read_spend(
    store: Store, *, tenant: str | None = None, scopes: Sequence[SpendScope] = SPEND_SCOPES
) -> tuple[SpendStatus, ...]:
    """Return the windows of spending limits that have not ended, by scope and subject.

    Args:
        store: The store. One that keeps no records has no windows.
        tenant: Only the windows of this tenant and its users; None for all windows.
        scopes: Only windows of these scopes.

    Raises:
        StoreError: if the records cannot be read.
    """
    now = await store.now()
    # The keys of a scope are in the order of their days and months; in some zone, two days ago is yesterday.
    first = datetime.fromtimestamp(now - 2 * DAY_S, UTC).strftime("%Y-%m-%d")
    found: list[SpendStatus] = []
    for scope in scopes:
        prefix = f"{scope}|"
        after = f"{prefix}{first}"
        try:
            while page := await store.list_records(SPEND_RECORDS, prefix=prefix, after=after, limit=_WINDOWS_PAGE):
                after = page[-1].key
                found += [each for record in page if (each := _read_window(record)).window.ends_at > now]
        except MisuseError:  # a store of the user's own
            return ()
    chosen = [each for each in found if tenant is None or tenant == _find_tenant(each.window)]
    return tuple(sorted(chosen, key=lambda each: (each.window.scope, each.window.tenant, each.window.subject)))


def _find_tenant(window: SpendWindow) -> str | None:
    """Return the tenant that a window belongs to; None for one of an agent."""
    return {"tenant": window.subject, "user": window.tenant, "agent": None}[window.scope]


def _read_window(record: StoreRecord) -> SpendStatus:
    state, value = WindowRecord.from_json(record.value, record.key), record.value
    assert isinstance(value, dict)  # `from_json` has checked it  # noqa: S101
    described: dict[str, Any] = {name: value.get(name, "") for name in attrs.fields_dict(SpendWindow)}
    described["purpose"] = value.get("purpose")  # a window that names none is about all
    return SpendStatus(
        window=SpendWindow(**described),
        spent_usd=state.spent_usd,
        reserved_usd=state.reserved_usd,
        limits_usd=tuple(sorted(state.limits)),
        requests=state.requests,
        refused=state.refused,
    )


def build_cost_document(report: CostReport, windows: Sequence[SpendStatus], tz: str) -> dict[str, Any]:
    """Return a report and the windows of spending limits as plain JSON."""
    days, usd = report.forecast_month(tz)
    rows = [{"name": row.name, "usd": row.usd, "runs": row.runs} | _count_tokens(row.usage) for row in report.rows]
    return {
        "since": report.since,
        "until": report.until,
        "by": report.by,
        "rows": rows,
        "total": {"usd": report.usd, "runs": report.runs} | _count_tokens(report.total),
        "is_whole": report.is_whole,
        "is_from_totals": report.is_from_totals,
        "uncounted": report.uncounted,
        "unreadable": report.unreadable,
        "pruned_before": report.pruned_before,
        "lost_tokens": report.lost_tokens,
        "lost_as_reported": dict(report.lost_as_reported),
        "forecast": None
        if report.forecast_gap
        else {"usd_per_day": report.usd_per_day, "days": report.days, "month_days": days, "month_usd": usd},
        "forecast_gap": report.forecast_gap,
        "windows": [
            attrs.asdict(each) | {"name": each.window.describe(), "resets": each.window.format_end()}
            for each in windows
        ],
    }


def _count_tokens(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.input_tokens,
        "cached_tokens": usage.cached_tokens,
        "cache_write_tokens": usage.cache_write_tokens,
        "cache_write_1h_tokens": usage.cache_write_1h_tokens,
        "output_tokens": usage.output_tokens,
        "unpriced": usage.unpriced,
        "estimated": usage.estimated,
    }


@attrs.frozen(kw_only=True)
class CostEstimate(Value):
    """Expected cost of a run: `input_tokens` is N*S + T*N*(N+1)/2 for N turns."""

    turns: int
    """Number of turns, N."""

    fixed_tokens: float
    """Tokens of instructions and tools in each request, S; counted."""

    added_tokens: float
    """Tokens that each turn adds to the next requests, T: its messages, replies and results."""

    reply_tokens: float
    """Tokens of a reply."""

    input_tokens: int
    """Tokens of all requests together."""

    output_tokens: int
    """Tokens of all replies together."""

    usd: float | None
    """US dollars at the price of the agent's model, without the discount of a provider's cache and without tools; None
    if the price is unknown.
    """

    sampled_runs: int
    """Number of runs that `added_tokens` and `reply_tokens` were measured from; 0 if they are assumed."""


def count_growing_tokens(turns: int, fixed_tokens: float, added_tokens: float) -> float:
    """Return the input tokens of a run whose requests contain all that was said before: N*S + T*N*(N+1)/2.

    Ten turns cost up to 55 times as much as one, if the instructions are short. (Source: document A, 8.1.)
    """
    return turns * fixed_tokens + added_tokens * turns * (turns + 1) / 2


async def estimate(
    agent: RunnableAgent,
    turns: int | None = None,
    *,
    added_tokens: float | None = None,
    reply_tokens: float | None = None,
) -> CostEstimate:
    """Estimate the cost of a run of an agent from the growth of its requests.

    Args:
        agent: The agent. Instructions that are a function count as empty.
        turns: Number of turns, 1 or more; None for the mean of its recorded runs, or 5 without any.
        added_tokens: Tokens that each turn adds to the next requests; None to measure them in its newest 100 runs.
        reply_tokens: Tokens of a reply; None to measure them there.

    Raises:
        MisuseError: if an argument is invalid.
        StoreError: if the store cannot be read.
    """
    COUNT.or_none().check("estimate", "turns", turns)
    NOT_NEGATIVE.or_none().check("estimate", "added_tokens", added_tokens)
    NOT_NEGATIVE.or_none().check("estimate", "reply_tokens", reply_tokens)
    config = agent.driver.config
    counter = await config.load_counter(config.model.name)
    parts = measure_fixed_parts(config, counter, config.registry.definitions)
    fixed = parts.tools_tokens + parts.instructions_tokens
    measured = await _measure_growth(agent, fixed)
    number = turns or max(1, round(measured.mean_turns or 5))
    added = added_tokens if added_tokens is not None else measured.added_tokens or ASSUMED_ADDED_TOKENS
    replies = reply_tokens if reply_tokens is not None else measured.reply_tokens or ASSUMED_REPLY_TOKENS
    whole = round(count_growing_tokens(number, fixed, added))
    written = round(number * replies)
    # Turn by turn, because some models cost more per token if a request is long.
    costs = [
        config.model.cost_usd(Usage(input_tokens=round(fixed + added * turn), output_tokens=round(replies)))
        for turn in range(1, number + 1)
    ]
    return CostEstimate(
        turns=number,
        fixed_tokens=fixed,
        added_tokens=added,
        reply_tokens=replies,
        input_tokens=whole,
        output_tokens=written,
        usd=None if None in costs else sum(each or 0.0 for each in costs),
        sampled_runs=measured.runs if added_tokens is None or reply_tokens is None else 0,
    )


@attrs.frozen(kw_only=True)
class _Growth(Value):
    runs: int = 0
    mean_turns: float = 0.0
    added_tokens: float = 0.0
    reply_tokens: float = 0.0


async def _measure_growth(agent: RunnableAgent, fixed_tokens: float) -> _Growth:
    """Measure the growth of requests in the newest runs of an agent: the T for which the formula gives their input."""
    runs = turns = weight = grown = written = 0.0
    async for summary in RunIterator(agent.store, Filter(agent=agent.name, purpose="")):
        if runs == SAMPLED_RUNS:
            break
        stored = await _read_journal(agent.store, summary.id)
        entries = () if stored is None else iter_costs(stored)
        spent = [usage for _, _, purpose, _, usage in entries if purpose is Purpose.TURN]
        if not spent:
            continue
        number = len(spent)
        runs, turns, weight = runs + 1, turns + number, weight + number * (number + 1) / 2
        grown += sum(usage.input_tokens for usage in spent) - number * fixed_tokens
        written += sum(usage.output_tokens for usage in spent)
    if not runs:
        return _Growth()
    return _Growth(
        runs=int(runs), mean_turns=turns / runs, added_tokens=max(0.0, grown / weight), reply_tokens=written / turns
    )
