"""Gemini over google's own package, against a server with its REST API."""

import base64
import json
from collections.abc import Iterator

import anyio
import pytest

from agentfsm import Agent, ImagePart, Limits, MisuseError, Settings, TextPart, UserMessage, tool
from agentfsm.models import Citation, CodeExecution, Gemini, URLContext, WebSearch, resolve
from agentfsm.planning import Planner
from agentfsm.testing import ScriptedModel, call, say
from tests.support.checks import HANG_S
from tests.support.google_server import USAGE, Google, reply, serve_google

SIGNATURE = base64.b64encode(b"signed by google").decode()


CALL = {"functionCall": {"name": "look", "args": {"place": "Rome"}}, "thoughtSignature": SIGNATURE}
THOUGHT = {"text": "I have to look.", "thought": True}


@pytest.fixture
def google() -> Iterator[Google]:
    """A server that answers with the next reply, whole or as events."""
    with serve_google() as google:
        yield google


@tool(read_only=True)
def look(place: str) -> str:
    """Look somewhere."""
    return f"sunny in {place}"


async def run_agent(google, prompt="How is Rome?", **options):
    """Run an agent on the server's replies."""
    model = Gemini("gemini-3-pro", api_key="key-of-google", base_url=google.url)
    with anyio.fail_after(HANG_S):
        async with Agent(model, tools=[look], **options) as agent:
            return await agent.run(prompt)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_run_with_a_call(google, stream):
    """The call runs, its signature goes back, and the usage has thoughts and the cache."""
    google.replies = [reply(THOUGHT, CALL), reply({"text": "It is sunny."})]
    if stream:
        pieces = [
            {"candidates": [{"content": {"role": "model", "parts": [{"text": text}]}}]} for text in ("It is ", "")
        ]
        google.replies = [[reply(THOUGHT, CALL)], [*pieces, reply({"text": "sunny."})]]
    run = await run_agent(google, instructions="Be short.", settings=Settings(stream=stream, max_tokens=99))
    assert run.output == "It is sunny."
    assert [(each.name, each.outcome) for each in run.calls] == [("look", "done")]
    assert (run.usage.input_tokens, run.usage.output_tokens) == (40, 24)
    assert (run.usage.cached_tokens, run.usage.reasoning_tokens) == (8, 14)
    first, second = google.seen
    assert first["key"] == "key-of-google"
    assert "gemini-3-pro" in first["path"]
    assert first["systemInstruction"]["parts"][0]["text"].startswith("Be short.")
    assert first["generationConfig"]["maxOutputTokens"] == 99
    [declared] = first["tools"][0]["functionDeclarations"]
    assert declared["name"] == "look"
    assert (
        next(declared[name] for name in declared if name.startswith("parameters"))["properties"]["place"]["type"]
        == "string"
    )
    assert [each["role"] for each in second["contents"]] == ["user", "model", "user"]
    assert second["contents"][1]["parts"][-1]["thoughtSignature"] == SIGNATURE
    answer = second["contents"][2]["parts"][0]["functionResponse"]
    assert answer["name"] == "look"
    assert "sunny in Rome" in answer["response"]["output"]


async def test_parallel_calls_are_answered_together(google):
    """Their results stand in one content, as the API wants them."""
    google.replies = [reply(CALL, {"functionCall": {"name": "look", "args": {"place": "Oslo"}}}), reply({"text": "ok"})]
    await run_agent(google)
    assert [len(each["parts"]) for each in google.seen[1]["contents"]] == [1, 2, 2]


async def test_a_response_has_the_id_that_gemini_gave_its_call(google):
    """And none where the call had none."""
    named = {**CALL, "functionCall": {**CALL["functionCall"], "id": "gjl2yj5t"}}
    google.replies = [reply(named), reply(CALL), reply({"text": "ok"})]
    await run_agent(google)
    contents = google.seen[2]["contents"]
    assert contents[1]["parts"][0]["functionCall"]["id"] == "gjl2yj5t"
    answered = [contents[at]["parts"][0]["functionResponse"].get("id") for at in (2, 4)]
    assert answered == ["gjl2yj5t", None]


async def test_edited_arguments_are_sent_without_the_signature_of_others(google):
    """The model reads the call that ran, and not the one that it wished for."""

    @tool(requires_approval=True)
    def go(place: str) -> str:
        """Go somewhere."""
        return f"went to {place}"

    wished = {"functionCall": {"name": "go", "args": {"place": "Rome"}}, "thoughtSignature": SIGNATURE}
    google.replies = [reply(wished), reply({"text": "ok"})]
    model = Gemini("gemini-3-pro", api_key="k", base_url=google.url)
    async with Agent(model, tools=[go]) as agent:
        run = await agent.run("Go.")
        await agent.approve(run.id, run.pending[0].call_id, arguments={"place": "Oslo"})
        run = await agent.resume(run.id)
    assert run.output == "ok"
    sent = google.seen[1]["contents"][1]["parts"][0]
    assert sent["functionCall"]["args"] == {"place": "Oslo"}
    assert base64.b64decode(sent["thoughtSignature"]) == b"skip_thought_signature_validator"


async def test_a_call_of_another_model_has_the_signature_that_is_not_checked(google):
    """Gemini 3 refuses a call without one."""
    google.replies = [reply({"text": "ok"})]
    first = await Agent(ScriptedModel(say("", call("look", place="Rome")), "sunny"), tools=[look]).run("How is Rome?")
    model = Gemini("gemini-3-pro", api_key="k", base_url=google.url)
    async with Agent(model, tools=[look]) as agent:
        await agent.run("And now?", messages=first.messages)
    part = google.seen[0]["contents"][1]["parts"][0]
    assert base64.b64decode(part["thoughtSignature"]) == b"skip_thought_signature_validator"


async def test_an_image_is_sent_inline(google):
    """With its type."""
    google.replies = [reply({"text": "a cat"})]
    await run_agent(google, [TextPart(text="What is it?"), ImagePart.of(b"\x89PNG\r\n\x1a\n")])
    assert google.seen[0]["contents"][0]["parts"][1]["inlineData"].items() >= {("mime_type", "image/png")}


@pytest.mark.parametrize(
    ("answer", "reason", "words"),
    [
        (
            (400, {"error": {"code": 400, "message": "bad schema", "status": "INVALID_ARGUMENT"}}),
            "model_error",
            "bad schema",
        ),
        (
            (401, {"error": {"code": 401, "message": "no key", "status": "UNAUTHENTICATED"}}),
            "model_error",
            "GEMINI_API_KEY",
        ),
        (reply(finish="SAFETY"), "model_error", ""),
        (reply({"text": "It is"}, finish="MODEL_ARMOR"), "model_error", "filter"),
        ({"promptFeedback": {"blockReason": "SAFETY"}, "usageMetadata": USAGE}, "model_error", ""),
    ],
)
async def test_a_refusal_ends_the_run(google, answer, reason, words):
    """At once, with the reason of the API."""
    google.replies = [answer]
    run = await run_agent(google)
    assert run.stop_reason == reason
    assert words in run.stop_message


@pytest.mark.parametrize(
    "answer",
    [(503, {"error": {"code": 503, "message": "overloaded"}}), reply(finish="MALFORMED_FUNCTION_CALL"), {}],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_what_may_pass_is_asked_again(google, answer, stream):
    """An overload, a reply that is none, and one without an end."""
    google.replies = [answer, reply({"text": "It is sunny."})]
    limits = Limits(retry_wait_s=0.001)
    run = await run_agent(google, limits=limits, settings=Settings(stream=stream))
    assert run.output == "It is sunny."
    assert len(google.seen) == 2


def test_the_prefix_and_the_key(monkeypatch):
    """`google:` names it; the error for a missing key says what to set."""
    monkeypatch.setenv("GOOGLE_API_KEY", "k")
    assert isinstance(resolve("google:gemini-2.5-flash"), Gemini)
    monkeypatch.delenv("GOOGLE_API_KEY")
    monkeypatch.delenv("GEMINI_API_KEY", raising=False)
    with pytest.raises(MisuseError, match="set GEMINI_API_KEY"):
        Gemini("gemini-2.5-flash")


@pytest.mark.parametrize(
    ("settings", "words"),
    [({"parallel_tool_calls": False}, "cannot limit a reply"), ({"reasoning_effort": "xhigh"}, "no reasoning effort")],
)
def test_a_setting_that_the_api_lacks_is_refused(settings, words):
    """Before a request."""
    assert words in Gemini("m", api_key="k").unsupported_settings(Settings(**settings))


def test_a_part_that_google_cannot_fetch_is_refused():
    """It fetches from its own storage only."""
    model = Gemini("m", api_key="k")
    assert "ImagePart.of(data)" in model.unsupported_part(ImagePart(url="https://example.org/cat.png"))
    assert UserMessage(parts=(TextPart(text="x"),)).text == "x"


async def test_a_plan_and_a_reminder_between_signed_calls(google):
    """Steps are no calls of the model, which would need signatures; their results are a note of the user's side."""
    step = {"id": 1, "tool": "look", "arguments": {"place": "Oslo"}}
    plan = reply({"text": json.dumps({"steps": [step]})})
    google.replies = [plan, reply(THOUGHT, CALL), reply({"text": "Sunny in both."})]
    run = await run_agent(google, planner=Planner(), reminder="Be brief.")
    assert run.output == "Sunny in both."
    _, first, second = (each["contents"] for each in google.seen)
    assert [each["role"] for each in first] == ["user"]
    assert "[Plan] Results" in first[0]["parts"][1]["text"]
    assert first[0]["parts"][-1]["text"] == "<system>Be brief.</system>"
    assert [each["role"] for each in second] == ["user", "model", "user"]
    assert second[1]["parts"][-1]["thoughtSignature"] == SIGNATURE
    assert list(second[2]["parts"][0]) == ["functionResponse"]
    called = [part for each in second for part in each["parts"] if "functionCall" in part]
    assert [part["functionCall"]["args"] for part in called] == [{"place": "Rome"}]


# Google's own tools, in the forms of its documentation.

PYTHON = {"executableCode": {"language": "PYTHON", "code": "print(6 * 7)"}}
RESULT = {"codeExecutionResult": {"outcome": "OUTCOME_OK", "output": "42"}}
GROUNDING = {
    "webSearchQueries": ["rome weather"],
    "groundingChunks": [{"web": {"uri": "https://a.eu", "title": "A"}}, {"web": {"uri": "https://b.eu", "title": "B"}}],
    "groundingSupports": [
        {"segment": {"startIndex": 0, "endIndex": 11, "text": "Ça va à Rome."}, "groundingChunkIndices": [0, 1]},
        {"segment": {"text": "It is sunny."}, "groundingChunkIndices": [1, 9]},
    ],
}
PAGES = {
    "urlMetadata": [
        {"retrievedUrl": "https://a.eu", "urlRetrievalStatus": "URL_RETRIEVAL_STATUS_SUCCESS"},
        {"retrievedUrl": "https://c.eu", "urlRetrievalStatus": "URL_RETRIEVAL_STATUS_PAYWALL"},
    ]
}


async def ask_google(google, *tools, name="gemini-3.5-flash", **options):
    """Run an agent with these tools."""
    with anyio.fail_after(HANG_S):
        async with Agent(Gemini(name, api_key="k", base_url=google.url), tools=tools, **options) as agent:
            return await agent.run("How is Rome?")


@pytest.mark.parametrize("stream", [False, True])
async def test_the_outcome_of_googles_own_tools_is_on_the_run(google, stream):
    """Calls, citations, and images that code has drawn; the texts of strangers label the run."""
    drawn = {"inlineData": {"mimeType": "image/png", "data": base64.b64encode(b"\x89PNG\r\n\x1a\n").decode()}}
    said = [{"text": "Ça va à Rome. "}, {"text": "It is sunny."}]
    answer = reply(PYTHON, RESULT, drawn, *said)
    answer["candidates"][0] |= {"groundingMetadata": GROUNDING, "urlContextMetadata": PAGES}
    begun = {"candidates": [{"content": {"role": "model", "parts": [PYTHON, RESULT, drawn, said[0]]}}]}
    ended = reply(said[1])
    ended["candidates"][0] |= {"groundingMetadata": GROUNDING, "urlContextMetadata": PAGES}
    google.replies = [[begun, ended] if stream else answer]
    own = (WebSearch(), URLContext(), CodeExecution())
    run = await ask_google(google, *own, settings=Settings(stream=stream))
    assert google.seen[0]["tools"] == [{"googleSearch": {}}, {"urlContext": {}}, {"codeExecution": {}}]
    assert "toolConfig" not in google.seen[0]
    assert run.output == "Ça va à Rome. It is sunny."
    assert [(each.tool, each.output, each.error) for each in run.hosted.calls] == [
        ("code_execution", "42", None),
        ("web_search", "", None),
        ("url_context", "", None),
        ("url_context", "", "URL_RETRIEVAL_STATUS_PAYWALL"),
    ]
    assert run.hosted.citations == (
        Citation(url="https://a.eu", title="A", start=0, end=13),
        Citation(url="https://b.eu", title="B", start=0, end=13),
        Citation(url="https://b.eu", title="B", start=14, end=26),
    )
    assert [image.url[:22] for image in run.hosted.images] == ["data:image/png;base64,"]
    assert {str(label) for label in run.labels} == {"untrusted"}


async def test_googles_own_tools_stand_beside_those_of_the_agent(google):
    """From Gemini 3 on: each part of such a reply goes back as it came, with its signature."""
    searched = {"toolCall": {"id": "s1", "toolType": "GOOGLE_SEARCH_WEB", "args": {"queries": ["rome"]}}}
    found = {"toolResponse": {"id": "s1", "toolType": "GOOGLE_SEARCH_WEB", "response": {"hits": 3}}}
    google.replies = [reply({**searched, "thoughtSignature": SIGNATURE}, found, CALL), reply({"text": "ok"})]
    run = await ask_google(google, look, WebSearch())
    first, second = google.seen
    assert first["toolConfig"] == {"includeServerSideToolInvocations": True}
    assert [list(each) for each in first["tools"]] == [["googleSearch"], ["functionDeclarations"]]
    sent = second["contents"][1]["parts"]
    assert [each.get("thoughtSignature") for each in sent] == [SIGNATURE, None, SIGNATURE]
    assert sent[0]["toolCall"].items() >= {"id": "s1"}.items()
    (called,) = run.hosted.calls
    assert (called.tool, json.loads(called.arguments), json.loads(called.output)) == (
        "web_search",
        {"queries": ["rome"]},
        {"hits": 3},
    )


async def test_older_models_refuse_to_combine_them(google):
    """Before a request, with the remedy."""
    run = await ask_google(google, look, CodeExecution(), name="gemini-2.5-flash")
    assert not google.seen
    assert "use a model from Gemini 3 on, or leave out CodeExecution()" in run.stop_message


async def test_code_that_failed_is_an_error_of_its_call(google):
    """With the output of the interpreter."""
    failed = {"codeExecutionResult": {"outcome": "OUTCOME_FAILED", "output": "ZeroDivisionError"}}
    google.replies = [reply(PYTHON, failed, {"text": "It failed."})]
    run = await ask_google(google, CodeExecution())
    assert [(each.arguments, each.output, each.error) for each in run.hosted.calls] == [
        ("print(6 * 7)", "", "ZeroDivisionError")
    ]
