"""A run for programs: what `--json` writes, and the messages of other programs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from agentfsm.cli.show import prompt_of, with_decisions
from agentfsm.core import codec
from agentfsm.core.errors import MisuseError
from agentfsm.core.machine import State

if TYPE_CHECKING:
    from agentfsm.cli.place import Way
    from agentfsm.core.events import Event
    from agentfsm.core.messages import Message
    from agentfsm.core.run import Run
    from agentfsm.ports import RunSummary


def run_json(run: Run, way: Way, top: str = "") -> dict[str, Any]:
    """Return what a program needs to know of a run.

    Args:
        run: As it stands.
        way: How to get back to it.
        top: The run that goes on with it, where that is another one.
    """
    return {
        "id": run.id,
        "state": str(run.state),
        "stop_reason": None if run.stop_reason is None else str(run.stop_reason),
        "stop_message": run.stop_message,
        "output": run.answer if run.state is State.DONE else None,
        "turns": run.turn,
        "version": run.version,
        "usage": attrs.asdict(run.usage) | {"tokens": run.usage.tokens},
        "duration_s": round(run.duration_s, 6),
        "pending": [attrs.asdict(item) for item in run.pending],
        "calls": [attrs.asdict(call) for call in run.calls],
        "resume": None if run.is_over else way.resume(top or run.id),
        "fork": way.fork(run),
    }


def whole_json(run: Run, way: Way, top: str, events: Sequence[Event] = ()) -> dict[str, Any]:
    """Return `run_json` with the header and the turns; the journal's `events` tell who decided what."""
    header = run.header
    return run_json(run, way, top) | {
        "agent": header.agent,
        "agent_version": header.agent_version,
        "target": header.target,
        "session": header.session,
        "parent": header.parent,
        "forked_from": header.forked_from,
        "forked_at": None if header.forked_from is None else header.forked_at,
        "user": header.user,
        "metadata": dict(header.metadata),
        "prompt": prompt_of(run),
        "created_at": run.created_at,
        "updated_at": run.updated_at,
        "tree": [attrs.asdict(turn) for turn in with_decisions(run, events)],
    }


def export_json(run: Run, way: Way, top: str, events: Sequence[Event]) -> dict[str, Any]:
    """Return all that there is of a run: `whole_json` with entry 0, the journal and the messages."""
    return whole_json(run, way, top, events) | {
        "header": json.loads(codec.encode_header(run.header)),
        "events": journal_json(events),
        "messages": [codec.message_to_json(message) for message in run.messages],
    }


def messages_in(path: str) -> tuple[Message, ...]:
    """Return the history that a file holds: a JSON list of messages as OpenAI has them, or an object with "messages".

    Raises:
        MisuseError: when the file cannot be read, or holds none.
    """
    try:
        given = json.loads(Path(path).read_bytes())
    except OSError as error:
        raise MisuseError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise MisuseError(f"{path} is no JSON: {error}") from None
    from agentfsm.models import from_openai  # noqa: PLC0415  it loads what reads replies, which few commands need

    try:
        return from_openai(given.get("messages", given) if isinstance(given, dict) else given)
    except MisuseError as error:
        raise MisuseError(f"{path}: {error}") from None


def journal_json(events: Iterable[Event]) -> list[dict[str, Any]]:
    """Return the events as the journal holds them, each with its version and date."""
    return [
        {"version": version, "date": datetime.fromtimestamp(event.at, UTC).isoformat(), **codec.event_to_json(event)}
        for version, event in enumerate(events, 1)
    ]


def summary_json(run: RunSummary) -> dict[str, Any]:
    """Return a line of a list of runs as JSON."""
    return attrs.asdict(run)
