"""The Agent Client Protocol: an agent in an editor, over standard input and output. Each session is one of the store.

The official package has the JSON-RPC and the forms of its messages. A prompt is a message of the session, as in each
chat: it starts a run, or is input of the open one. A process that is killed loses nothing, since the runs are in the
store; `session/load` in the next process shows the session, and goes on with what its run asks.
"""

from __future__ import annotations

import json
import logging
import os
import stat
import sys
from contextlib import redirect_stdout, suppress
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Final

import acp
import anyio
import attrs
from acp import schema as s
from pydantic import ValidationError

from agentfsm.agents.agent_fields import new_id
from agentfsm.agents.decisions import describe_allowance
from agentfsm.core.errors import AgentError, ConflictError, MisuseError
from agentfsm.core.limits import StopReason
from agentfsm.core.machine import State
from agentfsm.core.messages import AudioPart, FilePart, ImagePart, Part, TextPart, UserMessage
from agentfsm.core.pending import PendingKind
from agentfsm.serve.dialects.acp_transport import EditorTransport
from agentfsm.serve.dialects.acp_updates import ACPEncoder, write_history
from agentfsm.serve.dialects.answers import describe_waits
from agentfsm.serve.dialects.conversations import find_latest_run, say
from agentfsm.serve.dialects.turn_parts import format_call_id
from agentfsm.serve.run_control import approve_call, cancel_run, reject_call

if TYPE_CHECKING:
    from asyncio import StreamReader, StreamWriter

    from anyio.abc import TaskGroup

    from agentfsm._lib.web.http_guard import Message
    from agentfsm.agents.agent import Agent
    from agentfsm.core.pending import Pending
    from agentfsm.core.run import Run
    from agentfsm.serve.access import Caller
    from agentfsm.serve.event_stream import RunEventStream, Versions
    from agentfsm.serve.gateway import Gateway

_log = logging.getLogger("agentfsm.serve")

# Stop reasons of a run that the protocol knows; all others that are no end of a turn are errors.
_STOPS: Final = {StopReason.TOKEN_BUDGET: "max_tokens", StopReason.MAX_TURNS: "max_turn_requests"}
# Maximum size of a message of the editor, which has the inline parts of a prompt.
_MAX_MESSAGE_BYTES: Final = 50 * 1024 * 1024
# Empty data of each kind, by which a model is asked whether it takes the kind.
_IMAGE: Final = ImagePart(url="data:image/png;base64,iVBORw0KGgo=")
_AUDIO: Final = AudioPart(url="data:audio/wav;base64,UklGRg==")


@attrs.define(eq=False, repr=False, kw_only=True)
class _Session:
    """A session that an editor has open."""

    id: str
    metadata: dict[str, Any]
    """Metadata of the runs that begin in it: its folders."""

    run_id: str = ""
    """Id of its newest run; empty if it has none."""

    versions: Versions = attrs.field(factory=dict)
    """Position of the updates that the editor has."""

    shown: anyio.Event = attrs.field(factory=anyio.Event)
    """Set once the editor has all that was there when the session was loaded."""

    target: int = 0
    """Version of the run at which `shown` is set."""

    turn: anyio.CancelScope | None = None
    """Scope of what follows the run: a prompt, or the session after it was loaded. None: nothing does."""

    turn_over: anyio.Event = attrs.field(factory=anyio.Event)
    """Set at the end of `turn`."""

    question: anyio.CancelScope | None = None
    """Scope of the approval that the editor is asked for; None if there is none."""

    is_cancelled: bool = False
    """Whether the editor has cancelled the turn."""

    saying: anyio.Lock = attrs.field(factory=anyio.Lock)
    """Held while a prompt begins a run: another one at the same moment is input of it."""


@attrs.define(eq=False, repr=False, kw_only=True)
class ACPAgent:
    """The methods of the protocol, as the official package calls them."""

    gateway: Gateway
    """Executes the runs of one agent."""

    caller: Caller
    """The user of the editor."""

    tasks: TaskGroup
    """Tasks of the process."""

    client: Any = attrs.field(default=None, init=False)
    """The editor."""

    _sessions: dict[str, _Session] = attrs.field(factory=dict, init=False)

    @property
    def agent(self) -> Agent[Any]:
        """The agent."""
        return self.gateway.find_agent(None)

    def on_connect(self, client: Any) -> None:
        """Receive the connection to the editor."""
        self.client = client

    async def initialize(self, protocol_version: int, **_others: Any) -> s.InitializeResponse:  # noqa: ARG002
        """Return what the agent can do, and the one version of the protocol that it speaks."""
        takes = self.agent.model.unsupported_part
        accepts = s.PromptCapabilities(image=takes(_IMAGE) is None, audio=takes(_AUDIO) is None, embedded_context=True)
        return s.InitializeResponse(
            protocol_version=acp.PROTOCOL_VERSION,
            agent_capabilities=s.AgentCapabilities(load_session=True, prompt_capabilities=accepts),
            agent_info=s.Implementation(name=self.agent.name, version=version("agentfsm")),
            auth_methods=[],
        )

    async def new_session(self, cwd: str, **others: Any) -> s.NewSessionResponse:
        """Begin a session."""
        session = self._open_session(new_id(), cwd, others)
        return s.NewSessionResponse(session_id=session.id)

    async def load_session(self, cwd: str, session_id: str, **others: Any) -> s.LoadSessionResponse:
        """Show a session of the store, and go on with its run if that is not over."""
        run = await self._guard(find_latest_run(self.gateway, self.caller, session_id))
        if run is None or run.header.agent != self.agent.name:
            raise acp.RequestError(-32002, f"there is no session {session_id!r} of {self.agent.name!r} in this store")
        if session_id in self._sessions:
            await self._end_turn(self._sessions[session_id])
        session = self._open_session(session_id, cwd, others)
        session.run_id, session.versions, session.target = run.id, {}, run.version
        earlier = [*run.prior, *run.header.history, UserMessage(parts=run.header.prompt)]
        for update in write_history(earlier):
            await self.client.session_update(session_id, update)
        self.tasks.start_soon(self._follow_loaded, session)
        await session.shown.wait()
        return s.LoadSessionResponse()

    async def prompt(self, prompt: list[Any], session_id: str, **_others: Any) -> s.PromptResponse:
        """Say something in a session, and return when its run is over or waits for a message."""
        session = self._sessions.get(session_id)
        if session is None:
            raise acp.RequestError(-32002, f"session {session_id!r} is not open: load it first")
        session.is_cancelled = False
        response: s.PromptResponse = await self._guard(self._take_turn(session, [_read_block(each) for each in prompt]))
        return response

    async def cancel(self, session_id: str, **_others: Any) -> None:
        """End the run of a session."""
        session = self._sessions.get(session_id)
        if session is not None:
            session.is_cancelled = True
            if session.run_id:
                await self._cancel_run(session)
            if session.question is not None:
                session.question.cancel()

    # One turn.

    def _open_session(self, session_id: str, cwd: str, others: dict[str, Any]) -> _Session:
        if servers := others.get("mcp_servers"):
            names = ", ".join(repr(each.name) for each in servers)
            _log.warning("the MCP servers %s of the editor are not used: the tools are the agent's own", names)
        folders = others.get("additional_directories") or []
        metadata = {"cwd": cwd, **({"additional_directories": folders} if folders else {})}
        session = self._sessions[session_id] = _Session(id=session_id, metadata=metadata)
        return session

    async def _take_turn(self, session: _Session, parts: list[Part]) -> s.PromptResponse:
        async with session.saying:
            turn = await say(
                self.gateway,
                self.caller,
                parts,
                agent=self.agent.name,
                session=session.id,
                key=None,
                metadata=session.metadata,
                answer=parts[0].text if len(parts) == 1 and isinstance(parts[0], TextPart) else None,
            )
            await self._end_turn(session)
            if turn.run_id != session.run_id:
                session.run_id, session.versions = turn.run_id, turn.versions
        if session.is_cancelled:  # before the run was known
            await self._cancel_run(session)
        return s.PromptResponse(stop_reason=await self._follow(session, shows_inputs=False))

    async def _end_turn(self, session: _Session) -> None:
        """End what follows the run of a session, and not the run: something else follows it from there on."""
        if session.turn is not None:
            session.turn.cancel()
            await session.turn_over.wait()

    async def _follow_loaded(self, session: _Session) -> None:
        """Show the run of a loaded session, and ask what it asks, until it is over, or a prompt takes its place."""
        try:
            with suppress(ConnectionError):  # the editor has gone, and the process ends
                try:
                    await self._guard(self._follow(session, shows_inputs=True))
                except acp.RequestError as error:
                    await self._say(session, f"[{error}]")
        finally:
            session.shown.set()

    async def _follow(self, session: _Session, *, shows_inputs: bool) -> Any:
        """Show the run of a session and ask for its approvals. Return the reason why the turn is over.

        Raises:
            RequestError: when the run has failed.
        """
        session.turn, session.turn_over = anyio.CancelScope(), anyio.Event()
        try:
            with session.turn:
                while True:
                    encoder = ACPEncoder(shows_inputs=shows_inputs)
                    stream = await self.gateway.open_stream(session.run_id, dict(session.versions), encoder)
                    session.versions = stream.versions
                    await stream({"root_path": ""}, _never_leave, partial(self._send, session, stream))
                    if encoder.cut is not None:
                        why = f"the updates ended ({encoder.cut}); the run goes on: load the session again"
                        raise acp.RequestError(-32603, why)
                    run = await self.gateway.runs.load(session.run_id)
                    if run.is_over:
                        return _read_end(run)
                    session.shown.set()
                    approvals = [item for item in run.pending if item.kind is PendingKind.APPROVAL]
                    if run.is_waiting and not approvals:
                        await self._say(session, describe_waits(run))
                        return "end_turn"
                    for item in approvals:
                        await self._ask(session, item)
            return "end_turn"  # another prompt has taken the place of this one
        finally:
            session.turn = None
            session.turn_over.set()

    async def _send(self, session: _Session, stream: RunEventStream, message: Message) -> None:
        """Send the updates of a part of the stream."""
        # What was sent is counted already, so a turn that ends here sends it.
        with anyio.CancelScope(shield=True), suppress(ConnectionError):  # the editor has gone, and the process ends
            for line in message.get("body", b"").decode().split("\n"):
                if line.startswith("{"):
                    await self.client.session_update(session.id, json.loads(line))
        if stream.versions.get(session.run_id, 0) >= session.target:
            session.shown.set()

    async def _say(self, session: _Session, text: str) -> None:
        chunk = s.AgentMessageChunk(
            session_update="agent_message_chunk", content=s.TextContentBlock(type="text", text=f"\n\n{text}")
        )
        await self.client.session_update(session.id, chunk)

    async def _ask(self, session: _Session, item: Pending) -> None:
        """Ask for an approval, and pass on the decision, which is valid for exactly what was shown."""
        names = list(item.arguments)
        options = [
            s.PermissionOption(option_id="allow", name="Allow", kind="allow_once"),
            s.PermissionOption(option_id="reject", name="Reject", kind="reject_once"),
        ]
        with suppress(MisuseError):  # a call without arguments, or a plan
            rule = describe_allowance(item, names).partition("\n")[0]
            name = f"Allow in this session: {rule}"
            options.insert(1, s.PermissionOption(option_id="always", name=name, kind="allow_always"))
        about = "\n".join(filter(None, (item.error, item.reason, item.description)))
        content: Any = [acp.tool_content(acp.text_block(about))] if about else None
        call = s.ToolCallUpdate(
            tool_call_id=format_call_id(item.run_id, item.call_id),
            title=item.tool,
            status="pending",
            raw_input=item.arguments,
            content=content,
        )
        chosen: str | None = None
        with anyio.CancelScope() as session.question:
            try:
                answer = await self.client.request_permission(session.id, call, options)
            except ConnectionError:
                raise acp.RequestError(-32603, "the editor has gone; the call waits for its approval") from None
            except ValidationError:
                raise acp.RequestError(-32603, f"the answer of the editor is no decision; {item.tool} waits") from None
            chosen = getattr(answer.outcome, "option_id", None)
            if chosen is not None and chosen not in [each.option_id for each in options]:
                raise acp.RequestError(-32603, f"{chosen[:40]!r} is none of the options; {item.tool} waits")
        decide = (self.gateway, self.caller, item.run_id, item.call_id)
        try:
            if chosen in ("allow", "always"):
                allow = names if chosen == "always" else ()
                await approve_call(*decide, digest=item.digest, shown_run=item.run_id, allow=allow)
            elif chosen == "reject":
                await reject_call(*decide, shown_run=item.run_id)
            else:
                await self._cancel_run(session)
        except ConflictError as error:  # decided elsewhere, or changed: what waits now is asked for next
            await self._say(session, str(error))

    async def _cancel_run(self, session: _Session) -> None:
        with suppress(ConflictError):  # it is over
            await cancel_run(self.gateway, self.caller, session.run_id)

    async def _guard(self, work: Any) -> Any:
        """Return the outcome of a request, whose errors the editor shows to its user."""
        try:
            return await work
        except AgentError as error:
            raise acp.RequestError(-32602 if isinstance(error, MisuseError) else -32603, str(error)) from None


async def _never_leave() -> Message:
    """Wait: the client of a stream of this process leaves with the process."""
    await anyio.sleep_forever()
    raise AssertionError


def _read_end(run: Run) -> str:
    """Return the reason why the turn of a run that is over has ended.

    Raises:
        RequestError: when the run has failed.
    """
    if run.state is State.DONE:
        return "end_turn"
    if run.stop_reason is StopReason.CANCELLED:
        return "cancelled"
    if run.stop_reason is not None and run.stop_reason in _STOPS:
        return _STOPS[run.stop_reason]
    raise acp.RequestError(
        -32603, run.stop_message or str(run.stop_reason), {"runId": run.id, "stopReason": str(run.stop_reason)}
    )


def _read_block(block: Any) -> Part:
    """Return a part of a prompt.

    Raises:
        RequestError: when it has no form that a run can read.
    """
    if isinstance(block, s.TextContentBlock):
        return TextPart(text=block.text)
    if isinstance(block, s.ImageContentBlock):
        return ImagePart(url=f"data:{block.mime_type};base64,{block.data}")
    if isinstance(block, s.AudioContentBlock):
        return AudioPart(url=f"data:{block.mime_type};base64,{block.data}")
    if isinstance(block, s.ResourceContentBlock):  # a reference for the agent's tools; nothing is fetched
        title = f" ({block.title})" if block.title else ""
        return TextPart(text=f"[{block.name}{title}]: {block.uri}")
    resource = block.resource
    if isinstance(resource, s.TextResourceContents):
        return TextPart(text=f"Content of {resource.uri}:\n\n{resource.text}")
    kind = resource.mime_type or "application/octet-stream"
    makers: dict[str, Any] = {"image": ImagePart, "audio": AudioPart}
    make = makers.get(kind.partition("/")[0])
    url = f"data:{kind};base64,{resource.blob}"
    return FilePart(url=url, name=resource.uri.rpartition("/")[2]) if make is None else make(url=url)


async def serve_stdio(gateway: Gateway, caller: Caller, output: Any) -> None:
    """Serve the editor at standard input until it closes that. Meanwhile `print` writes to standard error.

    Args:
        gateway: Executes the runs of one agent.
        caller: The user of the editor.
        output: File of the protocol, which is the standard output of the process.

    Raises:
        MisuseError: when one of them is a file.
    """
    if os.name == "posix" and not all(map(_is_stream, (sys.stdin, output))):
        raise MisuseError(
            "standard input and output are no pipes: an editor starts `agentfsm acp`, and speaks with it over them"
        )
    with redirect_stdout(output):
        reader, writer = await acp.stdio_streams()
    with redirect_stdout(sys.stderr):
        await serve_editor(gateway, caller, reader, writer)


def _is_stream(file: Any) -> bool:
    """Return whether an event loop can wait for a file."""
    mode = os.fstat(file.fileno()).st_mode
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or os.isatty(file.fileno())


async def serve_editor(gateway: Gateway, caller: Caller, reader: StreamReader, writer: StreamWriter) -> None:
    """Serve an editor until it closes its stream. Its open runs are released to the store."""
    async with gateway.lifespan(None), anyio.create_task_group() as tasks:
        agent: Any = ACPAgent(gateway=gateway, caller=caller, tasks=tasks)
        await acp.run_agent(agent, EditorTransport(reader, writer, _MAX_MESSAGE_BYTES))
        tasks.cancel_scope.cancel()
