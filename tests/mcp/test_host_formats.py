"""Files as the hosts of MCP servers write them, and as publishers do: each is read, or one entry is refused by name."""

import contextlib
import json
import re
import stat
import sys
import zipfile
from pathlib import Path

import pytest

from agentfsm.mcp import MCPServer, MCPServerError, MemoryPins, OAuth
from agentfsm.mcp.connection.transports import SSETransport, StdioTransport, StreamableHTTPTransport
from agentfsm.mcp.trust.consent import build_start_text
from agentfsm.mcp.trust.server_config import load_entries

URL = "https://example.org/mcp"
ENVIRONMENT = {"TOKEN": "t0p", "HOME": "/home/ann", "AGENTFSM_INPUT_API_KEY": "k3y"}


def load(tmp_path, text, name="servers.json", ask=None):
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text if isinstance(text, str) else json.dumps(text))
    return load_entries(path, ENVIRONMENT, ask)


def command(program, *args, **env):
    return {"command": program, "args": list(args), "env": env}


def http(url=URL, **headers):
    return {"url": url, "headers": headers}


def stands_for(transport):
    if isinstance(transport, StdioTransport):
        return {"command": transport.command, "args": list(transport.args), "env": dict(transport.env)}
    return {"url": transport.url, "headers": dict(transport.headers)}


# Host -> its file, its servers in it, and the transport that they stand for.
HOSTS = {
    "Claude Desktop": (
        "claude_desktop_config.json",
        {"mcpServers": {"s": {"command": "npx", "args": ["-y", "x"], "env": {"A": "b"}}}, "globalShortcut": ""},
        command("npx", "-y", "x", A="b"),
    ),
    "Claude Code": (
        ".mcp.json",
        {
            "mcpServers": {
                "s": {"type": "http", "url": "${BASE:-https://example.org}/mcp", "headers": {"K": "${TOKEN}"}}
            }
        },
        http(K="t0p"),
    ),
    "VS Code": (
        ".vscode/mcp.json",
        """{
  // The servers of this folder.
  "inputs": [{"type": "promptString", "id": "api-key", "description": "Key", "password": true}],
  "servers": {"s": {
    "type": "stdio", "command": "${workspaceFolder}/run", /* ours */ "args": ["--key=${input:api-key}", "a//b",],
    "env": {"LEVEL": 3, "NONE": null}, "envFile": "${workspaceFolder}/.env", "dev": {"watch": "**"},
  },},
}""",
        command("{project}/run", "--key=k3y", "a//b", LEVEL="3", FROM="file"),
    ),
    "VS Code settings": (
        "settings.json",
        {"mcp": {"inputs": [], "servers": {"s": {"url": URL, "headers": {"K": "${env:TOKEN}"}}}}, "editor.tab": 4},
        http(K="t0p"),
    ),
    "Cline": (
        "cline_mcp_settings.json",
        {
            "mcpServers": {
                "s": {
                    "autoApprove": ["read"],
                    "disabled": False,
                    "timeout": 60,
                    "type": "streamableHttp",
                    "url": URL,
                }
            }
        },
        http(),
    ),
    "Cline, older": (
        "cline_mcp_settings.json",
        {"mcpServers": {"github.com/x/s": {"command": "node", "args": ["s"], "transportType": "stdio"}}},
        command("node", "s"),
    ),
    "Roo Code": (
        ".roo/mcp.json",
        {"mcpServers": {"s": {"type": "streamable-http", "url": URL, "alwaysAllow": ["x"], "disabledTools": []}}},
        http(),
    ),
    "Windsurf": (
        "mcp_config.json",
        {"mcpServers": {"s": {"serverUrl": URL, "headers": {"K": "${env:TOKEN}"}}}},
        http(K="t0p"),
    ),
    "Gemini": (
        ".gemini/settings.json",
        {
            "mcp": {"allowed": ["s"], "excluded": ["t"]},
            "mcpServers": {
                "s": {"httpUrl": URL, "headers": {"K": "Bearer $TOKEN"}, "timeout": 5000, "trust": True},
                "t": {"command": "x"},
            },
        },
        http(K="Bearer t0p"),
    ),
    "fastmcp": (
        "fastmcp.json",
        {"mcpServers": {"s": {"url": URL, "transport": "streamable-http", "description": "x", "icon": "y"}}},
        http(),
    ),
    "fastmcp without a root": (
        "mcp.json",
        {"s": {"command": "uvx", "args": ["s"], "keep_alive": True}},
        command("uvx", "s"),
    ),
    "Cursor": (
        ".cursor/mcp.json",
        {"mcpServers": {"s": {"command": "${workspaceFolder}/x", "envFile": "../.env"}}},
        command("{project}/x", FROM="file"),
    ),
    "Copilot": (
        "mcp.json",
        {"mcpServers": {"s": {"type": "local", "command": "x", "args": [], "tools": ["*"]}}},
        command("x"),
    ),
    "Zed": (
        "settings.json",
        '{"theme": "x", // y\n"context_servers": {"s": {"source": "custom", "command": {"path": "x", "args": ["y"]}}}}',
        command("x", "y"),
    ),
    "opencode": (
        "opencode.json",
        {"mcp": {"s": {"type": "local", "command": ["bun", "x"], "environment": {"A": "b"}, "enabled": True}}},
        command("bun", "x", A="b"),
    ),
    "Codex": (
        ".codex/config.toml",
        """model = "gpt-6"
[mcp_servers.s]
url = "https://example.org/mcp"
bearer_token_env_var = "TOKEN"
http_headers = { "X-A" = "b" }
env_http_headers = { "X-B" = "HOME" }
startup_timeout_sec = 20
tool_timeout_sec = 1200
enabled_tools = ["read"]
""",
        http(**{"Authorization": "Bearer t0p", "X-A": "b", "X-B": "/home/ann"}),
    ),
    "Codex, a command": (
        "config.toml",
        """[mcp_servers.s]
command = "npx"
args = ["-y", "x"]
env_vars = ["TOKEN"]
default_tools_approval_mode = "prompt"
[mcp_servers.s.env]
A = "b"
[mcp_servers.off]
command = "y"
enabled = false
""",
        {**command("npx", "-y", "x"), "env": {"TOKEN": "t0p", "A": "b"}},
    ),
    "Continue": (
        ".continue/mcpServers/s.yaml",
        """name: Mine
version: 0.0.1
schema: v1
mcpServers:
  - name: s
    type: streamable-http
    url: https://example.org/mcp
    connectionTimeout: 5000
    requestOptions:
      headers: {Authorization: "Bearer ${{ secrets.TOKEN }}"}
""",
        http(Authorization="Bearer t0p"),
    ),
    "Continue, a command": (
        "config.yaml",
        "mcpServers:\n- name: s\n  command: uvx\n  args: [s, --key, '${{ inputs.api-key }}']\n"
        "  env: {T: '${{ secrets.TOKEN }}'}\n".replace("api-key", "API_KEY"),
        command("uvx", "s", "--key", "k3y", T="t0p"),
    ),
    "Goose": (
        "config.yaml",
        """GOOSE_PROVIDER: openai
extensions:
  s:
    name: S
    type: stdio
    enabled: true
    bundled: null
    cmd: npx
    args: [-y, x]
    envs: {A: b}
    env_keys: [TOKEN]
    timeout: 1800
    available_tools: []
  off: {type: stdio, cmd: y, enabled: false}
""",
        {**command("npx", "-y", "x"), "env": {"TOKEN": "t0p", "A": "b"}},
    ),
    "Goose, a URL": (
        "config.yaml",
        "extensions: {s: {type: streamable_http, uri: 'https://example.org/mcp', headers: {K: '${TOKEN}'}}}",
        http(K="t0p"),
    ),
    "LibreChat": (
        "librechat.yaml",
        """version: 1.2.1
mcpServers:
  s:
    type: streamable-http
    url: https://example.org/mcp
    initTimeout: 10000
    timeout: 60000
    serverInstructions: true
    chatMenu: false
    headers: {K: "{{API_KEY}}", L: "${TOKEN}"}
    customUserVars: {API_KEY: {title: Key, description: The key}}
""",
        http(K="k3y", L="t0p"),
    ),
    "an extension of Gemini": (
        "gemini-extension.json",
        {
            "name": "ann",
            "version": "1.0.0",
            "contextFileName": "GEMINI.md",
            "settings": [{"name": "Key", "description": "A key", "envVar": "API_KEY", "sensitive": True}],
            "mcpServers": {"s": {"command": "node", "args": ["${extensionPath}${/}dist${/}s.js"], "env": {"A": "b"}}},
        },
        command("node", "{project}/dist/s.js", API_KEY="k3y", A="b"),
    ),
    "a devcontainer": (
        ".devcontainer/devcontainer.json",
        """{"image": "x", // ours
  "customizations": {"vscode": {"mcp": {"servers": {"s": {
    "command": "${localWorkspaceFolder}/run", "env": {"T": "${localEnv:TOKEN}", "U": "${localEnv:NO:none}"}}}}}}}""",
        command("{project}/run", T="t0p", U="none"),
    ),
    "Zed, newer": (
        ".zed/settings.json",
        {"context_servers": {"s": {"source": "custom", "command": "x", "args": ["y"], "env": {}, "enabled": True}}},
        command("x", "y"),
    ),
    "Warp": (
        "mcp.json",
        {"s": {"command": "npx", "args": ["-y", "x"], "env": {}, "working_directory": None, "start_on_launch": True}},
        command("npx", "-y", "x"),
    ),
    "Amp": (
        ".amp/settings.json",
        {"amp.notifications.enabled": True, "amp.mcpServers": {"s": {"url": URL, "headers": {"K": "${TOKEN}"}}}},
        http(K="t0p"),
    ),
    "a server of fastmcp": (
        "fastmcp.json",
        {
            "$schema": "https://gofastmcp.com/public/schemas/fastmcp.json/v1.json",
            "source": {"path": "s.py", "entrypoint": "mcp"},
            "environment": {"dependencies": ["httpx"]},
            "deployment": {"transport": "http", "port": 8000},
        },
        command("fastmcp", "run", "{project}/fastmcp.json", "--transport", "stdio"),
    ),
    "mcp-remote": (
        "claude_desktop_config.json",
        {
            "mcpServers": {
                "s": {
                    "command": "npx",
                    "args": ["mcp-remote", URL, "--header", "Authorization:${AUTH_HEADER}"],
                    "env": {"AUTH_HEADER": "Bearer ${TOKEN}"},
                }
            }
        },
        command("npx", "mcp-remote", URL, "--header", "Authorization:Bearer t0p", AUTH_HEADER="Bearer t0p"),
    ),
    "Amazon Q": ("mcp.json", {"mcpServers": {"s": {"command": "uvx", "timeout": 120000}}}, command("uvx")),
}


@pytest.mark.parametrize("host", HOSTS)
def test_files_of_hosts(tmp_path, host):
    """The one server of the file is reached as its host reaches it."""
    name, document, expected = HOSTS[host]
    (tmp_path / ".env").write_text("# Ours.\nexport FROM='file'\n")
    loaded = load(tmp_path, document, name)
    assert loaded.refused == ()
    (entry,) = loaded.entries
    assert entry.name == "s"
    assert stands_for(entry.transport) == json.loads(json.dumps(expected).replace("{project}", str(tmp_path)))


@pytest.mark.parametrize(
    ("entry", "kind"),
    [
        ({"url": URL}, StreamableHTTPTransport),
        ({"url": "https://example.org/sse"}, SSETransport),
        ({"url": "https://example.org/sse", "type": "http"}, StreamableHTTPTransport),
        ({"url": URL, "transport": "sse"}, SSETransport),
        ({"httpUrl": "https://example.org/sse"}, StreamableHTTPTransport),
    ],
)
def test_the_transport_of_a_url(tmp_path, entry, kind):
    """The key or the type says it; without them the end of the URL does, since hosts try both."""
    (found,) = load(tmp_path, {"mcpServers": {"s": entry}}).entries
    assert type(found.transport) is kind


@pytest.mark.parametrize(
    ("entry", "seconds"),
    [
        ({"timeout": 60}, 60),
        ({"timeout": 600}, 600),
        ({"timeout": 60_000}, 60),
        ({"timeout": 3600, "alwaysAllow": []}, 3600),
        ({"timeout": 1800, "confirm": False}, 1800),
    ],
)
def test_the_unit_of_a_timeout(tmp_path, entry, seconds):
    """Milliseconds where the host counts so; in entries with our keys, and of hosts that count in seconds, seconds."""
    (found,) = load(tmp_path, {"mcpServers": {"s": {"command": "x", **entry}}}).entries
    assert found.options["timeout_s"] == seconds


def test_times_and_lists_of_codex(tmp_path):
    """Seconds stay seconds, and a list of tools restricts."""
    name, document, _ = HOSTS["Codex"]
    (entry,) = load(tmp_path, document, name).entries
    assert (entry.options["timeout_s"], entry.options["start_s"]) == (1200, 20)
    assert entry.options["tool_policy"].allow == ("read",)
    name, document, _ = HOSTS["Codex, a command"]
    (entry,) = load(tmp_path, document, name).entries
    assert entry.options["tool_policy"].confirm is True


@pytest.mark.parametrize(
    ("name", "document", "why"),
    [
        ("config.yaml", "extensions: {s: {type: builtin, name: developer}}", "a part of Goose"),
        ("config.yaml", "extensions: {s: &a {cmd: x}, t: *a}", "aliases"),
        ("config.yaml", "extensions: [", "invalid YAML"),
        ("config.yaml", "extensions: \x01", "invalid YAML"),
        ("config.yaml", "", "expected a YAML object"),
        ("config.yaml", "extensions: {s: {cmd: x}, s: {cmd: y}}", "the key 's' is there twice"),
        ("config.toml", "[mcp_servers", "invalid TOML"),
        (
            "librechat.yaml",
            "mcpServers: {s: {url: 'https://a.eu', headers: {U: '{{LIBRECHAT_USER_ID}}'}}}",
            "no value here",
        ),
        ("settings.json", '{"context_servers": {"s": {"source": "extension", "settings": {}}}}', "an extension of Zed"),
        (
            "config.yaml",
            "mcpServers: [{name: s, url: 'https://a.eu', requestOptions: {verifySsl: false}}]",
            "only 'headers'",
        ),
        (
            "gemini-extension.json",
            '{"name": "x", "mcpServers": {"s": {"command": "x", "trusted": true}}}',
            "unknown key 'trusted'",
        ),
        (
            "gemini-extension.json",
            '{"name": "x", "mcpServers": {"s": {"command": "x", "args": ["${TOKEN}"]}}}',
            "not expanded",
        ),
        ("fastmcp.json", '{"source": {"type": "git"}, "environment": {}}', "has no path"),
    ],
)
def test_entries_of_hosts_that_cannot_be_used_say_why(tmp_path, name, document, why):
    """Each names the file, and the remedy where there is one."""
    with pytest.raises(MCPServerError, match=why):
        load(tmp_path, document, name)


@pytest.mark.parametrize("value", ["x", 3, [1], {"a": 1}, True])
@pytest.mark.parametrize(
    "key",
    [
        "http_headers",
        "env_http_headers",
        "bearer_token_env_var",
        "env_vars",
        "env_keys",
        "requestOptions",
        "scopes",
        "connectionTimeout",
        "customUserVars",
        "requiresOAuth",
        "default_tools_approval_mode",
        "available_tools",
    ],
)
def test_a_value_of_another_type_is_an_error_of_the_file(tmp_path, key, value):
    """Never another exception, whatever a key of another host has."""
    for entry in ({"url": URL, "headers": {}}, {"command": "x", "env": []}, {"url": URL, "headers": "x"}):
        with contextlib.suppress(MCPServerError):
            load(tmp_path, {"mcpServers": {"s": {**entry, key: value}}})


def test_dates_and_other_keys_of_yaml_are_texts(tmp_path):
    """An entry is approved as JSON, which has no dates."""
    (entry,) = load(tmp_path, "mcpServers: {s: {command: x, description: 2026-11-28, version: 3}}", "a.yaml").entries
    assert json.loads(json.dumps(entry.raw))["description"] == "2026-11-28"
    build_start_text(entry.transport, entry.raw)
    with pytest.raises(MCPServerError, match="a name of its own"):
        load(tmp_path, "mcpServers: [{name: s, command: x}, {name: s, command: y}]", "a.yaml")


def test_servers_of_projects_are_offered(tmp_path):
    """Those of the project are read over the user's own; of others the file, the folder and the remedy are told."""
    document = {
        "mcpServers": {"s": {"command": "user"}, "t": {"command": "user"}},
        "projects": {
            str(tmp_path): {
                "mcpServers": {"s": {"command": "project"}, "off": {"command": "x"}},
                "disabledMcpServers": ["off"],
            },
            "/other": {"mcpServers": {"s": {"command": "other"}}, "allowedTools": []},
            "/third": {"history": []},
        },
    }
    path = tmp_path / ".claude.json"
    path.write_text(json.dumps(document))
    refused = []
    servers = MCPServer.load(path, pins=MemoryPins(), project=tmp_path, on_refused=refused.append)
    assert [(each.name, each.transport.command) for each in servers] == [("s", "project"), ("t", "user")]
    assert [each.name for each in refused] == ["s"]
    assert "is of the project /other: give MCPServer.load(project=...)" in refused[0].why
    assert len(load_entries(path, ENVIRONMENT).refused) == 2


def test_lists_of_tools_restrict_and_never_grant(tmp_path):
    """`includeTools` and `excludeTools` count; `trust` and `autoApprove` of another host give no rights here."""
    plain = {
        "command": "x",
        "includeTools": ["read_*"],
        "excludeTools": ["read_x"],
        "trust": True,
        "autoApprove": ["y"],
    }
    (found,) = load(tmp_path, {"mcpServers": {"s": plain}}).entries
    policy = found.options["tool_policy"]
    assert (policy.allow, policy.deny, policy.trusted, policy.confirm) == (("read_*",), ("read_x",), False, None)


def test_an_input_is_asked_for_once(tmp_path):
    """Its description is passed on; without an answer its default counts, or the entry is refused."""
    asked = []

    def answer(field):
        asked.append((field.id, field.description, field.is_secret))
        return {"a": "one"}.get(field.id)

    servers = {
        "x": {"command": "${input:a}", "args": ["${input:a}", "${input:b}"]},
        "y": {"command": "${input:c}"},
    }
    described = [{"id": "a", "description": "First", "password": True}, {"id": "b", "default": "two"}]
    loaded = load(tmp_path, {"inputs": described, "servers": servers}, ask=answer)
    assert loaded.entries[0].transport.args == ["one", "two"]
    assert asked == [("a", "First", True), ("b", "", False), ("c", "", False)]
    assert [each.name for each in loaded.refused] == ["y"]
    assert "set the variable AGENTFSM_INPUT_C" in loaded.refused[0].why


def test_a_choice_of_an_input(tmp_path):
    """Only its options are taken."""
    document = {
        "inputs": [{"id": "r", "type": "pickString", "options": ["eu", {"label": "US", "value": "us"}]}],
        "servers": {"s": {"command": "${input:r}"}},
    }
    assert load(tmp_path, document, ask=lambda _: "us").entries[0].transport.command == "us"
    with pytest.raises(MCPServerError, match="must be one of 'eu', 'us'"):
        load(tmp_path, document, ask=lambda _: "xx")


def test_names_of_an_env_file_are_approved(tmp_path):
    """A variable that appears in the file later needs another approval; its value does not."""
    document = {"servers": {"s": {"command": "x", "envFile": ".env"}}}
    texts = []
    for content in ("A=1", "A=2", "A=2\nNODE_OPTIONS=--require=./evil.js"):
        (tmp_path / ".env").write_text(content)
        (entry,) = load(tmp_path, document).entries
        texts.append(build_start_text(entry.transport, entry.raw))
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ('A="x # y" # z', "x # y"),
        ("A=x # y", "x"),
        ("A=x#y", "x#y"),
        ("A='a\\nb'", "a\\nb"),
        ('A="a\\nb"', "a\nb"),
        ("A=", ""),
        ("export A = x=y", "x=y"),
    ],
)
def test_lines_of_an_env_file(tmp_path, content, found):
    """As shells and VS Code read them."""
    (tmp_path / ".env").write_text(content)
    (entry,) = load(tmp_path, {"servers": {"s": {"command": "x", "envFile": ".env"}}}).entries
    assert entry.transport.env == {"A": found}


@pytest.mark.parametrize(
    ("content", "why"),
    [(None, "cannot be read"), ("A=b\n=c", "line 2"), ("A" * 100_001, "larger"), (b"\xff", "cannot be read")],
)
def test_an_env_file_that_is_none(tmp_path, content, why):
    """The entry is refused with the file."""
    if content is not None:
        (tmp_path / ".env").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(MCPServerError, match=why):
        load(tmp_path, {"servers": {"s": {"command": "x", "envFile": ".env"}}})


# Publishers.

REGISTRY = {
    "$schema": "https://static.modelcontextprotocol.io/schemas/2025-12-11/server.schema.json",
    "name": "io.github.ann/weather",
    "description": "Weather.",
    "version": "1.2.0",
}
PACKAGE = {
    "registryType": "npm",
    "identifier": "@ann/weather",
    "version": "1.2.0",
    "transport": {"type": "stdio"},
    "packageArguments": [
        {"type": "positional", "value": "serve"},
        {"type": "named", "name": "--city", "default": "Bern"},
        {"type": "named", "name": "--quiet"},
        {"type": "positional", "valueHint": "unused"},
    ],
    "environmentVariables": [
        {"name": "API_KEY", "isRequired": True, "isSecret": True},
        {"name": "URL", "value": "https://{region}.example.org", "variables": {"region": {"default": "eu"}}},
        {"name": "UNUSED"},
    ],
}


def test_a_package_of_the_registry(tmp_path):
    """Its runner, its version, its arguments and its variables; what the user gives comes from the environment."""
    (entry,) = load(tmp_path, REGISTRY | {"packages": [PACKAGE]}, "server.json").entries
    assert entry.name == "weather"
    assert stands_for(entry.transport) == command(
        "npx",
        "-y",
        "@ann/weather@1.2.0",
        "serve",
        "--city",
        "Bern",
        "--quiet",
        API_KEY="k3y",
        URL="https://eu.example.org",
    )
    assert "k3y" not in json.dumps(entry.raw)


@pytest.mark.parametrize(
    ("package", "args"),
    [
        ({"registryType": "pypi", "identifier": "weather", "version": "1"}, ["uvx", "weather==1"]),
        (
            {"registryType": "oci", "identifier": "ghcr.io/ann/weather:1"},
            ["docker", "run", "-i", "--rm", "ghcr.io/ann/weather:1"],
        ),
        (
            {
                "registryType": "oci",
                "identifier": "w",
                "version": "1",
                "environmentVariables": [{"name": "A", "value": "b"}],
            },
            ["docker", "run", "-i", "--rm", "-e", "A", "w:1"],
        ),
        (
            {
                "registryType": "npm",
                "identifier": "w",
                "runtimeArguments": [{"type": "named", "name": "--x", "value": "y"}],
            },
            ["npx", "-y", "--x", "y", "w"],
        ),
    ],
)
def test_runners(tmp_path, package, args):
    """Each registry of packages has its own."""
    (entry,) = load(tmp_path, {"server": REGISTRY | {"packages": [package]}, "_meta": {}}).entries
    assert [entry.transport.command, *entry.transport.args] == args


def test_a_remote_of_the_registry(tmp_path):
    """It is used where no package can be."""
    remote = {
        "type": "streamable-http",
        "url": "https://{tenant}.example.org/mcp",
        "variables": {"tenant": {"default": "acme"}},
        "headers": [
            {
                "name": "Authorization",
                "value": "Bearer {api_key}",
                "variables": {"api_key": {"isSecret": True, "isRequired": True}},
            }
        ],
    }
    document = REGISTRY | {"packages": [{"registryType": "mcpb", "identifier": "https://x"}], "remotes": [remote]}
    (entry,) = load(tmp_path, document).entries
    assert stands_for(entry.transport) == http("https://acme.example.org/mcp", Authorization="Bearer k3y")


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ({"packages": []}, "it has no package"),
        ({"packages": [{"registryType": "mcpb", "identifier": "https://x"}]}, "'mcpb' are not supported"),
        ({"packages": [{"registryType": "npm", "identifier": "--eval=x"}]}, "read as an option"),
        ({"packages": [{"registryType": "npm"}]}, "it lacks a part"),
        ({"packages": [PACKAGE | {"transport": {"type": "sse"}}]}, "start it, and list its URL"),
        ({"remotes": [{"type": "ws", "url": "https://x"}]}, "'ws' is not supported"),
        ({"packages": [PACKAGE | {"packageArguments": [{"type": "positional", "value": "${TOKEN}"}]}]}, "not expanded"),
    ],
)
def test_a_publisher_whose_server_cannot_be_used(tmp_path, parts, why):
    """The reason is given; our environment is never filled in."""
    with pytest.raises(MCPServerError, match=why):
        load(tmp_path, REGISTRY | parts)


MANIFEST = {
    "manifest_version": "0.3",
    "name": "weather-bundle",
    "version": "1.0.0",
    "description": "Weather.",
    "author": {"name": "Ann"},
    "server": {
        "type": "binary",
        "entry_point": "server/run",
        "mcp_config": {
            "command": "${__dirname}/server/run",
            "args": ["--dir=${HOME}", "${user_config.folders}", "${user_config.extra}"],
            "env": {"KEY": "${user_config.api_key}", "LOUD": "${user_config.loud}"},
            "platform_overrides": {sys.platform: {"env": {"KEY": "${user_config.api_key}", "OS": "here"}}},
        },
    },
    "user_config": {
        "api_key": {"type": "string", "title": "Key", "description": "Key", "sensitive": True, "required": True},
        "folders": {"type": "directory", "title": "F", "description": "F", "multiple": True, "default": ["/a", "/b"]},
        "extra": {"type": "string", "title": "E", "description": "E"},
        "loud": {"type": "boolean", "title": "L", "description": "L", "default": False},
    },
}


@pytest.fixture
def bundle(tmp_path, monkeypatch):
    """The function that makes a bundle; it is unpacked below a home of its own."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("AGENTFSM_INPUT_API_KEY", "k3y")

    def make(manifest=MANIFEST, **files):
        path = tmp_path / "weather.mcpb"
        with zipfile.ZipFile(path, "w") as archive:
            if manifest is not None:
                archive.writestr("manifest.json", json.dumps(manifest))
            program = zipfile.ZipInfo("server/run")
            program.external_attr = (stat.S_IFREG | 0o755) << 16
            archive.writestr(program, "#!/bin/sh\n")
            for name, (content, mode) in files.items():
                member = zipfile.ZipInfo(name)
                member.external_attr = mode << 16
                archive.writestr(member, content)
        return path

    return make


def test_a_bundle(bundle, tmp_path):
    """It is unpacked once, beside its hash, and its configuration is filled in."""
    path = bundle()
    (server,) = MCPServer.load(path, pins=MemoryPins())
    program = Path(server.transport.command)
    assert server.name == "weather-bundle"
    assert program.is_relative_to(tmp_path / "home" / ".agentfsm" / "mcp-bundles")
    assert program.stat().st_mode & stat.S_IXUSR
    assert list(server.transport.args) == [f"--dir={tmp_path / 'home'}", "/a", "/b"]
    assert server.transport.env == {"KEY": "k3y", "OS": "here"}
    assert (server.tool_policy.trusted, server.tool_policy.confirm) == (False, None)
    (again,) = MCPServer.load(path, pins=MemoryPins())
    assert again.start == server.start
    (other,) = MCPServer.load(bundle(more=("x", stat.S_IFREG | 0o644)), pins=MemoryPins())
    assert other.start != server.start


def test_a_bundle_grants_itself_nothing(bundle):
    """Keys of this package in its configuration are unknown ones."""
    server = MANIFEST["server"]
    path = bundle(MANIFEST | {"server": server | {"mcp_config": server["mcp_config"] | {"trusted": True}}})
    with pytest.raises(MCPServerError, match="unknown key 'trusted'"):
        MCPServer.load(path, pins=MemoryPins())


@pytest.mark.parametrize(
    ("name", "mode", "why"),
    [
        ("../x", stat.S_IFREG | 0o644, "leads out"),
        ("/etc/x", stat.S_IFREG | 0o644, "leads out"),
        ("..\\x", stat.S_IFREG | 0o644, "leads out"),
        ("link", stat.S_IFLNK | 0o777, "leads out"),
    ],
)
def test_a_bundle_that_leads_out_of_its_folder(bundle, tmp_path, name, mode, why):
    """Nothing of it is kept."""
    with pytest.raises(MCPServerError, match=why):
        MCPServer.load(bundle(**{name: ("/etc", mode)}), pins=MemoryPins())
    assert list((tmp_path / "home" / ".agentfsm" / "mcp-bundles").iterdir()) == []


def test_a_bundle_that_is_none(bundle, tmp_path):
    """No archive, no manifest, or one for another platform."""
    (tmp_path / "x.mcpb").write_bytes(b"x")
    with pytest.raises(MCPServerError, match="not a zip file"):
        MCPServer.load(tmp_path / "x.mcpb", pins=MemoryPins())
    with pytest.raises(MCPServerError, match=r"no manifest\.json"):
        MCPServer.load(bundle(None), pins=MemoryPins())
    with pytest.raises(MCPServerError, match="is for amiga"):
        MCPServer.load(bundle(MANIFEST | {"compatibility": {"platforms": ["amiga"]}}), pins=MemoryPins())


# OAuth.

SECRET = {"client_id": "a", "client_secret": "t0p", "issuer": "https://id.example.org"}


@pytest.mark.parametrize(
    ("written", "settings"),
    [
        ({"auth": "oauth"}, {}),
        ({"auth": {"client_id": "a", "client_secret": "${TOKEN}", "issuer": "https://id.example.org"}}, SECRET),
        ({"oauth": {"clientId": "a", "callbackPort": 4321}}, {"client_id": "a", "callback_port": 4321}),  # Claude Code
        ({"oauth": {"enabled": True, "scopes": ["read"]}}, {"scopes": ["read"]}),  # Gemini
        ({"authProviderType": "dynamic_discovery"}, {}),  # Gemini
        ({"type": "remote", "oauth": {}}, {}),  # opencode
        (
            {"type": "remote", "oauth": {"clientId": "a", "scope": "read write"}},
            {"client_id": "a", "scopes": ["read", "write"]},
        ),
        ({"auth": {"CLIENT_ID": "a", "scopes": ["read"]}}, {"client_id": "a", "scopes": ["read"]}),  # Cursor
    ],
)
def test_logins_of_hosts(tmp_path, written, settings):
    """Whatever the key is called, the settings are ours."""
    [entry] = load(tmp_path, {"mcpServers": {"s": {"url": URL, **written}}}).entries
    assert entry.transport.auth == OAuth(**settings)


@pytest.mark.parametrize("written", [{}, {"oauth": False}, {"oauth": {"enabled": False}}])
def test_without_a_login(tmp_path, written):
    """None is added, and one that is turned off is none."""
    [entry] = load(tmp_path, {"mcpServers": {"s": {"url": URL, **written}}}).entries
    assert entry.transport.auth is None


@pytest.mark.parametrize(
    ("written", "why"),
    [
        ({"auth": "basic"}, "'auth' must be \"oauth\", or an object"),
        ({"auth": {"client_id": 5}}, "'client_id' must be a text"),
        ({"auth": {"secret": "x"}}, "unknown key 'secret'"),
        ({"oauth": {"clientId": "a", "clientSecret": "b"}}, "needs client_id= and issuer="),
        ({"authProviderType": "google_credentials"}, "'authProviderType' is not supported"),
    ],
)
def test_logins_that_cannot_be_used(tmp_path, written, why):
    """The entry is refused by name."""
    with pytest.raises(MCPServerError, match=re.escape(why)):
        load(tmp_path, {"mcpServers": {"s": {"url": URL, **written}}})


def test_a_secret_is_not_in_what_is_approved(tmp_path):
    """Its hash is, so that a change is noticed; what it is for is shown."""
    written = {"url": URL, "auth": {"client_id": "app", "client_secret": "hush", "issuer": "https://id.example.org"}}
    [entry] = load(tmp_path, {"mcpServers": {"s": written}}).entries
    texts = build_start_text(entry.transport, entry.raw).text, build_start_text(entry.transport).text
    assert not any("hush" in text for text in texts)
    assert all("https://id.example.org" in text and "sha256:" in text for text in texts)
