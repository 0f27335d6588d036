"""The log of a roll-out in a store. Its newest entry holds the plan in effect; no entry is ever changed.

An entry is a record whose key ends with its number, and which must not exist when it is written. So of two changes at
the same time one succeeds, and the other gets an error.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal, TypeAlias

import attrs

from agentfsm.core.errors import ConflictError, MisuseError, StoreError
from agentfsm.core.json_text import round_timestamp
from agentfsm.core.validation import NAME, ValueRule, require_between, require_choice
from agentfsm.core.value import Value
from agentfsm.ports.store import STORE, Clock, Store, SystemClock
from agentfsm.releases.buckets import (
    BUCKETS,
    BucketRanges,
    count_buckets,
    find_arm,
    find_bucket,
    move_buckets,
    read_weights,
)
from agentfsm.releases.rollback_rules import RollbackRule
from agentfsm.releases.targets import Target, read_targets

_log = logging.getLogger("agentfsm.releases")

# Seconds for which an assignment may follow a plan that was replaced meanwhile.
MAX_PLAN_AGE_S: Final = 2.0
# Kind of the records.
ROLLOUTS: Final = "rollout"
# Digits of the number in a key, so that the keys have the order of the entries.
_DIGITS: Final = 8
_PAGE: Final = 1_000
# Name of the group that gets the base and takes part in nothing, in the headers of its runs.
HOLDOUT: Final = "holdout"
# Salt of the holdout: the same users are held out of all roll-outs.
_HOLDOUT_SALT: Final = "agentfsm holdout"

Unit: TypeAlias = Literal["user", "session", "run"]
"""Kind of unit that an arm is assigned to."""

UNIT_KINDS: Final[tuple[Unit, ...]] = ("user", "session", "run")
UNIT: Final = require_choice(*UNIT_KINDS)
Action: TypeAlias = Literal["start", "weights", "targets", "back", "auto_back", "kill"]
_ROLLOUT_NAME: Final = ValueRule(
    fits=lambda value: isinstance(value, str) and re.fullmatch(r"[\w.:@-]{1,200}", value) is not None,
    wanted="a name of 1 to 200 letters, digits and . _ - : @, such as 'new-search'",
)


@attrs.frozen(kw_only=True)
class RolloutPlan(Value):
    """The arms of a roll-out and who gets them."""

    agent: str
    """Name of the agent; empty for an experiment without releases."""

    unit: Unit
    """Kind of unit that an arm is assigned to."""

    salt: str
    """Salt of the buckets."""

    base: str
    """Arm that all get before the start, after a kill, and in the holdout."""

    releases: Mapping[str, str]
    """Version of the release by arm; empty for an arm without one."""

    ranges: BucketRanges
    """Buckets by arm."""

    holdout: float = 0.0
    """Percent of the units that get the base in all roll-outs with a holdout, and count in none."""

    rules: tuple[RollbackRule, ...] = ()
    """Rules of automatic roll-backs."""

    targets: tuple[Target, ...] = ()
    """Runs that get an arm whatever its weight is. Of several targets of a run the first counts."""

    since: Mapping[str, float] = attrs.field(factory=dict)
    """Time since which each arm has had buckets or a target, seconds since 1970. Earlier runs say nothing about it."""

    @property
    def weights(self) -> dict[str, float]:
        """Percent by arm, 0 for an arm without buckets."""
        return dict.fromkeys(self.releases, 0.0) | read_weights(self.ranges)

    @property
    def active(self) -> tuple[str, ...]:
        """Arms that new runs get: those with buckets or a target."""
        return tuple(dict.fromkeys((*self.ranges, *[each.arm for each in self.targets])))

    def find_arm(self, unit: str) -> str:
        """Return the arm of a unit; "holdout" if it is held out."""
        if find_bucket(_HOLDOUT_SALT, unit) < self.holdout / 100 * BUCKETS:
            return HOLDOUT
        return find_arm(self.ranges, find_bucket(self.salt, unit))

    def find_release(self, arm: str) -> str:
        """Return the version of an arm's release, of the base for the holdout; empty for none."""
        return self.releases[self.base if arm == HOLDOUT else arm]


@attrs.frozen(kw_only=True)
class RolloutChange(Value):
    """An entry of the log."""

    number: int
    """Number of the entry, from 1."""

    action: Action
    """The change: "start", "weights", "targets", "back", "auto_back" (by a rule) or "kill" (all to the base)."""

    at: float
    """Time, seconds since 1970 by the store's clock."""

    by: str
    """Person or program that made it."""

    reason: str
    """The reason."""

    plan: RolloutPlan
    """The plan from then on."""

    restored: int | None = None
    """Number of the entry whose weights a "back" has restored; 0 for the base alone, which precedes a start."""

    arm: str | None = None
    """Arm whose weight a "back" or an "auto_back" has given to the base; None if it has restored an entry."""

    @property
    def is_killed(self) -> bool:
        """Whether the roll-out is over, and needs a new start."""
        return self.action == "kill"

    def __str__(self) -> str:
        weights = " ".join(f"{arm}={weight:g}" for arm, weight in self.plan.weights.items())
        back = "" if self.restored is None else f" to {f'entry {self.restored}' if self.restored else 'the base'}"
        back = back if self.arm is None else f" of {self.arm}"
        targets = "".join([f" {target}" for target in self.plan.targets])
        return f"{self.number} {self.action}{back} by {self.by}: {weights}{targets}; {self.reason}"

    def to_dict(self) -> dict[str, Any]:
        """Return the entry as plain JSON."""
        plan: dict[str, Any] = attrs.asdict(self.plan, recurse=False)
        del plan["targets"]
        if self.plan.targets:
            plan["targets"] = [str(target) for target in self.plan.targets]
        plan |= {
            "ranges": {arm: [list(each) for each in own] for arm, own in self.plan.ranges.items()},
            "rules": [str(rule) for rule in self.plan.rules],
            **{name: dict(plan[name]) for name in ("releases", "since")},
        }
        return {**attrs.asdict(self, recurse=False), "plan": plan}

    @classmethod
    def from_dict(cls, data: Any) -> RolloutChange:
        """Return the entry from the JSON that `to_dict` returned."""
        plan = data["plan"]
        ranges = {arm: tuple([(first, end) for first, end in own]) for arm, own in plan["ranges"].items()}
        rules = tuple([RollbackRule.parse(rule) for rule in plan["rules"]])
        targets = tuple([Target.parse(target) for target in plan.get("targets", ())])
        given = {**plan, "ranges": ranges, "rules": rules, "targets": targets}
        return cls(**{**data, "plan": RolloutPlan(**given)})


class RolloutControl:
    """Changes a roll-out, from any process: `control = RolloutControl("billing", store)`.

    Each change is an entry of its log with its time, author and reason. All processes follow it within 5 seconds. Runs
    that have begun keep their arm.
    """

    def __init__(self, name: str, store: Store, *, clock: Clock | None = None) -> None:
        """Name a roll-out in a store, without I/O.

        Args:
            name: Name of the roll-out.
            store: The store.
            clock: Clock; by default that of the system.

        Raises:
            MisuseError: if an argument is invalid.
        """
        _ROLLOUT_NAME.check("RolloutControl", "name", name)
        STORE.check("RolloutControl", "store", store)
        self.name = name
        self.store = store
        self._clock = clock or SystemClock()
        self._newest: RolloutChange | None = None
        self._read_at: float | None = None
        self._reports_outage = True

    async def newest(self) -> RolloutChange | None:
        """Return the newest entry of the log, as it was at most 2 s ago; None if the roll-out was never started.

        If the store fails, the entry that was read last counts.

        Raises:
            StoreError: if the store fails, and the log was never read.
        """
        now = self._clock.monotonic()
        if self._read_at is not None and now - self._read_at < MAX_PLAN_AGE_S:
            return self._newest
        try:
            log = await self.log(after=0 if self._newest is None else self._newest.number)
        except StoreError as error:
            if self._read_at is None:
                raise
            if self._reports_outage:
                _log.warning("roll-out %r: the store failed, the plan that was read last is used: %s", self.name, error)
            self._reports_outage = False
            return self._newest
        self._newest, self._read_at, self._reports_outage = log[-1] if log else self._newest, now, True
        return self._newest

    async def log(self, *, after: int = 0) -> tuple[RolloutChange, ...]:
        """Return the entries of the log, the oldest first.

        Args:
            after: Number of the entry after which they begin.
        """
        found: list[RolloutChange] = []
        prefix = f"{self.name}/"
        while True:
            page = await self.store.list_records(ROLLOUTS, prefix=prefix, after=self._key(after), limit=_PAGE)
            found += [RolloutChange.from_dict(record.value) for record in page]
            if len(page) < _PAGE:
                return tuple(found)
            after = found[-1].number

    def _key(self, number: int) -> str:
        return f"{self.name}/{number:0{_DIGITS}}"

    async def start(
        self,
        weights: Mapping[str, float],
        *,
        by: str,
        reason: str,
        agent: str = "",
        releases: Mapping[str, str] | None = None,
        unit: Unit = "user",
        holdout: float = 0.0,
        rules: Iterable[RollbackRule | str] = (),
        targets: Iterable[Target | str] = (),
    ) -> RolloutChange:
        """Start a roll-out. The first arm is the base: all have it before, and get it back after a kill.

        Args:
            weights: Percent by arm, in steps of 0.01; their sum is 100.
            by: Person or program that starts it.
            reason: The reason.
            agent: Name of the agent; empty for an experiment without releases.
            releases: Version of the release by arm; None for an experiment without releases.
            unit: What an arm is assigned to: "user", "session" or "run".
            holdout: Percent of the units that get the base, here and in all other roll-outs with a holdout.
            rules: Rules of automatic roll-backs.
            targets: Runs that get an arm whatever its weight is, such as "new:role=tester" (see `Target`).

        Raises:
            MisuseError: if an argument is invalid, or the roll-out is in progress: several arms get runs.
            ConflictError: if it was changed at the same moment.
        """
        UNIT.check("start", "unit", unit)
        require_between(0, 50).check("start", "holdout", holdout)
        parsed = tuple([each if isinstance(each, RollbackRule) else RollbackRule.parse(each) for each in rules])
        counts = count_buckets(weights)
        for arm in counts:
            NAME.check("start", "weights", arm)
        if not releases and parsed:
            raise MisuseError("rules compare the runs of releases: an experiment without releases has none")
        if wrong := counts.keys() ^ (releases or counts).keys():
            raise MisuseError(f"arm {min(wrong)!r} has a weight or a release, but not both")
        aimed = read_targets(targets, counts, f"roll-out {self.name!r}")
        if HOLDOUT in counts:
            raise MisuseError(f"an arm cannot be called {HOLDOUT!r}: give it another name")
        log = await self.log()
        if log and not log[-1].is_killed and len(log[-1].plan.active) > 1:
            raise MisuseError(
                f"roll-out {self.name!r} is in progress ({log[-1]}): give one arm all the weight, or kill it, before "
                "you start another"
            )
        number = len(log) + 1
        base = next(iter(counts))
        ranges = move_buckets(_all_buckets(base), counts)
        now = round_timestamp(await self.store.now())
        plan = RolloutPlan(
            agent=agent,
            unit=unit,
            salt=f"{self.name}#{number}",
            base=base,
            releases=releases or dict.fromkeys(counts, ""),
            ranges=ranges,
            holdout=float(holdout),
            rules=parsed,
            targets=aimed,
        )
        plan = _note_times(plan, {}, now)
        return await self._write(RolloutChange(number=number, action="start", at=now, by=by, reason=reason, plan=plan))

    async def set_weights(self, weights: Mapping[str, float], *, by: str, reason: str) -> RolloutChange:
        """Change the weights. Only the users of the difference get another arm.

        Args:
            weights: Percent by arm, in steps of 0.01; their sum is 100. An arm that is not named keeps nothing.
            by: Person or program that changes them.
            reason: The reason.

        Raises:
            MisuseError: if the weights are invalid, or the roll-out was not started, or killed.
            ConflictError: if it was changed at the same moment.
        """
        log = await self._read_open_log("weights")
        before = log[-1].plan
        if unknown := weights.keys() - before.releases.keys():
            raise MisuseError(f"roll-out {self.name!r} has no arm {min(unknown)!r}: {', '.join(before.releases)}")
        ranges = move_buckets(before.ranges, count_buckets(weights))
        now = round_timestamp(await self.store.now())
        plan = _note_times(attrs.evolve(before, ranges=ranges), before.since, now)
        return await self._write(
            RolloutChange(number=len(log) + 1, action="weights", at=now, by=by, reason=reason, plan=plan)
        )

    async def set_targets(self, targets: Iterable[Target | str], *, by: str, reason: str) -> RolloutChange:
        """Change the targets, and leave the weights as they are.

        Args:
            targets: All targets from now on, such as "new:role=tester" (see `Target`). Empty: there are none.
            by: Person or program that changes them.
            reason: The reason.

        Raises:
            MisuseError: if a target is invalid, or the roll-out was not started, or killed.
            ConflictError: if it was changed at the same moment.
        """
        log = await self._read_open_log("targets")
        before = log[-1].plan
        aimed = read_targets(targets, before.releases, f"roll-out {self.name!r}")
        now = round_timestamp(await self.store.now())
        plan = _note_times(attrs.evolve(before, targets=aimed), before.since, now)
        return await self._write(
            RolloutChange(number=len(log) + 1, action="targets", at=now, by=by, reason=reason, plan=plan)
        )

    async def back(
        self, *, by: str, reason: str, arm: str | None = None, automatic: bool = False, number: int | None = None
    ) -> RolloutChange:
        """Return to the weights and targets that were in effect before, or give one arm's weight to the base.

        Weights that were rolled back are never returned to, nor those before a kill. What precedes a start is the arm
        that had all the weight then, if the start has its release, else the base alone.

        Args:
            by: Person or program that rolls back.
            reason: The reason.
            arm: Give the weight of this arm to the base, end its targets, and leave the other arms as they are; None to
                return to the weights and targets before.
            automatic: Whether a rule decided this.
            number: Number of the newest entry that the caller knows; None not to check it.

        Raises:
            MisuseError: if no other weights were in effect before, or the arm has neither weight nor target.
            ConflictError: if it was changed at the same moment.
        """
        log = await self._read_open_log("back")
        if number is not None and number != len(log):
            raise ConflictError(f"roll-out {self.name!r} was changed since ({log[-1]}): look at it, and decide again")
        now = round_timestamp(await self.store.now())
        if arm is None:
            restored, plan = self._find_plan_before(log, now)
        else:
            restored, plan = None, self._take_weight(log[-1].plan, arm, now)
        change = RolloutChange(
            number=len(log) + 1,
            action="auto_back" if automatic else "back",
            at=now,
            by=by,
            reason=reason,
            plan=plan,
            restored=restored,
            arm=arm,
        )
        return await self._write(change)

    def _find_plan_before(self, log: tuple[RolloutChange, ...], now: float) -> tuple[int, RolloutPlan]:
        """Return the number of the entry that was in effect before the present weights, and its plan."""
        current = log[-1].plan
        for entry in reversed(find_active(log)):
            if (entry.plan.weights, entry.plan.targets) != (current.weights, current.targets):
                return entry.number, entry.plan
        number, plan = _find_plan_before_start(log, now)
        if (plan.weights, plan.targets) == (current.weights, current.targets):
            raise MisuseError(
                f"roll-out {self.name!r} has no plan that was in effect before, since its start: change the weights "
                "(`agentfsm rollout weights`), or kill it"
            )
        return number, plan

    def _take_weight(self, plan: RolloutPlan, arm: str, now: float) -> RolloutPlan:
        """Return a plan with the weight of an arm given to the base, and without its targets."""
        if arm not in plan.active:
            raise MisuseError(f"arm {arm!r} of roll-out {self.name!r} has no weight: nothing is to be taken back")
        if arm == plan.base:
            raise MisuseError(f"arm {arm!r} is the base, to which roll-backs return: change the weights instead")
        ranges = {each: own for each, own in plan.ranges.items() if each != arm}
        ranges[plan.base] = (*ranges.get(plan.base, ()), *plan.ranges.get(arm, ()))
        targets = tuple([each for each in plan.targets if each.arm != arm])
        return _note_times(attrs.evolve(plan, ranges=ranges, targets=targets), plan.since, now)

    async def kill(self, *, by: str, reason: str) -> RolloutChange:
        """Give the base to all, and end the roll-out.

        Args:
            by: Person or program that kills it.
            reason: The reason.

        Raises:
            MisuseError: if it was not started, or killed already.
            ConflictError: if it was changed at the same moment.
        """
        log = await self._read_open_log("kill")
        now = round_timestamp(await self.store.now())
        plan = _give_all(log[-1].plan, log[-1].plan.base, now)
        return await self._write(
            RolloutChange(number=len(log) + 1, action="kill", at=now, by=by, reason=reason, plan=plan)
        )

    async def _read_open_log(self, action: str) -> tuple[RolloutChange, ...]:
        log = await self.log()
        if not log:
            raise MisuseError(f"{action}: there is no roll-out {self.name!r}: start it first")
        if log[-1].is_killed:
            raise MisuseError(f"{action}: roll-out {self.name!r} was killed ({log[-1]}): start it again")
        return log

    async def _write(self, change: RolloutChange) -> RolloutChange:
        for name in ("by", "reason"):
            NAME.check(change.action, name, text := getattr(change, name))
            if not text.isprintable():  # a line of the log is one entry
                raise MisuseError(f"{change.action}({name}={text!r:.80}): give one line of printable characters")
        try:
            await self.store.write_record(ROLLOUTS, self._key(change.number), change.to_dict(), revision=0)
        except ConflictError:
            other = (await self.log(after=change.number - 1))[0]
            raise ConflictError(
                f"roll-out {self.name!r} was changed at the same moment ({other}): look at it, and decide again"
            ) from None
        self._newest, self._read_at = change, self._clock.monotonic()
        return change


async def list_rollouts(store: Store) -> list[str]:
    """Return the names of the roll-outs and experiments of a store that were started."""
    names: list[str] = []
    while page := await store.list_records(ROLLOUTS, after=f"{names[-1]}/~" if names else "", limit=_PAGE):
        names += dict.fromkeys(each.key.rpartition("/")[0] for each in page)
    return [*dict.fromkeys(names)]


def _give_all(plan: RolloutPlan, arm: str, now: float) -> RolloutPlan:
    return _note_times(attrs.evolve(plan, ranges=_all_buckets(arm), targets=()), plan.since, now)


def _note_times(plan: RolloutPlan, since: Mapping[str, float], now: float) -> RolloutPlan:
    """Return a plan with the times since which its arms have had runs: as before, or now."""
    return attrs.evolve(plan, since={arm: since.get(arm, now) for arm in plan.active})


def _all_buckets(arm: str) -> BucketRanges:
    return {arm: ((0, BUCKETS),)}


def find_active(log: Iterable[RolloutChange]) -> list[RolloutChange]:
    """Return the entries since the newest start that roll-backs can return to, and at the end the one in effect.

    An entry that was rolled back is never returned to: it was in effect, and given up.
    """
    stack: list[RolloutChange] = []
    for each in log:
        if each.action == "start":
            stack = [each]
        elif each.restored is not None:
            while stack and stack[-1].number != each.restored:
                stack.pop()
        else:
            stack = [*[known for known in stack if each.arm not in known.plan.active], each]
    return stack


def _find_plan_before_start(log: tuple[RolloutChange, ...], now: float) -> tuple[int, RolloutPlan]:
    """Return the number of the entry before the newest start, 0 for none, and the plan of the start with its weights.

    A start follows a kill, or an entry with one arm. The plan keeps the arms of the start, whose releases are known.
    """
    start = next(each for each in reversed(log) if each.action == "start")
    before = log[start.number - 2] if start.number > 1 else None
    if before is not None and not before.is_killed:
        [had_all] = before.plan.ranges
        release = before.plan.releases[had_all]
        for arm, own in start.plan.releases.items():
            if (own or arm) == (release or had_all):  # an experiment has no releases
                return before.number, _give_all(start.plan, arm, now)
    return 0, _give_all(start.plan, start.plan.base, now)
