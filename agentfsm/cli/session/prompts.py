"""What a run asks of a person: put to whoever sits at the terminal, exactly as it will be done."""

from __future__ import annotations

import getpass
import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final, TypeAlias

from agentfsm.cli.render.formatting import format_time
from agentfsm.cli.render.pending import OUTCOME_UNKNOWN_TEXT, find_question, format_call
from agentfsm.cli.session.forms import ask_questions
from agentfsm.core.errors import ConflictError
from agentfsm.core.inbox import Approve, Decision, GiveInput, Reject, Rerun, Settle
from agentfsm.core.messages import Outcome
from agentfsm.core.pending import PendingKind
from agentfsm.core.text_safety import format_exact_json

if TYPE_CHECKING:
    from collections.abc import Iterable

    from agentfsm.agent import Agent
    from agentfsm.cli.terminal import Terminal
    from agentfsm.core.pending import Pending

# Decides what a run waits for; None leaves it for later.
DecideFunction: TypeAlias = Callable[["Pending"], Decision | None]
# A decision, with the run that asked and what it asked for.
RunDecision: TypeAlias = tuple[str, PendingKind, Decision]


def user_name() -> str:
    """Return who sits at the terminal, for the record; empty where the system does not say."""
    try:
        return getpass.getuser()
    except (OSError, KeyError, ImportError):
        return ""


def build_prompter(terminal: Terminal, run_id: str) -> DecideFunction:
    """Return what asks at the terminal, for a run; what a sub-agent's run asks is told as such."""
    return lambda item: _PROMPTS[item.kind](terminal, item, run_id)


def leave_undecided(_item: Pending) -> None:
    """Decide nothing: nobody is there."""
    return


def _ask_approval(terminal: Terminal, item: Pending, run_id: str) -> Decision | None:
    terminal.err(f"\n{item.tool} ({format_call(item, run_id)}) asks for your approval.")
    if item.description.strip():
        terminal.err(f"What it says it will do: {format_exact_json(item.description)}")
    terminal.err("It would be given exactly this:")
    terminal.err(format_exact_json(item.arguments))
    _show_deadline(terminal, item, "is a no")
    match terminal.ask_choice("May it run? [y/n]", {"y": "y", "yes": "y", "n": "n", "no": "n"}):
        case "y":
            return Approve(call_id=item.call_id, by=user_name(), digest=item.digest)
        case "n":
            why = terminal.ask("Why not? (for the model; may be empty)") or ""
            return Reject(call_id=item.call_id, by=user_name(), message=why)
    return None


def _ask_outcome(terminal: Terminal, item: Pending, run_id: str) -> Decision | None:
    terminal.err(
        f"\n{item.tool} ({format_call(item, run_id)}) {OUTCOME_UNKNOWN_TEXT}.\n"
        "Whether it took effect is not known here, and the tool does not promise that it may be repeated.\n"
        "Look at what it acts on, then say. It had been given:",
    )
    terminal.err(format_exact_json(item.arguments))
    words = ("done", "failed", "rerun", "later")
    choices = {form: word for word in words for form in (word, word[0])}
    match terminal.ask_choice("What became of it? [done/failed/rerun/later]", choices):
        case "done":
            content = terminal.ask("What did it return?")
            return None if content is None else _build_settle(item, Outcome.DONE, content)
        case "failed":
            content = terminal.ask("How did it fail?")
            return None if content is None else _build_settle(item, Outcome.FAILED, content)
        case "rerun":
            return Rerun(call_id=item.call_id, by=user_name())
    return None


def _build_settle(item: Pending, outcome: Outcome, content: str) -> Decision:
    return Settle(call_id=item.call_id, by=user_name(), outcome=outcome, content=content)


def _ask_question(terminal: Terminal, item: Pending, run_id: str) -> Decision | None:
    question = find_question(item)
    if item.questions:
        terminal.err(f"\n{item.tool} ({format_call(item, run_id)}) asks:")
        _show_deadline(terminal, item, "is none: the call goes without")
        return ask_questions(terminal, item, user_name())
    if question is None:
        terminal.err(f"\n{item.tool} ({format_call(item, run_id)}) gets its result from outside. It was given:")
        terminal.err(format_exact_json(item.arguments))
    else:
        terminal.err(f"\nYou are asked ({format_call(item, run_id)}):\n{question}")
    _show_deadline(terminal, item, "is none: the run goes on without")
    while not (content := terminal.ask("Your answer:")):
        if content is None:
            return None
    return _build_settle(item, Outcome.DONE, content)


def _show_deadline(terminal: Terminal, item: Pending, then: str) -> None:
    if item.expires_at is not None:
        terminal.err(f"No answer until {format_time(item.expires_at)} {then}. Ctrl-D leaves it for later.")


def _ask_nothing(_terminal: Terminal, _item: Pending, _run_id: str) -> None:
    """Leave what no answer ends: the report tells of it."""
    return


_PROMPTS: Final[Mapping[PendingKind, Callable[[Terminal, Pending, str], Decision | None]]] = {
    PendingKind.APPROVAL: _ask_approval,
    PendingKind.OUTCOME: _ask_outcome,
    PendingKind.QUESTION: _ask_question,
    PendingKind.INPUT: _ask_nothing,
    PendingKind.PAUSE: _ask_nothing,
    PendingKind.CRASH: _ask_nothing,
}


async def submit_decisions(agent: Agent, decisions: Iterable[RunDecision]) -> list[str]:
    """Hand decisions in, each to the run that asked.

    Returns:
        What was refused, because somebody else had decided otherwise.
    """
    refused: list[str] = []
    for run_id, kind, decision in decisions:
        try:
            await _submit_decision(agent, run_id, kind, decision)
        except ConflictError as error:
            refused.append(str(error))
    return refused


async def _submit_decision(agent: Agent, run_id: str, kind: PendingKind, decision: Decision) -> None:
    call_id, by = decision.call_id, decision.by
    match decision:
        case Approve(arguments=text, digest=digest):
            arguments = None if text is None else json.loads(text)
            await agent.approve(run_id, call_id, by=by, arguments=arguments, digest=digest or None)
        case Reject(message=message):
            await agent.reject(run_id, call_id, message=message, by=by)
        case GiveInput(answers=answers, digest=digest):
            several = answers if len(answers) > 1 else next(iter(answers.values()))
            declined = all(each is None for each in answers.values())
            content = None if declined else several
            await agent.answer(run_id, call_id, content, declined=declined, by=by, digest=digest)
        case Rerun():
            await agent.settle(run_id, call_id, rerun=True, by=by)
        case Settle(outcome=outcome, content=content) if kind is PendingKind.QUESTION:
            await agent.answer(run_id, call_id, content, failed=outcome is Outcome.FAILED, by=by)
        case Settle(outcome=Outcome.DONE, content=content):
            await agent.settle(run_id, call_id, result=content, by=by)
        case Settle(content=content):
            await agent.settle(run_id, call_id, failed=content, by=by)
