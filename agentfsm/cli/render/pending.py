"""Describe the waits of a run, and build the command lines that end them."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from agentfsm.cli.render.formatting import NOTE_CHARS, VALUE_CHARS, format_arguments, format_time
from agentfsm.core.pending import PendingKind
from agentfsm.core.text_safety import escape_hidden, format_exact_json, one_line
from agentfsm.tools.schema.arguments import describe_parameters

if TYPE_CHECKING:
    from agentfsm.cli.resolve.command_hint import CommandHint
    from agentfsm.core.pending import Pending, Question

# Characters of the questions of a tool: messages, URLs and fields.
MAX_QUESTION_CHARS: Final = 1_000
# Name of the built-in tool that asks the user.
ASK_USER: Final = "ask_user"


def format_call(item: Pending, run_id: str = "") -> str:
    """Return the id of the call, followed by the id of its run if that is not `run_id`."""
    return item.call_id if item.run_id == run_id else f"{item.call_id} of run {item.run_id}"


def format_exact_arguments(arguments: Mapping[str, Any]) -> str:
    """Return the arguments of a call as indented JSON, with the lines of a longer text below its name, each after "| ".

    Every hidden character is escaped, and nothing is omitted.
    """
    if not any(isinstance(value, str) and "\n" in value for value in arguments.values()):
        return format_exact_json(arguments)
    lines: list[str] = []
    for name, value in arguments.items():
        key = format_exact_json(name)
        if isinstance(value, str) and "\n" in value:
            lines += [f"{key}:", *[f"  | {escape_hidden(line)}" for line in value.split("\n")]]
        else:
            lines += f"{key}: {format_exact_json(value)},".splitlines()
    return "\n".join(["{", *[f"  {line}" for line in lines], "}"])


def format_whole_call(item: Pending) -> list[str]:
    """Return the exact arguments of a call to approve as lines, if `format_pending` cuts them; else none."""
    is_cut = any("\n" in str(value) or len(str(value)) > VALUE_CHARS for value in item.arguments.values())
    is_long = len(format_arguments(item.arguments)) > NOTE_CHARS // 2
    if item.kind is not PendingKind.APPROVAL or not (is_cut or is_long):
        return []
    return format_exact_arguments(item.arguments).splitlines()


_CALL_WAITS: Final = {
    PendingKind.APPROVAL: "the approval of",
    PendingKind.OUTCOME: "the outcome of",
    PendingKind.QUESTION: "an answer to",
    PendingKind.LOGIN: "the login for",
    PendingKind.TASK: "the task of",
    PendingKind.INPUT: "input for",
}


# Waits of the run itself.
_RUN_WAITS: Final = {
    PendingKind.INPUT: "your input",
    PendingKind.PAUSE: "the end of a pause",
    PendingKind.CRASH: "the end of a pause after crashes",
}


def format_wait(item: Pending, run_id: str = "") -> str:
    """Return a short description of a wait: "the approval of t1.0"."""
    if item.call_id:
        return f"{_CALL_WAITS[item.kind]} {format_call(item, run_id)}"
    return _RUN_WAITS[item.kind] + ("" if item.run_id == run_id else f" in run {item.run_id}")


def find_question(item: Pending) -> str | None:
    """Return the question of the built-in tool that asks the user; None for any other tool."""
    question = item.arguments.get("question")
    return question if item.tool == ASK_USER and isinstance(question, str) else None


def format_pending(item: Pending, run_id: str) -> str:
    """Return one wait of a run as a line.

    Args:
        item: The wait.
        run_id: The run that is shown. The line names the run of a sub-agent.
    """
    text = _FORMATTERS[item.kind](item)
    if not item.call_id:
        return text if item.run_id == run_id else f"run {item.run_id}: {text}"
    return f"{format_call(item, run_id)}: {text}"


def describe_unknown_outcome(item: Pending) -> str:
    """Return that the outcome of a call is unknown, and why unless the item has a reason of its own."""
    if item.error:
        return f"the outcome of {item.tool} is unknown"
    return f"{item.tool} was running when its worker died or was stopped, or when the run was forked"


def format_error_lines(item: Pending) -> list[str]:
    """Return the reason why an approval was not executed, or an outcome is unknown, as lines; empty without one."""
    return [one_line(line, NOTE_CHARS) for line in item.error.splitlines() if line.strip()]


def format_deadline(item: Pending, consequence: str) -> str:
    """Return the deadline of a wait and its consequence; empty if there is no deadline."""
    return "" if item.expires_at is None else f" (no answer until {format_time(item.expires_at)} {consequence})"


def _format_approval(item: Pending) -> str:
    notes = [one_line(note, NOTE_CHARS) for note in (item.description, item.reason) if note.strip()]
    description = "".join([f" {note}" for note in notes])
    call = one_line(escape_hidden(f"{item.tool}({format_arguments(item.arguments)})"), NOTE_CHARS)
    return f"may {call} run?{description}{format_deadline(item, 'rejects it')}"


def _format_outcome(item: Pending) -> str:
    if item.lacks_tool:
        return f"{item.tool} waits for its tool"
    return f"{describe_unknown_outcome(item)}; how did it end?"


def _format_question(item: Pending) -> str:
    if item.questions:
        return one_line("; ".join(format_questions(item)), MAX_QUESTION_CHARS) + format_deadline(
            item, "means that the call continues without one"
        )
    question = find_question(item)
    asked = f"the result of {item.tool}({format_arguments(item.arguments)})?" if question is None else question
    return one_line(asked, NOTE_CHARS) + format_deadline(item, "means that the run continues without one")


def question_properties(question: Question) -> Mapping[str, Any]:
    """Return the schemas of the answer's fields, by name."""
    schema = question.schema or {}
    properties: Mapping[str, Any] = schema.get("properties", {})
    return properties


def format_questions(item: Pending) -> Iterator[str]:
    """Yield the questions of a call: the message, the URL to open, and the fields of the answer.

    Each begins with its key if there are several.
    """
    for question in item.questions:
        key = f"{question.key}: " if len(item.questions) > 1 else ""
        opens = f" (open {question.url})" if question.url else ""
        fields = ""
        if question_properties(question):
            described = describe_parameters({"properties": {}, **(question.schema or {})})
            fields = f" [{described.removeprefix('Parameters: ').rstrip('.')}]"
        yield f"{key}{question.message}{opens}{fields}"


def _format_input(item: Pending) -> str:
    if not item.call_id:
        return one_line(item.description, NOTE_CHARS)
    reason = item.arguments.get("reason")
    why = f" ({reason})" if isinstance(reason, str) and reason.strip() else ""
    end = "" if item.expires_at is None else f", until {format_time(item.expires_at)} at the latest"
    return one_line(f"it waits for input{end}{why}", NOTE_CHARS)


_FORMATTERS: Final[Mapping[PendingKind, Callable[[Pending], str]]] = {
    PendingKind.APPROVAL: _format_approval,
    PendingKind.OUTCOME: _format_outcome,
    PendingKind.QUESTION: _format_question,
    PendingKind.LOGIN: _format_question,
    PendingKind.TASK: lambda item: one_line(item.description, NOTE_CHARS),
    PendingKind.INPUT: _format_input,
    PendingKind.PAUSE: lambda item: one_line(item.description, NOTE_CHARS),
    PendingKind.CRASH: lambda item: one_line(item.description, NOTE_CHARS),
}


def group_alike(pending: Iterable[Pending]) -> list[list[Pending]]:
    """Return the waits in their order, with those for the approval of calls of one tool in one run together.

    A call whose approval was not carried out stands alone, since its reason has to be read.
    """
    groups: dict[tuple[str, ...], list[Pending]] = {}
    for item in pending:
        is_alone = item.kind is not PendingKind.APPROVAL or item.error
        key = (item.run_id, item.call_id, item.kind) if is_alone else (item.run_id, item.tool)
        groups.setdefault(key, []).append(item)
    return list(groups.values())


# Commands that end a wait.


def format_group_hint(items: Sequence[Pending], hint: CommandHint) -> str:
    """Return the command line that approves several calls of one run together."""
    calls = " ".join([item.call_id for item in items])
    return hint.build(f"approve {shlex.quote(items[0].run_id)} {calls}{format_shown(items)}")


def format_shown(items: Iterable[Pending]) -> str:
    """Return the options that bind a decision to the calls as they are now."""
    return "".join([f" --digest {item.digest}" for item in items if item.digest])


def format_hints(item: Pending, hint: CommandHint) -> list[str]:
    """Return the command lines that end the wait; empty for a pause, which `resume` ends."""
    if hint.location is None and _COMMANDS[item.kind]:
        return [f"from Python, with {_METHODS[item.kind]}, because only the agent can open its store"]
    is_question = item.kind is PendingKind.QUESTION and item.questions
    forms = _QUESTION_COMMANDS if is_question else _COMMANDS[item.kind]
    if item.lacks_tool:  # to run it again starts nothing here
        forms = forms[:2]
    words = {"run": shlex.quote(item.run_id), "call": item.call_id, "shown": format_shown([item])}
    return [hint.build(form.format(**words)) for form in forms]


_COMMANDS: Final = {
    PendingKind.APPROVAL: ("approve {run} {call}{shown}", "reject {run} {call} --message WHY"),
    PendingKind.OUTCOME: (
        "settle {run} {call} --result TEXT",
        "settle {run} {call} --failed TEXT",
        "settle {run} {call} --rerun",
    ),
    PendingKind.QUESTION: ("answer {run} {call} TEXT", "answer {run} {call} TEXT --failed"),
    PendingKind.LOGIN: ("login {run} {call}", "answer {run} {call} --decline"),
    PendingKind.TASK: (),
    PendingKind.INPUT: ("send {run} TEXT",),
    PendingKind.PAUSE: (),
    PendingKind.CRASH: (),
}
# For the questions of a tool.
_QUESTION_COMMANDS: Final = ("answer {run} {call} JSON", "answer {run} {call} --decline")
_METHODS: Final = {
    PendingKind.APPROVAL: "agent.approve or agent.reject",
    PendingKind.OUTCOME: "agent.settle",
    PendingKind.QUESTION: "agent.answer",
    PendingKind.LOGIN: "Login.begin and Login.complete",
    PendingKind.INPUT: "agent.send",
}
