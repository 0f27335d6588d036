"""Alerts for those without Prometheus: evaluates the table over the totals of a store, and posts what begins and ends.

Any number of processes may do so. Each evaluation is one write of a record, which decides who has made it, and holds
what fires and what is still to be sent. So a restart repeats nothing, and a message that a process could not send, or
died with, is sent by the next evaluation: each at least once, with an id by which a receiver finds repetitions.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import anyio
import attrs
import httpx2

from agentfsm._lib.public_network import PublicAddressTransport, check_url
from agentfsm.core.errors import AgentError, ConflictError
from agentfsm.telemetry.alerts import ALERTS, INTERVAL_S, Firing, read_firings
from agentfsm.telemetry.totals import HOUR_S, can_keep_totals, read_status

if TYPE_CHECKING:
    from agentfsm.ports.store import Store

MessageForm: TypeAlias = Literal["json", "slack"]
"""Body of a message: "json" has fields of the alert beside its `text`; "slack" is the `text` alone, which Slack and
others take.
"""

KIND: Final = "alerts"
KEY: Final = "notified"
TIMEOUT_S: Final = 15.0
# Messages that wait for a receiver that is away; the oldest are given up.
MAX_UNSENT: Final = 200
# Seconds that are evaluated anew each time: an alert that fires at the end of them fires now.
_REPLAYED_S: Final = 2 * HOUR_S

_log = logging.getLogger("agentfsm.telemetry")


class _ReceiverError(AgentError):
    """The address of the receiver is not allowed."""


@attrs.define(eq=False, repr=False, kw_only=True)
class AlertNotifier:
    """Posts alerts of a store to an address, once when they begin and once when they end.

    Raises:
        MisuseError: when the URL is not allowed.
    """

    store: Store
    """The store. It must keep totals."""

    url: str
    """Address of the receiver."""

    form: MessageForm = "json"
    """Body of a message."""

    allow_private: bool = False
    """Whether the address may be in a private network."""

    def __attrs_post_init__(self) -> None:
        check_url(self.url, allow_private=self.allow_private, role="the receiver of alerts")

    async def follow(self) -> None:
        """Evaluate the alerts every 5 minutes, until cancelled."""
        while True:
            try:
                await self.check()
            except Exception as error:  # noqa: BLE001  alerts are no reason to stop the server
                is_known = isinstance(error, AgentError)
                _log.warning("the alerts are evaluated later: %s", error, exc_info=None if is_known else error)
            await anyio.sleep(INTERVAL_S)

    async def check(self) -> int:
        """Evaluate the alerts, unless a process has done so within 5 minutes. Return how many messages were sent."""
        status = await read_status(self.store) if can_keep_totals(self.store) else None
        if status is None or not status.is_whole:
            _log.warning("the alerts are not evaluated: the store has no totals yet")
            return 0
        record, now = await self.store.read_record(KIND, KEY), await self.store.now()
        known: dict[str, Any] = record.value if record is not None and isinstance(record.value, dict) else {}
        if now < known.get("at", 0.0) + 0.9 * INTERVAL_S:  # clocks and sleeps are not exact
            return 0
        found = await read_firings(self.store, now - _REPLAYED_S)
        firing = {_name(each): each for each in found if each.until is None}
        before = known.get("firing", {})
        begun = [_describe(each, "firing", now) for name, each in firing.items() if name not in before]
        ended = [message | {"status": "resolved", "at": now} for name, message in before.items() if name not in firing]
        kept = {name: before.get(name) or _describe(each, "firing", now) for name, each in firing.items()}
        unsent = [*known.get("unsent", []), *begun, *ended][-MAX_UNSENT:]
        value: dict[str, Any] = {"at": now, "firing": kept, "unsent": unsent}
        try:
            record = await self.store.write_record(KIND, KEY, value, revision=0 if record is None else record.revision)
            sent = 0
            while sent < len(unsent) and await self.send(unsent[sent : sent + 1]):
                sent += 1
                # The time keeps other processes away meanwhile, however long the receiver takes for each.
                value = {"at": await self.store.now(), "firing": kept, "unsent": unsent[sent:]}
                record = await self.store.write_record(KIND, KEY, value, revision=record.revision)
        except ConflictError:  # another process has evaluated them
            return 0
        return sent

    async def send(self, messages: list[dict[str, Any]]) -> int:
        """Send messages in order. Return how many the receiver has accepted, up to the first that it has not."""
        transport = (
            httpx2.AsyncHTTPTransport()
            if self.allow_private
            else PublicAddressTransport(self.url, error=_ReceiverError)
        )
        async with httpx2.AsyncClient(transport=transport, timeout=TIMEOUT_S, follow_redirects=False) as client:
            for number, each in enumerate(messages):
                body = {"text": _format(each)} | ({} if self.form == "slack" else each)
                try:
                    async with client.stream("POST", self.url, json=body) as response:
                        flaw = "" if response.is_success else f"HTTP {response.status_code}"
                except (httpx2.HTTPError, _ReceiverError) as error:
                    flaw = f"{type(error).__name__}: {error}"
                if flaw:
                    _log.warning("the receiver of alerts accepted %d of %d messages: %s", number, len(messages), flaw)
                    return number
        return len(messages)


def build_test_message(now: float) -> dict[str, Any]:
    """Return a message by which a person sees that messages arrive."""
    return {"id": f"test@{now:.0f}", "alert": "test", "status": "test", "labels": {}, "value": 0.0, "at": now}


def _name(firing: Firing) -> str:
    return " ".join([firing.alert, *firing.labels.values()])


def _describe(firing: Firing, status: str, now: float) -> dict[str, Any]:
    return {
        "id": f"{_name(firing)}@{now:.0f}",
        "alert": firing.alert,
        "status": status,
        "labels": dict(firing.labels),
        "value": firing.worst,
        "at": now,
    }


def _format(message: dict[str, Any]) -> str:
    """Return a message as a line for people."""
    if message["alert"] not in ALERTS:
        return "agentfsm: alerts of this store arrive here"
    alert, of = ALERTS[message["alert"]], " ".join(message["labels"].values()) or "all agents"
    bound = "below" if alert.is_minimum else "above"
    now = f"{message['value']:,.4g}, {bound} {alert.threshold:,.12g}" if message["status"] == "firing" else "it is over"
    return f"[{message['status']}] {alert.name} of {of}: {now}. {alert.text}"
