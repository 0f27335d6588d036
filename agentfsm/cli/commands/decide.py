"""The subcommands that say something to a run, from any process: whoever drives it acts on it."""

from __future__ import annotations

import argparse
import json
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from agentfsm.cli.codes import ExitCode
from agentfsm.cli.render.formatting import format_time
from agentfsm.cli.render.json_documents import build_run_json
from agentfsm.cli.resolve.command_hint import CommandHint
from agentfsm.cli.resolve.run_lookup import build_store_agent, load_run_agent, load_with_root, run_in_store
from agentfsm.cli.resolve.store_location import open_existing_store, resolve_location
from agentfsm.cli.session.forms import parse_answer
from agentfsm.cli.session.prompts import submit_decisions, user_name
from agentfsm.core.errors import ConflictError, MisuseError, RunNotFoundError
from agentfsm.core.inbox import Approve, Decision, Input, InputKind, Priority, Reject, Rerun, Settle
from agentfsm.core.messages import Outcome, as_parts
from agentfsm.core.pending import PendingKind
from agentfsm.decisions import find_pending
from agentfsm.engine.execution.parent import child_run_id

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from agentfsm.agent import Agent
    from agentfsm.cli.terminal import Terminal
    from agentfsm.core.header import Header
    from agentfsm.core.run import Run


def approve(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Let a call run."""
    approval = Approve(call_id=args.call, by=_resolve_author(args), arguments=args.arguments, digest=args.digest)
    knower = None if args.arguments is None else _load_checking_agent(args, terminal)
    return _submit(args, terminal, PendingKind.APPROVAL, approval, knower)


def reject(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Do not let a call run."""
    rejection = Reject(call_id=args.call, by=_resolve_author(args), message=args.message)
    return _submit(args, terminal, PendingKind.APPROVAL, rejection)


def settle(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Say what became of a call."""
    if args.rerun:
        return _submit(args, terminal, PendingKind.OUTCOME, Rerun(call_id=args.call, by=_resolve_author(args)))
    outcome = Outcome.DONE if args.failed is None else Outcome.FAILED
    content = args.result if args.failed is None else args.failed
    settled = Settle(call_id=args.call, by=_resolve_author(args), outcome=outcome, content=content)
    return _submit(args, terminal, PendingKind.OUTCOME, settled)


def answer(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Give the result of a call that comes from outside, or what a tool has asked in its call.

    Raises:
        MisuseError: when that is not what was asked.
    """
    store = open_existing_store(args.store)
    _, item = run_in_store(store, lambda: find_pending(store, args.id, args.call, PendingKind.QUESTION))
    said: Decision
    if item.questions and not args.failed:
        said = parse_answer(item, args.text, args.field, declined=args.decline, by=_resolve_author(args))
    elif item.questions or args.decline or args.field or args.text is None:
        wish = "no --failed: --decline says no" if item.questions else "a text, with --failed if it has no result"
        raise MisuseError(f"{args.call} of run {args.id} takes {wish}")
    else:
        outcome = Outcome.FAILED if args.failed else Outcome.DONE
        said = Settle(call_id=args.call, by=_resolve_author(args), outcome=outcome, content=args.text)
    return _submit(args, terminal, PendingKind.QUESTION, said)


def _submit(
    args: argparse.Namespace,
    terminal: Terminal,
    kind: PendingKind,
    decision: Decision,
    checking_agent: Agent | None = None,
) -> ExitCode:
    async def act(agent: Agent) -> dict[str, Any]:
        if refused := await submit_decisions(agent, [(args.id, kind, decision)]):
            raise ConflictError(refused[0])
        word = "answer" if kind is PendingKind.QUESTION else type(decision).__name__.lower()
        said = {"says": f"noted for {decision.call_id} of run {args.id}", "decision": word, "call_id": decision.call_id}
        changed = {"arguments": json.loads(args.arguments)} if isinstance(decision, Approve) and args.arguments else {}
        return said | {"by": decision.by} | changed

    return _send_request(args, terminal, act, checking_agent)


def _load_checking_agent(args: argparse.Namespace, terminal: Terminal) -> Agent | None:
    """Return the agent whose tools changed arguments have to fit: the run's own, which may be one among the tools."""
    store = open_existing_store(args.store)
    agent = load_run_agent(*run_in_store(store, lambda: load_with_root(store, args.id)))
    if agent is None:
        terminal.err("the agent that the run is of is not known here: the arguments are checked when the call runs")
    return agent


def send(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
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
        when = "" if due is None else f", to be read from {format_time(due)} on"
        return {"says": f"noted for run {args.id}{when}", "sent": {"number": posted.number, "due_at": due}}

    return _send_request(args, terminal, act)


def pause(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Let a run rest until it is resumed."""

    async def act(agent: Agent) -> dict[str, Any]:
        await agent.pause(args.id, by=_resolve_author(args), message=args.message)
        rests = (await agent.load(args.id)).paused is not None
        return {"says": f"run {args.id} {'rests' if rests else 'will rest as soon as its driver hears of it'}"}

    return _send_request(args, terminal, act)


def cancel(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """End a run."""

    async def act(agent: Agent) -> dict[str, Any]:
        await _cancel_tree(agent, args.id, _resolve_author(args), args.message)
        is_over = (await agent.load(args.id)).is_over
        return {"says": f"run {args.id} {'is over' if is_over else 'will end as soon as its driver hears of it'}"}

    return _send_request(args, terminal, act)


async def _cancel_tree(agent: Agent, run_id: str, by: str, message: str) -> None:
    """Cancel a run, and the sub-agents' runs below it, which this agent does not know of for want of its tools."""
    before = await agent.load(run_id)
    await agent.cancel(run_id, by=by, message=message)
    if not (await agent.load(run_id)).is_over:
        return  # its driver ends it, and them
    for entry in before.open:
        child = child_run_id(run_id, entry.call.id)
        with suppress(RunNotFoundError):
            if not (await agent.load(child)).is_over:
                await _cancel_tree(agent, child, by, message)


def _send_request(
    args: argparse.Namespace,
    terminal: Terminal,
    act: Callable[[Agent], Awaitable[dict[str, Any]]],
    checking_agent: Agent | None = None,
) -> ExitCode:
    """Say something to a run, and report what came of it: what `act` returns under "says", the rest for programs.

    Where it matters what the run's tools are, an agent that knows them says it.
    """
    place = resolve_location(args.store)
    store = open_existing_store(place)

    async def whole() -> tuple[dict[str, Any], Run, Header]:
        said = await act(build_store_agent(store) if checking_agent is None else checking_agent.with_(store=store))
        return said, *await load_with_root(store, args.id)

    said, found, top = run_in_store(store, whole)
    way = CommandHint(location=place)
    resume_from = "" if found.is_over else f". To go on: {way.build_resume(top.id)}"
    terminal.err(said.pop("says") + resume_from)
    if terminal.json:
        terminal.document(build_run_json(found, way, top.id) | said)
    return ExitCode.DONE


def _resolve_author(args: argparse.Namespace) -> str:
    return user_name() if args.by is None else str(args.by)
