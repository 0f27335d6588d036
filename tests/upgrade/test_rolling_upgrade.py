"""Two versions of agentfsm work on one store: a simulated next one beside this one, and this one beside the first."""

from __future__ import annotations

import logging
from collections import Counter
from functools import partial

import anyio
import pytest

from agentfsm import TooNewError
from agentfsm.cli.render.text import format_summaries
from agentfsm.core.header import FORMAT
from agentfsm.journal.run_status import list_statuses
from tests.support.database_servers import empty_schema
from tests.support.other_versions import make_first_version, make_next_version
from tests.support.version_story import Books, make_agent, open_store

NEXT_RUNS = ("r0", "r1")
OLD_RUNS = ("r2", "r3")
RUNS = (*NEXT_RUNS, *OLD_RUNS)


@pytest.fixture(scope="session")
def next_package(tmp_path_factory):
    """The next version, whose format has one more event."""
    return make_next_version(tmp_path_factory.mktemp("next"))


@pytest.fixture(scope="session")
def next_version(next_package):
    """A process with it."""
    with next_package.start() as process:
        yield process


@pytest.fixture(scope="session")
def first_package(tmp_path_factory):
    """Version 0.1.0, with format 3 and older tables."""
    version = make_first_version(tmp_path_factory.mktemp("first"))
    if version is None:
        pytest.skip("the history does not go back to version 0.1.0: this is a shallow clone, or no repository")
    return version


@pytest.fixture(scope="session")
def first_version(first_package):
    """A process with it."""
    with first_package.start() as process:
        yield process


@pytest.fixture(params=["sqlite", "postgres", "redis"])
def address(request, tmp_path):
    """A store in words, as the story takes it."""
    if request.param == "sqlite":
        yield f"sqlite {tmp_path / 'runs.db'}"
    elif request.param == "redis":
        yield f"redis {request.getfixturevalue('redis_url')}"
    else:
        with empty_schema(request.getfixturevalue("postgres_desk")) as name:
            yield f"postgres {request.getfixturevalue('shared_postgres')} {name}"


@pytest.fixture
def books(tmp_path):
    return Books(str(tmp_path / "effects"))


@pytest.fixture
async def store(address):
    store = open_store(address)
    yield store
    await store.aclose()


@pytest.fixture
def anyio_backend():
    """The event loop makes no difference here."""
    return "asyncio"


async def ask(version, *args, abandon=False, **options):
    """Wait for another process without blocking the event loop, which would look like a blocked worker."""
    return await anyio.to_thread.run_sync(partial(version.ask, *args, **options), abandon_on_cancel=abandon)


def count_claims(store, monkeypatch):
    """Return the list of the claims that a worker makes from now on."""
    claims = []
    claim = store.claim

    async def count(*args, **options):
        claims.append(await claim(*args, **options))
        return claims[-1]

    monkeypatch.setattr(store, "claim", count, raising=False)
    return claims


async def wait_until(is_true):
    """Wait for what another process does."""
    with anyio.fail_after(60):
        while not is_true():  # noqa: ASYNC110  it cannot set an event
            await anyio.sleep(0.01)


async def test_an_older_worker_leaves_newer_runs_alone(  # noqa: PLR0917
    address, store, books, next_version, monkeypatch, caplog
):
    """It claims none, counts no crash, does not spin and logs once; a worker of that version goes on at once."""
    agent = make_agent(store)
    for run_id in RUNS:
        await agent.run("Pay.", id=run_id, deps=books)  # up to the question whether to pay
    for run_id in OLD_RUNS:
        await agent.approve(run_id, "t1.0", by="ann")
    await ask(next_version, "approve", address, books, *NEXT_RUNS)  # a post of the next version counts
    before = {line.id: line for line in await store.runs()}
    assert {run_id: line.format for run_id, line in before.items()} == {
        **dict.fromkeys(NEXT_RUNS, FORMAT + 1),
        **dict.fromkeys(OLD_RUNS, FORMAT),
    }
    rows = list(before.values())
    shown = "\n".join(format_summaries(rows, await list_statuses(store, rows)))
    assert shown.count(f"needs a newer agentfsm (format {FORMAT + 1})") == len(NEXT_RUNS)
    claims = count_claims(store, monkeypatch)
    with caplog.at_level(logging.WARNING, logger="agentfsm"):
        await agent.worker(deps=books, until_idle=True)
        assert len(claims) <= 1 + 2 * len(OLD_RUNS)  # it does not spin
        assert claims[-1].has_newer
        async with anyio.create_task_group() as group:
            group.start_soon(partial(agent.worker, deps=books, poll_s=0.01))
            with anyio.fail_after(30):
                while len(claims) < 10:  # noqa: ASYNC110  other polls follow
                    await anyio.sleep(0.01)
            group.cancel_scope.cancel()
    assert {lease.run_id for claim in claims for lease in claim.leases} == set(OLD_RUNS)
    assert sorted(books.effects()) == sorted(OLD_RUNS)
    assert {run_id: line for run_id, line in before.items() if run_id in NEXT_RUNS} == {
        line.id: line for line in await store.runs() if line.id in NEXT_RUNS
    }
    for takeover in (False, True):
        with pytest.raises(TooNewError, match=rf"'r0'.*format {FORMAT + 1}.*up to {FORMAT}\): upgrade"):
            await store.lease("r0", takeover=takeover)
    with pytest.raises(TooNewError, match="upgrade agentfsm"):
        await agent.resume("r0", deps=books)
    said = [record.message for record in caplog.records if "newer" in record.message]
    assert len(said) == 2, said  # workers
    assert said[0].startswith("runs of agent 'cashier' are ready whose records a newer agentfsm has written")
    outcome = await ask(next_version, "work", address, books)
    assert sorted(outcome["claimed"]) == [[run_id, 0] for run_id in NEXT_RUNS]
    assert outcome["warnings"] == []
    assert Counter(books.effects()) == dict.fromkeys(RUNS, 1)
    assert {line.id: (line.state, line.format) for line in await store.runs()} == {
        **dict.fromkeys(NEXT_RUNS, ("done", FORMAT + 1)),
        **dict.fromkeys(OLD_RUNS, ("done", FORMAT)),
    }


@pytest.mark.parametrize("address", ["sqlite"], indirect=True)
async def test_a_newer_post_ends_the_execution_of_an_older_worker(address, store, books, next_version, caplog):
    """It finishes the call that runs, then leaves the run to a newer worker, which has no reason to repeat the call."""
    agent = make_agent(store)
    await agent.run("Pay.", id="r0", deps=books)
    await agent.approve("r0", "t1.0", by="ann")
    books.delay.touch()
    async with anyio.create_task_group() as group:
        group.start_soon(partial(agent.worker, deps=books, until_idle=True))
        await wait_until(books.effects)
        await ask(next_version, "send", address, books, "r0")
        books.delay.unlink()
    assert [record.message for record in caplog.records if "was not executed" in record.message]
    [line] = await store.runs()
    assert (line.is_too_new, line.driven, line.stop_reason) == (True, False, None)
    outcome = await ask(next_version, "work", address, books)
    assert outcome["claimed"][0] == ["r0", 0]
    assert books.effects() == ["r0"]
    assert [line.state for line in await store.runs()] == ["done"]


async def test_the_first_version_is_refused_after_the_upgrade(address, books, first_version, first_package):
    """Version 0.1.0 works on the store when this one upgrades it: it writes nothing more, and no effect is repeated."""
    runs = ("r0", "r1")
    await ask(first_version, "begin", address, books, *runs)
    await ask(first_version, "approve", address, books, *runs)
    await ask(first_version, "submit", address, books, "r2", keep_open=True)
    books.delay.touch()
    with first_package.start() as worker:
        async with anyio.create_task_group() as group:
            group.start_soon(partial(ask, worker, "work", address, books, abandon=True))
            await wait_until(lambda: set(books.effects()) == {*runs})
            store = open_store(address)
            before = {line.id: line for line in await store.runs()}
            assert {line.format for line in before.values()} == {4}
            books.delay.unlink()
            await wait_until(lambda: books.log.exists() and books.log.read_text().count("was not driven") == len(runs))
            worker.process.kill()
            group.cancel_scope.cancel()
    # A post to Redis is the same in both versions, and arrives.
    for command in ("submit", "begin") if address.startswith("redis") else ("submit", "approve", "begin"):
        outcome = await ask(
            first_version, command, address, books, "r3" if command == "submit" else "r2", keep_open=True
        )
        assert outcome["error"], command
    outcome = await ask(first_version, "submit", address, books, "r3")  # closes the store
    outcome = await ask(first_version, "submit", address, books, "r3")
    assert (outcome["error"], "upgrade agentfsm" in outcome["text"]) == ("TooNewError", True)
    after = {line.id: line for line in await store.runs()}
    assert {run_id: line.version for run_id, line in after.items()} == {
        run_id: line.version for run_id, line in before.items()
    }
    agent = make_agent(store)
    async with store.follow("reader", wait=False) as follower:
        await agent.worker(deps=books, until_idle=True)
        assert {each.run_id async for each in follower} == {"r0", "r1", "r2"}
    assert Counter(books.effects()) == dict.fromkeys(runs, 1)
    for run_id in runs:
        run = await agent.load(run_id)
        assert (run.state, run.output, run.header.format) == ("done", "Paid.", 3)
    assert [item.kind for item in (await agent.load("r2")).pending] == ["approval"]
    await store.aclose()
