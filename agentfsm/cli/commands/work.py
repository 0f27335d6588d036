"""`agentfsm worker`: drives whatever runs of an agent can be moved on, and says how each ended."""

from __future__ import annotations

import argparse
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import attrs

from agentfsm.cli.codes import ExitCode
from agentfsm.cli.resolve.run_lookup import resolve_agent
from agentfsm.cli.resolve.store_location import mask_password
from agentfsm.cli.session.attended_run import describe_end
from agentfsm.cli.session.signals import InterruptibleRunner
from agentfsm.cli.terminal import stdout_to_stderr
from agentfsm.core.errors import MisuseError
from agentfsm.core.machine import State
from agentfsm.core.text_safety import one_line
from agentfsm.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Callable

    from agentfsm.agent import Agent
    from agentfsm.cli.terminal import Terminal
    from agentfsm.core.run import Run
    from agentfsm.ports.store import Lease

# Characters of what is said of a run: its id, and what it waits for.
MAX_LINE_CHARS: Final = 500
_END_NAMES: Final = {State.DONE: "done", State.ERROR: "stopped"}


def worker(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Drive the runs of an agent, until a signal comes; or until nothing is due but what could not be driven."""
    agent, place = resolve_agent(args, terminal)
    shift = _WorkerReport(agent=agent, terminal=terminal)
    own = Worker(agent=agent, execute=shift.execute, deps=None, parallel=args.parallel, poll_s=args.poll)
    where = "the agent's own store" if place is None else mask_password(place)
    terminal.err(f"working for {agent.name!r} on the runs in {where}; Ctrl-C ends it in order")

    with InterruptibleRunner() as ending:
        try:
            with stdout_to_stderr():  # what tools print is no result
                ending.run(partial(own.run, until_idle=args.until_idle))
        except KeyboardInterrupt:
            terminal.err("ended: what was under way is kept, and any worker goes on with it")
        finally:
            ending.run(agent.aclose)
    if terminal.json:
        terminal.document({"agent": agent.name, "runs": dict(shift.end_counts)})
    return ExitCode.FAILED if args.until_idle and own.failed_count else ExitCode.DONE


@attrs.define(eq=False, repr=False, kw_only=True)
class _WorkerReport:
    """What a worker has done since it began."""

    agent: Agent
    terminal: Terminal
    end_counts: Counter[str] = attrs.field(factory=lambda: Counter({"done": 0, "stopped": 0, "waiting": 0}), init=False)

    async def execute(self, before: Run, deps: Any, *, lease: Lease, on_run: Callable[[Run], None]) -> Run:
        """Drive a run whose lease is held, and say how it ended or what it waits for.

        Raises:
            MisuseError: when it is of another agent by the same name.
        """
        agent = self.agent
        target = before.header.target
        if target and target != agent.target:
            raise MisuseError(f"it is of {target}, an agent by the same name as {agent.target}: name each its own way")
        run = await agent.driver.run_until_blocked(before, deps, lease=lease, on_run=on_run)
        if run.version > before.version:
            self.end_counts[_END_NAMES.get(run.state, "waiting")] += 1
            self.terminal.err(one_line(f"run {run.id} {describe_end(run)}", MAX_LINE_CHARS))
        return run
