"""First contact with a model: a wrong argument, a missing package and a server that is down are named at once."""

from __future__ import annotations

import subprocess
import sys

import pytest

from agentfsm import MisuseError
from agentfsm.models import Anthropic, OpenAIChat, OpenAIResponses


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


@pytest.mark.parametrize("adapter", [OpenAIChat, OpenAIResponses, Anthropic])
@pytest.mark.parametrize(
    ("name", "arguments", "fault"),
    [
        (3, {}, r"\(name=3\): give the name of the model"),
        ("", {}, r"\(name=''\): give the name of the model"),
        ("m", {"base_url": 3}, r"\(base_url=3\): give a string such as 'http"),
        ("m", {"base_url": 0}, r"\(base_url=0\): give a string such as 'http"),
        ("m", {"headers": ["x-key"]}, r"\(headers=\.\.\.\) is of the type list: give a dict, or None"),
        ("m", {"headers": {3: "x"}}, r"\(headers=\.\.\.\) has the key 3: give a string"),
        ("m", {"http_client": 3}, r"\(http_client=3\): give an AsyncClient"),
        ("m", {"window_tokens": "8k"}, r"\(window_tokens='8k'\): give a whole number"),
    ],
)
def test_an_argument_of_the_wrong_type_is_refused_by_name(adapter, name, arguments, fault):
    """The error names the adapter, the argument and its value, instead of an error inside the SDK."""
    with pytest.raises(MisuseError, match=f"^{adapter.__name__}{fault}"):
        adapter(name, **{"api_key": "k", **arguments})


@pytest.mark.parametrize("adapter", [OpenAIChat, OpenAIResponses, Anthropic])
@pytest.mark.parametrize(("key", "kind"), [(3, "int"), (0, "int"), (b"sk-secret", "bytes"), (lambda: "sk", "function")])
def test_a_key_of_the_wrong_type_is_refused_and_not_shown(adapter, key, kind):
    """The error shows the type of the key, and not its value, which may be a secret."""
    with pytest.raises(MisuseError) as caught:
        adapter("m", api_key=key)
    assert str(caught.value) == f"{adapter.__name__}(api_key=...) is of the type {kind}: give a string, or None"


@pytest.mark.parametrize("adapter", [OpenAIChat, OpenAIResponses, Anthropic])
def test_a_header_of_the_wrong_type_is_refused_and_not_shown(adapter):
    """A header may hold a token, so its value is not shown either."""
    with pytest.raises(MisuseError, match=r"^the header 'x-token' is of the type bytes: give a string$"):
        adapter("m", api_key="k", headers={"x-token": b"sk-secret"})


def test_the_cache_argument_is_a_bool():
    """`cache="no"` would be taken as true."""
    with pytest.raises(MisuseError, match=r"^Anthropic\(cache='no'\): give True or False$"):
        Anthropic("m", api_key="k", cache="no")
