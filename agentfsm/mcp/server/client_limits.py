"""Limit the share of one client of a server over HTTP."""

from __future__ import annotations

import attrs

from agentfsm._lib.web.http_connections import MAX_CONNECTIONS
from agentfsm.core.validation import COUNT
from agentfsm.core.value import Value
from agentfsm.mcp.server.call_sequencer import MAX_CALLS
from agentfsm.mcp.server.http_sessions import MAX_SESSIONS


@attrs.frozen(kw_only=True)
class ClientLimits(Value):
    """Limits of one client over HTTP, which is an IPv4 address or a /64 network of IPv6: half of what there is.

    Raises:
        MisuseError: when a limit is below 1.
    """

    connections: int = attrs.field(default=MAX_CONNECTIONS // 2, validator=COUNT)
    """Connections at once, 1 or more, of 512 for all clients. The one that has waited longest for a request is closed
    for another.
    """

    sessions: int = attrs.field(default=MAX_SESSIONS // 2, validator=COUNT)
    """Sessions at once, 1 or more, of 1,000 for all clients; only the handshake revision has sessions. The one that is
    idle for longest ends for another.
    """

    calls: int = attrs.field(default=MAX_CALLS // 2, validator=COUNT)
    """Calls in progress and waiting, 1 or more, of 1,000 for all clients. Further calls are refused."""
