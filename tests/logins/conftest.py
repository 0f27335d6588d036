"""An API with its authorization server, and the program that uses it: all that stays of a process is in two files."""

import pytest

from agentfsm import Agent
from agentfsm.agents.login_waits import finish_login, list_logins
from agentfsm.guards import build_http_tool
from agentfsm.logins import OAuth, TokenFile
from agentfsm.stores import SQLiteStore
from agentfsm.testing import ScriptedModel, call, say
from tests.support.oauth_server import oauth_shop

RETURN = "http://127.0.0.1:9/v1/logins/callback"


@pytest.fixture(scope="session")
def running():
    with oauth_shop() as shop:
        yield shop


@pytest.fixture
def shop(running):
    running.reset()
    return running


class Program:
    """What each process of the program makes anew."""

    def __init__(self, shop, folder):
        self.shop = shop
        self.folder = folder
        self.tokens = TokenFile(folder / "tokens.json")
        self.settings = OAuth(redirect_url=RETURN, tokens=self.tokens)

    def make_tool(self, **options):
        host = self.shop.url.removeprefix("http://")
        given = {"methods": ["POST"], "name": "order", "trusted": True, "irreversible": False} | options
        return build_http_tool([host], login=self.settings, **given)

    def begin(self, *tools, count=1, calls=None, **options):
        """Return the agent of a process that begins runs."""
        calls = calls or [call("order", url=f"{self.shop.url}/orders") for _ in range(count)]
        return self._make(ScriptedModel(say("", *calls), "done"), tools, options)

    def go_on(self, *tools, **options):
        """Return the agent of a process that continues them: its model has only the end to say."""
        return self._make(ScriptedModel("done"), tools, options)

    def _make(self, model, tools, options):
        store = options.pop("store", None) or SQLiteStore(self.folder / "runs.db")
        return Agent(model, tools=tools or [self.make_tool()], store=store, **options)

    async def come_back(self, agent, query):
        """Do what the gateway does with a browser that returns."""
        return await finish_login(agent.runs, list_logins(agent.tools), query)

    def read_database(self):
        """Return all bytes of the store of the runs."""
        return b"".join(path.read_bytes() for path in self.folder.glob("runs.db*"))


@pytest.fixture
def program(shop, tmp_path):
    return Program(shop, tmp_path)
