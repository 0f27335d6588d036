"""Spending limits of an agent, a user or a tenant, and the calendar windows that they apply to."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from hashlib import sha256
from typing import TYPE_CHECKING, Final, Literal
from urllib.parse import quote

import attrs

from agentfsm.core.errors import MisuseError
from agentfsm.core.messages import replace_surrogates
from agentfsm.core.validation import POSITIVE, SHARE, require_choice
from agentfsm.core.value import Value

if TYPE_CHECKING:
    from zoneinfo import ZoneInfo

    from agentfsm.core.header import Header

SpendPeriod = Literal["day", "month"]
SpendScope = Literal["agent", "user", "tenant"]
SPEND_SCOPES: Final[tuple[SpendScope, ...]] = ("agent", "user", "tenant")

# Kind of the records of windows in the store.
SPEND_RECORDS: Final = "spend"
# Characters of a subject in the key of a record; longer ones are hashed, because keys have at most 500.
_MAX_KEY_PART_CHARS: Final = 120
# Days of the longest month, so that a date this much later is in the next one.
_LONGEST_MONTH_DAYS: Final = 31


def load_zone(name: str) -> ZoneInfo:
    """Return a time zone by its name in the IANA database.

    Raises:
        MisuseError: if the name is unknown.
    """
    from zoneinfo import ZoneInfo  # noqa: PLC0415  few agents limit spending

    try:
        return ZoneInfo(name)
    except (LookupError, ValueError, TypeError, OSError) as error:
        raise MisuseError(
            f"tz={name!r:.80}: give a time zone of the IANA database, such as 'Europe/Berlin' or 'UTC'; "
            "on Windows, install the package tzdata"
        ) from error


def _check_zone(_instance: object, _attribute: object, name: str) -> None:
    load_zone(name)


def _shorten(part: str) -> str:
    return part if len(part) <= _MAX_KEY_PART_CHARS else f"~{sha256(part.encode()).hexdigest()}"


@attrs.frozen(kw_only=True)
class SpendWindow(Value):
    """One calendar day or month of one agent, user or tenant."""

    scope: SpendScope
    """Kind of the subject."""

    subject: str
    """Name of the agent, or id of the user or tenant; empty for runs without one."""

    tenant: str = ""
    """Tenant of a user; empty if there is none, and for the other scopes."""

    per: SpendPeriod
    """Length of the window."""

    tz: str
    """Time zone of the calendar."""

    start: str
    """The day, as "2026-11-26", or the month, as "2026-11"."""

    ends_at: float
    """End of the window, seconds since 1970."""

    @property
    def key(self) -> str:
        """Key of the record of the window in the store."""
        parts = (self.scope, self.start, self.per, self.tz, self.tenant, self.subject)
        return "|".join([_shorten(quote(part, safe="/")) for part in parts])

    def describe(self) -> str:
        """Return the name of the window for people: "the agent shop on 2026-11-26 (UTC)"."""
        subject = f"the {self.scope} {self.subject}" if self.subject else f"runs without a {self.scope}"
        tenant = f" of the tenant {self.tenant}" if self.tenant else ""
        return f"{subject}{tenant} {'on' if self.per == 'day' else 'in'} {self.start} ({self.tz})"

    def format_end(self) -> str:
        """Return the end of the window in its time zone: "2026-11-27 00:00 +01:00"."""
        end = datetime.fromtimestamp(self.ends_at, load_zone(self.tz))
        offset = end.strftime("%z")
        return f"{end:%Y-%m-%d %H:%M} {offset[:3]}:{offset[3:5]}"


@attrs.frozen(kw_only=True)
class Spend(Value):
    """Spending limit of an agent, a user or a tenant for a calendar day or month: `Spend(per="day", usd=20)`.

    All processes that share a store share it. The requests of runs count whose agent, or a calling agent, has a limit
    with the same period, scope and time zone.

    Args:
        per: Length of the window: "day" or "month" of the calendar.
        scope: Subject of a window: the "agent", each "user", or each "tenant".
        usd: US dollars for models and tools in a window, above 0.
        tz: Time zone of the calendar, a name of the IANA database.
        warn_at: Share of `usd` at which a warning is logged, once per window, above 0 and up to 1.

    Raises:
        MisuseError: when a value is out of its range or of a wrong type, or the time zone is unknown.
    """

    per: SpendPeriod = attrs.field(validator=require_choice("day", "month"))
    """Length of the window: "day" or "month" of the calendar."""

    scope: SpendScope = attrs.field(default="agent", validator=require_choice(*SPEND_SCOPES))
    """Subject of a window: the "agent", each "user" of a tenant, or each "tenant". Agents with
    different names have windows of their own; a user's and a tenant's are shared by all agents that limit them. Runs
    without a user (or tenant) share one window. Default "agent".
    """

    usd: float = attrs.field(validator=POSITIVE)
    """US dollars for models and tools in a window, above 0. It is exceeded by one answer at most."""

    tz: str = attrs.field(default="UTC", validator=_check_zone)
    """Time zone of the calendar, a name of the IANA database such as "Europe/Berlin". Default "UTC"."""

    warn_at: float = attrs.field(default=0.8, validator=SHARE)
    """Share of `usd` at which a warning is logged, once per window, above 0 and up to 1. Default 0.8."""

    def find_window(self, header: Header, now: float) -> SpendWindow:
        """Return the window of a run with this header at a time, in seconds since 1970."""
        zone = load_zone(self.tz)
        today = datetime.fromtimestamp(now, zone).replace(hour=0, minute=0, second=0, microsecond=0, fold=0)
        if self.per == "day":
            start, end = today, today + timedelta(days=1)  # of the calendar: 23 or 25 hours when the clocks change
        else:
            start = today.replace(day=1)
            end = (start + timedelta(days=_LONGEST_MONTH_DAYS)).replace(day=1)
        subject = {"agent": header.agent, "user": header.user, "tenant": header.tenant}[self.scope]
        return SpendWindow(
            scope=self.scope,
            subject=replace_surrogates(subject or ""),  # as the journal has it
            tenant=replace_surrogates(header.tenant or "") if self.scope == "user" else "",
            per=self.per,
            tz=self.tz,
            start=f"{start:%Y-%m-%d}" if self.per == "day" else f"{start:%Y-%m}",
            ends_at=end.astimezone(UTC).timestamp(),
        )
