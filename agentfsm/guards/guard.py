"""Guards: sets of rules that decide together, and the rule by which a model reads results between marks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

import attrs

from agentfsm.core.events import GuardVerdict
from agentfsm.core.labels import Label
from agentfsm.core.value import Value
from agentfsm.guards.call_rules import ToolRule, no, no_change_after_untrusted, two_of, within_clearance
from agentfsm.guards.leak_rule import no_leaks
from agentfsm.ports.guards import CallGuard, check_guard, collect_instructions, describe_guard, filter_in_order

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from agentfsm.core.header import Header
    from agentfsm.ports.call_history import CallHistory
    from agentfsm.ports.guards import FilteredText, GuardDecision, GuardedCall, OutgoingText, ToolTraits
    from agentfsm.ports.planned_calls import PlannedCall
    from agentfsm.ports.screening import TextScreen


@attrs.frozen(init=False)
class Guard(CallGuard, Value):
    """A set of rules: `Guard(no("untrusted", "irreversible"), allow("save_draft"))`.

    A rule that refuses comes first, then one that allows, then one that asks. Of several guards, the strictest decides.
    A rule is a guard of its own, and a guard can be a rule of another: `Guard(Guard.default(), allow("save_draft"))`.

    Args:
        *rules: The rules.

    Raises:
        MisuseError: if one is not a rule.
    """

    rules: tuple[CallGuard, ...]
    """The rules."""

    def __str__(self) -> str:
        return f"Guard({', '.join(map(describe_guard, self.rules))})"

    def __init__(self, *rules: CallGuard) -> None:
        for rule in rules:
            check_guard("Guard(...)", rule)
        object.__setattr__(self, "rules", rules)

    @classmethod
    def default(cls) -> Self:
        """Return the recommended policy.

        Once a run has read untrusted content, a person is asked about each call that may change something: of all tools
        that are neither `read_only` nor declare `harmless=`, unless the user has ordered the call in his own words.
        Also about each call that would send words or numbers of the user's data out (`no_leaks`).
        Data above the clearance of a run, if it has one, is kept away from it. The model reads untrusted results
        between marks.
        """
        return cls(*cls.by_labels().rules, no_leaks(), no_change_after_untrusted())

    @classmethod
    def strict(cls) -> Self:
        """Return the policy of `default` for tools without labels.

        The results of a tool get the label `untrusted`, too, unless it declares `reads_untrusted=False`.
        """
        return cls(*cls.by_labels().rules, no_leaks(), no_change_after_untrusted(strict=True))

    @classmethod
    def by_labels(cls) -> Self:
        """Return a policy that asks less than `default`, and relies on the labels that the tools declare.

        A person is asked about calls that cannot be undone once the run has read untrusted content, and about calls
        that send data out once it has read untrusted content and private data. Calls of a tool without labels run.
        """
        return cls(
            no("untrusted", "irreversible", verdict="ask"),
            two_of("untrusted", "private", "sends_out"),
            within_clearance(),
            fence_untrusted(),
        )

    def concerns(self, tool: ToolTraits) -> bool:
        """Return whether a rule can concern calls of the tool."""
        return any(rule.concerns(tool) for rule in self.rules)

    @property
    def screens(self) -> Sequence[TextScreen]:
        """The screens of the rules, which read the texts of a run."""
        return [screen for rule in self.rules for screen in getattr(rule, "screens", ())]

    def counts(self, tool: ToolTraits) -> bool:
        """Return whether calls of the tool count toward a quota."""
        return any(rule.counts(tool) for rule in self.rules)

    def reads_calls(self) -> bool:
        """Return whether decisions of a rule depend on the history of calls."""
        return any(rule.reads_calls() for rule in self.rules)

    def binds_end(self) -> bool:
        """Return whether a rule checks the end of a run."""
        return any(rule.binds_end() for rule in self.rules)

    def list_due(self, history: CallHistory) -> Sequence[str]:
        """Return what has to happen before a run with these calls ends, by all rules."""
        return [text for rule in self.rules for text in rule.list_due(history)]

    def find_order_flaws(self, calls: Sequence[PlannedCall]) -> Sequence[str]:
        """Return how the steps of a plan or a flow break rules in whatever order they are carried out."""
        return [flaw for rule in self.rules for flaw in rule.find_order_flaws(calls)]

    def find_unreachable(self, tools: Sequence[ToolTraits]) -> Sequence[str]:
        """Return a text for each rule that never asks, because a rule beside it allows all its calls.

        Args:
            tools: The tools of the agent.
        """
        allowing = [rule for rule in self.rules if isinstance(rule, ToolRule) and rule.verdict is GuardVerdict.ALLOW]
        asking = [rule for rule in self.rules if getattr(rule, "verdict", None) is GuardVerdict.ASK]
        texts: list[str] = []
        for rule in asking:
            concerned = [tool for tool in tools if rule.concerns(tool)]
            if concerned and all(any(each.covers_all_calls(tool) for each in allowing) for tool in concerned):
                names = ", ".join([tool.name for tool in concerned])
                texts.append(f"the rule {rule} of a guard never asks: all calls that it is about ({names}) are allowed")
        return texts

    def list_tools(self) -> Sequence[str]:
        """Return the names of the tools that the rules are about, without patterns."""
        return [name for rule in self.rules for name in rule.list_tools()]

    def check_data(self, labels: Iterable[Label], header: Header) -> GuardDecision | None:
        """Return the refusal if a run must not read data with these labels, else None."""
        refusals = (rule.check_data(labels, header) for rule in self.rules)
        return next((each for each in refusals if each is not None), None)

    def distrusts(self, tool: ToolTraits) -> bool:
        """Return whether results of the tool are recorded as untrusted, although it does not say so."""
        return any(rule.distrusts(tool) for rule in self.rules)

    def fences(self, labels: Iterable[Label]) -> bool:
        """Return whether the model reads results with these labels between marks."""
        return any(rule.fences(labels) for rule in self.rules)

    def list_secrets(self) -> Sequence[str]:
        """Return the secrets that the rules know."""
        return [secret for rule in self.rules for secret in rule.list_secrets()]

    def filters_texts(self) -> bool:
        """Return whether a rule decides on texts."""
        return any(rule.filters_texts() for rule in self.rules)

    def filter_text(self, outgoing: OutgoingText) -> FilteredText | None:
        """Return the decision on a text of the model, which each rule gets as the one before has left it."""
        return filter_in_order(self.rules, outgoing)

    def for_sub_agent(self, header: Header) -> Guard:
        """Return the rules that the runs of sub-agents obey."""
        return Guard(*[rule.for_sub_agent(header) for rule in self.rules])

    def add_instructions(self, header: Header) -> str:
        """Return the texts that the rules add to the instructions of a run, each once."""
        return collect_instructions(self.rules, header)

    def decide(self, call: GuardedCall) -> GuardDecision | None:
        """Return the decision on a call; None if no rule applies."""
        decisions = [each for rule in self.rules if (each := rule.decide(call)) is not None]
        for verdict in _ORDER:
            if (found := next((each for each in decisions if each.verdict is verdict), None)) is not None:
                return found
        return None


# An allowing rule is an exception from those that ask.
_ORDER = (GuardVerdict.REFUSE, GuardVerdict.ALLOW, GuardVerdict.ASK)


@attrs.frozen(kw_only=True)
class FenceRule(CallGuard, Value):
    """A rule by which the model reads untrusted results between marks, without hidden characters."""

    def __str__(self) -> str:
        return "fence_untrusted()"

    def concerns(self, tool: ToolTraits) -> bool:  # noqa: ARG002  it decides on no call
        """Return False: the rule decides on no call."""
        return False

    def decide(self, call: GuardedCall) -> GuardDecision | None:  # noqa: ARG002  as above
        """Return None: the rule decides on no call."""
        return None

    def fences(self, labels: Iterable[Label]) -> bool:
        """Return whether one of the labels is `untrusted`."""
        return Label.UNTRUSTED in labels


def fence_untrusted() -> FenceRule:
    """Return a rule by which the model reads results labelled `untrusted` between marks that they cannot close.

    The marks have a name that is random for each run. Hidden characters are left out, and a note explains the marks to
    the model. The journal has the result as it was.
    """
    return FenceRule()
