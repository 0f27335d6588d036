"""Parse the answers to questions of a tool, from a command line or a terminal."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import attrs

from agentfsm.agents.decisions import build_input
from agentfsm.cli.render.pending import question_properties
from agentfsm.core.errors import MisuseError
from agentfsm.core.text_safety import format_exact_json
from agentfsm.tools.schema.arguments import describe_parameters

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from agentfsm.cli.terminal import Terminal
    from agentfsm.core.pending import Pending, Question


# Characters of an answer that an error message quotes.
ANSWER_CHARS: Final = 100
_YES_OR_NO: Final = {"true": True, "yes": True, "y": True, "false": False, "no": False, "n": False}


def parse_answer(
    item: Pending,
    text: str | None,
    fields: Sequence[tuple[str, str]],
    *,
    declined: bool,
) -> Any:
    """Return the content of an answer given as arguments; None if the person declines.

    Args:
        item: The questions.
        text: A JSON object, or plain text; None if not given.
        fields: Names of properties and their values. With several questions, the name starts with a key and a dot.
        declined: Whether the person declines.

    Raises:
        MisuseError: if the answer does not match the questions.
    """
    if text is not None and fields:
        raise MisuseError("expected either one text or --field NAME=VALUE, not both")
    if declined and (text is not None or fields):
        raise MisuseError("expected either an answer or --decline, not both")
    if text is None:
        content: Any = _parse_fields(item, fields) if fields else None
        build_input(item, content, declined=declined, by="")
        return content
    try:
        value, fault = json.loads(text), None
    except (ValueError, RecursionError) as error:
        value, fault = text, error
    content = value if isinstance(value, dict) else text
    try:
        build_input(item, content, declined=False, by="")
    except MisuseError:
        if fault is not None and text.lstrip().startswith("{"):  # intended as an object
            raise MisuseError(f"the answer is not valid JSON ({fault}): {text[:ANSWER_CHARS]}") from None
        raise
    return content


def _parse_fields(item: Pending, fields: Sequence[tuple[str, str]]) -> dict[str, Any]:
    if len(item.questions) == 1:
        return {name: _parse_value(item.questions[0], name, text) for name, text in fields}
    content: dict[str, Any] = {question.key: {} for question in item.questions}
    for name, text in fields:
        question = next((each for each in item.questions if name.startswith(f"{each.key}.")), None)
        if question is None:
            keys = ", ".join(content)
            raise MisuseError(
                f"--field {name}=... names no question: write KEY.NAME=VALUE, with one of the keys {keys}"
            )
        own = name.removeprefix(f"{question.key}.")
        content[question.key][own] = _parse_value(question, own, text)
    return content


def _parse_value(question: Question, name: str, text: str) -> Any:
    """Convert text to the type of a property. Return the text if that fails, so that validation reports the error."""
    kind = question_properties(question).get(name, {}).get("type", "string")
    if kind == "string":
        return text
    if kind == "boolean":
        return _YES_OR_NO.get(text.lower(), text)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = text
    return [each.strip() for each in text.split(",")] if kind == "array" and not isinstance(value, list) else value


def ask_questions(terminal: Terminal, item: Pending) -> Mapping[str, Any] | None:
    """Ask the questions of a tool at the terminal.

    Returns:
        The answers by key, with None for a declined question; or None to leave all of them undecided.
    """
    answers: dict[str, Any] = {}
    for question in item.questions:
        answer = _ask_question(terminal, item, question)
        if answer is None:
            return None
        answers |= answer
    return answers


def _ask_question(terminal: Terminal, item: Pending, question: Question) -> Mapping[str, Any] | None:
    """Ask one question until the answer is valid."""
    single = attrs.evolve(item, questions=(question,))
    terminal.err(format_exact_json(question.message)[1:-1])
    if question.url:
        terminal.err(f"Open this page: {format_exact_json(question.url)[1:-1]}")
    while True:
        choice = terminal.ask("Will you answer? [y/n]" if question_properties(question) else "Do you agree? [y/n]")
        if choice is None:
            return None
        if choice.lower() in {"n", "no"}:
            return {question.key: None}
        if choice.lower() not in {"y", "yes"}:
            continue
        fields = _ask_fields(terminal, question)
        if fields is None:
            return None
        try:
            return build_input(single, _parse_fields(single, fields), declined=False, by="").answers
        except MisuseError as error:
            terminal.err(str(error))


def _ask_fields(terminal: Terminal, question: Question) -> list[tuple[str, str]] | None:
    """Ask for each property; an empty line omits it. Return None after Ctrl-D."""
    fields: list[tuple[str, str]] = []
    schema = question.schema or {}
    for name, part in question_properties(question).items():
        description = describe_parameters({"properties": {name: part}, "required": schema.get("required", ())})
        text = terminal.ask(f"{description.removeprefix('Parameters: ').rstrip('.')}:")
        if text is None:
            return None
        if text:
            fields.append((name, text))
    return fields
