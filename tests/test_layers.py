"""The layers: imports point down the table of the architecture, and each vendor library is imported by one file."""

import ast
import re
import sys
from functools import cache
from pathlib import Path

import pytest

import agentfsm

ROOT = Path(agentfsm.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
TESTS = Path(__file__).parent

CORE = {"core"}
HELPERS = {"_concurrency", "_http", "_markup", "_plugins", "_public_network", "_shared_files", "limiter", "web"}
PORTS = CORE | {"ports"}
TOKENS = PORTS | HELPERS | {"tokens"}
STREAMING = CORE | HELPERS | {"streaming"}
TOOLS = TOKENS | STREAMING | {"tools"}
ENGINE = TOOLS | {"engine"}
ADAPTERS = {"models", "stores"}
FAMILIES = {"context", "guards", "openapi", "planning", "prompts", "reflection", "sandbox", "telemetry"}
KEEPERS = {"memory"}
FRONT = {"_runnable_agent", "_validation", "agent", "cli", "decisions", "mcp", "runs", "serve", "studio", "subagent"}
FRONT |= {
    "_admission",
    "_deltas",
    "costs",
    "_run_status",
    "__init__",
    "__main__",
    "engines",
    "learner",
    "evals",
    "flow",
    "patterns",
    "releases",
    "readiness",
    "schedules",
    "seals",
    "testing",
    "worker",
}

# Part of the package -> the parts that it may import, also inside functions and under TYPE_CHECKING.
MAY_IMPORT = (
    {"core": CORE, "ports": PORTS, "tokens": TOKENS, "streaming": STREAMING, "tools": TOOLS, "engine": ENGINE}
    | dict.fromkeys(HELPERS, CORE | HELPERS)
    | {adapter: TOKENS | {adapter} for adapter in ADAPTERS}
    | {family: ENGINE | {family} for family in FAMILIES}
    | {keeper: ENGINE | ADAPTERS | {keeper} for keeper in KEEPERS}
    | dict.fromkeys(FRONT, ENGINE | ADAPTERS | FAMILIES | KEEPERS | FRONT)
)

# Folders whose files the architecture page lists, from the ground floor up. What lies beside `tools/schema`
# in `tools` may import it, and likewise for the others; `test_circles` sees to the order within each folder.
ROOMS = ("ports", "streaming", "tools/schema", "tools", "tools/queue", "engine/execution", "engine/model_calls")
ROOMS += ("engine/tool_calls", "engine")

# Library -> the one file that imports it, or the one folder where that is an adapter of its own, or the files that do.
VENDORS = {
    "anthropic": "models/anthropic/model.py",
    "apsw": "memory/vector_file.py",
    "cattrs": "core/codec.py",
    "cronsim": "schedules/cron_times.py",
    "dbos": "engines/",
    "genai_prices": "models/prices.py",
    "google": "models/gemini/",
    "inspect_ai": "evals/inspect_solver.py",
    "jsonschema_rs": "tools/schema/validator.py",
    "linkify_it": "_markup.py",
    "markdown_it": "_markup.py",
    "mcp": "mcp/",
    "openai": "models/openai/",
    "opentelemetry": "telemetry/",
    "psycopg": "stores/postgres/connection.py",
    "redis": "stores/redis/server.py",
    "prompt_toolkit": "cli/line_editor.py",
    "rich": "cli/render/",
    "sqlalchemy": "engines/executor_locks.py",
    "selectolax": "_markup.py",
    "shtab": "cli/commands/shell_completion.py",
    "sqlite3": "stores/sqlite/file.py",
    "sqlite_vec": "memory/vector_file.py",
    "starlette": "serve/",
    "structlog": "streaming/log.py",
    "tinycss2": "_markup.py",
    "tiktoken": "tokens/tiktoken_counter.py",
    "trio": (
        "streaming/detached_task.py",
        "testing/clock.py",
    ),  # which anyio does not bring: its system tasks and clock
    "uvicorn": "web/",
    "yaml": ("evals/suite_files.py", "mcp/trust/host_documents.py", "openapi/document.py"),
}


def imports_of(source, package=()):
    """Return the modules that the source imports: statements anywhere, and `import_module("...")` with a literal."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                found |= {name.name for name in names}
            case ast.ImportFrom(module=module, names=names, level=level):
                base = [*package[: len(package) - level + 1], *([module] if module else [])] if level else [module]
                found |= {".".join([*base, name.name]) for name in names}
            case ast.Call(
                func=ast.Name(id=called) | ast.Attribute(attr=called), args=[ast.Constant(value=str(module)), *_]
            ):
                found |= {module} if called in {"import_module", "__import__"} else set()
    return found


def part_of(path):
    """Return the part of the package that a file, given below the package's folder, belongs to."""
    return path.parts[0].removesuffix(".py")


@cache
def imports_in(path):
    return imports_of(path.read_text(encoding="utf-8"), ("agentfsm", *path.relative_to(ROOT).parts[:-1]))


def own_parts(modules):
    """Return the parts of agentfsm that the modules belong to; a name out of the package itself is its front."""
    inside = {module.split(".")[1] for module in modules if module.startswith("agentfsm.")}
    return {name if name in MAY_IMPORT else "__init__" for name in inside}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_imports_point_down(path):
    """A file imports only from its own part of the package or from those below it."""
    part = part_of(path.relative_to(ROOT))
    assert part in MAY_IMPORT, "a new part: give it its place in the table above"
    assert own_parts(imports_in(path)) <= MAY_IMPORT[part]


def room_of(module):
    """Return the room that a module of agentfsm stands in, or None for one outside of all rooms."""
    _, *names = module.split(".")
    return next((room for room in ("/".join(names[:2]), names[0]) if room in ROOMS), None)


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_rest_on_those_below(room):
    """A room imports only from itself and from those below it."""
    below = {None, *ROOMS[: ROOMS.index(room) + 1]}
    paths = sorted((ROOT / room).glob("*.py"))
    assert paths
    for path in paths:
        inside = {room_of(module) for module in imports_in(path) if module.startswith("agentfsm.")}
        assert inside <= below, path.name


def names_below(folder):
    """Return the modules and packages of a folder, as the architecture page names them."""
    return {path.stem for path in folder.iterdir() if path.suffix in {"", ".py"} and not path.stem.startswith("__")}


def test_the_architecture_page_lists_what_there_is():
    """The rows of the layers, the files of the core, and the rooms with their files: all, and no more."""
    page = (ROOT.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line.startswith("|")]
    layers = {name.removesuffix(".py").rstrip("/") for row in rows[:13] for name in re.findall(r"`([^`]+)`", row[1])}
    assert layers == names_below(ROOT)
    core = next(row[2] for row in rows if row[1] == "`core/`")
    assert set(core.partition(".")[0].split(", ")) == names_below(ROOT / "core")
    for room in ROOMS:
        files = next(row[1] for row in rows if row[0] == f"`{room}/`")
        others = {other.removeprefix(f"{room}/") for other in ROOMS}
        assert set(re.findall(r"`([^`]+)`", files)) == names_below(ROOT / room) - others, room


@pytest.mark.parametrize("vendor", VENDORS)
def test_one_file_per_vendor(vendor):
    """Each vendor library is imported by exactly one file, so that it can be left out or replaced there."""
    tops = {path: {module.partition(".")[0] for module in imports_in(path)} for path in FILES}
    importers = [path.relative_to(ROOT).as_posix() for path in FILES if vendor in tops[path]]
    home = VENDORS[vendor]
    if isinstance(home, tuple):
        assert tuple(sorted(importers)) == home
    elif home.endswith("/"):
        assert importers
        assert all(importer.startswith(home) for importer in importers)
    else:
        assert importers == [home]


def test_the_core_needs_nothing():
    """The core imports the standard library and attrs, and its codec cattrs: no event loop, no I/O, no vendor."""
    allowed = set(sys.stdlib_module_names) - {"asyncio", "socket", "sqlite3", "subprocess", "threading"}
    allowed |= {"typing_extensions"}  # of the standard library's next versions
    for path in sorted((ROOT / "core").glob("*.py")):
        tops = {module.partition(".")[0] for module in imports_in(path)}
        codec = {"cattrs"} if path.name == "codec.py" else set()
        assert tops <= allowed | {"agentfsm", "attrs"} | codec, path.name


def test_one_process_can_load_all_tests():
    """No two files of tests have one name: pytest imports them by it, and `make soak` runs all in one process."""
    special = {"conftest.py", "__init__.py", "__main__.py"}
    names = [path.name for path in TESTS.rglob("*.py") if path.name not in special]
    assert sorted(names) == sorted(set(names))


def test_no_test_file_imports_another():
    """What two of them need stands in `tests/support`, which imports no test file either; so does no conftest."""
    wrong = {
        (path.relative_to(TESTS).as_posix(), module)
        for path in TESTS.rglob("*.py")
        for module in imports_of(path.read_text(encoding="utf-8"))
        if any(part.startswith("test_") or part == "conftest" for part in module.split("."))
    }
    assert not wrong


def test_the_page_about_shared_helpers_names_each():
    """A helper that nobody finds is written again."""
    folder = Path(__file__).parent / "support"
    there_are = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    named = re.findall(r"`(\w+)`", (folder / "README.md").read_text(encoding="utf-8"))
    assert {re.sub(r"\d+$", "", name) for name in there_are} == {re.sub(r"\d+$", "", name) for name in named}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("def f():\n    from agentfsm.tools import queue", {"agentfsm.tools.queue"}),
        ("if TYPE_CHECKING:\n    import agentfsm.models as m", {"agentfsm.models"}),
        ("from . import run\nfrom ..streaming import log", {"agentfsm.core.run", "agentfsm.streaming.log"}),
        ("x = importlib.import_module('trio.testing').y", {"trio.testing"}),
        ("from agentfsm import Agent", {"agentfsm.Agent"}),
        ("import_module(name)", set()),
    ],
)
def test_the_walk_sees_every_kind_of_import(source, found):
    """Imports inside functions, for type checkers only, relative ones and late ones all count."""
    assert imports_of(source, ("agentfsm", "core")) == found
