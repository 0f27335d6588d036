"""Run a server command in a bubblewrap sandbox, which needs no setup and no privileges.

The server sees the system's programs and libraries, and of all other files only those in `read` and `write`. It has its
own process space and /tmp, no network unless allowed, and none of our environment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import attrs

from agentfsm.core.value import Value
from agentfsm.mcp.errors import MCPServerError
from agentfsm.sandbox.bubblewrap import BASE_OPTIONS, Mount, build_mount_options, find_bubblewrap, list_mounts
from agentfsm.sandbox.rights import to_paths

# Files needed to resolve hosts.
_NETWORK_PATHS: Final = ("/etc/hosts", "/etc/resolv.conf")
_HOME: Final = "/tmp"  # noqa: S108  a private tmpfs in memory
_KERNEL_OPTIONS: Final = ("--proc", "/proc", "--dev", "/dev", "--tmpfs", _HOME)


@attrs.frozen(kw_only=True)
class ServerSandbox(Value):
    """Rights of a server command: `ServerSandbox(read=["/srv/docs"], write=["/srv/notes"], network=True)`.

    An interpreter outside of /usr, such as one in a home folder, has to be listed in `read`.
    """

    read: tuple[Path, ...] = attrs.field(default=(), converter=to_paths)
    """Files and folders that the server may read, in addition to the system's programs and libraries."""

    write: tuple[Path, ...] = attrs.field(default=(), converter=to_paths)
    """Files and folders that the server may read and change."""

    network: bool = False
    """Whether the server may use the network."""

    @property
    def description(self) -> str:
        """The rights, as text for a person."""
        reads = f"reads {', '.join(map(str, self.read)) or 'nothing but the system'}"
        writes = f"writes {', '.join(map(str, self.write)) or 'nothing'}"
        return f"{reads}; {writes}; {'with' if self.network else 'without'} network"

    @property
    def as_json(self) -> dict[str, Any]:
        """The rights, as JSON."""
        return {"read": [*map(str, self.read)], "write": [*map(str, self.write)], "network": self.network}

    def wrap_command(
        self, command: str, args: Sequence[str], env: Mapping[str, str], cwd: Path | str | None
    ) -> tuple[str, list[str]]:
        """Return the program and arguments that start a command in the sandbox.

        Raises:
            MCPServerError: when bubblewrap is not installed, or a path in `read` or `write` does not exist.
        """
        program = find_bubblewrap()
        if program is None:
            raise MCPServerError(
                "a sandbox needs bubblewrap, which is not installed: install it (`apt-get install bubblewrap`, `dnf "
                "install bubblewrap`; Linux only), or remove sandbox= if the server may run with all your rights"
            )
        if missing := [path for path in (*self.read, *self.write) if not path.exists()]:
            raise MCPServerError(
                f"the path {missing[0]} of the sandbox does not exist: create it, or remove it from the sandbox"
            )
        folder = ["--chdir", str(Path(cwd).absolute())] if cwd else ["--chdir", _HOME]
        home = [] if "HOME" in env else ["--setenv", "HOME", _HOME]
        network = ["--share-net"] if self.network else []
        paths = [Path(path) for path in _NETWORK_PATHS] if self.network else []
        mounts = [Mount("read", str(path.resolve()), str(path)) for path in paths if path.exists()]
        mounts += list_mounts(self.read, self.write)
        return program, [
            *(*BASE_OPTIONS, *network, *_KERNEL_OPTIONS, *build_mount_options(mounts)),
            *(*folder, *home, "--", command, *args),
        ]
