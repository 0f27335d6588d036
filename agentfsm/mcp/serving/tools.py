"""The tools of a registry as a server's: listed with what is declared of them, and called through our own queue."""

from __future__ import annotations

import itertools
import json
import logging
import secrets
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Final

import anyio
import attrs
import mcp.types as m
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.server import ServerRequestContext

from agentfsm.core.errors import AgentError, ArgumentsError
from agentfsm.core.messages import JSON, ErrorType, Outcome, ToolCall, ToolResult, clean
from agentfsm.engine import render
from agentfsm.engine.context import RunContext, ToolKind
from agentfsm.engine.decide import described, needs_approval
from agentfsm.engine.dispatch import End, Host, failed
from agentfsm.engine.permission import Permissions
from agentfsm.engine.queue import LIMIT, TIMEOUT_S, ToolQueue
from agentfsm.engine.registry import ToolRegistry
from agentfsm.engine.stream import ToolEvent, ToolEventType
from agentfsm.engine.tools import Bound, Tool
from agentfsm.mcp.serving.approval import Asking, Question
from agentfsm.mcp.serving.offers import block_of
from agentfsm.mcp.serving.turns import Turns
from agentfsm.ports import Clock, SystemClock

_log = logging.getLogger("agentfsm.mcp")

PROGRESS: Final = 100
# Notes of progress that wait for a slow client; later ones are dropped.

Context = ServerRequestContext[Any, Any]


@attrs.define(eq=False, repr=False, kw_only=True)
class ServedTools:
    """The tools of one registry, for the clients of one server."""

    registry: ToolRegistry
    permissions: Permissions | None = None
    # What clients may do; None: everything.
    deps: Any = None
    # Handed to tools as `ctx.deps`.
    outputs: Mapping[str, Mapping[str, JSON]] = attrs.field(factory=dict)
    # By tool: the JSON Schema of what it returns, which is then structured content, too.
    timeout_s: float = TIMEOUT_S
    # Seconds for a call whose tool sets none.
    limit: int = LIMIT
    # Calls in flight at once.
    clock: Clock = attrs.field(factory=SystemClock)
    turns: Turns = attrs.field(factory=Turns, init=False)
    asking: Asking = attrs.field(init=False, default=attrs.Factory(lambda tools: Asking(tools.clock), takes_self=True))
    _places: anyio.CapacityLimiter = attrs.field(
        init=False, default=attrs.Factory(lambda tools: anyio.CapacityLimiter(tools.limit), takes_self=True)
    )
    _refreshing: anyio.Lock = attrs.field(factory=anyio.Lock, init=False)
    _numbers: Iterator[int] = attrs.field(factory=itertools.count, init=False)

    async def refresh(self) -> str:
        """Take in what sources of tools have news of; return why that failed, if it did: all other tools are there."""
        if not self.registry.sources:
            return ""
        try:
            async with self._refreshing:
                await self.registry.refresh()
        except AgentError as error:
            _log.warning("some tools are not known: %s", error)
            return str(error)
        return ""

    def names(self) -> list[str]:
        """Return the names of the tools that clients are told of."""
        return [tool.name for tool in self.registry if self.offers(tool)]

    def offers(self, tool: Tool[..., Any]) -> bool:
        """Whether clients are told of a tool.

        One whose result comes from outside, and one that is an agent, need a run to wait in and to be paid by.
        """
        if tool.waits_for is not None or tool.kind is ToolKind.AGENT or not self._is_enabled(tool):
            return False
        return self.permissions is None or self.permissions.offers(tool, ())

    def _is_enabled(self, tool: Tool[..., Any]) -> bool:
        if isinstance(tool.enabled, bool):
            return tool.enabled
        try:
            return bool(tool.enabled(RunContext(deps=self.deps)))
        except Exception:  # noqa: BLE001  it has not said yes
            return False

    def get(self, name: str) -> Tool[..., Any] | None:
        """Return a tool that clients are told of, or None."""
        tool = self.registry.get(name)
        return tool if tool is not None and self.offers(tool) else None

    def listed(self) -> list[m.Tool]:
        """Return the tools as a client is told of them."""
        return [self._listed(tool) for tool in self.registry if self.offers(tool)]

    def _listed(self, tool: Tool[..., Any]) -> m.Tool:
        output = self.outputs.get(tool.name)
        return m.Tool(
            name=tool.name,
            description=tool.description or None,
            input_schema=dict(tool.parameters),
            output_schema=None if output is None else dict(output),
            annotations=annotations_of(tool),
        )

    async def call(
        self, ctx: Context, params: m.CallToolRequestParams, tool: Tool[..., Any]
    ) -> m.CallToolResult | m.InputRequiredResult:
        """Run a call; whatever becomes of it is its result.

        Raises:
            MCPError: when it answers a question that nobody asked.
        """
        call = self._call(params)
        question = self._question(tool, call)
        if question is not None:
            answer = await self.asking.answer(ctx, params, question)
            if isinstance(answer, m.InputRequiredResult):
                return answer
            if answer is not None:
                return _refused(answer)
        if self.turns.is_full:
            return _refused(f"{tool.name} was not run: the server has too many calls under way; try again later")
        host = ServedHost(self, is_approved=question is not None)
        return self._told(tool, await self._run(ctx, call, host))

    def _call(self, params: m.CallToolRequestParams) -> ToolCall:
        number, key = f"m{next(self._numbers)}", secrets.token_hex(16)
        try:
            text = clean(json.dumps(params.arguments or {}, ensure_ascii=False))
        except (ValueError, RecursionError) as error:
            return ToolCall(id=number, name=params.name, arguments="{}", key=key, malformed=render.describe(error))
        return ToolCall(id=number, name=params.name, arguments=text, key=key)

    def _question(self, tool: Tool[..., Any], call: ToolCall) -> Question | None:
        """Return what a person has to be asked before the call; None where nobody has to, or it cannot run anyway."""
        if tool.requires_approval is False or call.malformed is not None:
            return None
        try:
            bound = tool.bound(call.arguments)
        except ArgumentsError:
            return None  # the queue says what is wrong
        arguments = tool.arguments(bound)
        if not needs_approval(tool, arguments) or self._bars(tool, bound) is not None:
            return None
        return Question(
            tool=tool.name,
            arguments=json.loads(call.arguments),
            description=described(tool, arguments),
            digest=tool.digest_of(call),
            expires_s=tool.approval_expires_s,
        )

    def _bars(self, tool: Tool[..., Any], bound: Bound) -> str | None:
        return None if self.permissions is None else self.permissions.refusal(tool, (), tool.arguments(bound))

    async def _run(self, ctx: Context, call: ToolCall, host: ServedHost) -> ToolResult:
        """Run a call when its turn has come and there is a place, telling the client how far it is."""
        send, receive = anyio.create_memory_object_stream[str](PROGRESS)
        queue = ToolQueue(
            self.registry,
            timeout_s=self.timeout_s,
            owner=self,
            host=host,
            clock=self.clock,
            watch=partial(_note, send),
        )
        access = queue.job(0, call).access
        results: list[ToolResult] = []
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_report, ctx, receive)
            with send:
                async with self.turns.turn(access), self._places:
                    results += await queue.execute_all([call])
        return results[0]

    def _told(self, tool: Tool[..., Any], result: ToolResult) -> m.CallToolResult:
        done = result.outcome is Outcome.DONE
        structured = json.loads(result.content) if done and tool.name in self.outputs else None
        blocks = [m.TextContent(text=result.content), *map(block_of, result.parts)]
        return m.CallToolResult(content=blocks, structured_content=structured, is_error=not done)

    def bars(self, tool: Tool[..., Any], bound: Bound) -> End | None:
        """Say that no client may make a call with these arguments."""
        reason = self._bars(tool, bound)
        return None if reason is None else failed(render.not_permitted_text(reason), ErrorType.NOT_PERMITTED)


@attrs.define(eq=False, repr=False)
class ServedHost(Host):
    """Serves a call that a client has made."""

    tools: ServedTools
    is_approved: bool
    # Whether a person said yes to this very call.

    def context(self, call: ToolCall, tool: Tool[..., Any], deadline: float) -> RunContext[Any]:  # noqa: ARG002  as the host of a run
        """Make what a tool may know of its call: it belongs to no run."""
        return RunContext(deps=self.tools.deps, call_id=call.id, idempotency_key=call.key, deadline=deadline)

    def absence(self, tool: Tool[..., Any]) -> End | None:
        """Say that a tool is not there any more: it may have gone while the call waited."""
        return None if self.tools.offers(tool) else failed(render.absent_text(tool.name), ErrorType.WITHDRAWN)

    def refusal(self, call: ToolCall, tool: Tool[..., Any], bound: Bound) -> End | None:  # noqa: ARG002  as the host of a run
        """Say why a valid call may not run: not with these arguments, or not approved."""
        if (bar := self.tools.bars(tool, bound)) is not None:
            return bar
        if self.is_approved or not needs_approval(tool, tool.arguments(bound)):
            return None
        text = f"{tool.name} needs a person's word, which nobody was asked for: call it again to have them asked."
        return failed(text, ErrorType.BLOCKED, retryable=True)


def annotations_of(tool: Tool[..., Any]) -> m.ToolAnnotations:
    """Return what is declared of a tool; what is not declared is not claimed."""
    asks = tool.requires_approval is not False
    if tool.read_only:
        return m.ToolAnnotations(read_only_hint=True, destructive_hint=True if asks else None)
    return m.ToolAnnotations(read_only_hint=False, destructive_hint=True, idempotent_hint=tool.idempotent)


def _refused(text: str) -> m.CallToolResult:
    return m.CallToolResult(content=[m.TextContent(text=text)], is_error=True)


def _note(send: MemoryObjectSendStream[str], event: object) -> None:
    """Pass on a note of progress, where there is room for it."""
    if isinstance(event, ToolEvent) and event.type is ToolEventType.PROGRESS:
        try:
            send.send_nowait(clean(event.message))
        except (anyio.WouldBlock, anyio.BrokenResourceError, anyio.ClosedResourceError):
            return


async def _report(ctx: Context, notes: MemoryObjectReceiveStream[str]) -> None:
    """Tell the client what a call says of its progress, until it has ended."""
    number = 0
    with notes:
        async for note in notes:
            number += 1
            await ctx.session.report_progress(number, None, note)
