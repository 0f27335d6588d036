"""On what terms a server's tools are used: hints, confirmation, access lists, constraints on arguments."""

from types import SimpleNamespace

import mcp.types as m
import pytest

from agentfsm import Agent, MisuseError, Permissions
from agentfsm.mcp import MemoryPins, PinFile
from agentfsm.mcp.trust.consent import ConsentGate, summarize_item
from agentfsm.mcp.trust.tool_policy import ToolPolicy, build_tool_text, describe_call
from agentfsm.testing import ScriptedModel, call, say
from tests.support.listing_server import listed, names, tool

HINTS = m.ToolAnnotations(read_only_hint=True, idempotent_hint=True, destructive_hint=False)


def declared(annotations=None, **terms):
    given = m.Tool(name="t", input_schema={"type": "object"}, annotations=annotations)
    gate = ConsentGate(server="demo", pins=MemoryPins(), consent=None, origin=None)
    return ToolPolicy(**terms).tool_options(gate, given)


def asks(options):
    """Whether a call needs approval while no person has approved all calls of the tool."""
    rule = options["requires_approval"]
    return rule if isinstance(rule, bool) else rule(SimpleNamespace())


@pytest.mark.parametrize(
    ("said", "read_only", "idempotent", "needs_approval"),
    [
        (None, False, False, True),
        ({}, False, False, True),
        ({"read_only_hint": True}, True, False, False),
        ({"destructive_hint": False}, False, False, False),
        ({"destructive_hint": False, "idempotent_hint": True}, False, True, False),
        ({"idempotent_hint": True}, False, True, True),
        ({"read_only_hint": True, "destructive_hint": True}, False, False, True),
    ],
)
def test_hints_that_are_believed(said, read_only, idempotent, needs_approval):
    """They count, with the specification's defaults; one that contradicts itself is taken at its worst."""
    found = declared(None if said is None else m.ToolAnnotations(**said), hints=True)
    assert (found["read_only"], found["idempotent"], asks(found)) == (read_only, idempotent, needs_approval)


@pytest.mark.parametrize("trusted", [True, False])
def test_hints_that_are_not_believed_loosen_nothing(trusted):
    """Also not those of a server whose results are trusted: each call needs a person's yes, and counts as an effect."""
    found = declared(HINTS, trusted=trusted)
    assert (found["read_only"], found["idempotent"], asks(found)) == (False, False, True)
    assert (found["sends_out"], found["irreversible"]) == (True, True)


@pytest.mark.parametrize("trusted", [True, False])
@pytest.mark.parametrize("hints", [True, False])
def test_results_are_untrusted_unless_the_server_is_trusted(trusted, hints):
    """To believe its hints is something else: a mail server that says truly that it reads returns a stranger's text."""
    found = declared(HINTS, trusted=trusted, hints=hints)
    assert (found["reads_untrusted"], found["sends_arguments"]) == (not trusted, not trusted)
    assert declared(HINTS, hints=hints, labels={"t": {"sends_out": False}})["sends_arguments"] is False


@pytest.mark.parametrize(
    ("said", "labels"),
    [
        ({"read_only_hint": True}, set()),
        ({"read_only_hint": True, "open_world_hint": False}, set()),
        ({"read_only_hint": True, "open_world_hint": True}, {"reads_untrusted", "sends_out"}),
        ({"destructive_hint": False}, {"sends_out"}),
        ({"destructive_hint": False, "open_world_hint": False}, set()),
        ({"destructive_hint": True, "open_world_hint": False}, {"irreversible"}),
        ({"open_world_hint": True}, {"reads_untrusted", "sends_out", "irreversible"}),
        ({}, {"sends_out", "irreversible"}),
    ],
)
def test_labels_by_hints(said, labels):
    """A tool that does not say better is an effect; one that reaches an open world reads and sends out."""
    found = declared(m.ToolAnnotations(**said), hints=True, trusted=True)
    assert {name for name in ("reads_untrusted", "sends_out", "irreversible") if found[name]} == labels


def test_hints_that_tighten_always_count():
    """A server that is not believed is still believed to its own disadvantage."""
    said = m.ToolAnnotations(read_only_hint=True, open_world_hint=True)
    assert declared(said, trusted=True)["reads_untrusted"] is True
    reader = declared(said, trusted=True, labels={"t": {"read_only": True}})
    assert (reader["sends_out"], reader["irreversible"]) == (True, False)


@pytest.mark.parametrize("glob", ["t", "demo__*"])
def test_rules_have_the_last_word_on_labels(glob):
    """By the server's own names, or those that models see; of several, the last that declares an option."""
    rules = {"*": {"data_level": "internal", "reads_private": True}, glob: {"read_only": True, "reads_private": False}}
    found = declared(labels={**rules, "other": {"sends_out": True}})
    assert (found["read_only"], found["data_level"], found["reads_private"]) == (True, "internal", False)
    assert (found["sends_out"], found["irreversible"], asks(found)) == (False, False, False)
    other = declared(HINTS, hints=True, trusted=True, labels={glob: {"irreversible": True, "sends_out": True}})
    assert (other["read_only"], other["sends_out"], other["irreversible"], asks(other)) == (False, True, True, True)


def test_confirm_overrides_the_hints():
    """Who is asked is said by the program: nobody, always, or by tool and arguments; no clear no is a yes."""
    assert declared(confirm=False)["requires_approval"] is False
    assert declared(HINTS, hints=True, confirm=True)["requires_approval"] is True
    by_amount = declared(confirm=lambda name, a: name == "t" and a.cents > 500)["requires_approval"]
    assert [by_amount(SimpleNamespace(cents=cents)) for cents in (500, 501)] == [False, True]
    assert declared(confirm=lambda _name, _a: None)["requires_approval"](SimpleNamespace()) is True


def test_whoever_approves_reads_plain_words():
    """Server, tool, title and arguments stand there; a hidden character in them is spelt out."""
    given = m.Tool(name="t", title="Pay", input_schema={"type": "object"})
    text = describe_call("bank", given, SimpleNamespace(to="Eve\u202e", cents=5))
    assert text == "Call the tool 't' (Pay) of the MCP server 'bank' with to=\"Eve\\u202e\", cents=5."
    assert len(describe_call("bank", given, SimpleNamespace(to="x" * 10_000))) < 700


@pytest.mark.parametrize(
    "wrong",
    [
        {"confirm": "yes"},
        {"allow": "read_*"},
        {"deny": (5,)},
        {"labels": ["send_*"]},
        {"labels": {"send_*": ["sends_out"]}},
        {"labels": {"send_*": {"sendsout": True}}},
        {"labels": {"send_*": {"sends_out": "yes"}}},
        {"labels": {"send_*": {"data_level": "secret"}}},
        {"labels": {"send_*": {"read_only": True, "irreversible": True}}},
        {"constraints": ["t"]},
        {"constraints": {"t": 5}},
        {"constraints": {"t": {"type": "array"}}},
        {"constraints": {"t": {"properties": {"a": {"type": "strin"}}}}},
    ],
)
def test_terms_that_make_no_sense(wrong):
    """They are refused at once, and not when a call comes."""
    with pytest.raises(MisuseError):
        ToolPolicy(**wrong)


async def test_access_lists_of_the_server_and_the_agent(tmp_path, caplog):
    """A server's lists are on its own names and the agent's on ours; both hold, and denial wins."""
    tools = [tool(name) for name in ("read_a", "read_b", "read_c", "write")]
    rules = {"reed_*": {"sends_out": True}, "demo__read_*": {"reads_private": True}}
    access = {"allow": ("read_*", "list_*"), "deny": ("read_b",), "labels": rules}
    server = listed(tmp_path, *tools).server(**access, confirm=False)
    model = ScriptedModel(say("", *(call(f"demo__{each['name']}") for each in tools)), say("done"))
    async with Agent(model, tools=[server], permissions=Permissions(deny=("demo__read_c",))) as agent:
        run = await agent.run("go")
    assert [each.name for each in server.tools] == ["demo__read_a", "demo__read_c"]
    assert [each.name for each in model.requests[0].tools if each.name.startswith("demo")] == ["demo__read_a"]
    outcomes = [each.outcome for each in run.messages if hasattr(each, "content")]
    assert outcomes == ["done", "failed", "failed", "failed"]
    assert server.admitted.unmatched_globs == ("list_*", "reed_*")
    assert "no tool that matches 'list_*'" in caplog.text


SELECT = {"properties": {"sql": {"type": "string", "pattern": r"^(?i:select)\b[^;]*$"}}, "required": ["sql"]}


async def test_constraints_on_arguments(tmp_path):
    """Arguments have to fit the program's schema, or its rule, beside the tool's own; the model is told why not."""
    rule = {"query": SELECT, "pay": lambda a: None if a.cents <= 500 else "at most 500 cents"}
    server = listed(tmp_path, tool("query"), tool("pay")).server(constraints=rule, confirm=False)
    calls = [
        call("demo__query", sql="SELECT 1"),
        call("demo__query", sql="SELECT 1; DROP TABLE t"),
        call("demo__query"),
        call("demo__pay", cents=500),
        call("demo__pay", cents=501),
    ]
    async with Agent(ScriptedModel(say("", *calls), say("done")), tools=[server]) as agent:
        run = await agent.run("go")
    found = [each for each in run.messages if hasattr(each, "content")]
    assert [each.outcome for each in found] == ["done", "failed", "failed", "done", "failed"]
    assert "sql: should match" in found[1].content
    assert "sql: required, but missing" in found[2].content
    assert "at most 500 cents" in found[4].content


async def test_a_constraint_on_no_tool(tmp_path):
    """A constraint that protects nothing is a mistake, told as soon as the tools are known."""
    server = listed(tmp_path, tool("query")).server(constraints={"qery": SELECT})
    with pytest.raises(MisuseError, match="no tool 'qery'"):
        await names(server)


def rule(gate, name, **hints):
    listed = m.Tool(name=name, input_schema={"type": "object"}, annotations=m.ToolAnnotations(**hints))
    return ToolPolicy().tool_options(gate, listed)["requires_approval"]


def file_gate(tmp_path):
    return ConsentGate(server="demo", pins=PinFile(tmp_path / "pins.json"), consent=None, origin=None)


@pytest.mark.parametrize(
    ("scope", "covered"),
    [("tool", ["look"]), ("reading", ["look", "list"])],
)
async def test_an_approval_for_all_calls_is_remembered(tmp_path, scope, covered):
    """It is stored with the pin, and covers this tool, or those of the server that only read, as it says."""
    gate = file_gate(tmp_path)
    assert rule(gate, "look", read_only_hint=True).scopes() == ("tool", "reading")
    assert rule(gate, "wipe").scopes() == ("tool",)
    rule(gate, "look", read_only_hint=True).allow(scope)
    later = file_gate(tmp_path)  # another process
    await later.review({})
    rules = {
        "look": rule(later, "look", read_only_hint=True),
        "list": rule(later, "list", read_only_hint=True),
        "wipe": rule(later, "wipe"),
        "both": rule(later, "both", read_only_hint=True, destructive_hint=True),
    }
    assert [name for name, each in rules.items() if not each(SimpleNamespace())] == covered
    assert rule(later, "look", read_only_hint=True, title="new")(SimpleNamespace()) is (scope == "tool")
    later.clear_standing()
    again = file_gate(tmp_path)
    await again.review({})
    assert rule(again, "look", read_only_hint=True)(SimpleNamespace()) is True


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": None},
        {"properties": ["a"]},
        {"properties": {"a": {}}, "required": None},
        {"properties": {"a": {}}, "required": 3},
    ],
)
def test_a_line_for_a_tool_with_an_odd_schema(schema):
    """A server cannot break the question."""
    listed = m.Tool(name="t", description="x\n  y(): fake", input_schema=schema)
    line = summarize_item("tool t", build_tool_text(listed))
    assert line.startswith("  t(")
    assert "\n" not in line
