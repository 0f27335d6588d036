"""Send a request by the SDK's `create` methods, for tools that observe or replace them.

Tracing and evaluation tools patch `AsyncCompletions.create` or `AsyncAPIClient.request` of the openai package. They see
keyword arguments there, where the adapters otherwise post bytes that are encoded once. The result is turned back into
a response with the provider's JSON, so that both ways are decoded by the same code.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import AsyncIterator, Callable
from functools import cache
from operator import attrgetter
from pathlib import Path
from types import FunctionType
from typing import Any, Final

import httpx2
import openai
from openai.resources.chat.completions import AsyncCompletions
from openai.resources.embeddings import AsyncEmbeddings
from openai.resources.responses import AsyncResponses

_PACKAGE: Final = str(Path(openai.__file__).parent)
_CLASSES: Final[dict[str, Any]] = {
    "chat.completions": AsyncCompletions,
    "embeddings": AsyncEmbeddings,
    "responses": AsyncResponses,
}


def is_patched(client: openai.AsyncOpenAI, resource: str) -> bool:
    """Return whether another package has replaced the methods that a request of this resource passes.

    Of a resource that the SDK does not have, as `/rerank`, there is no `create`.
    """
    return resource in _CLASSES and not (
        _is_own(_CLASSES[resource].create) and _is_own(type(client).request) and _is_own(type(client).post)
    )


def _is_own(method: object) -> bool:
    # A decorator copies the name and the module of the method, but its code is in its own file. The proxies of wrapt
    # copy class and code too, but not the type.
    return type(method) is FunctionType and method.__code__.co_filename.startswith(_PACKAGE)


async def send_by_create(client: openai.AsyncOpenAI, resource: str, body: bytes, timeout_s: float) -> httpx2.Response:
    """Send a request by `create`, and return a response with an unread body.

    Args:
        client: The SDK's client.
        resource: "chat.completions", "embeddings" or "responses".
        body: Encoded request. Fields that `create` does not know go into its `extra_body`.
        timeout_s: Seconds that the provider may stay silent.
    """
    fields: dict[str, Any] = json.loads(body)
    known = _parameters(resource)
    arguments = {name: value for name, value in fields.items() if name in known}
    extra = {name: value for name, value in fields.items() if name not in known}
    create: Callable[..., Any] = attrgetter(f"{resource}.create")(client)
    made = await create(**arguments, **({"extra_body": extra} if extra else {}), timeout=timeout_s)
    if fields.get("stream"):
        return httpx2.Response(200, headers={"Content-Type": "text/event-stream"}, stream=_EventStream(made))
    return httpx2.Response(200, headers={"Content-Type": "application/json"}, stream=httpx2.ByteStream(_to_json(made)))


@cache
def _parameters(resource: str) -> frozenset[str]:
    return frozenset(inspect.signature(_CLASSES[resource].create).parameters) - {"self", "timeout"}


def _to_json(value: Any) -> bytes:
    """Return the provider's JSON of the SDK's object: only fields that the provider sent."""
    text: str = value.model_dump_json(exclude_unset=True, warnings=False)
    return text.encode()


class _EventStream(httpx2.AsyncByteStream):
    """Server-sent events of the SDK's stream of objects."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for each in self._stream:
            yield b"data: " + _to_json(each) + b"\n\n"
        yield b"data: [DONE]\n\n"

    async def aclose(self) -> None:
        close = getattr(self._stream, "close", None)  # a tool's stream may have none
        if close is not None:
            await close()
