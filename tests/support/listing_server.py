"""A server that lists what a file says, for tests; as a script it is that server, over standard input and output.

It is written by hand, since it starts in no time so, and since no library stands between it and what is wrong.
"""

import json
import sys
from pathlib import Path


def tool(name="search", **parts):
    """Return a tool as a server lists it."""
    return {"name": name, "description": f"Does {name}.", "inputSchema": {"type": "object"}, **parts}


class Listed:
    """A server in a process of its own, whose listing a test can change."""

    def __init__(self, path):
        self.path = path

    def says(self, *tools, instructions=None, results=None, lists=None):
        """Let the server list these tools from now on, return these results of calls, by tool, and have these lists."""
        state = {"tools": tools, "instructions": instructions, "results": results or {}, "lists": lists or {}}
        self.path.write_text(json.dumps(state), encoding="utf-8")
        return self

    @property
    def command(self):
        return sys.executable, [__file__, str(self.path)]

    def server(self, **options):
        from agentfsm.mcp import MCPServer  # noqa: PLC0415  the script has no use for it

        command, args = self.command
        return MCPServer.stdio(command, args, **{"name": "demo", **options})


def listed(tmp_path, *tools, **parts):
    return Listed(tmp_path / "state.json").says(*tools, **parts)


async def names(server):
    """Ask a server, close it, and return the names of the tools that are not withheld."""
    try:
        await server.update()
    finally:
        await server.aclose()
    return [each.name for each in server.tools if each.enabled is True]


def answer(path, method, params):
    state = json.loads(path.read_text(encoding="utf-8"))
    if method == "initialize":
        said = {"instructions": state["instructions"]} if state["instructions"] else {}
        version = params["protocolVersion"]
        return {
            "protocolVersion": version,
            "capabilities": {"tools": {}, **{name.partition("/")[0]: {} for name in state["lists"]}},
            "serverInfo": {"name": "", "version": ""},
        } | said
    if method in state["lists"]:
        return state["lists"][method]
    if method == "tools/list":
        return {"tools": state["tools"]}
    if method == "tools/call":
        default = {"content": [{"type": "text", "text": json.dumps(params["arguments"])}]}
        return state["results"].get(params["name"], default)
    return None


def main(path):
    for line in sys.stdin:
        message = json.loads(line)
        if "id" in message:
            result = answer(path, message["method"], message.get("params"))
            end = {"error": {"code": -32601, "message": "unknown"}} if result is None else {"result": result}
            sys.stdout.write(json.dumps({"jsonrpc": "2.0", "id": message["id"], **end}) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
