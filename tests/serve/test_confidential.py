"""The instructions of agents: administrators read them, and no other key and no client of any protocol does."""

import json

import anyio
import httpx2
import pytest
from mcp import Client
from mcp.client.streamable_http import streamable_http_client

from agentfsm import Agent, UserMessage, tool
from agentfsm.core.messages import NativeReply
from agentfsm.guards import Guard, exit_filter
from agentfsm.ports import ProposedCall, Reply
from agentfsm.serve.app import ROUTE_GROUPS
from agentfsm.stores import MemoryStore
from agentfsm.testing import FunctionModel
from tests.support.gateways import named, serving

TEXTS = {"shop": "PLAIN-SECRET", "desk": "RESOLVED-SECRET", "helper": "INNER-SECRET"}
KEYS = [named("ann", "", "run"), named("eve", "", "run+approve")]
READS = [each for group in ROUTE_GROUPS for each in group.endpoints if each.method == "GET" and each.scope != "admin"]
QUERIES = {"request": {"turn": "1"}, "diff": {"at": "0"}, "costs": {"by": "user"}, "stream": {"after": "0"}}

SENT = {"type": "text", "text": "again"}


@pytest.fixture
def anyio_backend():
    """Return the one that uvicorn runs on."""
    return "asyncio"


@tool
async def look(city: str) -> str:
    """Look up the weather."""
    return f"rain in {city}"


def betray(request):
    """Call tools beside the instructions, also in the provider's own form, which a reply with calls keeps."""
    text, names = request.instructions, [each.name for each in request.tools]
    if isinstance(request.messages[-1], UserMessage) and names:
        calls = [("helper", {"query": "help"}), ("look", {"city": "Rome"})]
        wanted = [(name, json.dumps(given)) for name, given in calls if name in names]
        made = tuple([ProposedCall(id=name, name=name, arguments=given) for name, given in wanted])
        return Reply(text=text, calls=made, native=NativeReply(provider="function", content=json.dumps({"text": text})))
    return Reply(text="done")


def build_agents():
    """Return an agent with a text and a sub-agent, and one whose instructions are resolved at the start of a run."""
    options = {"store": MemoryStore(), "guards": [Guard.default(), exit_filter()]}
    helper = Agent(FunctionModel(betray), tools=[look], name="helper", instructions=TEXTS["helper"], **options)
    tools = [look, helper.as_tool()]
    shop = Agent(FunctionModel(betray), tools=tools, name="shop", instructions=TEXTS["shop"], **options)
    return shop, shop.with_(name="desk", instructions=lambda _header: TEXTS["desk"])


def find_secrets(text):
    return [each for each in TEXTS.values() if each in text]


async def test_only_administrators_read_instructions():
    """Each operation that reads, of each run, agent and sub-agent, with each key, and the streams of all protocols."""
    agents = build_agents()
    async with serving(*agents) as client:
        ids = []
        for agent in agents:
            body = {"prompt": "go", "agent": agent.name, "session": "s", "wait_s": 30}
            made = (await client.post("/v1/runs", json=body, headers=KEYS[0])).json()
            assert made["state"] == "done", made
            ids += [made["id"], *[each.id for each in await agent.runs.children(made["id"])]]
        assert len(ids) == 4
        answered = set()
        for key in KEYS:
            for endpoint in READS:
                for run_id in ids if "{run_id}" in endpoint.path else ids[:1]:
                    for agent in agents if "{agent}" in endpoint.path else agents[:1]:
                        named = {"run_id": run_id, "response_id": f"resp_{run_id}"}
                        path = endpoint.path.format(**named, agent=agent.name, model="shop", chat="s")
                        query = QUERIES.get(path.rpartition("/")[2], {})
                        found = await client.get(path, params=query, headers=key)
                        assert find_secrets(found.text) == [], path
                        answered |= {endpoint.path} if found.status_code == 200 else set()
        assert answered == {each.path for each in READS}
        message = {"role": "user", "content": "again"}
        for path, body in [
            ("/v1/chat/completions", {"model": "desk", "messages": [message], "stream": True}),
            ("/v1/responses", {"model": "desk", "input": "again", "stream": True}),
            ("/v1/agents/desk/ag-ui", {"threadId": "t", "runId": "r", "messages": [message]}),
            ("/v1/agents/desk/ui-messages", {"id": "u", "messages": [{"role": "user", "parts": [SENT]}]}),
        ]:
            found = await client.post(path, json=body, headers=KEYS[0])
            assert found.status_code == 200
            assert find_secrets(found.text) == [], path
        events = (await client.get(f"/v1/runs/{ids[0]}/journal", headers=KEYS[0])).json()["events"]
        [reply] = [each for each in events if each["event"]["is"] == "ToolsChosen"]
        edit = {str(reply["version"]): reply["event"]}
        body = {"at": reply["version"], "edit": edit, "withhold": True}
        fork = (await client.post(f"/v1/runs/{ids[0]}/fork", json=body, headers=KEYS[0])).json()
        kept = (await agents[0].load(fork["id"], at=reply["version"])).reply
        assert find_secrets(kept.native.content), "a reply that is sent back as it was shown keeps its own form"
        for name in ("shop", "desk"):
            found = await client.get(f"/v1/agents/{name}")
            assert find_secrets(found.text) == ([TEXTS["shop"]] if name == "shop" else [])
        found = (await client.get(f"/v1/runs/{ids[2]}/journal")).json()
        assert found["header"]["instructions"] == TEXTS["desk"]
        async with (
            httpx2.AsyncClient(headers={"authorization": "Bearer ann//run"}) as http,
            Client(streamable_http_client(f"{client.base_url}".rstrip("/") + "/mcp", http_client=http)) as mcp,
        ):
            for name, arguments in [("list", {}), *[("result", {"run_id": run_id}) for run_id in ids]]:
                result = await mcp.call_tool(name, arguments)
                assert not result.is_error
                assert find_secrets(result.model_dump_json()) == [], name


async def test_an_mcp_server_of_an_agent_shows_no_instructions():
    """Neither at the handshake nor in its tools, nor in a run that is read as a resource."""
    _, desk = build_agents()
    async with Client(desk.as_mcp_server().server) as client:
        made = await client.call_tool("start", {"prompt": "go", "run_id": "r1"})
        seen = [made, await client.list_tools(), await client.list_resources()]
        seen.append(await client.read_resource("agentfsm://runs/r1"))
        assert "look" in seen[-1].contents[0].text
        assert [find_secrets(each.model_dump_json()) for each in seen] == [[]] * 4


async def test_only_administrators_read_the_error_of_an_execution():
    """A program may put anything into the text of its errors."""

    def leak(_request):
        raise RuntimeError("the plan of Ann")

    async with serving(Agent(FunctionModel(leak), name="shop", store=MemoryStore())) as client:
        made = (await client.post("/v1/runs", json={"prompt": "go", "agent": "shop"}, headers=KEYS[0])).json()
        path = f"/v1/runs/{made['id']}/details"
        while not (details := (await client.get(path)).json())["failure"]:  # noqa: ASYNC110
            await anyio.sleep(0.01)
        assert (details["status"], details["failure"]) == ("idle", "RuntimeError: the plan of Ann")
        for key in KEYS:
            assert (await client.get(path, headers=key)).json()["failure"] == ""
