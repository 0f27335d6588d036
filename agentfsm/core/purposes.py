"""Usage of a run by purpose, read from its journal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Final

from agentfsm.core import events as e
from agentfsm.core.usage import Purpose, Usage

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
        for purpose, usage in _iter_usage(event):
            if usage != _NOTHING:
                spent[purpose] = spent.get(purpose, _NOTHING) + usage
    return {purpose: spent[purpose] for purpose in Purpose if purpose in spent}


def _iter_usage(event: e.Event) -> Iterator[tuple[Purpose, Usage]]:
    if isinstance(event, e.ToolFinished):
        if event.result.child is not None:
            yield Purpose.AGENT, event.result.child.usage
        for spending in event.result.spent:
            yield spending.purpose, spending.usage
    elif (usage := getattr(event, "usage", None)) is not None:
        purpose = getattr(event, "purpose", None) or _DEFAULT_PURPOSES.get(type(event), Purpose.TURN)
        yield purpose, usage
