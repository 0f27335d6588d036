"""Advisory locks of PostgreSQL, by which the executors of a queue know each other to be alive.

The server releases the locks of a session when its connection ends, so a process that was killed loses them at once.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final

import attrs

from agentfsm._plugins import require_extra

with require_extra("agentfsm.engines.dbos", "dbos", "sqlalchemy", "psycopg"):
    import sqlalchemy as sa
    from sqlalchemy.exc import DBAPIError
    from sqlalchemy.pool import NullPool

if TYPE_CHECKING:
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

    space: str = attrs.field(kw_only=True)
    """Text that distinguishes the executors of different queues."""

    executor_id: str = attrs.field(kw_only=True)
    """Id of this executor, unique."""

    _connection: Connection | None = attrs.field(default=None, init=False)
    _is_held: bool = attrs.field(default=False, init=False)
    """Whether the connection has the lock of this executor."""

    is_supervisor: bool = attrs.field(default=False, init=False)
    """Whether this executor supervises the others."""

    @property
    def is_connected(self) -> bool:
        """Whether the connection was working at its last use."""
        return self._connection is not None

    def renew(self) -> frozenset[int]:
        """Connect if necessary, take the lock of this executor, and that of the supervisor if it is free.

        Returns:
            Numbers of the executors that are alive, see `hash_executor`; empty unless this is the supervisor.

        Raises:
            sqlalchemy.exc.DBAPIError: if the server is away; the locks are lost then.
        """
        try:
            if self._connection is None:
                self._connection = self._open()
            self._is_held = self._is_held or self._try_lock(self.hash_executor(self.executor_id))
            self.is_supervisor = self.is_supervisor or self._try_lock(SUPERVISOR)
            if not self.is_supervisor:
                return frozenset()
            rows = self._connection.execute(_SELECT_HELD, {"space": _hash(self.space)})
            return frozenset(number for (number,) in rows) - {SUPERVISOR}
        except DBAPIError:
            self.close()
            raise

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

    def _try_lock(self, number: int) -> bool:
        assert self._connection is not None  # noqa: S101  `renew` has opened it
        return bool(self._connection.execute(_TRY_LOCK, {"space": _hash(self.space), "number": number}).scalar())


_TRY_LOCK: Final = sa.text("SELECT pg_try_advisory_lock(:space, :number)")
# The numbers of the locks are unsigned there.
_SELECT_HELD: Final = sa.text("""
SELECT objid::bigint - CASE WHEN objid::bigint > 2147483647 THEN 4294967296 ELSE 0 END
FROM pg_locks
WHERE locktype = 'advisory' AND objsubid = 2 AND granted
  AND classid::bigint = :space + CASE WHEN :space < 0 THEN 4294967296 ELSE 0 END
  AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
""")


def _hash(text: str) -> int:
    """Return a number of 32 bits with sign, as locks have them."""
    return int.from_bytes(blake2b(text.encode(), digest_size=4).digest(), "big", signed=True)
