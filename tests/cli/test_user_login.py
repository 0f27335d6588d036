"""`agentfsm login` and `logout`: a user of runs logs in at this machine."""

import json
import webbrowser

import httpx2
import pytest

from agentfsm.cli.codes import ExitCode
from agentfsm.cli.terminal import Terminal
from tests.support.oauth_server import oauth_shop

APP = """
from agentfsm import Agent
from agentfsm.guards import build_http_tool
from agentfsm.logins import APIKey, OAuth, TokenFile
from agentfsm.testing import FunctionModel, call, say
from agentfsm import ToolResult

tokens = TokenFile("tokens.json")

def answer(request):
    ended = any(isinstance(each, ToolResult) for each in request.messages)
    return "ordered" if ended else say("", call("order", url="http://HOST/orders"))

def make(login):
    order = build_http_tool(["HOST"], methods=["POST"], name="order", trusted=True, irreversible=False, login=login)
    return Agent(FunctionModel(answer), name="buyer", tools=[order])

by_link = make(OAuth(tokens=tokens))
by_key = make(APIKey(header="X-API-Key", prefix="", tokens=tokens))
"""


@pytest.fixture(scope="module")
def shop():
    with oauth_shop() as running:
        yield running


@pytest.fixture
def buyer(here, shop, monkeypatch):
    shop.reset()
    (here.folder / "buyer.py").write_text(APP.replace("HOST", shop.url.removeprefix("http://")))
    monkeypatch.setattr(webbrowser, "open", lambda url: httpx2.get(url, follow_redirects=True, trust_env=False))
    return here


def test_logging_in_with_a_browser(buyer, shop):
    """The wait names the command; the run goes on after it. Another run needs no login until it is forgotten."""
    buyer("run", "buyer:by_link", "order", "--id", "first", code=ExitCode.WAITING)
    assert "agentfsm login first t1.0" in buyer.err
    assert f"logged in to {shop.url}" in buyer("login", "first")
    assert buyer("resume", "first") == "ordered\n"
    assert buyer("run", "buyer:by_link", "order") == "ordered\n"
    assert "forgotten: 1" in buyer("logout", "buyer:by_link")
    assert (len(shop.orders), shop.seen["revoked"]) == (2, 1)
    buyer("run", "buyer:by_link", "order", code=ExitCode.WAITING)


def test_forgetting_a_user_forgets_the_logins(buyer, shop):
    """With all items of the memory, if the agent is named whose tools have them."""
    buyer("run", "buyer:by_link", "order", "--id", "first", "--user", "ann", code=ExitCode.WAITING)
    buyer("login", "first")
    forget = ("memory", "forget", "--user", "ann", "--memory", "memory.db", "--agent", "buyer:by_link")
    (buyer.folder / "memory.db").touch()
    buyer(*forget, "ITEM", code=ExitCode.USAGE)
    assert buyer.json(*forget, "--all") == {"forgotten": 0, "logins": 1, "not_revoked": []}
    assert shop.seen["revoked"] == 1
    buyer("run", "buyer:by_link", "order", "--user", "ann", code=ExitCode.WAITING)


def test_entering_a_key(buyer, shop, monkeypatch):
    """It is asked for without being shown."""
    shop.keys["key-of-me"] = "me"
    monkeypatch.setattr(Terminal, "ask_secret", lambda _terminal, _question: "key-of-me")
    buyer("run", "buyer:by_key", "order", "--id", "second", code=ExitCode.WAITING)
    assert buyer.json("login", "second", "t1.0") == {"logged_in": shop.url, "continued": 1}
    assert buyer("resume", "second") == "ordered\n"
    assert "key-of-me" not in buyer("show", "second")


def test_declining(buyer, shop):
    """The run is told, and the command fails."""
    shop.denies = True
    buyer("run", "buyer:by_link", "order", "--id", "third", code=ExitCode.WAITING)
    buyer("login", "third", code=ExitCode.FAILED)
    assert buyer("resume", "third") == "ordered\n"
    assert "the user declined to log in" in json.dumps(buyer.json("show", "third", "--events"))
    assert not shop.orders
