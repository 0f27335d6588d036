"""One browser, and one server of agents whose runs are in different states, for all tests of the studio."""

import json

import anyio
import pytest

from agentfsm.cli import main
from tests.support.browser import open_browser
from tests.support.port_servers import free_port
from tests.support.studio_server import AGENTS, TARGETS, StudioServer, decide, in_thread, serving, write_journals


@pytest.fixture(scope="package")
def browser():
    """Return a browser; what a page is expected to show is waited for as long as a busy machine may take."""
    for made in open_browser():
        expect = pytest.importorskip("playwright.sync_api").expect
        expect.set_options(timeout=60_000)
        yield made


@pytest.fixture(scope="package")
def studio(tmp_path_factory):
    """Serve the agents, with a run for each thing that a page shows."""
    folder = tmp_path_factory.mktemp("studio")
    (folder / "agents.py").write_text(AGENTS.read_text(encoding="utf-8"), encoding="utf-8")
    (folder / ".agentfsm").mkdir(mode=0o700)
    in_thread(anyio.run, write_journals, folder / ".agentfsm" / "runs.db")
    with serving(folder, "serve", *TARGETS, "--studio", "--http", f"127.0.0.1:{free_port()}") as (_process, url):
        made = StudioServer(url, folder, {name: name for name in ("hostile", "long", "tiered", "repeated")})
        made.runs["waiting"] = made.start("shop")
        made.runs["question"] = made.start("clerk")
        made.runs["planned"] = made.start("planner")
        made.runs["nested"] = made.start("desk")
        done = made.runs["done"] = made.start("shop", "Pay invoice 17,\nthen tell me", session="invoices of ann")
        decide(made, done, "approve")
        plan = made.request("GET", f"/v1/runs/{made.runs['planned']}")
        decide(made, plan["id"], "approve")
        yield made


WINDOW = {"viewport": {"width": 1380, "height": 900}, "locale": "en-GB"}


@pytest.fixture(scope="package")
def profile(browser):
    """Return the profile that most pages share, so that the files of the studio are read once."""
    return browser.new_context(**WINDOW)


@pytest.fixture
def open_page(browser, profile, studio):
    """Return a function that opens a page of the studio. At the end none has had an error or asked another server."""
    complaints, opened = [], []

    def open_one(place="#/runs", url=studio.url, **options):
        context = browser.new_context(**WINDOW | options) if options or url != studio.url else profile
        page = context.new_page()
        opened.append(page if context is profile else context)
        origin = url.partition("/studio/")[0]
        page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("dialog", lambda dialog: complaints.append(dialog.message))
        page.on("request", lambda sent: complaints.append(sent.url) if not sent.url.startswith(origin) else None)
        page.complaints = complaints
        page.goto(f"{url}{place}" if "#" not in url else url)
        return page

    yield open_one
    for each in opened:
        each.close()
    assert complaints == []


@pytest.fixture
def show(studio, capsys):
    """Return a function that runs a command of `agentfsm` with `--json`, and returns the document."""

    def run(*words):
        capsys.readouterr()
        store = studio.folder / ".agentfsm" / "runs.db"
        assert in_thread(main, [*words, "--json", "--store", str(store)]) == 0
        return json.loads(capsys.readouterr().out)

    return run
