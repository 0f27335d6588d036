"""AG-UI: the official client, with its `verifyEvents`, starts runs, answers interrupts and connects again."""

import io
import json
import os
import re
import signal
import subprocess
import sys
from collections import defaultdict
from contextlib import contextmanager, redirect_stdout
from functools import partial
from pathlib import Path

import anyio
import httpx
import pytest

import agentfsm
from agentfsm import Agent, Runs, UserMessage, tool
from agentfsm.core.run_ids import build_key_id
from agentfsm.stores import MemoryStore
from agentfsm.testing import FunctionModel, ScriptedModel, call, say
from agentfsm.tools.builtin import wait
from tests.support import node_packages
from tests.support.example_modules import EXAMPLES, example
from tests.support.gateways import named, serving


@pytest.fixture
def anyio_backend():
    """Return the one that uvicorn runs on."""
    return "asyncio"


@pytest.fixture(scope="module")
def exchange():
    """Start the official client once."""
    with node_packages.running("ag_ui_client.mjs") as exchange:
        yield exchange


@pytest.fixture
def client(exchange):
    """Return a function that sends a request with the official client, and returns what that understood."""

    async def send(
        server,
        agent="shop",
        *,
        path=None,
        caller="ann//run",
        method="POST",
        messages=(),
        on_event=lambda _kind: None,
        **fields,
    ):
        made = {"threadId": "t", "runId": "r1", "messages": list(messages), **fields}
        url = f"{str(server.base_url).rstrip('/')}/{path or f'v1/agents/{agent}/ag-ui'}"
        request = {"url": url, "method": method, "headers": {"x-caller": caller}, "input": made}
        return await anyio.to_thread.run_sync(exchange, request, on_event)

    return send


def user(text, message_id="u1"):
    return {"id": message_id, "role": "user", "content": text}


def types_of(answer):
    return [event["type"] for event in answer["events"]]


def one(answer, kind):
    found = [event for event in answer["events"] if event["type"] == kind]
    assert len(found) == 1, (kind, found, types_of(answer))
    [event] = found
    return event


@tool(requires_approval=True)
async def pay(amount: int) -> str:
    """Pay an amount."""
    return f"paid {amount}"


def paying(store=None, *more):
    script = ScriptedModel(say("I will pay. ", call("pay", amount=5)), say("all done"), *more)
    return Agent(script, tools=[pay], name="shop", store=store or MemoryStore())


async def test_an_approval_is_an_interrupt(client):
    """The stream ends with the interrupt; `resume` decides, and the next stream continues where the first ended."""
    async with serving(paying()) as server:
        send = partial(client, server)
        first = await send(messages=[user("pay 5")])
        assert first["error"] is None, first
        finished = one(first, "RUN_FINISHED")
        [interrupt] = finished["outcome"]["interrupts"]
        assert (interrupt["reason"], interrupt["toolCallId"]) == ("approval", "t1.0")
        assert interrupt["metadata"]["arguments"] == {"amount": 5}
        assert [one(first, kind)["toolCallId"] for kind in ("TOOL_CALL_START", "TOOL_CALL_END")] == ["t1.0"] * 2
        answer = {"interruptId": interrupt["id"], "status": "resolved"}
        refused = await send(runId="r2", resume=[{**answer, "payload": {"approved": True}}])
        assert "403" in refused["error"]
        approved = {**answer, "payload": {"approved": True, "arguments": {"amount": 3}}}
        for _ in range(2):  # the second is the same request again
            second = await send(caller="ann//run+approve", runId="r2", resume=[approved])
            assert second["error"] is None, second
            assert one(second, "TOOL_CALL_RESULT")["content"] == "paid 3"
            assert one(second, "RUN_FINISHED")["result"] == "all done"
            assert [event["runId"] for event in second["events"] if "runId" in event] == ["r2", "r2"]
        for caller, changed in (
            ("eve//run+approve", {"payload": False}),
            ("ann//run+approve", {"payload": {"approved": False}}),
            ("ann//run+approve", {"status": "cancelled"}),
        ):
            other = await send(caller=caller, runId="r3", resume=[{**answer, **changed}])
            assert "409" in other["error"]
        texts = [message.get("content") for message in second["messages"] if message["role"] == "assistant"]
        assert texts == ["I will pay. ", "all done"]


async def test_input_that_is_sent_again_is_read_once():
    """Also if the run has read it: the same request again shows what the first one did."""
    agent = Agent(
        ScriptedModel(say("", call("wait", seconds=600, reason="mail")), say("read")),
        tools=[wait()],
        name="shop",
        store=MemoryStore(),
    )
    async with serving(agent) as server:

        async def send(**fields):
            body = {"threadId": "t", "runId": "r1", "messages": [], **fields}
            answer = await server.post("/v1/agents/shop/ag-ui", json=body, headers=named())
            assert answer.status_code == 200, answer.text
            return [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]

        [finished] = [each for each in await send(messages=[user("go")]) if each["type"] == "RUN_FINISHED"]
        [interrupt] = finished["outcome"]["interrupts"]
        answer = {"interruptId": interrupt["id"], "status": "resolved", "payload": "the mail"}
        for _ in range(2):
            events = await send(runId="r2", resume=[answer])
            assert [each["result"] for each in events if each["type"] == "RUN_FINISHED"] == ["read"]
        run = await agent.load(build_key_id("r1", tenant=None, user="ann"))
        assert [each.text for each in run.messages if isinstance(each, UserMessage)] == ["go", "the mail"]


async def test_text_arrives_in_pieces_and_once(client):
    """The streamed messages are those of the journal, and a second request with the same id shows the same run."""
    agent = Agent(ScriptedModel(say("one two three four"), say("again")), name="shop", store=MemoryStore())
    async with serving(agent) as server:
        send = partial(client, server)
        first = await send(messages=[user("count")])
        assert first["error"] is None, first
        again = await send(messages=[user("count")])
        assert [m["content"] for m in first["messages"]] == ["count", "one two three four"]
        assert again["messages"] == first["messages"]
        attached = await send(path="v1/runs/r1/ag-ui", method="GET")
        assert attached["error"] is None, attached
        assert attached["messages"] == first["messages"]
        connected = await send(messages=[])
        assert connected["messages"] == first["messages"]
        next_one = await send(runId="r2", messages=[*first["messages"], user("more", "u2")])
        assert [m["content"] for m in next_one["messages"]] == ["count", "one two three four", "more", "again"]
        assert len((await server.get("/v1/runs")).json()["runs"]) == 2


async def test_sub_agents_are_named(client):
    """Their events have their id, and an approval within is an interrupt of the conversation."""
    helper = Agent(ScriptedModel(say("", call("pay", amount=2)), say("inner")), name="helper", tools=[pay])
    script = ScriptedModel(say("", call("helper", query="x")), say("outer"))
    agent = Agent(script, name="shop", tools=[helper.as_tool()], store=MemoryStore())
    async with serving(agent) as server:
        send = partial(client, server)
        first = await send(caller="ann//admin", messages=[user("go")])
        assert first["error"] is None, first
        [interrupt] = one(first, "RUN_FINISHED")["outcome"]["interrupts"]
        child = one(first, "SUBAGENT_STARTED")["subagentRunId"]
        assert interrupt["subagentRunId"] == child
        assert one(first, "SUBAGENT_FINISHED")["outcome"]["type"] == "suspended"
        resume = [{"interruptId": interrupt["id"], "status": "resolved", "payload": True}]
        second = await send(caller="ann//admin", runId="r2", resume=resume)
        assert second["error"] is None, second
        assert one(second, "SUBAGENT_FINISHED")["result"] == "inner"
        assert one(second, "RUN_FINISHED")["result"] == "outer"


@tool(external=True)
async def look_up(key: str) -> str:
    """Look a value up elsewhere."""
    raise AssertionError


@pytest.mark.parametrize("status", ["resolved", "cancelled"])
async def test_a_result_from_outside(client, status):
    """The answer to a question is the result of the call; a cancelled one fails it."""
    script = ScriptedModel(say("", call("look_up", key="k")), say("done"))
    agent = Agent(script, name="shop", tools=[look_up], store=MemoryStore())
    async with serving(agent) as server:
        send = partial(client, server)
        first = await send(messages=[user("go")])
        [interrupt] = one(first, "RUN_FINISHED")["outcome"]["interrupts"]
        payload = {"payload": "42"} if status == "resolved" else {}
        resume = [{"interruptId": interrupt["id"], "status": status, **payload}]
        second = await send(runId="r2", resume=resume)
        assert second["error"] is None, second
        content = one(second, "TOOL_CALL_RESULT")["content"]
        assert content == ("42" if status == "resolved" else "the user gave no answer")


async def test_failures_are_said(client):
    """A run that a limit stops ends in RUN_ERROR, a cancelled one is cancelled, and wrong requests start nothing."""
    agent = paying()
    async with serving(agent) as server:
        send = partial(client, server)
        await send(messages=[user("pay")])
        blocked = await send(runId="r2", messages=[user("hello")])
        assert "409" in blocked["error"]
        assert "approve or reject it" in blocked["error"]
        await server.post(f"/v1/runs/{build_key_id('r1', tenant=None, user='ann')}/cancel", json={})
        gone = await send(path="v1/runs/r1/ag-ui", method="GET")
        assert gone["error"] is None
        assert one(gone, "RUN_FINISHED")["outcome"] == {"type": "cancelled"}
        path = "/v1/agents/shop/ag-ui"
        for body, status in [
            ({"threadId": "t"}, 422),
            ({"threadId": "t", "runId": "r9", "messages": []}, 404),
            ({"threadId": "t", "runId": "r9", "messages": [{"role": "user", "content": [{"type": "video"}]}]}, 400),
            ({"threadId": "t", "runId": "r9", "resume": [{"interruptId": "x", "status": "resolved"}]}, 400),
            ({"threadId": "t", "runId": "r9", "resume": [{"interruptId": "a/b/c/d:1", "status": "resolved"}]}, 404),
        ]:
            response = await server.post(path, json=body)
            assert response.status_code == status, (body, response.text)
        assert (await server.post("/v1/agents/none/ag-ui", json={"threadId": "t", "runId": "r"})).status_code == 400


async def test_another_tenant_sees_nothing(client):
    """Neither by the id of the run, nor by that of an interrupt, nor by the name of the conversation."""
    agent = Agent(
        FunctionModel(lambda _: say("", call("pay", amount=5))), tools=[pay], name="shop", store=MemoryStore()
    )
    async with serving(agent) as server:
        send = partial(client, server)
        first = await send(caller="ann/acme/run", messages=[user("pay")])
        [interrupt] = one(first, "RUN_FINISHED")["outcome"]["interrupts"]
        resume = [{"interruptId": interrupt["id"], "status": "resolved", "payload": True}]
        for caller in ("ann/zeta/admin", "root//admin", "bob/acme/run"):
            assert "404" in (await send(caller=caller, resume=resume))["error"]
            assert "404" in (await send(caller=caller, path="v1/runs/r1/ag-ui", method="GET"))["error"]
            assert "404" in (await send(caller=caller, messages=[]))["error"]
            started = await send(caller=caller, messages=[user("pay")])  # its own conversation and id of this name
            assert one(started, "RUN_FINISHED")["outcome"]["interrupts"][0]["id"] != interrupt["id"]
        assert (await server.get("/v1/runs", headers=named("ann", "acme"))).json()["runs"][0]["status"] == "waiting"


@pytest.mark.parametrize(
    "name",
    [
        "coordinator",
        pytest.param("four_roles", marks=pytest.mark.soak),
        pytest.param("hosted_tool", marks=pytest.mark.soak),
        "own_model",
        "planner",
        "report",
        "research",
        "toolbox",
        pytest.param("two_servers", marks=pytest.mark.soak),
        "weather",
    ],
)
async def test_every_run_of_the_examples(client, name, monkeypatch):
    """The journals of the examples, with their sub-agents, plans and retries, are streams that the client accepts."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    stores = []
    create = MemoryStore.create

    def noted(store, *args, **options):
        if store not in stores:
            stores.append(store)
        return create(store, *args, **options)

    async def keep_open(_store):
        """Leave the journals for the gateway."""

    monkeypatch.setattr(MemoryStore, "create", noted)
    monkeypatch.setattr(MemoryStore, "aclose", keep_open)
    module, by_path = example(name), defaultdict(MemoryStore)
    monkeypatch.setattr(module, "SQLiteStore", lambda path: by_path[str(path)], raising=False)
    with redirect_stdout(io.StringIO()):
        await module.main()
    followed = 0
    for store in stores:
        ids = [row.id async for row in Runs(store).iterate() if row.parent is None]
        async with serving(store=store) as server:
            for run_id in ids:
                answer = await client(server, caller="root//admin", path=f"v1/runs/{run_id}/ag-ui", method="GET")
                assert answer["error"] is None or one(answer, "RUN_ERROR"), answer
                assert types_of(answer)[-1] in {"RUN_FINISHED", "RUN_ERROR"}
                followed += 1
    assert followed


async def test_the_crash_example(client, tmp_path):
    """Its server is killed while it pays and streams. The next one shows the same run, which asks for the outcome."""
    (tmp_path / "refunds.py").write_text(STREAMED_REFUNDS, encoding="utf-8")
    variables = {"PYTHONPATH": str(EXAMPLES), "CRASH_FOLDER": str(tmp_path)}

    async def ask(url, on_event=lambda _kind: None, **fields):
        async with httpx.AsyncClient(base_url=url) as server:
            return await client(server, "refunds", caller="", on_event=on_event, **fields)

    go = {"messages": [user("Refund order 17")], "runId": "refund-17"}
    with server_in(tmp_path, "refunds:AGENT", KILL="yes", **variables) as (process, url):
        first = await ask(url, lambda _kind: (tmp_path / "streams.txt").touch(), **go)
        assert process.wait() == -signal.SIGKILL
    assert "Cannot send" not in str(first["error"]), first
    assert types_of(first)[0] == "RUN_STARTED"
    assert "RUN_FINISHED" not in types_of(first)
    with server_in(tmp_path, "refunds:AGENT", **variables) as (_process, url):
        second = await ask(url, **go)
        assert second["error"] is None, second
        [interrupt] = one(second, "RUN_FINISHED")["outcome"]["interrupts"]
        assert interrupt["reason"] == "outcome"
        outcome = {"interruptId": interrupt["id"], "status": "resolved", "payload": {"result": "paid"}}
        third = await ask(url, runId="r2", resume=[outcome])
    assert third["error"] is None, third
    assert re.fullmatch(
        r"Order 17 is refunded\. The result of the payment: .*paid'", one(third, "RUN_FINISHED")["result"]
    )
    for book in ("post.jsonl", "bank.jsonl"):
        assert len((tmp_path / book).read_text(encoding="utf-8").splitlines()) == 1


STREAMED_REFUNDS = """
import anyio
import crash
from agentfsm.testing import FunctionModel


async def think(request):
    while not (crash.FOLDER / "streams.txt").exists():
        await anyio.sleep(0.01)
    return crash.think(request)


AGENT = crash.AGENT.with_(model=FunctionModel(think))
"""


@pytest.mark.soak
@pytest.mark.parametrize("ends", [signal.SIGKILL, signal.SIGTERM], ids=["kill", "term"])
async def test_a_server_that_dies_in_the_middle(client, tmp_path, ends):
    """What came is valid, and the same request to the next server shows the same run to its end."""
    app = Path(__file__).with_name("served_shop.py.txt").read_text(encoding="utf-8")
    (tmp_path / "shop.py").write_text(app, encoding="utf-8")

    async def ask(url, on_event=lambda _kind: None):
        async with httpx.AsyncClient(base_url=url) as server:
            return await client(server, messages=[user("go")], on_event=on_event)

    with server_in(tmp_path) as (process, url):

        def end_server(kind):
            if kind == "TOOL_CALL_END":
                process.send_signal(ends)
                if ends is signal.SIGTERM:
                    (tmp_path / "go.txt").touch()  # a thread cannot be stopped

        first = await ask(url, end_server)
    (tmp_path / "go.txt").touch()
    with server_in(tmp_path) as (_process, url):
        second = await ask(url)
    assert "Cannot send" not in str(first["error"]), first
    assert "TOOL_CALL_END" in types_of(first)
    if ends is signal.SIGKILL:
        assert "RUN_FINISHED" not in types_of(first)
    assert second["error"] is None, second
    results = [event for event in second["events"] if event["type"] == "TOOL_CALL_RESULT"]
    calls = [event["toolCallId"] for event in second["events"] if event["type"] == "TOOL_CALL_START"]
    assert [event["toolCallId"] for event in results] == calls  # the script of the second process begins anew
    assert {event["content"] for event in results} == {"delivered book"}
    assert one(second, "RUN_FINISHED")["result"] == "all done"
    ids = [message["id"] for message in second["messages"]]
    assert len(ids) == len(set(ids)) == 2 + 2 * len(calls)


@contextmanager
def server_in(folder, target="shop:agent", **variables):
    """Serve in a process of its own, and return the process and its URL."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("AGENTFSM_", "PYTHON"))}
    command = [sys.executable, "-m", "agentfsm", "serve", target, "--http", "127.0.0.1:0"]
    root = str(Path(agentfsm.__file__).parents[1])
    path = os.pathsep.join([root, *filter(None, [variables.pop("PYTHONPATH", None)])])
    environment = {**kept, **variables, "PYTHONPATH": path}
    with subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True) as process:
        line = process.stderr.readline()
        found = re.search(r"http://\S+:\d+", line)
        assert found, line
        try:
            yield process, found[0]
        finally:
            process.kill()
