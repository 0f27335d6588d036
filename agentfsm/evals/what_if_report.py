"""The report of what-if runs: what another agent would have done otherwise, and whether that is more than noise."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from functools import partial
from statistics import fmean
from typing import Any, Final

import attrs

from agentfsm.core.value import Value
from agentfsm.evals.comparison import MIN_CASES
from agentfsm.evals.statistics import bootstrap_interval, cases_needed, mean_and_spread

# Share of runs that may differ beyond the noise floor, and relative change of a mean, that count as none.
MARGIN: Final = 0.05
# Values below which no interval is given.
MIN_VALUES: Final = 5
ASPECTS: Final = ("effects", "reads", "ends")


class WhatIfVerdict(StrEnum):
    """WhatIfVerdict on an aspect, or on all of them."""

    SAME = "no difference"
    """Nothing differs beyond the noise floor."""

    DIFFERENT = "different"
    """Runs differ, more than those of the control."""

    UNDECIDED = "undecided"
    """More runs are needed."""


@attrs.frozen(kw_only=True)
class Action(Value):
    """A call that reached the world outside, or would have."""

    tool: str
    """Name of the tool."""

    arguments: str
    """The arguments as JSON text."""

    def __str__(self) -> str:
        return f"{self.tool}({self.arguments})"


@attrs.frozen(kw_only=True)
class OtherArguments(Value):
    """A call of the record that was made with other arguments."""

    tool: str
    """Name of the tool."""

    before: str
    """The recorded arguments as JSON text."""

    after: str
    """The arguments now."""

    fields: tuple[str, ...]
    """Names of the arguments that differ."""

    def __str__(self) -> str:
        return f"{self.tool}: {self.before} -> {self.after}"


@attrs.frozen(kw_only=True)
class ActionDifference(Value):
    """Calls of one kind, compared with the record."""

    same: int
    """Number of calls that the record has with the same arguments."""

    other: tuple[OtherArguments, ...] = ()
    """Calls of the record that were made with other arguments."""

    more: tuple[Action, ...] = ()
    """Calls that the record does not have."""

    fewer: tuple[Action, ...] = ()
    """Calls of the record that were not made."""

    def __bool__(self) -> bool:
        return bool(self.other or self.more or self.fewer)


@attrs.frozen(kw_only=True)
class Measured(Value):
    """Turns, tokens and money that a run has used."""

    turns: int
    """Turns of the model, without those of sub-agents."""

    tokens: int
    """Input and output tokens, sub-agents included."""

    usd: float | None
    """US dollars; None if a price is unknown."""


@attrs.frozen(kw_only=True)
class Trial(Value):
    """One what-if run, compared with the recorded one."""

    run_id: str
    """Id of the recorded run."""

    repeat: int
    """Number of the trial among those of the run, from 1."""

    is_control: bool
    """Whether it is a trial of the control."""

    effects: ActionDifference
    """Calls that may act. None of them was made."""

    reads: ActionDifference
    """Calls that only read."""

    outside: tuple[Action, ...]
    """Reads that the record does not have, and which got no result."""

    live: int
    """Number of reads that were made."""

    before_end: str
    """End of the recorded run: its stop reason, or what it waits for."""

    after_end: str
    """End of the what-if run."""

    agent_changes: tuple[str, ...]
    """Changes of the agent since the recorded run, a few words each."""

    before: Measured
    """What the recorded run has used."""

    after: Measured
    """What the what-if run has used."""

    unrecalled: int = 0
    """Number of searches of the memory that the record does not have, and which found nothing."""

    is_cut_short: bool = False
    """Whether a flow ended at a step that was withheld, so that it is not known what it would have done after it."""

    unread_inputs: int = 0
    """Number of recorded inputs that had not arrived when the run ended."""

    @property
    def total_usd(self) -> float | None:
        """US dollars of the run; None if a price is unknown."""
        return self.after.usd

    def differs(self, aspect: str) -> bool:
        """Return whether the run differs from the record in one of `ASPECTS`."""
        if aspect == "ends":
            return self.before_end != self.after_end and not self.is_cut_short
        return bool(self.effects if aspect == "effects" else self.reads)


@attrs.frozen(kw_only=True)
class AspectVerdict(Value):
    """How many runs differ in one aspect, and what follows."""

    aspect: str
    """Name of the aspect: one of `ASPECTS`."""

    rate: float
    """Share of the runs that differ from the record."""

    noise: float | None
    """The same of the control; None without one."""

    interval: tuple[float, float] | None
    """Interval of the difference of the two with a confidence of 95 %; None if it cannot be given."""

    verdict: WhatIfVerdict
    """The verdict."""

    needed: int = 0
    """Further runs that would settle an undecided verdict."""

    def __str__(self) -> str:
        noise = "" if self.noise is None else f", noise floor {self.noise:.1%}"
        shown = "" if self.interval is None else f" [{self.interval[0]:+.1%}, {self.interval[1]:+.1%}]"
        more = f": {self.needed} more runs" if self.needed else ""
        return f"{self.aspect}: {self.verdict}{more}, {self.rate:.1%} of the runs{noise}{shown}"


@attrs.frozen(kw_only=True)
class Change(Value):
    """The mean of a measure, before and after."""

    name: str
    """Name of the measure: "usd", "tokens" or "turns"."""

    before: float
    """Mean of the control, or else of the record."""

    after: float
    """Mean of the candidate."""

    interval: tuple[float, float] | None
    """Interval of the difference with a confidence of 95 %; None for fewer than 5 runs."""

    needed: int = 0
    """Further runs that would tell a difference of 5 % from none; 0 if that is settled."""


@attrs.frozen(kw_only=True)
class WhatIfReport(Value):
    """What an agent would have done in the place of another one, in stored runs."""

    agent: str
    """Name of the candidate."""

    version: str
    """Version of the candidate; empty if it has none."""

    model: str
    """Name of its model."""

    at: str
    """Time of the trials, as in ISO 8601."""

    read: str
    """What became of reads that the record does not have: "recorded" or "live"."""

    repeats: int
    """Number of trials of each run."""

    trials: tuple[Trial, ...]
    """Trials of the candidate."""

    control: tuple[Trial, ...] = ()
    """Trials of the control; empty without one."""

    unreadable: tuple[str, ...] = ()
    """Ids of runs that were not tried, because they continue runs that are no longer in the store."""

    estimated_usd: float | None = None
    """US dollars that all of it was likely to cost; None if a price was unknown."""

    @property
    def verdict(self) -> WhatIfVerdict:
        """The verdict over all aspects."""
        found = [self.judge(aspect).verdict for aspect in ASPECTS]
        return next(
            (each for each in (WhatIfVerdict.DIFFERENT, WhatIfVerdict.UNDECIDED) if each in found), WhatIfVerdict.SAME
        )

    @property
    def usd(self) -> float | None:
        """US dollars of all trials; None if a price is unknown."""
        each = [trial.after.usd for trial in (*self.trials, *self.control)]
        return None if None in each else math.fsum(usd for usd in each if usd is not None)

    def judge(self, aspect: str) -> AspectVerdict:
        """Return the verdict on one of `ASPECTS`.

        Without a control, and with a control that never differs in fewer than 10 runs, each difference counts.
        """
        rates = _group(self.trials, lambda trial: float(trial.differs(aspect)))
        floor = _group(self.control, lambda trial: float(trial.differs(aspect)))
        rate = fmean(rates.values()) if rates else 0.0
        noise = fmean(floor.values()) if floor else None
        beyond = [value - floor.get(run_id, 0.0) for run_id, value in rates.items()]
        interval, needed = None, 0
        if len(beyond) >= MIN_CASES and noise is not None:
            interval = bootstrap_interval(beyond)
        if not rates:
            verdict, needed = WhatIfVerdict.UNDECIDED, 1
        elif not any(beyond) or (interval is None and not noise):
            verdict = WhatIfVerdict.DIFFERENT if any(beyond) else WhatIfVerdict.SAME
        elif interval is None:
            verdict, needed = WhatIfVerdict.UNDECIDED, MIN_CASES - len(beyond)
        elif interval[0] > 0:
            verdict = WhatIfVerdict.DIFFERENT
        elif interval[1] <= MARGIN:
            verdict = WhatIfVerdict.SAME
        else:
            wanted = cases_needed(mean_and_spread(beyond)[1], MARGIN)
            verdict, needed = WhatIfVerdict.UNDECIDED, max(1, wanted - len(beyond))
        return AspectVerdict(aspect=aspect, rate=rate, noise=noise, interval=interval, verdict=verdict, needed=needed)

    def measure(self) -> tuple[Change, ...]:
        """Return how cost, tokens and turns change: against the control, or without one against the record."""
        found = []
        for name in ("usd", "tokens", "turns"):
            after = _group(self.trials, partial(_read_after, name))
            before = _group(self.control, partial(_read_after, name)) if self.control else None
            before = _group(self.trials, partial(_read_before, name)) if before is None else before
            pairs = [(before[run_id], value) for run_id, value in after.items() if run_id in before]
            if not pairs:
                continue
            base = fmean(first for first, _ in pairs)
            changes = [second - first for first, second in pairs]
            interval = bootstrap_interval(changes) if len(changes) >= MIN_VALUES else None
            needed = 0
            if interval is not None and base and interval[0] <= 0 <= interval[1] and interval[1] - interval[0] > 0:
                wanted = cases_needed(mean_and_spread(changes)[1], MARGIN * base)
                needed = max(0, wanted - len(changes))
            found.append(
                Change(
                    name=name, before=base, after=fmean(second for _, second in pairs), interval=interval, needed=needed
                )
            )
        return tuple(found)

    def count_changes(self) -> Mapping[str, int]:
        """Return the changes of the agent, with the number of recorded runs that were made before each."""
        return Counter(
            change for change, _run in dict.fromkeys((c, t.run_id) for t in self.trials for c in t.agent_changes)
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        data: dict[str, Any] = attrs.asdict(self)
        own = {
            "verdict": str(self.verdict),
            "aspects": [attrs.asdict(self.judge(aspect)) for aspect in ASPECTS],
            "measured": [attrs.asdict(each) for each in self.measure()],
            "agent_changes": dict(self.count_changes()),
            "usd": self.usd,
        }
        return json.loads(json.dumps({**own, **data}))  # type: ignore[no-any-return]


def _read_before(name: str, trial: Trial) -> float | None:
    value: float | None = getattr(trial.before, name)
    return value


def _read_after(name: str, trial: Trial) -> float | None:
    value: float | None = getattr(trial.after, name)
    return value


def _group(trials: Sequence[Trial], read: Callable[[Trial], float | None]) -> dict[str, float]:
    """Return the mean over the repeats of each run; without runs in which a value is unknown."""
    found: dict[str, list[float | None]] = {}
    for each in trials:
        found.setdefault(each.run_id, []).append(read(each))
    return {
        run_id: fmean(value for value in values if value is not None)
        for run_id, values in found.items()
        if None not in values
    }
