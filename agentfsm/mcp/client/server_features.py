"""What a server offers beside calls: the lists of its tools, resources and prompts, and what stands in them.

The application asks for resources and prompts; the model gets at resources only by the two tools of
`build_resource_tools`, and at prompts never. Only what a server has declared is asked for.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal, TypeVar, get_args

import anyio
import attrs
import mcp.types as m
from mcp import Client, MCPError
from pydantic import ValidationError

from agentfsm.core.errors import MisuseError
from agentfsm.core.messages import AssistantMessage, Message, Part, TextPart, UserMessage, format_part
from agentfsm.core.text_safety import escape_hidden
from agentfsm.core.value import Value
from agentfsm.mcp.client.catalogue import Catalogue, fetch_all_pages
from agentfsm.mcp.client.content import convert_block, convert_resource
from agentfsm.mcp.connection import request_errors
from agentfsm.mcp.connection.lenient_parsing import InvalidEntry
from agentfsm.mcp.connection.server_connection import ServerConnection
from agentfsm.mcp.errors import MCPServerError, NoAnswerError
from agentfsm.mcp.trust.names import tool_name
from agentfsm.tools.run_context import ToolReturn
from agentfsm.tools.tool import Tool, make_tool

T = TypeVar("T")

_log = logging.getLogger("agentfsm.mcp")

Capability = Literal["tools", "resources", "prompts", "completions"]


@attrs.frozen(kw_only=True)
class RemoteResource(Value):
    """Something that a server can be asked to read out."""

    uri: str
    name: str = ""
    title: str = ""
    description: str = ""
    media_type: str = ""
    size: int | None = None
    """Bytes, where the server says so."""


@attrs.frozen(kw_only=True)
class ResourceTemplate(Value):
    """Resources of one kind, by the form of their URIs."""

    uri_template: str
    """As RFC 6570 has it: "file:///{path}"."""

    name: str = ""
    title: str = ""
    description: str = ""
    media_type: str = ""


@attrs.frozen(kw_only=True)
class PromptArgument(Value):
    """What a prompt is filled in with."""

    name: str
    description: str = ""
    required: bool = False


@attrs.frozen(kw_only=True)
class RemotePrompt(Value):
    """Messages that a server has ready, for a person to choose."""

    name: str
    title: str = ""
    description: str = ""
    arguments: tuple[PromptArgument, ...] = ()


@attrs.frozen(kw_only=True)
class Listing(Value):
    """What a server says of itself and its tools."""

    tools: Sequence[m.Tool | InvalidEntry]
    instructions: str | None = None
    has_resources: bool = False


async def request(
    connection: ServerConnection,
    subject: str,
    timeout_s: float,
    operation: Callable[[Client], Awaitable[T]],
    *,
    proves_health: bool = True,
) -> T:
    """Ask for something that is no call, within a time.

    Args:
        connection: The connection.
        subject: What is asked for, as it stands in an error.
        timeout_s: Seconds from the moment at which there is a connection.
        operation: Asks.
        proves_health: As `ServerConnection.request` has it.

    Raises:
        MCPServerError: when there is no answer, or one that cannot be used.
        MisuseError: when the server has not declared that it has such things.
    """

    async def within(client: Client) -> T:
        with anyio.fail_after(timeout_s):
            return await operation(client)

    try:
        return await connection.request(within, proves_health=proves_health)
    except (MCPError, ValidationError, TimeoutError) as error:
        said = (
            f"no answer within {timeout_s:g} s"
            if isinstance(error, TimeoutError)
            else request_errors.describe_request_error(error)
        )
        raise NoAnswerError(f"the MCP server {connection.name!r} was asked for {subject}: {said}") from error


def check_declared(client: Client, server: str, capability: Capability) -> None:
    """Check that the server has declared what it is to be asked for.

    Raises:
        MisuseError: when it has not.
    """
    declared = client.server_capabilities
    if getattr(declared, capability) is None:
        names = [name for name in get_args(Capability) if getattr(declared, name) is not None]
        raise MisuseError(
            f"the MCP server {server!r} has declared no {capability}, so it is not asked for them: it has "
            f"{' and '.join(names) or 'nothing to ask for'}"
        )


async def fetch_tools(
    connection: ServerConnection, timeout_s: float, catalogue: Catalogue, on_connected: Callable[[], object]
) -> Listing:
    """List the tools of a server; none where it has declared none.

    Args:
        connection: The connection.
        timeout_s: Seconds for all pages.
        catalogue: Keeps what the connection lists.
        on_connected: Called, in another thread, when there is a connection: the server tells what changes from then on.

    Raises:
        MCPServerError: when they cannot be listed.
    """

    async def question(client: Client) -> Listing:
        on_connected()
        found = await catalogue.fetch(client)
        has_resources = client.server_capabilities.resources is not None
        return Listing(tools=found, instructions=client.instructions, has_resources=has_resources)

    return await request(connection, "its tools", timeout_s, question, proves_health=False)


def keep_valid(server: str, kind: str, listed: Sequence[T | InvalidEntry]) -> list[T]:
    """Return the entries of a list that can be used, and tell the log of the others."""
    for each in listed:
        if isinstance(each, InvalidEntry):
            _log.warning(
                "the %s %r of the MCP server %r is left out: %s", kind, escape_hidden(each.name), server, each.why
            )
    return [each for each in listed if not isinstance(each, InvalidEntry)]


async def fetch_resources(connection: ServerConnection, timeout_s: float) -> tuple[RemoteResource, ...]:
    """List the resources of a server."""

    async def question(client: Client) -> list[m.Resource | InvalidEntry]:
        check_declared(client, connection.name, "resources")
        return await fetch_all_pages(lambda cursor: client.list_resources(cursor=cursor), lambda page: page.resources)

    return tuple(
        RemoteResource(
            uri=each.uri,
            name=each.name,
            title=each.title or "",
            description=each.description or "",
            media_type=each.mime_type or "",
            size=each.size,
        )
        for each in keep_valid(
            connection.name, "resource", await request(connection, "its resources", timeout_s, question)
        )
    )


async def fetch_resource_templates(connection: ServerConnection, timeout_s: float) -> tuple[ResourceTemplate, ...]:
    """List the templates of a server's resources."""

    async def question(client: Client) -> list[m.ResourceTemplate | InvalidEntry]:
        check_declared(client, connection.name, "resources")
        return await fetch_all_pages(
            lambda cursor: client.list_resource_templates(cursor=cursor), lambda page: page.resource_templates
        )

    listed = await request(connection, "the templates of its resources", timeout_s, question)
    return tuple(
        ResourceTemplate(
            uri_template=each.uri_template,
            name=each.name,
            title=each.title or "",
            description=each.description or "",
            media_type=each.mime_type or "",
        )
        for each in keep_valid(connection.name, "template", listed)
    )


async def fetch_resource(connection: ServerConnection, timeout_s: float, uri: str) -> tuple[Part, ...]:
    """Read a resource: its contents, in their order."""

    async def question(client: Client) -> m.ReadResourceResult:
        check_declared(client, connection.name, "resources")
        return await client.read_resource(uri)

    result = await request(connection, f"the resource {uri[:200]!r}", timeout_s, question)
    return convert_resource(result.contents)


async def fetch_prompts(connection: ServerConnection, timeout_s: float) -> tuple[RemotePrompt, ...]:
    """List the prompts of a server."""

    async def question(client: Client) -> list[m.Prompt | InvalidEntry]:
        check_declared(client, connection.name, "prompts")
        return await fetch_all_pages(lambda cursor: client.list_prompts(cursor=cursor), lambda page: page.prompts)

    return tuple(
        RemotePrompt(
            name=each.name,
            title=each.title or "",
            description=each.description or "",
            arguments=tuple(
                PromptArgument(name=one.name, description=one.description or "", required=bool(one.required))
                for one in each.arguments or ()
            ),
        )
        for each in keep_valid(connection.name, "prompt", await request(connection, "its prompts", timeout_s, question))
    )


async def fetch_prompt(
    connection: ServerConnection, timeout_s: float, name: str, arguments: dict[str, str]
) -> tuple[Message, ...]:
    """Get a prompt, filled in, as messages."""
    for key, value in arguments.items():
        if not isinstance(value, str):
            raise MisuseError(f"prompt({name!r}, {key}=...) takes text, not {type(value).__name__}: write str(...)")

    async def question(client: Client) -> m.GetPromptResult:
        check_declared(client, connection.name, "prompts")
        return await client.get_prompt(name, arguments)

    result = await request(connection, f"the prompt {name[:200]!r}", timeout_s, question)
    return tuple(filter(None, map(_to_message, result.messages)))


async def fetch_completions(
    connection: ServerConnection,
    timeout_s: float,
    target: RemotePrompt | ResourceTemplate,
    argument: tuple[str, str],
    known: dict[str, str],
) -> tuple[str, ...]:
    """Ask how an argument may go on."""
    ref: m.PromptReference | m.ResourceTemplateReference = (
        m.PromptReference(name=target.name)
        if isinstance(target, RemotePrompt)
        else m.ResourceTemplateReference(uri=target.uri_template)
    )
    name, value = argument

    async def question(client: Client) -> m.CompleteResult:
        check_declared(client, connection.name, "completions")
        return await client.complete(ref, {"name": name, "value": value}, known or None)

    result = await request(connection, f"what {name!r} may be", timeout_s, question)
    return tuple(result.completion.values)


def _to_message(message: m.PromptMessage) -> Message | None:
    """Return a message of a prompt; None where it says nothing, which no provider takes."""
    parts = convert_block(message.content)
    if all(isinstance(part, TextPart) and not part.text.strip() for part in parts):
        return None
    return (
        UserMessage(parts=parts)
        if message.role == "user"
        else AssistantMessage(text="\n".join(map(format_part, parts)))
    )


def build_resource_tools(connection: ServerConnection, timeout_s: float) -> tuple[Tool[..., Any], ...]:
    """Make the two tools by which a model gets at the resources of a server.

    Args:
        connection: The connection.
        timeout_s: Seconds for each call.
    """

    async def list_resources() -> list[dict[str, Any]] | ToolReturn:
        try:
            found = await fetch_resources(connection, timeout_s)
        except MCPServerError as error:
            return request_errors.resolve_failure(error, connection.name, "list_resources")
        return [attrs.asdict(each, filter=lambda _, value: bool(value)) for each in found]

    async def read_resource(uri: str) -> list[Part] | ToolReturn:
        try:
            return list(await fetch_resource(connection, timeout_s, uri))
        except MCPServerError as error:
            return request_errors.resolve_failure(error, connection.name, "read_resource")

    about: dict[Callable[..., Any], str] = {
        list_resources: f"List the resources of the server {connection.name}: what can be read there, by URI.",
        read_resource: f"Read a resource of the server {connection.name}.",
    }
    return tuple(
        make_tool(
            function,
            name=tool_name(connection.name, function.__name__),
            description=description,
            read_only=True,
            timeout_s=timeout_s,
        )
        for function, description in about.items()
    )
