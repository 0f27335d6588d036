"""Limits of users and tenants, full queues, metrics, sessions and workers."""

import time
from contextlib import AsyncExitStack

import anyio
import pytest
from prometheus_client.parser import text_string_to_metric_families

from agentfsm import Agent, MisuseError, Spend, tool
from agentfsm.ports import Store, SystemClock
from agentfsm.serve import APIKeys, Caller, RateLimits, serve
from agentfsm.serve.access import add_key
from agentfsm.serve.errors import QUEUE_RETRY_S, LimitExceededError, OverloadedError
from agentfsm.serve.metrics import BIRTH_S, RunMetrics
from agentfsm.serve.start_places import START_S
from agentfsm.stores import MemoryStore, SQLiteStore
from agentfsm.telemetry import totals
from agentfsm.telemetry.measurements import JUDGE_RATINGS, METRICS, OTHER_MODELS
from agentfsm.telemetry.totals import Totals
from agentfsm.testing import ScriptedModel, call, say
from tests.support.gateway_client import named, pay, paying, read_caller, serving


@pytest.fixture
def anyio_backend():
    """Return the one that uvicorn runs on."""
    return "asyncio"


def greeting(store=None, count=20):
    return Agent(ScriptedModel(*[say("hello")] * count), name="greeter", store=store or MemoryStore())


async def test_requests_of_a_user_and_a_tenant(tmp_path):
    """Both count in the store: a second server with the same store refuses as well, and says when to try again."""
    path = tmp_path / "runs.db"
    limits = {"limits": RateLimits(requests=3), "tenant_limits": RateLimits(requests=5)}
    async with (
        serving(greeting(SQLiteStore(path)), **limits) as one,
        serving(greeting(SQLiteStore(path)), **limits) as two,
    ):

        async def ask(client, user, tenant="acme"):
            response = await client.get("/v1/agents", headers=named(user, tenant))
            return response.status_code

        assert [await ask(client, "ann") for client in (one, two, one)] == [200] * 3
        refused = await two.get("/v1/agents", headers=named("ann", "acme"))
        assert refused.status_code == 429
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        assert refused.json()["error"]["code"] == "limit_exceeded"
        assert [await ask(one, "bob"), await ask(two, "bob"), await ask(one, "bob")] == [200, 200, 429]
        assert await ask(one, "ann", "other") == 200


async def test_the_limits_of_a_key_come_before_those_of_the_server():
    """A key may have more, or less; a limit that it has not is the server's."""

    def authenticate(request):
        limits = {"ann": RateLimits(requests=1), "bob": RateLimits(requests=5)}
        user = request.headers["x-user"]
        return Caller(user=user, scopes={"run"}, limits=limits.get(user, RateLimits()))

    async with serving(greeting(), auth=authenticate, limits=RateLimits(requests=2)) as client:
        for user, expected in (("ann", 1), ("bob", 5), ("eve", 2)):
            statuses = [(await client.get("/v1/agents", headers={"x-user": user})).status_code for _ in range(6)]
            assert statuses == [200] * expected + [429] * (6 - expected), user


def test_a_second_key_of_a_user_evades_nothing(tmp_path):
    """Four eyes and limits hold for all keys of a user in a tenant, the smaller limit of two; scopes are of the key."""
    path = tmp_path / "keys.json"
    first = {"scopes": ["run"], "four_eyes": True, "limits": RateLimits(runs=1, requests=9)}
    second = {"scopes": ["approve"], "limits": RateLimits(requests=4)}
    for options in (first, second):
        add_key(path, Caller(user="ann", tenant="acme", **options))
    add_key(path, Caller(user="ann", scopes=["run"]))
    *same, other = APIKeys(path).callers
    assert [(each.limits, each.four_eyes) for each in same] == [(RateLimits(runs=1, requests=4), True)] * 2
    assert [sorted(each.scopes) for each in same] == [["run"], ["approve"]]
    assert (other.limits, other.four_eyes) == (RateLimits(), False)


async def test_runs_at_once():
    """A run counts until it is over; a repeated request is answered, and other users are not refused."""
    store = MemoryStore()
    async with serving(greeting(store), parallel=0, limits=RateLimits(runs=1)) as client:
        first = {"json": {"prompt": "x"}, "headers": named() | {"idempotency-key": "a"}}
        started = await client.post("/v1/runs", **first)
        assert started.status_code == 201
        refused = await client.post("/v1/runs", json={"prompt": "x"}, headers=named())
        assert (refused.status_code, refused.headers["retry-after"]) == (429, f"{QUEUE_RETRY_S:.0f}")
        assert (await client.post("/v1/runs", **first)).status_code == 200
        assert (await client.post("/v1/runs", json={"prompt": "x"}, headers=named("bob"))).status_code == 201
        await client.post(f"{started.headers['location']}/cancel", json={}, headers=named())
        assert (await client.post("/v1/runs", json={"prompt": "x"}, headers=named())).status_code == 201


async def test_a_run_keeps_its_place_until_it_is_over():
    """Also while it waits or is paused: whatever lets it go on then, no more runs than are allowed are at work."""
    model = ScriptedModel(say("", call("pay", amount=5)), "done", "again")
    agent = Agent(model, tools=[pay], name="shop", store=MemoryStore())
    async with serving(agent, limits=RateLimits(runs=1)) as client:

        async def start():
            response = await client.post("/v1/runs", json={"prompt": "pay", "wait_s": 30}, headers=named())
            return response.status_code, response.json()

        async def act(operation, **body):
            response = await client.post(f"{path}/{operation}", json=body, headers=named("ann", "", "run+approve"))
            assert response.status_code == 202, response.text

        (status, run), path = await start(), ""
        path = f"/v1/runs/{run['id']}"
        for step in ("", "pause", "resume"):
            if step:
                await act(step)
            assert (status, (await start())[0]) == (201, 429), step
        item = run["pending"][0]
        await act("approve", call_id=item["call_id"], digest=item["digest"])
        assert (await client.get(path, params={"wait_s": 30}, headers=named())).json()["state"] == "done"
        assert (await start())[0] == 201


@pytest.mark.parametrize("own", [{}, {"user": "ann"}])
async def test_a_fork_counts_for_the_user_of_the_run(own):
    """Whoever makes it, and also if the run has no user."""
    store = MemoryStore()
    agent = greeting(store)
    run = await agent.run("x", **own)
    async with serving(agent, parallel=0, limits=RateLimits(runs=1)) as client:
        statuses = [(await client.post(f"/v1/runs/{run.id}/fork", json={"at": 0})).status_code for _ in range(2)]
        assert statuses == [201, 429]
        assert (await client.post("/v1/runs", json={"prompt": "x"})).status_code == 201  # the administrator's own
        mine = await client.post("/v1/runs", json={"prompt": "x"}, headers=named())
        assert mine.status_code == (429 if own else 201)


@pytest.mark.parametrize("limit", [1, 3])
@pytest.mark.parametrize("kind", ["user", "tenant", "queue"])
async def test_no_starts_at_one_moment_exceed_a_limit(tmp_path, kind, limit):
    """Over two servers with one store; as many as are allowed are started."""
    options = {
        "user": {"limits": RateLimits(runs=limit)},
        "tenant": {"tenant_limits": RateLimits(runs=limit)},
        "queue": {"max_queue": limit},
    }[kind]
    stores = [SQLiteStore(tmp_path / "runs.db") for _ in range(2)]
    gateways = [serve([greeting(store)], auth=read_caller, parallel=0, **options).gateway for store in stores]
    users = ["ann"] if kind == "user" else ["ann", "bob", "eve"]
    outcomes = []

    async def start(number):
        caller = Caller(user=users[number % len(users)], tenant="acme", scopes={"run"})
        try:
            outcomes.append(await gateways[number % 2].start_run(caller, "x"))
        except (LimitExceededError, OverloadedError):
            outcomes.append(None)

    async with anyio.create_task_group() as tasks:
        for number in range(14):
            tasks.start_soon(start, number)
    assert len([each for each in outcomes if each is not None]) == limit
    assert len(await stores[0].runs()) == limit
    for store in stores:
        await store.aclose()


async def test_a_start_that_fails_leaves_its_place(tmp_path):
    """At once, in all processes; one whose process died leaves it after a minute."""
    clock = LateClock()
    store = MemoryStore(clock=clock)
    one, two = (
        serve([greeting(store)], auth=read_caller, parallel=0, limits=RateLimits(runs=1)).gateway for _ in range(2)
    )
    ann = Caller(user="ann", scopes={"run"})
    with pytest.raises(ZeroDivisionError):
        async with one.admission.admit_run(ann, "greeter", "a"):
            raise ZeroDivisionError
    dead = two.admission.admit_run(ann, "greeter", "b")
    await dead.__aenter__()
    with pytest.raises(LimitExceededError):
        await one.start_run(ann, "x")
    clock.late_s = -START_S - 1
    await one.start_run(ann, "x")


async def test_open_requests_of_a_user():
    """Streams and waits of one user do not take the places of others; they are free again when they end."""
    async with serving(paying(), limits=RateLimits(open_requests=2)) as client:
        run = (await client.post("/v1/runs", json={"prompt": "pay", "wait_s": 30}, headers=named("ann"))).json()
        path, health = f"/v1/runs/{run['id']}", []
        async with AsyncExitStack() as streams:
            for _ in range(2):
                stream = await streams.enter_async_context(client.stream("GET", f"{path}/events", headers=named("ann")))
                assert stream.status_code == 200
            for where in (f"{path}/events", path, f"{path}/ag-ui"):
                refused = await client.get(where, headers=named("ann"))
                assert (refused.status_code, refused.headers["retry-after"]) == (429, f"{QUEUE_RETRY_S:.0f}")
            assert (await client.get("/v1/runs", headers=named("bob"))).status_code == 200
            assert (await client.get("/v1/runs", headers=named("ann", "other"))).status_code == 200
            health.append((await client.get("/healthz")).status_code)
        while (await client.get(path, headers=named("ann"))).status_code == 429:  # the server sees that they left
            pass
        assert health == [200]
        assert 'agentfsm_refusals_total{limit="open_requests"}' in (await client.get("/metrics")).text


async def test_tokens():
    """Those of a run count when it ends, in whichever process; then no run is started until they are a minute old."""
    async with serving(greeting(), limits=RateLimits(tokens=5)) as client:
        statuses = []
        for _ in range(200):  # a follower counts them, at its own pace
            made = await client.post("/v1/runs", json={"prompt": "x", "wait_s": 30}, headers=named())
            statuses.append(made.status_code)
            if made.status_code == 429:
                break
        assert statuses[0] == 201
        assert statuses[-1] == 429
        assert "tokens" in made.json()["error"]["message"]
        assert (await client.get("/v1/runs", headers=named())).status_code == 200
        assert (await client.post("/v1/runs", json={"prompt": "x"}, headers=named("bob"))).status_code == 201


async def test_a_full_queue():
    """New runs are refused with 503 and a time; reading and deciding goes on."""
    async with serving(greeting(), parallel=0, max_queue=1) as client:
        assert (await client.post("/v1/runs", json={"prompt": "x"})).status_code == 201
        refused = await client.post("/v1/runs", json={"prompt": "x"})
        while refused.status_code == 201:  # the length of the queue is known for a second
            refused = await client.post("/v1/runs", json={"prompt": "x"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
        assert int(refused.headers["retry-after"]) == QUEUE_RETRY_S
        assert (await client.get("/v1/runs")).status_code == 200


async def test_metrics():
    """A parser of Prometheus reads them; their labels are operations, classes of status, agents and limits."""
    async with serving(paying(), limits=RateLimits(requests=7)) as client:
        for _ in range(2):
            await client.post("/v1/runs", json={"prompt": "pay", "wait_s": 30})
        await client.get("/v1/runs/unknown")
        assert (await client.get("/metrics", headers=named())).status_code == 403
        response = await client.get("/metrics")
        assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
        families = {each.name: each for each in text_string_to_metric_families(response.text)}
        samples = {
            (each.name, *each.labels.values()): each.value for found in families.values() for each in found.samples
        }
        assert samples["agentfsm_requests_total", "create_run", "2xx"] == 2
        assert samples["agentfsm_requests_total", "get_run", "4xx"] == 1
        assert samples["agentfsm_executions_total", "shop"] == 2
        assert samples["agentfsm_queue_runs", "shop"] == 0
        assert samples["agentfsm_stranded_runs", "shop", "release"] == 0
        assert samples["agentfsm_schedule_conflicts_total", "shop"] == 0
        assert samples["agentfsm_streams_open",] == 0
        assert samples["agentfsm_refusals_total", "requests"] == 0
        assert families["agentfsm_requests"].type == "counter"
        while (await client.get("/v1/agents")).status_code == 200:
            pass
        text = (await client.get("/metrics", headers=named("eve", "", "admin"))).text
        assert 'agentfsm_refusals_total{limit="requests"} 1' in text


class LateClock(SystemClock):
    """A clock that may be late."""

    late_s = 0.0

    def now(self):
        return time.time() - self.late_s


async def test_metrics_of_stranded_runs():
    """A gauge counts the runs that no worker takes, by agent and reason, those of agents that are not served too."""
    clock = LateClock()
    store = MemoryStore(clock=clock)
    clock.late_s = 120.0
    await Agent(ScriptedModel(), name="gone", store=store).submit("go")
    await Agent(ScriptedModel(), name="shop", store=store).submit("go", release="1")
    clock.late_s = 0.0
    async with serving(Agent(ScriptedModel(), name="shop", store=store)) as client:
        found = text_string_to_metric_families((await client.get("/metrics")).text)
        samples = {
            tuple(each.labels.values()): each.value
            for family in found
            for each in family.samples
            if each.name == "agentfsm_stranded_runs"
        }
    assert {name: count for name, count in samples.items() if count} == {
        ("gone", "no_worker"): 1, ("shop", "release"): 1,
    }  # fmt: skip


async def read_samples(client):
    found = text_string_to_metric_families((await client.get("/metrics")).text)
    return {(each.name, *each.labels.values()): each.value for family in found for each in family.samples}


async def read_until(client, *name, value=1):
    while (samples := await read_samples(client)).get(name) != value:  # noqa: ASYNC110  it is counted at some time
        await anyio.sleep(0.02)
    return samples


async def test_metrics_of_runs(monkeypatch):
    """Those of known agents are there at 0; each run counts once, over a wait, with its ratings; labels are bounded."""
    monkeypatch.setattr(totals, "POLL_S", 0.02)
    model = ScriptedModel(say("", call("pay", amount=5)), "done")
    async with serving(agent := Agent(model, tools=[pay], name="shop", store=MemoryStore())) as client:
        samples = await read_until(client, "agentfsm_runs_total", "shop", "", "scripted", "completed", value=0)
        ours = {metric.name for metric in METRICS.values()}
        names = {each[0].removesuffix("_sum") for each in samples}
        assert ours - names == {OTHER_MODELS.name, JUDGE_RATINGS.name}  # labels are known with the first value
        assert not any(value for name, value in samples.items() if name[0] in ours)
        made = (await client.post("/v1/runs", json={"prompt": "pay", "wait_s": 30})).json()
        samples = await read_until(client, "agentfsm_waiting_runs", "shop")
        path, item = f"/v1/runs/{made['id']}", made["pending"][0]
        await client.post(f"{path}/approve", json={"call_id": item["call_id"], "digest": item["digest"]})
        await client.get(path, params={"wait_s": 30})
        await client.post(f"{path}/feedback", json={"rating": 4})
        samples = await read_until(client, "agentfsm_feedback_rating_sum", "shop", value=4)
        assert samples["agentfsm_runs_total", "shop", "", "scripted", "completed"] == 1
        assert samples["agentfsm_run_turns_sum", "shop"] == 2
        assert [samples["agentfsm_run_turns_bucket", "shop", bound] for bound in ("1", "2", "+Inf")] == [0, 1, 1]
        assert samples["agentfsm_tool_calls_total", "shop", "pay", "done"] == 1
        assert samples["agentfsm_wait_seconds_count", "shop", "approval"] == 1
        assert samples["agentfsm_tokens_total", "shop", "scripted", "output"] > 0
        assert samples["agentfsm_leases_lost_total", "shop"] == samples["agentfsm_crashes_total", "shop"] == 0
        assert not any(made["id"] in names for names in samples)
    async with serving(agent) as client, serving(agent, agent.with_(name="other")) as beside:
        for each in (client, beside):  # after a restart, and at another server of the store
            found = await read_samples(each)
            of_runs = {name: value for name, value in samples.items() if name[0].partition("_bucket")[0] in ours}
            assert {name: found[name] for name in of_runs if of_runs[name]} == {
                name: value for name, value in of_runs.items() if value
            }


class WithoutFollowers(MemoryStore):
    """A store of somebody that implements the required methods only."""

    add_follower = Store.add_follower


async def test_metrics_never_stop_the_server(caplog):
    """A store without followers has none, which is logged once; nor has one whose runs are not all counted yet."""
    metrics = RunMetrics(WithoutFollowers())
    assert [await metrics.format([]), await metrics.format([])] == ["", ""]
    assert caplog.text.count("WithoutFollowers keeps no totals") == 1
    agent = greeting()
    await agent.run("x")
    assert await RunMetrics(agent.store).format([agent]) == ""
    await Totals(agent.store).catch_up()
    assert 'outcome="completed"} 1' in await RunMetrics(agent.store).format([agent])


async def test_a_series_that_nobody_expected():
    """It begins at 0, so that Prometheus sees its first value as an increase; one as old as the totals does not."""
    clock = LateClock()
    store = MemoryStore(clock=clock)
    sample = 'agentfsm_runs_total{agent="greeter",version="",model="scripted",outcome="completed"} '
    counts = Totals(store)
    await greeting(store).run("x")
    await counts.catch_up()
    metrics = RunMetrics(store)
    assert f"{sample}1\n" in await metrics.format([])
    await greeting(store).with_(name="new").run("x")
    await counts.catch_up()
    new = sample.replace("greeter", "new")
    assert f"{new}0\n" in await metrics.format([])
    clock.late_s = -BIRTH_S - 1
    assert f"{new}1\n" in await metrics.format([])


async def test_series_are_bounded(monkeypatch):
    """Those of an agent beyond the bound are added to one series."""
    monkeypatch.setattr(totals, "MAX_SERIES", 20)
    store = MemoryStore()
    for number in range(30):
        model = Priced("hello")
        model.name = f"model-{number}"
        await Agent(model, name="greeter", store=store).run("x")
    await Totals(store).catch_up()
    text = await RunMetrics(store).format([])
    assert text.count("agentfsm_") < 20 * 20
    others = [line for line in text.splitlines() if 'agentfsm_cost_usd_total{agent="greeter",model="(other)"}' in line]
    every = [float(line.rpartition(" ")[2]) for line in text.splitlines() if "agentfsm_cost_usd_total{" in line]
    assert len(others) == 1
    assert sum(every) == pytest.approx(30 * 0.05)


async def test_sessions_and_workers():
    """Sessions with their last run; what has a worker, what waits for one, and for how long. Of the tenant only."""
    async with serving(greeting()) as client:
        for user, tenant, session in (
            ("ann", "acme", "s"),
            ("ann", "acme", "s"),
            ("bob", "acme", "s"),
            ("ann", "b", "t"),
        ):
            body = {"prompt": "x", "wait_s": 30, "session": session}
            await client.post("/v1/runs", json=body, headers=named(user, tenant))
        own = (await client.get("/v1/sessions", headers=named("ann", "acme"))).json()
        assert [(each["session"], each["user"], each["runs"]) for each in own["sessions"]] == [("s", "ann", 2)]
        assert own["sessions"][0]["last"]["status"] == "done"
        every = (await client.get("/v1/sessions", headers=named("eve", "acme", "approve"))).json()
        assert {(each["session"], each["user"]) for each in every["sessions"]} == {("s", "ann"), ("s", "bob")}
    async with serving(greeting(), parallel=0) as client:
        made = (await client.post("/v1/runs", json={"prompt": "x"}, headers=named("ann", "acme"))).json()
        found = (await client.get("/v1/workers", headers=named("eve", "acme", "approve"))).json()
        assert ([each["id"] for each in found["queue"]], found["workers"]) == ([made["id"]], [])
        assert "no worker" in found["queue"][0]["reason"]
        assert found["queue"][0]["ready_s"] >= 0
        other = (await client.get("/v1/workers", headers=named("eve", "b", "admin"))).json()
        assert other["queue"] == []
        assert (await client.get("/v1/workers", headers=named("ann", "acme"))).status_code == 403


class Priced(ScriptedModel):
    """A scripted model whose output costs a cent per token."""

    def cost_usd(self, usage):
        return usage.output_tokens * 0.01


async def test_costs_and_spending_limits():
    """Of the tenant only; the windows of agents are for those who see all tenants, and for the metrics."""
    limits = [Spend(per="day", usd=10), Spend(per="month", scope="user", usd=5)]
    agent = Agent(Priced(*["hello"] * 9), name="greeter", store=MemoryStore(), spend=limits)
    async with serving(agent) as client:
        for user, tenant in (("ann", "acme"), ("ann", "acme"), ("bob", "acme"), ("ann", "b")):
            await client.post("/v1/runs", json={"prompt": "x", "wait_s": 30}, headers=named(user, tenant))
        asked = "/v1/costs?by=user&since=1"
        found = (await client.get(asked, headers=named("eve", "acme", "approve"))).json()
        assert {row["name"]: (row["usd"], row["runs"]) for row in found["rows"]} == {"ann": (0.1, 2), "bob": (0.05, 1)}
        assert found["total"]["usd"] == pytest.approx(0.15)
        assert [each["name"].partition(" in ")[0] for each in found["windows"]] == [
            "the user ann of the tenant acme",
            "the user bob of the tenant acme",
        ]
        assert (await client.get("/v1/costs", headers=named("ann", "acme"))).status_code == 403
        wrong = await client.get("/v1/costs?by=month", headers=named("eve", "acme", "approve"))
        assert (wrong.status_code, "give one of agent, model" in wrong.json()["error"]["message"]) == (400, True)
        assert (await client.get("/metrics", headers=named("eve", "acme", "admin"))).status_code == 403
        text = (await client.get("/metrics", headers=named("eve", "", "admin"))).text
        assert 'agentfsm_spend_usd{agent="greeter",per="day",tz="UTC"} 0.2\n' in text
        assert 'agentfsm_spend_limit_usd{agent="greeter",per="day",tz="UTC"} 10\n' in text


async def test_what_a_worker_executes_is_listed(tmp_path):
    """A run with a worker says so, with the time since its last event; names of workers do not tell the machine."""
    gate, begun = anyio.Event(), anyio.Event()

    @tool
    async def wait() -> str:
        """Wait for the test."""
        begun.set()
        await gate.wait()
        return "ok"

    agent = Agent(
        ScriptedModel(say("", call("wait")), say("end")), tools=[wait], store=SQLiteStore(tmp_path / "runs.db")
    )
    async with serving(agent) as client:
        run = (await client.post("/v1/runs", json={"prompt": "x"})).json()
        await begun.wait()
        [worker] = (await client.get("/v1/workers")).json()["workers"]
        assert [each["id"] for each in worker["runs"]] == [run["id"]]
        assert len(worker["name"]) == 12
        gate.set()
        assert (await client.get(f"/v1/runs/{run['id']}", params={"wait_s": 30})).json()["output"] == "end"
        assert (await client.get("/v1/workers")).json()["workers"] == []


def test_which_limits_are_possible():
    """Whole numbers of 1 or more, and with a store that has quotas."""
    for wrong in ({"requests": 0}, {"tokens": -1}, {"runs": 1.5}):
        with pytest.raises(MisuseError):
            RateLimits(**wrong)

    class Plain(MemoryStore):
        take_quotas = Store.take_quotas

    with pytest.raises(MisuseError, match="quotas"):
        serve([greeting(Plain())], auth=read_caller, limits=RateLimits(requests=1))
    serve([greeting(Plain())], auth=read_caller)
    assert RateLimits(tokens=5).or_else(RateLimits(tokens=9, runs=1)) == RateLimits(tokens=5, runs=1)
