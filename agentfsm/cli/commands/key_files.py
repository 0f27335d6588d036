"""The subcommands of `agentfsm keys`: create, list and remove API keys for `agentfsm serve`."""

from __future__ import annotations

import argparse
from importlib import import_module
from typing import TYPE_CHECKING, Any

import attrs

from agentfsm.cli.codes import ExitCode
from agentfsm.cli.parser import KEY_LIMITS

if TYPE_CHECKING:
    from agentfsm.cli.terminal import Terminal


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
