"""docs/fastapi.md: its programs, saved and served over a real socket, do what the page says."""

import json
import re
import signal
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import anyio
import httpx
import pytest
import uvicorn

from agentfsm import AgentError, Runs
from agentfsm.serve import errors
from agentfsm.stores import SQLiteStore
from agentfsm.testing import LocalServer, call, say
from tests.support.bare_shell import BARE_PATH, execute_bare
from tests.support.browser import open_browser
from tests.support.doc_tables import read_names, read_table

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "fastapi.md").read_text(encoding="utf-8")
_FILE = re.compile(r"```\w+\n(?:# |<!-- )(\w+\.\w+)(?: -->)?\n(.*?)```", re.DOTALL)


def _clerk(body):
    """Play the model: ask for a refund, then report it."""
    return say("It is refunded.") if body["messages"][-1]["role"] == "tool" else say("", CALL)


CALL = call("refund", number=17, cents=1990)


@contextmanager
def serving(name, folder, monkeypatch):
    """Save the files of the page in a folder, serve one of them with uvicorn, and yield its URL."""
    for file, code in _FILE.findall(PAGE):
        (folder / file).write_text(code, encoding="utf-8")
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    with LocalServer(_clerk) as model, socket.create_server(("127.0.0.1", 0)) as bound:
        monkeypatch.setenv("OPENAI_API_KEY", "none")
        monkeypatch.setenv("OPENAI_BASE_URL", model.base_url)
        server = uvicorn.Server(uvicorn.Config(f"{name}:app", log_level="warning", timeout_graceful_shutdown=5))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{bound.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()
            sys.modules.pop(name)


def read_events(client, path, last=None):
    """Yield the events of a stream, each as its id, its kind and its data."""
    with client.stream("GET", f"{path}/events", headers={} if last is None else {"last-event-id": last}) as response:
        assert response.status_code == 200
        fields = {}
        for line in response.iter_lines():
            name, _, value = line.partition(": ")
            if line and name:
                fields[name] = value
            elif fields:
                yield fields.get("id"), fields.get("event"), json.loads(fields["data"])
                fields = {}


async def pause(run_id):
    """Pause a run, as another process does."""
    async with Runs(SQLiteStore("runs.db")) as runs:
        await runs.pause(run_id)


def test_the_routes_of_the_page(tmp_path, monkeypatch):
    """Run, approve, follow, continue a stream, resume; another user and a second approval are refused."""
    with (
        serving("service", tmp_path, monkeypatch) as url,
        httpx.Client(base_url=url, cookies={"user": "ann"}, timeout=30) as ann,
        httpx.Client(base_url=url, cookies={"user": "eve"}, timeout=30) as eve,
    ):
        place = f"/runs/{ann.post('/runs', json={'prompt': 'Refund order 17'}).raise_for_status().json()['id']}"
        before = []
        for item in read_events(ann, place):
            before.append(item)
            if item[2] == "ApprovalAsked":
                break
        [wait] = ann.get(place).json()["waits"]
        assert (wait["tool"], wait["arguments"]) == ("refund", {"number": 17, "cents": 1990})
        decision = {"call_id": wait["call_id"], "digest": wait["digest"]}
        assert eve.get(place).status_code == eve.post(f"{place}/approve", json=decision).status_code == 404
        anyio.run(pause, place.removeprefix("/runs/"))
        assert ann.post(f"{place}/approve", json=decision).is_success
        assert ann.post(f"{place}/resume").json()["status"] == "done"
        after = list(read_events(ann, place, last=before[-1][0]))
        versions = [int(version) for version, _kind, _data in (*before, *after)[:-1]]
        assert versions == [*range(1, len(versions) + 1)]
        assert (after[-1][1], after[-1][2]["status"], after[-1][2]["output"]) == ("end", "done", "It is refunded.")
        refused = ann.post(f"{place}/approve", json=decision)
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "conflict")


@pytest.mark.soak
def test_the_page_in_a_browser(tmp_path, monkeypatch):
    """The form starts a run, the dialog approves its call, and the answer comes by `EventSource`."""
    with serving("service", tmp_path, monkeypatch) as url, contextmanager(open_browser)() as browser:
        page = browser.new_page()
        asked = []
        page.on("dialog", lambda dialog: (asked.append(dialog.message), dialog.accept()))
        page.goto(url)
        page.fill("input", "Refund order 17")
        page.click("button")
        page.wait_for_function("document.querySelector('pre').textContent.includes('It is refunded.')")
        assert asked == ['refund {"number":17,"cents":1990}?']


def test_the_mounted_gateway(tmp_path, monkeypatch):
    """The eight lines serve the routes of the gateway under their prefix, and execute runs."""
    with serving("mounted", tmp_path, monkeypatch) as url:
        run = httpx.post(f"{url}/agents/v1/runs", json={"prompt": "Hi", "wait_s": 30}, headers={"x-user": "ann"})
        assert (run.status_code, run.json()["user"]) == (201, "ann")


@pytest.mark.soak
def test_the_page_in_an_environment_of_a_newcomer(tmp_path):
    """The commands of the page install what its program needs, and start it."""
    install, start = (line.removeprefix("$ ") for line in re.findall(r"```console\n(.*)\n```", PAGE))
    for file, code in _FILE.findall(PAGE):
        (tmp_path / file).write_text(code, encoding="utf-8")
    python = f"{sys.base_prefix}/bin/python3"
    execute_bare(tmp_path, f"{python} -m venv v; v/bin/pip install -q {ROOT}; PATH=$PWD/v/bin:$PATH; {install}")
    with LocalServer(_clerk) as model, socket.create_server(("127.0.0.1", 0)) as bound:
        port = bound.getsockname()[1]
        bound.close()
        env = {"PATH": f"{tmp_path}/v/bin:{BARE_PATH}", "OPENAI_API_KEY": "none", "OPENAI_BASE_URL": model.base_url}
        process = subprocess.Popen(["sh", "-c", f"exec {start} --port {port}"], cwd=tmp_path, env=env)
        try:
            wait = f"curl -sS --retry 60 --retry-connrefused --retry-delay 1 localhost:{port}"
            assert "EventSource" in execute_bare(tmp_path, wait)
            cookie = "-b user=ann -H 'content-type: application/json'"
            started = execute_bare(tmp_path, f'curl -sS {cookie} -d \'{{"prompt": "Refund"}}\' localhost:{port}/runs')
            place = f"localhost:{port}/runs/{json.loads(started)['id']}"
            while not (waits := json.loads(execute_bare(tmp_path, f"sleep 0.2; curl -sS {cookie} {place}"))["waits"]):
                pass
            assert waits[0]["tool"] == "refund"
        finally:
            process.terminate()
        assert process.wait(60) == -signal.SIGTERM  # which uvicorn raises again after the lifespan has ended


def test_the_table_of_the_page_is_the_one_of_the_package():
    """Each error of the table stands on the page with its status and code, in the same order."""
    rows = [(row[0], *read_names(row[1]), read_names(row[2])[0]) for row in read_table("fastapi.md", "status")]
    assert rows == [(str(status), code, kind.__name__) for kind, status, code in errors._STATUSES]
    assert errors._STATUSES[-1][0] is AgentError
