"""What people and other commands give to the checks: evidence, waivers, files of the project, and load tests."""

import json
import logging
from datetime import date
from xml.etree.ElementTree import fromstring

import anyio
import pytest

from agentfsm import Agent, ClosedError, MisuseError, tool
from agentfsm.cli import main
from agentfsm.readiness import CheckStatus, DrillReport, LoadReport, examine_readiness, load_waivers, measure_load
from agentfsm.stores import SQLiteStore
from agentfsm.telemetry.alerts import format_rules
from agentfsm.telemetry.totals import Totals
from agentfsm.testing import FunctionModel
from tests.support.checks import virtually

TODAY = date(2026, 11, 26)
AGENT = Agent(FunctionModel(lambda _request: "ok"), name="shop")
LOAD = LoadReport(
    agent="shop", fingerprint=AGENT.fingerprint.digest, at="2026-11-26T12:00:00", model="function", runs=100,
    concurrency=4, failed=0, seconds=1.0, p50_s=0.1, p95_s=0.2, p99_s=0.3, tokens=800,
)  # fmt: skip


async def examine(folder, agent=AGENT, **options):
    report = await examine_readiness(
        agent, evidence=folder, project=folder, **{"probes": False, "on": TODAY, **options}
    )
    return {each.id: each for each in report.checks}


async def test_a_load_test_that_was_saved_is_evidence(tmp_path):
    """It is read as it was written, also into a folder that was not there."""
    LOAD.save(tmp_path / "new" / "load.json")
    checks = await examine(tmp_path / "new")
    assert [checks[name].status for name in ("latency-baseline", "load-test")] == [CheckStatus.PASS] * 2


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"p50_s": "fast"}, "p50_s='fast'"),
        ({"p95_s": None}, "p95_s=None"),
        ({"p99_s": float("nan")}, "p99_s=nan"),
        ({"failed": None}, "failed=None"),
        ({"failed": -1}, "failed=-1"),
        ({"concurrency": "4"}, "concurrency='4'"),
        ({"runs": 0}, "runs=0"),
        ({"runs": True}, "runs=True"),
        ({"fingerprint": None}, "fingerprint=None"),
        ({"colour": "red"}, "colour"),
    ],
)
async def test_a_load_report_with_rubbish_is_no_evidence(tmp_path, fields, why):
    """It fails the checks that read it, which name the file and the field, and the other checks go on."""
    LOAD.save(tmp_path / "load.json")
    document = json.loads((tmp_path / "load.json").read_text(encoding="utf-8"))
    (tmp_path / "load.json").write_text(json.dumps(document | fields), encoding="utf-8")
    checks = await examine(tmp_path)
    for name in ("latency-baseline", "load-test"):
        assert checks[name].status is CheckStatus.FAIL
        assert "load.json is not a LoadReport" in checks[name].detail
        assert why in checks[name].detail
    assert checks["eval-cases"].status is CheckStatus.UNKNOWN


@pytest.mark.parametrize("content", ["[" * 100_000, "[]", "null", "5", "", "\ufeff{}"])
@pytest.mark.parametrize(
    ("name", "check"), [("load.json", "load-test"), ("eval.json", "eval-cases"), ("restore.json", "restore-drill")]
)
async def test_a_file_that_is_no_report_is_no_evidence(tmp_path, name, check, content):
    """Whatever JSON it is, and however deep."""
    (tmp_path / name).write_text(content, encoding="utf-8")
    assert (await examine(tmp_path))[check].status is CheckStatus.FAIL


@pytest.mark.parametrize(
    ("fields", "status", "why"),
    [
        ({}, CheckStatus.PASS, "40 s, 2026-11-26T12:00:00, by ann"),
        ({"at": "2026-11-27T05:00:00+14:00"}, CheckStatus.PASS, "by ann"),
        ({"at": "2026-08-28"}, CheckStatus.PASS, "by ann"),
        ({"at": "2026-08-27"}, CheckStatus.FAIL, "by ann"),
        ({"at": "2036-11-26"}, CheckStatus.FAIL, "in the future"),
        ({"at": "soon"}, CheckStatus.FAIL, "'soon'"),
        ({"at": 5}, CheckStatus.FAIL, "at=5"),
        ({"by": None}, CheckStatus.FAIL, "by=None"),
        ({"by": " "}, CheckStatus.FAIL, "by=' '"),
        ({"seconds": "40"}, CheckStatus.FAIL, "seconds='40'"),
        ({"seconds": float("nan")}, CheckStatus.FAIL, "seconds=nan"),
    ],
)
@pytest.mark.parametrize("name", ["rollback", "restore"])
async def test_a_drill_counts_with_its_person_and_its_time(tmp_path, name, fields, status, why):
    """For 90 days; one in the future was not practised."""
    of = {"kind": name, "subject": "shop", "checked": 10, "agents": ["shop"]}
    drill = of | {"at": "2026-11-26T12:00:00", "seconds": 40, "by": "ann"} | fields
    (tmp_path / f"{name}.json").write_text(json.dumps(drill), encoding="utf-8")
    found = (await examine(tmp_path))[f"{name}-drill"]
    assert (found.status, why in found.detail) == (status, True), found


def test_a_drill_without_a_person_is_none():
    """Also where it is recorded by a program."""
    with pytest.raises(MisuseError, match=r"DrillReport\(by=''\)"):
        DrillReport(kind="restore", subject="b.db", at="2026-11-26", seconds=1, by="", checked=1)


WAIVER = '[[waiver]]\ncheck = "{}"\nby = "ann"\nuntil = {}\nreason = "{}"\n'


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("waiver = [1]", "has the fields check, by, until, reason, not 1"),
        ('waiver = ["logs"]', "not 'logs'"),
        ("waiver = 1", r"begin each waiver with \[\[waiver\]\]"),
        ('[waiver]\ncheck = "logs"', r"begin each waiver with \[\[waiver\]\]"),
        ("[[waiver]]", "has the fields check, by, until, reason, not "),
        (WAIVER.format("logs", "2027-01-31T00:00:00", "x"), "of 'logs' is no date"),
        (WAIVER.format("logs", "2027-01-31", " "), "none is empty"),
        (WAIVER.format("logs", "2027-01-31", "x") + WAIVER.format("logs", "2020-01-31", "x"), "two waivers of 'logs'"),
        ("waiver = ", "is not a file of waivers"),
    ],
)
def test_waivers_that_say_less_than_they_must_are_refused(tmp_path, text, why):
    """Each has a person, a reason and a day; of two for one check nobody knows which counts."""
    path = tmp_path / "waivers.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(MisuseError, match=why):
        load_waivers(path)


def test_files_that_are_no_waivers(tmp_path):
    """A missing file, a folder and bytes are refused; a file without waivers has none."""
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    for path in (tmp_path / "missing.toml", tmp_path, tmp_path / "bytes.toml"):
        with pytest.raises(MisuseError, match="is not a file of waivers"):
            load_waivers(path)
    (tmp_path / "empty.toml").touch()
    assert load_waivers(tmp_path / "empty.toml") == {}


def test_the_reason_of_a_waiver_cannot_break_a_report(tmp_path, monkeypatch, capsys):
    """Characters that XML has no place for, that move a cursor, or that end a cell of a table."""
    (tmp_path / "shop.py").write_text(
        "from agentfsm import Agent\nfrom agentfsm.testing import FunctionModel\n"
        "agent = Agent(FunctionModel(lambda _: 'ok'), name='shop')\n"
    )
    (tmp_path / "w.toml").write_text(WAIVER.format("traces", "2999-01-01", r"a|b \u000b\u001b[2J<i> c"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    words = ["doctor", "--production", "shop:agent", "--no-probes", "--waivers", "w.toml"]
    assert main([*words, "--write", "page.md", "--junit", "out.xml"]) == 1
    assert "waived by ann until 2999-01-01: a|b <i> c\n" in capsys.readouterr().out
    suite = fromstring((tmp_path / "out.xml").read_text(encoding="utf-8"))  # noqa: S314  the package wrote it
    [skipped] = suite.iter("skipped")
    assert skipped.get("message").endswith("a|b <i> c")
    [row] = [
        line for line in (tmp_path / "page.md").read_text(encoding="utf-8").splitlines() if line.startswith("| `traces")
    ]
    assert r"a\|b &lt;i> c" in row
    assert row.replace(r"\|", "").count("|") == 6


async def test_links_to_nowhere_in_a_project_hold_up_nothing(tmp_path):
    """They are passed over, and the alerts are found beside them."""
    (tmp_path / "a.yml").symlink_to(tmp_path / "gone.yml")
    (tmp_path / "Makefile").symlink_to(tmp_path / "gone")
    (tmp_path / "folder.yml").mkdir()
    (tmp_path / "y.yml").write_bytes(b"\xff")
    (tmp_path / "z.yml").write_text(format_rules(), encoding="utf-8")
    checks = await examine(tmp_path)
    assert (checks["alerts"].status, checks["alerts"].detail[2:20]) == (CheckStatus.PASS, " alerts in z.yml, ")
    assert checks["evals-in-ci"].status is CheckStatus.FAIL
    assert (await examine(tmp_path / "missing"))["alerts"].status is CheckStatus.FAIL


@pytest.mark.parametrize(
    ("rules", "why"),
    [
        ("# - alert: X of agentfsm_runs_total\n", "is not a file of rules"),
        ("- alert: X\n  expr: agentfsm_runs_total > 1\n", "is not a file of rules"),
        (
            "groups: [{name: a, rules: [{alert: X, expr: agentfsm_runs_total > 1}]}]\n",
            "no alert in x.yml is about latency or costs",
        ),
    ],
)
async def test_alerts_are_rules_about_what_can_go_wrong(tmp_path, rules, why):
    """Words in a comment, and a rule about one thing, are not."""
    (tmp_path / "x.yml").write_text(rules, encoding="utf-8")
    found = (await examine(tmp_path))["alerts"]
    assert (found.status, why in found.detail) == (CheckStatus.FAIL, True), found


async def test_promtool_checks_the_rules(tmp_path, monkeypatch):
    """Where it is installed; its words are the reason."""
    (tmp_path / "x.yml").write_text(format_rules(), encoding="utf-8")
    tool = tmp_path / "promtool"
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    for code, status in ((0, CheckStatus.PASS), (1, CheckStatus.FAIL)):
        tool.write_text(f'#!/bin/sh\necho "$1 $2: bad rule" >&2\nexit {code}\n', encoding="utf-8")
        tool.chmod(0o700)
        found = (await examine(tmp_path))["alerts"]
        assert (found.status, "promtool" in found.detail) == (status, True), found
    assert "check rules: bad rule" in found.detail


async def test_a_follower_that_nobody_runs_does_not_count(tmp_path):
    """It is still in the store; what it has not read for more than an hour tells."""

    async def play(store, clock):
        agent = Agent(FunctionModel(lambda _request: "ok"), name="shop", store=store, clock=clock)
        await Totals(store).catch_up()
        await agent.run("x")
        assert (await examine(tmp_path, agent))["metrics"].status is CheckStatus.PASS
        await anyio.sleep(3_700)
        found = (await examine(tmp_path, agent))["metrics"]
        assert (found.status, "has read nothing since" in found.detail) == (CheckStatus.FAIL, True)

    await anyio.to_thread.run_sync(virtually, play)


async def test_a_command_in_a_comment_of_ci_runs_nothing(tmp_path):
    """Only lines that are carried out count."""
    (tmp_path / "Makefile").write_text("# agentfsm eval run suite.yaml\n", encoding="utf-8")
    assert (await examine(tmp_path))["evals-in-ci"].status is CheckStatus.FAIL


class Unpriced(FunctionModel):
    """A model of the user's own, with a bug."""

    def cost_usd(self, usage):
        raise ZeroDivisionError("no tariff")


async def test_a_check_that_raises_is_unknown(tmp_path):
    """An error of the agent's own code is told, and does not take the rest of the report along."""
    checks = await examine(tmp_path, AGENT.with_(model=Unpriced(lambda _request: "ok")))
    assert checks["prices"].status is CheckStatus.UNKNOWN
    assert "raised ZeroDivisionError: no tariff" in checks["prices"].detail
    assert checks["run-cost"].status is CheckStatus.FAIL


@pytest.mark.parametrize(
    ("names", "executes"),
    [
        (("code",), True),
        (("shellCommand",), True),
        (("javascript",), True),
        (("args", "source_code"), True),
        (("description",), False),
        (("subscription", "transcript", "postcode", "encoding"), False),
    ],
)
async def test_parameters_that_hold_something_to_execute(tmp_path, names, executes):
    """By whole names: a description is no script."""

    async def act(**given):
        """Act."""

    schema = {"type": "object", "properties": {name: {"type": "string"} for name in names}}
    checks = await examine(tmp_path, AGENT.with_(tools=[tool(parameters=schema, read_only=True)(act)]))
    assert checks["tool-sandbox"].status is (CheckStatus.FAIL if executes else CheckStatus.PASS)


async def test_agents_that_are_examined_at_once_do_not_silence_the_process(tmp_path, monkeypatch):
    """Probes are silent one agent after the other, so each gives back the level that the logger had."""
    logger = logging.getLogger("agentfsm")
    levels, set_level = [], logger.setLevel

    def note(level):
        levels.append(level)
        set_level(level)

    monkeypatch.setattr(logger, "setLevel", note)
    before = logger.level

    async def probe(name):
        await examine(tmp_path, AGENT.with_(name=name, instructions="Be brief."), probes=True)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(probe, "one")
        tasks.start_soon(probe, "two")
    assert levels == [logging.CRITICAL + 1, before] * 2


async def test_instructions_that_raise_are_told(tmp_path):
    """A probe that cannot run the agent is unknown, with the error."""

    def broken(_ctx):
        raise KeyError("no tenant")

    checks = await examine(tmp_path, AGENT.with_(instructions=broken), probes=True)
    assert {checks[name].status for name in ("empty-reply", "turn-limit")} <= {CheckStatus.UNKNOWN, CheckStatus.FAIL}
    assert "no tenant" in checks["empty-reply"].detail


# Load tests.


async def test_as_many_runs_at_a_time_as_there_are():
    """One run is no test of concurrency, whatever was asked for."""
    report = await measure_load(AGENT, ["go"], runs=1, concurrency=50)
    assert (report.runs, report.concurrency, report.failed) == (1, 1, 0)
    assert report.p50_s == report.p95_s == report.p99_s > 0 < report.seconds


@pytest.mark.parametrize(
    "options",
    [{"prompts": "What about order 7?"}, {"prompts": []}, {"runs": 0}, {"runs": True}, {"concurrency": 0}],
    ids=str,
)
async def test_a_load_test_of_nothing_is_refused(options):
    """One text is not a list of prompts, each of which would be a character."""
    with pytest.raises(MisuseError, match="measure_load"):
        await measure_load(AGENT, **{"prompts": ["go"], "runs": 1, "concurrency": 1, **options})


async def test_a_store_that_is_closed_ends_a_load_test(tmp_path):
    """With its own error, and not a group of one for each run at that time."""
    store = SQLiteStore(tmp_path / "runs.db")
    await store.aclose()
    with pytest.raises(ClosedError):
        await measure_load(AGENT.with_(store=store), ["go"], runs=6, concurrency=3)


async def test_a_run_that_raised_has_no_known_cost():
    """So the sum is unknown, and not that of the others."""
    asked = []

    def fail_first(_request):
        asked.append(1)
        if len(asked) == 1:
            raise ValueError("a bug")
        return "ok"

    class Priced(FunctionModel):
        def cost_usd(self, usage):
            return 0.01

    agent = AGENT.with_(model=Priced(fail_first))
    assert (await measure_load(agent, ["go"], runs=2, concurrency=1)).usd is None
    seen = []
    report = await measure_load(agent, ["a", "b"], runs=3, concurrency=1, on_run=seen.append)
    assert report.usd == pytest.approx(0.03)
    assert [run.header.prompt[0].text for run in seen] == ["a", "b", "a"]
