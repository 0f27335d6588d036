"""Waits of runs for the logins of their users: what ends them, for all runs of a user at once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from agentfsm.agents.decisions import post_decision
from agentfsm.core.errors import ConflictError, RunNotFoundError
from agentfsm.core.inbox import GiveInput
from agentfsm.core.pending import PendingKind
from agentfsm.journal.load import load_run
from agentfsm.journal.run_list import RunIterator
from agentfsm.ports.store import Filter

if TYPE_CHECKING:
    from agentfsm.ports.store import Store
    from agentfsm.ports.tool_login import ToolLogin
    from agentfsm.tools.tool import Tool


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


def list_logins(tools: Iterable[Tool[..., Any]]) -> list[ToolLogin]:
    """Return the logins of tools, each once."""
    return list(dict.fromkeys([tool.login for tool in tools if tool.login is not None]))
