"""Drills: a roll-back of a copy, and a restore of a backup, are carried out, measured and recorded."""

import sqlite3

import pytest

from agentfsm import Agent, CorruptError, MisuseError
from agentfsm.journal.seals import SealFile
from agentfsm.readiness import drill_restore, drill_rollback
from agentfsm.readiness.evidence import ROLLBACK_FILE, Evidence
from agentfsm.releases import Rollout
from agentfsm.stores import MemoryStore, SQLiteStore
from agentfsm.testing import ScriptedModel
from tests.support.checks import virtually


def build_rollout(store):
    agent = Agent(ScriptedModel(), name="shop", store=store, version="1")
    return Rollout("shop", {"old": agent, "new": agent.with_(version="2")})


def test_a_rollback_is_practised_on_a_copy(tmp_path):
    """Until each user of the other process gets the old release; the roll-out keeps its weights."""

    async def play(store, clock):
        rollout = build_rollout(store)
        with pytest.raises(MisuseError, match="there is no roll-out 'shop'"):
            await drill_rollback("shop", store, by="ann", clock=clock)
        await rollout.start({"old": 60, "new": 40}, by="ann", reason="a try")
        report = await drill_rollback("shop", store, by="bob", clock=clock)
        assert (report.kind, report.subject, report.by, report.checked) == ("rollback", "shop", "bob", 1_000)
        assert 1.9 < report.seconds < 2.2  # the age at which a process reads the plan again
        moved = int(report.note.partition("; ")[2].rpartition(" of 1,000")[0].rpartition(" ")[2])
        assert 350 < moved < 450
        assert [each.action for each in await rollout.control.log()] == ["start"]
        report.save(tmp_path)
        assert Evidence(tmp_path).read_drill(ROLLBACK_FILE) == report

    virtually(play)


async def make_backup(folder):
    """Return a store with two runs, and the file of its backup, which has both."""
    store = SQLiteStore(folder / "runs.db")
    agent = Agent(ScriptedModel("a", "b", "c"), store=store)
    await agent.run("x", id="one")
    await agent.run("y", id="two")
    with sqlite3.connect(folder / "runs.db") as connection:
        connection.execute("VACUUM INTO ?", [str(folder / "backup.db")])
    return agent, folder / "backup.db"


async def test_a_backup_is_opened_and_read(tmp_path):
    """All of its runs; those of the store that began later are not missed, and the backup itself is only copied."""
    agent, backup = await make_backup(tmp_path)
    seals = SealFile(tmp_path / "seals")
    async for _ in seals.seal(agent.store):
        pass
    before = backup.read_bytes()
    await agent.run("z", id="three")
    report = await drill_restore(str(backup), by="ann", live=agent.store, seals=seals.path)
    assert (report.kind, report.subject, report.checked) == ("restore", "backup.db", 2)
    assert report.note.startswith("2 runs with 4 events until ")
    assert report.note.endswith("as they were sealed")
    assert backup.read_bytes() == before
    await agent.store.aclose()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("DELETE FROM runs WHERE id = 'one'", "lacks 1 runs that are older than its newest event, such as one"),
        ("DELETE FROM runs", "the backup has no runs"),
        ("UPDATE events SET body = '{'", "run '(one|two)'"),
    ],
)
async def test_a_backup_that_is_not_whole_is_no_drill(tmp_path, change, why):
    """A run that is missing, or that cannot be read."""
    agent, backup = await make_backup(tmp_path)
    with sqlite3.connect(backup) as connection:
        connection.execute(change)
    with pytest.raises((MisuseError, CorruptError), match=why):
        await drill_restore(str(backup), by="ann", live=agent.store)
    await agent.store.aclose()


async def test_the_command_that_restores_has_to_succeed(tmp_path):
    """Its error is told, and so is a backup that is not there."""
    with pytest.raises(MisuseError, match="'echo no disk >&2; exit 3' ended with code 3: no disk"):
        await drill_restore("postgresql:///drill", by="ann", command="echo no disk >&2; exit 3")
    with pytest.raises(MisuseError, match="there is no backup at"):
        await drill_restore(str(tmp_path / "gone.db"), by="ann", live=MemoryStore())
