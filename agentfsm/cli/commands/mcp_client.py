"""The subcommands of `agentfsm mcp` that list, use and approve the servers of a file.

Users choose prompts, and applications read resources; models see neither.
"""

from __future__ import annotations

import argparse
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

import anyio
import attrs

from agentfsm.cli.argument_types import parse_pair
from agentfsm.cli.arguments import AddParser, add_command, add_group
from agentfsm.cli.codes import ExitCode
from agentfsm.cli.commands import mcp_login, mcp_serve
from agentfsm.cli.render.formatting import NOTE_CHARS, format_count, list_declarations
from agentfsm.cli.resolve.mcp_servers import TerminalConsent, format_approve_command, load_servers, select_servers
from agentfsm.core.codec import message_to_json
from agentfsm.core.errors import AgentError, MisuseError
from agentfsm.core.messages import AssistantMessage, TextPart, UserMessage, describe_media
from agentfsm.core.text_safety import one_line

if TYPE_CHECKING:
    from agentfsm.cli.terminal import Terminal
    from agentfsm.core.messages import Message, Part
    from agentfsm.mcp import MCPServer

T = TypeVar("T")

# Characters of a name that a server gives, on one line.
NAME_CHARS: Final = 200


def add_commands(add: AddParser) -> None:
    """Add the commands of this module."""
    sub = add_group(add, "mcp")
    _add_mcp_client(sub)
    mcp_serve.add_commands(sub)


def _add_mcp_client(sub: AddParser) -> None:
    tools_options = add_command(sub, tools, text="list the servers of a file, and their tools")
    approve_options = add_command(sub, approve, text="show the start and the tools of servers, and ask for approval")
    prompts_options = add_command(sub, prompts, text="list the prompts of the servers of a file")
    prompt_options = add_command(sub, prompt, text="show a prompt of a server with its arguments filled in")
    resources_options = add_command(sub, resources, text="list the resources of the servers of a file")
    read_options = add_command(sub, read, text="read a resource of a server")
    mcp_login.add_commands(sub)
    for takes in (tools_options, approve_options, prompts_options, prompt_options, resources_options, read_options):
        takes.add_argument("file", metavar="FILE", help='a JSON file with "mcpServers", the format of MCP hosts')
    approve_options.add_argument("server", metavar="SERVER", nargs="?", help="only this server")
    approve_options.add_argument("--yes", action="store_true", help="approve everything without asking")
    approve_options.add_argument(
        "--details", action="store_true", help="show the full texts of tools, not a line for each"
    )
    approve_options.add_argument(
        "--ask-again", action="store_true", help='withdraw "always" approvals: calls of these tools are asked again'
    )
    approve_options.epilog = (
        "Approvals are stored in ~/.agentfsm/mcp-pins.json, in your home folder and not beside the store: a folder "
        "from somewhere else could contain approvals of its own."
    )
    for takes in (prompt_options, read_options):
        takes.add_argument("server", metavar="SERVER", help="name of the server in the file")
    prompt_options.add_argument("name", metavar="NAME", help="name of the prompt")
    prompt_options.add_argument(
        "arguments", metavar="KEY=VALUE", type=parse_pair, nargs="*", help="arguments of the prompt"
    )
    read_options.add_argument("uri", metavar="URI", help="URI of the resource")


def tools(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """List the tools of the servers, including the refused and the withheld ones."""
    servers = load_servers(args.file, terminal)
    reports = anyio.run(_ask_all, servers, _report_tools)
    if terminal.json:
        terminal.document({"servers": reports})
    for report in [] if terminal.json else reports:
        for line in _format_head(report):
            terminal.out(line)
        for tool in report.get("tools", ()):
            terminal.out(f"  {tool['name']}: {', '.join(tool['declared']) or 'nothing declared'}")
            if description := one_line(tool["description"], NOTE_CHARS):
                terminal.out(f"      {description}")
        for line in _format_unused(report):
            terminal.out(line)
    if any(report.get("withheld") for report in reports):
        terminal.err(f"withheld tools need approval: {format_approve_command(args.file)}")
    return _exit_code(reports)


async def _report_tools(server: MCPServer) -> dict[str, Any]:
    admitted = await server.approve()
    usable = [tool for tool in admitted.tools if tool.enabled is not False]
    return {
        "tools": [
            {
                "name": tool.name,
                "declared": list_declarations(tool),
                "description": tool.description,
                "parameters": dict(tool.parameters),
            }
            for tool in usable
        ],
        "refused": dict(admitted.refused),
        "withheld": dict(admitted.withheld),
        "unmatched": list(admitted.unmatched_globs),
    }


def _format_unused(report: dict[str, Any]) -> Iterator[str]:
    for word in ("refused", "withheld"):
        for name, why in report.get(word, {}).items():
            yield f"  {word} {one_line(name, NAME_CHARS)}: {one_line(why, NOTE_CHARS)}"
    for glob in report.get("unmatched", ()):
        yield f"  {one_line(glob, NAME_CHARS)} in its access lists matches no tool"


def prompts(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """List the prompts of the servers."""
    return _list_features(args, terminal, "prompts", _fetch_prompts, _format_prompt)


async def _fetch_prompts(server: MCPServer) -> Sequence[Any]:
    return await server.prompts()


def _format_prompt(prompt: dict[str, Any]) -> str:
    arguments = ", ".join(f"{each['name']}{'' if each['required'] else '?'}" for each in prompt["arguments"])
    return f"{prompt['name']}({arguments}): {prompt['description'] or prompt['title']}"


def resources(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """List the resources of the servers."""
    return _list_features(args, terminal, "resources", _fetch_resources, _format_resource)


async def _fetch_resources(server: MCPServer) -> Sequence[Any]:
    return [*await server.resources(), *await server.resource_templates()]


def _format_resource(resource: dict[str, Any]) -> str:
    uri = resource.get("uri") or resource["uri_template"]
    kind = f" ({resource['media_type']})" if resource["media_type"] else ""
    return f"{uri}{kind}: {resource['description'] or resource['title'] or resource['name']}"


def _list_features(
    args: argparse.Namespace,
    terminal: Terminal,
    kind: str,
    ask: Callable[[MCPServer], Awaitable[Sequence[Any]]],
    line: Callable[[dict[str, Any]], str],
) -> ExitCode:
    async def report(server: MCPServer) -> dict[str, Any]:
        await server.update()  # starts the server only if it is approved
        try:
            found = await ask(server)
        except MisuseError:  # the server does not declare this feature
            found = ()
        return {kind: [attrs.asdict(each) for each in found]}

    reports = anyio.run(_ask_all, load_servers(args.file, terminal), report)
    if terminal.json:
        terminal.document({"servers": reports})
        return _exit_code(reports)
    for each in reports:
        found = [f"  {one_line(line(one), NOTE_CHARS)}" for one in each.get(kind, ())]
        if not found and "error" not in each:
            found = [f"  no {kind}"]
        for text in (*_format_head(each), *found):
            terminal.out(text)
    return _exit_code(reports)


async def _ask_all(
    servers: Sequence[MCPServer], report: Callable[[MCPServer], Awaitable[dict[str, Any]]]
) -> list[dict[str, Any]]:
    """Ask all servers concurrently; return the report of each, or its error, in their order."""
    reports: dict[str, dict[str, Any]] = {}

    async def ask(server: MCPServer) -> None:
        head = {"name": server.name, "reached_by": server.transport.display_text}
        try:
            reports[server.name] = head | await report(server)
        except AgentError as error:
            reports[server.name] = head | {"error": str(error)}
        finally:
            await server.aclose()

    async with anyio.create_task_group() as group:
        for server in servers:
            group.start_soon(ask, server)
    return [reports[server.name] for server in servers]


def _format_head(report: dict[str, Any]) -> Iterator[str]:
    yield f"server {report['name']}: {one_line(report['reached_by'], NOTE_CHARS)}"
    for line in report.get("error", "").splitlines():
        yield f"  {line}"


def _exit_code(reports: Iterable[dict[str, Any]]) -> ExitCode:
    return ExitCode.FAILED if any("error" in report for report in reports) else ExitCode.DONE


# One prompt or resource.


def prompt(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Show a prompt with its arguments filled in."""
    given = dict(args.arguments)
    messages: tuple[Message, ...] = _ask_one(args, terminal, lambda server: server.prompt(args.name, **given))
    if terminal.json:
        terminal.document({"messages": [message_to_json(message) for message in messages]})
        return ExitCode.DONE
    for message in messages:
        if isinstance(message, UserMessage):
            terminal.out(f"user: {_format_parts(message.parts)}")
        elif isinstance(message, AssistantMessage):
            terminal.out(f"assistant: {message.text}")
    return ExitCode.DONE


def read(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Read a resource."""
    parts: tuple[Part, ...] = _ask_one(args, terminal, lambda server: server.read(args.uri))
    if terminal.json:
        terminal.document({"contents": [{"is": type(part).__name__, **attrs.asdict(part)} for part in parts]})
    else:
        terminal.out(_format_parts(parts))
    return ExitCode.DONE


def _format_parts(parts: Iterable[Part]) -> str:
    """Return parts as text; images and other media as a description."""
    return "\n".join(
        part.text if isinstance(part, TextPart) else f"[{describe_media(part)}: use --json to read it]"
        for part in parts
    )


def _ask_one(args: argparse.Namespace, terminal: Terminal, ask: Callable[[MCPServer], Awaitable[T]]) -> T:
    """Connect to the server that the arguments name, and ask it.

    Raises:
        MisuseError: if the file has no such server.
        MCPServerError: if its start is not approved, or it does not answer.
    """
    [server] = select_servers(load_servers(args.file, terminal), args.file, args.server)

    async def act() -> T:
        try:
            await server.update()  # starts the server only if it is approved
            return await ask(server)
        finally:
            await server.aclose()

    return anyio.run(act)


# Approval.


def approve(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Show how servers start and which tools they offer, as far as not yet approved, and ask."""
    asking = TerminalConsent(terminal=terminal, approves_all=args.yes, shows_all=True, shows_details=args.details)
    servers = select_servers(load_servers(args.file, terminal, asking), args.file, args.server)
    for server in servers if args.ask_again else ():
        server.consent_gate.clear_standing()
    reports = [anyio.run(_review_server, server, asking) for server in servers]
    if terminal.json:
        terminal.document({"servers": reports})
    for report in [] if terminal.json else reports:
        for line in (f"{report['name']}: {_format_approval(report)}", *_format_unused(report)):
            terminal.out(line)
    if asking.unasked:  # not raised, because the result is already written
        terminal.err("there is no terminal to ask at: run the command in one, or approve everything above with --yes")
        return ExitCode.USAGE
    return ExitCode.DONE if all(report["approved"] for report in reports) else ExitCode.FAILED


async def _review_server(server: MCPServer, asking: TerminalConsent) -> dict[str, Any]:
    """Ask about one server; return its tools and its approval."""
    before = asking.asked_count
    head = {"name": server.name, "reached_by": server.transport.display_text}
    try:
        found = await _report_tools(server)
    except AgentError as error:
        return head | {"approved": False, "asked": asking.asked_count - before, "error": str(error)}
    finally:
        await server.aclose()
    return head | found | {"approved": not found["withheld"], "asked": asking.asked_count - before}


def _format_approval(report: dict[str, Any]) -> str:
    if "error" in report:
        error = report["error"]
        return str(error.partition("\n")[0] if report["asked"] else error)  # the question contained the other lines
    usable = f"{format_count(len(report['tools']), 'tool')} can be used"
    if report["withheld"]:
        return f"{usable}; withheld tools need approval"
    return f"{usable}; {'approved' if report['asked'] else 'already approved'}"
