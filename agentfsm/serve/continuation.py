"""Continue one run at the request of a person, on a server over a store that executes no runs by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import attrs

from agentfsm._concurrency import start_in_thread
from agentfsm.core.errors import ConflictError, MisuseError
from agentfsm.core.value import Value
from agentfsm.serve import bodies
from agentfsm.serve.endpoints import Endpoint, RouteGroup
from agentfsm.serve.run_documents import JSONDocument, build_run_document

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from agentfsm.agent import Agent
    from agentfsm.core.header import Header
    from agentfsm.core.run import Run
    from agentfsm.serve.access import Caller
    from agentfsm.serve.gateway import Gateway


@attrs.frozen(kw_only=True)
class Continuation(Value):
    """Two ways to continue a run: this server imports the agent that the run names, or a person enters a command."""

    store: str
    """Path or URL of the store, without a password, for people."""

    build_command: Callable[[Header], str]
    """Returns the command line that continues a run, from the header of its root."""

    open_agent: Callable[[Run, Header], Agent]
    """Imports the agent of a run, given with the header of its root, and returns it with the store. It blocks."""

    def describe(self, root: Header) -> dict[str, Any]:
        """Return the target that would be imported, the store, and the command line, for the person who decides."""
        return {"target": root.target or None, "store": self.store, "command": self.build_command(root)}


async def open_agent(gateway: Gateway, run: Run) -> Agent:
    """Return the agent of a run, imported from the target that the run names.

    Raises:
        ConflictError: when the server is not over a store alone, so that its own agents execute its runs.
        MisuseError: when the run names no agent, or it cannot be imported.
    """
    found = gateway.continuation
    if found is None:
        raise ConflictError("this server does not import the agents of runs: a worker continues them")
    root = await gateway.runs.root(run.id)
    if not root.target:
        raise MisuseError(
            "the run does not name its agent, since it was started from Python by an Agent without "
            f"target='module:name'. Continue it with: {found.build_command(root)}"
        )
    return await start_in_thread(lambda: found.open_agent(run, root)).wait()


async def continue_run(gateway: Gateway, request: Request, caller: Caller, _body: bodies.EmptyBody) -> Response:
    """Execute a run on this server until it is over or waits, with the agent that it names. A pause ends."""
    header = await gateway.open_run(request.path_params["run_id"], caller, is_control=True)
    run = await gateway.runs.load((await gateway.runs.root(header.id)).id)
    if run.is_over:
        raise ConflictError(f"run {run.id!r} is over")
    await gateway.execute_once(await open_agent(gateway, run), run)
    return JSONDocument(await build_run_document(gateway.runs.store, await gateway.wait_for(header.id, 0)), 202)


CONTINUATION = RouteGroup(
    name="continuation",
    endpoints=(
        Endpoint(
            method="POST",
            path="/v1/runs/{run_id}/continue",
            handler=continue_run,
            scope="admin",
            body=bodies.EmptyBody,
        ),
    ),
)
