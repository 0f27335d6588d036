"""What all stores decide alike."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from agentfsm.core.errors import ConflictError
from agentfsm.core.inbox import Approve, Settle
from agentfsm.core.machine import State
from agentfsm.core.messages import TextPart
from agentfsm.ports import Summary

if TYPE_CHECKING:
    from collections.abc import Iterable

    from agentfsm.core.inbox import InboxItem, Posted
    from agentfsm.core.run import Header, Run

PROMPT_CHARS = 200
# Of the prompt in a list of runs: a line or two.


def checked_session(header: Header, runs: Iterable[tuple[str, State]]) -> Header:
    """Name the session's last run in the header.

    Args:
        header: Of the new run.
        runs: Id and state of the session's runs, oldest first.

    Raises:
        ConflictError: when one of them is not over.
    """
    last = header.after
    for run_id, state in runs:
        if state not in (State.DONE, State.ERROR):
            raise ConflictError(
                f"session {header.session!r} has a run that is not over: {run_id}; finish it, or cancel it, "
                "before the next one starts",
            )
        last = run_id
    return attrs.evolve(header, after=last)


def told_winner(run_id: str, winner: Posted, item: InboxItem) -> Posted:
    """Return the first post of a key, if the second one says the same.

    Raises:
        ConflictError: when it says something else, showing who was first.
    """
    if _says(winner.item) == _says(item):
        return winner
    raise ConflictError(f"run {run_id!r}: {winner.key} was decided already, by {winner.item!r}")


def _says(item: InboxItem) -> tuple[object, ...]:
    """Return what a post comes down to, whoever says it and in whatever words."""
    match item:
        case Settle():
            return Settle, item.outcome, item.content
        case Approve():
            return Approve, item.arguments
    return (type(item),)


def prompt_of(header: Header) -> str:
    """Return the beginning of the prompt's text."""
    text = " ".join(part.text for part in header.prompt if isinstance(part, TextPart))
    return text[:PROMPT_CHARS]


def summary_of(run: Run, *, driven: bool) -> Summary:
    """Return the line of a list that stands for the run."""
    return Summary(
        id=run.id,
        agent=run.header.agent,
        session=run.session,
        state=run.state,
        stop_reason=run.stop_reason,
        waiting=run.is_waiting,
        driven=driven,
        turn=run.turn,
        version=run.version,
        tokens=run.usage.tokens,
        created_at=run.created_at,
        updated_at=run.updated_at,
        prompt=prompt_of(run.header),
    )
