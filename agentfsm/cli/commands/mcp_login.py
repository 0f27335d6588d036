"""The subcommands of `agentfsm mcp` for the logins at remote servers: `login`, `logout`, `status`."""

from __future__ import annotations

import argparse
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import anyio
import attrs

from agentfsm.cli.arguments import AddParser, add_command
from agentfsm.cli.codes import ExitCode
from agentfsm.cli.render.formatting import NOTE_CHARS, format_duration
from agentfsm.cli.resolve.mcp_servers import TerminalConsent, load_mcp, load_servers, select_servers
from agentfsm.core.errors import AgentError, MisuseError
from agentfsm.core.text_safety import one_line

if TYPE_CHECKING:
    from agentfsm.cli.terminal import Terminal
    from agentfsm.mcp import MCPServer
    from agentfsm.mcp.client.logins import LoginStatus

# Seconds. Its module is not imported for the options: it loads the package of MCP. A test compares them.
LOGIN_TIMEOUT_S: Final = 300.0


def add_commands(sub: AddParser) -> None:
    """Add the commands of this module."""
    login_options = add_command(sub, login, text="log in to remote servers with a browser")
    login_options.add_argument("--no-browser", action="store_true", help="only show the address of the login page")
    login_options.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=float,
        default=LOGIN_TIMEOUT_S,
        help="seconds for a login (default: %(default)g)",
    )
    login_options.epilog = (
        "The browser returns to a port of this machine. If it runs on another machine, set callback_port in the file, "
        "and forward that port: ssh -L PORT:127.0.0.1:PORT."
    )
    logout_options = add_command(sub, logout, text="remove the stored tokens of remote servers")
    status_options = add_command(sub, status, text="list the stored logins of remote servers")
    for takes in (login_options, logout_options, status_options):
        takes.add_argument(
            "file", metavar="FILE|URL", help="a file of servers, or the URL of one with default settings"
        )
        takes.add_argument("server", metavar="SERVER", nargs="?", help="only this server of the file")


def login(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Let the person log in to each server that needs it."""
    show = partial(_show_page, terminal, opens_browser=not args.no_browser)

    async def act(server: MCPServer) -> dict[str, Any]:
        await server.login(show, timeout_s=args.timeout)
        return {"logged_in": True}

    consent = TerminalConsent(terminal=terminal, shows_all=True)
    return _for_each(_load(args, terminal, consent), terminal, act, lambda _report: "logged in")


async def _show_page(terminal: Terminal, url: str, *, opens_browser: bool) -> None:
    from agentfsm.mcp.client.logins import open_browser  # noqa: PLC0415  loading it takes a second

    terminal.err(f"log in at: {url}")
    if opens_browser:
        await open_browser(url)


def logout(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Remove the tokens of the servers."""

    async def act(server: MCPServer) -> dict[str, Any]:
        return {"was_stored": await server.logout()}

    return _for_each(
        _load(args, terminal),
        terminal,
        act,
        lambda report: "logged out" if report["was_stored"] else "no login was stored",
    )


def status(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """List the logins, without the tokens."""

    async def act(server: MCPServer) -> dict[str, Any]:
        logins = server.logins
        assert logins is not None  # `_load` has selected them  # noqa: S101
        found = await logins.read_status()
        return {**attrs.asdict(found), "needs_person": logins.needs_person, "text": _format_status(found)}

    return _for_each(_load(args, terminal), terminal, act, lambda report: report["text"])


def _format_status(found: LoginStatus) -> str:
    if not found.is_stored:
        return "not logged in"
    parts = ["logged in"]
    if found.is_renewable:
        parts.append("the token is renewed by itself")
    elif found.expires_in_s is not None:
        left = found.expires_in_s
        parts.append(f"the token expires in {format_duration(left)}" if left > 0 else "the token has expired")
    if found.scope:
        parts.append(f"scope: {found.scope}")
    if found.is_refused:
        parts.append("the server wants another login")
    return "; ".join(parts)


def _load(args: argparse.Namespace, terminal: Terminal, consent: TerminalConsent | None = None) -> Sequence[MCPServer]:
    """Return the servers with logins that the arguments name.

    Raises:
        MisuseError: if there is none.
    """
    if "://" in args.file:
        if args.server is not None:
            raise MisuseError(f"{args.file!r} is a URL: leave out {args.server!r}, which names a server of a file")
        mcp: Any = load_mcp()
        return [mcp.MCPServer.http(args.file, auth="oauth")]
    servers = select_servers(load_servers(args.file, terminal, consent), args.file, args.server)
    found = [server for server in servers if server.logins is not None]
    if not found:
        raise MisuseError(f'{args.file}: no server has logins: they need "auth": "oauth"')
    return found


def _for_each(
    servers: Sequence[MCPServer],
    terminal: Terminal,
    act: Callable[[MCPServer], Awaitable[dict[str, Any]]],
    describe: Callable[[dict[str, Any]], str],
) -> ExitCode:
    """Act on the servers, one after another; report the result of each, or its error."""
    reports = [anyio.run(_report, server, act) for server in servers]
    if terminal.json:
        terminal.document({"servers": reports})
    for report in [] if terminal.json else reports:
        text = report["error"] if "error" in report else describe(report)
        terminal.out(f"{report['name']}: {one_line(text, NOTE_CHARS)}")
    return ExitCode.FAILED if any("error" in report for report in reports) else ExitCode.DONE


async def _report(server: MCPServer, act: Callable[[MCPServer], Awaitable[dict[str, Any]]]) -> dict[str, Any]:
    try:
        return {"name": server.name, **await act(server)}
    except AgentError as error:
        return {"name": server.name, "error": str(error)}
