"""Callers of the gateway: API keys, their scopes, and the runs that a caller may see."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias
from urllib.parse import quote, unquote

import attrs

from agentfsm._lib.shared_files import change_file
from agentfsm.core.errors import MisuseError
from agentfsm.core.value import Value
from agentfsm.serve.rate_limits import NO_LIMITS, RateLimits, read_limits

if TYPE_CHECKING:
    from starlette.requests import Request

    from agentfsm.core.header import Header

SCOPES: Final = ("run", "approve", "admin")
# Beginning of each key, by which people and scanners for leaked secrets recognise it.
KEY_PREFIX: Final = "afsm_"
# Random bytes of a key.
KEY_BYTES: Final = 32


def _check_scopes(_instance: object, _attribute: object, value: frozenset[str]) -> None:
    if not value or not value <= set(SCOPES):
        raise MisuseError(f"scopes must be one or more of {', '.join(SCOPES)}, not {sorted(value)}")


def _as_scopes(scopes: Iterable[str]) -> frozenset[str]:
    return frozenset(scopes)


def _as_roles(roles: Iterable[str]) -> tuple[str, ...]:
    return tuple(roles)


@attrs.frozen(kw_only=True)
class Caller(Value):
    """The person or program that sends a request, as its credential says. The body of a request cannot change it.

    Raises:
        MisuseError: when a scope is unknown, or none is given.
    """

    user: str
    """Name of the user: the user of the runs that it starts, and the author of its decisions."""

    tenant: str | None = None
    """Tenant of the user: the caller sees only runs of this tenant. None: only runs without a tenant."""

    scopes: frozenset[str] = attrs.field(converter=_as_scopes, validator=_check_scopes)
    """Rights of the caller. "run": start runs, read and control its own. "approve": read all runs of the tenant and
    decide on their calls. "admin": everything in the tenant, including deletion.
    """

    roles: tuple[str, ...] = attrs.field(default=(), converter=_as_roles)
    """Roles of the user for the permissions of tools."""

    limits: RateLimits = attrs.field(default=NO_LIMITS, converter=read_limits)
    """Limits of the user. A limit that is None is that of the server."""

    four_eyes: bool = False
    """Whether the user may not approve or settle a call that it has shaped, whatever its scopes are, so that its edit
    of a call needs a second approver.
    """

    @property
    def rights(self) -> tuple[object, ...]:
        """Identity of the caller and its rights, without its limits, as plain JSON."""
        return self.tenant, self.user, sorted(self.scopes), sorted(self.roles), self.four_eyes

    def allows(self, scope: str) -> bool:
        """Return whether the caller has a scope, or "admin"."""
        return scope in self.scopes or "admin" in self.scopes

    def can_see(self, header: Header) -> bool:
        """Return whether the caller may read a run."""
        is_own = header.user == self.user or self.allows("approve")
        return header.tenant == self.tenant and is_own

    def qualify_session(self, name: str) -> str:
        """Return the name under which the store keeps a session of this caller: no other user can name the same one."""
        return "/".join(quote(part, safe="", errors="surrogatepass") for part in (self.tenant or "", self.user, name))


def read_session_name(stored: str | None) -> str | None:
    """Return the name of a session as its caller gave it."""
    return None if stored is None else unquote(stored.rpartition("/")[2])


Authenticate: TypeAlias = "Callable[[Request], Caller | Awaitable[Caller | None] | None]"
"""Function that reads the credential of a request and returns the caller; None refuses the request with 401."""


def create_key() -> str:
    """Return a new random key."""
    return f"{KEY_PREFIX}{secrets.token_urlsafe(KEY_BYTES)}"


def _hash_key(key: str) -> str:
    # A key has 256 random bits, so that a fast hash is enough; a password would need a slow one.
    return hashlib.sha256(key.encode()).hexdigest()


@attrs.define(eq=False, repr=False)
class APIKeys:
    """API keys in a JSON file, of which only hashes are stored: `serve([agent], auth=APIKeys("keys.json"))`.

    Clients send a key as `Authorization: Bearer KEY`. The file is read again when it changes, so that a new key works
    and a removed key is refused without a restart.

    Raises:
        MisuseError: when the file cannot be read, or its content is invalid.
    """

    path: Path = attrs.field(converter=Path)
    """The file. `agentfsm keys add` creates it."""

    _stamp: tuple[int, int, int] = attrs.field(default=(0, 0, 0), init=False)
    """Number of the file, time of modification in nanoseconds, and size in bytes, of the content that was read."""

    _callers: dict[str, Caller] = attrs.field(factory=dict, init=False)
    """Callers by the hash of their key."""

    def __attrs_post_init__(self) -> None:
        self._refresh()

    def __call__(self, request: Request) -> Caller | None:
        """Return the caller whose key a request has; None if it has no valid one."""
        self._refresh()
        values = request.headers.getlist("authorization")
        scheme, _, key = values[0].partition(" ") if len(values) == 1 else ("", "", "")
        return self._callers.get(_hash_key(key.strip())) if scheme.lower() == "bearer" else None

    @property
    def callers(self) -> tuple[Caller, ...]:
        """The callers of all keys, in the order of the file."""
        self._refresh()
        return tuple(self._callers.values())

    def _refresh(self) -> None:
        try:
            status = self.path.stat()
            stamp = (status.st_ino, status.st_mtime_ns, status.st_size)  # two changes may have one time and one size
            if stamp != self._stamp:
                self._callers = {key: caller for key, caller, _ in _parse_keys(self.path, self.path.read_text("utf-8"))}
                self._stamp = stamp
        except OSError as error:
            raise MisuseError(
                f"cannot read the API keys in {self.path}: {error.strerror}; create the file with `agentfsm keys add`"
            ) from None


def _parse_keys(path: Path, text: str) -> list[tuple[str, Caller, dict[str, Any]]]:
    """Return the hash of each key with its caller, and its entry in the file.

    Four eyes and limits are of a user in a tenant, whichever key is used: one with them in any of its keys has them in
    all, and of two limits the smaller one.

    Raises:
        MisuseError: when the text is not that of a file of keys.
    """
    try:
        entries: list[dict[str, Any]] = json.loads(text)["keys"]
        found = [
            (entry["sha256"], Caller(**{name: part for name, part in entry.items() if name != "sha256"}), entry)
            for entry in entries
        ]
        bounds: dict[tuple[str | None, str], tuple[RateLimits, bool]] = {}
        for _, caller, _ in found:
            limits, four_eyes = bounds.get((caller.tenant, caller.user), (NO_LIMITS, False))
            joined = limits.and_also(caller.limits), four_eyes or caller.four_eyes
            bounds[caller.tenant, caller.user] = joined
    except (ValueError, TypeError, KeyError, AttributeError, MisuseError) as error:
        raise MisuseError(f"{path} is not a file of API keys ({error}): create it with `agentfsm keys add`") from None
    every = [(key, caller, entry, bounds[caller.tenant, caller.user]) for key, caller, entry in found]
    return [
        (key, attrs.evolve(caller, limits=limits, four_eyes=four_eyes), entry)
        for key, caller, entry, (limits, four_eyes) in every
    ]


def add_key(path: Path, caller: Caller) -> str:
    """Add a key for a caller to a file, which is created with mode 0600, and return the key. It is stored nowhere.

    Several processes may change the file at once, by this function and `remove_keys`: no change is lost.

    Raises:
        MisuseError: when the file exists and is not a file of keys.
    """
    key = create_key()
    added = {"sha256": _hash_key(key), **attrs.asdict(caller), "scopes": sorted(caller.scopes)}
    added["limits"] = {name: limit for name, limit in added["limits"].items() if limit is not None}

    def add(text: str | None) -> str:
        stored = [] if text is None else [entry for *_, entry in _parse_keys(path, text)]
        return _format_keys([*stored, added])

    change_file(path, add)
    return key


def remove_keys(path: Path, user: str, tenant: str | None) -> int:
    """Remove the keys of a user from a file, and return their number.

    Raises:
        MisuseError: when the file cannot be read.
    """
    APIKeys(path)  # raises if there is no file, which is not created
    removed = 0

    def remove(text: str | None) -> str | None:
        nonlocal removed
        stored = [] if text is None else _parse_keys(path, text)
        kept = [entry for _, caller, entry in stored if (caller.user, caller.tenant) != (user, tenant)]
        removed = len(stored) - len(kept)
        return _format_keys(kept) if removed else None

    change_file(path, remove)
    return removed


def _format_keys(entries: list[dict[str, Any]]) -> str:
    return json.dumps({"keys": entries}, indent=2) + "\n"
