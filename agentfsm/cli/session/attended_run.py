"""Execute a run from the command line: show its progress, ask the person at the terminal, report the result."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import anyio
import attrs
from anyio.lowlevel import checkpoint

from agentfsm.cli import codes
from agentfsm.cli.codes import ExitCode
from agentfsm.cli.render.formatting import NOTE_CHARS, format_count, format_duration
from agentfsm.cli.render.json_documents import build_run_json
from agentfsm.cli.render.pending import (
    format_error_lines,
    format_group_hint,
    format_hints,
    format_pending,
    format_whole_call,
    group_alike,
)
from agentfsm.cli.render.progress import PlainView
from agentfsm.cli.render.text import format_used
from agentfsm.cli.resolve.agent_target import join_target, split_target
from agentfsm.cli.resolve.command_hint import UNKNOWN_AGENT, CommandHint
from agentfsm.cli.session.prompts import ask_during_call, ask_together, build_prompter, leave_undecided
from agentfsm.cli.session.signals import InterruptibleRunner
from agentfsm.cli.terminal import stdout_to_stderr
from agentfsm.core.errors import (
    ConflictError,
    IncompatibleProgramError,
    LeaseHeldError,
    MisuseError,
    PartlyDoneError,
)
from agentfsm.core.machine import State
from agentfsm.core.text_safety import one_line
from agentfsm.tools.queue.result_text import describe_error

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from agentfsm.agents.agent import Agent
    from agentfsm.cli.render.progress import RunView
    from agentfsm.cli.session.prompts import DecideFunction, Submission
    from agentfsm.cli.terminal import Terminal
    from agentfsm.core.pending import Answer, Pending
    from agentfsm.core.run import Run
    from agentfsm.streaming.stream import StreamEvent

# Seconds between two reads of a run that another worker executes. A lease lasts 10 s.
POLL_S: Final = 0.2


@attrs.define(eq=False, repr=False, kw_only=True)
class AttendedRun:
    """One run, executed until it is over, waits without a terminal to ask at, or is interrupted."""

    terminal: Terminal
    agent: Agent
    run: Run
    """Newest known state of the run."""

    store_location: str | None
    """Path or URL of the store; None if only the agent can open it."""

    resumes_pause: bool = False
    """Whether the current pause of the run ends."""

    unattended_decide: DecideFunction = leave_undecided
    """Decides instead of a person if there is no terminal to ask at."""

    renamed: Mapping[str, str] = attrs.field(factory=dict)
    """New names of tools by their names in the journal."""

    remark: str = ""
    """Line that is written after the id of the run."""

    view: RunView = attrs.field(default=attrs.Factory(lambda self: choose_view(self.terminal), takes_self=True))
    """Shows the run while it is executed. By default a live tree, or plain lines."""

    runner: InterruptibleRunner = attrs.field(factory=InterruptibleRunner, init=False)
    """Handles the signals while the run is executed."""

    is_stored: bool = attrs.field(default=False, init=False)
    """Whether the run is known to be in the store."""

    _deferred: set[tuple[str, str]] = attrs.field(factory=set, init=False)
    """Pairs of run id and call id that stay undecided in this session."""

    @property
    def hint(self) -> CommandHint:
        """Hint for the command lines that continue with the run."""
        return build_hint(self.run, self.agent, self.store_location)

    def attend(self) -> ExitCode:
        """Store the run if it is new, execute it, and report it.

        Raises:
            AgentError: if it cannot be executed; a note on the error contains the command that resumes the run.
        """
        with self.runner:
            try:
                self.submit()
                self.terminal.err(f"run {self.run.id}")
                if self.remark:
                    self.terminal.err(self.remark)
                self.run_until_blocked()
            except KeyboardInterrupt:
                return self._report_interrupted()
            except Exception as error:
                if isinstance(error, IncompatibleProgramError):
                    other = attrs.evolve(self.hint, agent=UNKNOWN_AGENT)
                    error.add_note(f"To continue with another program: {other.build_resume(self.run.id)}")
                elif self.is_stored:
                    error.add_note(
                        f"Nothing that was acknowledged is lost. To continue: {self.hint.build_resume(self.run.id)}"
                    )
                raise
            else:
                return report_run(self.terminal, self.run, self.hint)
            finally:
                self.runner.run(self.agent.aclose)

    def submit(self) -> None:
        """Store a new run, so that it can be resumed after any failure."""
        if self.run.version == 0:
            self.run = self.runner.run(self.agent.submit, self.run)
        self.is_stored = True

    def run_until_blocked(self) -> None:
        """Execute the run until it is over, or waits for a decision that is not made here.

        Raises:
            KeyboardInterrupt: after Ctrl-C or SIGTERM. The run can be resumed.
        """
        while True:
            with stdout_to_stderr():  # stdout is reserved for results
                self.runner.run(self._run_with_view)
            submissions = [each for group in group_alike(self._open_items()) for each in self._decide_group(group)]
            if not submissions:
                return
            for submit in submissions:
                try:
                    self.runner.run(submit, self.agent.runs)
                except (ConflictError, MisuseError, PartlyDoneError) as error:  # decided elsewhere, or unfit edits
                    self.terminal.err(str(error))

    def _open_items(self) -> list[Pending]:
        if self.run.paused is not None:
            return []  # answers take effect after the pause only
        pending = self.run.pending if self.run.is_waiting else ()
        return [item for item in pending if (item.run_id, item.call_id) not in self._deferred]

    def _decide_group(self, items: Sequence[Pending]) -> list[Submission]:
        """Ask about calls that are alike together, and about those that are left one by one."""
        together, left = None, items
        if len(items) > 1 and self.terminal.can_ask:
            together, left = ask_together(self.terminal, items, self.run.id)
            if together is None and not left:
                self._deferred.update([(item.run_id, item.call_id) for item in items])
        submissions = [] if together is None else [together]
        asking = build_prompter(self.terminal, self.run.id, self._find_rule)
        decide = asking if self.terminal.can_ask else self.unattended_decide
        for item in left:
            if (submission := decide(item)) is not None:
                submissions.append(submission)
            else:
                self._deferred.add((item.run_id, item.call_id))
        return submissions

    def _find_rule(self, item: Pending) -> object:
        """Return the rule by which a tool of this agent needs approval; None for a sub-agent's tool."""
        tool = self.agent.tools.get(item.tool) if item.run_id == self.run.id else None
        return tool and tool.requires_approval

    async def _run_with_view(self) -> None:
        """Execute the run and show its events; wait while another worker executes it."""
        self.view.begin(self.run)
        is_reported = False
        try:
            while not self.run.is_over:
                try:
                    return await self._stream()
                except LeaseHeldError:
                    if not is_reported:
                        self.terminal.err(f"run {self.run.id} is executed by another worker: waiting for it")
                    is_reported = True
                    await anyio.sleep(POLL_S)
                except ConflictError:
                    if (await self.agent.load(self.run.id)).version == self.run.version:
                        raise
                self.run = await self.agent.load(self.run.id)
        finally:
            self.view.end(self.run)

    async def _stream(self) -> None:
        elicit = self._elicit if self.terminal.can_ask else None
        async with self.agent.stream(
            self.run, resume=self.resumes_pause, elicit=elicit, renamed=self.renamed
        ) as stream:
            async for event in stream:
                self.resumes_pause = False  # pauses from here on are new
                self.run = stream.run or self.run
                if event.run_id == self.run.id:  # AgentEvents of this run report the sub-agents
                    self._show_event(event)

    async def _elicit(self, item: Pending) -> Answer | None:
        """Ask the person at the terminal, while the call that asks stays open."""
        self.view.end(self.run)
        answer = ask_during_call(self.terminal, item, self.run.id)
        await checkpoint()  # raises if the answer was Ctrl-C
        self.view.begin(self.run)
        return answer

    def _show_event(self, event: StreamEvent) -> None:
        """Show an event. A view that fails is replaced by plain lines, and the run continues."""
        try:
            self.view.on_event(event, self.run)
        except Exception as error:  # noqa: BLE001  an error of the view must not stop the run
            self.view.end(self.run)
            self.view = PlainView(terminal=self.terminal)
            self.terminal.err(f"the display failed ({describe_error(error)}); plain lines from here on")

    def _report_interrupted(self) -> ExitCode:
        """Report an interrupted run. It is loaded again, because its last commit may be newer than the last event."""
        if self.is_stored:
            self.run = self.runner.run(self.agent.load, self.run.id)
            if self.run.is_over:  # it ended before the interruption
                return report_run(self.terminal, self.run, self.hint)
            self.terminal.err(
                f"interrupted at version {self.run.version}. To continue: {self.hint.build_resume(self.run.id)}"
            )
            if self.terminal.json:
                self.terminal.document(build_run_json(self.run, self.hint))
        return ExitCode.INTERRUPTED


def choose_view(terminal: Terminal) -> RunView:
    """Return the live tree if stderr is a capable terminal and rich is installed, else plain lines."""
    if terminal.can_render:
        from agentfsm.cli.render.live import LiveView  # noqa: PLC0415  it loads rich

        return LiveView()
    return PlainView(terminal=terminal)


def build_hint(run: Run, agent: Agent, store_location: str | None) -> CommandHint:
    """Return the hint for a run. It names the agent if the run does not, or if only the agent can open the store."""
    is_known = store_location is not None and agent.target == run.header.target
    return CommandHint(location=store_location, agent="" if is_known else join_target(*split_target(agent.target)))


def report_run(terminal: Terminal, run: Run, hint: CommandHint) -> ExitCode:
    """Write the result of a run to stdout, and its end or its waits to stderr. Return the exit code.

    Args:
        terminal: Receives the report.
        run: Newest state of the run.
        hint: Hint for the command lines that continue with the run.
    """
    code = codes.for_run(run)
    for line in format_end(run, hint):
        terminal.err(line)
    if terminal.json:
        terminal.document(build_run_json(run, hint))
    elif code is ExitCode.DONE:
        terminal.out(run.answer)
    return code


def describe_end(run: Run) -> str:
    """Return a line with the end of a run, or with its waits."""
    if run.state is State.DONE:
        return f"done: {_format_spent(run)}"
    if run.state is State.ERROR:
        return f"failed, {run.stop_reason}: {run.stop_message}"
    return f"waiting: {'; '.join(format_pending(item, run.id) for item in run.pending)}"


def _format_spent(run: Run) -> str:
    return f"{format_count(run.turn, 'turn')}, {format_used(run)}, {format_duration(run.duration_s)} active"


def format_end(run: Run, hint: CommandHint) -> Iterator[str]:
    """Yield the lines that report the end of a run, or its waits with the commands that end them."""
    if run.is_waiting:
        yield "waiting:"
        for item in run.pending:
            yield f"  {format_pending(item, run.id)}"
            yield from (f"    {line}" for line in format_whole_call(item))
            yield from (f"    {line}" for line in format_error_lines(item))
            yield from (f"    {line}" for line in format_hints(item, hint))
        missing = dict.fromkeys([item.tool for item in run.pending if item.lacks_tool])
        if missing:
            other = attrs.evolve(hint, agent=UNKNOWN_AGENT).build_resume(run.id)
            names = "".join([f" --renamed {name}=NEW" for name in missing])
            yield f"or, with a program that has {', '.join(missing)}: {other}"
            yield f"or, if it has another name now: {hint.build_resume(run.id)}{names}"
        for group in group_alike(run.pending):
            if len(group) > 1 and hint.location is not None:
                yield f"  all {len(group)} calls of {group[0].tool}:"
                yield f"    {format_group_hint(group, hint)}"
        yield f"then: {hint.build_resume(run.id)}"
        return
    yield describe_end(run)
    for claim in run.not_done:
        yield one_line(f"not done, although the answer says so: {claim}: {claim.fault}", NOTE_CHARS)
    if run.state is State.ERROR:
        yield _format_spent(run)
    if (fork := hint.build_fork(run)) is not None:
        yield f"To try again from right before that: {fork}"
        yield from [hint.note] if hint.note else []
