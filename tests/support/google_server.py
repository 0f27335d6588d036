"""A server with Google's REST API for Gemini, which answers from a list, whole or as events."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import attrs

USAGE = {"promptTokenCount": 20, "candidatesTokenCount": 5, "thoughtsTokenCount": 7, "cachedContentTokenCount": 4}


@attrs.define
class Google:
    """A running server: its address, the replies to come, and the requests so far."""

    url: str = ""
    replies: list[Any] = attrs.field(factory=list)
    answer: Callable[[dict[str, Any]], Any] | None = None
    # Gives the reply to a body in place of `replies`.
    seen: list[dict[str, Any]] = attrs.field(factory=list)


def reply(*parts: dict[str, Any], finish: str = "STOP") -> dict[str, Any]:
    """Return a response with these parts."""
    return {
        "candidates": [{"content": {"role": "model", "parts": list(parts)}, "finishReason": finish}],
        "usageMetadata": USAGE,
    }


@contextmanager
def serve_google() -> Iterator[Google]:
    """Serve on a free port."""
    google = Google()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            google.seen.append({"path": self.path, "key": self.headers.get("x-goog-api-key"), **body})
            status, answer = 200, google.answer(body) if google.answer else google.replies.pop(0)
            if isinstance(answer, tuple):
                status, answer = answer
            is_stream = "streamGenerateContent" in self.path and status == 200
            chunks = answer if isinstance(answer, list) else [answer]
            data = (
                b"".join(b"data: " + json.dumps(each).encode() + b"\r\n\r\n" for each in chunks)
                if is_stream
                else json.dumps(answer).encode()
            )
            self.send_response(status)
            self.send_header("Content-Type", "text/event-stream" if is_stream else "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    google.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield google
    finally:
        server.shutdown()
        server.server_close()
