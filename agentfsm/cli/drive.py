"""Drive a run from the command line: watch it, ask what it asks, leave it on Ctrl-C, report how it stands."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

import anyio
import attrs

from agentfsm.cli import codes
from agentfsm.cli.ask import ask_person, leave, tell
from agentfsm.cli.codes import Exit
from agentfsm.cli.documents import run_json
from agentfsm.cli.ending import Ending
from agentfsm.cli.place import Way
from agentfsm.cli.plain import counted, seconds
from agentfsm.cli.show import used_line
from agentfsm.cli.target import parts_of, target_with
from agentfsm.cli.terminal import aside
from agentfsm.cli.waits import pending_line, ways
from agentfsm.cli.watch import PlainView
from agentfsm.core.errors import ConflictError, LeaseHeldError
from agentfsm.core.machine import State
from agentfsm.engine.execution.journal import read_header
from agentfsm.tools.queue.result_text import describe_error

if TYPE_CHECKING:
    from collections.abc import Iterator

    from agentfsm.agent import Agent
    from agentfsm.cli.ask import Answer, Word
    from agentfsm.cli.terminal import Terminal
    from agentfsm.cli.watch import View
    from agentfsm.core.effects import Pending
    from agentfsm.core.run import Header, Run
    from agentfsm.ports import Store
    from agentfsm.streaming.stream import StreamEvent

# Seconds between two looks at a run that another worker drives: short beside the 10 s that a lease lasts.
POLL_S: Final = 0.2


@attrs.define(eq=False, repr=False, kw_only=True)
class AttendedRun:
    """One run, driven until it is over, waits for somebody who is not there, or is interrupted."""

    terminal: Terminal
    agent: Agent
    run: Run
    # The newest state that is known.
    place: str | None
    # Of the store; None where the command line cannot open it.
    wakes: bool = False
    # Whether the pause that the run is in ends.
    absent: Answer = leave
    # Who decides where nobody sits at a terminal.
    remark: str = ""
    # Said right behind the run's id.
    view: View = attrs.field(init=False, default=attrs.Factory(lambda self: view_of(self.terminal), takes_self=True))
    _ending: Ending = attrs.field(factory=Ending, init=False)
    _begun: bool = attrs.field(default=False, init=False)
    # Whether the run is in the store and its id was told.
    _put_off: set[tuple[str, str]] = attrs.field(factory=set, init=False)
    # Calls that the person wants to decide later, by run.

    @property
    def way(self) -> Way:
        """How to get back to the run."""
        return way_to(self.run, self.agent, self.place)

    def drive(self) -> Exit:
        """Create the run where it is new, drive it, and report how it stands.

        Raises:
            AgentError: when it cannot be driven; a note on it says how to go on.
        """
        with self._ending:
            try:
                return self._driven()
            finally:
                self._ending.run(self.agent.aclose)

    def _driven(self) -> Exit:
        try:
            self._begin()
            self._to_the_end()
        except KeyboardInterrupt:
            return self._interrupted()
        except Exception as error:
            if self._begun:
                error.add_note(f"Nothing that was acknowledged is lost. To go on: {self.way.resume(self.run.id)}")
            raise
        return report(self.terminal, self.run, self.way)

    def _begin(self) -> None:
        """Put the run into the store and tell its id, before anything is done: from here on it can be resumed."""
        if self.run.version == 0:
            self.run = self._ending.run(self.agent.submit, self.run)
        self._begun = True
        self.terminal.err(f"run {self.run.id}")
        if self.remark:
            self.terminal.err(self.remark)

    def _to_the_end(self) -> None:
        while True:
            with aside():  # what tools print is no result
                self._ending.run(self._watch)
            words = [word for item in self._open() if (word := self._word(item)) is not None]
            if not words:
                return
            for refusal in self._ending.run(tell, self.agent, words):
                self.terminal.err(refusal)

    def _open(self) -> list[Pending]:
        if self.run.paused is not None:
            return []  # nobody would act on an answer before the pause is over
        pending = self.run.pending if self.run.is_waiting else ()
        return [item for item in pending if (item.run_id, item.call_id) not in self._put_off]

    def _word(self, item: Pending) -> Word | None:
        answer = ask_person(self.terminal, self.run.id) if self.terminal.can_ask else self.absent
        decision = answer(item)
        if decision is None:
            self._put_off.add((item.run_id, item.call_id))
            return None
        return item.run_id, item.kind, decision

    async def _watch(self) -> None:
        """Drive the run with a view on it; wait while another worker drives it."""
        self.view.begin(self.run)
        told = False
        try:
            while not self.run.is_over:
                try:
                    return await self._stream()
                except LeaseHeldError:
                    if not told:
                        self.terminal.err(f"run {self.run.id} is driven by another worker: waiting for it")
                    told = True
                    await anyio.sleep(POLL_S)
                except ConflictError:
                    if (await self.agent.load(self.run.id)).version == self.run.version:
                        raise
                self.run = await self.agent.load(self.run.id)
        finally:
            self.view.end(self.run)

    async def _stream(self) -> None:
        async with self.agent.stream(self.run, resume=self.wakes) as stream:
            async for event in stream:
                self.wakes = False  # what pauses it from here on is meant
                self.run = stream.run or self.run
                if event.run_id == self.run.id:  # how far agents below are is told by events of this run
                    self._show(event)

    def _show(self, event: StreamEvent) -> None:
        """Show an event; a view that breaks is replaced, and the run goes on."""
        try:
            self.view.see(event, self.run)
        except Exception as error:  # noqa: BLE001  whatever it is, it is not the run's fault
            self.view.end(self.run)
            self.view = PlainView(terminal=self.terminal)
            self.terminal.err(f"the display failed ({describe_error(error)}); plain lines from here on")

    def _interrupted(self) -> Exit:
        """Report a run that was left; it is read again, since what was committed last may be newer than was seen."""
        if self._begun:
            self.run = self._ending.run(self.agent.load, self.run.id)
            if self.run.is_over:  # it was too late
                return report(self.terminal, self.run, self.way)
            self.terminal.err(f"interrupted at version {self.run.version}. To go on: {self.way.resume(self.run.id)}")
            if self.terminal.json:
                self.terminal.document(run_json(self.run, self.way))
        return Exit.INTERRUPTED


def view_of(terminal: Terminal) -> View:
    """Return the live tree where stderr is a terminal that can show it and rich is installed, else plain lines."""
    if terminal.is_watched and os.environ.get("TERM") != "dumb" and find_spec("rich") is not None:
        from agentfsm.cli.live import LiveView  # noqa: PLC0415  the one file that loads rich

        return LiveView()
    return PlainView(terminal=terminal)


def way_to(run: Run, agent: Agent, place: str | None) -> Way:
    """Return how to get back to a run: its agent is named where neither the store nor its header says which it is."""
    known = place is not None and agent.target == run.header.target
    return Way(place=place, agent="" if known else target_with(*parts_of(agent.target)))


def report(terminal: Terminal, run: Run, way: Way) -> Exit:
    """Write the result to stdout, and what there is to say of it to stderr.

    Args:
        terminal: Where to.
        run: As it stands.
        way: How to get back to it.
    """
    code = codes.of_run(run)
    for line in _end_lines(run, way):
        terminal.err(line)
    if terminal.json:
        terminal.document(run_json(run, way))
    elif code is Exit.DONE:
        terminal.out(run.answer)
    return code


def how_it_ended(run: Run) -> str:
    """Return how a run stands that is over, or waits, in a line."""
    if run.state is State.DONE:
        return f"done: {_spent(run)}"
    if run.state is State.ERROR:
        return f"stopped by {run.stop_reason}: {run.stop_message}"
    return f"waiting: {'; '.join(pending_line(item, run.id) for item in run.pending)}"


def _spent(run: Run) -> str:
    return f"{counted(run.turn, 'turn')}, {used_line(run)}, {seconds(run.duration_s)} active"


def _end_lines(run: Run, way: Way) -> Iterator[str]:
    if run.is_waiting:
        yield "waiting:"
        for item in run.pending:
            yield f"  {pending_line(item, run.id)}"
            yield from (f"    {line}" for line in ways(item, way))
        yield f"then: {way.resume(run.id)}"
        return
    yield how_it_ended(run)
    if run.state is State.ERROR:
        yield _spent(run)
    if (again := way.fork(run)) is not None:
        yield f"To try again from right before that: {again}"


async def top_of(store: Store, header: Header) -> Header:
    """Return the header of the run that a sub-agent's run works for in the end; of any other run its own."""
    while header.parent is not None:
        header = await read_header(store, header.parent)
    return header
