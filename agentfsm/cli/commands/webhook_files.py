"""`agentfsm webhooks`: check a file of webhooks, and list the events that were given up."""

from __future__ import annotations

import argparse
import os
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

import attrs

from agentfsm.cli.codes import ExitCode
from agentfsm.cli.render.formatting import format_count, format_time
from agentfsm.core.text_safety import one_line

if TYPE_CHECKING:
    from agentfsm.cli.terminal import Terminal

# Characters of a line about an event.
MAX_LINE_CHARS: Final = 300


def webhooks(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """List the webhooks of a file, and the events that were given up.

    Raises:
        MisuseError: if the file cannot be read, or is not valid.
    """
    reader: Any = import_module("agentfsm.serve.dialects.webhook_file")  # loading it takes a second
    file = reader.read_webhook_file(args.file)
    letters = reader.read_dead_letters(file.dead_letters)
    entries = {
        section: {
            name: {**entry.model_dump(exclude_none=True), "secret_is_set": entry.secret[2:-1] in os.environ}
            for name, entry in of_section.items()
        }
        for section, of_section in (("incoming", file.incoming), ("outgoing", file.outgoing))
    }
    if terminal.json:
        given_up = [attrs.asdict(each) for each in letters]
        terminal.document({**entries, "dead_letters": str(file.dead_letters), "given_up": given_up})
        return ExitCode.DONE
    for section, by_name in entries.items():
        for name, entry in by_name.items():
            where = f"/v1/hooks/{name}, user {entry['user']}" if section == "incoming" else entry["url"]
            tenant = f", tenant {entry['tenant']}" if "tenant" in entry else ""
            secret = "" if entry["secret_is_set"] else f"; {entry['secret']} is not set here"
            terminal.out(one_line(f"{section} {name}: {where}{tenant}{secret}", MAX_LINE_CHARS))
    terminal.out(f"{format_count(len(letters), 'event')} given up: {file.dead_letters}")
    for each in letters:
        line = f"{format_time(each.at)} {each.webhook} run {each.run_id}, version {each.version}: {each.error}"
        terminal.out(one_line(line, MAX_LINE_CHARS))
    return ExitCode.DONE
