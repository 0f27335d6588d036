"""`agentfsm rollout` and `agentfsm release`: start roll-outs, change, watch and end them, and compare releases."""

from __future__ import annotations

import argparse
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

import anyio
import attrs

from agentfsm.cli.argument_types import parse_weight
from agentfsm.cli.arguments import AUTHOR_HELP, AddParser, add_command, add_group
from agentfsm.cli.codes import ExitCode
from agentfsm.cli.render.formatting import format_count, format_time
from agentfsm.cli.resolve.agent_target import is_target, load_target
from agentfsm.cli.resolve.run_lookup import attach_rollout_store, run_in_store
from agentfsm.cli.resolve.store_location import create_store, open_existing_store, resolve_location
from agentfsm.cli.session.signals import InterruptibleRunner
from agentfsm.cli.terminal import user_name
from agentfsm.core.errors import MisuseError, PartlyDoneError, StoreError
from agentfsm.core.usage import format_usd
from agentfsm.releases import Release, Rollout, RolloutChange, RolloutControl
from agentfsm.releases.arm_results import read_results
from agentfsm.releases.release import RELEASES, load_release
from agentfsm.releases.rollout_guard import abort_runs, watch_rollout
from agentfsm.releases.rollout_log import UNIT_KINDS, list_rollouts

if TYPE_CHECKING:
    from agentfsm.cli.terminal import Terminal
    from agentfsm.releases import ArmResults

T = TypeVar("T")

_PAGE: Final = 1_000


def add_commands(add: AddParser) -> None:
    """Add the commands of this module."""
    _add_rollout(add)
    _add_release(add)


def _add_rollout(add: AddParser) -> None:
    sub = add_group(add, "rollout")
    begins = add_command(sub, start, text="start a roll-out of releases, or an experiment such as a flag")
    begins.add_argument("name", metavar="module:rollout|NAME", help="a Rollout, or the name of an experiment")
    begins.add_argument("--unit", choices=UNIT_KINDS, default="user", help="of an experiment (default: %(default)s)")
    begins.add_argument(
        "--holdout", metavar="PERCENT", type=float, default=0.0, help="share of the users that always get the base"
    )
    begins.add_argument(
        "--back-if",
        metavar="RULE",
        action="append",
        default=[],
        help='rule of automatic roll-backs, such as "failures 5%%" or "time>30 +5%%"; may be given several times',
    )
    begins.add_argument(
        "--target",
        metavar="ARM:CONDITIONS",
        action="append",
        default=[],
        help="runs that get an arm whatever its weight is, such as new:role=tester; may be given several times",
    )
    changes = add_command(sub, weights, text="change the weights; only the users of the difference get another arm")
    changes.add_argument("name", metavar="NAME", help="name of the roll-out")
    for each in (begins, changes):
        each.add_argument("weights", metavar="ARM=PERCENT", type=parse_weight, nargs="+", help="100 percent in all")
    aims = add_command(
        sub,
        target,
        text="change whose runs get an arm whatever its weight is, such as those of testers",
    )
    aims.add_argument("name", metavar="NAME", help="name of the roll-out")
    aims.add_argument(
        "targets",
        metavar="ARM:CONDITIONS",
        nargs="*",
        help="all targets from now on, such as 'new:role=tester|qa'; without any they end",
    )
    shows = add_command(sub, status, text="print the weights and the results of the arms")
    shows.add_argument("name", metavar="NAME", nargs="?", help="only this roll-out")
    backs = add_command(sub, back, text="return to the weights that were in effect before")
    backs.add_argument("--arm", metavar="ARM", help="give the weight of this arm to the base")
    kills = add_command(sub, kill, text="give the base to all, and end the roll-out")
    for each in (backs, kills):
        each.add_argument("--abort-running", action="store_true", help="cancel open runs of arms without weight")
    logs = add_command(sub, log, text="print all changes with their time, author and reason")
    watches = add_command(sub, watch, text="check the rules of a roll-out, and roll back by them, until interrupted")
    watches.add_argument("--once", action="store_true", help="check once")
    for each in (backs, kills, logs, watches):
        each.add_argument("name", metavar="NAME", help="name of the roll-out")
    for each in (begins, changes, aims, backs, kills):
        each.add_argument("--reason", metavar="TEXT", required=True, help="the reason, for the log")
        each.add_argument("--by", metavar="NAME", default=user_name() or "unknown", help=AUTHOR_HELP)


def _add_release(add: AddParser) -> None:
    sub = add_group(add, "release")
    lists = add_command(sub, list_releases, name="list", text="list the saved releases")
    lists.add_argument("agent", metavar="AGENT", nargs="?", help="only releases of the agent with this name")
    shows = add_command(sub, show_release, name="show", text="print a release, with its five dimensions")
    differs = add_command(sub, diff_releases, name="diff", text="print what differs between two releases")
    for each in (shows, differs):
        each.add_argument("agent", metavar="AGENT", help="name of the agent")
        each.add_argument("version", metavar="VERSION", help="version of the release")
    differs.add_argument("other", metavar="OTHER", help="version of the other release")


def _read_weights(pairs: Sequence[tuple[str, float]]) -> dict[str, float]:
    """Return the weights by arm.

    Raises:
        MisuseError: if an arm is repeated.
    """
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [arm for arm, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise MisuseError(f"arm {repeated!r} is given more than once: give each arm one weight")
    return found


def start(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Start a roll-out of the releases of a `Rollout`, or an experiment without releases by its name."""
    weights, options = _read_weights(args.weights), {"by": args.by, "reason": args.reason, "holdout": args.holdout}
    if is_target(args.name):
        rollout, _ = attach_rollout_store(load_target(args.name, Rollout), args.name, args.store)

        async def begin() -> RolloutChange:
            try:
                return await rollout.start(weights, rules=args.back_if, targets=args.target, **options)
            finally:
                await rollout.base.aclose()

        change = anyio.run(begin)
    else:
        store = create_store(resolve_location(args.store))
        control = RolloutControl(args.name, store)
        options |= {"unit": args.unit, "rules": args.back_if, "targets": args.target}
        begin_experiment = partial(control.start, weights, **options)
        change = run_in_store(store, begin_experiment)
    return _report(change, terminal)


def weights(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Change the weights of a roll-out."""
    found = _read_weights(args.weights)
    return _report(_change(args, lambda control: control.set_weights(found, by=args.by, reason=args.reason)), terminal)


def target(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Change the targets of a roll-out."""
    aim = partial(RolloutControl.set_targets, targets=args.targets, by=args.by, reason=args.reason)
    return _report(_change(args, aim), terminal)


def back(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Return a roll-out to the weights that were in effect before."""
    return _report_end(args, terminal, lambda control: control.back(arm=args.arm, by=args.by, reason=args.reason))


def kill(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Give the base to all, and end a roll-out."""

    async def end(control: RolloutControl) -> RolloutChange:
        newest = await control.newest()
        if newest is not None and newest.is_killed and args.abort_running:  # the first kill did not cancel all runs
            return newest
        return await control.kill(by=args.by, reason=args.reason)

    return _report_end(args, terminal, end)


def _change(args: argparse.Namespace, act: Callable[[RolloutControl], Awaitable[T]]) -> T:
    store = open_existing_store(args.store)
    return run_in_store(store, lambda: act(RolloutControl(args.name, store)))


def _report_end(
    args: argparse.Namespace, terminal: Terminal, act: Callable[[RolloutControl], Awaitable[RolloutChange]]
) -> ExitCode:
    async def change_and_abort(control: RolloutControl) -> tuple[RolloutChange, int]:
        change = await act(control)
        if not args.abort_running:
            return change, 0
        before = (await control.log())[change.number - 2].plan
        try:
            count = await abort_runs(control.store, before, change.plan, by=args.by, message=args.reason)
        except StoreError as error:
            raise PartlyDoneError(
                f"the roll-out was changed ({change}), and not all runs of the arms without weight were cancelled: "
                f"{error}; `agentfsm rollout status` counts them, and `agentfsm cancel` or the same `kill` ends them"
            ) from error
        return change, count

    change, count = _change(args, change_and_abort)
    if args.abort_running:
        terminal.err(f"cancelled {format_count(count, 'run')}")
    return _report(change, terminal)


def _report(change: RolloutChange, terminal: Terminal) -> ExitCode:
    if terminal.json:
        terminal.document(_build_change_json(change))
    else:
        terminal.out(_format_change(change))
    return ExitCode.DONE


def _build_change_json(change: RolloutChange) -> dict[str, Any]:
    return {**change.to_dict(), "weights": change.plan.weights}


def _format_change(change: RolloutChange) -> str:
    return f"{format_time(change.at)}  {change}"


def log(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Print the log of a roll-out, oldest entry first."""
    found = _change(args, lambda control: control.log())
    if terminal.json:
        terminal.document({"log": [_build_change_json(each) for each in found]})
        return ExitCode.DONE
    for each in found:
        terminal.out(_format_change(each))
    if not found:
        terminal.err(f"there is no roll-out {args.name!r}")
    return ExitCode.DONE


def status(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Print the weights of one roll-out or all, and the results of their arms."""
    store = open_existing_store(args.store)

    async def read() -> list[tuple[str, RolloutChange, tuple[ArmResults, ...]]]:
        names = [args.name] if args.name else await list_rollouts(store)
        rows = []
        for name in names:
            control = RolloutControl(name, store)
            if (newest := await control.newest()) is not None:
                rows.append((name, newest, await read_results(control)))
        return rows

    found = run_in_store(store, read)
    if args.name and not found:
        raise MisuseError(f"there is no roll-out {args.name!r}: `agentfsm rollout status` lists them")
    if terminal.json:
        documents = [
            {"name": name, "change": _build_change_json(change), "arms": [attrs.asdict(arm) for arm in arms]}
            for name, change, arms in found
        ]
        terminal.document({"rollouts": documents})
        return ExitCode.DONE
    for name, change, arms in found:
        state = "killed" if change.is_killed else f"by {change.plan.unit}"
        terminal.out(f"{name}: {state}, {_format_change(change)}")
        for line in _format_arms(arms):
            terminal.out(f"  {line}")
        for each in change.plan.targets:
            terminal.out(f"  gives {each.arm} to {str(each).partition(':')[2]}")
        for rule in change.plan.rules:
            terminal.out(f"  rolls back if {rule}")
    if not found:
        terminal.err("no roll-outs")
    return ExitCode.DONE


def _format_arms(arms: Iterable[ArmResults]) -> list[str]:
    rows = [("arm", "release", "weight", "open", "stalled", "ended", "failed", "cost", "time", "rating")]
    rows += [
        (
            each.arm,
            each.release or "-",
            f"{each.weight:g} %",
            f"{each.open:,}",
            f"{each.stalled:,}",
            f"{each.runs:,}",
            _format_failures(each),
            format_usd(each.usd, unpriced=each.unpriced > 0) if each.runs else "-",
            "-" if each.seconds is None else f"{each.seconds:.1f} s",
            "-" if each.rating is None else f"{each.rating:.2f} of {each.ratings:,}",
        )
        for each in arms
    ]
    return align_columns(rows)


def _format_failures(arm: ArmResults) -> str:
    if arm.failure_interval is None:
        return "-"
    low, high = arm.failure_interval
    return f"{arm.failed:,} ({arm.failed / arm.runs:.1%}, {low:.1%} to {high:.1%})"


def align_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the rows of a table as lines, with columns of one width."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def watch(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Check the rules of a roll-out until a signal arrives, and roll back by them."""
    store = open_existing_store(args.store)
    control = RolloutControl(args.name, store)
    with InterruptibleRunner() as runner:
        try:
            if not runner.run(control.log):
                raise MisuseError(f"there is no roll-out {args.name!r}: `agentfsm rollout status` lists them")
            terminal.err(f"watching roll-out {args.name!r}; stop with Ctrl-C")
            runner.run(partial(watch_rollout, control, once=args.once))
        except KeyboardInterrupt:
            terminal.err("stopped")
        finally:
            change = runner.run(control.newest)
            runner.run(store.aclose)
    return ExitCode.DONE if change is None else _report(change, terminal)


# Releases.


def list_releases(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """List the saved releases, of one agent or all."""
    store = open_existing_store(args.store)
    prefix = f"{args.agent}/" if args.agent else ""

    async def read() -> list[Release]:
        releases, after = list[Release](), ""
        while page := await store.list_records(RELEASES, prefix=prefix, after=after, limit=_PAGE):
            releases += [Release.from_dict(each.value) for each in page]
            after = page[-1].key
        return releases

    found = run_in_store(store, read)
    if terminal.json:
        terminal.document({"releases": [each.to_dict() for each in found]})
        return ExitCode.DONE
    rows = [
        (each.agent, each.version, each.digest, each.model, str(each.evaluation or "not evaluated")) for each in found
    ]
    for line in align_columns(rows) if rows else ():
        terminal.out(line)
    if not found:
        terminal.err("no releases")
    return ExitCode.DONE


def show_release(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Print a release: its dimensions, and its evaluation."""
    store = open_existing_store(args.store)
    found = run_in_store(store, lambda: load_release(store, args.agent, args.version))
    if terminal.json:
        terminal.document(found.to_dict())
    else:
        terminal.out(str(found))
    return ExitCode.DONE


def diff_releases(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Print what differs between two releases, by dimension."""
    store = open_existing_store(args.store)

    async def read() -> dict[str, tuple[str, ...]]:
        before = await load_release(store, args.agent, args.version)
        return before.diff(await load_release(store, args.agent, args.other))

    found = run_in_store(store, read)
    if terminal.json:
        terminal.document({"changes": found})
        return ExitCode.DONE
    for name, words in found.items():
        for each in words:
            terminal.out(f"{name}: {each}")
    if not found:
        terminal.err("the releases are the same")
    return ExitCode.DONE
