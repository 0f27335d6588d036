"""Servers that want tokens: logins of people, renewal without one, and what happens where nobody logs in."""

import json
import stat

import anyio
import httpx2
import keyring
import pytest
from keyring.backend import KeyringBackend
from keyring.backends import fail

from agentfsm import Agent, MisuseError, ToolResult
from agentfsm.logins import TokenStoreError, token_store
from agentfsm.mcp import (
    KeyringTokens,
    LoginRequiredError,
    MCPServer,
    MCPServerError,
    MemoryPins,
    MemoryTokens,
    OAuth,
    TokenFile,
)
from agentfsm.mcp.oauth.person_login import log_in
from agentfsm.mcp.oauth.server_authorization import ServerAuthorization
from agentfsm.testing import ScriptedModel, call, say
from tests.support.guarded_server import agree, guarded_server


@pytest.fixture(scope="module")
def running():
    with guarded_server() as guard:
        yield guard


@pytest.fixture
def guard(running):
    running.reset()
    return running


@pytest.fixture
def path(tmp_path):
    return tmp_path / "tokens.json"


def client_of(guard, path, **options):
    """A server as another process would make it: it knows what is in the file."""
    oauth = OAuth(tokens=TokenFile(path))
    return MCPServer.http(f"{guard.url}/mcp", auth=oauth, name="shop", confirm=False, **options)


async def results_of(server, *names):
    """Let an agent make these calls at once; return the results."""
    model = ScriptedModel(say("", *(call(f"shop__{name}") for name in names)), "done")
    async with Agent(model, tools=[server]) as agent:
        run = await agent.run("go on")
    assert run.output == "done"
    return [message for message in run.messages if isinstance(message, ToolResult)]


async def never(url):
    raise AssertionError("nobody is asked")


async def test_without_a_login_nobody_is_asked_and_the_error_names_the_command(guard, path):
    """A worker opens no browser, registers nothing, and does not wait."""
    server = client_of(guard, path)
    with pytest.raises(LoginRequiredError, match=r"'shop': there is no stored login.*call `login` of the MCPServer"):
        await server.update()
    await server.aclose()
    assert not {"registered", "authorized"} & guard.seen.keys()


async def test_a_login_serves_every_later_process(guard, path):
    """It is stored for its owner alone; the next process needs nobody, and speaks today's protocol."""
    first = client_of(guard, path)
    await first.login(agree)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert guard.seen["registered"] == guard.seen["authorized"] == 1
    later = client_of(guard, path)
    [paid] = await results_of(later, "pay")
    assert paid.content == "paid"
    assert await later.connection.request(_revision) == "2026-07-28"
    await later.aclose()


async def _revision(client):
    return client.protocol_version


async def test_a_server_that_failed_for_a_login_needs_no_restart(guard, path):
    """The login of another process is found with the next request; it has taken no time of the connection."""
    worker = client_of(guard, path)
    with pytest.raises(LoginRequiredError):
        await worker.update()
    await client_of(guard, path).login(agree)
    [paid] = await results_of(worker, "pay")
    assert paid.content == "paid"


async def test_an_expired_token_is_renewed_before_the_request(guard, path):
    """Also after a restart, and no request goes out with the old one."""
    guard.expires_in = -1
    await client_of(guard, path).login(agree)
    guard.expires_in = 3_600
    [paid] = await results_of(client_of(guard, path), "pay")
    assert paid.content == "paid"
    assert (guard.seen["refreshed"], guard.seen["refused"], guard.seen["authorized"]) == (1, 0, 1)


async def test_a_token_that_is_revoked_is_renewed_and_the_call_is_made_once(guard, path):
    """The refused request has done nothing, so it is sent again."""
    server = client_of(guard, path)
    await server.login(agree)
    await server.update()
    guard.access.clear()
    [paid] = await results_of(server, "pay")
    assert (paid.content, paid.attempts) == ("paid", 1)
    assert (guard.seen["paid"], guard.seen["refreshed"]) == (1, 1)


async def test_processes_renew_a_token_in_turns(guard, path):
    """A refresh token that is used twice would count as stolen, and end the login of all."""
    guard.expires_in = -1
    await client_of(guard, path).login(agree)
    guard.expires_in = 3_600
    async with anyio.create_task_group() as group:
        for _ in range(4):
            group.start_soon(results_of, client_of(guard, path), "pay")
    assert guard.seen["paid"] == 4
    assert (guard.seen["refreshed"], guard.seen["reused"]) == (1, 0)


async def test_a_login_that_ends_in_mid_run_is_told_to_the_model(guard, path):
    """The result says that nothing was run, and how to log in; the run goes on."""
    server = client_of(guard, path)
    await server.login(agree)
    await server.update()
    guard.access.clear()
    guard.refresh.clear()
    [refused] = await results_of(server, "pay")
    assert refused.outcome == "failed"
    assert "Nothing was run" in refused.content
    assert "call `login` of the MCPServer 'shop'" in refused.content
    assert guard.seen["paid"] == 0
    await server.login(agree)
    [paid] = await results_of(server, "pay")
    assert paid.content == "paid"


async def test_trouble_of_the_authorization_server_does_not_end_the_login(guard, path):
    """The request was not sent, so it is tried again; the refresh token is kept."""
    guard.expires_in = -1
    await client_of(guard, path).login(agree)
    guard.token_status, guard.expires_in = 503, 3_600
    server = client_of(guard, path)
    with pytest.raises(MCPServerError, match=r"did not renew the token .HTTP 503.") as caught:
        await server.update()
    assert caught.value.is_passing
    assert not isinstance(caught.value, LoginRequiredError)
    guard.token_status = None
    await server.update()
    await server.aclose()
    assert guard.seen["refreshed"] == 1


async def test_calls_overlap(guard, path):
    """A slow call, whose answer has no part before its end, does not hold up the others."""
    server = client_of(guard, path, trusted=True, constraints={})
    await server.login(agree)
    await server.update()
    answers = []

    async def act(name):
        answers.append((await server.connection.request(lambda client: client.call_tool(name))).content[0].text)

    async with anyio.create_task_group() as group:
        group.start_soon(act, "slow")
        await anyio.wait_all_tasks_blocked()
        group.start_soon(act, "quick")
    assert sorted(answers) == ["quick", "slow"]  # slow waits for quick: it says so if that never came
    await server.aclose()


# The login itself.


async def test_a_login_that_is_refused_keeps_the_earlier_one(guard, path):
    """The person reads the reason of the authorization server."""
    server = client_of(guard, path)
    await server.login(agree)
    before = path.read_text()
    guard.denies = True
    with pytest.raises(MCPServerError, match=r"the login failed: .*access_denied: No!"):
        await server.login(agree)
    assert path.read_text() == before


async def test_strangers_at_the_callback_end_no_login(guard, path):
    """A page that guesses the port does not know the secret of the login."""
    answered = []

    async def followed(url):
        back = httpx2.URL(url).params["redirect_uri"]
        async with httpx2.AsyncClient(trust_env=False) as client:
            for query in ("code=evil&state=guessed", "error=evil", ""):
                answered.append((await client.get(f"{back}?{query}")).status_code)  # noqa: PERF401  one by one
        await agree(url)

    server = client_of(guard, path)
    await server.login(followed)
    assert answered == [404] * 3
    assert (await server.logins.read_status()).is_stored


async def test_nobody_comes(guard, path):
    """The login ends, and nothing is stored."""

    async def ignore(url):
        pass

    with pytest.raises(MCPServerError, match=r"nobody logged in within 0\.05 s"):
        await client_of(guard, path).login(ignore, timeout_s=0.05)
    assert not path.exists()


async def test_a_second_login_uses_the_registration_again(guard, path):
    """Its port is part of it, and free."""
    server = client_of(guard, path)
    await server.login(agree)
    await server.login(agree)
    assert (guard.seen["registered"], guard.seen["authorized"]) == (1, 2)


async def test_logging_out(guard, path):
    """It removes the tokens here."""
    server = client_of(guard, path)
    assert not await server.logout()
    await server.login(agree)
    assert await server.logout()
    assert json.loads(path.read_text())["servers"] == {}
    with pytest.raises(LoginRequiredError):
        await client_of(guard, path).update()


async def test_a_server_from_a_file_is_approved_before_a_login(guard, tmp_path, monkeypatch):
    """A file names the URL, so a person has to have seen it; the errors name the commands."""
    monkeypatch.setattr(token_store, "default_folder", lambda: tmp_path)
    file = tmp_path / "servers.json"
    file.write_text(json.dumps({"mcpServers": {"shop": {"url": f"{guard.url}/mcp", "auth": "oauth"}}}))
    [server] = MCPServer.load(file, pins=MemoryPins())
    with pytest.raises(MCPServerError, match="agentfsm mcp approve"):
        await server.login(never)

    async def yes(proposal):
        return "login:     OAuth, authorization_code" in proposal.shown

    [server] = MCPServer.load(file, pins=MemoryPins(), consent=yes)
    with pytest.raises(LoginRequiredError, match=f"run: agentfsm mcp login {file} shop"):
        await server.update()
    await server.login(agree)
    await server.logout()


async def test_an_authorization_server_without_encryption_is_refused():
    """Codes and tokens would be readable on the network, whatever the MCP server says."""

    def answer(request):
        if request.method == "POST":
            return httpx2.Response(401)
        return httpx2.Response(
            200, json={"resource": "https://mcp.example.org/", "authorization_servers": ["http://id.example.org"]}
        )

    authorization = ServerAuthorization("https://mcp.example.org/", OAuth(tokens=MemoryTokens()))
    async with httpx2.AsyncClient(transport=httpx2.MockTransport(answer)) as client:
        with pytest.raises(MisuseError, match=r"plain HTTP to id\.example\.org"):
            await log_in(authorization, client, never, 60)


# Settings and storage.


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"client_id": "a", "client_secret": "b"}, "issuer="),
        ({"grant": "client_credentials", "client_id": "a"}, "either client_secret= or private_key="),
        ({"client_id": "a", "private_key": "k", "issuer": "https://id.example.org"}, "needs grant="),
        ({"scopes": "read"}, "a list of scopes"),
        ({"callback_port": 70_000}, "a port"),
        ({"client_metadata_url": "http://a.example"}, "an https:// URL with a path"),
    ],
)
def test_settings_that_cannot_work(settings, why):
    """They are refused when they are given."""
    with pytest.raises(MisuseError, match=why):
        OAuth(**settings)


def test_only_oauth_has_a_name():
    """Another text is no authentication."""
    with pytest.raises(MisuseError, match=r"give .oauth."):
        MCPServer.http("https://example.org/mcp", auth="basic")


async def test_client_credentials_need_no_login():
    """Whoever tries it learns so."""
    oauth = OAuth(
        grant="client_credentials",
        client_id="a",
        client_secret="hush",  # noqa: S106
        issuer="https://id.example.org",
        tokens=MemoryTokens(),
    )
    assert "hush" not in repr(oauth)
    with pytest.raises(MisuseError, match="needs no login of a person"):
        await MCPServer.http("https://example.org/mcp", auth=oauth).login(never)
    with pytest.raises(MisuseError, match='it needs auth="oauth"'):
        await MCPServer.http("https://example.org/mcp").login(never)


def test_a_file_of_tokens(path):
    """Other servers' tokens stay; a file that cannot be read is not overwritten."""
    one, two = TokenFile(path), TokenFile(path)
    one.write("a", '{"x": 1}')
    two.write("b", '{"y": 2}')
    one.write("a", None)
    assert (one.read("a"), one.read("b")) == (None, '{"y": 2}')
    path.write_text('{"version": 2, "servers": {}}')
    with pytest.raises(TokenStoreError, match="version 2"):
        one.write("a", "{}")
    assert path.read_text() == '{"version": 2, "servers": {}}'


class Locker(KeyringBackend):
    """A keyring in memory, which is used where a test sets it."""

    priority = -1

    def __init__(self):
        super().__init__()
        self.priority = 1
        self.held = {}

    def get_password(self, service, username):
        return self.held.get((service, username))

    def set_password(self, service, username, password):
        if len(password) > 1_000_000:
            raise keyring.errors.PasswordSetError("too long")
        self.held[service, username] = password

    def delete_password(self, service, username):
        del self.held[service, username]


@pytest.fixture
def locker(monkeypatch):
    locker = Locker()
    monkeypatch.setattr(keyring, "get_keyring", lambda: locker)
    for name in ("get_password", "set_password", "delete_password"):
        monkeypatch.setattr(keyring, name, getattr(locker, name))
    return locker


async def test_a_usable_keyring_is_preferred(guard, locker, tmp_path, monkeypatch):
    """The tokens are in it, and not in a file."""
    monkeypatch.setattr(token_store, "default_folder", lambda: tmp_path)
    server = MCPServer.http(f"{guard.url}/mcp", auth="oauth", name="shop", confirm=False)
    await server.login(agree)
    [(service, key)] = locker.held
    assert (service, key) == ("agentfsm-mcp", f"{guard.url}/mcp")
    [paid] = await results_of(server, "pay")
    assert paid.content == "paid"
    assert [file.name for file in tmp_path.iterdir() if "tokens" in file.name] == []
    assert await server.logout()
    assert locker.held == {}


def test_a_keyring_that_refuses(locker):
    """The error says what else there is."""
    with pytest.raises(TokenStoreError, match=r"PasswordSetError: too long.*TokenFile"):
        KeyringTokens().write("a", "x" * 1_000_001)


def test_without_a_usable_keyring_there_is_a_file(monkeypatch):
    """As on a server without a desktop."""
    monkeypatch.setattr(keyring, "get_keyring", fail.Keyring)
    assert isinstance(token_store.default_tokens(), TokenFile)
