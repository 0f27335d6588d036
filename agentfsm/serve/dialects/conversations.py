"""Conversations of clients that send messages: a message starts a run of the session, or is input of its open run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import attrs

from agentfsm.agents.decisions import HOW_TO_RESOLVE, build_answer
from agentfsm.core.errors import ConflictError
from agentfsm.core.inbox import Input, Wake
from agentfsm.core.pending import PendingKind
from agentfsm.core.run_ids import build_key_id, build_said_key
from agentfsm.core.value import Value
from agentfsm.ports.store import Filter
from agentfsm.serve.run_control import answer_call, send_text
from agentfsm.tools.front_end import read_front_end

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from agentfsm.agents.runs import Prompt, Runs
    from agentfsm.core.pending import Pending
    from agentfsm.core.run import Run
    from agentfsm.core.run_ids import DerivedId
    from agentfsm.core.settings import Settings
    from agentfsm.serve.access import Caller
    from agentfsm.serve.event_stream import Versions
    from agentfsm.serve.gateway import Gateway


# Waits of a run beside which it takes messages.
OPEN_WAITS: Final = frozenset({PendingKind.INPUT, PendingKind.TASK})


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
    key: str | None,
    session: str | None = None,
    after: Run | None = None,
    settings: Settings | None = None,
    metadata: dict[str, Any] | None = None,
    request_hash: str = "",
    answer: str | None = None,
    results: Mapping[str, FrontEndResult] | None = None,
    traceparent: str = "",
) -> Turn:
    """Say something in a conversation: start a run that continues it, or send input to its run that is not over.

    Args:
        gateway: The gateway.
        caller: The caller, to whom the session belongs.
        prompt: The message.
        agent: Name of the agent.
        session: Name of the session that is the conversation; None if `after` names it.
        after: The run with which the conversation goes on.
        settings: Settings of model requests for a new run. None: those of the agent.
        key: Key of the message, unique for the caller. A message that is sent again with it has no effect. None: the
            message is a new one.
        metadata: Data that is stored with a new run.
        request_hash: Hash of the request, by which `was_said` finds a message without a key; empty for none.
        answer: The message as the answer to a question, if the open run waits for one. None: no message answers.
        results: Results of the client's tools that came with the message, by the ids of their calls. A call without one
            fails: the client has gone on. None: the message does not end calls.
        traceparent: Span of the caller, for a new run; empty for none.

    Raises:
        ConflictError: when the open run is that of another agent, has other settings or waits for something else than a
            message, or the key is that of another run.
        MisuseError: when the answer does not fit the question.
    """
    if key is not None and (await gateway.find_keyed_run(caller, key))[1] is not None:
        started, _ = await gateway.start_run(caller, prompt, agent=agent, session=session, key=key)
        return Turn(run_id=started.id, versions={})
    run = after if session is None else await find_latest_run(gateway, caller, session)
    known_key = None
    if key is not None:
        known_key = build_key_id(f"{key}.{request_hash}", tenant=caller.tenant, user=caller.user)
    if run is not None and known_key is not None and await knows_message(gateway.runs, run.id, known_key):
        return Turn(run_id=run.id, versions={})
    if run is None or run.is_over:
        started, _ = await gateway.start_run(
            caller,
            prompt,
            agent=agent,
            session=session,
            after=after,
            settings=settings,
            key=key,
            metadata=metadata or {},
            traceparent=traceparent,
        )
        return Turn(run_id=started.id, versions={})
    if run.header.agent != agent or (settings is not None and settings != run.header.settings):
        raise ConflictError(
            f"run {run.id!r} of this conversation goes on, with {run.header.agent!r} and the settings of its first "
            "message, such as `temperature`: send the same ones, or leave them out, until it is over"
        )
    message_key = known_key or await _number_message(gateway.runs, run.id, request_hash)
    versions = await collect_versions(gateway.runs, run.id, run.version)
    if answer is not None and (item := _find_question(run)) is not None:
        build_answer(item, answer, failed=False, declined=False, by=caller.user)  # refused before anything is posted
        # The key is posted first, and not with the answer, which has a key of its own: if this process is killed in
        # between, a retry shows that the run still waits. The other order would make the retry input of the run.
        await gateway.runs.store.post(run.id, f"answer:{message_key}", Wake(run_id=run.id))
        await answer_call(gateway, caller, item.run_id, item.call_id, answer, shown_run=item.run_id, digest=item.digest)
        return Turn(run_id=run.id, versions=versions)
    asked = () if results is None else list_front_end_calls(run)
    if blocking := [item for item in run.pending if item.kind not in OPEN_WAITS and item not in asked]:
        waits = ", ".join(f"{each.kind} of {each.tool or 'the run'} ({HOW_TO_RESOLVE[each.kind]})" for each in blocking)
        raise ConflictError(f"run {run.id!r} of this conversation waits for: {waits}; decide that first, or cancel it")
    await give_results(gateway, caller, asked, {each.call_id: _LEFT_ALONE for each in asked} | dict(results or {}))
    await send_text(gateway, caller, run.id, prompt, key=message_key)
    return Turn(run_id=run.id, versions=versions)


@attrs.frozen(kw_only=True)
class FrontEndResult(Value):
    """Result of a tool that the client has carried out."""

    content: str
    """The result, or the error."""

    failed: bool = False
    """Whether it is an error."""


_LEFT_ALONE: Final = FrontEndResult(
    content="no result came from the page, and the user has gone on; it may have been carried out or not", failed=True
)


def list_front_end_calls(run: Run) -> tuple[Pending, ...]:
    """Return the calls of tools of the client that a run waits for."""
    found = read_front_end(run.header.metadata)
    names = frozenset[str]() if found is None else {tool.name for tool in found[0]}
    return tuple([each for each in run.pending if each.run_id == run.id and each.tool in names])


async def give_results(
    gateway: Gateway, caller: Caller, asked: Iterable[Pending], results: Mapping[str, FrontEndResult]
) -> None:
    """Answer the calls that have a result, as the caller.

    Raises:
        ConflictError: when one was answered already, or its time is up.
    """
    for item in asked:
        if (given := results.get(item.call_id)) is not None:
            await answer_call(
                gateway,
                caller,
                item.run_id,
                item.call_id,
                given.content,
                shown_run=item.run_id,
                digest=item.digest,
                failed=given.failed,
            )


def _find_question(run: Run) -> Pending | None:
    """Return the one question that a run waits for; None if it waits for nothing, or for more."""
    [item, *others] = run.pending or [None]
    is_question = item is not None and item.kind is PendingKind.QUESTION and len(item.questions) <= 1
    return item if is_question and not others else None


async def was_said(runs: Runs, run_id: str, request_hash: str) -> bool:
    """Return whether a run was given the message of a request without a key, as input or as an answer."""
    return await knows_message(runs, run_id, build_said_key(f"0.{request_hash}"))


async def _number_message(runs: Runs, run_id: str, request_hash: str) -> DerivedId:
    """Return the first key of a request without one that the run does not know: equal requests are counted from 0."""
    number = 0
    while await knows_message(runs, run_id, key := build_said_key(f"{number}.{request_hash}")):
        number += 1
    return key


async def knows_message(runs: Runs, run_id: str, message_key: DerivedId) -> bool:
    """Return whether a run was given a message with a key, even if the run has read it or is over."""
    # Posts of the same kind and key are equal to the store.
    posts = ((f"input:{message_key}", Input(parts=())), (f"answer:{message_key}", Wake(run_id=run_id)))
    for key, item in posts:
        try:
            await runs.store.post(run_id, key, item, before=0.0)  # too late for a new post; returns that of a known key
        except ConflictError:
            continue
        return True
    return False


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
