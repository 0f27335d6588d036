"""Common base of `OpenAIChat` and `OpenAIResponses`: the SDK's client, and the translation of its errors."""

from __future__ import annotations

import functools
import inspect
import os
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeAlias, cast

import anyio.to_thread
import httpx2
import openai

from agentfsm.core.errors import MisuseError, ModelError
from agentfsm.core.validation import BOOL
from agentfsm.models import provider_errors as t
from agentfsm.models.guarded_http import GuardedClient, read_redirect_url
from agentfsm.models.openai.create import is_patched, send_by_create
from agentfsm.models.provider_errors import read_error_message
from agentfsm.models.sdk import (
    TRANSPORT_ERRORS,
    SDKClient,
    SDKModel,
    check_arguments,
    check_header,
    parse_base_url,
    read_retry_after_headers,
    read_transport_failure,
    shared_ssl_context,
)
from agentfsm.models.wire import InBandError
from agentfsm.ports.model import OutputMode

if TYPE_CHECKING:
    from collections.abc import Mapping

    import httpx

    from agentfsm.models.prices import Prices
    from agentfsm.models.profiles import ModelProfile

OPENAI_URL: Final = "https://api.openai.com/v1"

AZURE_HOSTS: Final = (".openai.azure.com", ".cognitiveservices.azure.com", ".services.ai.azure.com")
# Hosts that run OpenAI's own software.
OPENAI_HOSTS: Final = ("api.openai.com", *AZURE_HOSTS)
# Path of an Azure deployment in the classic API, which takes the key in a header of its own.
_AZURE_DEPLOYMENTS: Final = "/openai/deployments/"

ApiKey: TypeAlias = "str | Callable[[], str] | Callable[[], Awaitable[str]]"

# HTTP status of an error that came with status 200, by its code: a number from other servers, a word from OpenAI. The
# words that are not listed ("server_error", "rate_limit_exceeded", "vector_store_timeout") are of temporary errors.
_STATUS_BY_CODE: Final = {str(status): status for status in range(400, 600)} | dict.fromkeys(
    (
        "bio_policy",
        "context_length_exceeded",
        "data_residency_mismatch",
        "empty_image_file",
        "failed_to_download_image",
        "image_content_policy_violation",
        "image_file_not_found",
        "image_file_too_large",
        "image_parse_error",
        "image_too_large",
        "image_too_small",
        "invalid_base64_image",
        "invalid_image",
        "invalid_image_format",
        "invalid_image_mode",
        "invalid_image_url",
        "invalid_prompt",
        "misalignment_policy_violation",
        "unsupported_image_media_type",
    ),
    400,
)


def _translate_busy(failure: t.ProviderFailure) -> ModelError:
    # It has status 429 as well, but a retry would not help.
    return t.quota_error(failure) if failure.code == "insufficient_quota" else t.unavailable_error(failure)


_translate_status = t.build_status_translator(t.bad_request_error, _translate_busy)


async def _call_provider(provide: Callable[[], object]) -> object:
    """Call a plain function in a thread, since it may wait for a network, and await an async one."""
    if inspect.iscoroutinefunction(provide) or inspect.iscoroutinefunction(getattr(provide, "__call__", None)):  # noqa: B004
        return await cast("Awaitable[object]", provide())
    return await anyio.to_thread.run_sync(provide)


def _check_token(key: object) -> str:
    if not isinstance(key, str):
        raise MisuseError(f"it returned {type(key).__name__}, not a string")
    return check_header("the token", key)


def _is_azure_deployment(base_url: str) -> bool:
    """Return whether an address is a deployment of Azure's classic API.

    Raises:
        MisuseError: if Azure would answer with 404: the address has neither the v1 path nor a deployment with
            an API version.
    """
    url = parse_base_url(base_url)
    is_deployment = _AZURE_DEPLOYMENTS in url.path
    if is_deployment and "api-version" not in url.params:
        raise MisuseError(
            f"base_url is an Azure deployment without an API version: append ?api-version=2024-10-21 to {url.path}, or "
            "use the v1 API, https://NAME.openai.azure.com/openai/v1"
        )
    if url.host.endswith(AZURE_HOSTS) and not is_deployment and not url.path.rstrip("/").endswith("/v1"):
        raise MisuseError(
            f"base_url has the Azure host {url.host} and the path {url.path!r}: use https://{url.host}/openai/v1, or a "
            "deployment, /openai/deployments/NAME?api-version=2024-10-21"
        )
    return is_deployment


class OpenAIModel(SDKModel):
    """Model behind the openai package; see `OpenAIChat` and `OpenAIResponses`.

    Args:
        name: Name of the model at the server.
        base_url: Address of the server, usually ending in /v1. Default: OPENAI_BASE_URL, then OpenAI itself. A query
            is sent with each request, for example `?api-version=2024-10-21` of a classic Azure deployment.
        api_key: API key, or a function, plain or async, that returns the current token before each request. A plain
            one runs in a thread. Default: OPENAI_API_KEY. A server of your own may need none.
        headers: Headers of each request.
        http_client: HTTP client of your own (proxies, certificates) for one event loop; you close it.
        plain: Whether requests go through the SDK's `create` with keyword arguments, which tools that patch the SDK
            observe. Default False: they do if `create` or the client's `request` is patched, and otherwise skip its
            conversions, whose cost grows with the history.
        window_tokens: Context window in tokens. Default: that of the model's family, else 128,000.
        price: Price of the model, or a table of prices by prefixes of models' names. Default: the public list of
            genai-prices, if that package is installed.
        profile: Abilities of the model, if they differ from those of `find_profile(name)`.
        cache_diagnostics: Whether OpenAI is asked why its prompt cache was missed, for the journal. `OpenAIResponses`
            has it, for GPT-5.6 and later models; other servers are not asked. Default False.

    Raises:
        MisuseError: if there is no key for OpenAI, or an argument is invalid.
    """

    resource: ClassVar[str]
    """Resource of the SDK's client whose `create` makes a request: "chat.completions" or "responses"."""

    api_key_env = "OPENAI_API_KEY"
    translations: ClassVar[Mapping[type[Exception], t.Translate]] = {
        openai.OpenAIError: t.sdk_error,
        InBandError: _translate_status,
        openai.APIError: _translate_status,
        openai.APIStatusError: _translate_status,  # and its classes for single statuses
        openai.OAuthError: t.api_key_error,
        openai.APIConnectionError: t.connection_error,
        openai.APITimeoutError: t.timeout_error,
        openai.APIResponseValidationError: t.invalid_reply_error,
        # Raised by helpers of the package that are not used here.
        openai.LengthFinishReasonError: t.invalid_reply_error,
        openai.ContentFilterFinishReasonError: t.invalid_reply_error,
        openai.WebSocketConnectionClosedError: t.connection_error,
        openai.WebSocketQueueFullError: t.connection_error,
        **TRANSPORT_ERRORS,
    }

    def __init__(
        self,
        name: str,
        *,
        base_url: str | None = None,
        api_key: ApiKey | None = None,
        headers: Mapping[str, str] | None = None,
        http_client: httpx.AsyncClient | httpx2.AsyncClient | None = None,
        plain: bool = False,
        window_tokens: int | None = None,
        price: Prices | None = None,
        profile: ModelProfile | None = None,
        cache_diagnostics: bool = False,
    ) -> None:
        BOOL.check(type(self).__name__, "plain", plain)
        if cache_diagnostics and self.resource != "responses":
            raise MisuseError("chat completions do not tell why a prompt cache was missed: use OpenAIResponses")
        provide_key = api_key if callable(api_key) else None
        fixed_key = None if callable(api_key) else api_key
        check_arguments(
            type(self).__name__,
            name=name,
            base_url=base_url,
            api_key=fixed_key,
            headers=headers,
            http_client=http_client,
        )
        base_url = base_url or os.environ.get("OPENAI_BASE_URL") or None
        if provide_key is None:
            fixed_key = self._check_api_key(fixed_key or os.environ.get("OPENAI_API_KEY"), needed=base_url is None)
        if base_url is not None and _is_azure_deployment(base_url) and fixed_key is not None:
            headers = {"api-key": fixed_key, **(headers or {})}  # the classic API ignores `Authorization` with a key
        super().__init__(
            name,
            base_url=base_url or OPENAI_URL,
            api_key=fixed_key or "none",
            headers=headers,
            http_client=http_client,
            window_tokens=window_tokens,
            price=price,
            profile=profile,
            cache_diagnostics=cache_diagnostics,
        )
        self._is_plain = plain
        if provide_key is not None:
            self._client_options["api_key"] = functools.partial(self._get_key, provide_key)
        self.is_openai: bool = self.host.endswith(OPENAI_HOSTS)
        # Versions of Azure's classic API refuse fields that came after them.
        self._takes_cache_key = self.is_openai and _AZURE_DEPLOYMENTS not in self.base_url
        self.output_modes: tuple[OutputMode, ...] = self._list_output_modes()

    def _list_output_modes(self) -> tuple[OutputMode, ...]:
        # Few other servers enforce a schema, and those that do not accept the field and ignore it.
        schema = (OutputMode.SCHEMA,) if self.is_openai else ()
        return (*schema, OutputMode.TOOL, OutputMode.JSON, OutputMode.PROMPT)

    def _check_api_key(self, key: str | None, *, needed: bool) -> str:
        if key:
            return check_header("the API key", key)
        if needed:
            msg = (
                "there is no API key for OpenAI: none was passed and OPENAI_API_KEY is not set. Set it, or pass "
                f"{type(self).__name__}(..., api_key=...); for a server of your own pass base_url, which needs no key"
            )
            raise MisuseError(msg)
        return "none"  # the package requires a key; a server without keys ignores it

    async def _get_key(self, provide: Callable[[], str] | Callable[[], Awaitable[str]]) -> str:
        """Return the current token of the user's function.

        Raises:
            ModelError: if the function fails, or returns something that cannot be a token.
        """
        try:
            checked = _check_token(await _call_provider(provide))
        except Exception as error:
            failure = self._build_failure(f"the function given as api_key failed: {type(error).__name__}: {error}")
            raise t.sdk_error(failure) from error
        self._mask(checked)
        return checked

    async def _send(self, client: Any, body: bytes, timeout_s: float) -> httpx2.Response:
        if not self._is_plain and not is_patched(client, self.resource):
            return await super()._send(client, body, timeout_s)
        try:
            return await send_by_create(client, self.resource, body, timeout_s)
        except Exception as error:  # noqa: BLE001  translated
            raise self._translate_error(error) from None

    def _make_client(self, http_client: httpx2.AsyncClient | None) -> SDKClient:
        # The SDK's own default client, if it is not closed, starts a task on any loop that runs when it is collected.
        inner = http_client or openai.DefaultAsyncHttpxClient(verify=shared_ssl_context())
        return openai.AsyncOpenAI(**self._client_options, http_client=GuardedClient(inner))

    def _describe_error(self, error: Exception) -> t.ProviderFailure:
        match error:
            case InBandError(body=body):
                code = str(body.get("code") or "")
                # It came with status 200. Servers other than OpenAI put the real status into the code, Azure beside it.
                real = _STATUS_BY_CODE.get(code) or _STATUS_BY_CODE.get(str(body.get("status")))
                status = real or (400 if body.get("type") == "invalid_request_error" else None)
                return self._build_failure(read_error_message(body), status=status, code=code)
            case openai.APIStatusError(response=response):
                return self._build_failure(
                    read_redirect_url(response) or read_error_message(error.body) or error.message,
                    status=error.status_code,
                    code=error.code or "",
                    request_id=error.request_id or "",
                    retry_after_s=read_retry_after_headers(response.headers, time.time()),
                )
            case openai.APIConnectionError(__cause__=BaseException() as cause):
                return self._build_failure(**read_transport_failure(cause))
        return super()._describe_error(error)
