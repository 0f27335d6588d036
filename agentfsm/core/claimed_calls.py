"""The calls behind the claims of an answer: which call did what it says, and which it does not mention."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import attrs

from agentfsm.core.call_facts import CallFact, list_call_facts
from agentfsm.core.claims import Claim
from agentfsm.core.json_text import dump_compact
from agentfsm.core.messages import JSON, Outcome, ToolResult
from agentfsm.core.value import Value

if TYPE_CHECKING:
    from agentfsm.core.run_fields import RunFields

# Characters from which a claim may leave an argument out, as JSON: a model would have to write it a second time.
LONG_CHARS: Final = 200


def bind_claims(
    claims: Sequence[Claim], calls: Sequence[CallFact], find_defaults: Callable[[str], Mapping[str, JSON]]
) -> tuple[Claim, ...]:
    """Return the claims, each with the call that did it, or with the reason why none did. No call stands for two.

    Args:
        claims: Claims of an answer.
        calls: Calls of the run and of those that it continues.
        find_defaults: Returns the values that arguments of a tool have if they are left out.
    """
    defaults = {claim.tool: find_defaults(claim.tool) for claim in claims}
    made: dict[str, list[_Made]] = {name: [] for name in defaults}
    for index, call in enumerate(calls):
        if call.tool in made:
            texts = _spell(call.arguments, defaults[call.tool])
            short = {name: text for name, text in texts.items() if len(text) < LONG_CHARS}
            made[call.tool].append(_Made(index=index, call=call, texts=texts, short=short))
    told = [_spell(claim.arguments, defaults[claim.tool]) for claim in claims]
    groups = {name: _group(each) for name, each in made.items()}
    equal = [_find_equal(claim, mine, groups[claim.tool]) for claim, mine in zip(claims, told, strict=True)]
    fitting = [[each.index for each in found if each.call.is_done] for found in equal]
    owners: dict[int, int] = {}  # claims by call

    def find_call(claim: int, seen: set[int]) -> bool:
        """Give the claim a call; one that another claim has, if that finds another one."""
        for index in fitting[claim]:
            if index not in seen:
                seen.add(index)
                if index not in owners or find_call(owners[index], seen):
                    owners[index] = claim
                    return True
        return False

    for claim in range(len(claims)):
        find_call(claim, set())
    found = {claim: calls[index].call_id for index, claim in owners.items()}
    return tuple(
        [
            attrs.evolve(claim, call_id=found[place])
            if place in found
            else attrs.evolve(claim, fault=_explain_fault(claim, told[place], equal[place], made[claim.tool]))
            for place, claim in enumerate(claims)
        ]
    )


@attrs.frozen(kw_only=True)
class _Made(Value):
    """A call that a claim may be about."""

    index: int
    call: CallFact
    texts: Mapping[str, str]
    """Its arguments, as of `_spell`."""

    short: Mapping[str, str]
    """Those that no claim may leave out."""

    def list_differences(self, claim: Claim, mine: Mapping[str, str]) -> list[str]:
        """Return the names of the arguments in which a claim differs. Long ones may be left out of the claim."""
        return [
            name
            for name in {**self.texts, **mine}
            if mine.get(name) != self.texts.get(name)
            and (name in claim.arguments or name in self.short or name not in self.texts)
        ]


# Calls of a tool by the names of the arguments that no claim may leave out, and their texts.
_Groups: TypeAlias = "dict[tuple[str, ...], dict[tuple[str | None, ...], list[_Made]]]"


def _group(made: Iterable[_Made]) -> _Groups:
    groups: _Groups = {}
    for each in made:
        names = tuple(sorted(each.short))
        groups.setdefault(names, {}).setdefault(tuple([each.short[name] for name in names]), []).append(each)
    return groups


def _find_equal(claim: Claim, mine: Mapping[str, str], groups: _Groups) -> list[_Made]:
    """Return the calls with the arguments of a claim, oldest first."""
    near = [
        each
        for names, by_texts in groups.items()
        for each in by_texts.get(tuple([mine.get(name) for name in names]), ())
    ]
    equal = [each for each in near if not each.list_differences(claim, mine)]
    return sorted(equal, key=lambda each: each.index)


def _spell(arguments: Mapping[str, JSON], defaults: Mapping[str, JSON]) -> dict[str, str]:
    """Return each argument that is not null as JSON text, equal for equal values: 5 and 5.0 are, 1 and true are not.

    An argument that is left out has its default.
    """
    whole = {**defaults, **arguments}
    return {name: dump_compact(_unify(value)) for name, value in whole.items() if value is not None}


def _unify(value: JSON) -> JSON:
    if isinstance(value, dict):
        return {key: _unify(value[key]) for key in sorted(value)}
    if isinstance(value, list):
        return [_unify(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _explain_fault(claim: Claim, mine: Mapping[str, str], equal: Sequence[_Made], made: Sequence[_Made]) -> str:
    """Return why no call did what a claim says, without the values of arguments, which a guard may have to filter."""
    if any(each.call.is_done for each in equal):
        return "it was done fewer times than is claimed"
    if equal:
        return f"its call {equal[-1].call.call_id} {_ENDS.get(equal[-1].call.outcome, 'is not done')}"
    done = [each for each in made if each.call.is_done]
    if not done:
        return "no call of this tool is done"
    nearest = min(done, key=lambda each: len(each.short.items() - mine.items()))
    return f"the call {nearest.call.call_id} differs in {', '.join(nearest.list_differences(claim, mine))}"


_ENDS: Final[Mapping[Outcome | None, str]] = {
    None: "has not ended",
    Outcome.FAILED: "failed",
    Outcome.TIMED_OUT: "timed out",
    Outcome.CANCELLED: "was cancelled",
    Outcome.REJECTED: "was rejected",
    Outcome.SKIPPED: "was not made",
    Outcome.UNKNOWN: "has an unknown outcome",
}


def describe_claims(run: RunFields) -> dict[str, Any]:
    """Return the claims of the answer of a run, and the calls that it does not claim, as JSON values.

    The claims are None if the answer does not have to name any.
    """
    left_out = () if run.claims is None else list_unclaimed(run)
    return {
        "claims": None if run.claims is None else [attrs.asdict(claim) for claim in run.claims],
        "unclaimed": [{"call_id": call.call_id, "tool": call.tool} for call in left_out],
    }


def list_unclaimed(run: RunFields) -> tuple[CallFact, ...]:
    """Return the calls of a run that may have changed something and are done, and its newest draft does not claim."""
    claimed = {claim.call_id for claim in run.draft_claims or ()}
    own = {message.call_id for message in run.messages[run.own_start :] if isinstance(message, ToolResult)}
    if run.plan is not None:
        own |= {entry.call.id for entry in run.plan.closed}
    left = own.intersection(run.acted) - claimed
    return tuple([call for call in list_call_facts(run) if call.is_done and call.call_id in left])
