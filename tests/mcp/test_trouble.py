"""What goes wrong with a request, by table: which fault it is, which way it goes, and in what words."""

import httpx2
import pytest
from mcp import MCPError
from pydantic import BaseModel, ValidationError

from agentfsm import AgentError, ErrorType, ModelRetry, Outcome, OutcomeUnknownError, RefusedError, TransientError
from agentfsm.mcp import MCPServerError
from agentfsm.mcp.connection import request_errors
from agentfsm.mcp.connection.request_errors import (
    FAULT_RULES,
    Disposition,
    MessageTooLongError,
    RequestFault,
    WireStatus,
    classify_error,
)
from agentfsm.mcp.errors import NoAnswerError, ServerCircuitOpenError
from agentfsm.tools.queue.transient import classify_failure


def told(error):
    """Return what comes of an error: the end of the call, or what is raised."""
    try:
        return request_errors.resolve_failure(error, "shop", "buy")
    except Exception as raised:  # noqa: BLE001  that is the answer
        return raised


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (httpx2.ConnectError("refused"), RequestFault.UNREACHABLE),
        (httpx2.ConnectTimeout("slow"), RequestFault.UNREACHABLE),
        (httpx2.PoolTimeout("busy"), RequestFault.UNREACHABLE),
        (httpx2.ReadTimeout("slow"), RequestFault.LOST),
        (httpx2.RemoteProtocolError("gone"), RequestFault.LOST),
        (MessageTooLongError("more than 64 MiB"), RequestFault.TOO_LONG),
        (AgentError("a private address"), RequestFault.FORBIDDEN),
        (ValueError("no token"), RequestFault.UNAUTHORIZED),
    ],
)
def test_what_came_instead_of_a_response_tells_the_fault(error, fault):
    """It is what was seen that counts, and not the code that the SDK has made up."""
    assert classify_error(MCPError(-32000, "Connection closed"), WireStatus(error=error)).fault is fault


@pytest.mark.parametrize(
    ("status", "code", "fault"),
    [
        (200, -32602, RequestFault.ARGUMENTS),
        (307, -32600, RequestFault.ADDRESS),
        (400, -32602, RequestFault.ARGUMENTS),
        (400, -32603, RequestFault.INTERNAL),
        (400, -32000, RequestFault.REQUEST),
        (400, -32600, RequestFault.REQUEST),
        (401, -32603, RequestFault.UNAUTHORIZED),
        (403, -32602, RequestFault.FORBIDDEN),
        (404, -32600, RequestFault.SESSION),
        (404, -32001, RequestFault.SESSION),
        (404, -32601, RequestFault.UNKNOWN),
        (405, -32603, RequestFault.ADDRESS),
        (408, -32603, RequestFault.DOWN),
        (425, -32603, RequestFault.DOWN),
        (429, -32603, RequestFault.BUSY),
        (500, -32603, RequestFault.DOWN),
        (504, -32603, RequestFault.DOWN),
        (None, -32000, RequestFault.DOWN),
        (None, -32001, RequestFault.DOWN),
        (None, -32700, RequestFault.MALFORMED),
        (None, -32600, RequestFault.REQUEST),
        (None, -32022, RequestFault.OTHER),
        (200, -32002, RequestFault.OTHER),
        (None, 0, RequestFault.OTHER),
    ],
)
def test_the_status_and_the_code_tell_the_fault(status, code, fault):
    """Whichever of them says more."""
    assert classify_error(MCPError(code, "said"), WireStatus(status=status)).fault is fault


@pytest.mark.parametrize(
    ("code", "said", "fault"),
    [
        (-32000, "Connection closed", RequestFault.LOST),
        (-32000, "SSE stream ended without a response", RequestFault.LOST),
        (-32000, "SSE stream failed: gone", RequestFault.LOST),
        (-32001, "Request 'tools/call' timed out", RequestFault.LATE),
    ],
)
def test_an_answer_that_the_sdk_has_made_up_is_none(code, said, fault):
    """It is known by its words; a server may answer with the same codes, and has then answered."""
    assert classify_error(MCPError(code, said), WireStatus(status=200)).fault is fault
    assert isinstance(told(classify_error(MCPError(code, said), WireStatus())), OutcomeUnknownError)


def test_a_connection_that_has_ended_is_lost_with_its_last_words():
    """Whatever the code, and once explained it stays so."""
    error = classify_error(MCPError(-32603, "oops"), WireStatus(), "it ended with exit code 3")
    assert (error.fault, error.detail) == (RequestFault.LOST, "it ended with exit code 3")
    assert classify_error(error, WireStatus(status=401)) is error
    assert (error.code, str(error)) == (-32603, "oops")


@pytest.mark.parametrize("code", [-32099, -32002, -1, 0, 7, 500])
def test_a_code_of_the_server_s_own_does_not_say_that_nothing_was_run(code):
    """It may have been answered when the effect was there already."""
    text = told(classify_error(MCPError(code, "the ledger is locked"), WireStatus(status=200))).content
    assert "the ledger is locked. Its effect may have happened" in text
    assert "Nothing was run" not in text
    assert "refused" not in text


def test_what_was_run_is_told_by_the_words():
    """Those with which nothing was run say so, or leave it to the engine, and no other does."""
    said = {
        fault
        for fault, row in FAULT_RULES.items()
        if "Nothing was run" in row.template or row.disposition is Disposition.REFUSED
    }
    assert said == request_errors.NOT_EXECUTED


@pytest.mark.parametrize("fault", RequestFault)
def test_each_fault_goes_the_way_of_its_row(fault):
    """And its words name the server and what was said; where it ends the call, also what to do."""
    came = told(request_errors.RequestError(MCPError(1, "m"), fault, "so and so", 7.0))
    row = FAULT_RULES[fault]
    expected = {
        Disposition.REFUSED: RefusedError,
        Disposition.PASSING: TransientError,
        Disposition.UNKNOWN: OutcomeUnknownError,
        Disposition.HINT: ModelRetry,
    }
    text = came.content if row.disposition is Disposition.FAILED else str(came)
    assert "'shop'" in text
    assert "so and so" in text
    if row.disposition is Disposition.FAILED:
        assert (came.outcome, came.error_type, came.retryable) == (Outcome.FAILED, row.error_type, False)
        assert any(word in text for word in ("tell the user", "Ask for less"))
    else:
        assert isinstance(came, expected[row.disposition])
        assert isinstance(came, RefusedError) == (row.disposition is Disposition.REFUSED)
    if row.disposition in {Disposition.REFUSED, Disposition.PASSING}:
        known = classify_failure(came)
        assert (known.retry_after_s, known.rate_limited) == (7.0, fault is RequestFault.BUSY)


def test_what_goes_wrong_before_a_call_goes_its_way():
    """A server that cannot be used now is refused, one that never can ends the call, one that rests says how long."""
    passing = told(MCPServerError("long words", why="short words", is_passing=True))
    assert isinstance(passing, RefusedError)
    assert str(passing) == "short words"
    final = told(MCPServerError("it was not approved"))
    assert (final.content, final.error_type) == ("it was not approved", ErrorType.UNAVAILABLE)
    rests = told(ServerCircuitOpenError("shop", 12.3))
    assert (rests.error_type, rests.retryable) == (ErrorType.CIRCUIT_OPEN, True)
    assert "Try again in 12 s" in rests.content


def test_a_request_of_the_application_in_a_tool_goes_the_way_of_its_cause():
    """Reading a resource that is not there is mended by other arguments."""
    error = NoAnswerError("the MCP server 'shop' did not return the resource")
    error.__cause__ = classify_error(MCPError(-32602, "no such resource"), WireStatus())
    assert isinstance(told(error), ModelRetry)


def test_an_answer_that_does_not_fit_is_told_by_the_places():
    """Not by all that pydantic has to say, and not by all of them."""

    class Answer(BaseModel):
        content: list[int]

    with pytest.raises(ValidationError) as caught:
        Answer.model_validate({"content": list("abcdefg")})
    came = told(caught.value)
    assert "invalid fields: content.0, content.1, content.2, content.3, content.4 and 2 more." in came.content
    assert "has an output schema" in told(RuntimeError("Tool buy has an output schema but ...")).content
    assert isinstance(told(TimeoutError()), OutcomeUnknownError)


def test_an_error_of_another_kind_is_the_caller_s():
    """A bug is no trouble of the server."""
    bug = LookupError("a bug")
    assert told(bug) is bug


def test_words_are_bounded_and_on_one_line():
    """Whatever a server says of its errors, in groups or alone."""
    assert len(request_errors.shorten("word\n" * 10_000)) == request_errors.MAX_DETAIL_CHARS + 3
    group = ExceptionGroup("many", [OSError("one"), OSError("one"), ExceptionGroup("more", [ValueError()])])
    assert request_errors.describe_error(group) == "OSError: one; ValueError"
    hostile = told(MCPError(7, "{server} \ud800 {0}"))
    assert "{server} \ufffd {0}" in hostile.content


@pytest.mark.parametrize(
    ("code", "said", "has_session", "fault"),
    [
        (-32000, "Bad Request: No valid session ID provided", True, RequestFault.SESSION),
        (-32600, "Bad Request: Session not found", True, RequestFault.SESSION),
        (-32603, "Server returned an error response", True, RequestFault.SESSION),
        (-32603, "Server returned an error response", False, RequestFault.REQUEST),
        (-32000, "Bad Request: No valid session ID provided", False, RequestFault.REQUEST),
        (-32000, "Bad Request: Unsupported protocol version", True, RequestFault.REQUEST),
        (-32602, "no such session in the arguments", True, RequestFault.ARGUMENTS),
    ],
)
def test_a_bad_request_is_refused(code, said, has_session, fault):
    """Nothing was run. A session that the server does not know is answered so by many, instead of with 404."""
    seen = WireStatus(status=400, has_session=has_session)
    assert classify_error(MCPError(code, said), seen).fault is fault
