"""UI messages: the chat of the `ai` SDK, as in `useChat`, starts runs, decides on calls and resumes streams."""

import anyio
import pytest

from agentfsm import Agent, ModelError, tool
from agentfsm.stores import MemoryStore
from agentfsm.testing import ScriptedModel, call, fail, say
from tests.support import node_packages
from tests.support.gateways import named, serving


@pytest.fixture
def anyio_backend():
    """Return the one that uvicorn runs on."""
    return "asyncio"


@pytest.fixture(scope="module")
def exchange():
    """Start the official client once."""
    with node_packages.running("ui_message_client.mjs") as exchange:
        yield exchange


@pytest.fixture
def page(exchange):
    """Return a function that opens a page of a chat, and returns a function of what its user does."""

    async def act(**asked):
        return await anyio.to_thread.run_sync(exchange, asked)

    async def load(server, *, chat="c", caller="ann//run+approve", agent="shop", messages=()):
        url = f"{str(server.base_url).rstrip('/')}/v1/agents/{agent}/ui-messages"
        await act(open={"chat": chat, "url": url, "headers": {"x-caller": caller}, "messages": list(messages)})
        return act

    return load


def text(words):
    return [{"type": "text", "text": words}]


def shown(page, *, message=-1):
    """Return the parts of a message as a page shows them, in short."""
    parts = []
    for part in page["messages"][message]["parts"]:
        if part["type"] in ("text", "reasoning"):
            retracted = part.get("providerMetadata", {}).get("agentfsm", {}).get("retracted")
            parts.append((part["type"], part["text"], *(["retracted"] if retracted else [])))
        elif part["type"].startswith("tool-"):
            parts.append((part["type"], part["state"], part.get("output") or part.get("errorText")))
    return parts


@tool(requires_approval=True)
async def pay(amount: int) -> str:
    """Pay an amount."""
    return f"paid {amount}"


@tool(external=True)
async def look_up(key: str) -> str:
    """Look a value up elsewhere."""
    raise AssertionError


def shop(*replies, tools=(pay,), **options):
    return Agent(ScriptedModel(*replies), tools=list(tools), name="shop", store=MemoryStore(), **options)


async def test_a_chat_streams_its_answers(page):
    """Each message starts a run of the session, whose text comes once; the same message again is one run."""
    agent = shop(say("one two three"), say("again"))
    async with serving(agent) as server:
        act = await page(server)
        first = await act(send=text("count"), id="u1", metadata={"page": "start"})
        assert (first["status"], first["error"]) == ("ready", None), first
        assert first["requests"] == [["POST", 200, "v1"]]
        assert shown(first) == [("text", "one two three")]
        run_id = first["messages"][-1]["metadata"]["runId"]
        assert first["messages"][-1]["metadata"]["usage"]["outputTokens"] > 0
        assert (await agent.load(run_id)).metadata == {"page": "start"}
        second = await act(send=text("more"))
        assert shown(second) == [("text", "again")]
        assert [each["role"] for each in second["messages"]] == ["user", "assistant"] * 2
        other = await page(server)
        assert shown(await other(send=text("count"), id="u1")) == shown(first)
        assert len((await server.get("/v1/runs")).json()["runs"]) == 2


@pytest.mark.parametrize("approved", [True, False])
async def test_an_approval_is_a_part_of_the_answer(page, approved):
    """The stream ends with the request; the decision continues the same message, once, whoever sends it again."""
    agent = shop(say("I will pay. ", call("pay", amount=5)), say("all done"))
    async with serving(agent) as server:
        act = await page(server)
        first = await act(send=text("pay 5"))
        assert shown(first) == [("text", "I will pay. "), ("tool-pay", "approval-requested", None)]
        [asked] = [part["approval"] for part in first["messages"][-1]["parts"] if "approval" in part]
        assert asked["descriptor"]["arguments"] == {"amount": 5}
        blocked = await (await page(server))(send=text("hello"))
        assert "approve or reject it" in blocked["error"]
        act = await page(server, caller="ann//run", messages=first["messages"])
        refused = await act(approve=approved)
        assert "scope 'approve'" in refused["error"]
        act = await page(server, messages=first["messages"])
        last = await act(approve=approved, reason="too much")
        assert last["error"] is None, last
        ended = ("output-available", "paid 5") if approved else ("output-denied", None)
        assert shown(last) == [("text", "I will pay. "), ("tool-pay", *ended), ("text", "all done")]
        assert len(last["messages"]) == 2
        act = await page(server, messages=first["messages"])
        assert shown(await act(approve=approved)) == shown(last)
        other = await page(server, caller="eve//run+approve", messages=first["messages"])
        assert "not wait" in (await other(approve=approved))["error"]


async def test_an_approval_within_a_sub_agent(page):
    """Its call is a part of the answer, and the page sends the decision by itself."""
    helper = Agent(ScriptedModel(say("", call("pay", amount=2)), say("inner")), name="helper", tools=[pay])
    async with serving(shop(say("", call("helper", query="x")), say("outer"), tools=[helper.as_tool()])) as server:
        act = await page(server)
        first = await act(send=text("go"))
        assert shown(first) == [("tool-helper", "input-available", None), ("tool-pay", "approval-requested", None)]
        last = await act(approve=True)
        assert last["error"] is None, last
        assert shown(last) == [
            ("tool-helper", "output-available", "inner"),
            ("tool-pay", "output-available", "paid 2"),
            ("text", "outer"),
        ]


@pytest.mark.parametrize("by", ["output", "text"])
async def test_a_result_from_outside(page, by):
    """The page gives the output of the call, or its user answers with a message."""
    async with serving(shop(say("", call("look_up", key="k")), say("done"), tools=[look_up])) as server:
        act = await page(server)
        first = await act(send=text("go"))
        assert shown(first)[0] == ("tool-look_up", "input-available", None)
        assert "answer here" in shown(first)[1][1]
        last = await (act(output="42") if by == "output" else act(send=text("42")))
        assert last["error"] is None, last
        assert ("tool-look_up", "output-available", "42") in shown(last)
        assert shown(last)[-1] == ("text", "done")
        assert len(last["messages"]) == (2 if by == "output" else 4)
        assert len({each["id"] for each in last["messages"]}) == len(last["messages"])


async def test_a_page_that_is_loaded_again_resumes(page):
    """While a run works or waits the stream shows its answer from the beginning; else there is nothing to resume."""
    agent = shop(say("I will pay. ", call("pay", amount=5)), say("all done"))
    async with serving(agent) as server:
        act = await page(server)
        assert (await act(resume=True))["requests"] == [["GET", 204, None]]
        first = await act(send=text("pay 5"), id="u1")
        act = await page(server, messages=first["messages"][:1])
        again = await act(resume=True)
        assert again["requests"] == [["GET", 200, "v1"]]
        assert shown(again) == shown(first)
        assert again["messages"][-1]["id"] == first["messages"][-1]["id"]
        assert shown(await act(approve=True))[-1] == ("text", "all done")
        assert (await act(resume=True))["requests"] == [["GET", 204, None]]
        url = "/v1/agents/shop/ui-messages/c/stream"
        rest = await server.get(f"{url}?after=1", headers=named())
        assert "all done" in rest.text
        assert (await server.get(url, headers=named("eve"))).status_code == 204


async def test_failures_are_said(page):
    """A run without an answer is an error of the chat, a cancelled one stops, and wrong requests start nothing."""
    agent = shop(say("", call("pay", amount=5)), say("", call("pay", amount=6)))
    async with serving(agent) as server:
        act = await page(server)
        first = await act(send=text("pay"))
        run_id = first["messages"][-1]["metadata"]["runId"]
        await server.post(f"/v1/runs/{run_id}/cancel", json={})
        url = "/v1/agents/shop/ui-messages"
        gone = await server.get(f"{url}/c/stream?after=0", headers=named())
        assert '"type":"abort"' in gone.text.replace(" ", "")
        assert "not made again" in (await act(regenerate=True))["error"]
        user = {"id": "u", "role": "user", "parts": text("x")}
        for messages, status in [
            ([], 422),
            ([{**user, "role": "system"}], 400),
            ([{**user, "parts": [{"type": "data-x", "data": 1}]}], 400),
            ([{**user, "metadata": 3}], 400),
            ([{"role": "assistant", "parts": text("x")}], 400),
            ([{"role": "assistant", "parts": 3}], 400),
            ([{"role": "assistant", "parts": [{"type": "data-wait", "id": "w", "data": 3}]}], 400),
        ]:
            answer = await server.post(url, json={"id": "c2", "messages": messages}, headers=named())
            assert answer.status_code == status, (messages, answer.text)
        extra = await server.post(url, json={"id": "c2", "messages": [user], "model": "x"}, headers=named())
        assert (extra.status_code, "model" in extra.text) == (422, True)
        assert not (await server.get("/v1/runs", params={"session": "c2"})).json()["runs"]
    async with serving(shop(fail(ModelError("no key")))) as server:
        failed = await (await page(server))(send=text("x"))
        assert failed["status"] == "error"
        assert "no key" in failed["error"]
