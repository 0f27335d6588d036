"""A gateway on a real socket, whose clients name their caller in a header."""

from contextlib import asynccontextmanager

import anyio
import httpx

from agentfsm._lib.web import http_server
from agentfsm.serve import Caller, serve


def read_caller(request):
    """Return the caller that a request names, as `x-caller: NAME/TENANT/SCOPE+SCOPE` or as the key of a client."""
    given = request.headers.get("x-caller") or request.headers.get("authorization", "").removeprefix("Bearer ")
    if given.count("/") != 2:
        return None
    user, tenant, scopes = given.split("/")
    return Caller(user=user, tenant=tenant or None, scopes=scopes.split("+"))


@asynccontextmanager
async def serving(*agents, auth=read_caller, connections=None, **options):
    """Serve on a free port, and return a client whose requests are those of an administrator."""
    app = serve(agents, auth=auth, **options)

    async def run(*, task_status):
        with http_server.bind_socket("127.0.0.1", 0) as bound:
            url = http_server.format_url("127.0.0.1", bound)
            await http_server.serve(app, bound, url, task_status, app.close_streams, limits=connections)

    async with anyio.create_task_group() as tasks:
        url = await tasks.start(run)
        async with httpx.AsyncClient(
            base_url=url,
            headers={"x-caller": "root//admin"},
            timeout=30,
            verify=False,  # noqa: S501  it speaks HTTP
        ) as client:  # reading the certificates would take longer than most tests
            yield client
        tasks.cancel_scope.cancel()


def named(user="ann", tenant="", scopes="run"):
    """Return the header of a caller."""
    return {"x-caller": f"{user}/{tenant}/{scopes}"}
