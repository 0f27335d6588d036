"""The tables of README and docs that list stop reasons, errors, commands and exit codes agree with the code."""

import argparse
import re
from pathlib import Path

from agentfsm import StopReason
from agentfsm.cli.codes import ExitCode
from agentfsm.cli.parser import build_parser
from agentfsm.core import errors, run
from agentfsm.tools.tool import ToolOptions

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
ERRORS = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
TOOLS = (ROOT / "docs" / "tools.md").read_text(encoding="utf-8")


def section(page, title):
    """Return the text below a heading, up to the next heading of the same level."""
    _, _, rest = page.partition(f"\n## {title}\n")
    assert rest, f"there is no heading {title!r}"
    return rest.partition("\n## ")[0]


def words(text):
    """Return the names that begin a text in backticks."""
    return set(re.findall(r"`([A-Za-z_]+)", text))


def commands(parser):
    """Return the parsers of the subcommands, by name."""
    (action,) = [each for each in parser._actions if isinstance(each, argparse._SubParsersAction)]
    return action.choices


def test_the_stop_reasons():
    """README's table has a row for each stop reason, and for nothing else."""
    rows = [line for line in section(README, "Limits").splitlines() if line.startswith("| `")]
    listed = [word for row in rows for word in re.findall(r"`(\w+)`", row.split("|")[1]) if word != "stop_reason"]
    assert sorted(listed) == sorted(StopReason)


def test_the_errors():
    """docs/errors.md names each error class, and no other."""
    modules = vars(errors) | vars(run)
    classes = {
        name for name, value in modules.items() if isinstance(value, type) and issubclass(value, errors.AgentError)
    }
    named = {word for word in words(ERRORS) if word.endswith("Error") or word == "ModelRetry"}
    assert named == classes


def test_the_commands():
    """README names each subcommand, and no other."""
    text = section(README, "The command line")
    named = {word.split()[0] for word in re.findall(r"`(?:agentfsm )?([a-z]+(?: [^`]+)?)`", text)}
    assert named - {"module:agent"} == set(commands(build_parser())) - {"demo"}


def test_the_options_of_a_tool():
    """docs/tools.md describes each option of `@tool`."""
    table = "".join(line for line in TOOLS.splitlines(keepends=True) if line.startswith("| `"))
    assert not [name for name in ToolOptions.__annotations__ if f"`{name}=" not in table]


def test_the_exit_codes():
    """README and `agentfsm --help` list the exit codes, in the same words."""
    listed = re.compile(r"exit codes:? (.*?130 interrupted)", re.DOTALL)
    texts = [" ".join(listed.search(page)[1].split()) for page in (README, build_parser().format_help())]
    assert texts[0] == texts[1]
    assert [int(number) for number in re.findall(r"\d+", texts[0])] == sorted(ExitCode)
