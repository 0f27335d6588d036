"""The subcommands that say something to a run, from any process: whoever drives it acts on it."""

from __future__ import annotations

import argparse
import json
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from agentfsm.cli.ask import tell, user_name
from agentfsm.cli.codes import Exit
from agentfsm.cli.documents import run_json
from agentfsm.cli.inquiry import given
from agentfsm.cli.place import Way, known_store, store_place
from agentfsm.cli.plain import moment
from agentfsm.cli.reach import agent_of, in_store, speaker, with_top
from agentfsm.core.effects import PendingKind
from agentfsm.core.errors import ConflictError, MisuseError, RunNotFoundError
from agentfsm.core.inbox import Approve, Decision, Input, InputKind, Priority, Reject, Rerun, Settle
from agentfsm.core.messages import Outcome, as_parts
from agentfsm.decisions import find_pending
from agentfsm.engine.execution.parent import child_run_id

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from agentfsm.agent import Agent
    from agentfsm.cli.terminal import Terminal
    from agentfsm.core.run import Header, Run


def approve(args: argparse.Namespace, terminal: Terminal) -> Exit:
    """Let a call run."""
    approval = Approve(call_id=args.call, by=_by(args), arguments=args.arguments, digest=args.digest)
    knower = None if args.arguments is None else _knower(args, terminal)
    return _decide(args, terminal, PendingKind.APPROVAL, approval, knower)


def reject(args: argparse.Namespace, terminal: Terminal) -> Exit:
    """Do not let a call run."""
    rejection = Reject(call_id=args.call, by=_by(args), message=args.message)
    return _decide(args, terminal, PendingKind.APPROVAL, rejection)


def settle(args: argparse.Namespace, terminal: Terminal) -> Exit:
    """Say what became of a call."""
    if args.rerun:
        return _decide(args, terminal, PendingKind.OUTCOME, Rerun(call_id=args.call, by=_by(args)))
    outcome = Outcome.DONE if args.failed is None else Outcome.FAILED
    content = args.result if args.failed is None else args.failed
    settled = Settle(call_id=args.call, by=_by(args), outcome=outcome, content=content)
    return _decide(args, terminal, PendingKind.OUTCOME, settled)


def answer(args: argparse.Namespace, terminal: Terminal) -> Exit:
    """Give the result of a call that comes from outside, or what a tool has asked in its call.

    Raises:
        MisuseError: when that is not what was asked.
    """
    store = known_store(args.store)
    _, item = in_store(store, lambda: find_pending(store, args.id, args.call, PendingKind.QUESTION))
    said: Decision
    if item.questions and not args.failed:
        said = given(item, args.text, args.field, declined=args.decline, by=_by(args))
    elif item.questions or args.decline or args.field or args.text is None:
        wish = "no --failed: --decline says no" if item.questions else "a text, with --failed if it has no result"
        raise MisuseError(f"{args.call} of run {args.id} takes {wish}")
    else:
        outcome = Outcome.FAILED if args.failed else Outcome.DONE
        said = Settle(call_id=args.call, by=_by(args), outcome=outcome, content=args.text)
    return _decide(args, terminal, PendingKind.QUESTION, said)


def _decide(
    args: argparse.Namespace,
    terminal: Terminal,
    kind: PendingKind,
    decision: Decision,
    knower: Agent | None = None,
) -> Exit:
    async def act(agent: Agent) -> dict[str, Any]:
        if refused := await tell(agent, [(args.id, kind, decision)]):
            raise ConflictError(refused[0])
        word = "answer" if kind is PendingKind.QUESTION else type(decision).__name__.lower()
        said = {"says": f"noted for {decision.call_id} of run {args.id}", "decision": word, "call_id": decision.call_id}
        changed = {"arguments": json.loads(args.arguments)} if isinstance(decision, Approve) and args.arguments else {}
        return said | {"by": decision.by} | changed

    return _say(args, terminal, act, knower)


def _knower(args: argparse.Namespace, terminal: Terminal) -> Agent | None:
    """Return the agent whose tools changed arguments have to fit: the run's own, which may be one among the tools."""
    store = known_store(args.store)
    agent = agent_of(*in_store(store, lambda: with_top(store, args.id)))
    if agent is None:
        terminal.err("the agent that the run is of is not known here: the arguments are checked when the call runs")
    return agent


def send(args: argparse.Namespace, terminal: Terminal) -> Exit:
    """Give a run more input.

    Raises:
        ConflictError: when the run is over, or the key stands for another input.
    """
    kind, priority = InputKind(args.kind), Priority(args.priority)

    async def act(agent: Agent) -> dict[str, Any]:
        at = None if args.at is None else args.at(await agent.store.now())
        posted = await agent.send(args.id, args.text, kind=kind, priority=priority, at=at, key=args.key)
        first = posted.item
        if not isinstance(first, Input) or (first.kind, first.parts) != (kind, as_parts(args.text)):
            raise ConflictError(f"run {args.id} was sent another input under the key {args.key!r}: this one was not")
        due = first.due_at
        when = "" if due is None else f", to be read from {moment(due)} on"
        return {"says": f"noted for run {args.id}{when}", "sent": {"number": posted.number, "due_at": due}}

    return _say(args, terminal, act)


def pause(args: argparse.Namespace, terminal: Terminal) -> Exit:
    """Let a run rest until it is resumed."""

    async def act(agent: Agent) -> dict[str, Any]:
        await agent.pause(args.id, by=_by(args), message=args.message)
        rests = (await agent.load(args.id)).paused is not None
        return {"says": f"run {args.id} {'rests' if rests else 'will rest as soon as its driver hears of it'}"}

    return _say(args, terminal, act)


def cancel(args: argparse.Namespace, terminal: Terminal) -> Exit:
    """End a run."""

    async def act(agent: Agent) -> dict[str, Any]:
        await _end(agent, args.id, _by(args), args.message)
        is_over = (await agent.load(args.id)).is_over
        return {"says": f"run {args.id} {'is over' if is_over else 'will end as soon as its driver hears of it'}"}

    return _say(args, terminal, act)


async def _end(agent: Agent, run_id: str, by: str, message: str) -> None:
    """Cancel a run, and the sub-agents' runs below it, which this agent does not know of for want of its tools."""
    before = await agent.load(run_id)
    await agent.cancel(run_id, by=by, message=message)
    if not (await agent.load(run_id)).is_over:
        return  # its driver ends it, and them
    for entry in before.open:
        child = child_run_id(run_id, entry.call.id)
        with suppress(RunNotFoundError):
            if not (await agent.load(child)).is_over:
                await _end(agent, child, by, message)


def _say(
    args: argparse.Namespace,
    terminal: Terminal,
    act: Callable[[Agent], Awaitable[dict[str, Any]]],
    knower: Agent | None = None,
) -> Exit:
    """Say something to a run, and report what came of it: what `act` returns under "says", the rest for programs.

    Where it matters what the run's tools are, an agent that knows them says it.
    """
    place = store_place(args.store)
    store = known_store(place)

    async def whole() -> tuple[dict[str, Any], Run, Header]:
        said = await act(speaker(store) if knower is None else knower.with_(store=store))
        return said, *await with_top(store, args.id)

    said, found, top = in_store(store, whole)
    way = Way(place=place)
    resume_from = "" if found.is_over else f". To go on: {way.resume(top.id)}"
    terminal.err(said.pop("says") + resume_from)
    if terminal.json:
        terminal.document(run_json(found, way, top.id) | said)
    return Exit.DONE


def _by(args: argparse.Namespace) -> str:
    return user_name() if args.by is None else str(args.by)
