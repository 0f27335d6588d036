"""Logins of the users of runs: the link or the key of a user, and the return of the browser."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from starlette.responses import PlainTextResponse
from starlette.routing import BaseRoute, Route

from agentfsm.agents.login_waits import continue_after_login, list_logins
from agentfsm.core.errors import ConflictError, MisuseError, RunNotFoundError, StoreError
from agentfsm.core.pending import Pending, PendingKind
from agentfsm.logins import APIKey, Login, LoginError, LoginLink, TokenStoreError
from agentfsm.serve import bodies
from agentfsm.serve.endpoints import Endpoint, RouteGroup
from agentfsm.serve.errors import STORE_RETRY_S, ForbiddenError
from agentfsm.serve.run_documents import JSONDocument

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from agentfsm.agents.runs import Runs
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
DONE: Final = "You are logged in. You may close this window; the run goes on."
DECLINED: Final = "You have declined. You may close this window; the run is told."
UNKNOWN: Final = "This link is unknown, or was used already: look at the run, and ask for a new one."


def find_logins(gateway: Gateway) -> list[Login]:
    """Return the logins of all agents that are served."""
    agents = gateway.agents.values()
    return list(
        dict.fromkeys([each for agent in agents for each in list_logins(agent.tools) if isinstance(each, Login)])
    )


async def log_in(gateway: Gateway, request: Request, caller: Caller, body: bodies.LoginBody) -> Response:
    """Return a link with which the caller logs in for a call of its own run that waits for it, or take the key.

    All calls of the caller that wait for this login go on, in all runs.
    """
    header = await gateway.open_run(request.path_params["run_id"], caller)
    waiting = await gateway.find_waiting_run(header, body.call_id)
    owner = await gateway.runs.header(waiting)
    if (owner.user, owner.tenant) != (caller.user, caller.tenant):
        raise ForbiddenError("this login is that of the run's user, with the user's own account")
    run = await gateway.runs.load(waiting)
    item = find_wait(run.pending, waiting, body.call_id)
    login = match_login(find_logins(gateway), item)
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


def find_wait(pending: Iterable[Pending], run_id: str, call_id: str) -> Pending:
    """Return the wait of a call for a login.

    Raises:
        ConflictError: when it does not wait for one.
    """
    for item in pending:
        if (item.kind, item.run_id, item.call_id) == (PendingKind.LOGIN, run_id, call_id):
            return item
    raise ConflictError(f"{call_id} of run {run_id!r} does not wait for a login")


def match_login(logins: Iterable[Login], item: Pending) -> Login:
    """Return the login that a call waits for.

    Raises:
        ConflictError: when no tool of this program has it.
    """
    for each in logins:
        if each.server == item.questions[0].key:
            return each
    raise ConflictError(f"no tool of this program has the login at {item.questions[0].key}")


async def finish_login(runs: Runs, logins: Iterable[Login], query: Mapping[str, str]) -> LoginLink | None:
    """Complete a login whose browser has returned, and let the calls go on that wait for it. It may be repeated.

    Args:
        runs: Client for the runs.
        logins: The logins of the program.
        query: Parameters with which the browser has returned.

    Returns:
        The link with its outcome; None if it is unknown, or its call does not wait any more.

    Raises:
        LoginError: when the link has expired, or the answer is not valid.
        StoreError: when not all calls may go on yet; repeat it.
    """
    for login in logins:
        link = await login.find_link(query)
        if link is None or not (link.outcome or await _is_waited_for(runs, link, login.server)):
            continue
        link = await login.complete(query)
        if link is not None and link.outcome == "granted":
            await continue_after_login(runs.store, login.server, tenant=link.tenant, user=link.user)
        elif link is not None:
            with suppress(ConflictError, MisuseError, RunNotFoundError):  # the call is over, or was answered
                await runs.answer(link.run_id, link.call_id, declined=True, by=link.user or "")
        return link
    return None


async def _is_waited_for(runs: Runs, link: LoginLink, server: str) -> bool:
    try:
        run = await runs.load(link.run_id)
    except (RunNotFoundError, MisuseError):
        return False
    return (run.header.tenant, run.header.user) == (link.tenant, link.user) and any(
        item.kind is PendingKind.LOGIN and item.call_id == link.call_id and item.questions[0].key == server
        for item in run.pending
    )


class _Callback:
    """Page to which browsers return. It needs no key: the state of the link names user, run and call."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def answer(self, request: Request) -> Response:
        """Complete the login."""
        query = dict(request.query_params)
        try:
            link = await finish_login(self._gateway.runs, find_logins(self._gateway), query)
        except LoginError as error:
            return _page(400, str(error))
        except (StoreError, TokenStoreError) as error:
            _log.warning("a login was not completed: %s", error)
            return _page(
                503, "The login is not complete yet: load this page again.", {"retry-after": str(STORE_RETRY_S)}
            )
        if link is None:
            return _page(404, UNKNOWN)
        return _page(200, DONE if link.outcome == "granted" else DECLINED)


def _page(status: int, text: str, headers: Mapping[str, str] | None = None) -> Response:
    return PlainTextResponse(text, status, headers={**_PAGE_HEADERS, **(headers or {})})


def _build_routes(gateway: Gateway, _auth: Authenticate) -> Sequence[BaseRoute]:
    return [Route(CALLBACK_PATH, _Callback(gateway).answer, methods=["GET"])]


async def forget_logins(gateway: Gateway, _request: Request, caller: Caller, _body: None) -> Response:
    """Revoke and delete all logins of the caller at the servers of the tools."""
    count, failed = await forget_all(find_logins(gateway), tenant=caller.tenant, user=caller.user)
    return JSONDocument({"forgotten": count, "not_revoked": failed})


async def forget_all(logins: Iterable[Login], *, tenant: str | None, user: str | None) -> tuple[int, list[str]]:
    """Revoke and delete the logins of a user; return their number, and the servers that did not revoke theirs."""
    count, failed = 0, []
    for login in logins:
        try:
            count += await login.forget(tenant=tenant, user=user)
        except LoginError:
            count += 1
            failed.append(login.server)
    return count, failed


LOGINS: Final = RouteGroup(
    name="logins",
    endpoints=(
        Endpoint(method="POST", path="/v1/runs/{run_id}/login", handler=log_in, body=bodies.LoginBody),
        Endpoint(method="DELETE", path="/v1/logins", handler=forget_logins),
    ),
    build_routes=_build_routes,
)
