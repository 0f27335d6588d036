"""Waits of runs for the logins of their users: what ends them, for all runs of a user at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from agentfsm.agents.decisions import post_decision
from agentfsm.agents.subagent import find_inner_agent
from agentfsm.core.errors import ConflictError, MisuseError, RunNotFoundError, ToolError
from agentfsm.core.inbox import GiveInput
from agentfsm.core.pending import PendingKind
from agentfsm.journal.load import load_run
from agentfsm.journal.run_list import RunIterator
from agentfsm.ports.store import Filter
from agentfsm.tools.registry import ToolRegistry

if TYPE_CHECKING:
    from agentfsm.agents.runs import Runs
    from agentfsm.core.run import Run
    from agentfsm.ports.store import Store
    from agentfsm.ports.tool_login import LoginLink, ToolLogin


NOT_REVOKED: Final = "{server} did not revoke its token, which is deleted here: revoke it there"


async def continue_after_login(store: Store, server: str, *, tenant: str | None, user: str | None) -> int:
    """Let every call go on that waits for the login of a user at a server; return their number.

    It may be repeated: a call that goes on already is left alone.

    Args:
        store: Store of the runs.
        server: The server, as the questions of the waits name it.
        tenant: Tenant of the user; None for runs without one.
        user: The user; None for runs without one.

    Raises:
        StoreError: when the store fails; repeat it.
    """
    count = 0
    async for summary in RunIterator(store, Filter(waiting=True, over=False, tenant=tenant or "", user=user or "")):
        try:
            run = await load_run(store, summary.id)
        except RunNotFoundError:  # deleted meanwhile
            continue
        for item in run.pending:
            if item.kind is not PendingKind.LOGIN or item.run_id != run.id or item.questions[0].key != server:
                continue
            given = GiveInput(call_id=item.call_id, by=user or "", answers={server: {}}, digest=item.digest)
            try:
                await post_decision(store, run, item, given)
            except ConflictError:  # declined or out of time a moment ago
                continue
            count += 1
    return count


def list_logins(tools: ToolRegistry) -> list[ToolLogin]:
    """Return the logins of an agent's tools, servers and sub-agents, each once."""
    given: list[ToolLogin | None] = [getattr(source, "users", None) for source in tools.sources]
    found = [each for each in given if each is not None]
    for tool in tools:
        if tool.login is not None:
            found.append(tool.login)
        inner = getattr(find_inner_agent(tool), "tools", None)
        if isinstance(inner, ToolRegistry):
            found += list_logins(inner)
    return list(dict.fromkeys(found))


def find_waited_login(logins: Iterable[ToolLogin], run: Run, call_id: str | None) -> ToolLogin:
    """Return the login that a call of a run waits for; that of the first call without a `call_id`.

    Raises:
        ConflictError: when it does not wait for one, or no tool of this program has it.
    """
    for item in run.pending:
        if item.kind is PendingKind.LOGIN and call_id in {None, item.call_id}:
            server = item.questions[0].key
            found = next((each for each in logins if each.server == server), None)
            if found is None:
                raise ConflictError(f"no tool of this program has the login at {server}")
            return found
    raise ConflictError(f"run {run.id!r} does not wait for a login{f' of {call_id}' if call_id else ''}")


async def finish_login(runs: Runs, logins: Iterable[ToolLogin], query: Mapping[str, str]) -> LoginLink | None:
    """Complete a login whose browser has returned, and let the calls go on that wait for it. It may be repeated.

    Args:
        runs: Client for the runs.
        logins: The logins of the program.
        query: Parameters with which the browser has returned.

    Returns:
        The link with its outcome; None if it is unknown, or its call does not wait any more.

    Raises:
        ToolError: when the link has expired, or the answer is not valid.
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


async def forget_all(logins: Iterable[ToolLogin], *, tenant: str | None, user: str | None) -> tuple[int, list[str]]:
    """Revoke and delete the logins of a user; return their number, and the servers that did not revoke theirs.

    Raises:
        StoreError: when not all were deleted; repeat it.
    """
    count, failed = 0, []
    for login in logins:
        try:
            count += await login.forget(tenant=tenant, user=user)
        except ToolError:
            count += 1
            failed.append(login.server)
    return count, failed


def describe_end(link: LoginLink | None) -> str:
    """Return the text for the browser that has returned."""
    if link is None:
        return "This link is unknown, or was used already: look at the run, and ask for a new one."
    if link.outcome == "granted":
        return "You are logged in. You may close this window; the run goes on."
    return "You have declined. You may close this window; the run is told."
