"""`agentfsm serve` and `agentfsm keys` as processes: a server that is killed loses no run and no event."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

import agentfsm
from agentfsm.cli import main

APP = Path(__file__).with_name("served_shop.py.txt")


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "shop.py").write_text(APP.read_text(encoding="utf-8"), encoding="utf-8")
    return tmp_path


@contextmanager
def server_in(folder, *options):
    """Serve in a process of its own, and return the process and a client."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("AGENTFSM_", "PYTHON"))}
    process = subprocess.Popen(
        [sys.executable, "-m", "agentfsm", "serve", "shop:agent", "--http", "127.0.0.1:0", *options],
        cwd=folder,
        env={**kept, "PYTHONPATH": str(Path(agentfsm.__file__).parents[1])},
        stderr=subprocess.PIPE,
        encoding="utf-8",
    )
    try:
        line = process.stderr.readline()
        url = re.search(r"http://\S+:\d+", line)
        assert url, line + process.stderr.read()
        with httpx.Client(base_url=url[0], timeout=60) as client:
            yield process, client
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def read_events(lines, count=None):
    """Return the events of a stream with their ids, at most `count` of them."""
    found, position = [], None
    for line in lines:
        if line.startswith("id: "):
            position = line[4:]
        elif line.startswith("data: ") and position is not None:
            found.append((position, json.loads(line[6:])))
            position = None
            if len(found) == count:
                break
    return found


@pytest.mark.parametrize(
    "ends", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.soak)], ids=["kill", "term"]
)
def test_a_client_goes_on_with_the_next_server(folder, ends):
    """The server dies in the middle of a call. The next one executes the run, and the client misses no event."""
    with server_in(folder) as (process, client):
        run = client.post("/v1/runs", json={"prompt": "go"}).json()
        with client.stream("GET", f"/v1/runs/{run['id']}/events") as stream:
            first = read_events(stream.iter_lines(), 3)
        assert first[-1][1]["event"]["is"] == "ToolStarted"
        process.send_signal(ends)
        if ends is signal.SIGTERM:
            (folder / "go.txt").touch()  # a thread cannot be stopped
            assert process.wait() == 0
    (folder / "go.txt").touch()
    with server_in(folder) as (_process, client):
        headers = {"last-event-id": first[-1][0]}
        with client.stream("GET", f"/v1/runs/{run['id']}/events", headers=headers) as stream:
            rest = read_events(stream.iter_lines())
        with client.stream("GET", f"/v1/runs/{run['id']}/events") as stream:
            assert read_events(stream.iter_lines()) == first + rest
        run = client.get(f"/v1/runs/{run['id']}").json()
    assert (run["status"], run["output"]) == ("done", "all done")
    assert [data["event"]["is"] for _, data in rest][-1] == "AnswerGiven"


def test_a_stream_ends_with_its_server(folder):
    """A server that stops ends its streams, so that it stops at once; the run goes on later."""
    with server_in(folder, "--no-worker") as (process, client):
        run = client.post("/v1/runs", json={"prompt": "go"}).json()
        with client.stream("GET", f"/v1/runs/{run['id']}/events") as stream:
            lines = stream.iter_lines()
            assert next(lines).startswith("retry")
            process.send_signal(signal.SIGTERM)
            assert read_events(lines) == []
        assert process.wait() == 0


def test_keys(folder, capsys, monkeypatch):
    """A key is created, works, is listed without its text, and is removed while the server runs, beside webhooks."""
    monkeypatch.chdir(folder)
    assert (
        main(
            [
                "keys",
                "add",
                "keys.json",
                "ann",
                "--tenant",
                "acme",
                "--scope",
                "run",
                "--scope",
                "approve",
                "--per-minute",
                "90",
                "--four-eyes",
            ]
        )
        == 0
    )
    key = capsys.readouterr().out.strip()
    monkeypatch.setenv("CRM_SECRET", "whsec_" + "a2tr" * 8)
    hooks = {"incoming": {"crm": {"secret": "${CRM_SECRET}", "user": "bot"}}}
    (folder / "hooks.json").write_text(json.dumps(hooks), encoding="utf-8")
    with server_in(folder, "--keys", "keys.json", "--webhooks", "hooks.json") as (_process, client):
        assert client.post("/v1/hooks/crm").status_code == 401
        headers = {"authorization": f"Bearer {key}"}
        assert client.get("/v1/agents", headers=headers).json()["agents"][0]["name"] == "shop"
        for path in ("/v1/agents", "/mcp"):
            assert client.get(path).status_code == 401
            assert client.get(path, headers=headers | {"host": "evil.example"}).status_code == 421
            assert client.get(path, headers=headers | {"origin": "http://evil.example"}).status_code == 403
        assert main(["keys", "list", "keys.json", "--json"]) == 0
        listed = capsys.readouterr().out
        rights = {"scopes": ["approve", "run"], "roles": [], "four_eyes": True}
        limits = {"requests": 90, "open_requests": None, "tokens": None, "runs": None}
        assert json.loads(listed) == {"keys": [{"user": "ann", "tenant": "acme", **rights, "limits": limits}]}
        assert main(["keys", "remove", "keys.json", "ann"]) == 1
        told = "ann has no key without a tenant in keys.json: its keys are removed with --tenant acme\n"
        assert capsys.readouterr().err == told
        time.sleep(0.01)  # the file's time of modification changes
        assert main(["keys", "remove", "keys.json", "ann", "--tenant", "acme"]) == 0
        assert client.get("/v1/agents", headers=headers).status_code == 401
    assert main(["keys", "remove", "keys.json", "ann"]) == 1
    assert main(["keys", "list", "keys.json"]) == 0
    assert main(["keys", "list", "missing.json"]) == 2


def test_other_machines_need_keys(folder, monkeypatch, capsys):
    """An address that others can reach is refused without keys, before anything is served."""
    monkeypatch.chdir(folder)
    assert main(["serve", "shop:agent", "--http", "0.0.0.0:0"]) == 2
    assert "agentfsm keys add" in capsys.readouterr().err
