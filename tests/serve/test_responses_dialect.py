"""OpenAI's Responses, by its own client and by the `ai` SDK: responses are runs, and go on after each other."""

from functools import partial

import anyio
import openai
import pytest
from openai.types.responses import Response
from pydantic import BaseModel

from agentfsm import Agent, Limits, UserMessage, tool
from agentfsm.stores import MemoryStore
from agentfsm.testing import FunctionModel, ScriptedModel, call, say
from tests.support import node_packages
from tests.support.gateways import serving

ONE_TURN = Limits(turns=1)


class Total(BaseModel):
    """A sum."""

    total: int


@pytest.fixture
def anyio_backend():
    """Return the one that uvicorn runs on."""
    return "asyncio"


@pytest.fixture(scope="module")
def exchange():
    """Start the `ai` SDK once."""
    with node_packages.running("ai_sdk_client.mjs") as exchange:
        yield exchange


@pytest.fixture
def sdk(exchange):
    """Return a function that sends a request with the `ai` SDK, and returns what that understood."""

    async def send(server, provider, how="generate", *, key="ann//run", headers=None, schema=None, **options):
        url = f"{server.base_url}".rstrip("/") + "/v1"
        request = {"provider": provider, "url": url, "key": key, "headers": headers or {}, "call": how}
        return await anyio.to_thread.run_sync(exchange, request | {"schema": schema, "options": options})

    return send


@tool(requires_approval=True)
async def pay(amount: int) -> str:
    """Pay an amount."""
    return f"paid {amount}"


@tool(external=True)
async def look_up(key: str) -> str:
    """Look a value up elsewhere."""
    raise AssertionError


def client_of(server, caller="ann//run"):
    base_url = f"{server.base_url}".rstrip("/") + "/v1"
    http = openai.DefaultAsyncHttpxClient(verify=False)
    return openai.AsyncOpenAI(base_url=base_url, api_key=caller, max_retries=0, http_client=http)


def shop(*script, **options):
    return Agent(ScriptedModel(*script), name="shop", store=MemoryStore(), **options)


def read_texts(run):
    return [message.text for message in run.messages]


async def test_a_response_is_a_run():
    """It is returned whole or as events of the client's own types, and again by its id; `metadata` is the client's."""
    agent = shop("one two", "three four")
    async with serving(agent) as server, client_of(server) as client:
        whole = await client.responses.create(model="shop", input="hi", metadata={"a": "b"}, user="u1")
        assert (whole.output_text, whole.status, whole.metadata) == ("one two", "completed", {"a": "b"})
        run = await agent.load(whole.id.removeprefix("resp_"))
        assert (whole.usage.total_tokens, whole.model) == (run.usage.tokens, "shop")
        assert await client.responses.retrieve(whole.id) == whole
        Response.model_validate(whole.model_dump(), strict=False)  # the client builds its types without a check
        async with client.responses.stream(model="shop", input="hi") as stream:
            events = [event async for event in stream]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        kinds = [event.type for event in events if event.type != "response.output_text.delta"]
        assert kinds == [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.completed",
        ]
        assert "".join(each.delta for each in events if each.type == "response.output_text.delta") == "three four"
        assert events[-1].response.output_text == "three four"
        assert (await client.responses.retrieve(events[-1].response.id)).output_text == "three four"


async def test_a_response_goes_on_after_another():
    """By `previous_response_id`, also in two branches, or in a conversation; the store has the replies."""
    agent = shop("a", "b", "c", "d", "e")
    async with serving(agent) as server, client_of(server) as client:
        ask = partial(client.responses.create, model="shop")
        first = await ask(input="1")
        second = await ask(input="2", previous_response_id=first.id)
        assert second.previous_response_id == first.id
        branch = await ask(input=[{"role": "user", "content": each} for each in "34"], previous_response_id=first.id)
        assert read_texts(await agent.load(second.id[5:])) == ["1", "a", "2", "b"]
        assert read_texts(await agent.load(branch.id[5:])) == ["1", "a", "3\n4", "c"]
        for conversation in ("trip", {"id": "trip"}):
            response = await ask(input="5", conversation=conversation)
            assert (response.conversation.id, response.previous_response_id) == ("trip", None)
        assert read_texts(await agent.load(response.id[5:])) == ["5", "d", "5", "e"]
        replies = [{"role": "assistant", "content": "forged"}, {"role": "user", "content": "6"}]
        for wrong in ({"previous_response_id": first.id}, {"conversation": "trip"}):
            with pytest.raises(openai.BadRequestError, match="the store has the replies"):
                await ask(input=replies, **wrong)
        with pytest.raises(openai.BadRequestError, match="leave one of them out"):
            await ask(input="6", previous_response_id=first.id, conversation="trip")


async def test_an_open_response_gets_input():
    """The next message answers the question of its run; an approval is not given by a message, and ends the wait."""
    agent = shop(say("", call("look_up", key="k")), say("", call("pay", amount=5)), "done", tools=[look_up, pay])
    async with serving(agent) as server, client_of(server) as client:
        ask = partial(client.responses.create, model="shop")
        told = await ask(input="go")
        assert "answer here" in told.output_text
        async with client.responses.stream(model="shop", input="42", previous_response_id=told.id) as stream:
            waits = await stream.get_final_response()
        assert (waits.id, "approve or reject it" in waits.output_text) == (told.id, True)
        with pytest.raises(openai.ConflictError, match="approve or reject it"):
            await ask(input="yes", previous_response_id=told.id)
        path = f"/v1/runs/{told.id[5:]}"
        [item] = (await server.get(path)).json()["pending"]
        await server.post(f"{path}/approve", json={"call_id": item["call_id"], "digest": item["digest"]})
        await agent.runs.wait(told.id[5:])
        assert (await client.responses.retrieve(told.id)).output_text == "done"
        run = await agent.load(told.id[5:])
        assert [each.text for each in run.messages if isinstance(each, UserMessage)] == ["go"]


async def test_a_response_works_in_the_background():
    """Its state is asked for, and it is cancelled, also when its run waits for something else."""
    gate = anyio.Event()

    async def reply(_request):
        await gate.wait()
        return "done"

    agent = Agent(FunctionModel(reply), name="shop", store=MemoryStore())
    async with serving(agent) as server, client_of(server) as client:
        first, second = [await client.responses.create(model="shop", input="go", background=True) for _ in range(2)]
        assert (first.status, first.output) == ("in_progress", [])
        assert (await client.responses.cancel(second.id)).status == "cancelled"
        gate.set()
        await agent.runs.wait(first.id[5:])
        done = await client.responses.retrieve(first.id)
        assert (done.status, done.output_text) == ("completed", "done")
        with pytest.raises(openai.BadRequestError, match="/events"):
            await client.responses.retrieve(first.id, stream=True)


async def test_a_retry_does_not_run_twice():
    """Neither by an idempotency key, nor when the client's own retry says that it is one."""
    agent = shop("a", "b", "c")
    async with serving(agent) as server, client_of(server) as client:
        ask = partial(client.responses.create, model="shop", input="go", instructions="Be brief.", conversation="c")
        keyed = {"extra_headers": {"idempotency-key": "k"}}
        first = await ask(**keyed)
        second = await ask()
        assert (await ask(**keyed)).id == first.id
        assert (await ask(extra_headers={"x-stainless-retry-count": "1"})).id == second.id
        assert len(agent.model.requests) == 2
        assert read_texts(await agent.load(second.id[5:])) == ["Be brief.\ngo", "a", "go", "b"]


async def test_a_run_that_fails_is_a_failed_response():
    """Whole and streamed; responses of others do not exist."""
    async with serving(shop(say("", call("x")), say("", call("x")), limits=ONE_TURN)) as server:
        async with client_of(server) as client:
            failed = await client.responses.create(model="shop", input="go")
            assert (failed.status, failed.error.code) == ("failed", "server_error")
            assert "max_turns" in failed.error.message
            async with client.responses.stream(model="shop", input="go") as stream:
                assert [event.type async for event in stream][-1] == "response.failed"
        async with client_of(server, "bob//run") as other:
            with pytest.raises(openai.NotFoundError, match="there is no response"):
                await other.responses.retrieve(failed.id)
            with pytest.raises(openai.BadRequestError, match="there is no response") as refused:
                await other.responses.create(model="shop", input="go", previous_response_id=failed.id)
            assert refused.value.param == "previous_response_id"
            reference = [{"type": "item_reference", "id": f"msg_{failed.id[5:]}"}, {"role": "user", "content": "go"}]
            with pytest.raises(openai.BadRequestError, match="there is no message"):
                await other.responses.create(model="shop", input=reference)


@pytest.mark.parametrize("provider", ["openai", "compatible"])
async def test_the_ai_sdk_is_served(sdk, provider):
    """Text, streams, settings, structured output and errors, by Responses and by chat completions."""
    schema = {
        "type": "object",
        "properties": {"total": {"type": "integer"}},
        "required": ["total"],
        "additionalProperties": False,
    }
    agent = shop("one two", "three four")
    typed = shop('{"total": 3}', '{"total": 4}', output_type=Total)
    async with serving(agent) as server:
        whole = await sdk(server, provider, system="Be brief.", prompt="hi", temperature=0.5, maxOutputTokens=20)
        assert (whole.get("error"), whole.get("text"), whole.get("finish")) == (None, "one two", "stop")
        assert agent.model.requests[0].messages[0].text == "Be brief.\nhi"
        assert agent.model.requests[0].settings.max_tokens == 20
        messages = [{"role": "user", "content": "hi"}, *whole["messages"], {"role": "user", "content": "more"}]
        stream = await sdk(server, provider, "stream", messages=messages)
        assert (stream.get("error"), stream.get("text"), stream.get("finish")) == (None, "three four", "stop")
        assert [message.text for message in agent.model.requests[1].messages] == ["hi", "one two", "more"]
        assert stream["usage"]["totalTokens"] > 0
        refused = await sdk(server, provider, prompt="hi", schema=schema)
        assert (refused["status"], "output_type=" in refused["error"]) == (400, True)
        assert (await sdk(server, provider, key="nobody", prompt="hi"))["status"] == 401
        penalty = (
            {"presencePenalty": 1} if provider == "compatible" else {"providerOptions": {"openai": {"store": False}}}
        )
        refused = await sdk(server, provider, prompt="hi", **penalty)
        assert (refused["status"], "is refused" in refused["error"]) == (400, True)
    async with serving(typed) as server:
        for number, how in ((3, "generate"), (4, "stream")):
            answer = await sdk(server, provider, how, prompt="hi", schema=schema)
            assert (answer.get("error"), answer.get("object")) == (None, {"total": number})


@pytest.mark.parametrize("how", ["generate", "stream"])
async def test_the_ai_sdk_is_told_of_waits_and_failures(sdk, how):
    """An approval is text, and the conversation goes on after it by `previousResponseId`; a failed run is an error."""
    agent = shop(say("", call("pay", amount=5)), say("", call("x")), tools=[pay], limits=Limits(turns=2))
    async with serving(agent) as server:
        told = await sdk(server, "openai", how, prompt="pay")
        assert "approve or reject it" in told["text"]
        options = {"providerOptions": {"openai": {"previousResponseId": told["id"]}}}
        refused = await sdk(server, "openai", how, prompt="yes", **options)
        assert refused["status"] == 409
        path = f"/v1/runs/{told['id'][5:]}"
        [item] = (await server.get(path)).json()["pending"]
        await server.post(f"{path}/approve", json={"call_id": item["call_id"], "digest": item["digest"]})
        assert (await agent.runs.wait(told["id"][5:])).is_over
        failing = shop(say("", call("x")), limits=ONE_TURN)
    async with serving(failing) as server:
        failed = await sdk(server, "openai", how, prompt="pay")
        assert "ended without an answer" in failed["error"]


async def test_a_response_is_deleted():
    """By a key that may delete runs; any other is told which scope that needs."""
    async with serving(shop("a")) as server, client_of(server) as client, client_of(server, "ann//run+admin") as admin:
        response = await client.responses.create(model="shop", input="go")
        with pytest.raises(openai.PermissionDeniedError, match="scope 'admin'"):
            await client.responses.delete(response.id)
        await admin.responses.delete(response.id)
        for again in (admin.responses.delete, client.responses.retrieve):
            with pytest.raises(openai.NotFoundError, match="there is no response"):
                await again(response.id)
