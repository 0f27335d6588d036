"""`agentfsm schedule`: recurring starts of runs."""

from __future__ import annotations

import argparse
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar, get_args

import anyio
import attrs

from agentfsm.cli.argument_types import parse_count, parse_datetime
from agentfsm.cli.arguments import (
    AddParser,
    add_agent,
    add_command,
    add_group,
    add_identity,
    add_mcp_option,
    add_metadata,
)
from agentfsm.cli.codes import ExitCode
from agentfsm.cli.render.formatting import format_count
from agentfsm.cli.resolve.agent_target import join_target, load_agent, split_target
from agentfsm.cli.resolve.command_hint import CommandHint
from agentfsm.cli.resolve.mcp_servers import join_servers
from agentfsm.cli.resolve.run_lookup import resolve_agent, run_in_store
from agentfsm.cli.resolve.store_location import open_existing_store
from agentfsm.core.errors import MisuseError
from agentfsm.core.text_safety import one_line
from agentfsm.schedules.schedule import DATE_PLACEHOLDER, MissedPolicy
from agentfsm.schedules.schedule_client import Schedules

if TYPE_CHECKING:
    from datetime import datetime

    from agentfsm.agents.agent import Agent
    from agentfsm.cli.terminal import Terminal
    from agentfsm.schedules.schedule import Schedule
    from agentfsm.schedules.schedule_client import BackfilledRuns

T = TypeVar("T")
# Characters of the name of an agent in the list.
MAX_AGENT_CHARS: Final = 80
# Characters of a prompt that are shown.
MAX_PROMPT_CHARS: Final = 500


def add_commands(add: AddParser) -> None:
    """Add the commands of this module."""
    sub = add_group(
        add,
        "schedule",
    )
    added = add_command(sub, add_schedule, name="add", text="add a schedule, whose runs workers start")
    _add_schedule_name(added)
    add_agent(added)
    added.add_argument("prompt", help=f"the task, or the inputs of a flow; {DATE_PLACEHOLDER} stands for the time")
    added.add_argument(
        "--cron",
        metavar="EXPRESSION",
        required=True,
        help="minute, hour, day of the month, month and day of the week, for example '0 3 * * *'",
    )
    added.add_argument(
        "--tz", metavar="ZONE", default="UTC", help="time zone, for example Europe/Vienna (default: %(default)s)"
    )
    added.add_argument(
        "--missed",
        choices=get_args(MissedPolicy),
        default="latest",
        help="which times without a worker are made up for (default: %(default)s)",
    )
    add_identity(added)
    add_metadata(added, "each run")
    added.add_argument("--replace", action="store_true", help="replace another schedule of this name")
    add_command(sub, list_schedules, name="list", text="list the schedules of the store with their next times")
    for act, name, does in (
        (show_schedule, "show", "print a schedule, with the times that could not get their run"),
        (remove_schedule, "remove", "remove a schedule; its runs stay"),
        (pause_schedule, "pause", "start no runs until the schedule is resumed"),
        (resume_schedule, "resume", "start runs again, from the next time on"),
    ):
        _add_schedule_name(add_command(sub, act, name=name, text=does))
    following = add_command(sub, print_next_times, name="next", text="print the next times")
    _add_schedule_name(following)
    following.add_argument(
        "--count", metavar="N", type=parse_count, default=5, help="number of times (default: %(default)s)"
    )
    backfill = add_command(
        sub, backfill_schedule, name="backfill", text="create the runs of a span of time in the past"
    )
    _add_schedule_name(backfill)
    backfill.add_argument(
        "--from",
        dest="start",
        metavar="TIME",
        type=parse_datetime,
        required=True,
        help="first moment, such as 2026-01-31 or 2026-01-31T18:00, in the schedule's zone unless it has an offset",
    )
    backfill.add_argument(
        "--to", dest="end", metavar="TIME", type=parse_datetime, required=True, help="end, which is not included"
    )
    backfill.add_argument(
        "--agent", metavar="module:agent", help="use this agent instead of the one that the schedule names"
    )
    add_mcp_option(backfill, "use the MCP servers of this file instead of those that the schedule was added with")


def _add_schedule_name(takes: argparse.ArgumentParser) -> None:
    takes.add_argument("name", metavar="NAME", help="name of the schedule")


def add_schedule(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Add a schedule for an agent."""
    agent, location = resolve_agent(args, terminal)

    async def act() -> tuple[Schedule, datetime]:
        async with agent:
            schedules = Schedules(agent.store)
            added = await schedules.add(
                agent,
                args.name,
                cron=args.cron,
                prompt=args.prompt,
                tz=args.tz,
                missed=args.missed,
                user=args.user,
                tenant=args.tenant,
                roles=args.role,
                metadata=dict(args.metadata),
                replace=args.replace,
            )
            (first,) = await schedules.next_times(args.name, 1)
            return added, first

    added, first = anyio.run(act)
    command = CommandHint(location=location).build(f"worker {join_target(*split_target(agent.target))}")
    terminal.err(f"added; any worker of the agent starts the runs: {command}")
    if terminal.json:
        terminal.document(_describe(added, first))
    else:
        terminal.out(_format_line(added, first))
    return ExitCode.DONE


def list_schedules(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """List the schedules of the store with their next times."""

    async def act(schedules: Schedules) -> list[tuple[Schedule, datetime]]:
        found = await schedules.list()
        return [(each, (await schedules.next_times(each.name, 1))[0]) for each in found]

    found = _act_in_store(args, act)
    if terminal.json:
        terminal.document({"schedules": [_describe(*each) for each in found]})
        return ExitCode.DONE
    for each in found:
        terminal.out(_format_line(*each))
    if not found:
        terminal.err("no schedules")
    return ExitCode.DONE


def show_schedule(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Print a schedule: its definition, its next time, and the times that another run kept from having theirs."""

    async def act(schedules: Schedules) -> tuple[Schedule, datetime]:
        return await schedules.get(args.name), (await schedules.next_times(args.name, 1))[0]

    found, first = _act_in_store(args, act)
    if terminal.json:
        terminal.document(_describe(found, first))
        return ExitCode.DONE
    terminal.out(_format_line(found, first))
    terminal.out(f"prompt: {one_line(found.prompt, MAX_PROMPT_CHARS)}")
    owner = [f"{name} {value}" for name, value in (("user", found.user), ("tenant", found.tenant)) if value]
    if owner:
        terminal.out(f"for: {', '.join(owner)}")
    if found.conflicts:
        count = format_count(found.conflicts, "time")
        terminal.out(
            f"conflicts: {count} got no run, because another run had its id; the newest is {found.last_conflict}"
        )
        terminal.err("look at that run, delete it, and create the run of its time with `agentfsm schedule backfill`")
    return ExitCode.DONE


def remove_schedule(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Remove a schedule."""
    _act_in_store(args, lambda schedules: schedules.remove(args.name))
    return _report(terminal, "removed", args.name)


def pause_schedule(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Pause a schedule."""
    _act_in_store(args, lambda schedules: schedules.pause(args.name))
    return _report(terminal, "paused", args.name)


def resume_schedule(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Resume a schedule."""
    _act_in_store(args, lambda schedules: schedules.resume(args.name))
    return _report(terminal, "resumed", args.name)


def print_next_times(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Print the next times of a schedule."""
    found = _act_in_store(args, lambda schedules: schedules.next_times(args.name, args.count))
    times = [_format_date(each) for each in found]
    if terminal.json:
        terminal.document({"schedule": args.name, "next": times})
    else:
        terminal.out("\n".join(times))
    return ExitCode.DONE


def backfill_schedule(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Create the runs of a schedule for a span of time in the past.

    Raises:
        MisuseError: if the schedule does not name its agent.
    """
    schedule = _act_in_store(args, lambda schedules: schedules.get(args.name))
    target, files = split_target(args.agent or schedule.target)
    if not target:
        raise MisuseError(
            f"schedule {args.name!r} does not name its agent, since it was added from Python by an Agent without "
            "target='module:agent': name it with --agent module:agent"
        )
    files = tuple(args.mcp) or files
    store = open_existing_store(args.store)
    agent: Agent = join_servers(load_agent(target), files, terminal).with_(
        store=store, target=join_target(target, files)
    )

    async def act() -> BackfilledRuns:
        async with agent:
            return await Schedules(store).backfill(agent, args.name, args.start, args.end)

    found = anyio.run(act)
    if terminal.json:
        terminal.document({name: [*ids] for name, ids in attrs.asdict(found).items()})
        return ExitCode.DONE
    for run_id in found.created:
        terminal.out(run_id)
    created, existing = (format_count(len(each), "run") for each in (found.created, found.existing))
    terminal.err(f"created {created}; {existing} existed already")
    for run_id in found.taken:
        terminal.err(f"no run for {run_id}: another run has this id; delete it, then repeat the command")
    return ExitCode.DONE


def _act_in_store(args: argparse.Namespace, act: Callable[[Schedules], Awaitable[T]]) -> T:
    store = open_existing_store(args.store)
    return run_in_store(store, lambda: act(Schedules(store)))


def _report(terminal: Terminal, done: str, name: str) -> ExitCode:
    if terminal.json:
        terminal.document({done: name})
    else:
        terminal.out(f"{done} the schedule {name}")
    return ExitCode.DONE


def _format_line(schedule: Schedule, first: datetime) -> str:
    following = "paused" if schedule.paused else f"next {_format_date(first)}"
    agent, cron = one_line(schedule.agent, MAX_AGENT_CHARS), " ".join(schedule.cron.split())
    return f"{schedule.name}  {agent}  {cron} {schedule.tz}  {following}  missed: {schedule.missed}"


def _describe(schedule: Schedule, first: datetime) -> dict[str, Any]:
    return {**attrs.asdict(schedule), "next": None if schedule.paused else _format_date(first)}


def _format_date(moment: datetime) -> str:
    return moment.isoformat(timespec="minutes")
