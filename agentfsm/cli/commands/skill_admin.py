"""The commands `agentfsm skills check` and `agentfsm skills pin`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from agentfsm.cli.arguments import AddParser, add_command, add_group
from agentfsm.cli.codes import ExitCode
from agentfsm.cli.resolve.mcp_servers import APPROVAL_QUESTION

if TYPE_CHECKING:
    from agentfsm.cli.terminal import Terminal

_ANSWERS = {"y": "y", "yes": "y", "n": "n", "no": "n"}


def add_commands(add: AddParser) -> None:
    """Add the commands of this module."""
    sub = add_group(add, "skills")
    check_options = add_command(sub, check, text="list the skills of a folder with their flaws", has_store=False)
    pin_options = add_command(
        sub, pin, text="show skills as far as not yet approved, and ask for approval", has_store=False
    )
    for takes in (check_options, pin_options):
        takes.add_argument("folder", metavar="FOLDER", help="a folder of skills, or a single skill")
    check_options.add_argument("--pins", metavar="FILE", help="fail if a skill is not approved in this file")
    pin_options.add_argument(
        "--pins", metavar="FILE", default="skill-pins.json", help="the file (default: %(default)s)"
    )
    pin_options.add_argument("--yes", action="store_true", help="approve everything without asking")


def check(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """List the skills of a folder with their flaws. An error, or one that is not approved as it is now, fails."""
    from agentfsm.skills import PinFile, Skill  # noqa: PLC0415  an extra
    from agentfsm.skills.skill import find_difference, list_folders, read_skill  # noqa: PLC0415  as above

    pins = PinFile(args.pins).read() if args.pins else None
    reports: list[dict[str, Any]] = []
    for folder in list_folders(args.folder):
        found = read_skill(folder)
        findings = found.findings if isinstance(found, Skill) else found
        report: dict[str, Any] = {
            "folder": str(folder),
            "usable": isinstance(found, Skill),
            "digest": None,
            "pin": None,
        }
        if isinstance(found, Skill):
            report |= {"digest": found.digest, "pin": None if pins is None else find_difference(found, pins)}
        reports.append(report | {"findings": [f"{each.severity}: {each.message}" for each in findings]})
    if terminal.json:
        terminal.document({"skills": reports})
    for report in [] if terminal.json else reports:
        terminal.out(f"{report['folder']}: {report['digest'] or 'cannot be used'}")
        for line in (*report["findings"], *([report["pin"]] if report["pin"] else [])):
            terminal.out(f"  {line}")
    return ExitCode.DONE if all(each["usable"] and not each["pin"] for each in reports) else ExitCode.FAILED


def pin(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Show each skill that is not approved as it is now, or what has changed, and ask."""
    from agentfsm.skills import Pin, PinFile, Skill  # noqa: PLC0415  an extra
    from agentfsm.skills.skill import find_difference, list_folders, pin_key, read_skill  # noqa: PLC0415  as above

    file, end = PinFile(args.pins), ExitCode.DONE
    reports: dict[str, str] = {}
    for folder in list_folders(args.folder):
        skill = read_skill(folder)
        if not isinstance(skill, Skill):
            reports[folder.name], end = f"cannot be used: {skill[0].message}", ExitCode.FAILED
            continue
        stored = file.read()
        if find_difference(skill, stored) is None:
            reports[skill.name] = "already approved"
            continue
        before, now = stored.get(pin_key(skill.name), Pin()).items, skill.build_pin()
        for name, text in now.items.items():
            if before.get(name) != text:
                terminal.err(before[name].diff(text, name) if name in before else f"New: {name}\n{text.text}")
        for name in before.keys() - now.items.keys():
            terminal.err(f"Removed: {name}")
        if not (args.yes or terminal.can_ask):
            terminal.err("there is no terminal to ask at: run the command in one, or approve with --yes")
            return ExitCode.USAGE
        if args.yes or terminal.ask_choice(APPROVAL_QUESTION, _ANSWERS) == "y":
            file.write(pin_key(skill.name), now)
            reports[skill.name] = "approved"
        else:
            reports[skill.name], end = "not approved", ExitCode.FAILED
    if terminal.json:
        terminal.document({"skills": reports})
    for name, word in {} if terminal.json else reports.items():
        terminal.out(f"{name}: {word}")
    return end
