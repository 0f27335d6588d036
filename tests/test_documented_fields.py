"""Every public field has an attribute docstring, which `help` tools, editors and reference generators read."""

import ast
import inspect
import re
import textwrap
from importlib import import_module
from itertools import pairwise

import attrs
import pytest
from docstring_parser import parse

from agentfsm import Agent, Limits, Settings
from agentfsm.agents.agent_fields import AgentFields

PUBLIC = "context evals flow guards mcp models patterns planning ports prompts reflection serve stores testing"
MODULES = ("", *(f".{name}" for name in PUBLIC.split()))


def public_classes():
    """Return the classes that the package's modules export."""
    modules = [import_module(f"agentfsm{name}") for name in MODULES]
    exported = [getattr(module, name) for module in modules for name in module.__all__]
    classes = {each for each in exported if isinstance(each, type) and each.__module__.startswith("agentfsm")}
    return sorted(classes, key=lambda each: each.__qualname__)


def undocumented(tree):
    """Return the public fields of a class that no string literal follows."""
    following = [*tree.body[1:], None]
    return [
        field.target.id
        for field, below in zip(tree.body, following, strict=True)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and not field.target.id.startswith("_")
        and not (
            isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str)
        )
    ]


@pytest.mark.parametrize("kind", [AgentFields, *public_classes()], ids=lambda kind: kind.__name__)
def test_each_public_field_is_documented(kind):
    """By a string literal right below the field."""
    [tree] = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert undocumented(tree) == []


def test_a_field_without_a_docstring_is_found():
    """A comment is not enough."""
    [tree] = ast.parse('class A:\n    a: int\n    """Seconds."""\n    b: int\n    # Seconds.\n    _c: int\n').body
    assert undocumented(tree) == ["b"]


@pytest.mark.parametrize(("kind", "fields"), [(Agent, AgentFields), (Limits, Limits), (Settings, Settings)])
def test_help_explains_each_parameter(kind, fields):
    """`help` shows no attribute docstrings, so the class docstring has the first sentence of each."""
    [tree] = ast.parse(inspect.getsource(fields)).body
    texts = {
        field.target.id: re.sub(r"\s+", " ", below.value.value)
        for field, below in pairwise(tree.body)
        if isinstance(field, ast.AnnAssign)
    }
    parameters = [field.name for field in attrs.fields(kind) if field.init]
    shown = {each.arg_name: re.sub(r"\s+", " ", each.description) for each in parse(kind.__doc__).params}
    assert shown == {name: re.match(r".+?\.(?= |$)", texts[name])[0] for name in parameters}
