"""One rule serves fields, arguments, declarations of tools and options of the command line."""

import math
from typing import Any

import pytest

from agentfsm import Filter, Limiter, Limits, MisuseError, Runs, ToolRegistry, tool
from agentfsm.cli.argument_types import parse_count, parse_seconds
from agentfsm.core import validation as v
from agentfsm.models import Price
from agentfsm.ports import Store
from agentfsm.stores import MemoryStore, SQLiteStore

RULES = {name: rule for name, rule in vars(v).items() if isinstance(rule, v.ValueRule)}
OBJECTS = (None, "", " ", "a", b"a", 0, 1, -1, 1.5, math.inf, math.nan, True, (), [], {}, object(), int, print)


class HalfAStore(Store):
    """A store that implements nothing."""


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_a_rule_takes_any_object(rule):
    """It never raises by itself, refuses something, and accepts something."""
    answers = {rule.fits(value) for value in OBJECTS}
    assert answers == {True, False}
    assert rule.or_none().fits(None)


@pytest.mark.parametrize("name", ["COUNT", "COUNT_OR_ZERO", "POSITIVE", "NOT_NEGATIVE", "SHARE", "SECONDS"])
def test_a_bool_is_not_a_number(name):
    """True would count as 1."""
    assert not RULES[name].fits(value=True)
    assert not RULES[name].fits(math.nan)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Limiter("2"), r"^Limiter\(concurrency='2'\): give a whole number, 1 or more, or None$"),
        (lambda: Limiter(per_minute=True), r"^Limiter\(per_minute=True\): give a whole number, 1 or more, or None$"),
        (lambda: Filter(state="nope"), r"^Filter\(state='nope'\): give 'observe', 'think'"),
        (lambda: Filter(before="2026-01-01"), r"^Filter\(before='2026-01-01'\): give seconds since 1970"),
        (lambda: Filter(waiting="yes"), r"^Filter\(waiting='yes'\): give True or False, or None$"),
        (lambda: SQLiteStore("x.db", lease_s="1"), r"^SQLiteStore\(lease_s='1'\): give seconds above 0"),
        (lambda: Price(input_usd_per_million="1", output_usd_per_million=1.0), r"^Price\(.*US dollars, 0 or more$"),
        (lambda: Runs(HalfAStore()), r"^Runs\(store=.*\): give a store"),
        (lambda: Runs("runs.db"), r"^Runs\(store='runs.db'\): give a store"),
        (lambda: Runs(MemoryStore(), tools=ToolRegistry()), r"^Runs\(tools=.*\): give a mapping"),
        (lambda: Runs(MemoryStore(), tools={"agent": [print]}), r"^Runs\(tools=.*\): give a mapping"),
        (lambda: Runs(MemoryStore(), durability="none"), r"^Runs\(durability='none'\): give 'full' or 'normal'$"),
        (lambda: tool(tags="db")(print), r"^tool 'print'\(tags='db'\): give a tuple of strings"),
        (lambda: tool(tags={5})(print), r"^tool 'print'\(tags=\{5\}\): give a tuple of strings"),
        (lambda: tool(description=5)(print), r"^tool 'print'\(description=5\): give a string, or None$"),
    ],
)
def test_a_mistake_says_where_and_what_to_give(make: Any, message):
    """In the same form, wherever the value is taken."""
    with pytest.raises(MisuseError, match=message):
        make()


@pytest.mark.parametrize(("parse", "text"), [(parse_count, "0"), (parse_count, "1.5"), (parse_seconds, "inf")])
def test_an_option_of_the_command_line_keeps_the_same_rule(parse, text):
    """With the same words."""
    rule = v.COUNT if parse is parse_count else v.SECONDS
    with pytest.raises(Exception, match=f"'{text}' is not valid: give {rule.wanted}"):
        parse(text)


async def test_a_list_takes_a_filter_and_a_count():
    """The store is not asked with anything else."""
    runs: Any = Runs(MemoryStore())
    with pytest.raises(MisuseError, match=r"^list\(where='shop'\): give a Filter"):
        await runs.list("shop")
    with pytest.raises(MisuseError, match=r"^list\(limit=0\): give a whole number, 1 or more$"):
        await runs.list(limit=0)


def test_an_unknown_field_gets_a_suggestion():
    """By similarity, by the name that other packages use, or as the list of all fields; other TypeErrors are kept."""
    for name, hint in (("turn", "did you mean 'turns'"), ("max_steps", "did you mean 'turns'"), ("zzz", "fields are")):
        with pytest.raises(TypeError, match=rf"^Limits\(\) has no field '{name}'; .*{hint}"):
            Limits(**{name: 3})
    with pytest.raises(TypeError, match="positional"):
        Limits(3)
