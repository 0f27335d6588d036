"""What must not come in at any door: hidden characters in texts, and parts that no run may read."""

import base64
import json

import attrs

from agentfsm import Runs
from agentfsm.core import codec
from agentfsm.core.text_safety import find_hidden

# A tag, a mark that reorders, a zero width, a terminal escape and an annotation.
HIDDEN = "a\U000e0041b\u202ec\u200bd\x1b[2Ke\ufff9f"
ESCAPED = "a\\udb40\\udc41b\\u202ec\\u200bd\\u001b[2Ke\\ufff9f"
TOO_LONG = "x" * 1_000_001


def data(content, kind):
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


# Kind and URL of parts that are refused.
PARTS = [
    ("image", "http://169.254.169.254/latest/meta-data"),
    ("image", "http://example.org/a.png"),
    ("image", "https://169.254.169.254/latest/meta-data"),
    ("image", "https://0x7f.1/a.png"),
    ("image", "https://2130706433/a.png"),
    ("image", "https://[::ffff:10.0.0.1]/a.png"),
    ("image", "https://localhost/a.png"),
    ("image", "https://metadata.google.internal/"),
    ("image", "https://intranet/a.png"),
    ("image", "https://ann:secret@example.org/a.png"),
    ("image", "https://10。0。0。1/a.png"),
    ("image", "https://example.org\\@10.0.0.1/a.png"),
    ("image", "https://example.org/\u202egnp.a"),
    ("image", "https://[/a.png"),
    ("image", "file:///etc/passwd"),
    ("image", data(b"<html><script>", "image/png")),
    ("image", data(b"<svg/>", "image/svg+xml")),
    ("image", "data:image/png;base64,%%%"),
    ("image", data(b"", "image/png")),
    ("audio", data(b"MZ", "audio/wav")),
    ("audio", "http://example.org/a.wav"),
    ("file", data(b"MZ", "application/x-msdownload")),
    ("file", data(b"<html>", "text/html")),
    ("file", data(b"no pdf", "application/pdf")),
    ("file", data(b"\xff\xfe", "text/plain")),
]


def list_texts(value):
    """Return all texts in a JSON value, the keys of objects included."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [text for pair in value.items() for each in pair for text in list_texts(each)]
    return [text for each in value for text in list_texts(each)] if isinstance(value, list | tuple) else []


async def read_store(store):
    """Return all texts of all runs in a store: headers, events, inboxes and feedback."""
    found, runs = [], Runs(store)
    for row in await runs.list(limit=1_000):
        stored = await store.read(row.id)
        found += list_texts(json.loads(codec.encode_header(stored.header)))
        found += [text for event in stored.events for text in list_texts(event.to_dict())]
        found += [text for each in await store.inbox(row.id) for text in list_texts(attrs.asdict(each.item))]
        found += [text for each in await runs.list_feedback(row.id) for text in list_texts(attrs.asdict(each))]
    return found


def find_raw(texts):
    """Return the texts that have a hidden character."""
    return [text for text in texts if find_hidden(text) is not None]
