"""Which failures are passing ones: by class, by status, by what they say themselves, and none that set traps."""

import errno
import http.client
import importlib
import io
import socket
import ssl
import time
import urllib.error
from email.message import Message
from email.utils import formatdate

import anthropic
import anyio
import httpx
import httpx2
import openai
import pytest
import requests
import trio
import urllib3
from hypothesis import given
from hypothesis import strategies as st

from agentfsm import ModelRetry, ModelUnavailableError, RefusedError, TransientError
from agentfsm.tools.queue.transient import TRANSIENT_BY_LIBRARY, TransientFailure, classify_failure

NOW_S = 1_800_000_000.0


class Answer:
    """A response, as most libraries have it."""

    def __init__(self, status_code=503, headers=None):
        self.status_code = status_code
        self.headers = {} if headers is None else headers


class Failure(Exception):  # noqa: N818  of no library
    """An error with whatever attributes a library may give it."""

    def __init__(self, **attributes):
        super().__init__("it failed")
        self.__dict__.update(attributes)


def asked(value, name="Retry-After"):
    """What is read from a header of a 503."""
    found = classify_failure(Failure(response=Answer(headers={name: value})))
    assert found is not None
    return found.retry_after_s


def of_aiohttp(name):
    """Return an error as aiohttp has it, which is not installed here; errors are known by module and name."""
    return type(name, (Exception,), {"__module__": "aiohttp.client_exceptions"})()


PASSING = [
    ConnectionResetError(),
    ConnectionRefusedError(errno.ECONNREFUSED, "refused"),
    BrokenPipeError(),
    TimeoutError(),
    OSError(errno.ENETUNREACH, "no network"),
    OSError(errno.EHOSTUNREACH, "no host"),
    OSError(errno.ETIMEDOUT, "timed out"),
    socket.gaierror(socket.EAI_AGAIN, "the name server is busy"),
    ssl.SSLEOFError(8, "EOF occurred in violation of protocol"),
    http.client.RemoteDisconnected("closed"),
    http.client.IncompleteRead(b""),
    urllib.error.URLError(ConnectionRefusedError()),
    urllib.error.URLError(TimeoutError()),
    httpx.ConnectTimeout(""),
    httpx.ReadTimeout(""),
    httpx.PoolTimeout(""),
    httpx.ConnectError(""),
    httpx.ReadError(""),
    httpx.WriteError(""),
    httpx.CloseError(""),
    httpx.RemoteProtocolError(""),
    httpx.ProxyError(""),
    httpx2.ReadError(""),
    requests.ConnectionError(),
    requests.ReadTimeout(),
    requests.ConnectTimeout(),
    requests.exceptions.ChunkedEncodingError(),
    requests.exceptions.RetryError(),
    urllib3.exceptions.ReadTimeoutError(None, "", ""),
    urllib3.exceptions.ProtocolError(),
    urllib3.exceptions.InvalidChunkLength(urllib3.HTTPResponse(), b"zz"),
    urllib3.exceptions.MaxRetryError(None, "", urllib3.exceptions.ProtocolError()),
    openai.APIConnectionError(request=httpx2.Request("GET", "http://localhost")),
    openai.APITimeoutError(httpx2.Request("GET", "http://localhost")),
    anthropic.APIConnectionError(request=httpx2.Request("GET", "http://localhost")),
    of_aiohttp("ClientConnectionError"),
    of_aiohttp("ClientPayloadError"),
    trio.TooSlowError(),
    trio.BrokenResourceError(),
    anyio.BrokenResourceError(),
    anyio.ConnectionFailed("all attempts failed"),
    TransientError("busy"),
    RefusedError("busy"),
    ModelUnavailableError("busy"),
]

LASTING = [
    ValueError("no number"),
    ModelRetry("not like this"),
    OSError("of no number"),
    FileNotFoundError(errno.ENOENT, "no file"),
    PermissionError(errno.EACCES, "not yours"),
    socket.gaierror(socket.EAI_NONAME, "no such name"),
    ssl.SSLCertVerificationError(1, "certificate verify failed"),
    urllib.error.URLError("unknown url type: ftpp"),
    urllib.error.URLError(ssl.SSLCertVerificationError(1, "certificate verify failed")),
    httpx.UnsupportedProtocol(""),
    httpx.LocalProtocolError(""),
    httpx.InvalidURL(""),
    httpx.TooManyRedirects(""),
    httpx.DecodingError(""),
    httpx2.SSEError(""),
    httpx2.UnsupportedProtocol(""),
    httpx2.LocalProtocolError(""),
    of_aiohttp("ClientSSLError"),
    of_aiohttp("ServerFingerprintMismatch"),
    requests.exceptions.SSLError(),
    requests.exceptions.InvalidURL(),
    requests.exceptions.JSONDecodeError("", "", 0),
    urllib3.exceptions.MaxRetryError(None, "", urllib3.exceptions.SSLError()),
    urllib3.exceptions.LocationParseError(""),
    KeyboardInterrupt(),
    SystemExit(503),
    Failure(code="503"),
    Failure(retry_after=None),
    Failure(retry_after=True),
    Failure(retry_after="soon"),
]


@pytest.mark.parametrize("error", PASSING, ids=lambda error: f"{type(error).__module__}.{type(error).__name__}")
def test_passing(error):
    """A connection that broke, a service that was slow: calling again may help, and nothing is known of the wait."""
    assert classify_failure(error) == TransientFailure(None, rate_limited=False)


@pytest.mark.parametrize("error", LASTING, ids=lambda error: f"{type(error).__module__}.{type(error).__name__}")
def test_lasting(error):
    """A bug, a wrong address, a certificate, a missing file: calling again changes nothing."""
    assert classify_failure(error) is None


def test_subclasses_are_judged_like_what_they_come_from():
    """A user's own subclass of a library's error is what the library's is, unless the table says otherwise."""

    class Mine(httpx.ReadTimeout):
        pass

    class Wrong(httpx.LocalProtocolError):
        pass

    assert classify_failure(Mine("")) is not None
    assert classify_failure(Wrong("")) is None


def test_all_names_of_the_table_exist():
    """Each name in the table is a class of its library, so that a misspelled one cannot hide."""
    homes = {
        "http": "http.client",
        "requests": "requests.exceptions",
        "urllib": "urllib.error",
        "urllib3": "urllib3.exceptions",
    }
    seen = 0
    for library, classes in TRANSIENT_BY_LIBRARY.items():
        try:
            home = importlib.import_module(homes.get(library, library))
        except ImportError:
            continue
        for name in classes:
            cls = getattr(home, name)
            assert issubclass(cls, Exception)
            assert cls.__name__ == name
            assert cls.__module__.partition(".")[0] == library
            seen += 1
    assert seen > 20


@pytest.mark.parametrize("library", [httpx, httpx2])
def test_every_transport_error_of_httpx(library):
    """Of all errors of the transport, those of the caller's own making are the only lasting ones."""
    errors = [each for each in vars(library).values() if isinstance(each, type)]
    found = {each.__name__: classify_failure(each("")) for each in errors if issubclass(each, library.TransportError)}
    assert len(found) > 10
    assert {name for name, passing in found.items() if passing is None} <= {
        "UnsupportedProtocol",
        "LocalProtocolError",
        "SSEError",
    }


@pytest.mark.parametrize("status", [*range(399, 600), 0, 200, 600])
def test_statuses(status):
    """Those statuses are passing that say so, wherever the error carries them."""
    is_passing = status in (408, 425, 429, 500, 502, 503, 504, 529)
    passing = TransientFailure(None, rate_limited=status == 429) if is_passing else None
    assert classify_failure(Failure(status_code=status)) == passing
    assert classify_failure(Failure(status=status)) == passing
    assert classify_failure(Failure(code=status)) == passing
    assert classify_failure(Failure(response=Answer(status))) == passing
    assert classify_failure(Failure(response=Failure(status=status))) == passing


def test_the_libraries_own_status_errors():
    """What the libraries raise for a status is understood: also by requests, whose failed responses count as false."""
    request = httpx.Request("GET", "http://localhost")
    response = httpx.Response(429, headers={"retry-after": "7"}, request=request)
    with pytest.raises(httpx.HTTPStatusError) as caught:
        response.raise_for_status()
    assert classify_failure(caught.value) == TransientFailure(7.0, rate_limited=True)

    answer = requests.Response()
    answer.status_code = 503
    answer.headers["Retry-After"] = "8"
    with pytest.raises(requests.HTTPError) as refused:
        answer.raise_for_status()
    assert classify_failure(refused.value) == TransientFailure(8.0, rate_limited=False)

    headers = Message()
    headers["Retry-After"] = "9"
    with urllib.error.HTTPError("http://localhost", 502, "bad gateway", headers, io.BytesIO()) as error:
        assert classify_failure(error) == TransientFailure(9.0, rate_limited=False)
    with urllib.error.HTTPError("http://localhost", 404, "not found", headers, io.BytesIO()) as error:
        assert classify_failure(error) is None


def test_openai_without_quota():
    """OpenAI says 429 for an account without credit too, which no waiting helps."""
    request = httpx2.Request("POST", "http://localhost")

    def error(code):
        response = httpx2.Response(429, request=request)
        return openai.RateLimitError("too many", response=response, body={"code": code})

    assert classify_failure(error("rate_limit_exceeded")) == TransientFailure(None, rate_limited=True)
    assert classify_failure(error("insufficient_quota")) is None


def test_a_status_weighs_more_than_the_class():
    """A service that answered 401 was reached, whatever class its client makes of it."""

    class RefusedConnectionError(ConnectionError):
        status_code = 401

    assert classify_failure(RefusedConnectionError()) is None


def test_a_tools_own_word_weighs_more_than_a_status():
    """A tool that says that it passes is believed."""
    error = TransientError("not there yet", retry_after_s=3)
    error.status_code = 404
    assert classify_failure(error) == TransientFailure(3.0, rate_limited=False)


def test_own_errors_tell_their_wait():
    """The wait that a tool's own errors ask for is handed on."""
    for make in (TransientError, RefusedError, ModelUnavailableError):
        assert classify_failure(make("busy", 2.5)) == TransientFailure(2.5, rate_limited=False)


def test_who_names_a_wait_is_passing():
    """An error that says in how many seconds to come again is a passing one, of whatever class."""
    assert classify_failure(Failure(retry_after=4)) == TransientFailure(4.0, rate_limited=False)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0", 0.0),
        ("120", 120.0),
        (" 1.5 ", 1.5),
        ("-3", 0.0),
        ("nan", None),
        ("inf", None),
        ("1e999", None),
        ("", None),
        ("soon", None),
        ("9" * 5_000, None),
        ("Wed, 99 Foo 2015 07:28:00 GMT", None),
        ("Wed, 21 Oct 2015 07:28:00 GMT", 0.0),
        (formatdate(NOW_S + 90, usegmt=True), 90.0),
        ("Fri Jan 15 08:01:00 2027", 60.0),
        ("Friday, 15-Jan-27 08:01:00 GMT", 60.0),
        (None, None),
        (b"5", 5.0),
        (b"\xff", None),
    ],
)
def test_retry_after(monkeypatch, text, seconds):
    """The header is read as seconds or as a date in each of HTTP's three forms; what it cannot mean is ignored."""
    monkeypatch.setattr(time, "time", lambda: NOW_S)
    assert asked(text) == seconds


def test_a_date_without_a_zone_is_in_utc(monkeypatch):
    """Where the machine stands does not matter."""
    monkeypatch.setattr(time, "time", lambda: NOW_S)
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        assert asked("Fri Jan 15 08:01:00 2027") == 60.0
    finally:
        monkeypatch.delenv("TZ")
        time.tzset()


@pytest.mark.parametrize("name", ["Retry-After", "retry-after", "RETRY-AFTER"])
def test_the_headers_name_in_any_case(name):
    """A plain dict is searched whatever the case of its names, beside other headers."""
    assert classify_failure(Failure(status=503, headers={"Date": "now", name: "6"})).retry_after_s == 6.0
    assert asked("6", name) == 6.0


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf"), 10**400])
def test_a_number_that_is_no_wait(number):
    """A wait without end is none, and the header is asked instead."""
    error = Failure(retry_after=number, response=Answer(429, {"retry-after": "5"}))
    assert classify_failure(error) == TransientFailure(5.0, rate_limited=True)
    assert classify_failure(Failure(retry_after=number)) is None


@pytest.mark.parametrize("headers", [5, [("retry-after", "5")], {5: "5"}, "retry-after: 5"])
def test_headers_of_another_shape(headers):
    """Headers that are no mapping of texts say nothing, and the status still counts."""
    assert classify_failure(Failure(status_code=503, headers=headers)) == TransientFailure(None, rate_limited=False)


def test_groups():
    """A group is passing when all of its members are; it asks for the longest wait of theirs."""
    quick, slow = Failure(status_code=503, retry_after=1), RefusedError("busy", 9)
    limited, plain = Failure(status_code=429), TimeoutError()
    group = ExceptionGroup("all", [plain, ExceptionGroup("some", [quick, slow]), limited])
    assert classify_failure(group) == TransientFailure(9.0, rate_limited=True)
    assert classify_failure(ExceptionGroup("one", [plain])) == TransientFailure(None, rate_limited=False)
    assert classify_failure(ExceptionGroup("mixed", [plain, ExceptionGroup("some", [slow, ValueError()])])) is None
    assert classify_failure(BaseExceptionGroup("stop", [plain, KeyboardInterrupt()])) is None


def test_causes_are_not_followed():
    """Who raises one error from another has chosen what to say."""
    error = ValueError("the service gave nothing that can be used")
    error.__cause__ = error.__context__ = TimeoutError()
    assert classify_failure(error) is None


class Trap(Exception):  # noqa: N818  of no library
    """Raises at every attribute that is not its own."""

    def __getattr__(self, name):
        raise RuntimeError(name)


class PropertyError(ConnectionError):
    """Raises where a client would look for its response."""

    @property
    def response(self):
        raise RuntimeError("no response was set")

    @property
    def headers(self):
        raise KeyError("headers")


class Number(int):
    """An integer that cannot be compared."""

    def __ge__(self, other):
        raise RuntimeError

    __le__ = __gt__ = __lt__ = __ge__


class Itself(ExceptionGroup):
    """A group that says that it is its own member, twice."""

    exceptions = property(lambda self: [self, self])


def test_traps():
    """An error whose attributes raise does not harm; what can be read of it still counts."""
    assert classify_failure(Trap()) is None
    assert classify_failure(Failure(response=Trap(), status=503)) == TransientFailure(None, rate_limited=False)
    assert classify_failure(PropertyError()) == TransientFailure(None, rate_limited=False)
    assert classify_failure(Failure(status_code=Number(503))) is None
    assert classify_failure(Itself("again", [ValueError()])) is None
    itself = urllib.error.URLError("")
    itself.reason = itself
    assert classify_failure(itself) is None
    nowhere = type("Nowhere", (Exception,), {"__module__": None})
    assert classify_failure(nowhere()) is None


PLAIN = st.one_of(
    st.sampled_from([None, True, 429, 503, 404, b"5", "insufficient_quota"]),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
)
VALUES = PLAIN | st.builds(lambda value: {"Retry-After": value}, PLAIN)
NAMES = ("status_code", "status", "code", "response", "headers", "retry_after", "retry_after_s", "reason")


@given(st.dictionaries(st.sampled_from(NAMES), VALUES | st.builds(Answer, VALUES, VALUES), max_size=4))
def test_anything(attributes):
    """Whatever an error carries, nothing is raised, and a wait is a number that can be waited."""
    found = classify_failure(Failure(**attributes))
    if found is not None:
        assert found.retry_after_s is None or 0 <= found.retry_after_s < float("inf")
