"""`agentfsm audit --seal`, `--verify` and `--head`: seal the journals of a store, and find later changes."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Final

import attrs

from agentfsm.cli.codes import ExitCode
from agentfsm.cli.render.formatting import format_count, format_time
from agentfsm.cli.resolve.run_lookup import run_in_store
from agentfsm.cli.resolve.store_location import open_existing_store
from agentfsm.journal.seals import KEY_VARIABLE, Fault, SealCheck, SealFile
from agentfsm.stores.home import HOME_FOLDER

if TYPE_CHECKING:
    from agentfsm.cli.terminal import Terminal

DEFAULT_SEALS: Final = f"{HOME_FOLDER}/seals.jsonl"


def seal_runs(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Seal the runs that changed since the last time; with `--follow`, until interrupted."""
    store = open_existing_store(args.store)
    seals = SealFile(Path(args.seals))

    async def act() -> int:
        count = 0
        async for made in seals.seal(store, wait=args.follow):
            count += 1
            if not terminal.json:
                terminal.out(f"{made.run}  version {made.version}  {made.hash}")
        return count

    count = run_in_store(store, act)
    if terminal.json:
        terminal.document({"sealed": count})
    elif not count:
        terminal.err("nothing new to seal")
    _warn_without_key(seals, terminal)
    return ExitCode.DONE


def show_head(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Show the end of the file of seals, to be kept elsewhere."""
    head = SealFile(Path(args.seals)).head()
    if terminal.json:
        terminal.document(attrs.asdict(head))
    else:
        terminal.out(f"{head.head}  {format_count(head.seals, 'seal')}")
    return ExitCode.DONE


def verify_runs(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Compare a run, or all that were sealed, with their seals.

    Returns:
        FAILED if one differs, or is missing without `--allow-missing`.
    """
    store = open_existing_store(args.store)
    seals = SealFile(Path(args.seals))

    async def act() -> list[SealCheck]:
        return [each async for each in seals.verify(store, args.id, head=args.since_head)]

    found = run_in_store(store, act)
    faults = [each for each in found if each.fault is not None]
    if terminal.json:
        terminal.document({"checked": len(found), "faults": [attrs.asdict(each) for each in faults]})
    else:
        for each in faults:
            terminal.out(f"{each.run_id}  {_describe(each)}")
        unsealed = sum(each.unsealed for each in found)
        after = f"; {format_count(unsealed, 'event')} came after their seals" if unsealed else ""
        terminal.out(f"{format_count(len(found), 'run')} checked, {format_count(len(faults), 'fault')}{after}")
    _warn_without_key(seals, terminal)
    allowed = {Fault.MISSING} if args.allow_missing else set()
    return ExitCode.FAILED if any(each.fault not in allowed for each in faults) else ExitCode.DONE


def _describe(check: SealCheck) -> str:
    if check.fault in {Fault.MISSING, Fault.UNREADABLE}:
        return f"{check.fault}: it was sealed up to version {check.sealed}"
    part = (
        f"events {check.intact + 1} to {check.changed_by}"
        if check.intact
        else f"the header or events 1 to {check.changed_by}"
    )
    return f"{check.fault}: {part} are not those that were sealed on {format_time(check.sealed_at)}"


def _warn_without_key(seals: SealFile, terminal: Terminal) -> None:
    if not seals.key:
        terminal.err(f"without {KEY_VARIABLE}, who can write the store and {seals.path} can make both agree again")
