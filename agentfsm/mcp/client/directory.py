"""Let an agent search a directory for MCP servers; a person approves each server before it is connected.

    agent = Agent(model, tools=[FoundServers(directory=MyDirectory(), pins=PinFile())])

The directory is not trusted. An entry may say how a server is started, but grants it no rights; our environment
variables are not expanded in it; and the approval is bound to the exact entry by its hash.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

import attrs

from agentfsm._lib.newest import Newest
from agentfsm._lib.pins import ApprovedText, Pin, PinFile, Pins
from agentfsm.core.errors import ModelRetry
from agentfsm.core.header import short_hash
from agentfsm.core.labels import Level
from agentfsm.core.messages import JSON
from agentfsm.core.text_safety import find_hidden
from agentfsm.core.value import Value
from agentfsm.mcp.client.mcp_server import MCPServer
from agentfsm.mcp.connection.server_sandbox import ServerSandbox
from agentfsm.mcp.connection.transports import StdioTransport
from agentfsm.mcp.errors import MCPServerError
from agentfsm.mcp.trust.consent import Consent, Proposal, Wish, format_start
from agentfsm.mcp.trust.names import SERVER_CHARS, derive_server_name, iter_texts
from agentfsm.mcp.trust.server_config import ServerEntry, parse_entry
from agentfsm.tools.schema.binding import Arguments
from agentfsm.tools.tool import DIGEST_CHARS, Tool, make_tool

_log = logging.getLogger("agentfsm.mcp")

# Servers in one search result: more are not compared in practice.
MAX_CANDIDATES: Final = 20
# Characters of the hash in a server's name, which prevents name collisions.
_NAME_HASH_CHARS: Final = 6
_DESCRIPTION_CHARS: Final = 500
# Cached candidates; the oldest are evicted and looked up again.
_MAX_REMEMBERED: Final = 1_000


@attrs.frozen(kw_only=True)
class Candidate(Value):
    """MCP server listed in a directory."""

    name: str
    """Name in the directory. `ServerDirectory.find` with this name must return the server."""

    description: str
    """Purpose of the server, for the model. At most 500 characters are shown."""

    entry: Mapping[str, JSON]
    """Start command or address, as in `mcpServers`: command, args, env, cwd; or url, headers; and type."""

    @property
    def id(self) -> str:
        """Identifier for `connect_server`: the name and a hash of the entry, so that a changed entry does not match."""
        return f"{self.name}@{short_hash(json.dumps(self.entry, sort_keys=True), DIGEST_CHARS)}"


class ServerDirectory(Protocol):
    """Searchable list of MCP servers, such as a company's registry."""

    async def find(self, query: str) -> Sequence[Candidate]:
        """Return the servers that match the query, best first. A server's exact name must find that server."""
        ...


@attrs.define(eq=False, repr=False, kw_only=True)
class FoundServers:
    """Tool source with `find_servers`, `connect_server` and the tools of the servers connected through them.

    An approved server is pinned, so that a run that continues in another process finds it there. Its tools are
    accepted as first listed, and each call of them needs a person's approval.
    """

    directory: ServerDirectory
    """Directory that `find_servers` searches."""

    pins: Pins = attrs.field(factory=PinFile)
    """Storage for approved servers. Agents that share it share their servers, so give each agent its own."""

    consent: Consent | None = None
    """Function that asks a person when an approved server has changed. None: the change is not accepted."""

    sandbox: ServerSandbox | None = None
    """Sandbox for all servers that are commands. None: they run with your own rights, and the approval text says so."""

    name: str = "directory"
    """Name of this source. It prefixes the keys in `pins`, so keep it the same across processes."""

    version: int = attrs.field(default=0, init=False)
    """Counter that increases with each update and each new server. A change means that `tools` may have changed."""

    _servers: dict[str, MCPServer] = attrs.field(factory=dict, init=False)
    """Connected servers, by the keys of their pins."""

    _candidates: Newest[str, Candidate] = attrs.field(factory=lambda: Newest(_MAX_REMEMBERED), init=False)
    _is_restored: bool = attrs.field(default=False, init=False)
    _own_tools: tuple[Tool[..., Any], ...] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._own_tools = (
            make_tool(self._find_servers, name="find_servers", read_only=True, reads_untrusted=True),
            make_tool(
                self._connect_server,
                name="connect_server",
                reads_untrusted=True,  # the result has names that the server has chosen
                requires_approval=True,
                permission=Level.ADMIN,
                describe=self._describe_connect,
            ),
        )

    @property
    def is_stale(self) -> bool:
        """Whether a server needs an update, or the approved servers were not restored yet."""
        return not self._is_restored or any(server.is_stale for server in self._servers.values())

    @property
    def tools(self) -> tuple[Tool[..., Any], ...]:
        """The two own tools, and those of the connected servers."""
        return *self._own_tools, *(tool for server in self._servers.values() for tool in server.tools)

    async def update(self) -> None:
        """Restore the approved servers and list the tools of stale ones. An unreachable server has no tools.

        Raises:
            PinsError: when the approvals cannot be read.
        """
        if not self._is_restored:
            prefix = f"{self.name}#"
            for key, pin in self.pins.read().items():
                if not key.startswith(prefix) or pin.start is None or key in self._servers:
                    continue
                try:
                    self._add_server(self._parse_entry(json.loads(pin.start.text), key.removeprefix(prefix)))
                except (MCPServerError, ValueError) as error:
                    _log.warning("an approved MCP server cannot be used: %s", error)
            self._is_restored = True
        for server in self._servers.values():
            if server.is_stale:
                await server.update()
        self.version += 1

    async def aclose(self) -> None:
        """Close the connections; the servers stay approved."""
        for server in self._servers.values():
            await server.aclose()

    async def _find_servers(self, query: str) -> list[dict[str, str]]:
        """Search for MCP servers, which provide further tools. Connect to a server by its id, with connect_server.

        Args:
            query: Purpose of the tools, in a few words.
        """
        shown = []
        for candidate in (await self.directory.find(query))[:MAX_CANDIDATES]:
            try:
                entry = self._parse_candidate(candidate)
            except MCPServerError as error:
                _log.warning("a server from the directory cannot be used: %s", error)
                continue
            self._candidates[candidate.id] = candidate
            about = candidate.description[:_DESCRIPTION_CHARS]
            shown.append({"id": candidate.id, "description": about, "start": format_start(entry.transport).strip()})
        return shown

    async def _connect_server(self, id: str) -> str:  # noqa: A002  the name that the model sees
        """Connect to an MCP server; its tools are available from your next turn on.

        Args:
            id: Id of a server that find_servers has found.
        """
        candidate = self._candidates.get(id)
        if candidate is None:  # this process has not cached it
            found = await self.directory.find(id.rpartition("@")[0])
            candidate = next((each for each in found[:MAX_CANDIDATES] if each.id == id), None)
        if candidate is None:
            raise ModelRetry("no server has this id now: use an id from find_servers")
        entry = self._parse_candidate(candidate)
        server = self._add_server(entry)
        self.pins.change(server.consent_gate.pin_key, lambda stored: stored or Pin(start=server.start))
        await server.update()
        if server.last_error is not None:
            del self._servers[server.consent_gate.pin_key]
            raise server.last_error
        self.version += 1
        names = ", ".join(tool.name for tool in server.tools) or "none"
        return f"Connected to {entry.name}. Its tools, from your next turn on: {names}"

    def _describe_connect(self, arguments: Arguments) -> str:
        candidate = self._candidates.get(arguments.id)
        if candidate is None:
            return f"Connect to the MCP server {arguments.id!r}. No details are available here: check it, or reject."
        entry = self._parse_candidate(candidate)
        return f"Connect to the MCP server {candidate.name!r}, found in a directory:\n{format_start(entry.transport)}"

    def _parse_candidate(self, candidate: Candidate) -> ServerEntry:
        for text in iter_texts([candidate.name, candidate.description, candidate.entry]):
            if (found := find_hidden(text)) is not None:
                raise MCPServerError(f"the server {candidate.name!r} holds the hidden character {found}")
        mark = short_hash(candidate.id, _NAME_HASH_CHARS)
        readable = derive_server_name(candidate.name)[: SERVER_CHARS - _NAME_HASH_CHARS - 1].rstrip("-")
        return self._parse_entry(candidate.entry, f"{readable}-{mark}")

    def _parse_entry(self, raw: Mapping[str, JSON], name: str) -> ServerEntry:
        entry = parse_entry(name, raw, where=self.name, environment=None, allow_extensions=False)
        if isinstance(entry.transport, StdioTransport):
            entry.transport.sandbox = self.sandbox
        return entry

    def _add_server(self, entry: ServerEntry) -> MCPServer:
        server = MCPServer(
            name=entry.name,
            transport=entry.transport,
            pins=self.pins,
            consent=self._decide_proposal,
            origin=self.name,
            start=ApprovedText.from_json(dict(entry.raw)),
            required=False,
        )
        return self._servers.setdefault(server.consent_gate.pin_key, server)

    async def _decide_proposal(self, proposal: Proposal) -> bool:
        """Accept the first list of tools of a server whose start was approved; ask about everything else."""
        if proposal.wish is Wish.TOOLS:
            return True
        return self.consent is not None and await self.consent(proposal)
