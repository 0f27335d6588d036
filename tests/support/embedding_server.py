"""A local server with OpenAI's `/embeddings`, which answers with vectors that depend on the texts; and a `/rerank`."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import attrs


def embed_text(text: str, dims: int) -> list[float]:
    """Return a vector that tells texts of different lengths and beginnings apart."""
    return [float(len(text)), float(ord(text[0])), *[1.0] * (dims - 2)]


@attrs.define
class EmbeddingServer:
    """What the server was asked, and what it answers."""

    base_url: str
    dims: int = 4
    requests: list[dict[str, Any]] = attrs.field(factory=list)
    headers: list[dict[str, str]] = attrs.field(factory=list)
    answer: Callable[[dict[str, Any]], tuple[int, Any]] | None = None
    """Answers a request with a status and a body, in place of vectors."""

    def respond(self, body: dict[str, Any]) -> tuple[int, Any]:
        """Return the status and the body of the answer."""
        if self.answer is not None:
            return self.answer(body)
        data = [
            {"object": "embedding", "index": place, "embedding": embed_text(text, self.dims)}
            for place, text in enumerate(body["input"])
        ]
        tokens = sum(len(text.split()) for text in body["input"])
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return 200, {"object": "list", "data": data[::-1], "model": body["model"], "usage": usage}


@contextmanager
def serving_embeddings(dims: int = 4) -> Iterator[EmbeddingServer]:
    """Serve embeddings on a free port until the end of the block."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: object) -> None:
            """Stay silent."""

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            server.requests.append(body)
            server.headers.append({name.lower(): value for name, value in self.headers.items()})
            status, answer = (404, {"error": {"message": self.path}})
            if self.path in {"/v1/embeddings", "/v1/rerank"}:
                status, answer = server.respond(body)
            data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    listener = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    listener.daemon_threads = True
    server = EmbeddingServer(base_url=f"http://127.0.0.1:{listener.server_port}/v1", dims=dims)
    thread = threading.Thread(target=listener.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        listener.shutdown()
        listener.server_close()
        thread.join()
