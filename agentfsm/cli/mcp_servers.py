"""The subcommands of `agentfsm mcp` that use the servers of a file: what they have, and a person's yes to it.

Prompts are chosen by the user and resources read by the application: no model is told of either.
"""

from __future__ import annotations

import argparse
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

import anyio
import attrs

from agentfsm.cli.codes import Exit
from agentfsm.cli.plain import NOTE_CHARS, counted, declared
from agentfsm.cli.servers import Asking, approving, load
from agentfsm.core.clean import one_line
from agentfsm.core.codec import message_to_json
from agentfsm.core.errors import AgentError, MisuseError
from agentfsm.core.messages import AssistantMessage, TextPart, UserMessage
from agentfsm.core.parts import describe_media

if TYPE_CHECKING:
    from agentfsm.cli.terminal import Terminal
    from agentfsm.core.messages import Message, Part
    from agentfsm.mcp import MCPServer

T = TypeVar("T")

# Characters of what a server calls something, on one line.
NAME_CHARS: Final = 200


# What they have.


def tools(args: argparse.Namespace, terminal: Terminal) -> Exit:
    """List the tools of the servers, with those that are refused or withheld."""
    servers = load(args.file, None)
    reports = anyio.run(_asked, servers, _report)
    if terminal.json:
        terminal.document({"servers": reports})
    for line in [] if terminal.json else _tool_lines(reports):
        terminal.out(line)
    if any(report.get("withheld") for report in reports):
        terminal.err(f"What is withheld waits for a yes: {approving(args.file)}")
    return _code(reports)


async def _report(server: MCPServer) -> dict[str, Any]:
    admitted = await server.approve()
    usable = [tool for tool in admitted.tools if tool.enabled is not False]
    return {
        "tools": [
            {
                "name": tool.name,
                "declared": declared(tool),
                "description": tool.description,
                "parameters": dict(tool.parameters),
            }
            for tool in usable
        ],
        "refused": dict(admitted.refused),
        "withheld": dict(admitted.withheld),
        "unmatched": list(admitted.unmatched_globs),
    }


def _tool_lines(reports: Iterable[dict[str, Any]]) -> Iterator[str]:
    for report in reports:
        yield from _head(report)
        for tool in report.get("tools", ()):
            said = one_line(tool["description"], NOTE_CHARS)
            yield f"  {tool['name']}: {', '.join(tool['declared']) or 'nothing declared'}"
            yield from [f"      {said}"] if said else []
        yield from _unused_lines(report)


def _unused_lines(report: dict[str, Any]) -> Iterator[str]:
    for word in ("refused", "withheld"):
        for name, why in report.get(word, {}).items():
            yield f"  {word} {one_line(name, NAME_CHARS)}: {one_line(why, NOTE_CHARS)}"
    for glob in report.get("unmatched", ()):
        yield f"  {one_line(glob, NAME_CHARS)} in its access lists matches no tool"


def prompts(args: argparse.Namespace, terminal: Terminal) -> Exit:
    """List the prompts of the servers."""
    return _listed(args, terminal, "prompts", _prompts, _prompt_line)


async def _prompts(server: MCPServer) -> Sequence[Any]:
    return await server.prompts()


def _prompt_line(prompt: dict[str, Any]) -> str:
    arguments = ", ".join(f"{each['name']}{'' if each['required'] else '?'}" for each in prompt["arguments"])
    return f"{prompt['name']}({arguments}): {prompt['description'] or prompt['title']}"


def resources(args: argparse.Namespace, terminal: Terminal) -> Exit:
    """List the resources of the servers."""
    return _listed(args, terminal, "resources", _resources, _resource_line)


async def _resources(server: MCPServer) -> Sequence[Any]:
    return [*await server.resources(), *await server.resource_templates()]


def _resource_line(resource: dict[str, Any]) -> str:
    uri = resource.get("uri") or resource["uri_template"]
    kind = f" ({resource['media_type']})" if resource["media_type"] else ""
    return f"{uri}{kind}: {resource['description'] or resource['title'] or resource['name']}"


def _listed(
    args: argparse.Namespace,
    terminal: Terminal,
    what: str,
    ask: Callable[[MCPServer], Awaitable[Sequence[Any]]],
    line: Callable[[dict[str, Any]], str],
) -> Exit:
    async def report(server: MCPServer) -> dict[str, Any]:
        await server.update()  # which starts it only if that is approved
        try:
            found = await ask(server)
        except MisuseError:  # it has not declared that it has such things
            found = ()
        return {what: [attrs.asdict(each) for each in found]}

    reports = anyio.run(_asked, load(args.file, None), report)
    if terminal.json:
        terminal.document({"servers": reports})
        return _code(reports)
    for each in reports:
        found = [f"  {one_line(line(one), NOTE_CHARS)}" for one in each.get(what, ())]
        for text in (*_head(each), *(found or _none(each, what))):
            terminal.out(text)
    return _code(reports)


async def _asked(
    servers: Sequence[MCPServer], report: Callable[[MCPServer], Awaitable[dict[str, Any]]]
) -> list[dict[str, Any]]:
    """Ask all servers at once; return what each has told of itself, or why it has not, in their order."""
    told: dict[str, dict[str, Any]] = {}

    async def ask(server: MCPServer) -> None:
        head = {"name": server.name, "reached_by": server.transport.display_text}
        try:
            told[server.name] = head | await report(server)
        except AgentError as error:
            told[server.name] = head | {"error": str(error)}
        finally:
            await server.aclose()

    async with anyio.create_task_group() as group:
        for server in servers:
            group.start_soon(ask, server)
    return [told[server.name] for server in servers]


def _head(report: dict[str, Any]) -> Iterator[str]:
    yield f"server {report['name']}: {one_line(report['reached_by'], NOTE_CHARS)}"
    for line in report.get("error", "").splitlines():
        yield f"  {line}"


def _none(report: dict[str, Any], what: str) -> list[str]:
    """Return what is said of a server that has none; nothing where it could not be asked."""
    return [] if "error" in report else [f"  no {what}"]


def _code(reports: Iterable[dict[str, Any]]) -> Exit:
    return Exit.FAILED if any("error" in report for report in reports) else Exit.DONE


# One thing that one of them has.


def prompt(args: argparse.Namespace, terminal: Terminal) -> Exit:
    """Show a prompt, filled in."""
    given = dict(args.arguments)
    messages: tuple[Message, ...] = _of_one(args, lambda server: server.prompt(args.name, **given))
    if terminal.json:
        terminal.document({"messages": [message_to_json(message) for message in messages]})
        return Exit.DONE
    for message in messages:
        if isinstance(message, UserMessage):
            terminal.out(f"user: {_text(message.parts)}")
        elif isinstance(message, AssistantMessage):
            terminal.out(f"assistant: {message.text}")
    return Exit.DONE


def read(args: argparse.Namespace, terminal: Terminal) -> Exit:
    """Read a resource out."""
    parts: tuple[Part, ...] = _of_one(args, lambda server: server.read(args.uri))
    if terminal.json:
        terminal.document({"contents": [{"is": type(part).__name__, **attrs.asdict(part)} for part in parts]})
    else:
        terminal.out(_text(parts))
    return Exit.DONE


def _text(parts: Iterable[Part]) -> str:
    """Return parts as text; what is none is named."""
    return "\n".join(
        part.text if isinstance(part, TextPart) else f"[{describe_media(part)}: --json writes it whole]"
        for part in parts
    )


def _of_one(args: argparse.Namespace, ask: Callable[[MCPServer], Awaitable[T]]) -> T:
    """Ask one server for something.

    Raises:
        MisuseError: when there is no such server.
        MCPServerError: when it is not approved how it is started, or it does not answer.
    """
    [server] = chosen(load(args.file, None), args)

    async def act() -> T:
        try:
            await server.update()  # which starts it only if that is approved
            return await ask(server)
        finally:
            await server.aclose()

    return anyio.run(act)


def chosen(servers: Sequence[MCPServer], args: argparse.Namespace) -> Sequence[MCPServer]:
    """Return the server that the words name, or all of them.

    Raises:
        MisuseError: when there is none of that name.
    """
    found = [server for server in servers if args.server in (None, server.name)]
    if not found:
        names = ", ".join(server.name for server in servers) or "none"
        raise MisuseError(f"{args.file} has no server {args.server!r}: it has {names}")
    return found


# A yes to it.


def approve(args: argparse.Namespace, terminal: Terminal) -> Exit:
    """Show how servers are started and what they offer, as far as it was not approved yet, and ask."""
    asking = Asking(terminal=terminal, approves_all=args.yes, tells_all=True)
    servers = chosen(load(args.file, asking), args)
    reports = [anyio.run(_reviewed, server, asking) for server in servers]
    if terminal.json:
        terminal.document({"servers": reports})
    for report in [] if terminal.json else reports:
        for line in (f"{report['name']}: {_standing(report)}", *_unused_lines(report)):
            terminal.out(line)
    if asking.unasked:  # told, not raised: the document is written already
        terminal.err("nobody sits here to be asked: run it at a terminal, or approve all that is shown with --yes")
        return Exit.USAGE
    return Exit.DONE if all(report["approved"] for report in reports) else Exit.FAILED


async def _reviewed(server: MCPServer, asking: Asking) -> dict[str, Any]:
    """Ask about one server; return how it stands then."""
    before = asking.count
    head = {"name": server.name, "reached_by": server.transport.display_text}
    try:
        found = await _report(server)
    except AgentError as error:
        return head | {"approved": False, "asked": asking.count - before, "error": str(error)}
    finally:
        await server.aclose()
    return head | found | {"approved": not found["withheld"], "asked": asking.count - before}


def _standing(report: dict[str, Any]) -> str:
    if "error" in report:
        what = report["error"]
        return str(what.partition("\n")[0] if report["asked"] else what)  # the rest was shown with the question
    usable = f"{counted(len(report['tools']), 'tool')} can be used"
    if report["withheld"]:
        return f"{usable}; what is withheld waits for a yes"
    return f"{usable}; {'approved' if report['asked'] else 'all of it was approved before'}"
