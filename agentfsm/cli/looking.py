"""The subcommands that only look."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from agentfsm.cli import picture
from agentfsm.cli.codes import Exit
from agentfsm.cli.documents import export_json, journal_json, summary_json, whole_json
from agentfsm.cli.drive import top_of
from agentfsm.cli.place import Way, known_store, store_place
from agentfsm.cli.reach import in_store
from agentfsm.cli.show import event_lines, run_text, summary_lines
from agentfsm.cli.target import load_agent, names_agent
from agentfsm.core import diagram
from agentfsm.core.errors import MisuseError
from agentfsm.core.machine import State
from agentfsm.core.run import begin_run
from agentfsm.engine.execution import journal
from agentfsm.ports import Filter

if TYPE_CHECKING:
    from agentfsm.cli.terminal import Terminal
    from agentfsm.core.events import Event
    from agentfsm.core.run import Run
    from agentfsm.ports import RunSummary, Store


def runs(args: argparse.Namespace, terminal: Terminal) -> Exit:
    """List runs."""
    where = Filter(
        session=args.session,
        agent=args.agent,
        user=args.user,
        state=None if args.state is None else State(args.state),
        waiting=True if args.waiting else None,
        parent=args.parent,
        before=args.before,
    )
    store = known_store(args.store)
    is_whole = args.all or args.parent is not None
    found = in_store(store, lambda: _listed(store, where, args.limit, is_whole=is_whole))
    if terminal.json:
        terminal.document({"runs": [summary_json(each) for each in found]})
    for line in [] if terminal.json else summary_lines(found):
        terminal.out(line)
    if not found:
        terminal.err("no runs")
    return Exit.DONE


async def _listed(store: Store, where: Filter, limit: int, *, is_whole: bool) -> tuple[RunSummary, ...]:
    """Return the newest runs; those of sub-agents only where the list is to be whole."""
    size = limit
    while True:
        page = await store.runs(where, limit=size)
        shown = [each for each in page if is_whole or each.parent is None]
        if len(shown) >= limit or len(page) < size:
            return tuple(shown[:limit])
        size *= 4  # asked again from the start: no run can slip in between two pages


def show(args: argparse.Namespace, terminal: Terminal) -> Exit:
    """Show a run."""
    way = Way(place=store_place(args.store))
    found, events, top = _read(args.id, args.at, args.store)
    if terminal.json:
        journalled = {"events": journal_json(events)} if args.events else {}
        terminal.document(whole_json(found, way, top, events) | journalled)
        return Exit.DONE
    terminal.out(run_text(found, events))
    for line in event_lines(events) if args.events else ():
        terminal.out(line)
    return Exit.DONE


def export(args: argparse.Namespace, terminal: Terminal) -> Exit:
    """Write all that there is of a run."""
    found, events, top = _read(args.id, None, args.store)
    if args.messages:
        from agentfsm.models import to_openai  # noqa: PLC0415  it loads what writes requests, which few commands need

        terminal.document({"messages": to_openai(found.messages)})
        return Exit.DONE
    terminal.document(export_json(found, Way(place=store_place(args.store)), top, events))
    return Exit.DONE


def _read(run_id: str, at: int | None, given: str | None) -> tuple[Run, tuple[Event, ...], str]:
    """Return a run, its journal up to there, and the id of the run that goes on with it."""
    store = known_store(given)

    async def act() -> tuple[Run, tuple[Event, ...], str]:
        stored = await store.read(run_id)
        newest = len(stored.events)
        if at is not None and not 0 <= at <= newest:
            raise MisuseError(f"run {run_id} has the versions 0 to {newest}, and not {at}")
        events = stored.events[:at]
        found = begin_run(stored.header, await journal.load_predecessor(store, stored.header)).fold(events)
        return found, events, (await top_of(store, stored.header)).id

    return in_store(store, act)


def graph(args: argparse.Namespace, terminal: Terminal) -> Exit:
    """Draw the machine, an agent or a run."""
    if args.what is None:
        drawn = {"mermaid": diagram.mermaid, "dot": diagram.dot, "text": diagram.text}[args.format]()
    else:
        drawn = _drawn(args)
    if terminal.json:
        terminal.document({"format": args.format, "graph": drawn})
    else:
        terminal.out(drawn)
    return Exit.DONE


def _drawn(args: argparse.Namespace) -> str:
    """Return the picture of the agent or the run that the words name.

    Raises:
        MisuseError: when they name none, or ask for a form that it has not.
    """
    if args.format not in picture.DRAW:
        raise MisuseError(f"only the machine is drawn as {args.format}: give --format {' or '.join(picture.DRAW)}")
    draw = picture.DRAW[args.format]
    if names_agent(args.what):
        return draw(picture.of_agent(load_agent(args.what)))
    found, events, _ = _read(args.what, None, args.store)
    return draw(picture.of_run(found, events))


def doctor(args: argparse.Namespace, terminal: Terminal) -> Exit:
    """Look at the installation, and at an agent."""
    from agentfsm.cli.doctor import examine  # noqa: PLC0415  it looks at every part, and loads them

    return examine(args, terminal)
