"""Where a server may send a request: on within its own origin, and nowhere else."""

from __future__ import annotations

import httpx
import httpx2
import pytest

from agentfsm import ModelError
from agentfsm.models import Anthropic, OpenAIChat, OpenAIResponses
from agentfsm.testing import LocalServer, WireReply, say
from tests.support.model_wires import REQUEST, both_ways

KEY = "sk-very-secret-key"
ADAPTERS = [OpenAIChat, OpenAIResponses, Anthropic]

each_adapter = pytest.mark.parametrize("adapter", ADAPTERS)


def redirect(location, status=307):
    """Return an answer that sends the request elsewhere."""
    return WireReply(status=status, raw="", headers={"location": location})


def path_of(adapter):
    """Return where an adapter asks."""
    return adapter.path if adapter.path.startswith("/v1") else f"/v1{adapter.path}"


async def refusal(adapter, server, *, streamed=False, **options):
    """Ask, and return the words of the error; it is no error that is worth a retry, and does not show the key."""
    model = adapter("m", base_url=server.base_url, api_key=KEY, headers={"Api-Key": "azure-secret"}, **options)
    with pytest.raises(ModelError) as caught:
        await model.reply(REQUEST, [].append if streamed else None)
    await model.aclose()
    assert type(caught.value) is ModelError
    assert KEY not in str(caught.value)
    return str(caught.value)


@each_adapter
@both_ways
@pytest.mark.parametrize("name", ["localhost", "127.0.0.1"])
async def test_a_conversation_does_not_follow_to_another_origin(adapter, streamed, name):
    """Another host or another port gets neither the conversation nor a key, and the error names where it would be."""
    with LocalServer(lambda _body: say("stolen")) as other:
        there = f"{other.base_url.replace('127.0.0.1', name).removesuffix('/v1')}{path_of(adapter)}"
        secret = there.replace("://", "://ann:hunter2@") + "?token=hunter2"
        with LocalServer(lambda _body: redirect(secret)) as server:
            words = await refusal(adapter, server, streamed=streamed)
            assert f"(307: {there}" in words
            assert "Give the server's new address as base_url" in words
            assert "hunter2" not in words
            assert len(server.requests) == 1
        assert other.requests == ()


@pytest.mark.parametrize(
    ("adapter", "library"), [(OpenAIChat, httpx), *((adapter, httpx2) for adapter in ADAPTERS)], ids=str
)
async def test_a_client_of_ones_own_does_not_follow_either(adapter, library):
    """Also where that client follows redirects by itself."""
    with LocalServer(lambda _body: say("stolen")) as other:
        with LocalServer(lambda _body: redirect(other.base_url)) as server:
            async with library.AsyncClient(follow_redirects=True) as client:
                assert f"(307: {other.base_url}" in await refusal(adapter, server, http_client=client)
        assert other.requests == ()


@each_adapter
@both_ways
@pytest.mark.parametrize("status", [307, 308])
@pytest.mark.parametrize("is_relative", [False, True])
async def test_a_redirect_within_the_origin_is_followed(adapter, streamed, status, is_relative):
    """The same question goes on to another path of the same server."""
    answers = []
    with LocalServer(lambda _body: answers.pop(0)) as server:
        base = "" if is_relative else server.base_url.removesuffix("/v1")
        answers += [redirect(f"{base}{path_of(adapter)}", status), say("here")]
        model = adapter("m", base_url=server.base_url, api_key=KEY)
        assert (await model.reply(REQUEST, [].append if streamed else None)).text == "here"
        await model.aclose()
        first, second = server.requests
        assert first.body == second.body


@each_adapter
@pytest.mark.parametrize(
    ("answer", "asked", "words"),
    [
        (redirect("/v2", 301), 1, "(301: http://127.0.0.1"),
        (redirect("/v2", 302), 1, "(302: http://127.0.0.1"),
        (redirect("/v2", 303), 1, "(303: http://127.0.0.1"),
        (redirect("https://127.0.0.1/v2"), 1, "(307: https://127.0.0.1/v2"),
        (WireReply(status=307, raw=""), 1, "(307: "),
        (None, 6, "(307: http://127.0.0.1"),
    ],
    ids=["301", "302", "303", "scheme", "nowhere", "circle"],
)
async def test_a_redirect_that_leads_nowhere_says_so(adapter, answer, asked, words):
    """A method that would become GET, another scheme, no address, and a circle, are errors with the address."""
    with LocalServer(lambda _body: answer or redirect(path_of(adapter))) as server:
        assert words in await refusal(adapter, server)
        assert len(server.requests) == asked
