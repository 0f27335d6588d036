"""The subcommands that decide about calls, send input, and pause or cancel runs, from any process."""

from __future__ import annotations

import argparse
import json
import shlex
from typing import TYPE_CHECKING, Any

import attrs

from agentfsm.agents.admission import admit, admit_answer
from agentfsm.agents.decisions import describe_allowance, find_pending, find_question
from agentfsm.agents.runs import Runs
from agentfsm.cli.argument_types import parse_field, parse_object, parse_rating, parse_time
from agentfsm.cli.arguments import AddParser, add_command, add_run_id
from agentfsm.cli.codes import ExitCode
from agentfsm.cli.render.formatting import format_count, format_time
from agentfsm.cli.render.json_documents import build_run_json
from agentfsm.cli.render.pending import format_shown
from agentfsm.cli.resolve.command_hint import build_header_hint
from agentfsm.cli.resolve.run_lookup import load_run_agent, load_with_root, run_in_store
from agentfsm.cli.resolve.store_location import open_existing_store, resolve_location
from agentfsm.cli.session.forms import parse_answer
from agentfsm.cli.terminal import user_name
from agentfsm.core.errors import AgentError, ConflictError, MisuseError
from agentfsm.core.inbox import Input, InputKind, Priority
from agentfsm.core.pending import PendingKind
from agentfsm.core.text_safety import escape_hidden
from agentfsm.engine.execution.allowances import build_document

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from agentfsm.cli.terminal import Terminal
    from agentfsm.core.header import Header
    from agentfsm.core.pending import Pending
    from agentfsm.core.run import Run
    from agentfsm.engine.execution.allowances import Allowance
    from agentfsm.tools.registry import ToolRegistry


def add_commands(add: AddParser) -> None:
    """Add the commands of this module."""
    approve_options = add_command(add, approve)
    reject_options = add_command(add, reject)
    settle_options = add_command(add, settle)
    answer_options = add_command(add, answer)
    for decides in (approve_options, reject_options):
        add_run_id(decides)
        decides.add_argument("calls", metavar="CALL", nargs="+", help="ids of the calls, for example t3.0")
    for decides in (settle_options, answer_options):
        add_run_id(decides)
        decides.add_argument("call", help="id of the call, for example t3.0")
    approve_options.add_argument(
        "--arguments",
        metavar="JSON",
        type=parse_object,
        help="run the call with these arguments instead of the model's",
    )
    approve_options.add_argument(
        "--digest",
        dest="digests",
        action="append",
        default=[],
        help="digest of the call as shown, in the order of the calls; nothing is approved if one has changed since",
    )
    approve_options.add_argument(
        "--allow",
        metavar="ARGUMENT",
        action="append",
        default=[],
        help="let later calls with this value of the argument run in this session; without --digest, only show it",
    )
    allowances_options = add_command(add, allowances)
    add_run_id(allowances_options)
    allowances_options.add_argument("--revoke", metavar="ALLOWANCE", help="end the allowance with this id")
    for checked in (approve_options, settle_options):
        checked.add_argument(
            "--four-eyes", action="store_true", help="refuse it if the person has shaped the call, as its prompt does"
        )
    reject_options.add_argument("--message", default="", help="the reason, which the model reads")
    outcome = settle_options.add_mutually_exclusive_group(required=True)
    outcome.add_argument("--result", metavar="TEXT", help="the call succeeded and returned this")
    outcome.add_argument("--failed", metavar="TEXT", help="the call failed with this message")
    outcome.add_argument("--rerun", action="store_true", help="run it again with the same idempotency key")
    answer_options.add_argument(
        "text", nargs="?", help="the answer; for the questions of a tool: a JSON object, or plain text"
    )
    answer_options.add_argument("--failed", action="store_true", help="the text is the reason why there is no result")
    answer_options.add_argument(
        "--field",
        metavar="NAME=VALUE",
        type=parse_field,
        action="append",
        default=[],
        help="a field of the answer to a tool's question; may be given several times",
    )
    answer_options.add_argument("--decline", action="store_true", help="decline to answer the questions of a tool")
    _add_send(add)
    pause_options = add_command(add, pause)
    cancel_options = add_command(add, cancel)
    for stops in (pause_options, cancel_options):
        add_run_id(stops)
        stops.add_argument("--message", default="", help="the reason, for the journal")
    feedback_options = add_command(add, feedback)
    add_run_id(feedback_options)
    feedback_options.add_argument(
        "--rating", metavar="1-5", type=parse_rating, required=True, help="1 (bad) to 5 (good)"
    )
    feedback_options.add_argument("--comment", default="", help="the reasons")
    for signed in (
        approve_options,
        allowances_options,
        reject_options,
        settle_options,
        answer_options,
        pause_options,
        cancel_options,
        feedback_options,
    ):
        signed.add_argument("--by", metavar="NAME", help="person who decides (default: your user name)")


def _add_send(add: AddParser) -> None:
    send_options = add_command(add, send)
    add_run_id(send_options)
    send_options.add_argument("text", help="the text that the model reads")
    kinds = [str(kind) for kind in InputKind if kind is not InputKind.REFLECTION]
    send_options.add_argument(
        "--kind", choices=kinds, default="user", help="source of the input (default: %(default)s)"
    )
    priorities = [str(priority) for priority in Priority]
    send_options.add_argument(
        "--priority", choices=priorities, default="normal", help="reading order (default: %(default)s)"
    )
    send_options.add_argument(
        "--at", metavar="TIME", type=parse_time, help="not before: +90s, +15m, +2h, +3d, or a date"
    )
    send_options.add_argument("--key", help="idempotency key: the run accepts one input for each key")
    send_options.add_argument("--by", metavar="NAME", help="person who sends it (default: your user name)")


def approve(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Approve one call, perhaps with other arguments, or several calls together.

    Raises:
        MisuseError: if the digests are not those of all calls, or several calls are given with arguments.
    """
    if args.digests and len(args.digests) != len(args.calls):
        raise MisuseError(f"--digest is given {len(args.digests)} times for {len(args.calls)} calls: give one for each")
    if len(args.calls) > 1 and (args.arguments is not None or args.allow):
        raise MisuseError("--arguments and --allow are about one call: approve the others by themselves")
    if args.allow and not args.digests:
        return _show_allowance(args, terminal)
    arguments = None if args.arguments is None else json.loads(args.arguments)
    tools = {} if arguments is None else _load_tools(args, terminal)

    async def decide(runs: Runs) -> None:
        by = _resolve_author(args)
        if len(args.calls) == 1:
            digest = args.digests[0] if args.digests else None
            return await runs.approve(
                args.id, args.calls[0], by=by, arguments=arguments, digest=digest, allow=args.allow
            )
        return await runs.decide(approve=await _find_shown(runs, args.id, args.calls, args.digests), by=by)

    details = {} if arguments is None else {"arguments": arguments}
    return _submit(args, terminal, "approve", decide, tools=tools, details=details)


def _show_allowance(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Show the rule that an approval would allow, and the command that approves the call with it."""
    store = open_existing_store(args.store)

    async def load() -> tuple[Pending, Header]:
        _, item = await find_pending(store, args.id, args.calls[0], PendingKind.APPROVAL)
        return item, (await load_with_root(store, args.id))[1]

    item, root = run_in_store(store, load)
    hint = build_header_hint(root, resolve_location(args.store))
    options = "".join([f" --allow {shlex.quote(name)}" for name in args.allow])
    edited = None if args.arguments is None else json.loads(args.arguments)
    options += "" if edited is None else f" --arguments {shlex.quote(str(args.arguments))}"
    terminal.err(f"nothing is approved yet; this would be allowed:\n{describe_allowance(item, args.allow, edited)}")
    terminal.err(
        f"To approve the call and allow this: {hint.build(f'approve {shlex.quote(item.run_id)} {item.call_id}')}"
        f"{options}{format_shown([item])}"
    )
    return ExitCode.WAITING


def allowances(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """List the allowances of the session of a run, or revoke one."""
    store = open_existing_store(args.store)

    async def act() -> Sequence[Allowance]:
        runs = Runs(store)
        if args.revoke is not None:
            await runs.revoke(args.revoke, by=_resolve_author(args))
        return await runs.allowances(args.id)

    found = run_in_store(store, act)
    for each in () if terminal.json else found:
        given = f"by {each.by or '?'}, {format_time(each.at)}"
        end = (
            f"ends {format_time(each.expires_at)}"
            if each.revoked_by is None
            else f"revoked by {each.revoked_by or '?'}"
        )
        terminal.out(f"{each.id}  {escape_hidden(each.rule)}  {format_count(each.used, 'call')}  {given}, {end}")
    if terminal.json:
        terminal.document({"allowances": [build_document(each) for each in found]})
    if not found:
        terminal.err(f"nothing is allowed in the session of run {args.id}")
    return ExitCode.DONE


def reject(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Reject one or several calls."""

    async def decide(runs: Runs) -> None:
        by = _resolve_author(args)
        message = admit_answer(args.message, by)
        if len(args.calls) == 1:
            return await runs.reject(args.id, args.calls[0], message=message, by=by)
        return await runs.decide(reject=await _find_shown(runs, args.id, args.calls), message=message, by=by)

    return _submit(args, terminal, "reject", decide)


async def _find_shown(runs: Runs, run_id: str, calls: Sequence[str], digests: Sequence[str] = ()) -> list[Pending]:
    """Return the waits for the approval of several calls, with the digests that the person gives, if any."""
    found = [await find_pending(runs.store, run_id, call, PendingKind.APPROVAL) for call in calls]
    items = [item for _, item in found]
    return (
        [attrs.evolve(item, digest=digest) for item, digest in zip(items, digests, strict=True)] if digests else items
    )


def settle(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Record the outcome of a call whose worker crashed."""

    async def decide(runs: Runs) -> None:
        by = _resolve_author(args)
        result, failed = admit_answer(args.result, by), admit_answer(args.failed, by)
        await runs.settle(args.id, args.call, result=result, failed=failed, rerun=args.rerun, by=by)

    return _submit(args, terminal, "rerun" if args.rerun else "settle", decide)


def answer(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Supply the result of an external call, or the answers to the questions of a tool."""

    async def decide(runs: Runs) -> None:
        _, item = await find_question(runs.store, args.id, args.call, digest=None)
        content = args.text
        if item.questions and not args.failed:
            content = parse_answer(item, args.text, args.field, declined=args.decline)
        elif item.questions or args.decline or args.field or args.text is None:
            raise MisuseError(
                f"{args.call} of run {args.id} asks questions: use --decline instead of --failed"
                if item.questions
                else f"{args.call} of run {args.id} needs a result: give a text, with --failed if there is none"
            )
        by, is_declined = _resolve_author(args), args.decline
        given = admit_answer(content, by)
        await runs.answer(
            args.id, args.call, given, failed=args.failed, declined=is_declined, by=by, digest=item.digest
        )

    return _submit(args, terminal, "answer", decide)


def _submit(
    args: argparse.Namespace,
    terminal: Terminal,
    decision: str,
    decide: Callable[[Runs], Awaitable[None]],
    *,
    tools: Mapping[str, ToolRegistry] | None = None,
    details: Mapping[str, Any] | None = None,
) -> ExitCode:
    async def act(runs: Runs) -> dict[str, Any]:
        await decide(runs)
        calls = args.calls if "calls" in args else [args.call]
        report: dict[str, Any] = {"says": f"recorded for {', '.join(calls)} of run {args.id}", "decision": decision}
        report |= {"call_id": calls[0]} if len(calls) == 1 else {"call_ids": calls}
        return {**report, "by": _resolve_author(args), **(details or {})}

    return _send_request(args, terminal, act, tools)


def _load_tools(args: argparse.Namespace, terminal: Terminal) -> Mapping[str, ToolRegistry]:
    """Return the tools that check edited arguments, by agent; empty if the agent of the run cannot be loaded."""
    store = open_existing_store(args.store)
    found = run_in_store(store, lambda: load_with_root(store, args.id))
    try:
        agent = load_run_agent(*found)
    except AgentError as error:
        terminal.err(str(error))
        agent = None
    if agent is not None:
        return {agent.name: agent.tools}
    terminal.err("the agent of the run cannot be loaded here, so the arguments are checked when the call runs")
    return {}


def send(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Send input to a run.

    Raises:
        ConflictError: if the run is over, or the key was used for another input.
    """
    kind, priority = InputKind(args.kind), Priority(args.priority)
    parts = admit(args.text, user_name())

    async def act(runs: Runs) -> dict[str, Any]:
        at = None if args.at is None else args.at(await runs.store.now())
        by = _resolve_author(args)
        posted = await runs.send(args.id, parts, kind=kind, priority=priority, at=at, key=args.key, by=by)
        first = posted.item
        if not isinstance(first, Input) or (first.kind, first.parts) != (kind, parts):
            raise ConflictError(f"run {args.id} has another input with the key {args.key!r}: this one was not sent")
        due = first.due_at
        when = "" if due is None else f", to be read at {format_time(due)} or later"
        return {"says": f"recorded for run {args.id}{when}", "sent": {"number": posted.number, "due_at": due}}

    return _send_request(args, terminal, act)


def pause(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Pause a run until it is resumed."""

    async def act(runs: Runs) -> dict[str, Any]:
        by = _resolve_author(args)
        await runs.pause(args.id, by=by, message=admit_answer(args.message, by))
        is_paused = (await runs.load(args.id)).paused is not None
        return {"says": f"run {args.id} {'is paused' if is_paused else 'pauses when its worker reads the request'}"}

    return _send_request(args, terminal, act)


def cancel(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """End a run."""

    async def act(runs: Runs) -> dict[str, Any]:
        by = _resolve_author(args)
        await runs.cancel(args.id, by=by, message=admit_answer(args.message, by))
        found = await runs.load(args.id)
        end = f"is over ({found.stop_reason})" if found.is_over else "ends when its worker reads the request"
        return {"says": f"run {args.id} {end}"}

    return _send_request(args, terminal, act, offers_resume=False)


def feedback(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Record an opinion of a run."""

    async def act(runs: Runs) -> dict[str, Any]:
        by = _resolve_author(args)
        await runs.feedback(args.id, rating=args.rating, comment=admit_answer(args.comment, by), by=by)
        return {"says": f"feedback on run {args.id} is recorded"}

    return _send_request(args, terminal, act, offers_resume=False)


def _send_request(
    args: argparse.Namespace,
    terminal: Terminal,
    act: Callable[[Runs], Awaitable[dict[str, Any]]],
    tools: Mapping[str, ToolRegistry] | None = None,
    *,
    offers_resume: bool = True,
) -> ExitCode:
    """Write a request to a run, and report it.

    Args:
        args: Arguments of the command.
        terminal: Receives the report.
        act: Writes the request. It returns the line for people as "says", and further fields of the JSON document.
        tools: Tools that check edited arguments, by agent.
        offers_resume: Whether to print the command that continues a run that is not over.
    """
    location = resolve_location(args.store)
    store = open_existing_store(location)

    async def act_and_load() -> tuple[dict[str, Any], Run, Header]:
        report = await act(Runs(store, tools=tools or {}, four_eyes=getattr(args, "four_eyes", False)))
        return report, *await load_with_root(store, args.id)

    report, found, root = run_in_store(store, act_and_load)
    hint = build_header_hint(root, location)
    resume = "" if found.is_over or not offers_resume else f". To continue: {hint.build_resume(root.id)}"
    terminal.err(report.pop("says") + resume)
    if resume and hint.note:
        terminal.err(hint.note)
    if terminal.json:
        terminal.document(build_run_json(found, hint, root.id) | report)
    return ExitCode.DONE


def _resolve_author(args: argparse.Namespace) -> str:
    return user_name() if args.by is None else str(args.by)
