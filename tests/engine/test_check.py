"""The look over tools: what is found, and what is not found fault with."""

import attrs
import pytest

from agentfsm import ToolRegistry, tool
from agentfsm.guards import (
    CallGuard,
    Guard,
    GuardDecision,
    GuardVerdict,
    allow,
    ask,
    exit_filter,
    max_calls,
    no,
    two_of,
)
from agentfsm.guards.reach import explain_idle_guards
from agentfsm.tools.lint import Finding


@tool(idempotent=True)
def plan_route(start: str, goal: str) -> str:
    """Plan a route between two places.

    Args:
        start: Where it begins, for example "Rome".
        goal: Where it ends, for example "Pisa".
    """
    return start + goal


def found(**changes):
    """What is found when a tool with which nothing is wrong is changed so."""
    findings = ToolRegistry.of([attrs.evolve(plan_route, **changes)]).check()
    assert all(each.tool == changes.get("name", "plan_route") for each in findings)
    return [(each.severity, each.message) for each in findings]


def one(part, **changes):
    """The severity of the only finding, which has to say this."""
    ((severity, message),) = found(**changes)
    assert part in message
    return severity


def schema(properties, **more):
    return {"type": "object", "properties": properties, **more}


def named(*names):
    return schema({name: {"type": "string", "description": "Some text."} for name in names})


def nested(inner, **more):
    return schema({"filter": {"description": "What to leave out.", **inner}}, **more)


def test_nothing_is_found_where_all_is_well():
    """A description, described parameters, and a declaration."""
    assert found() == []


# Descriptions.


@pytest.mark.parametrize("description", ["", " \n"])
def test_a_missing_description(description):
    """The model would have to guess from the name."""
    assert one("no description, so", description=description) == "warning"


@pytest.mark.parametrize("description", ["Plans.", "Plans a route.", "The route plan tool", "路线规划", "计划"])
def test_a_description_that_says_no_more_than_the_name(description):
    """Too few words, or only those of the name, in any order."""
    assert one("says no more than its name", description=description) == "hint"


@pytest.mark.parametrize(
    "description", ["Find the shortest way.", "规划两地之间的路线", "Планирует маршрут между городами"]
)
def test_a_description_in_any_language(description):
    """Words are counted where they are not set apart, too."""
    assert found(description=description) == []


# Declarations.


@pytest.mark.parametrize("name", ["get_route", "search-routes", "checkRoute", "list", "find_it", "read_it", "fetchIt"])
def test_a_reading_name_that_declares_nothing(name):
    """It runs alone for want of a word."""
    assert one("@tool(read_only=True)", name=name, idempotent=False) == "hint"
    for declared in ({"read_only": True}, {"concurrency_safe": lambda a: True}, {"locks": lambda a: [a.start]}):
        assert found(name=name, **declared) == []


@pytest.mark.parametrize(
    "name", ["save_route", "updateRoute", "delete_it", "send-it", "write_it", "create_it", "pay", "generate_payment"]
)
def test_a_changing_name_that_is_declared_harmless(name):
    """The two declarations differ in what may happen."""
    assert one("run again after a crash", name=name, read_only=True, concurrency_safe=True) == "warning"
    assert one("may overlap itself", name=name, concurrency_safe=True) == "warning"
    assert found(name=name) == []
    assert found(name=name, concurrency_safe=lambda a: True) == []
    assert found(name=name, concurrency_safe=True, locks=lambda a: [a.start]) == []


@pytest.mark.parametrize(
    ("description", "word"),
    [
        ("Deletes a route for good.", "Deletes"),
        ("Find a route and save it.", "save"),
        ("Finds a route, sends it to a friend.", "sends"),
        ("Finds routes.\nUpdates the map.", "Updates"),
        ("查询路线并保存结果。", "保存"),
    ],
)
def test_a_description_of_a_change_that_is_declared_harmless(description, word):
    """The description is a contract, and so is the declaration."""
    assert one(f"says {word!r} in its description", description=description, read_only=True) == "warning"
    assert one("overlap itself", description=description, concurrency_safe=True) == "warning"
    assert found(description=description) == []


@pytest.mark.parametrize(
    "description",
    [
        "List the routes that a user saves.",
        "Tells when the last update was.",
        "Finds a route. It does not create, update or delete anything.",
        "Never deletes a route, and doesn't save one.",
        "执行查询并返回结果。仅支持 SELECT，不允许执行更新，删除等写操作。",  # noqa: RUF001  Chinese
        "A payment is found by its number.",
    ],
)
def test_a_description_of_what_others_do_or_it_does_not(description):
    """Only what begins a clause is its own deed, and a denial is none."""
    assert found(description=description, read_only=True) == []


def test_a_name_and_a_description_are_one_finding():
    """Whoever reads it has one thing to do."""
    assert (
        one("named delete_it", name="delete_it", description="Deletes one of the routes.", read_only=True) == "warning"
    )


# Parameters.


def test_parameters_without_a_description():
    """Each is named, up to ten; a boolean for a schema describes nothing."""
    parameters = schema({"start": {"type": "string"}, "goal": True, "via": {"description": "Where it goes along."}})
    assert one("no description of start, goal:", parameters=parameters) == "hint"
    many = found(parameters=schema({f"place_{index}": {} for index in range(12)}))
    assert "place_9 and 2 more:" in many[0][1]


@pytest.mark.parametrize("key", ["$defs", "definitions"])
def test_a_parameter_may_be_described_with_its_type(key):
    """Where the type has a docstring."""
    place = {"type": "string", "description": "A town."}
    assert found(parameters=schema({"start": {"$ref": f"#/{key}/Place"}}, **{key: {"Place": place}})) == []
    assert len(found(parameters=schema({"start": {"$ref": f"#/{key}/Other"}}, **{key: {"Place": place}}))) == 1


def test_parameter_names_of_one_letter():
    """They tell a model nothing."""
    assert one("called q, x:", parameters=named("q", "start", "x")) == "hint"


def test_many_parameters():
    """Ten are many, eleven are too many."""
    assert found(parameters=named(*[f"place_{index}" for index in range(10)])) == []
    assert one("11 parameters", parameters=named(*[f"place_{index}" for index in range(11)])) == "hint"


def test_a_tool_without_parameters():
    """Nothing is missing."""
    assert found(parameters={"type": "object"}) == []


RANGE = schema({"low": {"type": "integer"}})


@pytest.mark.parametrize(
    ("inner", "levels"),
    [
        ({"type": "array", "items": {"type": "array", "items": RANGE}}, 3),
        ({"type": "array", "items": {"type": "array", "items": {"type": "array", "items": RANGE}}}, 4),
        (schema({"ranges": {"type": "array", "items": RANGE}}), 3),
        (schema({"ranges": {"type": "array", "items": schema({"each": RANGE})}}), 4),
        ({"anyOf": [{"type": "null"}, schema({"a": schema({"b": schema({"c": {"type": "object"}})})}), True]}, 4),
        ({"type": "array", "prefixItems": [RANGE, {"type": "array", "items": RANGE}]}, 3),
        ({"type": "object", "additionalProperties": schema({"a": {"oneOf": [{"allOf": [RANGE]}]}})}, 3),
        ({"type": "object", "patternProperties": {"^x": schema({"a": {"type": "array", "items": RANGE}})}}, 4),
        ({"type": "object", "additionalProperties": False}, 1),
    ],
)
def test_nesting(inner, levels):
    """Objects and lists count from the argument on, however a schema says them; three are good."""
    if levels > 3:
        assert one(f"nested {levels} levels deep", parameters=nested(inner)) == "hint"
    else:
        assert found(parameters=nested(inner)) == []


def test_nesting_by_named_types():
    """A type that is used twice is no cycle; one that holds itself has no end."""
    deep = {"B": schema({"c": RANGE}), "A": schema({"one": {"$ref": "#/$defs/B"}, "two": {"$ref": "#/$defs/B"}})}
    assert found(parameters=nested({"$ref": "#/$defs/A"}, **{"$defs": deep})) == []
    deeper = nested({"type": "array", "items": {"$ref": "#/$defs/A"}}, **{"$defs": deep})
    assert one("nested 4 levels deep", parameters=deeper) == "hint"
    tree = {"Tree": schema({"left": {"$ref": "#/$defs/Tree"}, "right": {"$ref": "#/$defs/Tree"}})}
    assert one("nested without end", parameters=nested({"$ref": "#/$defs/Tree"}, **{"$defs": tree})) == "hint"


def test_a_hostile_schema_is_looked_at_once():
    """Each of 60 types uses the next twice: without a memory that would be 2 to the power of 60 visits."""
    types = {f"T{n}": {"anyOf": [{"$ref": f"#/$defs/T{n + 1}"}] * 2} for n in range(60)}
    parameters = nested({"$ref": "#/$defs/T0"}, **{"$defs": types})
    assert not any("nested" in message for _, message in found(parameters=parameters))


# Size.


def test_a_long_definition():
    """Its tokens are counted where there is a counter, and estimated where there is none."""
    assert one("has about 6", description="Plan a route. " + "word " * 300) == "hint"
    registry = ToolRegistry.of([plan_route])
    assert registry.check(lambda text: 500) == ()
    (finding,) = registry.check(lambda text: 1_501 if '"name": "plan_route"' in text else 0)
    assert (finding.tool, finding.severity) == ("plan_route", "hint")
    assert "has 1,501 tokens" in finding.message


def test_many_tools_offered_together():
    """Twenty are many, twenty-one too many; those that are picked by `enabled` do not count."""
    tools = [attrs.evolve(plan_route, name=f"plan_{index}") for index in range(20)]
    assert ToolRegistry.of(tools).check() == ()
    for enabled in (lambda ctx: True, False):
        assert ToolRegistry.of([*tools, attrs.evolve(plan_route, enabled=enabled)]).check() == ()
    (finding,) = ToolRegistry.of([*tools, plan_route]).check()
    assert (finding.tool, finding.severity) == (None, "hint")
    assert finding.message.startswith("21 tools")


def test_findings_come_tool_by_tool():
    """In the order of registration, as values."""
    tools = [attrs.evolve(plan_route, name=name, description="") for name in ("b", "a")]
    first, second = ToolRegistry.of(tools).check()
    assert (first.tool, second.tool) == ("b", "a")
    assert first == Finding(tool="b", severity="warning", message=second.message)


def tools_of(**declared):
    """A registry of tools with these options, in which nothing else is wrong."""
    return ToolRegistry.of([tool(name=name, **options)(plan_route.function) for name, options in declared.items()])


READER = {"read_only": True, "reads_untrusted": True}


@pytest.mark.parametrize(
    ("options", "severity"),
    [
        ({}, "warning"),
        ({"idempotent": True}, "warning"),
        ({"reads_private": True}, "warning"),
        ({"irreversible": True}, None),
        ({"sends_out": lambda a: bool(a.goal)}, None),
        ({"requires_approval": True}, None),
        ({"read_only": True}, None),
    ],
)
def test_a_change_without_a_label_beside_a_reader_of_strangers(options, severity):
    """The stranger's text may ask for the call, and no rule about effects knows it, whatever its name."""
    findings = tools_of(open_mail=READER, unlock_door=options).check()
    assert [each.severity for each in findings if each.tool == "unlock_door"] == ([severity] if severity else [])
    if severity:
        assert "declares no effect, and open_mail reads texts of strangers" in findings[0].message


def test_a_change_without_a_label_alone():
    """Without a reader of strangers nothing is found: no text asks for its calls."""
    assert [each for each in tools_of(unlock_door={}).check() if "declares no effect" in each.message] == []


class AskOfGoal(CallGuard):
    """A rule of a user, which needs the arguments."""

    def concerns(self, tool):
        return True

    def decide(self, call):
        return GuardDecision(verdict=GuardVerdict.ASK, rule="goal", reason=call.arguments.goal)


NARROW = Guard(no("untrusted", "irreversible", verdict="ask"), two_of("untrusted", "private", "sends_out"))
PAY, INVITE = {"irreversible": True}, {"sends_out": True}


@pytest.mark.parametrize(
    ("tools", "guard", "reason"),
    [
        (
            {"mail": READER, "unlock": {}},
            NARROW,
            "about unlock: no tool declares that it does anything that is",
        ),
        ({"mail": READER, "unlock": {"idempotent": True}}, NARROW, "never ask about unlock"),
        ({"mail": {"read_only": True}, "pay": PAY}, NARROW, "reads anything that is untrusted or private"),
        ({"mail": READER, "invite": INVITE}, Guard(NARROW, exit_filter()), "never ask about invite"),
        ({"mail": READER, "unlock": {}}, Guard(NARROW, ask("lock")), "never ask about unlock"),
        ({"mail": READER, "unlock": {}}, Guard(NARROW, allow("unlock")), "never ask about unlock"),
        ({"mail": READER, "unlock": {}}, ask("lock"), "no rule of the guards is about unlock"),
        ({"mail": READER, "pay": PAY}, NARROW, ""),
        ({"mail": READER, "find": {**READER, "reads_private": True}, "invite": INVITE}, NARROW, ""),
        ({"mail": READER, "unlock": {}}, Guard(NARROW, ask("un*")), ""),
        ({"mail": READER, "unlock": {}}, Guard(NARROW, max_calls("unlock", 5)), ""),
        ({"mail": READER, "unlock": {}}, AskOfGoal(), ""),
        ({"mail": {"read_only": True}, "pay": {**PAY, "requires_approval": True}}, NARROW, ""),
        ({"mail": {"read_only": True}}, NARROW, ""),
    ],
)
def test_guards_that_can_never_ask(tools, guard, reason):
    """Labels that no tool has make a rule about them idle; the reason names the tools and the labels."""
    found = explain_idle_guards([guard], tools_of(**tools))
    assert reason in found
    assert bool(found) is bool(reason)
