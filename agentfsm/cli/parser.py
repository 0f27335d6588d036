"""The parser of the command line: its subcommands and their options."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from importlib.metadata import version
from typing import TYPE_CHECKING, Final, NoReturn

from agentfsm.agent import WORKER_PARALLEL, WORKER_POLL_S
from agentfsm.cli.argument_types import (
    parse_count,
    parse_date,
    parse_days,
    parse_field,
    parse_new_id,
    parse_object,
    parse_pair,
    parse_seconds,
    parse_time,
)
from agentfsm.cli.commands import (
    audit_log,
    decide,
    execute,
    inspect,
    mcp_client,
    mcp_serve,
    retention,
    timetravel,
)
from agentfsm.cli.resolve.agent_target import MCP_OPTION
from agentfsm.cli.resolve.store_location import DEFAULT_STORE, STORE_VARIABLE
from agentfsm.core.calls import Phase
from agentfsm.core.errors import MisuseError
from agentfsm.core.inbox import InputKind, Priority
from agentfsm.core.machine import State
from agentfsm.core.messages import Outcome
from agentfsm.stores.loading import mask_password

if TYPE_CHECKING:
    from agentfsm.cli.resolve.run_lookup import Command

AddParser = Callable[..., argparse.ArgumentParser]


class _CommandParser(argparse.ArgumentParser):
    """A parser that reports errors in the format of the other commands, followed by the usage, without passwords."""

    def error(self, message: str) -> NoReturn:
        wrong = MisuseError(mask_password(message))
        wrong.add_note(self.format_usage().strip())
        raise wrong


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of the command line."""
    made = _CommandParser(
        prog="agentfsm",
        description="Run agents whose every step is kept, and look at what they did.",
        epilog="exit codes: 0 done, 1 failed, 2 usage, 3 waiting for a person or for input, 4 a limit was reached, "
        "130 interrupted",
    )
    made.add_argument("--version", action="version", version=f"%(prog)s {version('agentfsm')}")
    add = made.add_subparsers(required=True, metavar="COMMAND").add_parser
    _add_execute(add)
    _add_inspect(add)
    _add_decide(add)
    _add_timetravel(add)
    _add_retention(add)
    _add_mcp(add)
    return made


def _add_command(add: AddParser, act: Command, *, text: str) -> argparse.ArgumentParser:
    added = add(act.__name__, help=text, description=text[0].upper() + text[1:] + ".")
    added.set_defaults(act=act)
    added.add_argument("--json", action="store_true", help="write one JSON document to stdout")
    added.add_argument(
        "--store",
        metavar="PATH|URL",
        help=f"where runs are kept: a file, postgresql://... or redis://... (${STORE_VARIABLE}, else {DEFAULT_STORE}); "
        "a URL with a password belongs in the variable",
    )
    return added


def _add_execute(add: AddParser) -> None:
    demo = _add_command(add, execute.demo, text="let an agent survey a folder and write a report; no key is needed")
    demo.add_argument("folder", nargs="?", default=".", help="the folder (default: the current one)")
    run = _add_command(add, execute.run, text="run an agent to the end, or until it waits")
    submit = _add_command(add, execute.submit, text="put a run into the store for a worker to drive, and print its id")
    for starts in (run, submit):
        _add_agent(starts)
        starts.add_argument("prompt", help="what it shall do")
        starts.add_argument(
            "--id",
            type=parse_new_id,
            help="the run's id (the same id and prompt again means the same run)",
        )
        starts.add_argument("--session", help="go on with this conversation")
        starts.add_argument("--messages", metavar="FILE", help="go on from these, in JSON as OpenAI has messages")
        starts.add_argument(
            "--metadata",
            metavar="KEY=VALUE",
            type=parse_pair,
            action="append",
            default=[],
            help="kept with the run",
        )
    worker = _add_command(
        add, execute.worker, text="drive the runs of an agent that can be moved on, until interrupted"
    )
    _add_agent(worker)
    worker.add_argument(
        "--parallel",
        metavar="N",
        type=parse_count,
        default=WORKER_PARALLEL,
        help="runs at once (default: %(default)s)",
    )
    worker.add_argument(
        "--poll",
        metavar="SECONDS",
        type=parse_seconds,
        default=WORKER_POLL_S,
        help="between two looks (%(default)s)",
    )
    worker.add_argument("--until-idle", action="store_true", help="end when nothing can be moved on")
    resume = _add_command(add, execute.resume, text="go on with a run, from where its journal ends; a pause ends")
    _add_run_id(resume)
    _add_agent_option(resume)
    resume.add_argument("--takeover", action="store_true", help="take it from the worker that drives it, if that hangs")


def _add_inspect(add: AddParser) -> None:
    runs = _add_command(add, inspect.runs, text="list the newest runs")
    runs.add_argument("--session", help="only of this conversation")
    runs.add_argument("--agent", metavar="NAME", help="only of the agent of this name")
    runs.add_argument("--user", metavar="NAME", help="only for this user")
    runs.add_argument("--state", choices=[str(state) for state in State], help="only in this state")
    runs.add_argument("--waiting", action="store_true", help="only those that wait")
    runs.add_argument("--parent", metavar="RUN", help="only those that work for this run")
    runs.add_argument("--before", metavar="TIME", type=parse_date, help="only those created before, as in `prune`")
    runs.add_argument("--all", action="store_true", help="those that work for other runs, too")
    runs.add_argument("--limit", type=parse_count, default=20, help="how many at most (default: %(default)s)")
    show = _add_command(add, inspect.show, text="show a run: its turns, calls and outcomes")
    _add_run_id(show)
    show.add_argument("--at", metavar="VERSION", type=int, help="as it was then")
    show.add_argument("--events", action="store_true", help="list its journal too")
    export = _add_command(add, inspect.export, text="write all that there is of a run as JSON")
    _add_run_id(export)
    export.add_argument("--messages", action="store_true", help="write only its messages, as OpenAI has them")
    _add_audit(add)
    graph = _add_command(add, inspect.graph, text="draw an agent with its tools, the path of a run, or the machine")
    graph.add_argument(
        "what", metavar="module:agent|RUN", nargs="?", help="the agent or the run's id (default: the machine)"
    )
    graph.add_argument("--format", choices=["mermaid", "dot", "text"], default="mermaid", help="default: %(default)s")
    doctor = _add_command(add, inspect.doctor, text="look at the installation and the store, and at an agent's tools")
    doctor.add_argument("agent", metavar="module:agent", nargs="?", help="the agent whose tools to look over")
    _add_mcp_option(doctor, "with the MCP servers of this file among them")


def _add_audit(add: AddParser) -> None:
    audit = _add_command(
        add, audit_log.audit, text="tell of each call of a run, or of all runs: who, what, when, how it ended"
    )
    audit.add_argument("id", metavar="RUN", nargs="?", help="the run's id (default: all runs, newest first)")
    audit.add_argument("--tool", metavar="GLOB", default="*", help="only of tools of this name, for example 'files__*'")
    audit.add_argument(
        "--status", choices=_STATUSES, metavar="STATUS", help=f"only in this one: {', '.join(_STATUSES)}"
    )
    audit.add_argument("--agent", metavar="NAME", help="only of the agent of this name")
    audit.add_argument("--user", metavar="NAME", help="only for this user")
    audit.add_argument("--session", help="only of this conversation")
    audit.add_argument("--since", metavar="TIME", type=parse_date, help="only those that were open then or later")
    audit.add_argument("--until", metavar="TIME", type=parse_date, help="only those asked for before")
    audit.add_argument("--limit", type=parse_count, default=1_000, help="how many at most (default: %(default)s)")
    audit.add_argument("--results", action="store_true", help="with --json: the whole results, beside their hashes")


_STATUSES: Final = [str(each) for each in (*Outcome, *Phase) if each is not Phase.FINISHED]


def _add_decide(add: AddParser) -> None:
    approve = _add_command(add, decide.approve, text="let a call run that waits for a yes")
    reject = _add_command(add, decide.reject, text="do not let a call run that waits for a yes")
    settle = _add_command(add, decide.settle, text="record the outcome of a call whose worker crashed")
    answer = _add_command(
        add, decide.answer, text="answer a question, or give the result of a call that comes from outside"
    )
    for decides in (approve, reject, settle, answer):
        _add_run_id(decides)
        decides.add_argument("call", help="the call's id, for example t3.0")
    approve.add_argument(
        "--arguments",
        metavar="JSON",
        type=parse_object,
        help="run it with these, not with the model's own",
    )
    approve.add_argument("--digest", default="", help="of the call as it was shown: a yes to any other is refused")
    reject.add_argument("--message", default="", help="why not, for the model")
    what = settle.add_mutually_exclusive_group(required=True)
    what.add_argument("--result", metavar="TEXT", help="it was done, and returned this")
    what.add_argument("--failed", metavar="TEXT", help="it failed like this")
    what.add_argument("--rerun", action="store_true", help="run it again, under the same key")
    answer.add_argument(
        "text", nargs="?", help="what the model reads; for a tool that asks: a JSON object, or its text"
    )
    answer.add_argument("--failed", action="store_true", help="the text says why there is no result")
    answer.add_argument(
        "--field",
        metavar="NAME=VALUE",
        type=parse_field,
        action="append",
        default=[],
        help="a field of what a tool asks",
    )
    answer.add_argument("--decline", action="store_true", help="tell a tool that asks that you do not answer")
    _add_send(add)
    pause = _add_command(add, decide.pause, text="let a run rest at its next step, until it is resumed")
    cancel = _add_command(add, decide.cancel, text="end a run")
    for stops in (pause, cancel):
        _add_run_id(stops)
        stops.add_argument("--message", default="", help="why, for the record")
    for signed in (approve, reject, settle, answer, pause, cancel):
        signed.add_argument("--by", metavar="NAME", help="who says so (default: the user's name)")


def _add_send(add: AddParser) -> None:
    send = _add_command(add, decide.send, text="give a run more input, which it reads at its next turn")
    _add_run_id(send)
    send.add_argument("text", help="what the model reads")
    kinds = [str(kind) for kind in InputKind if kind is not InputKind.REFLECTION]
    send.add_argument("--kind", choices=kinds, default="user", help="where it comes from (default: %(default)s)")
    priorities = [str(priority) for priority in Priority]
    send.add_argument("--priority", choices=priorities, default="normal", help="(default: %(default)s)")
    send.add_argument("--at", metavar="TIME", type=parse_time, help="not before: +90s, +15m, +2h, +3d, or a date")
    send.add_argument("--key", help="an input of the same key is taken in once only")


def _add_timetravel(add: AddParser) -> None:
    fork = _add_command(add, timetravel.fork, text="begin a run with the first events of another, and print its id")
    _add_run_id(fork)
    fork.add_argument("--at", metavar="VERSION", type=int, help="how many events (default: all, but for the end)")
    fork.add_argument("--prompt", help="another first message")
    fork.add_argument("--id", dest="new_id", type=parse_new_id, help="the new run's id")
    replay = _add_command(
        add, timetravel.replay, text="fold a run again, and check that the model would be asked the same now"
    )
    _add_run_id(replay)
    for takes in (fork, replay):
        _add_agent_option(takes)
    diff = _add_command(
        add, timetravel.diff, text="tell what differs between two versions of a run, or between two runs"
    )
    _add_run_id(diff)
    diff.add_argument("other", nargs="?", metavar="OTHER", help="the other run's id (default: the same run)")
    diff.add_argument("--at", metavar="VERSION", type=int, help="of the first one (default: the newest)")
    diff.add_argument("--to", metavar="VERSION", type=int, help="of the second one (default: the newest)")


def _add_retention(add: AddParser) -> None:
    delete = _add_command(add, retention.delete, text="remove a run with those that work for it, or a whole session")
    delete.add_argument("id", nargs="?", metavar="RUN", help="the run's id")
    delete.add_argument("--session", help="the conversation, with all its runs")
    prune = _add_command(add, retention.prune, text="remove the runs that ended long ago")
    long = prune.add_mutually_exclusive_group(required=True)
    long.add_argument("--before", metavar="TIME", type=parse_date, help="for example 2026-01-31, or seconds since 1970")
    long.add_argument("--older-than", metavar="DAYS", type=parse_days, help="by the store's clock")
    _add_command(
        add, retention.compact, text="give the room of removed runs back to the disk (a SQLite file, nothing driven)"
    )


def _add_mcp(add: AddParser) -> None:
    text = "speak the Model Context Protocol"
    group = add("mcp", help=text, description=f"{text[0].upper()}{text[1:]}.")
    sub = group.add_subparsers(required=True, metavar="COMMAND").add_parser
    _add_mcp_client(sub)
    serve = _add_command(sub, mcp_serve.serve, text="serve an agent, or a registry of tools, to MCP clients")
    serve.add_argument("target", metavar="module:name", help="an Agent, a ToolRegistry or an MCPService, or a function")
    serve.add_argument(
        "--http",
        metavar="HOST:PORT",
        type=mcp_serve.parse_address,
        nargs="?",
        const=mcp_serve.DEFAULT_ADDRESS,
        help="over HTTP (default: %(const)s), not over standard input and output",
    )
    serve.add_argument("--token-env", metavar="NAME", help="the variable that holds the bearer token of HTTP clients")
    serve.add_argument("--allow-host", metavar="NAME", action="append", default=[], help="a name it is called by")
    serve.add_argument("--prefix", default="", help="of the names of the tools for the agent's runs")
    serve.add_argument("--no-tools", action="store_true", help="leave out the agent's own tools")


def _add_mcp_client(sub: AddParser) -> None:
    tools = _add_command(
        sub, mcp_client.tools, text="list the servers of a file and their tools, and what is refused and why"
    )
    approve = _add_command(
        sub, mcp_client.approve, text="show how servers start and what they offer, or have changed, and ask"
    )
    prompts = _add_command(sub, mcp_client.prompts, text="list the prompts of the servers of a file")
    prompt = _add_command(sub, mcp_client.prompt, text="show a prompt of a server, filled in")
    resources = _add_command(sub, mcp_client.resources, text="list the resources of the servers of a file")
    read = _add_command(sub, mcp_client.read, text="read out a resource of a server")
    for takes in (tools, approve, prompts, prompt, resources, read):
        takes.add_argument("file", metavar="FILE", help='a JSON file with "mcpServers", as every host has it')
    approve.add_argument("server", metavar="SERVER", nargs="?", help="only this one")
    approve.add_argument("--yes", action="store_true", help="approve all that is shown")
    approve.epilog = (
        "Approvals are kept in ~/.agentfsm/mcp-pins.json, in your home and not beside the store: a folder that you "
        "were given could bring its own along."
    )
    for takes in (prompt, read):
        takes.add_argument("server", metavar="SERVER", help="its name in the file")
    prompt.add_argument("name", metavar="NAME", help="of the prompt")
    prompt.add_argument("arguments", metavar="KEY=VALUE", type=parse_pair, nargs="*", help="what it is filled in with")
    read.add_argument("uri", metavar="URI", help="of the resource")


# What several of them take.


def _add_run_id(takes: argparse.ArgumentParser) -> None:
    takes.add_argument("id", metavar="RUN", help="the run's id")


def _add_agent(takes: argparse.ArgumentParser) -> None:
    takes.add_argument("agent", metavar="module:agent", help="an Agent, or a function that returns one")
    _add_mcp_option(takes, "the MCP servers of this file join its tools; may be given several times")


def _add_agent_option(takes: argparse.ArgumentParser) -> None:
    takes.add_argument("--agent", metavar="module:agent", help="with this one, not the one that it was begun with")
    _add_mcp_option(takes, "with the MCP servers of this file, not those that it was begun with")


def _add_mcp_option(takes: argparse.ArgumentParser, text: str) -> None:
    takes.add_argument(MCP_OPTION, metavar="FILE", action="append", default=[], help=text)
