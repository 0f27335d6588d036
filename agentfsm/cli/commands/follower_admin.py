"""`agentfsm followers`: list the durable consumers of a store's journals, and drop one."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

import attrs

from agentfsm.cli.codes import ExitCode
from agentfsm.cli.render.formatting import format_count, format_duration
from agentfsm.cli.resolve.run_lookup import run_in_store
from agentfsm.cli.resolve.store_location import open_existing_store
from agentfsm.core.errors import MisuseError

if TYPE_CHECKING:
    from agentfsm.cli.terminal import Terminal
    from agentfsm.ports.stored import FollowerStatus


def list_followers(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """List the followers of the store, with their lag."""
    store = open_existing_store(args.store)

    async def act() -> tuple[tuple[FollowerStatus, ...], float]:
        return await store.followers(), await store.now()

    found, now = run_in_store(store, act)
    if terminal.json:
        terminal.document({"followers": [attrs.asdict(each) for each in found]})
        return ExitCode.DONE
    width = max([len(each.name) for each in found], default=0)
    for each in found:
        terminal.out(f"{each.name.ljust(width)}  {_format_lag(each, now)}")
    if not found:
        terminal.err("no followers")
    return ExitCode.DONE


def _format_lag(follower: FollowerStatus, now: float) -> str:
    waits = "" if follower.waiting_since is None else f", waiting {format_duration(now - follower.waiting_since)}"
    held = ", in use" if follower.held else ""
    return f"position {follower.position:,}, {format_count(follower.lag, 'run')} behind{waits}{held}"


def drop_follower(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Remove a follower with its position, so that the runs that it has not read may be pruned.

    Raises:
        MisuseError: if there is no such follower.
    """
    store = open_existing_store(args.store)
    if not run_in_store(store, lambda: store.drop_follower(args.name)):
        raise MisuseError(f"there is no follower {args.name!r}: `agentfsm followers list` lists them")
    if terminal.json:
        terminal.document({"dropped": args.name})
    else:
        terminal.out(f"dropped the follower {args.name}")
    return ExitCode.DONE
