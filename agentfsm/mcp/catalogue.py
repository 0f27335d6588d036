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

from agentfsm.mcp.connection.sift import UNFIT, Unfit
from agentfsm.mcp.trust.pins import tool_text

# Pages of one list: a server that goes on for ever is not followed.
MAX_PAGES: Final = 200
# Entries of one list.
MAX_ENTRIES: Final = 10_000
# Stands for what may be behind a page that came before.
FURTHER: Final = "(further pages)"


class NotAsAdmittedError(Exception):
    """A tool is not listed, or not as it was when it was admitted; nothing was sent."""


@attrs.define(eq=False, repr=False)
class _Newest:
    """The newest listing of one connection."""

    client: Client
    tools: Mapping[str, Sequence[m.Tool | Unfit]] | None = None
    # By name, which a server may give twice; None until it was asked.
    asking: anyio.Lock = attrs.field(factory=anyio.Lock)

    async def ask(self) -> Sequence[m.Tool | Unfit]:
        """List the tools; none where the server has declared none."""
        listed: Sequence[m.Tool | Unfit] = ()
        if self.client.server_capabilities.tools is not None:
            listed = await every(lambda cursor: self.client.list_tools(cursor=cursor), lambda page: page.tools)
        by_name: dict[str, list[m.Tool | Unfit]] = {}
        for each in listed:
            by_name.setdefault(each.name, []).append(each)
        self.tools = by_name
        return listed


@attrs.define(eq=False, repr=False)
class Catalogue:
    """The tools of one server, as its connection lists them; lives in the thread of `home`, as the connection does."""

    _newest: _Newest | None = attrs.field(default=None, init=False)

    async def ask(self, client: Client) -> Sequence[m.Tool | Unfit]:
        """List the tools of a connection, and what is among them that cannot be used."""
        newest = self._of(client)
        async with newest.asking:
            return await newest.ask()

    async def check(self, client: Client, admitted: m.Tool, *, anew: bool = False) -> None:
        """Return if a connection lists a tool as it was admitted; calls that ask at once have it list once.

        Args:
            client: The connection.
            admitted: The tool, as it was listed when it was admitted.
            anew: Whether to ask again what it has listed before.

        Raises:
            NotAsAdmittedError: when it does not.
            MCPError: when it cannot be asked.
        """
        newest = self._of(client)
        async with newest.asking:
            if anew or newest.tools is None:
                await newest.ask()
            now = (newest.tools or {}).get(admitted.name, ())
        if not now:
            raise NotAsAdmittedError("it is no longer there")
        if len(now) > 1:
            raise NotAsAdmittedError("there are two of that name now")
        if isinstance(now[0], Unfit):
            raise NotAsAdmittedError(now[0].why)
        if now[0] is not admitted and tool_text(now[0]) != tool_text(admitted):
            raise NotAsAdmittedError("it is described otherwise than when it was approved")

    def _of(self, client: Client) -> _Newest:
        if self._newest is None or self._newest.client is not client:
            self._newest = _Newest(client)
        return self._newest


class _Page(Protocol):
    """A page of a list."""

    next_cursor: str | None


T = TypeVar("T")
P = TypeVar("P", bound=_Page)


async def every(page: Callable[[str | None], Awaitable[P]], entries: Callable[[P], Sequence[T]]) -> list[T | Unfit]:
    """Return the entries of all pages, also those that do not fit. A cursor or a page that came before ends the list.

    Raises:
        MCPError: when there are too many.
    """
    found: list[T | Unfit] = []
    cursor: str | None = None
    cursors: set[str] = set()
    pages: list[Sequence[T | Unfit]] = []
    for _ in range(MAX_PAGES):
        unfit: list[Unfit] = []
        UNFIT.set(unfit)
        got = await page(cursor)
        new: list[T | Unfit] = [*entries(got), *unfit]
        if new and new in pages:
            return [*found, Unfit(FURTHER, "the server sends a page again, whichever it is asked for")]
        pages.append(new)
        found += new
        cursor = got.next_cursor
        if cursor is None or cursor in cursors:
            return found
        if len(found) > MAX_ENTRIES:
            break
        cursors.add(cursor)
    raise MCPError(m.INTERNAL_ERROR, f"its list has more than {MAX_PAGES} pages or {MAX_ENTRIES} entries")
