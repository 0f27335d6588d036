"""What a server lists, sorted: the tools that can be used, those that are refused, and those that wait for a yes."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import attrs
import mcp.types as m
from anyio.lowlevel import checkpoint

from agentfsm.core.errors import MisuseError
from agentfsm.core.text_safety import escape_hidden, find_hidden
from agentfsm.core.value import Value
from agentfsm.mcp.connection.sift import Unfit
from agentfsm.mcp.library import Listing, resource_tools
from agentfsm.mcp.tools import tool_of, withheld_tool
from agentfsm.mcp.trust.hidden import flaw_in
from agentfsm.mcp.trust.names import tool_name
from agentfsm.mcp.trust.pins import Text, tool_text
from agentfsm.tools.tool import Tool

if TYPE_CHECKING:
    from agentfsm.mcp.server import MCPServer

_log = logging.getLogger("agentfsm.mcp")

# Characters of all that a tool says of itself: two schemas of the greatest size, and a description as long as one.
_LONGEST: Final = 300_000
_INSTRUCTIONS: Final = "instructions"
_TWICE: Final = "the server lists two tools of that name, and nobody can say which is meant"


@attrs.frozen(kw_only=True)
class Admitted(Value):
    """What of that is used."""

    tools: tuple[Tool[..., Any], ...] = ()
    # Those that are withheld among them, switched off.
    instructions: str | None = None
    refused: Mapping[str, str] = attrs.field(factory=dict)
    # By the server's own name: why a tool cannot be used.
    withheld: Mapping[str, str] = attrs.field(factory=dict)
    # By the server's own name: why a tool is not used until somebody says yes.
    idle: tuple[str, ...] = ()
    # Globs of the access lists that match no tool.


async def admitted(server: MCPServer, listing: Listing) -> Admitted:
    """Sort what a server lists.

    Raises:
        MisuseError: when there is a constraint on a tool that there is not.
        MCPServerError: when it cannot be known or kept what was approved.
    """
    names = [listed.name for listed in listing.tools]
    server.terms.check(server.name, names)
    usable, refused = await _sorted(server, listing.tools)
    items = {f"tool {own}": text for own, text, _ in usable}
    said = listing.instructions
    if said and (flaw := _flaw_of(said)) is not None:
        refused["(instructions)"], said = flaw, None
    reasons = await server.gate.review(items | ({_INSTRUCTIONS: Text.of(said)} if said else {}))
    withheld = {name.removeprefix("tool "): why for name, why in reasons.items()}
    tools = [withheld_tool(tool.name) if own in withheld else tool for own, _, tool in usable]
    if server.resources_as_tools and listing.has_resources:
        taken = {tool.name for tool in tools}
        tools += [tool for tool in resource_tools(server.link, server.timeout_s) if tool.name not in taken]
    return Admitted(
        tools=tuple(tools),
        instructions=None if _INSTRUCTIONS in reasons else said,
        refused=refused,
        withheld=withheld,
        idle=server.terms.idle(names),
    )


async def _sorted(
    server: MCPServer, listed: Sequence[m.Tool | Unfit]
) -> tuple[list[tuple[str, Text, Tool[..., Any]]], dict[str, str]]:
    """Make tools of those that are admitted, by their own names, and say why others cannot be used.

    A long list of large schemas takes seconds, in which others have their turn behind each tool.
    """
    wanted = [each for each in listed if server.terms.admits(each.name)]
    times = Counter(tool_name(server.name, each.name) for each in wanted)
    usable: list[tuple[str, Text, Tool[..., Any]]] = []
    refused: dict[str, str] = {}
    for each in wanted:
        if isinstance(each, Unfit):
            refused[escape_hidden(each.name)] = each.why
            continue
        await checkpoint()
        try:
            text = tool_text(each)
            flaw = _TWICE if times[tool_name(server.name, each.name)] > 1 else _flaw(each, text)
            usable += [(each.name, text, tool_of(server, each))] if flaw is None else []
        except MisuseError as error:
            flaw = str(error)
        if flaw is not None:
            refused[escape_hidden(each.name)] = flaw
    return usable, refused


def _flaw(listed: m.Tool, text: Text) -> str | None:
    if not listed.name:
        return "it has no name"
    if (flaw := flaw_in(listed)) is not None:
        return flaw
    size = len(text.text)
    return f"it says {size:,} characters of itself, where {_LONGEST:,} are read" if size > _LONGEST else None


def _flaw_of(instructions: str) -> str | None:
    if (found := find_hidden(instructions)) is not None:
        return f"they hold the hidden character {found}"
    size = len(instructions)
    return f"they have {size:,} characters, where {_LONGEST:,} are read" if size > _LONGEST else None


def tell(server: str, found: Admitted) -> None:
    """Write to the log what of a server is not used, and why."""
    for name, why in found.refused.items():
        _log.warning("the tool %r of the MCP server %r is left out: %s", name, server, why)
    for name, why in found.withheld.items():
        _log.warning("%r of the MCP server %r is withheld: %s", name, server, why)
    for glob in found.idle:
        _log.warning("the MCP server %r has no tool that %r in its access lists matches", server, glob)
