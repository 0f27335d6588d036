"""Webhooks, by the conventions of Standard Webhooks: events of other systems start runs, and ends of runs are sent out.

The signature covers id, time and content, so that nothing can be changed, and nothing sent again later or twice.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
import logging
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Final

import anyio
import attrs
import httpx2
from starlette.responses import JSONResponse
from starlette.routing import Route

from agentfsm._lib.public_network import PublicAddressTransport, check_url
from agentfsm.agents.admission import admit_answer
from agentfsm.core.errors import AgentError, LeaseLostError, MisuseError
from agentfsm.core.inbox import InputKind
from agentfsm.core.labels import Label
from agentfsm.core.messages import TextPart
from agentfsm.core.run_ids import build_key_id
from agentfsm.core.text_safety import fence_untrusted
from agentfsm.core.validation import NAME
from agentfsm.core.value import Value
from agentfsm.serve.access import Caller
from agentfsm.serve.endpoints import Endpoint, EndpointHandler, RouteGroup, read_content
from agentfsm.serve.run_control import send_text
from agentfsm.serve.run_documents import build_past_document

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import BaseRoute

    from agentfsm.ports.followers import Delivery
    from agentfsm.serve.access import Authenticate
    from agentfsm.serve.gateway import Gateway

_log = logging.getLogger("agentfsm.serve")

# Seconds by which the time of a delivery may differ from the server's clock.
TOLERANCE_S: Final = 300
SECRET_PREFIX: Final = "whsec_"  # noqa: S105  the beginning of each secret
# Bytes of a secret, at least.
MIN_SECRET_BYTES: Final = 24
# Statuses of a run that are sent, unless others are given.
STATUSES: Final = ("done", "failed", "waiting", "paused")
# Attempts to send one event: with the waits between them about a quarter of an hour.
ATTEMPTS: Final = 10
MAX_BACKOFF_S: Final = 300.0
TIMEOUT_S: Final = 15.0
_CREDENTIAL: Final = (
    "the delivery is not signed with the secret of this webhook, or not of the last 5 minutes: check the address, the "
    "secret, and the clock of the sender"
)
# Seconds after which another server sends the events of one that was killed. A live one renews its lease.
LEASE_S: Final = 20.0
# Statuses of the receiver after which the same event may be accepted later; others from 400 to 499 are final.
_RETRIED: Final = frozenset({408, 409, 425, 429})


def _decode_secret(secret: str) -> bytes:
    """Return the key of a secret.

    Raises:
        MisuseError: when it is not one.
    """
    try:
        key = base64.b64decode(secret.removeprefix(SECRET_PREFIX), validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if len(key) < MIN_SECRET_BYTES:
        raise MisuseError(
            f"a webhook's secret is {SECRET_PREFIX} and the base64 of {MIN_SECRET_BYTES} bytes or more: print one with "
            f"`python -c \"import base64, os; print('{SECRET_PREFIX}' + base64.b64encode(os.urandom(32)).decode())\"`"
        )
    return key


def _check_secret(_hook: object, _attribute: object, secret: str) -> None:
    _decode_secret(secret)


def _check_statuses(_hook: object, _attribute: object, statuses: tuple[str, ...]) -> None:
    if isinstance(statuses, str) or not statuses or not set(statuses) <= set(STATUSES):
        raise MisuseError(f"OutgoingWebhook(statuses={statuses!r}): give some of {', '.join(map(repr, STATUSES))}")


def sign(secret: str, delivery_id: str, timestamp: int, content: bytes) -> str:
    """Return the value of `webhook-signature` for a delivery."""
    signed = b".".join((delivery_id.encode(), str(timestamp).encode(), content))
    digest = hmac.new(_decode_secret(secret), signed, hashlib.sha256).digest()
    return f"v1,{base64.b64encode(digest).decode()}"


@attrs.frozen(kw_only=True)
class IncomingWebhook(Value):
    """Webhook of another system: `POST /v1/hooks/NAME` starts a run, `POST /v1/hooks/NAME/RUN` sends a run input.

    Raises:
        MisuseError: when the secret is not one.
    """

    name: str = attrs.field(validator=NAME)
    """Name in the path."""

    secret: str = attrs.field(validator=_check_secret, repr=False)
    """Secret that signs the deliveries: "whsec_" and base64."""

    user: str = attrs.field(validator=NAME)
    """User of the runs."""

    tenant: str | None = None
    """Tenant of the user."""

    agent: str | None = None
    """Name of the agent; None if the server has one."""

    prompt: str = "Handle this event."
    """Task of each run. The content of the delivery follows it, marked as untrusted data."""

    def verify(self, delivery_id: str, timestamp: str, signatures: str, content: bytes, now: float) -> bool:
        """Return whether a delivery has a valid signature and a time near `now`, in seconds since 1970."""
        if not (delivery_id and timestamp.isascii() and timestamp.isdigit() and len(timestamp) <= len("99999999999")):
            return False
        if abs(now - int(timestamp)) > TOLERANCE_S:
            return False
        wanted = sign(self.secret, delivery_id, int(timestamp), content).encode()
        given = signatures.encode("utf-8", "replace").split(b" ")
        return any(hmac.compare_digest(each, wanted) for each in given)


@attrs.frozen(kw_only=True)
class OutgoingWebhook(Value):
    """Receiver of the runs of one tenant that were released, paused or ended.

    Raises:
        MisuseError: when the secret is not one, or the URL is not allowed.
    """

    name: str = attrs.field(validator=NAME)
    """Name of the receiver; the store keeps the position under it."""

    url: str
    """Address of the receiver."""

    secret: str = attrs.field(validator=_check_secret, repr=False)
    """Secret that signs the deliveries."""

    tenant: str | None = None
    """Tenant whose runs are sent. None: runs without a tenant."""

    statuses: tuple[str, ...] = attrs.field(default=STATUSES, validator=_check_statuses)
    """Statuses of a run that are sent: "done", "failed", "waiting" and "paused"."""

    allow_private: bool = False
    """Whether the address may be in a private network."""

    def __attrs_post_init__(self) -> None:
        check_url(self.url, allow_private=self.allow_private, role="the receiver of a webhook")


# In.


@attrs.frozen(eq=False)
class _IncomingHooks:
    hooks: tuple[IncomingWebhook, ...]

    def find(self, request: Request) -> IncomingWebhook | None:
        return next((each for each in self.hooks if each.name == request.path_params["name"]), None)

    async def authenticate(self, request: Request) -> Caller | None:
        """Return the user of a webhook, whose secret is the credential; None without a valid signature."""
        hook = self.find(request)
        content = await read_content(request)
        request.state.content = content
        headers = [request.headers.get(f"webhook-{name}", "") for name in ("id", "timestamp", "signature")]
        if hook is None or not hook.verify(headers[0], headers[1], headers[2], content, time.time()):
            return None
        return Caller(user=hook.user, tenant=hook.tenant, scopes={"run"})

    async def receive(self, gateway: Gateway, request: Request, caller: Caller, _body: object) -> Response:
        """Start a run for a signed delivery of another system, once for each `webhook-id`."""
        hook = self.find(request)
        assert hook is not None  # noqa: S101  it is authenticated
        text = admit_answer(request.state.content.decode("utf-8", "replace"), hook.user)  # before it gets its marks
        prompt = (TextPart(text=hook.prompt), TextPart(text=fence_untrusted(text)))
        started, is_new = await gateway.start_run(
            caller,
            prompt,
            agent=hook.agent,
            metadata={"webhook": hook.name},
            key=request.headers["webhook-id"],
            hook=hook.name,
            labels=[Label.UNTRUSTED],
        )
        return JSONResponse({"run_id": started.id, "new": is_new}, 202)

    async def receive_input(self, gateway: Gateway, request: Request, caller: Caller, _body: object) -> Response:
        """Send a run a signed delivery as input of the kind webhook, once for each `webhook-id`."""
        run_id = request.path_params["run_id"]
        text = request.state.content.decode("utf-8", "replace")
        delivery, hook = request.headers["webhook-id"], request.path_params["name"]
        key = build_key_id(delivery, tenant=caller.tenant, user=caller.user, hook=hook)
        await send_text(gateway, caller, run_id, text, kind=InputKind.WEBHOOK, key=key)
        return JSONResponse({"run_id": run_id}, 202)

    def build_routes(self, gateway: Gateway, _auth: Authenticate) -> Sequence[BaseRoute]:
        """Return the routes, whose credential is the signature and not a key."""
        endpoints = (
            Endpoint(method="POST", path="/v1/hooks/{name}", handler=self.receive, scope="run", credential=_CREDENTIAL),
            Endpoint(
                method="POST",
                path="/v1/hooks/{name}/{run_id}",
                handler=self.receive_input,
                scope="run",
                credential=_CREDENTIAL,
            ),
        )
        return [
            Route(
                each.path,
                EndpointHandler(gateway=gateway, auth=self.authenticate, endpoint=each, rechecks=False),
                methods=[each.method],
            )
            for each in endpoints
        ]


# Out.


class _ReceiverError(AgentError):
    """The address of a receiver is not allowed."""


@attrs.define(eq=False, repr=False)
class _Sender:
    """Sends the changes of runs to one receiver, in order, each at least once."""

    hook: OutgoingWebhook
    dead_letters: Path | None
    """File to which an event is added that was given up, as a line of JSON. None: only the log has it."""

    async def run(self, gateway: Gateway) -> None:
        """Send until cancelled."""
        transport = (
            httpx2.AsyncHTTPTransport()
            if self.hook.allow_private
            else PublicAddressTransport(self.hook.url, error=_ReceiverError)
        )
        async with httpx2.AsyncClient(transport=transport, timeout=TIMEOUT_S, follow_redirects=False) as client:
            while True:
                try:
                    await self._follow(gateway, client)
                except LeaseLostError:  # another server sends
                    _log.info("webhook %s: another server sends its events", self.hook.name)
                except AgentError as error:
                    _log.warning("webhook %s: %s", self.hook.name, error)
                await anyio.sleep(1.0)

    async def _follow(self, gateway: Gateway, client: httpx2.AsyncClient) -> None:
        name = f"webhook:{self.hook.name}"
        async with gateway.runs.store.follow(name, start="now", lease_s=LEASE_S) as follower:
            async for delivery in follower:
                async with delivery.hold():
                    await self._deliver(gateway, client, delivery)
                await delivery.done()

    async def _deliver(self, gateway: Gateway, client: httpx2.AsyncClient, delivery: Delivery) -> None:
        header = delivery.header
        if header.tenant != self.hook.tenant or header.parent is not None or header.agent not in gateway.agents:
            return
        run = await gateway.runs.load(delivery.run_id, at=delivery.version)
        document = build_past_document(run)
        if document["status"] not in self.hook.statuses or run.awaits_tasks:  # it goes on by itself
            return
        event = {"type": f"run.{document['status']}", "timestamp": run.updated_at, "data": document}
        content = json.dumps(event).encode()
        await self._send(client, f"{delivery.run_id}:{delivery.version}", content)

    async def _send(self, client: httpx2.AsyncClient, delivery_id: str, content: bytes) -> None:
        """Send until the receiver accepts the event, or refuses it, or there were too many attempts."""
        wait_s, flaw = 1.0, ""
        for attempt in range(1, ATTEMPTS + 1):
            status, flaw = await self._post(client, delivery_id, content)
            if not flaw:
                return
            if 400 <= status < 500 and status not in _RETRIED:
                break
            _log.warning("webhook %s: attempt %d for %s: %s", self.hook.name, attempt, delivery_id, flaw)
            if attempt < ATTEMPTS:
                await anyio.sleep(wait_s)
                wait_s = min(2 * wait_s, MAX_BACKOFF_S)
        _log.error("webhook %s: %s was given up: %s", self.hook.name, delivery_id, flaw)
        if self.dead_letters is not None:
            await self._note_dead_letter(self.dead_letters, delivery_id, flaw)

    async def _note_dead_letter(self, path: Path, delivery_id: str, flaw: str) -> None:
        entry = {"webhook": self.hook.name, "id": delivery_id, "error": flaw, "at": time.time()}
        try:
            async with await anyio.open_file(path, "a", encoding="utf-8") as file:
                await file.write(json.dumps(entry) + "\n")
        except OSError as error:  # the log has it already
            _log.error("webhook %s: %s cannot be written: %s", self.hook.name, path, error.strerror)

    async def _post(self, client: httpx2.AsyncClient, delivery_id: str, content: bytes) -> tuple[int, str]:
        """Send once. Return the status, 0 if there was no answer, and the error, "" if the event was accepted."""
        timestamp = int(time.time())
        headers = {
            "content-type": "application/json",
            "webhook-id": delivery_id,
            "webhook-timestamp": str(timestamp),
            "webhook-signature": sign(self.hook.secret, delivery_id, timestamp, content),
        }
        try:
            async with client.stream("POST", self.hook.url, content=content, headers=headers) as response:
                return response.status_code, "" if response.is_success else f"HTTP {response.status_code}"
        except (httpx2.HTTPError, _ReceiverError) as error:
            return 0, f"{type(error).__name__}: {error}"


def webhooks(
    hooks: Iterable[IncomingWebhook | OutgoingWebhook], *, dead_letters: str | Path | None = None
) -> RouteGroup:
    """Return the webhooks for `serve(groups=[webhooks([...])])`.

    Args:
        hooks: Webhooks of other systems, and receivers of the runs' events.
        dead_letters: File to which each event is added that no receiver accepted, as a line of JSON. None: only the log
            has them.

    Raises:
        MisuseError: when two have the same name.
    """
    given = tuple(hooks)
    if len({(type(each), each.name) for each in given}) < len(given):
        raise MisuseError("two webhooks have the same name: rename one")
    incoming = _IncomingHooks(tuple(each for each in given if isinstance(each, IncomingWebhook)))
    file = None if dead_letters is None else Path(dead_letters)
    senders = [_Sender(each, file) for each in given if isinstance(each, OutgoingWebhook)]

    async def send(gateway: Gateway) -> None:
        async with anyio.create_task_group() as tasks:
            for each in senders:
                tasks.start_soon(each.run, gateway)

    return RouteGroup(name="webhooks", build_routes=incoming.build_routes, background=send if senders else None)
