"""Keys that clients choose: scoped by tenant and user, apart from derived ids, and the same over an upgrade."""

import time
from datetime import UTC, datetime

import pytest

from agentfsm import Agent, MisuseError, RunNotFoundError, ToolCall
from agentfsm.core.run_ids import (
    DerivedId,
    build_inner_id,
    build_key_id,
    build_said_key,
    child_run_id,
    former_key_id,
    scheduled_run_id,
)
from agentfsm.serve import IncomingWebhook, webhooks
from agentfsm.serve.dialects.webhooks import sign
from agentfsm.stores import MemoryStore
from agentfsm.testing import FunctionModel
from tests.support.gateways import named, serving

SECRET = "whsec_" + "a2tra2tra2tra2tra2tra2tra2tra2tra2tra2tra2s="
DERIVED = (
    scheduled_run_id("nightly", datetime(2026, 11, 28, 1, 5, tzinfo=UTC).timestamp()),
    build_key_id("evt_1", tenant="acme", user="crm-bot", hook="crm"),
    former_key_id("evt_1", hook="crm"),
    build_key_id("order-1", tenant="acme", user="ann"),
    child_run_id("order-1", "t1.0"),
    build_inner_id("order-1", ToolCall(id="t1.0", name="pay", arguments="{}"), 1),
)


def greeting():
    return Agent(FunctionModel(lambda _: "hello"), name="shop", store=MemoryStore())


async def by_runs(client, key, caller, prompt="hi"):
    headers = {"idempotency-key": key} | caller
    return await client.post("/v1/runs", json={"prompt": prompt, "wait_s": 30}, headers=headers)


async def by_chat(client, key, caller, prompt="hi"):
    body = {"model": "shop", "messages": [{"role": "user", "content": prompt}]}
    return await client.post("/v1/chat/completions", json=body, headers={"idempotency-key": key} | caller)


async def by_conversation(client, key, caller, prompt="hi"):
    body = {"model": "shop", "messages": [{"role": "user", "content": prompt}]}
    headers = {"idempotency-key": key, "x-conversation-id": "c"} | caller
    return await client.post("/v1/chat/completions", json=body, headers=headers)


async def by_ag_ui(client, key, caller, prompt="hi"):
    body = {"threadId": f"t{key}", "runId": key, "messages": [{"id": "u", "role": "user", "content": prompt}]}
    return await client.post("/v1/agents/shop/ag-ui", json=body, headers=caller)


DOORS = (by_runs, by_chat, by_conversation, by_ag_ui)


@pytest.fixture
def anyio_backend():
    """Return the one that uvicorn runs on."""
    return "asyncio"


@pytest.mark.parametrize("door", DOORS)
async def test_a_key_takes_no_derived_id_and_no_other_users_key(door):
    """Whatever the key looks like, it starts a run of the caller's own, under an id of ours."""
    agent = greeting()
    async with serving(agent) as client:
        for key in DERIVED:
            answer = await door(client, key, named("gil", "globex"))
            assert answer.is_success, answer.text
            with pytest.raises(RunNotFoundError):
                await agent.load(key)
        for user, tenant in (("ann", "acme"), ("bob", "acme"), ("ann", "globex")):
            assert (await door(client, "order-1", named(user, tenant))).is_success
        rows = await agent.runs.list(limit=50)
        assert len(rows) == len(DERIVED) + 3
        assert {row.id for row in rows if row.user == "ann"} == {
            build_key_id("order-1", tenant=tenant, user="ann") for tenant in ("acme", "globex")
        }
        again = await door(client, "order-1", named("ann", "acme"))
        assert again.is_success
        assert len(await agent.runs.list(limit=50)) == len(rows)


@pytest.mark.parametrize("door", DOORS)
async def test_a_request_that_is_repeated_after_an_upgrade(door):
    """The run of the same user, whose id is the key itself, is found; that of another user or tenant is not."""
    agent = greeting()
    for key, user, tenant in (("order-1", "ann", "acme"), ("order-2", "bob", "acme"), ("order-3", "ann", "zeta")):
        await agent.run("hi", id=key, user=user, tenant=tenant)
    async with serving(agent) as client:
        for key, count in (("order-1", 3), ("order-2", 4), ("order-3", 5)):
            assert (await door(client, key, named("ann", "acme"))).is_success
            assert len(await agent.runs.list()) == count


async def deliver(client, delivery_id, run_id=""):
    at = int(time.time())
    headers = {"webhook-id": delivery_id, "webhook-timestamp": str(at)}
    headers["webhook-signature"] = sign(SECRET, delivery_id, at, b"{}")
    return (await client.post(f"/v1/hooks/crm{run_id and f'/{run_id}'}", content=b"{}", headers=headers)).json()


HOOK = IncomingWebhook(name="crm", secret=SECRET, user="crm-bot", tenant="acme")


async def test_a_delivery_that_is_repeated_after_an_upgrade():
    """A webhook finds the run of its delivery under the former id, unless another tenant had taken that."""
    agent = greeting()
    async with serving(agent, groups=[webhooks([HOOK])]) as client:
        fresh = await deliver(client, "evt_0")
        header = (await agent.load(fresh["run_id"])).header
        for delivery_id, tenant in (("evt_1", "acme"), ("evt_2", "zeta")):
            former = DerivedId(former_key_id(delivery_id, hook="crm") or "")
            await agent.run(header.prompt, id=former, user="crm-bot", tenant=tenant)
        assert [(await deliver(client, f"evt_{number}"))["new"] for number in range(3)] == [False, False, True]
        assert (await by_runs(client, "evt_3", named("crm-bot", "acme"))).status_code == 201
        assert (await deliver(client, "evt_3"))["new"]  # a key of the webhook's own user is not its delivery


async def test_keys_of_inputs():
    """No key of a client, whatever it looks like, takes that of a delivery, of another user, or of another protocol."""
    agent = greeting()
    async with serving(agent, groups=[webhooks([HOOK])], parallel=0) as client:
        ann, root = named("crm-bot", "acme"), named("root", "acme", "admin")
        run_id = (await client.post("/v1/runs", json={"prompt": "hi"}, headers=ann)).json()["id"]

        async def send(text, key, caller):
            body = {"text": text, "key": key}
            assert (await client.post(f"/v1/runs/{run_id}/input", json=body, headers=caller)).status_code == 202
            other = await client.post(f"/v1/runs/{run_id}/input", json=body | {"text": "other"}, headers=caller)
            assert other.status_code == 409

        derived = build_key_id("evt_1", tenant="acme", user="crm-bot", hook="crm")
        for key in ("hook:crm:evt_1", "evt_1", derived, build_said_key("resume:1"), "resume:1"):
            for caller in (ann, ann, root):
                await send(f"{key} of {caller}", key, caller)
        for _ in range(2):
            assert await deliver(client, "evt_1", run_id) == {"run_id": run_id}
        texts = [row.item.parts[0].text for row in await agent.store.inbox(run_id)]
        assert texts.count("{}") == 1
        assert len([each for each in texts if " of " in each]) == 2 * 5
        for key in (str(derived), str(build_said_key("x"))):
            with pytest.raises(MisuseError, match="derived"):
                await agent.send(run_id, "x", key=key)


async def test_streams_name_their_run():
    """`Location` has the id of the run, which is not the client's; AG-UI follows the run by either."""
    async with serving(greeting()) as client:
        streamed = await by_ag_ui(client, "r1", named())
        run_id = build_key_id("r1", tenant=None, user="ann")
        assert streamed.headers["location"] == f"/v1/runs/{run_id}"
        for name in ("r1", run_id):
            followed = await client.get(f"/v1/runs/{name}/ag-ui", headers=named())
            assert followed.headers["location"] == f"/v1/runs/{run_id}"
        assert (await client.get("/v1/runs/r1", headers=named())).status_code == 404
