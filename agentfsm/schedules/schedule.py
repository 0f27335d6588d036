"""A schedule, as a record of the store has it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, get_args

import attrs

from agentfsm.agents.admission import admit
from agentfsm.core.errors import AgentError, CorruptError
from agentfsm.core.labels import Label, as_labels
from agentfsm.core.messages import JSON
from agentfsm.core.run_ids import scheduled_run_id
from agentfsm.core.validation import (
    BOOL,
    COUNT_OR_ZERO,
    NAME,
    STRING,
    ValueRule,
    is_number,
    require_choice,
    require_tuple,
    require_type,
)
from agentfsm.core.value import Value

if TYPE_CHECKING:
    from agentfsm.agents.runnable_agent import RunnableAgent
    from agentfsm.core.header import Header
    from agentfsm.core.run import Run
    from agentfsm.ports.stored import StoreRecord
    from agentfsm.schedules.cron_times import CronTimes

MissedPolicy: TypeAlias = Literal["skip", "latest", "all"]
"""Treatment of times at which no worker was there. "latest": the newest of them is made up for. "all": each of
them, up to the newest 1,000. "skip": none, if it is more than a minute ago.
"""

# Kind of the records in the store.
SCHEDULE_KIND: Final = "schedule"
# Stands for the logical date in a prompt.
DATE_PLACEHOLDER: Final = "{logical_date}"
MAX_NAME_CHARS: Final = 100
# Maximum age of a time that counts as not missed, seconds: workers may be busy, or restart.
ON_TIME_S: Final = 60.0
# Maximum missed times that are made up for, per schedule.
MAX_MISSED: Final = 1_000
SCHEDULE_NAME: Final = ValueRule(
    fits=lambda value: (
        isinstance(value, str)
        and re.fullmatch(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{MAX_NAME_CHARS - 1}}}", value) is not None
    ),
    wanted=f"up to {MAX_NAME_CHARS} letters, digits, '.', '-' and '_', beginning with a letter or a digit",
)
MISSED: Final = require_choice(*get_args(MissedPolicy))
_TIME: Final = ValueRule(fits=is_number, wanted="seconds since 1970")
_SPAN: Final = ValueRule(
    fits=lambda value: isinstance(value, tuple) and len(value) == 2 and all(map(is_number, value)),
    wanted="two numbers of seconds since 1970",
)
_TIMES: Final = ValueRule(
    fits=lambda value: isinstance(value, tuple) and all(map(is_number, value)), wanted="a tuple of seconds since 1970"
)
_ROLES: Final = require_tuple(str, wanted="a tuple of strings")
_METADATA: Final = require_type(dict, wanted="a dict")


@attrs.frozen(kw_only=True)
class Schedule(Value):
    """A recurring start of runs of one agent."""

    name: str = attrs.field(validator=SCHEDULE_NAME)
    """Name of the schedule, unique in the store. The ids of its runs begin with it."""

    agent: str = attrs.field(validator=NAME)
    """Name of the agent. Each worker of an agent with this name starts the runs."""

    target: str = attrs.field(default="", validator=STRING)
    """Import path of the agent, as "module:attribute", for the command line; empty if unknown."""

    cron: str = attrs.field(validator=NAME)
    """The times, as a cron expression with five fields."""

    tz: str = attrs.field(default="UTC", validator=NAME)
    """Time zone of the expression, a name of the IANA database. Default "UTC"."""

    missed: MissedPolicy = attrs.field(default="latest", validator=MISSED)
    """Treatment of times at which no worker was there. Default "latest"."""

    prompt: str = attrs.field(validator=STRING)
    """Prompt of each run, or the inputs of a flow as a JSON object. `{logical_date}` in it is replaced."""

    user: str | None = attrs.field(default=None, validator=STRING.or_none())
    """User on whose behalf the runs work; None if not given."""

    tenant: str | None = attrs.field(default=None, validator=STRING.or_none())
    """Tenant that the user belongs to; None if not given."""

    roles: tuple[str, ...] = attrs.field(default=(), validator=_ROLES)
    """Roles of the user."""

    metadata: Mapping[str, Any] = attrs.field(factory=dict, validator=_METADATA)
    """Metadata of each run, besides "schedule" (the name) and "logical_date"."""

    labels: tuple[Label, ...] = attrs.field(default=(), converter=as_labels)
    """Labels of the prompt: those of the run whose tool has added the schedule, and `user_data`; empty otherwise."""

    paused: bool = attrs.field(default=False, validator=BOOL)
    """True if no runs are started until it is resumed."""

    done_until: float = attrs.field(validator=_TIME)
    """Moment up to which all times are dealt with, seconds since 1970 by the store's clock."""

    due: tuple[float, ...] = attrs.field(default=(), validator=_TIMES)
    """Times before that moment whose runs are still to be started, seconds since 1970, oldest first: they were due when
    the schedule was paused or replaced.
    """

    done_before: float | None = attrs.field(default=None, validator=_TIME.or_none())
    """`done_until` before it was last moved over missed times, seconds since 1970; None if it was not moved over any.
    If the clock was ahead then, the progress is set back to this moment.
    """

    set_back: tuple[float, float] | None = attrs.field(default=None, validator=_SPAN.or_none())
    """The moment to which the progress was set back because it was in the future, and the moment that it had, both in
    seconds since 1970; None if it was not set back, or that moment is past.
    """

    conflicts: int = attrs.field(default=0, validator=COUNT_OR_ZERO)
    """Times that got no run since the schedule was added, because another run had the id of theirs."""

    last_conflict: str = attrs.field(default="", validator=STRING)
    """Id of the run that the newest of these times found; empty if there were none."""

    @classmethod
    def parse(cls, record: StoreRecord) -> Schedule:
        """Parse a record of the store.

        Raises:
            CorruptError: if it is damaged, or a newer agentfsm has written it.
        """
        try:
            fields = _read_object(record.value)
            lists = {name: tuple(fields.get(name, ())) for name in ("roles", "due", "labels")}
            if fields.get("set_back") is not None:
                lists["set_back"] = tuple(fields["set_back"])
            return cls(**{**fields, **lists, "name": record.key})
        except (TypeError, AgentError) as error:
            raise CorruptError(
                f"schedule {record.key!r} cannot be read, since it is damaged or of a newer agentfsm ({error}): "
                "upgrade agentfsm, or remove the schedule and add it again"
            ) from None

    def build_record(self) -> dict[str, JSON]:
        """Return the value of the record."""
        fields: dict[str, JSON] = attrs.asdict(self)
        del fields["name"]
        if self.set_back is not None:
            fields["set_back"] = [*self.set_back]
        for name in (
            "done_before",
            "set_back",
            "labels",
            "conflicts",
            "last_conflict",
        ):  # 0.2 reads records without them
            if not fields[name]:
                del fields[name]
        if self.labels:
            fields["labels"] = [*self.labels]
        return {**fields, "roles": [*self.roles], "metadata": dict(self.metadata), "due": [*self.due]}

    def parse_times(self) -> CronTimes:
        """Return the times of the schedule.

        Raises:
            MisuseError: if the expression or the zone is invalid, or the extra `schedule` is not installed.
        """
        from agentfsm.schedules.cron_times import CronTimes  # noqa: PLC0415  the library of an extra

        return CronTimes.parse(self.cron, self.tz)

    def correct_progress(self, now: float) -> Schedule:
        """Return the schedule with its progress set back if it is in the future: the clock was ahead for a while.

        Times that got their run meanwhile are not repeated, because the run has the id of its time. If the clock is
        behind now instead, the old progress holds again as soon as the clock is right: nothing was started since.
        """
        if self.set_back is not None and self.set_back[0] == self.done_until and now >= self.set_back[1]:
            return attrs.evolve(self, done_until=self.set_back[1], set_back=None)
        if self.done_until <= now + ON_TIME_S:
            return self
        is_known = self.done_before is not None and self.done_before <= now
        to = self.done_before if is_known and self.done_before is not None else now
        ahead = max(self.done_until, self.set_back[1] if self.set_back else self.done_until)
        due = tuple([at for at in self.due if at <= now + ON_TIME_S])
        return attrs.evolve(self, done_until=to, done_before=None, set_back=(to, ahead), due=due)

    def keep_due(self, now: float) -> Schedule:
        """Return the schedule with the times up to now as dealt with or as `due`, so that a change of it loses none.

        Raises:
            MisuseError: as for `parse_times`.
        """
        own = self.correct_progress(now)
        done_until = max(now, own.done_until)
        set_back = None if own.set_back is None else (done_until, own.set_back[1])
        kept: list[float] = []
        if not own.paused:  # the times of a pause are not made up for
            found = own.parse_times().list_newest(own.done_until, now, MAX_MISSED if own.missed == "all" else 1)
            kept = [at for at in found if own.missed != "skip" or now - at <= ON_TIME_S]
        due = (*own.due, *kept)[-MAX_MISSED:]
        return attrs.evolve(own, done_until=done_until, done_before=None, set_back=set_back, due=due)

    def owns(self, header: Header) -> bool:
        """Return whether the run that has the id of one of the times is that of the schedule.

        Before version 0.3 any client of a server could take these ids, with any metadata, but only as its own user.
        """
        return (header.metadata.get("schedule"), header.tenant, header.user) == (self.name, self.tenant, self.user)

    def start_run(self, agent: RunnableAgent, times: CronTimes, at: float, **options: Any) -> Run[Any]:
        """Begin the run of a time, without I/O. It has the same id and prompt in each process.

        Args:
            agent: The agent.
            times: The times of the schedule.
            at: The time, seconds since 1970.
            **options: Release and arms of the run.

        Raises:
            MisuseError: if the agent refuses the prompt or another option.
        """
        date = times.localise(at).isoformat(timespec="minutes")
        return agent.start(
            admit(self.prompt.replace(DATE_PLACEHOLDER, date), f"schedule {self.name}"),
            id=scheduled_run_id(self.name, at),
            user=self.user,
            tenant=self.tenant,
            roles=self.roles,
            metadata={**self.metadata, "schedule": self.name, "logical_date": date},
            labels=self.labels,
            **options,
        )


def _read_object(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"{value!r:.40} is not an object")
    return value
