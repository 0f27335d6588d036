"""Names of servers and of their tools: legal for every provider, and never two alike."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentfsm import MisuseError
from agentfsm.mcp import MCPServer
from agentfsm.mcp.trust.names import check_server_name, derive_server_name, tool_name
from agentfsm.tools.tool import NAME_CHARS


@pytest.mark.parametrize("name", ["a", "files", "my-server_2", "a_b_c", "x" * 32, "7"])
def test_names_of_servers(name):
    """Letters, digits, "-" and single "_" inside are a server's name."""
    check_server_name(name)


@pytest.mark.parametrize("name", ["", "a__b", "_a", "a_", "a b", "é", "x" * 33, "a/b", "-a", None])
def test_names_that_no_tool_can_carry(name):
    """What would be ambiguous or illegal in front of a tool's name is refused."""
    with pytest.raises(MisuseError, match="invalid name"):
        MCPServer.stdio("true", name=name) if name else check_server_name(name)


@pytest.mark.parametrize(
    ("text", "name"), [("python3.11", "python3-11"), ("::1", "1"), ("___", "server"), ("x" * 50, "x" * 32)]
)
def test_a_server_without_a_name_gets_one(text, name):
    """Out of any command or host comes a name that is legal."""
    assert derive_server_name(text) == name
    check_server_name(name)


def test_a_plain_name_stays():
    """A tool's name is the server's and its own."""
    assert tool_name("files", "read_file") == "files__read_file"


@given(st.lists(st.text(max_size=90) | st.from_regex(r"[a-z_]{50,60}(-[0-9a-f]{10})?", fullmatch=True), unique=True))
def test_no_two_tools_share_a_name(owns):
    """Whatever a server calls its tools, the names are legal and differ."""
    made = [tool_name("files", own) for own in owns if own]
    assert len(set(made)) == len(made)
    for name in made:
        assert len(name) <= NAME_CHARS
        assert name.replace("_", "").replace("-", "").isalnum()
        assert name.isascii()


def test_nobody_takes_a_changed_name():
    """A tool whose own name looks like a changed one gets another, so that it does not stand for the first."""
    changed = tool_name("files", "read file")
    assert tool_name("files", changed.removeprefix("files__")) != changed
