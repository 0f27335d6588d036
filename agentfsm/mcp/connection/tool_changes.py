"""The stream by which a server of today's protocol tells that its tools have changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import anyio
from mcp import Client, MCPError
from mcp.client.subscriptions import SubscriptionLost
from mcp.types import INVALID_PARAMS, INVALID_REQUEST, METHOD_NOT_FOUND
from mcp.types.version import MODERN_PROTOCOL_VERSIONS

# Seconds before the stream is asked for again when it has ended, twice that the next time, and so on.
REOPEN_WAIT_S: Final = 1.0
# Seconds; a stream that has lasted for so long begins anew with the shortest wait.
MAX_REOPEN_WAIT_S: Final = 60.0

# With which a server says that it has no such stream, whatever it has declared.
_REFUSALS: Final = frozenset({INVALID_PARAMS, INVALID_REQUEST, METHOD_NOT_FOUND})


def announces_changes(client: Client) -> bool:
    """Whether the server has declared that it tells when its tools change."""
    tools = client.server_capabilities.tools
    return tools is not None and bool(tools.list_changed)


async def follow(client: Client, is_open: anyio.Event, on_gap: Callable[[], object]) -> None:
    """Keep the stream open for as long as the connection lasts; what comes by it the client's handler hears, too.

    Args:
        client: Of the connection.
        is_open: Set when the stream is open for the first time, or there will be none.
        on_gap: Called when it is open again after it has ended: nobody tells what happened meanwhile.
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
