"""Check each call against the tools that the current connection lists.

A call is sent only if the connection lists its tool exactly as it was admitted. A restarted server may be another
program, so it gets no calls before its listing was compared with the approved one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final, Protocol, TypeVar

import anyio
import attrs
import mcp.types as m
from mcp import Client, MCPError

from agentfsm.mcp.connection.lenient_parsing import INVALID_ENTRIES, InvalidEntry
from agentfsm.mcp.trust.tool_policy import build_tool_text

# Maximum number of pages of one list: an endless list is not followed.
MAX_PAGES: Final = 200
# Maximum number of entries of one list.
MAX_ENTRIES: Final = 10_000
# Name of the entry that stands for the pages after a repeated one.
FURTHER_PAGES: Final = "(further pages)"


class ToolChangedError(Exception):
    """A tool is no longer listed, or has changed since it was admitted. Nothing was sent."""


@attrs.define(eq=False, repr=False)
class _ConnectionListing:
    """Newest listing of one connection."""

    client: Client
    tools: Mapping[str, Sequence[m.Tool | InvalidEntry]] | None = None
    """Tools by name, which a server may list twice. None: not listed yet."""

    lock: anyio.Lock = attrs.field(factory=anyio.Lock)

    async def fetch(self) -> Sequence[m.Tool | InvalidEntry]:
        """List the tools; the result is empty if the server has not declared tools."""
        listed: Sequence[m.Tool | InvalidEntry] = ()
        if self.client.server_capabilities.tools is not None:
            listed = await fetch_all_pages(
                lambda cursor: self.client.list_tools(cursor=cursor), lambda page: page.tools
            )
        by_name: dict[str, list[m.Tool | InvalidEntry]] = {}
        for each in listed:
            by_name.setdefault(each.name, []).append(each)
        self.tools = by_name
        return listed


@attrs.define(eq=False, repr=False)
class Catalogue:
    """Tools of one server, as its connection lists them. It is used in the connection thread only."""

    _listing: _ConnectionListing | None = attrs.field(default=None, init=False)

    async def fetch(self, client: Client) -> Sequence[m.Tool | InvalidEntry]:
        """List the tools of a connection, including the entries that cannot be used."""
        newest = self._listing_for(client)
        async with newest.lock:
            return await newest.fetch()

    async def check_unchanged(self, client: Client, admitted: m.Tool, *, refetch: bool = False) -> None:
        """Check that a connection lists a tool as it was admitted. Concurrent checks share one listing.

        Args:
            client: The connection.
            admitted: The tool, as it was listed when it was admitted.
            refetch: Whether to list the tools again if this connection has listed them before.

        Raises:
            ToolChangedError: when the tool has changed or is not listed.
            MCPError: when the tools cannot be listed.
        """
        newest = self._listing_for(client)
        async with newest.lock:
            if refetch or newest.tools is None:
                await newest.fetch()
            now = (newest.tools or {}).get(admitted.name, ())
        if not now:
            raise ToolChangedError("it is no longer listed")
        if len(now) > 1:
            raise ToolChangedError("the server now lists two tools with this name")
        if isinstance(now[0], InvalidEntry):
            raise ToolChangedError(now[0].why)
        if now[0] is not admitted and build_tool_text(now[0]) != build_tool_text(admitted):
            raise ToolChangedError("it differs from the approved version")

    def _listing_for(self, client: Client) -> _ConnectionListing:
        if self._listing is None or self._listing.client is not client:
            self._listing = _ConnectionListing(client)
        return self._listing


class _ListPage(Protocol):
    """Page of a list."""

    next_cursor: str | None


T = TypeVar("T")
P = TypeVar("P", bound=_ListPage)


async def fetch_all_pages(
    fetch_page: Callable[[str | None], Awaitable[P]], entries_in: Callable[[P], Sequence[T]]
) -> list[T | InvalidEntry]:
    """Return the entries of all pages, including invalid ones. A repeated cursor or page ends the list.

    Raises:
        MCPError: when there are too many pages or entries.
    """
    found: list[T | InvalidEntry] = []
    cursor: str | None = None
    cursors: set[str] = set()
    pages: list[Sequence[T | InvalidEntry]] = []
    for _ in range(MAX_PAGES):
        invalid: list[InvalidEntry] = []
        INVALID_ENTRIES.set(invalid)
        page = await fetch_page(cursor)
        new: list[T | InvalidEntry] = [*entries_in(page), *invalid]
        if new and new in pages:
            return [*found, InvalidEntry(FURTHER_PAGES, "the server sent the same page for different cursors")]
        pages.append(new)
        found += new
        cursor = page.next_cursor
        if cursor is None or cursor in cursors:
            return found
        if len(found) > MAX_ENTRIES:
            break
        cursors.add(cursor)
    raise MCPError(m.INTERNAL_ERROR, f"the list has more than {MAX_PAGES} pages or {MAX_ENTRIES} entries")
