"""The same checks at every door of a server: what one refuses, no other lets in."""

import base64
import json
from contextlib import asynccontextmanager
from datetime import UTC, datetime

import httpx2
import pytest
from mcp import Client
from mcp.client.streamable_http import streamable_http_client
from standardwebhooks import Webhook

from agentfsm import Agent, OutcomeUnknownError, UserMessage, tool
from agentfsm.flow import Flow, step
from agentfsm.mcp.server.served_runs import ServedRuns
from agentfsm.schedules import Schedules
from agentfsm.schedules.schedule_client import create_scheduled_run
from agentfsm.serve import IncomingWebhook, webhooks
from agentfsm.serve.app import ROUTE_GROUPS
from agentfsm.serve.dialects.mcp_run_tools import CallerRunTools
from agentfsm.stores import MemoryStore
from agentfsm.testing import FunctionModel, call, say
from tests.support.doors import ESCAPED, HIDDEN, PARTS, TOO_LONG, find_raw, read_store
from tests.support.gateways import serving

SECRET = "whsec_" + base64.b64encode(b"k" * 32).decode()
DOORS = {}
# Operations that say nothing to a model: the arguments of an approved call are passed exactly.
SILENT = {f"POST /v1/runs/{{run_id}}/{name}" for name in ("approve", "login", "resume", "revoke", "stream-token")}
SILENT |= {"POST /v1/responses/{response_id}/cancel", "POST /v1/rollouts/{name}/back"}
SILENT |= {f"POST /v1/schedules/{{name}}/{verb}" for verb in ("pause", "resume")}


@pytest.fixture
def anyio_backend():
    """Return the one that uvicorn runs on."""
    return "asyncio"


def make_tools():
    @tool(requires_approval=True)
    async def pay(amount: int) -> str:
        """Pay an amount."""
        return f"paid {amount}"

    @tool(external=True)
    async def ask(key: str) -> str:
        """Ask elsewhere."""
        raise AssertionError

    @tool
    async def lose() -> str:
        """Break off."""
        raise OutcomeUnknownError("the line is dead")

    return [pay, ask, lose]


def answer(request):
    last = request.messages[-1]
    if isinstance(last, UserMessage) and last.text == "wait":
        return say("", call("pay", amount=5), call("ask", key="k"))
    return say("", call("lose")) if isinstance(last, UserMessage) and last.text == "lose" else "ok"


def door(*names):
    """Register a function that says a text to a run; it gets the world, the name, and an agent's run that waits."""

    def register(function):
        DOORS.update(dict.fromkeys(names, function))
        return function

    return register


class World:
    """A server with its clients, and the agent."""

    def __init__(self, client, agent, mcp, own):
        self.client, self.agent, self.mcp, self.own, self.number = client, agent, mcp, own, 0

    async def post(self, path, body, **options):
        response = await self.client.post(path, json=body, **options)
        return response.status_code < 300 and "RUN_ERROR" not in response.text

    async def call(self, client, name, **arguments):
        return not (await client.call_tool(name, arguments)).is_error

    async def begin(self, prompt="wait"):
        """Return the id of a run that waits for an approval and an answer, or for an outcome."""
        made = await self.client.post("/v1/runs", json={"prompt": prompt, "wait_s": 30})
        assert made.json()["pending"], made.text
        return made.json()["id"]

    async def deliver(self, path, text):
        self.number += 1
        at, name, content = datetime.now(UTC), f"msg_{self.number}", text.encode("utf-8", "replace")
        headers = {"webhook-id": name, "webhook-timestamp": str(int(at.timestamp()))}
        headers["webhook-signature"] = Webhook(SECRET).sign(name, at, content.decode())
        return (await self.client.post(path, content=content, headers=headers)).status_code < 300

    async def resume(self, reason, payload, prompt="wait"):
        """Answer an interrupt of a new run of AG-UI."""
        self.number += 1
        body = {"threadId": f"t{self.number}", "runId": f"r{self.number}"}
        asked = body | {"messages": [{"role": "user", "content": prompt}]}
        text = (await self.client.post("/v1/agents/shop/ag-ui", json=asked)).text
        events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
        [found] = [each for each in events[-1]["outcome"]["interrupts"] if each["reason"] == reason]
        given = {"interruptId": found["id"], "status": "resolved", "payload": payload}
        return await self.post("/v1/agents/shop/ag-ui", body | {"resume": [given]})

    async def decide_on_page(self, state, **given):
        """Decide, on a page of `useChat`, on a new run that waits for an approval and an answer."""
        self.number += 1
        url, chat = "/v1/agents/shop/ui-messages", f"ui{self.number}"
        text = (await self.client.post(url, json=send_on_page(chat, "wait"))).text
        chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        [asked] = [each for each in chunks if each["type"] == "tool-approval-request"]
        [wait] = [each for each in chunks if each["type"] == "data-wait"]
        if state == "approval-responded":
            parts = [{"type": "tool-pay", "state": state, "approval": {"id": asked["approvalId"], **given}}]
        else:
            parts = [{"type": "tool-ask", "state": state, "toolCallId": wait["data"]["toolCallId"], **given}, wait]
        return await self.post(url, {"id": chat, "messages": [{"role": "assistant", "parts": parts}]})


def send_on_page(chat, text):
    message = {"id": f"m-{chat}", "role": "user", "parts": [{"type": "text", "text": text}]}
    return {"id": chat, "messages": [message], "trigger": "submit-message"}


@asynccontextmanager
async def opened():
    """Serve an agent over all protocols."""
    agent = Agent(FunctionModel(answer), tools=make_tools(), name="shop", store=MemoryStore())
    hook = IncomingWebhook(name="crm", secret=SECRET, user="root")
    async with serving(agent, groups=[webhooks([hook])]) as client:
        url = f"{client.base_url}".rstrip("/") + "/mcp"
        async with (
            httpx2.AsyncClient(headers={"authorization": "Bearer root//admin"}) as http,
            Client(streamable_http_client(url, http_client=http)) as mcp,
            Client(agent.as_mcp_server().server) as own,
        ):
            yield World(client, agent, mcp, own)


# The doors.


SAID = "..."
# Operations that take a text, with their body.
BODIES = {
    "POST /v1/runs": {"prompt": SAID},
    "POST /v1/runs in parts": {"prompt": [{"type": "text", "text": SAID}]},
    "POST /v1/runs/{run_id}/input": {"text": SAID},
    "POST /v1/runs/{run_id}/reject": {"call_id": "t1.0", "message": SAID},
    "POST /v1/runs/{run_id}/answer": {"call_id": "t1.1", "content": SAID},
    "POST /v1/runs/{run_id}/settle": {"call_id": "t1.0", "result": SAID},
    "POST /v1/runs/{run_id}/settle as failed": {"call_id": "t1.0", "failed": SAID},
    "POST /v1/runs/{run_id}/pause": {"message": SAID},
    "POST /v1/runs/{run_id}/cancel": {"message": SAID},
    "POST /v1/runs/{run_id}/feedback": {"rating": 1, "comment": SAID},
    "POST /v1/runs/{run_id}/fork": {"at": 0, "prompt": SAID},
}
# Tools of the gateway's MCP server and of that of an agent which take a text, with their arguments.
ARGUMENTS = {
    "MCP start": {"prompt": SAID, "wait_s": 0},
    "MCP send": {"text": SAID},
    "MCP approve": {"call_id": "t1.0", "decision": "reject", "text": SAID},
    "MCP approve with an answer": {"call_id": "t1.1", "decision": "answer", "text": SAID},
    "MCP cancel": {"message": SAID},
    "MCP server start": {"prompt": SAID, "wait_s": 0},
    "MCP server send": {"text": SAID},
    "MCP server approve": {"call_id": "t1.0", "decision": "reject", "by": "ann", "text": SAID},
    "MCP server approve with an answer": {"call_id": "t1.1", "decision": "answer", "by": "ann", "text": SAID},
}


def say_in(body, text):
    """Return a body with the text in its place."""
    return json.loads(json.dumps(body).replace(json.dumps(SAID), json.dumps(text)))


@door(*BODIES)
async def post(world, name, run, text):
    if "/settle" in name:
        run = await world.begin("lose")
    return await world.post(name.split()[1].replace("{run_id}", run), say_in(BODIES[name], text))


@door(*ARGUMENTS)
async def call_tool(world, name, run, text):
    tool_name = name.removeprefix("MCP server ").removeprefix("MCP ").split()[0]
    place = {} if tool_name == "start" else {"run_id": run}
    client = world.own if name.startswith("MCP server ") else world.mcp
    return await world.call(client, tool_name, **place, **say_in(ARGUMENTS[name], text))


@door("POST /v1/runs/{run_id}/decide")
async def decide(world, _name, run, text):
    pending = (await world.client.get(f"/v1/runs/{run}")).json()["pending"]
    shown = [{"call_id": "t1.0", "digest": each["digest"]} for each in pending if each["call_id"] == "t1.0"]
    return await world.post(f"/v1/runs/{run}/decide", {"reject": shown, "message": text})


@door("POST /v1/runs/{run_id}/fork with an edit")
async def edit(world, _name, run, text):
    events = (await world.client.get(f"/v1/runs/{run}/journal")).json()["events"]
    [chosen] = [each for each in events if each["event"]["is"] == "ToolsChosen"]
    chosen["event"]["message"]["text"] = text
    body = {"at": chosen["version"], "edit": {str(chosen["version"]): chosen["event"]}, "withhold": True}
    return await world.post(f"/v1/runs/{run}/fork", body)


@door("POST /v1/agents/{agent}/ag-ui")
async def start_ag_ui(world, _name, run, text):
    body = {"threadId": run, "runId": f"a{run}", "messages": [{"role": "user", "content": text}]}
    return await world.post("/v1/agents/shop/ag-ui", body)


@door("POST /v1/agents/{agent}/ag-ui in parts")
async def start_ag_ui_in_parts(world, _name, run, text):
    content = [{"type": "text", "text": text}]
    body = {"threadId": run, "runId": f"p{run}", "messages": [{"role": "user", "content": content}]}
    return await world.post("/v1/agents/shop/ag-ui", body)


@door("POST /v1/agents/{agent}/ag-ui with a rejection")
async def reject_ag_ui(world, _name, _run, text):
    return await world.resume("approval", {"approved": False, "message": text})


@door("POST /v1/agents/{agent}/ag-ui with an answer")
async def answer_ag_ui(world, _name, _run, text):
    return await world.resume("question", text)


@door("POST /v1/agents/{agent}/ag-ui with an outcome")
async def settle_ag_ui(world, _name, _run, text):
    return await world.resume("outcome", {"result": text}, "lose")


@door("POST /v1/agents/{agent}/ui-messages")
async def start_ui_messages(world, _name, run, text):
    return await world.post("/v1/agents/shop/ui-messages", send_on_page(run, text))


@door("POST /v1/agents/{agent}/ui-messages with a rejection")
async def reject_on_page(world, _name, _run, text):
    return await world.decide_on_page("approval-responded", approved=False, reason=text)


@door("POST /v1/agents/{agent}/ui-messages with an answer")
async def answer_on_page(world, _name, _run, text):
    return await world.decide_on_page("output-available", output=text)


@door("POST /v1/chat/completions")
async def chat(world, _name, _run, text):
    body = {"model": "shop", "messages": [{"role": "user", "content": text}], "metadata": {"conversation": "c"}}
    return await world.post("/v1/chat/completions", body)


@door("POST /v1/chat/completions in the history")
async def chat_history(world, _name, _run, text):
    roles = ("user", "assistant")
    messages = [{"role": each, "content": text} for each in roles] + [{"role": "user", "content": "go"}]
    return await world.post("/v1/chat/completions", {"model": "shop", "messages": messages})


@door("POST /v1/responses")
async def respond(world, _name, _run, text):
    return await world.post("/v1/responses", {"model": "shop", "input": text, "conversation": "r"})


@door("POST /v1/responses in the instructions")
async def respond_instructed(world, _name, _run, text):
    return await world.post("/v1/responses", {"model": "shop", "input": "go", "instructions": text})


@door("POST /v1/hooks/{name}")
async def start_hook(world, _name, _run, text):
    return await world.deliver("/v1/hooks/crm", text)


@door("POST /v1/hooks/{name}/{run_id}")
async def send_hook(world, _name, run, text):
    return await world.deliver(f"/v1/hooks/crm/{run}", text)


def test_each_door_is_listed():
    """An operation, a tool or a way to say something that is new needs its line here, and so the checks."""
    found = {f"{each.method} {each.path}" for group in ROUTE_GROUPS for each in group.endpoints}
    found = {name for name in found if name.startswith("POST")}
    agent = Agent(FunctionModel(answer), store=MemoryStore())
    registries = {"MCP": CallerRunTools(None).build_tools(), "MCP server": ServedRuns(agent=agent).build_tools()[0]}
    for place, tools in registries.items():
        found |= {f"{place} {each.name}" for each in tools if not each.read_only}
    assert len(found) > 15
    assert found - SILENT - set(DOORS) == set()


async def test_no_door_lets_in_what_another_refuses():
    """More than a million characters are refused; controls, tags and marks that reorder are read as their escapes."""
    async with opened() as world:
        run = await world.begin()
        for name, say_it in DOORS.items():
            assert not await say_it(world, name, run, TOO_LONG), name
    async with opened() as world:
        for place, (name, say_it) in enumerate(DOORS.items()):
            assert await say_it(world, name, await world.begin(), f"door {place}: {HIDDEN}."), name
        texts = await read_store(world.agent.store)
        assert find_raw(texts) == []
        for place, name in enumerate(DOORS):
            assert any(f"door {place}: {ESCAPED}." in text for text in texts), name


async def test_each_door_refuses_the_same_parts():
    """Addresses that are not public or not https, data of another type than declared, and types of no model."""
    kinds = {"image": "image", "audio": "audio", "file": "document"}
    async with opened() as world:
        run = await world.begin()
        events = (await world.client.get(f"/v1/runs/{run}/journal")).json()["events"]
        [first] = [each for each in events if each["event"]["is"] == "Observed"]
        for number, (kind, url) in enumerate([*PARTS, ("image", "https://example.org/a.png")]):
            head, _, content = url.removeprefix("data:").partition(";base64,")
            source = {"type": "data", "mimeType": head, "value": content} if content else {"type": "url", "value": url}
            message = {"role": "user", "content": [{"type": kinds[kind], "source": source}]}
            page = send_on_page(f"p{number}", "x")
            page["messages"][0]["parts"] = [{"type": "file", "mediaType": f"{kind}/x", "url": url}]
            parts = [{"is": f"{kind.title()}Part", "url": url}]
            observed = first["event"] | {"inputs": [{"kind": "user", "parts": parts, "labels": []}]}
            fork = {"at": first["version"], "withhold": True, "edit": {str(first["version"]): observed}}
            taken = [
                await world.post("/v1/runs", {"prompt": [{"type": kind, "url": url}]}),
                await world.post(f"/v1/runs/{run}/input", {"text": [{"type": kind, "url": url}]}),
                await world.post(
                    "/v1/agents/shop/ag-ui", {"threadId": f"t{number}", "runId": f"r{number}", "messages": [message]}
                ),
                await world.post("/v1/agents/shop/ui-messages", page),
                await world.post(f"/v1/runs/{run}/fork", fork),
            ]
            if kind != "audio":  # of which OpenAI has data only
                chat = {"image": {"type": "image_url", "image_url": {"url": url}}}
                chat["file"] = {"type": "file", "file": {"file_data": url}}
                response = {"image": {"type": "input_image", "image_url": url}}
                response["file"] = {"type": "input_file", "file_url": url}
                said = [{"role": "user", "content": [part[kind]]} for part in (chat, response)]
                taken.append(await world.post("/v1/chat/completions", {"model": "shop", "messages": said[:1]}))
                taken.append(await world.post("/v1/responses", {"model": "shop", "input": said[1:]}))
            assert set(taken) == {number == len(PARTS)}, url


async def test_the_inputs_of_a_flow():
    """Hidden characters that the JSON of a prompt has as escapes are not what its steps get."""
    seen = []

    @step
    async def look(query: str) -> str:
        seen.append(query)
        return query

    flow = Flow([look], name="looking", store=MemoryStore())
    async with serving(flow) as client:
        for prompt in (json.dumps({"query": HIDDEN}), json.dumps({"query": HIDDEN}, ensure_ascii=False)):
            made = await client.post("/v1/runs", json={"prompt": prompt, "wait_s": 30})
            assert made.json()["state"] == "done", made.text
    assert seen == [ESCAPED, ESCAPED]


async def test_a_schedule():
    """Its prompt is checked when it is added, and again in each run."""
    agent = Agent(FunctionModel(answer), name="shop", store=MemoryStore())
    schedules = Schedules(agent.store)
    for wrong in ("", TOO_LONG):
        with pytest.raises(Exception, match="text"):
            await schedules.add(agent, "nightly", cron="0 3 * * *", prompt=wrong)
    added = await schedules.add(agent, "nightly", cron="0 3 * * *", prompt=HIDDEN)
    assert await create_scheduled_run(agent, added, added.parse_times(), 1_700_000_000.0)
    texts = await read_store(agent.store)
    assert find_raw(texts) == []
    assert ESCAPED in texts
