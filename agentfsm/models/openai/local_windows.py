"""Ask a self-hosted model server for the context window of its model."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

import anyio
import httpx2

from agentfsm.models.guarded_http import read_limited

if TYPE_CHECKING:
    import openai

_log: Final = logging.getLogger("agentfsm.models")

# Seconds that all questions together may take, on a machine that has just answered.
_MAX_ASK_S: Final = 1.0
_MAX_BODY_BYTES: Final = 2**20
_SMALLEST: Final = 256


def _read_vllm(body: Any, name: str) -> object:
    return next((each.get("max_model_len") for each in body["data"] if each["id"] == name), None)


def _read_ollama(body: Any, name: str) -> object:
    names = {name, name if ":" in name else f"{name}:latest"}
    return next((each.get("context_length") for each in body["models"] if each["name"] in names), None)


def _read_llama_cpp(body: Any, _name: str) -> object:
    return body["default_generation_settings"]["n_ctx"]


def _read_lm_studio(body: Any, name: str) -> object:
    return next((each.get("loaded_context_length") for each in body["data"] if each["id"] == name), None)


# Path, and the window in the answer. Each is of the loaded model: the length that a model was trained for, which
# /api/show of Ollama has, says nothing about the memory that the server gave it.
_QUESTIONS: Final[tuple[tuple[str, Callable[[Any, str], object]], ...]] = (
    ("/v1/models", _read_vllm),  # and SGLang
    ("/api/ps", _read_ollama),
    ("/props?model={name}&autoload=false", _read_llama_cpp),
    ("/api/v0/models", _read_lm_studio),
)


async def ask_window(client: openai.AsyncOpenAI, base_url: str, name: str) -> int | None:
    """Ask a server for the window of a model that it has loaded, within a second; None if it does not say.

    A cancellation takes effect after that, because the caller has a reply in hand. No error passes.

    Args:
        client: The SDK's client, whose connections and headers are used.
        base_url: Address of the server.
        name: Name of the model.
    """
    root = base_url.removesuffix("/").removesuffix("/v1")
    with anyio.move_on_after(_MAX_ASK_S, shield=True):
        for path, read in _QUESTIONS:
            try:
                url = root + path.format(name=quote(name, safe=""))
                response = await client.get(url, cast_to=httpx2.Response, stream=True, stream_cls=None)
                parts, _ = await read_limited(response, _MAX_BODY_BYTES)
                found = read(json.loads(b"".join(parts)), name)
            except Exception as error:  # noqa: BLE001  another server, or another form: the next question
                _log.debug("%s of %s says no window: %s", path, root, error)
                continue
            if isinstance(found, int) and not isinstance(found, bool) and found >= _SMALLEST:
                return found
    return None
