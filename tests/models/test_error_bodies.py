"""Bodies of errors as servers send them: their words are quoted, and their meaning decides what happens next."""

import json

import httpx2
import pytest

from agentfsm import (
    Agent,
    ContextTooLongError,
    Limits,
    ModelError,
    ModelReplyError,
    ModelUnavailableError,
    Settings,
    tool,
)
from agentfsm.models import OpenAIChat
from agentfsm.models.provider_errors import read_error_message
from agentfsm.stores import MemoryStore
from agentfsm.testing import LocalServer, WireReply, call, say
from tests.support.model_wires import REQUEST

FORBIDDEN = {"type": "extra_forbidden", "loc": ["body", "seed"], "msg": "Extra inputs are not permitted", "input": 1}
MISSING = {"type": "missing", "loc": ["body", "messages", 0, "content"], "msg": "Field required", "input": {}}
FORBIDDEN_WORDS = "body.seed: Extra inputs are not permitted"
UNSIGNED = "Function call is missing a thought_signature in functionCall parts."
GOOGLE = {"error": {"code": 400, "message": UNSIGNED, "status": "INVALID_ARGUMENT"}}
OPENROUTER = {"error": {"message": "Provider returned error", "code": 400}, "user_id": "user_2q"}


def openrouter(raw, **more):
    return {"error": {**OPENROUTER["error"], "metadata": {"raw": raw, "provider_name": "Google", **more}}}


# Each as it is in a public report of that server's error, shortened.
BODIES = {
    "openai": ({"error": {"message": "Bad.", "type": "invalid_request_error", "param": "seed", "code": None}}, "Bad."),
    "gemini, a list": ([GOOGLE], UNSIGNED),
    "fastapi": ({"detail": [FORBIDDEN, MISSING]}, f"{FORBIDDEN_WORDS}; body.messages.0.content: Field required"),
    "fastapi, a text": ({"detail": "Not Found"}, "Not Found"),
    "mistral": (
        {"object": "error", "message": {"detail": [FORBIDDEN]}, "type": "invalid_request_error", "code": None},
        FORBIDDEN_WORDS,
    ),
    "mistral, a text of JSON": (
        {"object": "error", "message": json.dumps({"detail": [FORBIDDEN]}), "type": "internal_error_proxy"},
        FORBIDDEN_WORDS,
    ),
    "mistral, both": (
        {"object": "Error", "detail": [FORBIDDEN], "message": [FORBIDDEN], "code": 3001},
        FORBIDDEN_WORDS,
    ),
    "openrouter": (openrouter(json.dumps(GOOGLE)), f"Provider returned error: Google: {UNSIGNED}"),
    "openrouter, parsed": (openrouter([GOOGLE]), f"Provider returned error: Google: {UNSIGNED}"),
    "openrouter, a text": (
        openrouter("z-ai/glm is temporarily rate-limited upstream.", is_byok=False),
        "Provider returned error: Google: z-ai/glm is temporarily rate-limited upstream.",
    ),
    "openrouter, nothing": (OPENROUTER, "Provider returned error"),
    "ollama": ({"error": "model 'x' not found"}, "model 'x' not found"),
    "xai": ({"code": "Client specified an invalid argument", "error": "Model not found"}, "Model not found"),
    "cloudflare": ({"errors": [{"message": "AiError: no such model", "code": 5007}], "success": False}, "AiError"),
    "groq": (
        {"error": {"message": "Failed to call a function.", "code": "x", "failed_generation": "<function=look>"}},
        "Failed to call a function.: <function=look>",
    ),
    "a page": ("<html>502 Bad Gateway</html>", "<html>502 Bad Gateway</html>"),
}


async def fail(kind, body, status=400):
    """Ask a server that answers with the body; return the error, which has exactly this class."""
    text = body if isinstance(body, str) else json.dumps(body)
    transport = httpx2.MockTransport(lambda _request: httpx2.Response(status, text=text))
    async with httpx2.AsyncClient(transport=transport) as client:
        model = OpenAIChat("m", base_url="http://a.test/v1", http_client=client)
        with pytest.raises(ModelError) as caught:
            await model.reply(REQUEST)
    assert type(caught.value) is kind, caught.value
    return str(caught.value)


@pytest.mark.parametrize("name", BODIES)
async def test_the_words_of_the_server_are_quoted(name):
    """The message is found in the shapes of many servers, without the braces around it."""
    body, words = BODIES[name]
    error = await fail(ModelError, body)
    assert f"(400: {words}" in error
    assert "{" not in error


@pytest.mark.parametrize("body", [{}, [], None, 7, [[]], {"error": {}}, {"error": {"message": 5}}, {"message": [None]}])
def test_a_body_without_words_has_no_message(body):
    """Other types, and objects without a message, are no message."""
    assert read_error_message(body) == ""


def test_hostile_bodies_are_bounded():
    """A deep or long body takes little time and gives a short message, or its own text."""
    deep = "x"
    for _ in range(50):
        deep = {"error": deep}
    assert read_error_message(deep) == ""
    assert read_error_message([{"msg": "x"}] * 100_000) == "; ".join("x" * 8)
    assert read_error_message("[" * 100_000).startswith("[[")
    assert read_error_message('{"message": "\ud800"}')


# Of Gemini, Vertex, Ollama, TGI and Together, with the status of each.
OVERFLOWS = [
    (
        400,
        [{"error": {"code": 400, "message": "The input token count (1206480) exceeds the maximum number of tokens."}}],
    ),
    (400, [{"error": {"message": "The input token count is 40000 but model only supports up to 32768."}}]),
    (400, {"error": {"message": "prompt too long; exceeded max context length by 12 tokens"}}),
    (400, {"error": "the input length exceeds the context length"}),
    (
        422,
        {"error": "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 2048. Given: 2019 `inputs`"},
    ),
    (422, {"error": "Input validation error: `inputs` must have less than 1024 tokens. Given: 1500"}),
    (400, {"error": {"message": "The input (9000 tokens) is longer than the model's context length (8192 tokens)."}}),
    (422, {"error": {"message": "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 8193."}}),
    (400, openrouter(json.dumps({"error": {"message": "prompt is too long: 210000 tokens > 200000 maximum"}}))),
    (
        400,
        {
            "object": "error",
            "message": "Prompt contains 40000 tokens, too large for model with 32768 maximum context length",
        },
    ),
]


@pytest.mark.parametrize(("status", "body"), OVERFLOWS)
async def test_a_request_beyond_the_window_is_recognised(status, body):
    """The history can then be compacted; OpenRouter has the words of the server behind it."""
    assert "compact" in await fail(ContextTooLongError, body, status)


async def test_a_limit_of_the_answer_is_no_overflow():
    """A setting that is too large is not mended by a shorter history."""
    await fail(ModelError, {"error": "Input validation error: `max_new_tokens` must be <= 512. Given: 600"}, 422)


@pytest.mark.parametrize(
    "text",
    [
        '[{"error": {"code": 503, "message": "Overloaded."}}]',
        '{"object": "error", "message": "Overloaded.", "code": 503}',
    ],
    ids=["gemini", "vllm"],
)
@pytest.mark.parametrize("streamed", [False, True])
async def test_errors_with_status_200_in_other_shapes(text, streamed):
    """A list, and an object without an outer `error`, are errors as well."""
    with LocalServer([WireReply(raw=f"data: {text}\n\n" if streamed else text)]) as server:
        model = OpenAIChat("m", base_url=server.base_url)
        with pytest.raises(ModelUnavailableError, match=r"\(503: Overloaded\.\)"):
            await model.reply(REQUEST, [].append if streamed else None)
        await model.aclose()


TOOL_USE_FAILED = {
    "message": "Failed to call a function. Please adjust your prompt. See 'failed_generation' for more details.",
    "type": "invalid_request_error",
    "code": "tool_use_failed",
    "failed_generation": "<function=look {'at': 'x'}</function>",
}


@pytest.mark.parametrize(
    "failed",
    [
        WireReply(status=400, error=TOOL_USE_FAILED),
        WireReply(raw=f'data: {{"error": {json.dumps(TOOL_USE_FAILED)}}}\n\n'),
    ],
)
async def test_a_call_that_groq_cannot_read_is_asked_for_again(failed):
    """The fault is the model's, and its next attempt is mostly right: the run goes on."""

    @tool(read_only=True)
    async def look(at: str) -> str:
        """Look there."""
        return f"saw {at}"

    with LocalServer([failed, say("", call("look", at="x")), say("Seen.")]) as server:
        model, limits = OpenAIChat("m", base_url=server.base_url), Limits(retry_wait_max_s=0.01)
        async with Agent(model, tools=[look], store=MemoryStore(), limits=limits) as agent:
            run = await agent.run("Look.", settings=Settings(stream=True))
            await model.aclose()
    assert (run.output, len(server.requests)) == ("Seen.", 3)


async def test_the_error_of_an_unreadable_call_quotes_it():
    """The text in which the server found no call is part of the message."""
    error = await fail(ModelReplyError, {"error": TOOL_USE_FAILED})
    assert "<function=look {'at': 'x'}</function>" in error
    await fail(ModelReplyError, {"error": {"message": "x", "code": "json_validate_failed"}})
