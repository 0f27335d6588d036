"""A plain JSON Schema, from anywhere, becomes a validator that stays within bounds and says what is wrong."""

from __future__ import annotations

import functools
import json
import socket
import threading
from collections.abc import Callable
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentfsm import ArgumentsError, MisuseError
from agentfsm.tools.schema.json_schema import SchemaSignature, build_schema_signature
from agentfsm.tools.schema.strict import drop_nulls

NEWEST = "https://json-schema.org/draft/2020-12/schema"
CAT = {
    "type": "object",
    "properties": {"kind": {"const": "cat"}, "meow": {"type": "integer"}},
    "required": ["kind", "meow"],
}
DOG = {
    "type": "object",
    "properties": {"kind": {"const": "dog"}, "bark": {"type": "integer"}},
    "required": ["kind", "bark"],
}
SEARCH: dict[str, Any] = {
    "type": "object",
    "properties": {
        "query": {"type": "string", "minLength": 2, "pattern": "^[a-z]+$"},
        "limit": {"type": "integer", "minimum": 1, "maximum": 50, "default": 5},
        "sort": {"enum": ["asc", "desc"]},
        "pet": {"anyOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}]},
        "tags": {"type": "array", "items": {"type": ["string", "null"]}, "uniqueItems": True, "maxItems": 2},
    },
    "required": ["query"],
    "additionalProperties": False,
    "$defs": {"Cat": CAT, "Dog": DOG},
}


@attrs.frozen
class Context:
    """Stands for the RunContext."""


def anything(**arguments: Any) -> None:
    """Take anything.

    Whatever it is.

    Args:
        **arguments: All of it.
    """


def sign(schema: Any, function: Callable[..., Any] = anything) -> SchemaSignature:
    return build_schema_signature(function, schema, context_type=Context, name="search")


def of(**parts: Any) -> dict[str, Any]:
    """Return a schema with these properties."""
    return {"type": "object", "properties": parts}


def refusal(schema: Any, arguments: Any) -> list[str]:
    """Return the lines that the model is told, without the first and the last."""
    with pytest.raises(ArgumentsError) as caught:
        sign(schema).bind(arguments if isinstance(arguments, str) else json.dumps(arguments))
    first, *lines, last = str(caught.value).splitlines()
    assert first == "the arguments of search do not fit:"
    assert last.startswith(("Parameters: ", "It takes no parameters", "Its schema describes"))
    return lines


class TestBind:
    def test_null_for_an_optional_property_is_none(self) -> None:
        """Models send it without strict mode too; where the schema has null, or requires a value, it stays."""
        signature = sign(
            {**of(a={"type": "boolean"}, b={"type": ["string", "null"]}, c={"type": "integer"}), "required": ["c"]}
        )
        assert signature.bind('{"a": null, "b": null, "c": 1}') == ((), {"b": None, "c": 1})
        with pytest.raises(ArgumentsError, match="c: should be an integer, got null"):
            signature.bind('{"a": null, "c": null}')

    def test_the_function_and_the_schema_make_the_definition(self) -> None:
        """The description is the docstring's text; the schema is told without its own address and dialect."""
        signature = sign({**SEARCH, "$schema": NEWEST, "$id": "https://example.com/search"})
        assert signature.description == "Take anything.\n\nWhatever it is."
        assert signature.parameters == SEARCH
        assert signature.context_parameter is None

    def test_arguments_are_bound_as_json_has_them(self) -> None:
        """By keyword, without what was left out; the namespace shows the defaults that the schema states."""
        signature = sign(SEARCH)
        bound = signature.bind('{"query": "ab", "pet": {"kind": "cat", "meow": 5.0}}')
        assert bound == ((), {"query": "ab", "pet": {"kind": "cat", "meow": 5}})
        assert vars(signature.to_namespace(bound)) == {"limit": 5, **bound[1]}
        assert signature.bind('{"query": "ab", "limit": 7}')[1] == {"query": "ab", "limit": 7}

    def test_a_schema_may_say_next_to_nothing(self) -> None:
        """The root's type may be missing, properties too, and true and false are schemas."""
        assert sign({}).bind("") == ((), {})
        assert sign({}).bind('{"a b": 1, "": [null]}') == ((), {"a b": 1, "": [None]})
        assert refusal({"additionalProperties": False}, {"a": 1}) == ["- a: unknown"]
        assert refusal(of(a=True, b=False), {"a": 1, "b": 1}) == ["- b: unknown"]

    def test_the_schema_is_copied(self) -> None:
        """Whoever changes theirs afterwards changes nothing here; tuples are lists."""
        mine: dict[str, Any] = of(a={"enum": ("x", "y")})
        signature = sign(mine)
        mine["properties"]["a"] = {"type": "integer"}
        assert signature.bind('{"a": "x"}') == ((), {"a": "x"})
        assert signature.parameters["properties"] == {"a": {"enum": ["x", "y"]}}

    def test_all_problems_are_told_at_once_with_their_paths(self) -> None:
        """One answer names each place, what it should be, what came, and the name that was meant."""
        sent = {
            "quer": "A",
            "limit": "5",
            "sort": "up",
            "pet": {"kind": "dog", "bark": "x"},
            "tags": [1, None, 1],
        }
        with pytest.raises(ArgumentsError) as caught:
            sign(SEARCH).bind(json.dumps(sent))
        assert str(caught.value).splitlines() == [
            "the arguments of search do not fit:",
            "- query: required, but missing",
            '- quer: unknown, did you mean "query"?',
            '- limit: should be an integer, got "5"',
            '- sort: should be "asc" or "desc", got "up"',
            '- pet.bark: should be an integer, got "x"',
            "- tags: should have at most 2 items and should have no item twice, got an array",
            "- tags[0]: should be a string or null, got 1",
            "- tags[2]: should be a string or null, got 1",
            (
                'Parameters: query (string, required), limit (integer, default 5), sort ("asc" | "desc"), '
                "pet (Cat | Dog), tags (array of string | null)."
            ),
        ]

    @pytest.mark.parametrize(
        ("part", "value", "line"),
        [
            ({"minimum": 3}, 2, "x: should be at least 3, got 2"),
            ({"exclusiveMinimum": 3}, 3, "x: should be greater than 3, got 3"),
            ({"exclusiveMaximum": 3}, 3, "x: should be less than 3, got 3"),
            ({"multipleOf": 3}, 4, "x: should be a multiple of 3, got 4"),
            ({"maxLength": 1}, "ab", 'x: should have at most 1 characters, got "ab"'),
            ({"pattern": "^a"}, "b", 'x: should match "^a", got "b"'),
            ({"minItems": 1}, [], "x: should have at least 1 items, got an array"),
            ({"minProperties": 1}, {}, "x: should have at least 1 properties, got an object"),
            ({"maxProperties": 0}, {"a": 1}, "x: should have at most 0 properties, got an object"),
            ({"const": {"a": 1}}, 1, "x: should be an object, got 1"),
            ({"enum": [True, None]}, 1, "x: should be true or null, got 1"),
            ({"type": "integer"}, True, "x: should be an integer, got true"),
            ({"type": ["integer", "string"]}, 1.5, "x: should be an integer or a string, got 1.5"),
            ({"type": "number"}, "1", 'x: should be a number, got "1"'),
            ({"dependentRequired": {"a": ["b"]}}, {"a": 1}, "x: should have all properties that go together, got an"),
            ({"not": {"type": "string"}}, "a", 'x: should fit "not" of the schema, got "a"'),
            ({"contains": {"type": "string"}}, [1], 'x: should fit "contains" of the schema, got an array'),
            ({"propertyNames": {"pattern": "^a"}}, {"b": 1}, 'x: should fit "propertyNames" of the schema'),
            ({"unevaluatedProperties": False}, {"b": 1}, 'x: should fit "unevaluatedProperties" of the schema'),
            ({"allOf": [{"minimum": 3}, {"multipleOf": 2}]}, 1, "x: should be at least 3 and should be a multiple of"),
            ({"oneOf": [{"type": "integer"}, {"minimum": 1}]}, 1, "x: should fit one of its forms only, got 1"),
            ({"anyOf": [{"minimum": 3}, {"maximum": 1}]}, 2, "x: should be at least 3 or should be at most 1, got 2"),
            ({"if": {"minimum": 3}, "then": {"multipleOf": 2}}, 3, "x: should be a multiple of 2, got 3"),
            ({"if": {"minimum": 3}, "else": {"multipleOf": 2}}, 1, "x: should be a multiple of 2, got 1"),
            ({"if": {"minimum": 3}, "then": {"multipleOf": 2}, "maximum": 0}, 1, "x: should be at most 0, got 1"),
            ({"prefixItems": [{"type": "string"}], "items": False}, ["a", 1], "x[1]: unknown"),
            ({"prefixItems": [{"type": "string"}]}, [2, 1], "x[0]: should be a string, got 2"),
            ({"additionalProperties": {"type": "string"}}, {"a": 1}, "x.a: should be a string, got 1"),
            ({"patternProperties": {"^a": {"type": "string"}}}, {"b": 2, "a": 1}, "x.a: should be a string, got 1"),
            (
                {"patternProperties": {"^a/~": {"type": "string"}}, "additionalProperties": False},
                {"a/~": "", "b": 1},
                "x.b: unknown",
            ),
            ({"properties": {'~/ %#é"': {"type": "string"}}}, {'~/ %#é"': 1}, 'x.~/ %#é": should be a string, got 1'),
            ({"anyOf": [CAT, DOG]}, 3, "x: should be an object, got 3"),
            ({"anyOf": [CAT, DOG]}, {"kind": "cow", "bark": 1}, 'x.kind: should be "dog", got "cow"'),
            ({"oneOf": [{**CAT, "title": "Tom"}, True, True]}, {"kind": "cat"}, "x: should fit one of its forms only"),
        ],
        ids=str,
    )
    def test_each_keyword_has_words(self, part: Any, value: Any, line: str) -> None:
        """Whatever the schema asks for, the model is told it in a line of its own."""
        (told,) = refusal(of(x=part), {"x": value})
        assert told.startswith(f"- {line}")

    def test_the_branches_of_a_union_have_names(self) -> None:
        """Reference, title or number; where nothing tells them apart, each says what it wants."""
        union = {"anyOf": [{"$ref": "#/$defs/Cat"}, {**DOG, "title": "Dog"}, {"type": "object", "required": ["x"]}]}
        assert refusal({**of(pet=union), "$defs": {"Cat": CAT}}, {"pet": {}}) == [
            "- pet (as Cat).kind: required, but missing",
            "- pet (as Cat).meow: required, but missing",
            "- pet (as Dog).kind: required, but missing",
            "- pet (as Dog).bark: required, but missing",
            "- pet (as branch_3).x: required, but missing",
        ]
        assert refusal({"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, {}) == [
            "- (as branch_1).a: required, but missing",
            "- (as branch_2).b: required, but missing",
        ]

    def test_older_drafts_mean_what_they_meant(self) -> None:
        """Draft 7 has items as a list, additionalItems and definitions; `$schema` decides."""
        schema = {
            "$schema": "http://json-schema.org/draft-07/schema#",
            **of(
                p={"items": [{"type": "string"}], "additionalItems": {"type": "integer"}},
                q={"$ref": "#/definitions/x~1%79"},
            ),
            "definitions": {"x/y": {"type": "string"}},
        }
        assert refusal(schema, {"p": [1, "a", 2], "q": 1}) == [
            "- p[0]: should be a string, got 1",
            '- p[1]: should be an integer, got "a"',
            "- q: should be a string, got 1",
        ]
        assert sign(schema).bind('{"p": ["a", 1], "q": ""}')[1] == {"p": ["a", 1], "q": ""}

    @pytest.mark.parametrize(
        "text",
        [
            *("[]", "nul", '"{}"', "5", "{", '{"x": [1', '```json\n{"x": 1}\n```', '{"x": 1} and so on', '{"x": 1,}'),
            *('{"x": 1, "x": 1}', '{"x": NaN}', '{"x": "\\u0000"}', '{"x": "\\ud800"}', '{"x": "\ud800"}'),
            *("[" * 200_000, '{"x": ' + "[" * 200_000, f'{{"x": {"9" * 5_000}}}'),
        ],
        ids=lambda text: ascii(text[:30]),
    )
    def test_what_is_not_a_strict_object_is_refused(self, text: str) -> None:
        """The validator never sees it; the answer says what to send."""
        with pytest.raises(ArgumentsError, match=r"^the arguments are not a JSON object \("):
            sign(of(x={})).bind(text)

    def test_numbers_beyond_all_bounds(self) -> None:
        """Infinity by way of 1e999 is refused; thousands of digits are compared like any number."""
        with pytest.raises(ArgumentsError, match="a number in it is too large"):
            sign(of(x={})).bind('{"x": [1e999]}')
        with pytest.raises(ArgumentsError, match="a number in it is too large"):
            sign(of(x={})).bind(f'{{"x": -{"9" * 400}.0}}')
        assert sign(of(x={})).bind('{"x": 1.5E3}')[1] == {"x": 1500}
        assert sign(of(x={"minimum": 5})).bind(f'{{"x": {"9" * 4_300}}}')[1]["x"] > 5
        (line,) = refusal(of(x={"maximum": 5, "multipleOf": 1}), f'{{"x": {"9" * 4_300}}}')
        assert line == f"- x: should be at most 5, got {'9' * 60}..."


class TestFunction:
    def test_the_context_is_handed_in_and_hidden(self) -> None:
        """It comes first, by position, and the model can neither see nor set it."""

        def function(ctx: Context, **arguments: Any) -> None: ...

        signature = sign({}, function)
        assert signature.context_parameter == "ctx"
        with pytest.raises(ArgumentsError, match="- ctx: unknown"):
            signature.bind('{"ctx": 1}')
        with pytest.raises(MisuseError, match="'ctx': the function does not take it"):
            sign(of(ctx={}), function)

        def hidden(ctx: Context, /, **arguments: Any) -> None: ...

        assert sign(of(ctx={}), hidden).bind('{"ctx": 1}') == ((), {"ctx": 1})

    def test_what_a_partial_or_a_method_fixes_cannot_be_set(self) -> None:
        """A model must not reach what is set already, whatever keys the schema lets through."""
        fixed = sign({}, functools.partial(anything, secret=1))
        assert fixed.bind('{"open": 1}') == ((), {"open": 1})
        with pytest.raises(ArgumentsError, match="- secret: unknown"):
            fixed.bind('{"secret": 2}')
        with pytest.raises(ArgumentsError, match="- self: unknown"):
            sign({}, self.method).bind('{"self": 1}')

    def method(self, **arguments: Any) -> None: ...

    def test_a_function_with_names_takes_only_these(self) -> None:
        """What the schema lets through beside them is unknown, and told together with the rest."""

        def function(path, depth: int = 3) -> None:  # type: ignore[no-untyped-def]
            """Walk."""

        signature = sign({**of(path={"type": "string"}), "required": ["path"]}, function)
        assert signature.bind('{"path": "a", "depth": "no schema"}') == ((), {"path": "a", "depth": "no schema"})
        with pytest.raises(ArgumentsError) as caught:
            signature.bind('{"path": 1, "paths": 2, "more": 3}')
        assert str(caught.value).splitlines()[1:-1] == [
            "- path: should be a string, got 1",
            '- paths: unknown, did you mean "path"?',
            "- more: unknown",
        ]

    @pytest.mark.parametrize(
        ("function", "words"),
        [
            (lambda: 0, "'a': the function does not take it. Add it, or \\*\\*kwargs"),
            (lambda b, **_: b, "'b': the schema lets the model leave it out"),
            (lambda a: a, "'a': the schema lets the model leave it out"),
            (lambda b, /, **_: b, "'b' is passed by position only"),
            (Context, "the class Context. Write a function"),
            (3, "3 is not a callable object"),
        ],
    )
    def test_a_function_that_a_valid_call_would_miss_is_refused(self, function: Any, words: str) -> None:
        """What would fail at the first call fails when the tool is made."""
        with pytest.raises(MisuseError, match=f"^Tool 'search'.* ?{words}"):
            sign(of(a={}), function)


def nested(levels: int, wrap: Callable[[Any], Any], inner: Any) -> Any:
    for _ in range(levels):
        inner = wrap(inner)
    return inner


def chain(length: int, step: Callable[[dict[str, Any]], Any], last: Any) -> dict[str, Any]:
    """Return a schema whose `x` goes through definitions, of which each leads to the next."""
    definitions = {f"d{n}": step({"$ref": f"#/$defs/d{n + 1}"}) for n in range(length)}
    return {**of(x={"$ref": "#/$defs/d0"}), "$defs": {**definitions, f"d{length}": last}}


class TestHostileSchemas:
    @pytest.mark.parametrize(
        ("schema", "words"),
        [
            (of(a={"type": "objekt"}), "invalid at properties/a/type"),
            (of(a={"minimum": "3"}), "invalid at properties/a/minimum"),
            (of(a=3), "invalid at properties/a"),
            ({"properties": [1]}, "invalid at properties"),
            ({"required": "a"}, "invalid at required"),
            ({"type": "array"}, 'has to be "object"'),
            ({"type": ["object", "null"]}, 'has to be "object"'),
            ([("type",)], "not a JSON Schema"),
            ({"default": float("nan")}, "not a JSON Schema"),
            ({"default": "\ud800"}, "not a JSON Schema"),
            ({"description": "x" * 100_000}, "larger than 100000 characters"),
            (nested(40, lambda inner: of(a=inner), {}), "deeper than 64"),
            ({"$schema": "http://json-schema.org/draft-04/schema#"}, "known: https"),
            ({"$schema": "https://example.com/mine"}, "known: https"),
            ({"$schema": 5}, "known: https"),
            (of(a={"$id": "https://example.com/a"}), "an address of their own"),
            (of(a={"$dynamicRef": "#a"}), "an address of their own"),
            (of(a={"$ref": "#/nope"}), "/nope"),
            (of(a={"$ref": "#/properties/a/b/c"}), "/properties/a/b/c"),
            (of(a={"$ref": "#b"}, b={"$anchor": "b"}), "refers to '#b'. Write '#/"),
            (of(a={"$ref": "#/title"}) | {"title": "x"}, "invalid at title"),
            (of(a={"$ref": "other.json"}), "other.json"),
            (of(a={"$ref": "file:///etc/passwd"}), "Retrieval is disabled, cannot fetch file:///etc/passwd"),
            (of(a={"$ref": NEWEST}), f"refers to '{NEWEST}'. Write '#/"),
            ({**of(), "$defs": {"unused": {"$ref": "http://127.0.0.1:9/"}}}, "cannot fetch http://127.0.0.1:9/"),
            (of(a={"pattern": "("}), "invalid at properties/a/pattern"),
            (of(a={"pattern": "(?=x)"}), "linear time"),
            (of(a={"pattern": r"(a)\1"}), "linear time"),
            (of(a={"pattern": "((a{1000}){1000}){1000}"}), "linear time"),
            ({"patternProperties": {"(?!a)": {}}}, "linear time"),
            ({"$ref": "#"}, "one that leads to itself"),
            ({"allOf": [{"$ref": "#"}]}, "one that leads to itself"),
            (of(a={"$ref": "#/properties/a"}), "one that leads to itself"),
            (chain(30, lambda ref: ref, {}), "more than 20 references and unions in a row"),
            (of(**{f"p{n}": {} for n in range(2_100)}), "more than 2000 parts"),
            (chain(5, lambda ref: {"anyOf": [ref] * 40}, {}), "too many ways to fit one value"),
            (
                nested(20, lambda part: {"allOf": [part], "unevaluatedProperties": False}, {"type": "object"}),
                "too many ways to fit one value",
            ),
        ],
        ids=lambda value: str(value)[:50],
    )
    def test_a_schema_that_cannot_be_used_is_refused(self, schema: Any, words: str) -> None:
        """Invalid, foreign, too large or too winding: the error names tool and place, in few words."""
        with pytest.raises(MisuseError) as caught:
            sign(schema)
        assert str(caught.value).startswith("Tool 'search'")
        assert words in str(caught.value)
        assert len(str(caught.value)) < 700

    def test_a_schema_that_json_cannot_carry_is_refused(self) -> None:
        """Python's objects, one that holds itself, and one that is deeper than any parser goes."""
        cycle: dict[str, Any] = {}
        cycle["not"] = cycle
        for schema in (cycle, {"default": object()}, {"default": nested(100_000, lambda inner: [inner], 0)}):
            with pytest.raises(MisuseError, match=r"^Tool 'search': its parameters are not a JSON Schema"):
                sign(schema)

    def test_nothing_is_fetched(self) -> None:
        """A server that a schema refers to, in all the ways there are, is never connected to."""
        server = socket.create_server(("127.0.0.1", 0))
        server.settimeout(None)
        connections = []

        def accept() -> None:
            while True:
                connection, address = server.accept()
                with connection:
                    if connection.recv(1) == b"!":
                        return
                    connections.append(address)

        thread = threading.Thread(target=accept)
        thread.start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}/schema.json"
        ways: list[dict[str, Any]] = [
            of(a={"$ref": url}),
            of(a={"$ref": f"{url}#/a"}),
            of(a={"$dynamicRef": url}),
            {"$schema": url},
            {"$id": url, **of(a={"$ref": "other.json"})},
            {**of(), "$defs": {"a": {"$id": url, "$ref": "other.json"}}},
            {"$schema": "http://json-schema.org/draft-07/schema#", **of(a={"$ref": url})},
            {"allOf": [{"if": {"$ref": url}}]},
        ]
        try:
            for schema in ways:
                with pytest.raises(MisuseError):
                    sign(schema)
            sign({"$id": url, "$comment": url, **of(a={"contentSchema": {"type": "string"}, "format": "uri"})})
        finally:
            with socket.create_connection(server.getsockname()) as last:  # served after all that came before
                last.sendall(b"!")
            thread.join()
            server.close()
        assert connections == []

    def test_recursion_goes_as_deep_as_the_arguments(self) -> None:
        """`#` and recursive definitions are schemas like others, in a refusal too."""
        tree = {**of(v={"type": "integer"}, kids={"type": "array", "items": {"$ref": "#"}}), "required": ["v"]}

        def grown(levels: int, leaf: Any) -> Any:
            return nested(levels, lambda inner: {"v": 1, "kids": [inner]}, leaf)

        deep = grown(99, {"v": 1})
        assert sign(tree).bind(json.dumps(deep)) == ((), deep)
        assert refusal(tree, grown(2, {"v": "x"})) == ['- kids[0].kids[0].v: should be an integer, got "x"']
        (line,) = refusal(tree, grown(99, {"v": "x"}))
        assert line.endswith("should fit its part of the schema, got an array")
        assert sign(of(a={"$ref": "#"})).bind('{"a": {"a": {}}}')[1] == {"a": {"a": {}}}
        assert refusal(of(a={"$ref": "#"}), {"a": {"a": 1}}) == ["- a.a: should be an object, got 1"]

    def test_a_reference_may_point_anywhere_in_the_schema(self) -> None:
        """Into a list, at true, through escapes, at a part that is itself a reference."""
        parts = {"a": {"anyOf": [{"type": "null"}, {"type": "integer"}]}, "b": {"$ref": "#/properties/a/anyOf/1"}}
        schema = {
            **of(**parts, c={"$ref": "#/$defs/~0%25%2Fx"}, d={"$ref": "#/properties/b"}),
            "$defs": {"~%": {"x": True}},
        }
        assert refusal(schema, {"a": "1", "b": None, "c": 1, "d": None}) == [
            '- a: should be null or should be an integer, got "1"',
            "- b: should be an integer, got null",
            "- d: should be an integer, got null",
        ]

    def test_any_json_has_a_schema(self) -> None:
        """A value, a list of values, or an object of values: as deep as JSON may be here."""
        value = {"$ref": "#/$defs/value"}
        kinds = [{"type": kind} for kind in ("string", "number", "boolean", "null")]
        union = [*kinds, {"type": "array", "items": value}, {"type": "object", "additionalProperties": value}]
        signature = sign({**of(x=value), "$defs": {"value": {"anyOf": union}}})
        for wrap in (lambda inner: [inner], lambda inner: {"a": inner}):
            deep = nested(190, wrap, 1)
            assert signature.bind(json.dumps({"x": deep}))[1] == {"x": deep}

    @pytest.mark.parametrize("keyword", ["anyOf", "oneOf"])
    def test_a_tag_leads_through_a_tree(self, keyword: str) -> None:
        """An expression tree of five kinds has 10 to the power of 90 ways through it, of which the tags leave one."""
        ref = {"$ref": "#/$defs/node"}
        kinds = [
            {"type": "object", "properties": {"left": ref, "right": ref, "op": {"const": op}}, "required": ["op"]}
            for op in ("and", "or", "not", "is", "in")
        ]
        schema = {**of(x=ref), "$defs": {"node": {keyword: [{"$ref": f"#/$defs/{n}"} for n in range(5)]}}}
        schema["$defs"] |= {str(n): kind for n, kind in enumerate(kinds)}
        grown = nested(90, lambda node: {"op": "in", "left": {"op": "is"}, "right": node}, {"op": "not"})
        assert sign(schema).bind(json.dumps({"x": grown}))[1] == {"x": grown}
        lines = refusal(schema, {"x": {"op": "in", "left": {"op": "is", "right": 3}}})
        assert lines == ["- x.left.right: should be an object, got 3"]

    def test_what_would_cost_too_much_is_refused_unseen(self) -> None:
        """Two ways at each of 40 levels are a million million; a few levels are fine, and the answer says so."""

        def either(ref: dict[str, Any]) -> dict[str, Any]:
            return {"anyOf": [of(x=ref, y={"type": "integer"}), of(x=ref, y={"type": "number"})]}

        schema = chain(40, either, {"type": "string"})
        fine = nested(10, lambda inner: {"x": inner}, {})
        assert sign(schema).bind(json.dumps(fine))[1] == fine
        with pytest.raises(ArgumentsError, match="nested 41 levels deep, and its schema allows 2"):
            sign(schema).bind(json.dumps(nested(41, lambda inner: {"x": inner}, "end")))
        beside = {"x": {"x": {}, "y": 1}, **{f"k{n}": {} for n in range(50)}}  # many brackets, and not deep
        assert sign(schema).bind(json.dumps(beside))[1] == beside
        winding = chain(4, lambda ref: {"anyOf": [ref] * 30}, {"type": "string", "pattern": "(a+)+$"})
        assert sign(winding).bind('{"x": "aaa"}')[1] == {"x": "aaa"}
        with pytest.raises(ArgumentsError, match="too large for a schema with so many branches"):
            sign(winding).bind(json.dumps({"x": "a" * 300}))
        objects = of(x={"items": {"enum": [{"a": n} for n in range(1_000)]}})
        assert sign(objects).bind('{"x": [{"a": 999}]}')[1] == {"x": [{"a": 999}]}
        with pytest.raises(ArgumentsError, match="too large"):
            sign(objects).bind(json.dumps({"x": [{"a": 999}] * 1_000}))

    def test_references_in_a_row_do_not_overrun_the_stack(self) -> None:
        """Twenty at each of 190 levels are gone through natively; a thousand would end the process."""
        schema = chain(18, lambda ref: ref, {"type": "array", "items": {"$ref": "#/$defs/d0"}})
        deep = nested(190, lambda inner: [inner], [])
        assert sign(schema).bind(json.dumps({"x": deep}))[1] == {"x": deep}
        assert len(refusal(schema, {"x": nested(190, lambda inner: [inner], 3)})) == 1

    @pytest.mark.parametrize(
        ("schema", "value"),
        [
            (of(x={"items": {"type": "string"}}), {"x": [1] * 100_000}),
            (of(x={"items": {"type": "string"}}), {"x": ["a"] * 100_000 + [1]}),
            (of(x={"items": {"required": [str(n) for n in range(5_000)]}}), {"x": [{}] * 30_000}),
            ({"allOf": [{"maxProperties": n % 3} for n in range(300)]}, {str(n): [1] * 10 for n in range(2_000)}),
            (of(x={"enum": [f"value {n}" for n in range(5_000)]}), {"x": "?" * 100_000}),
            (of(**{f"p{n}": {"type": "string"} for n in range(1_900)}), {f"p{n}": n for n in range(1_900)}),
            (of() | {"additionalProperties": False}, {"k" * 10_000 + str(n): n for n in range(1_000)}),
            (of(x={"anyOf": [{"const": n} for n in range(1_500)]}), {"x": -1}),
            (chain(900, lambda ref: of(x=ref), {}), nested(91, lambda inner: {"x": inner}, 3)),
            (of(x={"pattern": "(a+)+$"}), {"x": "a" * 100_000 + "b"}),
        ],
        ids=lambda value: str(value)[:40],
    )
    def test_a_refusal_is_short_whatever_was_sent(self, schema: Any, value: Any) -> None:
        """However many problems, branches or parameters there are, the answer names some and stays readable."""
        with pytest.raises(ArgumentsError) as caught:
            sign(schema).bind(json.dumps(value))
        told = str(caught.value)
        assert told.startswith("the arguments of search do not fit:")
        assert len(told) < 8_000


NAMES = st.sampled_from(["a", "b", "a/b~", "é %#"])
PARTS = st.recursive(
    st.sampled_from(
        [
            *(True, False, {}, {"type": "string"}, {"type": ["integer", "null"]}, {"enum": [1, "a", None]}),
            *({"const": [1]}, {"minimum": 2}, {"pattern": "^a"}, {"required": ["a"]}, {"minItems": 1}),
            *({"$ref": "#/properties/a"}, {"$ref": "#"}, {"maxProperties": 1}),
        ]
    ),
    lambda part: (
        st.dictionaries(
            st.sampled_from(["anyOf", "oneOf", "allOf", "prefixItems"]), st.lists(part, min_size=1, max_size=3)
        )
        | st.dictionaries(st.sampled_from(["properties", "patternProperties", "$defs"]), st.dictionaries(NAMES, part))
        | st.dictionaries(
            st.sampled_from(["items", "additionalProperties", "not", "if", "then", "else", "contains"]), part
        )
    ),
    max_leaves=8,
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats(allow_nan=False, allow_infinity=False) | NAMES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(NAMES, PARTS, max_size=3), PARTS, st.dictionaries(NAMES, VALUES, max_size=3))
def test_random_schemas_and_values_never_escape(parts: dict[str, Any], also: Any, value: dict[str, Any]) -> None:
    """The schema is refused, or the value is bound as it is, or refused with at least one reason."""
    try:
        signature = sign({**of(**parts), "allOf": [also]})
    except MisuseError:
        return
    try:
        assert signature.bind(json.dumps(value))[1] in (value, drop_nulls(value, signature.schema))
    except ArgumentsError as error:
        told = str(error)
        assert "\n- " in told or "schema with so many branches" in told or "and its schema allows" in told
