"""Tools with which a model works on the files below one folder."""

from __future__ import annotations

import posixpath
import stat
from pathlib import Path
from typing import Any, Final, Unpack

from anyio import to_thread

from agentfsm.core.errors import MisuseError, ModelRetry
from agentfsm.sandbox.file_labels import keep_file_labels, restore_file_labels, restore_name_labels
from agentfsm.sandbox.path_jail import PathJail
from agentfsm.tools.run_context import RunContext
from agentfsm.tools.schema.binding import Arguments
from agentfsm.tools.tool import Tool, ToolDeclarations, UnknownOutcomePolicy, make_tool

LIST_FILES: Final = "list_files"
READ_FILE: Final = "read_file"
WRITE_FILE: Final = "write_file"
EDIT_FILE: Final = "edit_file"
# Bytes of a file: more than a context window holds.
MAX_FILE_BYTES: Final = 4 << 20
# Entries of a folder that are listed.
MAX_ENTRIES: Final = 500
# Lines that are read if the model does not say how many.
_MAX_LINES: Final = 2_000


def build_file_tools(
    folder: Path | str, *, write: bool = False, **options: Unpack[ToolDeclarations]
) -> list[Tool[..., Any]]:
    """Return the tools `list_files` and `read_file` for the files below a folder.

    Paths are relative to the folder. Symbolic links are not followed, so nothing leads out of it. Files are UTF-8 text
    of up to 4 MB. The results have the label `user_data`. A file that a run writes keeps the labels of the run, in the
    store of the run. A run that reads the same content from the same path, or the name of the file, gets them.

    The functions of the tools are async.

    Args:
        folder: An existing folder.
        write: Whether to add `write_file` and `edit_file`. A file is replaced as a whole, so a crash leaves the old or
            the new content.
        **options: Options of all these tools, such as `reads_private=True`, `reads_untrusted=True`, `tags=["files"]`.

    Raises:
        MisuseError: if the folder does not exist, or an option is invalid.
    """
    root = Path(folder).expanduser().resolve()
    if not root.is_dir():
        raise MisuseError(f"build_file_tools({str(folder)!r}): there is no such folder; create it first")
    jail = PathJail(root)
    reading = [_build_list_files(jail, options), _build_read_file(jail, options)]
    return [*reading, _build_write_file(jail, options), _build_edit_file(jail, options)] if write else reading


def _build_list_files(jail: PathJail, options: ToolDeclarations) -> Tool[..., Any]:
    async def list_files(folder: str = ".") -> list[dict[str, str | int]]:
        """List a folder: the name of each entry, its kind, and its size in bytes.

        Args:
            folder: Path of the folder, "." for the outermost.
        """
        entries = await to_thread.run_sync(jail.list_entries, folder, MAX_ENTRIES)
        await restore_name_labels([posixpath.join(_locate(jail, folder), name) for name, _status in entries])
        return [_describe_entry(name, status) for name, status in entries]

    return make_tool(list_files, name=LIST_FILES, read_only=True, **options)


def _build_read_file(jail: PathJail, options: ToolDeclarations) -> Tool[..., Any]:
    async def read_file(path: str, first_line: int = 1, lines: int = _MAX_LINES) -> str:
        """Read a text file, or a part of it.

        Args:
            path: Path of the file.
            first_line: Number of the first line to read, from 1.
            lines: Number of lines to read at most.
        """
        content = await to_thread.run_sync(jail.read, path, MAX_FILE_BYTES)
        await restore_file_labels(_locate(jail, path), content)
        found = _decode(path, content).splitlines(keepends=True)
        start = max(first_line, 1) - 1
        shown = "".join(found[start : start + max(lines, 1)])
        left = len(found) - start - max(lines, 1)
        return f"{shown}\n[... {left} more lines ...]" if left > 0 else shown

    return make_tool(read_file, name=READ_FILE, read_only=True, **options)


def _build_write_file(jail: PathJail, options: ToolDeclarations) -> Tool[..., Any]:
    async def write_file(path: str, text: str) -> str:
        """Write a text file: a new one, or in place of an old one. Folders are created as needed.

        Args:
            path: Path of the file.
            text: The whole content.
        """
        content, place = _encode(text), Path(_locate(jail, path))
        for folder in [each for each in place.parents if each.is_relative_to(jail.root) and not each.exists()]:
            await keep_file_labels(str(folder), b"")  # its name is new, too
        await keep_file_labels(str(place), content)
        await to_thread.run_sync(jail.write, path, content)
        return f"wrote {len(content):,} bytes to {path}"

    all_options: dict[str, Any] = {"locks": _lock, "reads_untrusted": False, **options}
    return make_tool(write_file, name=WRITE_FILE, idempotent=True, **all_options)


def _build_edit_file(jail: PathJail, options: ToolDeclarations) -> Tool[..., Any]:
    async def edit_file(path: str, old: str, new: str) -> str:
        """Replace a piece of a text file that occurs in it exactly once.

        Args:
            path: Path of the file.
            old: The piece, with as much around it as makes it unique.
            new: The text to put in its place; empty to remove it.
        """
        before = await to_thread.run_sync(jail.read, path, MAX_FILE_BYTES)
        await restore_file_labels(_locate(jail, path), before)
        text = _decode(path, before)
        count = text.count(old) if old else 0
        if count == 1 and text.find(old) != text.rfind(old):  # it overlaps itself
            count = 2
        if count != 1:
            earlier = "; an earlier edit may have replaced it" if not count else ""
            raise ModelRetry(f"the old text occurs {count} times in {path!r}, and has to occur once{earlier}")
        content = _encode(text.replace(old, new))
        await keep_file_labels(_locate(jail, path), content)
        await to_thread.run_sync(jail.write, path, content)
        return f"edited {path}"

    def decide_unknown(_ctx: RunContext[Any], a: Arguments) -> UnknownOutcomePolicy:
        """Repeat an edit whose outcome is unknown, unless it might then be made twice.

        The old text may be there again after it: within the new one, around it, or over one of its edges.
        """
        sizes = range(1, min(len(a.old), len(a.new)))
        is_on_edge = any(a.old.endswith(a.new[:size]) or a.new.endswith(a.old[:size]) for size in sizes)
        return "ask" if a.old in a.new or a.new in a.old or is_on_edge else "rerun"

    all_options: dict[str, Any] = {"locks": _lock, "on_unknown": decide_unknown, "reads_untrusted": False, **options}
    return make_tool(edit_file, name=EDIT_FILE, **all_options)


def _lock(a: Arguments) -> set[str]:
    return {posixpath.normpath(a.path)}


def _locate(jail: PathJail, path: str) -> str:
    return posixpath.normpath(posixpath.join(str(jail.root), path))


def _decode(path: str, content: bytes) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ModelRetry(f"{path!r} is not a text file in UTF-8") from error


def _encode(text: str) -> bytes:
    content = text.encode("utf-8", "replace")
    if len(content) > MAX_FILE_BYTES:
        raise ModelRetry(f"the text has {len(content):,} bytes, and a file has up to {MAX_FILE_BYTES:,}")
    return content


def _describe_entry(name: str, status: Any) -> dict[str, str | int]:
    if stat.S_ISDIR(status.st_mode):
        return {"name": name, "kind": "folder"}
    if stat.S_ISREG(status.st_mode):
        return {"name": name, "kind": "file", "bytes": status.st_size}
    return {"name": name, "kind": "link" if stat.S_ISLNK(status.st_mode) else "other"}
