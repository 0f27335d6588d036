"""Build the argument parser: the subcommands and their options."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, Final, NoReturn, get_args

from agentfsm.agents.agent import DRAIN_S, WORKER_PARALLEL, WORKER_POLL_S
from agentfsm.cli.argument_types import (
    DEFAULT_ADDRESS,
    parse_address,
    parse_count,
    parse_date,
    parse_datetime,
    parse_days,
    parse_field,
    parse_new_id,
    parse_object,
    parse_pair,
    parse_rate,
    parse_rating,
    parse_seconds,
    parse_seconds_or_zero,
    parse_share,
    parse_since,
    parse_threshold,
    parse_time,
    parse_usd,
    parse_weight,
)
from agentfsm.cli.resolve.store_location import STORE_VARIABLE
from agentfsm.cli.terminal import user_name
from agentfsm.core.calls import Phase
from agentfsm.core.errors import MisuseError
from agentfsm.core.inbox import InputKind, Priority
from agentfsm.core.labels import DATA_LEVELS
from agentfsm.core.limits import StopReason
from agentfsm.core.machine import State
from agentfsm.core.messages import Outcome
from agentfsm.ports.store import RunOrder
from agentfsm.stores.home import DEFAULT_STORE, HOME_FOLDER
from agentfsm.stores.loading import mask_password

AddParser = Callable[..., argparse.ArgumentParser]

_DEFAULT_SEALS: Final = f"{HOME_FOLDER}/seals.jsonl"
_DEFAULT_MEMORY: Final = f"{HOME_FOLDER}/memory.db"
# Name in the records of deletions from a memory.
_MEMORY_BY: Final = "agentfsm memory"
# Only programs on this machine can reach these.
_STUDIO_ADDRESS: Final = "127.0.0.1:8787"
_ENGINES: Final = ("store", "dbos")
# Shells, with the command that stores the script.
_SHELLS: Final = {
    "bash": "agentfsm completion bash > ~/.local/share/bash-completion/completions/agentfsm",
    "zsh": "agentfsm completion zsh > ~/.zfunc/_agentfsm, a folder of $fpath",
    "fish": "agentfsm completion fish > ~/.config/fish/completions/agentfsm.fish",
}
# Fields of ClientLimits that are options of `mcp serve`, and what they bound.
CLIENT_LIMITS: Final = {
    "connections": "connections at once",
    "sessions": "sessions at once",
    "calls": "calls in progress and waiting",
}
# Options for the limits of a user of `serve`, by field.
KEY_LIMITS: Final = {
    "requests": ("--per-minute", "requests of the user in a minute"),
    "open_requests": ("--open-requests", "requests of the user at once, such as event streams, in one process"),
    "tokens": ("--tokens-per-minute", "tokens of the user's runs in a minute"),
    "runs": ("--running", "runs of the user at once"),
}
# Values of the library. They are repeated here, because importing their modules takes longer than most commands, and
# tests/cli/test_parser.py compares them.
DATE_PLACEHOLDER: Final = "{logical_date}"
MISSED_POLICIES: Final = ("skip", "latest", "all")
COST_GROUPS: Final = ("agent", "model", "purpose", "user", "day", "tenant")
MESSAGE_FORMS: Final = ("json", "slack")
UNIT_KINDS: Final = ("user", "session", "run")
EVALUATION_RUNS: Final = 5
EVALUATIONS_PARALLEL: Final = 8
JUDGE_VOTES: Final = 3
WORSE_BY: Final = 0.05
LOGIN_TIMEOUT_S: Final = 300.0

_AUTHOR_HELP: Final = "its author (default: you)"
_EVIDENCE_HELP: Final = "folder of recorded results (default: %(default)s)"


class _CommandParser(argparse.ArgumentParser):
    """A parser that reports errors in the format of the other commands, followed by the usage, without passwords."""

    def error(self, message: str) -> NoReturn:
        wrong = MisuseError(mask_password(message))
        wrong.add_note(self.format_usage().strip())
        raise wrong


# Arguments of the library whose option has another name.
_OPTION_NAMES: Final = {"origins": "allow-origin", "allow_private": "alerts-private"}
_ARGUMENT: Final = re.compile(r"(?<![\w.-])(?P<name>[a-z]+(?:_[a-z]+)*)=(?P<set>True\b)?(?=(?P<value>\S)?)")


def spell_options(text: str, usage: str) -> str:
    """Return an error of the library with the options of a command in place of the arguments `name=`.

    Arguments in a call, such as `Agent(name=...)`, are those of the user's code, and stay. So do fields of the log.

    Args:
        text: The error.
        usage: Usage of the command.
    """

    def spell(found: re.Match[str]) -> str:
        before, closed = text[: found.start()], 1
        while closed:  # remove the parentheses that are closed, the inner ones first
            before, closed = re.subn(r"\([^()]*\)", "", before)
        option = f"--{_OPTION_NAMES.get(found['name'], found['name'].replace('_', '-'))}"
        if re.search(r"\w\(", before) or re.search(rf"{option}(?![\w-])", usage) is None:
            return found[0]
        has_value = found["set"] is None and found["value"] is not None and found["value"] not in ",;:.)"
        return f"{option} " if has_value else option

    return text if text.startswith("event=") else _ARGUMENT.sub(spell, text)


class _VersionAction(argparse.Action):
    """Prints the version and exits. The package metadata is read only here, because reading it slows each start."""

    def __call__(self, parser: argparse.ArgumentParser, *_args: Any) -> NoReturn:
        from importlib.metadata import version  # noqa: PLC0415  few commands need it

        sys.stdout.write(f"{parser.prog} {version('agentfsm')}\n")
        parser.exit()


@cache
def build_parser() -> argparse.ArgumentParser:
    """Build the parser of the command line, once in a process: it takes as long as a short command."""
    made = _CommandParser(
        prog="agentfsm",
        description="Run agents that record every step in a journal, and inspect, resume and control their runs.",
        epilog="exit codes: 0 done, 1 failed, 2 usage, 3 waiting for a person or for input, 4 a limit was reached, "
        "5 an evaluation cannot decide, 130 interrupted",
    )
    made.add_argument("--version", action=_VersionAction, nargs=0, help="print the version and exit")
    add = made.add_subparsers(required=True, metavar="COMMAND").add_parser
    _add_execute(add)
    _add_inspect(add)
    _add_decide(add)
    _add_logins(add)
    _add_timetravel(add)
    _add_retention(add)
    _add_followers(add)
    _add_totals(add)
    _add_schedule(add)
    _add_metrics(add)
    _add_costs(add)
    _add_memory(add)
    _add_index(add)
    _add_mcp(add)
    _add_skills(add)
    _add_prompts(add)
    _add_eval(add)
    _add_rollout(add)
    _add_release(add)
    _add_load(add)
    _add_drill(add)
    _add_serve(add)
    _add_keys(add)
    _add_webhooks(add)
    _add_setup(add)
    return made


_ENGINE_HELP: Final = "what dispatches the runs: the store, or DBOS, which needs agentfsm[dbos] (default: %(default)s)"


def _add_group(add: AddParser, name: str, text: str) -> AddParser:
    """Add a command that has commands of its own, and return what adds these."""
    group = add(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
    return group.add_subparsers(required=True, metavar="COMMAND").add_parser


def _add_command(
    add: AddParser, act: str, *, text: str, name: str = "", has_store: bool = True
) -> argparse.ArgumentParser:
    """Add a command.

    Args:
        add: Adds a parser to those of the commands, or of a group.
        act: Module in `cli/commands/` and function, as "module:function"; it is imported when the command runs.
        text: Line of help.
        name: Name of the command; by default that of the function.
        has_store: Whether it takes `--store`.
    """
    added = add(name or act.partition(":")[2], help=text, description=text[0].upper() + text[1:] + ".")
    added.set_defaults(act=act, usage=added.format_usage)
    added.add_argument("--json", action="store_true", help="write one JSON document to stdout")
    if has_store:
        added.add_argument(
            "--store",
            metavar="PATH|URL",
            help=f"store of the runs: a file, postgresql://... or redis://... (default: ${STORE_VARIABLE}, else "
            f"{DEFAULT_STORE}); pass a URL with a password in the variable",
        )
    return added


def _add_identity(takes: argparse.ArgumentParser) -> None:
    """Add the options of whom the runs work for: tools have their permissions by it, and roll-outs their targets."""
    takes.add_argument("--user", metavar="NAME", help="user on whose behalf the runs work")
    takes.add_argument("--tenant", metavar="NAME", help="tenant that the user belongs to")
    takes.add_argument(
        "--role", metavar="NAME", action="append", default=[], help="role of the user; may be given several times"
    )


def _add_execute(add: AddParser) -> None:
    demo = _add_command(add, "execute:demo", text="let an agent survey a folder and write a report; no key is needed")
    demo.add_argument("folder", nargs="?", default=".", help="the folder (default: the current one)")
    run = _add_command(add, "execute:run", text="run an agent to the end, or until it waits")
    talk = _add_command(
        add, "execute:chat", text="talk with an agent, in a conversation that a killed process continues"
    )
    _add_agent(talk)
    chosen = talk.add_mutually_exclusive_group()
    chosen.add_argument("--session", help="name of the conversation (default: a new one)")
    chosen.add_argument(
        "--continue", dest="continues", action="store_true", help="continue the newest conversation with this agent"
    )
    _add_identity(talk)
    editor = _add_command(
        add, "acp:serve", name="acp", text="serve an agent to an editor, over the Agent Client Protocol"
    )
    _add_agent(editor)
    editor.add_argument("--user", metavar="NAME", help="user of the editor (default: that of the operating system)")
    _add_drain(editor)
    submit = _add_command(add, "execute:submit", text="store a run for a worker to execute, and print its id")
    for starts in (run, submit):
        _add_agent(starts)
        starts.add_argument("prompt", help="the task")
        starts.add_argument(
            "--id",
            type=parse_new_id,
            help="id of the run (default: a random one); repeating an id with the same prompt continues that run",
        )
        starts.add_argument("--session", help="continue this conversation")
        _add_identity(starts)
        starts.add_argument("--messages", metavar="FILE", help="earlier messages, a JSON list in OpenAI's format")
        starts.add_argument(
            "--metadata",
            metavar="KEY=VALUE",
            type=parse_pair,
            action="append",
            default=[],
            help="stored with the run; may be given several times",
        )
    submit.add_argument("--engine", choices=_ENGINES, default="store", help=_ENGINE_HELP)
    submit.add_argument(
        "--priority",
        metavar="N",
        type=parse_count,
        help="1 is the most urgent (with --engine dbos; default: before all)",
    )
    submit.add_argument(
        "--delay", metavar="SECONDS", type=parse_seconds, help="start the run later (with --engine dbos)"
    )
    worker = _add_command(add, "execute:worker", text="execute runs that are ready, until interrupted")
    _add_agent(worker)
    worker.add_argument(
        "--parallel",
        metavar="N",
        type=parse_count,
        default=WORKER_PARALLEL,
        help="number of runs at a time (default: %(default)s)",
    )
    worker.add_argument(
        "--poll",
        metavar="SECONDS",
        type=parse_seconds,
        help=f"interval between two queries for ready runs (default: {WORKER_POLL_S}, with --engine dbos 0.25)",
    )
    worker.add_argument("--until-idle", action="store_true", help="exit when no run is ready")
    worker.add_argument("--engine", choices=_ENGINES, default="store", help=_ENGINE_HELP)
    worker.add_argument(
        "--concurrency",
        metavar="N",
        type=parse_count,
        help="number of runs of all workers at a time (with --engine dbos; default: no limit)",
    )
    worker.add_argument(
        "--tenant-concurrency",
        metavar="N",
        type=parse_count,
        help="number of runs of a tenant at a time (with --engine dbos; default: no limit)",
    )
    worker.add_argument(
        "--rate",
        metavar="RUNS/SECONDS",
        type=parse_rate,
        help="number of runs started in a period, such as 300/60 (with --engine dbos; default: no limit)",
    )
    _add_drain(worker)
    _add_deltas(worker)
    _add_notifier(worker, "--alerts-to")
    resume = _add_command(add, "execute:resume", text="resume a run from the end of its journal, and end its pause")
    _add_run_id(resume)
    _add_agent_option(resume)
    resume.add_argument("--takeover", action="store_true", help="take the run from a worker that hangs")
    resume.add_argument(
        "--renamed",
        metavar="OLD=NEW",
        type=parse_pair,
        action="append",
        default=[],
        help="a tool or step of the run has another name in this program; may be given several times",
    )


def _add_purpose(takes: argparse.ArgumentParser) -> None:
    takes.add_argument(
        "--purpose", metavar="WORD", default="", help="runs of this purpose, such as eval (default: production)"
    )


def _add_inspect(add: AddParser) -> None:
    pages = _add_command(
        add, "documentation:docs", text="print a page of the documentation, or a guide for coding agents"
    )
    pages.add_argument("topic", metavar="PAGE", nargs="?", help="such as tools or tutorial/index (default: the guide)")
    pages.add_argument("--list", action="store_true", help="list the pages")
    runs = _add_command(add, "inspect:runs", text="list the newest runs")
    runs.add_argument("--session", help="only runs of this conversation")
    runs.add_argument("--agent", metavar="NAME", help="only runs of the agent with this name")
    runs.add_argument("--user", metavar="NAME", help="only runs of this user")
    runs.add_argument("--state", choices=[str(state) for state in State], help="only runs in this state")
    runs.add_argument(
        "--stop-reason", choices=[str(each) for each in StopReason], help="only runs that ended for this reason"
    )
    runs.add_argument("--release", metavar="NAME", help="only runs of this release of an agent")
    runs.add_argument("--text", metavar="WORDS", help="only runs whose prompt and answer have all of these words")
    runs.add_argument("--waiting", action="store_true", help="only runs that wait for a person or for input")
    runs.add_argument(
        "--stranded", action="store_true", help="only runs that are ready and that no worker takes, with the reason"
    )
    _add_purpose(runs)
    runs.add_argument("--parent", metavar="RUN", help="only runs of sub-agents that this run called")
    runs.add_argument(
        "--since", metavar="TIME", type=parse_since, help="only runs created on this date or later, such as 7d"
    )
    runs.add_argument("--before", metavar="TIME", type=parse_date, help="only runs created before this date")
    runs.add_argument("--min-cost", metavar="USD", type=parse_usd, help="only runs that have cost this much or more")
    runs.add_argument(
        "--min-duration", metavar="SECONDS", type=parse_seconds, help="only runs that were executed for this long"
    )
    runs.add_argument(
        "--sort",
        choices=get_args(RunOrder),
        default="newest",
        help="order: newest first, or of the runs that are over the dearest or the longest (default: %(default)s)",
    )
    runs.add_argument(
        "--max-rating", metavar="1-5", type=parse_rating, help="only runs with this rating or a worse one"
    )
    runs.add_argument("--all", action="store_true", help="also list the runs of sub-agents")
    runs.add_argument("--limit", type=parse_count, default=20, help="maximum number (default: %(default)s)")
    show = _add_command(add, "inspect:show", text="show a run: its turns, calls and outcomes")
    _add_run_id(show)
    show.add_argument("--at", metavar="VERSION", type=int, help="show the run as it was at this version")
    show.add_argument("--events", action="store_true", help="list its journal as well")
    show.add_argument(
        "--request",
        metavar="TURN",
        type=parse_count,
        help="show what the model was sent in this turn instead: all parts, with tokens and costs",
    )
    _add_agent_option(show)
    logs = _add_command(add, "inspect:logs", text="print the log of a stored run: turns, calls, its end with totals")
    _add_run_id(logs)
    logs.add_argument("--follow", action="store_true", help="go on with what is new, until the run is over")
    _add_export(add)
    _add_audit(add)
    graph = _add_command(
        add, "inspect:graph", text="draw an agent, the plan or the path of a run, or the state machine"
    )
    graph.add_argument(
        "subject", metavar="module:agent|RUN", nargs="?", help="an agent or a run (default: the state machine)"
    )
    graph.add_argument(
        "--format", choices=["mermaid", "dot", "text"], default="mermaid", help="output format (default: %(default)s)"
    )
    graph.add_argument(
        "--states", action="store_true", help="draw the states of a run, also if it has a plan or is a flow"
    )
    doctor = _add_command(add, "inspect:doctor", text="check the installation, the store and the tools of an agent")
    doctor.add_argument("agent", metavar="module:agent", nargs="?", help="the agent whose tools are checked")
    _add_mcp_option(doctor, "add the MCP servers of this file to its tools")
    doctor.add_argument("--prompts", metavar="FOLDER", help="the folder whose prompts are checked")
    live = doctor.add_argument_group("before going live")
    live.add_argument("--production", action="store_true", help="check whether the agent is ready for production")
    live.add_argument("--evidence", metavar="FOLDER", default="evidence", help=_EVIDENCE_HELP)
    live.add_argument("--waivers", metavar="FILE", help="TOML file with accepted failures: check, by, until, reason")
    live.add_argument("--no-probes", action="store_true", help="do not run the agent with a scripted model")
    live.add_argument("--write", metavar="FILE", help="also write the report as a page in Markdown")
    live.add_argument("--sarif", metavar="FILE", help="also write what did not pass as SARIF")
    live.add_argument("--junit", metavar="FILE", help="also write the report as JUnit's XML")


def _add_load(add: AddParser) -> None:
    load = _add_command(add, "inspect:load", text="measure how long runs of an agent take at a stated concurrency")
    _add_agent(load)
    load.add_argument("--prompts", metavar="FILE", help="file with a prompt in each line, used in turn")
    load.add_argument("--prompt", metavar="TEXT", help="the prompt of all runs")
    load.add_argument(
        "--runs", metavar="N", type=parse_count, default=100, help="number of runs (default: %(default)s)"
    )
    load.add_argument(
        "--concurrency",
        metavar="N",
        type=parse_count,
        default=8,
        help="runs at a time (default: %(default)s)",
    )
    load.add_argument(
        "--runs-per-day", metavar="N", type=parse_count, help="runs expected in production, for a forecast of the costs"
    )
    load.add_argument("--out", metavar="FILE", help="write the result as JSON, as evidence for doctor --production")


def _add_drill(add: AddParser) -> None:
    sub = _add_group(add, "drill", "practise a roll-back or a restore on a copy, and record it for doctor --production")
    rollback = _add_command(
        sub, "production:drill_a_rollback", name="rollback", text="roll back a copy of a roll-out, and measure it"
    )
    rollback.add_argument("name", metavar="NAME", help="name of the roll-out")
    restore = _add_command(
        sub,
        "production:drill_a_restore",
        name="restore",
        text="open a backup of the store, and read its journals",
    )
    restore.add_argument("backup", metavar="FILE|URL", help="a file of SQLite, or a store that has the backup")
    restore.add_argument(
        "--run", metavar="COMMAND", default="", help="command that restores the backup into the URL, such as pg_restore"
    )
    restore.add_argument("--seals", metavar="FILE", help="compare the journals with these seals of `audit --seal`")
    for each in (rollback, restore):
        each.add_argument("--by", metavar="NAME", default=user_name() or "unknown", help=_AUTHOR_HELP)
        each.add_argument("--evidence", metavar="FOLDER", default="evidence", help=_EVIDENCE_HELP)


def _add_export(add: AddParser) -> None:
    text = "write a run, its journal and its messages as JSON; or send the traces of runs to OpenTelemetry"
    export = _add_command(add, "inspect:export", text=text)
    export.add_argument("id", metavar="RUN|otlp", help="id of the run; or the word otlp, for the traces of all runs")
    export.add_argument("--messages", action="store_true", help="write only its messages, in OpenAI's format")
    export.add_argument("--to", metavar="URL", help="otlp: the server (default: $OTEL_EXPORTER_OTLP_ENDPOINT)")
    export.add_argument(
        "--since", metavar="TIME", type=parse_since, help="otlp: only runs that were open then or later, such as 7d"
    )
    export.add_argument(
        "--content",
        choices=["none", "redacted", "full"],
        default="none",
        help="otlp: texts that the spans have (default: %(default)s)",
    )
    export.add_argument("--follow", action="store_true", help="otlp: export what is new, until interrupted")


def _add_audit(add: AddParser) -> None:
    audit = _add_command(
        add, "audit_log:audit", text="list each call of a run, or of all runs: caller, arguments, approval, outcome"
    )
    audit.add_argument("id", metavar="RUN", nargs="?", help="id of the run (default: all runs, newest first)")
    audit.add_argument("--tool", metavar="GLOB", default="*", help="only calls of these tools, for example 'files__*'")
    audit.add_argument(
        "--status", choices=_STATUSES, metavar="STATUS", help=f"only calls with this status: {', '.join(_STATUSES)}"
    )
    audit.add_argument("--agent", metavar="NAME", help="only runs of the agent with this name")
    audit.add_argument("--user", metavar="NAME", help="only runs of this user")
    audit.add_argument("--session", help="only runs of this conversation")
    audit.add_argument(
        "--since", metavar="TIME", type=parse_since, help="only calls that were open then or later, such as 7d"
    )
    audit.add_argument("--until", metavar="TIME", type=parse_date, help="only calls requested before this time")
    audit.add_argument("--limit", type=parse_count, default=1_000, help="maximum number (default: %(default)s)")
    audit.add_argument("--results", action="store_true", help="with --json: include the results, not only hashes")
    seals = audit.add_mutually_exclusive_group()
    seals.add_argument("--seal", action="store_true", help="write the hashes of journals that have changed to a file")
    seals.add_argument("--verify", action="store_true", help="find changes of the store since it was sealed")
    seals.add_argument("--head", action="store_true", help="show the end of that file, to be kept elsewhere")
    audit.add_argument(
        "--seals", metavar="FILE", default=_DEFAULT_SEALS, help="the file of the hashes (default: %(default)s)"
    )
    audit.add_argument("--follow", action="store_true", help="with --seal: go on until interrupted")
    audit.add_argument(
        "--since-head", metavar="HASH", default="", help="with --verify: a head from earlier, which the file must have"
    )
    audit.add_argument("--allow-missing", action="store_true", help="with --verify: runs may have been deleted since")


_STATUSES: Final = [str(each) for each in (*Outcome, *Phase) if each is not Phase.FINISHED]


def _add_logins(add: AddParser) -> None:
    login = _add_command(add, "user_login:login", text="log in to the server of a call that waits for it")
    _add_run_id(login)
    login.add_argument("call", metavar="CALL", nargs="?", help="id of the call; by default the first that waits")
    _add_agent_option(login)
    login.add_argument("--no-browser", action="store_true", help="only print the page to open")
    login.add_argument(
        "--timeout", type=parse_seconds, default=300.0, metavar="SECONDS", help="time for the login (default: 300)"
    )
    logout = _add_command(add, "user_login:logout", text="revoke and delete the logins of a user at servers of tools")
    logout.add_argument("target", metavar="AGENT", help="the agent, as module:name")
    logout.add_argument("--user", help="the user; by default that of runs without one")
    logout.add_argument("--tenant", help="tenant of the user")


def _add_decide(add: AddParser) -> None:
    approve = _add_command(add, "decide:approve", text="approve a call that waits for approval")
    reject = _add_command(add, "decide:reject", text="reject a call that waits for approval")
    settle = _add_command(add, "decide:settle", text="record the outcome of a call whose worker crashed")
    answer = _add_command(add, "decide:answer", text="answer a question, or supply the result of an external call")
    for decides in (approve, reject):
        _add_run_id(decides)
        decides.add_argument("calls", metavar="CALL", nargs="+", help="ids of the calls, for example t3.0")
    for decides in (settle, answer):
        _add_run_id(decides)
        decides.add_argument("call", help="id of the call, for example t3.0")
    approve.add_argument(
        "--arguments",
        metavar="JSON",
        type=parse_object,
        help="run the call with these arguments instead of the model's",
    )
    approve.add_argument(
        "--digest",
        dest="digests",
        action="append",
        default=[],
        help="digest of the call as shown, in the order of the calls; nothing is approved if one has changed since",
    )
    approve.add_argument(
        "--allow",
        metavar="ARGUMENT",
        action="append",
        default=[],
        help="let later calls with this value of the argument run in this session; without --digest, only show it",
    )
    allowances = _add_command(
        add, "decide:allowances", text="list what is allowed in the session of a run, or revoke it"
    )
    _add_run_id(allowances)
    allowances.add_argument("--revoke", metavar="ALLOWANCE", help="end the allowance with this id")
    for checked in (approve, settle):
        checked.add_argument(
            "--four-eyes", action="store_true", help="refuse it if the person has shaped the call, as its prompt does"
        )
    reject.add_argument("--message", default="", help="the reason, which the model reads")
    outcome = settle.add_mutually_exclusive_group(required=True)
    outcome.add_argument("--result", metavar="TEXT", help="the call succeeded and returned this")
    outcome.add_argument("--failed", metavar="TEXT", help="the call failed with this message")
    outcome.add_argument("--rerun", action="store_true", help="run it again with the same idempotency key")
    answer.add_argument("text", nargs="?", help="the answer; for the questions of a tool: a JSON object, or plain text")
    answer.add_argument("--failed", action="store_true", help="the text is the reason why there is no result")
    answer.add_argument(
        "--field",
        metavar="NAME=VALUE",
        type=parse_field,
        action="append",
        default=[],
        help="a field of the answer to a tool's question; may be given several times",
    )
    answer.add_argument("--decline", action="store_true", help="decline to answer the questions of a tool")
    _add_send(add)
    pause = _add_command(add, "decide:pause", text="pause a run at its next step, until it is resumed")
    cancel = _add_command(add, "decide:cancel", text="end a run")
    for stops in (pause, cancel):
        _add_run_id(stops)
        stops.add_argument("--message", default="", help="the reason, for the journal")
    feedback = _add_command(add, "decide:feedback", text="rate a run, also if it is over")
    _add_run_id(feedback)
    feedback.add_argument("--rating", metavar="1-5", type=parse_rating, required=True, help="1 (bad) to 5 (good)")
    feedback.add_argument("--comment", default="", help="the reasons")
    for signed in (approve, allowances, reject, settle, answer, pause, cancel, feedback):
        signed.add_argument("--by", metavar="NAME", help="person who decides (default: your user name)")


def _add_send(add: AddParser) -> None:
    send = _add_command(add, "decide:send", text="send input to a run, which reads it at its next turn")
    _add_run_id(send)
    send.add_argument("text", help="the text that the model reads")
    kinds = [str(kind) for kind in InputKind if kind is not InputKind.REFLECTION]
    send.add_argument("--kind", choices=kinds, default="user", help="source of the input (default: %(default)s)")
    priorities = [str(priority) for priority in Priority]
    send.add_argument("--priority", choices=priorities, default="normal", help="reading order (default: %(default)s)")
    send.add_argument("--at", metavar="TIME", type=parse_time, help="not before: +90s, +15m, +2h, +3d, or a date")
    send.add_argument("--key", help="idempotency key: the run accepts one input for each key")
    send.add_argument("--by", metavar="NAME", help="person who sends it (default: your user name)")


def _add_timetravel(add: AddParser) -> None:
    fork = _add_command(add, "timetravel:fork", text="start a run from the first events of another, and print its id")
    _add_run_id(fork)
    fork.add_argument(
        "--at", metavar="VERSION", type=int, help="number of events to copy (default: all but a final one)"
    )
    fork.add_argument("--prompt", help="replace the first message")
    fork.add_argument("--id", dest="new_id", type=parse_new_id, help="id of the new run")
    fork.add_argument(
        "--withhold", action="store_true", help="refuse calls of tools that are not read-only; else the new run acts"
    )
    replay = _add_command(add, "timetravel:replay", text="check that the agent would repeat the requests of a run")
    _add_run_id(replay)
    for takes in (fork, replay):
        _add_agent_option(takes)
    diff = _add_command(add, "timetravel:diff", text="compare two versions of a run, or two runs")
    _add_run_id(diff)
    diff.add_argument("other", nargs="?", metavar="OTHER", help="id of the other run (default: the same run)")
    diff.add_argument("--at", metavar="VERSION", type=int, help="version of the first run (default: the newest)")
    diff.add_argument("--to", metavar="VERSION", type=int, help="version of the second run (default: the newest)")


def _add_retention(add: AddParser) -> None:
    delete = _add_command(add, "retention:delete", text="remove a run with those of its sub-agents, or a session")
    delete.add_argument("id", nargs="?", metavar="RUN", help="id of the run")
    delete.add_argument("--session", help="the conversation whose runs are removed")
    prune = _add_command(add, "retention:prune", text="remove runs that ended long ago")
    long = prune.add_mutually_exclusive_group(required=True)
    long.add_argument(
        "--before",
        metavar="TIME",
        type=parse_date,
        help="they ended before this time: a date such as 2026-01-31, or seconds since 1970",
    )
    long.add_argument(
        "--older-than", metavar="DAYS", type=parse_days, help="they ended this long ago, by the store's clock"
    )
    prune.add_argument("--unread", action="store_true", help="also runs that a follower has not read")
    _add_command(add, "retention:compact", text="return the space of removed runs to the disk (SQLite only)")


def _add_totals(add: AddParser) -> None:
    sub = _add_group(add, "totals", "the sums of all runs that costs, metrics and alerts read")
    show = _add_command(sub, "fleet_metrics:totals", name="show", text="print how far they are")
    text = "make them anew from the journals, or for the first time"
    rebuild = _add_command(sub, "fleet_metrics:totals", name="rebuild", text=text)
    show.set_defaults(rebuild=False)
    rebuild.set_defaults(rebuild=True)


def _add_followers(add: AddParser) -> None:
    sub = _add_group(add, "followers", "list the durable consumers of the journals, or drop one")
    _add_command(sub, "retention:list_followers", name="list", text="list the followers of the store with their lag")
    drop = _add_command(
        sub, "retention:drop_follower", name="drop", text="remove a follower, which keeps runs from being pruned"
    )
    drop.add_argument("name", metavar="NAME", help="name of the follower")


def _add_schedule(add: AddParser) -> None:
    sub = _add_group(
        add,
        "schedule",
        "add, list, pause, resume or remove recurring starts of runs, or create the runs of a span of time",
    )
    added = _add_command(
        sub, "schedule_admin:add_schedule", name="add", text="add a schedule, whose runs workers start"
    )
    _add_schedule_name(added)
    _add_agent(added)
    added.add_argument("prompt", help=f"the task, or the inputs of a flow; {DATE_PLACEHOLDER} stands for the time")
    added.add_argument(
        "--cron",
        metavar="EXPRESSION",
        required=True,
        help="minute, hour, day of the month, month and day of the week, for example '0 3 * * *'",
    )
    added.add_argument(
        "--tz", metavar="ZONE", default="UTC", help="time zone, for example Europe/Vienna (default: %(default)s)"
    )
    added.add_argument(
        "--missed",
        choices=MISSED_POLICIES,
        default="latest",
        help="which times without a worker are made up for (default: %(default)s)",
    )
    _add_identity(added)
    added.add_argument(
        "--metadata",
        metavar="KEY=VALUE",
        type=parse_pair,
        action="append",
        default=[],
        help="stored with each run; may be given several times",
    )
    added.add_argument("--replace", action="store_true", help="replace another schedule of this name")
    _add_command(
        sub, "schedule_admin:list_schedules", name="list", text="list the schedules of the store with their next times"
    )
    for act, name, does in (
        ("schedule_admin:show_schedule", "show", "print a schedule, with the times that could not get their run"),
        ("schedule_admin:remove_schedule", "remove", "remove a schedule; its runs stay"),
        ("schedule_admin:pause_schedule", "pause", "start no runs until the schedule is resumed"),
        ("schedule_admin:resume_schedule", "resume", "start runs again, from the next time on"),
    ):
        _add_schedule_name(_add_command(sub, act, name=name, text=does))
    following = _add_command(sub, "schedule_admin:print_next_times", name="next", text="print the next times")
    _add_schedule_name(following)
    following.add_argument(
        "--count", metavar="N", type=parse_count, default=5, help="number of times (default: %(default)s)"
    )
    backfill = _add_command(
        sub, "schedule_admin:backfill_schedule", name="backfill", text="create the runs of a span of time in the past"
    )
    _add_schedule_name(backfill)
    backfill.add_argument(
        "--from",
        dest="start",
        metavar="TIME",
        type=parse_datetime,
        required=True,
        help="first moment, such as 2026-01-31 or 2026-01-31T18:00, in the schedule's zone unless it has an offset",
    )
    backfill.add_argument(
        "--to", dest="end", metavar="TIME", type=parse_datetime, required=True, help="end, which is not included"
    )
    backfill.add_argument(
        "--agent", metavar="module:agent", help="use this agent instead of the one that the schedule names"
    )
    _add_mcp_option(backfill, "use the MCP servers of this file instead of those that the schedule was added with")


def _add_schedule_name(takes: argparse.ArgumentParser) -> None:
    takes.add_argument("name", metavar="NAME", help="name of the schedule")


def _add_costs(add: AddParser) -> None:
    costs = _add_command(add, "cost_tables:costs", text="print the costs of runs, spending limits, and a forecast")
    costs.add_argument(
        "target", metavar="module:agent", nargs="?", help="estimate a run of this agent, and list the costs of its runs"
    )
    costs.add_argument("--by", choices=COST_GROUPS, default="agent", help="meaning of the rows (default: %(default)s)")
    costs.add_argument("--since", metavar="TIME", type=parse_since, help="from then on, such as 7d (default: all)")
    costs.add_argument("--agent", metavar="NAME", help="only runs of the agent with this name")
    costs.add_argument("--tz", metavar="ZONE", default="UTC", help="time zone of the days (default: %(default)s)")
    costs.add_argument("--turns", type=parse_count, help="turns of the estimated run (default: those of its runs)")


def _add_metrics(add: AddParser) -> None:
    metrics = _add_command(
        add, "fleet_metrics:metrics", text="print success, latency, tokens, cost and tools of all runs"
    )
    metrics.add_argument("--agent", metavar="NAME", help="only runs of the agent with this name")
    _add_purpose(metrics)
    sub = _add_group(add, "alerts", "print the rules for Prometheus, or test their thresholds with the journals")
    rules = _add_command(sub, "alert_rules:rules", text="print the alerts as a file of rules for Prometheus")
    board = _add_command(
        sub, "alert_rules:dashboard", text="print a Grafana board of the metrics, or write it to a file"
    )
    board.add_argument("file", metavar="FILE", nargs="?", help="file of the board (default: stdout)")
    test = _add_command(
        sub, "alert_rules:test", text="print when the alerts would have fired; exit code 1 if one still does"
    )
    text = "evaluate the alerts now, and post those that have begun or ended since the last time"
    notify = _add_command(sub, "alert_rules:notify", text=text)
    _add_notifier(notify, "url")
    notify.add_argument("--test", action="store_true", help="only post a message to see that it arrives")
    for each in (metrics, test):
        each.add_argument(
            "--since", metavar="TIME", type=parse_since, help="from then on, such as 1d (default: the first run)"
        )
    for each in (rules, board, test):
        each.add_argument(
            "--set",
            metavar="METRIC=NUMBER",
            type=parse_threshold,
            action="append",
            default=[],
            help="another threshold; may be given several times",
        )


def _add_memory(add: AddParser) -> None:
    text = "learn, search, show, release, forget, expire, rebuild, export or import the items kept across runs"
    sub = _add_group(add, "memory", text)
    learn = _add_command(sub, "memory_admin:learn", text="learn from runs as they end, until interrupted")
    learn.add_argument("learner", metavar="module:learner", help="a Learner, or a function that returns one")
    learn.add_argument("--until-idle", action="store_true", help="exit when all runs that have ended are read")
    search = _add_command(sub, "memory_admin:search", text="print the items that match a query, best first")
    search.add_argument("query", help="words to look for")
    search.add_argument("--limit", metavar="N", type=parse_count, default=8, help="maximum of items (default: 8)")
    show = _add_command(sub, "memory_admin:show", text="print one item with its source")
    show.add_argument("item", metavar="ITEM", help="id of the item")
    release = _add_command(sub, "memory_admin:release", text="approve items that are held, so that they are found")
    release.add_argument("items", metavar="ITEM", nargs="+", help="id of a held item")
    forget = _add_command(sub, "memory_admin:forget", text="delete items for good")
    forget.add_argument("items", metavar="ITEM", nargs="*", help="id of an item")
    forget.add_argument("--all", action="store_true", help="all items of the user")
    forget.add_argument("--runs", action="store_true", help="with --all: the runs of the user as well")
    forget.add_argument(
        "--deleted-runs", action="store_true", help="items of all users from runs that the store no longer has"
    )
    rebuild = _add_command(sub, "memory_admin:rebuild", text="derive the items of runs again from the journals")
    export = _add_command(sub, "memory_admin:export", text="print all items of a user")
    imports = _add_command(
        sub, "memory_admin:import_file", name="import", text="add the items of a file to those of a user"
    )
    imports.add_argument("file", metavar="FILE", help="file that `agentfsm memory export --json` wrote; - for stdin")
    expire = _add_command(sub, "memory_admin:expire", text="forget old items of little importance")
    expire.add_argument("--everyone", action="store_true", help="of all owners, not only of --user")
    expire.add_argument("--days", metavar="N", type=float, default=90.0, help="age, days (default: %(default)s)")
    text = "items of at least this importance are kept, 0 to 1 (default: %(default)s)"
    expire.add_argument("--importance", metavar="X", type=float, default=0.7, help=text)
    text = "items of an owner that are kept at most (default: %(default)s)"
    expire.add_argument("--count", metavar="N", type=parse_count, default=1_000, help=text)
    _add_memory_options(search, show, release, forget, rebuild, export, imports, expire)
    for each in (release, forget, expire):
        each.add_argument("--by", metavar="NAME", default=_MEMORY_BY, help="name for the record of it")


def _add_memory_options(*commands: argparse.ArgumentParser) -> None:
    for each in commands:
        each.add_argument(
            "--memory",
            metavar="PATH|URL",
            default=_DEFAULT_MEMORY,
            help="file of the memory, or postgresql://... (default: %(default)s)",
        )
        each.add_argument("--user", default="", help="owner of the items (default: items that all users share)")
        each.add_argument("--tenant", default="", help="tenant of the user (default: none)")


def _add_index(add: AddParser) -> None:
    sub = _add_group(add, "index", "add documents to a memory, search, list and remove them, or rebuild the index")
    adds = _add_command(sub, "index_admin:add", text="add documents, or new versions of them")
    adds.add_argument("documents", metavar="FILE", nargs="+", help="a Markdown or text file; with --mcp, a URI")
    adds.add_argument(
        "--level", choices=[*map(str, DATA_LEVELS)], default="internal", help="data level (default: %(default)s)"
    )
    adds.add_argument(
        "--label", metavar="LABEL", action="append", default=[], help="label of the documents, such as untrusted"
    )
    adds.add_argument("--mcp", metavar="FILE", help='add resources of a server of this JSON file with "mcpServers"')
    adds.add_argument("--server", metavar="NAME", help="with --mcp: the server, if the file has several")
    search = _add_command(sub, "index_admin:search", text="print the parts of documents that match a query, best first")
    search.add_argument("query", help="words to look for")
    search.add_argument("--limit", metavar="N", type=parse_count, default=8, help="maximum of parts (default: 8)")
    lists = _add_command(sub, "index_admin:list_documents", name="list", text="list the documents")
    remove = _add_command(sub, "index_admin:remove", text="remove documents from the search")
    remove.add_argument("documents", metavar="NAME", nargs="+", help="name of a document, as list prints it")
    remove.add_argument("--forget", action="store_true", help="delete all their versions for good")
    remove.add_argument("--by", metavar="NAME", default=_MEMORY_BY, help="name for the record of a deletion")
    rebuild = _add_command(sub, "index_admin:rebuild", text="build the index again from the items of all users")
    _add_memory_options(adds, search, lists, remove, rebuild)
    for each in (adds, search, rebuild):
        each.add_argument(
            "--embedder",
            metavar="NAME",
            help="also search by meaning, with an embedder such as openai:text-embedding-3-small",
        )


def _add_mcp(add: AddParser) -> None:
    sub = _add_group(add, "mcp", "use or serve tools over the Model Context Protocol (MCP)")
    _add_mcp_client(sub)
    serve = _add_command(sub, "mcp_serve:serve", text="serve an agent, or a registry of tools, to MCP clients")
    serve.add_argument("target", metavar="module:name", help="an Agent, a ToolRegistry or an MCPService, or a function")
    serve.add_argument(
        "--http",
        metavar="HOST:PORT",
        type=parse_address,
        nargs="?",
        const=DEFAULT_ADDRESS,
        help="serve over HTTP at this address (default: %(const)s) instead of standard input and output",
    )
    serve.add_argument("--token-env", metavar="NAME", help="variable with the bearer token for HTTP clients")
    serve.add_argument(
        "--allow-host", metavar="NAME", action="append", default=[], help="another host name of the server"
    )
    serve.add_argument("--prefix", default="", help="prefix for the names of the tools that control runs")
    _add_drain(serve)
    serve.add_argument("--no-tools", action="store_true", help="leave out the agent's own tools")
    for name, what in CLIENT_LIMITS.items():
        serve.add_argument(f"--client-{name}", metavar="N", type=parse_count, help=f"maximum {what} of one HTTP client")


def _add_drain(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--drain",
        metavar="SECONDS",
        type=parse_seconds_or_zero,
        default=DRAIN_S,
        help="time for model requests and calls in flight to end after the first signal (default: %(default)g)",
    )


def _add_connections(serve: argparse.ArgumentParser) -> None:
    serve.add_argument(
        "--connections", metavar="N", type=parse_count, help="connections of all clients at once (default: 512)"
    )
    serve.add_argument(
        "--connections-per-address",
        metavar="N",
        type=parse_count,
        help="connections of one client address at once (default: half of --connections)",
    )
    serve.add_argument(
        "--trust-proxy",
        metavar="CIDR",
        action="append",
        default=[],
        help="network of proxies whose Forwarded or X-Forwarded-For names the client; may be given several times",
    )


def _add_serve(add: AddParser) -> None:
    serve = _add_command(add, "serve_http:serve", text="serve agents over HTTP, and execute their runs")
    serve.add_argument("agents", metavar="module:agent", nargs="+", help="an Agent, or a function that returns one")
    serve.add_argument(
        "--http",
        metavar="HOST:PORT",
        type=parse_address,
        default=DEFAULT_ADDRESS,
        help="the address (default: %(default)s)",
    )
    serve.add_argument(
        "--keys", metavar="FILE", help="file of API keys; without it, only programs of this machine may connect"
    )
    serve.add_argument(
        "--allow-host", metavar="NAME", action="append", default=[], help="another host name of the server"
    )
    serve.add_argument(
        "--parallel",
        metavar="N",
        type=parse_count,
        default=WORKER_PARALLEL,
        help="runs of each agent at a time (default: %(default)s)",
    )
    _add_drain(serve)
    serve.add_argument("--no-worker", action="store_true", help="execute no runs: `agentfsm worker` does")
    serve.add_argument("--studio", action="store_true", help="also serve pages to see the runs and steer them")
    serve.add_argument(
        "--webhooks",
        metavar="FILE",
        type=Path,
        help="JSON file of webhooks, which start runs or are sent their ends and waits: see `agentfsm webhooks`",
    )
    serve.add_argument(
        "--allow-origin",
        metavar="ORIGIN",
        action="append",
        default=[],
        help="origin of pages that may call the server from a browser, for example https://app.example.org",
    )
    serve.add_argument(
        "--allow-header",
        metavar="NAME",
        action="append",
        default=[],
        help="a further header that these pages may send; those of the protocols and of tracing are allowed",
    )
    serve.add_argument(
        "--root-path",
        metavar="PATH",
        default="",
        help="path below which a proxy, which removes it, has the server, for example /agents",
    )
    serve.add_argument(
        "--four-eyes", action="store_true", help="no user may approve or settle a call that it has shaped"
    )
    serve.add_argument(
        "--max-queue",
        metavar="N",
        type=parse_count,
        default=1_000,
        help="runs of an agent that may wait for a worker before new ones are refused (default: %(default)s)",
    )
    _add_deltas(serve)
    _add_notifier(serve, "--alerts-to")
    _add_connections(serve)
    for who, name in (("each user", ""), ("all users of a tenant together", "tenant-")):
        limits = {
            "per-minute": "requests in a minute",
            "open-requests": "requests at once, such as event streams, in this process,",
            "tokens-per-minute": "tokens in a minute",
            "running": "runs",
        }
        for option, text in limits.items():
            serve.add_argument(f"--{name}{option}", metavar="N", type=parse_count, help=f"{text} of {who}")
    studio = _add_command(add, "serve_http:studio", text="see runs in a browser, and steer them")
    studio.add_argument(
        "subject",
        metavar="STORE|module:agent",
        nargs="?",
        help="a store, whose runs are shown; or an agent, whose runs are executed too (default: the default store)",
    )
    studio.add_argument(
        "--http",
        metavar="HOST:PORT",
        type=parse_address,
        default=_STUDIO_ADDRESS,
        help="the address, on this machine (default: %(default)s)",
    )
    studio.add_argument("--no-browser", action="store_true", help="open no browser, only print the URL")
    studio.set_defaults(allow_host=[], allow_origin=[], trust_proxy=[], connections=None, connections_per_address=None)


def _add_deltas(takes: argparse.ArgumentParser) -> None:
    takes.add_argument(
        "--deltas",
        metavar="URL",
        help="a Redis through which the text that models write reaches the event streams of all servers",
    )


def _add_notifier(takes: argparse.ArgumentParser, option: str) -> None:
    text = "URL to which alerts are posted as they begin and end"
    takes.add_argument(option, metavar="URL", help=text)
    takes.add_argument(
        "--alerts-form",
        choices=MESSAGE_FORMS,
        default="json",
        help="body of a message: json, or slack for receivers that take a text only (default: %(default)s)",
    )
    takes.add_argument("--alerts-private", action="store_true", help="the URL may be in a private network")


def _add_webhooks(add: AddParser) -> None:
    text = "check a file of webhooks for `agentfsm serve`, and list the events that were given up"
    hooks = _add_command(add, "serve_http:webhooks", text=text, has_store=False)
    hooks.add_argument("file", metavar="FILE", type=Path, help='JSON file with "incoming" and "outgoing" webhooks')


def _add_setup(add: AddParser) -> None:
    text = "write a small project: an agent with tools, a prompt, tests, an evaluation"
    init = _add_command(add, "new_project:init", text=text, has_store=False)
    init.description = f"{init.description} Files that exist are never changed."
    init.add_argument("folder", nargs="?", default=".", help="folder of the project (default: the current one)")
    init.add_argument("--name", help="name of the project (default: that of the folder)")
    text = "print a script that completes commands and options with the Tab key"
    completion = _add_command(add, "shell_completion:completion", text=text, has_store=False)
    completion.set_defaults(build_parser=build_parser)
    completion.add_argument("shell", choices=[*_SHELLS], help="the shell")
    completion.epilog = "; ".join(f"{shell}: {how}" for shell, how in _SHELLS.items())


def _add_skills(add: AddParser) -> None:
    sub = _add_group(add, "skills", "check folders of skills, or approve them")
    check = _add_command(sub, "skill_admin:check", text="list the skills of a folder with their flaws", has_store=False)
    pin = _add_command(
        sub, "skill_admin:pin", text="show skills as far as not yet approved, and ask for approval", has_store=False
    )
    for takes in (check, pin):
        takes.add_argument("folder", metavar="FOLDER", help="a folder of skills, or a single skill")
    check.add_argument("--pins", metavar="FILE", help="fail if a skill is not approved in this file")
    pin.add_argument("--pins", metavar="FILE", default="skill-pins.json", help="the file (default: %(default)s)")
    pin.add_argument("--yes", action="store_true", help="approve everything without asking")


def _add_mcp_client(sub: AddParser) -> None:
    tools = _add_command(sub, "mcp_client:tools", text="list the servers of a file, and their tools")
    approve = _add_command(
        sub, "mcp_client:approve", text="show the start and the tools of servers, and ask for approval"
    )
    prompts = _add_command(sub, "mcp_client:prompts", text="list the prompts of the servers of a file")
    prompt = _add_command(sub, "mcp_client:prompt", text="show a prompt of a server with its arguments filled in")
    resources = _add_command(sub, "mcp_client:resources", text="list the resources of the servers of a file")
    read = _add_command(sub, "mcp_client:read", text="read a resource of a server")
    _add_mcp_logins(sub)
    for takes in (tools, approve, prompts, prompt, resources, read):
        takes.add_argument("file", metavar="FILE", help='a JSON file with "mcpServers", the format of MCP hosts')
    approve.add_argument("server", metavar="SERVER", nargs="?", help="only this server")
    approve.add_argument("--yes", action="store_true", help="approve everything without asking")
    approve.add_argument("--details", action="store_true", help="show the full texts of tools, not a line for each")
    approve.add_argument(
        "--ask-again", action="store_true", help='withdraw "always" approvals: calls of these tools are asked again'
    )
    approve.epilog = (
        "Approvals are stored in ~/.agentfsm/mcp-pins.json, in your home folder and not beside the store: a folder "
        "from somewhere else could contain approvals of its own."
    )
    for takes in (prompt, read):
        takes.add_argument("server", metavar="SERVER", help="name of the server in the file")
    prompt.add_argument("name", metavar="NAME", help="name of the prompt")
    prompt.add_argument("arguments", metavar="KEY=VALUE", type=parse_pair, nargs="*", help="arguments of the prompt")
    read.add_argument("uri", metavar="URI", help="URI of the resource")


def _add_mcp_logins(sub: AddParser) -> None:
    login = _add_command(sub, "mcp_login:login", text="log in to remote servers with a browser")
    login.add_argument("--no-browser", action="store_true", help="only show the address of the login page")
    login.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=float,
        default=LOGIN_TIMEOUT_S,
        help="seconds for a login (default: %(default)g)",
    )
    login.epilog = (
        "The browser returns to a port of this machine. If it runs on another machine, set callback_port in the file, "
        "and forward that port: ssh -L PORT:127.0.0.1:PORT."
    )
    logout = _add_command(sub, "mcp_login:logout", text="remove the stored tokens of remote servers")
    status = _add_command(sub, "mcp_login:status", text="list the stored logins of remote servers")
    for takes in (login, logout, status):
        takes.add_argument(
            "file", metavar="FILE|URL", help="a file of servers, or the URL of one with default settings"
        )
        takes.add_argument("server", metavar="SERVER", nargs="?", help="only this server of the file")


def _add_eval(add: AddParser) -> None:
    sub = _add_group(add, "eval", "evaluate agents on suites of cases, and compare the results")
    run = _add_command(sub, "eval_suites:run", text="run each case several times, and grade the runs")
    run.add_argument("suite", metavar="SUITE", help="a file .yaml, .json, .jsonl or .csv, or module:suite")
    _add_agent(run)
    run.add_argument(
        "--runs",
        metavar="N",
        type=parse_count,
        default=EVALUATION_RUNS,
        help="runs of each case (default: %(default)s)",
    )
    run.add_argument(
        "--speed",
        choices=["live", "recorded", "replay"],
        default="live",
        help="recorded: tools answer from the recorded runs; replay: nothing is called (default: %(default)s)",
    )
    text = "function of the first run of a conversation that returns its dependencies, or an object (default: none)"
    run.add_argument("--deps", metavar="MODULE:NAME", help=text)
    run.add_argument("--label", default="", help="distinguishes evaluations of one version; others are continued")
    run.add_argument("--judge", metavar="MODEL", help="also grade answers with this model, of another family")
    compare = _add_command(sub, "eval_suites:compare_results", text="compare two results, case by case", name="compare")
    compare.add_argument("before", metavar="BEFORE", help="the baseline's result")
    compare.add_argument("after", metavar="AFTER", help="the candidate's result")
    text = "decide whether a result is worse than the baseline: exit 0 pass, 1 worse, 5 undecided"
    gate = _add_command(sub, "eval_suites:gate_result", text=text, name="gate")
    for takes in (run, gate):
        text = "lowest accepted mean, from 0 to 1: below it the exit code is 1"
        takes.add_argument("--floor", metavar="ASPECT=SHARE", type=parse_pair, action="append", default=[], help=text)
    gate.add_argument("--calibration", metavar="FILE", help="calibration of the judge, to gate what it grades")
    new = _add_command(
        sub,
        "eval_suites:make_case",
        text="make a case from a run, with the results of its tools and secrets masked, and append it to a suite",
        name="from-run",
    )
    _add_run_id(new)
    text = "a file .yaml or .jsonl; created if there is none (default: %(default)s)"
    new.add_argument("suite", metavar="SUITE", nargs="?", default="regressions.yaml", help=text)
    text = "grade answers of stored runs with a judge, each once by a rubric, and record the grades as feedback"
    grade = _add_command(sub, "eval_suites:grade", text=text)
    grade.add_argument("--judge", metavar="MODEL", required=True, help="the model that grades, of another family")
    text = "a sentence that holds of a good answer; may be given several times (default: the judge's criteria)"
    grade.add_argument("--rubric", metavar="TEXT", action="append", help=text)
    grade.add_argument(
        "--votes", metavar="N", type=parse_count, default=JUDGE_VOTES, help="votes (default: %(default)s)"
    )
    grade.add_argument("--own-family", action="store_true", help="allow a judge of the model family of the runs")
    grade.add_argument(
        "--since", metavar="TIME", type=parse_since, default=0.0, help="runs that ended then or later, such as 1d"
    )
    grade.add_argument(
        "--sample", metavar="SHARE", type=parse_share, default=1.0, help="share of the runs, such as 5%% (default: all)"
    )
    grade.add_argument("--agent", metavar="NAME", help="only runs of the agent with this name")
    report = _add_command(sub, "eval_suites:report", text="show a result, and write it as JUnit or HTML")
    calibrate = _add_command(
        sub, "eval_suites:calibrate_judge", text="compare the grades of a judge with labels of people", name="calibrate"
    )
    calibrate.add_argument("--metric", default="judge", help="name of the judge (default: %(default)s)")
    calibrate.add_argument("--out", metavar="FILE", help="write the calibration as JSON, for the gate")
    for takes in (run, grade):
        takes.add_argument(
            "--parallel",
            metavar="N",
            type=parse_count,
            default=EVALUATIONS_PARALLEL,
            help="runs at a time (default: %(default)s)",
        )
        text = "US dollars that all of it may cost" + ("; an estimate is shown first" if takes is run else "")
        takes.add_argument("--usd", metavar="AMOUNT", type=parse_usd, help=text)
        takes.add_argument("--out", metavar="FILE", help="write the result as JSON, for the other commands")
    for takes in (gate, report, calibrate):
        takes.add_argument("result", metavar="RESULT", help="a result that `eval run --out` wrote")
    calibrate.add_argument("labels", metavar="LABELS", help="JSON Lines with run and label, from 0 to 1")
    for takes in (run, gate, report):
        takes.add_argument("--against", metavar="FILE", required=takes is gate, help="the pinned baseline's result")
    for takes in (compare, gate):
        takes.add_argument("--metric", metavar="ASPECT", action="append", help="aspect to compare (default: outcome)")
    for takes in (run, compare, gate, report):
        takes.add_argument(
            "--worse-by", metavar="SHARE", type=float, default=WORSE_BY, help="relative loss not accepted (%(default)s)"
        )
    for takes in (gate, report):
        takes.add_argument("--history", metavar="FILE", help="history of versions; gate appends to it")
    for takes in (run, report):
        takes.add_argument("--junit", metavar="FILE", help="write JUnit's XML")
        takes.add_argument("--html", metavar="FILE", help="write a page of HTML")


def _add_prompts(add: AddParser) -> None:
    sub = _add_group(add, "prompts", "list, test and activate versions of prompts")
    plain = partial(_add_command, sub, has_store=False)
    lists = plain("prompt_files:list", text="list the prompts with their versions; * is the version in use")
    shows = plain("prompt_files:show", text="show a version of a prompt, with its activations, results and findings")
    renders = plain("prompt_files:render", text="print a prompt with values for its variables")
    tests = plain(
        "prompt_files:test", text="run the tests of a prompt with a model, and record the results beside the prompts"
    )
    activates = plain("prompt_files:activate", text="make a version the one in use")
    rolls_back = plain("prompt_files:rollback", text="return to the version that was in use before")
    diffs = plain("prompt_files:diff", text="compare two versions of a prompt")
    for takes in (lists, shows, renders, tests, activates, rolls_back, diffs):
        takes.add_argument("--folder", default="prompts", help="folder of the prompts (default: %(default)s)")
    for takes in (shows, renders):
        takes.add_argument("prompt", metavar="NAME[@VERSION]", help="the prompt (default: the version in use)")
    renders.add_argument(
        "values", metavar="VARIABLE=VALUE", type=parse_pair, nargs="*", help="text; for a json variable, JSON"
    )
    text = "prompts, or versions of one, each of which is tested with each model"
    tests.add_argument("prompts", metavar="NAME[@VERSION]", nargs="+", help=text)
    text = "a model, for example openai:gpt-5.4-mini; may be given several times"
    tests.add_argument("--model", required=True, action="append", help=text)
    tests.add_argument("--judge", metavar="MODEL", help="the model that judges tests with a rubric")
    tests.add_argument(
        "--runs",
        metavar="N",
        type=parse_count,
        default=EVALUATION_RUNS,
        help="runs of each test (default: %(default)s)",
    )
    for takes in (activates, rolls_back, diffs):
        takes.add_argument("prompt", metavar="NAME", help="name of the prompt")
    activates.add_argument("version", metavar="VERSION", help="the version")
    for takes in (activates, rolls_back):
        takes.add_argument("--why", required=True, help="the reason, for the log")
        takes.add_argument("--by", metavar="WHO", default=None, help="who decides (default: your user name)")
    diffs.add_argument("before", metavar="VERSION", help="the first version")
    diffs.add_argument("after", metavar="VERSION", nargs="?", help="the second version (default: the one in use)")


def _add_keys(add: AddParser) -> None:
    sub = _add_group(add, "keys", "create, list and remove API keys for `agentfsm serve`")
    plain = partial(_add_command, sub, has_store=False)
    added = plain("key_files:add_key", name="add", text="create a key, print it once, and store its hash")
    listed = plain("key_files:list_keys", name="list", text="list whose keys a file has")
    removed = plain(
        "key_files:remove_keys", name="remove", text="remove the keys of a user; a running server refuses them at once"
    )
    for takes in (added, listed, removed):
        takes.add_argument("file", metavar="FILE", type=Path, help="JSON file with the hashes of the keys")
    for takes in (added, removed):
        takes.add_argument("user", metavar="USER", help="user for whom the key acts")
        takes.add_argument("--tenant", help="tenant of the user")
    added.add_argument(
        "--scope",
        metavar="SCOPE",
        action="append",
        choices=["run", "approve", "admin"],
        help='"run" (the default), "approve" or "admin"; may be given several times',
    )
    for option, text in KEY_LIMITS.values():
        added.add_argument(option, metavar="N", type=parse_count, help=text)
    added.add_argument(
        "--four-eyes", action="store_true", help="the user may not approve or settle a call that it has shaped"
    )
    added.add_argument("--role", action="append", default=[], help="role of the user for permissions of tools")


def _add_rollout(add: AddParser) -> None:
    text = "start roll-outs and flags, change their weights, roll back, and print results and log"
    sub = _add_group(add, "rollout", text)
    begins = _add_command(
        sub, "rollout_admin:start", text="start a roll-out of releases, or an experiment such as a flag"
    )
    begins.add_argument("name", metavar="module:rollout|NAME", help="a Rollout, or the name of an experiment")
    begins.add_argument("--unit", choices=UNIT_KINDS, default="user", help="of an experiment (default: %(default)s)")
    begins.add_argument(
        "--holdout", metavar="PERCENT", type=float, default=0.0, help="share of the users that always get the base"
    )
    begins.add_argument(
        "--back-if",
        metavar="RULE",
        action="append",
        default=[],
        help='rule of automatic roll-backs, such as "failures 5%%" or "time>30 +5%%"; may be given several times',
    )
    begins.add_argument(
        "--target",
        metavar="ARM:CONDITIONS",
        action="append",
        default=[],
        help="runs that get an arm whatever its weight is, such as new:role=tester; may be given several times",
    )
    changes = _add_command(
        sub, "rollout_admin:weights", text="change the weights; only the users of the difference get another arm"
    )
    changes.add_argument("name", metavar="NAME", help="name of the roll-out")
    for each in (begins, changes):
        each.add_argument("weights", metavar="ARM=PERCENT", type=parse_weight, nargs="+", help="100 percent in all")
    aims = _add_command(
        sub,
        "rollout_admin:target",
        text="change whose runs get an arm whatever its weight is, such as those of testers",
    )
    aims.add_argument("name", metavar="NAME", help="name of the roll-out")
    aims.add_argument(
        "targets",
        metavar="ARM:CONDITIONS",
        nargs="*",
        help="all targets from now on, such as 'new:role=tester|qa'; without any they end",
    )
    shows = _add_command(sub, "rollout_admin:status", text="print the weights and the results of the arms")
    shows.add_argument("name", metavar="NAME", nargs="?", help="only this roll-out")
    backs = _add_command(sub, "rollout_admin:back", text="return to the weights that were in effect before")
    backs.add_argument("--arm", metavar="ARM", help="give the weight of this arm to the base")
    kills = _add_command(sub, "rollout_admin:kill", text="give the base to all, and end the roll-out")
    for each in (backs, kills):
        each.add_argument("--abort-running", action="store_true", help="cancel open runs of arms without weight")
    logs = _add_command(sub, "rollout_admin:log", text="print all changes with their time, author and reason")
    watches = _add_command(
        sub, "rollout_admin:watch", text="check the rules of a roll-out, and roll back by them, until interrupted"
    )
    watches.add_argument("--once", action="store_true", help="check once")
    for each in (backs, kills, logs, watches):
        each.add_argument("name", metavar="NAME", help="name of the roll-out")
    for each in (begins, changes, aims, backs, kills):
        each.add_argument("--reason", metavar="TEXT", required=True, help="the reason, for the log")
        each.add_argument("--by", metavar="NAME", default=user_name() or "unknown", help=_AUTHOR_HELP)


def _add_release(add: AddParser) -> None:
    sub = _add_group(add, "release", "list, print and compare the releases of agents")
    lists = _add_command(sub, "rollout_admin:list_releases", name="list", text="list the saved releases")
    lists.add_argument("agent", metavar="AGENT", nargs="?", help="only releases of the agent with this name")
    shows = _add_command(
        sub, "rollout_admin:show_release", name="show", text="print a release, with its five dimensions"
    )
    differs = _add_command(
        sub, "rollout_admin:diff_releases", name="diff", text="print what differs between two releases"
    )
    for each in (shows, differs):
        each.add_argument("agent", metavar="AGENT", help="name of the agent")
        each.add_argument("version", metavar="VERSION", help="version of the release")
    differs.add_argument("other", metavar="OTHER", help="version of the other release")


# Arguments that several commands share.


def _add_run_id(takes: argparse.ArgumentParser) -> None:
    takes.add_argument("id", metavar="RUN", help="id of the run")


def _add_agent(takes: argparse.ArgumentParser) -> None:
    takes.add_argument("agent", metavar="module:agent", help="an Agent, or a function that returns one")
    _add_mcp_option(takes, "add the MCP servers of this file to its tools; may be given several times")


def _add_agent_option(takes: argparse.ArgumentParser) -> None:
    takes.add_argument(
        "--agent",
        metavar="module:agent",
        help="use this agent instead of the one that the run names; required for a run that was started from Python, "
        "unless its Agent has target='module:agent'",
    )
    _add_mcp_option(takes, "use the MCP servers of this file instead of those that the run was started with")


def _add_mcp_option(takes: argparse.ArgumentParser, text: str) -> None:
    takes.add_argument("--mcp", metavar="FILE", action="append", default=[], help=text)
