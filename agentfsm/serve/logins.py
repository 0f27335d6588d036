"""Logins of the users of runs: the link or the key of a user, and the return of the browser."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from starlette.responses import PlainTextResponse
from starlette.routing import BaseRoute, Route

from agentfsm.agents.login_waits import (
    continue_after_login,
    describe_end,
    find_waited_login,
    finish_login,
    forget_all,
    list_logins,
)
from agentfsm.core.errors import ConflictError, MisuseError, StoreError, ToolError
from agentfsm.logins import APIKey, Login, LoginError, TokenStoreError
from agentfsm.serve import bodies
from agentfsm.serve.endpoints import Endpoint, RouteGroup
from agentfsm.serve.errors import STORE_RETRY_S, ForbiddenError
from agentfsm.serve.run_documents import JSONDocument

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from agentfsm.ports.tool_login import ToolLogin
    from agentfsm.serve.access import Authenticate, Caller
    from agentfsm.serve.gateway import Gateway

_log = logging.getLogger("agentfsm.serve")

CALLBACK_PATH: Final = "/v1/logins/callback"
# Seconds for which a link is valid that a user has just asked for.
LINK_S: Final = 3_600.0
_PAGE_HEADERS: Final = {
    "cache-control": "no-store",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "content-security-policy": "default-src 'none'",
}


def find_logins(gateway: Gateway) -> list[ToolLogin]:
    """Return the logins of all agents that are served."""
    return list(dict.fromkeys([each for agent in gateway.agents.values() for each in list_logins(agent.tools)]))


async def log_in(gateway: Gateway, request: Request, caller: Caller, body: bodies.LoginBody) -> Response:
    """Return a link with which the caller logs in for a call of its own run that waits for it, or take the key.

    All calls of the caller that wait for this login go on, in all runs.
    """
    header = await gateway.open_run(request.path_params["run_id"], caller)
    waiting = await gateway.find_waiting_run(header, body.call_id, shown_run=body.run_id)
    owner = await gateway.runs.header(waiting)
    if (owner.user, owner.tenant) != (caller.user, caller.tenant):
        raise ForbiddenError("this login is that of the run's user, with the user's own account")
    run = await gateway.runs.load(waiting)
    agent = gateway.agents.get((await gateway.runs.root(waiting)).agent)
    known = find_logins(gateway) if agent is None else list_logins(agent.tools)  # agents may log in differently
    login = find_waited_login(known, run, body.call_id)
    if not isinstance(login, Login):
        raise ConflictError(f"the login at {login.server} is made elsewhere")
    if body.key is not None:
        try:
            await login.store_key(body.key, tenant=owner.tenant, user=owner.user)
        except LoginError as error:
            raise MisuseError(str(error)) from None
        count = await continue_after_login(gateway.runs.store, login.server, tenant=owner.tenant, user=owner.user)
        return JSONDocument({"continued": count})
    if isinstance(login.settings, APIKey):
        raise MisuseError(f"{login.server} takes a key: give it as `key`")
    redirect_url = login.settings.redirect_url or f"{str(request.base_url).rstrip('/')}{CALLBACK_PATH}"
    try:
        url = await login.begin(
            tenant=owner.tenant,
            user=owner.user,
            run_id=waiting,
            call_id=body.call_id,
            redirect_url=redirect_url,
            lasts_s=LINK_S,
        )
    except LoginError as error:
        raise ConflictError(f"there is no link now: {error}") from None
    return JSONDocument({"url": url, "expires_in_s": LINK_S})


class _Callback:
    """Page to which browsers return. It needs no key: the state of the link names user, run and call."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def answer(self, request: Request) -> Response:
        """Complete the login."""
        query = dict(request.query_params)
        try:
            link = await finish_login(self._gateway.runs, find_logins(self._gateway), query)
        except (StoreError, TokenStoreError) as error:
            _log.warning("a login was not completed: %s", error)
            return _page(
                503, "The login is not complete yet: load this page again.", {"retry-after": str(STORE_RETRY_S)}
            )
        except ToolError as error:
            return _page(400, str(error))
        return _page(404 if link is None else 200, describe_end(link))


def _page(status: int, text: str, headers: Mapping[str, str] | None = None) -> Response:
    return PlainTextResponse(text, status, headers={**_PAGE_HEADERS, **(headers or {})})


def _build_routes(gateway: Gateway, _auth: Authenticate) -> Sequence[BaseRoute]:
    return [Route(CALLBACK_PATH, _Callback(gateway).answer, methods=["GET"])]


async def forget_logins(gateway: Gateway, _request: Request, caller: Caller, _body: None) -> Response:
    """Revoke and delete all logins of the caller at the servers of the tools."""
    count, failed = await forget_all(find_logins(gateway), tenant=caller.tenant, user=caller.user)
    return JSONDocument({"forgotten": count, "not_revoked": failed})


LOGINS: Final = RouteGroup(
    name="logins",
    endpoints=(
        Endpoint(method="POST", path="/v1/runs/{run_id}/login", handler=log_in, body=bodies.LoginBody),
        Endpoint(method="DELETE", path="/v1/logins", handler=forget_logins),
    ),
    build_routes=_build_routes,
)
