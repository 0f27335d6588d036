"""Store the tokens of remote servers: in a file that only its owner may read, in a keyring, or in memory."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Protocol

import anyio
import attrs

from agentfsm._lib.shared_files import change_file, open_lock, try_lock
from agentfsm.core.header import short_hash
from agentfsm.logins.errors import TokenStoreError

# The version of the file's format.
_VERSION: Final = 1
# Name of the service under which a keyring lists the tokens.
KEYRING_SERVICE: Final = "agentfsm-mcp"
# Seconds between two attempts to get the lock of a renewal, which another process holds for a request or two.
_LOCK_POLL_S: Final = 0.05
_LOCK_NAME_CHARS: Final = 16


class TokenStore(Protocol):
    """Storage for the tokens of servers, as texts by key. Several processes may share it.

    `read` and `write` may block: they are called in a thread.
    """

    def read(self, key: str) -> str | None:
        """Return the text of a key, or None.

        Raises:
            TokenStoreError: when the tokens cannot be read.
        """
        ...

    def write(self, key: str, text: str | None) -> None:
        """Store the text of a key, replacing the earlier one. None removes it.

        Raises:
            TokenStoreError: when the tokens cannot be stored.
        """
        ...

    def renewal(self, key: str) -> AbstractAsyncContextManager[None]:
        """Return a lock that one process holds at a time: many servers accept a refresh token only once."""
        ...


def default_folder() -> Path:
    """Return the folder of the tokens and the locks."""
    return Path.home() / ".agentfsm"


@asynccontextmanager
async def hold_renewal(folder: Path, key: str) -> AsyncIterator[None]:
    """Hold the lock of a key against the other processes that use the same folder."""
    with open_lock(folder / f"mcp-renewal-{short_hash(key, _LOCK_NAME_CHARS)}") as held:
        while not try_lock(held):  # noqa: ASYNC110  another process holds it
            await anyio.sleep(_LOCK_POLL_S)
        yield


@attrs.define(eq=False, repr=False)
class MemoryTokens:
    """Tokens in memory, which end with the process."""

    _texts: dict[str, str] = attrs.field(factory=dict, init=False)
    _held: set[str] = attrs.field(factory=set, init=False)
    """Keys whose lock is held, in any event loop of this process."""

    def read(self, key: str) -> str | None:
        """Return the text of a key, or None."""
        return self._texts.get(key)

    def write(self, key: str, text: str | None) -> None:
        """Store the text of a key. None removes it."""
        if text is None:
            self._texts.pop(key, None)
        else:
            self._texts[key] = text

    @asynccontextmanager
    async def renewal(self, key: str) -> AsyncIterator[None]:
        """Hold the lock of a key within this process; no other has these tokens."""
        while key in self._held:  # noqa: ASYNC110  another event loop may hold it
            await anyio.sleep(_LOCK_POLL_S)
        self._held.add(key)
        try:
            yield
        finally:
            self._held.remove(key)


@attrs.define(eq=False, repr=False)
class TokenFile:
    """Tokens in a JSON file of mode 0600. A write replaces the whole file atomically, under a lock."""

    path: Path = attrs.field(factory=lambda: default_folder() / "mcp-tokens.json", converter=Path)
    """Path of the file. Default: ~/.agentfsm/mcp-tokens.json."""

    def read(self, key: str) -> str | None:
        """Return the text of a key, or None.

        Raises:
            TokenStoreError: when the file cannot be read, or does not have the expected format.
        """
        try:
            content = self.path.read_text("utf-8")
        except FileNotFoundError:
            return None
        except (OSError, UnicodeError) as error:
            raise TokenStoreError(f"the tokens of servers cannot be read: {error}") from error
        found = self._parse(content).get(key)
        return None if found is None else json.dumps(found)

    def write(self, key: str, text: str | None) -> None:
        """Store the text of a key, which is JSON. None removes it.

        Raises:
            TokenStoreError: when the file cannot be read or written; it is left unchanged.
        """

        def change(content: str | None) -> str:
            stored = {} if content is None else self._parse(content)
            others = {name: each for name, each in stored.items() if name != key}
            servers = others if text is None else {**others, key: json.loads(text)}
            return json.dumps({"version": _VERSION, "servers": servers}, indent=2) + "\n"

        try:
            change_file(self.path, change)
        except (OSError, UnicodeError) as error:
            raise TokenStoreError(f"the tokens of servers cannot be stored: {error}") from error

    def _parse(self, content: str) -> Mapping[str, Any]:
        try:
            return _parse_file(json.loads(content))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise TokenStoreError(
                f"the tokens of servers in {self.path} cannot be parsed ({error or 'a part is missing'}). Nothing "
                "was overwritten. Remove the file, and log in again."
            ) from error

    def renewal(self, key: str) -> AbstractAsyncContextManager[None]:
        """Return a lock between the processes that use this file."""
        return hold_renewal(self.path.parent, key)


def _parse_file(document: Any) -> dict[str, Any]:
    if document["version"] != _VERSION:
        raise ValueError(f"the file has version {document['version']!r}; supported: {_VERSION}")
    return {str(key): each for key, each in document["servers"].items()}


@attrs.define(eq=False, repr=False)
class KeyringTokens:
    """Tokens in the keyring of the user's desktop, by the package `keyring`."""

    def read(self, key: str) -> str | None:
        """Return the text of a key, or None.

        Raises:
            TokenStoreError: when the keyring cannot be used.
        """
        found: str | None = self._call("get_password", KEYRING_SERVICE, key)
        return found

    def write(self, key: str, text: str | None) -> None:
        """Store the text of a key. None removes it.

        Raises:
            TokenStoreError: when the keyring cannot be used.
        """
        if text is not None:
            self._call("set_password", KEYRING_SERVICE, key, text)
        elif self.read(key) is not None:
            self._call("delete_password", KEYRING_SERVICE, key)

    def _call(self, name: str, *args: str) -> Any:
        keyring = import_module("keyring")
        try:
            return getattr(keyring, name)(*args)
        except Exception as error:
            raise TokenStoreError(
                f"the keyring cannot be used for the tokens of servers: {type(error).__name__}: {error}. Unlock "
                "it, or pass OAuth(tokens=TokenFile())"
            ) from error

    def renewal(self, key: str) -> AbstractAsyncContextManager[None]:
        """Return a lock between the processes of this user."""
        return hold_renewal(default_folder(), key)


def default_tokens() -> TokenStore:
    """Return the keyring, if the package `keyring` is installed and has a usable one, or else the default file."""
    if find_spec("keyring") is not None and import_module("keyring").get_keyring().priority > 0:
        return KeyringTokens()
    return TokenFile()
