"""Loops for each item of a list, over a flow and over a cycle of steps, whose workers are killed.

Each repetition has its effects once.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path

import anyio
import pytest

from agentfsm import Limits, RunContext, RunNotFoundError
from agentfsm.flow import Flow, each, step, until
from agentfsm.stores import SQLiteStore
from agentfsm.testing.crash import connect
from tests.support.effect_book import EffectBook


def flow_in(folder: str) -> Flow:
    """Return a flow that counts up from each start, in a loop over a flow of two steps."""
    book = EffectBook(folder)

    @step(on_unknown=book.look_up)
    async def note(ctx: RunContext[None], start: int, counted: dict[str, int] | None) -> str:
        book.act(ctx.idempotency_key, f"{start} after {counted and counted['add']}")
        return ctx.idempotency_key

    @step(depends_on=[note], read_only=True)
    async def add(start: int, counted: dict[str, int] | None, note: str) -> int:
        return (start if counted is None else counted["add"]) + 1

    counted = Flow([note, add], name="counted").as_step()
    loop = until(counted, lambda counted: counted["add"] >= 3, times=3)
    store = SQLiteStore(str(Path(folder, "runs.db")), connect=connect)
    return Flow([each(loop, over="starts", item="start")], limits=Limits(depth=4), store=store)


def cycle_in(folder: str) -> Flow:
    """Return the same as a cycle of three steps, the last of which is skipped at the end, with the same effects."""
    book = EffectBook(folder)

    @step(on_unknown=book.look_up)
    async def note(ctx: RunContext[None], start: int, add: int | None) -> str:
        book.act(ctx.idempotency_key, f"{start} after {add}")
        return ctx.idempotency_key

    @step(depends_on=[note], read_only=True)
    async def add(start: int, add: int | None, note: str) -> int:
        return (start if add is None else add) + 1

    @step(depends_on=[add], when=lambda add: add < 3, read_only=True)
    async def go_on(add: int, go_on: list[int] | None) -> list[int]:
        return [*(go_on or ()), add]

    @step(depends_on=[add, go_on], read_only=True)
    async def tell(add: int, go_on: list[int] | None) -> dict[str, object]:
        return {"add": add, "go_on": go_on}

    loop = until([tell, go_on, add, note], lambda go_on, add: go_on is None and add >= 3, times=3, name="counted")
    store = SQLiteStore(str(Path(folder, "runs.db")), connect=connect)
    return Flow([each(loop, over="starts", item="start")], limits=Limits(depth=4), store=store)


async def work(build: Callable[[str], Flow], folder: str) -> None:
    """Drive the run to its end, or until this process is killed."""
    async with build(folder) as flow:
        try:
            run = await flow.load("flow")
        except RunNotFoundError:
            await flow.run({"starts": [0, 1]}, id="flow")
        else:
            if not run.is_over:
                await flow.resume("flow", takeover=True)


async def check(build: Callable[[str], Flow], folder: str) -> None:
    """Check the effects and the results of a run that is over."""
    async with build(folder) as flow:
        run = await flow.load("flow")
        more = {"go_on": None} if build is cycle_in else {}
        assert json.loads(run.output) == {"counted": [{"add": 3, **more}, {"add": 3, **more}]}
        assert (await flow.replay("flow")).is_faithful
    assert sorted(EffectBook(folder).read().values()) == [
        "0 after 1",
        "0 after 2",
        "0 after None",
        "1 after 2",
        "1 after None",
    ]


def kill_once(fork_server, build: Callable[[str], Flow], folder: Path, moment: tuple[str, int]) -> bool:
    """Kill the first worker at a moment, and let another one finish. Return whether there is such a moment."""
    folder.mkdir()
    first = fork_server.run(partial(work, build, str(folder)), kill_at=moment)
    if first.killed:
        assert not fork_server.run(partial(work, build, str(folder))).killed
    anyio.run(check, build, str(folder))
    return first.killed


@pytest.mark.parametrize("build", [flow_in, cycle_in], ids=["flow", "cycle"])
def test_a_loop_may_be_killed(fork_server, folder, build):
    """Within an effect of the second repetition."""
    assert kill_once(fork_server, build, folder / "killed", ("effect", 6))


@pytest.mark.soak
@pytest.mark.parametrize("build", [flow_in, cycle_in], ids=["flow", "cycle"])
@pytest.mark.parametrize("kind", ["commit", "effect"])
def test_a_loop_may_be_killed_at_each_event(fork_server, folder, kind, build):
    """Before and after each commit and each effect."""
    for at in count(1):
        if not kill_once(fork_server, build, folder / str(at), (kind, at)):
            break
    assert at > (20 if kind == "commit" else 10)
