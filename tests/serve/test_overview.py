"""What an operator asks a server: who am I, how many runs are open, how do the agents do, what is scheduled."""

import pytest

from agentfsm import Agent, ModelError
from agentfsm.schedules import Schedules
from agentfsm.schedules.schedule_client import create_scheduled_run
from agentfsm.stores import MemoryStore, SQLiteStore
from agentfsm.telemetry.alerts import ALERTS
from agentfsm.testing import FunctionModel, ScriptedModel, call, say
from tests.support.gateway_client import named, pay, serving


@pytest.fixture
def anyio_backend():
    """Return the one that uvicorn runs on."""
    return "asyncio"


async def test_open_runs_are_those_of_the_caller():
    """Counts are by status, of the caller's own runs or with "approve" of the tenant, as the list has them."""
    agent = Agent(
        FunctionModel(lambda _: say("", call("pay", amount=5))), tools=[pay], name="shop", store=MemoryStore()
    )
    async with serving(agent) as client:
        for user in ("ann", "ann", "eve"):
            await client.post("/v1/runs", json={"prompt": "hi", "wait_s": 30}, headers=named(user))
        for caller, number in ((named("ann"), 2), (named("eve"), 1), (named("bob", scopes="approve"), 3)):
            found = (await client.get("/v1/open", headers=caller)).json()
            assert (found["open"]["waiting"], found["is_whole"]) == (number, True)
            listed = (await client.get("/v1/runs?waiting=true", headers=caller)).json()["runs"]
            assert [row["status"] for row in listed] == ["waiting"] * number
        assert (await client.get("/v1/open", headers=named("eve", tenant="acme"))).json()["open"]["waiting"] == 0
        me = (await client.get("/v1/caller", headers=named("eve", "acme", "run+approve"))).json()
        assert me == {"user": "eve", "tenant": "acme", "scopes": ["run", "approve"], "roles": []}


async def test_metrics_and_alerts_are_those_of_the_totals(tmp_path):
    """Outcomes and tokens by hour add up to the summary; callers with a tenant, or without the scope, are refused."""

    def refuse(_request):
        raise ModelError("no key")

    store = SQLiteStore(tmp_path / "runs.db")
    broken = Agent(FunctionModel(refuse), name="broken", store=store)
    fine = Agent(FunctionModel(lambda _: "yes"), name="fine", store=store)
    async with serving(broken, fine) as client:
        for name in ["broken"] * 20 + ["fine"] * 3:
            made = await client.post("/v1/runs", json={"prompt": "hi", "agent": name, "wait_s": 30})
            assert made.json()["status"] == {"broken": "failed", "fine": "done"}[name]
        found = (await client.get("/v1/metrics?days=1")).json()
        assert (found["is_whole"], found["step_s"], len(found["steps"])) == (True, 3600, 24)
        assert found["summary"]["outcomes"] == {"completed": 3, "model_error": 20}
        assert sum(each["done"] for each in found["steps"]) == 3
        assert sum(each["failed"] for each in found["steps"]) == 20
        tokens = found["summary"]["input_tokens"] + found["summary"]["output_tokens"]
        assert sum(each["tokens"] for each in found["steps"]) == tokens > 0
        assert any(each["unpriced"] for each in found["steps"])
        days = (await client.get("/v1/metrics?days=30&agent=fine")).json()
        assert days["step_s"] == 86400
        assert sum(each["done"] + each["failed"] for each in days["steps"]) == 3
        alerts = (await client.get("/v1/alerts")).json()
        assert {each["name"] for each in alerts["alerts"]} == {*ALERTS}
        assert alerts["is_whole"] is True
        for path in ("/v1/metrics", "/v1/alerts"):
            for caller in (named("ann", scopes="approve"), named("ann", "acme", "admin")):
                assert (await client.get(path, headers=caller)).status_code == 403


async def test_schedules_over_http():
    """A schedule has its next times and its last run; an administrator of its tenant pauses and resumes it."""
    agent = Agent(ScriptedModel("done"), name="shop", store=MemoryStore())
    schedules = Schedules(agent.store)
    schedule = await schedules.add(agent, "nightly", cron="0 3 * * *", prompt="Settle {logical_date}")
    await schedules.add(agent, "theirs", cron="0 4 * * *", prompt="x", tenant="acme")
    times = schedule.parse_times()
    *_, first, skipped, last = times.list_newest(0.0, schedule.done_until, 5)
    for at in (first, last):
        await create_scheduled_run(agent, schedule, times, at)
    async with serving(agent) as client:
        document = (await client.get("/v1/schedules", headers=named("eve", scopes="approve"))).json()
        [found] = document["schedules"]
        assert (found["name"], found["paused"], found["overdue"], document["unreadable"]) == ("nightly", False, [], [])
        assert found["next"] == [each.timestamp() for each in await schedules.next_times("nightly", 3)]
        assert (found["last"]["at"], found["last"]["run"]["agent"]) == (last, "shop")
        assert found["skipped"] == [skipped]  # what was before the first run is not known
        for name, caller in (("nightly", named("eve", scopes="approve")), ("nightly", named("eve", "acme", "admin"))):
            refused = await client.post(f"/v1/schedules/{name}/pause", headers=caller)
            assert refused.status_code in {400, 403}
        assert (await client.post("/v1/schedules/theirs/pause")).status_code == 400
        assert not any(each.paused for each in await schedules.list())
        assert (await client.post("/v1/schedules/nightly/pause")).json()["paused"] is True
        assert (await schedules.get("nightly")).paused
        assert (await client.post("/v1/schedules/nightly/resume")).json()["paused"] is False
        assert (await client.get("/v1/schedules", headers=named("ann"))).status_code == 403
