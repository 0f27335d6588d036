"""Local HTTP server that imitates model providers, for tests of agents: a real socket and scripted replies.

    with LocalServer([say("", call("weather", city="Rome")), say("Sunny.", expect="28")]) as server:
        model = OpenAIChat("local", base_url=server.base_url)
        ...
    assert server.requests[1].body["messages"][-1]["role"] == "tool"

A script has the lines of a `ScriptedModel`; `WireReply` adds HTTP details to a line: chunks, headers, faults. The path
of a request selects the protocol: chat completions, OpenAI's Responses API at /responses, or Anthropic's
Messages API at /messages. The server runs in its own threads, so it works with asyncio, trio and any client. It refuses
the histories that the provider refuses, and it fails on request: overload, broken streams, pages of HTML, silence.
"""

from __future__ import annotations

import json
import socketserver
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from socket import SHUT_RDWR
from typing import TYPE_CHECKING, Any, Final, Self, TypeAlias, cast

import attrs

from agentfsm.core.errors import MisuseError
from agentfsm.core.value import Value
from agentfsm.testing.fake_llm import anthropic, openai_chat, openai_responses
from agentfsm.testing.fake_llm.script import WireReply, check_expectation, to_wire_reply
from agentfsm.testing.models import Line

if TYPE_CHECKING:
    import socket
    from types import TracebackType

# Limit for joining a request's thread: a brain that never returns must not hang the test that closes the server.
_JOIN_TIMEOUT_S = 5.0

_LOGIN_PAGE = "<!DOCTYPE html><html><body><h1>Sign in to the hotel's network</h1></body></html>"


Brain: TypeAlias = Callable[[dict[str, Any]], WireReply | Line | str]


@attrs.frozen(kw_only=True)
class ReceivedRequest(Value):
    """Request that the server has received."""

    body: dict[str, Any]
    """JSON body of the request."""

    headers: Mapping[str, str]
    """Headers of the request, by their names in lower case."""


@attrs.define(eq=False, repr=False)
class LocalServer:
    """Scripted model server on 127.0.0.1, at a free port."""

    brain: Brain | Sequence[WireReply | Line | str]
    """Lines in the order of the requests, or a function that takes a request's body and returns a line. The function is
    called in the server's threads, concurrently if requests overlap.
    """

    _requests: list[ReceivedRequest] = attrs.field(factory=list, init=False)
    _lock: threading.Lock = attrs.field(factory=threading.Lock, init=False)
    _listener: _Listener | None = attrs.field(default=None, init=False)
    _thread: threading.Thread | None = attrs.field(default=None, init=False)

    @property
    def base_url(self) -> str:
        """The base URL for a client.

        Raises:
            MisuseError: when the server has not been started.
        """
        if self._listener is None:
            msg = "the server has no address yet: start it, with `with LocalServer(...) as server:` or server.start()"
            raise MisuseError(msg)
        return f"http://127.0.0.1:{self._listener.server_address[1]}/v1"

    @property
    def requests(self) -> tuple[ReceivedRequest, ...]:
        """The requests for a reply so far, in the order in which they came, refused ones too."""
        with self._lock:
            return tuple(self._requests)

    def start(self) -> None:
        """Start listening. Requests are answered as soon as this returns.

        Raises:
            MisuseError: when it was started before.
        """
        if self._listener is not None:
            msg = "the server was started before: make a new LocalServer"
            raise MisuseError(msg)
        self._listener = listener = _Listener(self._choose_answer)
        # The argument is the polling interval for the stop request in seconds; `close` takes no longer than that.
        self._thread = threading.Thread(target=listener.serve_forever, args=(0.01,), name="LocalServer", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening, break the open connections and wait for the threads; a second time does nothing."""
        thread, self._thread = self._thread, None
        if self._listener is not None and thread is not None:
            self._listener.stop()
            thread.join()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _choose_answer(
        self, endpoint: FakeEndpoint, body: dict[str, Any], headers: Mapping[str, str]
    ) -> tuple[int, WireReply]:
        with self._lock:
            self._requests.append(ReceivedRequest(body=body, headers=headers))
            number = len(self._requests)
        if (flaw := endpoint.find_request_error(body)) is not None:
            return number, WireReply(status=400, error=flaw)
        try:
            reply = to_wire_reply(self._next_line(number, body))
            check_expectation(reply.line, number, endpoint.find_newest_text(body))
        except AssertionError as error:
            return number, WireReply(status=400, error=str(error))
        except Exception as error:  # noqa: BLE001  the test must see any error, as a response
            return number, WireReply(
                status=400, error=f"The brain of LocalServer raised {type(error).__name__}: {error}"
            )
        return number, reply

    def _next_line(self, number: int, body: dict[str, Any]) -> WireReply | Line | str:
        if callable(self.brain):
            return self.brain(body)
        if number > len(self.brain):
            lines = len(self.brain)
            raise AssertionError(f"The script of LocalServer has {lines} lines; this is request {number}.")
        return self.brain[number - 1]


# Protocols.


@attrs.frozen(kw_only=True)
class FakeEndpoint(Value):
    """Protocol of one path."""

    find_request_error: Callable[[dict[str, Any]], Mapping[str, str] | None]
    """Function of a request's body that returns the fields of the error with which the vendor refuses it, or None."""

    find_newest_text: Callable[[Mapping[str, Any]], str]
    """Function of a valid body that returns the text of the newest message."""

    build_reply: Callable[[WireReply, dict[str, Any], int], dict[str, Any]]
    """Function of the reply, the request's body and its number that returns the response body."""

    stream_reply: Callable[[WireReply, dict[str, Any], int], Iterator[dict[str, Any]]]
    """Function of the same that returns the events of the response. An event with a type is sent under that name."""

    starts_call: Callable[[Mapping[str, Any]], bool]
    """Function that returns whether an event is the first of a tool call."""

    build_error: Callable[[WireReply], dict[str, Any]]
    """Function that returns the body of an error."""

    end_marker: str | None = None
    """Data of an event to send after the last one; None for none."""


_ENDPOINTS: Final[Mapping[str, FakeEndpoint]] = {
    "/v1/chat/completions": FakeEndpoint(
        find_request_error=openai_chat.find_request_error,
        find_newest_text=openai_chat.find_newest_text,
        build_reply=openai_chat.build_reply,
        stream_reply=openai_chat.stream_reply,
        starts_call=openai_chat.starts_call,
        build_error=openai_chat.build_error,
        end_marker="[DONE]",
    ),
    "/v1/responses": FakeEndpoint(
        find_request_error=openai_responses.find_request_error,
        find_newest_text=openai_responses.find_newest_text,
        build_reply=openai_responses.build_reply,
        stream_reply=openai_responses.stream_reply,
        starts_call=openai_responses.starts_call,
        build_error=openai_chat.build_error,
    ),
    "/v1/messages": FakeEndpoint(
        find_request_error=anthropic.find_request_error,
        find_newest_text=anthropic.find_newest_text,
        build_reply=anthropic.build_reply,
        stream_reply=anthropic.stream_reply,
        starts_call=anthropic.starts_call,
        build_error=anthropic.build_error,
    ),
}


# Sockets.


class _Listener(ThreadingHTTPServer):
    """Listener that remembers its connections, so that it can break them."""

    request_queue_size = 1024  # many agents connect at once

    def __init__(
        self, answer: Callable[[FakeEndpoint, dict[str, Any], Mapping[str, str]], tuple[int, WireReply]]
    ) -> None:
        self.answer = answer
        self.closing = threading.Event()
        self._open: dict[threading.Thread, socket.socket] = {}
        super().__init__(("127.0.0.1", 0), _Handler)

    def server_bind(self) -> None:
        # Skip HTTPServer's own, which looks up the host name.
        socketserver.TCPServer.server_bind(self)

    def process_request(self, request: Any, client_address: Any) -> None:
        # Only the listening thread calls this, and `stop` waits for its end first, so no lock is needed.
        self._open = {thread: connection for thread, connection in self._open.items() if thread.is_alive()}
        handler = threading.Thread(
            target=self.process_request_thread, args=(request, client_address), name="LocalServer-request", daemon=True
        )
        handler.start()
        self._open[handler] = request

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), OSError):  # the client or the server has closed the connection
            super().handle_error(request, client_address)

    def stop(self) -> None:
        self.closing.set()
        self.shutdown()
        self.server_close()
        for connection in self._open.values():
            with suppress(OSError):  # already closed by its client or its thread
                connection.shutdown(SHUT_RDWR)
        for thread in self._open:
            thread.join(_JOIN_TIMEOUT_S)


class _Handler(BaseHTTPRequestHandler):
    """Handler of one connection, which may send several requests in sequence."""

    protocol_version = "HTTP/1.1"  # keeps connections open
    disable_nagle_algorithm = True  # sends small chunks at once

    def do_GET(self) -> None:
        if self.path != "/v1/models":
            self._send_json(404, {"error": {"message": f"Unknown address: GET {self.path}"}})
            return
        model = {"id": "local", "object": "model", "created": 0, "owned_by": "agentfsm"}
        self._send_json(200, {"object": "list", "data": [model]})

    def do_POST(self) -> None:
        text = self.rfile.read(int(self.headers.get("content-length") or 0))
        wire = _ENDPOINTS.get(self.path)
        if wire is None:
            self._send_json(404, {"error": {"message": f"Unknown address: POST {self.path}"}})
            return
        try:
            body = json.loads(text)
        except ValueError:
            body = None
        if not isinstance(body, dict):
            self._send_json(400, wire.build_error(WireReply(status=400, error="The body is not a JSON object.")))
            return
        number, reply = self._listener.answer(wire, body, {name.lower(): value for name, value in self.headers.items()})
        self._pause(reply.line.delay_s)
        self._send_answer(wire, reply, body, number)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  the name is http.server's
        """Log nothing: `LocalServer.requests` has the requests."""

    @property
    def _listener(self) -> _Listener:
        return cast("_Listener", self.server)

    def _send_answer(self, endpoint: FakeEndpoint, reply: WireReply, body: dict[str, Any], number: int) -> None:
        streamed = bool(body.get("stream"))
        headers = {"x-request-id": f"req_{number}", "request-id": f"req_{number}", **reply.headers}
        if reply.status >= 400:
            self._send_json(reply.status, endpoint.build_error(reply), headers)
        elif reply.html:
            self._send(reply.status, _LOGIN_PAGE.encode(), {"content-type": "text/html", **headers})
        elif reply.raw is not None:
            kind = "text/event-stream" if streamed else "application/json"
            self._send(reply.status, reply.raw.encode(), {"content-type": kind, **headers})
        elif streamed:
            self._send_stream(endpoint, reply, endpoint.stream_reply(reply, body, number), headers)
        else:
            self._send_json(
                reply.status, endpoint.build_reply(reply, body, number), headers, cut=reply.cut_after is not None
            )

    def _send_json(
        self, status: int, value: dict[str, Any], headers: Mapping[str, str] | None = None, *, cut: bool = False
    ) -> None:
        text = json.dumps(value, ensure_ascii=False).encode()
        self._send(status, text, {"content-type": "application/json", **(headers or {})}, cut=cut)

    def _send(self, status: int, content: bytes, headers: Mapping[str, str], *, cut: bool = False) -> None:
        self._send_head(status, {**headers, "content-length": str(len(content))})
        self.wfile.write(content[: len(content) // 2] if cut else content)
        self.close_connection = self.close_connection or cut

    def _send_head(self, status: int, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def _send_stream(
        self, endpoint: FakeEndpoint, reply: WireReply, chunks: Iterator[dict[str, Any]], headers: Mapping[str, str]
    ) -> None:
        self._send_head(reply.status, {"content-type": "text/event-stream", **headers, "transfer-encoding": "chunked"})
        sent = count()
        for chunk in chunks:
            if next(sent) == reply.cut_after:
                self.close_connection = True
                return
            self._pause(reply.chunk_delay_s + (reply.line.pace_s if endpoint.starts_call(chunk) else 0.0))
            self._send_event(json.dumps(chunk, ensure_ascii=False), chunk.get("type"))
        if endpoint.end_marker is not None:
            self._send_event(endpoint.end_marker)
        self.wfile.write(b"0\r\n\r\n")

    def _send_event(self, data: str, kind: str | None = None) -> None:
        event = ("" if kind is None else f"event: {kind}\n").encode() + f"data: {data}\n\n".encode()
        self.wfile.write(b"%x\r\n%b\r\n" % (len(event), event))

    def _pause(self, seconds: float) -> None:
        if seconds and self._listener.closing.wait(seconds):
            msg = "the server closes"
            raise ConnectionAbortedError(msg)
