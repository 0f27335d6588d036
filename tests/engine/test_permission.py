"""Permissions: levels, rules over names and arguments, and roles."""

from types import SimpleNamespace

import pytest

from agentfsm import Level, MisuseError, Permissions, Rule, tool

CHEAP = Rule("pay", lambda a: a.cents <= 500)
DENIED = "pay is not permitted in this run"
THESE = "pay is not permitted with these arguments"
BROKEN = "a rule on pay could not be applied (AttributeError), so it is not permitted"


@tool
def pay(cents: int) -> str:
    """Pay an amount."""
    return str(cents)


@tool(read_only=True)
def read_rates() -> str:
    """Read the rates."""
    return ""


@tool(permission="admin")
def delete_all() -> str:
    """Delete everything."""
    return ""


def asked(permissions, which=pay, roles=(), **arguments):
    """Whether the tool is offered, and why the call is refused."""
    return permissions.may_offer(which, roles), permissions.refusal_reason(which, roles, SimpleNamespace(**arguments))


def test_levels_are_ordered_by_what_they_allow():
    """And not by the alphabet, whichever way they are compared, also with plain strings."""
    assert sorted(Level, reverse=True) == [Level.ADMIN, Level.WRITE, Level.READ]
    for low, high in (("read", "write"), ("write", "admin"), ("read", "admin")):
        lower, higher = Level(low), Level(high)
        assert lower < higher
        assert lower <= high
        assert higher > low
        assert higher >= lower
        assert not higher < lower
        assert not higher <= lower
        assert not lower > higher
        assert not lower >= higher
    assert Level.READ <= Level.READ
    assert Level.READ >= Level.READ
    assert not Level.READ < Level.READ
    assert not Level.READ > Level.READ
    assert {Level.READ: 1}["read"] == 1


@pytest.mark.parametrize("bad", ["owner", "READ", 1, None])
def test_there_are_three_levels(bad):
    """Another one is misuse wherever it is written, and the error lists the three."""
    for make in (Level, lambda level: Permissions(level=level), lambda level: level > Level.READ):
        with pytest.raises(MisuseError, match="read, write, admin"):
            make(bad)


def test_without_a_word_everything_is_permitted():
    """The default refuses nothing, whatever the roles."""
    for each in (pay, read_rates, delete_all):
        assert asked(Permissions(), each, roles=("any",)) == (True, None)


def test_a_tool_above_the_level_is_refused():
    """Hidden, and refused with both levels named."""
    limited = Permissions(level="write")
    assert asked(limited, delete_all) == (False, "delete_all needs level admin, and this run has write")
    assert asked(limited, pay) == (True, None)
    assert asked(Permissions(level=Level.READ), read_rates) == (True, None)


def test_what_is_not_allowed_is_refused():
    """Names and globs, in upper or lower case."""
    assert asked(Permissions(allow=("read_*", "pay"))) == (True, None)
    assert asked(Permissions(allow=("read_*",))) == (False, DENIED)
    assert asked(Permissions(allow=["PAY"])) == (True, None)
    assert asked(Permissions(allow=())) == (False, DENIED)


def test_deny_wins_over_allow():
    """Also where both name the very tool."""
    assert asked(Permissions(allow=("pay",), deny=("p*",))) == (False, DENIED)
    assert asked(Permissions(deny=("p*",)), read_rates) == (True, None)


def test_an_allow_rule_with_a_condition():
    """The tool is offered, since some call of it may run; each call is judged by its arguments."""
    permissions = Permissions(allow=(CHEAP,))
    assert asked(permissions, cents=500) == (True, None)
    assert asked(permissions, cents=501) == (True, THESE)
    assert asked(permissions, read_rates) == (False, "read_rates is not permitted in this run")


def test_a_deny_rule_with_a_condition():
    """The tool is offered, since it does not deny every call."""
    permissions = Permissions(deny=(Rule("*", lambda a: a.cents > 500),))
    assert asked(permissions, cents=500) == (True, None)
    assert asked(permissions, cents=501) == (True, THESE)


def test_one_allow_rule_that_holds_is_enough():
    """Also behind one that does not, and behind one that breaks."""
    assert asked(Permissions(allow=(CHEAP, Rule("pay", lambda a: a.cents == 900))), cents=900) == (True, None)
    assert asked(Permissions(allow=(Rule("pay", lambda a: a.missing), CHEAP)), cents=1) == (True, None)


def test_a_condition_that_breaks_counts_against_the_call():
    """To allow it says no, to deny it says yes, and the refusal tells what happened, without the arguments."""
    broken = Rule("pay", lambda a: a.missing)
    assert asked(Permissions(allow=(broken, CHEAP)), cents=501) == (True, BROKEN)
    assert asked(Permissions(deny=(broken,)), cents=1) == (True, BROKEN)


@pytest.mark.parametrize("answer", [1, "yes", None, object()])
def test_a_condition_that_answers_neither_yes_nor_no_counts_against_the_call(answer):
    """What merely reads as a yes allows nothing, and what merely reads as a no denies."""
    odd = Rule("pay", lambda a: answer)
    text = f"a rule on pay could not be applied ({TypeError.__name__}), so it is not permitted"
    assert asked(Permissions(allow=(odd,))) == (True, text)
    assert asked(Permissions(deny=(odd,))) == (True, text)


def test_what_ends_the_process_is_no_verdict():
    """Only exceptions of the rule are its failure."""

    def interrupt(a):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        asked(Permissions(allow=(Rule("pay", interrupt),)))


ROLES = Permissions(
    level="read",
    deny=("delete_*",),
    roles={
        "clerk": Permissions(level="write", allow=(CHEAP,)),
        "boss": Permissions(deny=("read_*",)),
        "guest": Permissions(level="read", allow=("read_*",)),
    },
)


def test_a_run_without_roles_has_the_outer_rules():
    """They are for everybody who is nobody in particular."""
    assert asked(ROLES, read_rates) == (True, None)
    assert asked(ROLES, pay) == (False, "pay needs level write, and this run has read")


def test_a_run_without_a_known_role_may_do_nothing():
    """A misspelled role must not grant more than the one that was meant."""
    unknown = "none of this run's roles (clark, chief) is known to the agent's permissions"
    assert asked(ROLES, read_rates, ("clark", "chief")) == (False, unknown)
    restricting = Permissions(roles={"clerk": Permissions(level="read")})
    assert asked(restricting, pay, ("clark", "chief")) == (False, unknown)


def test_a_role_takes_the_place_of_level_and_allow():
    """In both directions: more than the outer rules, or less."""
    assert asked(ROLES, pay, ["clerk"], cents=1) == (True, None)
    assert asked(ROLES, pay, ["clerk"], cents=501) == (True, THESE)
    assert asked(ROLES, read_rates, ["clerk"]) == (False, "read_rates is not permitted in this run")
    assert asked(ROLES, read_rates, ["boss"]) == (False, "read_rates is not permitted in this run")


def test_a_run_may_do_what_any_of_its_roles_may():
    """One role's deny does not bind another; a role that nobody has described takes nothing away."""
    assert asked(ROLES, pay, ["clerk", "boss"], cents=501) == (True, None)
    assert asked(ROLES, read_rates, {"boss", "guest"}) == (True, None)
    assert asked(ROLES, pay, ("stranger", "clerk"), cents=1) == (True, None)


def test_when_no_role_allows_it_each_reason_is_told_once():
    """Two roles with the same reason give it once."""
    assert asked(ROLES, pay, ("guest", "clerk"), cents=501) == (
        True,
        f"pay needs level write, and this run has read; {THESE}",
    )
    twice = Permissions(roles={"a": Permissions(allow=()), "b": Permissions(allow=())})
    assert asked(twice, roles=("a", "b")) == (False, DENIED)


def test_the_outer_deny_binds_every_role():
    """Without condition it hides the tool; with one it refuses the call."""
    assert asked(ROLES, delete_all, ["boss"]) == (False, "delete_all is not permitted in this run")
    outer = Permissions(deny=(Rule("pay", lambda a: a.cents > 500),), roles={"boss": Permissions()})
    assert asked(outer, pay, ["boss"], cents=501) == (True, THESE)


def test_roles_are_taken_as_they_are_now():
    """What is done to the mapping later gives nobody a role."""
    roles = {}
    permissions = Permissions(level="read", roles=roles)
    roles["boss"] = Permissions()
    assert asked(permissions, pay, ["boss"]) == (False, "pay needs level write, and this run has read")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"allow": "read_*"}, "as a tuple"),
        ({"deny": CHEAP}, "as a tuple"),
        ({"deny": 3}, "as a tuple"),
        ({"allow": (3,)}, "not 3"),
        ({"allow": (pay,)}, "a glob or a Rule"),
        ({"deny": ("",)}, "name a tool"),
        ({"roles": ["boss"]}, "a mapping"),
        ({"roles": {"boss": "admin"}}, "'boss': 'admin'"),
        ({"roles": {1: Permissions()}}, "a role is a name"),
        ({"roles": {"a": Permissions(roles={"b": Permissions()})}}, "move b to the top level"),
    ],
)
def test_what_is_no_permission_is_refused_at_once(options, text):
    """A string of letters above all, which would be read as a rule per letter."""
    with pytest.raises(MisuseError, match=text):
        Permissions(**options)


async def later(a):
    return True


@pytest.mark.parametrize(("tools", "when"), [("", None), (3, None), (pay, None), ("pay", "yes"), ("pay", later)])
def test_what_is_no_rule_is_refused_at_once(tools, when):
    """An async condition above all: its coroutine would read as a yes."""
    with pytest.raises(MisuseError):
        Rule(tools, when)
