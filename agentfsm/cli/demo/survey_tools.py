"""Tools of the demo: they read one folder and nothing outside it, and write one report.

The metadata of the run contains the folder, so that a process which resumes the run reads the same one.
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

# Maximum number and size of the files of one search, which takes about 0.2 s.
MAX_SEARCHED_FILES: Final = 2_000
MAX_SEARCHED_BYTES: Final = 32 * 1024 * 1024
# Bytes of one file. Longer files are mostly data, not text.
MAX_FILE_BYTES: Final = 512 * 1024
# Files in a listing.
MAX_LISTED: Final = 30
# Matching lines that a search returns.
MAX_LINES: Final = 8
MAX_LINE_CHARS: Final = 160
# Characters of a file that are read.
MAX_READ_CHARS: Final = 8_000
MAX_REPORT_CHARS: Final = 200_000
# A search ends this many seconds before the time-out of its call, so that it returns a partial result.
SPARE_S: Final = 2.0
# Bytes of a result: more than any of these tools returns, so that its JSON is never cut.
MAX_RESULT_BYTES: Final = 96_000
# Keys of this form get distinct file names without a hash.
_PLAIN_KEY: Final = re.compile(r"[A-Za-z0-9]{1,64}:t\d{1,9}\.\d{1,9}(:[0-9a-f]{8})?")

SurveyContext = RunContext[Any]


def _survey_root(ctx: SurveyContext) -> Path:
    return Path(str(ctx.metadata["folder"]))


def _deadline(ctx: SurveyContext) -> float:
    return ctx.deadline - SPARE_S


@tool(read_only=True, shown_tokens=MAX_RESULT_BYTES, shown_bytes=MAX_RESULT_BYTES)
def list_folder(ctx: SurveyContext, path: str = ".") -> dict[str, Any]:  # noqa: D417  the model does not see ctx
    """Count the files below a folder: their number, size and kinds, and the ones worth reading.

    Args:
        path: The folder, relative to the surveyed one; "." for all of it.
    """
    root = _survey_root(ctx)
    place = resolve_inside(root, path)
    if not place.is_dir():
        raise ModelRetry(f"{path!r} is not a folder here: call list_folder with '.' to see the folders")
    walk = FolderWalk(root, place, _deadline(ctx))
    files = list(walk)
    named = [file for file in files if file.can_be_named]
    kinds = Counter(file.kind if file.kind.isprintable() else "?" for file in files)
    text = sorted((file for file in named if file.is_text), key=lambda file: file.rank)
    return {
        "path": path,
        "files": len(files),
        "folders": walk.folders,
        "bytes": sum(file.bytes for file in files),
        "complete": walk.is_complete,
        "odd_names": len(files) - len(named),
        "kinds": [{"kind": kind, "files": count} for kind, count in kinds.most_common(10)],
        "largest": _to_plain_json(sorted(named, key=lambda file: -file.bytes)[:MAX_LINES]),
        "worth_reading": _to_plain_json(text[:MAX_LISTED]),
    }


def _to_plain_json(files: list[FolderFile]) -> list[dict[str, Any]]:
    return [attrs.asdict(file) for file in files]


@tool(read_only=True, shown_tokens=MAX_RESULT_BYTES, shown_bytes=MAX_RESULT_BYTES)
def search_text(ctx: SurveyContext, pattern: str, glob: str = "*") -> dict[str, Any]:  # noqa: D417  the model does not see ctx
    """Find a piece of text in the files of the folder.

    Args:
        pattern: The exact text, not a regular expression.
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
    """Matches of a search so far."""

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
def read_file(ctx: SurveyContext, path: str, max_chars: int = 2_000) -> dict[str, Any]:  # noqa: D417  the model does not see ctx
    """Read the beginning of a text file.

    Args:
        path: The file, relative to the surveyed folder.
        max_chars: Number of characters to read, 1 to 8,000.
    """
    root = _survey_root(ctx)
    place = resolve_inside(root, path)
    limit = min(max(max_chars, 1), MAX_READ_CHARS)
    try:
        data, size = read_beginning(root, place, limit * 4)
    except OSError as error:
        raise ModelRetry(f"cannot read {path!r} ({error.strerror or error}): choose another file") from None
    if is_binary(data):
        return {"path": path, "bytes": size, "binary": True, "text": ""}
    text = data.decode("utf-8", "replace")
    return {"path": path, "bytes": size, "binary": False, "text": text[:limit]}


# The report.


@tool(idempotent=True, requires_approval=True)
def write_report(ctx: SurveyContext, title: str, markdown: str) -> dict[str, Any]:  # noqa: D417  the model does not see ctx
    """Write the report of the survey. Call it once, when you know enough.

    Args:
        title: The title, one line.
        markdown: The whole report without the title.
    """
    if len(markdown) > MAX_REPORT_CHARS:
        raise ModelRetry(f"the report has {len(markdown):,} characters, the limit is {MAX_REPORT_CHARS:,}: shorten it")
    folder = Path(str(ctx.metadata["reports"]))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{safe_name(ctx.idempotency_key)}.md"
    text = f"# {' '.join(title.split())}\n\n{markdown.strip()}\n"
    _write_durably(path, text.encode("utf-8", "replace"))
    return {"path": str(_relative_path(path)), "bytes": path.stat().st_size}


def safe_name(key: str) -> str:
    """Return a file name for a key. Different keys get different names."""
    name = re.sub(r"[^A-Za-z0-9_-]", "-", key)[:100]
    if _PLAIN_KEY.fullmatch(key):
        return name
    return f"{name}-{hashlib.sha256(key.encode('utf-8', 'replace')).hexdigest()[:12]}"


def _write_durably(path: Path, data: bytes) -> None:
    """Write a file atomically and durably. A repetition after a crash leaves one file."""
    draft = path.with_suffix(".part")  # a fixed name, so that a repetition overwrites the draft of a killed worker
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
    """Return the path relative to the current folder if it is below it."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path
