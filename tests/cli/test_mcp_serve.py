"""`agentfsm mcp serve`: the words that it takes; what it serves is tested with the processes of `tests/mcp`."""

import argparse

import pytest

from agentfsm.cli.argument_types import parse_address


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["app:HOSTILE"], "is not an Agent or ToolRegistry or MCPService or Rollout, but of type str"),
        (["app:none"], "has no attribute 'none'"),
        (["app:adder", "--token-env", "MINE"], "options for HTTP: add --http"),
        (["app:adder", "--allow-host", "a.example"], "options for HTTP: add --http"),
        (["app:adder", "--http", "--token-env", "MINE"], "the variable MINE is not set"),
        (["app:adder", "--http", "192.0.2.1:0"], "clients need a bearer token"),
        (["app:adder", "--http", "nonsense"], "is not of the form HOST:PORT"),
        (["app:adder", "--client-calls", "3"], "options for HTTP: add --http"),
        (["app:adder", "--http", "--client-calls", "0"], "a whole number, 1 or more"),
        (["registry:service", "--http", "--client-calls", "3"], "is an MCPService: leave out --client-..."),
        (["registry:registry", "--no-tools"], "is not an Agent: leave out --prefix and --no-tools"),
        (["app:twice"], "tools for its runs: start"),
    ],
)
def test_what_makes_no_sense_is_refused(here, words, said):
    """With exit code 2, what to do, and nothing on standard output, which belongs to the protocol."""
    with (here.folder / "app.py").open("a", encoding="utf-8") as app:
        app.write("@tool\ndef start() -> str:\n    'Start.'\ntwice = Agent(once('start'), tools=[start])\n")
    (here.folder / "registry.py").write_text(
        "from agentfsm import ToolRegistry\nfrom agentfsm.mcp import MCPService\n"
        "registry = ToolRegistry()\nservice = MCPService(registry, name='mine')\n"
    )
    assert here("mcp", "serve", *words, code=2) == ""
    assert said in here.err


@pytest.mark.parametrize("text", ["127.0.0.1:0", "[::1]:8000", "mcp.example.org:443", "8000"])
def test_an_address_is_a_host_and_a_port(text):
    """Or a port of this machine."""
    assert parse_address(text) == text


@pytest.mark.parametrize("text", ["", ":", "host:", ":80", "host:65536", "host:-1", "host:\u0661", "host:80x"])
def test_anything_else_is_no_address(text):
    """Whatever is typed."""
    with pytest.raises(argparse.ArgumentTypeError, match="is not of the form HOST:PORT"):
        parse_address(text)
