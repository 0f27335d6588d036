"""Check a server's listing: sort its tools into usable, refused and withheld ones."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final, Protocol

import attrs
import mcp.types as m
from anyio.lowlevel import checkpoint

from agentfsm._lib.pins import ApprovedText
from agentfsm.core.errors import MisuseError
from agentfsm.core.text_safety import escape_hidden, find_hidden
from agentfsm.core.value import Value
from agentfsm.mcp.client.server_features import Listing
from agentfsm.mcp.client.tools import RESOURCE_TOOLS, ToolServer, build_resource_tools, build_tool, build_withheld_tool
from agentfsm.mcp.connection.lenient_parsing import InvalidEntry
from agentfsm.mcp.trust.names import find_hidden_flaw, tool_name
from agentfsm.mcp.trust.tool_policy import build_tool_text
from agentfsm.tools.tool import Tool

_log = logging.getLogger("agentfsm.mcp")

# Maximum size of a tool's texts in characters: two schemas of maximum size, and a description of the same size.
_MAX_CHARS: Final = 300_000
_INSTRUCTIONS: Final = "instructions"
_DUPLICATE_NAME: Final = "the server lists two tools with this name, so calls would be ambiguous"


class ListedServer(ToolServer, Protocol):
    """The parts of a server that its listing is checked with; `MCPServer` has them."""

    resources_as_tools: bool


@attrs.frozen(kw_only=True)
class AdmissionResult(Value):
    """Usable part of a listing, and the reasons why the rest is not used."""

    tools: tuple[Tool[..., Any], ...] = ()
    """Tools for the agent; withheld tools are included, but disabled."""

    instructions: str | None = None
    """Approved usage notes of the server for the model. None: there are none, or they are not used."""

    refused: Mapping[str, str] = attrs.field(factory=dict)
    """Reasons why tools cannot be used, by the server's own names for them."""

    withheld: Mapping[str, str] = attrs.field(factory=dict)
    """Reasons why tools await approval, by the server's own names for them."""

    unmatched_globs: tuple[str, ...] = ()
    """Globs of the policy that match no tool."""


async def admit_listing(server: ListedServer, listing: Listing) -> AdmissionResult:
    """Sort the listed tools into usable, refused and withheld ones.

    Raises:
        MisuseError: when a constraint names a tool that the server does not list.
        MCPServerError: when the approvals cannot be read or stored.
    """
    names = [listed.name for listed in listing.tools]
    server.tool_policy.check_constraints(server.name, names)
    usable, refused = await _build_tools(server, listing)
    items = {f"tool {own}": text for own, text, _ in usable}
    said = listing.instructions
    if said and (flaw := _find_instructions_flaw(said)) is not None:
        refused["(instructions)"], said = flaw, None
    reasons = await server.consent_gate.review(items | ({_INSTRUCTIONS: ApprovedText.from_json(said)} if said else {}))
    withheld = {name.removeprefix("tool "): why for name, why in reasons.items()}
    tools = [build_withheld_tool(tool.name) if own in withheld else tool for own, _, tool in usable]
    if server.resources_as_tools and listing.has_resources:
        names_in_use = {tool.name for tool in tools}
        resource_tools = build_resource_tools(server)
        tools += [tool for tool in resource_tools if tool.name not in names_in_use]
    return AdmissionResult(
        tools=tuple(tools),
        instructions=None if _INSTRUCTIONS in reasons else said,
        refused=refused,
        withheld=withheld,
        unmatched_globs=server.tool_policy.unmatched_globs(server.name, names, RESOURCE_TOOLS),
    )


async def _build_tools(
    server: ToolServer, listing: Listing
) -> tuple[list[tuple[str, ApprovedText, Tool[..., Any]]], dict[str, str]]:
    """Build the usable tools, with their own names and texts, and collect the reasons why others cannot be used.

    A long list of large schemas takes seconds, so other tasks get a turn before each tool.
    """
    wanted = [each for each in listing.tools if server.tool_policy.allows(each.name)]
    times = Counter(tool_name(server.name, each.name) for each in wanted)
    usable: list[tuple[str, ApprovedText, Tool[..., Any]]] = []
    refused: dict[str, str] = {}
    for each in wanted:
        if isinstance(each, InvalidEntry):
            refused[escape_hidden(each.name)] = each.why
            continue
        await checkpoint()
        try:
            text = build_tool_text(each)
            flaw = _DUPLICATE_NAME if times[tool_name(server.name, each.name)] > 1 else _find_flaw(each, text, listing)
            usable += [(each.name, text, build_tool(server, each))] if flaw is None else []
        except MisuseError as error:
            flaw = str(error)
        if flaw is not None:
            refused[escape_hidden(each.name)] = flaw
    return usable, refused


def _find_flaw(listed: m.Tool, text: ApprovedText, listing: Listing) -> str | None:
    if not listed.name:
        return "it has no name"
    if (flaw := find_hidden_flaw(listed)) is not None:
        return flaw
    if not listing.has_tasks and listed.execution is not None and listed.execution.task_support == "required":
        return (
            "it can only be called as a task of the revision 2025-11-25, where they were an experiment: ask its author "
            "for the extension io.modelcontextprotocol/tasks of 2026-07-28"
        )
    size = len(text.text)
    return f"its texts have {size:,} characters, the maximum is {_MAX_CHARS:,}" if size > _MAX_CHARS else None


def _find_instructions_flaw(instructions: str) -> str | None:
    if (found := find_hidden(instructions)) is not None:
        return f"they hold the hidden character {found}"
    size = len(instructions)
    return f"they have {size:,} characters, the maximum is {_MAX_CHARS:,}" if size > _MAX_CHARS else None


def log_exclusions(server: str, found: AdmissionResult) -> None:
    """Log which parts of a server are not used, and why."""
    for name, why in found.refused.items():
        _log.warning("the tool %r of the MCP server %r is left out: %s", name, server, why)
    for name, why in found.withheld.items():
        _log.warning("%r of the MCP server %r is withheld: %s", name, server, why)
    for glob in found.unmatched_globs:
        _log.warning(
            "the MCP server %r has no tool that matches %r of its allow=, deny=, repeat_for_input= or labels=",
            server,
            glob,
        )
