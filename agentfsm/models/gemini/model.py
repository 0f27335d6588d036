"""Adapter for Google's Gemini models over the google-genai package."""

from __future__ import annotations

import os
import time
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, ClassVar, Final, cast

import anyio
import attrs
import httpx2

from agentfsm._lib.plugins import require_extra
from agentfsm.core.errors import MisuseError
from agentfsm.core.value import Value
from agentfsm.models import provider_errors as t
from agentfsm.models.adapter import AdapterModel
from agentfsm.models.guarded_http import LimitedTransport
from agentfsm.models.sdk import (
    TRANSPORT_ERRORS,
    check_arguments,
    parse_base_url,
    read_retry_after_headers,
    read_transport_failure,
    shared_ssl_context,
)
from agentfsm.ports.model import OutputMode

with require_extra("agentfsm.models.Gemini", "gemini", "google"):
    from google import genai
    from google.genai import errors, types

    from agentfsm.models.gemini import contents, hosted_parts

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping

    from agentfsm.core.hosted_tools import HostedTool
    from agentfsm.core.messages import Part
    from agentfsm.core.settings import Settings
    from agentfsm.models.prices import Prices
    from agentfsm.models.profiles import ModelProfile
    from agentfsm.ports.model import Emit, Reply, Request

GEMINI_URL: Final = "https://generativelanguage.googleapis.com"
# Format of native replies.
PROVIDER: Final = "gemini"

_translate_status = t.build_status_translator(t.bad_request_error, t.unavailable_error)


@attrs.frozen
class GeminiConnection(Value):
    """A client of the package, and the HTTP client that it sends through and does not close."""

    client: genai.Client
    """The package's client."""

    http: httpx2.AsyncClient
    """The HTTP client of one event loop."""


class Gemini(AdapterModel[GeminiConnection]):
    """Model of Google's Gemini API, for example `Gemini("gemini-3.8-flash")`.

    Thoughts are shown, and their signatures are sent back with the next request, which Gemini 3 requires for calls.
    `AdapterModel` describes the life of its connections.

    Args:
        name: Name of the model.
        api_key: API key. Default: GEMINI_API_KEY, then GOOGLE_API_KEY.
        base_url: Address of the server. Default: Google's.
        headers: Headers of each request.
        window_tokens: Context window in tokens. Default: that of the model's family.
        price: Price of the model, or a table of prices by prefixes of models' names. Default: the public list of
            genai-prices, if that package is installed.
        profile: Abilities of the model, if they differ from those of `find_profile(name)`.

    Raises:
        MisuseError: if there is no key, or an argument is invalid.
    """

    provider: ClassVar[str] = PROVIDER
    """Format of native replies, for `NativeReply.provider`."""

    api_key_env = "GEMINI_API_KEY"
    expected_reply = "generated content"
    output_modes: tuple[OutputMode, ...] = (OutputMode.SCHEMA, OutputMode.TOOL, OutputMode.JSON, OutputMode.PROMPT)
    """Modes in which the model returns typed answers, the preferred one first."""
    translations: ClassVar[Mapping[type[Exception], t.Translate]] = {
        errors.APIError: _translate_status,
        errors.UnknownApiResponseError: t.invalid_reply_error,
        TimeoutError: t.timeout_error,
        ValueError: t.sdk_error,  # of the package's checks, pydantic's among them
        **TRANSPORT_ERRORS,
    }
    """Translations of the SDK's exceptions into `ModelError`s."""

    def __init__(
        self,
        name: str,
        *,
        api_key: str | None = None,
        base_url: str | None = None,
        headers: Mapping[str, str] | None = None,
        window_tokens: int | None = None,
        price: Prices | None = None,
        profile: ModelProfile | None = None,
    ) -> None:
        check_arguments(
            type(self).__name__, name=name, base_url=base_url, api_key=api_key, headers=headers, http_client=None
        )
        key = api_key or os.environ.get("GEMINI_API_KEY") or os.environ.get("GOOGLE_API_KEY")
        if not key:
            raise MisuseError("there is no API key for Gemini: set GEMINI_API_KEY, or pass Gemini(..., api_key=...)")
        url = parse_base_url(base_url or GEMINI_URL)
        address = f"{url.scheme}://{url.netloc.decode('ascii')}{url.path}".rstrip("/")
        super().__init__(
            name,
            base_url=address,
            secrets=(key, *(headers or {}).values()),
            window_tokens=window_tokens,
            price=price,
            profile=profile,
        )
        self._api_key = key
        self._headers = dict(headers or {})
        self._provider_id = PROVIDER if address == GEMINI_URL else f"{PROVIDER} of {address}"
        shared_ssl_context()  # read here, where no event loop waits

    def unsupported_part(self, part: Part) -> str | None:
        """Return the reason why the model does not support this part of a message or result; None if it does."""
        return contents.unsupported_part(part)

    def unsupported_settings(self, settings: Settings) -> str | None:
        """Return the reason why the API does not support one of the settings; None if it supports all."""
        return contents.unsupported_settings(settings) or super().unsupported_settings(settings)

    def unsupported_hosted_tool(self, tool: HostedTool) -> str | None:
        """Return the reason why the API does not have the tool or its options; None if it has."""
        return hosted_parts.unsupported_hosted_tool(tool)

    def _open_client(self) -> GeminiConnection:
        http = httpx2.AsyncClient(transport=LimitedTransport(verify=shared_ssl_context()), timeout=None)
        options = types.HttpOptions(
            base_url=self._base_url,
            headers=self._headers,
            httpx_async_client=http,
            retry_options=types.HttpRetryOptions(attempts=1),  # the engine retries
        )
        return GeminiConnection(genai.Client(api_key=self._api_key, vertexai=False, http_options=options), http)

    @staticmethod
    async def _close_client(client: GeminiConnection) -> None:
        await client.http.aclose()

    async def _ask(self, client: GeminiConnection, request: Request, emit: Emit | None) -> Reply:
        builder = contents.ReplyBuilder(self._provider_id)
        arguments: dict[str, Any] = {
            "model": self.name,
            "contents": contents.build_contents(request.messages, self._provider_id),
            "config": contents.build_config(request, self.profile),
        }
        models = client.client.aio.models
        with anyio.fail_after(request.timeout_s) as silence:
            if emit is None:
                builder.add(await models.generate_content(**arguments))
                return builder.build()
            started = await models.generate_content_stream(**arguments)
            async with aclosing(cast("AsyncGenerator[types.GenerateContentResponse]", started)) as stream:
                async for response in stream:
                    silence.deadline = anyio.current_time() + request.timeout_s
                    for chunk in builder.add(response):
                        emit(chunk)
        return builder.build()

    def _describe_error(self, error: Exception) -> t.ProviderFailure:
        if isinstance(error, errors.APIError):
            headers = getattr(error.response, "headers", {})
            return self._build_failure(
                error.message or str(error),
                status=error.code,
                code=error.status or "",
                retry_after_s=read_retry_after_headers(headers, time.time()),
            )
        if isinstance(error, tuple(TRANSPORT_ERRORS)):
            return self._build_failure(**read_transport_failure(error))
        return super()._describe_error(error)
