"""`agentfsm mcp serve` as a process: standard output belongs to the protocol, and no end of it loses a run."""

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path

import anyio
import httpx
import pytest
from mcp import Client, MCPError, StdioServerParameters
from mcp.client.stdio import stdio_client

import agentfsm
from agentfsm.stores import SQLiteStore
from agentfsm.testing.conformance.helpers import list_claimable
from tests.support import warm_python

APP = Path(__file__).with_name("served.py.txt")
TOKEN = "a-token-that-is-long-enough"  # noqa: S105  it opens nothing
WORDS = ("-m", "agentfsm", "mcp", "serve")
# Where it is the start of the process, or what its streams are, that is tested.
COLD = [sys.executable, *WORDS]


@pytest.fixture
def anyio_backend():
    """Return the one with which the processes are made."""
    return "asyncio"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "app.py").write_text(APP.read_text(encoding="utf-8"), encoding="utf-8")
    return tmp_path


def env(**more):
    package = str(Path(agentfsm.__file__).parents[1])
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("AGENTFSM_", "PYTHON"))}
    return {**kept, "PYTHONPATH": package, **more}


@contextmanager
def errors_of(folder):
    """Open what the standard error of processes goes to."""
    with (folder / "errors.txt").open("a", encoding="utf-8") as errors:
        yield errors


@asynccontextmanager
async def client_of(folder, target, *options, mode="auto", **more):
    """Connect to a process of its own that serves a target over stdio."""
    command, *args = warm_python.MCP.command(*WORDS, target, *options)
    parameters = StdioServerParameters(command=command, args=args, env=env(**more), cwd=folder)
    with errors_of(folder) as errors:
        async with Client(stdio_client(parameters, errlog=errors), mode=mode) as client:
            yield client


@pytest.mark.parametrize(
    ("target", "name", "tools", "mode"),
    [
        ("app:agent", "digger", ["start", "send", "status", "result", "approve", "dig", "loud", "pid"], "auto"),
        ("app:made", "digger", ["start", "send", "status", "result", "approve", "dig", "loud", "pid"], "legacy"),
        ("app:registry", "app", ["loud", "pid"], "auto"),
        ("app:service", "mine", ["loud"], "legacy"),
    ],
)
async def test_what_is_served_over_stdio(folder, target, name, tools, mode):
    """An agent, what a function returns, a registry, and a server with resources of its own."""
    async with client_of(folder, target, mode=mode) as client:
        assert [each.name for each in (await client.list_tools()).tools] == tools
        assert client.server_info.name == name
        assert (await client.call_tool("loud", {"text": "é"})).content[0].text == "É"


async def test_the_agents_options(folder):
    """Its own tools left out, the others under a prefix."""
    async with client_of(folder, "app:agent", "--prefix", "dig_", "--no-tools") as client:
        names = [each.name for each in (await client.list_tools()).tools]
    assert names == ["dig_start", "dig_send", "dig_status", "dig_result", "dig_approve"]


def request(number, method, **params):
    return json.dumps({"jsonrpc": "2.0", "id": number, "method": method, "params": params})


def test_nothing_but_the_protocol_gets_to_standard_output(folder):
    """Whatever prints: the module, a tool, Python's own buffer, a child, a logger, the end of the process."""
    hello = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "x", "version": "1"}}
    said = [
        request(1, "initialize", **hello),
        json.dumps({"jsonrpc": "2.0", "method": "notifications/initialized"}),
        request(2, "tools/call", name="loud", arguments={"text": "a"}),
    ]
    with errors_of(folder) as errors:
        process = subprocess.Popen(
            [*COLD, "app:agent"],
            cwd=folder,
            env=env(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            encoding="utf-8",
        )
    process.stdin.write("\n".join(said) + "\n")
    process.stdin.flush()
    answers = [json.loads(process.stdout.readline()) for _ in range(2)]
    process.stdin.write(request(3, "tools/call", name="pid", arguments={}) + "\n")
    process.stdin.flush()
    answers.append(json.loads(process.stdout.readline()))
    assert "printed by another tool" in (folder / "errors.txt").read_text(encoding="utf-8")  # at once
    process.stdin.close()
    rest = process.stdout.read()
    process.stdout.close()
    assert process.wait() == 0
    assert [each["id"] for each in answers] == [1, 2, 3]
    assert rest in ("", "printed at the end\n")  # the client has gone, and with it the protocol
    errors = (folder / "errors.txt").read_text(encoding="utf-8")
    for words in ("by the module", "by a tool", "held back", "to the descriptor", "by a child", "logged"):
        assert words in errors


async def begun(client, **arguments):
    """Start a run, and return once it is inside a tool."""
    async with anyio.create_task_group() as tasks:
        arguments = {"prompt": "dig", **arguments}
        tasks.start_soon(partial(client.call_tool, "start", arguments, progress_callback=inside(tasks)))


def inside(tasks):
    """Return what hears the progress of a run, and ends the waiting for it when it is inside a tool."""

    async def progress(_number, _total, message):
        if "dig" in message:
            tasks.cancel_scope.cancel()

    return progress


async def test_a_run_outlives_a_kill_of_the_server(folder):
    """It is killed in mid-run (kill -9); another server drives it on, and `result` has its answer."""
    async with client_of(folder, "app:agent") as client:
        await begun(client, run_id="r1", wait_s=60)
        number = int((await client.call_tool("pid", {})).content[0].text)
        os.kill(number, signal.SIGKILL)
        with pytest.raises(MCPError):
            await client.call_tool("pid", {})
    async with client_of(folder, "app:agent", SOFT="1") as client:
        run = (await client.call_tool("result", {"run_id": "r1", "wait_s": 60})).structured_content
    assert (run["status"], run["answer"]) == ("done", "it says: dug")


async def test_a_run_outlives_its_client(folder):
    """The client closes the streams in mid-run, the process ends, and the next one goes on with the run."""
    async with client_of(folder, "app:agent") as client:
        await begun(client, run_id="r1", wait_s=60)
    async with client_of(folder, "app:agent", SOFT="1") as client:
        run = (await client.call_tool("result", {"run_id": "r1", "wait_s": 60})).structured_content
    assert run["answer"] == "it says: dug"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_a_server_on_stdio_in_order(folder, number):
    """Although a thread waits for its input: the run under way has no owner afterwards, and no crash is counted."""
    with errors_of(folder) as errors:
        command = warm_python.MCP.command(*WORDS, "app:agent", "--drain", "0")
        process = await anyio.open_process(command, cwd=folder, env=env(), stderr=errors)
    hello = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "x", "version": "1"}}
    start = {"name": "start", "arguments": {"prompt": "dig", "run_id": "r1"}, "_meta": {"progressToken": 1}}
    for line in (
        request(1, "initialize", **hello),
        json.dumps({"jsonrpc": "2.0", "method": "notifications/initialized"}),
        request(2, "tools/call", **start),
    ):
        await process.stdin.send(f"{line}\n".encode())
    heard = b""
    while b"turn 1: dig" not in heard:
        heard += await process.stdout.receive()
    process.send_signal(number)
    assert await process.wait() == 0
    await process.aclose()
    assert await left_in(folder) == ("r1", 0)


async def left_in(folder):
    """Return the run that a worker could go on with, and how many crashes it has seen."""
    store = SQLiteStore(folder / ".agentfsm" / "runs.db")
    (due,) = await list_claimable(store, "digger")
    lease = await store.lease(due)
    await store.release(lease).wait()
    await store.aclose()
    return due, lease.crashes


def listening(folder, *options, **more):
    """Start a server over HTTP, and return its process and its URL."""
    process = subprocess.Popen(
        warm_python.MCP.command(*WORDS, *options),
        cwd=folder,
        env=env(**more),
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        encoding="utf-8",
    )
    for line in process.stderr:
        if found := re.search(r"at (http://\S+);", line):
            return process, found[1]
    raise AssertionError(process.wait())


async def test_a_signal_ends_a_server_over_http_in_order(folder):
    """A client that waits for a run is answered that it still runs, and the run is given back."""
    process, url = await anyio.to_thread.run_sync(lambda: listening(folder, "app:agent", "--http", "0", "--drain", "0"))
    async with Client(url) as client:
        await client.list_tools()  # which it would ask for behind the answer, to check that
        await begun(client, run_id="r1", wait_s=60)

        async def end(_number, _total, _message):
            process.send_signal(signal.SIGTERM)

        waits = {"run_id": "r1", "wait_s": 60}
        run = (await client.call_tool("result", waits, progress_callback=end)).structured_content
        assert run["status"] in {"queued", "running"}
    output, errors = await anyio.to_thread.run_sync(process.communicate)
    assert (process.returncode, output) == (0, "printed at the end\n")
    assert "the next server continues the open runs" in errors
    assert await left_in(folder) == ("r1", 0)


def test_a_token_from_a_variable_of_ones_own(folder):
    """Requests without it are refused."""
    options = ["app:registry", "--http", "127.0.0.1:0", "--token-env", "MINE"]
    process, url = listening(folder, *options, MINE=TOKEN)
    answer = httpx.post(url)
    process.terminate()
    process.communicate()
    assert answer.status_code == 401


def test_a_client_that_goes_in_mid_word_is_no_fault(folder):
    """It closes the stream that it would be answered on; the server ends, and says nothing of broken pipes."""
    hello = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "x", "version": "1"}}
    with errors_of(folder) as errors:
        process = subprocess.Popen(
            [*COLD, "app:registry"],
            cwd=folder,
            env=env(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
        )
    process.stdout.close()
    process.stdin.write(request(1, "initialize", **hello).encode() + b"\n")
    process.stdin.flush()
    with suppress(BrokenPipeError):
        process.stdin.close()
    process.wait()
    assert "Traceback" not in (folder / "errors.txt").read_text(encoding="utf-8")
