"""README, docs and examples run, and print what they say."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest

from agentfsm.testing import LocalServer, call, say
from agentfsm.testing.models import Line
from benchmarks.peers.environments import PACKAGES, python
from tests.support.doc_tables import read_table
from tests.support.warm_python import WarmPython

ROOT = Path(__file__).parent.parent
PAGES = (ROOT / "README.md", ROOT / "agentfsm" / "SKILL.md", *sorted((ROOT / "docs").rglob("*.md")))
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
# They speak a protocol on standard input and output.
SERVERS = {"project_manager.py"}
_BLOCK = re.compile(
    r"(?:<!-- (?:brain: (?P<brain>\w+)(?:, peer: (?P<peer>\w+))?|(?P<tests>pytest)) -->\n)?"
    r"```python\n(?:# (?P<file>\w+)\.py\n)?(?P<code>.*?)```\n(?:\n```text\n(?P<out>.*?)```)?",
    re.DOTALL,
)


@attrs.frozen
class Block:
    """A piece of Python in a page."""

    name: str
    code: str
    out: str | None
    # What it prints, where the page says so.
    brain: str | None
    # Who plays the model.
    is_tests: bool
    # Whether pytest runs it.
    peer: str | None
    # Another framework whose code it is, by the name of its module in benchmarks/peers.
    file: str | None
    # The name of the module that it is saved as, in the tutorial: tests/test_tutorial.py executes these.


def _weather(body: dict[str, object]) -> Line:
    """Play the model of the first example: ask for the weather, then tell it."""
    messages = body["messages"]
    assert isinstance(messages, list)
    if messages[-1]["role"] == "user":
        return say("", call("get_weather", city="Beijing"))
    assert '"temp":28' in messages[-1]["content"].replace(" ", "")
    return say("It is sunny in Beijing, 28 degrees.")


def _planner(body: dict[str, object]) -> Line:
    """Play the model of the page about plans: plan, answer the questions, then answer the user."""
    messages = body["messages"]
    assert isinstance(messages, list)
    task = messages[-2]["content"] if len(messages) > 1 else ""
    if "You plan" in task:
        cities = [{"id": n, "tool": "weather", "arguments": {"city": city}} for n, city in [(1, "Oslo"), (2, "Rome")]]
        questions = [{"id": 3, "question": "Warmer?", "after": [1, 2]}, {"id": 4, "question": "Pack?", "after": [3]}]
        return say(json.dumps({"steps": [*cities, *questions]}))
    if "question of a plan" in task:
        return say("Rome" if "Warmer?" in messages[-1]["content"] else "A hat")
    assert "celsius" in messages[-1]["content"]
    return say("Rome is warmer. Pack a hat.")


def _hybrid(body: dict[str, object]) -> Line:
    """Play the model that plans a goal and a call, works on the goal, and answers the user."""
    messages = body["messages"]
    assert isinstance(messages, list)
    task = messages[-2]["content"] if len(messages) > 1 else ""
    if "You plan" in task:
        goal = {"id": 1, "goal": "Find the cheapest hotel; answer with its name only.", "tools": ["search"]}
        booking = {"id": 2, "tool": "book", "arguments": {"hotel": {"$step": 1}}, "after": [1]}
        return say(json.dumps({"steps": [goal, booking]}))
    if "[Plan]" in messages[-1]["content"]:
        return say("Central is booked.")
    return say("Central") if messages[-1]["role"] == "tool" else say("", call("search", query="Rome"))


def _shop(body: dict[str, object]) -> Line:
    """Play the model of the pages on migration, in either API of OpenAI: look up, refund, answer."""
    said = body.get("messages") or body["input"]
    assert isinstance(said, list)
    results = [each for each in said if each.get("role") == "tool" or each.get("type") == "function_call_output"]
    if not results:
        return say("", call("find_order", number=17))
    return say("", call("refund", number=17, cents=1990)) if len(results) == 1 else say("Order 17 is refunded.")


def _hello(_body: dict[str, object]) -> Line:
    """Play a model that greets."""
    return say("Hello.")


BRAINS = {"weather": _weather, "planner": _planner, "hybrid": _hybrid, "shop": _shop, "hello": _hello}
# The first asks a client of the MCP package, whose answers are of many types: to tell them apart would be most of the
# example. The others use Django and Celery, which have no types.
UNTYPED = {"mcp.md-3", "frameworks.md-2", "frameworks.md-3", "frameworks.md-4"}


def blocks() -> list[Block]:
    """Return all Python blocks of all pages."""
    return [
        Block(
            name=f"{name_page(page)}-{number}",
            code=match["code"],
            out=match["out"],
            brain=match["brain"],
            is_tests=bool(match["tests"]),
            file=match["file"],
            peer=match["peer"],
        )
        for page in PAGES
        for number, match in enumerate(_BLOCK.finditer(page.read_text()), 1)
    ]


def name_page(page: Path) -> str:
    """Return the path of a page from docs/, or the name of a page of the root."""
    return page.relative_to(ROOT).as_posix().removeprefix("docs/")


@pytest.fixture(scope="module")
def warm() -> Iterator[WarmPython]:
    """Return a process that runs blocks."""
    with WarmPython() as python:
        yield python


def list_variables(**more: str) -> dict[str, str]:
    """Return the environment of a block: this one without keys, and more."""
    return {name: value for name, value in os.environ.items() if not name.startswith("OPENAI")} | more


def run(folder: Path, *words: str) -> str:
    """Run Python with these arguments in a folder, and return what it printed."""
    done = subprocess.run(
        [sys.executable, "-W", "error", *words],
        cwd=folder,
        env=list_variables(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


@pytest.mark.parametrize(
    "block",
    [each for each in blocks() if not each.file and not each.peer and each.brain != "hello"],
    ids=lambda block: block.name,
)
def test_a_block_does_what_the_page_says(block: Block, tmp_path: Path, warm: WarmPython) -> None:
    """It runs without a warning, and prints what stands below it."""
    if block.is_tests:
        (tmp_path / "test_block.py").write_text(block.code)
        assert re.search(r"[1-9]\d* passed", run(tmp_path, "-m", "pytest", "-q", "test_block.py"))
        return
    if block.brain is None:
        status, out, err = warm.run(("-c", block.code), tmp_path, list_variables())
    else:
        with LocalServer(BRAINS[block.brain]) as server:
            given = list_variables(OPENAI_API_KEY="none-needed", OPENAI_BASE_URL=server.base_url)
            status, out, err = warm.run(("-c", block.code), tmp_path, given)
    assert (status, err) == (0, "")
    assert re.sub(r"(?m)^wait queue\n", "", out) == (block.out or "")  # a span that a trace of a busy machine has


def test_the_service_of_the_readme_answers(tmp_path: Path, warm: WarmPython) -> None:
    """The lines for FastAPI are an application that answers a request."""
    [block] = [each for each in blocks() if each.brain == "hello"]
    asks = "\nfrom fastapi.testclient import TestClient\nprint(TestClient(app).post('/ask?question=Hi').json())"
    with LocalServer(_hello) as server:
        given = list_variables(OPENAI_API_KEY="none-needed", OPENAI_BASE_URL=server.base_url)
        assert warm.run(("-c", block.code + asks), tmp_path, given) == (0, "Hello.\n", "")


def test_the_readme_is_short() -> None:
    """It is read in a minute: few lines, and code that fits a column of 80 characters."""
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 120
    for name in ("README.md", "index.md"):
        for block in blocks():
            if block.name.startswith(name):
                assert max(map(len, block.code.splitlines())) <= 80


@pytest.mark.soak
@pytest.mark.parametrize("block", [each for each in blocks() if each.peer], ids=lambda block: block.name)
def test_a_block_of_another_framework_prints_the_same(block: Block, tmp_path: Path) -> None:
    """In the environment of the benchmarks, with the versions that the page names."""
    assert block.peer
    assert block.brain
    page = (ROOT / "docs" / block.name.rpartition("-")[0]).read_text()
    name, _, version = PACKAGES[block.peer][0].partition("==")
    assert f"{name.partition('[')[0]} {version}" in page
    with LocalServer(BRAINS[block.brain]) as server:
        given = list_variables(OPENAI_API_KEY="none-needed", OPENAI_BASE_URL=server.base_url)
        done = subprocess.run(
            [python(block.peer), "-c", block.code],
            cwd=tmp_path,
            env=given | {"OPENAI_AGENTS_DISABLE_TRACING": "1", "LANGSMITH_TRACING": "false"},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert done.stdout == block.out, done.stderr


def test_the_blocks_pass_a_type_checker(tmp_path: Path) -> None:
    """What a reader copies is no error of mypy's strict mode."""
    files = {}
    for block in blocks():
        if block.name not in UNTYPED and not block.peer:
            files[block.file or re.sub("[^a-z0-9]", "_", block.name.lower())] = block.code
    for name, code in files.items():
        (tmp_path / f"{name}.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *map(str, sorted(tmp_path.glob("*.py")))],  # with the cache of `make check`
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert f"in {len(files)} source files" in done.stdout


def test_each_fault_of_the_table_has_its_test() -> None:
    """What docs/durability.md says of a fault is shown by a test that there is."""
    rows = ["|".join(row) for row in read_table("durability.md", "fault")]
    assert len(rows) >= 40
    for row in rows:
        check_named_tests(row)


def test_each_risk_of_the_security_model_has_its_test() -> None:
    """Every risk of OWASP's two lists has a row, and what the row says is shown by a test that there is."""
    rows = read_table("SECURITY_MODEL.md", "risk")
    assert [row[0][:5] for row in rows] == [f"{kind}{number:02}" for kind in ("LLM", "ASI") for number in range(1, 11)]
    for row in rows:
        check_named_tests("|".join(row))


def check_named_tests(row: str) -> None:
    """Check that a row of a table names tests, and that these exist."""
    named = re.findall(r"`((?:tests|agentfsm)/[\w/]+\.py)::(\w+)`", row)
    assert named, f"no test is named: {row}"
    for path, name in named:
        assert re.search(rf"def {name}\(", (ROOT / path).read_text()), f"{path} has no {name}"


def test_the_pages_have_blocks() -> None:
    """The search above finds what is there."""
    assert len(blocks()) >= 4


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_runs(path: Path, tmp_path: Path, warm: WarmPython) -> None:
    """It needs no key and prints something; a server, whom nobody asks here, ends in order with its input."""
    status, out, err = warm.run((str(path),), tmp_path, list_variables())
    assert (status, err) == (0, "")
    assert bool(out.strip()) is (path.name not in SERVERS)
