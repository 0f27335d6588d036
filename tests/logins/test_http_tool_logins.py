"""Calls whose user has to log in first: the wait survives the process, and no journal has a token."""

import anyio
import attrs
import pytest
from mcp.shared.auth import OAuthClientInformationFull

from agentfsm import MisuseError, PendingKind, State, StoreError, ToolResult
from agentfsm.agents.login_waits import forget_all
from agentfsm.core import events as e
from agentfsm.guards import build_http_tool
from agentfsm.logins import APIKey, Login, LoginError, MemoryTokens, OAuth
from agentfsm.stores import MemoryStore
from tests.support.oauth_server import log_in


def link_of(run):
    [item] = run.pending
    assert item.kind is PendingKind.LOGIN
    return item.questions[0].url


async def started(agent, run):
    return [each for each in await agent.history(run.id) if isinstance(each, e.ToolStarted)]


def results(run):
    return [message for message in run.messages if isinstance(message, ToolResult)]


async def test_a_missing_login_waits_and_another_process_goes_on(shop, program):
    """The call has not started when it waits, and is made once. The token is in the token store alone."""
    async with program.begin() as agent:
        waiting = await agent.run("order it", user="ann")
        [item] = waiting.pending
        assert item.questions[0].key == shop.url
        assert not await started(agent, waiting)
    query = log_in(shop, link_of(waiting))
    async with program.go_on() as agent:
        link = await program.come_back(agent, query)
        assert (link.user, link.run_id, link.outcome) == ("ann", waiting.id, "granted")
        run = await agent.resume(waiting.id)
        assert run.state is State.DONE
        assert len(await started(agent, run)) == 1
        [result] = results(run)
    assert [person for person, _key in shop.orders] == ["ann"]
    assert "Bearer ***" in result.content  # the API repeats what it gets
    found, kept = program.read_database(), program.tokens.path.read_text()
    assert shop.issued[-1] in kept
    assert not [secret for secret in shop.issued if secret.encode() in found]


async def test_all_waits_of_the_user_and_no_others_go_on(shop, program):
    """A login is that of one user, in all runs; a second return of the browser changes nothing."""
    async with program.begin(count=2) as agent:
        waiting = await agent.run("order it", user="ann")
    async with program.begin() as agent:
        other = await agent.run("order it", user="bob")
    async with program.begin() as agent:
        third = await agent.run("order it", user="ann")
        query = log_in(shop, link_of(waiting))
        await program.come_back(agent, query)
        again = await program.come_back(agent, query)
        assert again.outcome == "granted"
        assert await program.come_back(agent, {**query, "state": "x" + query["state"]}) is None
    for each in (waiting, third):
        async with program.go_on() as agent:
            assert (await agent.resume(each.id)).state is State.DONE
    async with program.go_on() as agent:
        assert (await agent.resume(other.id)).pending[0].kind is PendingKind.LOGIN
    assert [person for person, _key in shop.orders] == ["ann"] * 3
    assert len({key for _person, key in shop.orders}) == 3
    assert shop.seen["exchanged"] == 1


async def test_a_refused_refresh_token_is_a_new_wait(shop, program):
    """A token that ends is renewed before the call; once the authorization server refuses that, the user is asked."""
    shop.expires_in = 10  # it ends before it would arrive
    async with program.begin() as agent:
        waiting = await agent.run("order it", user="ann")
        await program.come_back(agent, log_in(shop, link_of(waiting)))
    async with program.go_on() as agent:
        assert (await agent.resume(waiting.id)).state is State.DONE
    assert shop.seen["refreshed"] >= 1
    shop.refresh.clear()
    async with program.begin() as agent:
        waiting = await agent.run("order it", user="ann")
        assert link_of(waiting)
        assert not await started(agent, waiting)


async def test_a_token_that_is_revoked_elsewhere(shop, program):
    """It is renewed in the middle of the call, which is sent again; without a refresh token the user is asked."""
    async with program.begin() as agent:
        waiting = await agent.run("order it", user="ann")
        await program.come_back(agent, log_in(shop, link_of(waiting)))
    shop.access.clear()
    async with program.go_on() as agent:
        assert (await agent.resume(waiting.id)).state is State.DONE
    assert shop.seen["refreshed"] == 1
    shop.access.clear()
    shop.refresh.clear()
    async with program.begin() as agent:
        waiting = await agent.run("order it", user="ann")
        await program.come_back(agent, log_in(shop, link_of(waiting)))
    async with program.go_on() as agent:
        assert (await agent.resume(waiting.id)).state is State.DONE
    assert len(shop.orders) == 2


async def test_processes_renew_a_token_in_turns(shop, program):
    """A rotating refresh token is used once, by whoever comes first."""
    async with program.begin() as agent:
        waiting = await agent.run("order it", user="ann")
        await program.come_back(agent, log_in(shop, link_of(waiting)))
    token = next(iter(shop.access))
    found = []

    async def renew():
        login = Login(shop.url, program.settings)
        found.append(await login.find_token(tenant=None, user="ann", refused=token))

    async with anyio.create_task_group() as tasks:
        for _ in range(5):
            tasks.start_soon(renew)
    assert (len(set(found)), shop.seen["refreshed"], shop.seen["reused"]) == (1, 1, 0)


async def test_trouble_of_the_authorization_server_is_no_new_login(shop, program):
    """The login is kept, and the model reads that it should try later."""
    shop.expires_in = 10
    async with program.begin() as agent:
        waiting = await agent.run("order it", user="ann")
        await program.come_back(agent, log_in(shop, link_of(waiting)))
    shop.trouble = 503
    async with program.go_on() as agent:
        run = await agent.resume(waiting.id)
    [result] = results(run)
    assert "gives no tokens now: HTTP 503" in result.content
    assert not shop.orders


async def test_the_user_declines(shop, program):
    """At the page of the authorization server, or in the run: the model reads it, and nothing is sent."""
    shop.denies = True
    async with program.begin() as agent:
        waiting = await agent.run("order it", user="ann")
        assert (await program.come_back(agent, log_in(shop, link_of(waiting)))).outcome == "declined"
    async with program.go_on() as agent:
        run = await agent.resume(waiting.id)
        assert "the user declined to log in" in results(run)[0].content
    async with program.begin() as agent:
        waiting = await agent.run("order it", user="ann")
        with pytest.raises(MisuseError, match="answers are in the journal"):
            await agent.answer(waiting.id, waiting.pending[0].call_id, "secret")
        await agent.answer(waiting.id, waiting.pending[0].call_id, declined=True)
    async with program.go_on() as agent:
        assert "declined" in results(await agent.resume(waiting.id))[0].content
    assert not shop.orders


async def test_an_approval_comes_before_the_login_and_is_not_asked_again(shop, program):
    """Both are given once, to the same call."""
    tool = attrs.evolve(program.make_tool(), requires_approval=True)
    async with program.begin(tool) as agent:
        waiting = await agent.run("order it", user="ann")
        await agent.approve(waiting.id, waiting.pending[0].call_id)
        waiting = await agent.resume(waiting.id)
        await program.come_back(agent, log_in(shop, link_of(waiting)))
    async with program.go_on(tool) as agent:
        assert (await agent.resume(waiting.id)).state is State.DONE
    assert len(shop.orders) == 1


async def test_each_user_enters_a_key(shop, program):
    """It is in the store of the tokens, and a key that is refused is asked for again."""
    shop.keys["key-of-ann"] = "ann"
    program.settings = APIKey(header="X-API-Key", prefix="", hint="It is in your profile.", tokens=program.tokens)
    async with program.begin() as agent:
        waiting = await agent.run("order it", user="ann")
        [item] = waiting.pending
        assert item.questions[0].message == f"Enter your key for {shop.url}. It is in your profile."
        [login] = [tool.login for tool in agent.tools]
        await login.store_key("wrong-key", tenant=None, user="ann")
        waiting = await agent.resume(waiting.id)
        assert waiting.pending[0].kind is PendingKind.LOGIN
        with pytest.raises(LoginError, match="not a key"):
            await login.store_key("a b", tenant=None, user="ann")
        await login.store_key("key-of-ann", tenant=None, user="ann")
    async with program.go_on() as agent:
        assert (await agent.resume(waiting.id)).state is State.DONE
    assert len(shop.orders) == 1
    assert b"key-of-ann" not in program.read_database()


async def test_forgetting_a_user_revokes_the_tokens(shop, program):
    """The authorization server knows them no more, nor does the store; the next call asks."""
    async with program.begin() as agent:
        waiting = await agent.run("order it", user="ann")
        await program.come_back(agent, log_in(shop, link_of(waiting)))
        [login] = [tool.login for tool in agent.tools]
        assert await forget_all([login], tenant=None, user="ann") == (1, [])
        assert await forget_all([login], tenant=None, user="ann") == (0, [])
    assert (shop.seen["revoked"], shop.access, shop.refresh) == (1, {}, {})
    assert shop.issued[-1] not in program.tokens.path.read_text()
    async with program.go_on() as agent:
        assert (await agent.resume(waiting.id)).pending[0].kind is PendingKind.LOGIN


class FailingTokens(MemoryTokens):
    """A store of the user's whose server is down, with the keys that it was asked for."""

    def read(self, key):
        keys.append(key)
        raise RuntimeError("connection to secret-host failed")


keys = []


async def test_a_token_store_that_fails_is_a_result_of_the_call(shop, program):
    """The call is not made, and the text has nothing of the error; a made-up link asks the store for nothing."""
    program.settings = attrs.evolve(program.settings, tokens=FailingTokens())
    async with program.begin() as agent:
        run = await agent.run("order it", user="ann")
        assert results(run)[0].content == "the token store failed (RuntimeError)"
        keys.clear()
        assert await program.come_back(agent, {"state": "x.../../tokens", "code": "c"}) is None
    assert (keys, shop.orders) == ([], [])


async def test_a_login_that_cannot_be_deleted_is_not_reported_as_forgotten(shop, program):
    """The caller repeats it; a record that cannot be parsed is deleted."""
    login = Login(shop.url, program.settings)
    path = program.tokens.path
    path.write_text("{")
    with pytest.raises(StoreError, match="cannot be parsed"):
        await forget_all([login], tenant=None, user="ann")
    path.unlink()
    program.tokens.write(login.find_key(None, "ann"), '{"of": "a newer version"}')
    assert await forget_all([login], tenant=None, user="ann") == (0, [])
    assert program.tokens.read(login.find_key(None, "ann")) is None


async def test_answers_that_are_not_taken(shop, program):
    """Of another authorization server, of a link that has expired, and for a run that does not wait any more."""
    async with program.begin(store=MemoryStore()) as agent:
        waiting = await agent.run("order it", user="ann")
        query = log_in(shop, link_of(waiting))
        with pytest.raises(LoginError, match="another authorization server"):
            await program.come_back(agent, {**query, "iss": "https://evil.example"})
        with pytest.raises(LoginError, match="did not complete"):
            await program.come_back(agent, {"state": query["state"], "error": "server_error"})
        [login] = [tool.login for tool in agent.tools]
        late = await login.begin(
            tenant=None, user="ann", run_id=waiting.id, call_id="t1.0", redirect_url="http://127.0.0.1:9/x", lasts_s=0
        )
        with pytest.raises(LoginError, match="expired"):
            await login.complete(log_in(shop, late))
        await agent.cancel(waiting.id)
        await agent.resume(waiting.id)
        assert await program.come_back(agent, query) is None
    assert shop.seen["exchanged"] == 0


async def test_two_clients_at_one_server_complete_their_own_links(shop, program):
    """A link belongs to the client that has made it: the code is not spent with the secret of another."""
    there = {"issuer": f"{shop.url}/", "redirect_url": program.settings.redirect_url, "tokens": program.tokens}
    first, second = [Login(shop.url, OAuth(client_id=name, **there)) for name in ("one", "two")]
    for each in (first, second):
        await shop.register_client(
            OAuthClientInformationFull(
                client_id=each.settings.client_id,
                redirect_uris=[program.settings.redirect_url],
                token_endpoint_auth_method="none",  # noqa: S106  it has no password
                scope="orders",
            )
        )
    url = await second.begin(
        tenant=None, user="ann", run_id="r", call_id="t1.0", redirect_url=program.settings.redirect_url
    )
    back = log_in(shop, url)
    assert await first.find_link(back) is None
    assert (await second.complete(back)).outcome == "granted"


def test_settings_that_cannot_work():
    """What would send a token to the wrong place, or can never give one, is said at once."""
    tokens = MemoryTokens()
    with pytest.raises(MisuseError, match="a single host"):
        build_http_tool(["a.example.org", "b.example.org"], login=OAuth(tokens=tokens))
    with pytest.raises(MisuseError, match="plain HTTP"):
        Login("http://api.example.org", OAuth(tokens=tokens))
    with pytest.raises(MisuseError, match="needs token_url="):
        OAuth(authorization_url="https://a.example.org/authorize", client_id="me")
    with pytest.raises(MisuseError, match="client_id="):
        OAuth(authorization_url="https://a.example.org/authorize", token_url="https://a.example.org/t")  # noqa: S106  a URL
    with pytest.raises(MisuseError, match='grant="authorization_code"'):
        Login(
            "https://api.example.org",
            OAuth(grant="client_credentials", client_id="me", private_key="k", issuer="https://a.example.org"),
        )
