"""The SDK's client, with what it decides by itself and leaves to nobody: this is all of it that is reached into."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any, Final, cast

from mcp import Client, MCPError
from mcp.client.session import ClientSession

from agentfsm.mcp.connection.lenient_parsing import drop_invalid_entries
from agentfsm.mcp.connection.request_errors import WIRE_STATUS, WireStatus

# How much of the time for the start the first question has, by which a server of today's protocol is told from an
# older one. Many of those do not answer what they do not know: they need the rest. Of 30 s it is what the SDK waits.
DISCOVERY_SHARE: Final = 1 / 3


class LenientClient(Client):
    """A client that sees of each answer only what fits, and waits for the first one as long as the start may take.

    The SDK waits 10 s for it, whatever is wanted: a server that is slower is taken for an older one and asked what it
    may not know, and one that will never answer it is given up where the start has less time than that.
    """

    def __init__(self, transport: Any, *, start_s: float, **options: Any) -> None:
        """Make a client.

        Args:
            transport: Opens the streams.
            start_s: Seconds until the handshake has to be done.
            options: Those of the client.
        """
        super().__init__(transport, cache=None, **options)
        self._discovery_timeout_s = start_s * DISCOVERY_SHARE

    async def _build_session(self, exit_stack: AsyncExitStack) -> ClientSession:
        session = await super()._build_session(exit_stack)
        dispatcher = cast("Any", session)._dispatcher  # noqa: SLF001  what it returns, the session holds to the protocol
        ask = dispatcher.send_raw_request

        async def asked(
            method: str, params: Any = None, options: Mapping[str, Any] | None = None, **more: Any
        ) -> dict[str, Any]:
            is_first = method == "server/discover"
            if is_first:
                options = {**(options or {}), "timeout": self._discovery_timeout_s}
            try:
                answer = await ask(method, params, options, **more)
            except MCPError:
                if is_first and (outage := WIRE_STATUS.get(WireStatus()).error) is not None:
                    raise outage from None  # to the SDK any `MCPError` here is the sign of an older server
                raise
            return drop_invalid_entries(method, session.protocol_version or "", answer)

        dispatcher.send_raw_request = asked
        # Results are checked by `outputs`, within bounds; and a tool that was not listed is not listed for that.
        cast("Any", session).validate_tool_result = _accept_result
        return session


async def _accept_result(_name: str, _result: object) -> None:
    """Take a result as it is."""
