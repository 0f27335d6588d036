"""Choosing among many tools: by number, by words, by the model, and what is done where none of it works."""

import math
from types import MappingProxyType

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentfsm import MisuseError, ModelError, Usage
from agentfsm.context import AllTools, AutoSelect, BySimilarity, TwoStage
from agentfsm.context.selection import (
    DEFAULT_PICKS,
    DEFAULT_TOP,
    MAX_UNCHOSEN,
    STAGE_ONE_BYTES,
    TASK_CHARS,
    _find_names,
)
from agentfsm.ports import Scorer, ToolDefinition, ToolSelector
from agentfsm.ports.model import NAMES_CHARS, SENTENCE_CHARS

COST = Usage(input_tokens=7, output_tokens=2)


def tool(name, description="", parameters=MappingProxyType({"type": "object", "properties": {}})):
    return ToolDefinition(name=name, description=description, parameters=parameters)


def tools(count):
    """Return so many tools that differ in one word each."""
    return [tool(f"tool_{n}", f"Handles subject{n}.") for n in range(count)]


def names(numbers):
    return tuple(f"tool_{n}" for n in numbers)


class Answering:
    """A model that answers in advance, and remembers what it was asked."""

    def __init__(self, reply):
        self.reply = reply
        self.asked = []

    async def __call__(self, instructions, question):
        self.asked.append((instructions, question))
        if isinstance(self.reply, Exception):
            raise self.reply
        return self.reply, COST

    @property
    def lines(self):
        """The tools as they were listed."""
        return self.asked[0][0].partition("what it does\n")[2].splitlines()


async def nobody(_instructions, _question):
    raise AssertionError("the model was asked")


class Scripted(Scorer):
    """Gives these scores, or raises this, and remembers what it was given."""

    def __init__(self, scores):
        self.given = scores
        self.seen = []

    async def scores(self, query, texts):
        self.seen.append((query, list(texts)))
        if isinstance(self.given, BaseException):
            raise self.given
        return self.given(len(texts)) if callable(self.given) else self.given


@pytest.mark.parametrize(
    ("count", "wanted", "how", "chosen", "asked"),
    [
        (1, False, "all", 1, 0),
        (20, False, "all", 20, 0),
        (21, True, "similarity", DEFAULT_TOP, 0),
        (50, True, "similarity", DEFAULT_TOP, 0),
        (51, True, "two_stage", 1, 1),
    ],
)
async def test_the_number_decides_how(count, wanted, how, chosen, asked):
    """Up to 20 all, up to 50 by similarity, beyond that in two stages."""
    model = Answering('["tool_0"]')
    selector = AutoSelect()
    selection = await selector.select("subject0", tools(count), model)
    assert selector.wants(count) is wanted
    assert (selection.how, len(selection.tools), len(model.asked)) == (how, chosen, asked)
    assert selection.usage == (COST if asked else Usage())


async def test_every_part_of_the_default_can_be_set():
    """Thresholds, scorer, and numbers; two stages may begin where similarity would."""
    selector = AutoSelect(similar_above=2, two_stage_above=4, picks=1, similarity=BySimilarity(top=2))
    model = Answering("tool_1, tool_2")
    assert [selector.wants(count) for count in (2, 3)] == [False, True]
    assert (await selector.select("subject2", tools(3), nobody)).tools == names((0, 2))
    assert (await selector.select("subject2", tools(5), model)).tools == names([1])
    early = AutoSelect(similar_above=20, two_stage_above=5)
    assert [early.wants(count) for count in (5, 6)] == [False, True]
    assert (await early.select("subject2", tools(6), model)).how == "two_stage"


async def test_all_tools_asks_for_no_choice():
    """However many there are."""
    selector: ToolSelector = AllTools()
    selection = await selector.select("", tools(300), nobody)
    assert not selector.wants(300)
    assert (selection.tools, selection.how) == (names(range(300)), "all")


async def test_similarity_offers_the_nearest_in_the_order_of_registration():
    """What the task names is among them, and the request begins as it did before."""
    selection = await BySimilarity(top=3).select("subject9 and subject4, then subject7", tools(12), nobody)
    assert (selection.tools, selection.how) == (names((4, 7, 9)), "similarity")


async def test_among_equals_the_first_registered_win():
    """So the same task always gets the same tools."""
    selection = await BySimilarity(top=3).select("subject9", tools(12), nobody)
    assert selection.tools == names((0, 1, 9))


async def test_a_tool_is_found_by_all_that_its_definition_says():
    """Name, description, and of its parameters name, description and values, also of nested ones."""
    schema = {
        "type": "object",
        "properties": {
            "wanted": {"type": "string", "description": "Where the harbour lies.", "enum": ["ferry", 5]},
            "parts": {"type": "array", "items": ({"anyOf": [{"description": "wheel"}]},)},
            "description": {"type": "string"},
        },
        "$defs": MappingProxyType({"Part": {"properties": {"colour": {"description": "paint"}}}}),
    }
    told = [tool("a"), tool("b"), tool("find_boat", "Knows ships.", schema)]
    for word in ("boat", "ships", "wanted", "harbour", "ferry", "parts", "wheel", "colour", "paint"):
        assert (await BySimilarity(top=1).select(word, told, nobody)).tools == ("find_boat",), word


async def test_a_scorer_gets_the_name_on_the_first_line_and_no_more_than_it_can_use():
    """A pasted document is shown by its head and its tail, a huge definition by its head."""
    scorer = Scripted(range)
    task = "sum up: " + "x" * 100_000 + " in French"
    await BySimilarity(top=1, scorer=scorer).select(task, [*tools(2), tool("big", "y" * 100_000)], nobody)
    ((query, texts),) = scorer.seen
    assert query.startswith("sum up: xx")
    assert query.endswith("xx in French")
    assert len(query) < TASK_CHARS + 10
    assert texts[0].splitlines()[:2] == ["tool_0", "Handles subject0."]
    assert len(texts[2]) <= 8_000


class BrokenTextError(Exception):
    """An error that cannot be told."""

    def __str__(self):
        raise ValueError


@pytest.mark.parametrize(
    ("scores", "why"),
    [
        (ConnectionError("no route"), "the scorer raised ConnectionError: no route"),
        (BrokenTextError(), "the scorer raised BrokenTextError: (its text cannot be read)"),
        (ExceptionGroup("two", [OSError("a"), OSError("b")]), "the scorer raised OSError: a; OSError: b"),
        (["high"] * 30, "the scorer raised ValueError: could not convert string to float: 'high'"),
        (None, "the scorer raised TypeError: 'NoneType' object is not iterable"),
        ([1.0], "the scorer gave 1 scores for 30 tools"),
        (lambda count: [math.nan, *range(count - 1)], "the scorer gave NaN"),
        (lambda count: [0.5] * count, "no tool is nearer to the task than another"),
    ],
)
async def test_a_scorer_that_tells_nothing_leaves_all_tools(scores, why):
    """Nothing that a scorer does ends the run, and the journal can tell what it did."""
    selection = await BySimilarity(scorer=Scripted(scores)).select("task", tools(30), nobody)
    assert selection.tools == names(range(30))
    assert selection.how == f"all: {why}"


async def test_what_is_offered_unchosen_has_a_bound():
    """Providers refuse a request with more."""
    selection = await BySimilarity().select("no word in common", tools(MAX_UNCHOSEN + 1), nobody)
    assert selection.tools == names(range(MAX_UNCHOSEN))
    assert selection.how == "the first 128: no tool is nearer to the task than another"
    assert (await BySimilarity().select("no word in common", tools(MAX_UNCHOSEN), nobody)).how.startswith("all: ")


async def test_infinite_scores_rank():
    """A scorer may say never, and always."""
    selector = BySimilarity(top=1, scorer=Scripted([-math.inf, 0, math.inf]))
    assert (await selector.select("task", tools(3), nobody)).tools == ("tool_2",)


async def test_where_there_is_nothing_to_leave_out_nothing_is_scored():
    """Up to `top` tools are all of them, also where they are asked for as a fallback."""
    selection = await BySimilarity(top=3, scorer=Scripted(AssertionError())).select("task", tools(3), nobody)
    assert (selection.tools, selection.how) == (names(range(3)), "all")


@pytest.mark.parametrize("selector", [BySimilarity(scorer=Scripted(MisuseError("no key"))), TwoStage()])
async def test_misuse_is_told_to_the_developer(selector):
    """A scorer or model that is set up wrongly is a bug, and not to be worked around."""
    with pytest.raises(MisuseError, match="no key"):
        await selector.select("task", tools(30), Answering(MisuseError("no key")))


async def test_cancelling_is_no_failure_of_the_scorer():
    """A choice that is cut off ends, and falls back on nothing."""

    class Hanging(Scorer):
        async def scores(self, query, texts):
            scope.cancel()
            await anyio.sleep_forever()

    with anyio.CancelScope() as scope:
        await BySimilarity(scorer=Hanging()).select("task", tools(30), nobody)
    assert scope.cancelled_caught


async def test_stage_one_shows_a_line_per_tool_and_asks_for_names():
    """Name, parameters, first sentence; the task stands apart, so that the list can be cached."""
    schema = {"type": "object", "properties": {"city": {}, "days": {}}}
    given = [
        tool("weather", "  Tells the\n  weather, e.g. rain. Needs a city.\n\nMore.", schema),
        tool("天", "查天气。还有更多。"),
        tool("list", "Lists\n\nArgs:\n  none"),
        tool("odd", "", {"properties": True}),
        tool("long", "a" * 1_000, {"properties": dict.fromkeys(["p" * 1_000])}),
        *tools(5),
    ]
    model = Answering('["weather"]')
    await TwoStage(picks=4).select("Is it wet?", given, model)
    ((instructions, question),) = model.asked
    assert model.lines[:4] == [
        "weather(city?, days?): Tells the weather, e.g. rain.",
        "天(): 查天气。",
        "list(): Lists",
        "odd()",
    ]
    assert model.lines[4] == f"long({'p' * NAMES_CHARS}...): {'a' * SENTENCE_CHARS}..."
    assert len(model.lines) == len(given)
    assert "at most 4" in instructions
    assert "wet" not in instructions
    assert question == "The task:\nIs it wet?"


KNOWN = ("get_weather", "read-file", "search", "a", "send_mail", "Read", "_own")


@pytest.mark.parametrize(
    ("reply", "found"),
    [
        ('["search", "get_weather"]', ["search", "get_weather"]),
        ("```json\n[\n  'read-file',\n  'search'\n]\n```", ["read-file", "search"]),
        ('{"tools": ["search", "search"]}', ["search"]),
        ('[{"name": "search"}, {"name": "send_mail"}]', ["search", "send_mail"]),
        ('["search", "get_wea', ["search"]),
        ("Perhaps [search] or [get_weather]; no: [send_mail].", ["send_mail"]),
        ("I'd use `send_mail` after a `search`.", ["send_mail", "search"]),
        ("You need a tool: **search**", ["search"]),
        (
            "- search: search for a file, then send_mail\n- get_weather(a, b) - a search\n* send_mail",
            ["search", "get_weather", "send_mail"],
        ),
        ("1. get_weather\n2.search\n3) read-file", ["get_weather", "search", "read-file"]),
        ("search, get_weather and send_mail.", ["search", "get_weather", "send_mail"]),
        ("tools: search, send_mail", ["search", "send_mail"]),
        ("使用get_weather工具、search。", ["get_weather", "search"]),
        ("_search_, -send_mail-", ["search", "send_mail"]),
        ("get_weather.v2 my.search functions/search getweather Get_Weather get-weather searches read_file", []),
        ("_own", ["_own"]),
        ("own read", []),
        ("[1] [none] ``", []),
        ("", []),
    ],
)
def test_names_are_read_from_any_format(reply, found):
    """Lists, bullets, commas, marks and prose; what is not exactly a name does not count, and no name twice."""
    assert _find_names(reply, KNOWN) == found


@given(st.text(alphabet='[]()`"*:- \nab_.1,'))
def test_any_reply_can_be_read(reply):
    """Whatever a model writes, only names come out, each once."""
    found = _find_names(reply, ("a", "b_1"))
    assert set(found) <= {"a", "b_1"}
    assert len(found) == len(set(found))


@pytest.mark.parametrize("mark", ["[", "(", "`", '"', "**", "1.", "a.", "- "])
def test_a_hostile_reply_is_read_in_a_time_that_grows_with_its_length(mark):
    """Half a million marks in a row; a reader that goes back for each would not come to an end."""
    assert _find_names(mark * 500_000, ("get_weather",)) == []


async def test_the_first_picks_are_offered_in_the_order_of_registration():
    """The model's order decides who is in, the agent's who stands where."""
    reply = ", ".join(names((9, 3, 40, 1, 50, 2, 5)))
    selection = await TwoStage().select("task", tools(60), Answering(reply))
    assert selection.tools == names((1, 3, 9, 40, 50))
    assert len(selection.tools) == DEFAULT_PICKS
    assert (selection.how, selection.usage) == ("two_stage", COST)


async def test_a_model_that_names_none_leaves_it_to_similarity():
    """What asking cost is still told."""
    selection = await TwoStage().select("subject30", tools(60), Answering("I cannot help with that."))
    assert selection.how == "similarity: the model named none"
    assert selection.tools == names((*range(19), 30))
    assert selection.usage == COST


@pytest.mark.parametrize("usage", [None, COST])
async def test_a_model_that_cannot_be_asked_leaves_it_to_similarity(usage):
    """An outage costs the choice and not the run; what was paid for nothing is told."""
    error = ModelError("overloaded")
    error.usage = usage
    selection = await TwoStage().select("subject30", tools(60), Answering(error))
    assert selection.how == "similarity: the model could not be asked: ModelError: overloaded"
    assert "tool_30" in selection.tools
    assert selection.usage == (usage or Usage())


async def test_both_failures_are_told():
    """Where the fallback falls back as well, each says why."""
    selection = await TwoStage().select("nothing", tools(60), Answering(""))
    assert selection.how == "all: no tool is nearer to the task than another; the model named none"
    few = await TwoStage().select("nothing", tools(6), Answering(""))
    assert few.how == "all: the model named none"


async def test_too_long_a_list_is_cut_to_the_nearest():
    """With 1,000 tools stage one stays bounded, and holds what the task speaks of, in the order of registration."""
    many = [tool(f"tool_{n}", f"Handles subject{n} {'和' * 30}.") for n in range(1_000)]
    model = Answering("tool_990, tool_7, tool_800")
    selection = await TwoStage().select("subject990 and subject7", many, model)
    listed = [int(line.partition("(")[0].removeprefix("tool_")) for line in model.lines]
    assert listed == sorted(listed)
    assert {7, 990} < set(listed)
    assert 800 not in listed
    assert STAGE_ONE_BYTES - 200 < len("\n".join(model.lines).encode()) <= STAGE_ONE_BYTES
    assert selection.tools == names((7, 990))
    assert selection.how == f"two_stage: among {len(listed)} of 1000"


async def test_too_long_a_list_that_nothing_ranks_is_cut_behind():
    """A scorer that fails leaves the model the first tools to choose among."""
    many = [tool(f"tool_{n}", "word " * 50) for n in range(1_000)]
    model = Answering("tool_3")
    selector = TwoStage(similarity=BySimilarity(scorer=Scripted(OSError())))
    assert (await selector.select("task", many, model)).tools == ("tool_3",)
    assert [line.partition("(")[0] for line in model.lines] == list(names(range(len(model.lines))))


def test_two_stages_and_similarity_want_more_than_they_offer():
    """A choice among as many as are offered would be none."""
    assert [TwoStage(picks=3).wants(count) for count in (3, 4)] == [False, True]
    assert [BySimilarity(top=7).wants(count) for count in (7, 8)] == [False, True]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: BySimilarity(top=0), r"BySimilarity\(top=0\): give a whole number, 1 or more"),
        (lambda: TwoStage(picks=-1), r"TwoStage\(picks=-1\): give a whole number, 1 or more"),
        (lambda: AutoSelect(picks="3"), r"AutoSelect\(picks='3'\): give a whole number"),
        (lambda: AutoSelect(similar_above=-1), r"AutoSelect\(similar_above=-1\): give a whole number, 0 or more"),
        (lambda: AutoSelect(two_stage_above=-1), r"AutoSelect\(two_stage_above=-1\)"),
    ],
)
def test_a_number_that_leaves_no_tool_is_refused(make, text):
    """It is told when the selector is made."""
    with pytest.raises(MisuseError, match=text):
        make()
