"""Usage of a run by purpose, read from its journal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final

from agentfsm.core import events as e
from agentfsm.core.usage import Purpose, Spending, Usage

# Purpose of requests in journals of format 3 and older, which do not record it. All other events are turns.
_DEFAULT_PURPOSES: Final[Mapping[type[e.Event], Purpose]] = MappingProxyType(
    {e.Compacted: Purpose.SUMMARY, e.ToolsOffered: Purpose.TOOL_SELECTION, e.Judged: Purpose.JUDGE}
)
_NOTHING: Final = Usage()


def usage_by_purpose(events: Iterable[e.Event]) -> dict[Purpose, Usage]:
    """Return what a run has spent for each purpose: `usage_by_purpose(await agent.history(run_id))`.

    The sum is `run.usage`. Purposes for which nothing was spent are left out. What the runs of sub-agents have spent is
    under `Purpose.AGENT`; their own journals have the details.

    Args:
        events: Events of the journal, from the first on.
    """
    spent: dict[Purpose, Usage] = {}
    for event in events:
        for part in list_spending(event):
            if part.usage != _NOTHING:
                spent[part.purpose] = spent.get(part.purpose, _NOTHING) + part.usage
    return {purpose: spent[purpose] for purpose in Purpose if purpose in spent}


def list_spending(event: e.Event) -> tuple[Spending, ...]:
    """Return the parts of the usage that an event records, by purpose and model; their sum is added to `run.usage`.

    The model is empty for the agent's own. The usage of the run of a sub-agent is one part, under `Purpose.AGENT`.
    """
    if isinstance(event, e.ToolFinished):
        child = event.result.child
        below = () if child is None else (Spending(purpose=Purpose.AGENT, usage=child.usage),)
        return (*below, *event.result.spent)
    usage: Usage | None = getattr(event, "usage", None)
    if usage is None:
        return ()
    tier = getattr(event, "tier", None)
    others: tuple[Spending, ...] = () if tier is None else tier.spent
    for part in others:
        usage = usage.without(part.usage)
    purpose = getattr(event, "purpose", None) or _DEFAULT_PURPOSES.get(type(event), Purpose.TURN)
    return (*others, Spending(purpose=purpose, usage=usage, model=getattr(event, "model", "")))
