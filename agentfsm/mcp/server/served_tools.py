"""Serve the tools of a registry: list them with their declarations, and execute calls in the tool queue."""

from __future__ import annotations

import itertools
import json
import logging
import secrets
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Final
from weakref import WeakKeyDictionary

import anyio
import attrs
import mcp.types as m
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from agentfsm._lib.web.eviction import derive_client_key
from agentfsm.agents.runnable_agent import RunnableAgent
from agentfsm.core.errors import AgentError, ArgumentsError
from agentfsm.core.labels import FROM_MODEL, ToolKind
from agentfsm.core.messages import JSON, ErrorType, Outcome, ToolCall, ToolResult, replace_surrogates
from agentfsm.engine.deciders.approvals import answer_lifetime_s, describe_call, needs_approval
from agentfsm.mcp.server.call_sequencer import CallSequencer
from agentfsm.mcp.server.input_requests import (
    ApprovalRequest,
    InputBroker,
    InputNotGivenError,
    InterruptedCall,
    RequestContext,
    collect_answers,
)
from agentfsm.mcp.server.resources import to_content_block
from agentfsm.mcp.server.structured_output import OutputSchema, build_output_schema
from agentfsm.ports.store import Clock, SystemClock
from agentfsm.streaming.stream import ToolEvent, ToolEventType
from agentfsm.tools import callback_errors
from agentfsm.tools.permission import Permissions
from agentfsm.tools.question_validation import MAX_ROUNDS
from agentfsm.tools.queue import result_text
from agentfsm.tools.queue.dispatch import CallOutcome, QueueHost, ToolJob, failed_outcome
from agentfsm.tools.queue.scheduler import DEFAULT_LIMIT, DEFAULT_TIMEOUT_S, ToolQueue
from agentfsm.tools.registry import ToolRegistry
from agentfsm.tools.run_context import CallPaused, InputRequired, RunContext
from agentfsm.tools.schema.binding import BoundArguments
from agentfsm.tools.tool import Tool

_log = logging.getLogger("agentfsm.mcp")

# Maximum of progress messages that wait for a slow client; later ones are dropped.
MAX_PENDING_PROGRESS: Final = 100


@attrs.define(eq=False, repr=False, kw_only=True)
class ServedTools:
    """Tools of one registry, for the clients of one server."""

    registry: ToolRegistry
    permissions: Permissions | None = None
    """Permissions of the clients. None: all tools are allowed."""

    deps: Any = None
    """Object that tools receive as `ctx.deps`."""

    resolve_deps: Callable[[Any], Any] | None = None
    """Returns `ctx.deps` of a call from its HTTP request. None: all calls get `deps`."""

    outputs: Mapping[str, Mapping[str, JSON]] = attrs.field(factory=dict)
    """Output schemas by tool, where they are more precise than the return hints."""

    timeout_s: float = DEFAULT_TIMEOUT_S
    """Seconds that a call may take if its tool sets no timeout."""

    limit: int = DEFAULT_LIMIT
    """Maximum of calls in flight at once."""

    max_client_calls: int
    """Maximum of calls of one client over HTTP that are in progress or wait."""

    long_tools: frozenset[str] = frozenset()
    """Names of the tools whose calls are tasks: they are listed for clients that have tasks."""

    is_stopping: bool = attrs.field(default=False, init=False)
    """Whether the server is stopping, so that no further call begins."""

    clock: Clock = attrs.field(factory=SystemClock)
    sequencer: CallSequencer = attrs.field(
        init=False, default=attrs.Factory(lambda tools: CallSequencer(tools.limit), takes_self=True)
    )
    broker: InputBroker = attrs.field(
        init=False, default=attrs.Factory(lambda tools: InputBroker(tools.clock), takes_self=True)
    )
    _refresh_lock: anyio.Lock = attrs.field(factory=anyio.Lock, init=False)
    _output_schemas: WeakKeyDictionary[Tool[..., Any], OutputSchema | None] = attrs.field(
        factory=WeakKeyDictionary, init=False
    )
    """Output schemas of the tools seen so far; None for tools with results that are only text."""

    _call_numbers: Iterator[int] = attrs.field(factory=itertools.count, init=False)

    async def refresh(self) -> str:
        """Update the tool sources. Return the error text, or "" if that succeeded; other tools stay available."""
        if not self.registry.sources:
            return ""
        try:
            async with self._refresh_lock:
                await self.registry.refresh()
        except AgentError as error:
            _log.warning("the tools of a source could not be listed: %s", error)
            return str(error)
        return ""

    def names(self) -> list[str]:
        """Return the names of the offered tools."""
        return [tool.name for tool in self.registry if self.is_offered(tool)]

    def is_offered(self, tool: Tool[..., Any]) -> bool:
        """Return whether clients can see and call a tool.

        Tools with an external result need a run that waits, and agents need a run whose budget pays for them. A call of
        a tool that takes long is a run of its own.
        """
        is_agent = tool.kind is ToolKind.AGENT and tool.name not in self.long_tools
        if tool.waits_for is not None or is_agent or not self._is_enabled(tool):
            return False
        return self.permissions is None or self.permissions.may_offer(tool, ())

    def _is_enabled(self, tool: Tool[..., Any]) -> bool:
        if isinstance(tool.enabled, bool):
            return tool.enabled
        try:
            return bool(tool.enabled(RunContext(deps=self.deps)))
        except Exception as error:  # noqa: BLE001  the tool is not enabled then
            callback_errors.log_callback_error("enabled", tool.name, "it is not offered to clients", error)
            return False

    def get(self, name: str) -> Tool[..., Any] | None:
        """Return an offered tool, or None."""
        tool = self.registry.get(name)
        return tool if tool is not None and self.is_offered(tool) else None

    def list_tools(self, *, has_tasks: bool = False) -> list[m.Tool]:
        """Return the offered tools in the protocol's form, with those that take long if the client has tasks."""
        offered = [tool for tool in self.registry if self.is_offered(tool)]
        return [self._to_mcp_tool(tool) for tool in offered if has_tasks or tool.name not in self.long_tools]

    def _to_mcp_tool(self, tool: Tool[..., Any]) -> m.Tool:
        output = self._get_output_schema(tool)
        return m.Tool(
            name=tool.name,
            description=tool.description or None,
            input_schema=tool.input_schema,
            output_schema=None if output is None else dict(output.schema),
            annotations=build_annotations(tool),
        )

    def _get_output_schema(self, tool: Tool[..., Any]) -> OutputSchema | None:
        if tool not in self._output_schemas:
            known = self.outputs.get(tool.name)
            self._output_schemas[tool] = (
                build_output_schema(tool.function, tool.name)
                if known is None
                else OutputSchema(tool=tool.name, schema=known)
            )
        return self._output_schemas[tool]

    async def call(
        self, ctx: RequestContext, params: m.CallToolRequestParams, tool: Tool[..., Any]
    ) -> m.CallToolResult | m.InputRequiredResult:
        """Execute a call. A failure is returned as a result.

        Raises:
            MCPError: when the request state is invalid or has expired.
        """
        call = self._build_call(params)
        digest = tool.digest_call(call)
        if params.request_state is None:
            call_state = InterruptedCall(call_id=call.id, key=call.key, digest=digest)
        else:
            call_state = self.broker.resume(params.request_state, digest)
            call = attrs.evolve(call, id=call_state.call_id, key=call_state.key)
        try:
            return await self._run_with_input(ctx, params, tool, call, call_state)
        except InputNotGivenError as end:
            return _error_result(str(end))

    async def begin_call(
        self, ctx: RequestContext, params: m.CallToolRequestParams, tool: Tool[..., Any], agent: RunnableAgent
    ) -> m.CallToolResult | str:
        """Begin the run of a call that takes long. Return its id, or an error result if it may not begin."""
        call = self._build_call(params)
        try:
            bound = tool.bind_and_check(call.arguments)
        except ArgumentsError as error:
            return _error_result(str(error))
        if (refusal := self.check_permission(tool, bound)) is not None:
            return _error_result(refusal.text)
        if (why := self._explain_overload(ctx)) is not None:
            return _error_result(f"{tool.name} was not run: {why}; try again later")
        run = await agent.submit(call.arguments, labels=FROM_MODEL)
        return run.id

    async def _run_with_input(
        self,
        ctx: RequestContext,
        params: m.CallToolRequestParams,
        tool: Tool[..., Any],
        call: ToolCall,
        call_state: InterruptedCall,
    ) -> m.CallToolResult | m.InputRequiredResult:
        """Execute a call until it ends or needs input. People are asked its questions unless the request has answers.

        Answers to a tool's questions are accepted with the first request, since they are always the client's word. An
        approval is not: it is valid only for the text that was shown.
        """
        replies: Mapping[str, Any] = params.input_responses or {}
        if not call_state.is_approved and (approval := self._build_approval(tool, call)) is not None:
            known = None if params.request_state is None or call_state.questions else replies
            if (question := await approval.obtain(self.broker, ctx, call_state, known)) is not None:
                return question
            call_state, replies = attrs.evolve(call_state, is_approved=True), {}
        numbers = itertools.count(1)
        while True:
            if call_state.questions:
                expires_s = answer_lifetime_s(tool, tool.to_namespace(tool.bind(call.arguments)))
                answered = await collect_answers(
                    self.broker, ctx, call_state, replies, tool=tool.name, expires_s=expires_s
                )
                if isinstance(answered, m.InputRequiredResult):
                    return answered
                call_state, replies = answered, {}
            if (why := self._explain_overload(ctx)) is not None:
                return _error_result(f"{tool.name} was not run: {why}; try again later")
            host = ServedHost(self, call_state, self.find_deps(ctx))
            result = await self._run(ctx, call, host, numbers)
            if result is not None:
                return self._to_mcp_result(tool, result)
            call_state = host.call_state

    def find_deps(self, ctx: RequestContext) -> Any:
        """Return the `ctx.deps` of a request's calls."""
        return self.deps if self.resolve_deps is None or ctx.request is None else self.resolve_deps(ctx.request)

    def _explain_overload(self, ctx: RequestContext) -> str | None:
        """Return why another call of a client would be too many, or None."""
        if self.is_stopping:
            return "the server is stopping"
        if self.sequencer.is_full:
            return "the server has too many calls in progress"
        address, _, _ = _identify_client(ctx).partition(" ")
        if address and self.sequencer.count_calls(address) >= self.max_client_calls:
            return f"this client has too many calls in progress, of which it may have {self.max_client_calls:,}"
        return None

    def _build_call(self, params: m.CallToolRequestParams) -> ToolCall:
        number, key = f"m{next(self._call_numbers)}", secrets.token_hex(16)
        try:
            text = replace_surrogates(json.dumps(params.arguments or {}, ensure_ascii=False))
        except (ValueError, RecursionError) as error:
            return ToolCall(
                id=number, name=params.name, arguments="{}", key=key, malformed=result_text.describe_error(error)
            )
        return ToolCall(id=number, name=params.name, arguments=text, key=key)

    def _build_approval(self, tool: Tool[..., Any], call: ToolCall) -> ApprovalRequest | None:
        """Build the approval question of a call. None: no approval is needed, or the call would fail anyway."""
        if tool.requires_approval is False or call.malformed is not None:
            return None
        try:
            bound = tool.bind_and_check(call.arguments)
        except ArgumentsError:
            return None  # the queue reports the error
        arguments = tool.to_namespace(bound)
        if not needs_approval(tool, arguments) or self.check_permission(tool, bound) is not None:
            return None
        return ApprovalRequest(
            tool=tool.name,
            arguments=json.loads(call.arguments),
            description=describe_call(tool, arguments),
            expires_s=tool.approval_expires_s,
        )

    async def _run(
        self, ctx: RequestContext, call: ToolCall, host: ServedHost, numbers: Iterator[int]
    ) -> ToolResult | None:
        """Execute a call when its turn has come and a slot is free. The client gets its progress.

        Args:
            ctx: Context of the request.
            call: The call.
            host: Receives the tool's questions; the result is then None.
            numbers: Counter of the progress notifications.
        """
        send, receive = anyio.create_memory_object_stream[str](MAX_PENDING_PROGRESS)
        queue = ToolQueue(
            self.registry,
            timeout_s=self.timeout_s,
            owner=self,
            host=host,
            clock=self.clock,
            on_event=partial(_enqueue_progress, send),
        )
        access = queue.build_job(0, call).access
        results: list[ToolResult] = []
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_report_progress, ctx, receive, numbers)
            with send:
                async with self.sequencer.wait_turn(access, _identify_client(ctx)):
                    results += await queue.execute_all([call])
        return results[0] if results else None

    def _to_mcp_result(self, tool: Tool[..., Any], result: ToolResult) -> m.CallToolResult:
        blocks = [m.TextContent(text=result.content), *map(to_content_block, result.parts)]
        if result.outcome is not Outcome.DONE:
            return m.CallToolResult(content=blocks, is_error=True)
        if (output := self._get_output_schema(tool)) is None:
            return m.CallToolResult(content=blocks)
        try:
            return m.CallToolResult(content=blocks, structured_content=output.parse(result.content))
        except ValueError as error:
            text = f"{tool.name} was run, but its result does not fit its return type: {error}. Its result is below."
            return m.CallToolResult(content=[m.TextContent(text=text), *blocks], is_error=True)

    def check_permission(self, tool: Tool[..., Any], bound: BoundArguments) -> CallOutcome | None:
        """Return a failed outcome if clients may not make a call with these arguments, else None."""
        reason = (
            None if self.permissions is None else self.permissions.refusal_reason(tool, (), tool.to_namespace(bound))
        )
        return (
            None if reason is None else failed_outcome(result_text.not_permitted_text(reason), ErrorType.NOT_PERMITTED)
        )


@attrs.define(eq=False, repr=False)
class ServedHost(QueueHost):
    """Queue host of a call that a client has made."""

    tools: ServedTools
    call_state: InterruptedCall
    """State of the call; questions of its tool are added."""

    deps: Any
    """Object that the tool receives as `ctx.deps`."""

    def build_context(self, call: ToolCall, tool: Tool[..., Any], deadline: float) -> RunContext[Any]:  # noqa: ARG002  as the host of a run
        """Build the tool's context, without a run."""
        inquiry = self.call_state.inquiry
        return RunContext(
            deps=self.deps,
            call_id=call.id,
            idempotency_key=call.key,
            attempt=1 + inquiry.rounds,
            inquiry=inquiry,
            deadline=deadline,
        )

    def check_available(self, tool: Tool[..., Any]) -> CallOutcome | None:
        """Return a failed outcome if the tool was removed while the call waited, else None."""
        return (
            None
            if self.tools.is_offered(tool)
            else failed_outcome(result_text.absent_text(tool.name), ErrorType.WITHDRAWN)
        )

    def check_permitted(self, call: ToolCall, tool: Tool[..., Any], bound: BoundArguments) -> CallOutcome | None:  # noqa: ARG002  as the host of a run
        """Return a failed outcome if a valid call is not permitted or not approved, else None."""
        if (refusal := self.tools.check_permission(tool, bound)) is not None:
            return refusal
        if self.call_state.is_approved or not needs_approval(tool, tool.to_namespace(bound)):
            return None
        text = f"{tool.name} needs a person's approval, which was not requested: call it again to request it."
        return failed_outcome(text, ErrorType.BLOCKED, retryable=True)

    async def on_pause(self, job: ToolJob, pause: CallPaused) -> CallOutcome | None:
        """Record the tool's questions, or fail the call if it has asked too often."""
        if not isinstance(pause, InputRequired):
            return await super().on_pause(job, pause)
        inquiry = self.call_state.inquiry
        if inquiry.rounds >= MAX_ROUNDS:
            return failed_outcome(result_text.too_many_rounds_text(job.call.name, inquiry.rounds), ErrorType.TOOL)
        inquiry = attrs.evolve(inquiry, rounds=inquiry.rounds + 1, state=pause.state)
        self.call_state = attrs.evolve(self.call_state, questions=pause.questions, inquiry=inquiry)
        return None


def build_annotations(tool: Tool[..., Any]) -> m.ToolAnnotations:
    """Return the protocol's hints for a tool. Undeclared properties are not claimed."""
    asks = tool.requires_approval is not False
    if tool.read_only:
        return m.ToolAnnotations(read_only_hint=True, destructive_hint=True if asks else None)
    return m.ToolAnnotations(read_only_hint=False, destructive_hint=True, idempotent_hint=tool.idempotent)


def _identify_client(ctx: RequestContext) -> str:
    """Return a key of the client that makes a request; "" over standard input, where there is one."""
    request: Any = ctx.request
    if request is None:
        return ""
    about = ctx.session.client_params
    address = request.client.host if request.client is not None else ""
    own = request.headers.get("mcp-session-id") or (about.client_info.name if about is not None else "")
    return f"{derive_client_key(address)} {own}"


def _error_result(text: str) -> m.CallToolResult:
    return m.CallToolResult(content=[m.TextContent(text=text)], is_error=True)


def _enqueue_progress(send: MemoryObjectSendStream[str], event: object) -> None:
    """Queue a progress message if there is room."""
    if isinstance(event, ToolEvent) and event.type is ToolEventType.PROGRESS:
        try:
            send.send_nowait(replace_surrogates(event.message))
        except (anyio.WouldBlock, anyio.BrokenResourceError, anyio.ClosedResourceError):
            return


async def _report_progress(ctx: RequestContext, notes: MemoryObjectReceiveStream[str], numbers: Iterator[int]) -> None:
    """Send the progress messages of a call to the client until the call has ended."""
    with notes:
        async for note in notes:
            await ctx.session.report_progress(next(numbers), None, note)
