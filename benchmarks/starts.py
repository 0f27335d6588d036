"""`python -m benchmarks starts [REQUESTS]`: `POST /v1/runs` of one process of `agentfsm serve`, 200 at once.

The agent's model answers at once, and the store is SQLite, each commit on the disk. Requests come over 200 connections
that stay open; first they only start a run, then they wait for its answer. The processor time of the server includes
the execution of the runs, and its floor is what the same runs take in this process, as many at once as the server
executes. A bare endpoint of Starlette that reads the same body and answers at once shows what HTTP costs.
"""

from __future__ import annotations

import asyncio
import json
import re
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

import anyio
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from agentfsm import Agent
from agentfsm.agents.agent import WORKER_PARALLEL
from agentfsm.stores import SQLiteStore
from agentfsm.testing import FunctionModel
from benchmarks.__main__ import machine
from benchmarks.open_streams import Process, started

REQUESTS: Final = 2_000
AT_ONCE: Final = 200
PROGRAM: Final = """
from agentfsm import Agent
from agentfsm.testing import FunctionModel

def build():
    return Agent(FunctionModel(lambda _request: "done"), name="shop")
"""
LENGTH: Final = re.compile(rb"content-length: (\d+)", re.IGNORECASE)


async def send_requests(port: int, body: bytes, count: int, times_s: list[float]) -> None:
    """Send requests over one connection, each after the answer to the one before it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /v1/runs HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
    for _ in range(count):
        begun = time.perf_counter()
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        answer = await reader.readuntil(b"\r\n\r\n")
        found = LENGTH.search(answer)
        assert b" 201 " in answer, answer
        assert found is not None
        await reader.readexactly(int(found[1]))
        times_s.append(time.perf_counter() - begun)
    writer.close()


async def measure(port: int, process: Process, name: str, body: dict[str, object], requests: int) -> float:
    """Measure a server, and print. Return the processor time per request in ms."""
    content, times_s = json.dumps(body).encode(), list[float]()
    await send_requests(port, content, 1, [])
    cpu_s, begun = process.read_cpu_s(), time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(AT_ONCE):
            tasks.create_task(send_requests(port, content, requests // AT_ONCE, times_s))
    took_s = time.perf_counter() - begun
    await asyncio.sleep(2.0)  # for the runs that still wait for the worker
    cpu_ms = (process.read_cpu_s() - cpu_s) / len(times_s) * 1e3
    cuts = statistics.quantiles(times_s, n=100)
    print(
        f"{name:<28} {len(times_s) / took_s:6,.0f}/s, {cuts[49] * 1e3:5.0f} ms in half of the cases, "
        f"{cuts[98] * 1e3:5.0f} ms in 99 %; {cpu_ms:.2f} ms of processor time each"
    )
    return cpu_ms


async def measure_runs(store: SQLiteStore, requests: int) -> float:
    """Return the processor time per run in ms, without a server."""
    agent = Agent(FunctionModel(lambda _request: "done"), name="shop", store=store)
    places = anyio.CapacityLimiter(WORKER_PARALLEL)

    async def run() -> None:
        async with places:
            await agent.run("x")

    await run()
    begun, cpu_s = time.perf_counter(), time.process_time()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(requests):
            tasks.create_task(run())
    cpu_ms, took_s = (time.process_time() - cpu_s) / requests * 1e3, time.perf_counter() - begun
    await agent.aclose()
    print(f"{'the runs without a server':<28} {requests / took_s:6,.0f}/s; {cpu_ms:.2f} ms of processor time each")
    return cpu_ms


def serve_bare() -> None:
    """Serve the bare endpoint, until the process is terminated."""

    async def start(request: Request) -> JSONResponse:
        return JSONResponse({"id": "x", "prompt": (await request.json())["prompt"]}, 201)

    app = Starlette(routes=[Route("/v1/runs", start, methods=["POST"])])
    config = uvicorn.Config(app, port=0, http="h11", access_log=False, log_level="warning")
    bound = config.bind_socket()
    bound.listen(AT_ONCE)
    print(f"http://127.0.0.1:{bound.getsockname()[1]}", file=sys.stderr, flush=True)
    uvicorn.Server(config).run(sockets=[bound])


def main(count: str = str(REQUESTS)) -> int:
    """Start the servers, one after the other, and measure them."""
    requests, told = int(count), machine()
    print(f"Python {told['python']}, {told['processor']}; {AT_ONCE} requests at once\n")
    with started(["benchmarks.starts"], Path.cwd()) as (port, process):
        bare_ms = asyncio.run(measure(port, process, "bare endpoint", {"prompt": "x"}, requests))
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        runs_ms = asyncio.run(measure_runs(SQLiteStore(place / "alone.db"), requests))
        (place / "crowd.py").write_text(PROGRAM)
        command = ["agentfsm", "serve", "crowd:build", "--http", "127.0.0.1:0", "--store", str(place / "runs.db")]
        command += [
            each
            for name in ("connections", "connections-per-address", "open-requests")
            for each in (f"--{name}", str(2 * AT_ONCE))
        ]
        with started(command, place) as (port, process):
            start_ms = asyncio.run(measure(port, process, "start a run", {"prompt": "x"}, requests))
            wait_ms = asyncio.run(
                measure(port, process, "start it, wait for its end", {"prompt": "x", "wait_s": 60}, requests)
            )
    for name, own_ms in (("start a run", start_ms), ("start it, wait for its end", wait_ms)):
        print(f"{name}: {own_ms / (runs_ms + bare_ms):.1f} times the processor time of a run and a bare request")
    return 0


if __name__ == "__main__":
    serve_bare()
