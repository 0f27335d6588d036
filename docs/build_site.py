"""Build the documentation site: `make site` writes it to build/site.

The pages are those of docs/, with the API reference, the examples and the pages of the root beside them. Each page is
also there as Markdown beside its HTML, and `llms.txt` lists all of them for language models: https://llmstxt.org.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
ROOT_PAGES = (
    "SECURITY_MODEL.md",
    "SECURITY.md",
    "CONTRIBUTING.md",
    "CODE_OF_CONDUCT.md",
    "CHANGELOG.md",
    "agentfsm/SKILL.md",
)
_LINK = re.compile(r"(\]\()([^)\s:#]+)((?:#[^)\s]*)?\))")
_CODE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
Nav = list[Any]


def list_sources() -> dict[Path, Path]:
    """Return the place in the site of each file of the repository that becomes a part of it."""
    kinds = {".md", ".png", ".svg", ".css"}
    pages = {path: path.relative_to(DOCS) for path in sorted(DOCS.rglob("*")) if path.suffix in kinds}
    roots = {ROOT / name: Path(Path(name).name) for name in ROOT_PAGES}
    notebooks = {path: path.relative_to(DOCS).with_suffix(".md") for path in DOCS.rglob("*.ipynb")}
    examples = sorted((ROOT / "examples").rglob("*.py"))
    return pages | roots | notebooks | {path: path.relative_to(ROOT).with_suffix(".md") for path in examples}


def move_links(text: str, path: Path, places: dict[Path, Path]) -> str:
    """Return a page with its links as they are from its place in the site.

    Raises:
        ValueError: when a link leads to a file outside the site.
    """

    def move(link: re.Match[str]) -> str:
        target = Path(os.path.normpath(path.parent / link[2]))
        if target == ROOT / "examples":
            target = ROOT / "examples" / "weather.py"
        if target not in places:
            raise ValueError(f"{path.relative_to(ROOT)}: the link to {link[2]} leads to nothing that the site has")
        return f"{link[1]}{os.path.relpath(places[target], places[path].parent)}{link[3]}"

    parts = iter(_CODE.split(text))
    code = iter(_CODE.findall(text))
    return "".join(_LINK.sub(move, part) + next(code, "") for part in parts)


def render_example(path: Path) -> str:
    """Return an example as a page: its docstring, then its code."""
    code = path.read_text(encoding="utf-8")
    title = code.partition("\n")[0].strip('"')
    return f"# {path.name}\n\n{title}\n\n```python\n{code}```\n"


def render_notebook(path: Path) -> str:
    """Return a notebook as a page: its texts, and its code with what it prints."""
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            text = "".join(output.get("text") or output["data"]["text/plain"]).rstrip()
            parts.append(f"```text\n{text}\n```")
    return "\n\n".join(parts) + "\n"


def write_source(folder: Path) -> Nav:
    """Write the Markdown of all pages, and return those of the API reference for the navigation."""
    places = list_sources()
    for path, place in places.items():
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".py":
            (folder / place).write_text(render_example(path), encoding="utf-8")
        elif path.suffix == ".ipynb":
            (folder / place).write_text(render_notebook(path), encoding="utf-8")
        elif path.suffix == ".md":
            text = path.read_text(encoding="utf-8")
            (folder / place).write_text(move_links(text, path, places), encoding="utf-8")
        else:
            shutil.copyfile(path, folder / place)
    pages: list[dict[str, str]] = runpy.run_path(str(DOCS / "reference.py"))["write"](folder / "reference")
    return ["reference/index.md", *({title: f"reference/{file}"} for each in pages for title, file in each.items())]


def read_title(page: Path) -> str:
    """Return the heading of a page."""
    return next(line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("# "))[2:].strip()


def read_summary(page: Path) -> str:
    """Return the first sentence of a page, without links; empty if the page begins otherwise."""
    found = re.search(r"^# .*\n\n((?:[\w`\[*].*\n)+)", page.read_text(encoding="utf-8"), re.MULTILINE)
    words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", " ".join(found[1].split())) if found else ""
    return ": " + re.split(r"(?<=[.!?])\s", words)[0] if words else ""


def list_pages(nav: Nav) -> Iterator[str]:
    """Yield the pages of a navigation, in their order."""
    for entry in nav:
        for each in entry.values() if isinstance(entry, dict) else (entry,):
            yield from list_pages(each) if isinstance(each, list) else (each,)


def complete_nav(nav: Nav, folder: Path, reference: Nav) -> Nav:
    """Return the navigation with the generated pages.

    Raises:
        ValueError: when a page of docs/ is not in the navigation.
    """
    examples = sorted(str(path.relative_to(folder)) for path in (folder / "examples").rglob("*.md"))
    added = {"API": reference, "Examples": [{Path(name).stem: name} for name in examples]}
    whole = [{name: added.get(name, part) for name, part in each.items()} for each in nav]
    listed = list(list_pages(whole))
    present = {str(path.relative_to(folder)) for path in folder.rglob("*.md")}
    if wrong := sorted(page for page in present.union(listed) if listed.count(page) != (page in present)):
        raise ValueError(f"docs/mkdocs.yml and docs/ disagree on {', '.join(wrong)}: list each page once in `nav`")
    return whole


def write_markdown(nav: Nav, source: Path, site: Path) -> None:
    """Write each page as Markdown beside its HTML, and llms.txt and llms-full.txt."""
    pages = list(list_pages(nav))
    for page in pages:
        shutil.copyfile(source / page, site / page)
    text = [f"# agentfsm\n\n> {yaml.safe_load((DOCS / 'mkdocs.yml').read_text())['site_description']}\n"]
    for section in nav:
        for name, part in section.items():
            names = list_pages(part) if isinstance(part, list) else [part]
            rows = [f"- [{read_title(source / each)}]({each}){read_summary(source / each)}\n" for each in names]
            text.append(f"\n## {name}\n\n" + "".join(rows))
    (site / "llms.txt").write_text("".join(text), encoding="utf-8")
    whole = "\n".join(f"<!-- {page} -->\n\n{(source / page).read_text(encoding='utf-8')}" for page in pages)
    (site / "llms-full.txt").write_text(whole, encoding="utf-8")


def generate(settings: dict[str, Any], folder: Path) -> None:
    """Make HTML of the pages in `site-source`, a part of the folder.

    Raises:
        CalledProcessError: when the generator has a warning, for example of an anchor that does not exist.
    """
    (folder / "mkdocs.yml").write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean", "-f", str(folder / "mkdocs.yml")]
    subprocess.run(command, check=True, cwd=folder)  # noqa: S603  our own Python


def build(folder: Path) -> Path:
    """Build the site in a folder, and return the folder of its pages.

    Raises:
        ValueError: when a link leads out of the site, or a page is not in the navigation.
        CalledProcessError: when the generator has a warning.
    """
    source, site = folder / "site-source", folder / "site"
    for each in (source, site):
        shutil.rmtree(each, ignore_errors=True)
    reference = write_source(source)
    settings = yaml.safe_load((DOCS / "mkdocs.yml").read_text(encoding="utf-8"))
    settings["nav"] = complete_nav(settings["nav"], source, reference)
    generate(settings, folder)
    write_markdown(settings["nav"], source, site)
    return site


if __name__ == "__main__":
    print(build(Path(sys.argv[1]).absolute()) / "index.html")  # noqa: T201  a program
