"""Resolve the texts of an agent that are prompts or functions.

Instructions are resolved once, at the start of a run, which keeps them whatever is activated later; the reminder once a
turn.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from inspect import isawaitable, iscoroutinefunction, signature
from typing import Any, TypeAlias

import attrs

from agentfsm.core.errors import MisuseError
from agentfsm.core.header import Header
from agentfsm.core.run import Run
from agentfsm.core.value import Value
from agentfsm.prompts.template import PromptTemplate, RenderedPrompt
from agentfsm.tools.run_context import RunContext
from agentfsm.tools.schema.introspection import find_context_parameter, read_parameters

# Text, a prompt, or a function, plain or async, that returns text: of nothing, of the run's header, of a RunContext, or
# of the last two.
Instructions: TypeAlias = str | PromptTemplate | Callable[..., str] | Callable[..., Awaitable[str]]
# The same for the note at the end of each request, whose function takes the run instead of the header.
Reminder: TypeAlias = str | PromptTemplate | Callable[..., str] | Callable[..., Awaitable[str]]


@attrs.frozen(kw_only=True)
class TextSource(Value):
    """A text of an agent that a prompt or a function gives."""

    option: str
    """Name of the agent's field, for errors."""

    given: str | PromptTemplate | Callable[..., Any]
    """The text, the prompt or the function."""

    takes_context: bool = False
    """Whether the function takes a RunContext first."""

    takes_subject: bool = True
    """Whether the function takes the header or the run."""

    @property
    def is_deferred(self) -> bool:
        """Whether the text is known only when the run is executed: the function is async, or takes the context."""
        function = self.given
        is_async = iscoroutinefunction(function) or iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004
        return self.takes_context or is_async

    def read(self, subject: Header | Run) -> str:
        """Return the text of a prompt, or of a plain function of the header or the run.

        Raises:
            MisuseError: if the prompt has variables without a default, or the function does not return text.
        """
        if isinstance(self.given, PromptTemplate):
            current = self.given.current()
            if missing := [each.name for each in current.declared if each.is_required]:
                values = ", ".join(f"{name}=..." for name in missing)
                raise MisuseError(
                    f"{self.option}=: prompt {current.name} {current.version} has the variables {', '.join(missing)}: "
                    f"give a function, {self.option}=lambda subject: prompts[{current.name!r}].render({values})"
                )
            return current.render()
        return self._check(self.given(*[subject] * self.takes_subject) if callable(self.given) else self.given)

    async def read_with(self, subject: Header | Run, context: RunContext[Any]) -> str:
        """Return the text, also of an async function and of one that takes the context.

        Raises:
            MisuseError: as `read`.
        """
        if not self.is_deferred or not callable(self.given):
            return self.read(subject)
        text = self.given(*[context] * self.takes_context, *[subject] * self.takes_subject)
        return self._check(await text if isawaitable(text) else text)

    def _check(self, text: object) -> str:
        if isinstance(text, str):
            return text
        raise MisuseError(
            f"the function {self.option}= returned {type(text).__name__}: return text, such as prompt.render(...)"
        )


def find_source(option: str, given: Instructions | Reminder) -> TextSource:
    """Return the source of an agent's text, after a look at the parameters of a function.

    Raises:
        MisuseError: if a parameter after the first takes the RunContext.
    """
    if not callable(given) or isinstance(given, PromptTemplate):
        return TextSource(option=option, given=given)
    try:
        parameters = read_parameters(given, option)
    except MisuseError:  # it has no signature, or a hint that is imported for type checkers only
        if "RunContext" in str(_read_first_hint(given)):
            raise
        return TextSource(option=option, given=given)
    context = find_context_parameter(parameters, RunContext, option)
    takes_context = context is not None
    takes_subject = len(parameters) > takes_context
    return TextSource(option=option, given=given, takes_context=takes_context, takes_subject=takes_subject)


def _read_first_hint(function: Callable[..., Any]) -> object:
    try:
        return next((each.annotation for each in signature(function).parameters.values()), "")
    except (TypeError, ValueError):
        return ""


def set_instructions(header: Header, text: str) -> Header:
    """Return the header with the text of the instructions, and the versions of their prompts in the fingerprint."""
    sources = text.sources if isinstance(text, RenderedPrompt) else ()
    prompts = dict(source.split("@", 1) for source in sources)
    return attrs.evolve(header, instructions=str(text), fingerprint=attrs.evolve(header.fingerprint, prompts=prompts))
