"""Waits of runs for the logins of their users: what ends them, for all runs of a user at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentfsm.agents.decisions import post_decision
from agentfsm.agents.subagent import find_inner_agent
from agentfsm.core.errors import ConflictError, RunNotFoundError
from agentfsm.core.inbox import GiveInput
from agentfsm.core.pending import PendingKind
from agentfsm.journal.load import load_run
from agentfsm.journal.run_list import RunIterator
from agentfsm.ports.store import Filter
from agentfsm.tools.registry import ToolRegistry

if TYPE_CHECKING:
    from agentfsm.ports.store import Store
    from agentfsm.ports.tool_login import ToolLogin


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
