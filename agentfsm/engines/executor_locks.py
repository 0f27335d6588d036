"""Advisory locks of PostgreSQL, by which the executors of an agent know each other to be alive.

The server releases the locks of a session when its connection ends, so a process that was killed loses them at once.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final

import attrs

from agentfsm._lib.plugins import require_extra

with require_extra("agentfsm.engines.dbos", "dbos", "sqlalchemy", "psycopg"):
    import sqlalchemy as sa
    from sqlalchemy.exc import DBAPIError
    from sqlalchemy.pool import NullPool

if TYPE_CHECKING:
    from collections.abc import Collection

    from sqlalchemy import Connection

# Number of the lock of the executor that supervises the others.
SUPERVISOR: Final = 0
# Bounds on the time until the server or this side notices that the other machine has vanished, about 11 seconds.
_CLIENT_OPTIONS: Final = {
    "connect_timeout": 5,
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 11_000,
    "application_name": "agentfsm executor",
}
_SERVER_OPTIONS: Final = (
    "SET tcp_keepalives_idle = 5; SET tcp_keepalives_interval = 2; SET tcp_keepalives_count = 3; "
    "SET tcp_user_timeout = 11000; SET idle_session_timeout = 0"
)


@attrs.define(eq=False, repr=False)
class ExecutorLocks:
    """The locks of one executor, on a connection of its own. Its methods block, and are called one at a time."""

    url: str
    """URL of the database."""

    schema: str = attrs.field(kw_only=True)
    """Schema of DBOS's tables, which distinguishes queues of the same name."""

    queues: tuple[str, ...] = attrs.field(kw_only=True)
    """Names of the queues that this executor works on. The first is that of the agent, which all its executors share,
    and of which one of them is the supervisor.
    """

    executor_id: str = attrs.field(kw_only=True)
    """Id of this executor, unique."""

    _connection: Connection | None = attrs.field(default=None, init=False)
    _is_held: bool = attrs.field(default=False, init=False)
    """Whether the connection has the locks of this executor, one for each queue."""

    is_supervisor: bool = attrs.field(default=False, init=False)
    """Whether this executor supervises the others."""

    @property
    def is_connected(self) -> bool:
        """Whether the connection was working at its last use."""
        return self._connection is not None

    def renew(self) -> frozenset[int]:
        """Connect if necessary, take the locks of this executor, and that of the supervisor if it is free.

        Returns:
            Numbers of the executors that are alive, see `hash_executor`; empty unless this is the supervisor.

        Raises:
            sqlalchemy.exc.DBAPIError: if the server is away; the locks are lost then.
        """
        try:
            if self._connection is None:
                self._connection = self._open()
            number = self.hash_executor(self.executor_id)
            self._is_held = self._is_held or all(self._try_lock(queue, number) for queue in self.queues)
            self.is_supervisor = self.is_supervisor or self._try_lock(self.queues[0], SUPERVISOR)
            if not self.is_supervisor:
                return frozenset()
            held = self._connection.execute(_SELECT_HELD, {"spaces": [self._hash_queue(self.queues[0])]})
            return frozenset(executor for _, executor in held) - {SUPERVISOR}
        except DBAPIError:
            self.close()
            raise

    def find_served(self, queues: Collection[str]) -> frozenset[str]:
        """Return those of some queues that an executor works on; all of them while the server is away."""
        if self._connection is None:
            return frozenset(queues)
        spaces = {self._hash_queue(queue): queue for queue in queues}
        try:
            held = self._connection.execute(_SELECT_HELD, {"spaces": [*spaces]}).all()
        except DBAPIError:  # `renew` connects again
            self.close()
            return frozenset(queues)
        return frozenset(spaces[space] for space, number in held if number != SUPERVISOR)

    def hash_executor(self, executor_id: str | None) -> int:
        """Return the number of the lock of an executor."""
        return _hash(executor_id or "") or 1

    def close(self) -> None:
        """Close the connection, which releases the locks."""
        connection, self._connection = self._connection, None
        self._is_held = self.is_supervisor = False
        if connection is not None:
            connection.invalidate()
            connection.close()

    def _open(self) -> Connection:
        url = sa.make_url(self.url).set(drivername="postgresql+psycopg")
        options: dict[str, Any] = {name: value for name, value in _CLIENT_OPTIONS.items() if name not in url.query}
        engine = sa.create_engine(url, poolclass=NullPool, isolation_level="AUTOCOMMIT", connect_args=options)
        connection = engine.connect()
        connection.exec_driver_sql(_SERVER_OPTIONS)
        return connection

    def _hash_queue(self, queue: str) -> int:
        return _hash(f"{self.schema}/{queue}")

    def _try_lock(self, queue: str, number: int) -> bool:
        assert self._connection is not None  # noqa: S101  `renew` has opened it
        values = {"space": self._hash_queue(queue), "number": number}
        return bool(self._connection.execute(_TRY_LOCK, values).scalar())


_TRY_LOCK: Final = sa.text("SELECT pg_try_advisory_lock(:space, :number)")
# The numbers of the locks are unsigned there.
_SELECT_HELD: Final = sa.text("""
SELECT space, number FROM (
  SELECT classid::bigint - CASE WHEN classid::bigint > 2147483647 THEN 4294967296 ELSE 0 END AS space,
         objid::bigint - CASE WHEN objid::bigint > 2147483647 THEN 4294967296 ELSE 0 END AS number
  FROM pg_locks
  WHERE locktype = 'advisory' AND objsubid = 2 AND granted
    AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
) held WHERE space = ANY(:spaces)
""")


def _hash(text: str) -> int:
    """Return a number of 32 bits with sign, as locks have them."""
    return int.from_bytes(blake2b(text.encode(), digest_size=4).digest(), "big", signed=True)
