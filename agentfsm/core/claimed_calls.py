"""The calls behind the claims of an answer: which call did what it says, and which it does not mention."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import attrs

from agentfsm.core.call_facts import CallFact, list_call_facts
from agentfsm.core.claims import Claim
from agentfsm.core.json_text import dump_compact
from agentfsm.core.messages import JSON, Outcome, ToolResult

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
    fitting = [
        [
            index
            for index, call in enumerate(calls)
            if call.tool == claim.tool and call.is_done and _fits(claim, call, find_defaults)
        ]
        for claim in claims
    ]
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
            else attrs.evolve(claim, fault=_explain_fault(claim, calls, find_defaults(claim.tool)))
            for place, claim in enumerate(claims)
        ]
    )


def _fits(claim: Claim, call: CallFact, find_defaults: Callable[[str], Mapping[str, JSON]]) -> bool:
    return next(iter_differences(claim.arguments, call.arguments, find_defaults(claim.tool)), None) is None


def _explain_fault(claim: Claim, calls: Sequence[CallFact], defaults: Mapping[str, JSON]) -> str:
    """Return why no call did what a claim says, without the values of arguments, which a guard may have to filter."""
    of_tool = [call for call in calls if call.tool == claim.tool]
    differing = [[*iter_differences(claim.arguments, call.arguments, defaults)] for call in of_tool]
    equal = [call for call, names in zip(of_tool, differing, strict=True) if not names]
    if any(call.is_done for call in equal):
        return "it was done fewer times than is claimed"
    if equal:
        return f"its call {equal[-1].call_id} {_ENDS.get(equal[-1].outcome, 'is not done')}"
    done = [(len(names), place) for place, names in enumerate(differing) if of_tool[place].is_done]
    if not done:
        return "no call of this tool is done"
    _, nearest = min(done)
    return f"the call {of_tool[nearest].call_id} differs in {', '.join(differing[nearest])}"


_ENDS: Final[Mapping[Outcome | None, str]] = {
    None: "has not ended",
    Outcome.FAILED: "failed",
    Outcome.TIMED_OUT: "timed out",
    Outcome.CANCELLED: "was cancelled",
    Outcome.REJECTED: "was rejected",
    Outcome.SKIPPED: "was not made",
    Outcome.UNKNOWN: "has an unknown outcome",
}


def iter_differences(
    claimed: Mapping[str, JSON], called: Mapping[str, JSON], defaults: Mapping[str, JSON]
) -> Iterator[str]:
    """Yield the names of the arguments in which a claim differs from a call.

    An argument that is left out has its default, or is null. Long ones of the call may be left out of the claim.
    """
    mine, theirs = {**defaults, **claimed}, {**defaults, **called}
    for name in theirs | mine:
        if not _is_same(mine.get(name), theirs.get(name)) and (
            name in claimed or len(dump_compact(theirs[name])) < LONG_CHARS
        ):
            yield name


def _is_same(one: Any, other: Any) -> bool:
    """Return whether two JSON values are the same: 5 and 5.0 are, 1 and true are not."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_is_same(each, other[key]) for key, each in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return isinstance(one, bool) is isinstance(other, bool) and bool(one == other)


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
