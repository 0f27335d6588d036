"""The port of interpreters, which run a script from its start until it waits for calls without an answer, or ends.

An interpreter is a pure function of its `ScriptSource`: for the same source and the same first answers a script makes
the same calls in the same order. All calls that the script waits for at once are answered together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import attrs

from agentfsm.core.messages import JSON
from agentfsm.core.value import Value


@attrs.frozen(kw_only=True)
class Answer(Value):
    """The result of a call of a script."""

    value: JSON = None
    """Value that the call returns."""

    error: str | None = None
    """Text of the exception that the call raises instead; None if it returns."""

    error_kind: str = "RuntimeError"
    """Name of the class of that exception, one of Python's own."""

    at: float
    """Time at which the call ended, seconds since 1970, which is the time that the script reads from then on."""


@attrs.frozen(kw_only=True)
class ScriptSource(Value):
    """A script, and all that its run depends on."""

    code: str
    """Text of the script."""

    parameters: Mapping[str, tuple[str, ...]]
    """Names of the parameters of each tool, in order, by the name of the tool."""

    answers: tuple[Answer, ...] = ()
    """Answers to its first calls, in the order of the calls."""

    max_calls: int
    """Maximum of its calls. It is not run beyond the first call above it."""

    has_await: bool = False
    """Whether the script awaits its calls, so that they may overlap. Otherwise a call returns its result."""

    started_at: float
    """Time at which the script started, seconds since 1970."""

    seed: str
    """Seed of its random numbers."""


@attrs.frozen(kw_only=True)
class ScriptCall(Value):
    """A call that a script has made."""

    tool: str
    """Name of the tool."""

    arguments: Mapping[str, Any]
    """Arguments by name, as JSON values."""

    line: int
    """Line of the script, from 1; 0 if it is not known."""


@attrs.frozen(kw_only=True)
class ScriptEnd(Value):
    """The end of a script."""

    value: Any = None
    """Value of its last line if that is an expression."""

    error: str | None = None
    """Exception that ended it, with its lines; None if it came to its end."""


@attrs.frozen(kw_only=True)
class ScriptStep(Value):
    """A script that waits, or has ended."""

    calls: tuple[ScriptCall, ...]
    """All its calls so far, those with an answer first."""

    printed: str = ""
    """What it has printed."""

    end: ScriptEnd | None = None
    """Its end; None while it waits for its calls without an answer."""


class Interpreter(Protocol):
    """Runs scripts: `Monty`, `CPython`, or your own."""

    @property
    def name(self) -> str:
        """Name of the interpreter."""
        ...

    @property
    def description(self) -> str:
        """What scripts cannot do, or can in addition, for the model: a sentence."""
        ...

    async def advance(self, source: ScriptSource) -> ScriptStep:
        """Run a script from its start until it waits or ends. Whatever the script does, an error of it is its end."""
        ...
