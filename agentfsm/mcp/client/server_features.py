"""Fetch a server's lists of tools, resources and prompts, and their contents.

The application requests resources and prompts. The model reaches resources only through two tools, and prompts never.
Capabilities that a server has not declared are not requested.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Literal, TypeVar, get_args

import anyio
import attrs
import mcp.types as m
from mcp import Client, MCPError
from mcp.types.version import MODERN_PROTOCOL_VERSIONS
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
from agentfsm.mcp.errors import LoginRequiredError, NoAnswerError

T = TypeVar("T")

_log = logging.getLogger("agentfsm.mcp")

Capability = Literal["tools", "resources", "prompts", "completions"]


@attrs.frozen(kw_only=True)
class RemoteResource(Value):
    """Resource in a server's list."""

    uri: str
    """URI by which the resource is read."""

    name: str = ""
    """Name of the resource."""

    title: str = ""
    """Title for people; empty: none was sent."""

    description: str = ""
    """Description of the resource; empty: none was sent."""

    media_type: str = ""
    """MIME type of the contents; empty: unknown."""

    size: int | None = None
    """Size of the contents in bytes. None: unknown."""


@attrs.frozen(kw_only=True)
class ResourceTemplate(Value):
    """URI template for resources of one kind."""

    uri_template: str
    """URI template as in RFC 6570, such as "file:///{path}"."""

    name: str = ""
    """Name of the template."""

    title: str = ""
    """Title for people; empty: none was sent."""

    description: str = ""
    """Description of the resources; empty: none was sent."""

    media_type: str = ""
    """MIME type that all resources of this kind have; empty: unknown."""


@attrs.frozen(kw_only=True)
class PromptArgument(Value):
    """Argument of a remote prompt."""

    name: str
    """Name of the argument."""

    description: str = ""
    """Description for the user; empty: none was sent."""

    required: bool = False
    """Whether the server cannot render the prompt without this argument."""


@attrs.frozen(kw_only=True)
class RemotePrompt(Value):
    """Prompt in a server's list, for a person to choose."""

    name: str
    """Name by which the prompt is requested."""

    title: str = ""
    """Title for people; empty: none was sent."""

    description: str = ""
    """Description for the user; empty: none was sent."""

    arguments: tuple[PromptArgument, ...] = ()
    """Arguments of the prompt."""


@attrs.frozen(kw_only=True)
class Listing(Value):
    """Result of listing a server's tools."""

    tools: Sequence[m.Tool | InvalidEntry]
    """Tools of the server; an entry that could not be parsed is an `InvalidEntry`."""

    instructions: str | None = None
    """Usage notes of the server for the model. None: it sent none."""

    has_resources: bool = False
    """Whether the server has declared resources."""

    has_tasks: bool = True
    """Whether calls can begin tasks: the extension is one of 2026-07-28."""


async def request(
    connection: ServerConnection,
    subject: str,
    timeout_s: float,
    operation: Callable[[Client], Awaitable[T]],
    *,
    proves_health: bool = True,
) -> T:
    """Make a request other than a tool call, with a timeout.

    Args:
        connection: The connection.
        subject: The subject of the request, for error messages.
        timeout_s: Seconds that the operation may take, counted from an open connection.
        operation: Function that makes the request.
        proves_health: As for `ServerConnection.request`.

    Raises:
        MCPServerError: when the answer is missing or invalid.
        MisuseError: when the server has not declared the capability.
    """

    async def within(client: Client) -> T:
        with anyio.fail_after(timeout_s):
            return await operation(client)

    try:
        return await connection.request(within, proves_health=proves_health)
    except (MCPError, ValidationError, TimeoutError) as error:
        if isinstance(error, request_errors.RequestError) and error.login is not None:
            raise LoginRequiredError(error.login.reason, error.login.advice, server=connection.name) from error
        said = (
            f"no answer within {timeout_s:g} s"
            if isinstance(error, TimeoutError)
            else request_errors.describe_request_error(error)
        )
        raise NoAnswerError(f"the MCP server {connection.name!r} did not return {subject}: {said}") from error


def check_declared(client: Client, server: str, capability: Capability) -> None:
    """Check that the server has declared a capability.

    Raises:
        MisuseError: when the server has not declared it.
    """
    declared = client.server_capabilities
    if getattr(declared, capability) is None:
        names = [name for name in get_args(Capability) if getattr(declared, name) is not None]
        raise MisuseError(
            f"the MCP server {server!r} has not declared {capability}, so they cannot be requested; declared: "
            f"{', '.join(names) or 'none'}"
        )


async def fetch_tools(
    connection: ServerConnection, timeout_s: float, catalogue: Catalogue, on_connected: Callable[[], object]
) -> Listing:
    """List the tools of a server; the list is empty if it has not declared tools.

    Args:
        connection: The connection.
        timeout_s: Seconds for all pages.
        catalogue: Receives the listed tools of the connection.
        on_connected: Called in another thread when the connection is open: the server reports changes from then on.

    Raises:
        MCPServerError: when the tools cannot be listed.
    """

    async def question(client: Client) -> Listing:
        on_connected()
        found = await catalogue.fetch(client)
        has_resources = client.server_capabilities.resources is not None
        return Listing(
            tools=found,
            instructions=client.instructions,
            has_resources=has_resources,
            has_tasks=client.protocol_version in MODERN_PROTOCOL_VERSIONS,
        )

    return await request(connection, "its tools", timeout_s, question, proves_health=False)


def keep_valid(server: str, kind: str, listed: Sequence[T | InvalidEntry]) -> list[T]:
    """Return the valid entries of a list, and log the others."""
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
    """Read a resource; return its contents in order."""

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
    """Fetch a rendered prompt, as messages."""
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
    """Fetch completions of an argument."""
    ref: m.PromptReference | m.ResourceTemplateReference = (
        m.PromptReference(name=target.name)
        if isinstance(target, RemotePrompt)
        else m.ResourceTemplateReference(uri=target.uri_template)
    )
    name, value = argument

    async def question(client: Client) -> m.CompleteResult:
        check_declared(client, connection.name, "completions")
        return await client.complete(ref, {"name": name, "value": value}, known or None)

    result = await request(connection, f"completions of {name!r}", timeout_s, question)
    return tuple(result.completion.values)


def _to_message(message: m.PromptMessage) -> Message | None:
    """Convert a message of a prompt; return None if it is empty, since providers refuse empty messages."""
    parts = convert_block(message.content)
    if all(isinstance(part, TextPart) and not part.text.strip() for part in parts):
        return None
    return (
        UserMessage(parts=parts)
        if message.role == "user"
        else AssistantMessage(text="\n".join(map(format_part, parts)))
    )
