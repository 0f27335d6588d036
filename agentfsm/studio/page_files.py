"""Serve the files of the studio: HTML, CSS and ES modules, under a policy that forbids everything else."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import TYPE_CHECKING, Final

import attrs

from agentfsm.core.value import Value

if TYPE_CHECKING:
    from agentfsm._lib.web.http_guard import Receive, Scope, Send

CONTENT_TYPES: Final[Mapping[str, str]] = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
# Scripts and styles come from these files only, nothing is sent to or loaded from another server, no page may embed the
# studio, and no text can become markup (Trusted Types).
POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS: Final = (
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"permissions-policy", b"camera=(), geolocation=(), microphone=()"),
    (b"cache-control", b"no-cache"),  # the browser asks each time, and is answered with 304
)


@attrs.frozen(kw_only=True)
class PageFile(Value):
    """One file."""

    body: bytes
    content_type: str
    etag: bytes
    """Hash of the content, in quotes."""


def _iter_files(folder: Traversable, prefix: str = "") -> Iterator[tuple[str, PageFile]]:
    for each in folder.iterdir():
        if each.is_dir():
            yield from _iter_files(each, f"{prefix}{each.name}/")
        elif content_type := CONTENT_TYPES.get(each.name.rpartition(".")[2]):
            yield f"{prefix}{each.name}", _build_file(each.read_bytes(), content_type)


def _build_file(body: bytes, content_type: str) -> PageFile:
    etag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'.encode()
    return PageFile(body=body, content_type=content_type, etag=etag)


def _read_files() -> dict[str, PageFile]:
    """Read all files. The page lists the modules, which a browser else finds one after the other, as they import."""
    found = dict(_iter_files(files("agentfsm.studio") / "static"))
    links = "".join([f'<link rel="modulepreload" href="{path}">\n' for path in sorted(found) if path.endswith(".js")])
    page = found["index.html"]
    body = page.body.replace(b"</head>", f"{links}</head>".encode())
    return found | {"index.html": _build_file(body, page.content_type)}


@attrs.frozen(eq=False, repr=False)
class StudioFiles:
    """ASGI app that serves the files. They are read once, so that no request reaches the disk."""

    files: Mapping[str, PageFile] = attrs.field(factory=_read_files)
    """Files by their path below the app."""

    async def __call__(self, scope: Scope, _receive: Receive, send: Send) -> None:
        """Answer a request."""
        path = scope["path"].removeprefix(scope.get("root_path", "")).lstrip("/") or "index.html"
        found = self.files.get(path)
        if found is None or scope["method"] not in ("GET", "HEAD"):
            return await _respond(send, 404, [(b"content-type", b"text/plain")], b"not found")
        headers = [(b"content-type", found.content_type.encode()), (b"etag", found.etag)]
        asked = b",".join([value for name, value in scope["headers"] if name == b"if-none-match"]).split(b",")
        if found.etag in [each.strip().removeprefix(b"W/") for each in asked]:  # weak if a proxy has compressed it
            return await _respond(send, 304, headers, b"")
        return await _respond(send, 200, headers, found.body, has_body=scope["method"] == "GET")


async def _respond(
    send: Send, status: int, headers: list[tuple[bytes, bytes]], body: bytes, *, has_body: bool = True
) -> None:
    length = [] if status == 304 else [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": [*headers, *length, *HEADERS]})
    await send({"type": "http.response.body", "body": body if has_body else b""})
