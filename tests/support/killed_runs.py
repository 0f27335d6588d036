"""A run that is killed at each crash point of a kind, and goes on in another process."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from itertools import count
from pathlib import Path

import anyio

from agentfsm import Agent, Pending, PendingKind, Run, RunNotFoundError
from agentfsm.testing.crash import ForkServer


async def drive(agent: Agent, run_id: str, know: Callable[[Pending], str] | None = None) -> Run:
    """Drive a run to its end, or until this process is killed.

    Args:
        agent: The agent; it is closed at the end.
        run_id: Id of the run.
        know: Function that returns the result of a call whose outcome is unknown; None if there can be none.
    """
    async with agent:
        try:
            run = await agent.load(run_id)
        except RunNotFoundError:
            run = await agent.run("Go", id=run_id)
        else:
            run = run if run.is_over else await agent.resume(run_id, takeover=True)
        while run.pending:
            for item in run.pending:
                assert item.kind is PendingKind.OUTCOME
                assert know is not None
                await agent.settle(item.run_id, item.call_id, result=know(item))
            run = await agent.resume(run_id)
        return run


def kill_at_each(
    fork_server: ForkServer,
    folder: Path,
    work: Callable[[Path], Awaitable[None]],
    check: Callable[[Path], Awaitable[None]],
    kind: str,
    *,
    apart: int = 1,
    backend: str = "asyncio",
) -> int:
    """Kill a run at each crash point of a kind, let it go on, and check it; return the number of the last point.

    Args:
        fork_server: Server of the processes.
        folder: Place for a folder of each run, whose name differs from those of the others.
        work: Function that drives the run of a folder, which is killed or not.
        check: Function that checks the run once it is over.
        kind: Kind of the crash points.
        apart: Distance of the points at which runs are killed.
        backend: Event loop of the work.
    """
    for at in count(1, apart):
        place = folder / f"{kind}{at}"
        place.mkdir()
        first = fork_server.run(partial(work, place), kill_at=(kind, at), backend=backend)
        if first.killed:
            assert not fork_server.run(partial(work, place), backend=backend).killed
        anyio.run(check, place)
        if not first.killed:
            return at
    raise AssertionError
