"""`agentfsm index`: add documents to a memory, search, list and remove them, and rebuild the index."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from agentfsm.cli.argument_types import parse_count
from agentfsm.cli.arguments import MEMORY_BY, AddParser, add_command, add_group, add_memory_options
from agentfsm.cli.codes import ExitCode
from agentfsm.cli.commands.memory_admin import report, report_found, run_with_memory
from agentfsm.cli.render.formatting import format_count
from agentfsm.cli.resolve.mcp_servers import load_servers, select_servers
from agentfsm.core.errors import MisuseError
from agentfsm.core.labels import DATA_LEVELS

if TYPE_CHECKING:
    from agentfsm.cli.terminal import Terminal
    from agentfsm.mcp import MCPServer
    from agentfsm.memory import DocumentChange, Memory


def add_commands(commands: AddParser) -> None:
    """Add the commands of this module."""
    sub = add_group(commands, "index")
    adds = add_command(sub, add, text="add documents, or new versions of them")
    adds.add_argument("documents", metavar="FILE", nargs="+", help="a Markdown or text file; with --mcp, a URI")
    adds.add_argument(
        "--level", choices=[*map(str, DATA_LEVELS)], default="internal", help="data level (default: %(default)s)"
    )
    adds.add_argument(
        "--label", metavar="LABEL", action="append", default=[], help="label of the documents, such as untrusted"
    )
    adds.add_argument("--mcp", metavar="FILE", help='add resources of a server of this JSON file with "mcpServers"')
    adds.add_argument("--server", metavar="NAME", help="with --mcp: the server, if the file has several")
    search_options = add_command(sub, search, text="print the parts of documents that match a query, best first")
    search_options.add_argument("query", help="words to look for")
    search_options.add_argument(
        "--limit", metavar="N", type=parse_count, default=8, help="maximum of parts (default: 8)"
    )
    lists = add_command(sub, list_documents, name="list", text="list the documents")
    remove_options = add_command(sub, remove, text="remove documents from the search")
    remove_options.add_argument("documents", metavar="NAME", nargs="+", help="name of a document, as list prints it")
    remove_options.add_argument("--forget", action="store_true", help="delete all their versions for good")
    remove_options.add_argument("--by", metavar="NAME", default=MEMORY_BY, help="name for the record of a deletion")
    rebuild_options = add_command(sub, rebuild, text="build the index again from the items of all users")
    add_memory_options(adds, search_options, lists, remove_options, rebuild_options)
    for each in (adds, search_options, rebuild_options):
        each.add_argument(
            "--embedder",
            metavar="NAME",
            help="also search by meaning, with an embedder such as openai:text-embedding-3-small",
        )


def add(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Add documents, or new versions of them: files, or resources of an MCP server.

    Raises:
        MisuseError: if a file cannot be read as text; then nothing is added.
        MCPServerError: if the server is not approved, or has no such resource.
    """
    if args.server and not args.mcp:
        raise MisuseError("--server names a server of the file that --mcp names: give both")
    options = {"level": args.level, "labels": args.label}
    texts = {} if args.mcp else {Path(each).as_posix(): _read_file(each) for each in args.documents}

    async def add_files(memory: Memory) -> list[DocumentChange]:
        return [await memory.add_document(name, text, **options) for name, text in texts.items()]

    async def add_resources(memory: Memory, server: MCPServer) -> list[DocumentChange]:
        try:
            await server.update()  # starts the server only if it is approved
            return [await memory.add_resource(server, each, **options) for each in args.documents]
        finally:
            await server.aclose()

    if args.mcp:
        found = select_servers(load_servers(args.mcp, terminal), args.mcp, args.server)
        if len(found) != 1:
            names = ", ".join(server.name for server in found)
            raise MisuseError(f"{args.mcp} has several servers, {names}: name one with --server")
        changes = run_with_memory(args, lambda memory: add_resources(memory, found[0]), creates=True)
    else:
        changes = run_with_memory(args, add_files, creates=True)
    return report(
        terminal, {"documents": [*map(attrs.asdict, changes)]}, "\n".join(_format_change(each) for each in changes)
    )


def _read_file(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise MisuseError(f"{path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise MisuseError(f"{path} is not a text in UTF-8: add Markdown or plain text") from error


def _format_change(change: DocumentChange) -> str:
    counts = {"new": change.added, "kept": change.kept, "gone": change.closed, "forgotten before": change.left_out}
    told = ", ".join(f"{count:,} {name}" for name, count in counts.items() if count)
    hint = "; a forgotten text is not found: add it under another name" if change.left_out else ""
    return f"{change.name}: {told} (chunks){hint}"


def search(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Print the parts of documents that match a query, best first."""
    found = run_with_memory(args, lambda memory: memory.recall(args.query, k=args.limit, kinds=["document"]))
    return report_found(terminal, found)


def list_documents(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Print the documents with the number of their chunks."""
    found = run_with_memory(args, lambda memory: memory.list_documents())
    if not found and not terminal.json:
        terminal.err("no documents")
        return ExitCode.DONE
    written = [{"name": name, "chunks": chunks} for name, chunks in found.items()]
    return report(
        terminal, {"documents": written}, "\n".join(f"{each['chunks']:>6}  {each['name']}" for each in written)
    )


def remove(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Remove documents from the search, or delete them for good.

    Raises:
        MisuseError: if there is no such document.
    """

    async def act(memory: Memory) -> list[int]:
        return [await _remove(memory, name) for name in args.documents]

    async def _remove(memory: Memory, name: str) -> int:
        if args.forget:
            return await memory.forget_document(name, by=args.by)
        return (await memory.remove_document(name)).closed

    counts: Sequence[int] = run_with_memory(args, act)
    word = "forgot" if args.forget else "removed"
    lines = [
        f"{name}: {word} {format_count(count, 'chunk')}" for name, count in zip(args.documents, counts, strict=True)
    ]
    return report(terminal, {"chunks": dict(zip(args.documents, counts, strict=True))}, "\n".join(lines))


def rebuild(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Build the index again from the items of all owners."""
    count = run_with_memory(args, lambda memory: memory.reindex())
    return report(terminal, {"items": count}, f"indexed {format_count(count, 'item')}")
