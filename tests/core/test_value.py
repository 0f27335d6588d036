"""Values are equal, hashed and shown as attrs has it."""

import ast
from pathlib import Path

import attrs
import pytest

import agentfsm
from agentfsm.core.value import Value


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
