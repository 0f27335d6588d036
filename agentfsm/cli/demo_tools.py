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

from agentfsm.cli.demo_folder import Found, Walk, inside, is_binary, read
from agentfsm.core.errors import ModelRetry
from agentfsm.tools.run_context import RunContext
from agentfsm.tools.tool import tool

# Files searched at most, and bytes of them: both together take about 0.2 s.
SEARCHED: Final = 2_000
SEARCHED_BYTES: Final = 32 * 1024 * 1024
# Bytes of one file: a longer one is data, not text that somebody wrote.
FILE_BYTES: Final = 512 * 1024
# Files named in a listing.
LISTED: Final = 30
# Found lines quoted.
LINES: Final = 8
LINE_CHARS: Final = 160
# Characters of a file that is read, at most.
READ_CHARS: Final = 8_000
REPORT_CHARS: Final = 200_000
# Looking ends so long before the call would be cut off: part of an answer is better than none.
SPARE_S: Final = 2.0
# Bytes of a result: more than any here can have, so that the JSON is never cut in its middle.
SHOWN_BYTES: Final = 96_000
# No two keys in this form make the same name, so it need not hold a hash.
_PLAIN_KEY: Final = re.compile(r"[A-Za-z0-9]{1,64}:t\d{1,9}\.\d{1,9}(:[0-9a-f]{8})?")

Folder = RunContext[Any]


def _root(ctx: Folder) -> Path:
    return Path(str(ctx.metadata["folder"]))


def _until(ctx: Folder) -> float:
    return ctx.deadline - SPARE_S


@tool(read_only=True, shown_tokens=SHOWN_BYTES, shown_bytes=SHOWN_BYTES)
def list_folder(ctx: Folder, path: str = ".") -> dict[str, Any]:  # noqa: D417  the model is not told of ctx
    """Count the files below a folder: how many, how large, of which kinds, and which are worth reading.

    Args:
        path: The folder, from the surveyed one on; "." for the whole.
    """
    root = _root(ctx)
    place = inside(root, path)
    if not place.is_dir():
        raise ModelRetry(f"{path!r} is no folder here: list '.' to see what there is")
    walk = Walk(root, place, _until(ctx))
    files = list(walk)
    named = [file for file in files if file.can_be_named]
    text = sorted((file for file in named if file.is_text), key=lambda file: file.rank)
    return {
        "path": path,
        "files": len(files),
        "folders": walk.folders,
        "bytes": sum(file.bytes for file in files),
        "complete": walk.complete,
        "odd_names": len(files) - len(named),
        "kinds": _kinds(files),
        "largest": _listed(sorted(named, key=lambda file: -file.bytes)[:LINES]),
        "worth_reading": _listed(text[:LISTED]),
    }


def _kinds(files: list[Found]) -> list[dict[str, Any]]:
    counts = Counter(file.kind if file.kind.isprintable() else "?" for file in files)
    return [{"kind": kind, "files": count} for kind, count in counts.most_common(10)]


def _listed(files: list[Found]) -> list[dict[str, Any]]:
    return [attrs.asdict(file) for file in files]


@tool(read_only=True, shown_tokens=SHOWN_BYTES, shown_bytes=SHOWN_BYTES)
def search_text(ctx: Folder, pattern: str, glob: str = "*") -> dict[str, Any]:  # noqa: D417  the model is not told of ctx
    """Find a piece of text in the files of the folder.

    Args:
        pattern: The text, exactly; no regular expression.
        glob: Which files, for example "*.py".
    """
    if not pattern:
        raise ModelRetry("the pattern is empty: give the text to look for")
    root = _root(ctx)
    walk = Walk(root, root, _until(ctx))
    search = _Search(pattern, root)
    for file in walk:
        if file.can_be_named and fnmatch(file.path, glob):
            search.look_into(file)
        if search.is_full:
            break
    complete = walk.complete and not search.is_full
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
        return self.searched >= SEARCHED or self.searched_bytes >= SEARCHED_BYTES

    def look_into(self, file: Found) -> None:
        try:
            data, _ = read(self.root, self.root / file.path, FILE_BYTES)
        except OSError:
            return
        self.searched += 1
        self.searched_bytes += len(data)
        if (count := data.count(self.pattern.encode("utf-8", "replace"))) and not is_binary(data):
            self.matches[file.path] = count
            self._quote(file, data)

    def _quote(self, file: Found, data: bytes) -> None:
        for number, line in enumerate(data.decode("utf-8", "replace").splitlines(), 1):
            if len(self.lines) >= LINES:
                return
            if self.pattern in line:
                self.lines.append({"path": file.path, "line": number, "text": line.strip()[:LINE_CHARS]})

    def result(self) -> dict[str, Any]:
        top = [{"path": path, "matches": count} for path, count in self.matches.most_common(LINES)]
        return {
            "matches": self.matches.total(),
            "files": len(self.matches),
            "searched": self.searched,
            "top": top,
            "lines": self.lines,
        }


@tool(read_only=True, shown_tokens=SHOWN_BYTES, shown_bytes=SHOWN_BYTES)
def read_file(ctx: Folder, path: str, max_chars: int = 2_000) -> dict[str, Any]:  # noqa: D417  the model is not told of ctx
    """Read the beginning of a text file.

    Args:
        path: The file, from the surveyed folder on.
        max_chars: How much of it, 1 to 8,000 characters.
    """
    root = _root(ctx)
    place = inside(root, path)
    limit = min(max(max_chars, 1), READ_CHARS)
    try:
        data, size = read(root, place, limit * 4)
    except OSError as error:
        raise ModelRetry(f"{path!r} cannot be read ({error.strerror or error}): choose another file") from None
    if is_binary(data):
        return {"path": path, "bytes": size, "binary": True, "text": ""}
    text = data.decode("utf-8", "replace")
    return {"path": path, "bytes": size, "binary": False, "text": text[:limit]}


# The report.


@tool(idempotent=True, requires_approval=True)
def write_report(ctx: Folder, title: str, markdown: str) -> dict[str, Any]:  # noqa: D417  the model is not told of ctx
    """Write the report of the survey. Call it once, when you know enough.

    Args:
        title: A line.
        markdown: The whole report, without the title.
    """
    if len(markdown) > REPORT_CHARS:
        raise ModelRetry(f"the report has {len(markdown):,} characters, and {REPORT_CHARS:,} are the most: shorten it")
    folder = Path(str(ctx.metadata["reports"]))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{safe_name(ctx.idempotency_key)}.md"
    text = f"# {' '.join(title.split())}\n\n{markdown.strip()}\n"
    _put(path, text.encode("utf-8", "replace"))
    return {"path": str(_near(path)), "bytes": path.stat().st_size}


def safe_name(key: str) -> str:
    """Return a key as a file's name: the same for the same key, another for another."""
    name = re.sub(r"[^A-Za-z0-9_-]", "-", key)[:100]
    return name if _PLAIN_KEY.fullmatch(key) else f"{name}-{_digest(key)}"


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "replace")).hexdigest()[:12]


def _put(path: Path, data: bytes) -> None:
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


def _near(path: Path) -> Path:
    """Return the path from the current folder on, where it lies below."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path
