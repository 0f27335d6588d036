"""Tasks of servers: a server answers a call with a handle, and the call is made again to look at the task.

The handle is in the journal before anything is asked about it, so any process goes on with the same task. Source: the
extension `io.modelcontextprotocol/tasks` of the revision 2026-07-28.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import attrs
import mcp.types as m
from mcp import Client, MCPError
from mcp.client import ClaimContext, ClientExtension, ResultClaim
from pydantic import Field, ValidationError

from agentfsm.core.errors import MisuseError, OutcomeUnknownError
from agentfsm.core.messages import JSON, ErrorType, Outcome, replace_surrogates
from agentfsm.core.text_safety import escape_hidden
from agentfsm.mcp.client.elicitation import UNSUPPORTED_REQUEST, ElicitParams, to_question, to_response
from agentfsm.mcp.connection.lenient_parsing import drop_invalid_entries
from agentfsm.mcp.connection.request_errors import shorten
from agentfsm.tools.run_context import CallPaused, InputRequired, RunContext, TaskPending, ToolReturn
from agentfsm.tools.tool import ANSWER_EXPIRES_S

TASKS_EXTENSION: Final = "io.modelcontextprotocol/tasks"
# Seconds between two looks at a task whose server names no interval, and the bounds of those that it names.
_POLL_S: Final = 1.0
_MIN_POLL_S: Final = 0.05
_MAX_POLL_S: Final = 300.0
# A look costs an event: an old task is looked at after this share of its age, if that is longer.
_AGE_SHARE: Final = 0.1
# Errors in a row that a server may answer before its task counts as lost. One that cannot be reached answers none.
_MAX_ERRORS: Final = 5
# Longest id of a task in characters.
_MAX_ID_CHARS: Final = 1_000


class TaskStatus(m.Result):
    """State of a task, as the server reports it."""

    task_id: str
    status: Literal["working", "input_required", "completed", "failed", "cancelled"]
    status_message: str | None = None
    ttl_ms: float | None = None
    poll_interval_ms: float | None = None


class _CreatedTask(TaskStatus):
    """Answer to a call that has begun a task."""

    result_type: Literal["task"] = "task"


class _TaskDetails(TaskStatus):
    """Answer to a look at a task."""

    input_requests: m.InputRequests | None = None
    result: dict[str, Any] | None = None
    error: m.ErrorData | None = None


class _TaskParams(m.RequestParams):
    task_id: str


class _UpdateParams(_TaskParams):
    input_responses: Mapping[str, m.ElicitResult] = Field(default_factory=dict)


class _Get(m.Request[_TaskParams, Literal["tasks/get"]]):
    method: Literal["tasks/get"] = "tasks/get"
    name_param = "taskId"


class _Cancel(m.Request[_TaskParams, Literal["tasks/cancel"]]):
    method: Literal["tasks/cancel"] = "tasks/cancel"
    name_param = "taskId"


class _Update(m.Request[_UpdateParams, Literal["tasks/update"]]):
    method: Literal["tasks/update"] = "tasks/update"
    name_param = "taskId"


class TasksExtension(ClientExtension):
    """Tells servers that calls may begin tasks."""

    identifier = TASKS_EXTENSION

    def claims(self) -> Sequence[ResultClaim[Any]]:
        """Return the answer that stands for a task."""
        return (ResultClaim(result_type="task", model=_CreatedTask, resolve=_refuse_to_wait),)


async def _refuse_to_wait(created: _CreatedTask, _context: ClaimContext) -> m.CallToolResult:
    """Refuse to wait for a task: calls of runs do it themselves."""
    raise MCPError(m.INVALID_REQUEST, f"the task {created.task_id!r} is not waited for here")


@attrs.define(eq=False, repr=False)
class RemoteTask:
    """Task of a call, as the journal has it between two looks."""

    id: str
    began_at: float
    """Unix time of our first knowledge of it."""

    ends_at: float
    """Unix time after which the server need not know it."""

    answered: list[str] = attrs.field(factory=list)
    """Keys of the server's questions that were answered."""

    asked: dict[str, str] = attrs.field(factory=dict)
    """Keys of the open questions: from ours to the server's."""

    errors: int = 0
    """Errors that the server has answered in a row."""

    @classmethod
    def begin(cls, created: TaskStatus) -> RemoteTask:
        """Take the task that a server has created.

        Raises:
            OutcomeUnknownError: when its id cannot be used.
        """
        if not 0 < len(created.task_id) <= _MAX_ID_CHARS or created.task_id != replace_surrogates(created.task_id):
            raise OutcomeUnknownError("the server began a task, and its id cannot be used")
        task = cls(created.task_id, now := time.time(), now)
        task._set_end(created)
        return task

    @classmethod
    def from_state(cls, state: Any) -> RemoteTask | None:
        """Return the task in the state of a call, or None if the call has begun none."""
        known = state.get("task") if isinstance(state, dict) else None
        return None if known is None else cls(**known)

    def _set_end(self, seen: TaskStatus) -> None:
        longest = ANSWER_EXPIRES_S if seen.ttl_ms is None else seen.ttl_ms / 1_000
        self.ends_at = self.began_at + min(longest, ANSWER_EXPIRES_S)

    @property
    def state(self) -> JSON:
        """The task as JSON."""
        return {"task": attrs.asdict(self)}

    @property
    def has_expired(self) -> bool:
        """Whether the server need not know it any more."""
        return time.time() >= self.ends_at

    def wait(self, server: str, seen: TaskStatus | None, why: str = "") -> TaskPending:
        """Return the pause until the next look.

        Args:
            server: Name of the server.
            seen: State of the task. None: the server could not be asked.
            why: Reason why it could not.
        """
        named_s = _POLL_S if seen is None or seen.poll_interval_ms is None else seen.poll_interval_ms / 1_000
        age_s = time.time() - self.began_at
        left_s = max(self.ends_at - time.time(), _MIN_POLL_S)
        wait_s = min(max(named_s, _MIN_POLL_S, _AGE_SHARE * age_s), _MAX_POLL_S, left_s)
        said = f"could not be looked at: {why}" if seen is None else f"is {seen.status.replace('_', ' ')}"
        note = f": {shorten(seen.status_message)}" if seen is not None and seen.status_message else ""
        text = f"the task {shorten(self.id)!r} of the MCP server {server!r} {said}{note}"
        return TaskPending(replace_surrogates(escape_hidden(text)), state=self.state, wait_s=wait_s)

    async def look(
        self, client: Client, ctx: RunContext[Any], server: str
    ) -> m.CallToolResult | ToolReturn | CallPaused:
        """Give the server the answers of people, look at the task, and return its result, or the pause of the call.

        Raises:
            MCPError: when the server or the SDK reports an error.
        """
        await self._send_answers(client, ctx.answers)
        params = _TaskParams(task_id=self.id)
        seen = await client.session.send_request(_Get(params=params), _TaskDetails)
        self.errors = 0
        self._set_end(seen)
        about = f"the task of the MCP server {server!r}"
        match seen.status:
            case "completed":
                return m.CallToolResult.model_validate(
                    drop_invalid_entries("tools/call", client.protocol_version, seen.result or {})
                )
            case "failed":
                said = shorten(
                    seen.error.message if seen.error is not None else seen.status_message or "it says no reason"
                )
                return _end(f"{about} failed: {said}. Its effect may have happened, in whole or in part.")
            case "cancelled":
                said = f": {shorten(seen.status_message)}" if seen.status_message else ""
                return _end(f"{about} was cancelled by the server{said}. What it did until then may have happened.")
            case _:
                questions = self._ask(seen)
        if questions is not None:
            return questions
        if self.has_expired:
            await cancel_task(client, self.id)
            return _end(
                f"{about} did not end within its time, and was cancelled. Its effect may have happened.",
                Outcome.UNKNOWN,
            )
        return self.wait(server, seen)

    async def _send_answers(self, client: Client, answers: Mapping[str, Any]) -> None:
        given = {theirs: to_response(answers[own]) for own, theirs in self.asked.items() if own in answers}
        if given:
            params = _UpdateParams(task_id=self.id, input_responses=given)
            await client.session.send_request(_Update(params=params), m.EmptyResult)
            self.answered += given
            self.asked = {}

    def _ask(self, seen: _TaskDetails) -> InputRequired | None:
        """Return the questions of the server that have no answer yet, or None.

        Raises:
            MCPError: when they cannot be asked.
        """
        requests = {key: each for key, each in (seen.input_requests or {}).items() if key not in self.answered}
        asked: dict[str, ElicitParams] = {
            key: each.params for key, each in requests.items() if isinstance(each, m.ElicitRequest)
        }
        if len(asked) < len(requests):
            raise MCPError(m.INTERNAL_ERROR, UNSUPPORTED_REQUEST)
        if not asked:
            return None
        first = len(self.answered) + 1
        self.asked = {f"q{number}": key for number, key in enumerate(asked, first)}
        try:
            questions = [to_question(own, asked[key]) for own, key in self.asked.items()]
            return InputRequired(*questions, state=self.state)
        except MisuseError as error:
            text = f"the server asks for input in a form that cannot be shown to a person: {error}"
            raise MCPError(m.INTERNAL_ERROR, text) from error

    def resolve_error(self, error: Exception, server: str) -> ToolReturn | CallPaused:
        """Return the end of a task that the server does not know any more, or the pause if it may still be there."""
        has_answered = isinstance(error, MCPError) and not getattr(error, "is_passing", False)
        self.errors += has_answered or isinstance(error, ValidationError)
        is_unknown = isinstance(error, MCPError) and has_answered and error.code == m.INVALID_PARAMS
        if is_unknown or self.errors >= _MAX_ERRORS or self.has_expired:
            text = (
                f"outcome unknown: the MCP server {server!r} began a task for this call, and has no result of it now "
                f"({shorten(str(error))}). Its effect may have happened: check before you repeat it."
            )
            return _end(text, Outcome.UNKNOWN)
        return self.wait(server, None, shorten(str(error)))


async def cancel_task(client: Client, task_id: str) -> None:
    """Ask a server to cancel a task.

    Raises:
        MCPError: when the server does not know it, or cannot be reached.
    """
    await client.session.send_request(_Cancel(params=_TaskParams(task_id=task_id)), m.EmptyResult)


def _end(text: str, outcome: Outcome = Outcome.FAILED) -> ToolReturn:
    return ToolReturn(outcome=outcome, content=replace_surrogates(text), error_type=ErrorType.TOOL)
