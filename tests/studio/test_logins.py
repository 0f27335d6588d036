"""The wait for a login in the studio: a link for the user, or a field for the key."""

import pytest
from playwright.sync_api import expect

from tests.support.browser import check_access
from tests.support.oauth_server import oauth_shop
from tests.support.port_servers import free_port
from tests.support.studio_server import StudioServer, serving

APP = """
from agentfsm import Agent
from agentfsm.guards import build_http_tool
from agentfsm.logins import APIKey, OAuth, TokenFile
from agentfsm.testing import ScriptedModel, call, say

tokens = TokenFile("tokens.json")

def make(name, login):
    order = build_http_tool(["HOST"], methods=["POST"], name="order", trusted=True, irreversible=False, login=login)
    model = ScriptedModel(say("", call("order", url="http://HOST/orders")), "ordered")
    return Agent(model, name=name, tools=[order])

by_link = make("by_link", OAuth(tokens=tokens))
by_key = make("by_key", APIKey(header="X-API-Key", prefix="", tokens=tokens))
"""


@pytest.fixture(scope="module")
def shop():
    with oauth_shop() as running:
        yield running


@pytest.fixture(scope="module")
def server(shop, tmp_path_factory):
    folder = tmp_path_factory.mktemp("logins")
    (folder / "app.py").write_text(APP.replace("HOST", shop.url.removeprefix("http://")))
    words = ("serve", "app:by_link", "app:by_key", "--studio", "--http", f"127.0.0.1:{free_port()}")
    with serving(folder, *words) as (_process, url):
        yield StudioServer(url, folder, {})


def test_a_link_leads_to_the_page_of_the_login(open_page, server, shop, browser):
    """The link is made when it is asked for; once the user has logged in, the run goes on."""
    run_id = server.start("by_link")
    page = open_page(f"#/runs/{run_id}", url=server.url, color_scheme="dark")
    card = page.locator(".decision.login")
    expect(card).to_contain_text(f"Log in to {shop.url}")
    check_access(page)
    card.get_by_role("button", name="Get a link").click()
    link = card.get_by_role("link", name="Open the page of the login")
    expect(link).to_have_attribute("rel", "noopener noreferrer")
    elsewhere = browser.new_context()
    other = elsewhere.new_page()
    other.goto(link.get_attribute("href"))
    expect(other.locator("body")).to_contain_text("You are logged in")
    elsewhere.close()
    assert server.request("GET", f"/v1/runs/{run_id}?wait_s=30")["output"] == "ordered"
    assert shop.seen["exchanged"] == 1


def test_a_key_is_entered_in_a_field_of_its_own(open_page, server, shop):
    """It is not shown; the run goes on at once."""
    shop.keys["key-of-ann"] = "ann"
    run_id = server.start("by_key")
    page = open_page(f"#/runs/{run_id}", url=server.url, viewport={"width": 390, "height": 844})
    card = page.locator(".decision.login")
    key = card.get_by_label("Key")
    expect(key).to_have_attribute("type", "password")
    check_access(page, ".decision.login")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    key.fill("key-of-ann")
    card.get_by_role("button", name="Log in").click()
    expect(page.locator(".decision.login:has(input)")).to_have_count(0)
    assert server.request("GET", f"/v1/runs/{run_id}?wait_s=30")["output"] == "ordered"
    expect(page.locator(".decision.login")).to_have_count(0)
