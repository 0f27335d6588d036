"""The studio's server without a browser: what it serves to whom, from empty and damaged stores, and what it refuses."""

import re

import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

from agentfsm import Agent, CorruptError, StoreError, TooNewError
from agentfsm.stores import MemoryStore
from agentfsm.studio import StudioFiles
from agentfsm.testing import FunctionModel
from tests.support.gateways import serving

FILES = StudioFiles()
APP = Starlette(routes=[Mount("/studio", FILES)])


@pytest.fixture
def anyio_backend():
    """Return the one that uvicorn runs on."""
    return "asyncio"


@pytest.fixture
async def client():
    """A client of an application that mounts the files."""
    async with httpx.AsyncClient(transport=httpx.ASGITransport(APP), base_url="http://app.example") as client:
        yield client


@pytest.mark.parametrize("name", FILES.files)
async def test_each_file_is_whole_and_has_its_type(client, name):
    """A HEAD has the headers of the GET. No page has a script, a style or a handler in it; no browser runs them."""
    whole, head = [await client.request(method, f"/studio/{name}") for method in ("GET", "HEAD")]
    assert (whole.status_code, head.status_code, head.content) == (200, 200, b"")
    assert dict(head.headers) == dict(whole.headers)
    assert whole.headers["content-length"] == str(len(whole.content)) != "0"
    assert whole.headers["content-type"].partition("/")[2][:3] in {"htm", "css", "jav", "svg"}
    if name.endswith(".html"):
        assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\son\w+=|javascript:", whole.text)


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/studio", 307),
        ("/studio/", 200),
        ("/studio/?x=1", 200),
        ("/studio/static/main.js", 404),
        ("/studio/main.js/", 404),
        ("/studio/MAIN.JS", 404),
        ("/studio/pages", 404),
        ("/studio/pages/", 404),
        ("/studio/%00", 404),
        ("/studio/%2e%2e/page_files.py", 404),
        ("/studio/..%2f..%2fserve%2fapp.py", 404),
        ("/studio//etc/passwd", 404),
        ("/studio/main.js%0d%0ax-injected: 1", 404),
    ],
)
async def test_nothing_but_the_files_is_served(client, path, status):
    """Whatever the path, and under the same policy."""
    answer = await client.get(path)
    assert answer.status_code == status
    assert "x-injected" not in answer.headers
    if status != 307 and "%0d" not in path:  # those are answered by the application
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PROPFIND"])
async def test_files_are_read_only(client, method):
    """Other methods get no file."""
    answer = await client.request(method, "/studio/main.js", content=b"x")
    assert (answer.status_code, answer.content) == (404, b"not found")


@pytest.mark.parametrize(
    ("known", "status"),
    [("{}", 304), ("W/{}", 304), ('"other", {}', 304), ('W/"other" ,W/{}', 304), ('"other"', 200), ("", 200)],
)
async def test_a_file_that_the_browser_has_is_not_sent_again(client, known, status):
    """Also if a proxy has compressed it and made its mark a weak one, or the browser has several."""
    etag = (await client.get("/studio/main.js")).headers["etag"]
    answer = await client.get("/studio/main.js", headers={"if-none-match": known.format(etag)})
    assert answer.status_code == status
    assert bool(answer.content) is (status == 200)
    assert answer.headers["etag"] == etag


PAGES = ("/v1/machine", "/v1/runs", "/v1/agents", "/v1/sessions", "/v1/costs", "/v1/workers")


async def test_the_pages_of_an_empty_store():
    """Each has an answer, and nothing in it."""
    async with serving(store=MemoryStore()) as client:
        answers = {path: await client.get(path) for path in PAGES}
        assert {each.status_code for each in answers.values()} == {200}
        assert answers["/v1/runs"].json() == {"runs": [], "after": None}
        assert answers["/v1/costs"].json()["total"]["runs"] == 0
        assert (await client.get("/v1/runs", headers={"x-caller": "?"})).status_code == 401


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (CorruptError("line 3 of run 'r1' at db.internal"), 500, "unreadable"),
        (TooNewError("run 'r1' has format 99"), 500, "unreadable"),
        (StoreError("no route to db.internal"), 503, "unavailable"),
    ],
    ids=repr,
)
async def test_a_journal_that_cannot_be_read_is_told_from_a_store_that_is_away(error, status, code):
    """Only of the second another try helps; the list and the other runs stay, and no host is named."""
    store = MemoryStore()
    agent = Agent(FunctionModel(lambda _request: "ok"), name="shop", store=store)
    for run_id in ("r0", "r1", "r2"):
        await agent.run("go", id=run_id)
    read = store.read

    async def read_or_fail(run_id, *args, **options):
        if run_id == "r1":
            raise error
        return await read(run_id, *args, **options)

    store.read = read_or_fail
    async with serving(store=store) as client:
        for path in ("/v1/runs/r1", "/v1/runs/r1/details", "/v1/costs"):
            answer = await client.get(path)
            assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
            assert ("retry-after" in answer.headers) is (status == 503)
            assert "internal" not in answer.text
        assert (await client.get("/v1/runs/r0/details")).status_code == 200
        assert [each["id"] for each in (await client.get("/v1/runs")).json()["runs"]] == ["r2", "r1", "r0"]
