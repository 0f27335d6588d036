"""An HTTP client that reaches the hosts of a list only, for tools that send requests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any, Final

import httpx2

from agentfsm._lib.public_network import AllowedHostsTransport, to_hosts
from agentfsm.core.errors import ToolError
from agentfsm.core.validation import COUNT, SECONDS

# Entry of a list of hosts that stands for all hosts with public addresses.
ANY_HOST: Final = "*"
# Bytes of a response: text for a model, which reads some thousand tokens of it.
MAX_BYTES: Final = 1_000_000
# Seconds to connect, to send a part of a request, or to wait for a part of a response.
TIMEOUT_S: Final = 30.0


class EgressError(ToolError):
    """A request was refused: its host or address is not allowed, or its response is too large or compressed."""


def open_http_client(
    hosts: Iterable[str],
    *,
    headers: Mapping[str, str] | None = None,
    auth: httpx2.Auth | tuple[str, str] | None = None,
    max_bytes: int = MAX_BYTES,
    timeout_s: float = TIMEOUT_S,
) -> httpx2.AsyncClient:
    """Open an HTTP client for a tool that sends requests to URLs which a model may have written.

        async with open_http_client(["api.example.org"]) as client:
            response = await client.get(url)

    A request to a host that is not in the list fails with an `EgressError`, and so does one to a host whose address is
    private. The address is checked at the connection, so a name that changes its address leads nowhere else. Redirects
    are not followed unless a request asks for it (`follow_redirects=True`); each of their requests is checked too, but
    carries `headers` to every host of the list. A proxy from the environment is not used, since it would resolve
    names itself. A response that is compressed, although this was not asked for, is refused, because its size is not
    known.

    Args:
        hosts: Hosts that may be reached: "api.example.org", "*.example.org" for the names below it, or with a port,
            "example.org:8443"; without one, ports 80 and 443. A private address is allowed if the list has the address
            itself, "10.0.0.5:8080". "*" stands for every host with a public address.
        headers: Headers of each request.
        auth: User and password, or an `httpx2.Auth`.
        max_bytes: Maximum size of the body of a response, bytes, 1 or more.
        timeout_s: Seconds to connect, to send a part of a request, or to wait for a part of a response, above 0. The
            whole request is bounded by the timeout of the tool's call.

    Raises:
        MisuseError: if an argument is invalid.
    """
    COUNT.check("open_http_client", "max_bytes", max_bytes)
    SECONDS.check("open_http_client", "timeout_s", timeout_s)
    return httpx2.AsyncClient(
        transport=_SizedTransport(to_allowed_hosts(hosts, "an HTTP client"), max_bytes),
        headers={"accept-encoding": "identity", **(headers or {})},
        auth=auth,
        timeout=timeout_s,
    )


def to_allowed_hosts(hosts: Iterable[str], role: str) -> tuple[str, ...]:
    """Return the entries of a list of hosts, which may have the entry "*".

    Raises:
        MisuseError: if it is not a sequence of hosts.
    """
    given = hosts if isinstance(hosts, str) or not isinstance(hosts, Iterable) else tuple(hosts)
    if isinstance(given, tuple) and ANY_HOST in given:
        return (*to_hosts([each for each in given if each != ANY_HOST], role), ANY_HOST)
    return to_hosts(given, role)


class _SizedTransport(AllowedHostsTransport):
    """Transport to allowed hosts whose responses have a maximum size."""

    def __init__(self, hosts: tuple[str, ...], max_bytes: int) -> None:
        super().__init__(hosts, error=EgressError)
        self._max_bytes = max_bytes

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        response = await super().handle_async_request(request)
        response.stream = _SizedBody(response, self._max_bytes)
        return response


class _SizedBody(httpx2.AsyncByteStream):
    """Body of a response, with a maximum size."""

    def __init__(self, response: httpx2.Response, max_bytes: int) -> None:
        self._stream: Any = response.stream
        self._encoding = response.headers.get("content-encoding", "identity").lower()
        self._max_bytes = max_bytes

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size, refusal = 0, ""
        try:
            async for chunk in self._stream:
                size += len(chunk)
                refusal = refusal or self._find_refusal(size)
                if not refusal:
                    yield chunk
                    continue
                # Iterating goes on, so that the generators below end: by an error, as their connection is closed.
                await self._stream.aclose()
        except httpx2.TransportError:
            if not refusal:
                raise
        if refusal:
            raise EgressError(refusal)

    def _find_refusal(self, size: int) -> str:
        """Return the reason to refuse the body after that many bytes; empty for none."""
        if self._encoding != "identity":
            return (
                f"the response is compressed ({self._encoding}), although uncompressed data was requested, so its size "
                "is unknown"
            )
        return f"the response has more than {self._max_bytes:,} bytes; ask for less" if size > self._max_bytes else ""

    async def aclose(self) -> None:
        await self._stream.aclose()
