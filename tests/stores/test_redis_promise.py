"""RedisStore says what the server promises, and refuses one that promises too little."""

import math

import pytest
import redis

from agentfsm import MisuseError, StoreError, TooNewError
from agentfsm.core.events import Observed
from agentfsm.stores import RedisStore
from agentfsm.stores.redis.server import LOSS_DESCRIPTIONS, SCHEMA_VERSION
from agentfsm.testing.conformance.helpers import LeasedRun, create_finished_run, make_header, make_input
from tests.support.database_servers import RedisServer

# By what a crash of such a server may cost.
SETTINGS = {
    "nothing": {"appendonly": "yes", "appendfsync": "always", "no-appendfsync-on-rewrite": "no", "save": ""},
    "seconds": {"appendonly": "yes", "appendfsync": "everysec"},
    "snapshot": {"appendonly": "no", "save": "3600 1"},
    "everything": {"appendonly": "no", "save": ""},
}
CHANGED = {name for settings in SETTINGS.values() for name in settings} | {"maxmemory", "maxmemory-policy"}


@pytest.fixture(scope="module")
def server():
    with RedisServer() as server:
        yield server


@pytest.fixture
def client(server):
    """A look at the server from outside; at the end of the test it is as it was before."""
    with redis.Redis.from_url(server.url) as client:
        before = {name: value for name, value in client.config_get("*").items() if name in CHANGED}
        yield client
        client.execute_command("ACL", "SETUSER", "default", "+config")
        configure(client, before)
        client.flushdb()


@pytest.fixture
async def make(server, client):
    """Make stores on the server, which are closed at the end of the test."""
    stores = []

    def make(accept_loss):
        stores.append(RedisStore(server.url, accept_loss=accept_loss))
        return stores[-1]

    yield make
    for store in stores:
        await store.aclose()


def configure(client, settings):
    for name, value in settings.items():
        client.config_set(name, value)


@pytest.mark.parametrize("loss", LOSS_DESCRIPTIONS)
async def test_less_than_was_accepted_is_refused(make, client, loss):
    """A server that may lose more is refused in every use, and the error says what it has and what to do."""
    configure(client, SETTINGS[loss])
    levels = list(SETTINGS)
    for accepted in levels[levels.index(loss) :]:
        await create_finished_run(make(accepted), make_header(accepted))
    for accepted in levels[: levels.index(loss)]:
        store = make(accepted)
        for use in (
            store.create(make_header()),
            store.read(loss),
            store.post(loss, "k", make_input("x")),
            store.describe_durability(),
        ):
            with pytest.raises(MisuseError, match=f"accept_loss='{loss}'") as refusal:
                await use
            assert f"appendonly {SETTINGS[loss]['appendonly']}" in str(refusal.value)


@pytest.mark.parametrize(
    "setting", [{"appendfsync": "no"}, {"no-appendfsync-on-rewrite": "yes"}], ids=lambda setting: next(iter(setting))
)
async def test_a_log_that_is_not_always_written_through_may_lose_seconds(make, client, setting):
    """Who lets the log rest, at all times or while it is rewritten, does not promise to lose nothing."""
    configure(client, {**SETTINGS["nothing"], **setting})
    with pytest.raises(MisuseError, match="accept_loss='seconds'"):
        await make("nothing").now()
    assert "last seconds" in await make("seconds").describe_durability()


async def test_the_promise_is_told_in_words(make, client):
    """It names the server, the settings, what they come to, and what no setting promises."""
    configure(client, SETTINGS["nothing"])
    promise = await make("nothing").describe_durability()
    for word in ("Redis", "appendfsync always", "power cut", "failover"):
        assert word in promise.replace("Valkey", "Redis")


async def test_what_a_server_does_not_show_is_taken_for_the_worst(make, client):
    """Where CONFIG is refused, as managed servers do, what INFO tells has to do, and the promise says so."""
    configure(client, SETTINGS["nothing"])
    client.execute_command("ACL", "SETUSER", "default", "-config")
    with pytest.raises(MisuseError, match="accept_loss='seconds'"):
        await make("nothing").now()
    assert "appendfsync not shown" in await make("seconds").describe_durability()


@pytest.mark.parametrize("shown", ["+config", "-config"])
async def test_a_server_that_throws_keys_away_is_refused(make, client, shown):
    """Where memory is limited only noeviction keeps journals, whether CONFIG or INFO has to tell."""
    configure(client, {"maxmemory": "100mb", "maxmemory-policy": "allkeys-lru"})
    client.execute_command("ACL", "SETUSER", "default", shown)
    with pytest.raises(StoreError, match=r"maxmemory-policy allkeys-lru.*noeviction"):
        await make("everything").now()
    client.execute_command("ACL", "SETUSER", "default", "+config")
    configure(client, {"maxmemory-policy": "noeviction"})
    assert await make("everything").now()
    configure(client, {"maxmemory": "0", "maxmemory-policy": "allkeys-lru"})
    assert await make("everything").now()


async def test_the_settings_are_looked_at_again(server, make, client):
    """A server that comes back with other settings is another server: nothing is written that it may lose."""
    configure(client, SETTINGS["nothing"])
    store = make("nothing")
    driver = await LeasedRun.create(store)
    configure(client, SETTINGS["everything"])
    client.client_kill_filter(_type="normal", skipme=True)
    with pytest.raises(MisuseError, match="accept_loss='everything'"):
        await driver.append(Observed()).wait()
    configure(client, SETTINGS["nothing"])
    assert (await store.read("r1")).events == ()


async def test_a_server_that_is_still_reading_its_data_is_not_judged(make):
    """Until it has read its log it says that it keeps none: that is no answer yet."""

    class Wire:
        def send_command(self, *_command):
            pass

        def read_response(self):
            return b"loading:1\r\naof_enabled:0\r\n"

    with pytest.raises(redis.BusyLoadingError):
        make("nothing")._create_backend()._inspect_server(Wire())


async def test_a_replica_is_refused(make, client):
    """Who gives the address of a replica is told so."""
    client.replicaof("127.0.0.1", 1)
    with pytest.raises(StoreError, match="replica"):
        await make("everything").now()
    client.replicaof("NO", "ONE")
    assert await make("everything").now()


async def test_keys_of_a_newer_agentfsm_are_refused(make, client):
    """Whose keys have another form than this one knows, this one does not touch."""
    store = make("everything")
    await create_finished_run(store)
    assert client.get("agentfsm:schema") == str(SCHEMA_VERSION).encode()
    client.set("agentfsm:schema", SCHEMA_VERSION + 100)
    with pytest.raises(TooNewError, match="upgrade agentfsm"):
        await make("everything").runs()


async def test_a_cluster_is_refused():
    """Scripts touch keys of many slots, which a cluster does not allow; it is said at once."""
    server = RedisServer()
    server.options = {"cluster-enabled": "yes", "cluster-port": str(server.port + 1)}
    with server:
        store = RedisStore(server.url, accept_loss="everything")
        with pytest.raises(StoreError, match="Redis Cluster"):
            await store.now()
        await store.aclose()


@pytest.mark.parametrize(
    "options",
    [
        {"accept_loss": "all"},
        {"ttl_s": 0},
        {"ttl_s": math.inf},
        {"ttl_s": math.nan},
        {"lease_s": 0},
        {"patience_s": -1},
    ],
)
def test_options_out_of_range_are_refused(options):
    """They are named where they are given."""
    (name,) = options
    with pytest.raises(MisuseError, match=name):
        RedisStore("redis://localhost", **options)


@pytest.mark.parametrize(
    "url", ["", "localhost", "http://h", "redis://:s3cret/x@h/0", "redis://:s3cret@h:x", "redis://:s3cret@h?db=x"]
)
def test_what_is_no_url_is_refused_without_telling_it(url):
    """A URL may hold a password, so it is not repeated."""
    with pytest.raises(MisuseError, match="URL") as refusal:
        RedisStore(url)
    assert "s3cret" not in f"{refusal.value} {refusal.value.__cause__}"


def test_a_store_does_not_show_its_password():
    """It is shown by where it is."""
    store = RedisStore("redis://ann:s3cret@example.org:7000/3")
    assert store.address == "Redis at example.org:7000, database 3"
    assert "s3cret" not in repr(store) + store.address + repr(store._create_backend())
    assert RedisStore("unix://ann:s3cret@/run/redis.sock?db=2").address == "Redis at /run/redis.sock, database 2"


def test_an_option_that_the_driver_does_not_know_is_named():
    """The rest of the URL is not told: a password may stand in it."""
    with pytest.raises(MisuseError, match=r"an option that its driver does not know: 'bogus'$"):
        RedisStore("redis://:secret@localhost/0?bogus=secret")
