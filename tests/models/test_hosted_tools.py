"""Tools that the provider executes: the request, the reply, and that no effect of theirs is asked for twice."""

from __future__ import annotations

import json

import pytest

from agentfsm import Agent, MisuseError, Settings, StopReason, tool
from agentfsm.guards import Guard
from agentfsm.models import (
    Anthropic,
    Citation,
    CodeExecution,
    FileSearch,
    Gemini,
    HostedFile,
    HostedMCP,
    ImageGeneration,
    OpenAIChat,
    OpenAIResponses,
    URLContext,
    WebSearch,
)
from agentfsm.testing import LocalServer, ScriptedModel, WireReply
from tests.support.model_wires import forget_keys

USAGE = {"input_tokens": 9, "output_tokens": 7, "total_tokens": 16}
PIXEL = "iVBORw0KGgo="


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch, tmp_path):
    forget_keys(monkeypatch, tmp_path)


def response(*output):
    return WireReply(raw=json.dumps({"object": "response", "status": "completed", "output": output, "usage": USAGE}))


def text(said, *annotations):
    part = {"type": "output_text", "text": said, "annotations": list(annotations), "logprobs": []}
    return {"id": "msg_1", "type": "message", "status": "completed", "role": "assistant", "content": [part]}


def message(*content, stop="end_turn", **more):
    usage = {"input_tokens": 9, "output_tokens": 7}
    body = {"id": "msg_1", "type": "message", "role": "assistant", "model": "claude", "content": list(content)}
    return WireReply(raw=json.dumps({**body, "stop_reason": stop, "stop_sequence": None, "usage": usage, **more}))


IMAGE = {"id": "ig_1", "type": "image_generation_call", "status": "completed", "result": PIXEL, "output_format": "png"}
SEARCH = {"id": "fs_1", "type": "file_search_call", "status": "completed", "queries": ["euro"], "results": None}
PROVIDER_ITEMS = {
    "an image": IMAGE,
    "a hosted MCP call": {
        "id": "mcp_1",
        "type": "mcp_call",
        "server_label": "crm",
        "name": "charge",
        "arguments": "{}",
        "output": "charged",
        "error": None,
    },
    "a compaction": {"id": "cmp_1", "type": "compaction", "encrypted_content": "xyz"},
    "a search of tools": {"id": "ts_1", "type": "tool_search_call", "execution": "server", "status": "completed"},
    "an unknown item": {"id": "q_1", "type": "quantum_call", "status": "completed"},
}


async def run_against(kind, replies, name, **options):
    """Run an agent against a server that says these things; returns the run and the bodies of the requests."""
    with LocalServer(replies) as server:
        model = kind(name, base_url=server.base_url, api_key="key")
        async with Agent(model, settings=Settings(stream=False), **options) as agent:
            run = await agent.run("go")
        return run, [request.body for request in server.requests]


@pytest.mark.parametrize("item", PROVIDER_ITEMS.values(), ids=PROVIDER_ITEMS)
async def test_a_reply_of_provider_items_only_is_asked_once(item):
    """It is no empty reply: what the provider has done, it would do again."""
    run, bodies = await run_against(OpenAIResponses, [response(item)], "gpt-5")
    assert len(bodies) == 1
    assert run.is_over
    assert run.stop_reason is StopReason.COMPLETED
    assert len(run.hosted.calls) == 1


async def test_a_block_of_anthropic_only_is_asked_once():
    """A compaction block, for example."""
    run, bodies = await run_against(
        Anthropic,
        [message({"type": "compaction", "content": "so far"}), message({"type": "text", "text": "x"})],
        "claude",
    )
    assert len(bodies) == 1
    assert run.is_over


async def test_openai_is_asked_for_its_tools_beside_the_agents_own():
    @tool
    def pay(cents: int) -> str:
        """Pay."""
        return "paid"

    hosted = [
        WebSearch(allowed_domains=["python.org"], country="FR"),
        CodeExecution(),
        ImageGeneration(size="1024x1024"),
        FileSearch(vector_store_ids=["vs_1"], max_results=3),
        HostedMCP(server="crm", url="https://crm.example.org/mcp", authorization="tok", allowed_tools=["find"]),
    ]
    run, [body] = await run_against(OpenAIResponses, [response(text("ok"))], "gpt-5", tools=[pay, *hosted])
    assert run.output == "ok"
    own, *others = body["tools"]
    assert own["name"] == "pay"
    assert others[0]["filters"] == {"allowed_domains": ["python.org"]}
    assert [each["type"] for each in others] == [
        "web_search",
        "code_interpreter",
        "image_generation",
        "file_search",
        "mcp",
    ]
    assert others[4]["require_approval"] == "never"


async def test_the_outcome_of_hosted_tools_is_on_the_run():
    """Calls, citations, files and images, as our values."""
    cites = {"type": "url_citation", "url": "https://a.eu", "title": "A", "start_index": 0, "end_index": 2}
    file = {"type": "container_file_citation", "file_id": "f_1", "filename": "sums.csv", "container_id": "c_1"}
    search = {
        "id": "ws_1",
        "type": "web_search_call",
        "status": "completed",
        "action": {"type": "search", "query": "euro"},
    }
    run, _ = await run_against(
        OpenAIResponses, [response(search, IMAGE, text("ok", cites, file))], "gpt-5", tools=[WebSearch()]
    )
    assert [call.tool for call in run.hosted.calls] == ["web_search", "image_generation"]
    assert json.loads(run.hosted.calls[0].arguments)["query"] == "euro"
    assert run.hosted.citations == (Citation(url="https://a.eu", title="A", start=0, end=2),)
    assert run.hosted.files == (HostedFile(id="f_1", name="sums.csv", container="c_1"),)
    assert [image.url for image in run.hosted.images] == [f"data:image/png;base64,{PIXEL}"]
    assert {str(label): source.name for label, source in run.labels.items()} == {"untrusted": "web_search"}
    assert run.hosted.labels == ("untrusted",)


@pytest.mark.parametrize(
    ("tools", "item", "expected"),
    [
        ([ImageGeneration(), WebSearch()], "an image", ()),
        ([ImageGeneration(labels=["internal"])], "an image", ("internal",)),
        ([WebSearch(), HostedMCP(server="crm", url="https://a.eu/mcp")], "a hosted MCP call", ("untrusted",)),
        ([HostedMCP(server="crm", url="https://a.eu/mcp", labels=["private"])], "a hosted MCP call", ("private",)),
    ],
)
async def test_hosted_tools_that_were_used_bring_their_labels(tools, item, expected):
    """Those that the agent declares for the tool; a tool that the provider did not use brings none."""
    replies = [response(PROVIDER_ITEMS[item], text("ok"))]
    run, _ = await run_against(OpenAIResponses, replies, "gpt-5", tools=tools)
    assert tuple(run.labels) == expected


@pytest.mark.parametrize(
    ("hosted", "item", "expected"),
    [
        (FileSearch(vector_store_ids=["vs_1"]), SEARCH, ("untrusted",)),
        (FileSearch(vector_store_ids=["vs_1"], labels=["internal"]), SEARCH, ("internal",)),
        (ImageGeneration(), IMAGE, ()),
    ],
)
async def test_strict_distrusts_hosted_tools_without_labels(hosted, item, expected):
    """An image is no text; labels of the agent are a declaration."""
    replies = [response(item, text("ok"))]
    run, _ = await run_against(OpenAIResponses, replies, "gpt-5", tools=[hosted], guards=[Guard.strict()])
    assert tuple(run.labels) == expected


async def test_anthropic_is_asked_for_its_tools():
    search = {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "euro"}}
    found = {
        "type": "web_search_tool_result",
        "tool_use_id": "srvtoolu_1",
        "content": [{"type": "web_search_result", "url": "https://a.eu", "title": "A", "encrypted_content": "x"}],
    }
    cite = {"type": "web_search_result_location", "url": "https://a.eu", "title": "A", "cited_text": "17 €"}
    said = {"type": "text", "text": "17 €", "citations": [cite]}
    run, [body] = await run_against(
        Anthropic, [message(search, found, said)], "claude", tools=[WebSearch(max_uses=2), CodeExecution()]
    )
    assert body["tools"][0]["type"].startswith("web_search_")
    assert body["tools"][0]["max_uses"] == 2
    assert body["tools"][1]["type"].startswith("code_execution_")
    assert run.hosted.calls[0].tool == "web_search"
    assert run.hosted.citations[0].url == "https://a.eu"
    assert run.output == "17 €"


async def test_a_paused_reply_is_continued_with_its_blocks():
    """`pause_turn`: the next request has the blocks, and the run does not end."""
    started = {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "euro"}}
    run, bodies = await run_against(
        Anthropic,
        [message(started, stop="pause_turn"), message({"type": "text", "text": "17 €"})],
        "claude",
        tools=[WebSearch()],
    )
    assert run.output == "17 €"
    assert bodies[1]["messages"][-1] == {"role": "assistant", "content": [started]}


@pytest.mark.parametrize(
    ("item", "words"),
    [
        (
            {"id": "a_1", "type": "mcp_approval_request", "server_label": "crm", "name": "charge", "arguments": "{}"},
            "approval of crm.charge",
        ),
        (
            {"id": "ts_1", "type": "tool_search_call", "execution": "client", "call_id": "c", "status": "completed"},
            "tool_search_call",
        ),
        ({"id": "c_1", "type": "computer_call", "call_id": "c", "status": "completed"}, "computer_call"),
    ],
)
async def test_a_request_to_the_caller_ends_the_run_with_the_reason(item, words):
    """It is recorded, said, and not asked again."""
    run, bodies = await run_against(OpenAIResponses, [response(item)], "gpt-5")
    assert len(bodies) == 1
    assert run.stop_reason is StopReason.MODEL_ERROR
    assert words in run.stop_message


CUSTOM = {"index": 0, "id": "call_1", "type": "custom", "custom": {"name": "run_sql", "input": "select 1"}}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_custom_call_of_chat_completions_is_explained_as_in_responses(stream):
    """It is not asked again, and the message says which tool to leave out."""
    choice = {"index": 0, "finish_reason": "tool_calls"}
    message = {"role": "assistant", "content": None, "tool_calls": [CUSTOM]}
    body = json.dumps({"choices": [{**choice, "delta" if stream else "message": message}]})
    with LocalServer([WireReply(raw=f"data: {body}\n\ndata: [DONE]\n\n" if stream else body)]) as server:
        model = OpenAIChat("gpt-5", base_url=server.base_url, api_key="key")
        run = await Agent(model, settings=Settings(stream=stream)).run("go")
        assert len(server.requests) == 1
    assert run.stop_reason is StopReason.MODEL_ERROR
    assert "The model made a custom tool call" in run.stop_message
    assert "offer it as a function" in run.stop_message


async def test_background_is_refused_before_anything_is_sent():
    with LocalServer([]) as server:
        model = OpenAIResponses("gpt-5", base_url=server.base_url, api_key="key")
        options = Settings(extra_body={"background": True})
        with pytest.raises(MisuseError, match="background"):
            Agent(model, settings=options)
        run = await Agent(model, settings=lambda _: options).run("go")
        assert not server.requests
    assert "background" in run.stop_message


@pytest.mark.parametrize(
    ("model", "hosted", "words"),
    [
        (lambda: OpenAIChat("gpt-4o", api_key="k"), WebSearch(), "OpenAIResponses"),
        (lambda: OpenAIResponses("gpt-5", api_key="k"), URLContext(), "no 'url_context'"),
        (lambda: Gemini("gemini-3.5-flash", api_key="k"), ImageGeneration(), "no 'image_generation'"),
        (lambda: Gemini("gemini-3.5-flash", api_key="k"), WebSearch(country="FR"), "has no options"),
        (lambda: ScriptedModel("x"), WebSearch(), "executed by the provider"),
        (lambda: Anthropic("claude", api_key="k"), ImageGeneration(), "no 'image_generation'"),
        (lambda: OpenAIResponses("gpt-5", api_key="k"), WebSearch(max_uses=2), "no max_uses"),
        (
            lambda: Anthropic("claude", api_key="k"),
            WebSearch(allowed_domains=["a.b"], blocked_domains=["c.d"]),
            "one of them",
        ),
    ],
)
async def test_models_without_the_tool_refuse_it_at_once(model, hosted, words):
    """Before any request, with the remedy."""
    with pytest.raises(MisuseError, match=words):
        await Agent(model(), tools=[hosted]).run("go")


async def test_tools_in_extra_body_do_not_replace_the_agents():
    """As a value beside the agent's own tools they are refused; alone they may stay."""
    settings = Settings(extra_body={"tools": [{"type": "web_search"}]}, stream=False)
    with pytest.raises(MisuseError, match=r"WebSearch\(\)"):
        await Agent(OpenAIResponses("gpt-5", api_key="k"), tools=[WebSearch()], settings=settings).run("go")
    with LocalServer([response(text("ok"))]) as server:
        model = OpenAIResponses("gpt-5", base_url=server.base_url, api_key="k")
        assert (await Agent(model, settings=settings).run("go")).output == "ok"
        assert server.requests[0].body["tools"] == [{"type": "web_search"}]


@pytest.mark.parametrize(
    "bad",
    [
        lambda: FileSearch(vector_store_ids=[]),
        lambda: HostedMCP(server="a", url="http://a.b"),
        lambda: HostedMCP(server="", url="https://a.b"),
        lambda: WebSearch(allowed_domains="a.b"),
        lambda: WebSearch(max_uses=0),
        lambda: ImageGeneration(size=5),
    ],
)
def test_options_are_checked(bad):
    with pytest.raises(MisuseError, match=r"give|needs|has to"):
        bad()


def test_two_tools_of_one_name_are_refused():
    with pytest.raises(MisuseError, match="two tools are called 'web_search'"):
        Agent(OpenAIResponses("gpt-5", api_key="k"), tools=[WebSearch(), WebSearch(country="FR")])


def test_a_secret_is_not_shown():
    """Neither the address nor the token of a hosted server."""
    hosted = HostedMCP(server="crm", url="https://crm.example.org/mcp?key=s3cret", authorization="t0ken")
    assert "s3cret" not in repr(hosted) + json.dumps(hosted.describe())
    assert "t0ken" not in repr(hosted) + json.dumps(hosted.describe())
