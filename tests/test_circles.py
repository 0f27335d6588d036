"""No circles among imports: neither files of the package nor folders import each other, at any level."""

import ast
from functools import cache
from pathlib import Path

import pytest

import agentfsm

ROOT = Path(agentfsm.__file__).parent


def module_name(path):
    """Return the name that a file is imported by."""
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(ROOT.rglob("*.py"))}


def resolve_from(node, package, modules):
    """Return the modules that a `from` statement names: `from a import b` is `a.b` where that is a module."""
    base = node.module or ""
    if node.level:
        above = package.split(".")
        base = ".".join([*above[: len(above) - node.level + 1], *([node.module] if node.module else [])])
    names = {f"{base}.{each.name}" for each in node.names}
    return (names & modules) | ({base} if names - modules else set())


def imports_of(source, package, modules):
    """Return the modules among `modules` that a source imports.

    Statements inside functions and under TYPE_CHECKING count, and so does `import_module("...")` with a literal.
    """
    found = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                found |= {each.name for each in names}
            case ast.ImportFrom():
                found |= resolve_from(node, package, modules)
            case ast.Call(
                func=ast.Name(id="import_module") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(module)), *_],
            ):
                found.add(module)
    return found & modules


def find_circles(graph):
    """Return the strongly connected components of more than one node (Tarjan's algorithm)."""
    index, low, stack, circles = {}, {}, [], []

    def visit(node):
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in graph[node]:
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            start = stack.index(node)
            if len(stack) - start > 1:
                circles.append(sorted(stack[start:]))
            del stack[start:]

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return circles


@cache
def import_graph():
    """Return by module of the package which others it imports."""
    graph = {}
    for name, path in MODULES.items():
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        graph[name] = imports_of(path.read_text(encoding="utf-8"), package, MODULES.keys()) - {name}
    return graph


def test_no_files_import_each_other_in_a_circle():
    """Each file can be read, typed and moved with no more than the files below it."""
    assert find_circles(import_graph()) == []


@pytest.mark.parametrize("package", sorted({name.rpartition(".")[0] for name in MODULES} - {""}))
def test_no_folders_import_each_other_in_a_circle(package):
    """What lies side by side in a folder, files and folders, has an order: imports point one way."""

    def child_of(name):
        return name.removeprefix(f"{package}.").partition(".")[0] if name.startswith(f"{package}.") else None

    graph = {child_of(name): set() for name in MODULES if child_of(name)}
    for name, targets in import_graph().items():
        own = child_of(name)
        if own:
            graph[own] |= {child_of(target) for target in targets} - {own, None}
    assert find_circles(graph) == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import p.a", {"p.a"}),
        ("from p import a", {"p.a"}),
        ("from p import a, name", {"p", "p.a"}),
        ("from p.a import name", {"p.a"}),
        ("from . import a", {"p.a"}),
        ("from .a import name", {"p.a"}),
        ("def f():\n    from p.a import name", {"p.a"}),
        ("if TYPE_CHECKING:\n    from p.a import name", {"p.a"}),
        ("import_module('p.a')", {"p.a"}),
        ("importlib.import_module('p.a')", {"p.a"}),
        ("import_module(name)", set()),
        ("import json", set()),
    ],
)
def test_every_kind_of_import_counts(source, found):
    """Absolute and relative imports, in functions, for type checkers only, and late ones by name."""
    assert imports_of(source, "p", {"p", "p.a"}) == found


@pytest.mark.parametrize(
    ("graph", "circles"),
    [
        ({"a": {"b"}, "b": set()}, []),
        ({"a": {"b"}, "b": {"a"}}, [["a", "b"]]),
        ({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}, [["a", "b", "c"]]),
        ({"a": {"b", "c"}, "b": {"d"}, "c": {"d"}, "d": set()}, []),
        ({"a": {"b"}, "b": {"a", "c"}, "c": {"d"}, "d": {"c"}}, [["c", "d"], ["a", "b"]]),
    ],
)
def test_circles_are_found(graph, circles):
    """A circle is named by its members; a node that two paths lead to is none."""
    assert find_circles(graph) == circles
