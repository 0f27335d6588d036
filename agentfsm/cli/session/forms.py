"""What a tool asks a person in the middle of its call: shown, and taken in from a command line or a terminal."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import attrs

from agentfsm.cli.render.pending import question_properties
from agentfsm.core.errors import MisuseError
from agentfsm.core.text_safety import format_exact_json
from agentfsm.decisions import build_input
from agentfsm.tools.schema.arguments import describe_parameters

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from agentfsm.cli.terminal import Terminal
    from agentfsm.core.pending import Pending, Question


# Characters of an answer that is told again, for whoever gave it.
ANSWER_CHARS: Final = 100
_YES_OR_NO: Final = {"true": True, "yes": True, "y": True, "false": False, "no": False, "n": False}


def parse_answer(
    item: Pending,
    text: str | None,
    fields: Sequence[tuple[str, str]],
    *,
    declined: bool,
) -> Any:
    """Return the content of the answer that a command line gives; None where it declines.

    Args:
        item: What is asked.
        text: A JSON object, or plain text; None where there is none.
        fields: Names of properties and their values; with a key and a dot in front, where several questions are asked.
        declined: Whether the person declines.

    Raises:
        MisuseError: when it does not fit what is asked.
    """
    if text is not None and fields:
        raise MisuseError("give the answer as one text, or as --field NAME=VALUE, and not both")
    if declined and (text is not None or fields):
        raise MisuseError("give an answer, or --decline, and not both")
    if text is None:
        content: Any = _parse_fields(item, fields) if fields else None
        build_input(item, content, declined=declined, by="")
        return content
    try:
        value, flaw = json.loads(text), None
    except (ValueError, RecursionError) as error:
        value, flaw = text, error
    content = value if isinstance(value, dict) else text
    try:
        build_input(item, content, declined=False, by="")
    except MisuseError:
        if flaw is not None and text.lstrip().startswith("{"):  # meant as an object
            raise MisuseError(f"the answer is not JSON ({flaw}): {text[:ANSWER_CHARS]}") from None
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
            raise MisuseError(f"--field {name}=... belongs to none of the questions {keys}: write KEY.NAME=VALUE")
        own = name.removeprefix(f"{question.key}.")
        content[question.key][own] = _parse_value(question, own, text)
    return content


def _parse_value(question: Question, name: str, text: str) -> Any:
    """Return what a person wrote as the property's kind has it; what is no such thing is left for the check to tell."""
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
    """Ask the person at the terminal a tool's questions.

    Returns:
        The answers by key, None for one that was declined; or None to leave all of them for later.
    """
    answers: dict[str, Any] = {}
    for question in item.questions:
        answer = _ask_question(terminal, item, question)
        if answer is None:
            return None
        answers |= answer
    return answers


def _ask_question(terminal: Terminal, item: Pending, question: Question) -> Mapping[str, Any] | None:
    """Ask one question until the answer fits."""
    alone = attrs.evolve(item, questions=(question,))
    terminal.err(format_exact_json(question.message)[1:-1])
    if question.url:
        terminal.err(f"It has to be opened: {format_exact_json(question.url)[1:-1]}")
    while True:
        word = terminal.ask("Will you answer? [y/n]" if question_properties(question) else "Do you agree? [y/n]")
        if word is None:
            return None
        if word.lower() in {"n", "no"}:
            return {question.key: None}
        if word.lower() not in {"y", "yes"}:
            continue
        fields = _ask_fields(terminal, question)
        if fields is None:
            return None
        try:
            return build_input(alone, _parse_fields(alone, fields), declined=False, by="").answers
        except MisuseError as error:
            terminal.err(str(error))


def _ask_fields(terminal: Terminal, question: Question) -> list[tuple[str, str]] | None:
    """Ask for each property; an empty line leaves it out. None where there is no answer."""
    fields: list[tuple[str, str]] = []
    schema = question.schema or {}
    for name, part in question_properties(question).items():
        one = describe_parameters({"properties": {name: part}, "required": schema.get("required", ())})
        text = terminal.ask(f"{one.removeprefix('Parameters: ').rstrip('.')}:")
        if text is None:
            return None
        if text:
            fields.append((name, text))
    return fields
