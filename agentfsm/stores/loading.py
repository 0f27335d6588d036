"""Open stores by path or URL, and load those that need a driver when they are used."""

from __future__ import annotations

import os
import re
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

from agentfsm._lib.plugins import STORES, create_from_plugin, find_plugins, require_extra
from agentfsm.core.errors import AgentError, MisuseError
from agentfsm.ports.store import ensure_store

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from agentfsm.ports.store import Store
    from agentfsm.stores.redis.broadcast import RedisBroadcast

MODULES: Final = {
    "MemoryStore": "memory",
    "PostgresStore": "postgres.store",
    "RedisStore": "redis.store",
    "SQLiteStore": "sqlite.store",
}
_REDIS_SCHEMES: Final = ("redis", "rediss", "unix")
# The options of each store that the query of its URL may contain, as texts.
_URL_OPTIONS: Final = {"PostgresStore": ("schema",), "RedisStore": ("accept_loss", "prefix")}
# The extra and the driver of each store that needs one.
_EXTRAS: Final = {"PostgresStore": ("postgres", "psycopg"), "RedisStore": ("redis", "redis")}
# Up to the last @, because an unescaped password may contain any character.
_URL_PASSWORD: Final = re.compile(r"(://[^:]*):(.*)@")
_QUERY_PASSWORD: Final = re.compile(r"([?&][^=&]*pass[^=&]*)=([^&\s]*)", re.IGNORECASE)


def open_store(location: str | os.PathLike[str]) -> Store:
    """Return the store at a path or URL. It connects, or creates its file, at its first use.

    Args:
        location: The path of a SQLite file, or a URL. The scheme of a URL selects the store: `postgresql://` and
            `postgres://`, `redis://`, `rediss://` and `unix://`, and those that installed packages provide as entry
            points of the group `agentfsm.stores`. The query contains options of the store:
            `postgresql://db/shop?schema=agents`, `redis://cache?prefix=shop`.

    Raises:
        MisuseError: if no installed package knows the scheme, its package is faulty, or the driver is missing. The
            message masks the password of the URL.
    """
    text = os.fspath(location)
    scheme, is_url, _ = text.partition("://")
    prefix, colon, _ = text.partition(":")
    if not is_url and colon and prefix.lower() in find_plugins(STORES):
        raise MisuseError(f"{mask_password(text)} would be the name of a file: write the URL as {prefix}://...")
    if not is_url:
        store: Store = load_store_class("SQLiteStore")(text)
        return store
    scheme = scheme.lower()
    if scheme not in find_plugins(STORES):
        known = ", ".join(f"{each}://" for each in sorted(find_plugins(STORES)))
        raise MisuseError(
            f"{mask_password(text)} names no store: give the path of a file, or a URL that begins with {known}. "
            f"A package provides another scheme by an entry point of the group {STORES}."
        )
    try:
        return create_from_plugin(STORES, scheme, text, ensure_store)
    except AgentError as error:
        written = {found[2] for pattern in (_URL_PASSWORD, _QUERY_PASSWORD) for found in pattern.finditer(text)}
        if not (passwords := (written | {unquote(word) for word in written}) - {""}):
            raise
        shown = mask_password(str(error))
        for word in sorted(passwords, key=len, reverse=True):  # whole words only, because many passwords are "postgres"
            shown = re.sub(rf"(?<!\w){re.escape(word)}(?!\w)", "***", shown)
        raise MisuseError(shown) from None  # the original errors may also quote the password


def open_postgres(url: str) -> Store:
    """Return the `PostgresStore` at a URL, whose query may contain `schema`."""
    return _open("PostgresStore", url)


def open_redis(url: str) -> Store:
    """Return the `RedisStore` at a URL, whose query may contain `accept_loss` and `prefix`."""
    return _open("RedisStore", url)


def open_broadcast(url: str, encode: Callable[[Sequence[Any]], bytes]) -> RedisBroadcast:
    """Return a broadcast through the Redis at a URL, whose query may have the options of a store. It connects late.

    Args:
        url: The URL.
        encode: Encodes the items that one message has. A thread calls it.

    Raises:
        MisuseError: if it is not the URL of a Redis.
    """
    if url.partition("://")[0].lower() not in _REDIS_SCHEMES:
        raise MisuseError(
            f"{mask_password(url)!r} is not the URL of a Redis: give redis://HOST:PORT/DATABASE, rediss:// for TLS, or "
            "unix://PATH"
        )
    url, options = _split_options(url, _URL_OPTIONS["RedisStore"])
    with require_extra("agentfsm.stores.RedisStore", *_EXTRAS["RedisStore"]):
        kind = import_module("agentfsm.stores.redis.broadcast").RedisBroadcast
    options.pop("accept_loss", None)
    broadcast: RedisBroadcast = kind(url, encode, **options)
    return broadcast


def load_store_class(name: str) -> Any:
    """Return the class of a store, imported at the first call.

    Raises:
        ImportError: if its driver is not installed; the message names the extra.
    """
    if name not in _EXTRAS:
        return _import_store_class(name)
    with require_extra(f"agentfsm.stores.{name}", *_EXTRAS[name]):
        return _import_store_class(name)


def _import_store_class(name: str) -> Any:
    return getattr(import_module(f"agentfsm.stores.{MODULES[name]}"), name)


def mask_password(text: str) -> str:
    """Mask the password of a URL, or of the URLs in a text."""
    return _QUERY_PASSWORD.sub(r"\1=***", _URL_PASSWORD.sub(r"\1:***@", text))


def _open(name: str, url: str) -> Store:
    url, options = _split_options(url, _URL_OPTIONS[name])
    store: Store = load_store_class(name)(url, **options)
    return store


def _split_options(url: str, names: tuple[str, ...]) -> tuple[str, dict[str, str]]:
    """Split a URL into the part without the store's own options, and these options."""
    head, _, query = url.partition("?")
    pairs = [pair for pair in query.split("&") if pair]
    own = {name: unquote(value) for name, _, value in (pair.partition("=") for pair in pairs) if name in names}
    rest = [pair for pair in pairs if pair.partition("=")[0] not in names]
    return "?".join(filter(None, [head, "&".join(rest)])), own
