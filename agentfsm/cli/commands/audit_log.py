"""`agentfsm audit`: list calls with their agent and user, their approval and their outcome.

With `--seal`, `--verify` and `--head`, seal the journals of a store, and find later changes.
"""

from __future__ import annotations

import argparse
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from functools import partial
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import attrs

from agentfsm.agents.runs import Runs
from agentfsm.cli.argument_types import parse_count, parse_date, parse_since
from agentfsm.cli.arguments import AddParser, add_command
from agentfsm.cli.codes import ExitCode
from agentfsm.cli.render.formatting import (
    CALL_CHARS,
    NOTE_CHARS,
    format_arguments,
    format_count,
    format_duration,
    format_time,
)
from agentfsm.cli.render.text import format_caller, format_decisions
from agentfsm.cli.resolve.run_lookup import run_in_store
from agentfsm.cli.resolve.store_location import open_existing_store
from agentfsm.core.calls import Phase
from agentfsm.core.claimed_calls import describe_claims, list_unclaimed
from agentfsm.core.claims import list_not_done
from agentfsm.core.errors import MisuseError
from agentfsm.core.labels import matches_tool
from agentfsm.core.messages import Outcome
from agentfsm.core.sensitive_text import redact_members, redact_sensitive
from agentfsm.core.text_safety import one_line
from agentfsm.journal.seals import KEY_VARIABLE, Fault, SealCheck, SealFile
from agentfsm.ports.store import Filter
from agentfsm.stores.home import HOME_FOLDER

if TYPE_CHECKING:
    from agentfsm.cli.terminal import Terminal
    from agentfsm.journal.audit import AuditRecord
    from agentfsm.ports.store import Store

_DEFAULT_SEALS: Final = f"{HOME_FOLDER}/seals.jsonl"
_STATUSES: Final = [str(each) for each in (*Outcome, *Phase) if each is not Phase.FINISHED]


def add_commands(add: AddParser) -> None:
    """Add the commands of this module."""
    audit_options = add_command(add, audit)
    audit_options.add_argument("id", metavar="RUN", nargs="?", help="id of the run (default: all runs, newest first)")
    audit_options.add_argument(
        "--tool", metavar="GLOB", default="*", help="only calls of these tools, for example 'files__*'"
    )
    audit_options.add_argument(
        "--status", choices=_STATUSES, metavar="STATUS", help=f"only calls with this status: {', '.join(_STATUSES)}"
    )
    audit_options.add_argument("--agent", metavar="NAME", help="only runs of the agent with this name")
    audit_options.add_argument("--user", metavar="NAME", help="only runs of this user")
    audit_options.add_argument("--session", help="only runs of this conversation")
    audit_options.add_argument(
        "--since", metavar="TIME", type=parse_since, help="only calls that were open then or later, such as 7d"
    )
    audit_options.add_argument("--until", metavar="TIME", type=parse_date, help="only calls requested before this time")
    audit_options.add_argument("--limit", type=parse_count, default=1_000, help="maximum number (default: %(default)s)")
    audit_options.add_argument(
        "--results", action="store_true", help="with --json: include the results, not only hashes"
    )
    seals = audit_options.add_mutually_exclusive_group()
    seals.add_argument("--claims", action="store_true", help="show what the answer of RUN says was done, and its calls")
    seals.add_argument("--seal", action="store_true", help="write the hashes of journals that have changed to a file")
    seals.add_argument("--verify", action="store_true", help="find changes of the store since it was sealed")
    seals.add_argument("--head", action="store_true", help="show the end of that file, to be kept elsewhere")
    audit_options.add_argument(
        "--seals", metavar="FILE", default=_DEFAULT_SEALS, help="the file of the hashes (default: %(default)s)"
    )
    audit_options.add_argument("--follow", action="store_true", help="with --seal: go on until interrupted")
    audit_options.add_argument(
        "--since-head", metavar="HASH", default="", help="with --verify: a head from earlier, which the file must have"
    )
    audit_options.add_argument(
        "--allow-missing", action="store_true", help="with --verify: runs may have been deleted since"
    )


def audit(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """List each call of a run, or of all runs in the store; or seal journals, and verify them."""
    if args.seal or args.verify or args.head:
        command = seal_runs if args.seal else verify_runs if args.verify else show_head
        return command(args, terminal)
    if args.claims:
        return show_claims(args, terminal)
    store = open_existing_store(args.store)
    found: list[AuditRecord] = []
    source = ""
    findings: list[str] = []

    async def act() -> bool:
        """Write calls as they are found; return whether there are more than the limit."""
        nonlocal source
        async with aclosing(_iter_records(store, args)) as records:
            async for record in records:
                if len(found) == args.limit:
                    return True
                found.append(record)
                for line in [] if terminal.json else _format_record(record):
                    terminal.out(line)
        if args.id is not None:
            run = await Runs(store).load(args.id)
            findings.extend(run.findings)
            if not found and run.answered_from is not None:
                source = run.answered_from.run_id
        return False

    has_more = run_in_store(store, act)
    if terminal.json:
        documents = [build_record_json(record, with_result=args.results) for record in found]
        more: dict[str, Any] = {"answered_from": source} if source else {}
        more |= {"findings": findings} if findings else {}
        terminal.document({"calls": documents, "more": has_more, **more})
    for text in () if terminal.json else findings:
        terminal.out(f"finding: {one_line(redact_sensitive(text), NOTE_CHARS)}")
    if not found:
        hint = f": the answer is that of run {source}, from the answer cache; see agentfsm audit {source}"
        terminal.err(f"no calls{hint if source else ''}")
    if has_more:
        terminal.err(
            f"there are more than these {args.limit:,} calls: raise --limit, or select fewer, for example with --since"
        )
    return ExitCode.DONE


async def _iter_records(store: Store, args: argparse.Namespace) -> AsyncGenerator[AuditRecord, None]:
    if args.id is not None:
        for record in await Runs(store).audit(args.id):
            if _matches(args, record):
                yield record
        return
    where = Filter(session=args.session, agent=args.agent, user=args.user, before=args.until)
    async for record in Runs(store).audits(where, since=_start_time(args)):
        if _matches(args, record):
            yield record


def _start_time(args: argparse.Namespace) -> float:
    return -inf if args.since is None else float(args.since)


def _matches(args: argparse.Namespace, record: AuditRecord) -> bool:
    """Whether a call matches the arguments of the command."""
    pairs = ((args.agent, record.agent), (args.user, record.user), (args.session, record.session))
    return (
        all(wanted is None or wanted == own for wanted, own in pairs)
        and matches_tool(args.tool, record.tool)
        and args.status in (None, str(record.status))
        and (record.ended_at is None or record.ended_at >= _start_time(args))
        and (args.until is None or record.asked_at < args.until)
    )


def build_record_json(record: AuditRecord, *, with_result: bool) -> dict[str, Any]:
    """Return a call as JSON, with the hash and length of its result; with the result itself if `with_result`.

    Sensitive data in arguments, reason and result is replaced by marks.
    """
    digest = None if record.result is None else {"sha256": record.digest, "chars": len(record.result)}
    document = attrs.asdict(record) | {"content": record.result}
    shown = document | redact_members({name: document[name] for name in _REDACTED_FIELDS}) | {"result": digest}
    return shown if with_result else {name: value for name, value in shown.items() if name != "content"}


# Fields with texts of the model or from tools.
_REDACTED_FIELDS: Final = ("arguments", "proposed", "reason", "content")


def _format_record(record: AuditRecord) -> Iterator[str]:
    """Yield the lines of a call: the call, its outcome, and one line for each decision."""
    call = f"{format_time(record.asked_at)}  {record.run_id} {record.call_id}"
    arguments = format_arguments(redact_members(record.arguments))
    yield f"{call}  {one_line(f'{record.tool}({arguments})', CALL_CHARS)}"
    yield f"    {one_line(_format_outcome(record), NOTE_CHARS)}"
    if record.labels:
        yield f"    labels: {', '.join(record.labels)}"
    if record.sandbox:
        yield f"    sandbox: {record.sandbox}"
    yield from (f"    {one_line(redact_sensitive(words), NOTE_CHARS)}" for words in format_decisions(record))


def _format_outcome(record: AuditRecord) -> str:
    why = f" ({record.error_type})" if record.error_type is not None else ""
    tries = f", {record.attempts} attempts" if record.attempts > 1 else ""
    whom = f", for {record.user}" if record.user is not None else ""
    agent = f", by {record.agent}" if record.agent else ""
    whom += f", started by {format_caller(record.caller)}" if record.caller is not None else ""
    if record.result is None:
        return f"{record.status}{tries}{agent}{whom}"
    result = f", {format_count(len(record.result), 'character')}, SHA-256 {record.digest[:12]}..."
    return f"{record.status}{why} in {format_duration(record.duration_s)}{tries}{agent}{whom}{result}"


def show_claims(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Show each act that the answer of a run says was done with its call, and the calls that it does not mention.

    Returns:
        FAILED if one was not done.
    """
    if args.id is None:
        raise MisuseError("audit --claims is about one run: give its id, agentfsm audit --claims RUN")
    store = open_existing_store(args.store)
    run = run_in_store(store, partial(Runs(store).load, args.id))
    if terminal.json:
        terminal.document(redact_members(describe_claims(run)))
    elif run.claims is None:
        terminal.err("no claims: the agent has no claims=, or the run has no answer yet")
    else:
        for claim in run.claims:
            outcome = f"done by {claim.call_id}:" if claim.call_id else f"not done, {claim.fault}:"
            arguments = format_arguments(redact_members(claim.arguments))
            terminal.out(one_line(f"{outcome} {claim.tool}({arguments})", CALL_CHARS))
        for call in list_unclaimed(run):
            arguments = format_arguments(redact_members(call.arguments))
            terminal.out(one_line(f"not claimed, {call.call_id}: {call.tool}({arguments})", CALL_CHARS))
    return ExitCode.FAILED if list_not_done(run.claims or ()) else ExitCode.DONE


# Seals: hashes of the journals, by which later changes are found.


def seal_runs(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Seal the runs that changed since the last time; with `--follow`, until interrupted."""
    store = open_existing_store(args.store)
    seals = SealFile(Path(args.seals))

    async def act() -> int:
        count = 0
        async for made in seals.seal(store, wait=args.follow):
            count += 1
            if not terminal.json:
                terminal.out(f"{made.run}  version {made.version}  {made.hash}")
        return count

    count = run_in_store(store, act)
    if terminal.json:
        terminal.document({"sealed": count})
    elif not count:
        terminal.err("nothing new to seal")
    _warn_without_key(seals, terminal)
    return ExitCode.DONE


def show_head(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Show the end of the file of seals, to be kept elsewhere."""
    head = SealFile(Path(args.seals)).head()
    if terminal.json:
        terminal.document(attrs.asdict(head))
    else:
        terminal.out(f"{head.head}  {format_count(head.seals, 'seal')}")
    return ExitCode.DONE


def verify_runs(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Compare a run, or all that were sealed, with their seals.

    Returns:
        FAILED if one differs, or is missing without `--allow-missing`.
    """
    store = open_existing_store(args.store)
    seals = SealFile(Path(args.seals))

    async def act() -> list[SealCheck]:
        return [each async for each in seals.verify(store, args.id, head=args.since_head)]

    found = run_in_store(store, act)
    faults = [each for each in found if each.fault is not None]
    if terminal.json:
        terminal.document({"checked": len(found), "faults": [attrs.asdict(each) for each in faults]})
    else:
        for each in faults:
            terminal.out(f"{each.run_id}  {_describe_fault(each)}")
        unsealed = sum(each.unsealed for each in found)
        after = f"; {format_count(unsealed, 'event')} came after their seals" if unsealed else ""
        terminal.out(f"{format_count(len(found), 'run')} checked, {format_count(len(faults), 'fault')}{after}")
    _warn_without_key(seals, terminal)
    allowed = {Fault.MISSING} if args.allow_missing else set()
    return ExitCode.FAILED if any(each.fault not in allowed for each in faults) else ExitCode.DONE


def _describe_fault(check: SealCheck) -> str:
    if check.fault in {Fault.MISSING, Fault.UNREADABLE}:
        return f"{check.fault}: it was sealed up to version {check.sealed}"
    part = (
        f"events {check.intact + 1} to {check.changed_by}"
        if check.intact
        else f"the header or events 1 to {check.changed_by}"
    )
    return f"{check.fault}: {part} are not those that were sealed on {format_time(check.sealed_at)}"


def _warn_without_key(seals: SealFile, terminal: Terminal) -> None:
    if not seals.key:
        terminal.err(f"without {KEY_VARIABLE}, who can write the store and {seals.path} can make both agree again")
