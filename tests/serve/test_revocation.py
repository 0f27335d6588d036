"""Keys that are removed or changed while a request is being answered: each kind of long request ends."""

import base64
import json
import time
from collections import Counter

import anyio
import attrs
import pytest

from agentfsm import MisuseError
from agentfsm.serve import APIKeys, Caller, IncomingWebhook, RateLimits, endpoints, webhooks
from agentfsm.serve.access import add_key, remove_keys
from agentfsm.serve.dialects.webhooks import sign
from tests.support.gateway_client import paying, serving

ANN = Caller(user="ann", scopes={"run"})
ACCEPT = {"accept": "application/json, text/event-stream"}
HELLO = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "x", "version": "1"}}
SECRET = "whsec_" + base64.b64encode(b"s" * 32).decode()
QUESTION = [{"role": "user", "content": "x"}]


@pytest.fixture
def anyio_backend():
    """Return the one that uvicorn runs on."""
    return "asyncio"


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """Check keys often."""
    monkeypatch.setattr(endpoints, "RECHECK_S", 0.02)
    monkeypatch.setattr(endpoints, "RECHECK_TIMEOUT_S", 0.05)


class Keys:
    """Authenticates as the file does, and counts its checks by kind of request."""

    def __init__(self, answer):
        self.answer, self.checks, self.checked = answer, Counter(), anyio.Event()

    async def __call__(self, request):
        self.checks[request.headers.get("x-kind", "")] += 1
        self.checked.set()
        self.checked = anyio.Event()
        found = self.answer(request)
        return await found if hasattr(found, "__await__") else found

    async def wait_for_rechecks(self, kinds):
        """Wait until each request was checked again while it was being answered."""
        while any(self.checks[kind] < 3 for kind in kinds):
            await self.checked.wait()


def rpc(method, **params):
    return {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}


# Requests that last, by kind: method, path and body.
LONG = {
    "events": ("GET", "/v1/runs/RUN/events", None),
    "AG-UI of a run": ("GET", "/v1/runs/RUN/ag-ui", None),
    "AG-UI": (
        "POST",
        "/v1/agents/shop/ag-ui",
        {"threadId": "t", "runId": "u", "messages": [{"id": "m", **QUESTION[0]}]},
    ),
    "chat": ("POST", "/v1/chat/completions", {"model": "shop", "messages": QUESTION}),
    "chat stream": ("POST", "/v1/chat/completions", {"model": "shop", "messages": QUESTION, "stream": True}),
    "start": ("POST", "/v1/runs", {"prompt": "x", "wait_s": 60}),
    "wait": ("GET", "/v1/runs/RUN?wait_s=60", None),
    "MCP listening": ("GET", "/mcp", None),
    "MCP call": ("POST", "/mcp", rpc("tools/call", name="result", arguments={"run_id": "RUN", "wait_s": 60})),
}
# Endings that tell the client to ask again, by kind; the others are refused as if they came now.
ENDINGS = {"events": '"reason": "revoked"', "AG-UI of a run": "stream_revoked", "AG-UI": "stream_revoked"}
ENDINGS |= {"chat stream": "stream_revoked", "MCP listening": "", "MCP call": ""}


async def test_each_long_request_ends_with_its_key(tmp_path):
    """Streams of every protocol, waits, and MCP in both directions; the key of another user goes on."""
    path = tmp_path / "keys.json"
    headers = {"authorization": f"Bearer {add_key(path, ANN)}", **ACCEPT}
    other = {"authorization": f"Bearer {add_key(path, attrs.evolve(ANN, user='bob'))}", **ACCEPT}
    keys, results = Keys(APIKeys(path)), {}
    async with serving(paying(), auth=keys, parallel=0) as client:
        run_id = (await client.post("/v1/runs", json={"prompt": "x"}, headers=headers)).json()["id"]
        hello = await client.post("/mcp", json=rpc("initialize", **HELLO), headers=headers)
        headers |= {"mcp-session-id": hello.headers["mcp-session-id"]}
        noted = {"jsonrpc": "2.0", "method": "notifications/initialized"}
        await client.post("/mcp", json=noted, headers=headers)

        async def ask(kind):
            method, where, body = json.loads(json.dumps(LONG[kind]).replace("RUN", run_id))
            async with client.stream(method, where, json=body, headers=headers | {"x-kind": kind}) as answer:
                results[kind] = answer.status_code, (await answer.aread()).decode()

        async def stay():
            async with client.stream("GET", "/v1/runs", headers=other):
                pass
            made = (await client.post("/v1/runs", json={"prompt": "x"}, headers=other)).json()
            where = f"/v1/runs/{made['id']}/events"
            async with client.stream("GET", where, headers=other | {"x-kind": "other"}) as answer:
                async for _ in answer.aiter_raw():
                    pass

        with anyio.fail_after(20):
            async with anyio.create_task_group() as staying:
                staying.start_soon(stay)
                async with anyio.create_task_group() as tasks:
                    for kind in LONG:
                        tasks.start_soon(ask, kind)
                    await keys.wait_for_rechecks([*LONG, "other"])
                    assert results == {}
                    assert remove_keys(path, "ann", None) == 1
                checked = keys.checks["other"]
                while keys.checks["other"] < checked + 2:
                    await keys.checked.wait()
                staying.cancel_scope.cancel()
        for kind, (status, text) in results.items():
            assert status == (200 if kind in ENDINGS else 401), (kind, text)
            assert ENDINGS.get(kind, "unauthorized") in text or "authentication_error" in text, (kind, text)
        refused = await client.post("/mcp", json=rpc("tools/list"), headers=headers)
        assert refused.status_code == 401


async def hang(_request):
    await anyio.sleep_forever()


def fail(_request):
    raise MisuseError("the keys cannot be read")


def crash(_request):
    raise ZeroDivisionError


@pytest.mark.parametrize(
    ("now", "ends"),
    [
        (lambda _: None, True),
        (lambda _: attrs.evolve(ANN, scopes={"run", "approve"}), True),
        (lambda _: attrs.evolve(ANN, tenant="acme"), True),
        (lambda _: attrs.evolve(ANN, user="bob"), True),
        (lambda _: attrs.evolve(ANN, roles=["cashier"]), True),
        (lambda _: attrs.evolve(ANN, four_eyes=True), True),
        (lambda _: attrs.evolve(ANN, limits=RateLimits(requests=5)), False),
        (hang, True),
        (fail, True),
        (crash, True),
    ],
    ids=["removed", "scopes", "tenant", "user", "roles", "four_eyes", "limits", "hangs", "fails", "crashes"],
)
async def test_other_rights_end_a_stream(now, ends):
    """Also rights that were added, since the client asks again with them; and a check that cannot be made."""
    keys = Keys(lambda _: ANN)
    async with serving(paying(), auth=keys, parallel=0) as client:
        run = (await client.post("/v1/runs", json={"prompt": "x"})).json()
        with anyio.fail_after(20):
            async with client.stream("GET", f"/v1/runs/{run['id']}/events", headers={"x-kind": "s"}) as stream:
                lines = stream.aiter_lines()
                assert await anext(lines) == "retry: 1000"
                keys.answer = now
                if ends:
                    assert "event: retry" in [line async for line in lines]
                else:
                    keys.checks.clear()
                    await keys.wait_for_rechecks(["s"])  # it would be the last check


async def test_a_signed_delivery_is_checked_once(monkeypatch):
    """The signature is of one request, whose body is read once: a slow delivery is not refused."""
    agent, begun = paying(), []
    submit = type(agent).submit

    async def submit_slowly(self, run, **options):
        begun.append(run.id)
        await anyio.sleep(10 * endpoints.RECHECK_S)
        return await submit(self, run, **options)

    monkeypatch.setattr(type(agent), "submit", submit_slowly)
    hook = IncomingWebhook(name="crm", secret=SECRET, user="crm-bot")
    async with serving(agent, groups=[webhooks([hook])], parallel=0) as server:
        moment = int(time.time())
        headers = {"webhook-id": "m", "webhook-timestamp": f"{moment}"}
        headers["webhook-signature"] = sign(SECRET, "m", moment, b"{}")
        assert (await server.post("/v1/hooks/crm", content="{}", headers=headers)).status_code == 202
        assert len(begun) == 1
