"""Recordings as VCR.py writes them, read out of an archive.

Two forms: a list of `interactions`; and langchain's own, which keeps requests and responses in two lists, gzips the
file, and leaves neither addresses nor headers.
"""

from __future__ import annotations

import gzip
import json
import tarfile
from collections.abc import Iterator, Mapping
from enum import StrEnum
from functools import cache, cached_property
from typing import Any, Final
from urllib.parse import urlsplit

import attrs
import yaml

from tests.support.recording_archives import ARCHIVES, Archive, fetched

# How what is gzipped begins.
GZIP: Final = b"\x1f\x8b"
# What langchain leaves of addresses and headers.
REDACTED: Final = "**REDACTED**"
OK: Final = 200
# Headers of a body as it was sent; ours is decoded.
_DROPPED: Final = {"content-encoding", "content-length", "transfer-encoding"}


class Wire(StrEnum):
    """What was spoken."""

    CHAT = "chat completions"
    RESPONSES = "responses"
    MESSAGES = "messages"
    OTHER = "other"


_PATHS: Final = {
    "/chat/completions": Wire.CHAT,
    "/responses": Wire.RESPONSES,
    "/v1/messages": Wire.MESSAGES,
    "/invoke": Wire.MESSAGES,  # Bedrock, where the model is part of the address
}


@attrs.frozen(kw_only=True, slots=False, eq=False)
class Recording:
    """One request and what came back."""

    source: str
    # The package that carries it.
    name: str
    # Of the cassette, and the number of the request in it, from 0.
    url: str
    # Empty where it was taken out.
    request: Mapping[str, Any]
    # The body; empty where it is no JSON object.
    status: int
    headers: Mapping[str, str]
    # Of the response, with lower-case names, but for those that were taken out.
    body: bytes = attrs.field(repr=False)
    # Of the response, as it is after any decompression.

    @cached_property
    def wire(self) -> Wire:
        """What was spoken, by the address; where there is none, by the fields of the request."""
        if self.url:
            path = urlsplit(self.url).path
            return next((wire for end, wire in _PATHS.items() if path.endswith(end)), Wire.OTHER)
        if "messages" in self.request:
            return Wire.MESSAGES if "anthropic" in self.source else Wire.CHAT
        return Wire.RESPONSES if {"input", "stream"} <= self.request.keys() else Wire.OTHER

    @property
    def is_streamed(self) -> bool:
        """Whether the request asked for a stream of events."""
        return bool(self.request.get("stream"))

    @property
    def content_type(self) -> str:
        """What the body is; for those without headers, by what was asked."""
        usual = "text/event-stream" if self.is_streamed and self.status == OK else "application/json"
        return self.headers.get("content-type", usual)


@cache
def recordings() -> tuple[Recording, ...]:
    """Return all recordings of all archives; fetches what is not kept yet."""
    return tuple([recording for archive in ARCHIVES for recording in _recordings(archive)])


def of(wire: Wire, *, streamed: bool) -> list[Recording]:
    """Return the recordings of that wire whose status is 200."""
    return [each for each in recordings() if (each.wire, each.is_streamed, each.status) == (wire, streamed, OK)]


def named(name: str) -> Recording:
    """Return the one recording of that name."""
    (found,) = [each for each in recordings() if each.name == name]
    return found


def _recordings(archive: Archive) -> Iterator[Recording]:
    with tarfile.open(fetched(archive), "r:gz") as files:
        for member in files:
            path = member.name
            if member.isfile() and "/cassettes/" in path and path.endswith((".yaml", ".yaml.gz")):
                file = files.extractfile(member)
                assert file is not None
                name = f"{archive.name}: {path.partition('/cassettes/')[2].partition('.yaml')[0]}"
                yield from cut(_plain(file.read()), source=archive.name, name=name)


def cut(cassette: bytes, *, source: str, name: str) -> Iterator[Recording]:
    """Read a cassette."""
    content = yaml.load(cassette, Loader=yaml.CSafeLoader)  # six times quicker than the one in Python
    if "interactions" in content:
        pairs = [(each["request"], each["response"]) for each in content["interactions"]]
    else:
        pairs = list(zip(content["requests"], content["responses"], strict=True))
    for number, (request, response) in enumerate(pairs):
        yield Recording(
            source=source,
            name=f"{name} #{number}",
            url="" if request["uri"] == REDACTED else request["uri"],
            request=_object(_bytes(request["body"])),
            status=response["status"]["code"],
            headers=_headers(response["headers"]),
            body=_plain(_bytes(response["body"]["string"])),
        )


def _bytes(body: object) -> bytes:
    if isinstance(body, bytes):
        return body
    return str(body or "").encode()


def _plain(data: bytes) -> bytes:
    return gzip.decompress(data) if data.startswith(GZIP) else data


def _object(body: bytes) -> dict[str, Any]:
    try:
        value = json.loads(_plain(body))
    except ValueError:  # a form, or a file that was sent
        value = None
    return value if isinstance(value, dict) else {}


def _headers(headers: Mapping[str, Any]) -> dict[str, str]:
    # A value stands in a list, or alone.
    values = {name.lower(): value if isinstance(value, str) else value[0] for name, value in headers.items() if value}
    return {name: value for name, value in values.items() if value != REDACTED and name not in _DROPPED}
