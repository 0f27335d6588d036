"""Connections to the served endpoint: how long a request may take to arrive, and how many connections a client has.

uvicorn bounds neither. A client that sends half a request keeps its connection for ever, and beyond its
`limit_concurrency` uvicorn refuses all clients. Here the connection that has waited longest for a request makes room.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
from collections import Counter
from collections.abc import Iterable
from typing import Any, ClassVar, Final, TypeAlias, cast

import attrs
from uvicorn.protocols.http.flow_control import service_unavailable
from uvicorn.protocols.http.h11_impl import H11Protocol

from agentfsm._lib.web.eviction import choose_evicted, derive_client_key
from agentfsm._lib.web.http_guard import App, Receive, Scope, Send
from agentfsm.core.errors import MisuseError
from agentfsm.core.validation import COUNT
from agentfsm.core.value import Value

Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network
Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address

# Connections at once. A process usually has 1,024 descriptors; up to three backlogs are accepted before the first
# connection that makes room is closed, and the store needs some.
MAX_CONNECTIONS: Final = 512
# Connections that are accepted in one round of the event loop.
BACKLOG: Final = 128
# Connections without a place, in which a health check may come, before the oldest of them is closed.
MAX_WITHOUT_PLACE: Final = 64
# Seconds for a whole request to arrive, head and body, counted from the connection or the last answer.
RECEIVE_TIMEOUT_S: Final = 30.0
# Seconds that a connection stays open after an answer if no other request begins.
KEEP_ALIVE_S: Final = 5
# An element of `Forwarded` (RFC 7239, 4) that names the client of the hop.
_FORWARDED_FOR: Final = re.compile(r'(?:^|;)\s*for=(?P<quote>"?)(?P<node>[^";]*)(?P=quote)\s*(?:;|$)', re.IGNORECASE)
_FORWARDED_PROTO: Final = re.compile(r'(?:^|;)\s*proto="?(https?)"?\s*(?:;|$)')
# The node of a hop with an address (RFC 7239, 6): IPv4 or IPv6, perhaps in brackets and with a port.
_NODE: Final = re.compile(
    r"\[(?P<v6>[0-9a-fA-F:.]+)\](?::\d+)?|(?P<v4>[0-9.]+)(?::\d+)?|(?P<bare>[0-9a-fA-F:.]+)", re.ASCII
)


def parse_network(text: str) -> Network:
    """Parse an address or a network of trusted proxies.

    Raises:
        MisuseError: when it is neither.
    """
    try:
        return ipaddress.ip_network(text)
    except ValueError as error:
        raise MisuseError(f"{text!r} is not a network ({error}): give for example 10.0.0.0/8 or 192.0.2.7") from None


@attrs.frozen(kw_only=True)
class ConnectionLimits(Value):
    """Limits of the connections of a server.

    Raises:
        MisuseError: when a limit is below 1.
    """

    total: int = attrs.field(factory=lambda: MAX_CONNECTIONS, validator=COUNT)
    """Connections at once, 1 or more. Default: 512."""

    per_address: int = attrs.field(default=attrs.Factory(lambda self: max(1, self.total // 2), takes_self=True))
    """Connections of one client at once, which is an IPv4 address or a /64 network of IPv6. Default: half of all."""

    trusted_proxies: tuple[Network, ...] = ()
    """Networks of proxies that say in `Forwarded` or `X-Forwarded-For` whose request they pass on. Their connections
    are limited by `total` only, and their requests in progress by `per_address` for each client.
    """

    always_answered: frozenset[str] = frozenset()
    """Paths that are answered also when there is no place, such as that of a health check."""

    def trusts(self, address: Address | None) -> bool:
        """Return whether an address is that of a trusted proxy."""
        return address is not None and any(address in each for each in self.trusted_proxies)


def find_client(headers: Iterable[tuple[bytes, bytes]], limits: ConnectionLimits) -> str | None:
    """Return the address of the client for which a trusted proxy sends a request; None if the headers do not say.

    Of the hops, that counts which is nearest and not a trusted proxy: what is before it, the client may have written.
    If both headers are there and disagree, the client may have written one, which its proxy does not know: none counts.
    """
    lists: dict[bytes, list[str]] = {}
    for name, value in headers:
        if name in (b"forwarded", b"x-forwarded-for"):
            lists.setdefault(name, []).extend(value.decode("latin-1").split(","))
    found: set[str | None] = set()
    for name, hops in lists.items():
        client: Address | None = None
        for hop in reversed(hops):
            client = _read_hop(hop, is_forwarded=name == b"forwarded")
            if not limits.trusts(client):
                break
        found.add(None if client is None else str(client))
    return found.pop() if len(found) == 1 else None


def find_scheme(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """Return the scheme by which a trusted proxy was asked, from the hop next to it; None if the headers do not say."""
    found: set[str] = set()
    for name, value in headers:
        hop = value.decode("latin-1").rpartition(",")[2].strip().lower()
        if name == b"x-forwarded-proto":
            found.add(hop)
        elif name == b"forwarded" and (named := _FORWARDED_PROTO.search(hop)):
            found.add(named[1])
    return found.pop() if len(found) == 1 else None


def _read_hop(text: str, *, is_forwarded: bool) -> Address | None:
    named = _FORWARDED_FOR.search(text) if is_forwarded else None
    if is_forwarded and named is None:
        return None
    node = _NODE.fullmatch(text.strip() if named is None else named["node"])
    return None if node is None else _parse_address(node["v6"] or node["v4"] or node["bare"])


def _parse_address(text: str) -> Address | None:
    try:
        found = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    return getattr(found, "ipv4_mapped", None) or found


def limit_connections(limits: ConnectionLimits) -> type[LimitedConnection]:
    """Return the class of the connections of one server."""
    return type("LimitedConnection", (LimitedConnection,), {"limits": limits, "proxied": Counter()})


class LimitedConnection(H11Protocol):
    """A connection that times out while it waits for a request, and holds one of a bounded number of places.

    While a request is answered, however long that takes, the connection is in use: it neither times out nor makes room.
    """

    limits: ClassVar[ConnectionLimits]
    proxied: ClassVar[Counter[str]]
    """Requests in progress that trusted proxies have passed on, by client."""

    client_key: str = ""
    has_place = True
    """Whether the connection has a place. Without one, only `always_answered` is served."""

    _is_of_proxy = False
    _served: App
    _timer: asyncio.TimerHandle | None = None
    """None while a request is answered."""

    @property
    def idle_rank(self) -> tuple[float, ...] | None:
        """None while a request is answered; otherwise the time of the event loop at which the connection times out."""
        return None if self._timer is None else (self._timer.when(),)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """Take a place, for which an idle connection may be closed. If there is none, refuse requests with 503."""
        super().connection_made(transport)
        address = self.client[0] if self.client else ""
        self.client_key = derive_client_key(address)
        self._is_of_proxy = self.limits.trusts(_parse_address(address))
        self._served = cast("Any", self.app)
        self.app = self._serve
        self._update_timer()
        open_now = [each for each in self.connections if isinstance(each, LimitedConnection)]
        places = [each for each in open_now if each.has_place]
        most, total = self.limits.per_address, self.limits.total
        leaving = choose_evicted(places, self, max_total=total, max_per_client=total if self._is_of_proxy else most)
        if leaving is self:
            self.has_place = False
            waiting = [(rank, each) for each in open_now if not each.has_place and (rank := each.idle_rank)]
            leaving = min(waiting, key=lambda found: found[0])[1] if len(waiting) > MAX_WITHOUT_PLACE else None
        if leaving is not None:
            self.connections.discard(leaving)  # now, since the transport takes one more round of the event loop
            leaving.transport.abort()

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, if there is a place for it."""
        client, has_place = None, self.has_place
        if self._is_of_proxy and (client := find_client(scope["headers"], self.limits)) is not None:
            scope["client"] = (client, 0)
        if self._is_of_proxy and find_scheme(scope["headers"]) == "https":
            scope["scheme"] = "https"  # so that an address of the server, as in a redirect, is one of the proxy
        key = self.client_key if client is None else derive_client_key(client)
        if self._is_of_proxy:
            has_place = has_place and self.proxied[key] < self.limits.per_address
        if not has_place and scope["path"] not in self.limits.always_answered:
            await service_unavailable(scope, receive, send)  # type: ignore[arg-type]
            return
        if not self._is_of_proxy:
            await self._served(scope, receive, send)
            return
        self.proxied[key] += 1
        try:
            await self._served(scope, receive, send)
        finally:
            self.proxied[key] -= 1
            if not self.proxied[key]:
                del self.proxied[key]

    def data_received(self, data: bytes) -> None:
        """Take in a part of a request."""
        super().data_received(data)
        self._update_timer()

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        super().on_response_complete()
        self._update_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer."""
        super().connection_lost(exc)
        self._stop_timer()

    def _update_timer(self) -> None:
        cycle = self.cycle
        if cycle is not None and not cycle.more_body and not cycle.response_complete:
            self._stop_timer()
        elif self._timer is None:
            self._timer = self.loop.call_later(RECEIVE_TIMEOUT_S, self.transport.abort)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
