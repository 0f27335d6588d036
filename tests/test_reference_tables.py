"""The tables of the docs that list stop reasons, errors, commands and exit codes agree with the code."""

import argparse
import re
import shlex
from pathlib import Path

import attrs

from agentfsm import Agent, Limits, StopReason, Usage
from agentfsm.cli.codes import ExitCode
from agentfsm.cli.commands import decide
from agentfsm.cli.parser import build_parser
from agentfsm.core import errors, run
from agentfsm.models.prices import find_list_cost_usd
from agentfsm.tools.tool import _OPTION_RULES, Tool, ToolOptions

ROOT = Path(__file__).parents[1]
LIMITS = (ROOT / "docs" / "limits.md").read_text(encoding="utf-8")
COMMAND_LINE = (ROOT / "docs" / "command-line.md").read_text(encoding="utf-8")
ERRORS = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
TOOLS = (ROOT / "docs" / "tools.md").read_text(encoding="utf-8")


def words(text):
    """Return the names that begin a text in backticks."""
    return set(re.findall(r"`([A-Za-z_]+)", text))


def first_column(page):
    """Return the words in backquotes in the first column of a page's tables."""
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    return [word for row in rows for word in re.findall(r"`(\w+)`", row)]


def commands(parser):
    """Return the parsers of the subcommands, by name."""
    (action,) = [each for each in parser._actions if isinstance(each, argparse._SubParsersAction)]
    return action.choices


def test_the_stop_reasons():
    """docs/limits.md has a row for each stop reason and for each limit, and for nothing else."""
    limits, reasons = LIMITS.split("| `stop_reason` |")
    assert sorted(first_column(reasons)) == sorted(StopReason)
    assert sorted(first_column(limits)) == sorted(field.name for field in attrs.fields(Limits))
    defaults = re.findall(r"^\| `(\w+)` \| ([\d.,]+) \|", limits, re.MULTILINE)
    assert {name: float(number.replace(",", "")) for name, number in defaults} == {
        name: getattr(Limits(), name) for name, _ in defaults
    }


def test_the_errors():
    """docs/errors.md names each error class, and no other."""
    modules = vars(errors) | vars(run)
    classes = {
        name for name, value in modules.items() if isinstance(value, type) and issubclass(value, errors.AgentError)
    }
    named = {word for word in words(ERRORS) if word.endswith("Error") or word == "ModelRetry"}
    assert named == classes


def test_the_commands():
    """docs/command-line.md lists each subcommand, and no other."""
    rows = [line.split("|")[2] for line in COMMAND_LINE.splitlines() if line.startswith("| ")]
    named = {word for row in rows for word in re.findall(r"`([a-z]+)[ `]", row)}
    assert named == set(commands(build_parser()))


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
    page = (ROOT / "docs" / "choosing.md").read_text(encoding="utf-8")
    _, _, table = page.partition("<!-- commands -->\n")
    table = table.partition("<!-- /commands -->")[0]
    lines = re.findall(r"`agentfsm ((?:\w+) [^`]+)`", table)
    for line in lines:
        build_parser().parse_args(shlex.split(line.replace("VERSION", "3")))
    acts = {name: parser.get_default("act") for name, parser in commands(build_parser()).items()}
    deciding = {name for name, act in acts.items() if act is not None and act.__module__ == decide.__name__}
    deciding -= {"allowances", "cancel", "feedback", "pause"}  # these let no run go on
    assert {line.split()[0] for line in lines} == deciding | {"fork", "resume", "run", "worker"}
    methods = set(re.findall(r"`agent\.(\w+)`", table))
    assert all(callable(getattr(Agent, name)) for name in methods)
    assert methods >= {"approve", "reject", "answer", "settle", "send", "resume", "worker", "finish", "fork"}


def test_each_field_of_a_tool_is_an_option_with_a_rule():
    """Fields that `make_tool` computes have no option, and three options have checks of their own instead of a rule."""
    computed = {"function", "dialect", "bind", "to_namespace", "takes_context", "is_async", "kind"}
    for_other_kinds = {"grace_s", "waits_for", "inner_agent", "start_rule"}
    fields = {field.name for field in attrs.fields(Tool) if field.init} - computed - for_other_kinds
    assert fields == ToolOptions.__annotations__.keys()
    assert fields == _OPTION_RULES.keys() | {"name", "parameters", "permission"}


def test_the_options_of_a_tool():
    """docs/tools.md describes each option of `@tool`."""
    table = "".join(line for line in TOOLS.splitlines(keepends=True) if line.startswith("| `"))
    assert not [name for name in ToolOptions.__annotations__ if f"`{name}=" not in table]


def test_the_exit_codes():
    """docs/command-line.md and `agentfsm --help` list the exit codes, in the same words."""
    listed = re.compile(r"exit codes:? (.*?130 interrupted)", re.DOTALL)
    texts = [" ".join(listed.search(page)[1].split()) for page in (COMMAND_LINE, build_parser().format_help())]
    assert texts[0] == texts[1]
    assert [int(number) for number in re.findall(r"\d+", texts[0])] == sorted(ExitCode)
