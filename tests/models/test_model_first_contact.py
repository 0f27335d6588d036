"""First contact with a model: a wrong argument, a missing package and a server that is down are named at once."""

from __future__ import annotations

import os
import re
import socket
import ssl
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx2
import pytest

from agentfsm import MisuseError
from agentfsm.models import Anthropic, OpenAIChat, OpenAIResponses
from agentfsm.models.sdk import read_transport_failure
from tests.support.warm_python import PLAIN, WARM_UP, WarmPython

# The plain one has not imported what is to be missing.
WITH_VENDORS = WarmPython(
    warm_up=f"{WARM_UP}\nimport anthropic, openai, agentfsm.models.anthropic, agentfsm.models.openai"
)


def run_python(code: str, python: WarmPython = PLAIN) -> tuple[str, str]:
    """Run code in a process of its own, and return its output and errors."""
    with TemporaryDirectory() as folder:
        return python.run(("-c", code), Path(folder), dict(os.environ))[1:]


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
    out, err = run_python(
        f"import sys; sys.modules[{package!r}] = None\n"
        f"try:\n    {code}\n"
        "except ImportError as error:\n    print(error, [kind.__name__ for kind in type(error).__mro__])"
    )
    assert err == ""
    assert out.startswith(f"agentfsm.{part} needs the extra {extra!r}; pip install 'agentfsm[{extra}]' [")
    assert MisuseError.__name__ in out


def test_a_missing_module_of_another_package_is_passed_on():
    """Only the packages of the extra are reported as a missing extra."""
    _, err = run_python("import sys; sys.modules['httpx2'] = None\nfrom agentfsm.models import Anthropic")
    assert "ModuleNotFoundError: import of httpx2 halted" in err
    assert "extra" not in err.splitlines()[-1]


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
@pytest.mark.parametrize(("key", "kind"), [(3, "int"), (0, "int"), (b"sk-secret", "bytes")])
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


def test_the_cache_argument_is_a_bool_or_a_time():
    """`cache="no"` would be taken as true."""
    with pytest.raises(MisuseError, match=r"^Anthropic\(cache='no'\): give True, False, '5m' or '1h'$"):
        Anthropic("m", api_key="k", cache="no")


DOWN = """
import socket, sys
import anyio
from agentfsm import Agent, Limits
from agentfsm.models import Anthropic, OpenAIChat, OpenAIResponses
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
model = ADAPTER("local", base_url=url)
async def main():
    run = await Agent(model, limits=Limits(errors=1, model_retries=2, retry_wait_s=0.01)).run("hi")
    print(url.removesuffix("/v1"), run.stop_reason)
SETUP
anyio.run(main, backend=BACKEND)
"""


@pytest.mark.parametrize("backend", ["asyncio", pytest.param("trio", marks=pytest.mark.soak)])
@pytest.mark.parametrize("adapter", ["OpenAIChat", "OpenAIResponses", "Anthropic"])
def test_a_server_that_is_down_is_named_on_stderr_at_the_first_attempt(adapter, backend):
    """A program that has not configured logging gets one line per turn, before the first wait for a retry."""
    out, err = run_python(
        DOWN.replace("ADAPTER", adapter).replace("SETUP", "").replace("BACKEND", repr(backend)), WITH_VENDORS
    )
    url = out.split()[0]
    assert re.fullmatch(
        rf"agentfsm: Cannot connect to 'local' at {url}\S* \(connection refused\); retrying in 0\.\d s\n", err
    )


@pytest.mark.parametrize(
    "setup",
    [
        "import logging; logging.getLogger('agentfsm').addHandler(logging.NullHandler())",
        "import logging; logging.getLogger('agentfsm').setLevel(logging.ERROR)",
    ],
)
def test_a_program_that_configures_logging_decides_about_the_notice(setup):
    """A handler or a level of the program's own turns the line on stderr off."""
    _, err = run_python(
        DOWN.replace("ADAPTER", "OpenAIChat").replace("SETUP", setup).replace("BACKEND", "'asyncio'"), WITH_VENDORS
    )
    assert err == ""


def test_a_server_that_is_down_is_named_in_the_log():
    """Each attempt is a WARNING with the address and the reason."""
    setup = "import logging; logging.basicConfig()"
    out, err = run_python(
        DOWN.replace("ADAPTER", "OpenAIChat").replace("SETUP", setup).replace("BACKEND", "'asyncio'"), WITH_VENDORS
    )
    lines = [line for line in err.splitlines() if "event=model_retry" in line]
    assert len(lines) == 2
    assert all("(connection refused)" in line and out.split()[0] in line for line in lines)
    assert "retrying" not in err


def test_the_reason_of_the_operating_system_is_found_behind_the_error_of_the_transport():
    """The transport's error names no reason by itself."""
    error = httpx2.ConnectError("All connection attempts failed")
    error.__cause__ = OSError("All connection attempts failed")
    refused = ConnectionRefusedError(111, "Connection refused")
    error.__cause__.__cause__ = ExceptionGroup("multiple connection attempts failed", [refused, refused])
    assert read_transport_failure(error) == {"detail": "connection refused", "is_unreachable": True}
    unknown = httpx2.ConnectError("[Errno -2] Name or service not known")
    unknown.__context__ = socket.gaierror(-2, "Name or service not known")
    assert read_transport_failure(unknown) == {"detail": "name or service not known", "is_unreachable": True}
    untrusted = httpx2.ConnectError("certificate verify failed")
    untrusted.__cause__ = ssl.SSLCertVerificationError(1, "[SSL: CERTIFICATE_VERIFY_FAILED] self-signed certificate")
    assert "self-signed certificate" in read_transport_failure(untrusted)["detail"]
    broken = httpx2.ReadError("reset")
    assert read_transport_failure(broken) == {"detail": "ReadError: reset"}
