"""Wrap a server's tool as a `Tool`: its name, its declaration and its call."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Final, Protocol, TypeVar

import attrs
import mcp.types as m
from mcp import Client

from agentfsm.core.messages import ErrorType, Outcome, Part, replace_surrogates
from agentfsm.logins import Login
from agentfsm.mcp.client.catalogue import Catalogue, ToolChangedError
from agentfsm.mcp.client.content import OutputCheck, convert_result
from agentfsm.mcp.client.elicitation import AttemptResult, ElicitationRouter, QuestionHandling
from agentfsm.mcp.client.elicitation import call_tool as call_asking
from agentfsm.mcp.client.question_relay import QuestionRelay
from agentfsm.mcp.client.server_features import fetch_resource, fetch_resources
from agentfsm.mcp.client.tasks import RemoteTask, TaskStatus, cancel_task
from agentfsm.mcp.client.user_sessions import UserSession, UserSessions
from agentfsm.mcp.connection import request_errors
from agentfsm.mcp.connection.server_connection import ServerConnection
from agentfsm.mcp.errors import LoginRequiredError, MCPServerError
from agentfsm.mcp.trust.consent import ConsentGate
from agentfsm.mcp.trust.names import tool_name
from agentfsm.mcp.trust.tool_policy import ToolPolicy, find_title
from agentfsm.tools.attendance import Attendance, AttendedQuestions
from agentfsm.tools.run_context import CallPaused, InputRequired, RunContext, TaskPending, ToolReturn
from agentfsm.tools.tool import EndTask, Tool, make_tool

T = TypeVar("T")

_log = logging.getLogger("agentfsm.mcp")

# Maximum of refused questions that a result quotes.
MAX_REFUSALS_SHOWN: Final = 3
_REFUSED_TEXT: Final = (
    "[The MCP server {server!r} asked a person for input during this call, and was refused: {asked}. The call went on "
    "without the input, and its effects before the question may have happened. Do not repeat it to get asked again: "
    "tell the user that this tool needs a person who attends the run.]"
)
_REFUSED_LOG: Final = (
    "the MCP server %r asked for input during a call of %r, and was refused: %s. Give the driving call elicit=; or "
    "name the tool in repeat_for_input=, if its calls may be made again from the beginning"
)
# Names of the tools of `build_resource_tools`, without that of the server.
RESOURCE_TOOLS: Final = ("list_resources", "read_resource")
WITHHELD_DESCRIPTION: Final = "Withheld: a person has to approve its current version."


class Session(Protocol):
    """A connection of a server, with what belongs to it."""

    connection: ServerConnection
    catalogue: Catalogue
    elicitation_router: ElicitationRouter


class ToolServer(Protocol):
    """The parts of a server that its tools use; `MCPServer` has them."""

    name: str
    tool_policy: ToolPolicy
    consent_gate: ConsentGate
    timeout_s: float
    connection: ServerConnection
    catalogue: Catalogue
    elicitation_router: ElicitationRouter
    needs_refresh: bool
    users: Login | None
    sessions: UserSessions


def build_tool(server: ToolServer, listed: m.Tool) -> Tool[..., Any]:
    """Build a tool from a server's listing.

    Raises:
        MisuseError: when one of its schemas cannot be used.
    """
    name, options = tool_name(server.name, listed.name), server.tool_policy.tool_options(server.consent_gate, listed)
    may_repeat = options["read_only"] or options["idempotent"] or server.tool_policy.repeats_for_input(listed.name)
    check = None if listed.output_schema is None else OutputCheck.from_schema(listed.output_schema, name)
    return make_tool(
        _build_function(server, listed, check, may_repeat=may_repeat),
        name=name,
        description=listed.description or find_title(listed) or "",
        parameters=listed.input_schema,
        timeout_s=server.timeout_s,
        login=server.users,
        end_task=_build_end_task(server),
        **options,
    )


def build_resource_tools(server: ToolServer) -> tuple[Tool[..., Any], ...]:
    """Build the two tools with which a model lists and reads the resources of a server."""
    name, timeout_s, policy = server.name, server.timeout_s, server.tool_policy

    async def fetch(ctx: RunContext[Any], ask: Callable[[ServerConnection], Awaitable[T]]) -> T:
        own = await _find_own(server, ctx.tenant, ctx.user)
        try:
            return await ask(server.connection if own is None else own.connection)
        except LoginRequiredError:
            if server.users is not None:
                await server.users.ask(ctx)
            raise

    async def list_resources(ctx: RunContext[Any]) -> list[dict[str, Any]] | ToolReturn:
        try:
            found = await fetch(ctx, lambda connection: fetch_resources(connection, timeout_s))
        except MCPServerError as error:
            return request_errors.resolve_failure(error, name, "list_resources")
        return [attrs.asdict(each, filter=lambda _, value: bool(value)) for each in found]

    async def read_resource(ctx: RunContext[Any], uri: str) -> list[Part] | ToolReturn:
        try:
            return list(await fetch(ctx, lambda connection: fetch_resource(connection, timeout_s, uri)))
        except MCPServerError as error:
            return request_errors.resolve_failure(error, name, "read_resource")

    functions: tuple[Callable[..., Any], ...] = (list_resources, read_resource)
    about = (
        f"List the resources of the server {name}, with the URIs to read them.",
        f"Read a resource of the server {name}.",
    )
    return tuple(
        make_tool(
            function,
            name=tool_name(name, own_name),
            description=description,
            timeout_s=timeout_s,
            login=server.users,
            **{
                "read_only": True,
                "reads_untrusted": not policy.trusted,
                "sends_arguments": not policy.trusted,
                **policy.find_declarations(name, own_name),
            },
        )
        for own_name, function, description in zip(RESOURCE_TOOLS, functions, about, strict=True)
    )


def build_withheld_tool(name: str) -> Tool[..., Any]:
    """Build the disabled placeholder of a withheld tool: models do not see it, and calls of it are refused."""
    return make_tool(_do_nothing, name=name, description=WITHHELD_DESCRIPTION, parameters={}, enabled=False)


async def _do_nothing(**_arguments: Any) -> None:
    """Do nothing: the engine refuses calls of a disabled tool."""


def _build_function(
    server: ToolServer, listed: m.Tool, check: OutputCheck | None, *, may_repeat: bool
) -> Callable[..., Any]:
    async def call(ctx: RunContext[Any], /, **arguments: Any) -> ToolReturn:
        own = await _find_own(server, ctx.tenant, ctx.user)
        at: Session = own or server
        if (task := RemoteTask.from_state(ctx.state)) is not None:
            return await _look_at_task(server, own, ctx, task, check)
        is_sent = False
        relay = None if ctx.attendance is None else QuestionRelay(partial(_ask_person, ctx, ctx.attendance))
        handling = QuestionHandling(relay=relay, may_repeat=may_repeat)

        async def ask(client: Client) -> AttemptResult:
            nonlocal is_sent

            async def report(progress: float, total: float | None, message: str | None) -> None:
                ctx.progress(_mask(own, message or f"{progress:g}{f' of {total:g}' if total else ''}"))

            async def relist() -> None:
                await at.catalogue.check_unchanged(client, listed, refetch=True)

            await at.catalogue.check_unchanged(client, listed)
            is_sent = True
            return await call_asking(
                client,
                at.elicitation_router,
                ctx,
                handling,
                name=listed.name,
                arguments=arguments,
                report=report,
                relist=relist,
            )

        try:
            request = at.connection.request(ask, patience_s=server.timeout_s)
            result = await (request if relay is None else relay.run(request))
        except ToolChangedError as error:
            server.needs_refresh = True
            return _tool_changed_result(server, listed, error)
        except (LoginRequiredError, request_errors.RequestError) as error:
            if server.users is not None and _needs_login(error):
                await server.users.ask(ctx)
            if isinstance(error, request_errors.RequestError):
                error.detail = _mask(own, error.detail)
            return request_errors.resolve_failure(error, server.name, listed.name, is_sent=is_sent)
        except Exception as error:  # noqa: BLE001  `resolve_failure` raises other errors again
            return request_errors.resolve_failure(error, server.name, listed.name, is_sent=is_sent)
        if isinstance(result, InputRequired):
            raise result
        if isinstance(result, TaskStatus):
            raise RemoteTask.begin(result).wait(server.name, result)
        assert isinstance(result, m.CallToolResult)  # no other extension is offered  # noqa: S101
        converted = _convert_result(result, check)
        converted = attrs.evolve(converted, content=_mask(own, converted.content))
        if not handling.refused:
            return converted
        _log.warning(_REFUSED_LOG, server.name, listed.name, "; ".join(handling.refused))
        asked = "; ".join(handling.refused[:MAX_REFUSALS_SHOWN])
        text = _REFUSED_TEXT.format(server=server.name, asked=asked)
        return attrs.evolve(converted, content=f"{converted.content}\n\n{replace_surrogates(text)}")

    return call


async def _look_at_task(
    server: ToolServer, own: UserSession | None, ctx: RunContext[Any], task: RemoteTask, check: OutputCheck | None
) -> ToolReturn:
    at: Session = own or server
    try:
        ended = await at.connection.request(
            partial(task.look, ctx=ctx, server=server.name), patience_s=server.timeout_s
        )
    except Exception as error:  # noqa: BLE001  whatever it is, the task may go on
        if server.users is not None and _needs_login(error):
            await server.users.ask(ctx)
        ended = task.resolve_error(error, server.name)
    if isinstance(ended, TaskPending):
        ended.message = _mask(own, ended.message)
    if isinstance(ended, CallPaused):
        raise ended
    converted = ended if isinstance(ended, ToolReturn) else _convert_result(ended, check)
    return attrs.evolve(converted, content=_mask(own, converted.content))


def _build_end_task(server: ToolServer) -> EndTask:
    async def end(state: Any, *, tenant: str | None, user: str | None) -> bool:
        task = RemoteTask.from_state(state)
        if task is None:
            return False
        at: Session = await _find_own(server, tenant, user) or server
        await at.connection.request(partial(cancel_task, task_id=task.id))
        return True

    return end


def _needs_login(error: Exception) -> bool:
    return isinstance(error, LoginRequiredError) or getattr(error, "login", None) is not None


async def _find_own(server: ToolServer, tenant: str | None, user: str | None) -> UserSession | None:
    """Return the connection of a user; None if all calls go over that of the program."""
    return None if server.users is None else await server.sessions.find(tenant, user)


def _mask(own: UserSession | None, text: str) -> str:
    """Return a text of the server without the token of the user, which it may repeat."""
    masked: str = text if own is None else own.auth.mask(text)
    return masked


async def _ask_person(ctx: RunContext[Any], attendance: Attendance, asked: InputRequired) -> Mapping[str, Any] | None:
    return await attendance.ask(AttendedQuestions(questions=asked.questions, state=asked.state, attempt=ctx.attempt))


def _tool_changed_result(server: ToolServer, listed: m.Tool, error: ToolChangedError) -> ToolReturn:
    text = (
        f"{listed.name!r} was not called: the MCP server {server.name!r} has changed its tools, and {error}. "
        "Nothing was run. Its tools are listed again before your next turn: use the tools available then, or tell "
        "the user that a person may have to approve the change."
    )
    return ToolReturn(outcome=Outcome.FAILED, content=text, error_type=ErrorType.UNAVAILABLE)


def _convert_result(result: m.CallToolResult, check: OutputCheck | None) -> ToolReturn:
    if check is not None and (flaw := check.explain_mismatch(result)) is not None:
        return ToolReturn(outcome=Outcome.FAILED, content=flaw, error_type=ErrorType.TOOL)
    failed = bool(result.is_error)
    content, parts = convert_result(result)
    return ToolReturn(
        outcome=Outcome.FAILED if failed else Outcome.DONE,
        content=content,
        error_type=ErrorType.TOOL if failed else None,
        parts=parts,
    )
