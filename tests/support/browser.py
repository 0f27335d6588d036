"""A browser for the tests: Chromium from Debian's packages, driven by Playwright."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from tests.support.database_servers import debian

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Browser, Page

OPTIONS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run")
OPTIONS += ("--disable-background-networking", "--disable-component-update", "--disable-sync")


def open_browser() -> Iterator[Browser]:
    """Yield a browser with a profile of its own.

    Where Chromium is missing and cannot be installed the test is skipped, but fails in CI.
    """
    path = debian("chromium")
    if path is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("there is no browser: `apt-get install chromium`")
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=OPTIONS, headless=True)
        try:
            yield browser
        finally:
            browser.close()


LIGHT = {"resultTypes": ["violations"]}
DARK = LIGHT | {"runOnly": ["color-contrast"]}


def check_access(page: Page, part: str = "body") -> None:
    """Fail if axe-core finds a violation in a part of a page, or bad contrast in the dark theme."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    for scheme, options in (("light", LIGHT), ("dark", DARK)):
        page.emulate_media(color_scheme=scheme)
        found = axe.run(page, context=part, options=options).response["violations"]
        assert not found, (page.url, scheme, [(each["id"], [node["html"] for node in each["nodes"]]) for each in found])
