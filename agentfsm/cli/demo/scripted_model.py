"""Scripted model of the demo, used without an API key. It derives each reply from the messages of the request.

It keeps no state. So after a crash another process continues the run, and its model reads the same history.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

import attrs

from agentfsm.core.value import Value
from agentfsm.testing import WireReply, call, say
from agentfsm.testing.models import Call

DELAY_VARIABLE: Final = "AGENTFSM_DEMO_DELAY_S"
# Seconds between two pieces of a reply: slow enough to be seen. The whole demo takes about three seconds.
DELAY_S: Final = 0.006
PIECE_CHARS: Final = 20
# Number of files that the model reads.
MAX_FILES_READ: Final = 5
READ_CHARS: Final = 1_200
# Lines of each file that the report quotes.
QUOTED_LINES: Final = 3
_RESULT_HEAD: Final = re.compile(r"\[(\w+): (\w+)\]")


@attrs.frozen
class ParsedToolResult(Value):
    """Result of a tool call, parsed from the messages of a request."""

    arguments: Mapping[str, Any]
    outcome: str
    content: str

    @property
    def data(self) -> dict[str, Any]:
        """Result as a JSON object; empty if the call failed or returned something else."""
        try:
            value = json.loads(self.content)
        except ValueError:
            return {}
        return value if isinstance(value, dict) and self.outcome == "done" else {}


# Results so far, by name of the tool.
History = dict[str, list[ParsedToolResult]]


def answer_request(body: dict[str, Any]) -> WireReply:
    """Return the next reply: list and search, read, write the report, answer."""
    history = _parse_history(body["messages"])
    if not history:
        return _build_reply("I will list the folder first.", *_FIRST_CALLS)
    if "write_report" in history:
        return _build_reply(_build_answer(history))
    files = [file["path"] for file in _find_listing(history).get("worth_reading", [])][:MAX_FILES_READ]
    if files and "read_file" not in history:
        calls = [call("read_file", path=path, max_chars=READ_CHARS) for path in files]
        return _build_reply(f"Now I read the {len(files)} most informative files.", *calls)
    return _build_reply("I have enough for the report.", call("write_report", **_build_report(history)))


_FIRST_CALLS: Final = (
    call("list_folder", path="."),
    call("search_text", pattern="TODO"),
    call("search_text", pattern="def ", glob="*.py"),
)


def _build_reply(text: str, *calls: Call) -> WireReply:
    delay_s = _read_delay_s()
    return WireReply(
        say(text, *calls, usage=None, delay_s=delay_s * 20), chunk_delay_s=delay_s, chunk_chars=PIECE_CHARS
    )


def _read_delay_s() -> float:
    try:
        wanted = float(os.environ[DELAY_VARIABLE])
    except (KeyError, ValueError):
        return DELAY_S
    return wanted if 0 <= wanted <= 1 else DELAY_S


def _parse_history(messages: list[dict[str, Any]]) -> History:
    calls = {call["id"]: call["function"] for message in messages for call in message.get("tool_calls") or ()}
    history: History = {}
    for message in messages:
        call = calls.get(message.get("tool_call_id"))
        if message["role"] == "tool" and call is not None:
            head, _, content = message["content"].partition("\n")
            found = _RESULT_HEAD.fullmatch(head)
            outcome = found[2] if found else "unknown"
            history.setdefault(call["name"], []).append(
                ParsedToolResult(json.loads(call["arguments"]), outcome, content)
            )
    return history


def _find_listing(history: History) -> dict[str, Any]:
    return next((each.data for each in history.get("list_folder", ())), {})


def _iter_searches(history: History) -> Iterator[tuple[str, dict[str, Any]]]:
    return ((str(each.arguments.get("pattern")), each.data) for each in history.get("search_text", ()) if each.data)


# The report.


def _build_report(history: History) -> dict[str, str]:
    listing = _find_listing(history)
    sections = ["The folder could not be listed."]
    if listing:
        files, folders, size = (listing.get(name, 0) for name in ("files", "folders", "bytes"))
        lines = [f"{files:,} files in {folders:,} folders, {size:,} bytes in all."]
        if not listing.get("complete"):
            lines.append("Some files were skipped: they are beyond the limits of the demo, or cannot be read.")
        if listing.get("odd_names"):
            lines.append(f"{listing['odd_names']:,} names contain characters that cannot be shown.")
        sections = ["\n".join(lines)]
    if kinds := listing.get("kinds", []):
        rows = [f"| {_format_code(kind['kind'] or 'none')} | {kind['files']:,} |" for kind in kinds]
        sections.append("\n".join(["## Kinds of files", "", "| ending | files |", "|---|---|", *rows]))
    if largest := listing.get("largest", []):
        rows = [f"- {_format_code(file['path'])}: {file['bytes']:,} bytes" for file in largest]
        sections.append("\n".join(["## Largest files", "", *rows]))
    sections += [*_format_searches(history), *_format_files(history)]
    return {"title": "A survey of the folder", "markdown": "\n\n".join(sections)}


def _format_searches(history: History) -> Iterator[str]:
    for pattern, data in _iter_searches(history):
        head = (
            f"## {_format_code(pattern)}: {data['matches']:,} times in {data['files']:,} of {data['searched']:,} files"
        )
        rows = [f"- {_format_code(top['path'])}: {top['matches']:,}" for top in data["top"]]
        yield "\n".join([head, "", *rows]) if rows else head


def _format_files(history: History) -> Iterator[str]:
    for result in history.get("read_file", ()):
        path, data = _format_code(str(result.arguments.get("path"))), result.data
        if not data:
            yield f"## {path}\n\nIt could not be read."
        elif not data.get("binary"):
            lines = [f"    {line[:120]}" for line in data["text"].splitlines() if line.strip()][:QUOTED_LINES]
            yield "\n".join([f"## {path}, {data['bytes']:,} bytes, begins", "", *lines])


def _format_code(text: str) -> str:
    return "`" + text.replace("`", "'").replace("|", "/") + "`"


# The answer.


def _build_answer(history: History) -> str:
    written = history["write_report"][-1]
    if written.data:
        report = f"The report is in {written.data['path']}."
    elif written.outcome == "rejected":
        report = "You rejected the report, so it was not written. My findings:"
    else:
        report = f"The report could not be written ({' '.join(written.content.split())[:200]}). My findings:"
    return "\n".join([report, *(f"- {fact}" for fact in _iter_facts(history))])


def _iter_facts(history: History) -> Iterator[str]:
    listing = _find_listing(history)
    yield f"{_bound_prefix(listing)}{listing.get('files', 0):,} files, {listing.get('bytes', 0):,} bytes"
    kinds, largest = listing.get("kinds", []), listing.get("largest", [])
    yield f"most are {kinds[0]['kind'] or 'without an ending'} ({kinds[0]['files']:,})" if kinds else "no kind of file"
    if largest:
        yield f"the largest is {largest[0]['path']} ({largest[0]['bytes']:,} bytes)"
    for pattern, data in _iter_searches(history):
        yield f"{pattern.strip()!r} occurs {_bound_prefix(data)}{data['matches']:,} times"


def _bound_prefix(data: dict[str, Any]) -> str:
    """Return "at least " for the numbers of an incomplete search, else an empty text."""
    return "" if data.get("complete") else "at least "
