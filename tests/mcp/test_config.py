"""The configuration of servers: what every host writes is read, and what makes no sense is told with its place."""

import json
from pathlib import Path

import pytest

from agentfsm.mcp import MCPServer, MCPServerError, MemoryPins, ServerSandbox
from agentfsm.mcp.trust.server_config import load_entries

ENVIRONMENT = {"TOKEN": "t0p", "EMPTY": ""}


def written(tmp_path, servers, key="mcpServers", **others):
    path = tmp_path / "servers.json"
    path.write_text(json.dumps({key: servers, **others}))
    return path


def read(tmp_path, servers, **parts):
    return load_entries(written(tmp_path, servers, **parts), ENVIRONMENT).entries


def test_what_every_host_writes(tmp_path):
    """Commands and URLs, with their arguments, variables, folders and headers, and the types that hosts give them."""
    files, search = read(
        tmp_path,
        {
            "files": {"type": "stdio", "command": "npx", "args": ["-y", "x"], "env": {"A": "b"}, "cwd": "/srv"},
            "search": {"type": "streamable-http", "url": "https://example.org/mcp", "headers": {"X": "y"}},
        },
    )
    assert (files.transport.command, files.transport.args, files.transport.env) == ("npx", ["-y", "x"], {"A": "b"})
    assert files.transport.cwd == "/srv"
    assert (search.transport.url, search.transport.headers) == ("https://example.org/mcp", {"X": "y"})


def test_the_key_of_another_host(tmp_path):
    """`servers` stands for `mcpServers`; what else is in the file is other programs'."""
    assert [each.name for each in read(tmp_path, {"a": {"command": "x"}}, key="servers", inputs=[])] == ["a"]


def test_a_disabled_server_is_passed_over(tmp_path):
    """It is there for another day."""
    assert read(tmp_path, {"a": {"command": "x", "disabled": True}}) == ()


def test_variables(tmp_path):
    """They are put in where they are written, from our environment, with defaults; nothing else is."""
    (entry,) = read(
        tmp_path,
        {
            "a": {
                "command": "run",
                "args": [
                    "${TOKEN}",
                    "$TOKEN",
                    "${env:TOKEN}",
                    "${NONE:-a b}",
                    "${NONE:-}",
                    "${EMPTY:-d}",
                    "x${EMPTY}y",
                ],
                "env": {"KEY": "Bearer ${TOKEN}"},
            }
        },
    )
    assert entry.transport.args == ["t0p", "$TOKEN", "t0p", "a b", "", "d", "xy"]
    assert entry.transport.env == {"KEY": "Bearer t0p"}
    assert entry.raw["env"] == {"KEY": "Bearer ${TOKEN}"}


def test_our_own_keys(tmp_path):
    """What a server may do and is believed stands in its entry."""
    path = written(
        tmp_path,
        {
            "a": {
                "command": "run",
                "hints": True,
                "trusted": True,
                "labels": {"a__send_*": {"sends_out": True}},
                "confirm": False,
                "allow": ["read_*"],
                "deny": ["read_secrets"],
                "constraints": {"query": {"properties": {"sql": {"pattern": "^SELECT"}}}},
                "timeout": 5,
                "start_timeout": 60,
                "required": False,
                "sandbox": {"read": ["/srv"], "network": True},
            },
            "b": {"url": "http://10.0.0.1/mcp", "allow_private": True},
        },
    )
    one, two = MCPServer.load(path, pins=MemoryPins())
    assert (one.tool_policy.trusted, one.tool_policy.confirm, one.tool_policy.allow) == (True, False, ("read_*",))
    assert (one.tool_policy.hints, one.tool_policy.labels) == (True, {"a__send_*": {"sends_out": True}})
    assert (one.tool_policy.deny, set(one.tool_policy.constraints)) == (("read_secrets",), {"query"})
    assert (one.timeout_s, one.start_s, one.required) == (5, 60, False)
    assert one.transport.sandbox == ServerSandbox(read=[Path("/srv")], network=True)
    assert two.transport.allow_private


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        (5, "its entry must be an object, not 5"),
        ({}, "expected either 'command' or 'url', found neither"),
        ({"command": "x", "url": "https://example.org"}, "found command and url"),
        ({"command": "x", "arg": []}, "unknown key 'arg'; did you mean 'args'?"),
        ({"command": "x", "trustd": True}, "did you mean 'trusted'?"),
        ({"command": "x", "labels": {"a": {"sendsout": True}}}, "the declarations are: read_only"),
        ({"command": "x", "zzz": 1}, "known keys: command, args"),
        ({"command": 5}, "'command' must be a text"),
        ({"command": "x", "args": "y"}, "'args' must be a list of texts, not 'y'"),
        ({"command": "x", "env": {"A": []}}, "'env' must be an object of texts"),
        ({"command": "x", "timeout": 0}, "'timeout' must be a number of seconds above 0"),
        ({"command": "x", "type": "http"}, "a server of 'type' 'http' cannot have 'command'"),
        ({"command": "x", "type": "ws"}, "'type' must be 'stdio' or 'http'"),
        ({"command": "x", "headers": {}}, "a server with 'command' cannot have 'headers'"),
        ({"url": "https://example.org", "sandbox": True}, "a server with 'url' cannot have 'sandbox'"),
        ({"command": "x", "sandbox": {"reads": []}}, "did you mean 'read'?"),
        ({"command": "${NONE}"}, "the variable NONE is not set"),
        ({"command": "x", "args": ["${input:token}"]}, "'token' has no value: set the variable AGENTFSM_INPUT_TOKEN"),
        ({"command": "x", "args": ["${a b}"]}, "unsupported variable '${a b}'"),
        ({"url": "https://example.org", "headersHelper": "get.sh"}, "'headersHelper' is not supported: it runs"),
        ({"url": "http://example.org/mcp"}, "plain HTTP"),
        ({"url": "ftp://example.org"}, "is not a URL of an MCP server"),
        ({"url": "https://"}, "is not a URL of an MCP server"),
        ({"command": "x", "constraints": {"t": {"type": "array"}}}, 'has to be "object"'),
    ],
)
def test_what_makes_no_sense_in_an_entry(tmp_path, entry, told):
    """The error names the file, the server and the key."""
    with pytest.raises(MCPServerError) as caught:
        read(tmp_path, {"demo": entry})
    assert str(caught.value).startswith(f"{tmp_path / 'servers.json'}: server 'demo': ")
    assert told in str(caught.value)


def test_a_name_that_tools_cannot_carry(tmp_path):
    """It becomes one that they can; two that become the same are not both used."""
    path = written(
        tmp_path,
        {name: {"command": "x"} for name in ("a__b", "Brave Search", "github.com/x/src/git", "git", "a  b", "a-b")},
    )
    loaded = load_entries(path, ENVIRONMENT)
    assert [each.name for each in loaded.entries] == ["Brave-Search", "git", "a-b"]
    assert [each.name for each in loaded.refused] == ["a__b", "github.com/x/src/git", "a  b"]
    assert "rename it" in loaded.refused[0].why


def test_one_entry_that_makes_no_sense(tmp_path, caplog):
    """It is left out by name, and the others are loaded."""
    path = written(tmp_path, {"a": {"command": "x"}, "b": {"command": "x", "arg": []}, "c": {"command": "y"}})
    assert [each.name for each in MCPServer.load(path, pins=MemoryPins())] == ["a", "c"]
    assert "the MCP server 'b' is left out" in caplog.text
    found = []
    MCPServer.load(path, pins=MemoryPins(), on_refused=found.append)
    assert [(each.name, "did you mean 'args'" in each.why) for each in found] == [("b", True)]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"{", "invalid JSON"),
        (b"[]", "expected a JSON object"),
        (b"{}", 'no object "mcpServers"'),
        (b'{"mcpServers": []}', 'no object "mcpServers"'),
        (b'{"mcpServers": {"a": {"command": "x"}, "a": {"command": "y"}}}', "invalid JSON"),
        (b"\xff", "invalid JSON"),
        (b" " * 1_000_001, "larger than"),
    ],
)
def test_a_file_that_is_none(tmp_path, content, told):
    """Whatever is in the file, the error names it."""
    path = tmp_path / "servers.json"
    path.write_bytes(content)
    with pytest.raises(MCPServerError, match=told) as caught:
        load_entries(path)
    assert str(path) in str(caught.value)


def test_a_file_that_is_not_there(tmp_path):
    """The path is named."""
    with pytest.raises(MCPServerError, match=r"nothing\.json cannot be read"):
        MCPServer.load(tmp_path / "nothing.json", pins=MemoryPins())
