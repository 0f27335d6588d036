"""The demo's tools: they look at one folder and at nothing outside it, and write one report.

The folder stands in the run's metadata, so a run that is resumed by another process looks at the same one.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections import Counter
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Final

import attrs

from agentfsm.cli.demo.folder_walk import FolderFile, FolderWalk, is_binary, read_beginning, resolve_inside
from agentfsm.core.errors import ModelRetry
from agentfsm.tools.run_context import RunContext
from agentfsm.tools.tool import tool

# Files searched at most, and bytes of them: both together take about 0.2 s.
MAX_SEARCHED_FILES: Final = 2_000
MAX_SEARCHED_BYTES: Final = 32 * 1024 * 1024
# Bytes of one file: a longer one is data, not text that somebody wrote.
MAX_FILE_BYTES: Final = 512 * 1024
# Files named in a listing.
MAX_LISTED: Final = 30
# Found lines quoted.
MAX_LINES: Final = 8
MAX_LINE_CHARS: Final = 160
# Characters of a file that is read, at most.
MAX_READ_CHARS: Final = 8_000
MAX_REPORT_CHARS: Final = 200_000
# Looking ends so long before the call would be cut off: part of an answer is better than none.
SPARE_S: Final = 2.0
# Bytes of a result: more than any here can have, so that the JSON is never cut in its middle.
MAX_RESULT_BYTES: Final = 96_000
# No two keys in this form make the same name, so it need not hold a hash.
_PLAIN_KEY: Final = re.compile(r"[A-Za-z0-9]{1,64}:t\d{1,9}\.\d{1,9}(:[0-9a-f]{8})?")

SurveyContext = RunContext[Any]


def _survey_root(ctx: SurveyContext) -> Path:
    return Path(str(ctx.metadata["folder"]))


def _deadline(ctx: SurveyContext) -> float:
    return ctx.deadline - SPARE_S


@tool(read_only=True, shown_tokens=MAX_RESULT_BYTES, shown_bytes=MAX_RESULT_BYTES)
def list_folder(ctx: SurveyContext, path: str = ".") -> dict[str, Any]:  # noqa: D417  the model is not told of ctx
    """Count the files below a folder: how many, how large, of which kinds, and which are worth reading.

    Args:
        path: The folder, from the surveyed one on; "." for the whole.
    """
    root = _survey_root(ctx)
    place = resolve_inside(root, path)
    if not place.is_dir():
        raise ModelRetry(f"{path!r} is no folder here: list '.' to see what there is")
    walk = FolderWalk(root, place, _deadline(ctx))
    files = list(walk)
    named = [file for file in files if file.can_be_named]
    text = sorted((file for file in named if file.is_text), key=lambda file: file.rank)
    return {
        "path": path,
        "files": len(files),
        "folders": walk.folders,
        "bytes": sum(file.bytes for file in files),
        "complete": walk.is_complete,
        "odd_names": len(files) - len(named),
        "kinds": _count_kinds(files),
        "largest": _to_plain_json(sorted(named, key=lambda file: -file.bytes)[:MAX_LINES]),
        "worth_reading": _to_plain_json(text[:MAX_LISTED]),
    }


def _count_kinds(files: list[FolderFile]) -> list[dict[str, Any]]:
    counts = Counter(file.kind if file.kind.isprintable() else "?" for file in files)
    return [{"kind": kind, "files": count} for kind, count in counts.most_common(10)]


def _to_plain_json(files: list[FolderFile]) -> list[dict[str, Any]]:
    return [attrs.asdict(file) for file in files]


@tool(read_only=True, shown_tokens=MAX_RESULT_BYTES, shown_bytes=MAX_RESULT_BYTES)
def search_text(ctx: SurveyContext, pattern: str, glob: str = "*") -> dict[str, Any]:  # noqa: D417  the model is not told of ctx
    """Find a piece of text in the files of the folder.

    Args:
        pattern: The text, exactly; no regular expression.
        glob: Which files, for example "*.py".
    """
    if not pattern:
        raise ModelRetry("the pattern is empty: give the text to look for")
    root = _survey_root(ctx)
    walk = FolderWalk(root, root, _deadline(ctx))
    search = _Search(pattern, root)
    for file in walk:
        if file.can_be_named and fnmatch(file.path, glob):
            search.search_file(file)
        if search.is_full:
            break
    complete = walk.is_complete and not search.is_full
    return {"pattern": pattern, "glob": glob, "complete": complete, **search.result()}


@attrs.define(eq=False, repr=False)
class _Search:
    """What a search has found so far."""

    pattern: str
    root: Path
    searched: int = 0
    searched_bytes: int = 0
    matches: Counter[str] = attrs.field(factory=Counter)
    lines: list[dict[str, Any]] = attrs.field(factory=list)

    @property
    def is_full(self) -> bool:
        return self.searched >= MAX_SEARCHED_FILES or self.searched_bytes >= MAX_SEARCHED_BYTES

    def search_file(self, file: FolderFile) -> None:
        try:
            data, _ = read_beginning(self.root, self.root / file.path, MAX_FILE_BYTES)
        except OSError:
            return
        self.searched += 1
        self.searched_bytes += len(data)
        if (count := data.count(self.pattern.encode("utf-8", "replace"))) and not is_binary(data):
            self.matches[file.path] = count
            self._quote(file, data)

    def _quote(self, file: FolderFile, data: bytes) -> None:
        for number, line in enumerate(data.decode("utf-8", "replace").splitlines(), 1):
            if len(self.lines) >= MAX_LINES:
                return
            if self.pattern in line:
                self.lines.append({"path": file.path, "line": number, "text": line.strip()[:MAX_LINE_CHARS]})

    def result(self) -> dict[str, Any]:
        top = [{"path": path, "matches": count} for path, count in self.matches.most_common(MAX_LINES)]
        return {
            "matches": self.matches.total(),
            "files": len(self.matches),
            "searched": self.searched,
            "top": top,
            "lines": self.lines,
        }


@tool(read_only=True, shown_tokens=MAX_RESULT_BYTES, shown_bytes=MAX_RESULT_BYTES)
def read_file(ctx: SurveyContext, path: str, max_chars: int = 2_000) -> dict[str, Any]:  # noqa: D417  the model is not told of ctx
    """Read the beginning of a text file.

    Args:
        path: The file, from the surveyed folder on.
        max_chars: How much of it, 1 to 8,000 characters.
    """
    root = _survey_root(ctx)
    place = resolve_inside(root, path)
    limit = min(max(max_chars, 1), MAX_READ_CHARS)
    try:
        data, size = read_beginning(root, place, limit * 4)
    except OSError as error:
        raise ModelRetry(f"{path!r} cannot be read ({error.strerror or error}): choose another file") from None
    if is_binary(data):
        return {"path": path, "bytes": size, "binary": True, "text": ""}
    text = data.decode("utf-8", "replace")
    return {"path": path, "bytes": size, "binary": False, "text": text[:limit]}


# The report.


@tool(idempotent=True, requires_approval=True)
def write_report(ctx: SurveyContext, title: str, markdown: str) -> dict[str, Any]:  # noqa: D417  the model is not told of ctx
    """Write the report of the survey. Call it once, when you know enough.

    Args:
        title: A line.
        markdown: The whole report, without the title.
    """
    if len(markdown) > MAX_REPORT_CHARS:
        raise ModelRetry(
            f"the report has {len(markdown):,} characters, and {MAX_REPORT_CHARS:,} are the most: shorten it"
        )
    folder = Path(str(ctx.metadata["reports"]))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{safe_name(ctx.idempotency_key)}.md"
    text = f"# {' '.join(title.split())}\n\n{markdown.strip()}\n"
    _write_durably(path, text.encode("utf-8", "replace"))
    return {"path": str(_relative_path(path)), "bytes": path.stat().st_size}


def safe_name(key: str) -> str:
    """Return a key as a file's name: the same for the same key, another for another."""
    name = re.sub(r"[^A-Za-z0-9_-]", "-", key)[:100]
    return name if _PLAIN_KEY.fullmatch(key) else f"{name}-{_digest(key)}"


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "replace")).hexdigest()[:12]


def _write_durably(path: Path, data: bytes) -> None:
    """Write a file whole or not at all, durably. Cut off and done again, it leaves the one file behind."""
    draft = path.with_suffix(".part")  # the same name each time: what a killed worker left is overwritten
    with draft.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    if os.name != "posix":
        return
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _relative_path(path: Path) -> Path:
    """Return the path from the current folder on, where it lies below."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path
