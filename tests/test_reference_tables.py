"""What README and docs state about the code is so: tables in both directions, and calls and commands in the prose."""

import argparse
import ast
import inspect
import re
import shlex
import tomllib
from importlib import import_module
from itertools import takewhile
from pathlib import Path
from typing import get_args, get_type_hints

import attrs
import pytest

from agentfsm import (
    TABLE,
    Agent,
    AgentEventType,
    AnswerCache,
    ErrorType,
    Limits,
    MisuseError,
    PendingKind,
    Purpose,
    Spend,
    State,
    StopReason,
    StreamEvent,
    Tool,
    ToolEventType,
    Usage,
    context,
    evals,
    guards,
    mcp,
    prompts,
    stores,
)
from agentfsm.cli.codes import ExitCode
from agentfsm.cli.command_table import COMMANDS as CLI_COMMANDS
from agentfsm.cli.commands import serve_http
from agentfsm.cli.demo.scripted_model import DELAY_VARIABLE
from agentfsm.cli.parser import build_parser
from agentfsm.cli.session.chat_session import COMMANDS
from agentfsm.core import errors, run
from agentfsm.core.window_layers import MOVES, SHARES, Shares
from agentfsm.engine.step import HANDLERS
from agentfsm.evals.evaluation_runner import Speed
from agentfsm.flow.steps import Join
from agentfsm.journal.run_list import StrandedReason
from agentfsm.journal.run_status import RunStatus
from agentfsm.mcp.server.served_runs import ServedRuns
from agentfsm.mcp.trust.config_variables import INPUT_PREFIX
from agentfsm.memory import Memory
from agentfsm.models import AdapterModel, HostedTool, adapter, provider_errors, wire
from agentfsm.models.prices import find_list_cost_usd
from agentfsm.ports import Durability, PlanMaker, model
from agentfsm.readiness.checks import CHECKS
from agentfsm.releases import Release
from agentfsm.releases.rollback_rules import Signal
from agentfsm.sandbox import Isolation, Sandbox
from agentfsm.sandbox.process.skill_script import SKILLS_VARIABLE
from agentfsm.schedules import MissedPolicy, Schedules
from agentfsm.serve import IncomingWebhook, serve, webhooks
from agentfsm.serve.access import SCOPES
from agentfsm.serve.dialects.mcp_run_tools import CallerRunTools
from agentfsm.serve.dialects.mcp_sessions import MCP_PATH
from agentfsm.stores.loading import _URL_OPTIONS
from agentfsm.stores.threaded.group_commit import TransactionBackend
from agentfsm.stores.threaded.store import StoreBackend
from agentfsm.telemetry.alerts import ALERTS
from agentfsm.testing import ScriptedModel
from agentfsm.tools.tool import _OPTION_RULES, ToolOptions, UnknownOutcomePolicy
from tests.support.doc_tables import read_names, read_table

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [
    ROOT / name for name in ("README.md", "SECURITY.md", "SECURITY_MODEL.md", "CONTRIBUTING.md", "agentfsm/SKILL.md")
]
PAGES += sorted(DOCS.rglob("*.md"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CODE = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "agentfsm").rglob("*.py"))
_FENCES = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
TEXTS = {path: path.read_text(encoding="utf-8") for path in PAGES}
PROSE = {path: _FENCES.sub("", text) for path, text in TEXTS.items()}


def fields(kind, *but):
    """Return the names of the fields of a class that may be given, without some."""
    return [field.name for field in attrs.fields(kind) if field.init and field.name not in but]


def parameters(function, *but):
    """Return the names of the parameters of a function, without some."""
    return [name for name in inspect.signature(function).parameters if name not in ("self", *but)]


def methods(kind):
    """Return the names of the public methods of a class."""
    return [name for name in dir(kind) if callable(getattr(kind, name)) and not name.startswith("_")]


def constructors(kind):
    """Return the class methods of a class, with its name."""
    return [f"{kind.__name__}.{name}" for name, value in vars(kind).items() if isinstance(value, classmethod)]


def functions(module, *ends):
    """Return the names of the public functions of a module whose result is of a class with such an ending."""
    public = {name: getattr(module, name) for name in module.__all__}
    found = {name: value for name, value in public.items() if inspect.isfunction(value)}
    return [name for name, value in found.items() if inspect.signature(value).return_annotation.endswith(ends)]


def commands(parser):
    """Return the parsers of the subcommands, by name; none if it has none."""
    return next((each.choices for each in parser._actions if isinstance(each, argparse._SubParsersAction)), {})


AGENT = Agent(ScriptedModel("Hello."), name="shop", store=stores.MemoryStore())
BACKEND = {
    name
    for kind in (StoreBackend, TransactionBackend)
    for name in (*vars(kind), *kind.__annotations__)
    if not name.startswith("_")
}
# Of a page, each table whose header begins with these cells: the names in that column are those of the code.
TABLES = [
    ("agentfsm/SKILL.md", "`item.kind`", 0, PendingKind),
    ("architecture.md", "effect", 0, [kind.__name__ for kind in HANDLERS]),
    ("command-line.md", "key or command", 0, {*COMMANDS, "Enter", "Alt-Enter", "Ctrl-C"}),
    ("context.md", "policy", 0, [name for name in context.__all__ if hasattr(getattr(context, name), "compact")]),
    ("cost.md", "field", 0, fields(Spend)),
    ("cost.md", "option", 0, fields(AnswerCache)),
    ("dialects.md", "tool", 0, [tool.name for tool in CallerRunTools(gateway=None).build_tools()]),
    ("durability.md", "`on_unknown`", 0, {*get_args(UnknownOutcomePolicy), "a function"}),
    ("durability.md", "kind | waits for", 0, PendingKind),
    ("durability.md", "level | survives", 0, get_args(Durability)),
    ("durability.md", "status", 0, RunStatus),
    ("durability.md", "store | for", 0, {*stores.__all__} - {"open_store"}),
    ("evals.md", "`speed`", 0, get_args(Speed)),
    ("evals.md", "conclusion", 0, evals.Conclusion),
    ("evals.md", "field", 1, [scorer.name for scorer in evals.SCORERS]),
    ("extending.md", "argument", 0, parameters(AdapterModel)),
    ("extending.md", "function", 0, [name for name in vars(provider_errors) if name.endswith("_error")]),
    ("extending.md", "member of the backend", 0, BACKEND),
    ("flows.md", "`join=`", 0, get_args(Join)),
    ("guards.md", "kind", 0, guards.DataKind),
    ("guards.md", "policy", 0, constructors(guards.Guard)),
    ("guards.md", "rule", 0, functions(guards, "Rule", "Filter")),
    ("limits.md", "`stop_reason`", 0, StopReason),
    ("limits.md", "field", 0, fields(Limits)),
    ("limits.md", "purpose", 0, Purpose),
    ("machine.md", "state", 0, [state.name for state in State]),
    ("machine.md", "state", 2, {*(kind.__name__ for kind in HANDLERS), "none"}),
    ("mcp.md", "constructor", 0, constructors(mcp.MCPServer)),
    ("mcp.md", "setting", 0, fields(mcp.OAuth)),
    ("mcp.md", "tool | purpose", 0, [tool.name for tool in ServedRuns(agent=AGENT).build_tools()[0]]),
    ("memory.md", "argument", 0, parameters(Memory.remember, "text")),
    ("memory.md", "call", 0, [name for name in vars(Memory) if name.startswith(("forget", "expire"))]),
    ("models.md", "value", 0, [kind.__name__ for kind in HostedTool.__subclasses__()]),
    ("plans.md", "`replan=`", 0, get_args(get_type_hints(PlanMaker)["replan"])),
    ("production.md", "check", 0, [check.id for check in CHECKS]),
    ("prompts.md", "kind", 0, prompts.VariableKind),
    ("prompts.md", "layer", 0, prompts.LayerKind),
    ("releases.md", "dimension", 0, fields(Release, "agent", "version", "evaluation")),
    ("releases.md", "rule", 0, get_args(Signal)),
    ("sandbox.md", "`Isolation`", 0, Isolation),
    ("sandbox.md", "field", 0, fields(Sandbox)),
    ("scale.md", "reason", 0, get_args(StrandedReason)),
    ("schedules.md", "`missed`", 0, get_args(MissedPolicy)),
    ("schedules.md", "method of `Schedules`", 0, methods(Schedules)),
    ("serve.md", "scope", 0, SCOPES),
    ("streaming.md", "event", 0, [kind.__name__ for kind in get_args(StreamEvent)]),
    ("telemetry.md", "metric", 0, ALERTS),
    ("tools.md", "cause", 1, {*ErrorType} - {ErrorType.CONDITION, ErrorType.FALLBACK}),  # of steps: docs/flows.md
    ("tools.md", "declaration", 0, ToolOptions.__annotations__),
]


@pytest.mark.parametrize(("page", "header", "column", "names"), TABLES)
def test_a_table_names_what_the_code_has(page, header, column, names):
    """A row without code fails, and so does code without a row."""
    named = {name for row in read_table(page, header) for name in read_names(row[column])}
    assert named == set(map(str, names))


# Of a page, a table whose column names some of what the code has.
PARTS = [
    ("README.md", "the tool declares", 0, {*ToolOptions.__annotations__, "nothing"}),
    ("answers.md", "limit", 0, fields(Limits)),
    ("conversations.md", "argument", 0, parameters(Agent.start)),
    ("conversations.md", "argument of `start`", 0, parameters(Agent.start)),
    ("durability.md", "kind | waits for", 2, methods(Agent)),
    ("evals.md", "field", 0, fields(evals.Case)),
    ("queue.md", "declaration", 0, {*ToolOptions.__annotations__, "none"}),
]


@pytest.mark.parametrize(("page", "header", "column", "names"), PARTS)
def test_a_table_names_nothing_that_the_code_does_not_have(page, header, column, names):
    """It may leave out what another page says."""
    assert {name for row in read_table(page, header) for name in read_names(row[column])} <= set(names)


@pytest.mark.parametrize(
    ("page", "header", "column", "made"),
    [
        ("limits.md", "field", 1, Limits()),
        ("cost.md", "field", 1, Spend(per="day", usd=1)),
        ("sandbox.md", "field", 1, Sandbox()),
        ("mcp.md", "| all", 2, mcp.ClientLimits()),
    ],
)
def test_the_defaults_are_those_of_the_fields(page, header, column, made):
    """A default is a value, none, or the name of another field; an empty cell says that there is none."""
    for row in read_table(page, header):
        names, text = re.findall(r"(?:^|`)(\w+)", row[0]), row[column].replace("`", "")
        texts = text.split(", ") if len(names) > 1 and ", " in text else [text] * len(names)
        for name, each in zip(names, texts, strict=True):
            if each == "none":
                assert not getattr(made, name)
            elif each and ";" not in each:
                value = None if hasattr(made, each) else ast.literal_eval(each.replace(",", ""))
                assert getattr(made, name) == value, name


def test_the_events_that_handlers_return():
    """docs/architecture.md has those of the table of the machine; each state accepts the five that it leaves out."""
    rows = {row[0]: read_names(row[2]) for row in read_table("architecture.md", "effect")}
    common = {"ChildReported", "Paused", "Resumed", "LimitReached", "Failed"}
    effects = ("`ReadInbox`", "`AskModel`", "`RunTools`, `Wait` for a call", "`Reflect`")
    for state, effect in zip(State, effects, strict=False):  # the final states have none
        assert {*rows[effect]} - common == {kind.__name__ for kind in TABLE[state]} - common


def test_the_fields_of_stream_events():
    """docs/streaming.md names each field, besides those that all have and `attempt`, and each type of `ToolEvent`."""
    text = TEXTS[DOCS / "streaming.md"]
    for kind, row in zip(get_args(StreamEvent), read_table("streaming.md", "event"), strict=True):
        if row[2] != "the same":
            named = re.findall(r"`(\w+)`", row[1] + row[2])
            own = [name for name in fields(kind) if name not in {"run_id", "seq", "attempt"} | ({"turn"} - {*named})]
            assert {*own} <= {*named}, kind
    assert {*ToolEventType} <= {*re.findall(r"`(\w+)`", text)}
    assert {*AgentEventType} <= {*re.findall(r"`(\w+)`", text)}


def test_the_operations_of_the_gateway():
    """docs/serve.md and docs/dialects.md list each route, with its method."""
    listed, method = set(), ""
    cells = [row[0] for row in read_table("serve.md", "operation")]
    cells += [row[1] for row in read_table("dialects.md", "protocol")]
    for span in re.findall(r"`([^`]+)`", " ".join(cells)):
        *methods_of_it, path = span.split()
        method = methods_of_it[0] if methods_of_it else method if path != MCP_PATH else "POST"
        path = path.replace("...", "/v1/runs/{run_id}")
        listed.add((method, path if path.startswith("/") else f"/v1/runs/{{run_id}}/{path}"))
    hook = IncomingWebhook(name="crm", secret=f"whsec_{'a2tr' * 11}", user="crm", tenant="acme", prompt="Sort this.")
    groups = (*serve_http._list_groups(with_studio=False), webhooks([hook]))
    routes = serve([AGENT], auth=lambda _: None, groups=groups).app.routes
    assert listed == {
        (method, route.path) for route in routes for method in route.methods - {"HEAD"} if route.path != MCP_PATH
    } | {("POST", MCP_PATH)}


def test_the_metrics():
    """Docs name each metric of `/metrics`, and no other; and each attribute of docs/telemetry.md is one of spans."""
    ends = {f"{name}_{part}" for name in re.findall(r'"(agentfsm_\w+)"', CODE) for part in ("sum", "count", "bucket")}
    metric = re.compile(r"\bagentfsm_\w+_(?:total|seconds|runs|open|usd|turns|tokens|rating)\b")
    told = {name for text in TEXTS.values() for name in metric.findall(text)}
    assert told - ends == {*metric.findall(CODE)} - ends
    attributes = re.findall(r"`(agentfsm\.(?!telemetry)[a-z_.]+)`", TEXTS[DOCS / "telemetry.md"])
    assert [name for name in attributes if f'"{name}"' not in CODE] == []


def test_the_environment_variables():
    """Docs name each variable of agentfsm, except those that programs set for their own processes; and no other."""
    name = re.compile(r"\bAGENTFSM_\w+")
    assert {each for text in TEXTS.values() for each in name.findall(text)} >= {*name.findall(CODE)} - {
        DELAY_VARIABLE,
        INPUT_PREFIX,
        SKILLS_VARIABLE,
    }
    assert {each for text in TEXTS.values() for each in name.findall(text)} <= {*name.findall(CODE)}


def test_the_extras():
    """Docs name each extra of pyproject.toml, and no other; and the prefixes of models that it has."""
    texts = "\n".join(TEXTS.values())
    lists = re.findall(r"(?:agentfsm|'\.)\[([a-z,]+)\]", texts)
    named = {name for each in lists for name in each.split(",")} | {*re.findall(r"extra\s`(\w+)`", texts)}
    assert named == PROJECT["optional-dependencies"].keys()
    adapters = {row[0].partition(":")[0].strip('`"'): row[1].strip("`") for row in read_table("models.md", "string")}
    assert adapters == {
        name: each.rpartition(":")[2] for name, each in PROJECT["entry-points"]["agentfsm.models"].items()
    }


def test_the_options_of_stores():
    """docs/durability.md names each; those that the query of a URL may have are fields of the store."""
    internal = {"path", "url", "connect"}
    for name in (*_URL_OPTIONS, "SQLiteStore", "MemoryStore"):
        options = {*parameters(getattr(stores, name))} - internal
        assert options <= {*re.findall(r"\w+", TEXTS[DOCS / "durability.md"])}
        assert {*_URL_OPTIONS.get(name, ())} <= options


def test_the_numbers_of_tables():
    """Limits of replies, shares of the window, alerts with their fewest values, and where a check looks."""
    limits = [wire.MAX_BODY_BYTES, wire.MAX_STREAM_BYTES, model.MAX_REPLY_CHARS, model.MAX_REPLY_CALLS, wire.MAX_ITEMS]
    limits += [wire.MAX_JSON_VALUES, model.MAX_NATIVE_REPLY_CHARS, adapter._MAX_RAW_DETAIL_CHARS]
    units = {"": 1, " KiB": 2**10, " MiB": 2**20}
    stated = [re.search(r"([\d,]+)( KiB| MiB|)", row[1]).groups() for row in read_table("models.md", "quantity")]
    assert [int(number.replace(",", "")) * units[unit] for number, unit in stated] == limits
    shares = [[int(cell or 0) for cell in row[1:]] for row in read_table("memory.md", "task | instructions")]
    assert shares[: len(SHARES)] == [[*each] for each in SHARES.values()]
    layers = Shares._fields
    assert shares[len(SHARES) :] == [
        [move.percent * ((name == move.target) - (name == move.source)) for name in layers] for move in MOVES
    ]
    for name, condition, least in read_table("telemetry.md", "metric"):
        alert = ALERTS[name.strip("`")]
        number = re.search(r"(above|below) ([\d.,]+)( %|)", condition)
        assert int(re.findall(r"\d+|$", least)[0] or 0) == alert.at_least
        if number is not None:
            assert float(number[2].replace(",", "")) * (0.01 if number[3] else 1) == alert.threshold
            assert alert.is_minimum == (number[1] == "below")
    assert {row[0].strip("`"): row[2] for row in read_table("production.md", "check")} == {
        check.id: check.source for check in CHECKS
    }


def test_the_errors():
    """docs/errors.md names each error class, and no other."""
    modules = vars(errors) | vars(run)
    classes = {
        name for name, value in modules.items() if isinstance(value, type) and issubclass(value, errors.AgentError)
    }
    assert {*re.findall(r"`(\w+Error|ModelRetry)", TEXTS[DOCS / "errors.md"])} == classes


PUBLIC = "context core.labels evals flow guards mcp memory models openapi patterns planning ports prompts readiness"
PUBLIC += " reflection releases sandbox schedules serve stores telemetry testing tools.permission tools.registry"


def test_the_calls_in_the_prose_fit_their_signatures():
    """Each call of a public name between backquotes has parameters that there are, and so has each method of an agent.

    In a column about another framework a call may be that framework's.
    """
    modules = [import_module(f"agentfsm{name}") for name in ("", *(f".{name}" for name in PUBLIC.split()))]
    owners = {}  # an object is taken from its module late: some load the packages of vendors
    for module in modules:
        for name in getattr(module, "__all__", vars(module)):
            owners.setdefault(name, []).append(module)
    for prefix, kind in (("agent", Agent), ("Guard", guards.Guard), ("MCPServer", mcp.MCPServer)):
        owners |= {f"{prefix}.{name}": [kind] for name in dir(kind)}
    wrong, count = [], 0
    for page, text in PROSE.items():
        own = re.sub(r"^\|[^|]*\|", "", text, flags=re.MULTILINE) if page.parent.name == "migration" else text
        for span in re.findall(r"`@?([^`]+\))`", own):
            try:
                tree = ast.parse(re.sub(r"=(?=\s*[,)])", "=...", " ".join(span.split())))
            except SyntaxError:
                continue
            for call in [node for node in ast.walk(tree) if isinstance(node, ast.Call)]:
                name, given = ast.unparse(call.func), {each.arg for each in call.keywords} - {None}
                if re.fullmatch(r"agent\.\w+", name) or name in owners:
                    count += 1
                    found = [getattr(owner, name.rpartition(".")[2]) for owner in owners.get(name, ()) if given]
                    if name not in owners or (given and not any(takes(each, given) for each in found)):
                        wrong.append(span)
    assert wrong == []
    assert count >= 300


def takes(function, names):
    """Return whether a function has these parameters; an exception has none of its own."""
    is_error = isinstance(function, type) and issubclass(function, Exception)
    found = () if is_error else inspect.signature(function).parameters.values()
    return names <= {each.name for each in found} or any(each.kind is each.VAR_KEYWORD for each in found)


def test_the_commands_in_the_prose_are_taken():
    """Each line of a console parses, and each command between backquotes has subcommands and options that there are."""
    wrong, root = [], build_parser(*CLI_COMMANDS)
    for page, text in TEXTS.items():
        for block in re.findall(r"```(?:sh|bash|console)\n(.*?)```", text.replace("\\\n", " "), re.DOTALL):
            for line in re.findall(r"^(?:\$ )?agentfsm ([^$;\n]*)$", block, re.MULTILINE):
                words = shlex.split(line, comments=True)
                try:
                    root.parse_args([*takewhile(lambda word: not re.match(r"\d?[<>&|]", word), words)])
                except MisuseError as error:
                    wrong.append((page.name, line, str(error)))
        spans = [span.split() for span in re.findall(r"`agentfsm ([^`]+)`", PROSE[page])]
        if page.name == "command-line.md":
            cells = [row[1] for row in read_table(page.name, "task")]
            spans += [span.split() for cell in cells for span in re.findall(r"`([a-z][^`]+)`", cell)]
        if page.name == "schedules.md":
            rows = [row[1] for row in read_table(page.name, "method of `Schedules`")]
            spans += [span.split() for row in rows for span in re.findall(r"`([^`]+)`", row)]
        for words in spans:
            parser = root
            for word in words:
                choices = commands(parser)
                if word[0] == "-" and word not in parser._option_string_actions:
                    wrong.append((page.name, words))
                elif choices and word.isalpha() and word.islower():
                    if word not in choices:
                        wrong.append((page.name, words))
                        break
                    parser = choices[word]
    assert wrong == []


def test_the_commands():
    """docs/command-line.md lists each command, and no other; each argument has its line of help."""
    root = build_parser(*CLI_COMMANDS)
    first = [span for row in read_table("command-line.md", "task") for span in re.findall(r"`([a-z]+)[ `]", row[1])]
    assert {*first} == {*commands(root)}
    for parser in [root, *(each for name in commands(root) for each in walk(commands(root)[name]))]:
        assert [each for each in parser._actions if not each.help and not commands(parser)] == []


def walk(parser):
    """Yield a parser and those of its subcommands."""
    yield parser
    for each in commands(parser).values():
        yield from walk(each)


def test_each_name_stands_in_the_file_that_is_named_with_it():
    """Where README and docs say "`name` (`folder/file.py`)"."""
    folders = ("agentfsm/**/*.py", "tests/**/*.py", "agentfsm/**/*.js")
    files = [path for folder in folders for path in ROOT.glob(folder)]
    pair = re.compile(r"`(?:\w+\.)?(\w+)(?:\(\))?`,?(?: \(| in | of )`((?:\w+/)*\w+(?:\.py|/))`")
    for page, text in PROSE.items():
        for name, place in pair.findall(text):
            found = [path for path in files if f"/{place}" in path.as_posix()]
            assert any(name == path.stem or re.search(rf"\b{name}\b", path.read_text()) for path in found), (page, name)


def test_the_models_that_are_named():
    """README, docs, examples and the project of `init` name models that the price list of their vendor knows."""
    folders = ("docs/**/*.md", "docs/*.ipynb", "examples/**/*.*", "agentfsm/cli/project_template/**/*.txt")
    pages = [ROOT / "README.md", ROOT / "agentfsm/SKILL.md", ROOT / "agentfsm/cli/demo/demo_agent.py"]
    pages += [path for pattern in folders for path in ROOT.glob(pattern) if path.suffix != ".pyc"]
    named = set(
        re.findall(r"\b(?:gpt-\d|claude-[a-z]+-\d|gemini-\d)(?:[\w.-]*\w)?", "\n".join(map(Path.read_text, pages)))
    )
    vendors = {"gpt": "api.openai.com", "claude": "api.anthropic.com", "gemini": "generativelanguage.googleapis.com"}
    hosts = {name: f"https://{vendors[name.partition('-')[0]]}/v1" for name in named}
    assert len(named) >= 5
    assert [each for each in hosts if find_list_cost_usd(each, hosts[each], Usage(input_tokens=1)) is None] == []


def test_the_commands_that_continue_a_run():
    """docs/choosing.md names each command and method that lets a run go on, as the command line takes it."""
    table = "\n".join("|".join(row) for row in read_table("choosing.md", "the run"))
    lines = re.findall(r"`agentfsm ((?:\w+) [^`]+)`", table)
    for line in lines:
        build_parser(*CLI_COMMANDS).parse_args(shlex.split(line.replace("VERSION", "3")))
    acts = {name: parser.get_default("act") for name, parser in commands(build_parser(*CLI_COMMANDS)).items()}
    deciding = {name for name, act in acts.items() if act is not None and act.__module__.endswith(".decide")}
    deciding -= {"allowances", "cancel", "feedback", "pause"}  # these let no run go on
    assert {line.split()[0] for line in lines} == deciding | {"fork", "resume", "run", "worker"}
    methods = set(re.findall(r"`agent\.(\w+)`", table))
    assert all(callable(getattr(Agent, name)) for name in methods)
    assert methods >= {"approve", "reject", "answer", "settle", "send", "resume", "worker", "finish", "fork"}


def test_each_field_of_a_tool_is_an_option_with_a_rule():
    """Fields that `make_tool` computes have no option, and three options have checks of their own instead of a rule."""
    computed = {"function", "dialect", "bind", "to_namespace", "takes_context", "is_async", "kind"}
    for_other_kinds = {"grace_s", "waits_for", "inner_agent", "start_rule", "end_task"}
    fields = {field.name for field in attrs.fields(Tool) if field.init} - computed - for_other_kinds
    assert fields == ToolOptions.__annotations__.keys()
    assert fields == _OPTION_RULES.keys() | {"name", "parameters", "permission"}


def test_the_exit_codes():
    """docs/command-line.md and `agentfsm --help` list the exit codes, in the same words."""
    listed = re.compile(r"exit codes:? (.*?130 interrupted)", re.DOTALL)
    texts = [
        " ".join(listed.search(page)[1].split())
        for page in (TEXTS[DOCS / "command-line.md"], build_parser().format_help())
    ]
    assert texts[0] == texts[1]
    assert [int(number) for number in re.findall(r"\d+", texts[0])] == sorted(ExitCode)
