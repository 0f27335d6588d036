"""Decide, travel in time and fork in the pages; what the runs do is checked with `agentfsm show --json`."""

import re

from playwright.sync_api import expect

from tests.support.studio_server import decide

CARD = ".decision[data-key]"


def open_run(open_page, run_id, **options):
    page = open_page(f"#/runs/{run_id}", **options)
    page.wait_for_selector(".run-main .machine")
    return page


def expect_status(page, status):
    expect(page.locator("header.run .chip").first).to_have_text(status)


def test_approve_with_edited_arguments_in_one_of_two_tabs(open_page, studio, show):
    """The call runs with the arguments of the person, and the other tab follows without a reload."""
    run_id = studio.start("shop", "Pay with edited arguments")
    tab, other = open_run(open_page, run_id), open_run(open_page, run_id)
    expect(other.locator(CARD)).to_have_count(1)
    card = tab.locator(CARD)
    expect(card.locator(".description")).to_have_text("Pay 129.00 EUR to DE02")
    [item] = studio.request("GET", f"/v1/runs/{run_id}")["pending"]
    assert item["digest"][:12] in card.text_content()
    expect(card.locator("dl.arguments dt")).to_have_text(["account", "cents"])
    card.get_by_role("button", name="Edit the arguments").click()
    card.get_by_label("Arguments, as JSON").fill('{"account": "DE02", "cents": ')
    expect(card.get_by_role("alert").first).to_contain_text("not valid JSON")
    card.get_by_label("Arguments, as JSON").fill('{"account": "DE02", "cents": 9900}')
    card.get_by_role("button", name="Approve as edited").click()
    for page in (tab, other):
        expect_status(page, "done")
        expect(page.locator(CARD)).to_have_count(0)
    assert "DE02 9900\n" in (studio.folder / "paid.txt").read_text()
    [paid] = [call for turn in show("show", run_id)["tree"] for call in turn["calls"] if call["name"] == "pay"]
    assert (paid["arguments"]["cents"], paid["proposed"]["cents"]) == (9900, 12900)
    assert paid["approved_by"]
    tab.reload()
    expect_status(tab, "done")
    tab.get_by_role("tab", name="Calls").click()
    expect(tab.locator('tr[data-call="t2.0"]')).to_contain_text("arguments edited")


def test_calls_of_one_tool_are_decided_on_together(open_page, studio, show):
    """Each stands in one card with its arguments; those not chosen keep a card of their own."""
    run_id = studio.start("payroll")
    page = open_run(open_page, run_id)
    together = page.locator(".decision.together")
    expect(together.locator("code")).to_have_text([f'{{"account":"DE0{n}","cents":{n * 100}}}' for n in (1, 2, 3)])
    together.get_by_role("checkbox").nth(1).uncheck()
    together.get_by_role("button", name="Approve the chosen").click()
    expect(page.locator(CARD)).to_have_count(2)  # the third starts after the second
    expect(together).to_have_count(0)
    expect(page.locator(CARD).nth(1)).to_contain_text("a worker applies it")
    page.locator(CARD).get_by_text("Reject…").click()
    page.locator(CARD).get_by_role("button", name="Reject", exact=True).click()
    expect_status(page, "done")
    assert [call["status"] for call in show("show", run_id)["tree"][0]["calls"]] == ["done", "rejected", "done"]


def test_the_second_of_two_people_is_told(open_page, studio):
    """A card that shows an old state decides nothing: its server says that the call was decided."""
    run_id = studio.start("shop", "Two people at once")
    page = open_run(open_page, run_id)
    expect(page.locator(CARD)).to_have_count(1)
    page.route("**/events", lambda route: route.abort())
    page.route("**/details", lambda route: route.abort())
    decide(studio, run_id, "reject", message="not today")
    page.locator(CARD).get_by_role("button", name="Approve").click()
    expect(page.locator(f"{CARD} .error:visible")).to_contain_text(re.compile("approv|decided|wait"))
    page.close()
    page.complaints.clear()  # the browser reports the answer 4xx, and the routes that were cut


def test_reject_with_a_reason(open_page, studio, show):
    """The model reads the reason, and nothing is paid."""
    run_id = studio.start("shop", "Reject me")
    page = open_run(open_page, run_id)
    page.get_by_text("Reject…").click()
    page.get_by_label("Reason").fill("wrong account")
    page.get_by_role("button", name="Reject", exact=True).click()
    expect_status(page, "done")
    [paid] = [call for turn in show("show", run_id)["tree"] for call in turn["calls"] if call["name"] == "pay"]
    assert paid["status"] == "rejected"
    assert "wrong account" in paid["content"]


def test_answer_in_the_inbox(open_page, studio, show):
    """The inbox has each run that waits; an answer is sent from there, and the run leaves the inbox."""
    run_id = studio.start("clerk", "Ask me")
    page = open_page("#/waiting")
    waiting = [each["id"] for each in show("runs", "--waiting", "--limit", "100")["runs"]]
    expect(page.locator(".waiting-run")).to_have_count(len(waiting))
    assert page.locator(".waiting-run").evaluate_all("(all) => all.map((each) => each.dataset.run)") == waiting
    run = page.locator(f'.waiting-run[data-run="{run_id}"]')
    expect(run.locator(".description")).to_have_text("Which account?")
    run.get_by_label("Answer").fill("the second one")
    run.get_by_role("button", name="Answer", exact=True).click()
    expect(run).to_have_count(0)
    assert studio.request("GET", f"/v1/runs/{run_id}?wait_s=30")["status"] == "done"
    assert show("show", run_id)["tree"][0]["calls"][0]["content"] == "the second one"


def test_time_travel(open_page, studio, show):
    """Each version is shown as `show --at` has it; a refresh keeps the version, and the newest is one button away."""
    run_id = studio.runs["done"]
    page = open_run(open_page, run_id)
    newest = show("show", run_id)["version"]
    slider = page.get_by_role("slider")
    expect(slider).to_have_value(str(newest))
    for version in (1, 2, newest - 3):
        slider.fill(str(version))
        expect(page.locator("header.run .chip.past")).to_have_count(1)
        then = show("show", run_id, "--at", str(version))
        expect(page.locator(".state.present")).to_have_attribute("data-state", then["state"])
        facts = page.locator(".run-main dl.facts").text_content()
        assert f"turns{then['turns']} of 20" in facts.replace("version", " ")
        assert f"tokens{then['usage']['tokens']:,} of" in facts
    page.reload()
    expect(slider).to_have_value(str(newest - 3))
    page.get_by_role("button", name="Previous version").click()
    expect(slider).to_have_value(str(newest - 4))
    slider.press("ArrowRight")
    expect(slider).to_have_value(str(newest - 3))
    page.get_by_role("button", name="Newest").click()
    expect_status(page, "done")


def test_fork_and_settle(open_page, studio, show):
    """A fork in the middle of a payment waits for its outcome, which a person records."""
    run_id = studio.runs["done"]
    kinds = [each["is"] for each in show("show", run_id, "--events")["events"]]
    started = kinds.index("ToolStarted") + 1
    page = open_run(open_page, f"{run_id}?v={started}")
    page.get_by_role("button", name="Fork here").click()
    dialog = page.get_by_role("dialog")
    expect(dialog.get_by_label("Number of events")).to_have_value(str(started))
    dialog.get_by_role("button", name="Fork", exact=True).click()
    dialog.get_by_role("button", name="Fork and act").click()
    expect(page.locator("header.run .line")).to_contain_text("forked from")
    made = re.search(r"#/runs/([^?]+)", page.url)[1]
    assert show("show", made)["forked_at"] == started
    card = page.locator(CARD)
    expect(card).to_contain_text("Unknown outcome")
    card.get_by_role("button", name="It failed").click()
    expect(card.locator(".error:visible")).to_contain_text("Write the result or the error first.")
    card.get_by_label("Result or error").fill("the bank says no")
    card.get_by_role("button", name="It failed").click()
    expect_status(page, "done")
    assert show("show", made)["tree"][1]["calls"][0]["content"] == "the bank says no"


def test_fork_with_an_edited_event(open_page, studio, show):
    """The text of a reply is edited in the record of its event, and the fork has it."""
    page = open_page(f"#/runs/{studio.runs['done']}?v=2&panel=events")
    page.get_by_role("button", name="Edit in a fork").click()
    record = page.get_by_role("dialog").get_by_label("Record of the event")
    expect(record).to_contain_text("")
    record.fill(record.input_value().replace("I look up what is open.", "I was edited."))
    page.get_by_role("dialog").get_by_role("button", name="Fork", exact=True).click()
    page.get_by_role("dialog").get_by_role("button", name="Fork and act").click()
    expect(page.locator("header.run .line")).to_contain_text("forked from")
    made = re.search(r"#/runs/([^?]+)", page.url)[1]
    studio.request("GET", f"/v1/runs/{made}?wait_s=30")
    assert show("show", made)["tree"][0]["text"] == "I was edited."


def test_a_fork_that_can_act_asks_first(open_page, studio, show):
    """Nothing is forked before the choice; the withheld fork ends without a decision, and says that it is one."""
    run_id, count = studio.runs["done"], len(show("runs", "--limit", "1000")["runs"])
    page = open_run(open_page, f"{run_id}?v=1")
    page.get_by_role("button", name="Fork here").click()
    dialog = page.get_by_role("dialog")
    expect(dialog.get_by_text("This fork can act")).to_be_hidden()
    dialog.get_by_role("button", name="Fork", exact=True).click()
    expect(dialog.get_by_text("This fork can act")).to_be_visible()
    assert len(show("runs", "--limit", "1000")["runs"]) == count
    dialog.get_by_role("button", name="Withhold the calls").click()
    expect(page.locator("header.run .line")).to_contain_text("calls withheld")
    expect_status(page, "done")
    made = show("show", re.search(r"#/runs/([^?]+)", page.url)[1])
    [paid] = [call for turn in made["tree"] for call in turn["calls"] if call["name"] == "pay"]
    assert (made["withhold"], paid["status"]) == (True, "skipped")


def test_a_fork_that_cannot_act_asks_nothing(open_page, studio):
    """All tools of the agent are read-only."""
    run_id = studio.start("planner", "Look only")
    page = open_run(open_page, run_id)
    page.get_by_role("button", name="Fork here").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Number of events").fill("0")
    dialog.get_by_role("button", name="Fork", exact=True).click()
    expect(page.locator("header.run .line")).to_contain_text("forked from")


def test_control_a_run(open_page, studio):
    """A run gets input, is paused, resumed and cancelled, and is rated at its end."""
    run_id = studio.start("clerk", "Control me")
    page = open_run(open_page, run_id)
    page.get_by_placeholder("Write to the run…").fill("hurry up")
    page.get_by_role("button", name="Send", exact=True).click()
    expect(page.get_by_placeholder("Write to the run…")).to_have_value("")
    page.get_by_role("button", name="Pause", exact=True).click()
    expect(page.locator(".decision.pause")).to_have_count(1)
    page.get_by_role("button", name="Resume").click()
    expect(page.locator(".decision.pause")).to_have_count(0)
    page.get_by_role("button", name="Cancel the run").click()
    expect_status(page, "failed")
    page.get_by_role("button", name="Good", exact=True).click()
    expect(page.get_by_text("Thank you.")).to_be_visible()
    assert studio.request("GET", f"/v1/runs/{run_id}/feedback")["feedback"][0]["rating"] == 5
