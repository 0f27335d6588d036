"""A run whose call begins a task at an MCP server is killed at each commit: the server never gets a second one."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from itertools import count
from pathlib import Path

import anyio
import pytest

from agentfsm import Agent, Limits, PendingKind, RunNotFoundError, State, ToolResult
from agentfsm.core.events import ToolLost, ToolPaused
from agentfsm.mcp import MCPServer
from agentfsm.ports import Emit, Model, ProposedCall, Reply, Request, Store
from agentfsm.testing.crash import ForkServer
from tests.support.crash_story import count_statements
from tests.support.port_servers import listening

SERVER = str(Path(__file__).parents[1] / "support" / "task_server.py")


class Clerk(Model):
    """Has a report written, and repeats what has become of it; in any process."""

    def __init__(self, job: str) -> None:
        """Name the report."""
        self.name = "clerk"
        self.call = ProposedCall(id="a", name="jobs__report", arguments=json.dumps({"job": job}))

    async def reply(self, request: Request, emit: Emit | None = None) -> Reply:
        """Return the call, or its result."""
        last = request.messages[-1]
        return Reply(text=last.content) if isinstance(last, ToolResult) else Reply(calls=(self.call,))


def clerk_on(store: Store, url: str, run_id: str) -> Agent:
    """Return the agent."""
    jobs = MCPServer.http(f"{url}/mcp", name="jobs", confirm=False, allow_private=True)
    limits = Limits(crashes=1_000_000)
    return Agent(Clerk(run_id), name="clerk", tools=[jobs], store=store, limits=limits)


async def work(store_of: Callable[[], Store], url: str, run_id: str) -> None:
    """Drive the run to its end, or until this process is killed. A person settles a call of unknown outcome."""
    count_statements()
    clerk = clerk_on(store_of(), url, run_id)
    try:
        run = await clerk.load(run_id)
    except RunNotFoundError:
        run = await clerk.run("Write it.", id=run_id)
    while not run.is_over:
        for item in run.pending:
            if item.kind is PendingKind.OUTCOME:
                await clerk.settle(run_id, item.call_id, result="settled")
        run = await clerk.resume(run_id, takeover=True)
    await clerk.aclose()


async def check(store_of: Callable[[], Store], place: Path, run_id: str) -> None:
    """Check that one task at most was begun, and that a person was asked only if the journal has no handle of it."""
    clerk = Agent(Clerk(run_id), name="clerk", store=store_of())
    run, events = await clerk.load(run_id), await clerk.history(run_id)
    began = (place / "notes").read_text().splitlines().count(f"{run_id}: began")
    handles = {json.loads(event.state)["task"]["id"] for event in events if isinstance(event, ToolPaused)}
    is_lost = any(isinstance(event, ToolLost) for event in events)
    assert run.state is State.DONE
    assert (began, len(handles), run.output) == (1, 1, f"{run_id} is ready") or (began <= 1 and is_lost and not handles)
    await clerk.aclose()


def prepare() -> None:
    """Load the client of MCP once."""
    import_module("agentfsm.mcp.client.mcp_server")


@pytest.fixture(scope="module")
def fork_server() -> Iterator[ForkServer]:
    with ForkServer(prepare) as server:
        yield server


@pytest.fixture
def url(folder: Path) -> Iterator[str]:
    with listening([sys.executable, SERVER, str(folder)], {}) as found:
        yield found


@pytest.mark.parametrize("backend", ["asyncio", pytest.param("trio", marks=pytest.mark.soak)])
@pytest.mark.parametrize(
    ("store_of", "apart"),
    [
        ("sqlite", 7),
        pytest.param("sqlite", 1, marks=pytest.mark.soak),
        pytest.param("postgres", 1, marks=pytest.mark.soak),
    ],
    indirect=["store_of"],
)
def test_a_run_with_a_task_may_be_killed(fork_server, folder, url, store_of, apart, backend):  # noqa: PLR0917  fixtures
    """Before and after each commit. The server knows of the job by its name, which is that of the run."""
    for at in count(1, apart):
        run_id = f"{backend}{at}"
        (folder / f"{run_id}.done").touch()
        first = fork_server.run(partial(work, store_of, url, run_id), kill_at=("commit", at), backend=backend)
        if first.killed:
            assert not fork_server.run(partial(work, store_of, url, run_id), backend=backend).killed
        anyio.run(check, store_of, folder, run_id)
        if not first.killed:
            break
    assert at > 10, at
