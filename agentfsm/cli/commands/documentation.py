"""The subcommand that prints pages of the documentation, which are part of the package."""

from __future__ import annotations

import argparse
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Final

from agentfsm.cli.arguments import AddParser, add_command
from agentfsm.cli.codes import ExitCode
from agentfsm.core.errors import MisuseError

if TYPE_CHECKING:
    from agentfsm.cli.terminal import Terminal

PACKAGE: Final = Path(__file__).parents[2]
"""The folder of the package, which has SKILL.md."""


def add_commands(add: AddParser) -> None:
    """Add the commands of this module."""
    pages = add_command(add, docs)
    pages.add_argument("topic", metavar="PAGE", nargs="?", help="such as tools or tutorial/index (default: the guide)")
    pages.add_argument("--list", action="store_true", help="list the pages")


def find_pages() -> Path:
    """Return the folder of the pages: that of the installed package, or that of the repository."""
    installed = PACKAGE / "docs"
    return installed if installed.is_dir() else PACKAGE.parent / "docs"


def list_topics() -> dict[str, Path]:
    """Return the pages by their names, such as `tools` and `tutorial/3-crash`."""
    folder = find_pages()
    return {str(path.relative_to(folder).with_suffix("").as_posix()): path for path in sorted(folder.rglob("*.md"))}


def docs(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Print a page, or the guide for coding agents."""
    topics = list_topics()
    topic: str = (args.topic or "").removesuffix(".md")
    page = topics.get(topic) if topic else PACKAGE / "SKILL.md"
    if args.list:
        text = "\n".join(topics)
    elif page is None:
        near = ", ".join(get_close_matches(topic, topics, n=3, cutoff=0.5))
        hint = f"did you mean {near}? " if near else ""
        raise MisuseError(f"there is no page {topic!r}: {hint}`agentfsm docs --list` names all pages")
    else:
        text = page.read_text(encoding="utf-8").rstrip()
    if terminal.json:
        terminal.document({"topics": list(topics)} if args.list else {"topic": args.topic, "text": text})
    else:
        terminal.out(text)
    return ExitCode.DONE
