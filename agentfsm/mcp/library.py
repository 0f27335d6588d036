"""What a server offers beside calls: the lists of its tools, resources and prompts, and what stands in them.

The application asks for resources and prompts; the model gets at resources only by the two tools of `resource_tools`,
and at prompts never. Only what a server has declared is asked for.
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
from agentfsm.core.messages import AssistantMessage, Message, Part, TextPart, UserMessage
from agentfsm.core.parts import format_part
from agentfsm.core.text_safety import escape_hidden
from agentfsm.core.value import Value
from agentfsm.mcp.catalogue import Catalogue, every
from agentfsm.mcp.connection import trouble
from agentfsm.mcp.connection.link import Link
from agentfsm.mcp.connection.sift import Unfit
from agentfsm.mcp.content import parts_of_block, parts_of_resource
from agentfsm.mcp.errors import MCPServerError, NoAnswerError
from agentfsm.mcp.trust.names import tool_name
from agentfsm.tools.run_context import ToolReturn
from agentfsm.tools.tool import Tool, make_tool

T = TypeVar("T")

_log = logging.getLogger("agentfsm.mcp")

Capability = Literal["tools", "resources", "prompts", "completions"]


@attrs.frozen(kw_only=True)
class Resource(Value):
    """Something that a server can be asked to read out."""

    uri: str
    name: str = ""
    title: str = ""
    description: str = ""
    media_type: str = ""
    size: int | None = None
    # Bytes, where the server says so.


@attrs.frozen(kw_only=True)
class ResourceTemplate(Value):
    """Resources of one kind, by the form of their URIs."""

    uri_template: str
    # As RFC 6570 has it: "file:///{path}".
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
class Prompt(Value):
    """Messages that a server has ready, for a person to choose."""

    name: str
    title: str = ""
    description: str = ""
    arguments: tuple[PromptArgument, ...] = ()


@attrs.frozen(kw_only=True)
class Listing(Value):
    """What a server says of itself and its tools."""

    tools: Sequence[m.Tool | Unfit]
    instructions: str | None = None
    has_resources: bool = False


async def asked(
    link: Link, what: str, timeout_s: float, question: Callable[[Client], Awaitable[T]], *, proves: bool = True
) -> T:
    """Ask for something that is no call, within a time.

    Args:
        link: The connection.
        what: What is asked for, as it stands in an error.
        timeout_s: Seconds from the moment at which there is a connection.
        question: Asks.
        proves: As `Link.ask` has it.

    Raises:
        MCPServerError: when there is no answer, or one that cannot be used.
        MisuseError: when the server has not declared that it has such things.
    """

    async def within(client: Client) -> T:
        with anyio.fail_after(timeout_s):
            return await question(client)

    try:
        return await link.ask(within, proves=proves)
    except (MCPError, ValidationError, TimeoutError) as error:
        said = f"no answer within {timeout_s:g} s" if isinstance(error, TimeoutError) else trouble.said_of(error)
        raise NoAnswerError(f"the MCP server {link.name!r} was asked for {what}: {said}") from error


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


async def tools(link: Link, timeout_s: float, catalogue: Catalogue, begun: Callable[[], object]) -> Listing:
    """List the tools of a server; none where it has declared none.

    Args:
        link: The connection.
        timeout_s: Seconds for all pages.
        catalogue: Keeps what the connection lists.
        begun: Called, in another thread, when there is a connection: what changes from then on, the server tells.

    Raises:
        MCPServerError: when they cannot be listed.
    """

    async def question(client: Client) -> Listing:
        begun()
        found = await catalogue.ask(client)
        has_resources = client.server_capabilities.resources is not None
        return Listing(tools=found, instructions=client.instructions, has_resources=has_resources)

    return await asked(link, "its tools", timeout_s, question, proves=False)


def fit(server: str, kind: str, listed: Sequence[T | Unfit]) -> list[T]:
    """Return the entries of a list that can be used, and tell the log of the others."""
    for each in listed:
        if isinstance(each, Unfit):
            _log.warning(
                "the %s %r of the MCP server %r is left out: %s", kind, escape_hidden(each.name), server, each.why
            )
    return [each for each in listed if not isinstance(each, Unfit)]


async def resources(link: Link, timeout_s: float) -> tuple[Resource, ...]:
    """List the resources of a server."""

    async def question(client: Client) -> list[m.Resource | Unfit]:
        check_declared(client, link.name, "resources")
        return await every(lambda cursor: client.list_resources(cursor=cursor), lambda page: page.resources)

    return tuple(
        Resource(
            uri=each.uri,
            name=each.name,
            title=each.title or "",
            description=each.description or "",
            media_type=each.mime_type or "",
            size=each.size,
        )
        for each in fit(link.name, "resource", await asked(link, "its resources", timeout_s, question))
    )


async def templates(link: Link, timeout_s: float) -> tuple[ResourceTemplate, ...]:
    """List the templates of a server's resources."""

    async def question(client: Client) -> list[m.ResourceTemplate | Unfit]:
        check_declared(client, link.name, "resources")
        return await every(
            lambda cursor: client.list_resource_templates(cursor=cursor), lambda page: page.resource_templates
        )

    listed = await asked(link, "the templates of its resources", timeout_s, question)
    return tuple(
        ResourceTemplate(
            uri_template=each.uri_template,
            name=each.name,
            title=each.title or "",
            description=each.description or "",
            media_type=each.mime_type or "",
        )
        for each in fit(link.name, "template", listed)
    )


async def read(link: Link, timeout_s: float, uri: str) -> tuple[Part, ...]:
    """Read a resource: its contents, in their order."""

    async def question(client: Client) -> m.ReadResourceResult:
        check_declared(client, link.name, "resources")
        return await client.read_resource(uri)

    result = await asked(link, f"the resource {uri[:200]!r}", timeout_s, question)
    return parts_of_resource(result.contents)


async def prompts(link: Link, timeout_s: float) -> tuple[Prompt, ...]:
    """List the prompts of a server."""

    async def question(client: Client) -> list[m.Prompt | Unfit]:
        check_declared(client, link.name, "prompts")
        return await every(lambda cursor: client.list_prompts(cursor=cursor), lambda page: page.prompts)

    return tuple(
        Prompt(
            name=each.name,
            title=each.title or "",
            description=each.description or "",
            arguments=tuple(
                PromptArgument(name=one.name, description=one.description or "", required=bool(one.required))
                for one in each.arguments or ()
            ),
        )
        for each in fit(link.name, "prompt", await asked(link, "its prompts", timeout_s, question))
    )


async def prompt(link: Link, timeout_s: float, name: str, arguments: dict[str, str]) -> tuple[Message, ...]:
    """Get a prompt, filled in, as messages."""
    for key, value in arguments.items():
        if not isinstance(value, str):
            raise MisuseError(f"prompt({name!r}, {key}=...) takes text, not {type(value).__name__}: write str(...)")

    async def question(client: Client) -> m.GetPromptResult:
        check_declared(client, link.name, "prompts")
        return await client.get_prompt(name, arguments)

    result = await asked(link, f"the prompt {name[:200]!r}", timeout_s, question)
    return tuple(filter(None, map(_message_of, result.messages)))


async def complete(
    link: Link,
    timeout_s: float,
    of: Prompt | ResourceTemplate,
    argument: tuple[str, str],
    known: dict[str, str],
) -> tuple[str, ...]:
    """Ask how an argument may go on."""
    ref: m.PromptReference | m.ResourceTemplateReference = (
        m.PromptReference(name=of.name) if isinstance(of, Prompt) else m.ResourceTemplateReference(uri=of.uri_template)
    )
    name, value = argument

    async def question(client: Client) -> m.CompleteResult:
        check_declared(client, link.name, "completions")
        return await client.complete(ref, {"name": name, "value": value}, known or None)

    result = await asked(link, f"what {name!r} may be", timeout_s, question)
    return tuple(result.completion.values)


def _message_of(message: m.PromptMessage) -> Message | None:
    """Return a message of a prompt; None where it says nothing, which no provider takes."""
    parts = parts_of_block(message.content)
    if all(isinstance(part, TextPart) and not part.text.strip() for part in parts):
        return None
    return (
        UserMessage(parts=parts)
        if message.role == "user"
        else AssistantMessage(text="\n".join(map(format_part, parts)))
    )


def resource_tools(link: Link, timeout_s: float) -> tuple[Tool[..., Any], ...]:
    """Make the two tools by which a model gets at the resources of a server.

    Args:
        link: The connection.
        timeout_s: Seconds for each call.
    """

    async def list_resources() -> list[dict[str, Any]] | ToolReturn:
        try:
            found = await resources(link, timeout_s)
        except MCPServerError as error:
            return trouble.ended(error, link.name, "list_resources")
        return [attrs.asdict(each, filter=lambda _, value: bool(value)) for each in found]

    async def read_resource(uri: str) -> list[Part] | ToolReturn:
        try:
            return list(await read(link, timeout_s, uri))
        except MCPServerError as error:
            return trouble.ended(error, link.name, "read_resource")

    about: dict[Callable[..., Any], str] = {
        list_resources: f"List the resources of the server {link.name}: what can be read there, by URI.",
        read_resource: f"Read a resource of the server {link.name}.",
    }
    return tuple(
        make_tool(
            function,
            name=tool_name(link.name, function.__name__),
            description=description,
            read_only=True,
            timeout_s=timeout_s,
        )
        for function, description in about.items()
    )
