"""The pages of an operator: overview, alerts and schedules; counts that agree, and what a caller may not see."""

import re

import anyio
from playwright.sync_api import expect

from agentfsm import Agent
from agentfsm.schedules import Schedules
from agentfsm.stores import SQLiteStore
from agentfsm.testing import ScriptedModel
from tests.support.studio_server import in_thread


def numbers(text):
    return [int(each) for each in re.findall(r"\d+", text.replace(",", ""))]


def test_the_counts_agree(open_page, studio, show):
    """Navigation, inbox, overview and gateway have one number of waiting runs; outcomes are those of the metrics."""
    page = open_page("#/overview?days=365")
    waiting = studio.request("GET", "/v1/open")["open"]
    number = waiting["waiting"] + waiting["paused"]
    assert number > 0
    expect(page.locator('.links [data-path="waiting"] .count')).to_have_text(str(number))
    expect(page.locator('main a[href="#/waiting"]')).to_have_text(str(number))
    outcomes = show("metrics", "--since", "365d")["outcomes"]
    assert outcomes
    for reason, count in outcomes.items():
        expect(page.locator(f'[data-outcome="{reason}"] td').first).to_have_text(f"{count:,}")
    assert numbers(page.locator("svg.bars").first.get_attribute("aria-label"))[0] == outcomes["completed"]
    page.locator('main a[href="#/waiting"]').click()
    expect(page.locator("header.page [role=status]")).to_have_text(f"{number} runs wait")
    expect(page.locator(".waiting-run")).to_have_count(number)


def test_an_alert_says_what_to_do(open_page):
    """One that fires has its value, its threshold and what to do; all rules are listed."""
    page = open_page("#/agents", viewport={"width": 390, "height": 800})
    document = {}

    def fire(route):
        document.update(route.fetch().json())
        firing = {"alert": "error_rate", "labels": {"agent": "shop"}, "since": document["now"] - 60, "until": None}
        route.fulfill(json=document | {"fired": [firing | {"worst": 0.25}]})

    page.route("**/v1/alerts*", fire)
    page.evaluate("location.hash = '#/alerts'")
    firing = page.locator('[data-firing="error_rate"]')
    expect(firing).to_be_visible()
    [rule] = [each for each in document["alerts"] if each["name"] == "error_rate"]
    for text in ("shop", "0.25, above 0.05", rule["text"], rule["action"]):
        expect(firing).to_contain_text(text)
    assert page.locator("[data-rule]").count() == len(document["alerts"])
    assert page.evaluate("document.documentElement.scrollWidth") == 390


def test_a_schedule_is_paused_and_resumed(open_page, studio):
    """The page has the next times, in the zone of the schedule; the button changes the schedule itself."""
    store = studio.folder / ".agentfsm" / "runs.db"

    async def add():
        agent = Agent(ScriptedModel("done"), name="shop", store=SQLiteStore(store))
        async with agent:
            await Schedules(agent.store).add(
                agent, "yearly", cron="0 3 1 1 *", tz="Asia/Tokyo", prompt="Settle {logical_date}"
            )

    in_thread(anyio.run, add)
    page = open_page("#/schedules")
    panel = page.locator("[data-schedule=yearly]")
    expect(panel.locator("[data-next]")).to_contain_text(re.compile(r"1 Jan 2\d{3}, 03:00:00"))
    for button, paused in (("Pause", True), ("Resume", False)):
        panel.get_by_role("button", name=button, exact=True).click()
        expect(panel.get_by_role("button", name="Pause" if not paused else "Resume", exact=True)).to_be_visible()
        assert studio.request("GET", "/v1/schedules")["schedules"][0]["paused"] is paused


def test_pages_that_are_not_there(open_page):
    """An unknown address says so; a page that the caller may not read is not in the navigation, and says so as well."""
    page = open_page("#/nothing%")
    expect(page.locator("h1")).to_have_text("There is no such page")
    for address in ("#/nothing", "#/runs/%E0%A4%A"):
        page.evaluate("address => location.hash = address", address)
        page.get_by_role("link", name="To the runs").click()
        expect(page.locator("h1")).to_have_text("Runs")
    assert all("404" in each for each in page.complaints)
    page.complaints.clear()
    page.route("**/v1/caller", lambda route: route.fulfill(json={"user": "ann", "tenant": None, "scopes": ["run"]}))
    page.reload()
    expect(page.locator('.links [data-path="costs"]')).to_be_hidden()
    assert page.locator(".links a:visible").all_text_contents()[-1].startswith("Sessions")
    page.evaluate("location.hash = '#/alerts'")
    expect(page.locator("h1")).to_have_text("You may not see this page")
