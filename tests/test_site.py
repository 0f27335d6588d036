"""The documentation site: `make site` builds it without a warning, and no link of it leads nowhere."""

import importlib.util
import os
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def site_program():
    """Return the program that builds the site, which is a script."""
    spec = importlib.util.spec_from_file_location("site_program", ROOT / "docs/build_site.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def site(site_program, tmp_path_factory):
    """Return the folder of the built site."""
    return site_program.build(tmp_path_factory.mktemp("site"))


class Page(HTMLParser):
    """The ids and the links of a page, and what its browser loads."""

    def __init__(self, path):
        super().__init__()
        self.path, self.ids, self.links, self.loaded = path, set(), [], []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        """Note an element."""
        for name, value in attrs:
            if name == "id":
                self.ids.add(value)
            elif name in {"href", "src"} and value:
                (self.links if tag == "a" else self.loaded).append(value)


def test_no_link_leads_nowhere(site):
    """Links to pages, to elements in pages and to pictures; and no page loads anything from another host."""
    pages = {path: Page(path) for path in sorted(site.rglob("*.html")) if path.name != "404.html"}
    assert len(pages) > 60
    broken = []
    for path, page in pages.items():
        assert [each for each in page.loaded if urlsplit(each).netloc] == []
        for link in page.links + page.loaded:
            parts = urlsplit(link)
            target = Path(os.path.normpath(path.parent / unquote(parts.path))) if parts.path else path
            found = target.is_file() and (not parts.fragment or unquote(parts.fragment) in pages[target].ids)
            if not (parts.scheme or found):
                broken.append(f"{path.relative_to(site)}: {link}")
    assert broken == []


def test_each_page_is_in_the_navigation_and_lies_there_as_markdown(site):
    """The program refuses a page that the navigation lacks; llms.txt lists all, and llms-full.txt has their text."""
    index, whole = ((site / name).read_text(encoding="utf-8") for name in ("llms.txt", "llms-full.txt"))
    docs = [path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")]
    for page in [*docs, Path("reference/agentfsm.stores.md"), Path("examples/crash.md")]:
        assert f"]({page})" in index
        assert (site / page).read_text(encoding="utf-8") in whole
        assert (site / page).with_suffix(".html").is_file()


def test_the_build_fails(site_program, tmp_path):
    """For a page that the navigation lacks, a link out of the site, and an anchor that does not exist."""
    source = tmp_path / "site-source"
    source.mkdir()
    (source / "index.md").write_text("# Home\n\n[tools](#nowhere)\n")
    with pytest.raises(ValueError, match=r"disagree on index\.md, other\.md: list each page once"):
        site_program.complete_nav([{"Home": "other.md"}], source, [])
    page = ROOT / "docs" / "tools.md"
    with pytest.raises(ValueError, match=r"docs/tools\.md: the link to missing\.md leads"):
        site_program.move_links("See [this](missing.md).", page, {page: Path("tools.md")})
    with pytest.raises(subprocess.CalledProcessError):
        site_program.generate({"site_name": "x", "docs_dir": "site-source", "nav": [{"Home": "index.md"}]}, tmp_path)
