"""First contact: printed commands work as they are, tables fit the terminal, and a start loads only what it needs."""

import re
import shlex
import subprocess
import sys
from importlib import metadata

import anyio
import pytest

from agentfsm.cli.commands import doctor
from agentfsm.cli.render.formatting import count_columns, fit_columns, fit_with_length
from agentfsm.cli.resolve.agent_target import load_agent
from agentfsm.stores import SQLiteStore

STORE = ("--store", "runs.db")


def start_in_python(target="", prompt="Pay."):
    """Start a run of `app:payer` from Python, and return its id."""
    agent = load_agent("app:payer").with_(store=SQLiteStore("runs.db"), target=target)
    run_id = agent.run_sync(prompt).id
    anyio.run(agent.aclose)
    return run_id


def printed_command(here, word):
    """Return the words of the last printed command that continues a run, without the program."""
    line = next(line for line in reversed(here.err.splitlines()) if f"agentfsm {word}" in line)
    return shlex.split(line[line.index(f"agentfsm {word}") :])[1:]


def decide(here, run_id, *words):
    here(words[0], run_id, *words[1:], *STORE)


DECISIONS = [("approve", "t1.0"), ("reject", "t1.0"), ("send", "More."), ("pause",)]


@pytest.mark.parametrize("words", DECISIONS)
def test_the_printed_command_resumes_a_run_that_names_its_agent(here, words):
    """An Agent with `target=` puts it into the header of its runs, so the command needs no `--agent`."""
    run_id = start_in_python("app:payer")
    decide(here, run_id, *words)
    command = printed_command(here, "resume")
    assert command == ["resume", run_id, *STORE]
    assert "MODULE" not in here.err
    here(*command, code=0 if words[0] in ("approve", "reject") else 3)


@pytest.mark.parametrize("words", DECISIONS)
def test_the_printed_command_says_that_the_agent_is_missing(here, words):
    """Without `target=` the command has a placeholder, and the next line explains it and names the option."""
    run_id = start_in_python()
    decide(here, run_id, *words)
    command = printed_command(here, "resume")
    assert command == ["resume", run_id, *STORE, "--agent", "MODULE:NAME"]
    explanation = here.err.splitlines()[-1]
    assert explanation.startswith("For MODULE:NAME, give the agent of the run, for example app:agent")
    assert "target='app:agent'" in explanation
    here(*command[:-1], "app:payer", code=0 if words[0] in ("approve", "reject") else 3)


def test_the_placeholder_itself_is_refused_with_a_reason(here):
    """It is a usage error that names the module."""
    here("resume", start_in_python(), *STORE, "--agent", "MODULE:NAME", code=2)
    assert "there is no module 'MODULE' in " in here.err


def test_a_run_without_an_agent_says_how_to_name_it(here):
    """The error names the option, and the field that makes it unnecessary."""
    run_id = start_in_python()
    here("resume", run_id, *STORE, code=2)
    assert f"run {run_id} does not name its agent" in here.err
    assert "target='module:name'" in here.err
    assert "name it with --agent module:name" in here.err
    assert here.json("show", run_id, *STORE)["resume"].endswith(" --agent MODULE:NAME")
    assert "target='module:agent'" in " ".join(here("resume", "--help").split())


def test_an_agent_that_cannot_be_loaded_says_how_to_name_another(here):
    """The run names a module that is not here."""
    run_id = start_in_python("elsewhere:agent")
    here("resume", run_id, *STORE, code=2)
    assert "there is no module 'elsewhere'" in here.err
    assert "The run names the agent elsewhere:agent. Name another one with --agent module:name." in here.err


def test_the_command_that_forks_names_the_agent_too(here):
    """Also where the run is over and its agent is not loaded."""
    run_id = start_in_python()
    here("cancel", run_id, *STORE)
    here("resume", run_id, *STORE, code=1)
    assert printed_command(here, "fork") == ["fork", run_id, *STORE, "--agent", "MODULE:NAME"]
    assert here.err.splitlines()[-1].startswith("For MODULE:NAME, give the agent")


def test_a_difference_cuts_long_lines(here):
    """A line of a long result is cut with the number of characters that are missing; `--json` has all of them."""
    here.run("app:talker", "--id", "long", "Talk.")
    lines = here("diff", "long", "--at", "1").splitlines()
    [answer] = [line for line in lines if line.startswith("+ assistant: 'xxx")]
    assert len(answer) <= 300
    found = re.search(r"^(.*)\.\.\. \(([\d,]+) more characters\)$", answer)
    assert len(found[1]) + int(found[2].replace(",", "")) == len("+ assistant: ''") + 1_000_000
    assert len(here.json("diff", "long", "--at", "1")["added"][-1]["text"]) == 1_000_000


def test_a_list_of_runs_has_a_header(here):
    """Its columns stand below their names, and nothing is cut where stdout is not a terminal."""
    prompt = "word " * 35
    here.run("app:adder", "--id", "a", prompt)
    here.run("app:payer", "--id", "longer", "Pay.", code=3)
    header, *rows = here("runs").splitlines()
    assert header.split() == ["ID", "STATUS", "UPDATED", "TURN", "TOKENS", "PROMPT"]
    assert [row[: header.index("STATUS")].strip() for row in rows] == ["longer", "a"]
    assert [row[header.index("PROMPT") :] for row in rows] == ["Pay.", prompt.strip()]
    assert here("runs", "--session", "none") == ""


@pytest.mark.parametrize(
    ("columns", "header"),
    [
        (200, "ID STATUS UPDATED TURN TOKENS PROMPT"),
        (80, "ID STATUS UPDATED TURN TOKENS PROMPT"),
        (45, "ID STATUS PROMPT"),
        (12, "ID ..."),
    ],
)
def test_a_list_of_runs_fits_the_terminal(here, terminal, columns, header):
    """A narrow terminal gets fewer columns and shorter prompts."""
    for each in ("word " * 35, "\u4e16\u754c" * 60):
        here.run("app:adder", each, "--id", f"run-{len(each)}")
    screen = terminal("runs", COLUMNS=str(columns))
    assert screen.end() == 0
    shown, *rows = screen.text.splitlines()
    assert " ".join(shown.split()) == header
    assert len(rows) == 2
    assert all(count_columns(row) <= columns for row in rows)
    assert all(row.endswith("...") for row in rows if columns < 200)


def test_text_is_cut_by_columns_of_the_terminal():
    """A wide character takes two columns."""
    assert fit_columns("abcdef", 6) == "abcdef"
    assert fit_columns("abcdefg", 6) == "abc..."
    assert fit_columns("\u4e16\u754c\u4e16\u754c", 7) == "\u4e16\u754c..."
    assert fit_columns("abcdef", 2) == ".."
    assert fit_with_length("x" * 40, 40) == "x" * 40
    assert fit_with_length("x" * 50, 40) == f"{'x' * 16}... (34 more characters)"


def test_the_doctor_lists_each_extra(here, monkeypatch):
    """As the metadata of the package has them, with the command that installs a missing one."""
    extras = metadata.metadata("agentfsm").get_all("Provides-Extra")
    installed = doctor._installed_version
    monkeypatch.setattr(doctor, "_installed_version", lambda name: None if name == "redis" else installed(name))
    report = here.json("doctor")
    checks = {check["name"]: check for check in report["checks"]}
    assert {name for name in checks if name.startswith("extra ")} == {f"extra {name}" for name in extras}
    assert checks["extra redis"]["detail"] == "redis not installed: pip install 'agentfsm[redis]'"
    assert checks["extra all"]["detail"] == "redis not installed: pip install 'agentfsm[all]'"
    assert f"rich {metadata.version('rich')}" in checks["extra cli"]["detail"]
    assert report["ok"]


def test_phrases_of_the_help(here):
    """Commands are described by what they do."""
    text = " ".join(here("--help").split())
    assert "execute runs that are ready, until interrupted" in text
    assert "record the outcome of a call whose worker crashed" in text


def test_a_start_reads_neither_the_version_nor_the_commands():
    """The first costs a search of the installed packages, so `--version` alone does it; a command imports its own."""
    code = (
        "import importlib.metadata as m, sys\n"
        "real, asked = m.version, []\n"
        "m.version = lambda name: asked.append(name) or real(name)\n"
        "from agentfsm.cli.parser import build_parser\n"
        "before = asked.count('agentfsm')\n"
        "build_parser()\n"
        "assert not [name for name in sys.modules if name.startswith('agentfsm.cli.commands.')]\n"
        "assert asked.count('agentfsm') == before == 0, asked\n"
        "build_parser().parse_args(['--version'])\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, f"agentfsm {metadata.version('agentfsm')}\n", "")
