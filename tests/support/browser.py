"""A browser for the tests: Chromium from Debian's packages, driven by Playwright."""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import TYPE_CHECKING, NoReturn

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Browser

CHROMIUM = "/usr/bin/chromium"
OPTIONS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run")
OPTIONS += ("--disable-background-networking", "--disable-component-update", "--disable-sync")


def ensure_chromium() -> str:
    """Return the path of Chromium; as root it is installed where it is absent.

    Where it cannot be had the test is skipped, but fails in CI.
    """
    if not os.path.exists(CHROMIUM):  # noqa: PTH110
        if shutil.which("apt-get") is None or os.geteuid() != 0:
            _refuse("install Debian's package chromium")
        for words in (["update", "-qq"], ["install", "-y", "-qq", "--no-install-recommends", "chromium"]):
            environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
            done = subprocess.run(["apt-get", *words], env=environment, capture_output=True, text=True, check=False)
            if done.returncode:
                _refuse(f"apt-get {words[0]} failed: {done.stderr[-500:]}")
    return CHROMIUM


def _refuse(why: str) -> NoReturn:
    if os.environ.get("CI"):
        pytest.fail(f"there is no browser: {why}")
    pytest.skip(f"there is no browser: {why}")


def open_browser() -> Iterator[Browser]:
    """Yield a browser with a profile of its own."""
    path = ensure_chromium()
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=OPTIONS, headless=True)
        try:
            yield browser
        finally:
            browser.close()
