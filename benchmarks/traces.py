"""`python -m benchmarks traces`: what live traces cost, for a turn with one call and a journal in SQLite.

The same agent with and without `Telemetry` takes turns in one process. CPU is that of all threads: the spans are built
and written in threads of their own. Content is off. The exporter either keeps nothing, so that agentfsm and the SDK's
queue are measured alone, or sends to a server of OTLP over HTTP in another process. In the last line the model takes
50 ms, as fast ones do: the spans are built and sent while it is waited for.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from agentfsm import Agent
from agentfsm.stores import SQLiteStore
from agentfsm.telemetry import Telemetry
from benchmarks.contender import Script
from benchmarks.measure import Measured, Sample, alternate
from benchmarks.ours import following, job
from benchmarks.rows import CPU, US, WALL, Clock, timed

TURNS = Script(turns=10)
SLOW_TURNS = Script(turns=10, model_s=0.05)
# In one measurement.
RUNS = 10
REPEATS = 25
# Answers every request with 200, and prints its port.
RECEIVER = """
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_args):
        pass

server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(server.server_address[1], flush=True)
server.serve_forever()
"""


class Nowhere(SpanExporter):
    """Keeps nothing."""

    def export(self, _spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Take spans."""
        return SpanExportResult.SUCCESS


@contextmanager
def receiving() -> Iterator[str]:
    """Run a server of OTLP in another process, and yield its address."""
    server = subprocess.Popen([sys.executable, "-c", RECEIVER], stdout=subprocess.PIPE, text=True)  # noqa: S603
    assert server.stdout is not None
    try:
        yield f"http://127.0.0.1:{server.stdout.readline().strip()}"
    finally:
        server.kill()
        server.wait()


def sample(agent: Agent, clock: Clock, script: Script = TURNS, runs: int = RUNS) -> Sample:
    """Return the measurement of an agent: microseconds for a turn. The CPU is that until its spans are exported."""
    done = job(agent, script)

    async def once() -> float:
        begun = clock()
        await timed(done, script, runs, clock)
        took = clock() - begun
        for outlet in agent.watch:
            await asyncio.to_thread(outlet.flush)
        if clock is CPU:
            took = clock() - begun
        return took / runs / script.turns * US

    return once


def show(name: str, found: Measured) -> None:
    """Print a line of the table."""
    print(f"{name:<44}{found.floor:>9.1f}{found.own:>9.1f}{found.more:>+9.1f}{found.ratio - 1:>+8.1%}", flush=True)


async def measure() -> None:
    """Measure and print."""
    print(f"{'us for a turn':<44}{'without':>9}{'with':>9}{'more':>9}{'':>8}")
    with TemporaryDirectory() as folder, receiving() as address:
        for durability in ("normal", "full"):
            options: dict[str, Any] = {
                "durability": durability,
                "store": SQLiteStore(Path(folder) / f"{durability}.db"),
            }
            basis = following(TURNS, **options)
            for name, target in (("kept nowhere", Nowhere()), ("sent by OTLP", address)):
                traced = following(TURNS, watch=[Telemetry(target)], **options)
                for clock, unit in ((CPU, "CPU"), (WALL, "wall")):
                    found = await alternate(sample(basis, clock), sample(traced, clock), REPEATS)
                    show(f"SQLite {durability}, spans {name}, {unit}", found)
        slow = following(SLOW_TURNS, **options), following(SLOW_TURNS, watch=[Telemetry(address)], **options)
        plain, traced = [sample(agent, WALL, SLOW_TURNS, 1) for agent in slow]
        show("SQLite full, spans sent by OTLP, 50 ms, wall", await alternate(plain, traced, REPEATS))


def main() -> int:
    """Measure the cost of traces."""
    asyncio.run(measure())
    return 0
