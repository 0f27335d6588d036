"""The check of a page for people who see or use it in another way."""

from axe_playwright_python.sync_playwright import Axe

LIGHT = {"resultTypes": ["violations"]}
DARK = LIGHT | {"runOnly": ["color-contrast"]}


def check_access(page, part="body"):
    """Fail if axe-core finds a violation in a part of a page, or in the dark theme, whose colours differ, bad contrast."""
    for scheme, options in (("light", LIGHT), ("dark", DARK)):
        page.emulate_media(color_scheme=scheme)
        found = Axe().run(page, context=part, options=options).response["violations"]
        assert not found, (page.url, scheme, [(each["id"], [node["html"] for node in each["nodes"]]) for each in found])
