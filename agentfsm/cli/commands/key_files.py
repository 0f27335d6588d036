"""The subcommands of `agentfsm keys`: create, list and remove API keys for `agentfsm serve`."""

from __future__ import annotations

import argparse
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import attrs

from agentfsm.cli.argument_types import parse_count
from agentfsm.cli.arguments import AddParser, add_command, add_group
from agentfsm.cli.codes import ExitCode

if TYPE_CHECKING:
    from agentfsm.cli.terminal import Terminal

# Options for the limits of a user of `serve`, by field.
KEY_LIMITS: Final = {
    "requests": ("--per-minute", "requests of the user in a minute"),
    "open_requests": ("--open-requests", "requests of the user at once, such as event streams, in one process"),
    "tokens": ("--tokens-per-minute", "tokens of the user's runs in a minute"),
    "runs": ("--running", "runs of the user at once"),
}


def add_commands(add: AddParser) -> None:
    """Add the commands of this module."""
    sub = add_group(add, "keys")
    plain = partial(add_command, sub, has_store=False)
    added = plain(add_key, name="add", text="create a key, print it once, and store its hash")
    listed = plain(list_keys, name="list", text="list whose keys a file has")
    removed = plain(remove_keys, name="remove", text="remove the keys of a user; a running server refuses them at once")
    for takes in (added, listed, removed):
        takes.add_argument("file", metavar="FILE", type=Path, help="JSON file with the hashes of the keys")
    for takes in (added, removed):
        takes.add_argument("user", metavar="USER", help="user for whom the key acts")
        takes.add_argument("--tenant", help="tenant of the user")
    added.add_argument(
        "--scope",
        metavar="SCOPE",
        action="append",
        choices=["run", "approve", "admin"],
        help='"run" (the default), "approve" or "admin"; may be given several times',
    )
    for option, text in KEY_LIMITS.values():
        added.add_argument(option, metavar="N", type=parse_count, help=text)
    added.add_argument(
        "--four-eyes", action="store_true", help="the user may not approve or settle a call that it has shaped"
    )
    added.add_argument("--role", action="append", default=[], help="role of the user for permissions of tools")


def add_key(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Create a key."""
    access = _load_access()
    scopes = args.scope or ["run"]
    limits = {name: getattr(args, option.strip("-").replace("-", "_")) for name, (option, _) in KEY_LIMITS.items()}
    caller = access.Caller(
        user=args.user, tenant=args.tenant, scopes=scopes, roles=args.role, limits=limits, four_eyes=args.four_eyes
    )
    key = access.add_key(args.file, caller)
    terminal.err(f"{args.file} has its hash; the key is shown only now")
    if terminal.json:
        terminal.document({"key": key, **_build_json(caller)})
    else:
        terminal.out(key)
    return ExitCode.DONE


def list_keys(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """List the callers of a file."""
    callers = _load_access().APIKeys(args.file).callers
    if terminal.json:
        terminal.document({"keys": [_build_json(each) for each in callers]})
    for each in () if terminal.json else callers:
        terminal.out(f"{each.user}  tenant: {each.tenant or '-'}  scopes: {', '.join(sorted(each.scopes))}")
    return ExitCode.DONE


def remove_keys(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Remove the keys of a user."""
    access = _load_access()
    count = access.remove_keys(args.file, args.user, args.tenant)
    if not count:
        others = sorted({each.tenant or "" for each in access.APIKeys(args.file).callers if each.user == args.user})
        own = f"in the tenant {args.tenant}" if args.tenant else "without a tenant"
        options = " or ".join([f"with --tenant {each}" if each else "without --tenant" for each in others])
        hint = f"its keys are removed {options}" if others else "`agentfsm keys list` tells the users"
        terminal.err(f"{args.user} has no key {own} in {args.file}: {hint}")
    if terminal.json:
        terminal.document({"removed": count})
    else:
        terminal.out(f"removed {count} {'key' if count == 1 else 'keys'} of {args.user}")
    return ExitCode.DONE if count else ExitCode.FAILED


def _load_access() -> Any:
    return import_module("agentfsm.serve.access")


def _build_json(caller: Any) -> dict[str, Any]:
    names = {"user": caller.user, "tenant": caller.tenant}
    rights = {"scopes": sorted(caller.scopes), "roles": list(caller.roles), "four_eyes": caller.four_eyes}
    return {**names, **rights, "limits": attrs.asdict(caller.limits)}
