"""The checks before going live: the production example passes each, and each turns red when its cause is taken away."""

import json
import logging
import runpy
import shutil
from datetime import date
from pathlib import Path

import anyio
import attrs
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from agentfsm import Agent, Limits, Spend, tool
from agentfsm.context import Context, SlidingWindow
from agentfsm.evals import evaluate
from agentfsm.flow import Flow, agent_step, step
from agentfsm.guards import Guard, exit_filter, max_calls, no
from agentfsm.readiness import CheckStatus, DrillReport, Waiver, examine_readiness, measure_load
from agentfsm.readiness.checks import CHECKS
from agentfsm.stores import MemoryStore, SQLiteStore
from agentfsm.telemetry import Telemetry
from agentfsm.telemetry.alerts import format_rules
from agentfsm.telemetry.totals import Totals
from agentfsm.testing import FunctionModel, ScriptedModel

EXAMPLE = Path(__file__).parents[2] / "examples" / "production"
TODAY = date(2026, 11, 26)


async def prepare(folder: Path):
    """Copy the example, make its evidence, and return its agent."""
    shutil.copytree(EXAMPLE, folder, dirs_exist_ok=True)
    module = runpy.run_path(str(folder / "support.py"))
    traces = Telemetry(InMemorySpanExporter())
    agent = module["agent"].with_(store=SQLiteStore(folder / "runs.db"), watch=[traces])
    (await evaluate(agent, module["suite"], runs=1)).save(folder / "evidence" / "eval.json")
    load = await measure_load(agent, ["What about order 7?"], runs=10, concurrency=4, runs_per_day=2_000)
    attrs.evolve(load, runs=100).save(folder / "evidence" / "load.json")
    await (
        module["rollout"]
        .with_(store=agent.store)
        .start({"before": 95, "now": 5}, by="ann", reason="a try", rules=["failures 5%"])
    )
    for kind, of in (("rollback", "support"), ("restore", "backup.db")):
        drill = DrillReport(
            kind=kind, subject=of, at="2026-11-01T12:00:00", seconds=40, by="ann", checked=10, agents=["support"]
        )
        drill.save(folder / "evidence")
    (folder / "alerts.yml").write_text(format_rules(), encoding="utf-8")
    await Totals(agent.store).catch_up()
    return agent


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("production")
    agent = anyio.run(prepare, folder)
    yield agent, folder
    anyio.run(agent.store.aclose)


async def examine(prepared, agent=None, **options):
    own, folder = prepared
    report = await examine_readiness(
        agent or own, evidence=folder / "evidence", project=folder, **{"probes": False, "on": TODAY, **options}
    )
    return report, {each.id: each for each in report.checks}


PROBED = {each.id for each in CHECKS if each.source == "probe"}


async def test_the_production_example_is_green(prepared):
    """Each check passes, with a reason."""
    report, checks = await examine(prepared, probes=True)
    assert {name: each.detail for name, each in checks.items() if each.status is not CheckStatus.PASS} == {}
    assert report.is_ready
    assert all(each.detail for each in checks.values())


@tool
async def run_script(script: str) -> str:
    """Run a script that is given as a text."""
    return script


def bare(agent):
    return agent.with_(guards=())


@tool(read_only=True, reads_untrusted=True)
async def find_page(word: str) -> str:
    """Find a page about a word."""
    return word


@tool(idempotent=True)
async def change_password(new: str) -> str:
    """Change the password of the user."""
    return new


NARROW = Guard(no("untrusted", "irreversible", verdict="ask"))
LIMITS = {"turn-limit", "token-budget"}
PATIENCE = {"empty-reply", "model-fallback"}
# A change of the agent -> the checks that turn red by it.
CHANGES = {
    "without guards": (bare, {"input-guard", "output-guard", "personal-data", "prompt-leak"}),
    "with an unguarded tool": (
        lambda agent: bare(agent).with_(tools=[run_script]),
        {"tool-sandbox", "approvals", "effects-declared"},
    ),
    "with a model without a price or substitute": (
        lambda agent: agent.with_(model=ScriptedModel("ok"), limits=Limits(), spend=()),
        {"prices", "run-cost", "model-fallback", "eval-grades", "latency-baseline", "load-test"},
    ),
    "with a change that guards do not know": (
        lambda agent: agent.with_(tools=[find_page, change_password], guards=[NARROW, exit_filter()]),
        {"input-guard", "approvals", "effects-declared"},
    ),
    "without a limit for a day": (lambda agent: agent.with_(spend=()), {"daily-cost"}),
    "with one for evaluations": (
        lambda agent: agent.with_(spend=Spend(per="day", usd=1, purpose="eval")),
        {"daily-cost"},
    ),
    "without policies": (lambda agent: agent.with_(context=Context((SlidingWindow(),))), {"cost-measures"}),
    "without watchers": (lambda agent: agent.with_(watch=()), {"traces"}),
    "without versions": (
        lambda agent: agent.with_(version="", instructions="Be kind."),
        {"version", "prompt-versions"},
    ),
    "with 200 turns": (lambda agent: agent.with_(limits=Limits(turns=200, tokens=2_000_000)), LIMITS),
    "with patience": (
        lambda agent: agent.with_(limits=Limits(seconds=5_000, retry_wait_s=60, model_retries=9)),
        PATIENCE,
    ),
    "with too few tokens": (lambda agent: agent.with_(limits=Limits(tokens=1)), {"edge-inputs"}),
    "with little time": (lambda agent: agent.with_(limits=Limits(seconds=4)), {"tool-failures"}),
    "with a limit for each user only": (
        lambda agent: agent.with_(spend=[Spend(per="day", scope="user", usd=1), Spend(per="month", usd=9)]),
        {"daily-cost"},
    ),
    "with a limit that will not do": (
        lambda agent: agent.with_(spend=[Spend(per="day", usd=0.001)]),
        {"cost-forecast"},
    ),
    "with an exit filter alone": (lambda agent: agent.with_(guards=[exit_filter()]), {"input-guard"}),
    "with a quota alone": (lambda agent: agent.with_(guards=[max_calls("refund", 3)]), {"input-guard"}),
    "with a filter of nothing": (
        lambda agent: agent.with_(guards=[exit_filter(kinds=(), canary=False, allow_hosts=None)], output_type=str),
        {"output-guard"},
    ),
    "in memory": (lambda agent: agent.with_(store=MemoryStore()), {"store", "metrics", "rollout"}),
    "with weak durability": (lambda agent: agent.with_(durability="normal"), {"store"}),
}


@pytest.mark.parametrize("change", CHANGES)
async def test_a_change_of_the_agent_turns_checks_red(prepared, change):
    """Each with a detail and a remedy."""
    make, red = CHANGES[change]
    _, checks = await examine(prepared, make(prepared[0]), probes=bool(red & PROBED))
    for name in red:
        assert checks[name].status is CheckStatus.FAIL, checks[name]
        assert checks[name].remedy


# A change of the files -> the checks that turn red by it.
FILES = {
    "evidence/eval.json": {"eval-cases", "eval-grades"},
    "evidence/load.json": {"latency-baseline", "load-test", "cost-forecast"},
    "evidence/rollback.json": {"rollback-drill"},
    "evidence/restore.json": {"restore-drill"},
    "alerts.yml": {"alerts"},
    "Makefile": {"evals-in-ci"},
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("content", [None, "{broken"])
async def test_missing_and_broken_files_turn_checks_red(prepared, tmp_path, name, content):
    """A missing one is unknown, or a failure where it has to be in the project; a broken one is a failure."""
    agent, folder = prepared
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("runs.db*"))
    (tmp_path / name).unlink()
    if content is not None:
        (tmp_path / name).write_text(content, encoding="utf-8")
    _, checks = await examine((agent, tmp_path))
    expected = CheckStatus.UNKNOWN if content is None and name.startswith("evidence") else CheckStatus.FAIL
    assert {check: checks[check].status for check in FILES[name]} == dict.fromkeys(FILES[name], expected)


def edit(folder, name, **fields):
    path = folder / "evidence" / name
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **fields}), encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "fields", "red"),
    [
        ("eval.json", {"results": []}, {"eval-cases", "eval-grades"}),
        ("eval.json", {"fingerprint": "0123456789ab"}, {"eval-grades"}),
        ("load.json", {"fingerprint": "0123456789ab"}, {"latency-baseline", "load-test", "cost-forecast"}),
        ("load.json", {"runs": 99}, {"latency-baseline"}),
        ("load.json", {"usd": None}, {"cost-forecast"}),
        ("rollback.json", {"subject": "shop"}, {"rollback-drill"}),
        ("rollback.json", {"failure": "no such release"}, {"rollback-drill"}),
        ("restore.json", {"kind": "rollback"}, {"restore-drill"}),
        ("restore.json", {"failure": "the backup has no runs"}, {"restore-drill"}),
        ("restore.json", {"agents": ["shop"]}, {"restore-drill"}),
        ("load.json", {"failed": 1}, {"load-test"}),
        ("load.json", {"concurrency": 1}, {"load-test"}),
        ("rollback.json", {"seconds": 301}, {"rollback-drill"}),
        ("rollback.json", {"at": "2026-08-01T12:00:00"}, {"rollback-drill"}),
        ("restore.json", {"at": "yesterday"}, {"restore-drill"}),
    ],
)
async def test_evidence_that_is_poor_or_old_turns_checks_red(prepared, tmp_path, name, fields, red):
    """Old is: of another fingerprint, or a drill of more than 90 days ago."""
    agent, folder = prepared
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("runs.db*"))
    edit(tmp_path, name, **fields)
    _, checks = await examine((agent, tmp_path))
    unmet = {check for check, each in checks.items() if not each.is_met and check not in PROBED}
    assert unmet == red


async def test_a_silent_logger_turns_a_check_red(prepared, monkeypatch):
    """Its records are the ones that name the run."""
    monkeypatch.setattr(logging.getLogger("agentfsm"), "disabled", True)
    _, checks = await examine(prepared)
    assert checks["logs"].status is CheckStatus.FAIL


def test_every_check_has_been_red():
    """No check is left out of the tests above."""
    red = set().union(*(each for _, each in CHANGES.values()), *FILES.values(), {"logs"})
    assert red == {each.id for each in CHECKS}


async def test_a_waiver_counts_until_its_day(prepared):
    """And does not hide that it has expired."""
    agent = prepared[0].with_(watch=())
    waiver = Waiver(check="traces", by="ann", until=date(2026, 11, 26), reason="the collector comes in December")
    _, checks = await examine(prepared, agent, waivers={"traces": waiver})
    assert checks["traces"].status is CheckStatus.WAIVED
    _, checks = await examine(prepared, agent, waivers={"traces": waiver}, on=date(2026, 11, 27))
    assert checks["traces"].status is CheckStatus.FAIL
    assert checks["traces"].waiver == waiver


@step(read_only=True)
def extract(day: str) -> str:
    return day


async def test_a_flow_is_checked_without_its_model(prepared):
    """It asks none: the probes name the agents of its steps, and no step needs a text for a model."""
    reader = agent_step(prepared[0], "Read.", depends_on=[extract])
    _, checks = await examine(prepared, Flow([extract, reader], name="nightly"), probes=True)
    assert {checks[name].status for name in PROBED} == {CheckStatus.PASS}
    assert "check the agents of its steps: support" in checks["prompt-leak"].detail
    assert checks["effects-declared"].status is CheckStatus.PASS


async def test_a_load_test_counts_runs_that_raise(prepared):
    """An error of the agent's own code is a failed run among the others, and not the end of the measurement."""
    asked = []

    def fail_second(_request):
        asked.append(1)
        if len(asked) == 2:
            raise ValueError("a bug")
        return "ok"

    report = await measure_load(Agent(FunctionModel(fail_second)), ["go"], runs=4, concurrency=1)
    assert (report.failed, report.stop_reasons) == (1, {"completed": 3, "raised ValueError": 1})
