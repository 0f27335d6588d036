"""`agentfsm init` and `agentfsm completion`: the first commands of a new user."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
from itertools import takewhile

import pytest

from tests.support.bare_shell import execute_bare
from tests.support.built_package import ROOT
from tests.support.command_line import HANG_S


def execute(folder, *words, timeout=HANG_S, **env):
    done = subprocess.run(
        words,
        cwd=folder,
        env=os.environ | env,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def read_steps(text):
    """Return the command lines after "Next:"; a line that is indented more explains the one above it."""
    lines = takewhile(lambda line: line.startswith("  "), text.partition("Next:\n")[2].splitlines())
    return [line.removeprefix("  ") for line in lines if not line.startswith("   ")]


def test_a_new_project_passes_its_own_tests(here):
    """Each printed step works where it was printed, in a bare environment without a key; checkers find nothing."""
    written = here("init", "my-notes").splitlines()
    steps = read_steps(here.err)
    assert steps == ["cd my-notes", "make test", "make chat"]
    project = here.folder / "my-notes"
    files = sorted(path.relative_to(project).as_posix() for path in project.rglob("*") if path.is_file())
    assert sorted(written) == files
    assert {".gitignore", "Makefile", "README.md", "my_notes/agent.py", "tests/test_agent.py"} <= {*files}
    texts = "".join((project / path).read_text(encoding="utf-8") for path in files)
    assert not re.search(r"\{(name|package|agentfsm|python)\}", texts)
    install_offline(project)
    assert "2 passed" in execute_bare(here.folder, "; ".join(steps[:2]))
    chat = execute_bare(here.folder, f"{steps[0]}; {steps[2]}", "Hello!\nWhich notes do I have?\n")
    assert "A simulated model answers. For a real one: export OPENAI_API_KEY=" in chat
    assert "I am a simulated model." in chat
    assert chat.endswith("There is no note about that.\n")
    evaluated = execute_bare(project, "make eval-offline")
    assert "outcome     100.0%" in evaluated
    assert "tool_path   100.0%" in evaluated
    assert " my_notes.agent:agent" in execute(project, "make", "-n", "chat", AGENT_MODEL="openai:gpt-4o")
    execute(project, sys.executable, "-m", "ruff", "check", "--isolated", "--line-length=120", ".")
    execute(project, sys.executable, "-m", "ruff", "format", "--check", ".")


def install_offline(project):
    """Make the environment of a project, as its Makefile does, of what is installed here."""
    venv.EnvBuilder(with_pip=False, symlinks=True).create(project / ".venv")
    (site,) = (project / ".venv").glob("lib/python3*/site-packages")
    (site / "here.pth").write_text("\n".join([str(ROOT), *filter(None, sys.path)]), encoding="utf-8")
    command = project / ".venv" / "bin" / "agentfsm"
    command.write_text(f"#!{project}/.venv/bin/python\nfrom agentfsm.__main__ import run\nrun()\n", encoding="utf-8")
    command.chmod(0o755)
    (project / ".venv" / "ready").touch()


@pytest.mark.parametrize(
    ("record", "requirement"),
    [
        (None, "agentfsm[cli,serve]>=9.9"),
        ({"url": "file:///src/agentfsm", "dir_info": {"editable": True}}, "agentfsm[cli,serve] @ file:///src/agentfsm"),
        ({"url": "file:///a.whl", "archive_info": {}}, "agentfsm[cli,serve] @ file:///a.whl"),
        (
            {"url": "https://git.example/a", "vcs_info": {"vcs": "git", "commit_id": "17"}, "subdirectory": "py"},
            "agentfsm[cli,serve] @ git+https://git.example/a@17#subdirectory=py",
        ),
    ],
)
def test_a_new_project_needs_the_agentfsm_that_made_it(here, monkeypatch, record, requirement):
    """Its dependency names the folder, wheel, repository or index that agentfsm was installed from."""
    info = here.folder / "site" / "agentfsm-9.9.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Name: agentfsm\nVersion: 9.9\n", encoding="utf-8")
    if record is not None:
        (info / "direct_url.json").write_text(json.dumps(record), encoding="utf-8")
    monkeypatch.syspath_prepend(info.parent)
    here("init", "my-notes")
    project = tomllib.loads((here.folder / "my-notes" / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["dependencies"] == [requirement]


@pytest.mark.soak
def test_from_a_clone_to_an_agent_of_ones_own(tmp_path):
    """In a bare environment, README's commands and then each printed step work as printed, with real installations.

    Of `make test` only the beginning is executed: it checks style and types, and collects the tests.
    """
    execute(tmp_path, "git", "clone", "--quiet", str(ROOT), "clone")
    clone = tmp_path / "clone"
    shown = execute_bare(clone, "make demo FOLDER=docs/tutorial 2>&1")
    show, replay, studio, init = read_steps(shown)
    execute_bare(clone, f"{show}; {replay}")
    assert "#key=" in execute_bare(clone, f"timeout 20 {studio} --no-browser 2>&1 || test $? -eq 124")
    cd, *more = read_steps(execute_bare(clone, f"{init} 2>&1"))
    assert "2 passed" in execute_bare(clone, f"{cd}; {more[0]}")
    assert "I am a simulated model." in execute_bare(clone, f"{cd}; {more[1]}", "Hello!\n")
    execute_bare(clone, f"{cd}; make doctor")
    execute_bare(clone, "make check")
    assert "tests/core/test_run.py: " in execute_bare(clone, ".venv/bin/python -m pytest --collect-only -q")
    execute_bare(clone, "python3 -m venv plain; plain/bin/pip install . && plain/bin/pip install 'agentfsm[trio]'")
    assert "trio" in execute_bare(clone, "plain/bin/agentfsm doctor")


@pytest.mark.soak
def test_a_new_project_is_typed(here):
    """`mypy --strict` finds nothing in a new project."""
    here("init", "my-notes")
    execute(here.folder / "my-notes", sys.executable, "-m", "mypy", "--strict", "my_notes", "tests", timeout=600)


def test_init_never_overwrites(here):
    """A file that exists stops it before it writes anything."""
    (here.folder / "README.md").write_text("mine", encoding="utf-8")
    here("init", "--name", "my-notes", code=2)
    assert "nothing was written, because README.md exists: name a new folder" in here.err
    assert {path.name for path in here.folder.iterdir()} == {"README.md", "app.py"}
    assert (here.folder / "README.md").read_text(encoding="utf-8") == "mine"


@pytest.mark.parametrize("name", ["json", "pytest", "2go", "agentfsm", "a/b", "class", "with space"])
def test_a_name_that_is_no_package(here, name):
    """Names that Python cannot import, or that hide another module, are refused."""
    here("init", "new", "--name", name, code=2)
    assert "--name my-agent" in here.err
    assert not (here.folder / "new").exists()


# What is typed, its end once the Tab key was pressed.
COMPLETED = (("agentfsm ch", "at"), ("agentfsm chat --cont", "inue"), ("agentfsm eval ga", "te"))
SETUP = {
    "bash": "PS1=re''ady; source ./script",
    "zsh": "PS1=re''ady; mv script _agentfsm; fpath=($PWD $fpath); autoload -U compinit; compinit -D -u",
}


@pytest.mark.parametrize("name", SETUP)
def test_the_tab_key(here, terminal, name):
    """In a real shell, the script completes commands and options by itself: agentfsm does nothing in it."""
    (here.folder / "script").write_text(here("completion", name), encoding="utf-8")
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed")
    screen = terminal("-f" if name == "zsh" else "--norc", "-i", program=[name])
    screen.type(f"agentfsm() {{ :; }}; {SETUP[name]}\n")
    for prompts, (typed, rest) in enumerate(COMPLETED, 1):
        screen.wait_for("ready", times=prompts)
        screen.type(f"{typed}\t")
        screen.wait_for(typed.split()[-1] + rest)  # zsh shows an option before it inserts it
        screen.type("\n")
    screen.type("exit\n")
    assert screen.end() == 0


def test_completion_in_fish(here):
    """Fish asks the script for the words."""
    (here.folder / "script").write_text(here("completion", "fish"), encoding="utf-8")
    if shutil.which("fish") is None:
        pytest.skip("fish is not installed")
    for typed, rest in COMPLETED:
        found = execute(here.folder, "fish", "-c", f"source script; complete --do-complete='{typed}'")
        assert typed.split()[-1] + rest in found.split()
