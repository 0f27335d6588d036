"""The fields of OpenAI's requests: the table in the code, in the docs and in OpenAI's client, and what each does."""

import typing

import httpx
import openai
import pytest
from openai.lib._pydantic import to_strict_json_schema
from openai.types import chat, responses
from openai.types.chat import chat_completion_content_part_image_param as image_param
from openai.types.chat import chat_completion_content_part_input_audio_param as audio_param
from openai.types.chat import chat_completion_content_part_param as part_param
from openai.types.chat import chat_completion_content_part_refusal_param as refusal_param
from openai.types.chat import chat_completion_content_part_text_param as text_param
from openai.types.chat import completion_create_params as chat_params
from openai.types.chat.chat_completion_stream_options_param import ChatCompletionStreamOptionsParam
from openai.types.responses import response_create_params as response_params
from openai.types.responses import response_input_item_param as input_item
from openai.types.responses.response_text_config_param import ResponseTextConfigParam
from openai.types.shared_params.reasoning import Reasoning
from pydantic import BaseModel

from agentfsm import Agent, MisuseError, Settings, tool
from agentfsm.ports.model import FinishReason, Reply
from agentfsm.serve.dialects.openai_fields import CHAT, FIELDS, RESPONSES, check_format
from agentfsm.serve.dialects.openai_items import ITEM_FORMS
from agentfsm.stores import MemoryStore
from agentfsm.testing import FunctionModel, ScriptedModel, call, say
from tests.support.doc_tables import read_table
from tests.support.gateways import serving

# OpenAI's request types, and the objects in them whose fields are in the table.
REQUESTS = {
    CHAT: (chat_params.CompletionCreateParamsStreaming, {"stream_options": ChatCompletionStreamOptionsParam}),
    RESPONSES: (
        response_params.ResponseCreateParamsStreaming,
        {
            "stream_options": response_params.StreamOptions,
            "background_options": response_params.BackgroundOptions,
            "reasoning": Reasoning,
            "text": ResponseTextConfigParam,
        },
    ),
}
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


class Item(BaseModel):
    """A line of an order."""

    name: str
    price: float | None = None


class Order(BaseModel):
    """An order, whose items may have orders of their own."""

    number: int
    items: list[Item] = []
    next: "Order | None" = None


# As the model gives it: a type that contains itself is wrapped.
ORDER = '{"result": {"number": 7, "items": [{"name": "tea", "price": null}], "next": null}}'


@pytest.fixture
def anyio_backend():
    """Return the one that uvicorn runs on."""
    return "asyncio"


@tool
async def look() -> str:
    """Look."""
    return "seen"


def client_of(server, caller="ann//run"):
    base_url = f"{server.base_url}".rstrip("/") + "/v1"
    http = openai.DefaultAsyncHttpxClient(verify=False)
    return openai.AsyncOpenAI(base_url=base_url, api_key=caller, max_retries=0, http_client=http)


def shop(*script, **options):
    return Agent(ScriptedModel(*script), name="shop", store=MemoryStore(), **options)


def ask(text="hi"):
    return {"model": "shop", "messages": [{"role": "user", "content": text}]}


@pytest.mark.parametrize("api", REQUESTS)
def test_the_table_has_each_field_of_the_client(api):
    """A field that a new version of OpenAI's API adds is missing here, and one that it drops is too much."""
    body, objects = REQUESTS[api]
    wanted = set(typing.get_type_hints(body))
    wanted |= {f"{name}.{each}" for name, kind in objects.items() for each in typing.get_type_hints(kind)}
    names = [field.name for field in FIELDS if api in field.apis]
    assert set(names) == wanted - set(objects)
    assert len(set(names)) == len(names)


def test_the_page_has_the_table():
    """Each field with what is honoured and what is refused, and none that is ignored."""
    paths = {CHAT: "chat", RESPONSES: "responses"}
    wanted = [
        [f"`{each.name}`", ", ".join(paths[api] for api in each.apis), each.honoured or "-", each.refused or "-"]
        for each in FIELDS
    ]
    assert read_table("dialects.md", "field | endpoints | honoured | refused") == wanted
    assert all(each.honoured or each.refused for each in FIELDS)
    assert all(
        bool(each.honoured) == bool(each.neutral or each.setting or each.is_kept or each.is_read) for each in FIELDS
    )


def value_of(field):
    """Return a value that is not neutral for a field that refuses some."""
    first = field.neutral[0] if field.neutral else {}
    return {str: "other", list: ["other"], dict: {"50256": 1}, bool: not first, int: 3}[type(first)]


@pytest.mark.parametrize("api", REQUESTS)
async def test_a_refused_field_is_named(api):
    """With the reason, in OpenAI's form, whereas its neutral values start a run; null is as if it were left out."""
    fields = [each for each in FIELDS if api in each.apis and not (each.is_read or each.setting or each.is_kept)]
    async with serving(shop(*["ok"] * 2)) as server:
        server.headers["x-caller"] = "ann//run"

        async def send(values):
            body = {"model": "shop", **({"input": "hi"} if api == RESPONSES else ask())}
            for field, value in values:
                name, _, key = field.name.partition(".")
                body[name] = {**body.get(name, {}), key: value} if key else value
            return await server.post(api, json=body)

        assert (await send([(each, None) for each in fields])).status_code == 200
        answer = await send([(each, each.neutral[-1]) for each in fields if each.neutral])
        assert answer.status_code == 200, answer.text
        for field in fields:
            if field.refused:
                answer = await send([(field, value_of(field))])
                error = answer.json()["error"]
                assert (answer.status_code, error["param"], error["type"]) == (400, field.name, "invalid_request_error")
                assert error["message"].endswith(field.refused)


@pytest.mark.parametrize(
    ("api", "values", "param"),
    [
        (CHAT, {"n": True}, "n"),
        (CHAT, {"store": "x"}, "store"),
        (CHAT, {"response_format": {"type": "text", "x": 1}}, "response_format"),
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "x": 1}}}, "response_format"),
        (CHAT, {"metadata": {"openai_user": "eve"}}, "metadata"),
        (RESPONSES, {"conversation": ""}, "conversation"),
        (RESPONSES, {"conversation": {}}, "conversation"),
        (RESPONSES, {"conversation": {"id": None, "name": "c"}}, "conversation"),
        (RESPONSES, {"conversation": {"id": "c", "x": 1}}, "conversation"),
    ],
)
async def test_parts_of_fields_are_not_ignored(api, values, param):
    """What stands in a field is honoured as a whole, or refused with a reason."""
    async with serving(shop()) as server:
        body = {"model": "shop", **({"input": "hi"} if api == RESPONSES else ask()), **values}
        error = (await server.post(api, json=body)).json()["error"]
        assert error["param"] == param
        assert not error["message"].endswith(": ")


async def test_settings_are_those_of_the_run():
    """The client's override the agent's, except that it gets no longer replies; wrong ones are refused by name."""
    agent = shop("a", "b", settings=Settings(max_tokens=50, temperature=0))
    async with serving(agent) as server, client_of(server) as client:
        given = {
            "temperature": 0.5,
            "top_p": 0.9,
            "seed": 4,
            "stop": "END",
            "max_tokens": 20,
            "reasoning_effort": "low",
        }
        await client.chat.completions.create(**ask(), **given)
        settings = agent.model.requests[0].settings
        assert {name: getattr(settings, name) for name in given} == given | {"stop": ("END",)}
        await client.responses.create(model="shop", input="hi", max_output_tokens=900, reasoning={"effort": "high"})
        settings = agent.model.requests[1].settings
        assert (settings.max_tokens, settings.reasoning_effort, settings.temperature) == (50, "high", 0)
        for wrong in ({"temperature": 9}, {"max_completion_tokens": 0}, {"stop": 5}):
            with pytest.raises(openai.BadRequestError) as refused:
                await client.chat.completions.create(**ask(), **wrong)
            assert refused.value.param in wrong
        with pytest.raises(openai.BadRequestError, match="repeats another field"):
            await client.chat.completions.create(**ask(), max_tokens=1, max_completion_tokens=2)
        with pytest.raises(openai.BadRequestError, match="'top_k' is not a field") as refused:
            await client.chat.completions.create(**ask(), extra_body={"top_k": 4})
        assert refused.value.param == "top_k"


async def test_a_reply_at_the_length_limit_is_cut_off():
    """Its text is the answer, as far as it came, and the finish reason says so."""

    def reply(_request):
        return Reply(text="one two", finish_reason=FinishReason.LENGTH)

    agent = Agent(FunctionModel(reply), name="shop", store=MemoryStore())
    async with serving(agent) as server, client_of(server) as client:
        whole = (await client.chat.completions.create(**ask(), max_tokens=2)).choices[0]
        assert (whole.message.content, whole.finish_reason) == ("one two", "length")
        stream = await client.chat.completions.create(**ask(), stream=True)
        choices = [chunk.choices[0] async for chunk in stream]
        assert "".join(each.delta.content or "" for each in choices) == "one two"
        assert choices[-1].finish_reason == "length"
        response = await client.responses.create(model="shop", input="hi", max_output_tokens=2)
        assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert response.output_text == "one two"
        async with client.responses.stream(model="shop", input="hi") as events:
            kinds = [event.type async for event in events]
        assert kinds[-1] == "response.incomplete"


async def test_the_form_of_the_agent_is_parsed():
    """`parse()` of both endpoints works with the agent's own type, whole and streamed, also after a call of a tool."""
    script = [turn for _ in range(4) for turn in (say("I look. ", call("look")), ORDER)]
    agent = shop(*script, tools=[look], output_type=Order)
    async with serving(agent) as server, client_of(server) as client:
        chat = await client.chat.completions.parse(**ask(), response_format=Order)
        assert chat.choices[0].message.parsed == Order(number=7, items=[Item(name="tea")])
        response = await client.responses.parse(model="shop", input="hi", text_format=Order)
        assert response.output_parsed == chat.choices[0].message.parsed
        async with client.chat.completions.stream(**ask(), response_format=Order) as stream:
            assert (await stream.get_final_completion()).choices[0].message.parsed.number == 7
        async with client.responses.stream(model="shop", input="hi", text_format=Order) as stream:
            assert (await stream.get_final_response()).output_parsed.number == 7
        for changed in ({"number": str}, {"items": list[str]}, {"more": int}):
            other = type("Order", (Order,), {"__annotations__": changed, "__module__": __name__})
            with pytest.raises(openai.BadRequestError, match="not every answer of shop fits it") as refused:
                await client.chat.completions.parse(**ask(), response_format=other)
            assert refused.value.param == "response_format"


async def test_a_wait_is_no_answer_of_the_form():
    """If JSON was asked for, the text about the wait is a refusal, whole and streamed."""

    @tool(requires_approval=True)
    async def pay() -> str:
        """Pay."""
        raise AssertionError

    agent = shop(*[say("I pay. ", call("pay"))] * 4, tools=[pay], output_type=Item)
    async with serving(agent) as server, client_of(server) as client:
        chat = (await client.chat.completions.parse(**ask(), response_format=Item)).choices[0].message
        assert (chat.parsed, chat.content, "approve or reject it" in chat.refusal) == (None, None, True)
        response = await client.responses.parse(model="shop", input="hi", text_format=Item)
        assert (response.output_parsed, response.output[0].content[0].type) == (None, "refusal")
        async with client.chat.completions.stream(**ask(), response_format=Item) as stream:
            message = (await stream.get_final_completion()).choices[0].message
            assert (message.parsed, "approve or reject it" in message.refusal) == (None, True)
        async with client.responses.stream(model="shop", input="hi", text_format=Item) as stream:
            kinds = [event.type async for event in stream]
        assert kinds[4:7] == ["response.refusal.delta", "response.refusal.done", "response.content_part.done"]


async def test_a_form_that_an_agent_does_not_have_is_refused():
    """An agent that answers with text has no form, and one with a list has no object; `text` is what is done anyway."""
    texts, lists = shop("a"), shop('{"result": [1]}', output_type=list[int])
    for agent, kind in ((texts, "json_object"), (lists, "json_object"), (texts, "json_schema")):
        asked = {"type": kind, "json_schema": {"name": "x", "schema": to_strict_json_schema(Item)}}
        async with serving(agent) as server, client_of(server) as client:
            with pytest.raises(openai.BadRequestError, match="output_type="):
                await client.chat.completions.create(**ask(), response_format=asked)
            answer = await client.chat.completions.create(**ask(), response_format={"type": "text"})
            assert answer.choices[0].finish_reason == "stop"
            agent.model.requests.clear()


@pytest.mark.parametrize(
    ("hint", "asked", "fits"),
    [
        (dict[str, int], {"type": "object", "additionalProperties": {"type": "integer"}}, True),
        (dict[str, int], {"type": "object", "additionalProperties": {"type": "number"}}, True),
        (dict[str, int], {"type": "object", "additionalProperties": {"type": "string"}}, False),
        (dict[str, int], {"type": "object", "properties": {}, "additionalProperties": False}, False),
        (Item, {"type": "object", "required": ["name"]}, True),
        (Item, {"type": "object", "properties": {"name": {"type": "string", "maxLength": 3}}}, False),
        (Item, {"type": "object", "properties": {"name": {"enum": ["tea"]}}}, False),
        (Item, {"type": "object", "properties": {"price": {"type": "number"}}}, False),
        (Item, {"type": "object", "properties": {"price": {"type": ["number", "null"]}}}, True),
        (Item, {"$ref": "#"}, False),
        (Order, Order.model_json_schema(), True),
        (Order, {"type": "object", "properties": {"number": {"type": "integer", "maximum": 2**53 - 1}}}, True),
    ],
    ids=range(12),
)
def test_a_schema_may_be_wider_than_the_agents(hint, asked, fits):
    """Every answer of the agent has to fit it."""
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": asked}}
    agent = shop(output_type=hint)
    if fits:
        assert check_format(agent, "response_format", form)
    else:
        with pytest.raises(MisuseError, match="not every answer of shop fits it"):
            check_format(agent, "response_format", form)


async def test_images_and_instructions_reach_the_model():
    """Those of `system` and `developer` messages stand before the words of the user, whose rights they have."""
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}", "detail": "low"}}
    agent = shop("a", "b", "c", "d")
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "What is it?"}, image]},
    ]
    async with serving(agent) as server, client_of(server) as client:
        await client.chat.completions.create(model="shop", messages=messages)
        [message] = agent.model.requests[0].messages
        assert (message.text, message.parts[2].detail) == ("Be brief.\nWhat is it?", "low")
        items = [
            {"type": "input_text", "text": "And?"},
            {"type": "input_image", "image_url": image["image_url"]["url"]},
        ]
        options = {"model": "shop", "instructions": "Be brief.", "conversation": "c"}
        await client.responses.create(input=[{"role": "user", "content": items}], **options)
        assert agent.model.requests[1].messages[0].text == "Be brief.\nAnd?"
        await client.responses.create(input="Why?", **options)
        await client.responses.create(input="How?", **options | {"instructions": "Be long."})
        texts = [message.text for message in agent.model.requests[3].messages]
        assert texts == ["Be brief.\nAnd?", "b", "Why?", "c", "Be long.\nHow?"]
        for wrong in ([{"type": "input_audio"}], []):
            with pytest.raises(openai.BadRequestError) as refused:
                await client.responses.create(model="shop", input=[{"role": "user", "content": wrong}])
            assert refused.value.param == "input[0]"


CHAT_PARTS = {
    "text": text_param.ChatCompletionContentPartTextParam,
    "refusal": refusal_param.ChatCompletionContentPartRefusalParam,
    "image_url": image_param.ChatCompletionContentPartImageParam,
    "input_audio": audio_param.ChatCompletionContentPartInputAudioParam,
    "file": part_param.File,
}
# OpenAI's types of messages and parts, and the objects in them whose fields are in the table.
ITEMS = {
    **{(CHAT, name): kind for name, kind in CHAT_PARTS.items()},
    (CHAT, "user"): chat.ChatCompletionUserMessageParam,
    (CHAT, "system"): chat.ChatCompletionSystemMessageParam,
    (CHAT, "developer"): chat.ChatCompletionDeveloperMessageParam,
    (CHAT, "assistant"): chat.ChatCompletionAssistantMessageParam,
    (RESPONSES, "user"): input_item.Message,
    (RESPONSES, "assistant"): responses.ResponseOutputMessageParam,
    (RESPONSES, "item_reference"): input_item.ItemReference,
    (RESPONSES, "input_text"): responses.ResponseInputTextParam,
    (RESPONSES, "output_text"): responses.ResponseOutputTextParam,
    (RESPONSES, "refusal"): responses.ResponseOutputRefusalParam,
    (RESPONSES, "input_image"): responses.ResponseInputImageParam,
    (RESPONSES, "input_file"): responses.ResponseInputFileParam,
}
OBJECTS = {"image_url": image_param.ImageURL, "input_audio": audio_param.InputAudio, "file": part_param.FileFile}


def test_the_forms_have_each_field_of_the_client():
    """Of messages and their parts, as the table of the page has them."""
    forms = {(form.api, form.name): {*form.honoured, *form.echoed, *form.refused} for form in ITEM_FORMS}
    for key, kind in ITEMS.items():
        wanted = set(typing.get_type_hints(kind))
        if key[0] == CHAT and key[1] in OBJECTS:
            wanted |= {f"{key[1]}.{each}" for each in typing.get_type_hints(OBJECTS[key[1]])}
            wanted.discard(key[1])
        assert wanted <= forms[key], key
    paths = {CHAT: "chat", RESPONSES: "responses"}

    def show(fields):
        return ", ".join(f"`{each}`" for each in fields) or "-"

    rows = [
        [
            f"`{form.name}`",
            paths[form.api],
            show(form.honoured),
            show(form.echoed),
            "; ".join(f"`{name}`: {why}" for name, why in form.refused.items()) or "-",
        ]
        for form in ITEM_FORMS
    ]
    assert read_table("dialects.md", "message or part | endpoint | honoured") == rows


IMAGE = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}", "x": 1}}


@pytest.mark.parametrize(
    ("api", "message", "param"),
    [
        (CHAT, {"foo": 1}, "foo"),
        (CHAT, {"name": 5}, "name"),
        (CHAT, {"content": [{"type": "text", "text": "hi", "x": None}]}, "content[0].x"),
        (CHAT, {"content": [{"type": "text", "text": "hi"}, IMAGE]}, "content[1].image_url.x"),
        (CHAT, {"content": [{"type": "file", "file": {"file_id": "f"}}]}, "content[0].file.file_id"),
        (CHAT, {"role": "assistant", "audio": {"id": "a"}}, "audio"),
        (RESPONSES, {"name": "ann"}, "name"),
        (RESPONSES, {"role": "tool"}, ""),
        (RESPONSES, {"content": [{"type": "input_text", "text": "hi", "x": 1}]}, "content[0].x"),
        (RESPONSES, {"content": [{"type": "input_file", "file_id": "f"}]}, "content[0].file_id"),
        (RESPONSES, {"content": [{"type": "input_file", "file_data": "a", "file_url": "b"}]}, ""),
        (RESPONSES, {"type": "item_reference", "id": "msg_1", "x": 1}, "x"),
    ],
)
async def test_fields_of_messages_are_not_ignored(api, message, param):
    """One that is not known is refused by its path, also in an earlier message, and starts no run."""
    agent = shop()
    async with serving(agent) as server:
        name, last = "input" if api == RESPONSES else "messages", {"role": "user", "content": "hi"}
        given = message if "type" in message else {**last, **message}
        answer = await server.post(api, json={"model": "shop", name: [given, last]})
        assert answer.json()["error"]["param"] == f"{name}[0].{param}".rstrip(".")
        assert answer.status_code == 400
    assert not agent.model.requests


async def test_echoes_of_answers_are_taken():
    """As the client returns them, with the fields that describe them; names of speakers reach the model."""
    agent = shop(*["b", "c"] * 2)
    async with serving(agent) as server, client_of(server) as client:
        reply = (await client.chat.completions.create(**ask("a"))).choices[0].message.model_dump()
        echo = {**reply, "annotations": [], "reasoning_content": "so"}
        names = [{"role": "user", "name": "ann", "content": "a"}, echo, {**echo, "name": "eve"}]
        messages = [{"role": "system", "name": "boss", "content": "Be brief."}, *names]
        await client.chat.completions.create(model="shop", messages=[*messages, {**names[0], "name": "bob"}])
        texts = [message.text for message in agent.model.requests[1].messages]
        assert texts == ["boss:\nBe brief.\nann:\na", "b", "eve:\nb", "bob:\na"]
        first = await client.responses.create(model="shop", input="a")
        items = [{"role": "user", "content": "a"}, *[each.model_dump() for each in first.output]]
        items[1] |= {"phase": "final_answer"}
        await client.responses.create(model="shop", input=[*items, {"role": "user", "status": None, "content": "d"}])
        assert [message.text for message in agent.model.requests[3].messages] == ["a", "b", "d"]


# As the front ends send them by default; Open WebUI's chat id comes with ENABLE_FORWARD_USER_INFO_HEADERS.
FRONT_ENDS = {
    "Open WebUI": {"stream": True, **ask(), "stream_options": {"include_usage": True}},
    "Open WebUI, with settings": {
        "stream": True,
        **ask(),
        "temperature": 0.8,
        "top_p": 0.9,
        "max_tokens": 128,
        "stop": ["END"],
        "seed": 0,
        "frequency_penalty": 0,
        "presence_penalty": 0,
        "logit_bias": {},
        "reasoning_effort": "medium",
    },
    "LibreChat": {**ask(), "user": "665f1c", "stream": True, "stream_options": {"include_usage": True}},
    "LibreChat, with settings": {
        **ask(),
        "temperature": 1,
        "top_p": 1,
        "presence_penalty": 0,
        "frequency_penalty": 0,
        "max_tokens": 4096,
        "n": 1,
        "user": "665f1c",
        "stream": True,
        "stream_options": {"include_usage": True},
    },
}


@pytest.mark.parametrize("body", FRONT_ENDS.values(), ids=FRONT_ENDS)
async def test_front_ends_are_served(body):
    """Requests as Open WebUI and LibreChat send them; what has no effect on the run is kept with it."""
    agent = shop("one two")
    async with serving(agent) as server:
        headers = {"authorization": "Bearer ann//run", "x-openwebui-chat-id": "chat-1"}
        answer = await server.post(CHAT, json=body, headers=headers)
        assert (answer.status_code, answer.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
        assert ('"usage"' in answer.text, answer.text[-14:]) == ("stream_options" in body, "data: [DONE]\n\n")
        [row] = await agent.runs.list()
        header = await agent.runs.header(row.id)
        assert (header.metadata.get("openai_user"), row.session) == (body.get("user"), row.session)
        assert row.session.endswith("/chat-1")


async def test_a_conversation_keeps_the_terms_of_its_open_run():
    """A run that waits for an answer gets it with equal settings and instructions; with others it is refused."""

    @tool(external=True)
    async def look_up(key: str) -> str:
        """Look a value up elsewhere."""
        raise AssertionError

    agent = shop(say("", call("look_up", key="k")), "done", tools=[look_up])
    async with serving(agent) as server:
        headers = {"x-caller": "ann//run", "x-conversation-id": "c"}

        async def send(text, system="Be brief.", **fields) -> httpx.Response:
            messages = [{"role": "system", "content": system}, {"role": "user", "content": text}]
            return await server.post(CHAT, json={"model": "shop", "messages": messages, **fields}, headers=headers)

        assert "answer here" in (await send("go", temperature=0.5)).text
        for answer in (await send("42", temperature=0.7), await send("42", system="Be long.")):
            assert (answer.status_code, answer.json()["error"]["code"]) == (409, "conflict")
        answer = await send("42", temperature=0.5)
        assert answer.json()["choices"][0]["message"]["content"] == "done"
