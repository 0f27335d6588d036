"""First contact with a model: a wrong argument, a missing package and a server that is down are named at once."""

from __future__ import annotations

import subprocess
import sys

import pytest

from agentfsm import MisuseError


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a new interpreter."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("package", "extra", "part", "code"),
    [
        ("anthropic", "anthropic", "models.Anthropic", "from agentfsm.models import Anthropic"),
        ("anthropic", "anthropic", "models.Anthropic", "import agentfsm.models as m; hasattr(m, 'Anthropic')"),
        ("mcp", "mcp", "mcp", "from agentfsm.mcp import MCPServer"),
        ("uvicorn", "mcp", "mcp.MCPService", "import agentfsm.mcp as m; hasattr(m, 'MCPService')"),
        ("psycopg", "postgres", "stores.PostgresStore", "from agentfsm.stores import PostgresStore"),
        ("redis", "redis", "stores.RedisStore", "import agentfsm.stores as m; hasattr(m, 'RedisStore')"),
        ("redis", "redis", "stores.RedisStore", "from agentfsm.stores import open_store; open_store('redis://x')"),
    ],
)
def test_a_missing_extra_is_named_with_the_command_that_installs_it(package, extra, part, code):
    """All parts use one sentence. It is an ImportError and a MisuseError, never an AttributeError."""
    ran = run_python(
        f"import sys; sys.modules[{package!r}] = None\n"
        f"try:\n    {code}\n"
        "except ImportError as error:\n    print(error, [kind.__name__ for kind in type(error).__mro__])"
    )
    assert ran.stderr == ""
    assert ran.stdout.startswith(f"agentfsm.{part} needs the extra {extra!r}; pip install 'agentfsm[{extra}]' [")
    assert MisuseError.__name__ in ran.stdout


def test_a_missing_module_of_another_package_is_passed_on():
    """Only the packages of the extra are reported as a missing extra."""
    ran = run_python("import sys; sys.modules['httpx2'] = None\nfrom agentfsm.models import Anthropic")
    assert "ModuleNotFoundError: import of httpx2 halted" in ran.stderr
    assert "extra" not in ran.stderr.splitlines()[-1]
