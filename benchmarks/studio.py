"""`python -m benchmarks studio [PLACE [RUNS]]`: how long a reader of the studio waits for what he has opened.

PLACE is a SQLite file, which is filled as by `lists`; without one, a new file. Then the times are printed from the
opening of the address, in a browser that has nothing of the studio yet, to the frame that shows the first row of the
list of RUNS runs, 100,000 without a number, and the first entry of the transcript, and the first row of the trace, of a
run with 5,000 events. It needs the test group, and Chromium.
"""

from __future__ import annotations

import asyncio
import statistics
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Final

from agentfsm.core.header import Header
from agentfsm.core.messages import TextPart
from agentfsm.stores import SQLiteStore
from benchmarks.lists import RUNS, fill

if TYPE_CHECKING:
    from playwright.sync_api import Browser

EVENTS: Final = 5_000
REPEATS: Final = 7
RUN: Final = "long"
# Waits for an element of the page, then for the frame that shows it. The clock begins with the navigation.
PAINTED: Final = """selector => new Promise(resolve => {
    const look = () => document.querySelector(selector)
        ? requestAnimationFrame(() => setTimeout(() => resolve(performance.now())))
        : requestAnimationFrame(look);
    look();
})"""


def write_stores(place: Path, runs: int, long: Path) -> None:
    """Fill the store of the list, and write the one of the long run."""
    from tests.support.studio_server import long_journal  # noqa: PLC0415  only this needs it

    async def write() -> None:
        store = SQLiteStore(place)
        await fill(store, runs, await store.count(limit=runs))
        await store.aclose()
        store = SQLiteStore(long)
        header = Header(id=RUN, prompt=(TextPart(text="Read all pages"),), created_at=1_000.0, agent="reader")
        _, lease = await store.create(header, events=list(islice(long_journal(), EVENTS)))
        await store.release(lease).wait()
        await store.aclose()

    asyncio.run(write())


def measure(browser: Browser, store: Path, place: str, selector: str) -> list[float]:
    """Return the milliseconds of each repetition."""
    from tests.support.port_servers import free_port  # noqa: PLC0415
    from tests.support.studio_server import serving  # noqa: PLC0415

    found = []
    words = ("studio", str(store), "--no-browser", "--http", f"127.0.0.1:{free_port()}")
    with serving(store.parent, *words) as (_process, url):
        address, _, key = url.partition("#key=")
        for _ in range(REPEATS):
            context = browser.new_context(viewport={"width": 1440, "height": 900})
            context.add_init_script(f"localStorage.setItem('agentfsm.key', {key!r})")
            page = context.new_page()
            page.goto(f"{address}#/{place}", wait_until="commit")
            found.append(page.evaluate(PAINTED, selector))
            context.close()
    return found


def main(place: str = "", runs: str = str(RUNS)) -> int:
    """Measure the studio."""
    from tests.support.browser import open_browser  # noqa: PLC0415

    with TemporaryDirectory() as folder:
        store = Path(place).absolute() if place else Path(folder) / "runs.db"
        long = Path(folder) / "long" / "runs.db"
        long.parent.mkdir()
        write_stores(store, int(runs), long)
        for browser in open_browser():
            for name, which, address, selector in (
                (f"first rows of {int(runs):,} runs", store, "runs", "tr[data-run]"),
                (f"transcript of a run with {EVENTS:,} events", long, f"runs/{RUN}", ".transcript .entry"),
                (f"trace of a run with {EVENTS:,} events", long, f"runs/{RUN}?panel=trace", ".trace .row"),
            ):
                times = measure(browser, which, address, selector)
                print(f"{name:<44}{statistics.median(times):>8.0f} ms   {min(times):.0f} to {max(times):.0f}")
    return 0
