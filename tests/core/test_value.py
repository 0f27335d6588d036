"""Values are equal, hashed and shown as attrs has it."""

import ast
import copy
from pathlib import Path

import attrs
import pytest

import agentfsm
from agentfsm import AssistantMessage, Run, Tool, ToolCall, ToolResult, Usage, UserMessage
from agentfsm.core.calls import OpenCall
from agentfsm.core.value import Value
from agentfsm.engine.execution.config import EngineConfig
from agentfsm.engine.execution.execution import Execution


@attrs.frozen(kw_only=True)
class Plain:
    number: int
    text: str = attrs.field(default="", repr=False)
    note: list[int] = attrs.field(factory=list, eq=False)
    long: str = attrs.field(default="", repr=lambda text: f"<{len(text)}>")


@attrs.frozen(kw_only=True)
class Ours(Value):
    number: int
    text: str = attrs.field(default="", repr=False)
    note: list[int] = attrs.field(factory=list, eq=False)
    long: str = attrs.field(default="", repr=lambda text: f"<{len(text)}>")


@attrs.frozen
class More(Ours):
    more: int = 0


@attrs.frozen
class Bare(Value):
    pass


FIELDS = [
    {"number": 1},
    {"number": 2},
    {"number": 1, "text": "a"},
    {"number": 1, "note": [1]},
    {"number": 1, "long": "abc"},
]


@pytest.mark.parametrize("one", FIELDS)
@pytest.mark.parametrize("other", FIELDS)
def test_they_are_equal_as_those_of_attrs(one, other):
    same = Plain(**one) == Plain(**other)
    assert (Ours(**one) == Ours(**other)) is same
    assert (Ours(**one) != Ours(**other)) is not same
    assert len({Ours(**one), Ours(**other)}) == len({Plain(**one), Plain(**other)})


@pytest.mark.parametrize("fields", FIELDS)
def test_they_are_shown_as_those_of_attrs(fields):
    assert repr(Ours(**fields)) == repr(Plain(**fields)).replace("Plain", "Ours")


def test_only_values_of_one_class_are_equal():
    assert More(number=1) == More(number=1) != Ours(number=1)
    assert More(number=1) != More(number=1, more=1)
    assert Ours(number=1) != {"number": 1}
    assert Bare() == Bare()
    assert (repr(Bare()), len({Bare(), Bare()})) == ("Bare()", 1)


def test_their_fields_are_all_that_they_have():
    assert not hasattr(Ours(number=1), "__dict__")
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        Ours(number=1).number = 2


def test_methods_of_their_own_stay():
    @attrs.frozen
    class Secret(Value):
        key: str

        def __repr__(self):
            return "Secret()"

    assert repr(Secret("abc")) == "Secret()"
    assert Secret("abc") == Secret("abc") != Secret("b")


def test_every_frozen_class_is_one():
    """Unless it has a base or an identity of its own; else attrs compiles its methods again."""
    others = [
        f"{path.name}: {each.name}"
        for path in Path(agentfsm.__file__).parent.rglob("*.py")
        if "attrs.frozen" in (source := path.read_text())
        for each in ast.walk(ast.parse(source))
        if isinstance(each, ast.ClassDef)
        and not each.bases
        and any("attrs.frozen" in (text := ast.unparse(made)) and "eq=" not in text for made in each.decorator_list)
    ]
    assert others == []


def test_no_class_of_the_hot_path_looks_its_attributes_up():
    """With a `functools.cached_property`, attrs gives a slotted class a `__getattr__` that slows all of it down."""
    kinds = (AssistantMessage, ToolCall, ToolResult, UserMessage, Run, Usage, OpenCall, Tool, EngineConfig, Execution)
    assert [kind.__name__ for kind in kinds if "__getattr__" in vars(kind)] == []


def test_a_cached_property_is_computed_once_for_each_value():
    """A changed copy has its own."""
    call = ToolCall(id="t1.0", name="look", arguments='{"b": 1, "a": 2}')
    assert call.canonical is call.canonical
    assert attrs.evolve(call, arguments="{}").canonical != call.canonical
    assert copy.deepcopy(call).canonical == call.canonical


def test_a_cached_property_of_a_class_is_the_property():
    """With the text that documents it."""
    assert "canonical arguments" in AssistantMessage.signature.__doc__
