"""Messages in the bodies of errors, in the shapes of many servers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from agentfsm.models.wire import parse_json

# Fields with the message, or with the object or list that has it: OpenAI, Anthropic and Google; FastAPI and Mistral;
# Ollama; Cloudflare; an entry of a list of FastAPI.
_MESSAGE_FIELDS: Final = ("message", "detail", "error", "errors", "msg")
# Levels of objects, lists and texts of JSON. OpenRouter's body with Mistral's in it has seven.
_MAX_DEPTH: Final = 10
# Entries of a list that are read: FastAPI has one for each wrong field.
_MAX_ENTRIES: Final = 8


def read_error_message(body: object) -> str:
    """Return the message in the body of an error; empty if there is none.

    Args:
        body: The body, parsed, whole or without an outer `error`; or its text.
    """
    return _read(body, _MAX_DEPTH)


def _read(source: object, depth: int) -> str:
    if not depth:
        return ""
    match source:
        case str():
            return _read_text(source, depth)
        case list():
            return "; ".join(filter(None, [_read(each, depth - 1) for each in source[:_MAX_ENTRIES]]))
        case dict():
            return ": ".join(filter(None, _read_object(source, depth)))
    return ""


def _read_text(text: str, depth: int) -> str:
    """Return a text, or the message in it if it is JSON: gateways quote the bodies of other servers."""
    if not text.lstrip().startswith(("{", "[")):
        return text
    try:
        return _read(parse_json(text.encode("utf-8", "surrogatepass")), depth - 1) or text
    except (ValueError, RecursionError):
        return text


def _read_object(source: dict[str, object], depth: int) -> Iterable[str]:
    """Yield the place of the fault, the message, and what the server adds to it."""
    place = source.get("loc")
    yield ".".join(map(str, place)) if isinstance(place, list) and "msg" in source else ""  # FastAPI
    yield next(filter(None, [_read(source.get(name), depth - 1) for name in _MESSAGE_FIELDS]), "")
    if isinstance(metadata := source.get("metadata"), dict) and (raw := metadata.get("raw")):
        # OpenRouter: the message is "Provider returned error", and this is the body of that error.
        yield str(metadata.get("provider_name") or "")
        yield _read(raw, depth - 1)
    yield _read(source.get("failed_generation"), 1)  # Groq: the text in which it found no call
