"""JSON documents of the gateway: runs, and rows of a list."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

import attrs
from starlette.responses import JSONResponse

from agentfsm.agents.run_reports import read_output
from agentfsm.core.machine import State
from agentfsm.journal.run_status import find_past_status, list_statuses, read_status
from agentfsm.serve.access import read_session_name

if TYPE_CHECKING:
    from agentfsm.core.run import Run
    from agentfsm.journal.run_status import RunStatus
    from agentfsm.ports.store import RunSummary, Store
    from agentfsm.serve.access import Caller


class JSONDocument(JSONResponse):
    """A response whose text is ASCII, so that it may have lone surrogates, and whose mappings may be of any type."""

    def render(self, content: Any) -> bytes:
        """Return the body."""
        return json.dumps(content, separators=(",", ":"), default=_as_plain).encode()


def locate_run(scope: Mapping[str, Any], run_id: str) -> str:
    """Return the path of a run for a client, below the path at which an application mounts the gateway."""
    return f"{scope.get('root_path', '')}/v1/runs/{quote(run_id, safe='')}"


def _as_plain(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else str(value)


def strip_native(document: dict[str, Any], caller: Caller) -> dict[str, Any]:
    """Remove the provider's own form of a reply from the document of a message or an event, unless an admin reads it.

    It has the text as it was before an exit filter withheld or redacted a part, such as the instructions.
    """
    message = document.get("message", document)
    if not caller.allows("admin") and isinstance(message, dict):
        message.pop("native", None)
    return document


_ROW_FIELDS: Final = ("id", "agent", "user", "parent", "turn", "version", "tokens", "prompt", "rating", "release")
_ROW_AMOUNTS: Final = ("created_at", "updated_at", "cost_usd", "duration_s")


async def build_run_document(store: Store, run: Run) -> dict[str, Any]:
    """Return a run that was just loaded: its status and state, its result, what it waits for, and its tokens."""
    return _build_document(run, *await read_status(store, run))


def build_past_document(run: Run) -> dict[str, Any]:
    """Return a run as it was at a version of its journal."""
    return _build_document(run, find_past_status(run), "")


def _build_document(run: Run, status: RunStatus, standstill: str) -> dict[str, Any]:
    header = run.header
    return {
        "id": run.id,
        "agent": header.agent,
        "status": status,
        "standstill": standstill or None,
        "state": str(run.state),
        "version": run.version,
        "turn": run.turn,
        "output": read_output(run) if run.state is State.DONE else None,
        "not_done": [attrs.asdict(claim) for claim in run.not_done],
        "stop_reason": None if run.stop_reason is None else str(run.stop_reason),
        "stop_message": run.stop_message,
        "findings": [*run.findings],
        "pending": [attrs.asdict(item) for item in run.pending],
        "usage": attrs.asdict(run.usage) | {"tokens": run.usage.tokens},
        "session": read_session_name(header.session),
        "user": header.user,
        "parent": header.parent,
        "caller": header.caller,
        "metadata": dict(header.metadata),
        "created_at": run.created_at,
        "updated_at": run.updated_at,
    }


async def build_row_documents(store: Store, rows: Sequence[RunSummary]) -> list[dict[str, Any]]:
    """Return the rows of a list of runs."""
    statuses = await list_statuses(store, rows)
    return [_build_row(row, status) for row, status in zip(rows, statuses, strict=True)]


def _build_row(row: RunSummary, status: RunStatus) -> dict[str, Any]:
    return {name: getattr(row, name) for name in _ROW_FIELDS + _ROW_AMOUNTS} | {
        "status": status,
        "state": str(row.state),
        "stop_reason": None if row.stop_reason is None else str(row.stop_reason),
        "session": read_session_name(row.session),
    }
