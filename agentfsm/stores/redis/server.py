"""One Redis server: reached, looked at, and asked in pipelines. Knows what the server is, not what is kept in it.

A server that waits for the disk does so once for all that has come in together. So a group of jobs sends what it asks
in one pipeline: a job whose answer is not there yet is stopped, and done again when all answers are. This also serves
where a connection breaks: what was answered stands, and only the rest is asked again, marked as asked before, so that
the script can find out whether it was done. Hence three rules for a job: it asks the same each time, it acts on answers
in `after_commit` only, and what the script does is whole whenever it is asked.
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

from agentfsm._concurrency import boot_clock
from agentfsm.core.errors import AgentError, CorruptError, MisuseError, StoreError, TooNewError
from agentfsm.core.value import Value
from agentfsm.ports.store import Durability
from agentfsm.stores.threaded.change_listener import CHECK_INTERVAL_S, PushNotificationMixin
from agentfsm.stores.threaded.outage import Outage

_log = logging.getLogger("agentfsm.stores")

# The most that a crash of the server may cost of what it has acknowledged.
Loss: TypeAlias = Literal["nothing", "seconds", "snapshot", "everything"]

# From the least to the most.
LOSS_DESCRIPTIONS: Final[Mapping[Loss, str]] = {
    "nothing": "what it acknowledged survives a crash of it and a power cut",
    "seconds": "a crash of it or a power cut may cost the last seconds: two, or thirty with appendfsync no",
    "snapshot": "a crash of it or a power cut costs what came after its last snapshot: minutes, at times an hour",
    "everything": "its restart costs everything",
}
# Seconds of silence after which a connection is given up: an answer takes milliseconds, with the slowest disk a second.
TIMEOUT_S: Final = 5.0
# Seconds between two attempts to reach a server that is away; up to this each is as long as all before it together.
MAX_PAUSE_S: Final = 1.0
# The version of the keys; the script writes it down.
SCHEMA_VERSION: Final = 2
# The version of Redis that is tried here, as its successors are.
OLDEST_REDIS: Final = 6

# Bytes of one argument; a server is set otherwise by proto-max-bulk-len, and hangs up on whoever sends more.
MAX_ARG_BYTES: Final = 512 * 2**20

# What the server is asked for by CONFIG GET, which some do not answer.
_CONFIG_SETTINGS: Final = (
    "appendfsync",
    "no-appendfsync-on-rewrite",
    "save",
    "maxmemory",
    "maxmemory-policy",
    "proto-max-bulk-len",
)
# The codes of errors whose code the driver cuts off; in the text of all others it can be read.
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
# By code: why, and what next.
_ADVICE: Final[Mapping[str, str]] = {
    "lost": "see whether it runs and can be reached, then resume the runs",
    "silent": "see what keeps it from answering, then resume the runs",
    "BUSY": "somebody's script keeps it busy: end that with SCRIPT KILL, then resume the runs",
    "LOADING": "it is still reading its data: resume the runs when it has",
    "MASTERDOWN": "it is a replica: give the address of the master, or wait until there is one, then resume the runs",
    "MISCONF": "it cannot write to its disk and therefore takes no writes: see its log, then resume the runs",
    "NOAUTH": "it does not let us in: put user and password into the URL",
    "NOPERM": "this user may not do that: allow it EVALSHA, SCRIPT LOAD, INFO, and all commands on keys of the prefix",
    "NOREPLICAS": "it has too few replicas to take writes (min-replicas-to-write): see to them, then resume the runs",
    "NOSCRIPT": "it forgets scripts at once: give the address of one server, not of a proxy before several",
    "OOM": "it has reached its maxmemory: raise that or prune old runs, then resume the runs",
    "READONLY": "it is a replica: give the address of the master, or wait until there is one, then resume the runs",
    "WRONGTYPE": "a key of ours holds what agentfsm did not write: give another prefix, or restore a backup",
}
_CODE_PATTERN: Final = re.compile(r"(?:^|-)([A-Z]{3,})\b")
# What comes with a restart or a failover. Redis has done nothing of what it answers so.
_TRANSIENT: Final = frozenset(
    {"lost", "silent", "BUSY", "LOADING", "MASTERDOWN", "NOREPLICAS", "NOSCRIPT", "READONLY"},
)


class RedisConnection(Protocol):
    """A connection of the driver, as far as it is used here."""

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
        """Return the commands as they are sent."""
        ...

    def send_packed_command(self, command: list[bytes]) -> None:
        """Send what was packed."""
        ...

    def read_response(self) -> Any:
        """Return the next answer, or raise it where it is an error."""
        ...


class ReplyPendingError(AgentError):
    """The answer is not there yet: the job is stopped, and done again when it is. No caller is ever told."""


@attrs.define(eq=False, repr=False)
class RedisRequest:
    """One operation of the script."""

    args: tuple[bytes, ...]
    number: int
    """Among all of this process, so that what it came to can be looked up when the answer was lost on its way."""

    is_sent: bool = False
    sent_at: float = 0.0
    """Seconds by the boot clock, the last time."""

    reply: Any = None
    """None until it is there: a list, or an error that is of this question alone."""


@attrs.frozen(kw_only=True)
class DurabilityGuarantee(Value):
    """What a server promises, and by which settings."""

    server: str
    """Name and version."""

    loss: Loss
    shown: Mapping[str, str]
    """The settings that decide."""

    hidden: tuple[str, ...]
    """Those that it does not show; of them the worst is assumed."""

    def __str__(self) -> str:
        shown = [f"{name} {value or repr('')}" for name, value in self.shown.items()]
        hidden = [f"{name} not shown, so the worst is assumed" for name in self.hidden]
        return f"{self.server} ({', '.join(shown + hidden)}): {LOSS_DESCRIPTIONS[self.loss]}"


@attrs.define(eq=False, repr=False, kw_only=True)
class RedisServer(PushNotificationMixin):
    """The server, reached when it is needed. It belongs to the thread that uses it."""

    url: str = attrs.field(repr=False)
    script: str = attrs.field(repr=False)
    script_args: tuple[bytes, ...]
    """What the script is told each time; first the prefix of all keys."""

    accept_loss: Loss
    patience_s: float
    outage: Outage
    last_sent_at: float = attrs.field(default=0.0, init=False)
    """Seconds by the boot clock, when the question was sent whose answer `ask` has returned last."""

    guarantee: DurabilityGuarantee | None = attrs.field(default=None, init=False)
    """What was promised when the server was reached last; None until it was for the first time."""

    _max_arg_bytes: int = attrs.field(default=MAX_ARG_BYTES, init=False)
    """Bytes that the server takes."""

    _connection: RedisConnection | None = attrs.field(default=None, init=False)
    _away_since: float | None = attrs.field(default=None, init=False)
    """Monotonic seconds; None while it answers."""

    _requests: dict[tuple[tuple[object, ...], int], RedisRequest] = attrs.field(factory=dict, init=False)
    """Those of the group, by their words and by how often the group had asked the same before."""

    _call_counts: Counter[tuple[object, ...]] = attrs.field(factory=Counter, init=False)
    """How often the words were asked since the group was begun, or begun again."""

    _number: int = attrs.field(default=0, init=False)
    _commit_callbacks: list[Callable[[], None]] = attrs.field(factory=list, init=False)
    """What has to be done once the group is done."""

    @property
    def address(self) -> str:
        """Where it is, without user and password."""
        return format_address(self.url)

    # Questions.

    @contextmanager
    def transaction(
        self,
        *,
        write: bool,  # noqa: ARG002  it knows one way
        durability: Durability,  # noqa: ARG002
        runs: Collection[str],  # noqa: ARG002
    ) -> Iterator[None]:
        """Run the block and send what it has asked; as long as that is something, the block has to be run again."""
        self._commit_callbacks.clear()
        self._call_counts.clear()
        yield
        if questions := self._pending_requests():
            self.send_pipeline(questions)
            raise ReplyPendingError
        self._requests.clear()
        for act in self._commit_callbacks:
            act()

    def after_commit(self, act: Callable[[], None]) -> None:
        """Do something once the whole group is done; never when it failed."""
        self._commit_callbacks.append(act)

    def call(self, *args: object, at_once: bool = False) -> list[Any]:
        """Return the script's answer, inside a transaction.

        Args:
            args: The operation and its arguments.
            at_once: Wait for it here: for what takes many steps, and would be begun again for each.

        Raises:
            UnansweredError: when it is not there yet.
            MisuseError: when a word cannot be stored.
            StoreError: when the server failed at this one question.
        """
        key = args, self._call_counts[args]
        self._call_counts[args] += 1
        question = self._requests.get(key)
        if question is None:
            question = self._requests[key] = self._build_request(args)
        if question.reply is None and at_once:
            self.send_pipeline(self._pending_requests())
        if question.reply is None:
            raise ReplyPendingError
        self.last_sent_at = question.sent_at
        return self._unwrap_reply(question)

    def call_all(self, calls: Sequence[Sequence[object]]) -> list[list[Any]]:
        """Return the answers to questions that no job asks, in their order."""
        asked = [self._build_request(words) for words in calls]
        self.send_pipeline(asked)
        return [self._unwrap_reply(question) for question in asked]

    def is_answered(self, *reply: bytes) -> bool:
        """Whether something that the group has asked was answered like this, at least to begin with."""
        answers = [question.reply for question in self._requests.values() if isinstance(question.reply, list)]
        return any(each[: len(reply)] == list(reply) for each in answers)

    def send_pipeline(self, requests: Sequence[RedisRequest]) -> None:
        """Send questions in one pipeline, and read the answers as far as they come."""
        try:
            connection = self._connect()
            requests = [question for question in requests if self._check_size(question)]
            commands = [self._build_command(question) for question in requests]
            for question in requests:
                question.is_sent, question.sent_at = True, boot_clock()
            connection.send_packed_command(connection.pack_commands(commands))
            _read_replies(connection, requests)
        except BaseException:  # with answers left unread the next question would get another's
            self.outage.begin()
            self.disconnect()
            raise
        self._away_since = None
        self.outage.end()

    def _build_request(self, args: Sequence[object]) -> RedisRequest:
        self._number += 1
        try:
            return RedisRequest(tuple([_encode_arg(word) for word in args]), self._number)
        except UnicodeEncodeError as error:
            raise MisuseError(f"{self.address} cannot hold a value ({error}): ids, keys and names are text") from None

    def _check_size(self, request: RedisRequest) -> bool:
        """Whether the server would not hang up on the question; else that is its answer, and the others are asked."""
        size = max(map(len, request.args))
        if size > self._max_arg_bytes:
            request.reply = MisuseError(
                f"{self.address} takes records of at most {self._max_arg_bytes:,} bytes, and this one has {size:,}: "
                "make it smaller, or raise proto-max-bulk-len there",
            )
        return request.reply is None

    def _pending_requests(self) -> list[RedisRequest]:
        return [question for question in self._requests.values() if question.reply is None]

    def _build_command(self, request: RedisRequest) -> tuple[bytes, ...]:
        again = b"1" if request.is_sent else b"0"
        return (
            b"EVALSHA",
            _script_sha1(self.script),
            b"0",
            *self.script_args,
            b"%f" % self.outage.grace_s,
            again,
            b"%d" % request.number,
            *request.args,
        )

    def _unwrap_reply(self, request: RedisRequest) -> list[Any]:
        if isinstance(request.reply, AgentError):
            raise request.reply
        if isinstance(request.reply, Exception):
            raise self.translate_error(request.reply) from request.reply
        result: list[Any] = request.reply
        return result

    # Upkeep.

    def wait_to_retry(self, error: Exception) -> bool:
        """Return whether to do the jobs again: since there are answers now, or after a pause, since it may be back.

        A server that was never reached is waited for only while it starts: else the address is more likely wrong.
        """
        if isinstance(error, ReplyPendingError):
            return True
        code = _error_code(error)
        waited_s = self._measure_wait_s()
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
        """Return False: an error of one question is told to its own job."""
        return False

    def translate_error(self, error: Exception) -> AgentError:
        """Return what callers are told of an error of the server's, or of Python's."""
        if not isinstance(error, RedisError):
            return StoreError(f"{self.address}: the store failed by a fault of its own ({error!r}): please report it")
        code = _error_code(error)
        kind = CorruptError if code == "WRONGTYPE" else StoreError
        why = _ADVICE.get(code, "nothing of it was acknowledged: see Redis's own words, then resume the runs")
        what = "Redis says" if isinstance(error, ResponseError) else "the connection failed:"
        return kind(f"{self.address}: {what} {str(error)!r}; {why}")

    def _measure_wait_s(self) -> float:
        now = time.monotonic()
        if self._away_since is None:
            self._away_since = now
        return now - self._away_since

    def disconnect(self) -> None:
        """Hang up; the next question calls again."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.disconnect()

    # Reaching it.

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
        """Load the script, and see whether the server is one that we can rely on."""
        info = _parse_info(_send_command(connection, "INFO"))
        if info.get("loading", "0") != "0":  # until it has read its log, it says that it keeps none
            raise BusyLoadingError("it is still reading its data")
        shown = _settings(connection)
        _send_command(connection, "SCRIPT", "LOAD", self.script)
        if info.get("role", "master") != "master":
            raise ReadOnlyError("You can't write against a read only replica.")
        self._check_kind(info)
        self._check_schema(_send_command(connection, "GET", self.script_args[0] + b"schema"))
        self._check_eviction(shown.get("maxmemory") or info.get("maxmemory"), shown, info)
        self._max_arg_bytes = int(shown.get("proto-max-bulk-len", MAX_ARG_BYTES))
        return self._check_guarantee(_assess_guarantee(info, shown))

    def _migrate(self, connection: RedisConnection) -> None:
        """Bring the keys of an older agentfsm up to date."""
        schema, start = _send_command(connection, "GET", self.script_args[0] + b"schema"), 0
        while schema is not None and int(schema) < SCHEMA_VERSION and start >= 0:
            question = RedisRequest((b"upgrade", b"%d" % start), 0)
            _, start = _send_command(connection, *self._build_command(question))

    def _check_kind(self, info: Mapping[str, str]) -> None:
        if info.get("cluster_enabled") == "1":
            raise StoreError(
                f"{self.address} is part of a Redis Cluster, which agentfsm does not support, since each operation "
                "touches keys of many slots: give the address of a server that stands alone or has replicas",
            )
        version = info.get("redis_version", "")
        if version.partition(".")[0].isdecimal() and int(version.partition(".")[0]) < OLDEST_REDIS:
            raise StoreError(f"{self.address} is Redis {version}: agentfsm needs {OLDEST_REDIS} or later, or Valkey")

    def _check_eviction(self, limit: str | None, shown: Mapping[str, str], info: Mapping[str, str]) -> None:
        policy = shown.get("maxmemory-policy") or info.get("maxmemory_policy", "noeviction")
        if limit not in (None, "0") and policy != "noeviction":
            raise StoreError(
                f"{self.address} throws keys away when its memory is full (maxmemory {limit}, maxmemory-policy "
                f"{policy}), and with them journals: set maxmemory-policy noeviction there, or give another server",
            )

    def _check_schema(self, schema: bytes | None) -> None:
        if schema is not None and int(schema) > SCHEMA_VERSION:
            raise TooNewError(
                f"{self.address}: its keys were written by a newer agentfsm (schema {int(schema)}, this one knows "
                f"{SCHEMA_VERSION}): upgrade agentfsm",
            )

    def _check_guarantee(self, guarantee: DurabilityGuarantee) -> DurabilityGuarantee:
        """Refuse a server that may lose more than was accepted."""
        kinds = list(LOSS_DESCRIPTIONS)
        if kinds.index(guarantee.loss) <= kinds.index(self.accept_loss):
            return guarantee
        raise MisuseError(
            f"{self.address} promises less than was asked for (accept_loss={self.accept_loss!r}): {guarantee}. Set "
            "there appendonly yes, appendfsync always and no-appendfsync-on-rewrite no; or accept it, for posts and "
            f"for durability='full' too: RedisStore(..., accept_loss={guarantee.loss!r})",
        )


_parse_options: Final[Callable[[str], dict[str, Any]]] = parse_url


def build_connection(url: str) -> RedisConnection:
    """Return a connection that is not connected yet: its driver does nothing of its own accord.

    Raises:
        MisuseError: when it is no URL of a Redis, or has an unknown option; without the URL, in which a password may
            stand.
    """
    try:
        options = {"socket_timeout": TIMEOUT_S, **_parse_options(url)}
    except ValueError:
        raise MisuseError(
            "this is no URL of a Redis: give redis://[[USER]:PASSWORD@]HOST[:PORT][/DATABASE], rediss:// for TLS, or "
            "unix://[[USER]:PASSWORD@]PATH[?db=DATABASE], with what is special in a password as %XX",
        ) from None
    kind: Callable[..., RedisConnection] = options.pop("connection_class", Connection)
    try:
        return kind(**{**options, "decode_responses": False, "protocol": 2})
    except TypeError as error:
        name = str(error).rpartition(" ")[2]
        raise MisuseError(f"the URL of the Redis has an option that its driver does not know: {name}") from None


def iter_notifications(url: str, channel: str) -> Iterator[str]:
    """Listen to a channel, on a connection of its own; see `NotificationSource`."""
    with Redis.from_url(url, socket_connect_timeout=TIMEOUT_S) as client, client.pubsub() as channels:
        channels.subscribe(channel)
        while True:
            heard = channels.get_message(timeout=CHECK_INTERVAL_S)
            yield heard["data"].decode(errors="replace") if heard and heard["type"] == "message" else ""


def format_address(url: str) -> str:
    """Return where the URL leads, without user and password."""
    options = _parse_options(url)
    where = options.get("path") or f"{options.get('host', 'localhost')}:{options.get('port', 6379)}"
    return f"Redis at {where}, database {options.get('db', 0)}"


def _read_replies(connection: RedisConnection, requests: Sequence[RedisRequest]) -> None:
    """Read the answers; none counts behind a question that Redis put off, since it may have depended on that."""
    put_off: ResponseError | None = None
    for question in requests:
        answer = _read_reply(connection)
        if put_off is None and isinstance(answer, ResponseError) and _error_code(answer) in _TRANSIENT:
            put_off = answer
        if put_off is None:
            question.reply = answer
    if put_off is not None:
        raise put_off


def _read_reply(connection: RedisConnection) -> Any:
    try:
        return connection.read_response()
    except ResponseError as error:
        return error


def _send_command(connection: RedisConnection, *command: str | bytes) -> Any:
    connection.send_command(*command)
    return connection.read_response()


def _parse_info(text: bytes) -> dict[str, str]:
    lines = [line.partition(":") for line in text.decode(errors="replace").splitlines()]
    return {name: value for name, colon, value in lines if colon}


def _settings(connection: RedisConnection) -> dict[str, str]:
    """Return the settings that the server shows; many that others manage show none."""
    shown = {}
    for name in _CONFIG_SETTINGS:
        connection.send_command("CONFIG", "GET", name)
        answer = _read_reply(connection)
        if isinstance(answer, list) and answer:
            shown[name] = answer[1].decode(errors="replace")
    return shown


def _assess_guarantee(info: Mapping[str, str], shown: Mapping[str, str]) -> DurabilityGuarantee:
    """Judge what the settings come to; the worst is assumed of what is not shown."""
    has_log = info.get("aof_enabled") == "1"
    names = ("appendfsync", "no-appendfsync-on-rewrite") if has_log else ("save",)
    decisive = {"appendonly": "yes" if has_log else "no", **{name: shown[name] for name in names if name in shown}}
    if has_log:
        # While the log is rewritten, no-appendfsync-on-rewrite lets appendfsync always rest.
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
    """Return the code of an error of Redis; one inside a script is wrapped by Redis 6 ("ERR ...: -OOM ...")."""
    for kind in type(error).__mro__:
        if kind in _ERROR_CODES:
            return _ERROR_CODES[kind]
    words = _CODE_PATTERN.findall(str(error)) if isinstance(error, RedisError) else []
    return next((word for word in words if word in _ADVICE), "")
