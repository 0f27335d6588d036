"""Rules over time: what must have happened before a call, must not have, or must still happen before the run ends.

They read outcomes. A call has happened if its outcome is DONE. If it was started and its effect is not known, because
it is open, was lost, or broke while its tool was running, it may have happened: that never permits anything, and counts
where a rule forbids. The calls before it in the same reply are not done; where a rule forbids, they count.

The state of each rule is one number or moment for each value of the argument that binds its calls. It is made from the
calls in any order, so it does not depend on which run was read first.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal, InvalidOperation
from functools import lru_cache
from math import inf
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import attrs

from agentfsm.core.errors import MisuseError
from agentfsm.core.events import GuardVerdict
from agentfsm.core.labels import matches_tool
from agentfsm.core.messages import JSON
from agentfsm.core.text_safety import HIDDEN_CHARS
from agentfsm.core.validation import COUNT_OR_ZERO, NAME, NOT_NEGATIVE, SECONDS, require_choice
from agentfsm.core.value import Value
from agentfsm.guards.call_rules import PATTERN_SIGNS, parse_verdict
from agentfsm.ports.call_history import Moment
from agentfsm.ports.guards import CallGuard, GuardDecision
from agentfsm.ports.planned_calls import format_path
from agentfsm.tools.permission import Rule
from agentfsm.tools.tool import Tool

if TYPE_CHECKING:
    from agentfsm.core.call_facts import CallFact
    from agentfsm.core.header import Header
    from agentfsm.ports.call_history import CallHistory
    from agentfsm.ports.guards import GuardedCall, ToolTraits
    from agentfsm.ports.planned_calls import PlannedCall

_DAY_S: Final = 86_400.0
# Stands for the value of an argument that a call has not given: no JSON text, and no text that `_normalise` returns.
_MISSING: Final = " "
# Value under which a rule keeps calls without `same=`.
_ALL: Final = ""


@attrs.frozen
class Calls(Value):
    """Calls that a rule over time is about: `Calls("charge", result=lambda result: result["status"] == "paid")`."""

    tools: str
    """Name of a tool, or a glob over names. Case does not count."""

    when: Callable[[SimpleNamespace], bool] | None = None
    """Condition on the arguments; None for any."""

    result: Callable[[Any], bool] | None = None
    """Condition on the result of a call that is done: the value if the text is JSON, else the text. None for any."""

    def __attrs_post_init__(self) -> None:
        Rule(self.tools, self.when)
        if self.result is not None and not callable(self.result):
            raise MisuseError(f"Calls(result={self.result!r}): give a function of the result, which returns a bool")

    def __str__(self) -> str:
        conditions = [f" when {getattr(self.when, '__name__', 'a condition')}"] if self.when is not None else []
        conditions += [f" with {getattr(self.result, '__name__', 'a result')}"] if self.result is not None else []
        return f"{self.tools}{''.join(conditions)}"

    def covers(self, tool: str) -> bool:
        """Return whether calls of the tool may be among them."""
        return _matches(self.tools, tool)

    def holds(self, arguments: SimpleNamespace, *, otherwise: bool) -> bool:
        """Return whether the condition on the arguments holds; `otherwise` if it fails."""
        return self.when is None or _ask(self.when, arguments, otherwise=otherwise)

    def _fits(self, fact: CallFact, *, otherwise: bool) -> bool:
        return self.when is None or _ask(self.when, SimpleNamespace(**fact.arguments), otherwise=otherwise)

    def has_happened(self, fact: CallFact) -> bool:
        """Return whether a call is one of them, and is done with such a result."""
        if not fact.is_done or not self._fits(fact, otherwise=False):
            return False
        return self.result is None or _ask(self.result, _read_result(fact.result), otherwise=False)

    def may_happen(self, fact: CallFact) -> bool:
        """Return whether a call is one of them, and is done with such a result, or is open or may have happened."""
        if not self._fits(fact, otherwise=True):
            return False
        if not fact.is_done:
            return fact.may_have_happened or fact.outcome is None
        return self.result is None or _ask(self.result, _read_result(fact.result), otherwise=True)


_matches: Final = lru_cache(maxsize=10_000)(matches_tool)


def _ask(condition: Callable[[Any], bool], value: Any, *, otherwise: bool) -> bool:
    """Return what a condition says; `otherwise` if it raises or returns no bool."""
    try:
        met = condition(value)
    except Exception:  # noqa: BLE001  calls of other tools, older versions and failed calls have other values
        return otherwise
    return met if isinstance(met, bool) else otherwise


def _read_result(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


# Names of tools, tools, or calls of them.
CallSpec: TypeAlias = "str | Tool[..., Any] | Rule | Calls"


def as_calls(value: CallSpec) -> Calls:
    """Return the calls that a rule names.

    Raises:
        MisuseError: if it names none.
    """
    if isinstance(value, Calls):
        return value
    if isinstance(value, Tool):
        return Calls(value.name)
    if isinstance(value, Rule):
        return Calls(value.tools, value.when)
    if not isinstance(value, str) or not value:
        raise MisuseError(f"a rule over time is about tools, not {value!r}: give a tool, its name or Calls(...)")
    return Calls(value)


def _as_pair(same: str | tuple[str, str] | None) -> tuple[str, str] | None:
    pair = (same, same) if isinstance(same, str) else same
    if pair is not None and not (
        isinstance(pair, tuple) and len(pair) == 2 and all(isinstance(name, str) and name for name in pair)
    ):
        raise MisuseError(f"same= is the name of an argument, or one of each of the two calls, not {same!r}")
    return pair


def _check_names(names: tuple[str, str] | None, *calls: CallSpec) -> None:
    """Refuse the name of an argument that a tool does not have: no call would be equal to another one.

    Raises:
        MisuseError: if a tool does not have it.
    """
    for name, each in zip(names or (), calls, strict=False):
        if not isinstance(each, Tool) or each.parameters.get("additionalProperties"):
            continue
        declared = each.parameters.get("properties")
        if isinstance(declared, Mapping) and name not in declared:
            has = ", ".join(declared) or "none"
            raise MisuseError(f"same={name!r}: the tool {each.name} has no such argument; it has: {has}")


@lru_cache(maxsize=100)
def _parse(text: str) -> dict[str, JSON]:
    arguments: dict[str, JSON] = json.loads(text)
    return arguments


def _find_value(call: GuardedCall, name: str) -> JSON:
    """Return an argument of a call as it was written, since only that is known of earlier calls; else its default."""
    return _parse(call.written).get(name, call.defaults.get(name))


# Without the encoder that `json.dumps` builds for each value.
_write: Final = json.JSONEncoder(sort_keys=True).encode


def _exact(value: JSON) -> str:
    """Return the JSON text of a value, equal for values that are certainly the same: 5 and 5.0, but not "5"."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return _write(value)


def _loose(value: JSON) -> str:
    """Return the text of a value, equal for values that a service may take for the same: "a " and "A", 5 and "5.0"."""
    return _normalise(value if isinstance(value, str) else _exact(value))


@lru_cache(maxsize=10_000)
def _normalise(text: str) -> str:
    text = "".join(unicodedata.normalize("NFKC", HIDDEN_CHARS.sub("", text)).split()).casefold()
    try:
        number = Decimal(text)
    except InvalidOperation:
        return text
    if not number.is_finite():
        return text
    return str(number.normalize(Context(prec=len(text), Emax=MAX_EMAX, Emin=MIN_EMIN))) if number else "0"


@attrs.define
class _Since:
    """What a rule keeps: when its calls were forbidden, and when they were permitted."""

    forbidden: dict[str, dict[str, Moment]] = attrs.field(factory=dict)
    """The latest call of each run that forbids, by value."""

    permitted: dict[str, dict[str, Moment]] = attrs.field(factory=dict)
    """The latest call of each run that permits, by value."""

    def copy(self) -> _Since:
        """Return a copy."""
        return _Since(*[{key: dict(runs) for key, runs in each.items()} for each in (self.forbidden, self.permitted)])


_NO_MOMENTS: Final[Mapping[str, Moment]] = {}


@attrs.frozen(kw_only=True)
class TimeRule(CallGuard, Value):
    """A rule about calls of one kind, by what happened before: a call that permits them, or one that forbids them."""

    about: Calls
    """The calls that it decides on."""

    permitted_by: Calls | None = None
    """Calls that permit those, once they have happened; None if none does."""

    forbidden_by: Calls | None = None
    """Calls that forbid those from then on, as soon as they may have happened; None if none does."""

    needs_permit: bool = False
    """Whether one that permits must have happened, also if none has forbidden."""

    within_s: float | None = None
    """Seconds for which a call permits; None for ever."""

    same: tuple[str, str] | None = None
    """Names of the arguments that must be equal: of the calls, and of the others. None: all calls belong together."""

    verdict: GuardVerdict = attrs.field(default=GuardVerdict.REFUSE, converter=parse_verdict)
    """Verdict on a call that breaks the rule."""

    text: str
    """The rule as it is written in code."""

    def __str__(self) -> str:
        return self.text

    def concerns(self, tool: ToolTraits) -> bool:
        """Return whether the rule decides on calls of the tool."""
        return self.about.covers(tool.name)

    def reads_calls(self) -> bool:
        """Return True: decisions depend on the calls before."""
        return True

    def list_tools(self) -> Sequence[str]:
        """Return the names of the tools, without patterns."""
        return _list_names(self.about, self.permitted_by, self.forbidden_by)

    def decide(self, call: GuardedCall) -> GuardDecision | None:
        """Return the verdict if the call breaks the rule."""
        if not self.about.covers(call.tool.name) or not self.about.holds(call.arguments, otherwise=True):
            return None
        history, same, value = call.history, self.same, None
        state = _fold_with_open(self, history)
        if same is None:
            exact = loose = _ALL
        else:
            value = _find_value(call, same[0])
            if value is None and self.needs_permit:
                return self._refuse(f"the call has no {same[0]}, by which calls are compared", "")
            exact, loose = (_MISSING, _MISSING) if value is None else (_exact(value), _loose(value))
        permits = state.permitted.get(exact)
        if state.forbidden:
            # A call that has not given the argument, or is compared with such calls, is compared with all.
            keys = state.forbidden if loose == _MISSING else (loose, _MISSING)
            for key in keys:
                for moment in state.forbidden.get(key, _NO_MOMENTS).values():
                    if permits is None or not any(permit.is_after(moment) for permit in permits.values()):
                        return self._explain_forbidden(value)
        if not self.needs_permit:
            return None
        if permits is None:
            missing = f"no call of {self.permitted_by}{self._format_value(value)} has succeeded before"
            return self._refuse(missing, self._name_first())
        if (
            self.within_s is not None
            and (past_s := history.now - max([moment.at for moment in permits.values()])) > self.within_s
        ):
            newest = f"the newest call of {self.permitted_by}{self._format_value(value)}"
            missing = f"{newest} is {_describe_s(past_s)} ago, and {_describe_s(self.within_s)} are allowed"
            return self._refuse(missing, self._name_first())
        return None

    def _explain_forbidden(self, value: JSON) -> GuardDecision:
        of = self._format_value(value)
        if self.permitted_by is None:
            return self._refuse(f"a call of {self.forbidden_by}{of} has or may have happened before", "")
        if self.needs_permit:
            missing = f"the newest call of {self.forbidden_by}{of} is not a success of {self.permitted_by}"
        else:
            missing = f"no call of {self.permitted_by}{of} has succeeded since {self.forbidden_by}"
        return self._refuse(missing, self._name_first())

    def _format_value(self, value: JSON) -> str:
        return "" if value is None or self.same is None else f" with the same {self.same[0]} ({value!r})"

    def _name_first(self) -> str:
        return "" if self.permitted_by is None else self.permitted_by.tools

    def _refuse(self, missing: str, first: str) -> GuardDecision:
        reason = f"the rule {self.text}: {missing}"
        return GuardDecision(verdict=self.verdict, rule=self.text, reason=reason, first=first)

    def find_order_flaws(self, calls: Sequence[PlannedCall]) -> list[str]:
        """Return how the steps of a plan break the rule in whatever order they are carried out.

        What earlier runs or the caller of a flow have done is not known: only steps in a wrong order are flaws.
        """
        if self.verdict is not GuardVerdict.REFUSE or self.about.when is not None:
            return []
        found: list[str] = []
        for place, call in enumerate(calls):
            if not self.about.covers(call.tool):
                continue
            if self.needs_permit:
                permits = self._list_permits(calls, place)
                if permits and all(place in calls[each].earlier for each in permits):
                    found.append(f"{self.text} is broken in any order: {format_path(calls, place, permits[0])}")
                continue
            for first in sorted(call.earlier):
                is_forbidding = _is_certain(self.forbidden_by, calls[first]) and _are_equal(
                    self.same, call, calls[first]
                )
                lifts = [each for each in self._list_permits(calls, place) if place not in calls[each].earlier]
                if is_forbidding and all(each in calls[first].earlier for each in lifts):
                    found.append(f"{self.text} is broken in any order: {format_path(calls, first, place)}")
        return found

    def _list_permits(self, calls: Sequence[PlannedCall], place: int) -> list[int]:
        """Return the places of the calls that may permit one: agents may make any call."""
        return [
            other
            for other, each in enumerate(calls)
            if other != place
            and (
                each.may_call
                or (
                    self.permitted_by is not None
                    and self.permitted_by.covers(each.tool)
                    and not _differ(self.same, calls[place], each)
                )
            )
        ]

    # What it keeps of the calls.

    def reads(self, tool: str) -> bool:
        """Return whether the rule depends on calls of the tool."""
        return any(each is not None and each.covers(tool) for each in (self.permitted_by, self.forbidden_by))

    def begin(self) -> _Since:
        """Return the state before any call."""
        return _Since()

    def add(self, state: _Since, fact: CallFact, moment: Moment) -> None:
        """Add a call that is done, may have happened, or is open."""
        name = None if self.same is None else self.same[1]
        permitting, forbidding = self.permitted_by, self.forbidden_by
        permits = permitting is not None and permitting.covers(fact.tool) and permitting.has_happened(fact)
        if permits:
            _keep_latest(state.permitted, _read_key(fact, name, _exact), moment)
        if forbidding is None or not forbidding.covers(fact.tool) or not forbidding.may_happen(fact):
            return
        if not (permits and self.needs_permit):  # then it is the newest outcome that counts
            _keep_latest(state.forbidden, _read_key(fact, name, _loose), moment)


def _is_certain(calls: Calls | None, call: PlannedCall) -> bool:
    """Return whether a step makes one of the calls for certain, whatever its arguments and its result are."""
    is_plain = calls is not None and calls.when is None and calls.result is None
    return is_plain and call.is_certain and calls is not None and calls.covers(call.tool)


def _find_values(same: tuple[str, str], first: PlannedCall, second: PlannedCall) -> tuple[str, str] | None:
    one, other = first.values.get(same[0]), second.values.get(same[1])
    return None if one is None or other is None else (one, other)


def _are_equal(same: tuple[str, str] | None, first: PlannedCall, second: PlannedCall) -> bool:
    """Return whether it is certain that the arguments of two steps are equal."""
    values = None if same is None else _find_values(same, first, second)
    return same is None or (values is not None and values[0] == values[1])


def _differ(same: tuple[str, str] | None, first: PlannedCall, second: PlannedCall) -> bool:
    """Return whether it is certain that the arguments of two steps are not equal."""
    values = None if same is None else _find_values(same, first, second)
    return values is not None and values[0] != values[1] and all(each.startswith("=") for each in values)


def _fold_with_open(rule: TimeRule | DutyRule, history: CallHistory) -> _Since:
    """Return what a rule keeps of the calls before, with those of the open reply."""
    state: _Since = history.log.fold(rule)
    if not history.beside:
        return state
    state = state.copy()
    for fact in history.beside:
        if rule.reads(fact.tool):
            rule.add(state, fact, _place_open(history, fact))
    return state


def _place_open(history: CallHistory, fact: CallFact) -> Moment:
    """Return the moment of a call whose reply is open: no call is known to be later than one that has not ended."""
    at = inf if fact.outcome is None else fact.ended_at or history.now
    return Moment(at, fact.run_id, 2**31)


def _read_key(fact: CallFact, name: str | None, write: Callable[[JSON], str]) -> str:
    if name is None:
        return _ALL
    value = fact.arguments.get(name)
    return _MISSING if value is None else write(value)


def _keep_latest(moments: dict[str, dict[str, Moment]], key: str, moment: Moment) -> None:
    runs = moments.setdefault(key, {})
    known = runs.get(moment.run_id)
    if known is None or moment > known:
        runs[moment.run_id] = moment


def _list_names(*calls: Calls | None) -> list[str]:
    return [each.tools for each in calls if each is not None and not PATTERN_SIGNS.intersection(each.tools)]


def _describe_s(seconds: float) -> str:
    if seconds == inf:
        return "an unknown time"
    return f"{seconds / _DAY_S:.3g} days" if seconds >= _DAY_S else f"{seconds / 3_600:.3g} hours"


@attrs.frozen(kw_only=True)
class CountRule(CallGuard, Value):
    """A rule about the number of calls that happened, or may have."""

    about: Calls
    """The calls."""

    limit: int
    """Maximum of them, 0 or more."""

    same: str | None = None
    """Name of the argument, for each value of which they are counted; None: all are counted together."""

    per: Literal["session", "run"] = "session"
    """Whether those of earlier runs of the session count."""

    verdict: GuardVerdict = attrs.field(default=GuardVerdict.REFUSE, converter=parse_verdict)
    """Verdict on a call beyond it."""

    def __str__(self) -> str:
        same = "" if self.same is None else f", same={self.same}"
        return f"at_most({self.limit}, {self.about}{same}, per={self.per})"

    def concerns(self, tool: ToolTraits) -> bool:
        """Return whether the rule decides on calls of the tool."""
        return self.about.covers(tool.name)

    def reads_calls(self) -> bool:
        """Return True: decisions depend on the calls before."""
        return True

    def list_tools(self) -> Sequence[str]:
        """Return the name of the tool, unless it is a pattern."""
        return _list_names(self.about)

    def decide(self, call: GuardedCall) -> GuardDecision | None:
        """Return the verdict if the limit is reached."""
        if not self.about.covers(call.tool.name) or not self.about.holds(call.arguments, otherwise=True):
            return None
        history = call.history
        counts: dict[str, int] = history.log.fold(self)
        if history.beside or history.following:
            counts = dict(counts)
            for fact in (*history.beside, *history.following):
                if self.about.covers(fact.tool):
                    self.add(counts, fact, _NEVER)
        value = None if self.same is None else _find_value(call, self.same)
        if self.same is None:
            used, of = counts.get(_ALL, 0), ""
        elif value is None:
            used, of = sum(counts.values()), ""
        else:
            used, of = counts.get(_loose(value), 0) + counts.get(_MISSING, 0), f" for the {self.same} {value!r}"
        if used < self.limit:
            return None
        reason = f"the rule {self}: {used} calls of {self.about}{of} in this {self.per} have or may have happened"
        return GuardDecision(verdict=self.verdict, rule=str(self), reason=reason)

    def find_order_flaws(self, calls: Sequence[PlannedCall]) -> list[str]:
        """Return that a plan has more of the calls than are allowed."""
        if self.verdict is not GuardVerdict.REFUSE:
            return []
        certain = [each for each in calls if _is_certain(self.about, each)]
        groups: dict[str, list[PlannedCall]] = {}
        for each in certain:
            if self.same is None or self.same in each.values:
                groups.setdefault(_ALL if self.same is None else each.values[self.same], []).append(each)
        return [
            f"{self} is broken in any order: {', '.join([each.where for each in group])}"
            for group in groups.values()
            if len(group) > self.limit
        ]

    def reads(self, tool: str) -> bool:
        """Return whether the rule depends on calls of the tool."""
        return self.about.covers(tool)

    def begin(self) -> dict[str, int]:
        """Return the state before any call."""
        return {}

    def add(self, state: dict[str, int], fact: CallFact, moment: Moment) -> None:  # noqa: ARG002  all count alike
        """Count a call that is done, may have happened, or is open."""
        if (fact.is_earlier and self.per == "run") or not self.about.may_happen(fact):
            return
        key = _read_key(fact, self.same, _loose)
        state[key] = state.get(key, 0) + 1


_NEVER: Final = Moment(inf, "", 0)


@attrs.frozen(kw_only=True)
class DutyRule(CallGuard, Value):
    """A rule about calls that must follow others before the run ends."""

    about: Calls
    """The calls that must happen."""

    after: Calls
    """The calls that they must follow, as soon as those may have happened."""

    same: tuple[str, str] | None = None
    """Names of the arguments that must be equal: of the calls, and of those that they follow."""

    def __str__(self) -> str:
        return f"eventually({self.about}, after={self.after}{_format_same(self.same)})"

    def concerns(self, tool: ToolTraits) -> bool:  # noqa: ARG002  it decides on no call
        """Return False: the rule decides on no call."""
        return False

    def decide(self, call: GuardedCall) -> GuardDecision | None:  # noqa: ARG002  as above
        """Return None: the rule decides on no call."""
        return None

    def list_tools(self) -> Sequence[str]:
        """Return the names of the tools, without patterns."""
        return _list_names(self.about, self.after)

    def reads_calls(self) -> bool:
        """Return True: what is due depends on the calls."""
        return True

    def binds_end(self) -> bool:
        """Return True: the end of a run is checked."""
        return True

    def for_sub_agent(self, header: Header) -> CallGuard:  # noqa: ARG002  for all of them
        """Return a guard that asks nothing: the run that calls a sub-agent may still do what is due."""
        return _NO_RULE

    def list_due(self, history: CallHistory) -> Sequence[str]:
        """Return what is due, as clauses: calls of the run and of those below it that nothing has followed."""
        state = _fold_with_open(self, history)
        own = history.run_id
        found: list[str] = []
        for key, runs in state.forbidden.items():
            done = state.permitted.get(key, {}).values()
            for run_id, moment in runs.items():
                is_own = run_id.startswith((f"{own}.", f"{own}/")) or run_id == own
                if is_own and not any(each.is_after(moment) for each in done):
                    of = "" if self.same is None or key == _MISSING else f" with the {self.same[0]} {json.loads(key)!r}"
                    found.append(f"the rule {self}: {self.about}{of} has to succeed after {self.after}")
        return list(dict.fromkeys(found))

    def find_order_flaws(self, calls: Sequence[PlannedCall]) -> list[str]:
        """Return how a plan leaves something due in whatever order its steps are carried out."""
        found: list[str] = []
        for place, call in enumerate(calls):
            same = None if self.same is None else (self.same[1], self.same[0])
            answers = [
                other
                for other, each in enumerate(calls)
                if each.may_call or (self.about.covers(each.tool) and not _differ(same, call, each))
            ]
            if _is_certain(self.after, call) and answers and all(each in call.earlier for each in answers):
                found.append(f"{self} is broken in any order: {format_path(calls, answers[0], place)}")
        return found

    def reads(self, tool: str) -> bool:
        """Return whether the rule depends on calls of the tool."""
        return self.about.covers(tool) or self.after.covers(tool)

    def begin(self) -> _Since:
        """Return the state before any call."""
        return _Since()

    def add(self, state: _Since, fact: CallFact, moment: Moment) -> None:
        """Add a call that is done, may have happened, or is open."""
        names = (None, None) if self.same is None else self.same
        if self.about.covers(fact.tool) and self.about.has_happened(fact):
            _keep_latest(state.permitted, _read_key(fact, names[0], _exact), moment)
        if self.after.covers(fact.tool) and self.after.may_happen(fact):
            _keep_latest(state.forbidden, _read_key(fact, names[1], _exact), moment)


@attrs.frozen
class _NoRule(CallGuard, Value):
    def __str__(self) -> str:
        return "no rule"

    def reads_calls(self) -> bool:
        return True  # the rule of the calling run reads those of the sub-agent

    def concerns(self, tool: ToolTraits) -> bool:  # noqa: ARG002  it decides on no call
        return False

    def decide(self, call: GuardedCall) -> GuardDecision | None:  # noqa: ARG002  as above
        return None


_NO_RULE: Final = _NoRule()


@attrs.frozen
class Approved(Value):
    """Stands for the approval of a person, in `never(send, after=read_secret, until=approved)`."""


approved: Final = Approved()
"""The approval of a person, for each call that a rule would forbid."""


def _format_same(same: tuple[str, str] | None) -> str:
    if same is None:
        return ""
    return f", same={same[0] if same[0] == same[1] else same}"


def before(
    calls: CallSpec,
    first: CallSpec,
    *,
    same: str | tuple[str, str] | None = None,
    verdict: GuardVerdict | str = GuardVerdict.REFUSE,
) -> TimeRule:
    """Return a rule that refuses calls before another one has succeeded: `before("pay", "verify", same="account")`.

    Args:
        calls: The calls: a tool, a name or a glob over names, or `Calls`.
        first: The calls, one of which must be done before.
        same: Name of an argument that must be equal in both, or its names in the first and in the second.
        verdict: Verdict on a call without it; `"ask"` lets a person decide.

    Raises:
        MisuseError: if an argument is invalid.
    """
    about, other, pair = as_calls(calls), as_calls(first), _as_pair(same)
    _check_names(pair, calls, first)
    text = f"before({about}, {other}{_format_same(pair)})"
    return TimeRule(about=about, permitted_by=other, needs_permit=True, same=pair, verdict=verdict, text=text)


def never(
    calls: CallSpec,
    *,
    after: CallSpec,
    until: CallSpec | Approved | None = None,
    same: str | tuple[str, str] | None = None,
    verdict: GuardVerdict | str = GuardVerdict.REFUSE,
) -> TimeRule:
    """Return a rule that refuses calls once another may have happened: `never("send", after="read_secret")`.

    Args:
        calls: The calls: a tool, a name or a glob over names, or `Calls`.
        after: The calls that forbid them.
        until: Calls that permit them again, once they are done; `approved`: a person is asked about each call instead
            of refusing it. None: nothing permits them again.
        same: Name of an argument that must be equal in both, or its names in the first and in the others.
        verdict: Verdict on a call; `"ask"` lets a person decide.

    Raises:
        MisuseError: if an argument is invalid.
    """
    about, other, pair = as_calls(calls), as_calls(after), _as_pair(same)
    _check_names(pair, calls, after)
    lifting, shown = None, ""
    if isinstance(until, Approved):
        verdict, shown = GuardVerdict.ASK, ", until=approved"
    elif until is not None:
        lifting = as_calls(until)
        shown = f", until={lifting}"
    text = f"never({about}, after={other}{shown}{_format_same(pair)})"
    return TimeRule(about=about, permitted_by=lifting, forbidden_by=other, same=pair, verdict=verdict, text=text)


def within(
    calls: CallSpec,
    *,
    of: CallSpec,
    days: float = 0,
    hours: float = 0,
    same: str | tuple[str, str] | None = None,
    verdict: GuardVerdict | str = GuardVerdict.REFUSE,
) -> TimeRule:
    """Return a rule that refuses calls without another one that has succeeded not long ago, or was never made.

    `within("refund", days=2, of="charge", same="order")` refuses a refund without a charge of the order in the last two
    days.

    Args:
        calls: The calls: a tool, a name or a glob over names, or `Calls`.
        of: The calls, one of which must be done in that time.
        days: The time, days of 24 hours.
        hours: Hours that are added to it.
        same: Name of an argument that must be equal in both, or its names in the first and in the second.
        verdict: Verdict on a call; `"ask"` lets a person decide.

    Raises:
        MisuseError: if an argument is invalid.
    """
    for name, given in (("days", days), ("hours", hours)):
        NOT_NEGATIVE.check("within", name, given)
    seconds = days * _DAY_S + hours * 3_600
    SECONDS.check("within", "days and hours", seconds)
    about, other, pair = as_calls(calls), as_calls(of), _as_pair(same)
    _check_names(pair, calls, of)
    time = ", ".join(f"{name}={value:g}" for name, value in (("days", days), ("hours", hours)) if value)
    text = f"within({about}, {time}, of={other}{_format_same(pair)})"
    return TimeRule(
        about=about, permitted_by=other, needs_permit=True, within_s=seconds, same=pair, verdict=verdict, text=text
    )


def at_most(
    limit: int,
    calls: CallSpec,
    *,
    same: str | None = None,
    per: Literal["session", "run"] = "session",
    verdict: GuardVerdict | str = GuardVerdict.REFUSE,
) -> CountRule:
    """Return a rule that refuses calls beyond a number that happened, or may have: `at_most(3, "pay", same="account")`.

    Calls of sub-agents count. A call that failed before its tool did anything does not, other than for `max_calls`,
    which counts calls when they are allowed, also those of forks.

    Args:
        limit: Maximum of calls, 0 or more.
        calls: The calls: a tool, a name or a glob over names, or `Calls`.
        same: Name of an argument; they are counted for each of its values.
        per: `"session"`: the runs that the run continues count, too. `"run"`: they do not.
        verdict: Verdict on a call beyond it; `"ask"` lets a person decide.

    Raises:
        MisuseError: if an argument is invalid.
    """
    COUNT_OR_ZERO.check("at_most", "limit", limit)
    _PER.check("at_most", "per", per)
    if same is not None:
        NAME.check("at_most", "same", same)
        _check_names(_as_pair(same), calls)
    return CountRule(about=as_calls(calls), limit=limit, same=same, per=per, verdict=verdict)


_PER: Final = require_choice("session", "run")


def only_if(
    calls: CallSpec,
    *,
    outcome: CallSpec,
    same: str | tuple[str, str] | None = None,
    verdict: GuardVerdict | str = GuardVerdict.REFUSE,
) -> TimeRule:
    """Return a rule that refuses calls unless the newest call of another kind has succeeded with such a result.

    `only_if("ship", outcome=Calls("charge", result=lambda charge: charge["paid"]), same="order")` refuses to ship an
    order whose newest charge is not paid, is open, was lost, or failed while its tool was running.

    Args:
        calls: The calls: a tool, a name or a glob over names, or `Calls`.
        outcome: The other calls, with the condition on their results.
        same: Name of an argument that must be equal in both, or its names in the first and in the second.
        verdict: Verdict on a call; `"ask"` lets a person decide.

    Raises:
        MisuseError: if an argument is invalid.
    """
    about, other, pair = as_calls(calls), as_calls(outcome), _as_pair(same)
    _check_names(pair, calls, outcome)
    return TimeRule(
        about=about,
        permitted_by=other,
        forbidden_by=Calls(other.tools, other.when),
        needs_permit=True,
        same=pair,
        verdict=verdict,
        text=f"only_if({about}, outcome={other}{_format_same(pair)})",
    )


def eventually(calls: CallSpec, *, after: CallSpec, same: str | tuple[str, str] | None = None) -> DutyRule:
    """Return a rule by which a run must not end before calls that are due: `eventually("unlock", after="lock")`.

    A draft of the answer goes back to the model while one is due, as often as `Limits(answer_retries=)` says. Then the
    answer is accepted, and `run.findings` says what is due.

    Args:
        calls: The calls that must be done: a tool, a name or a glob over names, or `Calls`.
        after: The calls that they must follow.
        same: Name of an argument that must be equal in both, or its names in the first and in the second.

    Raises:
        MisuseError: if an argument is invalid.
    """
    pair = _as_pair(same)
    _check_names(pair, calls, after)
    return DutyRule(about=as_calls(calls), after=as_calls(after), same=pair)
