"""A roll-out behind the gateway: each user gets the release of the arm, and it is executed by that release."""

import pytest

from agentfsm import Agent
from agentfsm.releases import Rollout, RolloutControl
from agentfsm.stores import MemoryStore
from agentfsm.testing import FunctionModel
from tests.support.gateway_client import named, serving


@pytest.fixture
def anyio_backend():
    """Return the one that uvicorn runs on."""
    return "asyncio"


async def test_users_get_the_releases_of_a_roll_out():
    """A user keeps the release, a repeated key keeps the run, and a roll-back counts for new runs at once."""
    old = Agent(FunctionModel(lambda _: "old"), name="billing", version="1", store=MemoryStore())
    rollout = Rollout("billing", {"old": old, "new": old.with_(model=FunctionModel(lambda _: "new"), version="2")})
    await rollout.start({"old": 50, "new": 50}, by="ann", reason="a test")

    async def ask(client, user, key=None):
        headers = named(user) | ({"idempotency-key": key} if key else {})
        made = await client.post("/v1/runs", json={"prompt": "hi", "wait_s": 30}, headers=headers)
        header = await old.runs.header(made.json()["id"])
        assert header.release == {"old": "1", "new": "2"}[made.json()["output"]]
        assert header.arms == {"billing": made.json()["output"]}
        return made.json()["output"]

    async with serving(rollout) as client:
        users = [f"user{number}" for number in range(12)]
        first = [await ask(client, user) for user in users]
        assert {*first} == {"old", "new"}
        assert [await ask(client, user) for user in users] == first
        lucky = users[first.index("new")]
        assert await ask(client, lucky, "order-1") == "new"
        await rollout.control.back(by="ann", reason="a test")
        assert await ask(client, lucky, "order-1") == "new"
        assert await ask(client, lucky) == "old"


async def test_roll_outs_over_http():
    """An administrator sees weights, targets and results, and takes an arm back that it has looked at."""
    old = Agent(FunctionModel(lambda _: "old"), name="billing", version="1", store=MemoryStore())
    rollout = Rollout("billing", {"old": old, "new": old.with_(model=FunctionModel(lambda _: "new"), version="2")})
    await rollout.start({"old": 60, "new": 40}, targets=["new:role=tester"], by="ann", reason="a test")
    await RolloutControl("other", old.store).start({"x": 100}, agent="shop", releases={"x": "1"}, by="ann", reason="x")
    async with serving(rollout) as client:
        await client.post("/v1/runs", json={"prompt": "hi", "wait_s": 30})
        [found] = (await client.get("/v1/rollouts")).json()["rollouts"]
        assert (found["name"], found["log"][-1]["targets"]) == ("billing", ["new:role=tester"])
        assert sum(arm["runs"] for arm in found["arms"]) == 1
        path = "/v1/rollouts/billing/back"
        body = {"reason": "it is slow", "number": 1, "arm": "new"}
        for caller in ({"x-caller": "ann//approve"}, {"x-caller": "ann/acme/admin"}):
            assert (await client.get("/v1/rollouts", headers=caller)).status_code == 403
            assert (await client.post(path, json=body, headers=caller)).status_code == 403
        for name in ("other", "none"):
            assert (await client.post(f"/v1/rollouts/{name}/back", json=body)).status_code == 400
        change = (await client.post(path, json=body)).json()
        assert (change["weights"], change["targets"], change["by"]) == ({"old": 100, "new": 0}, [], "root")
        again = await client.post(path, json=body)
        assert (again.status_code, again.json()["error"]["code"]) == (409, "conflict")
