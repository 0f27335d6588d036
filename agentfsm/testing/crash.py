"""Crash tests: processes killed with SIGKILL, at random or at each moment in turn, and their reports before the end.

Each work runs in its own process and reports on a pipe. Reports survive the crash, so the parent knows the results that
were acknowledged before it.

    async def work(path):
        agent = Agent(..., store=SQLiteStore(path, connect=connect))
        run = await agent.run("go", id="r1")
        report(run.version)

    with ForkServer() as fork_server:
        for at in count(1):
            first = fork_server.run(work, path, kill_at=("await", at))
            ...                                  # take over in another process; check the state left behind
            if not first.killed:
                break                            # the work has no further moments

Moments are counted by kind: "await" (each step of a task, so the end of each await), "commit" and "statement" (of a
SQLite store with `connect`), and the kinds that the work passes to `crash_point`, for example in its tools.

A process that has imported all modules forks a child for each work, which takes milliseconds. Windows is not supported,
since it has neither SIGKILL nor fork.
"""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from contextvars import Context
from functools import partial
from importlib import import_module
from io import BytesIO
from itertools import count
from typing import TYPE_CHECKING, Any, Final, NoReturn, Self

import anyio
import attrs

from agentfsm.core.errors import MisuseError
from agentfsm.core.value import Value
from agentfsm.stores.sqlite.file import connect_sqlite3

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from agentfsm.stores.sqlite.file import Parameters, SQLiteConnection, SQLiteCursor

# Work of a process: a function of a module, so that it can be pickled.
Work = Callable[..., Awaitable[None]]
# A kind of crash point, and its number in the process, from 1.
Moment = tuple[str, int]

# Bytes of the length of a request.
_LENGTH_BYTES: Final = 8
# Maximum of bytes of a report: a pipe writes them atomically (PIPE_BUF of Linux is 4,096).
_MAX_MESSAGE_BYTES: Final = 4_000
# Bytes of a traceback that are reported, so that it fits into one report.
_MAX_TRACE_BYTES: Final = 3_000
# Capacity of a pipe of Linux; smaller ones are read completely as well.
_PIPE_BYTES: Final = 65_536
_BACKENDS: Final = ("asyncio", "trio")


# In the child.


@attrs.define(eq=False, repr=False)
class _ChildState:
    """State of this process if it is a child."""

    report_fd: int | None = None
    """Pipe for its reports; None outside of a child."""

    go_fd: int | None = None
    kill_at: Moment | None = None
    counters: dict[str, count[int]] = attrs.field(factory=lambda: defaultdict(lambda: count(1)))
    """Next number of each kind of moment. Counting is atomic, so threads may share it."""


_child = _ChildState()


def report(value: Any) -> None:
    """Send a value to the parent, which a later crash does not undo. Outside of a child, do nothing.

    Args:
        value: A picklable value of up to 4,000 bytes, so that it arrives completely or not at all.

    Raises:
        MisuseError: if it has more.
    """
    if _child.report_fd is None:
        return
    word = pickle.dumps(value)
    if len(word) > _MAX_MESSAGE_BYTES:
        raise MisuseError(
            f"report: {len(word):,} bytes may arrive in part; report at most {_MAX_MESSAGE_BYTES:,}, for example an id"
        )
    os.write(_child.report_fd, word)


async def wait_for_go() -> None:
    """Wait until the parent calls `RunningProcess.go`.

    Raises:
        EOFError: if the parent has ended.
    """
    assert _child.go_fd is not None, "wait_for_go works in a child only"  # noqa: S101  a mistake of the caller
    await anyio.wait_readable(_child.go_fd)
    if not os.read(_child.go_fd, 1):
        raise EOFError("the parent process has ended")


def crash_point(kind: str) -> None:
    """Mark a moment at which a child may be killed. Outside of a child, do nothing."""
    if _child.report_fd is not None and (kind, next(_child.counters[kind])) == _child.kill_at:
        os.kill(os.getpid(), signal.SIGKILL)


def connect(path: str) -> SQLiteConnection:
    """Open a SQLite file for a store, with crash points before each statement, and before and after each commit."""
    return _CrashConnection(connect_sqlite3(path))


@attrs.define(eq=False, repr=False)
class _CrashConnection:
    inner: SQLiteConnection
    is_writing: bool = False
    """Whether the current transaction writes."""

    def execute(self, sql: str, parameters: Parameters = (), /) -> SQLiteCursor:
        crash_point("statement")
        if sql.startswith("BEGIN"):
            self.is_writing = sql == "BEGIN IMMEDIATE"
        is_durable = sql == "COMMIT" and self.is_writing
        if is_durable:
            crash_point("commit")
        cursor = self.inner.execute(sql, parameters)
        if is_durable:
            crash_point("commit")  # written, but not yet acknowledged
        return cursor

    def close(self) -> None:
        self.inner.close()


# In the parent.


@attrs.frozen(kw_only=True)
class ProcessResult(Value):
    """Result of a process that has ended."""

    reports: tuple[Any, ...]
    """Reports of the process, oldest first."""

    killed: bool
    """Whether SIGKILL ended the process before its work was done."""

    points: Mapping[str, int]
    """Numbers of its moments by kind; empty if it was killed."""


@attrs.define(eq=False, repr=False)
class RunningProcess:
    """A child process, until `end` returns its result."""

    pid: int
    _go_fd: int
    _pipe: int
    _reap: Callable[[int], int]
    """Function of the pid of an ended process that returns its wait status."""

    _kill_at: Moment | None = None
    _received: list[Any] = attrs.field(factory=list, init=False)
    _has_ended: bool = attrs.field(default=False, init=False)

    def next_report(self) -> Any:
        """Wait for the next report, and return it.

        Raises:
            EOFError: if the process ends without another report.
        """
        heard = len(self._received)
        while len(self._received) == heard and not self._has_ended:
            self._read_messages(None)
        if len(self._received) == heard:
            raise EOFError("the process has ended")
        return self._received[heard]

    def go(self) -> None:
        """Let a `wait_for_go` of the process return."""
        with suppress(BrokenPipeError):
            os.write(self._go_fd, b".")

    def signal(self, number: signal.Signals) -> None:
        """Send the process a signal. Do nothing if it has ended."""
        os.kill(self.pid, number)  # the pid is not reused before `end` reaps the process

    def end(self, *, kill_after_s: float | None = None) -> ProcessResult:
        """Wait for the end of the process, and return its result.

        Args:
            kill_after_s: Seconds after which it is killed, 0 or more; None for never.

        Raises:
            AssertionError: if the work raised an exception, with its traceback; or if it had no moment of the kind of
                `kill_at`, since a test over such moments would always pass.
        """
        deadline = None if kill_after_s is None else time.monotonic() + kill_after_s
        while not self._has_ended:
            left_s = None if deadline is None else deadline - time.monotonic()
            if left_s is not None and left_s <= 0:
                self.signal(signal.SIGKILL)
                deadline, left_s = None, None
            self._read_messages(left_s)
        for pipe in (self._go_fd, self._pipe):
            os.close(pipe)
        status = os.waitstatus_to_exitcode(self._reap(self.pid))
        last = (
            self._received.pop() if self._received and isinstance(self._received[-1], _WorkDone | _WorkFailed) else None
        )
        if isinstance(last, _WorkFailed):
            raise AssertionError(f"the work of a child failed:\n{last.trace}")  # noqa: TRY004  the test has failed
        if last is None and status != -signal.SIGKILL:
            raise AssertionError(f"a child ended without a result, with status {status}")
        if last is not None and self._kill_at is not None and self._kill_at[0] not in last.points:
            kinds = ", ".join(sorted(last.points))
            raise AssertionError(
                f"kill_at={self._kill_at!r}: the work has no moment of that kind, only of {kinds}; for commits and "
                "statements, create the SQLiteStore with connect=agentfsm.testing.crash.connect"
            )
        return ProcessResult(
            reports=tuple(self._received), killed=last is None, points={} if last is None else last.points
        )

    def _read_messages(self, timeout_s: float | None) -> None:
        readable, _, _ = select.select([self._pipe], [], [], timeout_s)
        if not readable:
            return
        words = BytesIO(os.read(self._pipe, _PIPE_BYTES))  # reports are written atomically, so complete ones are read
        self._has_ended = not words.getvalue()
        while words.tell() < len(words.getvalue()):
            self._received.append(pickle.load(words))  # noqa: S301  of our own child


@attrs.frozen
class _WorkDone(Value):
    points: Mapping[str, int]


@attrs.frozen
class _WorkFailed(Value):
    trace: str


@attrs.frozen(kw_only=True)
class _ForkRequest(Value):
    work: Work
    args: tuple[Any, ...]
    kill_at: Moment | None
    backend: str


@attrs.define(eq=False, repr=False)
class ForkServer:
    """Process that forks a child for each work. The modules of the work are imported there once.

    Use it as a context manager; its exit kills the children that still run.

    Args:
        prepare: Function of a module that is called there at the start, for example to import modules that are
            otherwise loaded late. It must leave no thread running and no store open.
    """

    prepare: Callable[[], None] | None = None
    _control: socket.socket = attrs.field(init=False)
    _process: subprocess.Popen[bytes] = attrs.field(init=False)

    def __enter__(self) -> Self:
        self._control, theirs = socket.socketpair()
        with theirs:
            desk = theirs.fileno()
            code = f"import sys; sys.path[:] = {sys.path!r}; from agentfsm.testing import crash; crash._serve({desk})"
            command = [sys.executable, "-c", code]
            # A new session, since an interrupt at the terminal is meant for the parent.
            self._process = subprocess.Popen(command, pass_fds=[desk], start_new_session=True)  # noqa: S603  ours
            self._send(pickle.dumps(self.prepare))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._control.close()  # the server ends when its socket is closed
        self._process.wait()

    def run(
        self,
        work: Work,
        *args: Any,
        kill_at: Moment | None = None,
        kill_after_s: float | None = None,
        backend: str = "asyncio",
    ) -> ProcessResult:
        """Run the work in a child until it ends or is killed, and return its result.

        Args:
            work: An async function of a module.
            args: Picklable arguments of the work.
            kill_at: The moment at which it is killed; None for none.
            kill_after_s: Seconds from its first `report` after which it is killed; None for never.
            backend: "asyncio" or "trio".

        Raises:
            AssertionError: as for `RunningProcess.end`.
        """
        living = self.start(work, *args, kill_at=kill_at, backend=backend)
        if kill_after_s is not None:
            with suppress(EOFError):
                living.next_report()
        return living.end(kill_after_s=kill_after_s)

    def start(self, work: Work, *args: Any, kill_at: Moment | None = None, backend: str = "asyncio") -> RunningProcess:
        """Start the work in a child, without waiting for its end; arguments as for `run`."""
        if backend not in _BACKENDS:
            raise MisuseError(f"backend={backend!r}: expected one of {', '.join(_BACKENDS)}")
        if kill_at is not None and kill_at[1] < 1:
            raise MisuseError(f"kill_at={kill_at!r}: moments are counted from 1")
        order = pickle.dumps(_ForkRequest(work=work, args=args, kill_at=kill_at, backend=backend))
        (reports_fd, report_fd), (go_fd, go) = os.pipe(), os.pipe()
        self._send(order, report_fd, go_fd)
        for given in (report_fd, go_fd):
            os.close(given)
        return RunningProcess(self._read_int(), go, reports_fd, self._reap, kill_at)

    def _send(self, request: bytes, *pipes: int) -> None:
        socket.send_fds(self._control, [len(request).to_bytes(_LENGTH_BYTES)], pipes)
        self._control.sendall(request)

    def _reap(self, pid: int) -> int:
        self._control.sendall(bytes(_LENGTH_BYTES) + pid.to_bytes(_LENGTH_BYTES))
        return self._read_int()

    def _read_int(self) -> int:
        return int.from_bytes(_receive(self._control, _LENGTH_BYTES))


# In the fork server.


def _serve(control_fd: int) -> None:
    """Serve requests until the parent closes the socket."""
    for backend in _BACKENDS:
        with suppress(ImportError):
            import_module(f"anyio._backends._{backend}")
    living: set[int] = set()
    with socket.socket(fileno=control_fd) as desk, suppress(EOFError):
        prepare = pickle.loads(_receive(desk, int.from_bytes(_receive(desk, _LENGTH_BYTES))))  # noqa: S301  of our own parent
        if prepare is not None:
            prepare()
        gc.freeze()  # so that no collection in a child copies the pages of what is loaded
        while True:
            head, pipes, _, _ = socket.recv_fds(desk, _LENGTH_BYTES, 2)
            if not head:
                break
            if size := int.from_bytes(head):
                answer = _fork_child(pickle.loads(_receive(desk, size)), desk, pipes)  # noqa: S301  of our own parent
                living.add(answer)
            else:
                pid = int.from_bytes(_receive(desk, _LENGTH_BYTES))
                _, answer = os.waitpid(pid, 0)
                living.discard(pid)
            desk.sendall(answer.to_bytes(_LENGTH_BYTES))
    for pid in living:
        os.kill(pid, signal.SIGKILL)


def _receive(control: socket.socket, size: int) -> bytes:
    words = control.recv(size, socket.MSG_WAITALL)
    if len(words) < size:
        raise EOFError("the other process has ended")
    return words


def _fork_child(request: _ForkRequest, control: socket.socket, pipes: Sequence[int]) -> int:
    pid = os.fork()
    if not pid:
        control.close()
        _run_work(request, *pipes)
    for pipe in pipes:
        os.close(pipe)
    return pid


def _run_work(request: _ForkRequest, report_fd: int, go_fd: int) -> NoReturn:
    """Do the work, and exit without cleaning up objects inherited from the parent."""
    _child.report_fd, _child.go_fd, _child.kill_at = report_fd, go_fd, request.kill_at
    try:
        options: dict[str, Any] = {"loop_factory": _CrashEventLoop}  # a crash point before each step of a task
        if request.backend == "trio":
            options = {"instruments": [_CrashInstrument()]}
        anyio.run(partial(request.work, *request.args), backend=request.backend, backend_options=options)
        _child.kill_at = None
        last: _WorkDone | _WorkFailed = _WorkDone({kind: next(passed) - 1 for kind, passed in _child.counters.items()})
    except BaseException:  # noqa: BLE001  any error is reported to the parent
        trace = traceback.format_exc().encode(errors="backslashreplace")
        last = _WorkFailed(trace[-_MAX_TRACE_BYTES:].decode(errors="replace"))
    os.write(report_fd, pickle.dumps(last))
    os._exit(0)


class _CrashEventLoop(asyncio.SelectorEventLoop):
    def call_soon(self, callback: Callable[..., Any], *args: Any, context: Context | None = None) -> asyncio.Handle:  # type: ignore[override]
        return super().call_soon(_run_step, callback, *args, context=context)


def _run_step(callback: Callable[..., Any], *args: Any) -> None:
    crash_point("await")
    callback(*args)


class _CrashInstrument:
    """Instrument of trio with a crash point before each step of a task."""

    def before_task_step(self, _task: object) -> None:
        crash_point("await")
