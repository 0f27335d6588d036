"""An MCP server among an agent's tools: `Agent(..., tools=[MCPServer.stdio("npx", ["-y", "..."])])`."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypedDict, Unpack

import attrs
import httpx2
import mcp.types as m
from mcp import Client

from agentfsm.engine.tools import Tool
from agentfsm.mcp.admission import Admitted, Listing, admitted
from agentfsm.mcp.config import entries_in
from agentfsm.mcp.consent import Consent, Gate, start_text
from agentfsm.mcp.errors import MCPServerError
from agentfsm.mcp.launch import Http, Launch, Stdio
from agentfsm.mcp.link import START_S, Link
from agentfsm.mcp.names import check_server, server_name_of
from agentfsm.mcp.pins import MemoryPins, PinFile, Pins, Text
from agentfsm.mcp.sandbox import Sandbox
from agentfsm.mcp.terms import Confirm, Constraint, Terms

_log = logging.getLogger("agentfsm.mcp")

TIMEOUT_S: Final = 30.0
# Seconds for a call: document D, 7.4.
MOST_PAGES: Final = 100
# Of a listing: a server that goes on for ever is not followed.


class Options(TypedDict, total=False):
    """What a server is told beside how it is reached; what each means is said at `Terms` and `MCPServer`."""

    trusted: bool
    confirm: Confirm | None
    allow: Iterable[str]
    deny: Iterable[str]
    constraints: Mapping[str, Constraint]
    pins: Pins
    consent: Consent | None
    timeout_s: float
    start_s: float
    required: bool


_TERMS: Final = frozenset(field.name for field in attrs.fields(Terms))


def _server_options(options: Options) -> dict[str, Any]:
    given: dict[str, Any] = dict(options)
    terms = Terms(**{name: given.pop(name) for name in _TERMS & given.keys()})
    return {**given, "terms": terms}


@attrs.define(eq=False, repr=False, kw_only=True)
class MCPServer:
    """A server whose tools an agent may use. It is connected to when it is first needed, and closed with the agent.

    Nothing that a server says of itself is believed unless it is `trusted`, and each call of another's tool needs a
    person's yes, unless `confirm` says otherwise. A tool that has changed since it was approved is withheld.
    """

    name: str
    # 1 to 32 ASCII letters, digits, "-" and single "_": its tools are called `name__tool`.
    launch: Launch
    terms: Terms = attrs.field(factory=Terms)
    pins: Pins = attrs.field(factory=MemoryPins)
    # Where it is kept what was approved.
    consent: Consent | None = None
    # Asks a person, for what was not approved yet.
    origin: str | None = None
    # The file or the directory that it comes from; None for one that a program names in its code.
    start: Text = attrs.field(default=attrs.Factory(lambda server: start_text(server.launch), takes_self=True))
    # How it is started, as it is approved.
    required: bool = True
    # Whether an agent cannot do without it. Else it has no tools while it is away, until it was closed.
    timeout_s: float = TIMEOUT_S
    start_s: float = START_S
    admitted: Admitted = attrs.field(factory=Admitted, init=False)
    # What of it is used, as it was last listed.
    version: int = attrs.field(default=0, init=False)
    trouble: MCPServerError | None = attrs.field(default=None, init=False)
    # Why one that is not required has no tools; None where it has.
    link: Link = attrs.field(init=False)
    gate: Gate = attrs.field(init=False)
    _has_news: bool = attrs.field(default=True, init=False)
    _listed_at: int = attrs.field(default=0, init=False)
    # The connection that the tools were last listed on, by its number.

    def __attrs_post_init__(self) -> None:
        check_server(self.name)
        self.link = Link(name=self.name, launch=self.launch, start_s=self.start_s, heard=self._hear)
        self.gate = Gate(server=self.name, pins=self.pins, consent=self.consent, origin=self.origin)

    @property
    def is_stale(self) -> bool:
        """Whether the server was not asked yet, was started anew, or has said that its tools have changed."""
        return self._has_news or not self.version or self._listed_at != self.link.starts

    @property
    def tools(self) -> tuple[Tool[..., Any], ...]:
        """The tools as they were last listed; one that is withheld is among them, switched off."""
        return self.admitted.tools

    @property
    def refused(self) -> Mapping[str, str]:
        """Why tools cannot be used, by the server's own names."""
        return self.admitted.refused

    @classmethod
    def stdio(
        cls,
        command: str,
        args: Sequence[str] = (),
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | str | None = None,
        sandbox: Sandbox | None = None,
        name: str | None = None,
        **options: Unpack[Options],
    ) -> MCPServer:
        """Return a server that is a command: `MCPServer.stdio("npx", ["-y", "mcp-server-example"])`.

        It gets `env`, and HOME, LOGNAME, PATH, SHELL, TERM and USER of our environment, and nothing else of it.

        Raises:
            MisuseError: when an option makes no sense.
        """
        launch = Stdio(command=command, args=args, env=env or {}, cwd=cwd, sandbox=sandbox)
        return cls(name=name or server_name_of(Path(command).stem), launch=launch, **_server_options(options))

    @classmethod
    def http(
        cls,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        auth: httpx2.Auth | None = None,
        allow_private: bool = False,
        name: str | None = None,
        **options: Unpack[Options],
    ) -> MCPServer:
        """Return a server that is elsewhere: `MCPServer.http("https://example.org/mcp")`.

        Its host may not be at a private address, unless `allow_private` says so or the URL itself names this machine.

        Raises:
            MisuseError: when an option makes no sense, or plain HTTP goes to another machine.
        """
        launch = Http(url=url, headers=headers or {}, auth=auth, allow_private=allow_private)
        return cls(name=name or server_name_of(httpx2.URL(url).host), launch=launch, **_server_options(options))

    @classmethod
    def load(
        cls, path: Path | str, *, pins: Pins | None = None, consent: Consent | None = None
    ) -> tuple[MCPServer, ...]:
        """Return the servers of a file that has `mcpServers`; none of them is started yet.

        Args:
            path: The file.
            pins: Where it is kept what was approved; by default `PinFile()`, where `agentfsm mcp approve` keeps it.
            consent: Asks a person about what was not; without it a server that was not approved is not started.

        Raises:
            MCPServerError: when the file cannot be read, or something in it makes no sense.
        """
        place = Path(path).absolute()
        kept = pins or PinFile()
        return tuple(
            cls(
                name=entry.name,
                launch=entry.launch,
                pins=kept,
                consent=consent,
                origin=str(place),
                start=start_text(entry.launch, entry.written),
                **entry.options,
            )
            for entry in entries_in(place)
        )

    async def update(self) -> None:
        """List the tools, once it is approved how the server is started.

        Raises:
            MCPServerError: when it is not, or the server cannot be asked.
            MisuseError: when there is a constraint on a tool that there is not.
        """
        try:
            self.admitted = await self._asked()
        except BaseException:
            self._has_news = True
            raise
        self._listed_at = self.link.starts
        self.version += 1

    async def _asked(self) -> Admitted:
        self.trouble = None
        try:
            await self.gate.start(self.launch, self.start)
            self._has_news = False
            return await admitted(self, await self.link.ask(_listed))
        except MCPServerError as error:
            if self.required:
                raise
            self._has_news = False
            self.trouble = error
            _log.warning("the tools of the MCP server %r are not there: %s", self.name, error)
            return Admitted()

    async def approve(self) -> Admitted:
        """Have a person asked about all of the server that was not approved, keep what he says, and close it.

        Returns:
            What of it is used, what is refused, and what he has not approved.

        Raises:
            MCPServerError: when he has not approved how it is started, or it cannot be asked.
        """
        try:
            await self.update()
        finally:
            await self.aclose()
        return self.admitted

    async def aclose(self) -> None:
        """Close the connection; the next use opens another, and asks anew."""
        await self.link.aclose()
        self._has_news = True

    def _hear(self, message: object) -> None:
        if isinstance(message, m.ToolListChangedNotification):
            self._has_news = True


async def _listed(client: Client) -> Listing:
    tools: list[m.Tool] = []
    cursor: str | None = None
    for _ in range(MOST_PAGES):
        page = await client.list_tools(cursor=cursor)
        tools += page.tools
        cursor = page.next_cursor
        if cursor is None:
            break
    return Listing(tools=tools, instructions=client.instructions)
