"""Protocol of guards: rules that decide on each call before it starts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Protocol

import attrs

from agentfsm.core.errors import MisuseError
from agentfsm.core.events import GuardVerdict
from agentfsm.core.header import Header
from agentfsm.core.hosted_tools import HostedTool, ImageGeneration
from agentfsm.core.labels import EFFECT_LABELS, Label, LabelSource, join_labels
from agentfsm.core.messages import JSON, HostedContent, Message
from agentfsm.core.value import Value

if TYPE_CHECKING:
    from agentfsm.ports.call_history import CallHistory
    from agentfsm.ports.planned_calls import PlannedCall


@attrs.frozen(kw_only=True)
class ToolTraits(Value):
    """Traits of a tool, or of a call of it, that rules are about."""

    name: str
    """Name of the tool."""

    labels: tuple[Label, ...] = ()
    """Labels that the tool declares. In a `GuardedCall` they are those that the call has with its arguments."""

    read_only: bool = False
    """Whether the tool declares that a call changes nothing."""

    changes: bool = False
    """Whether a call may change something: the tool is a function that is neither read-only nor declared harmless."""

    is_unclear_reader: bool = False
    """Whether the tool reads something and declares nothing about text of strangers; False for agents."""

    is_sandboxed: bool = False
    """Whether the tool runs code in a sandbox: it may act on the texts that it reads, and not only on its arguments."""

    sends_arguments: bool = False
    """Whether the tool declares that the service that a call asks gets its arguments."""

    @property
    def gives_away(self) -> bool:
        """Whether a call gives its arguments to others: it sends out, or its service gets them."""
        return self.sends_arguments or Label.SENDS_OUT in self.labels

    @property
    def effects(self) -> frozenset[Label]:
        """Labels of the effects of a call, which count from its start."""
        return EFFECT_LABELS.intersection(self.labels)


@attrs.frozen(kw_only=True)
class KnownText(Value):
    """A text that a run had read when a call was written, or the arguments of an earlier call."""

    text: str
    """The text, as it came."""

    labels: frozenset[Label]
    """Labels of the text; `user_data` for the words of the user and recalled items."""

    name: str
    """Name of the tool, "prompt", "input", "memory" or "reply"."""

    call_id: str = ""
    """Id of the call; empty if the text belongs to none."""

    is_written: bool = False
    """Whether the model wrote it: the arguments of the call."""


def _build_no_history() -> CallHistory:
    from agentfsm.ports.call_history import CallHistory  # noqa: PLC0415  only agents with guards need it

    return CallHistory()


@attrs.frozen(kw_only=True)
class GuardedCall(Value):
    """A call that a guard decides on: it could run now, and has not started."""

    tool: ToolTraits
    """Traits of the tool that is called."""

    arguments: SimpleNamespace
    """Validated arguments, defaults included."""

    written: str = "{}"
    """Arguments as the model wrote them, or a person who edited them: an object as JSON text. Earlier calls are known
    only so.
    """

    labels: Mapping[Label, LabelSource]
    """Labels that the run had when the call was written, each with its first source. Results of other calls of the same
    reply are not among them, because the model had not read them.
    """

    counted: Mapping[str, int]
    """Number of calls before this one that count toward a quota, by tool name: of the session, sub-agents included."""

    header: Header
    """Header of the run, with the user, the roles and the clearance."""

    said: str = ""
    """The words of the run's user in this run: the prompt and inputs, without those that are called untrusted. Empty if
    the prompt was written by a model or a program.
    """

    history: CallHistory = attrs.field(factory=_build_no_history, eq=False, repr=False)
    """Calls before this one, with their outcomes: of the run, of those that it continues, and of those around it."""

    defaults: Mapping[str, JSON] = attrs.field(factory=dict)
    """Values that arguments have by the declaration of the tool if the model gives none, by name."""

    list_texts: Callable[[], Sequence[KnownText]] = attrs.field(default=tuple, eq=False, repr=False)
    """Function that returns the texts that the run had read when the call was written, and the arguments of earlier
    calls, in order, also those before a compaction.
    """


@attrs.frozen(kw_only=True)
class GuardDecision(Value):
    """Decision of a guard on a call, with its reason."""

    verdict: GuardVerdict
    """The verdict."""

    rule: str
    """Rule that gave the verdict, as it is written in code."""

    reason: str
    """Reason for the verdict: a clause for people and for the model."""

    labels: tuple[LabelSource, ...] = ()
    """Labels of the run that the rule is about, each with its source."""

    first: str = ""
    """Name of the tool that must succeed before the call may run; empty if nothing the model can do permits it."""


@attrs.frozen(kw_only=True)
class OutgoingText(Value):
    """A text of the model that is about to leave the run: an answer, a remark beside calls, or its thinking."""

    text: str
    """The text."""

    labels: frozenset[Label]
    """Labels of the run, and of the provider's own tools in the reply that has the text."""

    messages: Sequence[Message]
    """History of the run, without that reply."""

    hosted: HostedContent | None = None
    """Outcome of the provider's own tools in that reply; None if it has none."""

    header: Header
    """Header of the run."""


@attrs.frozen(kw_only=True)
class FilteredText(Value):
    """Decision of a guard on a text that must not leave as it is."""

    text: str
    """Text that takes its place."""

    rule: str
    """Rule that decided, as it is written in code."""

    reason: str
    """Kinds of the replaced data, a few words: "2 email, 1 secret"."""

    is_withheld: bool = False
    """Whether nothing of the text may leave. An answer then ends the run with the stop reason GUARD."""

    def describe(self) -> str:
        """Return the decision for the journal."""
        return f"{self.rule}: {self.reason}"


class CallGuard(Protocol):
    """Decides on calls before they start, and on the texts that a model reads and writes.

    Its methods are pure functions of their arguments. The decision is committed to the journal, and is made again only
    when another execution takes the run up: the stricter of the two holds.
    """

    def concerns(self, tool: ToolTraits) -> bool:
        """Return whether a rule can concern calls of the tool. No other call is decided on.

        Calls of such a tool do not start before the reply that requests them is complete.
        """
        ...

    def counts(self, tool: ToolTraits) -> bool:  # noqa: ARG002  a guard without quotas
        """Return whether calls of the tool count toward a quota. Default: none does."""
        return False

    def decide(self, call: GuardedCall) -> GuardDecision | None:
        """Return the decision on a call; None if no rule applies, so that the call may run."""
        ...

    def reads_calls(self) -> bool:
        """Return whether decisions depend on `GuardedCall.history`, which is empty otherwise. Default: they do not.

        If they do, each is made again right before the call starts, and the stricter one holds.
        """
        return False

    def binds_end(self) -> bool:
        """Return whether the guard checks the end of a run. Default: False."""
        return False

    def list_due(self, history: CallHistory) -> Sequence[str]:  # noqa: ARG002  as above
        """Return what has to happen before a run with these calls ends, as clauses. Default: nothing."""
        return ()

    def find_order_flaws(self, calls: Sequence[PlannedCall]) -> Sequence[str]:  # noqa: ARG002  as above
        """Return how the steps of a plan or a flow break rules in whatever order they are carried out. Default: not."""
        return ()

    def find_unreachable(self, tools: Sequence[ToolTraits]) -> Sequence[str]:  # noqa: ARG002  a single rule
        """Return a text for each rule that never asks, because another one allows all its calls. Default: none."""
        return ()

    def list_tools(self) -> Sequence[str]:
        """Return the names of tools that the guard is about, without patterns, to log unknown ones. Default: none."""
        return ()

    def check_data(self, labels: Iterable[Label], header: Header) -> GuardDecision | None:  # noqa: ARG002  as above
        """Return the refusal if a run must not read data with these labels, else None. Default: None.

        A result with such data is withheld from the model. A run that has read it, from its prompt for example, ends
        with the stop reason GUARD before the model is asked again.
        """
        return None

    def distrusts(self, tool: ToolTraits) -> bool:  # noqa: ARG002  as above
        """Return whether results of the tool are recorded as untrusted, although it does not say so. Default: False."""
        return False

    def fences(self, labels: Iterable[Label]) -> bool:  # noqa: ARG002  as above
        """Return whether the model reads results with these labels between marks, as data. Default: False.

        The decision is recorded with the result.
        """
        return False

    def list_secrets(self) -> Sequence[str]:
        """Return texts that are replaced by a mark in the error of a tool that has failed. Default: none.

        Secrets in a form that is recognised, such as passwords in URLs, are replaced in any case.
        """
        return ()

    def filters_texts(self) -> bool:
        """Return whether the guard decides on texts. Default: False.

        If one does, the pieces of a reply are not streamed: its text comes at once, after the decision.
        """
        return False

    def filter_text(self, outgoing: OutgoingText) -> FilteredText | None:  # noqa: ARG002  as above
        """Return the decision on a text of the model that must not leave as it is, else None. Default: None.

        Only the text that takes its place is recorded.
        """
        return None

    def for_sub_agent(self, header: Header) -> CallGuard:  # noqa: ARG002  as above
        """Return the guard that the runs of sub-agents obey, which the run with that header calls. Default: itself."""
        return self

    def add_instructions(self, header: Header) -> str:  # noqa: ARG002  as above
        """Return a text for the end of the instructions of a run; empty for none, which is the default."""
        return ""


def find_order_flaws(guards: Sequence[CallGuard], calls: Sequence[PlannedCall]) -> list[str]:
    """Return how the steps of a plan break rules in each order in which they can be carried out."""
    return list(dict.fromkeys([flaw for guard in guards for flaw in guard.find_order_flaws(calls)]))


def filter_in_order(guards: Iterable[CallGuard], outgoing: OutgoingText) -> FilteredText | None:
    """Return the decision of several guards on a text, each of which gets it as the one before left it; or None."""
    decided: list[FilteredText] = []
    for guard in guards:
        found = guard.filter_text(outgoing)
        if found is not None:
            decided.append(found)
            outgoing = attrs.evolve(outgoing, text=found.text)
            if found.is_withheld:
                break
    if not decided:
        return None
    rules = ", ".join(dict.fromkeys([each.rule for each in decided]))
    reasons = ", ".join([each.reason for each in decided])
    return attrs.evolve(decided[-1], rule=rules, reason=reasons)


def collect_instructions(guards: Iterable[CallGuard], header: Header) -> str:
    """Return the texts that guards add to the instructions of a run, each once; empty if none."""
    return "\n\n".join(dict.fromkeys([text for guard in guards if (text := guard.add_instructions(header))]))


def describe_guard(guard: CallGuard) -> str:
    """Return a guard as it is written in code, or the name of its class if that defines no text."""
    kind = type(guard)
    return kind.__qualname__ if kind.__str__ is object.__str__ else str(guard)


def list_hosted_labels(tool: HostedTool, guards: Iterable[CallGuard]) -> tuple[Label, ...]:
    """Return the labels of a tool of the provider, and `untrusted` if a guard distrusts one that has no labels."""
    is_unclear = not tool.labels and not isinstance(tool, ImageGeneration)
    traits = ToolTraits(name=tool.name, labels=tool.labels, read_only=tool.read_only, is_unclear_reader=is_unclear)
    return join_labels(tool.labels, [Label.UNTRUSTED] if any(guard.distrusts(traits) for guard in guards) else ())


def check_guard(place: str, value: object) -> None:
    """Check that a value has all methods of `CallGuard`. A class is refused: only its instances decide.

    Raises:
        MisuseError: if it has not.
    """
    if isinstance(value, type):
        raise MisuseError(f"{place} takes rules and guards, not the class {value.__name__}: give an instance of it")
    names = [name for name in vars(CallGuard) if not name.startswith("_")]
    missing = [name for name in names if not callable(getattr(value, name, None))]
    if len(missing) == len(names):
        raise MisuseError(
            f"{place} takes rules and guards, not {value!r}: give for example no('untrusted', 'irreversible') or "
            "Guard.default()"
        )
    if missing:
        raise MisuseError(
            f"{place}: {type(value).__name__} has no {', '.join(missing)}: derive it from agentfsm.guards.CallGuard, "
            "which has a default for all but concerns and decide"
        )
