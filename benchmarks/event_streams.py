"""`python -m benchmarks event_streams`: what an event costs in a stream of the gateway, beside a bare endpoint.

All send the events of the same journal, which has ended, to clients in this process, over ASGI: the gateway reads them
from a store in memory, follows the run and keeps a position. Of the bare endpoints of Starlette, one encodes the events
of the store, and the other writes texts that were made before. The figure is the processor time per event and client,
the best of several samples taken in turns.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

from agentfsm import Agent, Limits, tool
from agentfsm.serve import Caller, serve
from agentfsm.stores import MemoryStore
from agentfsm.testing import ScriptedModel, call, say
from benchmarks.__main__ import machine

TURNS: Final = 250
CLIENTS: Final = 20
SAMPLES: Final = 5
US: Final = 1e6


@tool(read_only=True)
async def look(at: int) -> str:
    """Look at a place."""
    return f"seen {at}"


async def read(app: Callable[..., Any], path: str) -> int:
    """Read a stream to its end, and return the number of its events with an id."""
    count = 0
    never = asyncio.Event()

    async def receive() -> dict[str, Any]:
        await never.wait()
        return {}

    async def send(message: dict[str, Any]) -> None:
        nonlocal count
        count += message.get("body", b"").count(b"id: ")

    headers = [(b"host", b"here")]
    scope = {"type": "http", "method": "GET", "path": path, "query_string": b"", "headers": headers, "root_path": ""}
    await app({**scope, "http_version": "1.1", "scheme": "http", "server": ("here", 80)}, receive, send)
    return count


async def measure() -> None:
    """Measure and print."""
    script = [say("", call("look", at=number)) for number in range(TURNS)]
    limits = Limits(turns=TURNS + 5, seconds=600.0)
    agent = Agent(ScriptedModel(*script, say("end")), tools=[look], name="long", store=MemoryStore(), limits=limits)
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
        print(f"{name:<16} {took:6.1f} us of processor time per event, {CLIENTS} clients, {len(texts)} events")
    print(
        f"the gateway takes {best['gateway'] / best['bare, encoding']:.1f} times as long as the endpoint that encodes"
    )


def main() -> int:
    """Measure what an event costs."""
    told = machine()
    print(f"Python {told['python']}, {told['processor']}\n")
    asyncio.run(measure())
    return 0
