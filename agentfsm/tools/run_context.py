"""What a tool may know of the call that it serves."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Generator, Mapping
from copy import deepcopy
from types import MappingProxyType
from typing import Any, Generic, TypeVar

import attrs

from agentfsm.core.calls import Inquiry
from agentfsm.core.messages import JSON, ErrorType, Media, Outcome
from agentfsm.core.pending import Pending, Question
from agentfsm.core.usage import AgentCost
from agentfsm.core.value import Value
from agentfsm.tools.question_validation import encode_state, validate_questions

D = TypeVar("D")


class _CompletedAwaitable:
    """What `ctx.progress(...)` returns: it was told already, and may be awaited or not."""

    def __await__(self) -> Generator[Any, Any, None]:
        return
        yield


_COMPLETED = _CompletedAwaitable()


async def _find_nothing(_query: str) -> str:
    return "There are no other tools."


@attrs.define(eq=False, repr=False)
class CancelFlag:
    """Whether a call is given up; set by the queue, read by the tool, from any thread."""

    is_set: bool = False


@attrs.frozen(kw_only=True)
class RunContext(Generic[D]):
    """What a tool may know of the call it serves; its first parameter, if annotated with this type."""

    deps: D
    """What the driving call was given as `deps=`."""

    run_id: str = ""
    turn: int = 0
    call_id: str = ""
    idempotency_key: str = ""
    """The same on every attempt at this call: hand it to the service that must not act twice."""

    fencing_token: int = 0
    """Of the lease that the run is driven under: larger for each later owner of the run. Hand it to the system that the
    tool writes to, if that refuses what comes with a smaller one than it has seen: then a process that stood still and
    was replaced changes nothing there. 0 where no run is behind the call.
    """

    attempt: int = 1
    """1, or more when an earlier attempt was cut off, is retried, or has asked a person."""

    deadline: float = float("inf")
    """Seconds since 1970 by which the call is cut off."""

    user: str | None = None
    roles: tuple[str, ...] = ()
    metadata: Mapping[str, Any] = attrs.field(factory=dict)
    on_progress: Callable[[str], None] | None = attrs.field(default=None, repr=False)
    """Where progress goes, from any thread; None when nobody watches."""

    cancel_flag: CancelFlag = attrs.field(factory=CancelFlag, repr=False)
    find_result_text: Callable[[str], str | None] = attrs.field(default=lambda _call_id: None, repr=False)
    """The whole content of an earlier result of the run, by its call's id."""

    find_result_parts: Callable[[str], tuple[Media, ...]] = attrs.field(default=lambda _call_id: (), repr=False)
    """All parts of an earlier result."""

    find_tools: Callable[[str], Awaitable[str]] = attrs.field(default=_find_nothing, repr=False)
    """Looks among the run's tools that the model was not offered, and tells of those that fit."""

    on_event: Callable[[Any], None] | None = attrs.field(default=None, repr=False)
    """Where the events of an agent that is a tool go; None when nobody watches."""

    inquiry: Inquiry = attrs.field(factory=Inquiry, repr=False)
    """What the tool has asked people, and was told: `answers` and `state`."""

    parent: Any = attrs.field(default=None, repr=False)
    """For a tool that is an agent: the run that it works for (`agentfsm.engine.execution.parent.Parent`)."""

    def progress(self, message: str) -> _CompletedAwaitable:
        """Tell whoever watches how far the call is: `await ctx.progress("half")`, without `await` in a plain function.

        Never waits for them.
        """
        if self.on_progress is not None:
            self.on_progress(message)
        return _COMPLETED

    @property
    def cancelled(self) -> bool:
        """Whether the call was given up (time-out, cancellation): a plain function should look, and stop."""
        return self.cancel_flag.is_set

    @property
    def answers(self) -> Mapping[str, Any]:
        """What people have answered so far to the tool's own `InputRequired`, by the question's key.

        Each is a dict that fits the question's schema, or None where it was declined. Empty on a first attempt.
        """
        return MappingProxyType(deepcopy(dict(self.inquiry.answers)))

    @property
    def state(self) -> Any:
        """The `state` of the tool's newest `InputRequired`, as JSON has it; None on a first attempt."""
        return json.loads(self.inquiry.state)


@attrs.frozen
class Found(Value):
    """What a tool's `on_unknown` function returns when the call was done before its worker died."""

    result: Any
    """What it returned then."""


@attrs.frozen(kw_only=True)
class ToolReturn(Value):
    """What a tool hands back that tells by itself how its call ended: one that is an agent."""

    outcome: Outcome
    content: str
    error_type: ErrorType | None = None
    retryable: bool = False
    child: AgentCost | None = None
    parts: tuple[Media, ...] = ()
    """What goes with the content, which names them: both come from `result_text.render_parts`."""


class CallPaused(Exception):  # noqa: N818  it is no error: the call goes on later
    """Raised by a tool whose call waits for what is outside of the run; it is called again when that is there.

    Attributes:
        pending: What it waits for.
    """

    def __init__(self, pending: tuple[Pending, ...]) -> None:
        super().__init__(pending)
        self.pending = pending


class InputRequired(CallPaused):
    """Raised by a tool that has to ask a person; its call ends, and is made again when the answer is there.

    Nothing waits in memory: the run is stored with the questions, anybody may answer (`agent.answer`), and the tool is
    called anew from its beginning, by whichever process goes on with the run. It then finds `ctx.answers` and
    `ctx.state`. What it did before it asked, it does again: ask first, or keep in `state` what is done.

    Attributes:
        questions: What is asked; all of them are answered at once.
        state: What the tool gets back, as JSON text.
    """

    def __init__(self, *questions: Question, state: JSON = None) -> None:
        """Ask.

        Args:
            *questions: 1 to 20, each under a key of its own.
            state: Anything that JSON can hold, up to 250,000 characters of it: what the next attempt has to know.

        Raises:
            MisuseError: when a question cannot be asked, or the state cannot be kept.
        """
        super().__init__(())
        self.questions = validate_questions(questions)
        self.state = encode_state(state)
