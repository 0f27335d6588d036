"""A vault: personal data as tokens that only its key turns back."""

from __future__ import annotations

import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable
from importlib import import_module
from os import urandom
from typing import TYPE_CHECKING, Any, Final

import attrs

from agentfsm.core.errors import MisuseError
from agentfsm.core.sensitive_text import DataKind

if TYPE_CHECKING:
    from agentfsm.core.header import Header
    from agentfsm.core.run import Run

# Lengths of a key in bytes that AES-SIV (RFC 5297) accepts.
_KEY_BYTES: Final = (32, 48, 64)
_KEY_HINT: Final = "make one with Vault.create_key(), and keep it where secrets are kept"
_TOKEN: Final = re.compile(r"\[([A-Z_]+):([A-Za-z0-9_-]{22,})\]")


@attrs.define(eq=False, init=False, repr=False)
class Vault:
    """Turns data into tokens, and tokens back: `[EMAIL:kq3Z...]`.

    A token is the data, encrypted and authenticated with the key (AES-SIV, RFC 5297). Nothing is stored: who has the
    key can read the tokens, and once it is destroyed they stay unreadable. In a session, or in a run without one, the
    same data has the same token; in another the token cannot be turned back.

    Args:
        key: Key of 32, 48 or 64 bytes, from `create_key`.

    Raises:
        MisuseError: if the key has another length, or the package `cryptography` is missing.
    """

    _cipher: Any

    def __init__(self, key: bytes) -> None:
        if not isinstance(key, bytes) or len(key) not in _KEY_BYTES:
            given = f"{len(key)} bytes" if isinstance(key, bytes) else type(key).__name__
            raise MisuseError(f"Vault(key) takes 32, 48 or 64 bytes, not {given}: {_KEY_HINT}")
        try:
            aead = import_module("cryptography.hazmat.primitives.ciphers.aead")
        except ImportError:
            raise MisuseError("a Vault needs the package cryptography: pip install 'agentfsm[vault]'") from None
        self._cipher: Any = aead.AESSIV(key)

    @staticmethod
    def create_key() -> bytes:
        """Return a new random key of 64 bytes."""
        return urandom(_KEY_BYTES[-1])

    def tokenise(self, kind: DataKind, text: str, header: Header) -> str:
        """Return the token of data in a run.

        Args:
            kind: Kind of the data, which is the readable part of the token.
            text: The data.
            header: Header of the run.
        """
        data = self._cipher.encrypt(text.encode("utf-8", "surrogatepass"), [_scope(header), kind.encode()])
        return f"[{kind.upper()}:{urlsafe_b64encode(data).decode().rstrip('=')}]"

    def restore(self, text: str, run: Run) -> str:
        """Return the text with the tokens of a run turned back. Tokens of another key or run stay.

        Args:
            text: A text with tokens, such as `run.output`.
            run: The run, or another of its session.
        """
        return _TOKEN.sub(self._build_restorer(run.header), text)

    def _build_restorer(self, header: Header) -> Callable[[re.Match[str]], str]:
        invalid = import_module("cryptography.exceptions").InvalidTag

        def restore(found: re.Match[str]) -> str:
            try:
                data = urlsafe_b64decode(found[2] + "=" * (-len(found[2]) % 4))
                text: bytes = self._cipher.decrypt(data, [_scope(header), found[1].lower().encode()])
            except (invalid, ValueError):  # anybody may write what looks like a token
                return found[0]
            return text.decode("utf-8", "surrogatepass")

        return restore


def _scope(header: Header) -> bytes:
    """Return the data that binds a token to a session, or to a run without one."""
    return f"session {header.session}".encode() if header.session else f"run {header.id}".encode()
