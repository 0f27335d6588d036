"""Try to get out of sandboxes; as a program, print what each attempt led to, for each level of isolation.

The function is told where to look: at files that it may not see, and at sockets that are listened to.
"""

import json
import os
import secrets
import shutil
import socket
import sys
import tempfile
from contextlib import ExitStack, contextmanager
from pathlib import Path

import anyio

from agentfsm.sandbox import Isolation, Sandbox, find_isolation
from tests.support import sandbox_functions

LEVELS = (Isolation.BUBBLEWRAP, Isolation.NAMESPACES)


@contextmanager
def outside():
    """Make a folder with something to read, a place to write to, and a secret; and sockets to connect to."""
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for folder, mode in ((place, 0o755), (place / "read", 0o755), (place / "write", 0o777)):
            folder.mkdir(exist_ok=True)
            folder.chmod(mode)
        (place / "read" / "note").write_text("a note")
        (place / "secret").write_text("hush")
        name = f"agentfsm-{secrets.token_hex(8)}"
        for address in (f"\0{name}", str(place / "read" / "socket")):
            listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(address)
            listener.listen()
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        yield place, name, listener.getsockname()[1]


async def try_escapes():
    """Run all attempts in a sandbox; return its level, and what each led to."""
    with outside() as (place, name, port):
        sandbox = Sandbox(read=[place / "read"], write=[place / "write"])
        arguments = (str(place), name, port, os.getpid())
        ended = await sandbox.run(sandbox_functions.try_everything, arguments, {})
        assert ended.value is not None, ended
        assert (place / "secret").read_text() == "hush"
        return {**ended.value, "level": ended.level, "owner": (place / "write" / "new").stat().st_uid}


@contextmanager
def without_bubblewrap():
    """Have bubblewrap not be found."""
    which = shutil.which
    shutil.which = lambda *_args, **_options: None
    try:
        yield
    finally:
        shutil.which = which


def main():
    """Print a JSON object: the level, or the reason why it is not there, to what the attempts led to."""
    found = {}
    for level in LEVELS:
        with ExitStack() as stack:
            if level is Isolation.NAMESPACES:
                stack.enter_context(without_bubblewrap())
            available = find_isolation()
            bomb = anyio.run(lambda: Sandbox(processes=8, seconds=20).run(sandbox_functions.fork_bomb, (), {}))
            found[level] = (
                anyio.run(try_escapes) | {"bomb": bomb.value, "uid": os.geteuid()}
                if available.isolation is level
                else available.description
            )
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
