"""Write the API reference from the docstrings: a Markdown page for each public module, which is one with `__all__`."""

from __future__ import annotations

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


def resolve(item: griffe.Object | griffe.Alias | None) -> Any:
    """Return an object itself, also for a name that imports or inherits it."""
    return item.final_target if isinstance(item, griffe.Alias) else item


@cache
def load() -> dict[str, dict[str, Any]]:
    """Return the exported objects of the public modules, by the names of the module and of the object."""
    options: Any = {"warn_unknown_params": False, "warn_missing_types": False}  # attrs makes parameters of fields
    root = griffe.load("agentfsm", docstring_parser="google", docstring_options=options, search_paths=[ROOT])
    modules = [each for each in (root, *root.modules.values()) if each.exports]
    return {each.path: {str(name): resolve(each[str(name)]) for name in each.exports or ()} for each in modules}


def summarise(item: Any) -> str:
    """Return the first paragraph of a docstring as one line."""
    return " ".join(item.docstring.value.split("\n\n")[0].split()) if item.docstring else ""


def list_members(kind: griffe.Class) -> list[Any]:
    """Return the public fields and methods of a class, with those that it inherits from private classes."""
    exported = {each.path for objects in load().values() for each in objects.values()}
    members = [resolve(each) for each in kind.all_members.values() if not each.name.startswith("_")]
    return [
        each
        for each in members
        if (each.is_function or each.is_attribute)
        and (each.docstring or "class-attribute" in each.labels)  # the rest is set in `__init__`, without a docstring
        and (each.parent is kind or (each.docstring and each.parent.path not in exported))
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
    shown = [fill(line, 100, subsequent_indent="    ", break_long_words=False) for line in lines]
    return "\n".join(["```python", *shown, "```"])


def render(name: str, item: Any, level: str = "##") -> Iterator[str]:
    """Yield the heading, signature, docstring, fields and methods of an object."""
    yield f"{level} `{name}`"
    if isinstance(item, griffe.Function):
        yield render_signature(item, name)
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
        yield "\n".join(map(render_field, fields))
        for each in list_members(item):
            if each.is_function:
                yield from render(each.name, each, "###")


def write(folder: Path) -> None:
    """Write the pages and an index."""
    folder.mkdir(parents=True, exist_ok=True)
    index = ["# API reference"]
    for path, objects in load().items():
        index.append(f"## [{path}]({path}.md)")
        index.append("\n".join(f"- `{name}`: {summarise(item)}" for name, item in objects.items()))
        parts = [f"# {path}", *[part for name, item in objects.items() for part in render(name, item)]]
        (folder / f"{path}.md").write_text("\n\n".join(filter(None, parts)) + "\n", encoding="utf-8")
    (folder / "index.md").write_text("\n\n".join(index) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
