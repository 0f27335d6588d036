"""`make pictures`: take the pictures of docs/studio.md again, and with FOLDER=... those of every page, to look at.

Every page is taken in light, dark and on a phone, of a store without runs and of one with a run in each status.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.support.browser import open_browser
from tests.support.port_servers import free_port
from tests.support.studio_server import AGENTS, TARGETS, StudioServer, decide, serving

DOCS = Path(__file__).parents[1] / "docs"
THEMES = {
    "light": {"color_scheme": "light", "viewport": {"width": 1440, "height": 900}},
    "dark": {"color_scheme": "dark", "viewport": {"width": 1440, "height": 900}},
    "phone": {"color_scheme": "light", "viewport": {"width": 390, "height": 844}},
}
FIND_PAGES = "import('./pages/index.js').then((all) => all.PAGES.map((each) => each.path))"


@contextmanager
def served():
    """Serve the agents of the studio's tests, on a store without runs."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "agents.py").write_text(AGENTS.read_text(encoding="utf-8"), encoding="utf-8")
        (folder / ".agentfsm").mkdir(mode=0o700)
        with serving(folder, "serve", *TARGETS, "--studio", "--http", f"127.0.0.1:{free_port()}") as (_process, url):
            yield StudioServer(url, folder, {})


def start_runs(studio):
    """Start a run for each status."""
    runs = studio.runs
    runs["question"] = studio.start("clerk", "Refund order 1841")
    runs["many"] = studio.start("payroll", "Pay the wages of November")
    runs["plan"] = studio.start("planner", "Compare invoice 18 and 19")
    runs["waiting"] = studio.start("shop", "Pay what is due")
    runs["done"] = studio.start("shop", "Pay invoice 17, then tell me", session="invoices of ann")
    decide(studio, runs["done"], "approve")
    runs["nested"] = studio.start("desk", "What is paid, and what is due?")
    runs["failed"] = studio.start("shop", "Pay invoice 16")
    studio.request("POST", f"/v1/runs/{runs['failed']}/cancel", json={"message": "it is paid already"})
    runs["running"] = studio.start("courier", "Bring the book", wait_s=0)


def open_call(page):
    """Open the run of the sub-agent in the trace."""
    page.get_by_role("treeitem", name="accountant").click()
    page.keyboard.press("ArrowRight")
    page.locator(".trace .row", has_text="search").wait_for()


def take(browser, studio, address, path, *, full_page=False, act=None, **options):
    """Open an address, and write its picture once it is quiet, and after an act on it."""
    context = browser.new_context(locale="en-GB", **options)
    page = context.new_page()
    page.goto(f"{studio.url}#/{address}")
    page.wait_for_selector("main h1")
    page.wait_for_timeout(1_000)  # what it reads after its first drawing
    if act is not None:
        act(page)
    page.screenshot(path=path, full_page=full_page)
    context.close()


def take_every_page(browser, studio, folder):
    """Write the picture of every page and of every run, in each theme."""
    folder.mkdir(parents=True, exist_ok=True)
    page = browser.new_page()
    page.goto(studio.url)
    places = {name: name for name in [*page.evaluate(FIND_PAGES), "agents/shop"]}
    places |= {f"run-{name}": f"runs/{run_id}" for name, run_id in studio.runs.items()}
    page.close()
    for theme, options in THEMES.items():
        for name, address in places.items():
            path = folder / f"{theme}-{name.replace('/', '-')}.png"
            take(browser, studio, address, path, full_page=theme == "phone", **options)


def main(folder=""):
    """Take the pictures."""
    for browser in open_browser():
        with served() as studio:
            if folder:
                take_every_page(browser, studio, Path(folder) / "empty")
            start_runs(studio)
            run, size = f"runs/{studio.runs['waiting']}", {"viewport": {"width": 1280, "height": 860}}
            take(browser, studio, run, DOCS / "studio-run.png", color_scheme="light", **size)
            nested = f"runs/{studio.runs['nested']}?panel=trace"
            take(browser, studio, nested, DOCS / "studio-trace.png", act=open_call, color_scheme="dark", **size)
            if folder:
                take_every_page(browser, studio, Path(folder) / "runs")
            (studio.folder / "go.txt").touch()  # the courier comes to its end


if __name__ == "__main__":
    main(*sys.argv[1:])
