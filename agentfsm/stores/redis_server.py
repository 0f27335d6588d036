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
from agentfsm.ports import Durability
from agentfsm.stores.listener import LOOK_S, Announced
from agentfsm.stores.outage import Outage

_log = logging.getLogger("agentfsm.stores")

# The most that a crash of the server may cost of what it has acknowledged.
Loss: TypeAlias = Literal["nothing", "seconds", "snapshot", "everything"]

# From the least to the most.
LOSSES: Final[Mapping[Loss, str]] = {
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
SCHEMA: Final = 2
# The version of Redis that is tried here, as its successors are.
OLDEST: Final = 6

# Bytes of one argument; a server is set otherwise by proto-max-bulk-len, and hangs up on whoever sends more.
MAX_WORD_BYTES: Final = 512 * 2**20

# What the server is asked for by CONFIG GET, which some do not answer.
_SHOWN: Final = (
    "appendfsync",
    "no-appendfsync-on-rewrite",
    "save",
    "maxmemory",
    "maxmemory-policy",
    "proto-max-bulk-len",
)
# The codes of errors whose code the driver cuts off; in the text of all others it can be read.
_CODES: Final[Mapping[type[Exception], str]] = {
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
_NEXT: Final[Mapping[str, str]] = {
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
_CODE: Final = re.compile(r"(?:^|-)([A-Z]{3,})\b")
# What comes with a restart or a failover. Redis has done nothing of what it answers so.
_PASSING: Final = frozenset(
    {"lost", "silent", "BUSY", "LOADING", "MASTERDOWN", "NOREPLICAS", "NOSCRIPT", "READONLY"},
)


class Wire(Protocol):
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


class UnansweredError(AgentError):
    """The answer is not there yet: the job is stopped, and done again when it is. No caller is ever told."""


@attrs.define(eq=False, repr=False)
class Question:
    """One operation of the script."""

    words: tuple[bytes, ...]
    number: int
    # Among all of this process, so that what it came to can be looked up when the answer was lost on its way.
    is_sent: bool = False
    sent_at: float = 0.0
    # Seconds by the boot clock, the last time.
    answer: Any = None
    # None until it is there: a list, or an error that is of this question alone.


@attrs.frozen(kw_only=True)
class Promise(Value):
    """What a server promises, and by which settings."""

    server: str
    # Name and version.
    loss: Loss
    shown: Mapping[str, str]
    # The settings that decide.
    hidden: tuple[str, ...]
    # Those that it does not show; of them the worst is assumed.

    def __str__(self) -> str:
        shown = [f"{name} {value or repr('')}" for name, value in self.shown.items()]
        hidden = [f"{name} not shown, so the worst is assumed" for name in self.hidden]
        return f"{self.server} ({', '.join(shown + hidden)}): {LOSSES[self.loss]}"


@attrs.define(eq=False, repr=False, kw_only=True)
class RedisServer(Announced):
    """The server, reached when it is needed. It belongs to the thread that uses it."""

    url: str = attrs.field(repr=False)
    script: str = attrs.field(repr=False)
    settings: tuple[bytes, ...]
    # What the script is told each time; first the prefix of all keys.
    accept_loss: Loss
    patience_s: float
    outage: Outage
    asked_at: float = attrs.field(default=0.0, init=False)
    # Seconds by the boot clock, when the question was sent whose answer `ask` has returned last.
    promise: Promise | None = attrs.field(default=None, init=False)
    # What was promised when the server was reached last; None until it was for the first time.
    _largest_word: int = attrs.field(default=MAX_WORD_BYTES, init=False)
    # Bytes that the server takes.
    _connection: Wire | None = attrs.field(default=None, init=False)
    _away_since: float | None = attrs.field(default=None, init=False)
    # Monotonic seconds; None while it answers.
    _questions: dict[tuple[tuple[object, ...], int], Question] = attrs.field(factory=dict, init=False)
    # Those of the group, by their words and by how often the group had asked the same before.
    _asked: Counter[tuple[object, ...]] = attrs.field(factory=Counter, init=False)
    # How often the words were asked since the group was begun, or begun again.
    _number: int = attrs.field(default=0, init=False)
    _after: list[Callable[[], None]] = attrs.field(factory=list, init=False)
    # What has to be done once the group is done.

    @property
    def place(self) -> str:
        """Where it is, without user and password."""
        return place_of(self.url)

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
        self._after.clear()
        self._asked.clear()
        yield
        if questions := self._unanswered():
            self.converse(questions)
            raise UnansweredError
        self._questions.clear()
        for act in self._after:
            act()

    def after_commit(self, act: Callable[[], None]) -> None:
        """Do something once the whole group is done; never when it failed."""
        self._after.append(act)

    def ask(self, *words: object, at_once: bool = False) -> list[Any]:
        """Return the script's answer, inside a transaction.

        Args:
            words: The operation and its arguments.
            at_once: Wait for it here: for what takes many steps, and would be begun again for each.

        Raises:
            UnansweredError: when it is not there yet.
            MisuseError: when a word cannot be stored.
            StoreError: when the server failed at this one question.
        """
        key = words, self._asked[words]
        self._asked[words] += 1
        question = self._questions.get(key)
        if question is None:
            question = self._questions[key] = self._question(words)
        if question.answer is None and at_once:
            self.converse(self._unanswered())
        if question.answer is None:
            raise UnansweredError
        self.asked_at = question.sent_at
        return self._result(question)

    def ask_all(self, questions: Sequence[Sequence[object]]) -> list[list[Any]]:
        """Return the answers to questions that no job asks, in their order."""
        asked = [self._question(words) for words in questions]
        self.converse(asked)
        return [self._result(question) for question in asked]

    def is_answered(self, *answer: bytes) -> bool:
        """Whether something that the group has asked was answered like this, at least to begin with."""
        answers = [question.answer for question in self._questions.values() if isinstance(question.answer, list)]
        return any(each[: len(answer)] == list(answer) for each in answers)

    def converse(self, questions: Sequence[Question]) -> None:
        """Send questions in one pipeline, and read the answers as far as they come."""
        try:
            connection = self._reached()
            questions = [question for question in questions if self._takes(question)]
            commands = [self._command(question) for question in questions]
            for question in questions:
                question.is_sent, question.sent_at = True, boot_clock()
            connection.send_packed_command(connection.pack_commands(commands))
            _read(connection, questions)
        except BaseException:  # with answers left unread the next question would get another's
            self.outage.begin()
            self.shut()
            raise
        self._away_since = None
        self.outage.end()

    def _question(self, words: Sequence[object]) -> Question:
        self._number += 1
        try:
            return Question(tuple([_word(word) for word in words]), self._number)
        except UnicodeEncodeError as error:
            raise MisuseError(f"{self.place} cannot hold a value ({error}): ids, keys and names are text") from None

    def _takes(self, question: Question) -> bool:
        """Whether the server would not hang up on the question; else that is its answer, and the others are asked."""
        size = max(map(len, question.words))
        if size > self._largest_word:
            question.answer = MisuseError(
                f"{self.place} takes records of at most {self._largest_word:,} bytes, and this one has {size:,}: make "
                "it smaller, or raise proto-max-bulk-len there",
            )
        return question.answer is None

    def _unanswered(self) -> list[Question]:
        return [question for question in self._questions.values() if question.answer is None]

    def _command(self, question: Question) -> tuple[bytes, ...]:
        again = b"1" if question.is_sent else b"0"
        return (
            b"EVALSHA",
            _hash_of(self.script),
            b"0",
            *self.settings,
            b"%f" % self.outage.seconds,
            again,
            b"%d" % question.number,
            *question.words,
        )

    def _result(self, question: Question) -> list[Any]:
        if isinstance(question.answer, AgentError):
            raise question.answer
        if isinstance(question.answer, Exception):
            raise self.explain(question.answer) from question.answer
        result: list[Any] = question.answer
        return result

    # Upkeep.

    def wait_out(self, error: Exception) -> bool:
        """Return whether to do the jobs again: since there are answers now, or after a pause, since it may be back.

        A server that was never reached is waited for only while it starts: else the address is more likely wrong.
        """
        if isinstance(error, UnansweredError):
            return True
        code = _code(error)
        waited_s = self._waited_s()
        if code in _PASSING and (self.promise or code == "LOADING") and waited_s < self.patience_s:
            _log.info("%s: waiting up to %g s for it, %.3f s so far: %s", self.place, self.patience_s, waited_s, error)
            time.sleep(min(waited_s, MAX_PAUSE_S))  # in the store's own thread
            return True
        self._questions.clear()
        self._away_since = None
        return False

    def is_locked(self, error: Exception) -> bool:  # noqa: ARG002  as the desk of a file would
        """Return False: Redis has no locks."""
        return False

    def is_of_one_job(self, error: Exception) -> bool:  # noqa: ARG002  as the desk of a file would
        """Return False: an error of one question is told to its own job."""
        return False

    def explain(self, error: Exception) -> AgentError:
        """Return what callers are told of an error of the server's, or of Python's."""
        if not isinstance(error, RedisError):
            return StoreError(f"{self.place}: the store failed by a fault of its own ({error!r}): please report it")
        code = _code(error)
        kind = CorruptError if code == "WRONGTYPE" else StoreError
        why = _NEXT.get(code, "nothing of it was acknowledged: see Redis's own words, then resume the runs")
        what = "Redis says" if isinstance(error, ResponseError) else "the connection failed:"
        return kind(f"{self.place}: {what} {str(error)!r}; {why}")

    def _waited_s(self) -> float:
        now = time.monotonic()
        if self._away_since is None:
            self._away_since = now
        return now - self._away_since

    def shut(self) -> None:
        """Hang up; the next question calls again."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.disconnect()

    # Reaching it.

    def _reached(self) -> Wire:
        if self._connection is None:
            connection = dial(self.url)
            try:
                connection.connect()
                self.promise = self._looked_at(connection)
                self._bring_up(connection)
            except BaseException:
                connection.disconnect()
                raise
            self._connection = connection
        return self._connection

    def _looked_at(self, connection: Wire) -> Promise:
        """Load the script, and see whether the server is one that we can rely on."""
        info = _info(_said(connection, "INFO"))
        if info.get("loading", "0") != "0":  # until it has read its log, it says that it keeps none
            raise BusyLoadingError("it is still reading its data")
        shown = _settings(connection)
        _said(connection, "SCRIPT", "LOAD", self.script)
        if info.get("role", "master") != "master":
            raise ReadOnlyError("You can't write against a read only replica.")
        self._check_kind(info)
        self._check_schema(_said(connection, "GET", self.settings[0] + b"schema"))
        self._check_eviction(shown.get("maxmemory") or info.get("maxmemory"), shown, info)
        self._largest_word = int(shown.get("proto-max-bulk-len", MAX_WORD_BYTES))
        return self._checked(_promise(info, shown))

    def _bring_up(self, connection: Wire) -> None:
        """Bring the keys of an older agentfsm up to date."""
        schema, start = _said(connection, "GET", self.settings[0] + b"schema"), 0
        while schema is not None and int(schema) < SCHEMA and start >= 0:
            question = Question((b"upgrade", b"%d" % start), 0)
            _, start = _said(connection, *self._command(question))

    def _check_kind(self, info: Mapping[str, str]) -> None:
        if info.get("cluster_enabled") == "1":
            raise StoreError(
                f"{self.place} is part of a Redis Cluster, which agentfsm does not support, since each operation "
                "touches keys of many slots: give the address of a server that stands alone or has replicas",
            )
        version = info.get("redis_version", "")
        if version.partition(".")[0].isdecimal() and int(version.partition(".")[0]) < OLDEST:
            raise StoreError(f"{self.place} is Redis {version}: agentfsm needs {OLDEST} or later, or Valkey")

    def _check_eviction(self, limit: str | None, shown: Mapping[str, str], info: Mapping[str, str]) -> None:
        policy = shown.get("maxmemory-policy") or info.get("maxmemory_policy", "noeviction")
        if limit not in (None, "0") and policy != "noeviction":
            raise StoreError(
                f"{self.place} throws keys away when its memory is full (maxmemory {limit}, maxmemory-policy {policy}),"
                " and with them journals: set maxmemory-policy noeviction there, or give another server",
            )

    def _check_schema(self, schema: bytes | None) -> None:
        if schema is not None and int(schema) > SCHEMA:
            raise TooNewError(
                f"{self.place}: its keys were written by a newer agentfsm (schema {int(schema)}, this one knows "
                f"{SCHEMA}): upgrade agentfsm",
            )

    def _checked(self, promise: Promise) -> Promise:
        """Refuse a server that may lose more than was accepted."""
        kinds = list(LOSSES)
        if kinds.index(promise.loss) <= kinds.index(self.accept_loss):
            return promise
        raise MisuseError(
            f"{self.place} promises less than was asked for (accept_loss={self.accept_loss!r}): {promise}. Set there "
            "appendonly yes, appendfsync always and no-appendfsync-on-rewrite no; or accept it, for posts and for "
            f"durability='full' too: RedisStore(..., accept_loss={promise.loss!r})",
        )


_options_of: Final[Callable[[str], dict[str, Any]]] = parse_url


def dial(url: str) -> Wire:
    """Return a connection that is not connected yet: its driver does nothing of its own accord.

    Raises:
        MisuseError: when it is no URL of a Redis, or has an unknown option; without the URL, in which a password may
            stand.
    """
    try:
        options = {"socket_timeout": TIMEOUT_S, **_options_of(url)}
    except ValueError:
        raise MisuseError(
            "this is no URL of a Redis: give redis://[[USER]:PASSWORD@]HOST[:PORT][/DATABASE], rediss:// for TLS, or "
            "unix://[[USER]:PASSWORD@]PATH[?db=DATABASE], with what is special in a password as %XX",
        ) from None
    kind: Callable[..., Wire] = options.pop("connection_class", Connection)
    try:
        return kind(**{**options, "decode_responses": False, "protocol": 2})
    except TypeError as error:
        name = str(error).rpartition(" ")[2]
        raise MisuseError(f"the URL of the Redis has an option that its driver does not know: {name}") from None


def announcements(url: str, channel: str) -> Iterator[str]:
    """Listen to a channel, on a connection of its own; see `listener.Announcements`."""
    with Redis.from_url(url, socket_connect_timeout=TIMEOUT_S) as client, client.pubsub() as channels:
        channels.subscribe(channel)
        while True:
            heard = channels.get_message(timeout=LOOK_S)
            yield heard["data"].decode(errors="replace") if heard and heard["type"] == "message" else ""


def place_of(url: str) -> str:
    """Return where the URL leads, without user and password."""
    options = _options_of(url)
    where = options.get("path") or f"{options.get('host', 'localhost')}:{options.get('port', 6379)}"
    return f"Redis at {where}, database {options.get('db', 0)}"


def _read(connection: Wire, questions: Sequence[Question]) -> None:
    """Read the answers; none counts behind a question that Redis put off, since it may have depended on that."""
    put_off: ResponseError | None = None
    for question in questions:
        answer = _answer(connection)
        if put_off is None and isinstance(answer, ResponseError) and _code(answer) in _PASSING:
            put_off = answer
        if put_off is None:
            question.answer = answer
    if put_off is not None:
        raise put_off


def _answer(connection: Wire) -> Any:
    try:
        return connection.read_response()
    except ResponseError as error:
        return error


def _said(connection: Wire, *command: str | bytes) -> Any:
    connection.send_command(*command)
    return connection.read_response()


def _info(text: bytes) -> dict[str, str]:
    lines = [line.partition(":") for line in text.decode(errors="replace").splitlines()]
    return {name: value for name, colon, value in lines if colon}


def _settings(connection: Wire) -> dict[str, str]:
    """Return the settings that the server shows; many that others manage show none."""
    shown = {}
    for name in _SHOWN:
        connection.send_command("CONFIG", "GET", name)
        answer = _answer(connection)
        if isinstance(answer, list) and answer:
            shown[name] = answer[1].decode(errors="replace")
    return shown


def _promise(info: Mapping[str, str], shown: Mapping[str, str]) -> Promise:
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
    return Promise(
        server=f"Valkey {valkey}" if valkey else f"Redis {info.get('redis_version', 'of unknown version')}",
        loss=loss,
        shown=decisive,
        hidden=tuple(name for name in names if name not in shown),
    )


def _word(value: object) -> bytes:
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, bytes):
        return value
    if isinstance(value, bool):
        return b"1" if value else b"0"
    return b"" if value is None else repr(value).encode()


@cache
def _hash_of(script: str) -> bytes:
    return sha1(script.encode(), usedforsecurity=False).hexdigest().encode()


def _code(error: Exception) -> str:
    """Return the code of an error of Redis; one inside a script is wrapped by Redis 6 ("ERR ...: -OOM ...")."""
    for kind in type(error).__mro__:
        if kind in _CODES:
            return _CODES[kind]
    words = _CODE.findall(str(error)) if isinstance(error, RedisError) else []
    return next((word for word in words if word in _NEXT), "")
