"""Logins at remote MCP servers on the command line."""

import json
import webbrowser

import httpx2
import pytest

from tests.support.guarded_server import guarded_server


@pytest.fixture(scope="module")
def guard():
    with guarded_server() as guard:
        yield guard


@pytest.fixture
def home(here, guard, monkeypatch):
    """A folder with a file of servers, which is also the home of the user."""
    guard.reset()
    monkeypatch.setenv("HOME", str(here.folder))
    servers = {"shop": {"url": f"{guard.url}/mcp", "auth": "oauth"}, "plain": {"url": f"{guard.url}/other"}}
    (here.folder / "servers.json").write_text(json.dumps({"mcpServers": servers}))
    return here


@pytest.fixture
def browser(monkeypatch):
    """A browser in which the person says yes; the pages that it has opened."""
    opened = []

    def visit(url):
        opened.append(url)
        httpx2.get(url, follow_redirects=True, trust_env=False)

    monkeypatch.setattr(webbrowser, "open", visit)
    return opened


def test_logging_in_and_out_at_a_url(home, guard, browser):
    """The login is stored for its owner; no token is shown."""
    url = f"{guard.url}/mcp"
    assert "not logged in" in home("mcp", "status", url)
    said = home("mcp", "login", url)
    assert said.endswith(": logged in\n")
    assert f"log in at: {browser[0]}" in home.err
    told = home("mcp", "status", url)
    assert "logged in; the token is renewed by itself" in told
    assert not any(token in told for token in guard.access)
    assert home("mcp", "logout", url).endswith(": logged out\n")
    assert home("mcp", "logout", url).endswith(": no login was stored\n")


def test_a_server_of_a_file_is_approved_first(home, guard, browser):
    """Its URL comes from the file: without a person to approve it, nothing is sent."""
    said = home("mcp", "login", "servers.json", code=1)
    assert "its start is not approved" in said
    assert browser == []
    assert not guard.seen


def test_an_unattended_command_names_the_login(home, guard, browser):
    """The other commands open no browser."""
    home("mcp", "approve", "servers.json", "shop", "--yes", code=1)
    said = home("mcp", "tools", "servers.json", code=1)
    assert f"run: agentfsm mcp login {home.folder / 'servers.json'} shop" in said
    assert home("mcp", "login", "servers.json") == "shop: logged in\n"
    assert len(browser) == 1
    home("mcp", "approve", "servers.json", "shop", "--yes")
    assert "shop__pay" in home("mcp", "tools", "servers.json", code=1)  # the other server is none


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("servers.json", "plain"), 'they need "auth": "oauth"'),
        (("https://example.org/mcp", "shop"), "leave out 'shop'"),
        (("servers.json", "nobody"), "has no server 'nobody'"),
    ],
)
def test_what_has_no_login(home, words, why):
    """The error says why."""
    home("mcp", "login", *words, code=2)
    assert why in home.err


def test_without_a_browser_the_address_is_shown(home, guard, browser):
    """A login that nobody finishes ends."""
    said = home("mcp", "login", f"{guard.url}/mcp", "--no-browser", "--timeout", "1", code=1)
    assert f"log in at: {guard.url}/authorize?" in home.err
    assert "nobody logged in within 1 s" in said
    assert browser == []
