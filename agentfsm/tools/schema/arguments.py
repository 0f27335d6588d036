"""Check whether arguments are one strict JSON object, repair them, and explain problems to the model.

This imports only jiter, so that the engine can check every call of a reply before it journals it, and pydantic stays
unloaded until the first tool is made.
"""

from __future__ import annotations

import difflib
import json
import re
from itertools import groupby, islice
from typing import TYPE_CHECKING, Any

import jiter

from agentfsm.core.errors import ArgumentsError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from pydantic_core import ErrorDetails

    from agentfsm.core.messages import JSON

# JSON's white space, and the byte order mark that some writers put in front.
_WHITESPACE = " \t\r\n\ufeff"
# The escape itself; behind an odd backslash it would be six harmless characters.
_NUL_ESCAPE = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")
# Characters; a longer text takes some milliseconds more, but is more likely to be broken in a way that nobody foresaw.
_MAX_REPAIR_CHARS = 16_000
# What may stand around an object without being a part of it: a sentence, a code fence.
_PREFIX = re.compile(r"(?:[^\[\]{}\":`]*[^\[\]{}\":`'])?:?\s*(?:```\w*\s*)?")
_SUFFIX = re.compile(r"\s*(?:```)?(?:\s*[^\[\]{}\":`'\s][^\[\]{}\":`]*)?")
# JSON as Python or JavaScript might write it. What is never closed reaches to the end, so that nobody looks for its end
# twice; it and what matches nothing is left as it is, and refused afterwards.
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
_PYTHON_LITERALS = {"True": "true", "False": "false", "None": "null"}
# What is written in another way between double quotes.
_QUOTED_CHAR = re.compile(r"\\.|[\"\x00-\x1f]", re.DOTALL)
# A comma with nothing behind it; texts match too, so that what looks like one in there is passed over.
_TRAILING_COMMA = re.compile(r'("(?:[^"\\]|\\.)*+"|".*)|,(?=\s*[}\]])', re.DOTALL)
# As many as a model can use; a list of 100,000 wrong items would fill its window.
_MAX_PROBLEMS = 20
# Characters; room for the allowed values of a usual enumeration.
_MAX_PROBLEM_CHARS = 300
# Characters; enough to recognise what was sent.
_MAX_VALUE_CHARS = 60
# Characters; an enumeration may hold 1,000 values.
_MAX_TYPE_CHARS = 150
# Characters, counted from the end; a path may be 100 steps deep.
_MAX_PATH_CHARS = 150
# A function has fewer; a schema from outside may have thousands.
_MAX_PARAMETERS = 50
# Where the parameters of a schema without properties of its own may stand.
_COMPOSITION_KEYWORDS = frozenset({"anyOf", "oneOf", "allOf", "$ref", "patternProperties"})
# The parser's words that say little to a reader.
_PARSER_MESSAGES = {
    "expected value": "expected a value (NaN, Infinity and bare words are none)",
    "lone leading surrogate in hex escape": "half of a surrogate pair",
    "number out of range": "a number of too many digits",
    "recursion limit exceeded": "nested more than 200 deep",
    "unexpected end of hex escape": "half of a surrogate pair, or a \\u escape that is cut short",
}


def normalise_text(text: str) -> str:
    """Trim white space and a byte order mark; no text at all counts as `{}`, as models send it for want of parameters.

    Returns:
        The text to check, journal, bind and send back.
    """
    return text.strip(_WHITESPACE) or "{}"


def require_object(text: str) -> str:
    """Return what `normalise_text` does.

    Raises:
        ArgumentsError: when that is not one strict JSON object.
    """
    text = normalise_text(text)
    if reason := check_object(text):
        raise ArgumentsError(f"the arguments are not a JSON object ({reason}). Send one, with nothing around it.")
    return text


def check_object(text: str) -> str | None:
    r"""Say why the text is not one strict JSON object, without raising.

    Refused is also what parsers let through and stores or other readers stumble over: duplicate keys, NaN and Infinity,
    lone surrogates, `\u0000`, nesting beyond 200, integers beyond 4,300 digits.

    Args:
        text: What the model wrote, of any length, after `normalise_text`.

    Returns:
        None where all is well, else the reason, to be put in brackets.
    """
    try:
        value = jiter.from_json(text.encode(), catch_duplicate_keys=True, allow_inf_nan=False)
    except UnicodeEncodeError as error:
        return f"half of a surrogate pair at character {error.start}"
    except ValueError as error:
        reason, at, place = str(error).rpartition(" at line ")
        return _PARSER_MESSAGES.get(reason, _truncate(reason, _MAX_PROBLEM_CHARS)) + at + place
    if not isinstance(value, dict):
        return f"it is {_describe_value(value)}"
    if "\\u0000" in text and _NUL_ESCAPE.search(text):
        return "it holds the character \\u0000"
    return None


def extract_object(text: str) -> str | None:
    """Return the one strict JSON object that a text is, mended if need be; None where it is none."""
    text = normalise_text(text)
    return text if check_object(text) is None else repair_object(text)


def repair_object(text: str) -> str | None:
    """Try to mend arguments that are no JSON: trailing commas, single quotes, bare keys, `True`, comments, fences.

    Only the way of writing is mended, token by token, so nothing is lost, guessed or reordered. Text that is JSON stays
    refused, whatever it was refused for. So does text that was cut short, since its last argument would be taken as if
    it were whole. json-repair was weighed and left out: it takes a text's last line break off, reads `NaN` as "NaN" and
    `1,,` as "1,", closes what was cut short, and took 92 ms for 60,000 characters of junk and 3 s for 16,000 brackets.

    Args:
        text: What `check_object` refused; beyond 16,000 characters it is not tried.

    Returns:
        One strict JSON object, or None.
    """
    before, bracket, rest = text.strip(_WHITESPACE).partition("{")
    if len(text) > _MAX_REPAIR_CHARS or not bracket or not _PREFIX.fullmatch(before):
        return None
    if whole := _extract_leading_object(bracket + rest):
        return whole
    broken = bracket + rest.rstrip(f"{_WHITESPACE},;`")
    mended = _TRAILING_COMMA.sub(lambda found: found[1] or "", _TOKEN.sub(_rewrite_token, broken)).strip(_WHITESPACE)
    return mended if check_object(mended) is None else None


def _extract_leading_object(text: str) -> str | None:
    try:
        _, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return None
    return text[:end] if _SUFFIX.fullmatch(text, end) and check_object(text[:end]) is None else None


def _rewrite_token(token: re.Match[str]) -> str:
    said = token.group()
    match token.lastgroup:
        case "note":
            return " "
        case "key":
            return json.dumps(said)
        case "text":
            return f'"{_QUOTED_CHAR.sub(_rewrite_quoted_char, said[1:-1])}"'
    return _PYTHON_LITERALS.get(said, said)


def _rewrite_quoted_char(found: re.Match[str]) -> str:
    char = found.group()
    return "'" if char == "\\'" else char if char[0] == "\\" else json.dumps(char)[1:-1]


def format_problems(
    subject: str, problems: Iterable[ErrorDetails], arguments: JSON, parameters: Mapping[str, Any]
) -> str:
    """Put a validator's findings into words that a model can act upon.

    Args:
        subject: What does not fit, and "do" or "does".
        problems: What was found, as pydantic puts it, in any number; the first 20 are asked for and told.
        arguments: What was sent, parsed.
        parameters: The JSON Schema of the arguments.

    Returns:
        A line per place, in the order found, and a last line with the expected parameters.
    """
    known, found = parameters["properties"], iter(problems)
    told = groupby(islice(found, _MAX_PROBLEMS), key=lambda problem: _format_path(problem, arguments))
    lines = [
        _truncate(f"- {path}: {_describe_problems(list(group), known)}", _MAX_PROBLEM_CHARS) for path, group in told
    ]
    if next(found, None):
        lines.append("- and more")
    return "\n".join((f"{subject} not fit:", *lines, describe_parameters(parameters)))


def describe_parameters(parameters: Mapping[str, Any]) -> str:
    """One line on the parameters: name, type, and whether it is required or what its default is."""
    required, properties = parameters.get("required", ()), parameters["properties"]
    shown = [
        f"{_truncate(name, _MAX_VALUE_CHARS)} "
        f"({_truncate(_describe_type(part), _MAX_TYPE_CHARS)}{_describe_requirement(name, part, required)})"
        for name, part in islice(properties.items(), _MAX_PARAMETERS)
    ]
    if len(properties) > _MAX_PARAMETERS:
        shown.append(f"and {len(properties) - _MAX_PARAMETERS} more")
    if shown:
        return f"Parameters: {', '.join(shown)}."
    return (
        "Its schema tells the parameters."
        if parameters.keys() & _COMPOSITION_KEYWORDS
        else "It takes no parameters: send {}."
    )


def join_alternatives(values: Iterable[object]) -> str:
    """Put values into words: `"a" or "b"`."""
    return " or ".join(map(_describe_value, values))


def _format_path(problem: ErrorDetails, arguments: JSON) -> str:
    """Where it is, as `items[3].name`; the branch of a union that was tried stands in brackets: `pet (as Cat).name`."""
    path, value, last = "", arguments, len(problem["loc"]) - 1
    for index, step in enumerate(problem["loc"]):
        found, value = _descend(value, step)
        if found or (index == last and problem["type"].startswith("missing")):
            path += f"[{step}]" if isinstance(step, int) else f".{_truncate(step, _MAX_VALUE_CHARS)}"
        elif index < last and str(step).isidentifier():
            path += f" (as {step})"
    path = path.removeprefix(".").lstrip() or "the object"
    return path if len(path) <= _MAX_PATH_CHARS else f"...{path[-_MAX_PATH_CHARS:]}"


def _descend(value: JSON, step: str | int) -> tuple[bool, JSON]:
    """Go one step down, or stay where the step is pydantic's name for a branch and no place in the value."""
    if isinstance(value, dict) and isinstance(step, str) and step in value:
        return True, value[step]
    if isinstance(value, list) and isinstance(step, int) and step < len(value):
        return True, value[step]
    return False, value


def _describe_problems(problems: Sequence[ErrorDetails], known: Mapping[str, Any]) -> str:
    """Say what is wrong at one place; there are several problems where no branch of a union fits."""
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
    """Offer the parameter that was probably meant; inside nested values the candidates are not known."""
    wanted = difflib.get_close_matches(str(loc[0])[:_MAX_VALUE_CHARS], known, n=1) if len(loc) == 1 else ()
    return "".join(f', did you mean "{name}"?' for name in wanted if name != loc[0])


def _describe_value(value: object) -> str:
    match value:
        case dict():
            return "an object"
        case list():
            return "an array"
        case str():
            return json.dumps(_truncate(value, _MAX_VALUE_CHARS), ensure_ascii=False)
    return _truncate(json.dumps(value, default=str), _MAX_VALUE_CHARS)


def _truncate(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]}..."


def _describe_requirement(name: str, schema: Any, required: Sequence[str]) -> str:
    if name in required:
        return ", required"
    stated = isinstance(schema, dict) and "default" in schema
    return f", default {_truncate(json.dumps(schema['default']), _MAX_VALUE_CHARS)}" if stated else ""


def _describe_type(schema: Any) -> str:
    """The type in a word or two: `integer`, `array of string`, `"asc" | "desc"`, or the name of a nested type."""
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
