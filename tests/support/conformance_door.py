"""What the official suite starts for each client scenario: it has the scenario played by who is there already.

The suite starts a process for each of a hundred scenarios, all at once, and what they import takes seconds each. So
this one imports next to nothing, and hands the scenario to a process that has forked: see `conformance_client`.
Usage: `conformance_door.py SOCKET URL`.
"""

import json
import os
import socket
import sys

WANTED = ("MCP_CONFORMANCE_SCENARIO", "MCP_CONFORMANCE_CONTEXT")

with socket.socket(socket.AF_UNIX) as door:
    door.connect(sys.argv[1])
    asked = {"url": sys.argv[2], "env": {name: os.environ[name] for name in WANTED if name in os.environ}}
    door.sendall(json.dumps(asked).encode())
    door.shutdown(socket.SHUT_WR)
    with door.makefile("rb") as answer:
        said = answer.read()
sys.stderr.buffer.write(said)
sys.exit(0 if said.endswith(b"done\n") else 1)
