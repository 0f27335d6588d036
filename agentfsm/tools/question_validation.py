"""Validation of the questions that a tool asks a person during a call, and of the answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import attrs

from agentfsm.core.errors import MisuseError
from agentfsm.core.json_text import encode_json
from agentfsm.core.messages import replace_surrogates
from agentfsm.core.pending import Question

if TYPE_CHECKING:
    from agentfsm.core.messages import JSON

# Maximum of questions per pause: more cannot be answered at a time.
MAX_QUESTIONS: Final = 20
# Maximum of characters of a question's key.
MAX_KEY_CHARS: Final = 200
# Maximum of characters of a question's message: about two pages.
MAX_MESSAGE_CHARS: Final = 8_000
# Maximum of characters of a question's schema: a form of 100 fields has fewer.
MAX_SCHEMA_CHARS: Final = 20_000
# Maximum of characters of an address: browsers and proxies cut longer ones.
MAX_URL_CHARS: Final = 4_000
# Maximum of characters of a tool's state: enough for notes, not for data.
MAX_STATE_CHARS: Final = 250_000
# Maximum of characters of an answer, as JSON.
MAX_ANSWER_CHARS: Final = 100_000
# Maximum of times that one call may ask. Source: the limit of the MCP SDKs.
MAX_ROUNDS: Final = 10
# Types that a property of an answer may have; an array of strings is also allowed.
_PLAIN_TYPES: Final = ("string", "number", "integer", "boolean")


def validate_questions(questions: Sequence[Question]) -> tuple[Question, ...]:
    """Return a copy of the questions, if they can be asked together.

    Raises:
        MisuseError: if there are none or too many, two have the same key, or one is invalid.
    """
    if odd := [each for each in questions if not isinstance(each, Question)]:
        raise MisuseError(f"InputRequired takes questions, not {type(odd[0]).__name__}: Question(key=..., message=...)")
    if not 1 <= len(questions) <= MAX_QUESTIONS:
        raise MisuseError(f"InputRequired has {len(questions)} questions: ask 1 to {MAX_QUESTIONS} at once")
    keys = [question.key for question in questions]
    if len(set(keys)) < len(keys):
        raise MisuseError(f"two questions have the same key among {keys}: give each its own")
    for question in questions:
        if (flaw := _find_question_flaw(question)) is not None:
            raise MisuseError(f"the question {question.key[:MAX_KEY_CHARS]!r} cannot be asked: {flaw}")
    return tuple([_copy_question(question) for question in questions])


def _copy_question(question: Question) -> Question:
    """Return a question as the journal stores it, without objects shared with the tool."""
    schema = (
        None
        if question.schema is None
        else json.loads(replace_surrogates(json.dumps(question.schema, ensure_ascii=False)))
    )
    return attrs.evolve(
        question, message=replace_surrogates(question.message), url=replace_surrogates(question.url), schema=schema
    )


def _find_question_flaw(question: Question) -> str | None:
    key, message, url = question.key, question.message, question.url
    if not 1 <= len(key) <= MAX_KEY_CHARS or replace_surrogates(key) != key:
        return f"its key has to be 1 to {MAX_KEY_CHARS} characters of text"
    if not message.strip() or len(message) > MAX_MESSAGE_CHARS:
        return f"its message has to be 1 to {MAX_MESSAGE_CHARS:,} characters, and has {len(message):,}"
    if url and (len(url) > MAX_URL_CHARS or not url.startswith(("https://", "http://"))):
        return f"its url has to be an http(s) address of at most {MAX_URL_CHARS:,} characters"
    if url and question.schema is not None:
        return "it has a url and a schema; a question that is answered elsewhere has no schema"
    return None if question.schema is None else _find_schema_flaw(question.schema)


def _find_schema_flaw(schema: Mapping[str, Any]) -> str | None:
    try:
        if len(json.dumps(schema, allow_nan=False)) > MAX_SCHEMA_CHARS:
            return f"its schema has more than {MAX_SCHEMA_CHARS:,} characters"
        _compile_question_schema(schema)
    except (TypeError, ValueError, RecursionError, MisuseError) as error:
        return f"its schema is invalid ({error})"
    odd = [name for name, part in schema.get("properties", {}).items() if not _is_plain(part)]
    return f"{odd[0]!r} in its schema is not a plain value (string, number, integer, boolean, strings)" if odd else None


_SCHEMA_DRAFT: Final = "https://json-schema.org/draft/2020-12/schema"


def _compile_question_schema(schema: Mapping[str, Any]) -> tuple[dict[str, Any], Callable[[Any], bool]]:
    """Return the normalised schema, and a function that returns whether a value fits it.

    Raises:
        MisuseError: if it is not a valid schema, or too expensive to check.
    """
    from agentfsm.tools.schema.complexity import normalise_parameters  # noqa: PLC0415  they bring pydantic and a validator
    from agentfsm.tools.schema.validator import compile_schema  # noqa: PLC0415

    whole = {"$schema": _SCHEMA_DRAFT, **normalise_parameters(schema, "question")}
    return whole, compile_schema(whole, "question")


def _is_plain(part: Any) -> bool:
    if not isinstance(part, Mapping) or "$ref" in part:
        return False
    if part.get("type") != "array":
        return part.get("type") in _PLAIN_TYPES if "type" in part else _is_choice(part)
    items = part.get("items")
    return isinstance(items, Mapping) and (items.get("type") == "string" or _is_choice(items))


def _is_choice(part: Mapping[str, Any]) -> bool:
    """Return whether the schema lists the permitted values."""
    return any(keyword in part for keyword in ("enum", "const", "oneOf", "anyOf"))


def encode_state(state: JSON) -> str:
    """Return a tool's state as JSON text.

    Raises:
        MisuseError: if it is not JSON, or too large.
    """
    try:
        text = json.dumps(state, allow_nan=False)  # in ASCII, so that it comes back as it was, half characters included
    except (TypeError, ValueError, RecursionError) as error:
        raise MisuseError(f"InputRequired(state=...) has to be plain JSON: {error}") from None
    if len(text) > MAX_STATE_CHARS:
        raise MisuseError(
            f"InputRequired(state=...) has {len(text):,} characters as JSON, more than {MAX_STATE_CHARS:,}"
        )
    return text


def validate_answer(question: Question, content: Any) -> dict[str, Any]:
    """Return a person's answer as JSON values, if it fits the question.

    Args:
        question: The question.
        content: An object with the properties of the question's schema; plain text, if the schema has one string; None,
            if it has no properties.

    Raises:
        MisuseError: if it does not fit; the message states the problem.
    """
    schema = question.schema or {"type": "object", "properties": {}}
    if isinstance(content, str):
        content = {_find_text_property(question.key, schema): content}
    if not isinstance(content, Mapping | None):
        raise MisuseError(f"the answer to {question.key!r} has to be an object, not {type(content).__name__}")
    try:
        text = replace_surrogates(encode_json(dict(content or {})))
    except (TypeError, ValueError, RecursionError) as error:
        raise MisuseError(f"the answer to {question.key!r} has to be plain JSON: {error}") from None
    if len(text) > MAX_ANSWER_CHARS:
        raise MisuseError(
            f"the answer to {question.key!r} has {len(text):,} characters, more than {MAX_ANSWER_CHARS:,}"
        )
    value: dict[str, Any] = json.loads(text)
    _check_answer(question.key, schema, value)
    return value


def _find_text_property(key: str, schema: Mapping[str, Any]) -> str:
    """Return the name of the one string property that plain text stands for."""
    named = schema.get("properties", {})
    if [part.get("type") for part in named.values()] != ["string"]:
        names = ", ".join(map(repr, named)) or "none: agree with {}, or decline"
        raise MisuseError(f"the answer to {key!r} must be an object with the properties {names}, not plain text")
    return str(*named)


def _check_answer(key: str, schema: Mapping[str, Any], value: dict[str, Any]) -> None:
    whole, is_valid = _compile_question_schema(schema)
    unknown = [name for name in value if name not in whole["properties"]]
    if unknown:
        known = ", ".join(map(repr, whole["properties"])) or "none"
        raise MisuseError(f"the answer to {key!r} has {unknown[0]!r}, which was not asked for; its properties: {known}")
    if not is_valid(value):
        from agentfsm.tools.schema.arguments import format_problems  # noqa: PLC0415  as above
        from agentfsm.tools.schema.validator import find_problems  # noqa: PLC0415

        raise MisuseError(format_problems(f"the answer to {key!r} does", find_problems(whole, value), value, whole))
