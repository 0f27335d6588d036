"""Servers far away that refuse, break off and flood, end to end over sockets: a clear result, and the run goes on."""

import socket
from contextlib import nullcontext

import anyio
import pytest

from agentfsm import ErrorType, MisuseError, Outcome
from agentfsm.mcp import MCPServer, MCPServerError
from agentfsm.mcp.connection import http_client
from tests.support.mcp_calls import one_call, until
from tests.support.misbehaving_http import serving


def far(server, **options):
    """Return the server as an agent knows it."""
    return MCPServer.http(server.url, name="rude", confirm=False, **options)


@pytest.mark.parametrize(
    ("habit", "error_type", "words"),
    [
        (401, ErrorType.NOT_PERMITTED, "does not accept our credentials: HTTP 401 Unauthorized"),
        (403, ErrorType.NOT_PERMITTED, "does not allow this call: HTTP 403 Forbidden"),
        (405, ErrorType.UNAVAILABLE, "does not accept calls: HTTP 405"),
        (500, ErrorType.UNAVAILABLE, "is having trouble: HTTP 500"),
        (503, ErrorType.UNAVAILABLE, "It asks to wait 7 s"),
        (529, ErrorType.UNAVAILABLE, "is having trouble: HTTP 529)"),
        (
            "html",
            ErrorType.TOOL,
            "violates the protocol: Unexpected content type: text/html",
        ),
        ("accepts", ErrorType.TOOL, "answered a request with 202 Accepted. The effect of 'act' may have happened"),
        ("rubbish", ErrorType.TOOL, "Failed to parse JSON response. The effect"),
        ("elsewhere", ErrorType.UNAVAILABLE, "Redirect to http://other.invalid/mcp not followed"),
        ("packed", ErrorType.TOOL, "it is compressed, although uncompressed"),
        ("endless-json", ErrorType.TOOL, "too long: it has more than 2 MiB"),
        ("breaks-off", None, "was lost during the call: RemoteProtocolError"),
        ("hangs-up", None, "was lost during the call: RemoteProtocolError"),
        ("event-and-gone", None, "SSE stream ended without a response"),
    ],
)
async def test_what_a_server_does_to_a_call_is_told_in_words(habit, error_type, words, monkeypatch):
    """A call that fails is a result that names the cause and what to do, and the run goes on to its end."""
    monkeypatch.setattr(http_client, "MESSAGE_BYTES", 2 << 20)
    with serving(habit) as server:
        (result,) = await one_call(far(server))
    assert (result.outcome, result.error_type, result.attempts) == (Outcome.FAILED, error_type, 1)
    assert words in result.content


async def test_an_event_without_end_is_given_up(monkeypatch):
    """One event may not be longer than a message, and the server is hung up on."""
    monkeypatch.setattr("agentfsm.mcp.connection.transports.MESSAGE_BYTES", 2 << 20)
    with serving("endless-event") as server:
        (result,) = await one_call(far(server))
        assert server.cut_off.wait(timeout=20)
    assert "too long: SSE stream failed" in result.content


async def test_ten_megabytes_come_through():
    """Also as one event."""
    with serving("big") as server:
        (result,) = await one_call(far(server))
    assert (result.outcome, len(result.content)) == (Outcome.DONE, 10_000_000)


@pytest.mark.parametrize("habit", ["forgets", "busy-once"])
async def test_what_was_refused_is_tried_again(habit):
    """A session that was forgotten, or too many requests: nothing was done, so any tool may be called again."""
    with serving(habit) as server:
        (result,) = await one_call(far(server))
        handshakes = sum(message["method"] == "initialize" for message in server.heard)
    assert (result.outcome, result.attempts) == (Outcome.DONE, 2)
    assert handshakes == (2 if habit == "forgets" else 1)


async def test_too_many_requests_are_told_of_with_the_wait():
    """What the server asks to wait is longer than the call has, so the model is told."""
    with serving(429) as server:
        (result,) = await one_call(far(server, timeout_s=5))
    assert (result.error_type, result.attempts) == (ErrorType.RATE_LIMITED, 1)
    assert "It asks to wait 7 s. Nothing was done." in result.content


def calls_of(server):
    return sum(message.get("method") == "tools/call" for message in server.heard)


@pytest.mark.parametrize("status", [400, 401, 403, 404, 405, 429, 503])
@pytest.mark.parametrize("habit", ["taken", "asks"])
async def test_a_call_that_was_taken_is_not_made_again_for_what_follows_it(habit, status):
    """What fetches the rest of its answer, or answers the server's question, is refused, and not the call."""
    with serving(f"{habit}-{status}") as server:
        (result,) = await one_call(far(server))
        assert calls_of(server) == 1
    assert (result.outcome, result.attempts) == (Outcome.FAILED, 1)
    assert result.content.startswith("settled: ")
    assert "was lost during the call: SSE stream ended" in result.content


async def test_a_session_that_is_forgotten_in_mid_call_is_a_new_one_for_the_next():
    """What was taken is not made again, and the call behind it is not made in vain first."""
    with serving("taken-404") as server:
        first, second = await one_call(far(server), turns=2)
        methods = [message["method"] for message in server.heard]
    assert (first.outcome, second.outcome, second.attempts) == (Outcome.FAILED, Outcome.DONE, 1)
    assert methods.count("initialize") == 2


@pytest.mark.parametrize(
    ("status", "error_type"),
    [(401, ErrorType.TOOL), (404, ErrorType.TOOL), (405, ErrorType.TOOL), (429, None)],
)
async def test_a_call_that_was_put_off_is_not_begun_again(status, error_type):
    """The server has taken it, and refuses to be asked how it stands."""
    with serving(f"put-off-{status}") as server:
        (result,) = await one_call(far(server))
        assert calls_of(server) == 2
    assert (result.outcome, result.error_type, result.attempts) == (Outcome.FAILED, error_type, 1)
    assert ("settled: " if error_type is None else "effect may have happened") in result.content


@pytest.mark.parametrize("returns", [False, True])
async def test_a_server_that_dies_behind_a_call_is_not_called_again(returns):
    """Whether it is back or not when the rest of the answer is asked for: the call was taken."""
    results = []

    async def act(known):
        results.extend(await one_call(known))

    async with anyio.create_task_group() as group:
        with serving("dies") as server:
            group.start_soon(act, far(server))
            await anyio.to_thread.run_sync(server.hanging.wait)
        with serving("plain", port=server.server_address[1]) if returns else nullcontext(server) as later:
            await until(lambda: results)
            assert calls_of(server) == 1
            assert later is server or not calls_of(later)
    (result,) = results
    assert (result.outcome, result.attempts) == (Outcome.FAILED, 1)
    assert result.content.startswith("settled: ")


async def test_a_call_that_fails_ends_no_other():
    """The connection is one, and each request of it fails alone."""
    with serving("hangs-up") as server:
        link = far(server).connection
        errors = []

        async def act():
            try:
                await link.request(lambda client: client.call_tool("act", {}))
            except Exception as error:  # noqa: BLE001  what it is, is looked at below
                errors.append(error)

        async with anyio.create_task_group() as group:
            group.start_soon(act)
            group.start_soon(link.request, lambda client: client.list_tools())
        await link.request(lambda client: client.list_tools())
        assert (len(errors), link.start_count) == (1, 1)
        await link.aclose()


async def test_a_call_that_is_cut_off_is_taken_back():
    """A server of the handshake era is told by a notification."""
    with serving("hangs") as server:
        link = far(server).connection
        async with anyio.create_task_group() as group:
            group.start_soon(link.request, lambda client: client.call_tool("act", {}))
            await anyio.to_thread.run_sync(server.hanging.wait)
            group.cancel_scope.cancel()
        await until(lambda: any(message["method"] == "notifications/cancelled" for message in server.heard))
        await link.aclose()


async def test_a_call_of_today_s_protocol_is_taken_back_by_hanging_up():
    """There the end of the stream is the sign, and no notification is sent."""
    with serving("hangs-today") as server:
        (result,) = await one_call(far(server, timeout_s=0.5))
        assert result.outcome is Outcome.TIMED_OUT
        assert server.cut_off.wait(timeout=20)
        methods = [message["method"] for message in server.heard]
    assert methods == ["server/discover", "tools/list", "tools/call"]


async def test_a_server_that_is_gone_is_unreachable():
    """Nothing was sent, so nothing was done, and the engine tries again before the model is told."""
    with serving("hurried") as server:
        known = far(server)
        await known.update()
    (result,) = await one_call(known)
    assert (result.error_type, result.attempts) == (ErrorType.UNAVAILABLE, 3)
    assert "Nothing was done." in result.content
    assert "ConnectError" in result.content


async def test_a_server_that_hangs_up_on_the_first_request_is_not_taken_for_an_older_one():
    """That tells nothing of what it is: it is asked anew, and not what only an older one knows."""
    with serving("hurried-today") as server:
        known = far(server)
        with pytest.raises(MCPServerError, match="RemoteProtocolError") as caught:
            await known.update()
        await known.update()
        await known.aclose()
        methods = [message["method"] for message in server.heard]
    assert caught.value.is_passing
    assert methods == ["server/discover", "server/discover", "tools/list"]


@pytest.mark.parametrize("status", [401, 404, 405, 503])
async def test_a_server_that_does_not_take_the_handshake_is_told_of(status):
    """The error has the status, and what to try: the address, a token, the older kind of servers."""
    with serving(status, always=(status,)) as server:
        known = far(server)
        with pytest.raises(MCPServerError) as caught:
            await known.update()
        await known.aclose()
    text = str(caught.value)
    assert f"HTTP {status}" in text or status == 404
    assert all(word in text for word in (server.url, "headers=", "MCPServer.sse", '"type": "sse"'))
    assert server.url not in caught.value.why
    assert caught.value.is_passing is (status == 503)


async def test_an_address_where_nobody_listens_is_told_of():
    """The error of the socket is the cause."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        with pytest.raises(MCPServerError, match="ConnectError") as caught:
            await MCPServer.http(f"http://user:secret@127.0.0.1:{port}/mcp").update()
    assert caught.value.is_passing
    assert "secret" not in str(caught.value)


async def test_a_server_of_the_older_kind_works():
    """Its stream of events and its requests make a connection like any other."""
    with serving("older") as server:
        (result,) = await one_call(MCPServer.sse(server.url, name="rude", confirm=False))
    assert (result.outcome, result.content) == (Outcome.DONE, "acted")


async def test_a_refused_request_ends_a_connection_of_the_older_kind():
    """Its answer would never come: the call ends at once, and does not wait for its time."""
    with serving("older-503") as server:
        (result,) = await one_call(MCPServer.sse(server.url, name="rude", confirm=False))
    assert result.error_type is ErrorType.UNAVAILABLE
    assert "HTTP 503" in result.content


async def test_what_is_no_stream_of_events_is_told_of():
    """A server of today's kind, taken for one of the older, is told of with the way to reach it."""
    with serving("plain") as server:
        known = MCPServer.sse(server.url)
        with pytest.raises(MCPServerError, match=r"HTTP 405.*MCPServer\.http"):
            await known.update()
        await known.aclose()


async def test_only_what_was_declared_is_asked_for():
    """A server without resources and prompts is not asked for them."""
    with serving("plain") as server:
        known = far(server)
        for ask in (known.resources, known.resource_templates, known.prompts):
            with pytest.raises(MisuseError, match=r"has not declared .*; declared: tools"):
                await ask()
        methods = {message["method"] for message in server.heard}
        await known.aclose()
    assert not {method for method in methods if method.startswith(("resources", "prompts"))}
