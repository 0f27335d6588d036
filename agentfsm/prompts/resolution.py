"""Resolve the instructions of an agent at the start of a run, which keeps them whatever is activated later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import attrs

from agentfsm.core.errors import MisuseError
from agentfsm.core.header import Header
from agentfsm.core.run import Run
from agentfsm.prompts.template import PromptTemplate, RenderedPrompt

# Text, a prompt, or a function of the run's header that returns text.
Instructions: TypeAlias = str | PromptTemplate | Callable[[Header], str]
# The same for the note at the end of each request, whose function takes the run.
Reminder: TypeAlias = str | PromptTemplate | Callable[[Run], str]


def resolve_instructions(given: Instructions, header: Header) -> Header:
    """Return the header with the text of the instructions, and the versions of their prompts in the fingerprint.

    Raises:
        MisuseError: if the prompt has variables without a default, or the function does not return text.
    """
    text = _resolve("instructions", given, header)
    sources = text.sources if isinstance(text, RenderedPrompt) else ()
    prompts = dict(source.split("@", 1) for source in sources)
    fingerprint = attrs.evolve(header.fingerprint, prompts=prompts)
    return attrs.evolve(header, instructions=str(text), fingerprint=fingerprint)


def resolve_reminder(given: Reminder, run: Run) -> str:
    """Return the text of the reminder for the next request of a run.

    Raises:
        MisuseError: if the prompt has variables without a default, or the function does not return text.
    """
    return _resolve("reminder", given, run)


def _resolve(option: str, given: str | PromptTemplate | Callable[[Any], str], subject: Header | Run) -> str:
    if isinstance(given, PromptTemplate):
        current = given.current()
        if missing := [each.name for each in current.declared if each.is_required]:
            values = ", ".join(f"{name}=..." for name in missing)
            raise MisuseError(
                f"{option}=: prompt {current.name} {current.version} has the variables {', '.join(missing)}: give a "
                f"function, {option}=lambda subject: prompts[{current.name!r}].render({values})"
            )
        return current.render()
    text: object = given(subject) if callable(given) else given
    if not isinstance(text, str):
        raise MisuseError(
            f"the function {option}= returned {type(text).__name__}: return text, such as prompt.render(...)"
        )
    return text
