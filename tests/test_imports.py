"""What import-linter cannot state: one file per vendor library, a core without I/O, and which rooms there are."""

import ast
import re
import sys
from pathlib import Path

import pytest

import agentfsm
from tests.support.doc_tables import read_table

ROOT = Path(agentfsm.__file__).parent
TESTS = Path(__file__).parent

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
    "linkify_it": "_lib/markup.py",
    "markdown_it": "_lib/markup.py",
    "mcp": "mcp/",
    "openai": "models/openai/",
    "opentelemetry": "telemetry/",
    "psycopg": "stores/postgres/connection.py",
    "redis": "stores/redis/server.py",
    "prompt_toolkit": "cli/line_editor.py",
    "rich": "cli/render/",
    "sqlalchemy": "engines/executor_locks.py",
    "selectolax": "_lib/markup.py",
    "shtab": "cli/commands/shell_completion.py",
    "sqlite3": "stores/sqlite/file.py",
    "sqlite_vec": "memory/vector_file.py",
    "starlette": "serve/",
    "structlog": "streaming/log.py",
    "tinycss2": "_lib/markup.py",
    "tiktoken": "tokens/tiktoken_counter.py",
    "trio": (
        "streaming/detached_task.py",
        "testing/clock.py",
    ),  # which anyio does not bring: its system tasks and clock
    "uvicorn": "_lib/web/",
    "yaml": (
        "evals/suite_files.py",
        "mcp/trust/host_documents.py",
        "openapi/document.py",
        "readiness/checks.py",
        "skills/skill.py",
    ),
}


def read_imports(path):
    """Return the modules that a file imports: statements anywhere, and `import_module("...")` with a literal."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Import(names=names):
                found |= {name.name for name in names}
            case ast.ImportFrom(module=str(module), level=0):
                found.add(module)
            case ast.Call(
                func=ast.Name(id=called) | ast.Attribute(attr=called), args=[ast.Constant(value=str(module)), *_]
            ) if called in {"import_module", "__import__"}:
                found.add(module)
    return found


IMPORTS = {
    path.relative_to(ROOT).as_posix(): {module.partition(".")[0] for module in read_imports(path)}
    for path in sorted(ROOT.rglob("*.py"))
}


@pytest.mark.parametrize("vendor", VENDORS)
def test_one_file_per_vendor(vendor):
    """Each vendor library is imported by exactly one file, so that it can be left out or replaced there."""
    importers = [file for file, imports in IMPORTS.items() if vendor in imports]
    home = VENDORS[vendor]
    if isinstance(home, str) and home.endswith("/"):
        assert importers
        assert all(importer.startswith(home) for importer in importers)
    else:
        assert importers == ([home] if isinstance(home, str) else list(home))


def test_the_core_needs_nothing():
    """The core imports the standard library and attrs, and its codec cattrs: no event loop, no I/O, no vendor."""
    allowed = set(sys.stdlib_module_names) - {"asyncio", "socket", "sqlite3", "subprocess", "threading"}
    allowed |= {"typing_extensions", "agentfsm", "attrs"}  # the first has parts of the standard library's next versions
    for file, imports in IMPORTS.items():
        if file.startswith("core/"):
            assert imports <= allowed | ({"cattrs"} if file == "core/codec.py" else set()), file


def test_the_architecture_page_lists_the_rooms():
    """All folders of the package, and no more; and nothing lies loose beside them."""
    listed = {name for row in read_table("architecture.md", "room") for name in re.findall(r"`(\w+)/`", row[0])}
    inner = {name for row in read_table("architecture.md", "folder") for name in re.findall(r"`([\w/]+)/`", row[0])}
    packages = [path.parent for room in ("engine", "tools") for path in (ROOT / room).glob("*/__init__.py")]
    assert inner == {"engine", *(path.relative_to(ROOT).as_posix() for path in packages)}
    folders = {path.name for path in ROOT.iterdir() if any(path.rglob("*.py"))}
    assert listed == folders
    assert {path.name for path in ROOT.iterdir() if path.is_file()} == {
        "__init__.py",
        "__main__.py",
        "py.typed",
        "SKILL.md",
    }


def test_files_that_are_named_are_there():
    """In pages, docstrings, comments, texts and the Makefile: paths from the root, from the package, or from a room."""
    tops, rooms = ("agentfsm", "benchmarks", "docs", "examples", "tests"), {file.partition("/")[0] for file in IMPORTS}
    known = {path.relative_to(ROOT.parent).as_posix() for top in tops for path in (ROOT.parent / top).rglob("*.*")}
    named = re.compile(
        rf"(?<![\w./:@$~{{\\<-])((?:{'|'.join(tops)})/[\w./-]*\w\.(?:ipynb|md|png|py|svg|txt|yml)"
        rf"|(?:{'|'.join(rooms)})/[\w/]*\w\.py)\b"
    )
    # Of examples: a page of a user, a project that `init` writes, and the file of a format to come.
    others = {"docs/install.md", "docs/old.md", "tests/test_agent.py", "tests/support/format_N.py"}
    others |= {"scripts/count.py", "scripts/pay.py"}  # of skills
    files = [path for path in ROOT.parent.iterdir() if path.suffix in {".md", ".toml"} or path.name == "Makefile"]
    files += [ROOT.parent / name for name in known if name.endswith((".ipynb", ".md", ".py", ".toml", ".yml"))]
    missing = {
        (name, path.name)
        for path in files
        if path.name
        not in {"CHANGELOG.md", "test_worlds.py", "test_site.py"}  # these name files that were, or of theirs
        for name in named.findall(path.read_text(encoding="utf-8"))
        if not known & {name, f"agentfsm/{name}", f"tests/{name}"} and name not in others
    }
    assert missing == set()
    modules = {name.rpartition("/")[2] for name in known}
    for path in [ROOT.parent / "docs" / "architecture.md", *(ROOT / file for file in IMPORTS)]:
        assert {*re.findall(r"`(\w+\.py)`", path.read_text(encoding="utf-8"))} <= modules, path


def test_the_architecture_page_names_modules_that_are_there():
    """In the table of folders whose modules it describes."""
    for folders, modules in read_table("architecture.md", "package"):
        (folder,) = re.findall(r"[\w/]+\w", folders)
        there_are = {path.stem for path in (ROOT / folder).glob("*.py")} | {"dialects"}
        if folder != "studio":
            assert {name for name in re.findall(r"`([a-z_]+)`", modules) if name not in there_are} <= {"logins"}, folder


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
        if re.search(r"\b(?:from|import|import_module)\b.*\b(?:test_|conftest)", path.read_text(encoding="utf-8"))
        for module in read_imports(path)
        if any(part.startswith("test_") or part == "conftest" for part in module.split("."))
    }
    assert not wrong


def test_the_page_about_shared_helpers_names_each():
    """A helper that nobody finds is written again."""
    there_are = {path.stem for path in (TESTS / "support").glob("*.py")} - {"__init__"}
    named = re.findall(r"`(\w+)`", (TESTS / "support" / "README.md").read_text(encoding="utf-8"))
    assert {re.sub(r"\d+$", "", name) for name in there_are} == {re.sub(r"\d+$", "", name) for name in named}
