"""`python -m benchmarks open_streams [STREAMS]`: one process of `agentfsm serve` with many open event streams.

The server is a process of its own, with keys of 100 users. Each stream follows a run that waits for an approval, of
20 runs in all. Measured are its memory, its processor time while nothing happens, and how long a health check takes;
then the runs are approved, and the time counts from each event, as the journal has it, to its arrival. At the end a key
is removed, and the time counts until its streams have ended.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

import httpx2

from agentfsm.serve import Caller
from agentfsm.serve.access import add_key, remove_keys
from benchmarks.__main__ import machine

STREAMS: Final = 2_000
USERS: Final = 100
RUNS: Final = 20
IDLE_S: Final = 20.0
TICKS: Final = os.sysconf("SC_CLK_TCK")
PROGRAM: Final = '''
from agentfsm import Agent, tool
from agentfsm.testing import ScriptedModel, call, say

@tool(requires_approval=True)
async def pay(amount: int) -> str:
    """Pay an amount."""
    return f"paid {amount}"

class Payer(ScriptedModel):
    async def reply(self, request, emit=None):
        is_paid = any(type(each).__name__ == "ToolResult" for each in request.messages)
        return await ScriptedModel(say("done") if is_paid else say("", call("pay", amount=5))).reply(request, emit)

def build():
    return Agent(Payer("x"), tools=[pay], name="shop")
'''


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


async def follow(port: int, path: str, key: str, opened: asyncio.Queue[None], delays: list[float]) -> None:
    """Follow a run until its stream ends. Note when each new event has arrived after its time in the journal."""
    begun = time.time()
    reader, writer = await ask(port, path, key)
    opened.put_nowait(None)
    async for line in reader:
        event = json.loads(line[6:]).get("event") if line.startswith(b"data: {") else None
        if event and event["at"] > begun:
            delays.append(time.time() - event["at"])
    writer.close()


async def time_health(port: int) -> list[float]:
    """Return the times of 100 health checks in ms, each on a connection of its own."""
    times = []
    for _ in range(100):
        begun = time.perf_counter()
        reader, writer = await ask(port, "/healthz", "")
        await reader.read()
        writer.close()
        times.append((time.perf_counter() - begun) * 1e3)
    return times


def describe(times: list[float], unit: str) -> str:
    """Return the median and the 99th percentile."""
    most = statistics.quantiles(times, n=100)[98]
    return f"{statistics.median(times):.1f} {unit} in half of the cases, {most:.1f} in 99 %"


async def measure(url: str, process: Process, keys: Path, streams: int) -> None:
    """Measure, and print."""
    users = [add_key(keys, Caller(user=f"u{number}", scopes={"run", "approve"})) for number in range(USERS)]
    port = httpx2.URL(url).port or 0
    async with httpx2.AsyncClient(base_url=url, timeout=60.0) as client, asyncio.TaskGroup() as tasks:
        headers = {"authorization": f"Bearer {users[-1]}"}
        runs = []
        for _ in range(RUNS):
            made = await client.post("/v1/runs", json={"prompt": "x", "wait_s": 30}, headers=headers)
            runs.append(made.json())
        before_mb, cpu_s, delays = process.read_mb(), process.read_cpu_s(), list[float]()
        opened, begun = asyncio.Queue[None](), time.perf_counter()
        owned: dict[int, list[asyncio.Task[None]]] = {}
        for number in range(streams):
            path = f"/v1/runs/{runs[number % RUNS]['id']}/events"
            task = tasks.create_task(follow(port, path, users[number % USERS], opened, delays))
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
        print(f"a health check beside them: {describe(await time_health(port), 'ms')}")
        begun = time.perf_counter()
        remove_keys(keys, "u0", None)
        await asyncio.wait(owned[0])
        print(f"streams of a removed key had ended after {time.perf_counter() - begun:.1f} s")
        for run in runs:
            [item] = run["pending"]
            body = {"call_id": item["call_id"], "digest": item["digest"]}
            answer = await client.post(f"/v1/runs/{run['id']}/approve", json=body, headers=headers)
            assert answer.status_code == 202, answer.text
    print(f"from an event to its arrival: {describe([each * 1e3 for each in delays], 'ms')}; {len(delays):,} arrivals")


def main(count: str = str(STREAMS)) -> int:
    """Start a server, and measure it."""
    streams = int(count)
    told = machine()
    print(f"Python {told['python']}, {told['processor']}\n")
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "crowd.py").write_text(PROGRAM)
        keys = place / "keys.json"
        add_key(keys, Caller(user="first", scopes={"run"}))
        most = str(streams + 200)
        command = [
            sys.executable,
            "-m",
            "agentfsm",
            "serve",
            "crowd:build",
            "--keys",
            str(keys),
            "--http",
            "127.0.0.1:0",
        ]
        command += ["--store", str(place / "runs.db"), "--connections", most, "--connections-per-address", most]
        server = subprocess.Popen(command, cwd=place, stderr=subprocess.PIPE, text=True)  # noqa: S603  our own
        try:
            assert server.stderr is not None
            url = next(word for line in server.stderr for word in line.split() if word.startswith("http"))
            asyncio.run(measure(url.rstrip(";"), Process(server.pid), keys, streams))
        finally:
            server.terminate()
            server.wait()
    return 0
