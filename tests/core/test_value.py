"""Values are equal, hashed and shown as attrs has it."""

import attrs
import pytest

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
