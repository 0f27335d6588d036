"""The subcommands that fork and replay runs, and compare two versions or two runs."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Final

import anyio
import attrs

from agentfsm.agents.admission import admit
from agentfsm.agents.runs import Runs
from agentfsm.cli.argument_types import parse_new_id
from agentfsm.cli.arguments import AddParser, add_agent_option, add_command, add_run_id
from agentfsm.cli.codes import ExitCode
from agentfsm.cli.render.formatting import NOTE_CHARS, fit_with_length
from agentfsm.cli.render.json_documents import build_run_json
from agentfsm.cli.resolve.run_lookup import resolve_run, run_in_store
from agentfsm.cli.resolve.store_location import open_existing_store
from agentfsm.cli.session.attended_run import build_hint
from agentfsm.cli.terminal import user_name
from agentfsm.core.codec import message_to_json
from agentfsm.core.errors import MisuseError
from agentfsm.core.text_safety import strip_unsafe
from agentfsm.journal.diff import difference

if TYPE_CHECKING:
    from agentfsm.cli.terminal import Terminal
    from agentfsm.core.run import Run
    from agentfsm.engine.replay import Replay
    from agentfsm.journal.diff import Difference

# A terminal that is narrower than this wraps the lines of a difference.
MIN_COLUMNS: Final = 60


def add_commands(add: AddParser) -> None:
    """Add the commands of this module."""
    fork_options = add_command(add, fork)
    add_run_id(fork_options)
    fork_options.add_argument(
        "--at", metavar="VERSION", type=int, help="number of events to copy (default: all but a final one)"
    )
    fork_options.add_argument("--prompt", help="replace the first message")
    fork_options.add_argument("--id", dest="new_id", type=parse_new_id, help="id of the new run")
    fork_options.add_argument(
        "--withhold", action="store_true", help="refuse calls of tools that are not read-only; else the new run acts"
    )
    replay_options = add_command(add, replay)
    add_run_id(replay_options)
    for takes in (fork_options, replay_options):
        add_agent_option(takes)
    diff_options = add_command(add, diff)
    add_run_id(diff_options)
    diff_options.add_argument("other", nargs="?", metavar="OTHER", help="id of the other run (default: the same run)")
    diff_options.add_argument(
        "--at", metavar="VERSION", type=int, help="version of the first run (default: the newest)"
    )
    diff_options.add_argument(
        "--to", metavar="VERSION", type=int, help="version of the second run (default: the newest)"
    )


def fork(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Start a run from the first events of another.

    Raises:
        MisuseError: if the run is that of a sub-agent and `--agent` is missing, or it is over at that version.
    """
    found = resolve_run(args, terminal)
    if found.run.header.parent is not None and args.agent is None:
        raise MisuseError(
            f"run {found.run.id} belongs to run {found.run.header.parent}: fork that one, or name the agent of "
            "the fork with --agent module:name",
        )

    async def act() -> Run:
        async with found.agent as agent:
            prompt = None if args.prompt is None else admit(args.prompt, user_name())
            return await agent.fork(
                args.id, at=args.at, prompt=prompt, id=args.new_id, withhold=args.withhold, by=user_name()
            )

    new = anyio.run(act)
    hint = build_hint(new, found.agent, found.store_location)
    terminal.err(f"forked from {args.id} at version {new.header.forked_at}. To continue: {hint.build_resume(new.id)}")
    terminal.err(
        "The fork withholds calls of tools that are not read-only: their results show the calls."
        if args.withhold
        else "The fork acts: its tools are called with their effects. For a fork that only shows them, add --withhold."
    )
    if terminal.json:
        header = new.header
        origin = {"forked_from": header.forked_from, "forked_at": header.forked_at, "withhold": header.withhold}
        terminal.document(build_run_json(new, hint) | origin)
    else:
        terminal.out(new.id)
    return ExitCode.DONE


def replay(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Replay a run, and check each request."""
    found = resolve_run(args, terminal)

    async def act() -> Replay:
        async with found.agent as agent:
            return await agent.replay(args.id)

    result = anyio.run(act)
    if terminal.json:
        divergences = [attrs.asdict(each) for each in result.divergences]
        terminal.document({"id": args.id, "checked": result.checked, "divergences": divergences})
    else:
        terminal.out(f"{result.checked} requests checked, {len(result.divergences)} of them would differ now")
        for each in result.divergences:
            terminal.out(f"  turn {each.turn}, version {each.version}: {' and '.join(each.what)}")
    return ExitCode.DONE if result.is_faithful else ExitCode.FAILED


def diff(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Compare two versions of a run, or two runs. Lines are cut to fit the terminal; `--json` writes all.

    Raises:
        MisuseError: if neither a second run nor a version is named.
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
    columns = NOTE_CHARS if terminal.width is None else max(terminal.width, MIN_COLUMNS)
    for line in found.lines():
        terminal.out(fit_with_length(strip_unsafe(line), columns))
    if not found:
        terminal.err("no difference")
    return ExitCode.DONE
