"""`agentfsm worker`: drives whatever runs of an agent can be moved on, and says how each ended."""

from __future__ import annotations

import argparse
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import attrs

from agentfsm.cli.codes import Exit
from agentfsm.cli.drive import how_it_ended
from agentfsm.cli.ending import Ending
from agentfsm.cli.place import masked
from agentfsm.cli.reach import named_by
from agentfsm.cli.terminal import aside
from agentfsm.core.clean import one_line
from agentfsm.core.errors import MisuseError
from agentfsm.core.machine import State
from agentfsm.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Callable

    from agentfsm.agent import Agent
    from agentfsm.cli.terminal import Terminal
    from agentfsm.core.run import Run
    from agentfsm.ports import Lease

# Characters of what is said of a run: its id, and what it waits for.
LINE_CHARS: Final = 500
_ENDS: Final = {State.DONE: "done", State.ERROR: "stopped"}


def worker(args: argparse.Namespace, terminal: Terminal) -> Exit:
    """Drive the runs of an agent, until a signal comes; or until nothing is due but what could not be driven."""
    agent, place = named_by(args, terminal)
    shift = _Shift(agent=agent, terminal=terminal)
    own = Worker(agent=agent, execute=shift.drive, deps=None, parallel=args.parallel, poll_s=args.poll)
    where = "the agent's own store" if place is None else masked(place)
    terminal.err(f"working for {agent.name!r} on the runs in {where}; Ctrl-C ends it in order")

    with Ending() as ending:
        try:
            with aside():  # what tools print is no result
                ending.run(partial(own.run, until_idle=args.until_idle))
        except KeyboardInterrupt:
            terminal.err("ended: what was under way is kept, and any worker goes on with it")
        finally:
            ending.run(agent.aclose)
    if terminal.json:
        terminal.document({"agent": agent.name, "runs": dict(shift.ends)})
    return Exit.FAILED if args.until_idle and own.failed_count else Exit.DONE


@attrs.define(eq=False, repr=False, kw_only=True)
class _Shift:
    """What a worker has done since it began."""

    agent: Agent
    terminal: Terminal
    ends: Counter[str] = attrs.field(factory=lambda: Counter({"done": 0, "stopped": 0, "waiting": 0}), init=False)

    async def drive(self, before: Run, deps: Any, *, lease: Lease, see: Callable[[Run], None]) -> Run:
        """Drive a run whose lease is held, and say how it ended or what it waits for.

        Raises:
            MisuseError: when it is of another agent by the same name.
        """
        agent = self.agent
        target = before.header.target
        if target and target != agent.target:
            raise MisuseError(f"it is of {target}, an agent by the same name as {agent.target}: name each its own way")
        run = await agent.driver.run_until_blocked(before, deps, lease=lease, on_run=see)
        if run.version > before.version:
            self.ends[_ENDS.get(run.state, "waiting")] += 1
            self.terminal.err(one_line(f"run {run.id} {how_it_ended(run)}", LINE_CHARS))
        return run
