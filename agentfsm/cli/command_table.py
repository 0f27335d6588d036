"""The commands, in the groups of `agentfsm --help`.

A command declares its arguments in its module, which is imported only when the command is called.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple


class Command(NamedTuple):
    """A command, or a group of commands."""

    module: str
    """Module in `cli/commands/` whose `add_commands` adds it."""

    line: str
    """Its line of help."""


GROUPS: Final[Mapping[str, Mapping[str, Command]]] = {
    "run agents": {
        "run": Command("execute", "run an agent to the end, or until it waits"),
        "chat": Command("execute", "talk with an agent, in a conversation that a killed process continues"),
        "submit": Command("execute", "store a run for a worker to execute, and print its id"),
        "worker": Command("execute", "execute runs that are ready, until interrupted"),
        "schedule": Command(
            "schedule_admin",
            "add, list, pause, resume or remove recurring starts of runs, or create the runs of a span of time",
        ),
        "resume": Command("execute", "resume a run from the end of its journal, and end its pause"),
        "fork": Command("timetravel", "start a run from the first events of another, and print its id"),
        "demo": Command("execute", "let an agent survey a folder and write a report; no key is needed"),
    },
    "decide on runs": {
        "approve": Command("decide", "approve a call that waits for approval"),
        "reject": Command("decide", "reject a call that waits for approval"),
        "answer": Command("decide", "answer a question, or supply the result of an external call"),
        "settle": Command("decide", "record the outcome of a call whose worker crashed"),
        "send": Command("decide", "send input to a run, which reads it at its next turn"),
        "pause": Command("decide", "pause a run at its next step, until it is resumed"),
        "cancel": Command("decide", "end a run"),
        "feedback": Command("decide", "rate a run, also if it is over"),
        "allowances": Command("decide", "list what is allowed in the session of a run, or revoke it"),
        "login": Command("user_login", "log in to the server of a call that waits for it"),
        "logout": Command("user_login", "revoke and delete the logins of a user at servers of tools"),
    },
    "inspect runs": {
        "runs": Command("inspect", "list the newest runs"),
        "show": Command("inspect", "show a run: its turns, calls and outcomes"),
        "logs": Command("inspect", "print the log of a stored run: turns, calls, its end with totals"),
        "audit": Command("audit_log", "list each call of a run, or of all runs: caller, arguments, approval, outcome"),
        "diff": Command("timetravel", "compare two versions of a run, or two runs"),
        "replay": Command("timetravel", "check that the agent would repeat the requests of a run"),
        "graph": Command("inspect", "draw an agent, the plan or the path of a run, or the state machine"),
        "export": Command(
            "inspect", "write a run, its journal and its messages as JSON; or send the traces of runs to OpenTelemetry"
        ),
        "docs": Command("documentation", "print a page of the documentation, or a guide for coding agents"),
    },
    "operate": {
        "metrics": Command("fleet_metrics", "print success, latency, tokens, cost and tools of all runs"),
        "costs": Command("cost_tables", "print the costs of runs, spending limits, and a forecast"),
        "alerts": Command("alert_rules", "print the rules for Prometheus, or test their thresholds with the journals"),
        "totals": Command("fleet_metrics", "the sums of all runs that costs, metrics and alerts read"),
        "rollout": Command(
            "rollout_admin", "start roll-outs and flags, change their weights, roll back, and print results and log"
        ),
        "rules": Command("rule_admin", "ask the rules over time of an agent about the calls of old runs"),
        "release": Command("rollout_admin", "list, print and compare the releases of agents"),
        "upgrade": Command("upgrades", "say what becomes of the open runs of an agent under another release of it"),
        "doctor": Command("inspect", "check the installation, the store and the tools of an agent"),
        "load": Command("inspect", "measure how long runs of an agent take at a stated concurrency"),
        "drill": Command(
            "production", "practise a roll-back or a restore on a copy, and record it for doctor --production"
        ),
        "memory": Command(
            "memory_admin",
            "learn, search, show, release, forget, expire, rebuild, export or import the items kept across runs",
        ),
        "index": Command(
            "index_admin", "add documents to a memory, search, list and remove them, or rebuild the index"
        ),
        "followers": Command("retention", "list the durable consumers of the journals, or drop one"),
        "delete": Command("retention", "remove a run with those of its sub-agents, or a session"),
        "prune": Command("retention", "remove runs that ended long ago"),
        "compact": Command("retention", "return the space of removed runs to the disk (SQLite only)"),
    },
    "serve": {
        "serve": Command("serve_http", "serve agents over HTTP, and execute their runs"),
        "studio": Command("serve_http", "see runs in a browser, and steer them"),
        "mcp": Command("mcp_client", "use or serve tools over the Model Context Protocol (MCP)"),
        "acp": Command("acp", "serve an agent to an editor, over the Agent Client Protocol"),
        "keys": Command("key_files", "create, list and remove API keys for `agentfsm serve`"),
        "webhooks": Command(
            "serve_http", "check a file of webhooks for `agentfsm serve`, and list the events that were given up"
        ),
    },
    "evaluate": {
        "eval": Command("eval_suites", "evaluate agents on suites of cases, and compare the results"),
        "whatif": Command("what_if", "drive stored runs again with another agent, without an effect"),
        "prompts": Command("prompt_files", "list, test and activate versions of prompts"),
    },
    "configure": {
        "init": Command("new_project", "write a small project: an agent with tools, a prompt, tests, an evaluation"),
        "skills": Command("skill_admin", "check folders of skills, or approve them"),
        "completion": Command(
            "shell_completion", "print a script that completes commands and options with the Tab key"
        ),
    },
}
COMMANDS: Final[Mapping[str, Command]] = {name: each for group in GROUPS.values() for name, each in group.items()}
