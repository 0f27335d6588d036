"""OpenAI's package: its client, and its errors as ours; what `OpenAIChat` and `OpenAIResponses` share."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, ClassVar, Final

import httpx2
import openai

from agentfsm.core.errors import MisuseError, ModelError
from agentfsm.models import trouble as t
from agentfsm.models.guarded_client import GuardedClient, redirected_to
from agentfsm.models.vendor import (
    TRANSPORT,
    Client,
    VendorModel,
    certificates,
    checked_header,
    retry_after_s,
    words_of,
)
from agentfsm.models.wire import SentError
from agentfsm.ports import OutputMode

if TYPE_CHECKING:
    from collections.abc import Mapping

    import httpx

    from agentfsm.models.prices import Prices

OPENAI_URL: Final = "https://api.openai.com/v1"

# Servers that are OpenAI's own software.
OPENAI_HOSTS: Final = ("api.openai.com", ".openai.azure.com")

# The true status of an error that came with status 200, by its code: of other servers a number, of OpenAI's a word. The
# other words, "server_error", "rate_limit_exceeded" and "vector_store_timeout", are of trouble that passes.
_STATUSES: Final = {str(status): status for status in range(400, 600)} | dict.fromkeys(
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


def _busy(trouble: t.Trouble) -> ModelError:
    # A 429 by its status, but no matter of waiting.
    return t.no_credit(trouble) if trouble.code == "insufficient_quota" else t.unavailable(trouble)


_by_status = t.by_status(t.bad_request, _busy)


class OpenAIModel(VendorModel):
    """A model behind the openai package; see `OpenAIChat` and `OpenAIResponses`.

    Args:
        name: The model, as the server knows it.
        base_url: Where the server answers, usually ending in /v1. Default: OPENAI_BASE_URL, then OpenAI itself.
        api_key: Default: OPENAI_API_KEY. A server of your own may need none.
        headers: Sent with each request.
        http_client: A client of your own (proxies, certificates); it stays yours to close, and belongs to one event
            loop.
        window_tokens: The context window. Default: that of the model's family, else 128,000.
        price: What the model costs, or a table that says it by the beginnings of models' names. Default: the public
            list of genai-prices, where that package is installed.

    Raises:
        MisuseError: when there is no key for OpenAI, or an argument cannot be right.
    """

    key_name = "OPENAI_API_KEY"
    translations: ClassVar[Mapping[type[Exception], t.Translate]] = {
        openai.OpenAIError: t.unforeseen,
        SentError: _by_status,
        openai.APIError: _by_status,
        openai.APIStatusError: _by_status,  # and its classes for single statuses
        openai.OAuthError: t.key_refused,
        openai.APIConnectionError: t.unreachable,
        openai.APITimeoutError: t.timed_out,
        openai.APIResponseValidationError: t.garbled,
        # Of helpers that are not used here.
        openai.LengthFinishReasonError: t.garbled,
        openai.ContentFilterFinishReasonError: t.garbled,
        openai.WebSocketConnectionClosedError: t.unreachable,
        openai.WebSocketQueueFullError: t.unreachable,
        **TRANSPORT,
    }

    def __init__(
        self,
        name: str,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        headers: Mapping[str, str] | None = None,
        http_client: httpx.AsyncClient | httpx2.AsyncClient | None = None,
        window_tokens: int | None = None,
        price: Prices | None = None,
    ) -> None:
        base_url = base_url or os.environ.get("OPENAI_BASE_URL") or None
        super().__init__(
            name,
            base_url=base_url or OPENAI_URL,
            api_key=self._key(api_key or os.environ.get("OPENAI_API_KEY"), needed=base_url is None),
            headers=headers,
            http_client=http_client,
            window_tokens=window_tokens,
            price=price,
        )
        self.is_openai = self.host.endswith(OPENAI_HOSTS)
        # Of the servers of others, few hold a model to a schema, and those that do not take the field and ignore it.
        schema = (OutputMode.SCHEMA,) if self.is_openai else ()
        self.output_modes = (*schema, OutputMode.TOOL, OutputMode.JSON, OutputMode.PROMPT)

    def _key(self, key: str | None, *, needed: bool) -> str:
        if key:
            return checked_header("the API key", key)
        if needed:
            msg = (
                "there is no API key for OpenAI: none was passed and OPENAI_API_KEY is not set. Set it, or pass "
                f"{type(self).__name__}(..., api_key=...); for a server of your own pass base_url, which needs no key"
            )
            raise MisuseError(msg)
        return "none"  # the package insists on one; a server that wants none does not read it

    def _client(self, http_client: httpx2.AsyncClient | None) -> Client:
        # Not the package's default client: when that one is forgotten, it starts a task on whatever loop runs then.
        ours = http_client or openai.DefaultAsyncHttpxClient(verify=certificates())
        return openai.AsyncOpenAI(**self._options, http_client=GuardedClient(ours))

    def _told(self, error: Exception) -> t.Trouble:
        match error:
            case SentError(body=body):
                code = str(body.get("code") or "")
                # It came with status 200; other servers than OpenAI put the true one into the code, Azure beside it.
                told = _STATUSES.get(code) or _STATUSES.get(str(body.get("status")))
                status = told or (400 if body.get("type") == "invalid_request_error" else None)
                return self._trouble(words_of(body), status=status, code=code)
            case openai.APIStatusError(response=response):
                return self._trouble(
                    redirected_to(response) or words_of(error.body) or error.message,
                    status=error.status_code,
                    code=error.code or "",
                    request_id=error.request_id or "",
                    retry_after_s=retry_after_s(response.headers, time.time()),
                )
            case openai.APIConnectionError(__cause__=BaseException() as cause):
                return self._trouble(f"{type(cause).__name__}: {cause}")
        return self._trouble(f"{type(error).__name__}: {error}")
