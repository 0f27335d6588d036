"""`Anthropic` against a local server: every way in which it fails."""

import json

import anthropic
import httpx2
import pytest

from agentfsm import ContextTooLongError, ModelError, ModelReplyError, ModelUnavailableError
from agentfsm.models import Anthropic
from agentfsm.testing import WireReply
from tests.support.model_wires import ANTHROPIC, KEY, REQUEST, both_ways, forget_keys

failure = ANTHROPIC.failure


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch, tmp_path):
    forget_keys(monkeypatch, tmp_path)


# What the server says


@pytest.mark.parametrize("status", [400, 403, 412, 422, 431])
async def test_refusals_for_good_are_not_asked_again(status):
    """What the server refuses for good quotes the server's words."""
    error = await failure(ModelError, WireReply(status=status, error="Not like this."))
    assert f"({status}: Not like this." in str(error)


@both_ways
@pytest.mark.parametrize(
    ("status", "error"),
    [
        (402, {"message": "No credit.", "type": "billing_error"}),
        (400, "Your credit balance is too low to access the Anthropic API."),
        (429, {"message": "Spent.", "details": {"error_code": "enforced_spend_limit_reached"}}),
        (429, {"message": "Spent.", "details": {"error_code": "contract_spend_limit_reached"}}),
    ],
)
async def test_an_empty_account_is_not_waited_for(streamed, status, error):
    """Want of money is no matter of time, whatever the status."""
    assert "Add credit" in str(await failure(ModelError, WireReply(status=status, error=error), streamed=streamed))


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (400, "prompt is too long: 208310 tokens > 200000 maximum"),
        (400, "input length and `max_tokens` exceed context limit: 188240 + 21333 > 200000"),
        (413, {"message": "Request exceeds the maximum size", "type": "request_too_large"}),
    ],
)
async def test_too_large_a_request_is_told_apart(status, error):
    """A request beyond the window, or beyond 32 MB, has its own error."""
    assert "compact" in str(await failure(ContextTooLongError, WireReply(status=status, error=error)))


async def test_an_organization_on_hold_is_told_apart():
    """A 400 that no change of the request mends."""
    line = WireReply(status=400, error={"message": "On hold.", "details": {"error_code": "organization_on_hold"}})
    assert "not open to this API key" in str(await failure(ModelError, line))


@both_ways
@pytest.mark.parametrize(
    "body",
    ["null", "[1]", '"words"', '{"error": "words"}', '{"error": {"details": 5, "type": 7}}', "<html>", "[" * 99_999],
)
async def test_errors_of_any_form_are_translated(streamed, body):
    """What a proxy sends in the provider's place tells by its status."""

    def respond(_request):
        return httpx2.Response(503, text=body)

    async with httpx2.AsyncClient(transport=httpx2.MockTransport(respond)) as client:
        model = Anthropic("m", base_url="http://a.test", http_client=client)
        with pytest.raises(ModelUnavailableError):
            await model.reply(REQUEST, [].append if streamed else None)


@pytest.mark.parametrize(
    ("streamed", "raw"),
    [
        (False, '{"choices": []}'),
        (False, '{"content": '),
        (False, ""),
        (True, 'data: {"choices": []}\n\ndata: {"type": "ping"}\n\n'),
        (True, "data: {oops\n\n"),
        (True, 'data: {"type": "content_block_stop"}\n\n'),
        (True, "data: " + "[" * 100_000 + "\n\n"),
    ],
    ids=["another wire", "no JSON", "nothing", "stream of another wire", "event of no JSON", "bad event", "too deep"],
)
async def test_what_cannot_be_used_is_a_reply_error(streamed, raw):
    """A reply without content, or one that cannot be read, is unusable, and is not taken for an empty one."""
    await failure(ModelReplyError, WireReply(raw=raw), streamed=streamed)


@pytest.mark.parametrize("end", ["", '{"type": "message_delta", "delta": {"stop_reason": "end_turn"}}'])
async def test_a_stream_without_an_end_is_broken_off(end):
    """A stream that stops without its last event is never taken for a whole reply."""
    begin = '{"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": "Once upon"}}'
    raw = f"data: {begin}\n\n" + (f"data: {end}\n\n" if end else "")
    assert "ended before the reply was complete" in str(
        await failure(ModelUnavailableError, WireReply(raw=raw), streamed=True)
    )


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        ({"type": "overloaded_error", "message": "Overloaded"}, ModelUnavailableError),
        ({"type": "api_error", "message": "Internal server error"}, ModelUnavailableError),
        ({"type": "rate_limit_error", "message": "slow down"}, ModelUnavailableError),
        ({"type": "timeout_error", "message": "too slow"}, ModelUnavailableError),
        ({"type": "a_new_error", "message": "x"}, ModelUnavailableError),
        ({"type": "invalid_request_error", "message": "bad tool"}, ModelError),
        ({"type": "invalid_request_error", "message": "prompt is too long: 2 > 1"}, ContextTooLongError),
        ({"type": "request_too_large", "message": "x"}, ContextTooLongError),
        ({"type": "authentication_error", "message": "x"}, ModelError),
        ({"type": "billing_error", "message": "x"}, ModelError),
        ("just words", ModelUnavailableError),
    ],
)
@both_ways
async def test_errors_with_status_200_are_translated(streamed, error, kind):
    """An error inside a stream, or in place of a reply, counts by its type like one with a status."""
    text = json.dumps({"type": "error", "error": error})
    await failure(kind, WireReply(raw=f"event: error\ndata: {text}\n\n" if streamed else text), streamed=streamed)


@pytest.mark.parametrize("status", [200, 500])
async def test_a_transport_that_breaks_in_the_body_is_unavailability(status):
    """In the middle of a stream, or of an error, what the transport raises comes through as it is."""

    def respond(request):
        class Broken(httpx2.AsyncByteStream):
            async def __aiter__(self):
                yield b"half"
                message = "gone"
                raise httpx2.ReadError(message, request=request)

        return httpx2.Response(status, stream=Broken())

    async with httpx2.AsyncClient(transport=httpx2.MockTransport(respond)) as client:
        model = Anthropic("m", base_url="http://a.test", http_client=client)
        with pytest.raises(ModelUnavailableError, match="ReadError: gone"):
            await model.reply(REQUEST, [].append)


# Every error is translated

KINDS = {
    "APIConnectionError": ModelUnavailableError,
    "APITimeoutError": ModelUnavailableError,
    "APIResponseValidationError": ModelReplyError,
    "APIWebhookValidationError": ModelReplyError,
    "RetryableError": ModelUnavailableError,
    "RequestTimeoutError": ModelUnavailableError,
    "ConflictError": ModelUnavailableError,
    "ContentTooLargeError": ContextTooLongError,
    "RequestTooLargeError": ContextTooLongError,
    "RequestBodyTooLargeAfterDecodingError": ContextTooLongError,
    "RateLimitError": ModelUnavailableError,
    "RampLimitExceededError": ModelUnavailableError,
    "ClientClosedRequestError": ModelUnavailableError,
    "InternalServerError": ModelUnavailableError,
    "HTTPNotImplementedError": ModelUnavailableError,
    "ServiceUnavailableError": ModelUnavailableError,
    "CMEKContextUnavailableError": ModelUnavailableError,
    "CMEKKeyUnreachableError": ModelUnavailableError,
    "GatewayTimeoutError": ModelUnavailableError,
    "DeadlineExceededError": ModelUnavailableError,
    "OverloadedError": ModelUnavailableError,
    "APIError": ModelUnavailableError,
    "APIStatusError": ModelUnavailableError,
}
FOR_GOOD = {
    "AnthropicError",
    "BadRequestError",
    "AuthenticationError",
    "PaymentRequiredError",
    "PermissionDeniedError",
    "NotFoundError",
    "PreconditionFailedError",
    "UnprocessableEntityError",
    "RequestHeaderFieldsTooLargeError",
    "ClaudeCodeKeyCreatorNotMemberError",
    "ClaudeCodeVersionTooOldError",
    "CMEKKeyDisabledError",
    "CMEKKeyNetworkBlockedError",
    "OrganizationOnHoldError",
    "OrganizationTypeNotSupportedError",
    "ParentOrganizationRequiredError",
    "RequestBodyEncodingInvalidError",
    "RequestBodyEncodingUnsupportedError",
    "LinkedOrganizationSpendLimitReachedError",
    "LinkedOrganizationBillingUnavailableError",
    "SandboxEgressRestrictedError",
    "ContractSpendLimitReachedError",
    "EnforcedSpendLimitReachedError",
    "CredentialsError",
    "IdentityTokenFileError",
}


def made(kind):
    """An error of the package, as it makes one of what a server answers."""
    request = httpx2.Request("POST", "http://a.test")
    if not issubclass(kind, anthropic.APIError):
        return kind("x")
    if issubclass(kind, anthropic.APIConnectionError):
        return kind(request=request)
    if not issubclass(kind, anthropic.APIStatusError):
        response = httpx2.Response(200, request=request)
        validation = kind is anthropic.APIResponseValidationError
        return kind(response, None) if validation else kind("x", request, body=None)
    codes = [code for (_, code), each in anthropic._error_classes.ERROR_CLASSES.items() if each is kind and code]
    body = {"type": "error", "error": {"type": "x", "message": "x", "details": {"error_code": (*codes, None)[0]}}}
    response = httpx2.Response(getattr(kind, "status_code", 500), request=request)
    return kind("x", response=response, body=body)


def test_no_vendor_error_is_missing():
    """Each public exception becomes an error of ours of the right kind; one of a newer version goes by its status."""
    public = {name for name in anthropic.__all__ if isinstance(getattr(anthropic, name), type)}
    raised = {name for name in public if issubclass(getattr(anthropic, name), anthropic.AnthropicError)}
    assert raised >= KINDS.keys() | FOR_GOOD
    model = Anthropic("m", api_key=KEY)
    for name in raised:
        translated = model._translate_error(made(getattr(anthropic, name)))
        assert isinstance(translated, ModelError), name
        if name in KINDS.keys() | FOR_GOOD:
            assert type(translated) is KINDS.get(name, ModelError), name


def test_transport_errors_are_translated():
    """Each error of the HTTP client that a request can raise is caught by the table."""
    kinds = [kind for kind in vars(httpx2).values() if isinstance(kind, type) and issubclass(kind, httpx2.HTTPError)]
    assert kinds
    assert all(issubclass(kind, tuple(Anthropic.translations)) for kind in kinds)
