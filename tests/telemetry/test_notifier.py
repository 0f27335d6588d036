"""The notifier posts each alert once when it begins and once when it ends, whatever happens to its process."""

from __future__ import annotations

import json

import anyio
import pytest

from agentfsm import MisuseError, StopReason
from agentfsm.stores import MemoryStore
from agentfsm.telemetry import notifier as n
from agentfsm.telemetry.notifier import AlertNotifier
from agentfsm.telemetry.totals import Totals
from tests.support.recorded_tasks import record_task

pytestmark = pytest.mark.anyio
BEGIN = 1_790_000_100.0


class SetClock:
    """A clock that is set."""

    at = BEGIN

    def now(self):
        return self.at


class Receiver:
    """Stands for the program at the address."""

    def __init__(self, monkeypatch):
        self.got, self.accepts, self.before = [], True, None
        receiver = self

        async def send(_notifier, messages):
            if receiver.before is not None:
                await receiver.before()
            if not receiver.accepts:
                return 0
            receiver.got += [f"{each['status']} {each['alert']}" for each in messages]
            return len(messages)

        monkeypatch.setattr(AlertNotifier, "send", send)


@pytest.fixture
def receiver(monkeypatch):
    return Receiver(monkeypatch)


async def fail_tasks(store, clock):
    """Record tasks of the last 40 minutes, half of which break, and count them."""
    for number in range(40):
        made = record_task(number, clock.at - 2_400 + number * 60, failed=StopReason.TIMEOUT if number % 2 else None)
        _, lease = await store.create(made.header, events=made.events)
        await store.release(lease).wait()
    await Totals(store).catch_up()


def build(store):
    return AlertNotifier(store=store, url="https://alerts.example.org/hook")


async def test_each_begins_and_ends_once(receiver):
    """Over restarts, and with two processes; nothing is said while an alert goes on."""
    clock = SetClock()
    store = MemoryStore(clock=clock)
    await Totals(store).catch_up()
    assert await build(store).check() == 0
    clock.at += 1
    await fail_tasks(store, clock)
    assert await build(store).check() == 0  # evaluated a moment ago
    for _ in range(4):
        clock.at += n.INTERVAL_S
        async with anyio.create_task_group() as tasks:
            for _ in range(2):
                tasks.start_soon(build(store).check)
    assert sorted(receiver.got) == ["firing error_rate", "firing task_success_rate"]
    for _ in range(20):
        clock.at += n.INTERVAL_S
        await build(store).check()
    assert sorted(receiver.got[2:]) == ["resolved error_rate", "resolved task_success_rate"]


async def test_a_receiver_that_is_away_gets_them_later(receiver):
    """They wait in the store, in order, also over the end of the process that could not send them."""
    clock = SetClock()
    store = MemoryStore(clock=clock)
    await fail_tasks(store, clock)
    receiver.accepts = False
    assert await build(store).check() == 0
    clock.at += 30 * n.INTERVAL_S
    receiver.accepts = True
    assert await build(store).check() == 4
    assert [each.partition(" ")[0] for each in receiver.got] == ["firing", "firing", "resolved", "resolved"]
    clock.at += n.INTERVAL_S
    assert await build(store).check() == 0


async def test_a_slow_receiver_gets_each_once(receiver, monkeypatch):
    """Another process stays away while messages are sent, however long that takes."""
    clock = SetClock()
    store = MemoryStore(clock=clock)
    await fail_tasks(store, clock)
    receiver.accepts = False
    await build(store).check()
    clock.at += 30 * n.INTERVAL_S
    receiver.accepts, send = True, AlertNotifier.send

    async def send_slowly(notifier, messages):
        sent = await send(notifier, messages)
        clock.at += n.INTERVAL_S / 2
        assert await build(store).check() == 0
        return sent

    monkeypatch.setattr(AlertNotifier, "send", send_slowly)
    assert await build(store).check() == 4
    assert len(receiver.got) == 4


async def test_nothing_is_judged_without_totals(receiver, caplog):
    """A store whose runs are not all counted yet says nothing of them."""
    assert await build(MemoryStore()).check() == 0
    assert "no totals yet" in caplog.text


def test_the_address_is_public():
    """As for all that is sent: plain HTTP and private networks need a word of the user."""
    with pytest.raises(MisuseError, match="plain HTTP"):
        AlertNotifier(store=MemoryStore(), url="http://alerts.example.org/hook")
    assert AlertNotifier(store=MemoryStore(), url="http://10.0.0.5/hook", allow_private=True)


@pytest.mark.parametrize("form", ["json", "slack"])
async def test_what_is_posted(form, caplog):
    """A text for people, which is all that Slack takes, and the fields; a refusal is logged."""
    received = []

    async def answer(stream):
        async with stream:
            request = b""
            while not request.endswith(b"}"):
                request += await stream.receive()
            received.append(json.loads(request.partition(b"\r\n\r\n")[2]))
            status = b"200 OK" if len(received) < 2 else b"500 Away"
            await stream.send(b"HTTP/1.1 " + status + b"\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")

    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, answer)
        port = listener.extra(anyio.abc.SocketAttribute.local_port)  # noqa: S610  not Django's
        notifier = AlertNotifier(store=MemoryStore(), url=f"http://127.0.0.1:{port}/hook", form=form)
        message = {"id": "x@1", "alert": "error_rate", "status": "firing", "labels": {"agent": "shop"}, "value": 0.5}
        assert await notifier.send([message, message]) == 1
        tasks.cancel_scope.cancel()
    text = "[firing] error_rate of shop: 0.5, above 0.05. "
    assert received[0]["text"].startswith(text)
    assert received[0].keys() == ({"text"} if form == "slack" else {"text", *message})
    assert "accepted 1 of 2 messages: HTTP 500" in caplog.text
