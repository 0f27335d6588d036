"""The benchmarks do their work and check it; how fast is not asked here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import pytest

from agentfsm import Agent
from agentfsm.ports import Reply
from agentfsm.stores import SQLiteStore
from agentfsm.testing import HashEmbedder, ScriptedModel, call, say
from agentfsm.tools.tool import make_tool
from benchmarks import __main__ as table
from benchmarks import bare, direct_harm, growth, locomo, ours, questions
from benchmarks.contender import Contender, Script
from benchmarks.floor import Floor
from benchmarks.peers import driver
from benchmarks.rows import rows

QUICK = (
    "run",
    "turns",
    "fan-out",
    "naps",
    "journal:20",
    "journal:full",
    "chunk",
    "chunk:merged",
    "http:10",
    "sse",
    "mcp:2026-07-28",
    "import:tool",
)


@pytest.fixture(params=["asyncio"])
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    """The floor is a loop of asyncio."""
    return request.param


@pytest.mark.parametrize("row", [row for row in rows() if row.id in QUICK], ids=lambda row: row.id)
@pytest.mark.parametrize(
    "contender", [Floor(), ours.contender(), bare.contender()], ids=lambda contender: type(contender).__name__
)
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


async def test_a_bare_tool_runs_its_calls_one_by_one():
    """The two contenders of ours differ in what their tool declares, and nothing else."""
    script = Script(turns=1, width=2)
    for contender, declared in ((ours.contender(), True), (bare.contender(), False)):
        agent = contender._following(script, ours.MemoryStore())
        assert [each.read_only for each in agent.tools] == [declared]


async def test_long_runs_are_measured(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Single turns of a run, and what it takes to open it; here of a short one."""
    monkeypatch.setattr(growth, "LONG", Script(turns=40))
    monkeypatch.setattr(growth, "TOLD", (10, 30))
    monkeypatch.setattr(growth, "AROUND", 5)
    monkeypatch.setattr(growth, "DRIVES", 1)
    await growth.single_turns()
    store = SQLiteStore(tmp_path / "runs.db")
    await growth.opening(store, "SQLite")
    await store.aclose()
    printed = capsys.readouterr().out
    assert all(words in printed for words in ("turn 30", "in memory", "a run of 40 turns", "to resume (stall"))


def test_both_columns_are_in_the_tables():
    """With `read_only=True` and with a bare `@tool`; who is ahead is told for each."""
    [row] = [row for row in rows() if row.id == "turns"]
    figures = {"ours": 6.0, "bare": 9.0, "peer": 8.0}
    results = {
        name: {row.id: {"row": row.id, "contender": name, "floor": 2.0, "own": 2 * ratio, "ratio": ratio}}
        for name, ratio in figures.items()
    }
    page = driver.table([row], results)
    assert "| 2 us | **6x** | 9x | 8x |" in page
    assert "Ahead of ours: nobody." in page
    assert "Ahead of bare: turns, peer." in page
    entry = {**results["ours"][row.id], "own_spread": 0.1}
    assert "6.00x          9x           9x         4x" in table.line(row, entry, results["bare"][row.id])


async def test_the_outcome_of_an_attack_does_not_depend_on_labels():
    """Without a guard each harmful call runs, and counts; under a guard, those run that no label is about."""
    readers, harms = direct_harm.READERS[:1], direct_harm.HARMS[::8]
    named = [*harms, next(harm for harm in direct_harm.HARMS if harm[0] == "transfer_money")]
    figures = await direct_harm.count_pairs(readers, named)
    assert (figures.pairs, figures.succeeded["no guard"]) == (4, 4)
    assert figures.succeeded["Guard.default(), no labels"] == 4
    assert figures.succeeded["Guard.by_labels(), labels as in MARKS"] == 2
    assert figures.succeeded["Guard.default(), labels as in MARKS"] == 0
    assert len(direct_harm.READERS) * len(direct_harm.HARMS) == 288


async def test_the_questions_of_ordinary_work_are_counted(tmp_path, monkeypatch):
    """Each call is noted with the policies that ask about it, and runs; the pages and examples are all there."""
    log = tmp_path / "calls.jsonl"
    monkeypatch.setenv(questions.LOG, str(log))
    tools = [make_tool(lambda: "text", name="read", description="Read.", read_only=True, reads_untrusted=True)]
    tools += [make_tool(lambda: "done", name="pay", description="Pay.", irreversible=True)]
    model = ScriptedModel(say("", call("read")), say("", call("pay")), "Done.")
    run = await Agent(model, tools=tools, guards=[questions.Counting()]).run("Help.")
    assert run.output == "Done."
    asking = [json.loads(line)["asking"] for line in log.read_text().splitlines()]
    assert asking == [[], ["by_labels", "default"]]  # those of strict are counted in runs of its own
    tasks = questions.list_tasks(tmp_path)
    assert (len(tasks["tutorial"]), "guarded" in tasks["examples"]) == (8, True)


async def test_recall_on_dialogues(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """A made set of the shape of LoCoMo is measured: each way to search finds what is easy, by kind of question."""
    monkeypatch.setattr(locomo, "TUNED", 1)
    subjects = ("violin", "garden", "kayak", "bakery", "telescope", "marathon")
    samples = []
    for number in range(2):
        talk: dict[str, Any] = {"speaker_a": "Ann", "speaker_b": "Bob"}
        for place, subject in enumerate(subjects, 1):
            talk[f"session_{place}_date_time"] = f"1:56 pm on {place} May, 2023"
            talk[f"session_{place}"] = [
                {"speaker": "Ann", "dia_id": f"D{place}:1", "text": f"Let me tell you about my {subject}"},
                {"speaker": "Bob", "dia_id": f"D{place}:2", "text": "Go on", "blip_caption": f"a photo of a {subject}"},
            ]
        talk["session_9_date_time"] = "1:56 pm on 9 May, 2023"  # some sessions of the set have a time only
        asked = [
            {"question": f"Who has a {subject}?", "evidence": [f"D{place}:1; D{place}:2"], "category": 1 + place % 5}
            for place, subject in enumerate(subjects, 1)
        ]
        samples.append({"sample_id": f"s{number}", "conversation": talk, "qa": [*asked, {**asked[0], "evidence": []}]})
    path = tmp_path / "made.json"
    path.write_text(json.dumps(samples))
    shares = await locomo.measure(str(path), HashEmbedder())
    assert [*shares] == ["script", "text", "text and vectors"]
    for found in shares.values():
        assert {(tuned, kind) for tuned, kind, _ in found} == {
            (t, kind) for t in (True, False) for kind in locomo.KINDS
        }
        assert all(share == 1.0 for each in found.values() for share in each)
    locomo.show(shares)
    assert capsys.readouterr().out.count("100.0") == 2 * 6 * 3 * 3
