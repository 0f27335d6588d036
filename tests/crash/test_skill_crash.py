"""A run that reads a skill and runs its script is killed at each commit: the script has its effect at most once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from agentfsm import Agent, Limits, State
from agentfsm.ports import Emit, Model, ProposedCall, Reply, Request
from agentfsm.sandbox import Sandbox, find_isolation
from agentfsm.skills import Skills
from agentfsm.stores import SQLiteStore
from agentfsm.testing.crash import connect
from tests.support.killed_runs import drive, kill_at_each

SKILL = "---\nname: pay\ndescription: Pays.\n---\nRun scripts/pay.py.\n"
CALLS = (
    ProposedCall(id="a", name="read_skill", arguments='{"name": "pay"}'),
    ProposedCall(id="b", name="run_skill_script", arguments='{"skill": "pay", "script": "scripts/pay.py"}'),
)


class ReadingModel(Model):
    """Reads the skill, then runs its script, in any process."""

    name = "reading"

    async def reply(self, request: Request, emit: Emit | None = None) -> Reply:
        """Return the next call, or the answer."""
        turn = len(request.messages) // 2
        return Reply(calls=(CALLS[turn],)) if turn < len(CALLS) else Reply(text="paid")


@pytest.fixture
def disk_folder() -> Iterator[Path]:
    """A folder that a sandbox can show: of /dev it shows nothing."""
    with TemporaryDirectory() as place:
        Path(place).chmod(0o755)
        yield Path(place)


def agent_in(folder: Path) -> Agent:
    """Return the agent; its script writes into a file, which outlives its processes."""
    skills, book = folder / "skills", folder / "book"
    if not book.exists():
        (skills / "pay/scripts").mkdir(parents=True)
        (skills / "pay/SKILL.md").write_text(SKILL)
        (skills / "pay/scripts/pay.py").write_text(f"open({str(book / 'paid')!r}, 'a').write('paid\\n')")
        book.mkdir()
        book.chmod(0o777)  # root's sandboxes write as another user
    return Agent(
        ReadingModel(),
        skills=Skills(skills, trusted=True, sandbox=Sandbox(write=[book])),
        store=SQLiteStore(str(folder / "runs.db"), connect=connect),
        limits=Limits(crashes=1_000_000),
    )


async def work(place: Path) -> None:
    """Drive the run to its end, or until this process is killed."""
    await drive(agent_in(place), "r", lambda _item: "the bank knows")


def times_paid(folder: Path) -> int:
    """Return how often the script had its effect."""
    paid = folder / "book/paid"
    return paid.read_text().count("paid") if paid.exists() else 0


async def check(place: Path) -> None:
    """Check that the run is over, and that it paid at most once."""
    async with agent_in(place) as agent:
        run = await agent.load("r")
    assert (run.state, run.output) == (State.DONE, "paid")
    times, settled = times_paid(place), "the bank knows" in str(run.messages)
    assert times <= 1
    assert times or settled  # without the person's word, it was paid


@pytest.mark.parametrize("apart", [7, pytest.param(1, marks=pytest.mark.soak)])
def test_a_run_with_a_skill_may_be_killed(fork_server, disk_folder, apart):
    """Before and after each commit."""
    if find_isolation().isolation is None:
        pytest.skip("no sandbox here")
    assert kill_at_each(fork_server, disk_folder, work, check, "commit", apart=apart) > 10
