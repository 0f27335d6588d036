"""Targets of a roll-out: testers get a release without weight, wherever runs begin, until it is taken back."""

import sys
from datetime import UTC, datetime
from io import StringIO

import pytest

from agentfsm import Agent, MisuseError, ModelError, cli
from agentfsm.evals import Case, Suite, evaluate
from agentfsm.ports.store import Filter
from agentfsm.releases import Flag, Rollout, RolloutChange, RolloutControl, Target
from agentfsm.releases.rollout_guard import RolloutGuard
from agentfsm.schedules import Schedules
from agentfsm.stores import MemoryStore, SQLiteStore
from agentfsm.testing import FunctionModel
from tests.support.gateways import serving

pytestmark = pytest.mark.anyio
BY = {"by": "ann", "reason": "a test"}
SHOP = """
from agentfsm import Agent
from agentfsm.releases import Rollout
from agentfsm.stores import SQLiteStore
from agentfsm.testing import FunctionModel

old = Agent(FunctionModel(lambda _: "old"), name="shop", version="old", store=SQLiteStore("runs.db"))
new = old.with_(model=FunctionModel(lambda _: "new"), version="new")
rollout = Rollout("shop", {"old": old, "new": new})
"""
TESTERS = {"roles": ["tester"]}


def make_rollout(store=None, new=lambda _request: "new"):
    store = store or MemoryStore()
    arms = {
        name: Agent(FunctionModel(reply), name="billing", version=name, store=store)
        for name, reply in (("old", lambda _request: "old"), ("new", new))
    }
    return Rollout("billing", arms)


@pytest.mark.parametrize(
    ("target", "about", "matches"),
    [
        ("new:user=ann|bob", {"user": "bob"}, True),
        ("new:user=ann|bob", {"user": "cid"}, False),
        ("new:tenant=acme,role=tester", {"tenant": "acme", "roles": ("clerk", "tester")}, True),
        ("new:tenant=acme,role=tester", {"roles": ("tester",)}, False),
        ("new:metadata.plan=beta", {"metadata": {"plan": "beta"}}, True),
        ("new:metadata.level=3", {"metadata": {"level": 3}}, True),
        ("new:metadata.plan=beta", {}, False),
    ],
)
def test_conditions(target, about, matches):
    """All have to hold, each by one of its values; the text says the same as the value."""
    found = Target.parse(target)
    assert Target.parse(str(found)) == found
    nobody = {"user": None, "tenant": None, "roles": (), "metadata": {}}
    assert found.matches(**nobody | about) is matches
    assert not found.matches(**nobody)


@pytest.mark.parametrize(
    "text", ["new", "new:", ":role=x", "new:role", "new:role=", "new:rolle=x", "new:role=a,role=b", "new:metadata.=x"]
)
def test_texts_that_are_no_target(text):
    """Each is refused with an example of one that is."""
    with pytest.raises(MisuseError, match=r"target|Target"):
        Target.parse(text)
    with pytest.raises(MisuseError, match="cannot have"):
        Target(arm="new", users="ann|bob")


async def test_the_drill():
    """Testers only, then 5 %, then back by a rule: every run by its release, and the log says all of it."""
    broken = False

    def reply(_request):
        if broken:
            raise ModelError("400: no such parameter")
        return "new"

    rollout = make_rollout(new=reply)
    await rollout.start({"old": 100}, targets=["new:role=tester"], rules=["failures 20%"], **BY)
    users = [f"user {number}" for number in range(40)]

    async def ask(user, **options):
        run = await rollout.run("go", user=user, **options)
        assert run.header.release == run.header.arms["billing"]
        return run.header.release

    assert {await ask(user) for user in users} == {"old"}
    assert await ask("tess", **TESTERS) == "new"
    assert await ask("tess", **TESTERS) == "new"
    assert await ask("tess") == "old"  # without her role
    await rollout.control.set_weights({"old": 70, "new": 30}, **BY)
    assert await ask("tess", **TESTERS) == "new"
    lucky = [user for user in users if await ask(user) == "new"]
    assert 3 < len(lucky) < 24
    broken = True
    for _ in range(30):
        await ask("tess", **TESTERS)
    change = await RolloutGuard(rollout.control).check()
    assert (change.action, change.arm, change.plan.targets) == ("auto_back", "new", ())
    assert await ask("tess", **TESTERS) == "old"
    assert {await ask(user) for user in lucky} == {"old"}
    log = await rollout.control.log()
    assert [each.action for each in log] == ["start", "weights", "auto_back"]
    assert "new:role=tester" in str(log[0])
    assert [RolloutChange.from_dict(each.to_dict()) for each in log] == [*log]


async def test_changes_of_targets():
    """They leave the weights alone, a way back restores them, and a kill ends them."""
    rollout = make_rollout()
    await rollout.start({"old": 100}, **BY)
    control = rollout.control
    before = await control.set_targets([Target(arm="new", users="tess")], **BY)
    assert before.plan.weights == {"old": 100, "new": 0}
    assert before.plan.since["new"] == before.at
    await control.set_targets([], **BY)
    assert (await control.back(**BY)).plan.targets == before.plan.targets
    with pytest.raises(MisuseError, match="in progress"):
        await rollout.start({"old": 100}, **BY)
    with pytest.raises(MisuseError, match="no arm 'other'"):
        await control.set_targets(["other:user=tess"], **BY)
    assert (await control.kill(**BY)).plan.targets == ()


@pytest.mark.parametrize("reason", ["x\n9 kill by eve: all=0", "\x1b[2J", "a\u202eb"])
async def test_a_reason_is_one_line(reason):
    """So that a line of the log is an entry."""
    rollout = make_rollout()
    with pytest.raises(MisuseError, match="one line"):
        await rollout.start({"old": 100}, by="ann", reason=reason)


async def test_flags_have_targets():
    """A flag may be on for testers alone."""
    store = MemoryStore()
    await RolloutControl("search", store).start({"off": 100, "on": 0}, targets=["on:role=tester"], **BY)
    flag = Flag("search", store)
    assert await flag.is_on(user="tess", roles=["tester"])
    assert not await flag.is_on(user="tess")


async def test_an_arm_that_cannot_be_given():
    """The arm of a run is chosen by its roll-out, so it is refused as an argument."""
    rollout = make_rollout()
    with pytest.raises(MisuseError, match="chooses its arm"):
        await rollout.run("go", user="ann", arms={"billing": "new"})
    run = await rollout.run("go", user="ann", arms={"tone": "warm"})
    assert dict(run.header.arms) == {"tone": "warm", "billing": "old"}


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_targets_at_every_door():
    """The gateway, schedules and evaluations give a tester the release."""
    rollout = make_rollout()
    await rollout.start({"old": 100}, targets=["new:user=tess", "new:metadata.plan=beta"], **BY)
    async with serving(rollout) as client:
        for user, metadata, wanted in (("tess", {}, "new"), ("ann", {"plan": "beta"}, "new"), ("ann", {}, "old")):
            body = {"prompt": "hi", "wait_s": 30, "metadata": metadata}
            made = await client.post("/v1/runs", json=body, headers={"x-caller": f"{user}//run"})
            assert made.json()["output"] == wanted
    schedules = Schedules(rollout.base.store)
    await schedules.add(rollout.base, "yearly", cron="0 0 1 1 *", prompt="go", user="tess")
    span = [datetime(2026, 1, day, tzinfo=UTC) for day in (1, 2)]
    await schedules.backfill(rollout.base, "yearly", *span, choose=rollout.choose)
    [run] = await rollout.base.runs.list(Filter(user="tess"), limit=1)
    assert run.release == "new"
    suite = Suite(
        name="s",
        cases=[
            Case(id=user, input="hi", user=user, expect=[{"contains": wanted}])
            for user, wanted in (("tess", "new"), ("ann", "old"))
        ],
    )
    assert (await evaluate(rollout, suite)).mean("outcome") == 1


def test_the_command_line(tmp_path, monkeypatch, capsys):
    """Targets are given at the start and changed later, and `run` and `chat` follow them."""
    (tmp_path / "aimed_shop.py").write_text(SHOP)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    why = ["--reason", "a test"]

    def main(words):  # each command is a process
        sys.modules.pop("aimed_shop", None)
        return cli.main(words)

    assert main(["rollout", "start", "aimed_shop:rollout", "old=100", "--target", "new:user=tess", *why]) == 0
    assert main(["rollout", "status", "shop", "--store", "runs.db"]) == 0
    assert "gives new to user=tess" in capsys.readouterr().out
    for user, wanted in (("tess", "new"), ("ann", "old")):
        assert main(["run", "aimed_shop:rollout", "hi", "--user", user]) == 0
        assert wanted in capsys.readouterr().out
        monkeypatch.setattr("sys.stdin", StringIO("hello\n"))
        assert main(["chat", "aimed_shop:rollout", "--user", user]) == 0
        assert wanted in capsys.readouterr().out
    assert main(["rollout", "target", "shop", "--store", "runs.db", *why]) == 0
    assert main(["run", "aimed_shop:rollout", "hi", "--user", "tess"]) == 0
    assert "old" in capsys.readouterr().out
    assert main(["mcp", "serve", "aimed_shop:rollout"]) == 2
    assert "at /mcp" in capsys.readouterr().err


async def test_a_plan_without_targets_is_written_as_before(tmp_path):
    """Processes of the release before read it."""
    store = SQLiteStore(tmp_path / "runs.db")
    change = await RolloutControl("x", store).start({"off": 100, "on": 0}, **BY)
    assert "targets" not in change.to_dict()["plan"]
    await store.aclose()
