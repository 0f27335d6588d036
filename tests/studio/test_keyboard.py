"""The studio without a mouse: what Tab reaches, and the single keys. `modules/keyboard.test.mjs` has each key."""

from playwright.sync_api import expect


def test_the_keyboard_is_enough(open_page, studio):
    """The content is one key away, tabs move with arrows, and the dialog closes with Escape."""
    page = open_page(f"#/runs/{studio.runs['done']}")
    page.wait_for_selector(".run-main .machine")
    page.keyboard.press("Tab")
    expect(page.locator(":focus")).to_have_text("Skip to the content")
    page.keyboard.press("Enter")
    expect(page.locator("main")).to_be_focused()
    page.locator("#tab-transcript").focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator("#tab-trace")).to_be_focused()
    expect(page.locator('.panel[data-panel="trace"]')).to_be_visible()
    page.get_by_role("button", name="Fork here").press("Enter")
    expect(page.get_by_role("dialog")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)


def test_single_keys_search_move_and_approve(open_page, studio):
    """They move over rows that are renewed, write text in a field, and approve after a question, once."""
    run_id = studio.start("shop", "Approve me by key")
    page = open_page("#/runs")
    box, focused = page.get_by_role("searchbox"), page.locator(":focus")
    expect(page.locator("tr[data-run]").nth(1)).to_be_visible()
    page.keyboard.press("/")
    expect(box).to_be_focused()
    page.keyboard.type("by key/")
    expect(box).to_have_value("by key/")
    box.fill("")
    page.keyboard.press("Escape")
    for key, row in (("j", 0), ("j", 1), ("k", 0)):
        page.keyboard.press(key)
        expect(page.locator("tr[data-run]").nth(row).locator("a")).to_be_focused()
    page.evaluate("document.activeElement.dataset.old = 'yes'")
    expect(page.locator("[data-old]")).to_have_count(0)  # the list was drawn anew
    expect(focused).to_have_text("Approve me by key")
    page.keyboard.press("Enter")
    expect(page.locator("header.run h1")).to_have_text("Approve me by key")
    card, dialog = page.locator(".decision.approval"), page.get_by_role("dialog")
    expect(card).to_be_visible()
    page.keyboard.press("?")
    expect(dialog).to_contain_text("Approve the chosen call")
    page.keyboard.press("a")
    expect(dialog).to_have_count(1)
    page.keyboard.press("Escape")
    expect(dialog).to_have_count(0)
    page.keyboard.press("a")
    expect(dialog.locator("dd")).to_have_text(["DE02", "12900"])
    page.keyboard.press("Escape")
    expect(dialog).to_have_count(0)
    assert studio.request("GET", f"/v1/runs/{run_id}")["status"] == "waiting"
    page.keyboard.press("a")
    page.keyboard.press("Enter")
    expect(page.locator("header.run .chip").first).to_have_text("done")
    page.locator("#tab-events").click()
    page.keyboard.press("j")
    expect(page.locator(".virtual")).to_be_focused()
    newest = page.locator(".record strong").text_content()
    page.keyboard.press("k")
    expect(page.locator(".record strong")).not_to_have_text(newest)
