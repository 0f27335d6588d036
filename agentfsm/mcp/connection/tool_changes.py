"""Stream on which a server of the current protocol reports changes of its tools."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import anyio
from mcp import Client, MCPError
from mcp.client.subscriptions import SubscriptionLost
from mcp.types import INVALID_PARAMS, INVALID_REQUEST, METHOD_NOT_FOUND
from mcp.types.version import MODERN_PROTOCOL_VERSIONS

# Seconds before an ended stream is opened again; doubled each time.
REOPEN_WAIT_S: Final = 1.0
# Maximum of that wait in seconds. After a stream that lasted for so long, the shortest wait applies again.
MAX_REOPEN_WAIT_S: Final = 60.0

# Error codes of a server that has no such stream, whatever it has declared.
_REFUSALS: Final = frozenset({INVALID_PARAMS, INVALID_REQUEST, METHOD_NOT_FOUND})


def announces_changes(client: Client) -> bool:
    """Return whether the server has declared that it reports changes of its tools."""
    tools = client.server_capabilities.tools
    return tools is not None and bool(tools.list_changed)


async def follow(client: Client, is_open: anyio.Event, on_gap: Callable[[], object]) -> None:
    """Keep the stream open while the connection lasts. The client's message handler receives its events.

    Args:
        client: Client of the connection.
        is_open: Set when the stream is open for the first time, or is not available.
        on_gap: Called when the stream is open again after its end, since changes meanwhile were not reported.
    """
    wait_s = REOPEN_WAIT_S
    while announces_changes(client) and client.protocol_version in MODERN_PROTOCOL_VERSIONS:
        began = anyio.current_time()
        try:
            async with client.listen(tools_list_changed=True) as changes:
                if is_open.is_set():
                    on_gap()
                is_open.set()
                async for _ in changes:
                    pass
        except SubscriptionLost:
            pass
        except MCPError as error:
            if error.code in _REFUSALS:
                break
        lasted = anyio.current_time() - began >= MAX_REOPEN_WAIT_S
        await anyio.sleep(wait_s)
        wait_s = REOPEN_WAIT_S if lasted else min(2 * wait_s, MAX_REOPEN_WAIT_S)
    is_open.set()
