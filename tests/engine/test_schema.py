"""A function becomes a description, a JSON Schema and a validator."""

from __future__ import annotations

import dataclasses
import functools
import json
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, NamedTuple, Optional, TypeVar
from uuid import UUID

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import AfterValidator, BaseModel, Field, field_validator
from typing_extensions import TypedDict

from agentfsm import ArgumentsError, MisuseError
from agentfsm.tools.schema.signature import FunctionSignature, build_function_signature

Deps = TypeVar("Deps")


@attrs.frozen
class Context(Generic[Deps]):
    deps: Deps


class Color(Enum):
    RED = "red"
    BLUE = "blue"


@attrs.frozen
class Point:
    """A place."""

    x: int = attrs.field(validator=attrs.validators.instance_of(int))
    _y: int = attrs.field(default=0, validator=attrs.validators.lt(10))
    near: list[Point] = attrs.field(factory=list, kw_only=True)
    length: int = attrs.field(init=False, default=2)


@attrs.frozen
class Box(Generic[Deps]):
    content: Deps


@attrs.frozen
class Untyped:
    x = attrs.field()  # type: ignore[var-annotated]


class Cat(BaseModel):
    meow: int
    title: str = "Sir"


class Dog(BaseModel):
    bark: int

    @field_validator("bark")
    @classmethod
    def _check(cls, value: int) -> int:
        if value > 9:
            raise ValueError("too loud, neighbours complain")
        return value


@dataclasses.dataclass
class Flat:
    rooms: float
    cat: Cat | None = None


class Odd(BaseModel):
    maker: Callable[[], int]


class Marked(BaseModel):
    mark: Any = object()


class Row(TypedDict):
    key: str


class Pair(NamedTuple):
    left: int
    right: int = 0


def sign(function: Callable[..., Any]) -> FunctionSignature:
    return build_function_signature(function, context_type=Context, name="search")


def typed(hint: Any) -> Callable[..., None]:
    """Return a function whose parameter x has the hint."""

    def function(x: Any) -> None: ...

    function.__annotations__["x"] = hint
    return function


def refusal(function: Callable[..., Any], text: str) -> str:
    """Return what the model is told."""
    with pytest.raises(ArgumentsError) as caught:
        sign(function).bind(text)
    return str(caught.value)


def search(  # noqa: D417
    query: str,
    limit: Annotated[int, Field(ge=1, le=50)] = 5,
    *,
    sort: Literal["asc", "desc"] = "asc",
) -> Nope:  # type: ignore[name-defined]  # noqa: F821  what it returns need not resolve
    """Search the knowledge base.

    Every word counts: all of them.

    Args:
        query: Words to look for,
            in any order.
        limit (int): How many results, 1 to 50.

    Returns:
        What was found.
    """


class TestSchema:
    def test_the_docstring_and_hints_become_the_definition(self) -> None:
        """Description without sections, parameters with theirs, bounds, values, defaults; no titles."""
        signature = sign(search)
        assert signature.description == "Search the knowledge base.\n\nEvery word counts: all of them."
        assert signature.parameters == {
            "type": "object",
            "properties": {
                "query": {"type": "string", "description": "Words to look for, in any order."},
                "limit": {
                    "type": "integer",
                    "minimum": 1,
                    "maximum": 50,
                    "default": 5,
                    "description": "How many results, 1 to 50.",
                },
                "sort": {"type": "string", "enum": ["asc", "desc"], "default": "asc"},
            },
            "required": ["query"],
            "additionalProperties": False,
        }

    def test_nested_types_are_defined_once_and_have_no_titles(self) -> None:
        """Models and attrs classes nest, recurse and describe themselves; a field called title stays."""

        def function(place: Point, cat: Cat, title: str) -> None: ...

        assert sign(function).parameters == {
            "$defs": {
                "Point": {
                    "type": "object",
                    "description": "A place.",
                    "properties": {
                        "x": {"type": "integer"},
                        "y": {"type": "integer", "default": 0},
                        "near": {"type": "array", "items": {"$ref": "#/$defs/Point"}},
                    },
                    "required": ["x"],
                    "additionalProperties": False,
                },
                "Cat": {
                    "type": "object",
                    "properties": {"meow": {"type": "integer"}, "title": {"type": "string", "default": "Sir"}},
                    "required": ["meow"],
                },
            },
            "type": "object",
            "properties": {
                "place": {"$ref": "#/$defs/Point"},
                "cat": {"$ref": "#/$defs/Cat"},
                "title": {"type": "string"},
            },
            "required": ["place", "cat", "title"],
            "additionalProperties": False,
        }

    def test_each_kind_of_class_and_parameter_has_a_schema(self) -> None:
        """Dataclass, TypedDict, NamedTuple, enum, union, an optional one, and parameters that go by keyword only."""

        def function(
            flat: Flat, row: Row, *, pair: Pair, color: Color, either: Cat | int, when: date | None = None
        ) -> None: ...

        signature = sign(function)
        definitions: Any = signature.parameters["$defs"]
        assert {name: part["type"] for name, part in definitions.items()} == {
            "Flat": "object",
            "Row": "object",
            "Pair": "array",
            "Color": "string",
            "Cat": "object",
        }
        assert definitions["Color"]["enum"] == ["red", "blue"]
        assert definitions["Flat"]["required"] == ["rooms"]
        assert signature.parameters["properties"] == {
            "flat": {"$ref": "#/$defs/Flat"},
            "row": {"$ref": "#/$defs/Row"},
            "pair": {"$ref": "#/$defs/Pair"},
            "color": {"$ref": "#/$defs/Color"},
            "either": {"anyOf": [{"$ref": "#/$defs/Cat"}, {"type": "integer"}]},
            "when": {"anyOf": [{"type": "string", "format": "date"}, {"type": "null"}], "default": None},
        }
        assert signature.parameters["required"] == ["flat", "row", "pair", "color", "either"]
        sent = {"flat": {"rooms": 1}, "row": {"key": "k"}, "pair": [1, 2], "color": "red", "either": {"meow": 1}}
        taken = signature.bind(json.dumps(sent))[1]
        assert list(taken) == list(sent)
        assert (taken["pair"], taken["either"]) == (Pair(1, 2), Cat(meow=1))

    @pytest.mark.parametrize(
        "doc",
        [
            ":class:`Index` is searched.\n\nArgs:\n    a: The first.\n    b: The first.",
            "Search.\n\nParameters\n----------\na, b : int, optional\n    The\n    first.\n\nNotes\n-----\nNone.",
            "Search.\n\n:param a: The first.\n:param int b: The\n    first.\n:returns: Things.\n:raises ValueError: x",
        ],
        ids=["google", "numpy", "sphinx"],
    )
    def test_each_style_of_docstring_is_read(self, doc: str) -> None:
        """Google, NumPy (two names in one line too) and Sphinx all give descriptions on one line."""

        def function(a: int, b: int) -> None: ...

        function.__doc__ = doc
        signature = sign(function)
        assert signature.description == doc.partition("\n")[0]
        properties: Any = signature.parameters["properties"]
        assert [properties[name]["description"] for name in "ab"] == ["The first.", "The first."]

    @pytest.mark.parametrize("doc", [None, "", "  ", ":", "x>..a----Args:\n:    :->ParametersParameters:aparam1.0>:"])
    def test_no_docstring_or_a_strange_one_is_no_fault(self, doc: str | None) -> None:
        """The description may be empty, and a docstring that a parser trips over is only prose."""

        def function(deprecated: int) -> None: ...

        function.__doc__ = doc
        assert sign(function).parameters["required"] == ["deprecated"]

    def test_annotated_prevails_over_the_docstring(self) -> None:
        """Who writes Field(description=...) means it; an alias is the name that the model uses."""

        def function(from_: Annotated[str, Field(alias="from", description="Mine.")], b: int = 0) -> None:
            """S.

            Args:
                from_: Not mine.
                b: The docstring's.
            """

        signature = sign(function)
        assert signature.parameters["properties"] == {
            "from": {"type": "string", "description": "Mine."},
            "b": {"type": "integer", "description": "The docstring's.", "default": 0},
        }
        assert signature.bind('{"from": "here"}') == ((), {"from_": "here"})

    def test_any_name_is_a_name(self) -> None:
        """Names that a model class would take for its own are parameters like others."""

        def function(_x: int, schema: int, model_config: int, copy: int, self_: int) -> None: ...

        names = ["_x", "schema", "model_config", "copy", "self_"]
        signature = sign(function)
        assert signature.parameters["required"] == names
        assert signature.bind(json.dumps(dict.fromkeys(names, 1))) == ((), dict.fromkeys(names, 1))

    def test_a_default_that_json_cannot_say_is_not_told(self) -> None:
        """Infinity, an object and a set (it has no fixed order) are left out; the rest is told as JSON."""

        def function(  # noqa: PLR0917
            a: float = float("inf"),
            b: Any = object(),  # noqa: B008
            c: Any = frozenset("xy"),
            d: Color = Color.RED,
            e: Path = Path("/tmp"),  # noqa: S108
            f: Any = Point(1),
        ) -> None: ...

        properties: Any = sign(function).parameters["properties"]
        told = {name: schema["default"] for name, schema in properties.items() if "default" in schema}
        assert told == {"d": "red", "e": "/tmp"}  # noqa: S108

    def test_a_nested_default_that_json_cannot_say_is_not_told(self) -> None:
        """A model's own default of that kind is left out without a warning, since it is nobody's fault."""
        definitions: Any = sign(typed(Marked)).parameters["$defs"]
        assert definitions["Marked"] == {"type": "object", "properties": {"mark": {}}}


class TestForms:
    async def _coroutine(self, context: Context[int], query: str) -> None:
        """Search."""

    def __call__(self, query: str) -> None:
        """Search."""

    def test_methods_objects_and_wrappers_are_functions_too(self) -> None:
        """Bound methods, callable objects, wraps, staticmethod and lambdas without parameters make a signature."""

        @functools.wraps(search)
        def wrapped(*args: Any, **kwargs: Any) -> Any: ...

        assert list(sign(self._coroutine).parameters["properties"]) == ["query"]  # type: ignore[arg-type]
        assert [sign(form).description for form in (self._coroutine, self)] == ["Search.", "Search."]
        assert sign(wrapped) == sign(staticmethod(search)) == sign(search)
        assert sign(lambda: 5).bind("") == ((), {})

    def test_a_callable_object_may_be_described_by_its_class(self) -> None:
        """Where `__call__` has no docstring, the class has one."""

        class Searcher:
            """Search."""

            def __call__(self) -> None: ...

        assert sign(Searcher()).description == "Search."

    def test_what_a_partial_fixes_is_hidden(self) -> None:
        """A model must not set what the partial has set, and need not be told of it."""

        def pay(ctx: Context[int], link: socket.socket | None, account: str, cents: int) -> None:
            """Pay."""

        signature = sign(functools.partial(functools.partial(pay, link=None), account="A"))
        assert (signature.description, signature.context_parameter) == ("Pay.", "ctx")
        assert signature.parameters["required"] == ["cents"]
        with pytest.raises(ArgumentsError, match="account: unknown"):
            signature.bind('{"account": "B", "cents": 1}')

    def test_arguments_are_shown_with_defaults(self) -> None:
        """As a namespace, however they are passed: what was sent, and Python's own default for the rest."""

        def function(ctx: Context[int], a: int, /, b: Point, c: int = 3, *, d: Any = ()) -> None: ...

        signature = sign(function)
        shown = vars(signature.to_namespace(signature.bind('{"a": 1, "b": {"x": 2}}')))
        assert shown == {"a": 1, "b": Point(2), "c": 3, "d": ()}

    def test_positional_only_parameters_are_passed_by_position(self) -> None:
        """Named by the model, positional in the call; a gap is filled with a copy of the function's default."""

        def function(a: int, b: list[int] = [1], c: int = 2, /, d: int = 3) -> None: ...  # noqa: B006

        signature = sign(function)
        assert signature.bind('{"c": 5, "a": 1, "d": 4}') == ((1, [1], 5), {"d": 4})
        assert signature.bind('{"a": 1}') == ((1, [1], 2), {})

    def test_python_applies_the_defaults(self) -> None:
        """What the model leaves out is absent from the call."""
        assert sign(search).bind('{"query": "x"}') == ((), {"query": "x"})


class TestContext:
    @pytest.mark.parametrize(
        "hint",
        [Context, Context[int], "Context[Deps]", "Annotated[Context[int], 1]", "Context[int] | None"],
        ids=str,
    )
    def test_the_context_is_found_and_hidden(self, hint: Any) -> None:
        """Bare, subscripted, as text, in Annotated or optional: it is the engine's to pass."""

        def function(ctx: Any, query: str) -> None: ...

        function.__annotations__["ctx"] = hint
        signature = sign(function)
        assert signature.context_parameter == "ctx"
        assert list(signature.parameters["properties"]) == ["query"]  # type: ignore[arg-type]

    def test_a_context_elsewhere_is_refused(self) -> None:
        """Only the first parameter that can be passed by position takes the context, and only one does."""

        def second(query: str, ctx: Context[int]) -> None: ...
        def keyword(*, ctx: Context[int]) -> None: ...
        def twice(a: Context[int], ctx: Context[int]) -> None: ...

        for function in (second, keyword, twice):
            with pytest.raises(MisuseError, match=r"'ctx' takes the Context.*Make it the first parameter"):
                sign(function)


class TestMisuse:
    @pytest.mark.parametrize(
        ("hint", "reason"),
        [
            (socket.socket, "socket"),
            (Callable[[int], int], "CallableSchema"),
            (Callable[[], int] | None, "CallableSchema"),
            (int | Callable[[], int], "CallableSchema"),
            (Iterable[int], r"write list\[...\]"),
            (type[int], "a class"),
            (Odd, "CallableSchema"),
            (list[Context[int]], "Context"),
            (Box[int], "Box"),
            (Untyped, "Untyped.x has no type hint"),
            (Annotated[str, Field(pattern="(")], "validator"),
            ("Missing", "name 'Missing' is not defined.*TYPE_CHECKING"),
            ("list[", "cannot be resolved"),
            (Annotated[int, Field(default=3)], "default inside Field"),
        ],
        ids=str,
    )
    def test_a_hint_that_json_cannot_carry_is_refused(self, hint: Any, reason: str) -> None:
        """The error names the tool, the parameter among others, and the reason."""

        def function(fine: int, x: Any) -> None: ...

        function.__annotations__["x"] = hint
        with pytest.raises(MisuseError, match=rf"^Tool 'search', parameter 'x'.*{reason}"):
            sign(function)

    def test_a_function_that_a_model_cannot_call_is_refused(self) -> None:
        """No hint, any number of arguments, a class, a number, a builtin: each says what to do instead."""

        def bare(query) -> None: ...  # type: ignore[no-untyped-def]
        def star(*names: str) -> None: ...
        def stars(**names: str) -> None: ...
        def field(limit: int = Field(5)) -> None: ...

        things: list[tuple[Any, str]] = [
            (bare, "'query' has no type hint. Add one"),
            (TestForms.__call__, "'self' has no type hint.* give a method bound"),
            (star, "'names' takes any number of arguments. Write each one out"),
            (stars, "'names' takes any number of arguments. Write each one out"),
            (field, "'limit': a default inside Field"),
            (Cat, "the class Cat. Write a function"),
            (3, "3 is not a callable object. Write a function"),
            (max, "no signature found.*Write a function"),
            (len, "'obj' has no type hint"),
        ]
        for thing, words in things:
            with pytest.raises(MisuseError, match=words):
                sign(thing)


class TestBind:
    @pytest.mark.parametrize(
        ("hint", "sent", "got"),
        [
            (int, '"5"', 5),
            (int, "5.0", 5),
            (int, "9" * 4_300, int("9" * 4_300)),
            (float, "1", 1.0),
            (bool, '"true"', True),
            (str | None, "null", None),
            (Color, '"red"', Color.RED),
            (tuple[int, str], '["1", "a"]', (1, "a")),
            (set[int], "[1, 1, 2]", {1, 2}),
            (dict[int, float], '{"1": 2}', {1: 2.0}),
            (date, '"2026-11-20"', date(2026, 11, 20)),
            (datetime, '"2026-11-20T10:00:00Z"', datetime(2026, 11, 20, 10, tzinfo=UTC)),
            (UUID, '"12345678123456781234567812345678"', UUID("12345678123456781234567812345678")),
            (Decimal, '"1.10"', Decimal("1.10")),
            (Path, '"a/b"', Path("a/b")),
            (Flat, '{"rooms": 2, "cat": {"meow": 1}}', Flat(2.0, Cat(meow=1))),
            (Row, '{"key": "k"}', {"key": "k"}),
            (Pair, '{"left": "1"}', Pair(1)),
            (Cat | Dog, '{"bark": 1}', Dog(bark=1)),
            (Point, '{"x": "1", "y": 2, "near": [{"x": 3}]}', Point(1, 2, near=[Point(3)])),
            (Optional[Point], '{"x": 1}', Point(1)),  # noqa: UP045  not the same object as Point | None
            (Sequence[Point], '[{"x": 1}]', [Point(1)]),
            (Mapping[str, Point | None], '{"a": {"x": 1}, "b": null}', {"a": Point(1), "b": None}),
            (list[Point] | int, '[{"x": 1}]', [Point(1)]),
            (dict[str, tuple[Point, ...]], '{"a": [{"x": 1}]}', {"a": (Point(1),)}),
            (Annotated[Point, Field(description="Here.")], '{"x": 1}', Point(1)),
            (Any, "[1, null]", [1, None]),
        ],
        ids=lambda value: str(value)[:40],
    )
    def test_json_becomes_what_the_hint_says(self, hint: Any, sent: str, got: object) -> None:
        """Each kind of hint gets its own instance, by coercions that lose nothing."""
        assert sign(typed(hint)).bind(f'{{"x": {sent}}}') == ((), {"x": got})

    def test_all_problems_are_told_at_once_with_their_paths(self) -> None:
        """One answer names each place, what it should be, what came, the name that was meant, and the parameters."""

        def function(  # noqa: PLR0917
            query: str,
            limit: Annotated[int, Field(le=50)],
            pet: Cat | Dog,
            color: Color,
            places: dict[str, list[Point]],
            when: date | None = None,
        ) -> None: ...

        sent = (
            '{"quer": "x", "limit": 99, "pet": {}, "color": "green", "when": [],'
            ' "places": {"a": [{"x": "z", "q": 1}, {"x": 1, "y": 50}]}}'
        )
        assert refusal(function, sent).splitlines() == [
            "the arguments of search do not fit:",
            "- query: required, but missing",
            "- limit: should be less than or equal to 50, got 99",
            "- pet (as Cat).meow: required, but missing",
            "- pet (as Dog).bark: required, but missing",
            "- color: should be 'red' or 'blue', got \"green\"",
            '- places.a[0].x: should be a valid integer, unable to parse string as an integer, got "z"',
            "- places.a[0].q: unknown",
            "- places.a[1]: '_y' must be < 10: 50",
            "- when: should be a valid date, got an array",
            '- quer: unknown, did you mean "query"?',
            (
                "Parameters: query (string, required), limit (integer, required), pet (Cat | Dog, required), "
                "color (Color, required), places (object, required), when (string | null, default null)."
            ),
        ]

    def test_the_branches_of_a_union_are_told_in_one_line(self) -> None:
        """What would have fitted is joined by or, each wish once, and the value is shown once."""
        words = refusal(typed(int | Cat | Dog | Point), '{"x": []}')
        assert "- x: should be a valid integer or should be an object, got an array\n" in words

    def test_a_type_s_own_validator_speaks_for_itself(self) -> None:
        """The words of a ValueError are the user's and stand alone."""
        assert "- x.bark: too loud, neighbours complain\n" in refusal(typed(Dog), '{"x": {"bark": 10}}')

    def test_a_validator_that_breaks_is_the_call_s_failure(self) -> None:
        """A KeyError, or an error whose text cannot be read, does not leave as something else."""

        class EvilError(Exception):
            def __str__(self) -> str:
                raise RuntimeError

        def fail(value: int) -> int:
            raise (EvilError, KeyError("lost"))[value]

        function = typed(Annotated[int, AfterValidator(fail)])
        assert refusal(function, '{"x": 1}') == (
            "the arguments of search do not fit (KeyError: lost).\nParameters: x (integer, required)."
        )
        assert "(EvilError: no reason could be read)" in refusal(function, '{"x": 0}')

    @pytest.mark.parametrize(
        ("hint", "sent", "words"),
        [
            (int, '"' + "9" * 5_000 + '"', "exceeded maximum size"),
            (float, "1e999", "should be a finite number, got Infinity"),
            (Flat, '{"rooms": 1e999}', "x.rooms: should be a finite number"),
            (list[int], "[" + '"a",' * 50_000 + "1]", "- and more"),
            (set[Any], "[[]]", "hashable"),
            (Literal[tuple(range(1_000))], "-1", "should be 0, 1, 2"),
            (str, "[" * 190 + "]" * 190, "got an array"),
            (Point, '{"x":1,"near":[' * 90 + "3" + "]}" * 90, "near[0]: should be an object, got 3"),
            (int, '1, "' + "k" * 100_000 + '": 2', "kkk...: unknown\n"),
        ],
        ids=lambda value: str(value)[:30],
    )
    def test_hostile_values_are_refused_in_few_words(self, hint: Any, sent: str, words: str) -> None:
        """However large or deep the value, the answer names the fault and stays readable."""
        told = refusal(typed(hint), f'{{"x": {sent}}}')
        assert words in told
        assert len(told) < 3_000

    @pytest.mark.parametrize(
        "text",
        [
            *("[]", "nul", '"{}"', "5", "{", '{"x": [1', '{"x": "cut', '```json\n{"x": 1}\n```', '{"x": 1} and so on'),
            *('{"x": 1}{"x": 1}', '{"x": 1,}', "{'x': 1}", '{"x": 1, "x": 1}', '{"x": NaN}', '{"x": -Infinity}'),
            *('{"x": "\\u0000"}', '{"x": "\0"}', '{"x": "\\ud800"}', '{"x": "\ud800"}', f'{{"x": {"9" * 5_000}}}'),
            *("[" * 200_000, '{"x": ' + "[" * 200_000 + "]" * 200_000 + "}"),
        ],
        ids=lambda text: ascii(text[:30]),
    )
    def test_what_is_not_a_strict_object_is_refused(self, text: str) -> None:
        """The validator never sees it; the answer says what to send (all cases stand in test_arguments)."""
        assert refusal(typed(Any), text).startswith("the arguments are not a JSON object (")

    def test_white_space_and_a_byte_order_mark_around_the_object_are_nothing(self) -> None:
        """They are taken off; no text at all is an object without members."""
        assert sign(typed(int)).bind('\ufeff \n{"x": 1}\t') == ((), {"x": 1})
        assert sign(lambda: 5).bind("\ufeff") == ((), {})

    def test_a_tool_without_parameters_says_so(self) -> None:
        """The model is told to send nothing."""
        assert refusal(lambda: 5, '{"x": 1}').endswith("- x: unknown\nIt takes no parameters: send {}.")


def everything(  # noqa: PLR0917  one of each
    a: int,
    b: list[Point] | dict[str, Flat],
    c: Cat | Dog | None = None,
    d: Decimal | date | Color = Color.RED,
    e: set[Pair] | float = 1.0,
    f: Any = None,
) -> None:
    """Take a bit of everything."""


EVERYTHING = sign(everything)
KEYS = st.sampled_from(["x", "near", "rooms", "cat", "meow"]) | st.text(max_size=5)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(KEYS, inner, max_size=5),
    max_leaves=10,
)


@given(st.dictionaries(st.sampled_from("abcdef") | KEYS, JSON, max_size=7))
def test_random_json_never_escapes(arguments: dict[str, Any]) -> None:
    """Arguments of any shape bind, or are refused in words that UTF-8 can carry."""
    try:
        EVERYTHING.bind(json.dumps(arguments))
    except ArgumentsError as error:
        told = str(error)
        assert len(told.encode()) < 20_000


def plain(pair: Pair, point: Point, text: str, flat: Flat) -> None:
    """Take what a round trip leaves as it was."""


PLAIN = sign(plain)


@given(st.from_type(Pair), st.lists(st.integers()), st.text(st.characters(exclude_characters="\0", codec="utf-8")))
def test_valid_arguments_round_trip(pair: Pair, numbers: list[int], text: str) -> None:
    """What JSON can carry arrives as it was sent, nested or not."""
    sent = {"pair": pair, "point": {"x": 1, "near": [{"x": n} for n in numbers]}, "text": text, "flat": {"rooms": 1}}
    point = Point(1, near=[Point(n) for n in numbers])
    assert PLAIN.bind(json.dumps(sent)) == ((), {"pair": pair, "point": point, "text": text, "flat": Flat(1)})
