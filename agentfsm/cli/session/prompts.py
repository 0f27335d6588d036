"""Ask the person at the terminal about the waits of a run."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias, runtime_checkable

from agentfsm.agents.admission import admit_answer
from agentfsm.agents.decisions import describe_allowance
from agentfsm.cli.render.formatting import format_time
from agentfsm.cli.render.pending import (
    describe_unknown_outcome,
    find_question,
    format_call,
    format_error_lines,
    format_exact_arguments,
)
from agentfsm.cli.session.forms import ask_questions
from agentfsm.cli.terminal import user_name
from agentfsm.core.errors import AgentError, MisuseError
from agentfsm.core.pending import Answer, PendingKind
from agentfsm.core.plans import PLAN_TOOL
from agentfsm.core.text_safety import escape_hidden, format_exact_json
from agentfsm.tools.schema.arguments import check_object

if TYPE_CHECKING:
    from agentfsm.agents.runs import Runs
    from agentfsm.cli.terminal import Terminal
    from agentfsm.core.pending import Pending

# Submits a decision to the run that asked for it.
Submission: TypeAlias = Callable[["Runs"], Awaitable[None]]
# Decides about one wait of a run. Returns None to leave it undecided.
DecideFunction: TypeAlias = Callable[["Pending"], Submission | None]


@runtime_checkable
class ApprovalRule(Protocol):
    """Rule of a tool whose calls a person may approve once for all; tools of MCP servers have it."""

    def is_covered(self) -> bool:
        """Return whether all calls are approved."""
        ...

    def scopes(self) -> tuple[str, ...]:
        """Return the approvals that a person may give, keys of `_SCOPES`."""
        ...

    def allow(self, scope: str) -> None:
        """Store an approval."""
        ...


# Approval for all calls -> key to press, and its subject.
_SCOPES: Final = {
    "tool": ("a", "always for this tool"),
    "reading": ("r", "always for each tool of its server that the server calls read-only"),
}


def build_prompter(
    terminal: Terminal, run_id: str, find_rule: Callable[[Pending], object] = lambda _item: None
) -> DecideFunction:
    """Return a function that asks at the terminal. It names the run if a sub-agent's run asks.

    Args:
        terminal: The terminal.
        run_id: Id of the run that is executed.
        find_rule: Returns the rule by which the tool of an item needs approval.
    """

    def decide(item: Pending) -> Submission | None:
        if item.kind is PendingKind.APPROVAL:
            rule = find_rule(item)
            lasting = rule if isinstance(rule, ApprovalRule) and not item.reason else None  # a guard asks each time
            return _ask_approval(terminal, item, run_id, lasting)
        return _PROMPTS[item.kind](terminal, item, run_id)

    return decide


def leave_undecided(_item: Pending) -> None:
    """Leave the item undecided, because there is no terminal to ask at."""
    return


def _ask_approval(terminal: Terminal, item: Pending, run_id: str, rule: ApprovalRule | None) -> Submission | None:
    def approve(runs: Runs) -> Awaitable[None]:
        return runs.approve(item.run_id, item.call_id, by=user_name(), digest=item.digest)

    if rule is not None and rule.is_covered() and not item.error:  # approved at an earlier question of this reply
        terminal.err(f"{item.tool} ({format_call(item, run_id)}) is always approved")
        return approve
    _show_call(terminal, item, run_id)
    scopes = {_SCOPES[scope][0]: scope for scope in (rule.scopes() if rule is not None else ())}
    for key, scope in scopes.items():
        terminal.err(f"{key}: {_SCOPES[scope][1]}")
    terminal.err("e: edit the arguments first; ?: explain the answers")
    keys = ["y", "n", "e", *scopes]
    if item.arguments and item.tool != PLAN_TOOL:
        terminal.err("s: yes, and also to later calls like it in this session")
        keys.append("s")
    choices = {"yes": "y", "no": "n", "edit": "e", **{key: key for key in keys}}
    answer = terminal.ask_choice(f"May it run? [{'/'.join(keys)}]", choices, _EXPLANATION)
    if answer == "e":
        return _edit_arguments(terminal, item)
    if answer == "s":
        return _allow_for_session(terminal, item)
    if rule is not None and answer in scopes:
        try:
            rule.allow(scopes[answer])
        except AgentError as error:
            terminal.err(f"only this call is approved: {error}")
    if answer == "n":
        why = terminal.ask("Reason, for the model (may be empty):") or ""
        reason = admit_answer(why, user_name())
        return lambda runs: runs.reject(item.run_id, item.call_id, message=reason, by=user_name())
    return None if answer is None else approve


def ask_together(
    terminal: Terminal, items: Sequence[Pending], run_id: str
) -> tuple[Submission | None, Sequence[Pending]]:
    """Ask whether several calls of one tool may run, each shown as for a single question.

    Returns:
        The submission of the decisions, None if there are none; and the items that remain to be asked one by one. Both
        are empty if the person leaves all of them for later.
    """
    for number, item in enumerate(items, 1):
        terminal.err(f"\n{number} of {len(items)}:")
        _show_call(terminal, item, run_id)
    terminal.err("s: some of them, by their numbers; o: one by one, also to edit")
    answer = terminal.ask_choice("May they run? [y/n/s/o]", _TOGETHER)
    if answer == "o":
        return None, items
    if answer == "n":
        why = terminal.ask("Reason, for the model (may be empty):") or ""
        reason = admit_answer(why, user_name())
        return lambda runs: runs.decide(reject=items, message=reason, by=user_name()), ()
    chosen = set(range(1, len(items) + 1)) if answer == "y" else set[int]()
    while answer == "s" and not chosen:
        if (text := terminal.ask("Numbers of those that may run, such as 1,3:")) is None:
            return None, ()
        words = text.replace(",", " ").split()
        if words and all(word.isdecimal() and 1 <= int(word) <= len(items) for word in words):
            chosen = set(map(int, words))
    if not chosen:
        return None, ()
    approved = [item for number, item in enumerate(items, 1) if number in chosen]
    left = [item for number, item in enumerate(items, 1) if number not in chosen]
    return lambda runs: runs.decide(approve=approved, by=user_name()), left


_TOGETHER: Final = {form: word[0] for word in ("yes", "no", "some", "one") for form in (word, word[0])}
_EXPLANATION: Final = """\
y       the call runs once, with exactly these arguments
n       it does not run; you are asked for a reason, which the model reads
e       you edit the arguments, and the call runs with yours
s       it runs, and later calls like it in this session do; you choose the arguments that have to be the same
Ctrl-D  decide later: the run waits, also for days, and the commands to continue are printed"""


def _show_call(terminal: Terminal, item: Pending, run_id: str) -> None:
    """Show the call that needs approval, with its exact arguments."""
    terminal.err(f"\n{item.tool} ({format_call(item, run_id)}) asks for your approval.")
    if item.error:
        terminal.err("The last approval was not executed:")
        for line in format_error_lines(item):
            terminal.err(f"  {line}")
    if item.reason:
        terminal.err(f"A guard wants it: {format_exact_json(item.reason)}")
    if item.description.strip():
        terminal.err(f"Its own description: {format_exact_json(item.description)}")
    terminal.err("Its exact arguments:")
    terminal.err(format_exact_arguments(item.arguments))
    _show_deadline(terminal, item, "rejects it")


def _edit_arguments(terminal: Terminal, item: Pending) -> Submission | None:
    """Approve the call with other arguments. They are checked when the approval is submitted."""
    text = escape_hidden(json.dumps(item.arguments, ensure_ascii=False, default=str))
    while (edited := terminal.edit("Arguments, as JSON:", text)) is not None:
        if (flaw := check_object(edited)) is None:
            arguments = json.loads(edited)
            return lambda runs: runs.approve(
                item.run_id, item.call_id, by=user_name(), arguments=arguments, digest=item.digest
            )
        terminal.err(f"that is not a JSON object ({flaw})")
        text = edited
    return None


def _allow_for_session(terminal: Terminal, item: Pending) -> Submission | None:
    """Approve the call, and allow later ones by a rule that the person has seen."""
    names = ", ".join(item.arguments)
    while (text := terminal.ask(f"Arguments that have to be the same ({names}):")) is not None:
        chosen = text.replace(",", " ").split()
        try:
            terminal.err(f"Rule: {describe_allowance(item, chosen)}")
        except MisuseError as error:
            terminal.err(str(error))
            continue
        if (
            terminal.ask_choice("Approve the call, and allow this? [y/n]", {"y": "y", "yes": "y", "n": "n", "no": "n"})
            == "y"
        ):
            return lambda runs: runs.approve(
                item.run_id, item.call_id, by=user_name(), digest=item.digest, allow=chosen
            )
        return None
    return None


def _ask_outcome(terminal: Terminal, item: Pending, run_id: str) -> Submission | None:
    terminal.err(
        "\n".join([f"\n{describe_unknown_outcome(item)} ({format_call(item, run_id)}).", *format_error_lines(item), ""])
        + "It is unknown whether it took effect, and the tool is not declared safe to repeat.\n"
        "Check the system that it acts on, then answer. Its exact arguments:",
    )
    terminal.err(format_exact_arguments(item.arguments))
    words = ("done", "failed", "rerun", "later")
    choices = {form: word for word in words for form in (word, word[0])}
    match terminal.ask_choice("How did it end? [done/failed/rerun/later]", choices):
        case "done":
            if (result := admit_answer(terminal.ask("What did it return?"), user_name())) is not None:
                return lambda runs: runs.settle(item.run_id, item.call_id, result=result, by=user_name())
        case "failed":
            if (failure := admit_answer(terminal.ask("How did it fail?"), user_name())) is not None:
                return lambda runs: runs.settle(item.run_id, item.call_id, failed=failure, by=user_name())
        case "rerun":
            return lambda runs: runs.settle(item.run_id, item.call_id, rerun=True, by=user_name())
    return None


def _ask_question(terminal: Terminal, item: Pending, run_id: str) -> Submission | None:
    question = find_question(item)
    if item.questions:
        terminal.err(f"\n{item.tool} ({format_call(item, run_id)}) asks:")
        _show_deadline(terminal, item, "means that the call continues without one")
        if (answers := ask_questions(terminal, item)) is None:
            return None
        joined = _join_answers(answers)
        return lambda runs: runs.answer(
            item.run_id, item.call_id, joined, declined=joined is None, by=user_name(), digest=item.digest
        )
    if question is None:
        terminal.err(f"\n{item.tool} ({format_call(item, run_id)}) needs its result from outside. Its exact arguments:")
        terminal.err(format_exact_arguments(item.arguments))
    else:
        terminal.err(f"\nYou are asked ({format_call(item, run_id)}):\n{question}")
    _show_deadline(terminal, item, "means that the run continues without one")
    while not (content := admit_answer(terminal.ask("Your answer:"), user_name())):
        if content is None:
            return None
    return lambda runs: runs.answer(item.run_id, item.call_id, content, by=user_name())


def ask_during_call(terminal: Terminal, item: Pending, run_id: str) -> Answer | None:
    """Ask the questions of a call that waits for the answer. Return None if the person gives none."""
    terminal.err(f"\n{item.tool} ({format_call(item, run_id)}) asks, and the call waits. Ctrl-D gives no answer.")
    answers = ask_questions(terminal, item)
    return None if answers is None else Answer(content=_join_answers(answers), by=user_name())


def _join_answers(answers: Mapping[str, Any]) -> Any:
    """Return answers by key as the content of an answer; None if all questions were declined."""
    if all(each is None for each in answers.values()):
        return None
    return admit_answer(dict(answers) if len(answers) > 1 else next(iter(answers.values())), user_name())


def _show_deadline(terminal: Terminal, item: Pending, consequence: str) -> None:
    if item.expires_at is not None:
        terminal.err(f"No answer until {format_time(item.expires_at)} {consequence}. Ctrl-D leaves it for later.")


def _ask_nothing(_terminal: Terminal, _item: Pending, _run_id: str) -> None:
    """Ask nothing, because no answer ends this wait. The report contains the command that does."""
    return


_PROMPTS: Final[Mapping[PendingKind, Callable[[Terminal, Pending, str], Submission | None]]] = {
    PendingKind.OUTCOME: _ask_outcome,
    PendingKind.QUESTION: _ask_question,
    PendingKind.LOGIN: _ask_nothing,
    PendingKind.TASK: _ask_nothing,
    PendingKind.INPUT: _ask_nothing,
    PendingKind.PAUSE: _ask_nothing,
    PendingKind.CRASH: _ask_nothing,
}
