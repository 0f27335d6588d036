"""The crash kit: processes that are killed with SIGKILL, by chance or at one moment after another, and what they said.

What a crash leaves can only be seen after a real one. So each work has a process of its own, and what it says on a pipe
is all that the parent knows of it: what was acknowledged before the end.

    async def work(path):
        agent = Agent(..., store=SQLiteStore(path, connect=connect))
        run = await agent.run("go", id="r1")
        tell(run.version)

    with ForkServer() as fork_server:
        for at in count(1):
            first = fork_server.run(work, path, kill_at=("await", at))
            ...                                  # another one takes over; look at what is left
            if not first.killed:
                break                            # it has no such moment any more

A moment is counted by kind: "await" (each step of a task, so the end of each await), "commit" and "statement" (of a
SQLite store that has `connect`), and whatever calls `crash_point` with a kind of its own, such as the tools.

A process that has imported everything forks one child for each work, so that it costs milliseconds. Not for
Windows, which has neither SIGKILL nor fork.
"""

from __future__ import annotations

import asyncio
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

# What a process does; a function of a module, so that it can be named to another process.
Work = Callable[..., Awaitable[None]]
# A kind of crash point, and its number in the process, from 1.
Moment = tuple[str, int]

# Bytes that say how long an order is.
_LENGTH_BYTES: Final = 8
# Bytes of a word: a pipe takes so many whole or not at all (PIPE_BUF of Linux is 4,096).
_MAX_MESSAGE_BYTES: Final = 4_000
# Bytes of a traceback that are told, so that it is one word.
_MAX_TRACE_BYTES: Final = 3_000
# Bytes that a pipe of Linux holds; smaller ones are read whole as well.
_PIPE_BYTES: Final = 65_536
_BACKENDS: Final = ("asyncio", "trio")


# In the child.


@attrs.define(eq=False, repr=False)
class _ChildState:
    """What this process is, if it is a child."""

    tell_fd: int | None = None
    """The pipe that it tells by."""

    go_fd: int | None = None
    kill_at: Moment | None = None
    counters: dict[str, count[int]] = attrs.field(factory=lambda: defaultdict(lambda: count(1)))
    """The next number of each kind. Its steps cannot be torn, so threads may share it."""


_child = _ChildState()


def tell(value: Any) -> None:
    """Let the parent know something, which no crash makes it forget; outside of a child, nobody hears.

    Args:
        value: What can be pickled, up to 4,000 bytes, so that it arrives whole or not at all.

    Raises:
        MisuseError: when it has more.
    """
    if _child.tell_fd is None:
        return
    word = pickle.dumps(value)
    if len(word) > _MAX_MESSAGE_BYTES:
        raise MisuseError(
            f"tell: {len(word):,} bytes may arrive in part; tell at most {_MAX_MESSAGE_BYTES:,}, for example an id"
        )
    os.write(_child.tell_fd, word)


async def wait_for_go() -> None:
    """Wait for a word of `RunningProcess.go`.

    Raises:
        EOFError: when nobody is there any more who could say it.
    """
    assert _child.go_fd is not None, "only a child is spoken to"  # noqa: S101  a mistake of the caller
    await anyio.wait_readable(_child.go_fd)
    if not os.read(_child.go_fd, 1):
        raise EOFError("whoever started this process is gone")


def crash_point(kind: str) -> None:
    """Be a moment at which a child may be killed; outside of a child, nothing happens."""
    if _child.tell_fd is not None and (kind, next(_child.counters[kind])) == _child.kill_at:
        os.kill(os.getpid(), signal.SIGKILL)


def connect(path: str) -> SQLiteConnection:
    """Open a SQLite file for a store, with crash points before each statement, and before and behind each commit."""
    return _CrashConnection(connect_sqlite3(path))


@attrs.define(eq=False, repr=False)
class _CrashConnection:
    inner: SQLiteConnection
    is_writing: bool = False
    """Whether the transaction does."""

    def execute(self, sql: str, parameters: Parameters = (), /) -> SQLiteCursor:
        crash_point("statement")
        if sql.startswith("BEGIN"):
            self.is_writing = sql == "BEGIN IMMEDIATE"
        is_durable = sql == "COMMIT" and self.is_writing
        if is_durable:
            crash_point("commit")
        cursor = self.inner.execute(sql, parameters)
        if is_durable:
            crash_point("commit")  # it is written, and nobody has been told
        return cursor

    def close(self) -> None:
        self.inner.close()


# Outside.


@attrs.frozen(kw_only=True)
class ProcessResult(Value):
    """What is known of a process after its end."""

    told: tuple[Any, ...]
    """What it told, oldest first."""

    killed: bool
    """Whether SIGKILL ended it before it had done its work."""

    points: Mapping[str, int]
    """How many moments it had, by kind; empty if it was killed."""


@attrs.define(eq=False, repr=False)
class RunningProcess:
    """A child that has not ended, or whose end was not asked for."""

    pid: int
    _go_fd: int
    _pipe: int
    _reap: Callable[[int], int]
    """Told the pid of a process that has ended; returns its status."""

    _kill_at: Moment | None = None
    _received: list[Any] = attrs.field(factory=list, init=False)
    _has_ended: bool = attrs.field(default=False, init=False)

    def next_word(self) -> Any:
        """Wait for what it tells next, and return it.

        Raises:
            EOFError: when it ends before it tells anything more.
        """
        heard = len(self._received)
        while len(self._received) == heard and not self._has_ended:
            self._read_messages(None)
        if len(self._received) == heard:
            raise EOFError("the process has ended")
        return self._received[heard]

    def go(self) -> None:
        """Let a `wait_for_go` of it return."""
        with suppress(BrokenPipeError):
            os.write(self._go_fd, b".")

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal; nothing happens if it has ended."""
        os.kill(self.pid, number)  # its number is not used again before it is reaped, which `end` does

    def end(self, *, kill_after_s: float | None = None) -> ProcessResult:
        """Wait for its end, and return what is known of it.

        Args:
            kill_after_s: Seconds after which it is killed, 0 or more; None for never.

        Raises:
            AssertionError: when its work raised, with the traceback, or had no moment of the kind at which it was to be
                killed: whoever sweeps over these would find nothing wrong, ever.
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
            raise AssertionError(f"a child broke off:\n{last.trace}")  # noqa: TRY004  the test has failed
        if last is None and status != -signal.SIGKILL:
            raise AssertionError(f"a child ended without a word, with status {status}")
        if last is not None and self._kill_at is not None and self._kill_at[0] not in last.points:
            kinds = ", ".join(sorted(last.points))
            raise AssertionError(
                f"kill_at={self._kill_at!r}: the work has no moment of that kind, it has {kinds}; a SQLite store has "
                "commits and statements with connect=agentfsm.testing.crash.connect"
            )
        return ProcessResult(
            told=tuple(self._received), killed=last is None, points={} if last is None else last.points
        )

    def _read_messages(self, timeout_s: float | None) -> None:
        readable, _, _ = select.select([self._pipe], [], [], timeout_s)
        if not readable:
            return
        words = BytesIO(os.read(self._pipe, _PIPE_BYTES))  # words are written whole, so whole ones are read
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
    """Where children begin: a process that stays as it is, and forks. What an order names is imported there, once.

    As a context manager; at its exit whatever still runs is killed.

    Args:
        prepare: Done there at the start, so that no life has to: load what is loaded late. A function of a module,
            which leaves no thread behind and no store open.
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
            # In a session of its own, since an interrupt at the terminal is for whoever asks for children.
            self._process = subprocess.Popen(command, pass_fds=[desk], start_new_session=True)  # noqa: S603  ours
            self._send(pickle.dumps(self.prepare))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._control.close()  # it takes that for the end
        self._process.wait()

    def run(
        self,
        work: Work,
        *args: Any,
        kill_at: Moment | None = None,
        kill_after_s: float | None = None,
        backend: str = "asyncio",
    ) -> ProcessResult:
        """Let a process do the work, to its end or until it is killed.

        Args:
            work: An async function of a module.
            args: For it; they can be pickled.
            kill_at: The moment at which it is killed; None for none.
            kill_after_s: Seconds from its first word on (`tell`) after which it is killed; None for never.
            backend: "asyncio" or "trio".

        Raises:
            AssertionError: when the work raised, or had no moment of the kind; as `RunningProcess.end`.
        """
        living = self.start(work, *args, kill_at=kill_at, backend=backend)
        if kill_after_s is not None:
            with suppress(EOFError):
                living.next_word()
        return living.end(kill_after_s=kill_after_s)

    def start(self, work: Work, *args: Any, kill_at: Moment | None = None, backend: str = "asyncio") -> RunningProcess:
        """Start a process, and do not wait for its end; as `run`."""
        if backend not in _BACKENDS:
            raise MisuseError(f"backend={backend!r}: give one of {', '.join(_BACKENDS)}")
        if kill_at is not None and kill_at[1] < 1:
            raise MisuseError(f"kill_at={kill_at!r}: moments are counted from 1")
        order = pickle.dumps(_ForkRequest(work=work, args=args, kill_at=kill_at, backend=backend))
        (told, tell_fd), (go_fd, go) = os.pipe(), os.pipe()
        self._send(order, tell_fd, go_fd)
        for given in (tell_fd, go_fd):
            os.close(given)
        return RunningProcess(self._read_int(), go, told, self._reap, kill_at)

    def _send(self, request: bytes, *pipes: int) -> None:
        socket.send_fds(self._control, [len(request).to_bytes(_LENGTH_BYTES)], pipes)
        self._control.sendall(request)

    def _reap(self, pid: int) -> int:
        self._control.sendall(bytes(_LENGTH_BYTES) + pid.to_bytes(_LENGTH_BYTES))
        return self._read_int()

    def _read_int(self) -> int:
        return int.from_bytes(_receive(self._control, _LENGTH_BYTES))


# In the process that forks.


def _serve(control_fd: int) -> None:
    """Take orders until nobody is there who gives them."""
    for backend in _BACKENDS:
        with suppress(ImportError):
            import_module(f"anyio._backends._{backend}")
    living: set[int] = set()
    with socket.socket(fileno=control_fd) as desk, suppress(EOFError):
        prepare = pickle.loads(_receive(desk, int.from_bytes(_receive(desk, _LENGTH_BYTES))))  # noqa: S301  of our own parent
        if prepare is not None:
            prepare()
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
        raise EOFError("the other process is gone")
    return words


def _fork_child(request: _ForkRequest, control: socket.socket, pipes: Sequence[int]) -> int:
    pid = os.fork()
    if not pid:
        control.close()
        _run_work(request, *pipes)
    for pipe in pipes:
        os.close(pipe)
    return pid


def _run_work(request: _ForkRequest, tell_fd: int, go_fd: int) -> NoReturn:
    """Do the work, and end without a look at what the parent had open."""
    _child.tell_fd, _child.go_fd, _child.kill_at = tell_fd, go_fd, request.kill_at
    try:
        anyio.run(
            partial(request.work, *request.args),
            backend=request.backend,
            backend_options=_crash_point_options(request.backend),
        )
        _child.kill_at = None
        last: _WorkDone | _WorkFailed = _WorkDone({kind: next(passed) - 1 for kind, passed in _child.counters.items()})
    except BaseException:  # noqa: BLE001  whatever it is, the parent has to hear of it
        trace = traceback.format_exc().encode(errors="backslashreplace")
        last = _WorkFailed(trace[-_MAX_TRACE_BYTES:].decode(errors="replace"))
    os.write(tell_fd, pickle.dumps(last))
    os._exit(0)


def _crash_point_options(backend: str) -> dict[str, Any]:
    """Return the options of an event loop that has a crash point before each step of a task."""
    if backend == "trio":
        return {"instruments": [_CrashInstrument()]}
    return {"loop_factory": _CrashEventLoop}


class _CrashEventLoop(asyncio.SelectorEventLoop):
    def call_soon(self, callback: Callable[..., Any], *args: Any, context: Context | None = None) -> asyncio.Handle:  # type: ignore[override]
        return super().call_soon(_run_step, callback, *args, context=context)


def _run_step(callback: Callable[..., Any], *args: Any) -> None:
    crash_point("await")
    callback(*args)


class _CrashInstrument:
    """An instrument of trio."""

    def before_task_step(self, _task: object) -> None:
        crash_point("await")
