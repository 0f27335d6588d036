"""Run a server command in a bubblewrap sandbox, which needs no setup and no privileges.

The server sees the system's programs and libraries, and of all other files only those in `read` and `write`. It has its
own process space and /tmp, no network unless allowed, and none of our environment.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import attrs

from agentfsm.core.errors import MisuseError
from agentfsm.core.value import Value
from agentfsm.mcp.errors import MCPServerError

_BUBBLEWRAP: Final = "bwrap"
# Programs and libraries, which are world-readable.
_SYSTEM_PATHS: Final = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_SETTINGS_PATHS: Final = ("/etc/alternatives", "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/localtime", "/etc/passwd")
# Files needed to resolve hosts and to check certificates.
_NETWORK_PATHS: Final = (
    "/etc/ca-certificates",
    "/etc/hosts",
    "/etc/nsswitch.conf",
    "/etc/pki",
    "/etc/resolv.conf",
    "/etc/ssl",
)
_HOME: Final = "/tmp"  # noqa: S108  a private tmpfs in memory
# Own process, user, host name and network namespaces; killed with our process; no access to our terminal.
_BASE_OPTIONS: Final = (
    *("--unshare-all", "--die-with-parent", "--new-session"),
    *("--proc", "/proc", "--dev", "/dev", "--tmpfs", _HOME),
)


def _as_paths(given: Iterable[Path | str]) -> tuple[Path, ...]:
    if isinstance(given, str | Path) or not isinstance(given, Iterable):
        raise MisuseError(
            f"read= and write= of a sandbox must be sequences of paths, not {given!r}: write ({given!r},)"
        )
    return tuple(Path(path).expanduser().absolute() for path in given)


@attrs.frozen(kw_only=True)
class Sandbox(Value):
    """Rights of a server command: `Sandbox(read=["/srv/docs"], write=["/srv/notes"], network=True)`.

    An interpreter outside of /usr, such as one in a home folder, has to be listed in `read`.
    """

    read: tuple[Path, ...] = attrs.field(default=(), converter=_as_paths)
    """Files and folders that the server may read, in addition to the system's programs and libraries."""

    write: tuple[Path, ...] = attrs.field(default=(), converter=_as_paths)
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
        program = shutil.which(_BUBBLEWRAP)
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
        return program, [*_BASE_OPTIONS, *self._mount_options(), *folder, *home, "--", command, *args]

    def _mount_options(self) -> list[str]:
        shared = (*_SYSTEM_PATHS, *_SETTINGS_PATHS, *(_NETWORK_PATHS if self.network else ()))
        return [
            *(["--share-net"] if self.network else []),
            *(part for path in shared for part in ("--ro-bind-try", path, path)),
            *(part for path in self.read for part in ("--ro-bind", str(path), str(path))),
            *(part for path in self.write for part in ("--bind", str(path), str(path))),
        ]
