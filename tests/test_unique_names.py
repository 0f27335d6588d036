"""Names in the package: one class and one module for each name, and functions that say what they do."""

import ast
from collections import defaultdict
from pathlib import Path

import agentfsm

ROOT = Path(agentfsm.__file__).parent

# Modules that share a name, and why: the folder tells them apart.
SHARED_MODULES = {
    "errors": "the package's own errors; those of MCP servers need the SDK's types",
    "model": "the port; the adapter of Anthropic",
    "pending": "the values; how the command line shows them",
    "server": "the Redis server that a store speaks to; the local server of the testing kit",
    "store": "the port; one for each database, in the folder of its name",
    "wire": "helpers of all wires; Anthropic's wire",
}


def definitions(kind):
    """Return where each definition of that kind stands, by name."""
    found = defaultdict(list)
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, kind):
                found[node.name].append(path.relative_to(ROOT).as_posix())
    return found


def test_a_class_name_is_used_once():
    """No two classes of the package have one name."""
    assert {name: paths for name, paths in definitions(ast.ClassDef).items() if len(paths) > 1} == {}


def test_a_module_name_is_used_once():
    """No two modules of the package have one name, except those that the list above gives a reason for."""
    found = defaultdict(list)
    for path in sorted(ROOT.rglob("*.py")):
        if not path.stem.startswith("__"):
            found[path.stem].append(path.relative_to(ROOT).as_posix())
    assert {name for name, paths in found.items() if len(paths) > 1} == set(SHARED_MODULES)


def test_functions_say_what_they_do():
    """No function is named after its result alone, as `tokens_of` would be."""
    functions = definitions(ast.FunctionDef | ast.AsyncFunctionDef)
    # A rule reads as a sentence: two of three labels may come together. The other name is part of the interface.
    assert not [name for name in functions if name.endswith("_of") and name not in {"two_of", "trace_of"}]
