"""A connection that fails on purpose."""

import sqlite3

import attrs

from agentfsm.stores.sqlite.file import connect_sqlite3


def failure(code):
    """Return the error that sqlite3 raises for a result code."""
    error = sqlite3.OperationalError(f"made to fail with {code}")
    error.sqlite_errorcode = code
    return error


@attrs.define
class Faults:
    """Makes connections whose statements can be made to fail. Pass it as `connect`."""

    code: int | None = None
    # What fails, as SQLite's result code; None for nothing.
    on: str | tuple[str, ...] = ""
    # The first words of the statements that fail.
    times: int = 1
    # How often.
    seen: list[str] = attrs.field(factory=list)
    # The statements so far.
    opened: int = 0

    def __call__(self, path):
        self.opened += 1
        return _Connection(self, connect_sqlite3(path))

    def strike(self, code, on, times=1):
        """Let the next statements that begin so fail."""
        self.code, self.on, self.times = code, on, times

    def check(self, sql):
        """Fail, if this is the one."""
        self.seen.append(" ".join(sql.split()))
        if self.code is not None and self.times > 0 and self.seen[-1].startswith(self.on):
            self.times -= 1
            raise failure(self.code)


@attrs.frozen
class _Connection:
    faults: Faults
    inner: sqlite3.Connection

    def execute(self, sql, parameters=()):
        self.faults.check(sql)
        return self.inner.execute(sql, parameters)

    def close(self):
        self.inner.close()
