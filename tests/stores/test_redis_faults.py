"""RedisStore on a server that goes away, comes back, is full, busy or damaged."""

import os
import signal
import subprocess
import sys
import threading

import anyio
import pytest
import redis
from redis._parsers.base import BaseParser

from agentfsm import (
    AssistantMessage,
    ConflictError,
    CorruptError,
    LeaseLostError,
    MisuseError,
    RunNotFoundError,
    StoreError,
)
from agentfsm.core.events import AnswerGiven, Observed
from agentfsm.core.inbox import Approve, Reject
from agentfsm.ports import Filter
from agentfsm.stores import RedisStore
from agentfsm.stores.redis import server as redis_server
from agentfsm.testing.conformance.helpers import (
    FINAL_ANSWER,
    LeasedRun,
    check_refused,
    create_finished_run,
    list_ids,
    make_header,
    make_input,
    with_version,
)
from tests.support.busy_writer import hold
from tests.support.cutting_proxy import CuttingProxy
from tests.support.database_servers import RedisServer
from tests.support.server_reaper import await_that


@pytest.fixture(scope="module")
def server():
    """A server that no other test knows, which says at once when a script keeps it busy."""
    with RedisServer({"lua-time-limit": "1"}) as server:
        yield server


@pytest.fixture
def client(server):
    """A look at the server from outside."""
    with redis.Redis.from_url(server.url) as client:
        yield client
        client.config_set("maxmemory", 0)
        client.flushdb()


@pytest.fixture
def proxy(server):
    with CuttingProxy(server.port) as proxy:
        yield proxy


@pytest.fixture
async def make(server, client):
    """Make stores on the server, or somewhere else; they are closed at the end of the test."""
    stores = []

    def make(url=server.url, **options):
        stores.append(RedisStore(url, **{"accept_loss": "everything", **options}))
        return stores[-1]

    yield make
    for store in stores:
        await store.aclose()


@pytest.fixture
async def frail(make, server, proxy):
    """A store whose connection can be cut; it is connected."""
    store = make(server.url.replace(str(server.port), str(proxy.own_port)))
    await store.now()
    return store


# Cut connections.


async def creating(store, cut):
    cut()
    _head, lease = await store.create(make_header("new", session="s"), events=(Observed(at=1.0),))
    assert (lease.version, lease.crashes) == (1, 0)
    return lease


async def creating_in_a_session(store, cut):
    await create_finished_run(store, make_header("first", session="s"))
    cut()
    head, _lease = await store.create(make_header("new", session="s"))
    assert head.after == "first"


async def leasing(store, cut):
    await create_finished_run(store)
    cut()
    lease = await store.lease("r1")
    assert (lease.version, lease.crashes) == (2, 0)
    with pytest.raises(ConflictError):
        await store.lease("r1")


async def appending(store, cut):
    driver = await LeasedRun.create(store)
    cut()
    commits = [driver.append(Observed(at=1.0)), driver.append(*driver.build_turn())]
    assert [await commit.wait() for commit in commits] == [True, True]
    assert len((await store.read("r1")).events) == 6


async def ending(store, cut):
    driver = await LeasedRun.create(store)
    row = await store.post("r1", "k", make_input("x"))
    await driver.append(Observed()).wait()
    cut()
    assert await driver.append(FINAL_ANSWER, taken=[row.number], final=True).wait()
    assert (len((await store.read("r1")).events), await store.inbox("r1")) == (2, ())


async def not_ending(store, cut):
    driver = await LeasedRun.create(store)
    await driver.append(Observed()).wait()
    await store.post("r1", "k", make_input("x"))
    cut()
    assert await driver.append(FINAL_ANSWER, final=True).wait() is False
    assert driver.lease.inbox_head == 1


async def being_refused(store, cut):
    driver = await LeasedRun.create(store)
    await driver.append(Observed()).wait()
    cut()
    driver.run = LeasedRun(store, driver.lease, driver.run).run
    again = store.append(driver.lease, driver.run, (Observed(at=9.0),))
    await check_refused(again, ConflictError)
    assert (await store.read("r1")).events == (Observed(),)


async def releasing(store, cut):
    driver = await LeasedRun.create(store)
    cut()
    await driver.release()
    assert [line.driven for line in await store.runs()] == [False]


async def posting(store, cut):
    await LeasedRun.create(store)
    cut()
    row = await store.post("r1", "k", Approve(call_id="t1.0", by="ann"))
    assert (row.number, row.item.by, await store.inbox("r1")) == (1, "ann", (row,))
    with pytest.raises(ConflictError, match="ann"):
        await store.post("r1", "k", Reject(call_id="t1.0"))


async def reading(store, cut):
    await create_finished_run(store)
    cut()
    assert len((await store.read("r1")).events) == 2


async def listing(store, cut):
    await create_finished_run(store)
    cut()
    assert list_ids(await store.runs()) == ["r1"]


async def deleting(store, cut):
    await create_finished_run(store)
    cut()
    await store.delete("r1")
    with pytest.raises(RunNotFoundError):
        await store.delete("r1")


async def deleting_a_session(store, cut):
    for number in range(3):
        await create_finished_run(store, make_header(f"r{number}", session="s"))
    cut()
    assert await store.delete_session("s") == 3
    assert await store.delete_session("s") == 0


async def pruning(store, cut):
    for number in range(3):
        await create_finished_run(store, make_header(f"r{number}"))
    cut()
    assert await store.prune(5.0) == 3
    assert await store.prune(5.0) == 0


async def writing_a_record(store, cut):
    cut()
    first = await store.write_record("kind", "k", 1, revision=0)
    assert await store.read_record("kind", "k") == first
    with pytest.raises(ConflictError):
        await store.write_record("kind", "k", 2, revision=0)


async def deleting_a_record(store, cut):
    first = await store.write_record("kind", "k", 1, revision=0)
    cut()
    assert await store.delete_record("kind", "k", revision=first.revision)
    assert not await store.delete_record("kind", "k", revision=first.revision)


OPERATIONS = (
    creating,
    creating_in_a_session,
    leasing,
    appending,
    ending,
    not_ending,
    being_refused,
    releasing,
    posting,
    reading,
    listing,
    deleting,
    deleting_a_session,
    pruning,
    writing_a_record,
    deleting_a_record,
)


@pytest.mark.parametrize("side", ["question", "answer"])
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.__name__)
async def test_what_was_cut_off_is_done_once(frail, proxy, operation, side):
    """Whether the question or the answer is lost, what was asked for is done, once, and answered as if nothing was."""
    await operation(frail, lambda: proxy.cut(side))
    assert proxy.cuts == 1
    assert frail._writer.backend._away_since is None  # the next time it is waited for as long again


@pytest.mark.parametrize(("side", "keep"), [("question", 3_000), ("question", 20_000), ("answer", 40), ("answer", 700)])
async def test_a_group_that_was_cut_in_the_middle_is_done_once(frail, proxy, side, keep):
    """Of many runs' appends some were written, some not, and some answered: each is written once, in order."""
    drivers = [await LeasedRun.create(frail, make_header(f"r{number}")) for number in range(30)]
    gate = hold(frail)
    commits = [driver.append(Observed(at=float(number))) for number, driver in enumerate(drivers)]
    commits += [driver.append(*driver.build_turn()) for driver in drivers]
    for driver in drivers:
        frail.release(driver.lease)
    proxy.cut(side, keep)
    gate.set()
    for commit in commits:
        assert await commit.wait()
    assert proxy.cuts == 1
    for number, driver in enumerate(drivers):
        stored = await frail.read(f"r{number}")
        assert (len(stored.events), stored.events[0].at) == (6, float(number))
        assert (await LeasedRun.resume(frail, driver.run.id)).run == driver.run


async def test_an_owner_that_was_replaced_while_cut_off_is_told_so(frail, proxy, client):
    """What was asked again after another worker took the run is refused, and writes nothing."""
    driver = await LeasedRun.create(frail)
    client.hset("agentfsm:run:r1", "token", "999")
    proxy.cut("question")
    await check_refused(driver.append(Observed()), LeaseLostError)
    assert driver.lease.lost
    assert (await frail.read("r1")).events == ()


def test_nothing_counts_behind_a_question_that_was_put_off():
    """What was refused may have hung on what was not dealt with yet, so both are asked again."""
    answers = iter([["written"], redis.ResponseError("BUSY Redis is busy running a script."), ["moved"]])

    class Wire:
        def read_response(self):
            answer = next(answers)
            if isinstance(answer, Exception):
                raise answer
            return answer

    questions = [redis_server.RedisRequest((), number) for number in range(3)]
    with pytest.raises(redis.ResponseError, match="BUSY"):
        redis_server._read_replies(Wire(), questions)
    assert [question.reply for question in questions] == [["written"], None, None]


async def test_forgotten_scripts_are_loaded_again(make, client):
    """A SCRIPT FLUSH harms nobody."""
    store = make()
    driver = await LeasedRun.create(store)
    client.script_flush()
    assert await driver.append(Observed()).wait()
    assert len((await store.read("r1")).events) == 1


# Servers that go away.


async def test_a_server_that_was_killed_loses_nothing(make):
    """With appendfsync always all that was acknowledged is there after a crash, and who appends goes on."""
    options = {"appendonly": "yes", "appendfsync": "always", "no-appendfsync-on-rewrite": "no"}
    with RedisServer(options) as server:
        store = make(server.url, accept_loss="nothing")
        written = {}

        async def drive(name):
            driver = await LeasedRun.create(store, make_header(name))
            assert await driver.append(Observed()).wait()
            while len(killed) < 3 or written[name] < 50:
                assert await driver.append(*driver.build_turn()).wait()
                written[name] = driver.run.version
            await driver.release()

        killed = []
        async with anyio.create_task_group() as group:
            for number in range(5):
                written[f"r{number}"] = 0
                group.start_soon(drive, f"r{number}")
            for _ in range(3):
                before = dict(written)
                while any(written[name] == before[name] for name in written):
                    await anyio.lowlevel.checkpoint()
                await anyio.to_thread.run_sync(server.kill)
                await anyio.to_thread.run_sync(server.start)
                killed.append(True)
        for name, version in written.items():
            assert (await LeasedRun.resume(store, name)).run.version == version
        await store.aclose()


async def test_a_server_that_was_emptied_is_told_of(make, client):
    """Who drives a run that is gone is refused, and not told of another worker only; the id may be used again."""
    store = make()
    driver = await LeasedRun.create(store)
    assert await driver.append(Observed()).wait()
    client.flushall()
    with pytest.raises(LeaseLostError, match="or the store has lost it"):
        await driver.append(*driver.build_turn()).wait()
    assert driver.lease.lost
    await driver.release()
    with pytest.raises(RunNotFoundError):
        await store.read("r1")
    again = await LeasedRun.create(store)
    assert await again.append(Observed()).wait()


async def test_who_was_never_reached_is_not_waited_for(make):
    """A wrong address is reported at once, whatever the patience."""
    store = make("redis://127.0.0.1:1", patience_s=1e9)
    with pytest.raises(StoreError, match=r"127\.0\.0\.1:1.*can be reached"):
        await store.now()


async def test_patience_ends(make):
    """A server that stays away fails what was asked for; when it is back, so is the store."""
    with RedisServer() as server:
        store = make(server.url, patience_s=0.05)
        driver = await LeasedRun.create(store)
        await anyio.to_thread.run_sync(server.kill)
        await check_refused(driver.append(Observed()), StoreError)
        with pytest.raises(StoreError, match="an earlier append was not written"):
            await driver.append(FINAL_ANSWER).wait()
        store.release(driver.lease)
        await anyio.to_thread.run_sync(server.start)
        await create_finished_run(store, make_header("r2"))
        await store.aclose()


async def test_a_server_that_does_not_answer_is_given_up(make):
    """A server that hangs is not waited for without end; what was sent meanwhile is done once."""
    with RedisServer() as server:
        store = make(f"{server.url}?socket_timeout=0.05", patience_s=0.1)
        driver = await LeasedRun.create(store)
        os.kill(server.pid, signal.SIGSTOP)
        await check_refused(driver.append(Observed()), StoreError)
        os.kill(server.pid, signal.SIGCONT)
        assert len((await store.read("r1")).events) <= 1
        await store.aclose()


async def test_a_server_that_is_busy_is_waited_for(make, client, server, caplog):
    """While somebody's script runs nothing is lost, and then all goes on."""
    caplog.set_level("INFO", logger="agentfsm.stores")
    store = make()
    driver = await LeasedRun.create(store)

    def be_busy():
        with redis.Redis.from_url(server.url, retry=None) as other, pytest.raises(redis.ResponseError):
            other.eval("while true do end", 0)

    def is_busy():
        try:
            client.get("x")
        except redis.ResponseError:
            return True
        return False

    thread = threading.Thread(target=be_busy)
    thread.start()
    await_that(is_busy, "the script keeps the server busy")
    commits = [driver.append(Observed()), driver.append(*driver.build_turn())]
    await anyio.to_thread.run_sync(await_that, lambda: "BUSY" in caplog.text, "the store meets it")
    client.script_kill()
    assert [await commit.wait() for commit in commits] == [True, True]
    thread.join()
    assert len((await store.read("r1")).events) == 6


async def test_a_master_that_became_a_replica_is_waited_for(make, client, caplog):
    """In a failover what was asked of the old master is asked again, of whoever answers at the address then."""
    caplog.set_level("INFO", logger="agentfsm.stores")
    store = make()
    driver = await LeasedRun.create(store)
    client.config_set("replica-read-only", "yes")
    client.replicaof("127.0.0.1", 1)
    commit = driver.append(Observed())
    await anyio.to_thread.run_sync(await_that, lambda: "read only replica" in caplog.text, "the store meets it")
    client.replicaof("NO", "ONE")
    assert await commit.wait()
    assert len((await store.read("r1")).events) == 1


# Servers that are full, or damaged.


async def test_a_full_memory_tears_nothing(make, client):
    """Where no memory is left writes are refused whole and by name; reading, leaving and deleting go on."""
    store = make()
    driver = await LeasedRun.create(store)
    row = await store.post("r1", "k", make_input("x"))
    await create_finished_run(store, make_header("old", session="s"))
    client.config_set("maxmemory", 1)
    append = driver.append(Observed(), taken=[row.number])
    for refusal in (
        append.wait(),
        store.post("r1", "k2", make_input("y")),
        store.create(make_header("r2")),
        store.lease("old"),
    ):
        with pytest.raises(StoreError, match="maxmemory"):
            await refusal
    with pytest.raises(StoreError, match="an earlier append was not written"):
        await driver.append(FINAL_ANSWER).wait()
    other = make()
    assert ((await other.read("r1")).events, await other.inbox("r1")) == ((), (row,))
    assert set(list_ids(await other.runs())) == {"r1", "old"}
    assert await other.delete_session("s") == 1
    await driver.release()
    assert [(line.id, line.driven) for line in await other.runs()] == [("r1", False)]
    client.config_set("maxmemory", 0)
    driver = await LeasedRun.resume(other)
    assert await driver.append(Observed(), taken=[row.number]).wait()
    assert await other.inbox("r1") == ()


async def test_a_record_that_the_server_does_not_take_stops_no_other_run(make, client):
    """The server hangs up on whoever sends more than it takes: that is refused here, and all else goes on."""
    client.config_set("proto-max-bulk-len", 2**20)
    try:
        store = make(patience_s=0.2)
        with pytest.raises(MisuseError, match=r"1,048,576 bytes.*raise proto-max-bulk-len"):
            await store.create(make_header("large", prompt="x" * 2**20))
        large, small = [await LeasedRun.create(store, make_header(f"r{number}")) for number in range(2)]
        gate = hold(store)
        commits = [large.append(Observed(), AnswerGiven(message=AssistantMessage(text="x" * 2**20)))]
        commits.append(small.append(Observed()))
        gate.set()
        with pytest.raises(MisuseError):
            await commits[0].wait()
        assert await commits[1].wait()
        late = store.append(large.lease, with_version(large.run, 3), (Observed(),))
        with pytest.raises(StoreError, match="an earlier append was not written"):
            await late.wait()
        assert list_ids(await store.runs()) == ["r1", "r0"]
    finally:
        client.config_set("proto-max-bulk-len", redis_server.MAX_ARG_BYTES)


async def test_a_damaged_record_is_named(make, client):
    """The journal says which record cannot be read, and what is whole stays readable."""
    store = make()
    driver = await LeasedRun.create(store)
    await driver.append(Observed(), *driver.build_turn()).wait()
    client.lset("agentfsm:journal:r1", 3, b"{")
    with pytest.raises(CorruptError, match="version 3"):
        await store.read("r1")
    assert len((await store.read("r1", 3)).events) == 3
    client.ltrim("agentfsm:journal:r1", 0, 4)
    with pytest.raises(CorruptError, match=r"version 5.*missing"):
        await store.read("r1", 3)
    client.delete("agentfsm:journal:r1")
    with pytest.raises(CorruptError, match="the header"):
        await store.read("r1")


async def test_a_damaged_post_is_named(make, client):
    """A row that is no post, or whose item is none, is told by its key or its number."""
    store = make()
    await LeasedRun.create(store)
    await store.post("r1", "k", make_input("x"))
    client.hset("agentfsm:inbox:r1", "k", b"\xff")
    for use in (store.inbox("r1"), store.post("r1", "k", make_input("x"))):
        with pytest.raises(CorruptError, match="'k'"):
            await use
    client.hset("agentfsm:inbox:r1", "k", b"1 - 0 {")
    with pytest.raises(CorruptError, match="inbox row 1"):
        await store.inbox("r1")


@pytest.mark.parametrize(("field", "value"), [("turn", "x"), ("state", "dreaming"), ("prompt", b"\xff")])
async def test_a_damaged_line_of_the_list_is_named(make, client, field, value):
    """A run whose line cannot be read is told by its id, and can be deleted."""
    store = make()
    await create_finished_run(store)
    client.hset("agentfsm:run:r1", field, value)
    with pytest.raises(CorruptError, match="'r1'"):
        await store.runs()
    await store.delete("r1")
    assert await store.runs(Filter()) == ()


async def test_keys_of_another_program_are_told_of(make, client):
    """A key that holds something else is left as it is, and the other jobs of the group are done."""
    store = make()
    driver = await LeasedRun.create(store)
    client.set("agentfsm:run:r2", "somebody else's")
    gate = hold(store)
    commit = driver.append(Observed())
    async with anyio.create_task_group() as group:
        group.start_soon(anyio.to_thread.run_sync, gate.set)
        with pytest.raises(CorruptError, match="another prefix"):
            await store.create(make_header("r2"))
    assert await commit.wait()
    assert client.get("agentfsm:run:r2") == b"somebody else's"


# Errors.


CODES = sorted(code for code in redis_server._ADVICE if code.isupper())


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("form", ["{} words", "ERR Error running script (call to f_1): @user_script:12: -{} words"])
def test_every_error_of_the_table_is_known_by_its_code(code, form):
    """As Redis says it, and as Redis 6 wraps what went wrong in a script."""
    assert redis_server._error_code(BaseParser.parse_error(form.format(code))) == code


def test_every_error_that_the_driver_makes_its_own_is_in_the_table():
    """The driver cuts the code off: what is not in our table would be told without advice."""
    known = redis_server._ERROR_CODES.keys() | {redis.exceptions.ResponseError}
    cluster = {"ASK", "TRYAGAIN", "MOVED", "CLUSTERDOWN", "CROSSSLOT"}  # such a server is refused before
    for code, kind in BaseParser.EXCEPTION_CLASSES.items():
        if code not in cluster | {"ERR", "EXECABORT"}:
            assert kind in known, code


@pytest.mark.parametrize(("is_there", "told"), [(True, "user and password"), (False, "can be reached")])
async def test_no_error_tells_a_password(make, server, caplog, is_there, told):
    """Neither a refused login nor a lost connection shows it, in the error, its cause or the log."""
    caplog.set_level("DEBUG")
    store = make(f"redis://:s3cret@127.0.0.1:{server.port if is_there else 1}/0")
    with pytest.raises(StoreError, match=told) as failure:
        await store.now()
    assert "s3cret" not in f"{failure.value!r} {failure.value.__cause__!r} {failure.value.__cause__} {caplog.text}"


async def test_a_fault_of_the_store_itself_is_said_to_be_one(make):
    """What nobody foresaw fails the group, by name; the next one is done."""
    store = make()
    with pytest.raises(StoreError, match="a bug in it"):
        await store._run_job(lambda _ledger: 1 / 0)
    assert await store.now()


FORK = """
import os, sys, anyio
from agentfsm.core.events import Observed
from agentfsm.stores import RedisStore
from agentfsm.testing.conformance.helpers import FINAL_ANSWER, LeasedRun, make_header

store = RedisStore(sys.argv[1], accept_loss="everything")

async def start(name):
    driver = await LeasedRun.create(store, make_header(name))
    assert await driver.append(Observed()).wait()
    return driver

async def end(driver):
    assert await driver.append(FINAL_ANSWER).wait()
    await driver.release()

async def child():
    await end(await start("child"))
    await store.aclose()

driver = anyio.run(start, "parent")
pid = os.fork()
if pid == 0:
    anyio.run(child)
    sys.exit()
assert os.waitpid(pid, 0)[1] == 0
del driver  # its event loop is over, and so is its lease

async def resume_from():
    await end(await LeasedRun.resume(store, "parent"))

anyio.run(resume_from)
"""


def test_a_forked_child_has_a_connection_of_its_own(server, client):
    """Parent and child go on with the store that was in use at the fork, and neither disturbs the other."""
    run = [sys.executable, "-W", "error", "-W", "ignore::DeprecationWarning", "-c", FORK, server.url]
    subprocess.run(run, check=True, timeout=60)
    assert [client.llen(f"agentfsm:journal:{name}") for name in ("parent", "child")] == [3, 3]
