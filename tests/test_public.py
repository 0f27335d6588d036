"""What is public: the names of `agentfsm`, and that importing it is cheap."""

import inspect
import subprocess
import sys

import pytest

import agentfsm

HEAVY = (
    "anthropic",
    "cattrs",
    "genai_prices",
    "httpx",
    "httpx2",
    "jsonschema_rs",
    "openai",
    "pydantic",
    "rich",
    "sqlite3",
    "structlog",
    "tiktoken",
    "trio",
)


@pytest.mark.parametrize("statement", ["import agentfsm", "from agentfsm import Agent, tool"])
def test_importing_loads_no_vendor(statement):
    """A fresh interpreter that imports the package has loaded none of the slow or optional libraries."""
    code = f"import sys; {statement}; print(*[name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == []
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


def test_nothing_public_is_left_out():
    """What the package's own file imports for its users is in `__all__`."""
    extra = {
        name
        for name, value in vars(agentfsm).items()
        if not name.startswith("_") and not inspect.ismodule(value) and name not in agentfsm.__all__
    }
    assert not extra
