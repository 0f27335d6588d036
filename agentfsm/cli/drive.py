"""Drive a run from the command line: watch it, ask what it asks, pause it on Ctrl-C, report how it stands."""

from __future__ import annotations

import shlex
import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import anyio
import attrs

from agentfsm.cli import codes
from agentfsm.cli.ask import ask_person, leave, tell
from agentfsm.cli.codes import Exit
from agentfsm.cli.place import command
from agentfsm.cli.show import pending_line, run_json, seconds, usage_line
from agentfsm.cli.terminal import aside
from agentfsm.cli.watch import PlainView, view_of
from agentfsm.core.effects import PendingKind
from agentfsm.core.errors import ConflictError, LeaseHeldError, RunNotFoundError
from agentfsm.core.machine import State
from agentfsm.engine.render import describe

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from agentfsm.agent import Agent
    from agentfsm.cli.ask import Answer
    from agentfsm.cli.terminal import Terminal
    from agentfsm.cli.watch import View
    from agentfsm.core.effects import Pending
    from agentfsm.core.inbox import Decision
    from agentfsm.core.run import Header, Run
    from agentfsm.engine.stream import StreamEvent
    from agentfsm.ports import Store

POLL_S: Final = 0.2
# Seconds between two looks at a run that another worker drives: short beside the 10 s that a lease lasts.


@attrs.define(eq=False, kw_only=True)
class Driver:
    """One run, driven until it is over, waits for somebody who is not there, or is interrupted."""

    terminal: Terminal
    agent: Agent
    run: Run
    # The newest state that is known.
    path: str | None
    # Of the store; None where the command line cannot open it.
    absent: Answer = leave
    # Who decides where nobody sits at a terminal.
    remark: str = ""
    # Said right behind the run's id.
    view: View = attrs.field(init=False, default=attrs.Factory(lambda self: view_of(self.terminal), takes_self=True))
    _begun: bool = attrs.field(default=False, init=False)
    # Whether the run is in the store and its id was told.
    _put_off: set[tuple[str, str]] = attrs.field(factory=set, init=False)
    # Calls that the person wants to decide later, by run.

    @property
    def resume(self) -> str:
        """The command line that goes on with the run."""
        line = resume_line(self.run.id, self.path)
        known = self.path is not None and self.agent.target == self.run.header.target
        return line if known else f"{line} --agent {shlex.quote(self.agent.target)}"

    def drive(self) -> Exit:
        """Create the run where it is new, drive it, and report how it stands.

        Raises:
            AgentError: when it cannot be driven; a note on it says how to go on.
        """
        with terminable():
            try:
                return self._driven()
            finally:
                anyio.run(self.agent.aclose)

    def _driven(self) -> Exit:
        try:
            self._begin()
            self._to_the_end()
        except KeyboardInterrupt:
            return self._interrupted()
        except Exception as error:
            if self._begun:
                error.add_note(f"Nothing that was acknowledged is lost. To go on: {self.resume}")
            raise
        return report(self.terminal, self.run, self.path, self.resume)

    def _begin(self) -> None:
        """Put the run into the store and tell its id, before anything is done: from here on it can be resumed."""
        if self.run.version == 0:
            self.run = anyio.run(created, self.agent, self.run)
        self._begun = True
        self.terminal.err(f"run {self.run.id}")
        if self.remark:
            self.terminal.err(self.remark)

    def _to_the_end(self) -> None:
        while True:
            with aside():  # what tools print is no result
                anyio.run(self._watch)
            decisions = [(item.run_id, each) for item in self._open() if (each := self._decision(item)) is not None]
            if not decisions:
                return
            for refusal in anyio.run(tell, self.agent, decisions):
                self.terminal.err(refusal)

    def _open(self) -> list[Pending]:
        pending = self.run.pending if self.run.is_waiting else ()
        return [item for item in pending if (item.run_id, item.call_id) not in self._put_off]

    def _decision(self, item: Pending) -> Decision | None:
        answer = ask_person(self.terminal, self.run.id) if self.terminal.can_ask else self.absent
        decision = answer(item)
        if decision is None:
            self._put_off.add((item.run_id, item.call_id))
        return decision

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
        async with self.agent.stream(self.run) as stream:
            async for event in stream:
                self.run = stream.run or self.run
                self._show(event)

    def _show(self, event: StreamEvent) -> None:
        """Show an event; a view that breaks is replaced, and the run goes on."""
        try:
            self.view.see(event, self.run)
        except Exception as error:  # noqa: BLE001  whatever it is, it is not the run's fault
            self.view.end(self.run)
            self.view = PlainView(terminal=self.terminal)
            self.terminal.err(f"the display failed ({describe(error)}); plain lines from here on")

    def _interrupted(self) -> Exit:
        """Report a run that was paused; it is read again, since what was committed last may be newer than was seen."""
        if self._begun:
            self.run = anyio.run(self.agent.load, self.run.id)
            if self.run.is_over:  # it was too late
                return report(self.terminal, self.run, self.path, self.resume)
            self.terminal.err(f"paused at version {self.run.version}. To go on: {self.resume}")
            if self.terminal.json:
                self.terminal.document(run_json(self.run, self.resume))
        return Exit.INTERRUPTED


def resume_line(run_id: str, path: str | None) -> str:
    """Return the command line that goes on with a run.

    Args:
        run_id: The run: of a sub-agent's, the one that it works for.
        path: Of its store; None where only the agent can open it.
    """
    words = f"resume {shlex.quote(run_id)}"
    return f"agentfsm {words}" if path is None else command(words, path)


def report(terminal: Terminal, run: Run, path: str | None, resume: str) -> Exit:
    """Write the result to stdout, and what there is to say of it to stderr.

    Args:
        terminal: Where to.
        run: As it stands.
        path: Of its store; None where only the agent can open it.
        resume: The command line that goes on with it.
    """
    code = codes.of_run(run)
    for line in _end_lines(run, path, resume):
        terminal.err(line)
    if terminal.json:
        terminal.document(run_json(run, resume))
    elif code is Exit.DONE:
        terminal.out(run.output)
    return code


def _end_lines(run: Run, path: str | None, resume: str) -> Iterator[str]:
    how = f"{run.turn} turns, {usage_line(run.usage)}, {seconds(run.duration_s)} active"
    if run.state is State.DONE:
        yield f"done: {how}"
    elif run.state is State.ERROR:
        yield f"stopped by {run.stop_reason}: {run.stop_message}"
        yield how
    else:
        yield "waiting for a person:"
        for item in run.pending:
            yield f"  {pending_line(item, run.id)}"
            yield from (f"    {line}" for line in _ways(item, path))
        yield f"then: {resume}"


def _ways(item: Pending, path: str | None) -> list[str]:
    """Return the command lines that decide it."""
    if path is None:
        return ["from Python, with agent.approve, agent.reject or agent.settle: its store is the agent's own"]
    return [command(form.format(run=shlex.quote(item.run_id), call=item.call_id), path) for form in _WAYS[item.kind]]


_WAYS: Final = {
    PendingKind.APPROVAL: ("approve {run} {call}", "reject {run} {call} --message WHY"),
    PendingKind.OUTCOME: (
        "settle {run} {call} --result TEXT",
        "settle {run} {call} --failed TEXT",
        "settle {run} {call} --rerun",
    ),
}


@contextmanager
def terminable() -> Iterator[None]:
    """Treat SIGTERM as Ctrl-C: the run is paused, not lost."""

    def interrupt(_number: int, frame: FrameType | None) -> None:
        handler = signal.getsignal(signal.SIGINT)
        act = handler if callable(handler) else signal.default_int_handler
        act(signal.SIGINT, frame)

    try:
        before = signal.signal(signal.SIGTERM, interrupt)
    except ValueError:  # not in the main thread: then signals are the business of whoever called
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


async def top_of(store: Store, header: Header) -> Header:
    """Return the header of the run that a sub-agent's run works for in the end; of any other run its own.

    Runs above that were deleted are not counted.
    """
    while header.parent is not None:
        try:
            header = (await store.read(header.parent)).header
        except RunNotFoundError:
            break
    return header


async def created(agent: Agent, run: Run) -> Run:
    """Put a new run into the store, so that its id can be told before anything is done.

    Returns:
        The run as it stands there: further on, where the id was known.

    Raises:
        ConflictError: when the id stands for another prompt, or the session has a run that is not over.
    """
    try:
        _, lease = await agent.store.create(run.header)
        await agent.store.release(lease).wait()
    except LeaseHeldError:
        pass  # it exists, and whoever drives it is waited for
    return await agent.load(run.id)
