"""Connect to one Redis server, check its settings, and send requests in pipelines. The keys are defined elsewhere.

A server that waits for its disk does so once for all commands that arrive together. So a group of jobs sends its
requests in one pipeline: a job whose reply is missing is stopped, and executed again when all replies have arrived.
This also handles broken connections: replies are kept, and only the other requests are sent again, marked as repeated,
so that the script can check whether they were executed. Hence three rules: a job makes the same requests each time, it
acts on replies in `after_commit` only, and each operation of the script is atomic.
"""

from __future__ import annotations

import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from hashlib import sha1
from typing import Any, Final, Literal, Protocol, TypeAlias

import attrs
from redis import Redis
from redis.connection import Connection, parse_url
from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    MasterDownError,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)
from redis.exceptions import ConnectionError as LostError
from redis.exceptions import TimeoutError as SilentError

from agentfsm._lib.concurrency import boot_clock
from agentfsm.core.errors import AgentError, CorruptError, MisuseError, StoreError
from agentfsm.core.value import Value
from agentfsm.ports.store import Durability
from agentfsm.stores.rules import check_major_version
from agentfsm.stores.threaded.change_listener import CHECK_INTERVAL_S, PushNotificationMixin
from agentfsm.stores.threaded.outage import Outage

_log = logging.getLogger("agentfsm.stores")

# The acknowledged writes that a crash of the server may lose.
Loss: TypeAlias = Literal["nothing", "seconds", "snapshot", "everything"]

# From the least to the most.
LOSS_DESCRIPTIONS: Final[Mapping[Loss, str]] = {
    "nothing": "acknowledged writes survive a crash of the server and a power cut",
    "seconds": "a crash of the server or a power cut may lose the last seconds: 2, or 30 with appendfsync no",
    "snapshot": "a crash of the server or a power cut loses the writes since its last snapshot: minutes to an hour",
    "everything": "a restart of the server loses everything",
}
# Seconds of silence after which a connection is given up: a reply takes milliseconds, with the slowest disk a second.
TIMEOUT_S: Final = 5.0
# Maximum seconds between two attempts to reach a server that is away. The pauses double up to this.
MAX_PAUSE_S: Final = 1.0
# Prefix of all keys and channels, unless another one is given.
DEFAULT_PREFIX: Final = "agentfsm:"
# Version of the keys, which the script stores; see `rules.MINOR_VERSIONS`.
SCHEMA_VERSION: Final = 400
# The oldest tested version of Redis.
OLDEST_REDIS: Final = 6

# Default maximum bytes of one argument (proto-max-bulk-len). The server disconnects clients that send more.
MAX_ARG_BYTES: Final = 512 * 2**20

# Settings to read by CONFIG GET, which some servers refuse.
_CONFIG_SETTINGS: Final = (
    "appendfsync",
    "no-appendfsync-on-rewrite",
    "save",
    "maxmemory",
    "maxmemory-policy",
    "proto-max-bulk-len",
)
# Codes of errors whose text lacks the code, because the driver removes it.
_ERROR_CODES: Final[Mapping[type[Exception], str]] = {
    AuthenticationError: "NOAUTH",
    BusyLoadingError: "LOADING",
    LostError: "lost",
    MasterDownError: "MASTERDOWN",
    NoPermissionError: "NOPERM",
    NoScriptError: "NOSCRIPT",
    OutOfMemoryError: "OOM",
    ReadOnlyError: "READONLY",
    SilentError: "silent",
}
# Cause and remedy by code.
_ADVICE: Final[Mapping[str, str]] = {
    "lost": "check that it runs and can be reached, then resume the runs",
    "silent": "find out why it does not answer, then resume the runs",
    "BUSY": "a script of another client blocks it: end that with SCRIPT KILL, then resume the runs",
    "LOADING": "it is still loading its data: resume the runs when it has finished",
    "MASTERDOWN": "it is a replica: give the address of the master, or wait until there is one, then resume the runs",
    "MISCONF": "it cannot write to its disk and therefore refuses writes: see its log, then resume the runs",
    "NOAUTH": "it refuses the login: put user and password into the URL",
    "NOPERM": "this user may not do that: allow it EVALSHA, SCRIPT LOAD, INFO, and all commands on keys of the prefix",
    "NOREPLICAS": "it has too few replicas to accept writes (min-replicas-to-write): add some, then resume the runs",
    "NOSCRIPT": "it loses scripts at once: give the address of one server, not of a proxy in front of several",
    "OUTDATED": "an older agentfsm writes its keys: stop that one, then call again",
    "OOM": "it has reached its maxmemory: raise that or prune old runs, then resume the runs",
    "READONLY": "it is a replica: give the address of the master, or wait until there is one, then resume the runs",
    "WRONGTYPE": "a key with this prefix was not written by agentfsm: give another prefix, or restore a backup",
}
_CODE_PATTERN: Final = re.compile(r"(?:^|-)([A-Z]{3,})\b")
# Errors of a restart or a failover. Redis has not executed a command that it answers so.
_TRANSIENT: Final = frozenset(
    {"lost", "silent", "BUSY", "LOADING", "MASTERDOWN", "NOREPLICAS", "NOSCRIPT", "OUTDATED", "READONLY"},
)


class RedisConnection(Protocol):
    """The used part of a connection of the driver."""

    def connect(self) -> None:
        """Connect, and log in."""
        ...

    def disconnect(self) -> None:
        """Close the socket."""
        ...

    def send_command(self, *command: str | bytes) -> None:
        """Send one command."""
        ...

    def pack_commands(self, commands: Sequence[tuple[bytes, ...]]) -> list[bytes]:
        """Return the encoded commands."""
        ...

    def send_packed_command(self, command: list[bytes]) -> None:
        """Send encoded commands."""
        ...

    def read_response(self) -> Any:
        """Return the next reply, or raise it if it is an error."""
        ...


class ReplyPendingError(AgentError):
    """A reply has not arrived yet: the job is stopped, and executed again afterwards. Callers never see this error."""


@attrs.define(eq=False, repr=False)
class RedisRequest:
    """One call of an operation of the script."""

    args: tuple[bytes, ...]
    """Name of the operation, and its arguments."""

    number: int
    """Number of the request in this process, by which the script finds the outcome if the reply was lost."""

    is_sent: bool = False
    """True if the request was sent before."""

    sent_at: float = 0.0
    """Time when it was last sent, seconds by the boot clock."""

    reply: Any = None
    """The reply: a list, or an error of this request; None before it has arrived."""


@attrs.frozen(kw_only=True)
class DurabilityGuarantee(Value):
    """The durability of a server's writes, and the settings that determine it."""

    server: str
    """Name and version of the server."""

    loss: Loss
    """The most that a crash may lose."""

    shown: Mapping[str, str]
    """Values of the relevant settings."""

    hidden: tuple[str, ...]
    """Relevant settings that the server does not show. The worst value is assumed."""

    def __str__(self) -> str:
        shown = [f"{name} {value or repr('')}" for name, value in self.shown.items()]
        hidden = [f"{name} not shown, so the worst is assumed" for name in self.hidden]
        return f"{self.server} ({', '.join(shown + hidden)}): {LOSS_DESCRIPTIONS[self.loss]}"


@attrs.define(eq=False, repr=False, kw_only=True)
class RedisServer(PushNotificationMixin):
    """A server, connected at the first request. Only the store's thread uses it."""

    url: str = attrs.field(repr=False)
    """Address of the server, with user and password."""

    script: str = attrs.field(repr=False)
    """The Lua script of the operations."""

    script_args: tuple[bytes, ...]
    """Arguments of all calls of the script: first the prefix of all keys."""

    accept_loss: Loss
    """The most that a crash of the server may lose; other servers are refused."""

    patience_s: float
    """Maximum wait for a server that is away, seconds."""

    outage: Outage
    """The last outage, which extends leases."""

    last_sent_at: float = attrs.field(default=0.0, init=False)
    """Time when the request of the last returned reply was sent, seconds by the boot clock."""

    guarantee: DurabilityGuarantee | None = attrs.field(default=None, init=False)
    """Durability of the server at the last connection; None before the first."""

    _max_arg_bytes: int = attrs.field(default=MAX_ARG_BYTES, init=False)
    """Maximum bytes of an argument that the server accepts."""

    _connection: RedisConnection | None = attrs.field(default=None, init=False)
    _away_since: float | None = attrs.field(default=None, init=False)
    """Start of the outage, monotonic seconds; None while the server answers."""

    _requests: dict[tuple[tuple[object, ...], int], RedisRequest] = attrs.field(factory=dict, init=False)
    """Requests of the group, by arguments and by the number of earlier requests with the same arguments."""

    _call_counts: Counter[tuple[object, ...]] = attrs.field(factory=Counter, init=False)
    """Number of requests with the same arguments since the group was last started."""

    _has_stopped_job: bool = attrs.field(default=False, init=False)
    """Whether a job of the group was stopped since the group was last started, because its reply had not arrived."""

    _number: int = attrs.field(default=0, init=False)
    _commit_callbacks: list[Callable[[], None]] = attrs.field(factory=list, init=False)
    """Functions to call when the group is done."""

    @property
    def address(self) -> str:
        """Address of the server, without user and password."""
        return format_address(self.url)

    # Requests.

    @contextmanager
    def transaction(
        self,
        *,
        write: bool,  # noqa: ARG002  all operations work the same way
        durability: Durability,  # noqa: ARG002
        runs: Collection[str],  # noqa: ARG002
    ) -> Iterator[None]:
        """Run the block and send its requests.

        Raises:
            ReplyPendingError: if there were requests; the block must then be run again, with their replies.
        """
        self._commit_callbacks.clear()
        self._call_counts.clear()
        self._has_stopped_job = False
        yield
        if requests := self._pending_requests():
            self.send_pipeline(requests)
        if requests or self._has_stopped_job:  # another job, with `at_once`, may have sent its requests
            raise ReplyPendingError
        self._requests.clear()
        for act in self._commit_callbacks:
            act()

    def after_commit(self, act: Callable[[], None]) -> None:
        """Call a function once the whole group is done; never if it failed."""
        self._commit_callbacks.append(act)

    def call(self, *args: object, at_once: bool = False) -> list[Any]:
        """Return the script's reply, inside a transaction.

        Args:
            args: The operation and its arguments.
            at_once: Wait for the reply, for operations of many steps, which would be restarted for each.

        Raises:
            ReplyPendingError: if the reply has not arrived yet.
            MisuseError: if an argument cannot be stored.
            StoreError: if the server failed to execute this request.
        """
        key = args, self._call_counts[args]
        self._call_counts[args] += 1
        request = self._requests.get(key)
        if request is None:
            request = self._requests[key] = self._build_request(args)
        if request.reply is None and at_once:
            self.send_pipeline(self._pending_requests())
        if request.reply is None:
            self._has_stopped_job = True
            raise ReplyPendingError
        self.last_sent_at = request.sent_at
        return self._unwrap_reply(request)

    def call_all(self, calls: Sequence[Sequence[object]]) -> list[list[Any]]:
        """Send requests outside of jobs. Return their replies in the same order."""
        requests = [self._build_request(args) for args in calls]
        self.send_pipeline(requests)
        return [self._unwrap_reply(request) for request in requests]

    def is_answered(self, *reply: bytes) -> bool:
        """Return whether a reply to the group's requests begins with these values."""
        replies = [request.reply for request in self._requests.values() if isinstance(request.reply, list)]
        return any(each[: len(reply)] == list(reply) for each in replies)

    def send_pipeline(self, requests: Sequence[RedisRequest]) -> None:
        """Send requests in one pipeline, and read the replies until the first failure."""
        try:
            connection = self._connect()
            requests = [request for request in requests if self._check_size(request)]
            commands = [self._build_command(request) for request in requests]
            for request in requests:
                request.is_sent, request.sent_at = True, boot_clock()
            connection.send_packed_command(connection.pack_commands(commands))
            _read_replies(connection, requests)
        except BaseException:  # unread replies would be taken for those of the next requests
            self.outage.begin()
            self.disconnect()
            raise
        self._away_since = None
        self.outage.end()

    def _build_request(self, args: Sequence[object]) -> RedisRequest:
        self._number += 1
        try:
            return RedisRequest(tuple([_encode_arg(arg) for arg in args]), self._number)
        except UnicodeEncodeError as error:
            raise MisuseError(f"{self.address} cannot store a value ({error}): ids, keys and names are text") from None

    def _check_size(self, request: RedisRequest) -> bool:
        """Return whether the server accepts the size of the request. If not, set a MisuseError as its reply."""
        size = max(map(len, request.args))
        if size > self._max_arg_bytes:
            request.reply = MisuseError(
                f"{self.address} accepts records of at most {self._max_arg_bytes:,} bytes, and this one has {size:,}: "
                "make it smaller, or raise proto-max-bulk-len there",
            )
        return request.reply is None

    def _pending_requests(self) -> list[RedisRequest]:
        return [request for request in self._requests.values() if request.reply is None]

    def _build_command(self, request: RedisRequest) -> tuple[bytes, ...]:
        is_repeated = b"1" if request.is_sent else b"0"
        return (
            b"EVALSHA",
            _script_sha1(self.script),
            b"0",
            *self.script_args,
            b"%f" % self.outage.grace_s,
            is_repeated,
            b"%d" % request.number,
            *request.args,
        )

    def _unwrap_reply(self, request: RedisRequest) -> list[Any]:
        if isinstance(request.reply, AgentError):
            raise request.reply
        if isinstance(request.reply, Exception):
            raise self.translate_error(request.reply) from request.reply
        result: list[Any] = request.reply
        if result[0] == b"too new":
            self._check_schema(result[1])
        return result

    # Errors and retries.

    def wait_to_retry(self, error: Exception) -> bool:
        """Return whether to execute the jobs again: at once if replies arrived, or after a pause if the server is away.

        The first connection is only retried while the server starts, because otherwise the address is probably wrong.
        """
        if isinstance(error, ReplyPendingError):
            return True
        code = _error_code(error)
        now = time.monotonic()
        if self._away_since is None:
            self._away_since = now
        waited_s = now - self._away_since
        if code in _TRANSIENT and (self.guarantee or code == "LOADING") and waited_s < self.patience_s:
            _log.info(
                "%s: waiting up to %g s for it, %.3f s so far: %s", self.address, self.patience_s, waited_s, error
            )
            time.sleep(min(waited_s, MAX_PAUSE_S))  # in the store's own thread
            return True
        self._requests.clear()
        self._away_since = None
        return False

    def is_lock_error(self, error: Exception) -> bool:  # noqa: ARG002  a file backend uses it
        """Return False: Redis has no locks."""
        return False

    def is_job_error(self, error: Exception) -> bool:  # noqa: ARG002  a file backend uses it
        """Return False: the error of a request is raised in its own job."""
        return False

    def translate_error(self, error: Exception) -> AgentError:
        """Return the AgentError that reports an error of the server or of Python to callers."""
        if not isinstance(error, RedisError):
            return StoreError(f"{self.address}: the store failed because of a bug in it ({error!r}): please report it")
        code = _error_code(error)
        kind = CorruptError if code == "WRONGTYPE" else StoreError
        why = _ADVICE.get(code, "the write was not acknowledged: see Redis's message, then resume the runs")
        problem = "Redis says" if isinstance(error, ResponseError) else "the connection failed:"
        return kind(f"{self.address}: {problem} {str(error)!r}; {why}")

    def disconnect(self) -> None:
        """Close the connection; the next request opens another."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.disconnect()

    # Connect.

    def _connect(self) -> RedisConnection:
        if self._connection is None:
            connection = build_connection(self.url)
            try:
                connection.connect()
                self.guarantee = self._inspect_server(connection)
                self._migrate(connection)
            except BaseException:
                connection.disconnect()
                raise
            self._connection = connection
        return self._connection

    def _inspect_server(self, connection: RedisConnection) -> DurabilityGuarantee:
        """Load the script, and check that the server is suitable."""
        text: bytes = _send_command(connection, "INFO")
        lines = [line.partition(":") for line in text.decode(errors="replace").splitlines()]
        info = {name: value for name, colon, value in lines if colon}
        if info.get("loading", "0") != "0":  # while it loads its log, it reports that it has none
            raise BusyLoadingError("it is still reading its data")
        shown = _settings(connection)
        _send_command(connection, "SCRIPT", "LOAD", self.script)
        if info.get("role", "master") != "master":
            raise ReadOnlyError("You can't write against a read only replica.")
        self._check_kind(info)
        self._check_schema(_send_command(connection, "GET", self.script_args[0] + b"schema"))
        limit = shown.get("maxmemory") or info.get("maxmemory")
        policy = shown.get("maxmemory-policy") or info.get("maxmemory_policy", "noeviction")
        if limit not in (None, "0") and policy != "noeviction":
            raise StoreError(
                f"{self.address} evicts keys, and so journals, when its memory is full (maxmemory {limit}, "
                f"maxmemory-policy {policy}): set maxmemory-policy noeviction there, or give another server",
            )
        self._max_arg_bytes = int(shown.get("proto-max-bulk-len", MAX_ARG_BYTES))
        return self._check_guarantee(_assess_guarantee(info, shown))

    def _migrate(self, connection: RedisConnection) -> None:
        """Upgrade the keys of an older agentfsm."""
        prefix, start = self.script_args[0], 0
        schema = _send_command(connection, "GET", prefix + b"schema")
        is_old = schema is not None and int(schema) < SCHEMA_VERSION
        while start >= 0 and (is_old or _send_command(connection, "EXISTS", prefix + b"upgrading")):
            request = RedisRequest((b"upgrade", b"%d" % start), 0)
            _, start = _send_command(connection, *self._build_command(request))

    def _check_kind(self, info: Mapping[str, str]) -> None:
        if info.get("cluster_enabled") == "1":
            raise StoreError(
                f"{self.address} is part of a Redis Cluster, which agentfsm does not support, because each operation "
                "uses keys of many slots: give the address of a single server, which may have replicas",
            )
        version = info.get("redis_version", "")
        if version.partition(".")[0].isdecimal() and int(version.partition(".")[0]) < OLDEST_REDIS:
            raise StoreError(f"{self.address} is Redis {version}: agentfsm needs {OLDEST_REDIS} or later, or Valkey")

    def _check_schema(self, schema: bytes | int | None) -> None:
        check_major_version(
            f"{self.address}, prefix {self.script_args[0].decode()!r},", int(schema or 0), SCHEMA_VERSION
        )

    def _check_guarantee(self, guarantee: DurabilityGuarantee) -> DurabilityGuarantee:
        """Return the guarantee unchanged, if the server may not lose more than `accept_loss`.

        Raises:
            MisuseError: if it may lose more.
        """
        kinds = list(LOSS_DESCRIPTIONS)
        if kinds.index(guarantee.loss) <= kinds.index(self.accept_loss):
            return guarantee
        raise MisuseError(
            f"{self.address} may lose more than accept_loss={self.accept_loss!r} allows: {guarantee}. Set appendonly "
            "yes, appendfsync always and no-appendfsync-on-rewrite no there; or accept the loss, which also applies to "
            f"posts and to durability='full': RedisStore(..., accept_loss={guarantee.loss!r})",
        )


_parse_options: Final[Callable[[str], dict[str, Any]]] = parse_url


def build_connection(url: str) -> RedisConnection:
    """Return a connection that is not connected yet, and does not retry.

    Raises:
        MisuseError: if the URL is invalid, or has an unknown option; without the URL, which may contain a password.
    """
    try:
        options = {"socket_timeout": TIMEOUT_S, **_parse_options(url)}
    except ValueError:
        raise MisuseError(
            "invalid URL of a Redis: give redis://[[USER]:PASSWORD@]HOST[:PORT][/DATABASE], rediss:// for TLS, or "
            "unix://[[USER]:PASSWORD@]PATH[?db=DATABASE], with special characters of a password as %XX",
        ) from None
    kind: Callable[..., RedisConnection] = options.pop("connection_class", Connection)
    try:
        return kind(**{**options, "decode_responses": False, "protocol": 2})
    except TypeError as error:
        name = str(error).rpartition(" ")[2]
        raise MisuseError(f"the URL of the Redis has an option that its driver does not know: {name}") from None


def iter_notifications(url: str, channel: str) -> Iterator[str]:
    """Yield the notifications of a channel, on a separate connection; see `NotificationSource`."""
    for _, message in iter_messages(url, lambda: (channel,), CHECK_INTERVAL_S):
        yield message.decode(errors="replace")


def iter_messages(
    url: str, list_channels: Callable[[], Collection[str]], interval_s: float
) -> Iterator[tuple[str, bytes]]:
    """Yield the messages of channels with their channel, on a separate connection.

    The channels are listed before each item. An empty channel and message are yielded after each change of the
    channels, and after each `interval_s` without a message.
    """
    with Redis.from_url(url, socket_connect_timeout=TIMEOUT_S) as client, client.pubsub() as subscriber:
        subscribed: set[str] = set()
        while True:
            wanted = set(list_channels())
            if wanted - subscribed:
                subscriber.subscribe(*wanted - subscribed)
            if subscribed - wanted:
                subscriber.unsubscribe(*subscribed - wanted)
            subscribed = wanted
            heard = subscriber.get_message(timeout=interval_s)
            if heard and heard["type"] == "message":
                yield heard["channel"].decode(errors="replace"), heard["data"]
            else:
                yield "", b""


def publish_heard(
    connection: RedisConnection, items: Mapping[str, Sequence[Any]], encode: Callable[[Sequence[Any]], bytes]
) -> set[str]:
    """Publish the items of each channel that has a subscriber, as one message. Return these channels."""
    counts = _send_command(connection, "PUBSUB", "NUMSUB", *items)
    heard = {counts[at] for at in range(0, len(counts), 2) if int(counts[at + 1])}
    channels = [channel for channel in items if channel.encode() in heard]
    commands = [(b"PUBLISH", channel.encode(), encode(items[channel])) for channel in channels]
    if commands:
        connection.send_packed_command(connection.pack_commands(commands))
    for _ in commands:
        connection.read_response()
    return set(channels)


def format_address(url: str) -> str:
    """Return the address in a URL, without user and password."""
    options = _parse_options(url)
    where = options.get("path") or f"{options.get('host', 'localhost')}:{options.get('port', 6379)}"
    return f"Redis at {where}, database {options.get('db', 0)}"


def _read_replies(connection: RedisConnection, requests: Sequence[RedisRequest]) -> None:
    """Read the replies. Discard those after a transient error, since later requests may depend on the failed one."""
    transient: ResponseError | None = None
    for request in requests:
        reply = _read_reply(connection)
        if transient is None and isinstance(reply, ResponseError) and _error_code(reply) in _TRANSIENT:
            transient = reply
        if transient is None:
            request.reply = reply
    if transient is not None:
        raise transient


def _read_reply(connection: RedisConnection) -> Any:
    try:
        return connection.read_response()
    except ResponseError as error:
        return error


def _send_command(connection: RedisConnection, *command: str | bytes) -> Any:
    connection.send_command(*command)
    return connection.read_response()


def _settings(connection: RedisConnection) -> dict[str, str]:
    """Return the settings that the server shows; many managed servers show none."""
    shown = {}
    for name in _CONFIG_SETTINGS:
        connection.send_command("CONFIG", "GET", name)
        reply = _read_reply(connection)
        if isinstance(reply, list) and reply:
            shown[name] = reply[1].decode(errors="replace")
    return shown


def _assess_guarantee(info: Mapping[str, str], shown: Mapping[str, str]) -> DurabilityGuarantee:
    """Derive the guarantee from the settings. For hidden settings, assume the worst."""
    has_log = info.get("aof_enabled") == "1"
    names = ("appendfsync", "no-appendfsync-on-rewrite") if has_log else ("save",)
    decisive = {"appendonly": "yes" if has_log else "no", **{name: shown[name] for name in names if name in shown}}
    if has_log:
        # no-appendfsync-on-rewrite suspends appendfsync always while the log is rewritten.
        waits = (shown.get("appendfsync"), shown.get("no-appendfsync-on-rewrite")) == ("always", "no")
        loss: Loss = "nothing" if waits else "seconds"
    else:
        loss = "snapshot" if shown.get("save") else "everything"
    valkey = info.get("valkey_version")
    return DurabilityGuarantee(
        server=f"Valkey {valkey}" if valkey else f"Redis {info.get('redis_version', 'of unknown version')}",
        loss=loss,
        shown=decisive,
        hidden=tuple(name for name in names if name not in shown),
    )


def _encode_arg(value: object) -> bytes:
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, bytes):
        return value
    if isinstance(value, bool):
        return b"1" if value else b"0"
    return b"" if value is None else repr(value).encode()


@cache
def _script_sha1(script: str) -> bytes:
    return sha1(script.encode(), usedforsecurity=False).hexdigest().encode()


def _error_code(error: Exception) -> str:
    """Return the code of an error of Redis. Redis 6 wraps an error inside a script ("ERR ...: -OOM ...")."""
    for kind in type(error).__mro__:
        if kind in _ERROR_CODES:
            return _ERROR_CODES[kind]
    codes = _CODE_PATTERN.findall(str(error)) if isinstance(error, RedisError) else []
    return next((code for code in codes if code in _ADVICE), "")
