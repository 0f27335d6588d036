"""Runs over HTTP, on a real socket: start, follow, decide; who may do what; requests that are wrong."""

import json

import anyio
import anyio.lowlevel
import httpx
import pytest

from agentfsm import Agent, MisuseError, tool
from agentfsm.core.events import Observed
from agentfsm.serve import APIKeys, Caller, serve
from agentfsm.serve.access import add_key, remove_keys
from agentfsm.serve.app import ROUTE_GROUPS, build_openapi
from agentfsm.serve.endpoints import MAX_BODY_BYTES
from agentfsm.serve.event_stream import format_position, parse_position
from agentfsm.stores import MemoryStore, SQLiteStore
from agentfsm.testing import ScriptedModel, call, say
from agentfsm.testing.conformance.helpers import LeasedRun, build_answer, create_finished_run, make_header
from tests.support.gateway_client import events_of, named, pay, paying, read_caller, serving

ENDPOINTS = [each for group in ROUTE_GROUPS for each in group.endpoints]


@pytest.fixture
def anyio_backend():
    """Return the one that uvicorn runs on."""
    return "asyncio"


async def test_a_run_from_start_to_answer():
    """A short run is answered at once; its document, its row and its events say the same."""
    async with serving(Agent(ScriptedModel(say("hello")), name="greeter", store=MemoryStore())) as client:
        made = await client.post("/v1/runs", json={"prompt": "hi", "wait_s": 30, "metadata": {"ticket": 7}})
        run = made.json()
        assert made.status_code == 201
        assert made.headers["location"] == f"/v1/runs/{run['id']}"
        assert (run["status"], run["output"], run["user"], run["metadata"]) == ("done", "hello", "root", {"ticket": 7})
        assert (await client.get(f"/v1/runs/{run['id']}")).json() == run
        rows = (await client.get("/v1/runs")).json()
        assert [row["id"] for row in rows["runs"]] == [run["id"]]
        assert rows["after"] is None
        events = await events_of(client, run["id"])
        assert [data["version"] for _, data in events] == list(range(1, run["version"] + 1))


async def test_evaluations_are_no_part_of_production():
    """Lists have them only if asked, and one that was killed is no part of the queue and of the list of workers."""
    store = MemoryStore()
    agent = Agent(ScriptedModel(say("hello")), name="greeter", store=store)
    await agent.run("hi", id="judged", purpose="eval", user="root", session="root/s")
    for number in range(3):
        await agent.submit("hi", id=f"killed-{number}", purpose="eval", user="root")
    async with serving(agent, parallel=0, max_queue=1) as client:

        async def listed(path, key="runs"):
            return {row["id"] for row in (await client.get(path)).json()[key]}

        assert await listed("/v1/runs") == set()
        assert await listed("/v1/runs?purpose=eval") == {"judged", "killed-0", "killed-1", "killed-2"}
        assert await listed("/v1/workers", "queue") == set()
        metrics = (await client.get("/metrics")).text
        assert 'agentfsm_queue_runs{agent="greeter"} 0' in metrics
        started = await client.post("/v1/runs", json={"prompt": "hi"})
        assert started.status_code == 201
        assert await listed("/v1/runs") == {started.json()["id"]}


async def test_the_list_of_workers_says_that_it_is_cut(monkeypatch):
    """Also if what was cut off gave way to runs of agents that are served elsewhere."""
    monkeypatch.setattr("agentfsm.serve.administration.MAX_ACTIVE", 2)
    store = MemoryStore()
    agents = [Agent(ScriptedModel(), name=name, store=store) for name in ("here", "elsewhere")]
    async with serving(agents[0], parallel=0) as client:
        for agent, is_whole in ((agents[0], True), (agents[1], False), (agents[1], False)):
            await agent.submit("hi", user="root")
            assert (await client.get("/v1/workers")).json()["is_whole"] is is_whole


async def test_a_key_names_one_run():
    """A repeated request returns the same run, whose id is in `Location`; another user may choose the same key."""
    async with serving(Agent(ScriptedModel(say("a"), say("b")), store=MemoryStore())) as client:
        sent = {"json": {"prompt": "hi", "wait_s": 30}, "headers": {"idempotency-key": "order-1"} | named()}
        first, second = [await client.post("/v1/runs", **sent) for _ in range(2)]
        assert (first.status_code, second.status_code) == (201, 200)
        assert first.json() == second.json()
        other = await client.post("/v1/runs", json={"prompt": "other"}, headers=sent["headers"])
        assert other.status_code == 409
        elsewhere = {"prompt": "hi", "session": "other"}
        assert (await client.post("/v1/runs", json=elsewhere, headers=sent["headers"])).status_code == 409
        assert first.headers["location"] == second.headers["location"] == f"/v1/runs/{first.json()['id']}"
        users = [named("bob"), named("ann", "rival"), named("bob", "rival")]
        others = [
            await client.post("/v1/runs", json={"prompt": "b"}, headers={"idempotency-key": "order-1"} | user)
            for user in users
        ]
        assert [each.status_code for each in others] == [201, 201, 201]
        assert len({first.json()["id"], *[each.json()["id"] for each in others]}) == 4


async def test_a_position_does_not_tell_of_other_runs():
    """A stream answers in the same way whether a run of another user exists or not."""
    async with serving(Agent(ScriptedModel(say("a"), say("b")), store=MemoryStore())) as client:
        sent = {"json": {"prompt": "hi", "wait_s": 30}}
        await client.post("/v1/runs", **sent, headers={"idempotency-key": "order-1"} | named("bob", "rival"))
        own = (await client.post("/v1/runs", **sent, headers=named())).json()["id"]
        for protocol in ("events", "ag-ui"):
            answers = [
                await client.get(f"/v1/runs/{own}/{protocol}", params={"after": f"{name}:1"}, headers=named())
                for name in ("order-1", "order-2")
            ]
            assert [each.status_code for each in answers] == [400, 400]
            assert answers[0].text.replace("order-1", "order-2") == answers[1].text


async def test_a_fork_does_not_bring_back_roles():
    """The caller had a role when it started the run, and has it no longer."""
    roles = ["clerk"]

    def authenticate(_request):
        return Caller(user="ann", scopes=["run"], roles=roles)

    async with serving(Agent(ScriptedModel(say("a"), say("b")), store=MemoryStore()), auth=authenticate) as client:
        run = (await client.post("/v1/runs", json={"prompt": "hi", "wait_s": 30})).json()["id"]
        assert (await client.post(f"/v1/runs/{run}/fork", json={"at": 1})).status_code == 201
        roles.clear()
        refused = await client.post(f"/v1/runs/{run}/fork", json={"at": 1})
        assert (refused.status_code, "no longer have (clerk)" in refused.text) == (403, True)


async def test_a_call_is_approved_by_whom_may():
    """The digest is bound, the scope is needed, and the journal has the name of the credential."""
    async with serving(paying()) as client:
        run = (await client.post("/v1/runs", json={"prompt": "pay", "wait_s": 30}, headers=named())).json()
        [item] = run["pending"]
        path = f"/v1/runs/{run['id']}"
        answer = {"call_id": item["call_id"], "digest": item["digest"]}
        refused = await client.post(f"{path}/approve", json=answer, headers=named())
        assert refused.status_code == 403
        blind = await client.post(f"{path}/approve", json={"call_id": "x"}, headers=named("eve", "", "approve"))
        assert (blind.status_code, "`pending` of `GET /v1/runs/{run_id}`" in blind.text) == (422, True), blind.text
        stale = await client.post(f"{path}/approve", json=answer | {"digest": "x"}, headers=named("eve", "", "approve"))
        assert stale.status_code == 409
        done = await client.post(
            f"{path}/approve", json=answer | {"arguments": {"amount": 3}}, headers=named("eve", "", "approve")
        )
        assert done.status_code == 202
        run = (await client.get(path, params={"wait_s": 30})).json()
        assert run["output"] == "done"
        events = [data["event"] for _, data in await events_of(client, run["id"])]
        [approval] = [event for event in events if event["is"] == "ApprovalGiven"]
        assert "eve" in json.dumps(approval)
        twice = await client.post(f"{path}/approve", json=answer)
        assert twice.status_code in {400, 409}


async def test_several_calls_are_decided_on_together():
    """As they were shown, by whom may, in part too; with four eyes not by the run's own user, except to reject."""
    calls = say("", *[call("pay", amount=amount) for amount in (1, 2, 3)])
    agent = Agent(ScriptedModel(calls, say("done")), tools=[pay], name="shop", store=MemoryStore())
    async with serving(agent, four_eyes=True) as client:
        own = named("ann", "", "run+approve")
        run = (await client.post("/v1/runs", json={"prompt": "pay", "wait_s": 30}, headers=own)).json()
        path = f"/v1/runs/{run['id']}"
        first, second, third = [{name: item[name] for name in ("call_id", "digest")} for item in run["pending"]]
        forbidden = await client.post(f"{path}/decide", json={"approve": [first]}, headers=own)
        assert forbidden.status_code == 403
        stale = {"approve": [first, second | {"digest": "x"}]}
        assert (await client.post(f"{path}/decide", json=stale, headers=named("eve", "", "approve"))).status_code == 409
        rejected = await client.post(f"{path}/decide", json={"reject": [third], "message": "no"}, headers=own)
        approved = await client.post(
            f"{path}/decide", json={"approve": [first, second]}, headers=named("eve", "", "approve")
        )
        assert (rejected.status_code, approved.status_code) == (202, 202)
        run = (await client.get(path, params={"wait_s": 30})).json()
        assert run["output"] == "done"
        events = [data["event"] for _, data in await events_of(client, run["id"])]
        assert [event["by"] for event in events if event["is"] == "ApprovalGiven"] == ["eve", "eve"]


async def test_a_decision_reaches_the_call_that_was_shown():
    """Two sub-agents wait for calls with one id: `run_id` tells them apart, and without it nothing is decided."""

    @tool(external=True, read_only=True)
    def ask(question: str) -> str:
        """Ask a person."""
        raise AssertionError

    agents = [
        Agent(ScriptedModel(say("", call("ask", question=name)), say("done")), tools=[ask], name=name)
        for name in ("city", "password")
    ]
    calls = [call(each.name, query="x") for each in agents]
    model = ScriptedModel(say("", *calls), say("done"))
    agent = Agent(model, tools=[each.as_tool() for each in agents], name="chief", store=MemoryStore())
    async with serving(agent) as client:
        run = (await client.post("/v1/runs", json={"prompt": "go", "wait_s": 30})).json()
        city, password = run["pending"]
        assert city["call_id"] == password["call_id"]
        path, shown = f"/v1/runs/{run['id']}", {"call_id": password["call_id"]}
        for run_id in (None, run["id"], "nobody"):
            for verb, body in (("answer", {"content": "4711"}), ("reject", {}), ("settle", {"rerun": True})):
                refused = await client.post(f"{path}/{verb}", json=shown | body | {"run_id": run_id})
                assert refused.status_code == 400
        answer = shown | {"content": "4711", "run_id": password["run_id"]}
        assert (await client.post(f"{path}/answer", json=answer)).status_code == 202
        again = await client.post(f"{path}/answer", json=answer | {"content": "1"})
        assert again.status_code == 409
        assert city in (await client.get(path)).json()["pending"]
        await client.post(
            f"{path}/answer", json={"call_id": city["call_id"], "run_id": city["run_id"], "content": "Rome"}
        )
        done = (await client.get(path, params={"wait_s": 30})).json()
        assert done["status"] == "done"
        for item, said in ((city, "Rome"), (password, "4711")):
            messages = (await client.get(f"/v1/runs/{item['run_id']}/messages")).json()["messages"]
            assert said in json.dumps(messages)


async def test_later_calls_of_a_session_are_allowed_and_that_is_revoked():
    """They run unasked and are counted, until the run's user ends it. With four eyes nothing is allowed beforehand."""
    store, replies = MemoryStore(), [say("", call("pay", amount=5)), say("done")]
    agent = Agent(ScriptedModel(*replies * 3), tools=[pay], name="shop", store=store)
    own, start = named("ann", "", "run+approve"), {"prompt": "pay", "session": "s", "wait_s": 30}
    async with serving(agent, four_eyes=True) as client:
        run = (await client.post("/v1/runs", json=start, headers=own)).json()
        path, [item] = f"/v1/runs/{run['id']}", run["pending"]
        answer = {"call_id": item["call_id"], "digest": item["digest"], "allow": ["amount"]}
        for headers in (own, named("eve", "", "approve")):
            assert (await client.post(f"{path}/approve", json=answer, headers=headers)).status_code == 403
    async with serving(agent) as client:
        assert (await client.get(f"{path}/allowances", headers=own)).json() == {"allowances": []}
        given = await client.post(f"{path}/approve", json=answer, headers=named("eve", "", "approve"))
        assert given.status_code == 202
        await client.get(path, params={"wait_s": 30})
        assert (await client.post("/v1/runs", json=start, headers=own)).json()["output"] == "done"
        [found] = (await client.get(f"{path}/allowances", headers=own)).json()["allowances"]
        assert (found["rule"], found["by"], found["used"]) == ("allow(pay, amount=5)", "eve", 1)
        ended = await client.post(f"{path}/revoke", json={"allowance": found["id"]}, headers=own)
        assert (ended.json()["revoked_by"], ended.json()["used"]) == ("ann", 1)
        assert (await client.post("/v1/runs", json=start, headers=own)).json()["status"] == "waiting"
        assert (await client.post(f"{path}/revoke", json={"allowance": "x/t1.0"}, headers=own)).status_code == 400


@pytest.mark.parametrize(
    "endpoint", [each for each in ENDPOINTS if "{run_id}" in each.path], ids=lambda each: each.handler.__name__
)
async def test_other_tenants_runs_do_not_exist(endpoint):
    """Each operation on another tenant's run, or with "run" on another user's, answers as for an unknown id."""
    bodies = {"approve": {"call_id": "c", "digest": "d"}, "input": {"text": "x"}, "feedback": {"rating": 1}}
    bodies["revoke"] = {"allowance": "x/t1.0"}
    body = bodies.get(
        endpoint.path.rpartition("/")[2],
        {"call_id": "c"} if endpoint.body and "call_id" in endpoint.body.model_fields else {},
    )
    async with serving(paying()) as client:
        run = (await client.post("/v1/runs", json={"prompt": "pay", "wait_s": 30}, headers=named("ann", "acme"))).json()

        async def answer_to(run_id, headers):
            options = {} if endpoint.body is None else {"json": body}
            path = endpoint.path.format(run_id=run_id, agent="shop")
            response = await client.request(endpoint.method, path, headers=headers, **options)
            return response.status_code, response.text.replace(run_id, "ID")

        for headers in (named("ann", "other", "admin"), named("root", "", "admin")):
            assert await answer_to(run["id"], headers) == await answer_to("unknown", headers)
            assert (await answer_to(run["id"], headers))[0] == 404
        if endpoint.scope == "run":
            assert (await answer_to(run["id"], named("bob", "acme")))[0] == 404
        after = (await client.get(f"/v1/runs/{run['id']}", headers=named("ann", "acme"))).json()
        assert after == run


async def test_lists_show_the_callers_runs_only():
    """Also page by page, and also when a filter names another user."""
    agent = Agent(ScriptedModel(*[say("x")] * 9), store=MemoryStore())
    async with serving(agent) as client:
        for user, tenant in [("ann", "acme"), ("bob", "acme"), ("ann", "zeta"), ("ann", "acme"), ("ann", "acme")]:
            await client.post("/v1/runs", json={"prompt": "p", "wait_s": 30}, headers=named(user, tenant))

        async def listed(headers, **query):
            rows, after = [], None
            while True:
                page = (
                    await client.get("/v1/runs", params=query | ({"after": after} if after else {}), headers=headers)
                ).json()
                rows += page["runs"]
                if (after := page["after"]) is None:
                    return [row["user"] for row in rows]

        assert await listed(named("ann", "acme"), limit=2) == ["ann"] * 3
        assert await listed(named("ann", "acme"), user="bob") == ["ann"] * 3
        assert await listed(named("eve", "acme", "approve")) == ["ann", "ann", "bob", "ann"]
        assert await listed(named("eve", "acme", "approve"), user="bob") == ["bob"]
        assert await listed(named("eve", "nobody", "admin")) == []


async def test_a_list_is_filtered_sorted_and_counted():
    """By the store: pages of any order have all runs once, and the total is theirs; a wrong filter is refused."""
    store = MemoryStore()
    for number, (usd, user) in enumerate([(0.1, "ann"), (0.3, "ann"), (None, "ann"), (0.3, "bob"), (9.0, "ann")]):
        driver = await LeasedRun.create(
            store,
            make_header(f"r{number}", created_at=float(number), agent="other" if usd == 9.0 else "shop", user=user),
        )
        await driver.append(Observed(), build_answer(usd, 10.0 - number)).wait()
        await driver.release()
    await create_finished_run(store, make_header("below", created_at=9.0, agent="shop", user="ann", parent="r0"))
    async with serving(Agent(ScriptedModel(), name="shop", store=store)) as client:

        async def listed(**query):
            ids, after = [], None
            while True:
                params = {"limit": 1, "total": "true", "subagents": "false", **query}
                page = (await client.get("/v1/runs", params=params | ({"after": after} if after else {}))).json()
                ids += [row["id"] for row in page["runs"]]
                if (after := page["after"]) is None:
                    assert page["total"] in {len(ids), None}
                    return ids

        assert await listed() == ["r3", "r2", "r1", "r0"]
        assert await listed(subagents="true") == ["below", "r3", "r2", "r1", "r0"]
        assert await listed(order="cost") == ["r3", "r1", "r0"]
        assert await listed(order="duration", user="ann", max_duration_s=9) == ["r1", "r2"]
        assert await listed(since=1, before=3, stop_reason="completed") == ["r2", "r1"]
        assert await listed(min_cost_usd=0.2, agent="other") == []
        row = (await client.get("/v1/runs", params={"order": "cost"})).json()["runs"][0]
        assert (row["id"], row["cost_usd"], row["duration_s"], row["release"]) == ("r3", 0.3, 7.0, "")
        for wrong in ({"order": "cheapest"}, {"min_cost_usd": "-1"}, {"since": "nan"}, {"stop_reason": "x"}):
            assert (await client.get("/v1/runs", params=wrong)).status_code == 400, wrong


async def test_a_session_is_its_callers():
    """Two callers with the same session name have two conversations."""
    seen = []
    agent = Agent(ScriptedModel(*[say(f"{n}") for n in range(4)]), store=MemoryStore())
    async with serving(agent) as client:
        for headers in (named("ann", "a"), named("ann", "a"), named("ann", "b"), named("bob", "a")):
            made = await client.post("/v1/runs", json={"prompt": "p", "session": "s/1", "wait_s": 30}, headers=headers)
            assert made.json()["session"] == "s/1"
            run = await agent.load(made.json()["id"])
            seen.append(len(run.messages))
    assert seen == [2, 4, 2, 2]


async def test_a_stream_continues_where_it_was_cut():
    """After any version, from another server on the same store, and with a position that does not exist."""
    store = MemoryStore()
    async with serving(paying(store)) as client:
        run = (await client.post("/v1/runs", json={"prompt": "pay", "wait_s": 30})).json()
        first = await events_of(client, run["id"], until="ApprovalAsked")
    later = Agent(ScriptedModel(say("done")), tools=[pay], name="shop", store=store)
    async with serving(later) as client:
        [item] = run["pending"]
        body = {"call_id": item["call_id"], "digest": item["digest"]}
        await client.post(f"/v1/runs/{run['id']}/approve", json=body)
        whole = await events_of(client, run["id"])
        assert whole[: len(first)] == first
        for position, data in whole:
            rest = await events_of(client, run["id"], after=position)
            assert rest == whole[data["version"] :]
        header = {"last-event-id": first[-1][0]} | named("root", "", "admin")
        assert await events_of(client, run["id"], headers=header) == whole[len(first) :]
        for wrong in ("999", "x", f"{run['id']}:999", "a:1:", "other:1"):
            response = await client.get(f"/v1/runs/{run['id']}/events", params={"after": wrong})
            assert response.status_code in {400, 404}, wrong


async def test_sub_agents_are_followed():
    """Their events are in the stream of their caller, and the position covers both."""
    helper = Agent(ScriptedModel(say("inner")), name="helper")
    agent = Agent(
        ScriptedModel(say("", call("helper", query="x")), say("outer")),
        name="chief",
        tools=[helper.as_tool()],
        store=MemoryStore(),
    )
    async with serving(agent) as client:
        run = (await client.post("/v1/runs", json={"prompt": "go", "wait_s": 30})).json()
        assert run["output"] == "outer"
        whole = await events_of(client, run["id"])
        runs = {data["run_id"] for _, data in whole}
        assert len(runs) == 2
        middle = whole[len(whole) // 2][0]
        rest = await events_of(client, run["id"], after=middle)
        had = parse_position(middle, run["id"])
        wanted = {
            (data["run_id"], data["version"]) for _, data in whole if data["version"] > had.get(data["run_id"], 0)
        }
        assert {(data["run_id"], data["version"]) for _, data in rest} == wanted
        assert len(rest) == len(wanted)


async def test_text_arrives_while_it_is_written():
    """Pieces of text come without an id, from the process that executes the run."""
    gate = anyio.Event()

    @tool
    async def wait() -> str:
        """Wait for the test."""
        await gate.wait()
        return "ok"

    agent = Agent(ScriptedModel(say("", call("wait")), say("one two three")), tools=[wait], store=MemoryStore())
    async with serving(agent) as client:
        run = (await client.post("/v1/runs", json={"prompt": "go"})).json()
        texts, is_delta = [], False
        async with client.stream("GET", f"/v1/runs/{run['id']}/events") as response:
            async for line in response.aiter_lines():
                if line.startswith("data: ") and "ToolStarted" in line:
                    gate.set()
                if line.startswith("event: "):
                    is_delta = line == "event: delta"
                elif line.startswith("data: ") and is_delta:
                    texts.append(json.loads(line[6:]).get("text", ""))
                elif not line:
                    is_delta = False
        assert "".join(texts) == "one two three"


async def test_a_viewer_that_leaves_ends_no_run():
    """A stream that is cut, and a request that waits and is cut."""
    gate = anyio.Event()

    @tool
    async def wait() -> str:
        """Wait for the test."""
        await gate.wait()
        return "ok"

    agent = Agent(ScriptedModel(say("", call("wait")), say("end")), tools=[wait], store=MemoryStore())
    async with serving(agent) as client:
        run = (await client.post("/v1/runs", json={"prompt": "go"})).json()
        await events_of(client, run["id"], until="ToolStarted")
        with anyio.move_on_after(0.05):
            await client.get(f"/v1/runs/{run['id']}", params={"wait_s": 30})
        gate.set()
        assert (await client.get(f"/v1/runs/{run['id']}", params={"wait_s": 30})).json()["output"] == "end"


async def test_a_request_that_waits_is_answered_when_the_server_stops():
    """With the run as it is."""
    agent = Agent(ScriptedModel("never"), name="shop", store=MemoryStore())
    app = serve([agent], auth=lambda _request: Caller(user="ann", scopes={"run"}), parallel=0)
    answers = []

    async def start():
        answers.append(await client.post("/v1/runs", json={"prompt": "go", "wait_s": 60}))

    async with (
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here") as client,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(start)
        while not answers:
            app.close_streams()
            await anyio.lowlevel.checkpoint()
    assert [(answer.status_code, answer.json()["status"]) for answer in answers] == [(201, "queued")]


async def test_control():
    """Pause, resume, input, cancel, fork, feedback and deletion."""
    async with serving(paying()) as client:
        run = (await client.post("/v1/runs", json={"prompt": "pay", "wait_s": 30}, headers=named())).json()
        path = f"/v1/runs/{run['id']}"
        strange = await client.post(f"{path}/cancel", json={}, headers=named("eve", "", "approve"))
        assert strange.status_code == 403
        assert (await client.post(f"{path}/input", json={"text": "and hurry", "key": "k"})).status_code == 202
        assert (await client.post(f"{path}/pause", json={"message": "lunch"})).status_code == 202
        assert (await client.post(f"{path}/resume")).status_code == 202
        fork = await client.post(f"{path}/fork", json={"at": 1, "prompt": "another"})
        assert fork.status_code == 201
        stopped = await client.post(f"{path}/cancel", json={"message": "enough"}, headers=named())
        assert stopped.status_code == 202
        run = (await client.get(path, params={"wait_s": 30})).json()
        assert (run["status"], run["stop_reason"]) == ("failed", "cancelled")
        assert (await client.post(f"{path}/feedback", json={"rating": 2})).status_code == 204
        assert (await client.post(f"{path}/input", json={"text": "late"})).status_code == 409
        assert (await client.delete(path, headers=named())).status_code == 403
        assert (await client.delete(path)).status_code == 204
        assert (await client.get(path)).status_code == 404


async def test_a_fork_that_withholds_its_calls():
    """It needs no decision, since it makes no payment; the details say which runs may act."""
    async with serving(paying()) as client:
        run = (await client.post("/v1/runs", json={"prompt": "pay", "wait_s": 30})).json()
        path = f"/v1/runs/{run['id']}"
        assert (await client.post(f"{path}/fork", json={"at": 1, "withhold": {}})).status_code == 422
        fork = (await client.post(f"{path}/fork", json={"at": 1, "withhold": True})).json()
        done = (await client.get(f"/v1/runs/{fork['id']}", params={"wait_s": 30})).json()
        assert (run["status"], done["status"], done["pending"]) == ("waiting", "done", [])
        for each, withhold in ((run, False), (fork, True)):
            details = (await client.get(f"/v1/runs/{each['id']}/details")).json()
            assert (details["withhold"], details["may_act"], details["caller"]) == (withhold, True, None)
        await client.post(f"{path}/cancel", json={})


async def test_a_fork_that_is_asked_for_again_is_the_first_one():
    """The key stands for this fork only, and for its user; what differs from the first request is refused."""
    async with serving(paying()) as client:
        run = (await client.post("/v1/runs", json={"prompt": "pay", "wait_s": 30}, headers=named())).json()

        async def fork(headers, **body):
            sent = {"json": body, "headers": headers | {"idempotency-key": "f"}}
            answer = await client.post(f"/v1/runs/{run['id']}/fork", **sent)
            return answer.status_code, answer.json().get("id")

        status, made = await fork(named(), at=1, withhold=True)
        assert status == 201
        assert await fork(named(), at=1, withhold=True) == (200, made)
        for body in ({"at": 0, "withhold": True}, {"at": 1}, {"at": 1, "withhold": True, "prompt": "another"}):
            assert await fork(named(), **body) == (409, None)
        start = {"json": {"prompt": "pay"}, "headers": named() | {"idempotency-key": "f"}}
        assert (await client.post("/v1/runs", **start)).status_code == 409
        [copy] = [each for each in (await client.get("/v1/runs")).json()["runs"] if each["id"] != run["id"]]
        assert copy["id"] == made
        admin = named("root", "", "admin")  # whose key is not that of the run's user
        status, other = await fork(admin, at=1, withhold=True)
        assert (status, await fork(admin, at=1, withhold=True)) == (201, (200, other))
        assert (await fork(admin, at=1), await fork(named(), at=1, withhold=True)) == ((409, None), (200, made))
        await client.post(f"/v1/runs/{run['id']}/cancel", json={})


async def test_a_key_of_a_fork_stands_for_its_edits():
    """Another edit with the key is refused, though it is of the same event, and so is none."""
    async with serving(paying()) as client:
        run = (await client.post("/v1/runs", json={"prompt": "pay", "wait_s": 30})).json()
        events = (await client.get(f"/v1/runs/{run['id']}/journal")).json()["events"]
        [(version, chosen)] = [
            (each["version"], each["event"]) for each in events if each["event"]["is"] == "ToolsChosen"
        ]

        async def fork(amount):
            event = json.loads(json.dumps(chosen))
            event["message"]["calls"][0]["arguments"] = json.dumps({"amount": amount})
            body = {"at": version, "edit": {str(version): event} if amount else {}}
            answer = await client.post(f"/v1/runs/{run['id']}/fork", json=body, headers={"idempotency-key": "f"})
            return answer.status_code

        assert [await fork(amount) for amount in (6, 6, 7, None)] == [201, 200, 409, 409]


@pytest.mark.parametrize(
    ("content", "content_type", "status"),
    [
        (b"{", "application/json", 400),
        (b"[" * 100_000, "application/json", 400),
        (b"\xff", "application/json", 400),
        (b'{"prompt": "x"}', "text/plain", 415),
        (b'{"prompt": "x", "user": "root"}', "application/json", 422),
        (b'{"prompt": ""}', "application/json", 422),
        (b'{"prompt": 5}', "application/json", 422),
        (b"[]", "application/json", 422),
        (b'{"prompt": "x", "agent": "nobody"}', "application/json", 400),
        (b'{"prompt": "' + b"x" * MAX_BODY_BYTES + b'"}', "application/json", 413),
    ],
    ids=range(10),
)
async def test_wrong_bodies(content, content_type, status):
    """Each is refused with a reason, and starts no run."""
    async with serving(Agent(ScriptedModel(say("x")), store=MemoryStore())) as client:
        response = await client.post("/v1/runs", content=content, headers={"content-type": content_type})
        assert response.status_code == status, response.text
        assert response.json()["error"]["message"]
        assert (await client.get("/v1/runs")).json()["runs"] == []


async def test_wrong_requests():
    """Unknown paths, methods, parameters and ids."""
    async with serving(Agent(ScriptedModel(say("x")), store=MemoryStore())) as client:
        for method, path, status in [
            ("GET", "/nowhere", 404),
            ("PUT", "/v1/runs", 405),
            ("GET", "/v1/runs?limit=9999", 400),
            ("GET", "/v1/runs?limit=%C2%B2", 400),
            ("GET", "/v1/runs?state=LOST", 400),
            ("GET", "/v1/runs/%00", 404),
            ("GET", "/v1/runs/x?wait_s=9", 404),
            ("GET", "/v1/runs/x/events", 404),
        ]:
            response = await client.request(method, path)
            assert response.status_code == status, path
            assert response.json()["error"]["message"], path
        for key, status in (("x" * 201, 400), ("", 400), ("é\u0080".encode("latin-1"), 400), ("a/b ..?", 201)):
            keyed = await client.post("/v1/runs", json={"prompt": "x"}, headers={"idempotency-key": key})
            assert keyed.status_code == status, key
        nobody = await client.get("/v1/runs", headers={"x-caller": ""})
        assert nobody.status_code == 401
        assert nobody.headers["www-authenticate"].startswith("Bearer")


async def test_keys_are_read_again_when_they_change(tmp_path):
    """Only hashes are stored, for the owner of the file only; a removed key is refused without a restart."""
    path = tmp_path / "keys" / "keys.json"
    key = add_key(path, Caller(user="ann", tenant="acme", scopes=["run"]))
    assert key not in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600
    async with serving(Agent(ScriptedModel(say("x")), store=MemoryStore()), auth=APIKeys(path)) as client:
        mine = {"authorization": f"Bearer {key}"}
        assert (await client.get("/v1/runs", headers=mine)).status_code == 200
        for wrong in ("", f"Bearer {key}x", f"Basic {key}", "Bearer"):
            assert (await client.get("/v1/runs", headers={"authorization": wrong})).status_code == 401
        other = add_key(path, Caller(user="bob", scopes=["approve"]))
        refused = await client.post("/v1/runs", json={"prompt": "x"}, headers={"authorization": f"Bearer {other}"})
        assert refused.status_code == 403
        assert remove_keys(path, "ann", "acme") == 1
        assert (await client.get("/v1/runs", headers=mine)).status_code == 401
    path.write_text("[]")
    with pytest.raises(MisuseError, match="agentfsm keys add"):
        APIKeys(path)
    with pytest.raises(MisuseError, match="agentfsm keys add"):
        APIKeys(tmp_path / "none.json")
    with pytest.raises(MisuseError, match="scopes"):
        Caller(user="x", scopes=["root"])


async def test_a_store_that_is_down_is_said(tmp_path):
    """With 503 and the time of the next attempt; readiness says so, and health does not depend on it."""
    store = SQLiteStore(tmp_path / "runs.db")
    async with serving(Agent(ScriptedModel(say("x")), store=store)) as client:
        assert (await client.get("/readyz")).status_code == 200
        await store.aclose()
        response = await client.get("/v1/runs")
        assert response.status_code == 503
        assert response.headers["retry-after"] == "2"
        assert (await client.get("/readyz")).status_code == 503
        assert (await client.get("/healthz")).status_code == 200


async def test_the_document_describes_each_operation():
    """OpenAPI: each path with its method, summary and body."""
    async with serving(Agent(ScriptedModel(say("x")), store=MemoryStore())) as client:
        document = (await client.get("/openapi.json")).json()
        assert document == build_openapi()
        assert (await client.get("/v1/agents")).json()["agents"][0]["name"] == "agent"
    for each in ENDPOINTS:
        operation = document["paths"][each.path][each.method.lower()]
        assert operation["summary"].endswith(".")
        assert ("requestBody" in operation) == (each.body is not None)


def test_which_agents_can_be_served():
    """One or more, with names and one store."""
    agent = Agent(ScriptedModel(say("x")), store=MemoryStore())
    for wrong in (
        [],
        [agent, agent.with_(instructions="x")],
        [agent, Agent(ScriptedModel(say("x")), name="b", store=MemoryStore())],
    ):
        with pytest.raises(MisuseError):
            serve(wrong, auth=read_caller)


@pytest.mark.parametrize("versions", [{}, {"a": 1}, {"a:b,c": 12, "é": 3, "%": 0}])
def test_positions(versions):
    """Each position is read as it was written, with any id."""
    assert parse_position(format_position(versions), "a") == versions
    assert parse_position("7", "a") == {"a": 7}
