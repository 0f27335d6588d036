"""HTTP servers of few manners, in threads of the test: `with serving(habit) as url`.

They speak the handshake era. `tools/call` goes as the habit says; what is no method of theirs gets -32601.
"""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import SimpleQueue

MB = 1_000_000
TOOL = {"name": "act", "inputSchema": {"type": "object"}}


LIST = {"resultType": "complete", "ttlMs": 0, "cacheScope": "public"}


def _is_today(habit):
    return habit in {"hangs-today", "hurried-today"} or str(habit).startswith("put-off-")


def _result(method, habit):
    match method:
        case "server/discover" if _is_today(habit):
            return {"supportedVersions": ["2026-07-28"], "capabilities": {"tools": {}}, **LIST}
        case "initialize":
            info = {"name": "rude", "version": "1"}
            return {"protocolVersion": "2025-11-25", "capabilities": {"tools": {}}, "serverInfo": info}
        case "tools/list":
            return {"tools": [TOOL], **(LIST if _is_today(habit) else {})}
        case "tools/call":
            return {"content": [{"type": "text", "text": "acted"}]}
    return None


class Rude(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def do_GET(self):
        if str(self.server.habit).startswith("taken-") and "last-event-id" in self.headers:
            self.plain(int(self.server.habit.removeprefix("taken-")), b"")
            return
        if not str(self.server.habit).startswith("older"):
            self.plain(405, b"")
            return
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        self.close_connection = True
        self.wfile.write(b"event: endpoint\ndata: /messages\n\n")
        while (message := self.server.answers.get()) is not None:
            self.wfile.write(b"event: message\ndata: " + message + b"\n\n")

    def do_DELETE(self):
        self.plain(200, b"")

    def do_POST(self):
        message = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.heard.append(message)
        method = message.get("method")
        if method is None:  # the answer to a question of the habit "asks-"
            self.plain(int(self.server.habit.removeprefix("asks-")), b"")
            self.server.hanging.set()
        elif self.server.habit == "hurried-today" and len(self.server.heard) == 1:
            self.close_connection = True
        elif self.server.habit == "older-503" and method == "tools/call":
            self.plain(503, b"")
        elif "id" not in message:
            self.plain(202, b"")
        elif str(self.server.habit).startswith("older"):
            self.plain(202, b"")
            self.server.answers.put(self.body_of(message))
        elif method == "tools/call" or self.server.habit in self.server.always:
            self.act(message)
        else:
            self.answer(message)

    def answer(self, message):
        headers = {"mcp-session-id": "s1"} if message["method"] == "initialize" else {}
        self.plain(200, self.body_of(message), **headers)

    def body_of(self, message):
        result = _result(message["method"], self.server.habit)
        error = {"code": -32601, "message": "Method not found"}
        said = {"error": error} if result is None else {"result": result}
        return json.dumps({"jsonrpc": "2.0", "id": message["id"], **said}).encode()

    def plain(self, status, body, kind="application/json", **headers):
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        if self.server.habit == "hurried":
            self.send_header("connection", "close")
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def act(self, message):
        habit = self.server.habit
        calls = sum(each["method"] == "tools/call" for each in self.server.heard)
        match habit:
            case int():
                self.plain(habit, b"<html>no</html>", "text/html", retry_after="7")
            case "forgets" if calls == 1:
                self.plain(404, b"", "text/plain")
            case "busy-once" if calls == 1:
                self.plain(429, b"", "text/plain", retry_after="0")
            case "accepts":
                self.plain(202, b"")
            case "html":
                self.plain(200, b"<html>welcome</html>", "text/html")
            case "rubbish":
                self.plain(200, b"\xff\xfe{", "application/json")
            case "elsewhere":
                self.plain(307, b"", location="http://other.invalid/mcp")
            case "packed":
                self.plain(200, b"\x1f\x8b rubbish", content_encoding="gzip")
            case "endless-json":
                self.endless("application/json", b"")
            case "endless-event":
                self.endless("text/event-stream", b"data: ")
            case "breaks-off":
                self.send_response(200)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", "1000")
                self.end_headers()
                self.wfile.write(b'{"jsonrpc"')
                self.close_connection = True
            case "hangs-up":
                self.close_connection = True
            case "event-and-gone":
                self.plain(200, b"event: message\ndata:\n\n", "text/event-stream")
            case str() if habit.startswith("taken-") and calls == 1:
                self.plain(200, b"id: 7\nretry: 10\ndata: \n\n", "text/event-stream")
            case str() if habit.startswith("asks-") and calls == 1:
                self.begins(b'data: {"jsonrpc": "2.0", "id": 1, "method": "ping"}\n\n')
                self.server.hanging.wait()
            case str() if habit.startswith("put-off-") and calls == 1:
                later = {"resultType": "input_required", "requestState": "job 1"}
                self.plain(200, json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": later}).encode())
            case str() if habit.startswith("put-off-"):
                self.plain(int(habit.removeprefix("put-off-")), b"")
            case "dies":
                self.begins(b"id: 7\nretry: 10\ndata: \n\n")
                self.server.hanging.set()
                self.server.enough.wait()
            case "big":
                text = {"content": [{"type": "text", "text": "x" * 10 * MB}]}
                body = json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": text}).encode()
                self.plain(200, b"event: message\ndata: " + body + b"\n\n", "text/event-stream")
            case "hangs-today":
                self.server.hanging.set()
                if not self.connection.recv(1):
                    self.server.cut_off.set()
            case "hangs":
                self.server.hanging.set()
                self.server.enough.wait()
            case _:
                self.answer(message)

    def begins(self, first, kind="text/event-stream"):
        self.send_response(200)
        self.send_header("content-type", kind)
        self.end_headers()
        self.close_connection = True
        self.wfile.write(first)

    def endless(self, kind, first):
        try:
            self.begins(first, kind)
            while not self.server.enough.is_set():
                self.wfile.write(b"x" * MB)
        except OSError:
            self.server.cut_off.set()


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request, client_address):
        """Say nothing: clients hang up on these."""


@contextmanager
def serving(habit, always=(), port=0):
    """Serve until left; `always` holds the habits that concern all requests, and not calls alone."""
    server = Server(("127.0.0.1", port), Rude)
    server.habit, server.always, server.heard = habit, always, []
    server.answers = SimpleQueue()
    server.enough, server.hanging, server.cut_off = threading.Event(), threading.Event(), threading.Event()
    server.url = f"http://127.0.0.1:{server.server_address[1]}/mcp"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        server.enough.set()  # so that what hangs breaks off when nobody listens any more
        server.answers.put(None)
        thread.join()
