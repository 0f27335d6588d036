"""Mistakes of the first hour are answered with the place to go to."""

from importlib.metadata import version
from typing import Any

import pytest

import agentfsm
from agentfsm import Filter, MisuseError, tool
from agentfsm.stores import SQLiteStore
from agentfsm.testing import FunctionModel


def test_the_version_is_that_of_the_package():
    """`agentfsm.__version__`, as other packages have it."""
    assert agentfsm.__version__ == version("agentfsm")


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("SQLiteStore", "stores"),
        ("OpenAIChat", "models"),
        ("ScriptedModel", "testing"),
        ("Reflector", "reflection"),
        ("SlidingWindow", "context"),
        ("MCPServer", "mcp"),
    ],
)
def test_a_name_of_another_module_is_found(name, module):
    """The error says how to import it."""
    with pytest.raises(AttributeError, match=f"write `from agentfsm.{module} import {name}`"):
        getattr(agentfsm, name)


def test_an_unknown_name_is_an_attribute_error():
    """`hasattr` answers False, and nothing is imported for private names."""
    assert not hasattr(agentfsm, "nothing_of_this_name")
    assert not hasattr(agentfsm, "__wrapped__")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Filter(state="DONE"), r"^Filter\(state='DONE'\): give 'observe', .*'done' or 'error', or None$"),
        (lambda: SQLiteStore(None), r"^SQLiteStore\(path=None\): give the path of a file"),
        (lambda: SQLiteStore("runs.db", lease_s="x"), r"^SQLiteStore\(lease_s='x'\): give seconds above 0"),
        (lambda: FunctionModel(3), r"^FunctionModel\(function=3\): give a function$"),
        (lambda: tool(after=3)(print), r"^tool 'print'\(after=3\): give a tuple of strings"),
        (lambda: tool(estimate_s="x")(print), r"^tool 'print'\(estimate_s='x'\): give a finite number, 0 or more"),
    ],
)
def test_a_wrong_type_is_refused_where_it_is_given(make: Any, message):
    """It is no error out of the depths."""
    with pytest.raises(MisuseError, match=message):
        make()
