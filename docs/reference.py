"""Write the API reference from the docstrings as Markdown.

There is a page for each public module, which is one with `__all__`, and for each subject of the package's own names.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from textwrap import fill
from typing import Any

import griffe

ROOT = Path(__file__).parent.parent
MAX_DEFAULT_CHARS = 60
"""Maximum characters of a default value; a longer one is left out."""
COLUMNS = 80
"""Characters of a line in a code block that a page of the site shows without scrolling."""
SUBJECTS = {
    "Agent": ("agents",),
    "Tools": ("tools", "agents.subagent", "core.labels", "_lib.limiter", "ask_user", "note", "wait"),
    "Runs": ("agents.runs", "core", "engine", "journal", "ports.store"),
    "Messages": ("core.messages",),
    "Streaming": ("streaming",),
    "Limits and costs": ("core.limits", "core.settings", "core.usage", "core.run_facts"),
    "The machine": ("core.machine",),
    "Errors": ("core.errors", "core.run.RunError"),
}
"""Pages of the names of `agentfsm`, by where these are defined; the longest place counts."""


def resolve(item: griffe.Object | griffe.Alias | None) -> Any:
    """Return an object itself, also for a name that imports or inherits it."""
    return item.final_target if isinstance(item, griffe.Alias) else item


@cache
def load_modules() -> dict[str, Any]:
    """Return the public modules by their names."""
    options: Any = {"warn_unknown_params": False, "warn_missing_types": False}  # attrs makes parameters of fields
    root: Any = griffe.load("agentfsm", docstring_parser="google", docstring_options=options, search_paths=[ROOT])
    return {each.path: each for each in (root, *root.modules.values()) if each.exports}


@cache
def load() -> dict[str, dict[str, Any]]:
    """Return the exported objects of the public modules, by the names of the module and of the object."""
    modules = load_modules().items()
    return {path: {str(name): resolve(each[str(name)]) for name in each.exports} for path, each in modules}


@cache
def list_pages() -> dict[str, dict[str, Any]]:
    """Return the objects of each page by the title of the page: the subjects of `agentfsm`, then the other modules."""
    modules = dict(sorted(load().items()))
    pages: dict[str, dict[str, Any]] = {subject: {} for subject in SUBJECTS}
    places = {f"agentfsm.{place}": subject for subject, each in SUBJECTS.items() for place in each}
    for name, item in modules.pop("agentfsm").items():
        place = max((each for each in places if f"{item.path}.".startswith(f"{each}.")), key=len)
        pages[places[place]][name] = item
    return pages | modules


def name_file(title: str) -> str:
    """Return the name of the file of a page."""
    return f"{title.lower().replace(' ', '-')}.md"


def summarise(item: Any) -> str:
    """Return the first paragraph of a docstring as one line."""
    return " ".join(item.docstring.value.split("\n\n")[0].split()) if item.docstring else ""


def list_members(kind: griffe.Class) -> list[Any]:
    """Return the public fields and methods of a class, with those that it inherits from private classes."""
    exported = {each.path for objects in load().values() for each in objects.values()}
    bases = [base for base in kind.mro() if base.path in exported]
    shown_there = {resolve(each).path for base in bases for each in base.all_members.values()}
    members = [resolve(each) for each in kind.all_members.values() if not each.name.startswith("_")]
    return [
        each
        for each in members
        if (each.is_function or each.is_attribute)
        and (each.docstring or "class-attribute" in each.labels)  # the rest is set in `__init__`, without a docstring
        and (each.parent is kind or (each.docstring and each.path not in shown_there))
    ]


def render_docstring(item: Any, *hidden: str) -> Iterator[str]:
    """Yield the sections of a docstring, except those of the hidden kinds."""
    for section in item.docstring.parsed if item.docstring else ():
        kind = section.kind.value
        if kind == "text":
            yield section.value
        elif kind not in hidden:
            names = [getattr(each, "name", "") or each.annotation for each in section.value]
            texts = [" ".join(each.description.split()) for each in section.value]
            rows = [f"- `{name}`: {text}" for name, text in zip(names, texts, strict=True)]
            yield f"{kind.capitalize()}:\n\n" + "\n".join(rows)


def render_field(field: griffe.Attribute) -> str:
    """Return the name, type, default and docstring of a field as an item of a list."""
    value = "" if field.value is None or "class-attribute" not in field.labels else str(field.value)
    if isinstance(field.value, griffe.ExprCall) and str(field.value.function) == "attrs.field":
        given = {each.name: str(each.value) for each in field.value.arguments if isinstance(each, griffe.ExprKeyword)}
        value = f"{given['factory']}()" if "factory" in given else given.get("default", "")
    default = f" = {value}" if value and len(value) <= MAX_DEFAULT_CHARS and "lambda" not in value else ""
    text = f": {' '.join(field.docstring.value.split())}" if field.docstring else ""
    return f"- `{field.name}{f': {field.annotation}' if field.annotation else ''}{default}`{text}"


def render_signature(function: griffe.Function, name: str) -> str:
    """Return the signature of a function, or of each overload, as a code block."""
    start = f"{'async ' if 'async' in function.labels else ''}def "
    lines = [start + each.signature(name=name) for each in function.overloads or [function]]
    lines = [line.replace("(self, ", "(").replace("(self)", "()") for line in lines]
    # A union stays on one line.
    lines = [line.replace(" | ", "\N{NO-BREAK SPACE}|\N{NO-BREAK SPACE}") for line in lines]
    shown = [fill(line, COLUMNS, subsequent_indent="    ", break_long_words=False) for line in lines]
    shown = [line.replace("\N{NO-BREAK SPACE}", " ") for line in shown]
    return "\n".join(["```python", *shown, "```"])


def render(name: str, item: Any, level: str = "##") -> Iterator[str]:
    """Yield the heading, signature, docstring, fields and methods of an object."""
    yield f"{level} `{name}` {{#{name}}}"
    if isinstance(item, griffe.Function):
        yield render_signature(item, name.rpartition(".")[2])
        yield from render_docstring(item)
    elif not isinstance(item, griffe.Class):
        yield render_field(item)
    else:
        if item.bases:
            yield f"Bases: {', '.join(f'`{base}`' for base in item.bases)}"
        if isinstance(init := resolve(item.all_members.get("__init__")), griffe.Function):
            yield render_signature(init, name).replace("def ", "").replace(" -> None", "")
        fields = [each for each in list_members(item) if each.is_attribute]
        is_declared = any(each.annotation for each in fields)
        yield from render_docstring(item, *(("parameters", "attributes") if is_declared else ()))
        yield "\n".join(["Fields:\n", *map(render_field, fields)]) if fields else ""
        for each in sorted(list_members(item), key=lambda each: each.parent is not item):
            if each.is_function:
                yield from render(f"{name}.{each.name}", each, "###")


def link(text: str, page: str) -> str:
    """Return the text of a page with links from the names of classes, except in headings and code blocks."""
    files = {name: name_file(title) for title, objects in reversed(list_pages().items()) for name in objects}
    files |= dict.fromkeys(list_pages()[page], "")

    def point(name: re.Match[str]) -> str:
        return f"[`{name[1]}`]({files[name[1]]}#{name[1]})" if name[1] in files else name[0]

    parts = re.split(r"(^```.*?^```$|^#[^\n]*$)", text, flags=re.DOTALL | re.MULTILINE)
    return "".join(part if at % 2 else re.sub(r"(?<!\[)`([A-Z]\w+)`", point, part) for at, part in enumerate(parts))


def write(folder: Path) -> list[dict[str, str]]:
    """Write the pages and an index, and return the pages in their order, each as its title and its file."""
    folder.mkdir(parents=True, exist_ok=True)
    index = ["# API reference", "The names of `agentfsm` by subject, and those of its public modules."]
    for title, objects in list_pages().items():
        file, modules = name_file(title), load_modules()
        intro = summarise(modules[title]) if title in modules else "These names are imported from `agentfsm`."
        names = ", ".join(f"[`{name}`]({file}#{name})" for name in objects)
        index += [f"## [{title}]({file})", intro if title in modules else "", names]
        names = "\n".join(
            f"- [`{name}`](#{name}): {summarise(item)}" for name, item in objects.items() if objects.keys() > {name}
        )
        parts = [f"# {title}", intro, names, *[part for name, item in objects.items() for part in render(name, item)]]
        (folder / file).write_text(link("\n\n".join(filter(None, parts)), title) + "\n", encoding="utf-8")
    (folder / "index.md").write_text("\n\n".join(filter(None, index)) + "\n", encoding="utf-8")
    return [{title: name_file(title)} for title in list_pages()]


if __name__ == "__main__":
    write(Path(sys.argv[1]))
