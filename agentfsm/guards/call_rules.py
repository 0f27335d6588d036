"""Rules of guards, as data: about the labels of a run and its call, or about tools and arguments."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

import attrs

from agentfsm.core.errors import MisuseError
from agentfsm.core.events import GuardVerdict
from agentfsm.core.json_text import list_leaves
from agentfsm.core.labels import DATA_LEVELS, EFFECT_LABELS, Label, LabelSource, as_labels, highest_level, matches_tool
from agentfsm.core.validation import COUNT_OR_ZERO, require_choice
from agentfsm.core.value import Value
from agentfsm.guards.said_words import SaidWords
from agentfsm.ports.guards import CallGuard, GuardDecision
from agentfsm.tools.permission import Rule

if TYPE_CHECKING:
    from agentfsm.core.header import Header
    from agentfsm.ports.guards import GuardedCall, ToolTraits


# Labels of data, in words.
_READ_WORDS: Final = {Label.UNTRUSTED: "untrusted content", Label.PRIVATE: "private data"}
# Signs of a glob, of which names of tools have none.
PATTERN_SIGNS: Final = frozenset("*?[")
# Labels of effects, in words.
_EFFECT_WORDS: Final = {Label.SENDS_OUT: "sends data out", Label.IRREVERSIBLE: "cannot be undone"}


_VERDICT: Final = require_choice(*GuardVerdict)


def parse_verdict(value: GuardVerdict | str) -> GuardVerdict:
    """Return the verdict of a rule, which may be given by its name."""
    _VERDICT.check("LabelRule", "verdict", value)
    return GuardVerdict(value)


@attrs.frozen(kw_only=True)
class LabelRule(CallGuard, Value):
    """A rule about labels that must not come together: those of the run, and those of the call that is about to start.

    A call breaks it if it adds one of the labels, and all others are there. If the labels name something that calls do
    (`sends_out`, `irreversible`), only a call that does it breaks the rule, whatever it reads itself: its arguments
    were written before. Code in a sandbox may act on texts that it reads, so there that counts. A level of data stands
    for itself and all levels above.
    """

    labels: tuple[Label, ...] = attrs.field(converter=as_labels)
    """The labels, two or more."""

    verdict: GuardVerdict = attrs.field(converter=parse_verdict)
    """Verdict on a call that breaks the rule."""

    name: str = "no"
    """Function that made the rule, for its text."""

    def __attrs_post_init__(self) -> None:
        if len(self.labels) < 2:
            raise MisuseError(
                f"{self}: a rule names two or more labels; to decide on all calls of a tool, use ask() or refuse()"
            )

    def __str__(self) -> str:
        return f"{self.name}({', '.join(self.labels)})"

    def concerns(self, tool: ToolTraits) -> bool:
        """Return whether calls of the tool can add one of the labels."""
        return bool(self._list_added(tool))

    def _list_added(self, tool: ToolTraits) -> frozenset[Label]:
        """Return the labels of the rule that a call of the tool adds."""
        own = tool.effects if EFFECT_LABELS.intersection(self.labels) else _with_lower_levels(tool.labels)
        return own.intersection(self.labels)

    def decide(self, call: GuardedCall) -> GuardDecision | None:
        """Return the verdict if the call completes the labels."""
        added, known = self._list_added(call.tool), _with_lower_levels(call.labels)
        if added and call.tool.is_sandboxed:
            added |= (_with_lower_levels(call.tool.labels) - known).intersection(self.labels)
        if not added or not known.union(added).issuperset(self.labels):
            return None
        sources = tuple([_find_source(call, label) for label in self.labels if label not in added])
        read = ", ".join([f"{_READ_WORDS.get(each.label, each.label)} from {each.describe()}" for each in sources])
        does = " and ".join([_EFFECT_WORDS.get(label, f"reads {label}") for label in self.labels if label in added])
        history = f", and the run has {read}" if read else ""
        return GuardDecision(
            verdict=self.verdict,
            rule=str(self),
            reason=f"the rule {self}: {call.tool.name} {does}{history}",
            labels=sources,
        )


def _with_lower_levels(labels: Iterable[Label]) -> frozenset[Label]:
    """Return labels, and all levels of data below the highest among them."""
    given = frozenset(labels)
    ranks = [rank for rank, level in enumerate(DATA_LEVELS) if level in given]
    return given.union(DATA_LEVELS[: max(ranks, default=-1) + 1])


def _find_source(call: GuardedCall, label: Label) -> LabelSource:
    """Return the source of a label, or of a level of data the lowest level above that the run has."""
    if label in call.labels:
        return call.labels[label]
    above = DATA_LEVELS[DATA_LEVELS.index(label) :]
    return next(call.labels[level] for level in above if level in call.labels)


def no(*labels: Label | str, verdict: GuardVerdict | str = GuardVerdict.REFUSE) -> LabelRule:
    """Return a rule that refuses calls that would bring all of these labels together in a run.

    `no("untrusted", "irreversible")` refuses calls that cannot be undone once the run has read untrusted content.

    Args:
        *labels: Two or more labels.
        verdict: Verdict on such a call; `"ask"` lets a person decide.

    Raises:
        MisuseError: if a label or the verdict is unknown, or fewer than two labels are given.
    """
    return LabelRule(labels=labels, verdict=verdict)


def two_of(
    first: Label | str, second: Label | str, third: Label | str, *, verdict: GuardVerdict | str = GuardVerdict.ASK
) -> LabelRule:
    """Return a rule that lets a run have two of three labels, and wants an approval of calls that add the third.

    With untrusted content, private data and sending out this is the rule of two (Meta, 2025).

    Args:
        first: A label.
        second: Another.
        third: Another.
        verdict: Verdict on a call that adds the third.

    Raises:
        MisuseError: if a label or the verdict is unknown.
    """
    return LabelRule(labels=(first, second, third), verdict=verdict, name="two_of")


@attrs.frozen(kw_only=True)
class ToolRule(CallGuard, Value):
    """A rule about tools, and optionally their arguments, whatever the run has read."""

    rules: tuple[Rule, ...]
    """The tools and conditions. One of them is enough."""

    verdict: GuardVerdict
    """Verdict on such a call. ALLOW lifts verdicts of the same guard that a person has to be asked."""

    def __str__(self) -> str:
        return f"{self.verdict}({', '.join([_format_rule(rule) for rule in self.rules])})"

    def list_tools(self) -> Sequence[str]:
        """Return the names of the tools, without patterns."""
        return _list_names(self.rules)

    def concerns(self, tool: ToolTraits) -> bool:
        """Return whether one of the rules covers the tool."""
        return any(rule.covers(tool) for rule in self.rules)

    def covers_all_calls(self, tool: ToolTraits) -> bool:
        """Return whether one of the rules covers all calls of the tool, whatever their arguments."""
        return any(rule.when is None and rule.covers(tool) for rule in self.rules)

    def decide(self, call: GuardedCall) -> GuardDecision | None:
        """Return the verdict if one of the rules covers the call. A condition that fails counts against the call."""
        for rule in self.rules:
            met = rule.covers(call.tool) and rule.evaluate(call.tool, call.arguments)
            if met is False or (isinstance(met, Exception) and self.verdict is GuardVerdict.ALLOW):
                continue
            failed = f" (its condition failed: {type(met).__name__})" if isinstance(met, Exception) else ""
            reason = f"the rule {self} is about this call{failed}"
            return GuardDecision(verdict=self.verdict, rule=str(self), reason=reason)
        return None


def _list_names(rules: Iterable[Rule]) -> list[str]:
    return [rule.tools for rule in rules if not PATTERN_SIGNS.intersection(rule.tools)]


def _format_rule(rule: Rule) -> str:
    return rule.tools if rule.when is None else f"{rule.tools} when {getattr(rule.when, '__name__', 'a condition')}"


def _to_tool_rule(rules: tuple[str | Rule, ...], verdict: GuardVerdict) -> ToolRule:
    if not rules:
        raise MisuseError(f"{verdict}(): name one or more tools, as {verdict}('send_*')")
    return ToolRule(rules=tuple([rule if isinstance(rule, Rule) else Rule(rule) for rule in rules]), verdict=verdict)


def ask(*rules: str | Rule) -> ToolRule:
    """Return a rule that wants an approval of calls: `ask("send_*", Rule("pay", lambda a: a.cents > 500))`.

    Args:
        *rules: Names of tools, globs over names, or rules with a condition on the arguments.
    """
    return _to_tool_rule(rules, GuardVerdict.ASK)


def refuse(*rules: str | Rule) -> ToolRule:
    """Return a rule that refuses calls: `refuse(Rule("read_file", lambda a: ".." in a.path))`.

    Args:
        *rules: Names of tools, globs over names, or rules with a condition on the arguments.
    """
    return _to_tool_rule(rules, GuardVerdict.REFUSE)


def allow(*rules: str | Rule) -> ToolRule:
    """Return a rule that exempts calls from the approvals that other rules of the same guard want.

    It does not lift a refusal, nor a verdict of another guard.

    Args:
        *rules: Names of tools, globs over names, or rules with a condition on the arguments.
    """
    return _to_tool_rule(rules, GuardVerdict.ALLOW)


@attrs.frozen(kw_only=True)
class ChangeRule(CallGuard, Value):
    """A rule about calls that may change something, in a run that has read untrusted content.

    A call is exempt if the user of the run has ordered it in the prompt or an input: each text and number among its
    arguments, and there is one at least, stands there as a whole word. See `SaidWords`.
    """

    verdict: GuardVerdict = attrs.field(converter=parse_verdict)
    """Verdict on such a call."""

    strict: bool = False
    """Whether results of tools get the label `untrusted` that declare nothing about text of strangers."""

    def __str__(self) -> str:
        return f"no_change_after_untrusted({'strict' if self.strict else ''})"

    def concerns(self, tool: ToolTraits) -> bool:
        """Return whether a call of the tool may change something."""
        return tool.changes

    def distrusts(self, tool: ToolTraits) -> bool:
        """Return whether the tool declares nothing about text of strangers, and the rule is strict."""
        return self.strict and tool.is_unclear_reader

    def decide(self, call: GuardedCall) -> GuardDecision | None:
        """Return the verdict if the run has read untrusted content, and the user has not ordered the call."""
        source = call.labels.get(Label.UNTRUSTED)
        if not call.tool.changes or source is None or is_ordered(call):
            return None
        return GuardDecision(
            verdict=self.verdict,
            rule=str(self),
            reason=f"the rule {self}: {call.tool.name} may change something, and the run has untrusted content from "
            f"{source.describe()}",
            labels=(source,),
        )


def is_ordered(call: GuardedCall) -> bool:
    """Return whether the user has said each text and number among the arguments, and there is one at least.

    Values that the tool declares as defaults are left out, and so are booleans and None. An empty text cannot be said.
    """
    if not call.said:
        return False
    chosen = [value for name, value in vars(call.arguments).items() if call.defaults.get(name, call) != value]
    leaves = [value for value in list_leaves(chosen) if not isinstance(value, bool)]
    words = SaidWords(call.said)
    return bool(leaves) and all(map(words.has, leaves))


def no_change_after_untrusted(*, verdict: GuardVerdict | str = GuardVerdict.ASK, strict: bool = False) -> ChangeRule:
    """Return a rule that wants an approval of calls that may change something after untrusted content.

    It is about all tools that are neither `read_only` nor declare `harmless=`, except agents, whose own calls it is
    about. Calls that the user has ordered in his own words are exempt.

    Args:
        verdict: Verdict on such a call.
        strict: Whether results of tools get the label `untrusted` that do not declare `reads_untrusted=False`.

    Raises:
        MisuseError: if the verdict is unknown.
    """
    return ChangeRule(verdict=verdict, strict=strict)


_LEVEL = require_choice(*DATA_LEVELS)


@attrs.frozen(kw_only=True)
class ClearanceRule(CallGuard, Value):
    """A rule that keeps data above the clearance of a run away from it.

    Calls of tools that declare a higher level are refused, and results that turn out to have one are withheld.
    """

    default: str = ""
    """Clearance of runs that were started without one; empty: they are not restricted."""

    def __str__(self) -> str:
        return f"within_clearance({self.default})"

    def concerns(self, tool: ToolTraits) -> bool:
        """Return whether the tool declares a level of data."""
        return highest_level(tool.labels) is not None

    def decide(self, call: GuardedCall) -> GuardDecision | None:
        """Refuse the call if its tool reads data above the clearance."""
        return self.check_data(call.tool.labels, call.header)

    def check_data(self, labels: Iterable[Label], header: Header) -> GuardDecision | None:
        """Return the refusal if the highest level among the labels is above the clearance."""
        level, clearance = highest_level(labels), header.clearance or self.default
        if level is None or not clearance or DATA_LEVELS.index(level) <= DATA_LEVELS.index(Label(clearance)):
            return None
        reason = f"the rule {self}: the data is {level}, and the run is cleared for {clearance}"
        return GuardDecision(verdict=GuardVerdict.REFUSE, rule=str(self), reason=reason)


def within_clearance(default: Label | str = "") -> ClearanceRule:
    """Return a rule that keeps data above a run's clearance away from it: public, internal, confidential, restricted.

    The clearance is that of `agent.run(..., clearance=)`.

    Args:
        default: Clearance of runs that were started without one; empty: they are not restricted.

    Raises:
        MisuseError: if that is not a level of data.
    """
    if default:
        _LEVEL.check("within_clearance", "default", default)
    return ClearanceRule(default=str(default))


@attrs.frozen(kw_only=True)
class RoleRule(CallGuard, Value):
    """A rule that keeps tools for some roles."""

    tools: Rule
    """The tools."""

    roles: tuple[str, ...]
    """Roles, one of which the run must have."""

    def __str__(self) -> str:
        return f"only_for({self.tools.tools}, {', '.join(self.roles)})"

    def list_tools(self) -> Sequence[str]:
        """Return the name of the tool, unless it is a pattern."""
        return _list_names([self.tools])

    def concerns(self, tool: ToolTraits) -> bool:
        """Return whether the tool is one of them."""
        return self.tools.covers(tool)

    def decide(self, call: GuardedCall) -> GuardDecision | None:
        """Refuse a call of the tools if the run has none of the roles."""
        if not self.tools.covers(call.tool) or not set(self.roles).isdisjoint(call.header.roles):
            return None
        given = ", ".join(call.header.roles) or "none"
        reason = f"the rule {self}: {call.tool.name} is for {' or '.join(self.roles)}; roles of this run: {given}"
        return GuardDecision(verdict=GuardVerdict.REFUSE, rule=str(self), reason=reason)


def only_for(tools: str, *roles: str) -> RoleRule:
    """Return a rule that refuses calls of runs without one of these roles: `only_for("send_mail", "admin")`.

    The roles are those of `agent.run(..., roles=)`. A run without roles may not call the tools.

    Args:
        tools: Name of a tool, or a glob over names.
        *roles: One or more roles.

    Raises:
        MisuseError: if no role is given.
    """
    if not roles or not all(isinstance(role, str) and role for role in roles):
        raise MisuseError(f"only_for({tools!r}): name one or more roles, as only_for({tools!r}, 'admin')")
    return RoleRule(tools=Rule(tools), roles=roles)


@attrs.frozen(kw_only=True)
class QuotaRule(CallGuard, Value):
    """A rule about the number of calls in a session.

    A call counts from the decision on it, which is in the journal before it starts. It no longer counts if it ends
    before its tool is tried, for instance because a person rejects it.
    """

    tools: Rule
    """The tools, whose calls are counted together."""

    limit: int
    """Maximum of calls, 0 or more."""

    verdict: GuardVerdict = attrs.field(converter=parse_verdict)
    """Verdict on a call beyond it."""

    def __str__(self) -> str:
        return f"max_calls({self.tools.tools}, {self.limit})"

    def list_tools(self) -> Sequence[str]:
        """Return the name of the tool, unless it is a pattern."""
        return _list_names([self.tools])

    def concerns(self, tool: ToolTraits) -> bool:
        """Return whether calls of the tool are counted."""
        return self.tools.covers(tool)

    def counts(self, tool: ToolTraits) -> bool:
        """Return whether calls of the tool are counted."""
        return self.tools.covers(tool)

    def decide(self, call: GuardedCall) -> GuardDecision | None:
        """Return the verdict on a call of the tools if the quota is used up."""
        if not self.tools.covers(call.tool):
            return None
        used = sum([count for name, count in call.counted.items() if matches_tool(self.tools.tools, name)])
        if used < self.limit:
            return None
        reason = f"the rule {self}: {used} of {self.limit} calls in this session are used"
        return GuardDecision(verdict=self.verdict, rule=str(self), reason=reason)


def max_calls(tools: str, limit: int, *, verdict: GuardVerdict | str = GuardVerdict.REFUSE) -> QuotaRule:
    """Return a rule that refuses calls beyond a number in a session, sub-agents included: `max_calls("send_mail", 5)`.

    A session is a chain of runs, each of which continues the one before; a run that continues none is a session of its
    own.

    Args:
        tools: Name of a tool, or a glob over names, whose calls are counted together.
        limit: Maximum of calls, 0 or more.
        verdict: Verdict on a call beyond it; `"ask"` lets a person decide.

    Raises:
        MisuseError: if an argument is invalid.
    """
    COUNT_OR_ZERO.check("max_calls", "limit", limit)
    return QuotaRule(tools=Rule(tools), limit=limit, verdict=verdict)
