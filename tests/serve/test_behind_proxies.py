"""The gateway below a path, behind a proxy, and in pages: addresses, headers, and tokens for event streams."""

import os
import re
import socket
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path

import anyio
import httpx
import pytest
from anyio import to_thread
from starlette.applications import Starlette
from starlette.routing import Mount

from agentfsm import Agent, MisuseError
from agentfsm._lib.web.http_connections import ConnectionLimits, find_scheme, parse_network
from agentfsm.cli.commands.serve_http import _list_groups
from agentfsm.serve import endpoints, serve
from agentfsm.stores import MemoryStore
from agentfsm.testing import ScriptedModel, say
from tests.support.browser import open_browser
from tests.support.database_servers import debian
from tests.support.gateway_client import named, paying, read_caller, serving

PAGE = (Path(__file__).parents[2] / "docs" / "serve.md").read_text(encoding="utf-8")
HERE = ConnectionLimits(trusted_proxies=(parse_network("127.0.0.1"),))
RIGHTS = {"x-caller": "ann//run"}


@pytest.fixture
def anyio_backend():
    """Return the one that uvicorn runs on."""
    return "asyncio"


@pytest.mark.parametrize("is_mounted", [True, False])
async def test_a_gateway_below_a_path(is_mounted):
    """Its addresses have the path in front, whether an application mounts it or a proxy removes the path."""
    agent = Agent(ScriptedModel(say("done")), name="shop", store=MemoryStore())
    given = serve(
        [agent], auth=read_caller, groups=_list_groups(with_studio=True), root_path="" if is_mounted else "/a/b"
    )
    app = Starlette(routes=[Mount("/a/b", given)]) if is_mounted else given
    base = "http://server/a/b" if is_mounted else "http://server"
    async with given.lifespan(), httpx.AsyncClient(transport=httpx.ASGITransport(app), headers=RIGHTS) as client:
        made = await client.post(f"{base}/v1/runs", json={"prompt": "x", "wait_s": 30})
        where = made.headers["location"]
        assert where == f"/a/b/v1/runs/{made.json()['id']}"
        stream = await client.get(f"{base}/v1/runs/{made.json()['id']}/events")
        assert stream.headers["location"] == where
        token = await client.post(f"{base}/v1/runs/{made.json()['id']}/stream-token", json={})
        assert token.json()["url"].startswith(f"{where}/events?token=")
        fork = await client.post(f"{base}/v1/runs/{made.json()['id']}/fork", json={"at": 1})
        assert fork.headers["location"] == f"/a/b/v1/runs/{fork.json()['id']}"
        assert (await client.get(f"{base}/")).headers["location"] == "/a/b/studio/"
        assert (await client.get(f"{base}/openapi.json")).json()["servers"] == [{"url": "/a/b"}]


@pytest.mark.parametrize("wrong", ["/", "agents", "/agents/", "/a b"])
def test_a_root_that_is_no_path(wrong):
    """It is refused when the app is created."""
    with pytest.raises(MisuseError, match="root_path"):
        serve([paying()], auth=read_caller, root_path=wrong)


async def test_headers_of_pages():
    """A page may send what tracing adds, and what the server was told."""
    origin = "https://app.example.org"
    asked = {"origin": origin, "access-control-request-method": "POST"}
    tracing = "traceparent, tracestate, baggage, sentry-trace"
    async with serving(paying(), origins=[origin], allow_headers=["X-Shop"]) as client:
        for names, status in ((tracing, 200), ("x-shop", 200), ("x-other", 400)):
            found = await client.options("/v1/runs", headers=asked | {"access-control-request-headers": names})
            assert found.status_code == status, names


@pytest.mark.parametrize(
    ("headers", "scheme"),
    [
        ([("x-forwarded-proto", "https")], "https"),
        ([("forwarded", 'for=192.0.2.1;proto="https"')], "https"),
        ([("x-forwarded-proto", "https, http")], "http"),
        ([("x-forwarded-proto", "https"), ("forwarded", "proto=http")], None),
        ([("forwarded", "for=192.0.2.1")], None),
    ],
)
def test_the_scheme_of_a_proxy(headers, scheme):
    """The hop next to the server says it; headers that disagree do not."""
    assert find_scheme([(name.encode(), value.encode()) for name, value in headers]) == scheme


@pytest.mark.parametrize(("limits", "scheme"), [(HERE, "https"), (None, "http")])
async def test_redirects_keep_https(limits, scheme):
    """Behind a trusted proxy, whose client speaks https; another client cannot say so."""
    async with serving(paying(), connections=limits) as client:
        found = await client.get("/v1/runs/", headers={"x-forwarded-proto": "https"})
        assert found.headers["location"].startswith(f"{scheme}://")


async def test_a_token_for_a_stream():
    """It reads the events of one run with the rights of its caller, and nothing else."""
    agent = paying()
    async with serving(agent) as client:
        nobody = {"headers": {"x-caller": ""}}
        made, other = [await client.post("/v1/runs", json={"prompt": "x"}, headers=named("ann")) for _ in range(2)]
        path = f"/v1/runs/{made.json()['id']}"
        token = await client.post(f"{path}/stream-token", json={}, headers=named("ann"))
        assert token.status_code == 201
        key = token.json()["token"]
        async with client.stream("GET", token.json()["url"], **nobody) as stream:
            assert (
                await anext(line async for line in stream.aiter_lines() if line.startswith("id: "))
                == f"id: {made.json()['id']}:1"
            )
        for method, where in (
            ("GET", f"{path}/events?token={key}x"),
            ("GET", f"/v1/runs/{other.json()['id']}/events?token={key}"),
            ("GET", f"{path}?token={key}"),
            ("POST", f"{path}/stream-token?token={key}"),
            ("POST", f"{path}/cancel?token={key}"),
        ):
            assert (await client.request(method, where, **nobody)).status_code == 401, where
        foreign = await client.post(f"{path}/stream-token", json={}, headers=named("bob"))
        assert foreign.status_code == 404
        for ttl_s in (0, 3_601):
            assert (await client.post(f"{path}/stream-token", json={"ttl_s": ttl_s})).status_code == 422


async def test_the_end_of_a_token(monkeypatch):
    """A stream ends with the token that opened it, and no other one begins."""
    monkeypatch.setattr(endpoints, "RECHECK_S", 0.02)
    async with serving(paying()) as client:
        run_id = (await client.post("/v1/runs", json={"prompt": "x"})).json()["id"]
        token = (await client.post(f"/v1/runs/{run_id}/stream-token", json={"ttl_s": 1})).json()
        async with client.stream("GET", token["url"], headers={"x-caller": ""}) as response:
            assert response.status_code == 200
            text = "".join([each async for each in response.aiter_text()])
        assert 'event: retry\ndata: {"reason": "revoked"}' in text
        assert (await client.get(token["url"], headers={"x-caller": ""})).status_code == 401


@contextmanager
def nginx(folder, port, recipe):
    """Serve a page and, by the recipe of the docs, the gateway."""
    program = debian("nginx", "nginx-light")
    if program is None:
        pytest.skip("there is no nginx: `apt-get install nginx-light`")
    text = f"""
    daemon off; worker_processes 1; pid {folder}/pid; error_log {folder}/errors;
    {"user root;" if os.geteuid() == 0 else ""}
    events {{}}
    http {{
        access_log off; client_body_temp_path {folder}/1; proxy_temp_path {folder}/2; fastcgi_temp_path {folder}/3;
        uwsgi_temp_path {folder}/4; scgi_temp_path {folder}/5; types {{ text/html html; }}
        server {{ listen 127.0.0.1:{port}; root {folder}; {recipe} }}
    }}
    """
    (folder / "nginx.conf").write_text(text)
    with subprocess.Popen([program, "-c", folder / "nginx.conf"], stderr=subprocess.DEVNULL) as process:
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


async def test_the_page_and_the_recipe_of_the_docs(tmp_path):
    """A browser shows an answer that streams from a gateway behind nginx, and the studio works there."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    answer = " ".join(f"word{number}" for number in range(50))
    agent = Agent(ScriptedModel(say(answer)), name="shop", store=MemoryStore())
    groups = _list_groups(with_studio=True)
    tmp_path.chmod(0o755)
    async with serving(agent, connections=HERE, root_path="/agents", groups=groups) as client:
        page = re.search(r"```html\n<!-- talk.html -->\n(.*?)```", PAGE, re.DOTALL)[1]
        assert '"http://127.0.0.1:8000"' in page
        (tmp_path / "talk.html").write_text(page.replace("http://127.0.0.1:8000", f"http://127.0.0.1:{port}/agents"))
        recipe = re.search(r"```nginx\n(.*?)```", PAGE, re.DOTALL)[1]
        assert "http://127.0.0.1:8000/" in recipe
        recipe = recipe.replace("http://127.0.0.1:8000/", f"{client.base_url}/")

        def browse():
            with nginx(tmp_path, port, recipe) as url, contextmanager(open_browser)() as browser:
                while True:
                    try:
                        httpx.get(url)
                    except httpx.ConnectError:
                        time.sleep(0.02)  # until nginx listens
                    else:
                        break
                page = browser.new_page()
                page.goto(f"{url}/talk.html")
                page.evaluate("localStorage.setItem('key', 'ann//run')")
                page.evaluate("localStorage.setItem('agentfsm.key', 'ann//run')")
                page.reload()
                page.fill("#prompt", "hello")
                page.click("#send")
                page.wait_for_function(f"document.getElementById('answer').textContent === {answer!r}")
                page.goto(f"{url}/agents/")
                page.wait_for_url("**/agents/studio/**")
                page.goto(f"{url}/agents/studio/#/runs")
                page.wait_for_selector("text=hello")
                return True

        with anyio.fail_after(60):
            assert await to_thread.run_sync(browse)
