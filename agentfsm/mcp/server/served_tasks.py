"""Serve runs as tasks, to clients that declare the extension `io.modelcontextprotocol/tasks` of 2026-07-28.

A task is a run, and its id is the id of the run: 80 random bits. So it outlives the client and the server, its
questions are those that the run waits for, and its result is read from the journal.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, Protocol

import attrs
import mcp.types as m
from mcp import MCPError
from mcp.server.mcpserver import require_client_extension
from mcp.shared.inbound import MCP_NAME_HEADER, decode_header_value
from mcp.types.version import MODERN_PROTOCOL_VERSIONS
from pydantic import Field

from agentfsm.agents.run_reports import describe_progress
from agentfsm.core.errors import AgentError, ConflictError, MisuseError, RunNotFoundError
from agentfsm.core.header import short_hash
from agentfsm.core.limits import StopReason
from agentfsm.core.machine import State
from agentfsm.core.messages import Outcome, ToolResult
from agentfsm.core.pending import Pending, PendingKind, Question
from agentfsm.core.text_safety import format_exact_json, strip_unsafe
from agentfsm.mcp.client.tasks import TASKS_EXTENSION
from agentfsm.mcp.server.input_requests import APPROVAL_SCHEMA, RequestContext, to_elicit_params
from agentfsm.mcp.server.resources import to_content_block
from agentfsm.ports.store import Store
from agentfsm.tools.question_validation import validate_answer

if TYPE_CHECKING:
    from mcp.server import Server

    from agentfsm.agents.runnable_agent import RunnableAgent
    from agentfsm.core.run import Run

# Milliseconds between two looks that clients are asked for.
POLL_MS: Final = 1_000
# Kind of the records with the answers to some of the questions that a tool asks together.
_ANSWERS: Final = "mcp-answers"
_KEY_DIGITS: Final = 24
# The question of a call whose result comes from a person.
_RESULT: Final = Question(
    key="", message="", schema={"type": "object", "properties": {"answer": {"type": "string"}}, "required": ["answer"]}
)
_ACK: Final = {"resultType": "complete"}


class TaskParams(m.RequestParams):
    """Parameters of the methods on tasks."""

    task_id: str
    input_responses: dict[str, Any] = Field(default_factory=dict)


class TaskRuns(Protocol):
    """The runs of a server that are tasks. `deps` is that of the tools' calls, such as the caller."""

    @property
    def store(self) -> Store:
        """Store of the runs."""
        ...

    @property
    def start_tool(self) -> str:
        """Name of the tool that starts runs, and returns a `run_id`."""
        ...

    @property
    def long_tools(self) -> Mapping[str, RunnableAgent]:
        """Agents that make the calls of tools which take long, by the tool's name: a run for each call."""
        ...

    async def load_task(self, deps: Any, run_id: str, /) -> Run:
        """Return a run that the caller may see.

        Raises:
            RunNotFoundError: when there is none.
        """
        ...

    async def describe_task(self, run: Run, /) -> dict[str, Any]:
        """Return a run as the tools for runs do."""
        ...

    async def decide(self, deps: Any, run: Run, item: Pending, given: bool | str | Mapping[str, Any] | None, /) -> None:
        """Post a person's decision: whether a call may run, or the answer to a question; None declines it."""
        ...

    async def cancel_task(self, deps: Any, run: Run, /) -> None:
        """End a run."""
        ...


def declares_tasks(ctx: RequestContext) -> bool:
    """Return whether a request may be answered with a task."""
    declared = ctx.session.client_capabilities
    has_extension = declared is not None and TASKS_EXTENSION in (declared.extensions or {})
    return has_extension and ctx.protocol_version in MODERN_PROTOCOL_VERSIONS


@attrs.define(eq=False, repr=False)
class ServedTasks:
    """The methods on tasks, and the tasks as clients see them."""

    runs: TaskRuns
    find_deps: Callable[[RequestContext], Any]
    """Returns the dependencies of the tools' calls from a request."""

    def register(self, server: Server[Any]) -> None:
        """Declare the extension, and handle its methods."""
        server.extensions[TASKS_EXTENSION] = {}
        for name, handle in (("get", self._get), ("update", self._update), ("cancel", self._cancel)):
            server.add_request_handler(f"tasks/{name}", TaskParams, self._guard(handle))

    async def begin(self, ctx: RequestContext, run_id: str) -> dict[str, Any]:
        """Return the handle of a run that has begun, as the answer to a call."""
        run = await self.runs.load_task(self.find_deps(ctx), run_id)
        return {**_describe_task(run, "working"), "resultType": "task"}

    def _guard(
        self, handle: Callable[[RequestContext, TaskParams, Run], Awaitable[dict[str, Any]]]
    ) -> Callable[[RequestContext, TaskParams], Awaitable[dict[str, Any]]]:
        """Return the handler of a method, with the checks that are the same for all."""

        async def check_and_handle(ctx: RequestContext, params: TaskParams) -> dict[str, Any]:
            require_client_extension(ctx, TASKS_EXTENSION)
            named = None if ctx.request is None else decode_header_value(ctx.request.headers.get(MCP_NAME_HEADER))
            if ctx.request is not None and named != params.task_id:
                raise MCPError(m.HEADER_MISMATCH, "the header Mcp-Name has to be the id of the task")
            try:
                run = await self.runs.load_task(self.find_deps(ctx), params.task_id)
                return await handle(ctx, params, run)
            except RunNotFoundError:
                raise MCPError(m.INVALID_PARAMS, f"there is no task {params.task_id[:100]!r}") from None
            except AgentError as error:
                raise MCPError(m.INVALID_PARAMS, str(error)) from error

        return check_and_handle

    async def _get(self, ctx: RequestContext, _params: TaskParams, run: Run) -> dict[str, Any]:
        if run.stop_reason is StopReason.CANCELLED:
            return _describe_task(run, "cancelled")
        if run.is_over:
            ended = await self._build_result(run)
            shown = ended.model_dump(by_alias=True, mode="json", exclude_none=True)
            return _describe_task(run, "completed") | {"result": shown}
        asked = {key: request for key, (_, _, request) in (await self._list_requests(ctx, run)).items()}
        return (
            {**_describe_task(run, "input_required"), "inputRequests": asked}
            if asked
            else _describe_task(run, "working")
        )

    async def _build_result(self, run: Run) -> m.CallToolResult:
        """Return the result of a run that is over: of its only call, or its answer."""
        called = [message for message in run.messages if isinstance(message, ToolResult)]
        if run.header.agent in self.runs.long_tools and called:
            blocks = [m.TextContent(text=called[0].content), *map(to_content_block, called[0].parts)]
            return m.CallToolResult(content=blocks, is_error=called[0].outcome is not Outcome.DONE)
        is_done = run.state is State.DONE
        text = run.answer if is_done else f"{run.stop_reason}: {run.stop_message}"
        view = await self.runs.describe_task(run)
        return m.CallToolResult(content=[m.TextContent(text=text)], structured_content=view, is_error=not is_done)

    async def _update(self, ctx: RequestContext, params: TaskParams, run: Run) -> dict[str, Any]:
        open_requests = await self._list_requests(ctx, run)
        for key, given in params.input_responses.items():
            if key in open_requests:
                item, question, _ = open_requests[key]
                reply = _parse_reply(given)
                if question is None:
                    is_approved = reply.action == "accept" and (reply.content or {}).get("approve") is True
                    await self._decide(ctx, run, item, is_approved)
                else:
                    await self._take_answer(ctx, run, item, question, reply)
        return _ACK

    async def _cancel(self, ctx: RequestContext, _params: TaskParams, run: Run) -> dict[str, Any]:
        if not run.is_over:
            try:
                await self.runs.cancel_task(self.find_deps(ctx), run)
            except ConflictError:  # it has ended meanwhile
                return _ACK
        return _ACK

    async def _decide(self, ctx: RequestContext, run: Run, item: Pending, given: Any) -> None:
        try:
            await self.runs.decide(self.find_deps(ctx), run, item, given)
        except ConflictError:  # another came first, as with an answer that is sent twice
            return

    async def _take_answer(
        self, ctx: RequestContext, run: Run, item: Pending, question: Question, reply: m.ElicitResult
    ) -> None:
        """Keep an answer until all questions of the call have theirs, then post them."""
        given = None
        if reply.action == "accept":
            given = validate_answer(question, None if question.url else reply.content)
        if question is _RESULT:
            text = "The person declined to answer." if given is None else given["answer"]
            return await self._decide(ctx, run, item, text)
        if len(item.questions) == 1:
            return await self._decide(ctx, run, item, given)
        record = await self.runs.store.read_record(_ANSWERS, key := _item_key(item))
        known: Any = {} if record is None else record.value
        answers = {**known, question.key: given}
        if answers.keys() >= {each.key for each in item.questions}:
            return await self._decide(ctx, run, item, answers)
        revision = 0 if record is None else record.revision
        await self.runs.store.write_record(_ANSWERS, key, answers, revision=revision, expires_at=item.expires_at)
        return None

    async def _list_requests(
        self, ctx: RequestContext, run: Run
    ) -> dict[str, tuple[Pending, Question | None, dict[str, Any]]]:
        """Return what a run asks people and has no answer to, by keys that are never used twice."""
        declared = ctx.session.client_capabilities
        found: dict[str, tuple[Pending, Question | None, dict[str, Any]]] = {}
        if declared is None or declared.elicitation is None:
            return found
        for item in run.pending:
            key = _item_key(item)
            if item.kind is PendingKind.APPROVAL:
                form = m.ElicitRequestFormParams(message=_ask_approval(item), requested_schema=APPROVAL_SCHEMA)
                found[key] = item, None, _dump(form)
            elif item.kind is PendingKind.QUESTION and not item.questions:
                asked = attrs.evolve(_RESULT, message=_ask_result(item))
                found[key] = item, _RESULT, _dump(to_elicit_params(asked))
            elif item.kind is PendingKind.QUESTION:
                record = await self.runs.store.read_record(_ANSWERS, key) if len(item.questions) > 1 else None
                known: Any = {} if record is None else record.value
                for index, each in enumerate(item.questions):
                    if each.key not in known:
                        found[f"{key}.{index}"] = item, each, _dump(to_elicit_params(each))
        return found


def _describe_task(run: Run, status: str) -> dict[str, Any]:
    task = {
        "taskId": run.id,
        "status": status,
        "createdAt": _format_time(run.created_at),
        "lastUpdatedAt": _format_time(run.updated_at),
        "ttlMs": None,
        "pollIntervalMs": POLL_MS,
    }
    waits = ", ".join(f"{item.kind} of {item.tool or 'the run'}" for item in run.pending)
    said = run.stop_message or (f"waits for: {waits}" if waits else describe_progress(run))
    return {**task, "statusMessage": said} if said else task


def _format_time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _item_key(item: Pending) -> str:
    return short_hash(f"{item.run_id} {item.kind} {item.call_id} {item.digest} {item.expires_at}", _KEY_DIGITS)


def _ask_approval(item: Pending) -> str:
    notes = "".join([f"\n\n{strip_unsafe(note)}" for note in (item.description, item.reason, item.error) if note])
    return f"May {item.tool} run?{notes}\n\nArguments: {format_exact_json(item.arguments)}"


def _ask_result(item: Pending) -> str:
    asked = item.arguments.get("question")
    return asked if isinstance(asked, str) else f"The result of {item.tool}: {format_exact_json(item.arguments)}"


def _dump(params: m.ElicitRequestFormParams | m.ElicitRequestURLParams) -> dict[str, Any]:
    return m.ElicitRequest(params=params).model_dump(by_alias=True, mode="json", exclude_none=True)


def _parse_reply(given: Any) -> m.ElicitResult:
    try:
        return m.ElicitResult.model_validate(given)
    except ValueError as error:
        raise MisuseError(f"an answer is not that of an elicitation: {str(error)[:200]}") from error
