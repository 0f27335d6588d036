"""Short-lived tokens for the event stream of one run: `EventSource` in browsers sends no header with a key.

A token is a record of the store, under its hash, so every server of the store knows it. It has the rights of the caller
for whom it was created, for one run, and ends with its record. A stream that was opened with it ends then, too.
"""

from __future__ import annotations

import secrets
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final

import attrs

from agentfsm.serve.access import Caller
from agentfsm.serve.run_documents import JSONDocument, locate_run

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from agentfsm.serve.bodies import StreamTokenBody
    from agentfsm.serve.gateway import Gateway

STREAM_TOKENS: Final = "stream-tokens"
# Random bytes of a token.
_BYTES: Final = 32


async def create_stream_token(gateway: Gateway, request: Request, caller: Caller, body: StreamTokenBody) -> Response:
    """Create a token by which a page reads the events of a run with `EventSource`, without a key.

    It is a part of the address, `url`, for `ttl_s` seconds, and gives no right to anything else.
    """
    header = await gateway.open_run(request.path_params["run_id"], caller)
    token = secrets.token_urlsafe(_BYTES)
    expires_at = await gateway.runs.store.now() + body.ttl_s
    rights = attrs.asdict(caller) | {"scopes": sorted(caller.scopes)}
    value: dict[str, Any] = {"run": header.id, "caller": rights}
    key = sha256(token.encode()).hexdigest()
    await gateway.runs.store.write_record(STREAM_TOKENS, key, value, revision=0, expires_at=expires_at)
    url = f"{locate_run(request.scope, header.id)}/events?token={token}"
    headers = {"cache-control": "no-store"}
    return JSONDocument({"token": token, "url": url, "expires_at": expires_at}, 201, headers)


async def read_stream_token(gateway: Gateway, request: Request) -> Caller | None:
    """Return the caller for whom the token of a request was created; None if it is unknown, old, or of another run."""
    key = sha256(request.query_params["token"].encode()).hexdigest()
    record = await gateway.runs.store.read_record(STREAM_TOKENS, key)
    value: Any = {} if record is None else record.value
    return Caller(**value["caller"]) if value.get("run") == request.path_params["run_id"] else None
