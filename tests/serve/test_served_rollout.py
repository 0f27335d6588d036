"""A roll-out behind the gateway: each user gets the release of the arm, and it is executed by that release."""

import pytest

from agentfsm import Agent
from agentfsm.releases import Rollout
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
