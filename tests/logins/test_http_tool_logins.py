"""Calls whose user has to log in first: the wait survives the process, and no journal has a token."""

import pytest

from agentfsm import Agent, PendingKind, State
from agentfsm.agents.login_waits import continue_after_login
from agentfsm.core import events as e
from agentfsm.guards import build_http_tool
from agentfsm.logins import OAuth, TokenFile
from agentfsm.stores import SQLiteStore
from agentfsm.testing import ScriptedModel, call, say
from tests.support.oauth_server import log_in, oauth_shop

RETURN = "http://127.0.0.1:9/v1/logins/callback"


@pytest.fixture(scope="module")
def running():
    with oauth_shop() as shop:
        yield shop


@pytest.fixture
def shop(running):
    running.reset()
    return running


@pytest.fixture
def program(shop, tmp_path):
    """Makes the agent as each process makes it: all that stays is in two files."""

    def make(settings=None, *, replies=None, **options):
        order = build_http_tool(
            [shop.url.removeprefix("http://")],
            methods=["POST"],
            name="order",
            trusted=True,
            irreversible=False,
            login=settings or OAuth(redirect_url=RETURN, tokens=TokenFile(tmp_path / "tokens.json")),
        )
        first = say("", call("order", url=f"{shop.url}/orders"))
        model = ScriptedModel(*([first, "done"] if replies is None else replies))
        return Agent(model, tools=[order], store=SQLiteStore(tmp_path / "runs.db"), **options)

    return make


def login_of(agent):
    return agent.tools.get("order").login


async def come_back(agent, query):
    """Do what the gateway does with a browser that returns."""
    login = login_of(agent)
    done = await login.complete(query)
    await continue_after_login(agent.store, login.server, tenant=done.tenant, user=done.user)
    return done


def read_files(folder):
    return b"".join(path.read_bytes() for path in folder.glob("runs.db*"))


async def test_a_missing_login_waits_and_another_process_goes_on(shop, program, tmp_path):
    """The call has not started when it waits, and is made once. The token is in the token store alone."""
    async with program() as agent:
        waiting = await agent.run("order it", user="ann")
        [item] = waiting.pending
        assert (item.kind, item.questions[0].key) == (PendingKind.LOGIN, shop.url)
        assert not any(isinstance(each, e.ToolStarted) for each in await agent.history(waiting.id))
    query = log_in(shop, item.questions[0].url)
    async with program(replies=["done"]) as agent:
        done = await come_back(agent, query)
        assert (done.user, done.run_id, done.is_granted) == ("ann", waiting.id, True)
        run = await agent.resume(waiting.id)
        assert run.state is State.DONE
        history = await agent.history(waiting.id)
    assert [person for person, _key in shop.orders] == ["ann"]
    assert len([each for each in history if isinstance(each, e.ToolStarted)]) == 1
    kept = (tmp_path / "tokens.json").read_bytes()
    found = read_files(tmp_path)
    assert shop.issued[-1].encode() in kept
    assert not [secret for secret in shop.issued if secret.encode() in found]
