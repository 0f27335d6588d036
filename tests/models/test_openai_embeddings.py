"""`OpenAIEmbedder` against a local server: batches, limits, failures and cost."""

import json
from functools import wraps

import pytest

from agentfsm import MisuseError, ModelError, ModelReplyError, ModelUnavailableError
from agentfsm.models import OpenAIEmbedder, Price
from agentfsm.models.openai.embeddings import BATCH_TOKENS, create_embedder
from tests.support.embedding_server import embed_text, serving_embeddings
from tests.support.model_wires import KEY, forget_keys


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch, tmp_path):
    forget_keys(monkeypatch, tmp_path)


@pytest.fixture
def server():
    with serving_embeddings() as server:
        yield server


@pytest.fixture
async def embedder(server):
    embedder = OpenAIEmbedder("m", dims=4, base_url=server.base_url, api_key=KEY, batch_texts=2)
    yield embedder
    await embedder.aclose()


async def test_each_text_gets_its_vector(server, embedder):
    """The vectors are in the order of the texts, whatever the server's order, in batches of the given size."""
    texts = ["a", "bb", "ccc", "dddd", "eeeee"]
    found = await embedder.embed(texts)
    assert found.vectors == tuple(tuple(embed_text(text, 4)) for text in texts)
    assert [request["input"] for request in server.requests] == [["a", "bb"], ["ccc", "dddd"], ["eeeee"]]
    assert {*server.requests[0]} == {"model", "input"}
    assert server.headers[0]["authorization"] == f"Bearer {KEY}"
    assert (found.usage.input_tokens, found.usage.estimated) == (5, False)
    assert (await embedder.embed([])).vectors == ()


async def test_the_cost_is_reported(server):
    """From the table of prices; without one the tokens are marked as unpriced."""
    for price, cost, unpriced in (
        ({"m": Price(input_usd_per_million=0.5, output_usd_per_million=0)}, 1e-6, False),
        (None, None, True),
    ):
        embedder = OpenAIEmbedder("m", dims=4, base_url=server.base_url, price=price)
        usage = (await embedder.embed(["two words"])).usage
        assert (usage.cost_usd, usage.unpriced) == (cost, unpriced)
        await embedder.aclose()


async def test_tokens_bound_a_batch(server):
    """Long texts are sent in more requests, and one that the model would not read whole is cut."""
    embedder = OpenAIEmbedder("m", dims=4, base_url=server.base_url, max_tokens=BATCH_TOKENS)
    long = "汉" * (BATCH_TOKENS * 2 // 3 + 100)
    await embedder.embed([long, long, "short"])
    assert [len(request["input"]) for request in server.requests] == [1, 2]
    assert len(server.requests[0]["input"][0]) == BATCH_TOKENS * 2 // 3
    await embedder.aclose()


async def test_a_text_that_is_too_long_is_divided(server, embedder):
    """A server with a smaller window gets the batch in parts, and the beginning of the text."""

    def answer(body):
        if max(map(len, body["input"])) > 100:
            return 400, {"error": {"message": "This model's maximum context length is 8192 tokens"}}
        server.answer = None
        try:
            return server.respond(body)
        finally:
            server.answer = answer

    server.answer = answer
    found = await embedder.embed(["short", "x" * 300])
    assert [vector[0] for vector in found.vectors] == [5, 75]


async def test_a_model_shortens_its_vectors(server):
    """The number of dimensions is sent only to models that can shorten their vectors."""
    for name, sent in (("text-embedding-3-small", 4), ("vendor/nomic-embed-text", None)):
        embedder = OpenAIEmbedder(name, dims=4, base_url=server.base_url)
        await embedder.embed(["text"])
        assert server.requests[-1].get("dimensions") == sent
        await embedder.aclose()
    assert OpenAIEmbedder("text-embedding-3-large", api_key=KEY).dims == 3072


@pytest.mark.parametrize(
    ("status", "answer", "error"),
    [
        (500, {"error": {"message": "down"}}, (ModelUnavailableError, "unavailable")),
        (401, {"error": {"message": f"bad key {KEY}"}}, (ModelError, "refused the API key")),
        (200, {"data": []}, (ModelReplyError, "0 vectors for 1 texts")),
        (200, {"data": [{"index": 0, "embedding": ["x"]}]}, (ModelReplyError, "something else than numbers")),
        (200, b'{"data": [{"index": 0, "embedding": [1, 2, 3, NaN]}]}', (ModelReplyError, "not finite")),
        (200, {"data": [{"index": 3, "embedding": [1]}]}, (ModelReplyError, "1 vectors for 1 texts")),
        (200, b"<html>", (ModelReplyError, "not JSON")),
        (200, {"data": [{"index": 0, "embedding": [1.0]}]}, (MisuseError, "dims=1")),
        (200, {"error": {"message": "in band"}}, (ModelError, "in band")),
    ],
)
async def test_failures(server, embedder, status, answer, error):
    """Each failure has the error of its kind, which says what to do and shows no key."""
    server.answer = lambda _body: (status, answer)
    with pytest.raises(error[0], match=error[1]) as caught:
        await embedder.embed(["text"])
    assert KEY not in str(caught.value)


async def test_requests_that_fail_are_paid_with_those_before(server, embedder):
    """An answer that cannot be used was billed, and one with an error status was not."""
    bodies = []

    def answer(body):
        bodies.append(body)
        if len(bodies) % 2:
            return 200, {
                "data": [{"index": place, "embedding": [1] * 4} for place in (0, 1)],
                "usage": {"prompt_tokens": 7},
            }
        return (200, {"data": []}) if len(bodies) == 2 else (500, {})

    server.answer = answer
    for input_tokens, estimated in ((7 + 200, True), (7, False)):
        with pytest.raises(ModelError) as caught:
            await embedder.embed(["a", "b", "word" * 150])
        assert (caught.value.usage.input_tokens, caught.value.usage.estimated) == (input_tokens, estimated)


async def test_a_server_that_is_away():
    """A refused connection is an error that a retry may mend."""
    with serving_embeddings() as server:
        pass
    embedder = OpenAIEmbedder("m", dims=4, base_url=server.base_url)
    with pytest.raises(ModelUnavailableError, match="Cannot connect"):
        await embedder.embed(["text"])
    await embedder.aclose()


def test_names(monkeypatch):
    """A name has a provider with OpenAI's API and a model whose dimensions are known."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    assert create_embedder("openai:text-embedding-3-small").dims == 1536
    local = create_embedder("ollama:nomic-embed-text")
    assert (local.dims, local._endpoint._client_options["api_key"]) == (768, "none")
    for name, words in (
        ("openai:own", "dims"),
        ("nobody:m", "does not name an embedder"),
        ("openai:", "does not name"),
        ("mistral:mistral-embed", "MISTRAL_API_KEY"),
    ):
        with pytest.raises(MisuseError, match=words):
            create_embedder(name)
    for wrong in ({"dims": 0}, {"max_tokens": 0}, {"batch_texts": 0}, {"timeout_s": 0}):
        with pytest.raises(MisuseError, match="OpenAIEmbedder"):
            OpenAIEmbedder("text-embedding-3-small", **wrong)


async def test_tools_that_patch_the_sdk_see_the_request(server, embedder, monkeypatch):
    """A tracer that replaces `create` gets the call, and the vectors are the same."""
    from openai.resources.embeddings import AsyncEmbeddings  # noqa: PLC0415  as a tracer finds it

    seen, create = [], AsyncEmbeddings.create

    @wraps(create)
    async def traced(self, **arguments):
        seen.append(arguments["input"])
        return await create(self, **arguments)

    monkeypatch.setattr(AsyncEmbeddings, "create", traced)
    found = await embedder.embed(["text"])
    assert seen == [["text"]]
    assert found.vectors == (tuple(embed_text("text", 4)),)
    assert json.dumps(server.requests[0]["input"]) == '["text"]'
