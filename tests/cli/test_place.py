"""Where runs are kept: files and servers, and passwords that are shown nowhere."""

import secrets
import sys

import pytest

from agentfsm import MisuseError
from agentfsm.cli.resolve import store_location
from agentfsm.cli.resolve.command_hint import CommandHint
from agentfsm.cli.resolve.store_location import open_existing_store
from agentfsm.stores import SQLiteStore
from agentfsm.stores.loading import mask_password
from tests.support.database_servers import PASSWORD, RedisServer


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://u:s3cret@h:5432/db", "postgresql://u:***@h:5432/db"),
        ("redis://:s3cret@h/0", "redis://:***@h/0"),
        ("postgresql://u:s3cret/s3cret?s3cret@s3cret:@h/db", "postgresql://u:***@h/db"),
        ("postgresql://me@corp:s3cret@h/db", "postgresql://me@corp:***@h/db"),
        ("postgresql://h/db?user=u&password=s3cret&x=1", "postgresql://h/db?user=u&password=***&x=1"),
        ("postgresql://h/db?SSLPassword=s3cret", "postgresql://h/db?SSLPassword=***"),
        ("postgresql://u@h/db?sslmode=require", "postgresql://u@h/db?sslmode=require"),
        ("redis://h:6379/0", "redis://h:6379/0"),
    ],
)
def test_a_password_is_masked(url, shown):
    """Wherever in the URL it stands, and whatever it holds that should have been escaped; the rest is as it was."""
    assert mask_password(url) == shown
    assert "s3cret" not in mask_password(f"invalid choice: {url!r} (choose from run)")


def test_command_lines_find_the_store_again(monkeypatch):
    """A URL that the environment knows is left to it, since the password is there; another is named, masked.

    So is the usual path where the environment would lead elsewhere.
    """
    monkeypatch.delenv(store_location.STORE_VARIABLE, raising=False)
    url = "postgresql://u:s3cret@h/db"
    assert CommandHint(location=url).build_resume("7") == "agentfsm resume 7 --store 'postgresql://u:***@h/db'"
    assert CommandHint(location="redis://h/0").build_resume("7") == "agentfsm resume 7 --store redis://h/0"
    assert CommandHint(location=store_location.DEFAULT_STORE).build_resume("7") == "agentfsm resume 7"
    monkeypatch.setenv(store_location.STORE_VARIABLE, url)
    assert CommandHint(location=url, agent="a:b").build_resume("7") == "agentfsm resume 7 --agent a:b"
    assert CommandHint(location="redis://h/0").build_resume("7") == "agentfsm resume 7 --store redis://h/0"
    assert (
        CommandHint(location=store_location.DEFAULT_STORE).build_resume("7")
        == f"agentfsm resume 7 --store {store_location.DEFAULT_STORE}"
    )


def test_a_url_that_names_no_store(here):
    """The error names the ones that do, and no password; so does a complaint about words in the wrong place."""
    here("runs", "--store", "mysql://u:s3cret@h/db", code=2)
    assert "mysql://u:***@h/db names no store" in here.err
    said = here.err
    for words, code in [
        (("--store", "postgresql://u:s3cret@h/db", "runs"), 2),
        (("runs", "postgresql://u:s3cret@h/db"), 2),
        (("doctor", "--store", "redis://u:s3cret@h/zero/one?x=y"), 1),
        (("runs", "--store", "redis://u:s3cret@h:port/0", "--json"), 2),
    ]:
        said += here(*words, code=code) + here.err
    assert "***" in said
    assert "s3cret" not in said


class Missing:
    """Finds no redis."""

    def find_spec(self, name, *_where):
        if name == "redis":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def test_a_driver_that_is_missing(monkeypatch):
    """It is said what to install."""
    for name in [name for name in sys.modules if name.startswith(("redis", "agentfsm.stores.redis"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Missing(), *sys.meta_path])
    with pytest.raises(MisuseError, match=r"pip install 'agentfsm\[redis\]'"):
        open_existing_store("redis://h/0")


def test_runs_in_postgresql(here, shared_postgres, postgres_desk, monkeypatch):
    """All that a file can do: submitted, driven, shown, removed; which schema is the URL's to say."""
    schema = f"cli_{secrets.token_hex(8)}"
    monkeypatch.setenv(
        store_location.STORE_VARIABLE, f"{shared_postgres}{'&' if '?' in shared_postgres else '?'}schema={schema}"
    )
    try:
        a_life(here)
        assert "opens and contains no runs; acknowledged events survive a crash of the server" in here("doctor")
        tables = "SELECT count(*) FROM information_schema.tables WHERE table_schema = %s"
        assert postgres_desk.execute(tables, [schema]).fetchone() != (0,)
    finally:
        postgres_desk.execute(f"DROP SCHEMA IF EXISTS {schema} CASCADE")


def test_runs_in_redis(here, monkeypatch):
    """Only where less than everything may be lost, unless the URL accepts that; doctor tells what it promises."""
    with RedisServer() as server:
        here("submit", "app:adder", "2 + 2", "--store", server.url, code=2)
        assert "accept_loss='everything'" in here.err
        monkeypatch.setenv(store_location.STORE_VARIABLE, f"{server.url}?accept_loss=everything&prefix=cli:")
        a_life(here)
        assert "a restart of the server loses everything" in here("doctor")
        assert PASSWORD not in here.out + here.err


def a_life(here):
    """Do with a run what there is to do with one."""
    here("submit", "app:asker", "Ask.", "--id", "q")
    worker = "agentfsm worker app:asker\n"
    assert here.err.endswith(worker)
    here("worker", "app:asker", "--until-idle")
    assert "run q waiting: t1.0: Which colour?" in here.err
    said = here.json("answer", "q", "t1.0", "blue", "--by", "ann")
    assert said["resume"] == "agentfsm resume q"
    assert here("resume", "q") == "blue\n"
    assert [run["id"] for run in here.json("runs", "--agent", "asker")["runs"]] == ["q"]
    assert "answered by ann" in here("show", "q")
    assert here("delete", "q") == "removed run q\n"
    assert here.json("runs") == {"runs": []}


def test_a_file_stays_a_file(tmp_path):
    """A path is opened by SQLite, which nothing else has to be installed for."""
    path = tmp_path / "runs.db"
    path.touch()
    assert isinstance(open_existing_store(str(path)), SQLiteStore)
