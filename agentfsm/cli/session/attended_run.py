"""Drive a run from the command line: watch it, ask what it asks, leave it on Ctrl-C, report how it stands."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

import anyio
import attrs

from agentfsm.cli import codes
from agentfsm.cli.codes import ExitCode
from agentfsm.cli.render.formatting import format_count, format_duration
from agentfsm.cli.render.json_documents import build_run_json
from agentfsm.cli.render.pending import format_error_lines, format_hints, format_pending
from agentfsm.cli.render.progress import PlainView
from agentfsm.cli.render.text import format_used
from agentfsm.cli.resolve.agent_target import join_target, split_target
from agentfsm.cli.resolve.command_hint import CommandHint
from agentfsm.cli.session.prompts import build_prompter, leave_undecided
from agentfsm.cli.session.signals import InterruptibleRunner
from agentfsm.cli.terminal import stdout_to_stderr
from agentfsm.core.errors import ConflictError, LeaseHeldError
from agentfsm.core.machine import State
from agentfsm.tools.queue.result_text import describe_error

if TYPE_CHECKING:
    from collections.abc import Iterator

    from agentfsm.agent import Agent
    from agentfsm.cli.render.progress import RunView
    from agentfsm.cli.session.prompts import DecideFunction, Submission
    from agentfsm.cli.terminal import Terminal
    from agentfsm.core.pending import Pending
    from agentfsm.core.run import Run
    from agentfsm.streaming.stream import StreamEvent

# Seconds between two looks at a run that another worker drives: short beside the 10 s that a lease lasts.
POLL_S: Final = 0.2


@attrs.define(eq=False, repr=False, kw_only=True)
class AttendedRun:
    """One run, driven until it is over, waits for somebody who is not there, or is interrupted."""

    terminal: Terminal
    agent: Agent
    run: Run
    """The newest state that is known."""

    store_location: str | None
    """Of the store; None where the command line cannot open it."""

    resumes_pause: bool = False
    """Whether the pause that the run is in ends."""

    unattended_decide: DecideFunction = leave_undecided
    """Who decides where nobody sits at a terminal."""

    remark: str = ""
    """Said right behind the run's id."""

    view: RunView = attrs.field(
        init=False, default=attrs.Factory(lambda self: choose_view(self.terminal), takes_self=True)
    )
    _runner: InterruptibleRunner = attrs.field(factory=InterruptibleRunner, init=False)
    _is_stored: bool = attrs.field(default=False, init=False)
    """Whether the run is in the store and its id was told."""

    _deferred: set[tuple[str, str]] = attrs.field(factory=set, init=False)
    """Calls that the person wants to decide later, by run."""

    @property
    def hint(self) -> CommandHint:
        """How to get back to the run."""
        return build_hint(self.run, self.agent, self.store_location)

    def attend(self) -> ExitCode:
        """Create the run where it is new, drive it, and report how it stands.

        Raises:
            AgentError: when it cannot be driven; a note on it says how to go on.
        """
        with self._runner:
            try:
                return self._attend()
            finally:
                self._runner.run(self.agent.aclose)

    def _attend(self) -> ExitCode:
        try:
            self._submit_run()
            self._run_until_blocked()
        except KeyboardInterrupt:
            return self._report_interrupted()
        except Exception as error:
            if self._is_stored:
                error.add_note(
                    f"Nothing that was acknowledged is lost. To go on: {self.hint.build_resume(self.run.id)}"
                )
            raise
        return report_run(self.terminal, self.run, self.hint)

    def _submit_run(self) -> None:
        """Put the run into the store and tell its id, before anything is done: from here on it can be resumed."""
        if self.run.version == 0:
            self.run = self._runner.run(self.agent.submit, self.run)
        self._is_stored = True
        self.terminal.err(f"run {self.run.id}")
        if self.remark:
            self.terminal.err(self.remark)

    def _run_until_blocked(self) -> None:
        while True:
            with stdout_to_stderr():  # what tools print is no result
                self._runner.run(self._run_with_view)
            submissions = [each for item in self._open_items() if (each := self._decide(item)) is not None]
            if not submissions:
                return
            for submit in submissions:
                try:
                    self._runner.run(submit, self.agent.runs)
                except ConflictError as error:  # another person has decided it
                    self.terminal.err(str(error))

    def _open_items(self) -> list[Pending]:
        if self.run.paused is not None:
            return []  # nobody would act on an answer before the pause is over
        pending = self.run.pending if self.run.is_waiting else ()
        return [item for item in pending if (item.run_id, item.call_id) not in self._deferred]

    def _decide(self, item: Pending) -> Submission | None:
        decide = build_prompter(self.terminal, self.run.id) if self.terminal.can_ask else self.unattended_decide
        submission = decide(item)
        if submission is None:
            self._deferred.add((item.run_id, item.call_id))
        return submission

    async def _run_with_view(self) -> None:
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
        async with self.agent.stream(self.run, resume=self.resumes_pause) as stream:
            async for event in stream:
                self.resumes_pause = False  # what pauses it from here on is meant
                self.run = stream.run or self.run
                if event.run_id == self.run.id:  # how far agents below are is told by events of this run
                    self._show_event(event)

    def _show_event(self, event: StreamEvent) -> None:
        """Show an event; a view that breaks is replaced, and the run goes on."""
        try:
            self.view.on_event(event, self.run)
        except Exception as error:  # noqa: BLE001  whatever it is, it is not the run's fault
            self.view.end(self.run)
            self.view = PlainView(terminal=self.terminal)
            self.terminal.err(f"the display failed ({describe_error(error)}); plain lines from here on")

    def _report_interrupted(self) -> ExitCode:
        """Report a run that was left; it is read again, since what was committed last may be newer than was seen."""
        if self._is_stored:
            self.run = self._runner.run(self.agent.load, self.run.id)
            if self.run.is_over:  # it was too late
                return report_run(self.terminal, self.run, self.hint)
            self.terminal.err(
                f"interrupted at version {self.run.version}. To go on: {self.hint.build_resume(self.run.id)}"
            )
            if self.terminal.json:
                self.terminal.document(build_run_json(self.run, self.hint))
        return ExitCode.INTERRUPTED


def choose_view(terminal: Terminal) -> RunView:
    """Return the live tree where stderr is a terminal that can show it and rich is installed, else plain lines."""
    if terminal.is_watched and os.environ.get("TERM") != "dumb" and find_spec("rich") is not None:
        from agentfsm.cli.render.live import LiveView  # noqa: PLC0415  the one file that loads rich

        return LiveView()
    return PlainView(terminal=terminal)


def build_hint(run: Run, agent: Agent, store_location: str | None) -> CommandHint:
    """Return how to get back to a run: its agent is named where neither the store nor its header says which it is."""
    known = store_location is not None and agent.target == run.header.target
    return CommandHint(location=store_location, agent="" if known else join_target(*split_target(agent.target)))


def report_run(terminal: Terminal, run: Run, hint: CommandHint) -> ExitCode:
    """Write the result to stdout, and what there is to say of it to stderr.

    Args:
        terminal: Where to.
        run: As it stands.
        hint: How to get back to it.
    """
    code = codes.for_run(run)
    for line in _format_end(run, hint):
        terminal.err(line)
    if terminal.json:
        terminal.document(build_run_json(run, hint))
    elif code is ExitCode.DONE:
        terminal.out(run.answer)
    return code


def describe_end(run: Run) -> str:
    """Return how a run stands that is over, or waits, in a line."""
    if run.state is State.DONE:
        return f"done: {_format_spent(run)}"
    if run.state is State.ERROR:
        return f"stopped by {run.stop_reason}: {run.stop_message}"
    return f"waiting: {'; '.join(format_pending(item, run.id) for item in run.pending)}"


def _format_spent(run: Run) -> str:
    return f"{format_count(run.turn, 'turn')}, {format_used(run)}, {format_duration(run.duration_s)} active"


def _format_end(run: Run, hint: CommandHint) -> Iterator[str]:
    if run.is_waiting:
        yield "waiting:"
        for item in run.pending:
            yield f"  {format_pending(item, run.id)}"
            yield from (f"    {line}" for line in format_error_lines(item))
            yield from (f"    {line}" for line in format_hints(item, hint))
        yield f"then: {hint.build_resume(run.id)}"
        return
    yield describe_end(run)
    if run.state is State.ERROR:
        yield _format_spent(run)
    if (again := hint.build_fork(run)) is not None:
        yield f"To try again from right before that: {again}"
