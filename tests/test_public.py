"""What is public: the names of `agentfsm`, and that importing it is cheap."""

import ast
import inspect
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import get_args

import pytest

import agentfsm
from agentfsm.core import errors
from agentfsm.core.messages import Message

ROOT = Path(__file__).parent.parent
NAMES = "context evals guards logins mcp models openapi patterns "
NAMES += "flow planning prompts reflection releases sandbox scripts serve skills stores testing tokens"
PACKAGES = ("", *(f".{name}" for name in NAMES.split()))
HEAVY = (
    "anthropic",
    "cattrs",
    "genai_prices",
    "httpx",
    "httpx2",
    "importlib.metadata",
    "jsonschema_rs",
    "openai",
    "psycopg",
    "pydantic",
    "redis",
    "rich",
    "sqlite3",
    "structlog",
    "tiktoken",
    "trio",
)
# Modules of the package that an import loads: each takes a millisecond. The engine is loaded with the first agent.
LOADED = 83


@pytest.mark.parametrize("statement", ["import agentfsm", "from agentfsm import Agent, tool"])
def test_importing_loads_no_vendor_and_no_engine(statement):
    """A fresh interpreter that imports the package has loaded no slow or optional library, nor the engine."""
    code = f"import sys; {statement}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    loaded = done.stdout.split()
    assert [name for name in HEAVY if name in loaded] == []
    assert "agentfsm.engine.step" not in loaded
    assert len([name for name in loaded if name.partition(".")[0] == "agentfsm"]) <= LOADED
    assert done.stderr == ""


def test_all_is_sorted():
    """`__all__` is in ruff's order (constants, classes, the rest) and names nothing twice."""
    names = agentfsm.__all__
    assert len(names) == len(set(names))
    assert names == sorted(names, key=lambda name: (not name.isupper(), not name[0].isupper(), name))


@pytest.mark.parametrize("name", agentfsm.__all__)
def test_every_public_name_is_there_and_explained(name):
    """Every name resolves, and what can have a docstring has its own."""
    value = getattr(agentfsm, name)
    if inspect.isclass(value) or inspect.isroutine(value):
        assert value.__dict__.get("__doc__") if inspect.isclass(value) else value.__doc__


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_stands_on_a_page(package):
    """Nothing is public that README and docs do not tell of."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    told = set(re.findall(r"\w+", "\n".join(page.read_text(encoding="utf-8") for page in pages)))
    assert set(import_module(f"agentfsm{package}").__all__) <= told


def test_nothing_public_is_left_out():
    """What the package's own file takes from its modules, or makes late, is in `__all__`."""
    tree = ast.parse(inspect.getsource(agentfsm))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    own = {name.name for node in imports if str(node.module).startswith("agentfsm.") for name in node.names}
    late = {node.target.id for node in ast.walk(tree) if isinstance(node, ast.AnnAssign)}
    assert own | late == set(agentfsm.__all__)


def test_whatever_may_be_caught_or_said_is_public():
    """All errors, and all messages that a history is made of."""
    tree = ast.parse(inspect.getsource(errors))
    raised = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    said = {kind.__name__ for kind in get_args(Message)}
    assert raised | said <= set(agentfsm.__all__)


def test_a_name_that_is_not_public_is_refused():
    """What is made late takes nothing away from the usual error, nor from what looks for names."""
    with pytest.raises(AttributeError, match="no attribute 'ask_users'"):
        _ = agentfsm.ask_users
    assert agentfsm.ask_user is agentfsm.ask_user
    with pytest.raises(AttributeError, match=r"from agentfsm\.planning import Planner"):
        _ = agentfsm.Planner
