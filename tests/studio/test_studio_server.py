"""The studio as a whole: restarts of its server, sign-in, many events, hostile text, accessibility, languages."""

import hashlib
import re
import signal
import sys
from functools import partial
from pathlib import Path

import httpx
from playwright.sync_api import expect

import agentfsm
from agentfsm.cli import main
from agentfsm.studio import StudioFiles
from tests.support.browser import check_access
from tests.support.port_servers import free_port
from tests.support.studio_server import AGENTS, HOSTILE, in_thread, serving

STATIC = Path(agentfsm.__file__).parent / "studio" / "static"
WIDE, PHONE = {"width": 1440, "height": 900}, {"width": 390, "height": 844}
PANELS = ["transcript", "trace", "events", "calls", "shown", "cost", "labels", "changes"]


def test_a_run_goes_on_after_the_server_was_killed(open_page, browser, tmp_path):
    """The page shows a run and its sub-agent's live, survives the server's death within a call, and misses no event."""
    (tmp_path / "agents.py").write_text(AGENTS.read_text(encoding="utf-8"), encoding="utf-8")
    words = ("serve", "agents:dispatcher", "--studio", "--http", f"127.0.0.1:{free_port()}")
    with serving(tmp_path, *words) as (process, url):
        run = httpx.post(url.replace("/studio/", "/v1/runs"), json={"prompt": "Bring the book"}, timeout=60).json()
        page = open_page(url=f"{url}#/runs/{run['id']}?panel=trace")
        page.get_by_role("treeitem", name="courier").click()
        page.keyboard.press("ArrowRight")
        deliver = page.get_by_role("treeitem", name="deliver")
        expect(deliver.locator(".trace-bar.running")).to_be_visible()
        expect(page.locator(".connection")).to_have_text("live")
        deliver.click()
        expect(page.locator(".trace .record")).to_contain_text(re.compile("Worker now[0-9a-f]{8}"))
        process.send_signal(signal.SIGKILL)
        process.wait()
        expect(page.locator(".connection")).to_have_text("reconnecting…")
    (tmp_path / "go.txt").touch()
    with serving(tmp_path, *words) as (_process, url):
        expect(page.locator("header.run .chip").first).to_have_text("done")
        run = httpx.get(url.replace("/studio/", f"/v1/runs/{run['id']}"), timeout=60).json()
        expect(page.locator(".travel .where")).to_contain_text(f"version {run['version']} of {run['version']}")
        expect(page.locator(".result-card")).to_contain_text("It is delivered.")
        expect(deliver.locator(".trace-bar.done")).to_be_visible()
        expect(deliver.locator(".trace-crash")).to_have_count(1)
        page.close()  # it would ask the server, which is gone
    assert all("ERR_" in each for each in page.complaints)  # what the browser says while the server is away
    page.complaints.clear()


def test_nothing_is_sent_twice_to_a_server_that_dies(open_page, browser, tmp_path):
    """It dies before it has answered a message, and before it gets an approval; a fork's answer is lost on the way."""
    (tmp_path / "agents.py").write_text(AGENTS.read_text(encoding="utf-8"), encoding="utf-8")
    words = ("serve", "agents:shop", "--studio", "--http", f"127.0.0.1:{free_port()}")

    def lose_answer(route):
        route.fetch()
        route.abort()

    def kill():
        process.send_signal(signal.SIGKILL)
        process.wait()

    def count_runs():
        return len(httpx.get(url.replace("/studio/", "/v1/runs"), timeout=60).json()["runs"])

    with serving(tmp_path, *words) as (process, url):
        page = open_page(url=f"{url}#/talk")
        page.route("**/v1/runs", lambda route: (route.fetch(), kill(), route.abort()), times=1)
        page.get_by_label("Message").fill("Settle my invoices")
        page.keyboard.press("Enter")
        expect(page.get_by_role("alert").first).to_have_text("The server does not answer.")
    with serving(tmp_path, *words) as (process, url):
        page.keyboard.press("Enter")
        approve = page.locator(".said .decision").get_by_role("button", name="Approve", exact=True)
        expect(approve).to_be_visible()
        assert count_runs() == 1
        kill()
        approve.click()
        expect(page.locator(".said .decision .error:visible")).to_have_text("The server does not answer.")
    with serving(tmp_path, *words) as (process, url):
        approve.click()
        expect(page.locator(".bubble.theirs").last).to_contain_text("Invoice 17 is paid.")
        page.get_by_role("link", name="turn 1").first.click()
        page.get_by_role("button", name="Fork here").click()
        page.get_by_role("dialog").get_by_role("button", name="Fork", exact=True).click()
        page.route("**/fork", lose_answer, times=1)
        page.get_by_role("button", name="Withhold the calls").click()
        expect(page.get_by_role("dialog").get_by_role("alert").and_(page.locator(":visible"))).to_be_visible()
        page.get_by_role("button", name="Withhold the calls").click()
        expect(page.locator("header.run .line")).to_contain_text("forked from")
        assert count_runs() == 2
        page.close()  # it would ask the server, which is gone
    assert (tmp_path / "paid.txt").read_text(encoding="utf-8") == "DE02 12900\n"
    assert all("ERR_" in each for each in page.complaints)
    page.complaints.clear()


def test_only_who_has_the_key_sees_the_runs(browser, open_page, studio, tmp_path):
    """`agentfsm studio` prints a URL with a key, which leaves the address at once and works in other tabs."""
    store = studio.folder / ".agentfsm" / "runs.db"
    with serving(tmp_path, "studio", str(store), "--http", f"127.0.0.1:{free_port()}") as (_process, url):
        assert httpx.get(url.partition("/studio/")[0] + "/v1/runs", timeout=60).status_code == 401
        stranger = open_page(url=url.partition("#")[0] + "#/runs")
        expect(stranger.get_by_role("button", name="Sign in")).to_be_visible()
        page = open_page(url=url)
        page.wait_for_selector("tr[data-run]")
        assert "key" not in page.url
        other = page.context.new_page()
        other.goto(url.partition("#")[0] + f"#/runs/{studio.runs['done']}")
        expect(other.locator(".result-card")).to_contain_text("Invoice 17 is paid.")
        other.goto(url.partition("#")[0] + "#/agents")
        expect(other.locator(".empty")).to_contain_text("No agent is served")
        other.get_by_role("button", name="Sign out").click()
        expect(other.get_by_role("button", name="Sign in")).to_be_visible()
        page.evaluate("key => localStorage.setItem('agentfsm.key', key)", url.partition("#key=")[2])
        expect(other.locator(".empty")).to_contain_text("No agent is served")  # signed in by the other window
        page.context.close()
        stranger.context.close()
    assert all("401" in each for each in page.complaints)
    page.complaints.clear()


def test_a_link_asks_before_it_replaces_a_key(open_page):
    """Until the person chooses, the stored key stays, and the address has neither. One that is refused is replaced."""
    page = open_page("#key=mine%2F1", locale="en-US")
    stored = partial(page.evaluate, "localStorage.getItem('agentfsm.key')")
    ready = page.get_by_label("Message")
    for choice, key in (("Keep my key", "mine/1"), ("Use the key of the link", "other")):
        expect(ready).to_be_visible()
        page.evaluate("location.hash = '#key=other'")
        expect(page.get_by_text("This link has another key")).to_be_visible()
        assert (stored(), page.url.partition("#")[2]) == ("mine/1", "/")
        page.get_by_role("button", name=choice).click()
        expect(ready).to_be_visible()
        assert stored() == key
    page.route("**/v1/caller", lambda route: route.fulfill(status=401, json={}), times=1)
    page.evaluate("location.hash = '#key=anew'")
    expect(ready).to_be_visible()
    assert stored() == "anew"
    page.complaints.clear()


def test_a_studio_over_a_store_executes_a_run_only_if_asked(open_page, tmp_path, monkeypatch, capsys):
    """A decision and a fork lead on: the page names target and store, and continues that run, or shows the command."""
    (tmp_path / "agents.py").write_text(AGENTS.read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "agents", raising=False)
    assert in_thread(main, ["run", "agents:shop", "Settle my invoices", "--id", "r1"]) == 3
    assert in_thread(main, ["submit", "agents:chatter", "broken", "--id", "r2"]) == 0
    monkeypatch.delitem(sys.modules, "agents")
    with serving(tmp_path, "studio", "--no-browser", "--http", f"127.0.0.1:{free_port()}") as (_process, url):
        place, _, key = url.partition("#key=")
        headers = {"authorization": f"Bearer {key}"}

        def read(run_id):
            return httpx.get(place.replace("/studio/", f"/v1/runs/{run_id}"), headers=headers, timeout=60).json()

        page = open_page(url=url)
        badge = page.locator("nav .count")
        expect(badge).to_have_text("1")
        page.get_by_role("link", name="Settle my invoices").click()
        page.locator(".decision.approval").get_by_role("button", name="Approve").click()
        still = page.locator(".standstill")
        expect(still).to_contain_text("in the store .agentfsm/runs.db")
        expect(still.locator(".command")).to_have_text(re.compile(r"agentfsm resume r1$"))
        expect(badge).to_have_count(0)
        assert read("r1")["status"] == "queued"
        assert not (tmp_path / "paid.txt").exists()
        still.get_by_role("button", name="Continue here with agents:shop").click()
        expect(page.locator("header.run .chip").first).to_have_text("done")
        expect(still).to_have_count(0)
        page.get_by_role("slider").fill("1")
        page.get_by_role("button", name="Fork here").click()
        page.get_by_role("button", name="Fork", exact=True).click()
        expect(page.get_by_role("dialog")).to_contain_text("The fork is made with agents:shop in the store")
        page.get_by_role("button", name="Fork and act").click()
        expect(page.locator("header.run")).to_contain_text("forked from")
        expect(still.get_by_role("button", name="Continue here with agents:shop")).to_be_visible()
        assert read(page.url.partition("/runs/")[2].partition("?")[0])["status"] == "idle"
        page.evaluate("location.hash = '#/runs/r2'")
        still.get_by_role("button", name="Continue here with agents:chatter").click()
        expect(still.locator("pre").first).to_have_text("RuntimeError: the model is gone")
        page.context.close()
    assert (tmp_path / "paid.txt").read_text(encoding="utf-8") == "DE02 12900\n"


def test_the_studio_stays_on_this_machine(capsys):
    """An address that other machines reach is refused before anything is served."""
    assert in_thread(main, ["studio", "--http", "0.0.0.0:0"]) == 2
    assert "--keys" in capsys.readouterr().err


def test_a_journal_of_10000_events(open_page, studio, show):
    """All events are there, a few rows are in the page, and the ends of the list are reached."""
    page = open_page("#/runs/long?panel=events")
    newest = show("show", "long")["version"]
    assert newest >= 10_000
    expect(page.locator(".travel .where")).to_contain_text(f"version {newest} of {newest}")
    expect(page.locator(".panel .toolbar")).to_contain_text(f"{newest} of {newest}")
    assert page.locator("*").count() < 1_500
    events = page.locator(".virtual")
    events.press("Home")
    expect(page.locator(".record strong")).to_have_text("1 · Observed")
    events.press("End")
    expect(page.locator(".record strong")).to_have_text(f"{newest} · AnswerGiven")
    page.get_by_role("slider").fill("5000")
    expect(page.locator(".travel .where")).to_contain_text("version 5000")
    page.get_by_role("tab", name="Transcript").click()
    expect(page.locator(".entry")).to_have_count(60)
    page.get_by_role("tab", name="Trace").click()
    page.get_by_role("tree").press("End")
    expect(page.locator('.trace .row[aria-selected="true"]')).to_contain_text("search")
    assert page.locator("*").count() < 2_500


def test_hostile_text_is_text(open_page, studio):
    """No text becomes markup, in no panel; characters that hide or reorder text are visible."""
    page = open_page("#/runs/hostile")
    page.wait_for_selector(".run-main .machine")
    for panel in set(PANELS) - {"labels"}:
        page.locator(f"#tab-{panel}").click()
        expect(page.locator(f'.panel[data-panel="{panel}"] *').first).to_be_visible()
        assert page.locator("main script, main img, main b b").count() == 0
    page.locator("#tab-transcript").click()
    text = page.locator(".transcript").text_content()
    assert "<script>alert(1)</script><img src=x onerror=alert(2)>" in text
    assert not set("\u202e\u202c\u200b\x1b") & set(page.locator("body").text_content())
    hidden = page.locator("header.run .hidden-char").all_text_contents()
    assert hidden[:4] == ["U+202E", "U+202C", "U+001B", "U+200B"]
    page.goto(f"{studio.url}#/runs")
    row = page.locator('tr[data-run="hostile"]')
    expect(row).to_contain_text("<script>alert(1)</script>")
    assert HOSTILE.count("\u202e") == row.locator(".hidden-char", has_text="U+202E").count() - 1  # prompt and user


def test_evaluations_are_listed_only_when_asked_for(open_page, studio):
    """The list of runs shows production; the control shows the others, is in the address, and leads to the run."""
    page = open_page("#/runs")
    rows, row = page.locator("tr[data-run]"), page.locator('tr[data-run="evaluated"]')
    expect(rows.first).to_be_visible()
    expect(row).to_have_count(0)
    page.get_by_label("Purpose").select_option("evaluations")
    expect(row).to_be_visible()
    expect(rows).to_have_count(1)
    assert page.url.endswith("#/runs?purpose=eval")
    page.reload()
    expect(row).to_be_visible()
    expect(page.get_by_label("Purpose")).to_have_value("eval")
    page.goto(f"{studio.url}#/sessions")
    expect(page.locator("tr[data-session]").first).to_be_visible()
    expect(page.locator("tr[data-session='a case']")).to_have_count(0)


def test_everybody_can_use_every_page(open_page, studio):
    """axe-core finds no violation on any page, nor bad contrast in the dark; a phone scrolls none sideways."""
    page = open_page(viewport=WIDE)

    def check(part="body"):
        expect(page.locator("main h1")).to_be_visible()
        expect(page.locator(".failure")).to_have_count(0)
        check_access(page, part)
        page.set_viewport_size(PHONE)
        assert page.evaluate("document.documentElement.scrollWidth") == PHONE["width"], page.url
        page.set_viewport_size(WIDE)

    names = page.evaluate("import('./pages/index.js').then((all) => all.PAGES.map((each) => each.path))")
    for place in [*names, "agents/shop"]:
        page.goto(f"{studio.url}#/{place}")
        check()
    page.goto(f"{studio.url}#/runs/{studio.runs['done']}")
    expect(page.locator(".transcript .entry").first).to_be_visible()
    text, bar = page.locator(".transcript .entry").nth(1).bounding_box(), page.locator(".travel").bounding_box()
    assert text["y"] + text["height"] <= bar["y"] < WIDE["height"]  # the transcript begins above the fold
    check()
    for panel in PANELS[1:]:
        page.locator(f"#tab-{panel}").click()
        expect(page.locator(f'.panel[data-panel="{panel}"] *').first).to_be_visible()
        check(".panel")


def test_chinese(open_page):
    """A browser in Chinese gets Chinese pages, and the choice of another language stays."""
    page = open_page(locale="zh-CN")
    expect(page.locator("h1")).to_have_text("运行")
    page.get_by_label("Language / 语言").select_option("en")
    expect(page.locator("h1")).to_have_text("Runs")
    page.reload()
    expect(page.locator("html")).to_have_attribute("lang", "en")


def test_each_text_has_a_translation():
    """Texts that the modules ask for by name are in zh.js."""
    known = set(re.findall(r'"((?:[^"\\]|\\.)*)": "', (STATIC / "zh.js").read_text(encoding="utf-8")))
    asked = {
        text
        for path in STATIC.rglob("*.js")
        for text in re.findall(r'\bt\("((?:[^"\\]|\\.)*)"', path.read_text(encoding="utf-8"))
    }
    assert asked - known == set()


def test_the_modules_load_nothing_from_elsewhere():
    """No file of ours names another server, and no module has a way to make markup of text."""
    for path in STATIC.rglob("*.*"):
        text = path.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert "://" not in text or path.parent.name == "vendor", path
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|style=", text), path


def test_the_parser_is_that_of_its_package():
    """The one file of others is as npm has it, of the version and with the hash in the Makefile."""
    makefile = (Path(__file__).parents[2] / "Makefile").read_text(encoding="utf-8")
    version, digest = re.findall(r"^MARKDOWN_IT(?:_SHA256)? := (\S+)$", makefile, re.MULTILINE)
    content = (STATIC / "vendor" / "markdown-it.js").read_bytes()
    assert content.startswith(f"/*! markdown-it {version} ".encode())
    assert hashlib.sha256(content).hexdigest() == digest


def test_each_file_is_served():
    """What is in the folder is in the app, so that it is in an installed package as well."""
    there = {path.relative_to(STATIC).as_posix() for path in STATIC.rglob("*.*") if path.suffix != ".ts"}
    assert there == set(StudioFiles().files)


def test_the_headers_of_the_files(studio):
    """Each answer has the policy, an unchanged file is not sent again, and nothing else is served."""
    response = httpx.get(f"{studio.url}main.js")
    assert "default-src 'none'" in response.headers["content-security-policy"]
    assert "unsafe" not in response.headers["content-security-policy"]
    assert response.headers["x-content-type-options"] == "nosniff"
    again = httpx.get(f"{studio.url}main.js", headers={"if-none-match": response.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    for path in ("../page_files.py", "%2e%2e/page_files.py", "panels", "nothing.js"):
        assert httpx.get(f"{studio.url}{path}").status_code == 404
    assert httpx.post(f"{studio.url}main.js").status_code == 404
    assert httpx.get(studio.url.replace("/studio/", "/")).headers["location"] == "/studio/"
