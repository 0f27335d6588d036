"""What a server lists on the connection at hand: what stood behind it on the one before may be another program.

A call goes only to a connection that lists its tool just as it was admitted. So a server that dies and comes back as
something else meets no call before its listing was compared with what was approved.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final, Protocol, TypeVar

import anyio
import attrs
import mcp.types as m
from mcp import Client, MCPError

from agentfsm.mcp.connection.lenient_parsing import INVALID_ENTRIES, InvalidEntry
from agentfsm.mcp.trust.pins import build_tool_text

# Pages of one list: a server that goes on for ever is not followed.
MAX_PAGES: Final = 200
# Entries of one list.
MAX_ENTRIES: Final = 10_000
# Stands for what may be behind a page that came before.
FURTHER_PAGES: Final = "(further pages)"


class ToolChangedError(Exception):
    """A tool is not listed, or not as it was when it was admitted; nothing was sent."""


@attrs.define(eq=False, repr=False)
class _ConnectionListing:
    """The newest listing of one connection."""

    client: Client
    tools: Mapping[str, Sequence[m.Tool | InvalidEntry]] | None = None
    """By name, which a server may give twice; None until it was asked."""

    lock: anyio.Lock = attrs.field(factory=anyio.Lock)

    async def fetch(self) -> Sequence[m.Tool | InvalidEntry]:
        """List the tools; none where the server has declared none."""
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
    """The tools of one server, as its connection lists them; lives in the thread of `home`, as the connection does."""

    _listing: _ConnectionListing | None = attrs.field(default=None, init=False)

    async def fetch(self, client: Client) -> Sequence[m.Tool | InvalidEntry]:
        """List the tools of a connection, and what is among them that cannot be used."""
        newest = self._listing_for(client)
        async with newest.lock:
            return await newest.fetch()

    async def check_unchanged(self, client: Client, admitted: m.Tool, *, refetch: bool = False) -> None:
        """Return if a connection lists a tool as it was admitted; calls that ask at once have it list once.

        Args:
            client: The connection.
            admitted: The tool, as it was listed when it was admitted.
            refetch: Whether to ask again what it has listed before.

        Raises:
            NotAsAdmittedError: when it does not.
            MCPError: when it cannot be asked.
        """
        newest = self._listing_for(client)
        async with newest.lock:
            if refetch or newest.tools is None:
                await newest.fetch()
            now = (newest.tools or {}).get(admitted.name, ())
        if not now:
            raise ToolChangedError("it is no longer there")
        if len(now) > 1:
            raise ToolChangedError("there are two of that name now")
        if isinstance(now[0], InvalidEntry):
            raise ToolChangedError(now[0].why)
        if now[0] is not admitted and build_tool_text(now[0]) != build_tool_text(admitted):
            raise ToolChangedError("it is described otherwise than when it was approved")

    def _listing_for(self, client: Client) -> _ConnectionListing:
        if self._listing is None or self._listing.client is not client:
            self._listing = _ConnectionListing(client)
        return self._listing


class _ListPage(Protocol):
    """A page of a list."""

    next_cursor: str | None


T = TypeVar("T")
P = TypeVar("P", bound=_ListPage)


async def fetch_all_pages(
    fetch_page: Callable[[str | None], Awaitable[P]], entries_in: Callable[[P], Sequence[T]]
) -> list[T | InvalidEntry]:
    """Return the entries of all pages, also those that do not fit. A cursor or a page that came before ends the list.

    Raises:
        MCPError: when there are too many.
    """
    found: list[T | InvalidEntry] = []
    cursor: str | None = None
    cursors: set[str] = set()
    pages: list[Sequence[T | InvalidEntry]] = []
    for _ in range(MAX_PAGES):
        unfit: list[InvalidEntry] = []
        INVALID_ENTRIES.set(unfit)
        got = await fetch_page(cursor)
        new: list[T | InvalidEntry] = [*entries_in(got), *unfit]
        if new and new in pages:
            return [*found, InvalidEntry(FURTHER_PAGES, "the server sends a page again, whichever it is asked for")]
        pages.append(new)
        found += new
        cursor = got.next_cursor
        if cursor is None or cursor in cursors:
            return found
        if len(found) > MAX_ENTRIES:
            break
        cursors.add(cursor)
    raise MCPError(m.INTERNAL_ERROR, f"its list has more than {MAX_PAGES} pages or {MAX_ENTRIES} entries")
