"""`python -m benchmarks event_streams`: what an event costs in a stream of the gateway, beside a bare endpoint.

All send the events of the same journal, which has ended, to clients in this process, over ASGI: the gateway reads them
from a store in memory, follows the run and keeps a position. Of the bare endpoints of Starlette, one encodes the events
of the store, and the other writes texts that were made before. The figure is the processor time per event and client,
the best of several samples taken in turns.

Then clients follow a run that goes on, a turn every few milliseconds: the time from the append of an event to its
arrival at each client. The bare endpoint is given each event by a queue for each client.
"""

from __future__ import annotations

import asyncio
import json
import re
import statistics
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Final

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

from agentfsm import Agent, Limits, tool
from agentfsm.core.events import Event
from agentfsm.engine.execution.options import ExecutionOptions
from agentfsm.serve import Caller, serve
from agentfsm.stores import MemoryStore
from agentfsm.testing import ScriptedModel, call, say
from benchmarks.__main__ import machine

TURNS: Final = 250
CLIENTS: Final = 20
SAMPLES: Final = 5
# The run that goes on: its turns, and the seconds between them.
LIVE_TURNS: Final = 100
PAUSE_S: Final = 0.02
EVENTS_PER_TURN: Final = 5
US: Final = 1e6
MS: Final = 1e3


@tool(read_only=True)
async def look(at: int) -> str:
    """Look at a place."""
    return f"seen {at}"


async def read(app: Callable[..., Any], path: str, on_part: Callable[[bytes], None] = lambda _part: None) -> int:
    """Read a stream to its end, and return the number of its events with an id; `on_part` is given each part."""
    count = 0
    never = asyncio.Event()

    async def receive() -> dict[str, Any]:
        await never.wait()
        return {}

    async def send(message: dict[str, Any]) -> None:
        nonlocal count
        part = message.get("body", b"")
        count += part.count(b"id: ")
        on_part(part)

    headers = [(b"host", b"here")]
    scope = {"type": "http", "method": "GET", "path": path, "query_string": b"", "headers": headers, "root_path": ""}
    await app({**scope, "http_version": "1.1", "scheme": "http", "server": ("here", 80)}, receive, send)
    return count


class Arrivals:
    """Times from the append of events to their arrival."""

    def __init__(self) -> None:
        """Begin without any."""
        self.appended: dict[int, float] = {}
        self.delays_s: list[float] = []
        self.begun = time.process_time()
        self.took_s = 0.0

    def append(self, version: int) -> None:
        """Note that the events up to a version are appended."""
        for each in range(len(self.appended) + 1, version + 1):
            self.appended[each] = time.perf_counter()

    def take(self, part: bytes) -> None:
        """Note that a part of a stream has arrived."""
        now = time.perf_counter()
        self.took_s = time.process_time() - self.begun
        self.delays_s += [
            now - self.appended[int(found)] for found in re.findall(rb"^id: \S+:(\d+)$", part, re.MULTILINE)
        ]

    def describe(self) -> str:
        """Return the median and the 95th percentile, and the processor time per event."""
        cuts = statistics.quantiles(self.delays_s, n=20)
        took = self.took_s * US / len(self.delays_s)
        return f"{cuts[9] * MS:6.2f} ms in half of the cases, {cuts[18] * MS:6.2f} ms in 95 %; {took:.1f} us per event"


async def follow_gateway(agent: Agent) -> Arrivals:
    """Follow a run in the gateway's streams while it goes on."""
    arrivals = Arrivals()
    gateway = serve([agent], auth=lambda _request: Caller(user="x", scopes={"admin"}), parallel=0)
    run = await agent.submit("go")
    async with gateway.lifespan(), asyncio.TaskGroup() as tasks:
        for _ in range(CLIENTS):
            tasks.create_task(read(gateway, f"/v1/runs/{run.id}/events", arrivals.take))
        await asyncio.sleep(PAUSE_S)
        await agent.driver.run_until_blocked(run, ExecutionOptions(on_run=lambda run: arrivals.append(run.version)))
    return arrivals


async def follow_bare(events: Sequence[Event]) -> Arrivals:
    """Follow the same events in the streams of a bare endpoint, as many at a time as a turn has."""
    arrivals, queues = Arrivals(), list[asyncio.Queue[tuple[int, Event] | None]]()

    async def stream(_request: Request) -> StreamingResponse:
        queue = asyncio.Queue[tuple[int, Event] | None]()
        queues.append(queue)

        async def write() -> AsyncIterator[str]:
            while (item := await queue.get()) is not None:
                version, event = item
                yield f"id: run:{version}\ndata: {json.dumps(event.to_dict())}\n\n"

        return StreamingResponse(write(), media_type="text/event-stream")

    app = Starlette(routes=[Route("/live", stream)])
    async with asyncio.TaskGroup() as tasks:
        for _ in range(CLIENTS):
            tasks.create_task(read(app, "/live", arrivals.take))
        for version, event in enumerate(events, 1):
            if version % EVENTS_PER_TURN == 1:
                await asyncio.sleep(PAUSE_S)
            arrivals.append(version)
            for queue in queues:
                queue.put_nowait((version, event))
        for queue in queues:
            queue.put_nowait(None)
    return arrivals


def build_agent(turns: int, delay_s: float = 0.0) -> Agent:
    """Return an agent whose run has so many turns."""
    script = [say("", call("look", at=number), delay_s=delay_s) for number in range(turns)]
    limits = Limits(turns=turns + 5, tool_calls=turns + 5, seconds=600.0)
    return Agent(ScriptedModel(*script, say("end")), tools=[look], name="long", store=MemoryStore(), limits=limits)


async def measure_time() -> None:
    """Measure what an event costs, and print it."""
    agent = build_agent(TURNS)
    run = await agent.run("go")
    texts = [
        f"id: {run.id}:{version}\ndata: {json.dumps(event.to_dict())}\n\n"
        for version, event in enumerate(await agent.history(run.id), 1)
    ]

    async def prepared(_request: Request) -> StreamingResponse:
        async def write() -> AsyncIterator[str]:
            for text in texts:
                yield text

        return StreamingResponse(write(), media_type="text/event-stream")

    async def encoding(_request: Request) -> StreamingResponse:
        async def write() -> AsyncIterator[str]:
            for version, event in enumerate((await agent.store.read(run.id)).events, 1):
                yield f"id: {run.id}:{version}\ndata: {json.dumps(event.to_dict())}\n\n"

        return StreamingResponse(write(), media_type="text/event-stream")

    bare = Starlette(routes=[Route("/prepared", prepared), Route("/encoding", encoding)])
    gateway = serve([agent], auth=lambda _request: Caller(user="x", scopes={"admin"}), parallel=0)
    apps = {
        "bare, prepared": (bare, "/prepared"),
        "bare, encoding": (bare, "/encoding"),
        "gateway": (gateway, f"/v1/runs/{run.id}/events"),
    }
    best: dict[str, float] = {}
    async with gateway.lifespan():
        for _ in range(SAMPLES):
            for name, (app, path) in apps.items():
                begun = time.process_time()
                counts = await asyncio.gather(*[read(app, path) for _ in range(CLIENTS)])
                took = (time.process_time() - begun) * US / sum(counts)
                assert set(counts) == {len(texts)}, counts
                best[name] = min(took, best.get(name, took))
    for name, took in best.items():
        rate = f"{US / took:,.0f} events a second"
        print(f"{name:<16} {took:6.1f} us of processor time per event, {rate}; {CLIENTS} clients, {len(texts)} events")
    print(
        f"the gateway takes {best['gateway'] / best['bare, encoding']:.1f} times as long as the endpoint that encodes"
    )


async def measure_delays() -> None:
    """Measure how fast events arrive, and print it."""
    live = build_agent(LIVE_TURNS, PAUSE_S)
    of_gateway = await follow_gateway(live)
    [of_live] = [row.id async for row in live.runs.iterate()]
    of_bare = await follow_bare(await live.history(of_live))
    print(f"\nfrom the append to the arrival, {CLIENTS} clients, {len(of_gateway.appended)} events:")
    for name, arrivals in (("bare, a queue", of_bare), ("gateway", of_gateway)):
        assert len(arrivals.delays_s) == CLIENTS * len(arrivals.appended)
        print(f"{name:<16} {arrivals.describe()}")


def main() -> int:
    """Measure what an event costs."""
    told = machine()
    print(f"Python {told['python']}, {told['processor']}\n")
    asyncio.run(measure_time())
    asyncio.run(measure_delays())
    return 0
