"""Whether what we read in recordings is what the vendors' own packages read in them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from urllib.parse import urlsplit

import attrs
import httpx2

from agentfsm import ModelError, TextPart, UserMessage
from agentfsm.models.sdk import SDKModel
from agentfsm.models.wire import StreamAssembler
from agentfsm.ports import CallChunk, Chunk, FinishChunk, Reply, Request, TextChunk
from tests.support.cassettes import OK, Recording, Wire, recordings
from tests.support.sdk_readings import BASE_URL, Reading

REQUEST = Request(instructions="", messages=(UserMessage(parts=(TextPart(text="x"),)),))
# How the network may cut a stream, bytes. Those of a few bytes are tried on a part of the streams.
PORTIONS = (1 << 20, 1_000, 61)

# How much of a stream has come when it dies.
SHARES = (0.0, 0.05, 0.3, 0.5, 0.7, 0.9, 0.97, 0.99)
# What may stand where something else belongs.
ODD = (None, True, -7, 1.5, 10**30, "", "odd", "\ud800", [], [None], [[]], {}, {"odd": []})


@attrs.define
class Tally:
    """How many recordings were compared, and which were not alike."""

    compared: Counter[str] = attrs.field(factory=Counter)
    # By source.
    different: list[tuple[str, Reading, Reading]] = attrs.field(factory=list)
    # Name, theirs, ours.

    def check(self, *, at_least: int) -> None:
        """Fail unless all were alike and enough were compared; print how many were."""
        total = sum(self.compared.values())
        print(f"{total} recordings compared: {dict(self.compared)}")  # noqa: T201  shown with -s, and where a test fails
        assert self.different == []
        assert total >= at_least


def compare(
    played: Iterable[Recording],
    theirs: Callable[[Recording], Reading],
    *mine: Callable[[Recording], Reading],
) -> Tally:
    """Read each recording as the vendor does and in each of our ways, and compare."""
    tally = Tally()
    for recording in played:
        expected = theirs(recording)
        tally.compared[recording.source] += 1
        for read in mine:
            if (found := read(recording)) != expected:
                tally.different.append((recording.name, expected, found))
    return tally


def fed(assembly: StreamAssembler, body: bytes, portion: int) -> Reply:
    """Feed a stream in portions of so many bytes; what it tells on the way adds up to the reply."""
    chunks: list[Chunk] = []
    for start in range(0, len(body), portion):
        chunks += assembly.feed(body[start : start + portion])
        if assembly.is_done:
            break  # as an adapter does
    assert assembly.is_begun
    assert assembly.is_complete
    assert assembly.is_done
    reply = assembly.build_reply()
    assert "".join([chunk.text for chunk in chunks if isinstance(chunk, TextChunk)]) == reply.text
    assert [chunk.reason for chunk in chunks if isinstance(chunk, FinishChunk)] == [reply.finish_reason]
    told = [chunk for chunk in chunks if isinstance(chunk, CallChunk)]
    indexes = sorted({chunk.index for chunk in told})
    names = ["".join([chunk.name for chunk in told if chunk.index == index]) for index in indexes]
    texts = ["".join([chunk.arguments for chunk in told if chunk.index == index]) for index in indexes]
    assert names == [call.name for call in reply.calls]
    assert [text or "{}" for text in texts] == [call.arguments or "{}" for call in reply.calls]
    return reply


def check_dead(assembly: Callable[[], StreamAssembler], streams: Iterable[Recording]) -> int:
    """Fail where a stream that dies is taken for whole though it says less than it would have; return how many died."""
    died = 0
    for recording in streams:
        whole = fed(assembly(), recording.body, len(recording.body))
        for share in SHARES:
            cut = assembly()
            cut.feed(recording.body[: int(len(recording.body) * share)])
            died += not cut.is_complete
            if cut.is_complete:  # all but its bill had come
                reply = attrs.evolve(cut.build_reply(), usage=whole.usage)
                assert reply == whole, (recording.name, share)
    return died


def check_hostile(
    read: Callable[[bytes], object], bodies: Iterable[bytes], failures: tuple[type[Exception], ...]
) -> int:
    """Fail where a body with one value of it replaced is answered by another error than those; return how many were."""
    refused = 0
    for body in bodies:
        for changed in _changed(json.loads(body)):
            try:
                read(json.dumps(changed).encode())
            except failures:
                refused += 1
    return refused


def _changed(value: object) -> Iterator[object]:
    """Each JSON value that differs from this one in one place."""
    yield from ODD
    if isinstance(value, dict):
        for key, inside in value.items():
            yield from ({**value, key: each} for each in _changed(inside))
            yield {other: each for other, each in value.items() if other != key}
    if isinstance(value, list):
        for place, inside in enumerate(value):
            yield from ([*value[:place], each, *value[place + 1 :]] for each in _changed(inside))


def others_than(wire: Wire) -> list[Recording]:
    """Return what came with status 200 in other wires than that one: one recording of each address and beginning."""
    others: dict[tuple[object, ...], Recording] = {}
    for each in recordings():
        # A proxy on the recorder's own machine mixed the events of two wires.
        if each.wire is not wire and each.status == OK and "//localhost" not in each.url:
            others.setdefault((each.wire, each.is_streamed, urlsplit(each.url).path, each.body[:40]), each)
    return list(others.values())


async def asked(make: Callable[..., SDKModel], recording: Recording, *, streamed: bool) -> Reply | ModelError:
    """Ask an adapter whose network plays a recording; returns its reply, or the error that it raises.

    Args:
        make: The adapter's class.
        recording: What the network says.
        streamed: Whether a stream is asked for, whatever was recorded.
    """

    def respond(_request: httpx2.Request) -> httpx2.Response:
        headers = {**recording.headers, "content-type": recording.content_type}
        return httpx2.Response(recording.status, headers=headers, content=recording.body)

    async with httpx2.AsyncClient(transport=httpx2.MockTransport(respond), trust_env=False) as client:
        model = make("m", base_url=BASE_URL, api_key="sk-recorded", http_client=client)
        try:
            return await model.reply(REQUEST, [].append if streamed else None)
        except ModelError as error:
            return error
