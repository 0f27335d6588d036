"""The benchmarks do their work and check it; how fast is not asked here."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from agentfsm.ports import Reply
from benchmarks import ours
from benchmarks.contender import Contender
from benchmarks.floor import Floor
from benchmarks.rows import rows

QUICK = ("run", "turns", "fan-out", "naps", "journal:20", "chunk", "http:10", "sse")


@pytest.fixture(params=["asyncio"])
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    """The floor is a loop of asyncio."""
    return request.param


@pytest.mark.parametrize("row", [row for row in rows() if row.id in QUICK], ids=lambda row: row.id)
@pytest.mark.parametrize("contender", [Floor(), ours.contender()], ids=lambda contender: contender.name)
async def test_a_row_is_measured(row: Any, contender: Contender):
    """One sample of each quick row is a figure, and the row's own checks hold."""
    async with row.ready(contender) as sample:
        assert await sample() > 0


async def test_a_row_sees_work_that_was_not_done(monkeypatch: pytest.MonkeyPatch):
    """A contender that skips its calls is no fast contender: the row fails."""
    answer = ours.Scripted.reply

    async def idle(self: Any, *args: Any) -> Reply:
        return attrs.evolve(await answer(self, *args), calls=(), text="done")

    monkeypatch.setattr(ours.Scripted, "reply", idle)
    [row] = [row for row in rows() if row.id == "turns"]
    async with row.ready(ours.contender()) as sample:
        with pytest.raises(AssertionError):
            await sample()
