"""Talk with agents in the studio: start, stream, decide, stop, retry, go on; answers as Markdown."""

import re
from urllib.parse import urlencode

import pytest
from playwright.sync_api import expect

from agentfsm._lib.markup import list_addresses
from tests.support.browser import check_access
from tests.support.composed_links import list_composed_texts

# Shows texts in Markdown: returns the number of links, and the texts with one to a host which the filter did not read.
FIND_OTHERS = """async ([url, texts]) => {
    const { markdown } = await import(url);
    const hosts = urls => urls.map(each => URL.parse(each)?.host);
    let links = 0;
    const others = texts.filter(([text, addresses]) => {
        const shown = hosts([...markdown(text).querySelectorAll('a')].map(each => each.href));
        links += shown.length;
        return !shown.every(host => hosts(addresses).includes(host));
    });
    return [links, others];
}"""


def talk(open_page, agent, session="", **options):
    page = open_page(f"#/talk?{urlencode({'agent': agent, 'session': session})}", **options)
    expect(page.get_by_label("Message")).to_be_focused()
    return page


def say(page, text):
    page.get_by_label("Message").fill(text)
    page.keyboard.press("Enter")


def read_session(page):
    return re.search(r"session=([^&]+)", page.url)[1]


def test_the_first_page_talks_with_an_agent(open_page, studio):
    """A message starts a run, whose answer is shown; the next one goes on in the session; a bubble opens its turn."""
    page = open_page("")
    box, answers = page.get_by_label("Message"), page.locator(".bubble.theirs .content")
    expect(box).to_be_focused()
    assert page.locator(".links a").first.text_content() == "Talk"
    page.get_by_label("Agent", exact=True).select_option("chatter")
    box.fill("one")
    box.press("Shift+Enter")
    page.keyboard.type("two")
    box.press("Enter")
    expect(answers).to_have_text(["You said 'one\\ntwo'."])
    expect(box).to_have_value("")
    say(page, "three")
    expect(answers).to_have_text(["You said 'one\\ntwo'.", "You said 'three'."])
    page.reload()
    expect(answers).to_have_text(["You said 'one\\ntwo'.", "You said 'three'."])
    expect(page.get_by_label("Session", exact=True)).to_have_value(read_session(page))
    [last, first] = studio.request("GET", f"/v1/runs?session={read_session(page)}")["runs"]
    page.get_by_role("link", name="turn 1").first.click()
    expect(page.locator(".travel .where")).to_contain_text(f"version {first['version']} of {first['version']}")
    assert f"#/runs/{first['id']}?" in page.url
    assert (first["agent"], last["prompt"]) == ("chatter", "three")


def test_the_answer_is_shown_while_it_is_written(open_page, studio):
    """Text appears before the answer is complete; a message to a run that works is its input."""
    (studio.folder / "on.txt").unlink(missing_ok=True)
    page = talk(open_page, "chatter")
    say(page, "slow please")
    expect(page.locator(".draft strong").first).to_have_text("write")
    say(page, "and this")
    expect(page.locator(".bubble.unread")).to_contain_text("and this")
    (studio.folder / "on.txt").touch()
    expect(page.locator(".bubble.theirs .content")).to_have_text(["You said 'slow please'.", "You said 'and this'."])
    expect(page.locator(".bubble.mine .content")).to_have_text(["slow please", "and this"])
    expect(page.locator(".bubble.unread, .draft")).to_have_count(0)
    assert len(studio.request("GET", f"/v1/runs?session={read_session(page)}")["runs"]) == 1


def test_calls_are_approved_and_rejected_in_place(open_page, studio):
    """The card stands in the conversation; until it is decided on, no message is taken; another run is rejected."""
    page = talk(open_page, "shop")
    say(page, "Settle my invoices")
    card = page.locator(".said .decision.approval")
    expect(page.get_by_role("button", name="Send", exact=True)).to_be_disabled()
    expect(page.get_by_text("Decide above first, or stop the run.")).to_be_visible()
    check_access(page)
    card.get_by_role("button", name="Approve").click()
    expect(page.locator(".bubble.theirs").last).to_contain_text("Invoice 17 is paid.")
    expect(card).to_have_count(0)
    page.get_by_label("Session", exact=True).select_option("")
    say(page, "Once more")
    card.get_by_text("Reject…").click()
    card.get_by_label("Reason").fill("not today")
    card.get_by_role("button", name="Reject", exact=True).click()
    expect(page.locator(".chip.rejected")).to_have_count(1)
    expect(page.get_by_role("button", name="Retry")).to_be_visible()


def test_a_question_is_answered_in_place(open_page):
    """The answer goes to the call that asked."""
    page = talk(open_page, "clerk")
    say(page, "Ask me")
    card = page.locator(".said .decision.question")
    expect(card).to_contain_text("Which account?")
    card.get_by_label("Answer").fill("DE02")
    card.get_by_role("button", name="Answer", exact=True).click()
    expect(page.locator(".bubble.theirs").last).to_contain_text("Noted.")
    page.locator(".result summary").click()
    expect(page.locator(".result pre")).to_contain_text("DE02")


def test_a_form_sends_what_was_chosen(open_page):
    """A choice begins empty, what is required is asked for, defaults are filled in; the question is shown once."""
    page = talk(open_page, "booker")
    say(page, "To Oslo")
    card = page.locator(".said .decision.question")
    answer = card.get_by_role("button", name="Answer", exact=True)
    expect(card.get_by_text("Who travels?")).to_have_count(1)
    answer.click()
    expect(card.get_by_role("alert")).to_have_text("Fill in Name first.")
    card.get_by_label("Name").fill("Ann")
    answer.click()
    expect(card.get_by_role("alert")).to_have_text("Fill in class first.")
    card.get_by_label("class").select_option("First")
    answer.click()
    page.locator(".result summary").click()
    expect(page.locator(".result pre")).to_have_text('{"name": "Ann", "class": "first", "bags": 1}')


def test_an_execution_that_fails_is_shown(open_page):
    """A run whose program is broken says why it stands still; a message that it never reads says so after the end."""
    page = talk(open_page, "chatter")
    say(page, "broken")
    expect(page.locator(".decision.standstill pre")).to_have_text("RuntimeError: the model is gone")
    say(page, "still there?")
    expect(page.locator(".bubble.unread")).to_contain_text("read at the next turn")
    page.get_by_role("button", name="Stop", exact=True).click()
    expect(page.locator(".bubble.unread")).to_contain_text("not read: the run had ended")


def test_stop_and_retry(open_page, studio):
    """A run that works is stopped; its prompt is sent again with its files, as a new run of the session."""
    (studio.folder / "on.txt").unlink(missing_ok=True)
    page = talk(open_page, "chatter")
    note = {"name": "note.md", "mimeType": "", "buffer": b"# Note"}
    page.locator("input[type=file]").set_input_files([note, note | {"name": "tool.exe"}])
    expect(page.get_by_role("alert")).to_contain_text("tool.exe is not of a type that models take")
    expect(page.locator(".attachments li")).to_have_count(1)
    say(page, "slow please")
    page.get_by_role("button", name="Stop", exact=True).click()
    expect(page.locator(".bubble.is-failure")).to_contain_text("cancelled")
    (studio.folder / "on.txt").touch()
    page.get_by_role("button", name="Retry").click()
    expect(page.locator(".bubble.theirs .content")).to_have_text("You said 'slow please[note.md]'.")
    runs = studio.request("GET", f"/v1/runs?session={read_session(page)}")["runs"]
    assert [each["state"] for each in runs] == ["done", "error"]


def test_a_message_whose_answer_is_lost_is_sent_once(open_page, studio):
    """The second attempt has the key of the first, so that there is one run."""
    page = talk(open_page, "chatter")

    def lose(route):
        route.fetch()
        route.abort()

    page.route("**/v1/runs", lose, times=1)
    say(page, "only once")
    expect(page.get_by_role("alert")).to_have_text("The server does not answer.")
    expect(page.get_by_label("Message")).to_have_value("only once")
    page.keyboard.press("Enter")
    expect(page.locator(".bubble.theirs .content")).to_have_text("You said 'only once'.")
    assert len(studio.request("GET", f"/v1/runs?session={read_session(page)}")["runs"]) == 1
    assert all("ERR_FAILED" in each for each in page.complaints)
    page.complaints.clear()


def test_a_hostile_answer_does_nothing(open_page):
    """HTML is text, other schemes and the studio's own addresses are no links, and no picture is loaded unasked."""
    page = talk(open_page, "chatter")
    say(page, "hostile")
    answer = page.locator(".markdown")
    expect(answer).to_contain_text("<script>alert(1)</script>")
    expect(answer).to_contain_text("<img src=x onerror=alert(2)>")
    hrefs = answer.locator("a").evaluate_all("all => all.map(each => each.getAttribute('href'))")
    assert hrefs == ["https://evil.example/?q=secret", "https://good.example/a"]
    assert answer.locator("img, script, b, iframe, form, [onclick], canvas").count() == 0
    expect(answer.locator(".hidden-char")).to_have_text("U+202E")
    answer.get_by_role("button", name="Picture: dot").click()
    expect(answer.get_by_role("img", name="dot")).to_be_visible()


@pytest.mark.parametrize("every", [6, pytest.param(1, marks=pytest.mark.soak)])
def test_no_link_is_shown_that_the_exit_filter_has_not_read(open_page, studio, every):
    """Of each text that hides an address, the studio shows links to those hosts only that the exit filter judges."""
    texts = [
        [each.text, [found.url for found in list_addresses(each.text)]] for each in list_composed_texts(every=every)
    ]
    links, others = open_page().evaluate(FIND_OTHERS, [f"{studio.url}markdown.js", texts])
    assert links >= 50
    assert others == []


def test_a_phone_needs_no_sideways_scroll(open_page, studio):
    """At 390 px the page is as wide as the window, also with a table, code and a card, which everybody can use."""
    page = talk(open_page, "chatter", viewport={"width": 390, "height": 844})
    say(page, "table")
    expect(page.locator(".markdown table")).to_be_visible()
    page.get_by_label("Agent", exact=True).select_option("shop")
    say(page, "Settle my invoices")
    expect(page.locator(".decision")).to_be_visible()
    check_access(page)
    assert page.evaluate("document.documentElement.scrollWidth") == 390


def test_a_page_that_is_left_while_it_opens_leaves_the_address_alone(open_page, studio):
    """The first page is slow, and the reader goes to another: that one is shown, and its address stays."""
    page = open_page("#/workers")
    expect(page.get_by_role("heading", level=1)).to_have_text("Workers and leases")
    held = []

    def hold(route):
        held.append(route)

    page.route("**/v1/sessions", hold)
    with page.expect_request("**/v1/sessions"):
        page.evaluate("location.hash = '#/talk'")
    page.evaluate("location.hash = '#/runs'")
    expect(page.get_by_role("heading", level=1)).to_have_text("Runs")
    with page.expect_response("**/v1/sessions"):
        held.pop().continue_()
    page.wait_for_timeout(300)
    assert page.url.endswith("#/runs")
    expect(page.get_by_role("heading", level=1)).to_have_text("Runs")
