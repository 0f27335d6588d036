"""Conversations of clients that send messages: a message starts a run of the session, or is input of its open run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

from agentfsm.core.errors import ConflictError, RunNotFoundError
from agentfsm.core.pending import PendingKind
from agentfsm.core.value import Value
from agentfsm.decisions import HOW_TO_RESOLVE
from agentfsm.ports.store import Filter

if TYPE_CHECKING:
    from agentfsm.core.run import Run
    from agentfsm.runs import Prompt, Runs
    from agentfsm.serve.access import Caller
    from agentfsm.serve.event_stream import Versions
    from agentfsm.serve.gateway import Gateway


@attrs.frozen(kw_only=True)
class Turn(Value):
    """The run that answers a message, and the position after which its events answer it."""

    run_id: str
    """Id of the run."""

    versions: Versions
    """Versions of the run and of its sub-agents' runs before the message; empty for a new run."""


async def say(
    gateway: Gateway,
    caller: Caller,
    prompt: Prompt,
    *,
    agent: str,
    session: str,
    key: str,
    metadata: dict[str, Any] | None = None,
    request_hash: str = "",
) -> Turn:
    """Say something in a conversation: start a run of the session, or send input to its run that is not over.

    Args:
        gateway: The gateway.
        caller: The caller, to whom the session belongs.
        prompt: The message.
        agent: Name of the agent.
        session: Name of the session.
        key: Id of the message, which becomes the id of a new run. A message that is sent again with it has no effect.
        metadata: Data that is stored with a new run.
        request_hash: Hash of the request, by which `has_input` finds the message; empty for none.

    Raises:
        ConflictError: when the open run waits for something else than a message, or the key is that of another run.
    """
    if await _exists(gateway.runs, key):
        run_id, _ = await gateway.start_run(caller, prompt, agent=agent, session=session, key=key)
        return Turn(run_id=run_id, versions={})
    run = await find_latest_run(gateway, caller, session)
    input_key = f"{key}.{request_hash}" if request_hash else key
    if run is not None and await has_input(gateway.runs, run.id, f"input:{input_key}"):
        return Turn(run_id=run.id, versions={})
    if run is None or run.is_over:
        run_id, _ = await gateway.start_run(
            caller, prompt, agent=agent, session=session, key=key, metadata=metadata or {}
        )
        return Turn(run_id=run_id, versions={})
    if blocking := [item for item in run.pending if item.kind is not PendingKind.INPUT]:
        waits = ", ".join(f"{each.kind} of {each.tool or 'the run'} ({HOW_TO_RESOLVE[each.kind]})" for each in blocking)
        raise ConflictError(f"run {run.id!r} of this conversation waits for: {waits}; decide that first, or cancel it")
    versions = await collect_versions(gateway.runs, run.id, run.version)
    await gateway.runs.send(run.id, prompt, key=input_key)
    return Turn(run_id=run.id, versions=versions)


async def has_input(runs: Runs, run_id: str, ending: str) -> bool:
    """Return whether a run was sent input whose key has an ending, such as the hash of a request."""
    return any(row.key.endswith(ending) for row in await runs.store.inbox(run_id))


async def _exists(runs: Runs, run_id: str) -> bool:
    try:
        await runs.header(run_id)
    except RunNotFoundError:
        return False
    return True


async def find_latest_run(gateway: Gateway, caller: Caller, session: str) -> Run | None:
    """Return the newest run of a conversation; None if there is none."""
    rows = await gateway.runs.list(Filter(session=caller.qualify_session(session)), limit=1)
    return await gateway.runs.load(rows[0].id) if rows else None


async def collect_versions(runs: Runs, run_id: str, version: int) -> Versions:
    """Return the versions of a run and of the runs of its sub-agents."""
    versions = {run_id: version}
    for child in await runs.children(run_id):
        versions |= await collect_versions(runs, child.id, child.version)
    return versions
