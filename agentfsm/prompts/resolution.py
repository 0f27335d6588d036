"""Resolve the instructions of an agent at the start of a run, which keeps them whatever is activated later."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import attrs

from agentfsm.core.errors import MisuseError
from agentfsm.core.header import Header
from agentfsm.prompts.template import PromptTemplate, RenderedPrompt

# Text, a prompt, or a function of the run's header that returns text.
Instructions: TypeAlias = str | PromptTemplate | Callable[[Header], str]


def resolve_instructions(given: Instructions, header: Header) -> Header:
    """Return the header with the text of the instructions, and the versions of their prompts in the fingerprint.

    Raises:
        MisuseError: if the prompt has variables without a default, or the function does not return text.
    """
    text = _render(given) if isinstance(given, PromptTemplate) else given(header) if callable(given) else given
    if not isinstance(text, str):
        raise MisuseError(
            f"the function instructions= returned {type(text).__name__}: return text, such as prompt.render(...)"
        )
    sources = text.sources if isinstance(text, RenderedPrompt) else ()
    prompts = dict(source.split("@", 1) for source in sources)
    fingerprint = attrs.evolve(header.fingerprint, prompts=prompts)
    return attrs.evolve(header, instructions=str(text), fingerprint=fingerprint)


def _render(prompt: PromptTemplate) -> RenderedPrompt:
    current = prompt.current()
    if missing := [each.name for each in current.declared if each.is_required]:
        values = ", ".join(f"{name}=..." for name in missing)
        raise MisuseError(
            f"instructions=: prompt {current.name} {current.version} has the variables {', '.join(missing)}: give a "
            f"function, instructions=lambda header: prompts[{current.name!r}].render({values})"
        )
    return current.render()
