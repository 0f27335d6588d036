"""The Grafana board: its queries are those of the metrics that a server has, and Prometheus can read them."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import anyio
import pytest

from agentfsm import Agent, Spend, tool
from agentfsm.cli import main
from agentfsm.ports import Feedback
from agentfsm.stores import MemoryStore
from agentfsm.telemetry import dashboard
from agentfsm.telemetry.alerts import set_thresholds
from agentfsm.telemetry.dashboard import format_dashboard
from agentfsm.telemetry.measurements import METRICS, OTHER_MODELS
from agentfsm.telemetry.totals import Totals
from agentfsm.testing import ScriptedModel
from tests.support import node_packages
from tests.support.database_servers import promtool
from tests.support.gateways import serving

BOARD = json.loads(format_dashboard())
PANELS = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
QUERIES = [target["expr"] for panel in PANELS for target in panel["targets"]]


class Priced(ScriptedModel):
    """A scripted model whose output costs a cent per token."""

    def cost_usd(self, usage):
        return usage.output_tokens * 0.01


@tool(read_only=True)
async def search(query: str) -> str:
    """Search."""
    return query


def test_the_file_is_the_board():
    """Panels are in a grid of 24 columns, none on another, and their names are their own."""
    shipped = Path(dashboard.__file__).with_name("grafana_dashboard.json")
    assert shipped.read_text(encoding="utf-8") == format_dashboard()
    places = [panel["gridPos"] for panel in BOARD["panels"]]
    cells = [
        (x, y)
        for place in places
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells))
    assert {x for x, _ in cells} == set(range(24))
    for of in ("id", "title"):
        assert len({panel[of] for panel in BOARD["panels"]}) == len(BOARD["panels"])
    assert all(len({target["refId"] for target in panel["targets"]}) == len(panel["targets"]) for panel in PANELS)


def test_the_board_has_the_types_of_grafana(tmp_path):
    """Those that its own schema gives to boards and to the two kinds of panels; an unknown field is none of them."""
    source = Path(__file__).with_name("board.ts.txt").read_text(encoding="utf-8")
    (tmp_path / "board.ts").write_text(source.replace("BOARD", format_dashboard().strip()), encoding="utf-8")
    (tmp_path / "node_modules").symlink_to(node_packages.packages())
    options = ["--noEmit", "--strict", "--skipLibCheck", "--target", "esnext", "--moduleResolution", "bundler"]
    command = node_packages.program("typescript", *options, "--module", "esnext", "board.ts")
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.anyio
async def test_each_query_shows_the_metrics_of_a_server(tmp_path):
    """Prometheus' tool evaluates them while all series of a server grow: each has a value, and each metric a panel."""
    model = Priced("hi")
    agent = Agent(model, name="shop", tools=[search], spend=Spend(per="day", usd=9), store=(store := MemoryStore()))
    run = await agent.run("go")
    await store.add_feedback(run.id, "1", Feedback(rating=4, at=await store.now(), by="judge:m 1a2b"))
    await Totals(store).catch_up()
    async with serving(agent) as client:
        text = (await client.get("/metrics")).text
    lines = [line for line in text.splitlines() if line[0] != "#"]
    lines.append(f'{OTHER_MODELS.name}{{agent="shop",model="m",served="n"}} 0')
    names = [re.sub(r"^(\w+){?", r'\1{job="agents",instance="a",', line.rpartition(" ")[0]) for line in lines]
    queries = {f"query{number}": query for number, query in enumerate(QUERIES)}
    rules = [
        {"alert": name, "expr": f"count({re.sub(r'[$](job|agent)', '.*', query).replace('$window', '15m')}) > 0"}
        for name, query in queries.items()
    ]
    (tmp_path / "rules.yml").write_text(json.dumps({"groups": [{"name": "board", "rules": rules}]}), encoding="utf-8")
    test = {
        "interval": "1m",
        "input_series": [{"series": name if name[-1] == "}" else name + "}", "values": "1+1x90"} for name in names],
        "alert_rule_test": [
            {"eval_time": "90m", "alertname": name, "exp_alerts": [{"exp_labels": {}}]} for name in queries
        ],
    }
    document = {"rule_files": ["rules.yml"], "evaluation_interval": "15m", "tests": [test]}
    (tmp_path / "test.yml").write_text(json.dumps(document), encoding="utf-8")
    promtool("test", "rules", tmp_path / "test.yml")
    shown = {
        re.sub("_(sum|count|bucket)$", "", name) for query in QUERIES for name in re.findall(r"agentfsm_\w+", query)
    }
    assert shown >= set(METRICS)
    for target in [target for panel in PANELS for target in panel["targets"]]:
        kept = re.search(r"by \(([^)]*)\)", target["expr"])[1].split(", ")
        assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= set(kept), target


def test_thresholds_are_those_of_the_alerts():
    """Also those of your own; for a minimum, what is below is red."""
    board = json.loads(format_dashboard(set_thresholds({"error_rate": 0.02})))
    shown = {panel["title"]: panel["fieldConfig"]["defaults"] for panel in board["panels"] if "targets" in panel}
    steps = {title: defaults.get("thresholds") for title, defaults in shown.items()}
    assert steps["Error rate"]["steps"] == [{"color": "green", "value": None}, {"color": "red", "value": 0.02}]
    assert steps["Completed tasks"]["steps"] == [{"color": "red", "value": None}, {"color": "green", "value": 0.9}]
    assert steps["Tool calls"] is None


@pytest.mark.anyio
async def test_the_command(tmp_path, capsys):
    """It prints the board, or writes it to a file."""
    assert await anyio.to_thread.run_sync(main, ["alerts", "dashboard"]) == 0
    assert capsys.readouterr().out == format_dashboard()
    path = tmp_path / "board.json"
    words = ["alerts", "dashboard", str(path), "--set", "error_rate=0.02"]
    assert await anyio.to_thread.run_sync(main, words) == 0
    assert path.read_text(encoding="utf-8") == format_dashboard(set_thresholds({"error_rate": 0.02}))
    assert str(path) in capsys.readouterr().out
