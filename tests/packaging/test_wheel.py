"""The wheel, in environments that have its requirements and nothing else."""

import json
import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.built_package import ROOT, Environment, build

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

# A use of each extra that imports its packages.
USES = {
    "acp": "import agentfsm.serve.dialects.acp",
    "anthropic": "from agentfsm.models import Anthropic; Anthropic('claude', api_key='k')",
    "cli": "import agentfsm.cli.line_editor, agentfsm.cli.render.rich_chat; from agentfsm.cli import main; "
    "assert main(['completion', 'bash']) == 0",
    "dbos": "import agentfsm.engines.dbos",
    "evals": "import yaml, agentfsm.evals.suite_files",
    "gemini": "from agentfsm.models import Gemini; Gemini('gemini', api_key='k')",
    "inspect": "import agentfsm.evals.inspect_solver",
    "keyring": "import keyring; from agentfsm.logins import token_store",
    "mcp": "from agentfsm.mcp import MCPServer, MCPService",
    "monty": "import pydantic_monty, agentfsm.scripts.monty",
    "openapi": "import yaml; from agentfsm.openapi import tools_from_openapi",
    "otel": "from agentfsm.telemetry import Telemetry; Telemetry",
    "pii": "from agentfsm.guards import load_country_data; load_country_data('US', 'EU')",
    "postgres": "from agentfsm.stores import PostgresStore; PostgresStore",
    "prices": "from agentfsm.models import OpenAIChat; from agentfsm import Usage; "
    "assert OpenAIChat('gpt-4o', api_key='k').cost_usd(Usage(input_tokens=1000)) > 0",
    "redis": "from agentfsm.stores import RedisStore; RedisStore",
    "schedule": "import agentfsm.schedules.cron_times",
    "serve": "from agentfsm.serve import serve",
    "skills": "import yaml, agentfsm.skills",
    "trio": "import anyio; anyio.run(anyio.sleep, 0, backend='trio')",
    "vault": "from agentfsm.guards import Vault; Vault",
    "vec": "import agentfsm.memory.vector_file",
}
# Packages of extras that an environment without extras must not see.
ABSENT = (
    "acp",
    "anthropic",
    "apsw",
    "google.genai",
    "mcp",
    "prompt_toolkit",
    "psycopg",
    "redis",
    "rich",
    "shtab",
    "starlette",
)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The paths of the sdist and of the wheel."""
    return build(tmp_path_factory.mktemp("dist"))


def test_the_first_minute(built, tmp_path):
    """After `pip install agentfsm` alone, the first commands work, or say which extra to install."""
    empty = Environment(tmp_path, built[1])
    work = tmp_path / "work"
    work.mkdir()
    (work / "notes.md").write_text("# TODO: buy milk\n", encoding="utf-8")
    find = "from importlib.util import find_spec; import sys; print([name for name in sys.argv[1:] if find_spec(name)])"
    assert empty.run("-c", find, *[name for name in ABSENT if "." not in name], folder=work) == "[]\n"
    demo = empty.run("-m", "agentfsm", "demo", folder=work, AGENTFSM_DEMO_DELAY_S="0")
    assert "The report is in .agentfsm/reports/" in demo
    assert "agentfsm studio\n" in demo
    assert "before it, pip install 'agentfsm[serve]'" in demo
    assert "Traceback" not in demo
    script = """if True:
        import sys
        from agentfsm.cli import main
        for line in ("init my-agent", "doctor", "runs", "docs --list", "completion bash", "studio"):
            words = line.split()
            print(words, main(words), flush=True)
    """
    shown = empty.run("-c", script, folder=work)
    for line in ("['init', 'my-agent'] 0", "['doctor'] 0", "['runs'] 0", "['docs', '--list'] 0"):
        assert line in shown
    assert "['completion', 'bash'] 2" in shown
    assert "pip install 'agentfsm[cli]'" in shown
    assert "['studio'] 2" in shown
    assert "pip install 'agentfsm[serve]'" in shown
    assert (work / "my-agent" / "my_agent" / "agent.py").exists()


def test_the_files_of_the_package(built):
    """The wheel has the package and its data, and the sdist what is needed to build and to test it."""
    sdist, wheel = built
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {name.split("/")[0] for name in names} == {"agentfsm", f"agentfsm-{PROJECT['version']}.dist-info"}
    source = {path.relative_to(ROOT).as_posix() for path in (ROOT / "agentfsm").rglob("*") if path.is_file()}
    missing = {name for name in source - names if "__pycache__" not in name}
    assert not missing
    with tarfile.open(sdist) as archive:
        tops = {name.split("/")[1] for name in archive.getnames() if "/" in name}
    assert {"agentfsm", "docs", "tests", "pyproject.toml", "LICENSE", "CHANGELOG.md", "PKG-INFO"} <= tops
    assert not tops & {".git", ".venv", "build", "dist", ".agentfsm"}


def test_each_extra_is_listed():
    """Each extra has a use here, and `all` has each but those that it leaves out for a reason."""
    extras = set(PROJECT["optional-dependencies"]) - {"all"}
    assert set(USES) == extras
    (everything,) = PROJECT["optional-dependencies"]["all"]
    listed = set(everything.partition("[")[2].rstrip("]").split(","))
    assert extras - listed == {"dbos", "inspect", "keyring", "pii"}


@pytest.mark.soak
def test_two_builds_are_identical(built, tmp_path):
    """The source builds the same sdist and the same wheel, byte by byte, in another folder at another time."""
    with tarfile.open(built[0]) as archive:
        archive.extractall(tmp_path / "source", filter="data")
    (source,) = (tmp_path / "source").iterdir()
    (source / "PKG-INFO").unlink()  # only an sdist has it
    for path in source.rglob("*"):
        path.touch()
    again = build(tmp_path / "dist", source)
    assert [path.read_bytes() for path in again] == [path.read_bytes() for path in built]


@pytest.mark.soak
def test_the_type_of_each_public_symbol_is_known():
    """Pyright finds no symbol whose type another checker could infer differently."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # it checks the package of the python there
    words = ["pyright", "--verifytypes", "agentfsm", "--ignoreexternal", "--outputjson"]
    done = subprocess.run(words, cwd=ROOT, env=os.environ | {"PATH": path}, capture_output=True, text=True, check=False)
    report = json.loads(done.stdout)["typeCompleteness"]
    assert report["exportedSymbolCounts"]["withKnownType"] > 10_000
    assert report["completenessScore"] == 1.0


@pytest.mark.soak
@pytest.mark.parametrize("extra", USES)
def test_an_extra_alone(built, tmp_path, extra):
    """Each extra works without the packages of the others."""
    if extra == "inspect" and find_spec("inspect_ai") is None:
        pytest.skip("inspect-ai is not installed: it has 80 packages")
    extras = ("keyring", "mcp") if extra == "keyring" else (extra,)  # it keeps tokens of MCP servers
    Environment(tmp_path / "with", built[1], *extras).run("-c", USES[extra], folder=tmp_path)
