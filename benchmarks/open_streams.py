"""`python -m benchmarks open_streams [STREAMS]`: one process of `agentfsm serve` with many open event streams.

The server is a process of its own, with keys of 100 users. Each stream follows a run that waits for an approval, of
20 runs in all. Measured are its memory, its processor time while nothing happens, and how long a health check takes,
asked by a third process. A key is removed, and the time counts until its streams have ended. Then the runs are
approved, and each goes on for 20 turns: the processor time of the server counts for each arrival of an event at a
client, and the time from each event, as the journal has it, to its arrival, with health checks meanwhile.

Beside it a bare endpoint of Starlette has as many streams. It is given the texts of as many events, which are made
already, several at a time and at the pace of the runs, and passes them to a queue for each stream, one chunk for each.
Both run on uvicorn with h11, and their clients read over real sockets.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import httpx2
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from agentfsm.serve import Caller
from agentfsm.serve.access import add_key, remove_keys
from benchmarks.__main__ import machine

STREAMS: Final = 2_000
USERS: Final = 100
RUNS: Final = 20
IDLE_S: Final = 20.0
TICKS: Final = os.sysconf("SC_CLK_TCK")
PROGRAM: Final = '''
import structlog  # runs of so many turns are reported, and its import would be measured
from agentfsm import Agent, Limits, tool
from agentfsm.testing import ScriptedModel, call, say

TURNS = 20

@tool(requires_approval=True)
async def pay(amount: int) -> str:
    """Pay an amount."""
    return f"paid {amount}"

@tool(read_only=True)
async def look(at: int) -> str:
    """Look at a place."""
    return f"seen {at}"

class Payer(ScriptedModel):
    async def reply(self, request, emit=None):
        count = sum(type(each).__name__ == "ToolResult" for each in request.messages)
        line = say("", call("look", at=count)) if count else say("", call("pay", amount=5))
        return await ScriptedModel(say("done") if count > TURNS else line).reply(request, emit)

def build():
    return Agent(Payer("x"), tools=[pay, look], name="shop", limits=Limits(turns=TURNS + 5, tool_calls=TURNS + 5))
'''
AT: Final = re.compile(rb'"at":([0-9.]+)')
# Events that the bare endpoint is given at a time, as many as a turn has.
EVENTS_PER_TURN: Final = 5


class Process:
    """The server, as /proc shows it."""

    def __init__(self, pid: int) -> None:
        """Look at a process."""
        self.folder = Path(f"/proc/{pid}")

    def read_mb(self) -> float:
        """Return its resident memory in MB."""
        lines = dict(line.split(":", 1) for line in (self.folder / "status").read_text().splitlines())
        return int(lines["VmRSS"].split()[0]) / 1024

    def read_cpu_s(self) -> float:
        """Return its processor time in seconds."""
        fields = (self.folder / "stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS


async def ask(port: int, path: str, key: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send a request on a connection of its own, as cheaply as can be: the client shares the processor."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nAuthorization: Bearer {key}\r\nConnection: close\r\n\r\n"
    writer.write(head.encode())
    assert b" 200 " in await reader.readline()
    return reader, writer


class Arrivals:
    """Events that arrive at the clients of the gateway."""

    def __init__(self) -> None:
        """Begin without any."""
        self.delays_ms: list[float] = []
        self.deltas = 0
        """Pieces of text that models write, which have no place in a journal."""


async def follow(port: int, path: str, key: str, opened: asyncio.Queue[None], arrivals: Arrivals) -> None:
    """Follow a run until its stream ends. Note when each new event has arrived after its time in the journal."""
    begun = time.time()
    reader, writer = await ask(port, path, key)
    opened.put_nowait(None)
    async for line in reader:
        if line.startswith(b"event: delta"):
            arrivals.deltas += 1
        elif line.startswith(b"data: ") and (found := AT.search(line)) and float(found[1]) > begun:
            arrivals.delays_ms.append((time.time() - float(found[1])) * 1e3)
    writer.close()


async def count_events(port: int, path: str, opened: asyncio.Queue[None]) -> int:
    """Follow a stream of the bare endpoint until its end, and return the number of its events."""
    reader, writer = await ask(port, path, "")
    opened.put_nowait(None)
    count = 0
    async for line in reader:
        count += line.startswith(b"data: ")
    writer.close()
    return count


@contextmanager
def health_checks(port: int) -> Iterator[list[float]]:
    """Ask for the health of a server again and again, in a process of its own, until the block ends: times in ms."""
    command = [sys.executable, "-m", "benchmarks.open_streams", "health", str(port)]
    times: list[float] = []
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:  # noqa: S603
        assert process.stdout is not None
        process.stdout.readline()
        yield times
        times += json.loads(process.communicate()[0])


def check_health(port: int) -> None:
    """Ask for the health of a server, each time on a connection of its own, until the standard input ends."""
    times: list[float] = []

    async def check() -> None:
        while not ended.is_set():
            begun = time.perf_counter()
            reader, writer = await ask(port, "/healthz", "")
            await reader.read()
            writer.close()
            times.append((time.perf_counter() - begun) * 1e3)
            await asyncio.sleep(0.01)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.run_in_executor(None, lambda: (sys.stdin.read(), loop.call_soon_threadsafe(ended.set)))
        print("ready", flush=True)
        await check()

    ended = asyncio.Event()
    asyncio.run(main())
    print(json.dumps(times))


def serve_bare() -> None:
    """Serve the bare endpoint, until the process is terminated."""
    groups: dict[int, list[asyncio.Queue[str | None]]] = {number: [] for number in range(RUNS)}

    async def live(request: Request) -> StreamingResponse:
        queue = asyncio.Queue[str | None]()
        groups[int(request.path_params["number"])].append(queue)

        async def write() -> AsyncIterator[str]:
            yield ": open\n\n"
            while (text := await queue.get()) is not None:
                yield text

        return StreamingResponse(write(), media_type="text/event-stream")

    async def put(request: Request) -> Response:
        texts, pause_s = await request.json()
        for first in range(0, len(texts), EVENTS_PER_TURN):
            for queues in groups.values():
                for queue in queues:
                    for text in texts[first : first + EVENTS_PER_TURN]:
                        queue.put_nowait(text)
                await asyncio.sleep(pause_s)
        for queue in [queue for queues in groups.values() for queue in queues]:
            queue.put_nowait(None)
        return Response()

    async def health(_request: Request) -> Response:
        return Response("ok")

    routes = [
        Route("/live/{number}", live),
        Route("/put", put, methods=["POST"]),
        Route("/healthz", health),
    ]
    config = uvicorn.Config(Starlette(routes=routes), port=0, http="h11", access_log=False, backlog=STREAMS)
    bound = config.bind_socket()
    bound.listen(STREAMS)
    print(f"http://127.0.0.1:{bound.getsockname()[1]}", file=sys.stderr, flush=True)
    uvicorn.Server(config).run(sockets=[bound])


def describe(times: list[float], unit: str) -> str:
    """Return the median and the 99th percentile."""
    most = statistics.quantiles(times, n=100)[98]
    return f"{statistics.median(times):.1f} {unit} in half of the cases, {most:.1f} in 99 %"


@contextmanager
def started(command: list[str], place: Path) -> Iterator[tuple[int, Process]]:
    """Start a server that writes its URL to stderr, and give its port and its process."""
    server = subprocess.Popen([sys.executable, "-m", *command], cwd=place, stderr=subprocess.PIPE, text=True)  # noqa: S603
    try:
        assert server.stderr is not None
        url = next(word for line in server.stderr for word in line.split() if word.startswith("http"))
        yield httpx2.URL(url.rstrip(";")).port or 0, Process(server.pid)
    finally:
        server.terminate()
        server.wait()


async def measure(port: int, process: Process, keys: Path, streams: int) -> tuple[float, list[str], float]:
    """Measure the gateway, and print. Return the us per arrival, as many texts as a stream got, and in what time."""
    users = [add_key(keys, Caller(user=f"u{number}", scopes={"run", "approve"})) for number in range(USERS)]
    url = f"http://127.0.0.1:{port}"
    async with httpx2.AsyncClient(base_url=url, timeout=60.0) as client:
        headers = {"authorization": f"Bearer {users[-1]}"}
        alone_s = process.read_cpu_s()
        await approve(client, await start_runs(client, headers), headers, wait_s=60)
        alone_s = process.read_cpu_s() - alone_s
        runs = await start_runs(client, headers)
        before_mb, cpu_s, arrivals = process.read_mb(), process.read_cpu_s(), Arrivals()
        opened, begun = asyncio.Queue[None](), time.perf_counter()
        owned: dict[int, list[asyncio.Task[None]]] = {}
        for number in range(streams):
            path = f"/v1/runs/{runs[number % RUNS]['id']}/events"
            task = asyncio.create_task(follow(port, path, users[number % USERS], opened, arrivals))
            owned.setdefault(number % USERS, []).append(task)
        for _ in range(streams):
            await opened.get()
        took, busy_s = time.perf_counter() - begun, process.read_cpu_s() - cpu_s
        await asyncio.sleep(1.0)
        grown = (process.read_mb() - before_mb) * 1024 / streams
        print(
            f"{streams:,} streams of {USERS} users opened in {took:.1f} s, the server was busy for {busy_s:.1f} s; "
            f"{process.read_mb():.0f} MB, {grown:.0f} KB each"
        )
        cpu_s, begun = process.read_cpu_s(), time.perf_counter()
        await asyncio.sleep(IDLE_S)
        share = (process.read_cpu_s() - cpu_s) / (time.perf_counter() - begun)
        print(f"while nothing happens: {share:.0%} of a processor")
        with health_checks(port) as times:
            await asyncio.sleep(2.0)
        print(f"a health check beside them: {describe(times, 'ms')}")
        begun = time.perf_counter()
        remove_keys(keys, "u0", None)
        await asyncio.wait(owned.pop(0))
        print(f"streams of a removed key had ended after {time.perf_counter() - begun:.1f} s")
        cpu_s, begun = process.read_cpu_s(), time.perf_counter()
        with health_checks(port) as times:
            await approve(client, runs, headers)
            await asyncio.wait([task for tasks in owned.values() for task in tasks])
            lasted_s = time.perf_counter() - begun
        took_s = process.read_cpu_s() - cpu_s - alone_s
        count = len(arrivals.delays_ms) + arrivals.deltas
        print(
            f"from an event to its arrival: {describe(arrivals.delays_ms, 'ms')}; {len(arrivals.delays_ms):,} arrivals "
            f"and {arrivals.deltas:,} of pieces of text"
        )
        print(f"a health check meanwhile: {describe(times, 'ms')}, {max(times):.1f} ms at most")
        print(f"processor time of the same runs without streams: {alone_s:.2f} s, which do not count below")
        answer = await client.get(f"/v1/runs/{runs[0]['id']}/events", headers=headers)
        arrived = count // sum(map(len, owned.values()))
        texts = re.findall(r"id: .*\ndata: .*\n\n", answer.text)
        return took_s / count * 1e6, (texts * 2)[-arrived:], lasted_s


async def start_runs(client: httpx2.AsyncClient, headers: dict[str, str]) -> list[dict[str, Any]]:
    """Start runs, and return them once they wait for their approval."""
    body = {"prompt": "x", "wait_s": 30}
    return [(await client.post("/v1/runs", json=body, headers=headers)).json() for _ in range(RUNS)]


async def approve(
    client: httpx2.AsyncClient, runs: list[dict[str, Any]], headers: dict[str, str], wait_s: int = 0
) -> None:
    """Approve the call that each run waits for; then wait for the end of the runs."""
    for run in runs:
        [item] = run["pending"]
        body = {"call_id": item["call_id"], "digest": item["digest"]}
        answer = await client.post(f"/v1/runs/{run['id']}/approve", json=body, headers=headers)
        assert answer.status_code == 202, answer.text
    for run in runs if wait_s else ():
        await client.get(f"/v1/runs/{run['id']}", params={"wait_s": wait_s}, headers=headers)


async def measure_bare(port: int, process: Process, streams: int, texts: list[str], lasted_s: float) -> float:
    """Measure the bare endpoint, and print. Return the time per arrival in us."""
    opened = asyncio.Queue[None]()
    async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=600.0) as client:
        readers = [count_events(port, f"/live/{number % RUNS}", opened) for number in range(streams)]
        tasks = [asyncio.create_task(each) for each in readers]
        for _ in range(streams):
            await opened.get()
        await asyncio.sleep(1.0)
        cpu_s = process.read_cpu_s()
        with health_checks(port) as times:
            await client.post("/put", json=[texts, lasted_s / RUNS / len(texts) * EVENTS_PER_TURN])
            counts = await asyncio.gather(*tasks)
    assert set(counts) == {len(texts)}, set(counts)
    print(f"a health check of the bare endpoint meanwhile: {describe(times, 'ms')}, {max(times):.1f} ms at most")
    return (process.read_cpu_s() - cpu_s) / sum(counts) * 1e6


def main(count: str = str(STREAMS)) -> int:
    """Start the servers, one after the other, and measure them."""
    streams = int(count)
    told = machine()
    print(f"Python {told['python']}, {told['processor']}\n")
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "crowd.py").write_text(PROGRAM)
        keys = place / "keys.json"
        add_key(keys, Caller(user="first", scopes={"run"}))
        most = str(streams + 200)
        command = ["agentfsm", "serve", "crowd:build", "--keys", str(keys), "--http", "127.0.0.1:0"]
        command += ["--store", str(place / "runs.db"), "--connections", most, "--connections-per-address", most]
        with started(command, place) as (port, process):
            own_us, texts, lasted_s = asyncio.run(measure(port, process, keys, streams))
    with started(["benchmarks.open_streams", "bare"], Path.cwd()) as (port, process):
        bare_us = asyncio.run(measure_bare(port, process, streams, texts, lasted_s))
    print(
        f"processor time of the server per arrival of an event: {own_us:.1f} us, {own_us / bare_us:.1f} times that of "
        f"the bare endpoint ({bare_us:.1f} us)"
    )
    return 0


if __name__ == "__main__":
    if sys.argv[1] == "bare":
        serve_bare()
    else:
        check_health(int(sys.argv[2]))
