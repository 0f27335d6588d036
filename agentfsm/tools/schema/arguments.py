"""Check that arguments are one strict JSON object, repair them, and explain problems to the model.

This imports only jiter, so that the engine can check every call of a reply before it journals it, and pydantic is not
imported before the first tool is made.
"""

from __future__ import annotations

import difflib
import json
import re
from itertools import groupby, islice
from typing import TYPE_CHECKING, Any, TypeVar

import jiter

from agentfsm.core.errors import ArgumentsError
from agentfsm.core.json_text import JSON_BLANKS, normalise_arguments
from agentfsm.core.shortening import shorten

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from pydantic_core import ErrorDetails

    from agentfsm.core.messages import JSON

T = TypeVar("T")

# The escape sequence; after an odd number of backslashes it is six harmless characters.
_NUL_ESCAPE = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")
# Maximum of characters to repair: a longer text takes a few milliseconds more, and is rarely repairable.
_MAX_REPAIR_CHARS = 16_000
# Text that may surround an object: a sentence, a code fence.
_PREFIX = re.compile(r"(?:[^\[\]{}\":`]*[^\[\]{}\":`'])?:?\s*(?:```\w*\s*)?")
_SUFFIX = re.compile(r"\s*(?:```)?(?:\s*[^\[\]{}\":`'\s][^\[\]{}\":`]*)?")
# Tokens of JSON as Python or JavaScript might write it. An unclosed text or comment matches up to the end, so that its
# end is searched once. Such a token, and text that matches nothing, is kept and then refused.
_TOKEN = re.compile(
    r"""
    (?P<note> // [^\n]* | \# [^\n]* | /\* .*? \*/ )
    | (?P<text> "(?: [^"\\] | \\. )*+" | '(?: [^'\\] | \\. )*+' )
    | (?P<open> (?: ["'] | /\* ) .* )
    | (?P<key> [\w$] [\w$.-]* (?= \s* : ) )
    | (?P<word> [^\s{}\[\]:,"'/]+ )
    """,
    re.DOTALL | re.VERBOSE,
)
_TOKEN_OR_BRACKET = re.compile(rf"{_TOKEN.pattern} | (?P<opening> [\[{{] ) | (?P<closing> [\]}}] )", _TOKEN.flags)
# The beginning of an object, or of an array of arrays or objects. Other brackets may be part of a sentence.
_OPENING = re.compile(r"\{|\[(?=\s*[\[{])")
# A bracket too many, a name before an object, and a member behind one: the object was part of another.
_STRAY_MEMBER = re.compile(r"\}|[\"']\s*:\s*\Z|\A\s*,\s*[\"']")
# Maximum of arrays and objects in a reply that are looked at: each takes some 40 us.
_MAX_OBJECTS = 20
_PYTHON_LITERALS = {"True": "true", "False": "false", "None": "null"}
# Characters and escapes that are written differently between double quotes.
_QUOTED_CHAR = re.compile(r"\\.|[\"\x00-\x1f]", re.DOTALL)
# A trailing comma. Texts match too, so that a comma in a text is skipped.
_TRAILING_COMMA = re.compile(r'("(?:[^"\\]|\\.)*+"|".*)|,(?=\s*[}\]])', re.DOTALL)
# Maximum of problems in a message: a list of 100,000 wrong items would fill the model's window.
_MAX_PROBLEMS = 20
# Maximum of characters of a problem: enough for the values of a usual enumeration.
_MAX_PROBLEM_CHARS = 300
# Maximum of characters of a quoted value: enough to recognise it.
_MAX_VALUE_CHARS = 60
# Maximum of characters of a type: an enumeration may have 1,000 values.
_MAX_TYPE_CHARS = 150
# Maximum of characters of a path, counted from its end: a path may have 100 steps.
_MAX_PATH_CHARS = 150
# Maximum of parameters in a message: functions have fewer, but a foreign schema may have thousands.
_MAX_PARAMETERS = 50
# Keywords that may contain the parameters of a schema without own properties.
_COMPOSITION_KEYWORDS = frozenset({"anyOf", "oneOf", "allOf", "$ref", "patternProperties"})
# Clearer wording for messages of the parser.
_PARSER_MESSAGES = {
    "expected ident": "expected a value, not a bare word",
    "expected value": "expected a value, not NaN, Infinity or a bare word",
    "lone leading surrogate in hex escape": "half of a surrogate pair",
    "number out of range": "a number of too many digits",
    "recursion limit exceeded": "nested more than 200 deep",
    "unexpected end of hex escape": "half of a surrogate pair, or a \\u escape that is cut short",
}


def normalise_text(text: str) -> str:
    """Remove surrounding white space and a byte order mark; an empty text, which models send for no arguments, is `{}`.

    Returns:
        The text to check, journal, bind and send back.
    """
    return text.strip(JSON_BLANKS) or "{}"


def require_object(text: str) -> str:
    """Return the arguments of a call after `normalise_arguments`.

    Raises:
        ArgumentsError: if they are not one strict JSON object.
    """
    text = normalise_arguments(text)
    if reason := check_object(text):
        raise ArgumentsError(f"the arguments are not a JSON object ({reason}). Send one, with nothing around it.")
    return text


def check_object(text: str) -> str | None:
    r"""Return why the text is not one strict JSON object, without raising; None if it is one.

    JSON that some stores or parsers reject is refused, too: duplicate keys, NaN and Infinity, lone surrogates,
    `\u0000`, nesting beyond 200, integers beyond 4,300 digits.

    Args:
        text: Arguments from the model, of any length, after `normalise_text`.
    """
    try:
        value = jiter.from_json(text.encode(), catch_duplicate_keys=True, allow_inf_nan=False)
    except UnicodeEncodeError as error:
        return f"half of a surrogate pair at character {error.start}"
    except ValueError as error:
        reason, at, place = str(error).rpartition(" at line ")
        return _PARSER_MESSAGES.get(reason, shorten(reason, _MAX_PROBLEM_CHARS)) + at + place
    if not isinstance(value, dict):
        return f"it is {_describe_value(value)}"
    if "\\u0000" in text and _NUL_ESCAPE.search(text):
        return "it contains the character \\u0000"
    return None


def read_object(text: str, read: Callable[[str], T], *, such_as: str = "", alone: bool = False) -> T:
    """Return what `read` makes of the JSON object in a text of the model: the first that it accepts.

    The object may stand in a sentence or a code fence, beside others, and be written as `repair_object` mends it. It
    is part of no other value. Nothing is read from a text that breaks off in an object, or has members outside of one.
    If two objects are accepted that differ, none is taken, because the model may have quoted one of them.

    Args:
        text: The reply of a model, of any length.
        read: Reads the text of one strict JSON object. It refuses one by an `ArgumentsError`, `KeyError`, `TypeError`
            or `ValueError`.
        such_as: Example for the error, after "send one".
        alone: Whether there may be no other objects, nor quotes and brackets around it.

    Raises:
        ArgumentsError: if there is no such object; the message says to the model what is wrong.
    """
    found, flaws = None, {}
    for each in _list_objects(text, alone=alone):
        try:
            value = read(each)
        except KeyError as error:
            flaws[each] = f"the answer does not fit: {error} is missing"
        except (TypeError, ValueError) as error:
            flaws[each] = f"the answer does not fit: {error}"
        except ArgumentsError as error:
            flaws[each] = str(error)
        else:
            if found is not None and json.loads(found[0]) != json.loads(each):
                raise ArgumentsError("the answer has two JSON objects that differ, and each of them fits; send one.")
            found = found or (each, value)
    if found is not None:
        return found[1]
    if flaws:
        raise ArgumentsError(flaws[max(flaws, key=len)])  # a longer one is no example
    opening = _OPENING.search(text)
    flaw = check_object(normalise_text(text[opening.start() :] if opening else text)) or "it is part of another value"
    raise ArgumentsError(f"the answer is not a JSON object ({flaw}); send one{such_as}, with nothing around it.")


def _list_objects(text: str, *, alone: bool) -> list[str]:
    """Return the JSON objects in a text that are part of no other value, repaired if necessary.

    There are none if the text breaks off in one, or has more than 20 brackets to look at.
    """
    text = normalise_text(text)
    if whole := text if check_object(text) is None else repair_object(text):
        return [whole]
    objects: list[str] = []
    end, seen, opening = 0, 0, None if alone else _OPENING.search(text)
    while opening:
        start, before, seen = opening.start(), end, seen + 1
        end = _find_end(text, start)
        if (
            seen > _MAX_OBJECTS or end < 0 or _STRAY_MEMBER.search(text[before:start])
        ):  # the pattern has to see the ends
            return []
        part = text[start:end]
        if part[0] == "{" and (whole := part if check_object(part) is None else repair_object(part)):
            objects.append(whole)
        opening = _OPENING.search(text, end)
    return [] if _STRAY_MEMBER.search(text[end:]) else objects


def _find_end(text: str, start: int) -> int:
    """Return the end of the array or object that begins at an index; -1 if the text breaks off in it."""
    depth = 0
    for token in _TOKEN_OR_BRACKET.finditer(text, start):
        if token.lastgroup == "opening":
            depth += 1
        elif token.lastgroup == "closing":
            depth -= 1
            if depth == 0:
                return token.end()
    return -1


def repair_object(text: str) -> str | None:
    """Repair arguments that are not JSON: trailing commas, single quotes, bare keys, `True`, comments, code fences.

    The repair changes only the notation, token by token, so that nothing is lost, guessed or reordered. Valid JSON that
    was refused stays refused. So does truncated text, whose last argument would be incomplete. json-repair is not used:
    it drops the last line break of a text, reads `NaN` as "NaN" and `1,,` as "1,", completes truncated text, and took
    92 ms for 60,000 characters of junk and 3 s for 16,000 brackets.

    Args:
        text: Text that `check_object` refused. A text of more than 16,000 characters is not repaired.

    Returns:
        One strict JSON object, or None.
    """
    before, bracket, rest = text.strip(JSON_BLANKS).partition("{")
    if len(text) > _MAX_REPAIR_CHARS or not bracket or not _PREFIX.fullmatch(before):
        return None
    if whole := _extract_leading_object(bracket + rest):
        return whole
    broken = bracket + rest.rstrip(f"{JSON_BLANKS},;`")
    mended = _TRAILING_COMMA.sub(lambda found: found[1] or "", _TOKEN.sub(_rewrite_token, broken)).strip(JSON_BLANKS)
    return mended if check_object(mended) is None else None


def _extract_leading_object(text: str) -> str | None:
    try:
        _, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return None
    return text[:end] if _SUFFIX.fullmatch(text, end) and check_object(text[:end]) is None else None


def _rewrite_token(token: re.Match[str]) -> str:
    text = token.group()
    match token.lastgroup:
        case "note":
            return " "
        case "key":
            return json.dumps(text)
        case "text":
            return f'"{_QUOTED_CHAR.sub(_rewrite_quoted_char, text[1:-1])}"'
    return _PYTHON_LITERALS.get(text, text)


def _rewrite_quoted_char(found: re.Match[str]) -> str:
    char = found.group()
    return "'" if char == "\\'" else char if char[0] == "\\" else json.dumps(char)[1:-1]


def build_problem(kind: str, place: tuple[str | int, ...], value: object, wish: str = "") -> ErrorDetails:
    """Build a problem in pydantic's form."""
    return {"type": kind, "loc": place, "msg": wish, "input": value}


def format_problems(
    subject: str, problems: Iterable[ErrorDetails], arguments: JSON, parameters: Mapping[str, Any]
) -> str:
    """Format the problems found by a validator for the model.

    Args:
        subject: Subject and verb of the first line, for example "the arguments of search do".
        problems: Problems in pydantic's form, any number; only the first 20 are read.
        arguments: Parsed arguments.
        parameters: JSON Schema of the arguments.

    Returns:
        One line for each place, in the order found, and a last line with the expected parameters.
    """
    known, found = parameters["properties"], iter(problems)
    by_path = groupby(islice(found, _MAX_PROBLEMS), key=lambda problem: _format_path(problem, arguments))
    lines = [
        shorten(f"- {path}: {_describe_problems(list(group), known)}", _MAX_PROBLEM_CHARS) for path, group in by_path
    ]
    if next(found, None):
        lines.append("- and more")
    return "\n".join((f"{subject} not fit:", *lines, describe_parameters(parameters)))


def describe_parameters(parameters: Mapping[str, Any]) -> str:
    """Return one line about the parameters: name, type, and "required" or the default value."""
    required, properties = parameters.get("required", ()), parameters["properties"]
    shown = [
        f"{shorten(name, _MAX_VALUE_CHARS)} "
        f"({shorten(_describe_type(part), _MAX_TYPE_CHARS)}{_describe_requirement(name, part, required)})"
        for name, part in islice(properties.items(), _MAX_PARAMETERS)
    ]
    if len(properties) > _MAX_PARAMETERS:
        shown.append(f"and {len(properties) - _MAX_PARAMETERS} more")
    if shown:
        return f"Parameters: {', '.join(shown)}."
    return (
        "Its schema describes the parameters."
        if parameters.keys() & _COMPOSITION_KEYWORDS
        else "It takes no parameters: send {}."
    )


def join_alternatives(values: Iterable[object]) -> str:
    """Join values: `"a" or "b"`."""
    return " or ".join(map(_describe_value, values))


def _format_path(problem: ErrorDetails, arguments: JSON) -> str:
    """Return the path of a problem, as `items[3].name`, with the branch of a union in brackets: `pet (as Cat).name`."""
    path, value, last = "", arguments, len(problem["loc"]) - 1
    for index, step in enumerate(problem["loc"]):
        found, value = _descend(value, step)
        if found or (index == last and problem["type"].startswith("missing")):
            path += f"[{step}]" if isinstance(step, int) else f".{shorten(step, _MAX_VALUE_CHARS)}"
        elif index < last and str(step).isidentifier():
            path += f" (as {step})"
    path = path.removeprefix(".").lstrip() or "the object"
    return path if len(path) <= _MAX_PATH_CHARS else f"...{path[-_MAX_PATH_CHARS:]}"


def _descend(value: JSON, step: str | int) -> tuple[bool, JSON]:
    """Go one step down. A step that names a branch of a union, and is not in the value, changes nothing."""
    if isinstance(value, dict) and isinstance(step, str) and step in value:
        return True, value[step]
    if isinstance(value, list) and isinstance(step, int) and step < len(value):
        return True, value[step]
    return False, value


def _describe_problems(problems: Sequence[ErrorDetails], known: Mapping[str, Any]) -> str:
    """Describe the problems at one place. There are several if no branch of a union fits."""
    first = problems[0]
    match first["type"]:
        case "extra_forbidden" | "unexpected_keyword_argument":
            return "unknown" + _suggest_parameter(first["loc"], known)
        case kind if kind.startswith("missing"):
            return "required, but missing"
        case "value_error" | "assertion_error":
            return first["msg"].partition(", ")[2]
    wishes = dict.fromkeys(problem["msg"].removeprefix("Input ") for problem in problems)
    either = any(problem["loc"] != first["loc"] for problem in problems)  # the branches of a union
    return f"{(' or ' if either else ' and ').join(wishes)}, got {_describe_value(first['input'])}"


def _suggest_parameter(loc: tuple[str | int, ...], known: Mapping[str, Any]) -> str:
    """Suggest the parameter that was probably meant. In nested values the names are not known."""
    wanted = difflib.get_close_matches(str(loc[0])[:_MAX_VALUE_CHARS], known, n=1) if len(loc) == 1 else ()
    return "".join(f', did you mean "{name}"?' for name in wanted if name != loc[0])


def _describe_value(value: object) -> str:
    match value:
        case dict():
            return "an object"
        case list():
            return "an array"
        case str():
            return json.dumps(shorten(value, _MAX_VALUE_CHARS), ensure_ascii=False)
    return shorten(json.dumps(value, default=str), _MAX_VALUE_CHARS)


def _describe_requirement(name: str, schema: Any, required: Sequence[str]) -> str:
    if name in required:
        return ", required"
    stated = isinstance(schema, dict) and "default" in schema
    return f", default {shorten(json.dumps(schema['default']), _MAX_VALUE_CHARS)}" if stated else ""


def _describe_type(schema: Any) -> str:
    """Return the type in a few words: `integer`, `array of string`, `"asc" | "desc"`, or the name of a nested type."""
    if not isinstance(schema, dict):
        return "anything" if schema else "nothing"
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2].replace("#", "object")
    if "enum" in schema or "const" in schema:
        return " | ".join(map(_describe_value, schema.get("enum", [schema.get("const")])))
    if branches := schema.get("anyOf") or schema.get("oneOf"):
        return " | ".join(dict.fromkeys(map(_describe_type, branches)))
    if isinstance(items := schema.get("items"), dict) and items:
        return f"array of {_describe_type(items)}"
    kinds = schema.get("type", "anything")
    return " | ".join(kinds) if isinstance(kinds, list) else str(kinds)
