"""The subcommands that travel in time: fork a run, replay it, compare two versions."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

import anyio
import attrs

from agentfsm.cli.codes import ExitCode
from agentfsm.cli.render.json_documents import build_run_json
from agentfsm.cli.resolve.run_lookup import resolve_run, run_in_store
from agentfsm.cli.resolve.store_location import open_existing_store
from agentfsm.cli.session.attended_run import build_hint
from agentfsm.core.codec import message_to_json
from agentfsm.core.diff import difference
from agentfsm.core.errors import MisuseError
from agentfsm.runs import Runs

if TYPE_CHECKING:
    from agentfsm.cli.terminal import Terminal
    from agentfsm.core.diff import Difference
    from agentfsm.core.run import Run
    from agentfsm.engine.replay import Replay


def fork(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Begin a run with the first events of another.

    Raises:
        MisuseError: when the run works for another one, or is over at that version.
    """
    found = resolve_run(args, terminal)
    if found.run.header.parent is not None and args.agent is None:
        raise MisuseError(
            f"run {found.run.id} works for run {found.run.header.parent}: fork that one, or say with --agent "
            "module:agent which agent its fork is of",
        )

    async def act() -> Run:
        async with found.agent as agent:
            return await agent.fork(args.id, at=args.at, prompt=args.prompt, id=args.new_id)

    made = anyio.run(act)
    way = build_hint(made, found.agent, found.store_location)
    terminal.err(f"forked from {args.id} at version {made.header.forked_at}. To go on: {way.build_resume(made.id)}")
    if terminal.json:
        origin = {"forked_from": made.header.forked_from, "forked_at": made.header.forked_at}
        terminal.document(build_run_json(made, way) | origin)
    else:
        terminal.out(made.id)
    return ExitCode.DONE


def replay(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Fold a run again, and check each request."""
    found = resolve_run(args, terminal)

    async def act() -> Replay:
        async with found.agent as agent:
            return await agent.replay(args.id)

    made = anyio.run(act)
    if terminal.json:
        divergences = [attrs.asdict(each) for each in made.divergences]
        terminal.document({"id": args.id, "checked": made.checked, "divergences": divergences})
    else:
        terminal.out(f"{made.checked} requests checked, {len(made.divergences)} of them would not be the same now")
        for each in made.divergences:
            terminal.out(f"  turn {each.turn}, version {each.version}: {' and '.join(each.what)}")
    return ExitCode.DONE if made.is_faithful else ExitCode.FAILED


def diff(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Tell what differs between two versions of a run, or two runs.

    Raises:
        MisuseError: when there is but one to compare.
    """
    if args.other is None and args.at is None:
        raise MisuseError(f"nothing to compare: name another run, or a version of {args.id} with --at")
    store = open_existing_store(args.store)

    async def act() -> Difference:
        runs = Runs(store)
        before = await runs.load(args.id, at=args.at)
        return difference(before, await runs.load(args.other or args.id, at=args.to))

    found = run_in_store(store, act)
    if terminal.json:
        terminal.document(
            {
                "shared": found.shared,
                "removed": [message_to_json(message) for message in found.removed],
                "added": [message_to_json(message) for message in found.added],
                "changed": attrs.asdict(found)["changed"],
                "calls": found.calls,
            },
        )
        return ExitCode.DONE
    for line in found.lines():
        terminal.out(line)
    if not found:
        terminal.err("no difference")
    return ExitCode.DONE
