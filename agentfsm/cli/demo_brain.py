"""What the demo's model says where there is no real one: decided from the messages of each request alone.

It keeps no state, so a run that was killed is gone on with by another process, whose model reads the same history.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

import attrs

from agentfsm.core.value import Value
from agentfsm.testing.fake_llm.script import Say

PACE_VARIABLE: Final = "AGENTFSM_DEMO_DELAY_S"
# Between two pieces of a reply: slow enough to be seen, and the whole demo takes some three seconds.
DELAY_S: Final = 0.006
PIECE_CHARS: Final = 20
# Files that are read.
READ: Final = 5
READ_CHARS: Final = 1_200
# Lines of each file, quoted in the report.
FIRST_LINES: Final = 3
_HEAD: Final = re.compile(r"\[(\w+): (\w+)\]")


@attrs.frozen
class Result(Value):
    """What a tool has answered."""

    arguments: Mapping[str, Any]
    outcome: str
    content: str

    @property
    def data(self) -> dict[str, Any]:
        """The answer as JSON; empty where it is none."""
        try:
            value = json.loads(self.content)
        except ValueError:
            return {}
        return value if isinstance(value, dict) and self.outcome == "done" else {}


# The results so far, by tool.
History = dict[str, list[Result]]


def think(body: dict[str, Any]) -> Say:
    """Answer a request: look around, read, write, tell."""
    history = _history(body["messages"])
    if not history:
        return _speak("I will look at what is there.", _LOOK)
    if "write_report" in history:
        return _speak(_answer(history))
    files = _worth_reading(history)
    if files and "read_file" not in history:
        calls = tuple(("read_file", {"path": path, "max_chars": READ_CHARS}) for path in files)
        return _speak(f"Now the {len(files)} files that say most.", calls)
    return _speak("I know enough to write.", (("write_report", _report(history)),))


_LOOK: Final = (
    ("list_folder", {"path": "."}),
    ("search_text", {"pattern": "TODO"}),
    ("search_text", {"pattern": "def ", "glob": "*.py"}),
)


def _speak(text: str, calls: tuple[tuple[str, Mapping[str, Any]], ...] = ()) -> Say:
    delay_s = _delay_s()
    return Say(text=text, calls=calls, delay_s=delay_s * 20, chunk_delay_s=delay_s, chunk_chars=PIECE_CHARS)


def _delay_s() -> float:
    try:
        wanted = float(os.environ[PACE_VARIABLE])
    except (KeyError, ValueError):
        return DELAY_S
    return wanted if 0 <= wanted <= 1 else DELAY_S


def _history(messages: list[dict[str, Any]]) -> History:
    calls = {call["id"]: call["function"] for message in messages for call in message.get("tool_calls") or ()}
    history: History = {}
    for message in messages:
        call = calls.get(message.get("tool_call_id"))
        if message["role"] == "tool" and call is not None:
            head, _, content = message["content"].partition("\n")
            found = _HEAD.fullmatch(head)
            outcome = found[2] if found else "unknown"
            history.setdefault(call["name"], []).append(Result(json.loads(call["arguments"]), outcome, content))
    return history


def _listing(history: History) -> dict[str, Any]:
    return next((each.data for each in history.get("list_folder", ())), {})


def _worth_reading(history: History) -> list[str]:
    return [file["path"] for file in _listing(history).get("worth_reading", [])][:READ]


def _found(history: History) -> Iterator[tuple[str, dict[str, Any]]]:
    return ((str(each.arguments.get("pattern")), each.data) for each in history.get("search_text", ()) if each.data)


# The report.


def _report(history: History) -> dict[str, str]:
    listing = _listing(history)
    sections = [_counts(listing), _kinds(listing), _largest(listing), *_searches(history), *_read(history)]
    return {"title": "A survey of the folder", "markdown": "\n\n".join(filter(None, sections))}


def _counts(listing: dict[str, Any]) -> str:
    if not listing:
        return "The folder could not be listed."
    files, folders, size = (listing.get(name, 0) for name in ("files", "folders", "bytes"))
    lines = [f"{files:,} files in {folders:,} folders, {size:,} bytes in all."]
    if not listing.get("complete"):
        lines.append("There is more that was not looked at: it is beyond the demo's bounds, or may not be read.")
    if listing.get("odd_names"):
        lines.append(f"{listing['odd_names']:,} names hold characters that are not shown here.")
    return "\n".join(lines)


def _kinds(listing: dict[str, Any]) -> str:
    rows = [f"| {_code(kind['kind'] or 'none')} | {kind['files']:,} |" for kind in listing.get("kinds", [])]
    return "\n".join(["## Kinds of files", "", "| ending | files |", "|---|---|", *rows]) if rows else ""


def _largest(listing: dict[str, Any]) -> str:
    rows = [f"- {_code(file['path'])}: {file['bytes']:,} bytes" for file in listing.get("largest", [])]
    return "\n".join(["## Largest files", "", *rows]) if rows else ""


def _searches(history: History) -> Iterator[str]:
    for pattern, data in _found(history):
        head = f"## {_code(pattern)}: {data['matches']:,} times in {data['files']:,} of {data['searched']:,} files"
        rows = [f"- {_code(top['path'])}: {top['matches']:,}" for top in data["top"]]
        yield "\n".join([head, "", *rows]) if rows else head


def _read(history: History) -> Iterator[str]:
    for result in history.get("read_file", ()):
        path, data = _code(str(result.arguments.get("path"))), result.data
        if not data:
            yield f"## {path}\n\nIt could not be read."
        elif not data.get("binary"):
            lines = [f"    {line[:120]}" for line in data["text"].splitlines() if line.strip()][:FIRST_LINES]
            yield "\n".join([f"## {path}, {data['bytes']:,} bytes, begins", "", *lines])


def _code(text: str) -> str:
    return "`" + text.replace("`", "'").replace("|", "/") + "`"


# The answer.


def _answer(history: History) -> str:
    return "\n".join([_outcome(history["write_report"][-1]), *(f"- {fact}" for fact in _facts(history))])


def _outcome(written: Result) -> str:
    if written.data:
        return f"The report is in {written.data['path']}."
    if written.outcome == "rejected":
        return "You did not want the report, so none was written. What I found:"
    return f"The report could not be written ({' '.join(written.content.split())[:200]}). What I found:"


def _facts(history: History) -> Iterator[str]:
    listing = _listing(history)
    yield f"{_bound(listing)}{listing.get('files', 0):,} files, {listing.get('bytes', 0):,} bytes"
    kinds, largest = listing.get("kinds", []), listing.get("largest", [])
    yield f"most are {kinds[0]['kind'] or 'without an ending'} ({kinds[0]['files']:,})" if kinds else "no kind of file"
    if largest:
        yield f"the largest is {largest[0]['path']} ({largest[0]['bytes']:,} bytes)"
    for pattern, data in _found(history):
        yield f"{pattern.strip()!r} stands there {_bound(data)}{data['matches']:,} times"


def _bound(data: dict[str, Any]) -> str:
    """Return what a number has to be read with where not everything was looked at."""
    return "" if data.get("complete") else "at least "
