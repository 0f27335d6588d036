"""Build the JSON documents that `--json` writes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import attrs

from agentfsm.cli.render.text import build_decided_turns, format_prompt, parse_edited_arguments
from agentfsm.core import codec
from agentfsm.core.inbox import decision_word
from agentfsm.core.labels import join_labels
from agentfsm.core.machine import State
from agentfsm.core.run_facts import usage_by_purpose
from agentfsm.journal.cache_losses import list_cache_losses

if TYPE_CHECKING:
    from agentfsm.cli.resolve.command_hint import CommandHint
    from agentfsm.core.events import Event
    from agentfsm.core.inbox import Decision
    from agentfsm.core.run import Run
    from agentfsm.journal.run_status import RunStatus
    from agentfsm.ports.store import RunSummary


def build_run_json(run: Run, hint: CommandHint, root_id: str = "") -> dict[str, Any]:
    """Return the state, the result and the waits of a run, with the command lines that continue it.

    Args:
        run: The run at any version.
        hint: Hint for these command lines.
        root_id: Id of the run that has to be resumed, if the run is that of a sub-agent.
    """
    return {
        "id": run.id,
        "state": str(run.state),
        "stop_reason": None if run.stop_reason is None else str(run.stop_reason),
        "stop_message": run.stop_message,
        "findings": [*run.findings],
        "output": run.answer if run.state is State.DONE else None,
        "not_done": [attrs.asdict(claim) for claim in run.not_done],
        "turns": run.turn,
        "version": run.version,
        "usage": attrs.asdict(run.usage) | {"tokens": run.usage.tokens},
        "labels": [attrs.asdict(run.labels[label]) for label in join_labels(run.labels)],
        "data_level": run.data_level,
        "duration_s": round(run.duration_s, 6),
        "pending": [attrs.asdict(item) for item in run.pending],
        "calls": [attrs.asdict(call) for call in run.calls],
        "resume": None if run.is_over else hint.build_resume(root_id or run.id),
        "fork": hint.build_fork(run),
    }


def build_full_run_json(run: Run, hint: CommandHint, root_id: str, events: Sequence[Event] = ()) -> dict[str, Any]:
    """Return `build_run_json` with the header and the turns. Decisions are read from the `events` of the journal."""
    header = run.header
    return build_run_json(run, hint, root_id) | {
        "agent": header.agent,
        "agent_version": header.agent_version,
        "prompts": dict(header.fingerprint.prompts),
        "target": header.target,
        "session": header.session,
        "parent": header.parent,
        "caller": header.caller,
        "forked_from": header.forked_from,
        "forked_at": None if header.forked_from is None else header.forked_at,
        "withhold": header.withhold,
        "answered_from": None if run.answered_from is None else attrs.asdict(run.answered_from),
        "user": header.user,
        "tenant": header.tenant,
        "clearance": header.clearance,
        "release": header.release,
        "purpose": header.purpose,
        "arms": dict(header.arms),
        "traceparent": header.traceparent,
        "cache_losses": [attrs.asdict(loss) for loss in list_cache_losses(events)],
        "usage_by_purpose": {
            str(purpose): attrs.asdict(usage) | {"tokens": usage.tokens}
            for purpose, usage in usage_by_purpose(events).items()
        },
        "metadata": dict(header.metadata),
        "prompt": format_prompt(run),
        "created_at": run.created_at,
        "updated_at": run.updated_at,
        "tree": [attrs.asdict(turn) for turn in build_decided_turns(run, events)],
    }


def build_posted_json(run_id: str, decision: Decision) -> dict[str, Any]:
    """Return a decision in the inbox: its run and call, its kind, and its author."""
    return {
        "run_id": run_id,
        "call_id": decision.call_id,
        "decision": decision_word(decision),
        "by": decision.by,
        "arguments": parse_edited_arguments(decision),
    }


def build_export_json(run: Run, hint: CommandHint, root_id: str, events: Sequence[Event]) -> dict[str, Any]:
    """Return `build_full_run_json` with the whole header, the journal and the messages."""
    return build_full_run_json(run, hint, root_id, events) | {
        "header": json.loads(codec.encode_header(run.header)),
        "events": build_journal_json(events),
        "messages": [codec.message_to_json(message) for message in run.messages],
    }


def build_journal_json(events: Iterable[Event]) -> list[dict[str, Any]]:
    """Return the events of the journal, each with its version and date."""
    return [
        {"version": version, "date": datetime.fromtimestamp(event.at, UTC).isoformat(), **event.to_dict()}
        for version, event in enumerate(events, 1)
    ]


def build_summary_json(run: RunSummary, status: RunStatus) -> dict[str, Any]:
    """Return one row of a list of runs."""
    return attrs.asdict(run) | {"status": status}
