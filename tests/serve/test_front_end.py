"""The front end of a run: CopilotKit's own client carries out tools, shares a state, and sees what goes wrong."""

import json

import anyio
import pytest

from agentfsm import Agent, MisuseError, ToolResult, tool
from agentfsm.core.header import FRONT_END
from agentfsm.core.labels import Label
from agentfsm.core.run_ids import build_key_id
from agentfsm.stores import MemoryStore
from agentfsm.testing import ScriptedModel, call, say
from agentfsm.tools.front_end import MAX_CHARS, MAX_TOOLS
from tests.support import node_packages
from tests.support.gateways import named, serving

PAINT = {
    "name": "paint",
    "description": "Paint the page",
    "parameters": {"type": "object", "properties": {"color": {"type": "string"}}, "required": ["color"]},
}


@pytest.fixture
def anyio_backend():
    """Return the one that uvicorn runs on."""
    return "asyncio"


@pytest.fixture(scope="module")
def exchange():
    """Start CopilotKit's client once."""
    with node_packages.running("copilotkit_client.mjs") as exchange:
        yield exchange


@pytest.fixture
def page(exchange):
    """Return a function that opens a page on a server, in which the user sends messages, and returns what it shows."""

    async def visit(server, *messages, caller="ann//run", **fields):
        url = f"{str(server.base_url).rstrip('/')}/v1/agents/shop/ag-ui"
        request = {"url": url, "headers": {"x-caller": caller}, "threadId": "t", "messages": messages, **fields}
        return await anyio.to_thread.run_sync(exchange, request)

    return visit


async def send(server, *messages, run="r1", status=200, **fields):
    """Send a request of a client, and return its events, or the message of its refusal."""
    body = {"threadId": "t", "runId": run, "messages": messages, **fields}
    answer = await server.post("/v1/agents/shop/ag-ui", json=body, headers=named())
    assert answer.status_code == status, answer.text
    if status != 200:
        return answer.json()["error"]["message"]
    return [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]


def user(text):
    return {"id": "u", "role": "user", "content": text}


def gave(content, call_id="t1.0", **fields):
    return {"id": "x", "role": "tool", "toolCallId": call_id, "content": content, **fields}


def shop(*turns, store=None, **options):
    return Agent(ScriptedModel(*turns), name="shop", store=store or MemoryStore(), **options)


def find(events, kind):
    return [event for event in events if event["type"] == kind]


async def load(agent, run="r1"):
    return await agent.load(build_key_id(run, tenant=None, user="ann"))


async def newest(agent):
    [row] = await agent.runs.list(limit=1)
    return await agent.load(row.id)


def results(run):
    return [(each.tool, each.content) for each in run.messages if isinstance(each, ToolResult)]


async def test_copilotkit_carries_out_a_tool(page):
    """Its handler gets the arguments, and the run goes on with its result, once, in one run of the store."""
    agent = shop(say("", call("paint", color="red"), call("paint", color="blue")), say("painted"))
    tools = {"paint": {"parameters": PAINT["parameters"], "results": ["ok", {"painted": True}]}}
    async with serving(agent) as server:
        seen = await page(server, "paint it", tools=tools)
        assert seen["errors"] == []
        assert seen["executed"] == [["paint", {"color": "red"}], ["paint", {"color": "blue"}]]
        texts = [(each["role"], each.get("content")) for each in seen["messages"]]
        assert [text for role, text in texts if role == "tool"] == ["ok", '{"painted":true}']
        assert texts[-1] == ("assistant", "painted")
        [row] = (await server.get("/v1/runs")).json()["runs"]
        run = await agent.load(row["id"])
        assert results(run) == [("paint", "ok"), ("paint", '{"painted":true}')]
        assert run.labels[Label.UNTRUSTED].call_id == "t1.0"


async def test_copilotkit_shares_a_state(page):
    """The model reads the page's state and context, its changes arrive as deltas, and those of the page reach it."""
    agent = shop(
        say("", call("update_state", changes={"count": 2, "a/b": {"x": 1}}), call("paint", color="red")),
        say("done"),
        say("hello"),
    )
    tools = {"paint": {"parameters": PAINT["parameters"], "results": ["ok"], "state": {"color": "red"}}}
    async with serving(agent) as server:
        shown = {"description": "open document", "value": "invoice 17"}
        begun = {"count": 1, "kept": [1]}
        seen = await page(server, "go", tools=tools, state=begun, context=[shown], properties={"theme": "dark"})
        assert seen["errors"] == []
        whole = {"count": 2, "kept": [1], "a/b": {"x": 1}, "color": "red"}
        assert seen["state"] == whole
        assert {"count": 2, "kept": [1], "a/b": {"x": 1}} in seen["states"]
        again = await page(server, "hello")  # a page that was loaded again, and has no state
        assert again["states"][0] == whole
        first, second = agent.model.requests[:2]
        assert "invoice 17" in first.instructions
        assert '"count": 1' in first.instructions
        assert '"color": "red"' in second.messages[-1].text
        run = await newest(agent)
        assert run.labels[Label.UNTRUSTED].name == "page"
        [_, begun_run] = await agent.runs.list(limit=2)
        assert (await agent.load(begun_run.id)).metadata["forwardedProps"] == {"theme": "dark"}


async def test_copilotkit_sees_errors(page):
    """A handler that fails is told with the next message, and a refused request is an error of the client."""
    agent = shop(say("", call("paint", color="red")), say("never mind"))
    tools = {"paint": {"parameters": PAINT["parameters"], "results": [{"error": "no canvas"}]}}
    async with serving(agent) as server:
        seen = await page(server, "paint", "what happened?", tools=tools)
        assert seen["errors"] == ["tool_handler_failed: no canvas"]
        assert seen["messages"][-1]["content"] == "never mind"
        assert results(await newest(agent)) == [("paint", "Error: no canvas")]
    taken = shop(say("hi"), tools=[tool(name="paint")(lambda: "painted")])
    async with serving(taken) as server:
        seen = await page(server, "paint", tools=tools)
        assert any("400" in error for error in seen["errors"]), seen["errors"]
        assert (await server.get("/v1/runs")).json()["runs"] == []


async def test_a_result_is_taken_once():
    """The same result has no further effect; another one, and one that nothing waits for, are refused with a reason."""
    look = tool(name="look", read_only=True)(lambda: "seen\u202e")
    agent = shop(say("", call("paint", color="red"), call("look")), say("done"), tools=[look])
    async with serving(agent) as server:
        first = await send(server, user("go"), tools=[PAINT])
        assert find(first, "RUN_FINISHED")[0]["outcome"] == {"type": "success"}
        wrong = await send(
            server, gave("ok", "t9.9"), run="r2", status=409, context=[{"description": "d", "value": "v"}]
        )
        assert "no run of this conversation waits" in wrong
        for _ in range(2):
            events = await send(server, user("go"), gave("ok"), run="r2", tools=[PAINT])
            assert [each["content"] for each in find(events, "TOOL_CALL_RESULT")] == ["ok", "seen\u202e"]
            assert find(events, "RUN_FINISHED")[0]["result"] == "done"
        shown = gave("ok"), gave("seen\u202e", "t1.1")  # as the page has them, those of the server among them
        assert find(await send(server, user("go"), *shown, run="r2"), "RUN_FINISHED")[0]["result"] == "done"
        assert "another result already" in await send(server, gave("no"), run="r3", status=409)
        assert len(agent.model.requests) == 2
        assert "has changed" not in str(agent.model.requests[1].messages), "a refused request says nothing to the run"
        assert (await agent.runs.audit((await load(agent)).id))[0].decided_by == "ann"


async def test_another_worker_goes_on():
    """The tools are facts of the run: a program that knows nothing of them offers them again after a restart."""
    store, model = MemoryStore(), ScriptedModel(say("", call("paint", color="red")), say("", call("paint", color="no")))
    async with serving(Agent(model, name="shop", store=store)) as server:
        await send(server, user("go"), tools=[PAINT])
    second = Agent(model, name="shop", store=store)
    async with serving(second) as server:
        events = await send(server, gave("it failed", error="no canvas"), run="r2")
        assert find(events, "TOOL_CALL_START")[0]["toolCallId"] == "t2.0"
        assert [tool.name for tool in model.requests[1].tools] == ["paint"]
        assert results(await load(second)) == [("paint", "no canvas")]
        fork = await second.fork((await load(second)).id)
        assert [each.tool for each in fork.pending] == ["paint"]


async def test_a_message_ends_calls_of_a_page_that_is_gone():
    """A new page knows nothing of the call: it fails, the model is told so, and its late result is refused."""
    agent = shop(say("", call("paint", color="red")), say("all right"))
    async with serving(agent) as server:
        await send(server, user("go"), tools=[PAINT])
        events = await send(server, user("forget it"), run="r2")
        assert "may have been carried out or not" in find(events, "TOOL_CALL_RESULT")[0]["content"]
        assert find(events, "RUN_FINISHED")[0]["result"] == "all right"
        assert "another result already" in await send(server, gave("ok"), run="r3", status=409)


async def test_other_waits_remain_interrupts():
    """A result may come with the answers to the interrupts of the same turn."""

    @tool(requires_approval=True)
    async def pay() -> str:
        """Pay."""
        return "paid"

    agent = shop(say("", call("paint", color="red"), call("pay")), say("done"), tools=[pay])
    async with serving(agent) as server:
        events = await send(server, user("go"), tools=[PAINT], context=[{"description": "d", "value": "v"}])
        [interrupt] = find(events, "RUN_FINISHED")[0]["outcome"]["interrupts"]
        assert interrupt["reason"] == "approval"
        body = {"threadId": "t", "runId": "r2", "messages": [gave("ok")], "context": []}
        body["resume"] = [{"interruptId": interrupt["id"], "status": "resolved", "payload": True}]
        answer = await server.post("/v1/agents/shop/ag-ui", json=body, headers=named(scopes="run+approve"))
        assert '"result":"done"' in answer.text.replace(" ", "")
        assert 'has changed: {"context": []}' in agent.model.requests[1].messages[-1].text


async def test_unfit_tools_are_refused():
    """Before a run begins, with the reason: names that are taken, too many or too large tools, and no JSON Schema."""
    agent = shop(say("hi"), tools=[tool(name="mine")(lambda: "x")])
    refusals = {
        "of its own": {"tools": [{**PAINT, "name": "mine"}]},
        "of its own: rename": {"tools": [{**PAINT, "name": "read_result"}]},
        "rename one": {"tools": [PAINT, PAINT]},
        "rename": {"tools": [{**PAINT, "name": "update_state"}], "state": {"n": 1}},
        "cannot be called": {"tools": [{**PAINT, "name": "paint it!"}]},
        "at most": {"tools": [{"name": f"t{number}"} for number in range(MAX_TOOLS + 1)]},
        "characters at most": {"context": [{"description": "d", "value": "x" * MAX_CHARS}]},
        "has to be": {"tools": [{"name": "paint", "parameters": {"type": "string"}}]},
        "JSON object": {"state": [1]},
    }
    async with serving(agent) as server:
        for reason, fields in refusals.items():
            assert reason in await send(server, user("go"), status=400, **fields)
        assert (await server.get("/v1/runs")).json()["runs"] == []
    with pytest.raises(MisuseError, match="an object with tools"):
        agent.start("go", metadata={FRONT_END: {"tool": []}})


async def test_a_large_state_ends_no_conversation():
    """One that came to exceed the limit: the open run goes on, also with the whole state of its page."""
    half = "x" * (MAX_CHARS // 2)
    agent = shop(say("", call("paint", color="red")), say("painted"), say("hi"))
    async with serving(agent) as server:
        await send(server, user("go"), tools=[PAINT], state={"a": half})
        whole = {"a": half, "b": half}
        events = await send(server, gave("ok"), run="r2", tools=[PAINT], state=whole)
        assert find(events, "RUN_FINISHED")[0]["result"] == "painted"
        assert "Send a smaller state" in await send(server, user("on"), run="r3", status=400, state=whole)
        assert find(await send(server, user("on"), run="r3", state={"a": "x"}), "RUN_FINISHED")[0]["result"] == "hi"


async def test_a_server_may_take_no_tools():
    """Then a request with tools is refused, at every door, and one without them is served."""
    agent = shop(say("hi"))
    async with serving(agent, front_end_tools=False) as server:
        assert "takes no tools" in await send(server, user("go"), tools=[PAINT], status=403)
        body = {"prompt": "go", "metadata": {FRONT_END: {"tools": [PAINT]}}}
        assert (await server.post("/v1/runs", json=body, headers=named())).status_code == 403
        assert find(await send(server, user("go"), run="r2"), "RUN_FINISHED")[0]["result"] == "hi"


async def test_sub_agents_have_no_tools_of_the_page():
    """The page's tools are those of the run that it talks to."""
    model = ScriptedModel("inner")
    helper = Agent(model, name="helper")
    agent = shop(say("", call("helper", query="x")), say("outer"), tools=[helper.as_tool()])
    async with serving(agent) as server:
        await send(server, user("go"), tools=[{**PAINT, "description": "Paint\u202e it"}], state={"n": 1})
        assert [tool.name for tool in model.requests[0].tools] == []
        assert [tool.name for tool in agent.model.requests[0].tools] == ["helper", "paint", "update_state"]
        assert agent.model.requests[0].tools[1].description == "Paint\\u202e it"
