"""Adapter for Anthropic's Messages API and compatible servers; the only file that imports the `anthropic` package."""

from __future__ import annotations

import os
import time
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

import attrs
import httpx2

from agentfsm._lib.plugins import require_extra
from agentfsm.core.errors import MisuseError, ModelError
from agentfsm.core.hosted_tools import HostedMCP
from agentfsm.core.validation import ValueRule
from agentfsm.models import provider_errors as t
from agentfsm.models.anthropic import wire
from agentfsm.models.anthropic.hosted_blocks import MCP_BETA, unsupported_hosted_tool
from agentfsm.models.anthropic.schema import unsupported_schema
from agentfsm.models.guarded_http import GuardedClient, read_redirect_url
from agentfsm.models.provider_errors import read_error_message
from agentfsm.models.sdk import (
    TRANSPORT_ERRORS,
    SDKClient,
    SDKModel,
    check_arguments,
    check_header,
    read_retry_after_headers,
    read_transport_failure,
    shared_ssl_context,
)
from agentfsm.models.wire import InBandError, read_billed_usage
from agentfsm.ports.model import OutputMode

with require_extra("agentfsm.models.Anthropic", "anthropic", "anthropic"):
    import anthropic
    from anthropic._constants import ANTHROPIC_API_VERSION  # the one that its client sends; it has no public name

if TYPE_CHECKING:
    from collections.abc import Mapping

    from agentfsm.core.hosted_tools import HostedTool
    from agentfsm.core.messages import JSON, Part
    from agentfsm.core.settings import Settings
    from agentfsm.core.usage import Usage
    from agentfsm.models.prices import Price
    from agentfsm.models.profiles import ModelProfile
    from agentfsm.models.sdk import SDKConnection
    from agentfsm.models.wire import EncodingCache, StreamAssembler
    from agentfsm.ports.model import Emit, Reply, Request

ANTHROPIC_URL: Final = "https://api.anthropic.com"

_CACHE: Final = ValueRule(
    fits=lambda value: isinstance(value, bool) or value in ("5m", "1h"), wanted="True, False, '5m' or '1h'"
)

# HTTP status of each error type: an error in the middle of a stream has only the type.
# Source: platform.claude.com/docs/en/api/errors.
_STATUS_BY_ERROR_TYPE: Final = {
    "invalid_request_error": 400,
    "authentication_error": 401,
    "billing_error": 402,
    "permission_error": 403,
    "not_found_error": 404,
    "conflict_error": 409,
    "request_too_large": 413,
    "rate_limit_error": 429,
    "api_error": 500,
    "timeout_error": 504,
    "overloaded_error": 529,
}

# Codes of a 429 that lasts until a payment or the next month, so that a retry is useless.
_SPEND_LIMIT_CODES: Final = frozenset({"contract_spend_limit_reached", "enforced_spend_limit_reached"})


def _translate_bad_request(failure: t.ProviderFailure) -> ModelError:
    if failure.code == "organization_on_hold":
        return t.permission_error(failure)
    # Until 2026 an empty account was a 400 as well.
    return t.quota_error(failure) if "credit balance is too low" in failure.detail else t.bad_request_error(failure)


def _translate_busy(failure: t.ProviderFailure) -> ModelError:
    return t.quota_error(failure) if failure.code in _SPEND_LIMIT_CODES else t.unavailable_error(failure)


_translate_status = t.build_status_translator(_translate_bad_request, _translate_busy, {499: _translate_busy})


class Anthropic(SDKModel):
    """Model of Anthropic's Messages API, for example `Anthropic("claude-sonnet-5-5")`.

    The reasoning is stored with each reply and sent back unchanged. `Settings(reasoning_effort=...)` turns reasoning on
    ("low", "medium", "high", "xhigh", "max", as far as the model supports them), and "none" turns it off; models
    without effort levels take `extra_body={"thinking": {"type": "enabled", "budget_tokens": 4096}}`.

    Args:
        name: Name of the model at the server.
        base_url: Address of the server, with or without /v1 at its end. Default: ANTHROPIC_BASE_URL, then Anthropic
            itself.
        api_key: API key. Default: ANTHROPIC_API_KEY, then the token in ANTHROPIC_AUTH_TOKEN. A server of your own may
            need none. Keys that Anthropic's own tools left on the disk are not used.
        headers: Headers of each request.
        http_client: HTTP client of your own (proxies, certificates) for one event loop; you close it.
        window_tokens: Context window in tokens. Default: that of the model's family.
        price: Price of the model. Default: the public list of genai-prices, if that package is installed.
        profile: Abilities of the model, if they differ from those of `find_profile(name)`.
        cache: Whether to mark the parts that the provider's prompt cache keeps for the next request. Writing to the
            cache costs a quarter more and reading from it a tenth, so it pays from the second turn on. True: for 5
            minutes; in a few requests of a conversation that has stood still for longer than that, for an hour, at
            Anthropic itself. "5m" or "1h": always that long; writing for an hour costs twice as much as other input.
        cache_diagnostics: Whether Anthropic is asked why its prompt cache was missed, for the journal. It then keeps
            hashes of each turn's request for a short time. Other servers are not asked. Default False.

    Raises:
        MisuseError: if there is no key for Anthropic, or an argument is invalid.
    """

    path = "/v1/messages"
    api_key_env = "ANTHROPIC_API_KEY"
    expected_reply = "a message"
    provider = wire.PROVIDER
    official_host = "api.anthropic.com"
    output_modes: tuple[OutputMode, ...] = (OutputMode.SCHEMA, OutputMode.TOOL, OutputMode.PROMPT)
    """Modes in which the model returns typed answers, the preferred one first."""
    translations: ClassVar[Mapping[type[Exception], t.Translate]] = {
        anthropic.AnthropicError: t.sdk_error,
        anthropic.APIError: _translate_status,
        # The package has a class for each status and code, and adds more: one row covers all.
        anthropic.APIStatusError: _translate_status,
        InBandError: _translate_status,
        anthropic.APIConnectionError: t.connection_error,
        anthropic.APITimeoutError: t.timeout_error,
        anthropic.APIResponseValidationError: t.invalid_reply_error,
        # Raised by helpers of the package that are not used here.
        anthropic.APIWebhookValidationError: t.invalid_reply_error,
        anthropic.RetryableError: t.unavailable_error,
        anthropic.CredentialsError: t.api_key_error,
        **TRANSPORT_ERRORS,
    }
    """Functions that turn an exception of the SDK or the transport into a `ModelError`, by class of exception."""

    def __init__(
        self,
        name: str,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        headers: Mapping[str, str] | None = None,
        http_client: httpx2.AsyncClient | None = None,
        window_tokens: int | None = None,
        price: Price | None = None,
        profile: ModelProfile | None = None,
        cache: bool | Literal["5m", "1h"] = True,
        cache_diagnostics: bool = False,
    ) -> None:
        check_arguments(
            type(self).__name__,
            name=name,
            base_url=base_url,
            api_key=api_key,
            headers=headers,
            http_client=http_client,
        )
        _CACHE.check(type(self).__name__, "cache", cache)
        base_url = base_url or os.environ.get("ANTHROPIC_BASE_URL") or None
        api_key = api_key or os.environ.get("ANTHROPIC_API_KEY")
        token = None if api_key else os.environ.get("ANTHROPIC_AUTH_TOKEN")
        super().__init__(
            name,
            base_url=(base_url or ANTHROPIC_URL).rstrip("/").removesuffix("/v1"),  # `path` begins with /v1
            api_key=_check_api_key(api_key or token, needed=base_url is None),
            headers=headers,
            http_client=_check_http_client(http_client),
            window_tokens=window_tokens,
            price=price,
            profile=profile,
            cache_diagnostics=cache_diagnostics,
        )
        self.cache: bool | Literal["5m", "1h"] = cache
        self._digests = wire.PrefixDigests(partial(wire.list_wire_messages, self._provider_id, self.unsupported_part))
        given = {name.lower(): value for name, value in (headers or {}).items()}.get("anthropic-version")
        # Other servers implement the API as well, and keep what later versions of it have dropped.
        self._api_version = given or ANTHROPIC_API_VERSION if self._address == self.official_host else ""
        if token:
            self._client_options["auth_token"] = self._client_options.pop("api_key")

    def unsupported_part(self, part: Part) -> str | None:
        """Return the reason why the model does not support this part of a message or result; None if it does."""
        return wire.unsupported_part(part)

    def unsupported_settings(self, settings: Settings) -> str | None:
        """Return the reason why the API does not support one of the settings; None if it supports all."""
        return wire.unsupported_settings(settings, self._api_version) or super().unsupported_settings(settings)

    def unsupported_hosted_tool(self, tool: HostedTool) -> str | None:
        """Return the reason why the API does not have this tool or one of its options; None if it has."""
        return unsupported_hosted_tool(tool)

    def unsupported_schema(self, schema: Mapping[str, JSON]) -> str | None:
        """Return the reason why the provider cannot enforce this schema; None if it can."""
        return unsupported_schema(schema)

    def _make_client(self, http_client: httpx2.AsyncClient | None) -> SDKClient:
        # The SDK's own default client, if it is not closed, starts a task on any loop that runs when it is collected.
        inner = http_client or anthropic.DefaultAsyncHttpxClient(verify=shared_ssl_context())
        return anthropic.AsyncAnthropic(**self._client_options, http_client=GuardedClient(inner))

    def _make_encoding_cache(self) -> EncodingCache:
        return wire.build_encoding_cache(self._provider_id, self.unsupported_part)

    def _encode_request(self, request: Request, encoding_cache: EncodingCache, *, streamed: bool) -> bytes:
        keeps_hour = request.keep_longer and self._address == self.official_host  # few other servers have it
        cache: wire.CacheTime = ("1h" if keeps_hour else "5m") if self.cache is True else self.cache or ""
        return wire.encode(
            request,
            model=self.name,
            streamed=streamed,
            encoding_cache=encoding_cache,
            cache=cache,
            provider=self._provider_id,
            api_version=self._api_version,
            profile=self.profile,
            compared_id=self._find_compared_id(request),
        )

    async def _ask(self, client: SDKConnection, request: Request, emit: Emit | None) -> Reply:
        if any(isinstance(tool, HostedMCP) for tool in request.hosted_tools):
            sdk: Any = client.client
            given = sdk.default_headers.get("anthropic-beta")  # betas that the user requests
            headers = {"anthropic-beta": f"{given},{MCP_BETA}" if given else MCP_BETA}
            client = attrs.evolve(client, client=sdk.with_options(default_headers=headers))
        if not self.profile.binds_thinking:
            return await super()._ask(client, request, emit)
        cache = client.encoding_cache
        request, prefix = wire.keep_valid_thinking(request, cache, self._digests, self._provider_id)
        reply = await super()._ask(client, request, emit)
        return reply if reply.native is None else attrs.evolve(reply, native=attrs.evolve(reply.native, prefix=prefix))

    def _decode(self, data: bytes) -> Reply:
        return wire.decode(data, provider=self._provider_id, reports_cache=self._reports_cache)

    def _read_billed_usage(self, data: bytes) -> Usage | None:
        return read_billed_usage(data, wire.read_usage)

    def _make_assembler(self) -> StreamAssembler:
        return wire.AnthropicStreamAssembler(provider=self._provider_id, reports_cache=self._reports_cache)

    def _describe_error(self, error: Exception) -> t.ProviderFailure:
        match error:
            case InBandError(body=body):
                code, kind = _read_code_and_type(body)
                return self._build_failure(read_error_message(body), status=_STATUS_BY_ERROR_TYPE.get(kind), code=code)
            case anthropic.APIStatusError(body=body, response=response):
                inner = body.get("error") if isinstance(body, dict) else None
                return self._build_failure(
                    read_redirect_url(response)
                    or read_error_message(inner)
                    or read_error_message(body)
                    or error.message,
                    status=error.status_code,
                    code=_read_code_and_type(inner)[0],
                    request_id=response.headers.get("request-id", ""),
                    retry_after_s=read_retry_after_headers(response.headers, time.time()),
                )
            case anthropic.APIConnectionError(__cause__=BaseException() as cause):
                return self._build_failure(**read_transport_failure(cause))
        return super()._describe_error(error)


def _read_code_and_type(error: object) -> tuple[str, str]:
    """Return the code of an error (its type if it has none) and its type; empty strings if both are missing."""
    fields = error if isinstance(error, dict) else {}
    kind, details = str(fields.get("type") or ""), fields.get("details")
    code = details.get("error_code") if isinstance(details, dict) else None
    return code if isinstance(code, str) else kind, kind


def _check_api_key(key: str | None, *, needed: bool) -> str:
    if key:
        return check_header("the API key", key)
    if needed:
        msg = (
            "there is no API key for Anthropic: none was passed and neither ANTHROPIC_API_KEY nor ANTHROPIC_AUTH_TOKEN "
            "is set. Set one, or pass Anthropic(..., api_key=...); for a server of your own pass base_url, which needs "
            "no key"
        )
        raise MisuseError(msg)
    return "none"  # without a key the package would search the disk for one


def _check_http_client(http_client: object) -> httpx2.AsyncClient | None:
    if http_client is None or isinstance(http_client, httpx2.AsyncClient):
        return http_client
    kind = f"{type(http_client).__module__.partition('.')[0]}.{type(http_client).__name__}"
    msg = f"http_client is {kind}, but Anthropic's package supports httpx2 only: give an httpx2.AsyncClient"
    raise MisuseError(msg)
