"""The subcommands that remove runs for good, and `agentfsm followers`: the readers of journals that keep runs."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Final

import attrs

from agentfsm.agents.runs import Runs
from agentfsm.cli.argument_types import parse_date, parse_days
from agentfsm.cli.arguments import AddParser, add_command, add_group
from agentfsm.cli.codes import ExitCode
from agentfsm.cli.render.formatting import format_count, format_duration, format_time
from agentfsm.cli.resolve.run_lookup import run_in_store
from agentfsm.cli.resolve.store_location import open_existing_store
from agentfsm.core.errors import MisuseError
from agentfsm.stores.sqlite.store import SQLiteStore
from agentfsm.telemetry.totals import catch_up_totals, mark_pruned

if TYPE_CHECKING:
    from agentfsm.cli.terminal import Terminal
    from agentfsm.ports.stored import FollowerStatus

DAY_S: Final = 86_400.0


def add_commands(add: AddParser) -> None:
    """Add the commands of this module."""
    _add_retention(add)
    _add_followers(add)


def _add_retention(add: AddParser) -> None:
    delete_options = add_command(add, delete)
    delete_options.add_argument("id", nargs="?", metavar="RUN", help="id of the run")
    delete_options.add_argument("--session", help="the conversation whose runs are removed")
    prune_options = add_command(add, prune)
    long = prune_options.add_mutually_exclusive_group(required=True)
    long.add_argument(
        "--before",
        metavar="TIME",
        type=parse_date,
        help="they ended before this time: a date such as 2026-01-31, or seconds since 1970",
    )
    long.add_argument(
        "--older-than", metavar="DAYS", type=parse_days, help="they ended this long ago, by the store's clock"
    )
    prune_options.add_argument("--unread", action="store_true", help="also runs that a follower has not read")
    add_command(add, compact)


def _add_followers(add: AddParser) -> None:
    sub = add_group(add, "followers")
    add_command(sub, list_followers, name="list", text="list the followers of the store with their lag")
    drop = add_command(sub, drop_follower, name="drop", text="remove a follower, which keeps runs from being pruned")
    drop.add_argument("name", metavar="NAME", help="name of the follower")


def delete(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Remove a run with the runs of its sub-agents, or a whole session.

    Raises:
        MisuseError: if neither or both are named, or there is no such session.
    """
    if (args.id is None) == (args.session is None):
        raise MisuseError("expected either the id of a run, or a session with --session")
    store = open_existing_store(args.store)
    if args.session is not None:
        count = run_in_store(store, lambda: Runs(store).delete_session(args.session))
        if not count:
            raise MisuseError(f"there is no run of the session {args.session!r}: `agentfsm runs` lists the runs")
        return _report_removed(terminal, count, f"the session {args.session}, {format_count(count, 'run')}")
    count = run_in_store(store, lambda: Runs(store).delete(args.id))
    below = f", and {format_count(count - 1, 'run')} of its sub-agents" if count > 1 else ""
    return _report_removed(terminal, count, f"run {args.id}{below}")


def prune(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Remove runs that ended long ago."""
    store = open_existing_store(args.store)

    async def act() -> tuple[int, float]:
        before = await store.now() - args.older_than * DAY_S if args.before is None else args.before
        await catch_up_totals(store)
        if count := await Runs(store).prune(before, unread=args.unread):
            await mark_pruned(store, before)
        return count, before

    count, before = run_in_store(store, act)
    return _report_removed(terminal, count, f"{format_count(count, 'run')} that ended before {format_time(before)}")


def compact(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Return the space of removed runs to the disk.

    Raises:
        MisuseError: if the store is not a SQLite file.
    """
    store = open_existing_store(args.store)
    if not isinstance(store, SQLiteStore):
        raise MisuseError("only a SQLite file can be compacted: PostgreSQL and Redis reclaim space themselves")
    freed = run_in_store(store, store.compact)
    if terminal.json:
        terminal.document({"freed_bytes": freed})
    else:
        terminal.out(f"{store.path} is {format_count(freed, 'byte')} smaller")
    return ExitCode.DONE


def _report_removed(terminal: Terminal, count: int, description: str) -> ExitCode:
    if terminal.json:
        terminal.document({"removed": count})
    else:
        terminal.out(f"removed {description}")
    return ExitCode.DONE


# Followers: the durable consumers of the journals, which keep runs from being pruned.


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
        waits = "" if each.waiting_since is None else f", waiting {format_duration(now - each.waiting_since)}"
        lag = f"position {each.position:,}, {format_count(each.lag, 'run')} behind{waits}"
        terminal.out(f"{each.name.ljust(width)}  {lag}{', in use' if each.held else ''}")
    if not found:
        terminal.err("no followers")
    return ExitCode.DONE


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
