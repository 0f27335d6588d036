"""Context of a tool call: the run, the caller, the deadline, and access to earlier results."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Generator, Mapping
from copy import deepcopy
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import attrs

from agentfsm.core.calls import Inquiry
from agentfsm.core.labels import Label, as_labels
from agentfsm.core.messages import JSON, ErrorType, Media, Outcome
from agentfsm.core.pending import Pending, Question
from agentfsm.core.usage import AgentCost
from agentfsm.core.validation import NOT_NEGATIVE
from agentfsm.core.value import Value
from agentfsm.tools.attendance import Attendance
from agentfsm.tools.question_validation import encode_state, validate_questions

if TYPE_CHECKING:
    from agentfsm.core.call_facts import CallFact
    from agentfsm.core.run import Run

D = TypeVar("D")


class _CompletedAwaitable:
    """Return value of `ctx.progress(...)`. The message is sent already; awaiting this is optional."""

    def __await__(self) -> Generator[Any, Any, None]:
        return
        yield


_COMPLETED = _CompletedAwaitable()


async def _find_nothing(_query: str) -> str:
    return "There are no other tools."


@attrs.define(eq=False, repr=False)
class CancelFlag:
    """Cancellation flag of a call. The queue sets it, and the tool may read it from any thread."""

    is_set: bool = False
    """Whether the call was cancelled or timed out."""


@attrs.frozen(kw_only=True)
class RunContext(Generic[D]):
    """Context of a tool call, passed to the tool's first parameter if that is annotated with this type."""

    deps: D
    """The caller's dependencies, given as `deps=`."""

    run_id: str = ""
    """Id of the run; empty if no run is behind the call."""

    turn: int = 0
    """Number of the turn that the call belongs to, from 1; 0 if no run is behind the call."""

    call_id: str = ""
    """Id of the call, unique in the run."""

    idempotency_key: str = ""
    """Key that is equal on every attempt at this call. Pass it to services that must not repeat an effect."""

    fencing_token: int = 0
    """Fencing token of the run's lease; larger for each later owner of the run. Pass it to a system that rejects tokens
    smaller than the largest it has seen: a process that was suspended and replaced then cannot write there. 0 if no run
    is behind the call.
    """

    attempt: int = 1
    """Number of this attempt, from 1. Above 1 after a crash, a retry or a question to a person."""

    deadline: float = float("inf")
    """Unix time in seconds at which the call is cancelled."""

    user: str | None = None
    """Id of the user for whom the run was started, or None."""

    tenant: str | None = None
    """Tenant of the user, or None."""

    roles: tuple[str, ...] = ()
    """Roles with which the run was started, as `Permissions.roles` names them."""

    clearance: str = ""
    """Highest level of data that the run may read; empty if it has no bound."""

    labels: tuple[Label, ...] = ()
    """Labels of what the run has read before the call, levels of data included."""

    metadata: Mapping[str, Any] = attrs.field(factory=dict)
    """Metadata with which the run was started."""

    on_progress: Callable[[str], None] | None = attrs.field(default=None, repr=False)
    """Callback for progress messages, callable from any thread. None without a listener."""

    cancel_flag: CancelFlag = attrs.field(factory=CancelFlag, repr=False)
    """Flag behind `cancelled`."""

    find_result_text: Callable[[str], str | None] = attrs.field(default=lambda _call_id: None, repr=False)
    """Function that returns the whole text of an earlier result of the run by its call id, or None."""

    find_result_parts: Callable[[str], tuple[Media, ...]] = attrs.field(default=lambda _call_id: (), repr=False)
    """Function that returns all media parts of an earlier result by its call id."""

    ask_model: Callable[[str, Mapping[str, JSON]], Awaitable[str]] | None = attrs.field(default=None, repr=False)
    """Function that has a model answer a question from results; None for all tools but the engine's own for plans."""

    find_tools: Callable[[str], Awaitable[str]] = attrs.field(default=_find_nothing, repr=False)
    """Function that searches the run's tools not offered to the model, and returns a description of the matches."""

    on_cost: Callable[[float], None] | None = attrs.field(default=None, repr=False)
    """Callback for the costs that the tool reports. None if no run is behind the call."""

    on_labels: Callable[[tuple[Label, ...]], None] | None = attrs.field(default=None, repr=False)
    """Callback for the labels that the tool adds. None if no run is behind the call."""

    on_event: Callable[[Any], None] | None = attrs.field(default=None, repr=False)
    """Callback for the events of a subagent. None without a listener."""

    inquiry: Inquiry = attrs.field(factory=Inquiry, repr=False)
    """Questions that the tool has asked people, and their replies; read them as `answers` and `state`."""

    attendance: Attendance | None = attrs.field(default=None, repr=False)
    """Access to the person who attends the run; None if its driving call has no `elicit=`."""

    run: Run[Any] | None = attrs.field(default=None, repr=False)
    """The run as it was when the context was made, read-only; None if no run is behind the call."""

    parent: Any = attrs.field(default=None, repr=False)
    """Run behind the call of an agent or of a tool for background runs: an `agentfsm.engine.execution.parent.Parent`;
    None for other tools.
    """

    def progress(self, message: str) -> _CompletedAwaitable:
        """Report progress to listeners: `await ctx.progress("half")`, without `await` in a plain function.

        It returns at once and does not wait for the listeners.
        """
        if self.on_progress is not None:
            self.on_progress(message)
        return _COMPLETED

    def add_cost(self, usd: float) -> None:
        """Report what the call has cost, beside the model: it replaces the tool's `cost_usd`. Several amounts add up.

        The result of the call records it, also if the call fails or times out afterwards. A tool that reports costs
        declares `cost_usd=` as well, 0 if nothing is known before: a read-only tool could otherwise start early, for a
        reply that is then dropped. May be called from any thread.

        Args:
            usd: US dollars, 0 or more.

        Raises:
            MisuseError: if it is anything else.
        """
        NOT_NEGATIVE.check("add_cost", "usd", usd)
        if self.on_cost is not None:
            self.on_cost(usd)

    def add_labels(self, *labels: str) -> None:
        """Add labels to the result of this call, beside those that the tool declares: `ctx.add_labels("untrusted")`.

        The result of the call records them, also if the call fails or times out afterwards. May be called from any
        thread.

        Args:
            *labels: "untrusted", "private", "sends_out", "irreversible", "user_data", or a level of data.

        Raises:
            MisuseError: if a label is unknown.
        """
        given = as_labels(labels)
        if self.on_labels is not None:
            self.on_labels(given)

    @property
    def cancelled(self) -> bool:
        """Whether the call was cancelled or timed out. A plain function should check this and return."""
        return self.cancel_flag.is_set

    @property
    def calls(self) -> tuple[CallFact, ...]:
        """Calls of `run` and of the runs that it continues, with their arguments, outcomes, results and approvers.

        Empty if no run is behind the call.
        """
        from agentfsm.core.call_facts import list_call_facts  # noqa: PLC0415  few functions ask for it

        return () if self.run is None else list_call_facts(self.run)

    @property
    def answers(self) -> Mapping[str, Any]:
        """Answers to the tool's own `InputRequired` so far, by question key.

        An answer is a dict that fits the question's schema, or None if it was declined. Empty on the first attempt.
        """
        return MappingProxyType(deepcopy(dict(self.inquiry.answers)))

    @property
    def state(self) -> Any:
        """The `state` of the tool's latest `InputRequired`, decoded from JSON; None on the first attempt."""
        return json.loads(self.inquiry.state)


@attrs.frozen
class Found(Value):
    """Result of an `on_unknown` function for a call that completed before its worker crashed."""

    result: Any
    """Return value of that completed call."""


@attrs.frozen(kw_only=True)
class ToolReturn(Value):
    """Return value of a tool that reports its own outcome, as subagent tools do."""

    outcome: Outcome
    """Outcome of the call."""

    content: str
    """Text of the result."""

    error_type: ErrorType | None = None
    """Type of the error, or None if the call did not fail."""

    retryable: bool = False
    """Whether repeating the call may succeed."""

    child: AgentCost | None = None
    """Cost of the child run, or None."""

    parts: tuple[Media, ...] = ()
    """Media that accompany the content, which refers to them; both come from `result_text.render_parts`."""

    labels: tuple[Label, ...] = ()
    """Labels of the result, beside those that the tool declares."""

    background: bool = False
    """Whether the call has begun a run that goes on in the background, and whose result comes later."""


class CallPaused(Exception):  # noqa: N818  not an error: the call continues later
    """Raised by a tool whose call waits for external input. The tool is called again when the input is there.

    Attributes:
        pending: The external inputs that the call waits for.
    """

    def __init__(self, pending: tuple[Pending, ...]) -> None:
        super().__init__(pending)
        self.pending = pending


class TaskPending(CallPaused):
    """Raised by a tool whose call has begun a task at a server. The call is made again later, to look at the task.

    A repetition is no other attempt: it has the state, and only reads.

    Attributes:
        state: JSON text that identifies the task.
        message: State of the task, for people.
        wait_s: Seconds until the call is made again, above 0.
    """

    def __init__(self, message: str, *, state: JSON, wait_s: float) -> None:
        """Take the state of the task, which the next attempt receives as `ctx.state`."""
        super().__init__(())
        self.message = message
        self.state: str = encode_state(state)
        self.wait_s = wait_s


class InputRequired(CallPaused):
    """Raised by a tool to ask a person. The call ends, and is repeated when the answer is there.

    The run is stored with the questions, and no process waits. The answer may come from any caller (`agent.answer`).
    The process that continues the run calls the tool again from the beginning, with `ctx.answers` and `ctx.state`.
    Effects before the question are repeated: ask first, or record in `state` the work that is done.

    Attributes:
        questions: The questions, which are answered together.
        state: JSON text of the state returned to the tool.
    """

    def __init__(self, *questions: Question, state: JSON = None) -> None:
        """Validate the questions and the state.

        Args:
            *questions: 1 to 20 questions with different keys.
            state: A JSON value, up to 250,000 characters as text, that the next attempt receives as `ctx.state`.

        Raises:
            MisuseError: if a question is invalid, or the state is too large or not JSON.
        """
        super().__init__(())
        self.questions: tuple[Question, ...] = validate_questions(questions)
        self.state: str = encode_state(state)


class LoginRequired(InputRequired):
    """Raised by a tool whose server needs a login of the run's user. The call is repeated when the user has logged in.

    Attributes:
        questions: The one question: its key is the server, its URL the page where the user logs in.
    """

    def __init__(
        self, server: str, message: str, *, url: str = "", takes_key: bool = False, state: JSON = None
    ) -> None:
        """Validate the question.

        Args:
            server: URL of the server, 1 to 200 characters.
            message: Text for the user.
            url: Page where the user logs in. Empty: it is made when the user asks for it.
            takes_key: Whether the user enters a key instead. It is no answer: answers are in the journal.
            state: As for `InputRequired`.
        """
        schema = {"type": "object", "properties": {"key": {"type": "string", "format": "password"}}}
        question = Question(key=server, message=message, url=url, schema=schema if takes_key else None)
        super().__init__(question, state=state)
