"""Drills: a roll-back of a copy, and a restore of a backup, are carried out, measured and recorded."""

import re
import sqlite3

import pytest

from agentfsm import Agent, MisuseError
from agentfsm.journal.seals import SealFile
from agentfsm.readiness import drill_restore, drill_rollback
from agentfsm.readiness.evidence import RESTORE_FILE, ROLLBACK_FILE, Evidence
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


TARGETS = ["new:role=tester", "new:user=tess,tenant=acme,metadata.plan=beta"]


@pytest.mark.parametrize(
    ("weights", "targets", "moved", "failure"),
    [
        ({"old": 100}, TARGETS, "2 of 1,002", ""),
        ({"old": 60, "new": 40}, TARGETS[:1], "of 1,001", ""),
        ({"old": 99.99, "new": 0.01}, [], "0 of 1,000", "nobody got another arm"),
        ({"old": 100}, [], "", "no plan that was in effect before"),
    ],
)
def test_a_rollback_has_to_move_somebody(weights, targets, moved, failure):
    """Those that targets are about are among the users; a drill that changes nothing has failed."""

    async def play(store, clock):
        await build_rollout(store).start(weights, targets=targets, by="ann", reason="a try")
        report = await drill_rollback("shop", store, by="bob", clock=clock)
        assert (moved in report.note, failure in report.failure, bool(report.failure)) == (True, True, bool(failure))

    virtually(play)


def test_a_release_that_is_not_in_the_store_fails_the_drill():
    """The one that the plan before gives to its targets, too."""

    async def play(store, clock):
        rollout = build_rollout(store)
        await rollout.start({"old": 100}, targets=["new:user=tess"], by="ann", reason="a try")
        await rollout.control.set_targets([], by="ann", reason="tess is away")
        for record in await store.list_records("release"):
            if record.value["version"] == "2":
                await store.delete_record("release", record.key)
        report = await drill_rollback("shop", store, by="bob", clock=clock)
        assert "2" in report.failure

    virtually(play)


async def make_backup(folder):
    """Return a store with two runs, and the file of its backup, which has both."""
    store = SQLiteStore(folder / "runs.db")
    agent = Agent(ScriptedModel("a", "b", "c"), name="shop", store=store)
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
    assert (report.agents, report.failure) == (("shop",), "")
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
async def test_a_backup_that_is_not_whole_fails_the_drill(tmp_path, change, why):
    """A run that is missing, or that cannot be read; the record takes the place of one that passed."""
    agent, backup = await make_backup(tmp_path)
    (await drill_restore(str(backup), by="ann", live=agent.store)).save(tmp_path)
    with sqlite3.connect(backup) as connection:
        connection.execute(change)
    report = await drill_restore(str(backup), by="ann", live=agent.store)
    assert re.search(why, report.failure)
    report.save(tmp_path)
    assert Evidence(tmp_path).read_drill(RESTORE_FILE) == report
    await agent.store.aclose()


async def test_the_command_that_restores_has_to_succeed(tmp_path):
    """Its error is told, and so is a backup that is not there, or no store."""
    failed = await drill_restore("postgresql:///drill", by="ann", command="echo no disk >&2; exit 3")
    assert failed.failure == "'echo no disk >&2; exit 3' ended with code 3: no disk"
    gone = await drill_restore(str(tmp_path / "gone.db"), by="ann", live=MemoryStore())
    assert "there is no backup at" in gone.failure
    (tmp_path / "text.db").write_text("not a database, but longer than its header would be" * 9, encoding="utf-8")
    assert "text.db" in (await drill_restore(str(tmp_path / "text.db"), by="ann")).failure
