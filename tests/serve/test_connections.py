"""Connections of a server: places of clients behind proxies, and health checks that are always answered."""

from contextlib import AsyncExitStack

import anyio
import httpx
import pytest

from agentfsm import MisuseError
from agentfsm._lib.web import http_server
from agentfsm._lib.web.http_connections import ConnectionLimits, find_client, parse_network
from agentfsm._lib.web.http_guard import HTTPGuard, build_allowed_hosts
from tests.support.gateway_client import paying, serving

CHECKS = frozenset({"/healthz", "/readyz"})
PROXIES = ConnectionLimits(trusted_proxies=tuple(map(parse_network, ("10.0.0.0/8", "127.0.0.1", "2001:db8:a::/48"))))


@pytest.fixture
def anyio_backend():
    """Return the one that uvicorn runs on."""
    return "asyncio"


@pytest.mark.parametrize(
    ("headers", "client"),
    [
        ([], None),
        ([("x-forwarded-for", "192.0.2.7")], "192.0.2.7"),
        ([("x-forwarded-for", "1.1.1.1, 192.0.2.7")], "192.0.2.7"),
        ([("x-forwarded-for", "1.1.1.1"), ("x-forwarded-for", "192.0.2.7, 10.1.1.1")], "192.0.2.7"),
        ([("x-forwarded-for", "10.2.2.2, 10.1.1.1")], "10.2.2.2"),
        ([("x-forwarded-for", "192.0.2.7:4711")], "192.0.2.7"),
        ([("x-forwarded-for", "2001:db8::1")], "2001:db8::1"),
        ([("x-forwarded-for", "[2001:db8::1]:4711")], "2001:db8::1"),
        ([("x-forwarded-for", "::ffff:192.0.2.7")], "192.0.2.7"),
        ([("x-forwarded-for", "192.0.2.7, unknown")], None),
        ([("x-forwarded-for", "192.0.2.7,")], None),
        ([("x-forwarded-for", "")], None),
        ([("forwarded", "for=192.0.2.7")], "192.0.2.7"),
        ([("forwarded", "For=1.1.1.1, proto=https;for=192.0.2.7;by=10.1.1.1")], "192.0.2.7"),
        ([("forwarded", 'for="[2001:db8::1]:4711";proto=https, for="[2001:db8:a::1]"')], "2001:db8::1"),
        ([("forwarded", "for=192.0.2.7, for=_hidden")], None),
        ([("forwarded", "for=1.1.1.1, proto=https")], None),
        ([("forwarded", 'for=1.1.1.1;by=", for=192.0.2.7')], "192.0.2.7"),
        ([("forwarded", 'for=", for="[2001:db8::1]"')], "2001:db8::1"),
        ([("forwarded", "for=1.1.1.1"), ("x-forwarded-for", "192.0.2.7")], None),
        ([("forwarded", "for=192.0.2.7"), ("x-forwarded-for", "1.1.1.1, 192.0.2.7")], "192.0.2.7"),
    ],
)
def test_the_client_of_a_proxy(headers, client):
    """The nearest hop that is not a trusted proxy counts, and nothing that the client itself may have written."""
    assert find_client([(name.encode(), value.encode()) for name, value in headers], PROXIES) == client


async def open_streams(stack, url, path, count, address="127.0.0.1", **headers):
    """Open event streams on a connection each, and return their statuses."""
    transport = httpx.AsyncHTTPTransport(local_address=address, verify=False)
    client = await stack.enter_async_context(httpx.AsyncClient(base_url=url, transport=transport, timeout=30))
    caller = {"x-caller": "root//admin", **{name.replace("_", "-"): value for name, value in headers.items()}}
    streams = [await stack.enter_async_context(client.stream("GET", path, headers=caller)) for _ in range(count)]
    return [each.status_code for each in streams]


async def test_health_checks_without_a_place():
    """One address may have its share, all together the total; beyond them only the checks are answered."""
    limits = ConnectionLimits(total=6, per_address=3, always_answered=CHECKS)
    async with serving(paying(), connections=limits, parallel=0) as client, AsyncExitStack() as stack:
        path = f"/v1/runs/{(await client.post('/v1/runs', json={'prompt': 'x'})).json()['id']}/events"
        await client.aclose()
        url = client.base_url
        for address, expected in (("127.0.0.2", [200] * 3), ("127.0.0.2", [503]), ("127.0.0.3", [200] * 3)):
            assert await open_streams(stack, url, path, len(expected), address) == expected
        for address in ("127.0.0.2", "127.0.0.4"):
            assert await open_streams(stack, url, "/v1/runs", 1, address) == [503]
            for check in CHECKS:
                assert await open_streams(stack, url, check, 1, address) == [200]


@pytest.mark.parametrize("header", ["x_forwarded_for", "forwarded"])
@pytest.mark.parametrize("trusted", [True, False])
async def test_clients_behind_a_proxy_have_their_own_share(trusted, header):
    """One client cannot take the places of those that come through the same proxy, whatever it writes in front."""
    proxies = tuple(map(parse_network, ["127.0.0.2"] if trusted else []))
    limits = ConnectionLimits(total=20, per_address=2, trusted_proxies=proxies, always_answered=CHECKS)
    form = "{}" if header == "x_forwarded_for" else "for={}"
    async with serving(paying(), connections=limits, parallel=0) as client, AsyncExitStack() as stack:
        path = f"/v1/runs/{(await client.post('/v1/runs', json={'prompt': 'x'})).json()['id']}/events"

        async def ask(where, count, *hops):
            via = {header: ", ".join(form.format(hop) for hop in hops)}
            return await open_streams(stack, client.base_url, where, count, "127.0.0.2", **via)

        assert await ask(path, 2, "192.0.2.1") == [200, 200]
        assert await ask(path, 1, "9.9.9.9", "192.0.2.1") == [503]
        assert await ask(path, 2, "192.0.2.2") == ([200, 200] if trusted else [503, 503])
        assert await ask("/healthz", 1, "192.0.2.1") == [200]
        if trusted:
            async with AsyncExitStack() as short:
                via = {header: form.format("2001:db8::1") if header == "x_forwarded_for" else 'for="[2001:db8::1]"'}
                for _ in range(3):  # a request that has ended holds no place
                    answer = await open_streams(short, client.base_url, "/v1/agents", 1, "127.0.0.2", **via)
                    assert answer == [200]


async def test_checks_are_answered_under_every_host_name():
    """An orchestrator asks by address; everything else needs an allowed name."""
    seen = []

    async def app(scope, _receive, _send):
        seen.append(scope["path"])

    async def send(message):
        seen.append(message.get("status"))

    guard = HTTPGuard(app, build_allowed_hosts("0.0.0.0", ["agents.example.org"]), None, frozenset(), CHECKS)  # noqa: S104
    for path, method in (("/healthz", "GET"), ("/v1/runs", "GET"), ("/healthz", "POST")):
        scope = {"type": "http", "method": method, "path": path, "headers": [(b"host", b"10.1.2.3:8000")]}
        await guard(scope, None, send)
    assert seen == ["/healthz", 421, None, 421, None]


@pytest.mark.parametrize("text", ["10.0.0.1/8", "proxy", "", "10.0.0.0/33"])
def test_a_network_that_is_none(text):
    """The error says how to write one."""
    with pytest.raises(MisuseError, match=r"is not a network .*: give for example 10\.0\.0\.0/8"):
        parse_network(text)


async def test_more_connections_than_open_files(monkeypatch):
    """The limit of the process is raised, or the server says which limit to raise."""
    raised = []
    monkeypatch.setattr("resource.getrlimit", lambda _which: (1_024, 4_096))
    monkeypatch.setattr("resource.setrlimit", lambda _which, limits: raised.append(limits))
    async with serving(paying(), connections=ConnectionLimits(total=3_000), parallel=0) as client:
        assert (await client.get("/healthz")).status_code == 200
    assert raised == [(3_512, 4_096)]

    def refuse(_which, _limits):
        raise ValueError("not allowed to raise maximum limit")

    monkeypatch.setattr("resource.setrlimit", refuse)
    with http_server.bind_socket("127.0.0.1", 0) as bound:
        serve = http_server.serve(
            None, bound, "", anyio.TASK_STATUS_IGNORED, print, limits=ConnectionLimits(total=9_000)
        )
        with pytest.raises(MisuseError, match=r"9,000 connections need 9,512 open files.* LimitNOFILE"):
            await serve
