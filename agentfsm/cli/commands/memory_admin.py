"""`agentfsm memory`: learn from runs; search, show, release, forget, expire, rebuild, export and import their items."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import anyio

from agentfsm.agents.login_waits import NOT_REVOKED, forget_all, list_logins
from agentfsm.cli.argument_types import parse_count
from agentfsm.cli.arguments import MEMORY_BY, AddParser, add_command, add_group, add_memory_options
from agentfsm.cli.codes import ExitCode
from agentfsm.cli.render.formatting import format_count, format_time
from agentfsm.cli.resolve.agent_target import load_agent, load_target
from agentfsm.cli.resolve.store_location import open_existing_store
from agentfsm.cli.session.signals import InterruptibleRunner
from agentfsm.cli.terminal import stdout_to_stderr
from agentfsm.core.errors import MisuseError
from agentfsm.ports.memory_items import write_item
from agentfsm.stores.home import create_private_folder

if TYPE_CHECKING:
    from agentfsm.cli.terminal import Terminal
    from agentfsm.memory import Memory, Recollection
    from agentfsm.ports.memory_items import MemoryItem

T = TypeVar("T")


def add_commands(add: AddParser) -> None:
    """Add the commands of this module."""
    sub = add_group(add, "memory")
    learn_options = add_command(sub, learn, text="learn from runs as they end, until interrupted")
    learn_options.add_argument("learner", metavar="module:learner", help="a Learner, or a function that returns one")
    learn_options.add_argument("--until-idle", action="store_true", help="exit when all runs that have ended are read")
    search_options = add_command(sub, search, text="print the items that match a query, best first")
    search_options.add_argument("query", help="words to look for")
    search_options.add_argument(
        "--limit", metavar="N", type=parse_count, default=8, help="maximum of items (default: 8)"
    )
    show_options = add_command(sub, show, text="print one item with its source")
    show_options.add_argument("item", metavar="ITEM", help="id of the item")
    release_options = add_command(sub, release, text="approve items that are held, so that they are found")
    release_options.add_argument("items", metavar="ITEM", nargs="+", help="id of a held item")
    forget_options = add_command(sub, forget, text="delete items for good")
    forget_options.add_argument("items", metavar="ITEM", nargs="*", help="id of an item")
    forget_options.add_argument("--all", action="store_true", help="all items of the user")
    forget_options.add_argument("--runs", action="store_true", help="with --all: the runs of the user as well")
    text = "with --all: the logins of the user at the servers of this agent's tools as well"
    forget_options.add_argument("--agent", metavar="module:agent", help=text)
    forget_options.add_argument(
        "--deleted-runs", action="store_true", help="items of all users from runs that the store no longer has"
    )
    rebuild_options = add_command(sub, rebuild, text="derive the items of runs again from the journals")
    export_options = add_command(sub, export, text="print all items of a user")
    imports = add_command(sub, import_file, name="import", text="add the items of a file to those of a user")
    imports.add_argument("file", metavar="FILE", help="file that `agentfsm memory export --json` wrote; - for stdin")
    expire_options = add_command(sub, expire, text="forget old items of little importance")
    expire_options.add_argument("--everyone", action="store_true", help="of all owners, not only of --user")
    expire_options.add_argument(
        "--days", metavar="N", type=float, default=90.0, help="age, days (default: %(default)s)"
    )
    text = "items of at least this importance are kept, 0 to 1 (default: %(default)s)"
    expire_options.add_argument("--importance", metavar="X", type=float, default=0.7, help=text)
    text = "items of an owner that are kept at most (default: %(default)s)"
    expire_options.add_argument("--count", metavar="N", type=parse_count, default=1_000, help=text)
    add_memory_options(
        search_options,
        show_options,
        release_options,
        forget_options,
        rebuild_options,
        export_options,
        imports,
        expire_options,
    )
    for each in (release_options, forget_options, expire_options):
        each.add_argument("--by", metavar="NAME", default=MEMORY_BY, help="name for the record of it")


def run_with_memory(args: argparse.Namespace, act: Callable[[Memory], Awaitable[T]], *, creates: bool = False) -> T:
    """Run `act` with the memory of the user that the arguments name, and close it.

    Args:
        args: Arguments of the command.
        act: Works on the memory.
        creates: Whether the file is created if there is none.

    Raises:
        MisuseError: if there is no such file.
    """
    from agentfsm.memory import Memory  # noqa: PLC0415  brings sqlite3

    if "://" not in args.memory:  # the operator of a server creates its databases
        if creates:
            create_private_folder(Path(args.memory).parent)
        elif not Path(args.memory).is_file():
            raise MisuseError(f"there is no memory {args.memory}: name its file with --memory")
    memory = Memory(args.memory, embedder=getattr(args, "embedder", None)).for_(user=args.user, tenant=args.tenant)

    async def act_and_close() -> T:
        try:
            return await act(memory)
        finally:
            await memory.aclose()

    return anyio.run(act_and_close)


def report(terminal: Terminal, written: Mapping[str, Any], text: str) -> ExitCode:
    """Print a result as JSON or as a text."""
    if terminal.json:
        terminal.document(written)
    else:
        terminal.out(text)
    return ExitCode.DONE


def _format_item(item: MemoryItem) -> str:
    held = " (held)" if item.held else ""
    return f"{item.id}  {item.kind.value}{held}  {' '.join(item.text.split())}"


def search(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Print the items that match a query, best first."""
    return report_found(terminal, run_with_memory(args, lambda memory: memory.recall(args.query, k=args.limit)))


def report_found(terminal: Terminal, found: Sequence[Recollection]) -> ExitCode:
    """Print items that were found, best first."""
    if not found and not terminal.json:
        terminal.err("nothing found")
        return ExitCode.DONE
    items = [{**write_item(each.item), "score": each.score} for each in found]
    return report(terminal, {"items": items}, "\n".join(_format_item(each.item) for each in found))


def show(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Print one item whole.

    Raises:
        MisuseError: if the owner has no such item.
    """

    async def act(memory: Memory) -> MemoryItem:
        item = (await memory.index.get([args.item])).get(args.item)
        if item is None or item.namespace != memory.namespace:
            raise MisuseError(f"there is no item {args.item!r} of this owner: `agentfsm memory export` lists them")
        return item

    item = run_with_memory(args, act)
    lines = [item.text, "", f"kind: {item.kind.value}", f"importance: {item.importance}", f"level: {item.level}"]
    lines += [f"known since: {format_time(item.recorded_at)}"]
    lines += [f"from run: {item.source.run_id}"] if item.source is not None else []
    lines += [f"labels: {', '.join(item.labels)}"] if item.labels else []
    lines += ["held: it is not found before `agentfsm memory release`"] if item.held else []
    return report(terminal, write_item(item), "\n".join(lines))


def release(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Approve items that are held, so that they are found."""

    async def act(memory: Memory) -> int:
        held = [item.id for item in await memory.read(include_held=True) if item.held]
        if missing := [each for each in args.items if each not in held]:
            raise MisuseError(f"the owner has no held item {missing[0]!r}: `agentfsm memory export` lists them")
        return await memory.release(args.items, by=args.by)

    count = run_with_memory(args, act)
    return report(terminal, {"released": count}, f"released {format_count(count, 'item')}")


def forget(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Delete items of an owner, or all of them with the runs and logins of the user; or those of deleted runs.

    Raises:
        MisuseError: if none or several of these are named.
    """
    if [bool(args.items), args.all, args.deleted_runs].count(True) != 1:
        raise MisuseError("expected either ids of items, or --all, or --deleted-runs")
    if args.runs and not args.all:
        raise MisuseError("--runs deletes all runs of the user: give it with --all")
    if args.agent and not args.all:
        raise MisuseError("--agent deletes all logins of the user: give it with --all")
    agent = load_agent(args.agent) if args.agent else None
    store = open_existing_store(args.store) if args.runs or args.deleted_runs else None

    async def act(memory: Memory) -> int:
        if store is None:
            return await (memory.forget_all(by=args.by) if args.all else memory.forget(args.items, by=args.by))
        try:
            if args.deleted_runs:
                return await memory.forget_deleted_runs(store, by=args.by)
            return await memory.forget_all(runs="delete", store=store, by=args.by)
        finally:
            await store.aclose()

    count = run_with_memory(args, act)
    if agent is None:
        return report(terminal, {"forgotten": count}, f"forgot {format_count(count, 'item')}")
    logins, failed = anyio.run(
        partial(forget_all, list_logins(agent.tools), tenant=args.tenant or None, user=args.user or None)
    )
    for server in failed:
        terminal.err(NOT_REVOKED.format(server=server))
    text = f"forgot {format_count(count, 'item')} and {format_count(logins, 'login')}"
    report(terminal, {"forgotten": count, "logins": logins, "not_revoked": failed}, text)
    return ExitCode.FAILED if failed else ExitCode.DONE


def learn(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Learn from the ended runs of the learner's store until a signal arrives, or until all are read."""
    from agentfsm.memory.learner import Learner  # noqa: PLC0415  brings sqlite3

    if args.store is not None:
        raise MisuseError("memory learn takes no --store: a Learner has a store of its own")
    learner: Learner = load_target(args.learner, Learner)
    terminal.err(f"learning from ended runs as follower {learner.name!r}; stop with Ctrl-C")
    count = None
    with InterruptibleRunner() as runner:
        try:
            with stdout_to_stderr():  # stdout is reserved for results
                count = runner.run(partial(learner.run, until_idle=args.until_idle))
        except KeyboardInterrupt:
            terminal.err("stopped: the next learner goes on")
        finally:
            runner.run(learner.aclose)
    if count is None:
        return ExitCode.DONE
    return report(terminal, {"items": count}, f"learned {format_count(count, 'item')}")


def rebuild(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Derive the items of all owners that come from runs again from the journals."""
    store = open_existing_store(args.store)

    async def act(memory: Memory) -> int:
        try:
            return await memory.rebuild(store)
        finally:
            await store.aclose()

    count = run_with_memory(args, act)
    return report(terminal, {"items": count}, f"derived {format_count(count, 'item')} from the journals")


def export(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Print all items of an owner, those that are held included."""
    items = run_with_memory(args, lambda memory: memory.read(include_held=True))
    if not items and not terminal.json:
        terminal.err("no items")
        return ExitCode.DONE
    return report(terminal, {"items": [*map(write_item, items)]}, "\n".join(map(_format_item, items)))


def import_file(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Add the items of a file that `export --json` wrote.

    Raises:
        MisuseError: if the file cannot be read, or has another form.
    """
    try:
        text = sys.stdin.read() if args.file == "-" else Path(args.file).read_text(encoding="utf-8")
        written = json.loads(text)
    except (OSError, ValueError) as error:
        raise MisuseError(f"{args.file} cannot be read: {error}") from None
    if not isinstance(written, dict) or not isinstance(written.get("items"), list):
        raise MisuseError(f"{args.file} has no items: write it with `agentfsm memory export --json`")
    count = run_with_memory(args, lambda memory: memory.import_items(written["items"]), creates=True)
    return report(terminal, {"imported": count}, f"imported {format_count(count, 'item')}")


def expire(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Forget old items of little importance, and those beyond a number, of an owner or of all."""
    from agentfsm.memory import Expiry  # noqa: PLC0415  brings sqlite3

    rules = Expiry(days=args.days, importance=args.importance, count=args.count)

    async def act(memory: Memory) -> int:
        return await (memory.expire_all if args.everyone else memory.expire)(rules, by=args.by)

    count = run_with_memory(args, act)
    return report(terminal, {"forgotten": count}, f"forgot {format_count(count, 'item')}")
