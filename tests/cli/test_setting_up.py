"""`agentfsm init` and `agentfsm completion`: the first commands of a new user."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.command_line import HANG_S


def execute(folder, *words, timeout=HANG_S, **env):
    done = subprocess.run(
        words, cwd=folder, env=os.environ | env, capture_output=True, text=True, timeout=timeout, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_new_project_passes_its_own_tests(here):
    """Its tests and its offline evaluation pass without a key, and checkers find nothing in it."""
    written = here("init", "my-notes").splitlines()
    project = here.folder / "my-notes"
    files = sorted(path.relative_to(project).as_posix() for path in project.rglob("*") if path.is_file())
    assert sorted(written) == files
    assert {".gitignore", "Makefile", "README.md", "my_notes/agent.py", "tests/test_agent.py"} <= {*files}
    assert not [path for path in files if "{" in path or "{name}" in (project / path).read_text(encoding="utf-8")]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    assert "2 passed" in execute(project, "make", "test", PATH=path, OPENAI_API_KEY="")
    assert "pass^1      100.0%" in execute(project, "make", "eval-offline", PATH=path, OPENAI_API_KEY="")
    execute(project, sys.executable, "-m", "ruff", "check", "--isolated", "--line-length=120", ".")
    execute(project, sys.executable, "-m", "ruff", "format", "--check", ".")


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
