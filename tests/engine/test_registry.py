"""The registry: tools by name, what is kept of them, and what a model or a vendor's client is given."""

from types import MappingProxyType

import attrs
import pytest

from agentfsm import DuplicateToolError, Level, Limiter, MisuseError, ToolRegistry, tool


@tool(read_only=True, tags=["web", "weather"], limit=3)
def get_weather(city: str, unit: str = "celsius") -> str:
    """Tells the weather of a city. Knows cities only.

    Args:
        city: Its name.
        unit: Of the temperature.
    """
    return city + unit


@tool(tags=["db"], poll=True, requires_approval=lambda a: a.all)
def delete_rows(all: bool) -> str:  # noqa: A002  a name that a model understands
    """Delete rows"""  # noqa: D415  as people write
    return ""


@tool(tags=["db", "web", "other"], permission="admin", strict=True)
def export() -> str:
    """Export, e.g. to a file! And more."""
    return ""


TOOLS = (get_weather, delete_rows, export)


@pytest.fixture
def registry():
    return ToolRegistry.of(TOOLS)


def test_tools_are_found_by_name_in_their_order(registry):
    """Names, membership, length, iteration, and the name most like another."""
    assert registry.names == ("get_weather", "delete_rows", "export")
    assert tuple(registry) == TOOLS
    assert len(registry) == 3
    assert "export" in registry
    assert "import" not in registry
    assert registry.get("export") is export
    assert registry.get("import") is None
    assert registry.nearest("get_wether") == "get_weather"
    assert registry.nearest("xyz") is None


def test_a_registry_is_taken_as_it_is(registry):
    """So that what is registered later is known wherever it was given."""
    assert ToolRegistry.of(registry) is registry


def test_what_is_no_tool_is_refused_and_changes_nothing(registry):
    """Functions and tools, each name once."""
    with pytest.raises(MisuseError, match="not int"):
        registry.register(17)
    with pytest.raises(DuplicateToolError, match="export_2"):
        registry.register(export)
    assert (len(registry), registry.version) == (3, 3)


def test_a_function_becomes_a_tool(registry):
    """Without declarations."""

    def plain(word: str) -> str:
        """Say a word."""
        return word

    added = registry.register(plain)
    assert registry.get("plain") is added
    assert (added.function, added.read_only) == (plain, False)


def test_what_is_kept_follows_each_change(registry):
    """Definitions, polls and those that ask; the version never comes back."""
    assert [each.name for each in registry.definitions] == list(registry.names)
    assert (registry.polling_tools, registry.interactive_tools, registry.version) == (
        {"delete_rows"},
        {"delete_rows"},
        3,
    )
    assert registry.unregister("delete_rows") is delete_rows
    assert [each.name for each in registry.definitions] == ["get_weather", "export"]
    assert (registry.polling_tools, registry.interactive_tools, registry.version) == (set(), set(), 4)
    registry.register(delete_rows)
    assert registry.names == ("get_weather", "export", "delete_rows")
    assert [each.name for each in registry.definitions] == list(registry.names)
    assert (registry.polling_tools, registry.interactive_tools, registry.version) == (
        {"delete_rows"},
        {"delete_rows"},
        5,
    )


def test_an_approval_is_asked_also_where_the_function_reads_as_false(registry):
    """Only `False` means that nobody is ever asked."""

    class Never:
        def __call__(self, a):
            return True

        def __bool__(self):
            return False

    registry.unregister("export")
    registry.register(attrs.evolve(export, requires_approval=Never()))
    assert registry.interactive_tools == {"delete_rows", "export"}


def test_a_tool_that_is_not_there_cannot_be_removed(registry):
    """The error names what it may have been."""
    with pytest.raises(MisuseError, match=r"unknown tool 'delete_row': did you mean 'delete_rows'\?"):
        registry.unregister("delete_row")
    with pytest.raises(MisuseError, match="`names` lists the tools"):
        registry.unregister("xyz" * 1_000)
    assert registry.version == 3


@pytest.mark.parametrize(
    ("wanted", "names"),
    [
        ({}, ["get_weather", "delete_rows", "export"]),
        ({"names": ["export", "get_*"]}, ["get_weather", "export"]),
        ({"names": []}, []),
        ({"names": ["GET_*", "nobody"]}, ["get_weather"]),
        ({"tags": ("weather", "db")}, ["get_weather", "delete_rows", "export"]),
        ({"tags": {"weather", "none"}}, ["get_weather"]),
        ({"tags": ()}, []),
        ({"permission": "read"}, ["get_weather"]),
        ({"permission": Level.WRITE}, ["get_weather", "delete_rows"]),
        ({"names": ["*e*"], "tags": ["db"], "permission": "write"}, ["delete_rows"]),
    ],
)
def test_a_filter_takes_what_matches_all_that_is_given(registry, wanted, names):
    """Any of the names, any of the tags, up to the level; in the order of the whole, and the same tools."""
    part = registry.filter(**wanted)
    assert list(part.names) == names
    assert all(part.get(name) is registry.get(name) for name in names)
    assert len(registry) == 3


def test_a_filter_that_is_none_is_refused(registry):
    """A string would be read as its letters, and `*` among them would match everything."""
    for wanted in ({"names": "get_*"}, {"tags": "db"}, {"permission": "owner"}):
        with pytest.raises(MisuseError):
            registry.filter(**wanted)


def test_a_part_goes_its_own_way(registry):
    """What is removed from it stays in the whole."""
    part = registry.filter(tags=["db"])
    part.unregister("export")
    assert "export" in registry


def test_calls_pass_the_limit_of_their_tool_and_of_its_tags():
    """The tool's own first, then those of tags, the oldest first, the same objects always; some tags have none."""
    registry = ToolRegistry(tag_limits={"web": 5, "db": 2, "unused": 1})
    for each in TOOLS:
        registry.register(each)
    web, db = registry.tag_limits["web"], registry.tag_limits["db"]
    assert (web.concurrency, db.concurrency) == (5, 2)
    assert registry.limiters_for(get_weather) == (get_weather.limiter, web)
    assert registry.limiters_for(delete_rows) == (db,)
    assert registry.limiters_for(export) == (web, db)
    crossed = ToolRegistry(tag_limits={"db": web, "web": db})
    assert crossed.limiters_for(export) == (web, db)
    assert ToolRegistry(tag_limits={"db": web, "web": web}).limiters_for(export) == (web,)
    assert get_weather.limiter.concurrency == 3
    assert ToolRegistry.of(TOOLS).limiters_for(export) == ()


def test_a_part_shares_the_limits_of_the_whole():
    """Two agents with parts of one registry do not have twice the calls in flight."""
    registry = ToolRegistry(tag_limits={"db": 2})
    registry.register(delete_rows)
    part = registry.filter()
    assert part.limiters_for(delete_rows) == registry.limiters_for(delete_rows) == (registry.tag_limits["db"],)
    mine = Limiter(1)
    assert ToolRegistry(tag_limits={"db": mine}).tag_limits["db"] is mine


def test_a_call_on_its_way_keeps_its_limits_when_its_tool_is_removed():
    """It still has to give back what it took."""
    registry = ToolRegistry(tag_limits={"db": 2})
    registry.register(delete_rows)
    before = registry.limiters_for(delete_rows)
    registry.unregister("delete_rows")
    assert registry.limiters_for(delete_rows) == before == (registry.tag_limits["db"],)


@pytest.mark.parametrize(
    ("limits", "wish"),
    [
        (None, r"tag_limits=None\): give limits by tag"),
        ([1], r"tag_limits=\[1\]\): give limits by tag"),
        ({1: 2}, r"tag_limits=\{1: \.\.\.\}\): give a tag, which is a str"),
        ({"db": 0}, r"tag_limits=\{'db': 0\}\): give a whole number, 1 or more"),
        ({"db": "2"}, r"tag_limits=\{'db': '2'\}\): give a whole number"),
        ({"db": True}, r"tag_limits=\{'db': True\}\): give a whole number"),
        ({"db": None}, r"tag_limits=\{'db': None\}\): give a whole number"),
        ({"db": Limiter}, r"tag_limits=\{'db': <class .*Limiter'>\}\): give a whole number.* or a limiter"),
    ],
    ids=str,
)
def test_a_limit_that_makes_no_sense_is_refused(limits, wish):
    """The error names the tag, and says which limits there are."""
    with pytest.raises(MisuseError, match=rf"ToolRegistry\({wish}"):
        ToolRegistry(tag_limits=limits)


def test_a_summary_has_a_line_for_each_tool(registry):
    """Name, parameters with those marked that may be left out, and the first sentence."""
    assert registry.summary().splitlines() == [
        "get_weather(city, unit?): Tells the weather of a city.",
        "delete_rows(all): Delete rows",
        "export(): Export, e.g. to a file!",
    ]
    assert ToolRegistry().summary() == ""


@pytest.mark.parametrize(
    ("description", "line"),
    [
        ("", "export()"),
        ("  \n ", "export()"),
        ("Writes version 1.5 of\n  a file. Then ends.", "export(): Writes version 1.5 of a file."),
        ("Exports\n\nAll of it.", "export(): Exports"),
        ("查询天气。返回温度。", "export(): 查询天气。"),
        ("x" * 1_000, f"export(): {'x' * 200}..."),
    ],
)
def test_a_summary_is_short_whatever_a_description_is_like(description, line):
    """One line of bounded length for each tool."""
    registry = ToolRegistry.of([attrs.evolve(export, description=description)])
    assert registry.summary() == line


def test_definitions_for_openai(registry):
    """As its client takes them; strict only where it was asked for."""
    first, _, last = registry.for_openai()
    assert first == {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Tells the weather of a city. Knows cities only.",
            "parameters": get_weather.parameters,
        },
    }
    assert last["function"]["strict"] is True


def test_definitions_for_anthropic(registry):
    """As its client takes them; strict only where it was asked for."""
    first, _, last = registry.for_anthropic()
    assert first == {
        "name": "get_weather",
        "description": "Tells the weather of a city. Knows cities only.",
        "input_schema": get_weather.parameters,
    }
    assert last["strict"] is True


def test_what_a_vendor_is_given_may_be_changed():
    """Plain dicts and lists, at any depth, and no part of the tool's own."""
    schema = MappingProxyType({"type": "object", "properties": MappingProxyType({}), "required": ("a",)})
    registry = ToolRegistry.of([attrs.evolve(export, parameters=schema)])
    given = registry.for_openai()[0]["function"]["parameters"]
    assert given == {"type": "object", "properties": {}, "required": ["a"]}
    given["properties"]["x"] = {}
    assert registry.for_anthropic()[0]["input_schema"]["properties"] == {}
