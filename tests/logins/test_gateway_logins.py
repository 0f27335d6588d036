"""Logins over HTTP: the link, the page to which the browser returns, the key, and who may do it."""

import logging

import httpx2
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from agentfsm import StoreError
from agentfsm.logins import APIKey, OAuth
from agentfsm.stores import SQLiteStore
from agentfsm.telemetry import Telemetry
from tests.support.gateways import named, serving


@pytest.fixture
def anyio_backend():
    """Return the one that uvicorn runs on."""
    return "asyncio"


async def start(client, **caller):
    made = await client.post("/v1/runs", json={"prompt": "order it", "wait_s": 30}, headers=named(**caller))
    run = made.json()
    [item] = run["pending"]
    assert item["kind"] == "login"
    return run["id"], item


async def browse(url):
    async with httpx2.AsyncClient(trust_env=False, follow_redirects=True) as browser:
        return await browser.get(url)


async def test_the_browser_returns_to_the_gateway_and_the_run_goes_on(shop, program):
    """The link is for the run's user only, and good once; nothing of the answer is kept but the token."""
    program.settings = OAuth(tokens=program.tokens)
    async with serving(program.begin(name="shop")) as client:
        run_id, item = await start(client)
        body = {"call_id": item["call_id"]}
        path = f"/v1/runs/{run_id}/login"
        assert (await client.post(path, json=body, headers=named("bob"))).status_code == 404
        assert (await client.post(path, json=body)).status_code == 403  # an administrator has another account
        refused = await client.post(path, json={**body, "key": "k"}, headers=named())
        assert (refused.status_code, "takes no key" in refused.text) == (400, True)
        link = (await client.post(path, json=body, headers=named())).json()["url"]
        page = await browse(link)
        assert (page.status_code, page.headers["referrer-policy"]) == (200, "no-referrer")
        assert page.text.startswith("You are logged in")
        done = (await client.get(f"/v1/runs/{run_id}?wait_s=30", headers=named())).json()
        assert (done["status"], shop.orders[0][0]) == ("done", "ann")
        assert (await browse(str(page.url))).status_code == 200  # loaded again
        unknown = str(page.url).replace("state=", "state=x")
        assert (await browse(unknown)).status_code == 404
        assert (await client.post(path, json=body, headers=named())).status_code == 409
        forgotten = await client.delete("/v1/logins", headers=named())
        assert forgotten.json() == {"forgotten": 1, "not_revoked": []}
    assert shop.seen["revoked"] == 1
    secrets = [each.encode() for each in shop.issued]
    assert not [each for each in secrets if each in program.read_database()]


async def test_no_document_span_or_log_has_a_token(shop, program, caplog):
    """All that the gateway tells of a run, spans with all texts, and the logs at the lowest level."""
    caplog.set_level(logging.DEBUG)
    spans = InMemorySpanExporter()
    program.settings = OAuth(tokens=program.tokens)
    agent = program.begin(name="shop", watch=[Telemetry(spans, content="full")], log_prompts=True)
    async with serving(agent) as client:
        run_id, item = await start(client)
        body = {"call_id": item["call_id"]}
        link = (await client.post(f"/v1/runs/{run_id}/login", json=body, headers=named())).json()["url"]
        await browse(link)
        await client.get(f"/v1/runs/{run_id}?wait_s=30", headers=named())
        names = ("", "/journal", "/messages", "/request?turn=1", "/request?turn=2", "/audit", "/details", "/children")
        told = [(await client.get(f"/v1/runs/{run_id}{name}", headers=named())).text for name in names]
    agent.watch[0].flush()
    told += [span.to_json() for span in spans.get_finished_spans()]
    told += [repr(vars(record)) for record in caplog.records]
    assert len(shop.orders) == 1
    assert any("Bearer ***" in text for text in told)
    tokens = [*shop.access, *shop.refresh]
    assert not [token for token in tokens if any(token in text for text in told)]


async def test_a_key_goes_to_the_token_store_only(shop, program):
    """The run goes on at once."""
    shop.keys["key-of-ann"] = "ann"
    program.settings = APIKey(header="X-API-Key", prefix="", tokens=program.tokens)
    async with serving(program.begin(name="shop")) as client:
        run_id, item = await start(client)
        path, body = f"/v1/runs/{run_id}/login", {"call_id": item["call_id"]}
        assert (await client.post(path, json=body, headers=named())).status_code == 400
        assert (await client.post(path, json={**body, "key": "a b"}, headers=named())).status_code == 400
        given = await client.post(path, json={**body, "key": "key-of-ann"}, headers=named())
        assert given.json() == {"continued": 1}
        done = (await client.get(f"/v1/runs/{run_id}?wait_s=30", headers=named())).json()
        assert done["status"] == "done"
    assert b"key-of-ann" not in program.read_database()


async def test_a_store_that_fails_between_token_and_run(shop, program, monkeypatch):
    """The page says so, and to load it again completes the login: the code is not needed any more."""
    program.settings = OAuth(tokens=program.tokens)
    async with serving(program.begin(name="shop")) as client:
        run_id, item = await start(client)
        body = {"call_id": item["call_id"]}
        link = (await client.post(f"/v1/runs/{run_id}/login", json=body, headers=named())).json()["url"]

        async def fail(*_args, **_options):
            raise StoreError("the disk is full")

        with monkeypatch.context() as patch:
            patch.setattr(SQLiteStore, "post", fail)
            page = await browse(link)
        assert page.status_code == 503
        assert (await browse(str(page.url))).status_code == 200
        done = (await client.get(f"/v1/runs/{run_id}?wait_s=30", headers=named())).json()
        assert done["status"] == "done"
    assert shop.seen["exchanged"] == 1
