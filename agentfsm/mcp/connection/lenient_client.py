"""Client of the SDK with changed defaults: it drops invalid entries and scales the timeout of the first request."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any, Final, cast

from mcp import Client, MCPError
from mcp.client.session import ClientSession

from agentfsm.mcp.connection.lenient_parsing import drop_invalid_entries
from agentfsm.mcp.connection.request_errors import WIRE_STATUS, WireStatus

# Share of the start timeout for the first request, which distinguishes servers of the current protocol from older ones.
# Many older servers do not answer unknown requests, so the rest is for their handshake. For 30 s it is the SDK's 10 s.
DISCOVERY_SHARE: Final = 1 / 3


class LenientClient(Client):
    """Client that drops invalid entries from answers, and bounds the wait for the first answer by the start timeout.

    The SDK always waits 10 s for it. It would take a slower server for an older one, and send it requests that it may
    not know; and with a shorter start timeout, an older server that never answers it could not be used.
    """

    def __init__(self, transport: Any, *, start_s: float, **options: Any) -> None:
        """Create a client.

        Args:
            transport: Transport that opens the streams.
            start_s: Seconds that the handshake may take.
            options: Options of `Client`.
        """
        super().__init__(transport, cache=None, **options)
        self._discovery_timeout_s = start_s * DISCOVERY_SHARE

    async def _build_session(self, exit_stack: AsyncExitStack) -> ClientSession:
        session = await super()._build_session(exit_stack)
        dispatcher = cast("Any", session)._dispatcher  # noqa: SLF001  the session validates its answers
        send_raw_request = dispatcher.send_raw_request

        async def send_and_filter(
            method: str, params: Any = None, options: Mapping[str, Any] | None = None, **more: Any
        ) -> dict[str, Any]:
            is_first = method == "server/discover"
            if is_first:
                options = {**(options or {}), "timeout": self._discovery_timeout_s}
            try:
                answer = await send_raw_request(method, params, options, **more)
            except MCPError:
                if is_first and (outage := WIRE_STATUS.get(WireStatus()).error) is not None:
                    raise outage from None  # the SDK takes any `MCPError` here as a sign of an older server
                raise
            return drop_invalid_entries(method, session.protocol_version or "", answer)

        dispatcher.send_raw_request = send_and_filter
        # `OutputCheck` validates results with bounded work; the SDK would also list the tools to find a schema.
        cast("Any", session).validate_tool_result = _accept_result
        return session


async def _accept_result(_name: str, _result: object) -> None:
    """Accept a result without a check."""
