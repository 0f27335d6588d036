"""Seals find what somebody with access to the database has changed, in each kind of database."""

import json

import pytest

from agentfsm import Agent, CorruptError, MisuseError, tool
from agentfsm.journal.seals import Fault, SealFile, read_seal_key
from agentfsm.testing import ScriptedModel, call, say

KEY = b"k" * 32


@tool
async def pay(cents: int) -> str:
    """Pay."""
    return f"paid {cents}"


async def pay_in(store, run_id, cents=500):
    agent = Agent(ScriptedModel(say("", call("pay", cents=cents)), "Done."), tools=[pay], store=store)
    await agent.run("Pay.", id=run_id)


async def seal(store, seals):
    return [each async for each in seals.seal(store)]


async def check(store, seals, *run_id, **options):
    return [each async for each in seals.verify(store, *run_id, **options)]


async def test_an_amount_is_rewritten(place, tmp_path):
    """500 becomes 900 in a row of the database: the run and the part of its journal are named; others are intact."""
    store, seals = place.make(), SealFile(tmp_path / "seals", key=KEY)
    await pay_in(store, "r1", 700)
    await pay_in(store, "r2")
    [first, second] = await seal(store, seals)
    assert await seal(store, seals) == []
    assert [each.fault for each in await check(store, seals)] == [None, None]
    place.rewrite("500", "900")
    [intact, changed] = await check(place.make(), seals)
    assert (intact.run_id, intact.fault) == ("r1", None)
    assert (changed.run_id, changed.fault, changed.intact, changed.changed_by) == (
        "r2",
        Fault.CHANGED,
        0,
        second.version,
    )
    assert changed.sealed_at == second.at >= first.at
    assert (await store.read("r2")).events != ()


@pytest.mark.parametrize("line", [0, 1])
async def test_a_line_of_the_file_is_changed(store, tmp_path, line):
    """Or taken away: the file itself shows it. Without a line at its end, only a head kept elsewhere does."""
    seals = SealFile(tmp_path / "seals", key=KEY)
    for run_id in ("r1", "r2", "r3"):
        await pay_in(store, run_id)
        await seal(store, seals)
    head = seals.head()
    assert head.seals == 3
    lines = seals.path.read_text().splitlines(keepends=True)
    seals.path.write_text("".join(lines[:line] + lines[line + 1 :]))
    with pytest.raises(CorruptError, match=f"line {line + 1} of .* lines before it are gone"):
        seals.head()
    content = json.loads(lines[line])
    lines[line] = json.dumps(content | {"version": 2}) + "\n"
    seals.path.write_text("".join(lines))
    with pytest.raises(CorruptError, match=f"line {line + 1} of"):
        await check(store, seals)


async def test_the_end_of_the_file_is_cut_off(store, tmp_path):
    """A head that was kept elsewhere shows it, and a line that a crash has cut off is written again."""
    seals = SealFile(tmp_path / "seals", key=KEY)
    await pay_in(store, "r1")
    await seal(store, seals)
    whole = seals.path.read_bytes()
    await pay_in(store, "r2")
    await seal(store, seals)
    head = seals.head().head
    assert [each.run_id for each in await check(store, seals, head=head)] == ["r1", "r2"]
    seals.path.write_bytes(whole)
    with pytest.raises(CorruptError, match="seals were cut off"):
        await check(store, seals, head=head)
    seals.path.write_bytes(whole + b'{"run":"r2","ver')
    await pay_in(store, "r3")
    await seal(store, seals)
    assert [each.run_id for each in await check(store, seals)] == ["r1", "r3"]


async def test_runs_that_are_shorter_or_gone(store, path, tmp_path):
    """Rows that are deleted at the end of a journal, and runs that are deleted, are told apart."""
    seals = SealFile(tmp_path / "seals", key=KEY)
    await pay_in(store, "r1")
    await pay_in(store, "r2")
    [_, sealed] = await seal(store, seals)
    await store.delete("r1")
    stored = await store.read("r2")

    class Shortened:
        async def read(self, run_id):
            if run_id == "r1":
                return await store.read(run_id)
            return type(stored)(header=stored.header, events=stored.events[:-1])

    [gone, shorter] = await check(Shortened(), seals)
    assert (gone.run_id, gone.fault) == ("r1", Fault.MISSING)
    assert (shorter.fault, shorter.changed_by) == (Fault.SHORTENED, sealed.version)


async def test_keys(store, tmp_path):
    """Another key is named as the reason; a key that can be guessed is refused; one does not show in a repr."""
    seals = SealFile(tmp_path / "seals", key=KEY)
    await pay_in(store, "r1")
    await seal(store, seals)
    assert "kkk" not in repr(seals)
    with pytest.raises(MisuseError, match="with another key: set AGENTFSM_SEAL_KEY"):
        SealFile(seals.path, key=b"x" * 32).head()
    with pytest.raises(MisuseError, match="which can be guessed"):
        read_seal_key({"AGENTFSM_SEAL_KEY": "short"})
    with pytest.raises(MisuseError, match=r"cannot be read \(No such file"):
        SealFile(tmp_path / "none", key=KEY).head()
    with pytest.raises(MisuseError, match="run 'r9' has no seal"):
        await check(store, seals, "r9")


async def test_another_format(store, tmp_path, monkeypatch):
    """Records of another format have other hashes, which is not taken for a change."""
    seals = SealFile(tmp_path / "seals", key=KEY)
    await pay_in(store, "r1")
    await seal(store, seals)
    monkeypatch.setattr("agentfsm.journal.seals.FORMAT", 9)
    with pytest.raises(MisuseError, match="has seals of format 5, and this agentfsm hashes format 9"):
        await check(store, seals)
