"""`agentfsm login` and `logout`: logins of the users of runs at the servers of their tools."""

from __future__ import annotations

import argparse
import webbrowser
from functools import partial
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

import anyio
import attrs
from anyio.abc import Listener, SocketAttribute, SocketStream

from agentfsm.agents.login_waits import (
    NOT_REVOKED,
    continue_after_login,
    describe_end,
    find_waited_login,
    finish_login,
    forget_all,
    list_logins,
)
from agentfsm.cli.argument_types import parse_seconds
from agentfsm.cli.arguments import AddParser, add_agent_option, add_command, add_run_id
from agentfsm.cli.codes import ExitCode
from agentfsm.cli.resolve.agent_target import load_agent
from agentfsm.cli.resolve.run_lookup import resolve_run
from agentfsm.core.errors import MisuseError
from agentfsm.logins import APIKey, Login, LoginError, LoginLink
from agentfsm.logins.local_page import RECEIVE_TIMEOUT_S, format_page, listen_at, parse_query, receive_target

if TYPE_CHECKING:
    from agentfsm.agents.agent import Agent
    from agentfsm.cli.terminal import Terminal
    from agentfsm.core.pending import Pending
    from agentfsm.core.run import Run

_PATH: Final = "/callback"


def add_commands(add: AddParser) -> None:
    """Add the commands of this module."""
    login_options = add_command(add, login)
    add_run_id(login_options)
    login_options.add_argument(
        "call", metavar="CALL", nargs="?", help="id of the call; by default the first that waits"
    )
    add_agent_option(login_options)
    login_options.add_argument("--no-browser", action="store_true", help="only print the page to open")
    login_options.add_argument(
        "--timeout", type=parse_seconds, default=300.0, metavar="SECONDS", help="time for the login (default: 300)"
    )
    logout_options = add_command(add, logout)
    logout_options.add_argument("target", metavar="AGENT", help="the agent, as module:name")
    logout_options.add_argument("--user", help="the user; by default that of runs without one")
    logout_options.add_argument("--tenant", help="tenant of the user")


def login(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Log in as the user of a run, in the browser of this machine or with a key; the run goes on with the next worker.

    Raises:
        MisuseError: if the run does not wait for a login.
        LoginError: if it cannot be made.
    """
    found = resolve_run(args, terminal)
    own = find_waited_login(list_logins(found.agent.tools), found.run, args.call)
    if not isinstance(own, Login):
        raise MisuseError(f"the login at {own.server} is made elsewhere")
    item = next(each for each in found.run.pending if each.questions and each.questions[0].key == own.server)
    if isinstance(own.settings, APIKey):
        key = terminal.ask_secret(f"{item.questions[0].message} Key:")
        if not key:
            return ExitCode.WAITING
        count = anyio.run(_store_key, own, found.agent, found.run, key)
    else:
        desk = _LoginDesk(found.agent, own, found.run, item, terminal, opens_browser=not args.no_browser)
        link = anyio.run(desk.log_in, own.settings.callback_port, args.timeout)
        if link.outcome != "granted":
            terminal.err("the login was declined; the run is told")
            return ExitCode.FAILED
        count = 1
    return _report(terminal, {"logged_in": own.server, "continued": count}, f"logged in to {own.server}")


def logout(args: argparse.Namespace, terminal: Terminal) -> ExitCode:
    """Revoke and delete the logins of a user at the servers of an agent's tools."""
    logins = list_logins(load_agent(args.target).tools)
    count, failed = anyio.run(partial(forget_all, logins, tenant=args.tenant, user=args.user))
    for server in failed:
        terminal.err(NOT_REVOKED.format(server=server))
    _report(terminal, {"forgotten": count, "not_revoked": failed}, f"logins that are forgotten: {count}")
    return ExitCode.FAILED if failed else ExitCode.DONE


def _report(terminal: Terminal, document: dict[str, object], text: str) -> ExitCode:
    if terminal.json:
        terminal.document(document)
    else:
        terminal.out(text)
    return ExitCode.DONE


async def _store_key(own: Login, agent: Agent, run: Run, key: str) -> int:
    header = run.header
    await own.store_key(key, tenant=header.tenant, user=header.user)
    return await continue_after_login(agent.store, own.server, tenant=header.tenant, user=header.user)


@attrs.define(eq=False)
class _LoginDesk:
    """A login in the browser of this machine, which returns to a port of it."""

    agent: Agent
    login: Login
    run: Run
    item: Pending
    terminal: Terminal
    opens_browser: bool = attrs.field(kw_only=True)
    _link: LoginLink | None = attrs.field(default=None, init=False)
    _done: anyio.Event = attrs.field(factory=anyio.Event, init=False)

    async def log_in(self, port: int, timeout_s: float) -> LoginLink:
        """Show the page of the login, and wait until the browser has returned.

        Raises:
            LoginError: when the user does not log in within `timeout_s`.
        """
        async with await listen_at(port) as listener:
            url = await self.login.begin(
                tenant=self.run.header.tenant,
                user=self.run.header.user,
                run_id=self.item.run_id,
                call_id=self.item.call_id,
                redirect_url=f"http://127.0.0.1:{_port_of(listener)}{_PATH}",
                lasts_s=timeout_s,
            )
            self.terminal.err(f"log in at: {url}")
            with anyio.move_on_after(timeout_s):
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(listener.serve, self._answer)
                    if self.opens_browser:
                        await anyio.to_thread.run_sync(webbrowser.open, url)
                    await self._done.wait()
                    tasks.cancel_scope.cancel()
        if self._link is None:
            raise LoginError(f"nobody logged in within {timeout_s:g} s")
        return self._link

    async def _answer(self, stream: SocketStream) -> None:
        """Answer a request of the browser. One that is not of this login ends nothing."""
        async with stream:
            with anyio.move_on_after(RECEIVE_TIMEOUT_S):
                target = await receive_target(stream)
                if target is None:
                    return
                status, text = 404, describe_end(None)
                if urlsplit(target).path == _PATH:
                    status, text = await self._complete(parse_query(target))
                await stream.send(format_page(status, text))
                if self._link is not None:
                    self._done.set()

    async def _complete(self, query: dict[str, str]) -> tuple[int, str]:
        try:
            self._link = await finish_login(self.agent.runs, [self.login], query)
        except LoginError as error:
            return 400, str(error)
        return 404 if self._link is None else 200, describe_end(self._link)


def _port_of(listener: Listener[SocketStream]) -> int:
    return int(listener.extra(SocketAttribute.local_port))  # noqa: S610  not Django's
