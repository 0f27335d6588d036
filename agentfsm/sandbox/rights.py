"""The rights and limits of a function that runs in a sandbox."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

import attrs

from agentfsm._lib.public_network import to_hosts
from agentfsm.core.errors import MisuseError
from agentfsm.core.validation import BOOL, COUNT, SECONDS, ValueRule
from agentfsm.core.value import Value

# Defaults of document H, 5.2.
DEFAULT_SECONDS: Final = 30.0
DEFAULT_MEMORY_MB: Final = 256
# The least memory in which Python starts.
MIN_MEMORY_MB: Final = 64
# Folders of the kernel, which are no files.
_KERNEL_FOLDERS: Final = ("/", "/proc", "/sys", "/dev")


def to_paths(given: Iterable[Path | str]) -> tuple[Path, ...]:
    """Return absolute paths.

    Raises:
        MisuseError: if it is not a sequence of paths.
    """
    if isinstance(given, str | Path) or not isinstance(given, Iterable):
        raise MisuseError(
            f"read= and write= of a sandbox must be sequences of paths, not {given!r}: write ({given!r},)"
        )
    return tuple([Path(path).expanduser().absolute() for path in given])


def _to_hosts(given: Iterable[str]) -> tuple[str, ...]:
    return to_hosts(given, "a sandbox")


def _is_environment(value: object) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(name, str) and isinstance(text, str) and name and "=" not in name and "\0" not in name + text
        for name, text in value.items()
    )


_ENVIRONMENT: Final = ValueRule(
    fits=_is_environment, wanted="a mapping of names to strings, without '=' in a name and null characters"
)


@attrs.frozen(kw_only=True)
class Rights(Value):
    """Rights and limits of a function in a sandbox."""

    seconds: float = attrs.field(default=DEFAULT_SECONDS, validator=SECONDS)
    """Seconds until the function and all that it has started are ended, above 0."""

    cpu_s: int | None = attrs.field(default=None, validator=COUNT.or_none())
    """Seconds of processor time of each process, 1 or more. None: `seconds`."""

    memory_mb: int = attrs.field(default=DEFAULT_MEMORY_MB, validator=COUNT)
    """Maximum of address space of each process in mebibytes, 64 or more. Libraries such as pandas need more than the
    default, 256.
    """

    processes: int = attrs.field(default=1, validator=COUNT)
    """Processes and threads that may run at once, 1 or more. With 1 the function cannot start processes, but up to 64
    threads.
    """

    read: tuple[Path, ...] = attrs.field(default=(), converter=to_paths)
    """Files and folders that the function may read."""

    write: tuple[Path, ...] = attrs.field(default=(), converter=to_paths)
    """Files and folders that the function may read and change. Where the agent runs as root, the function runs as
    user 65534, who needs the right to write there.
    """

    hosts: tuple[str, ...] = attrs.field(default=(), converter=_to_hosts)
    """Hosts that the function may connect to by HTTP or HTTPS: "api.example.org", "*.example.org" for all names below
    it, or either with a port; without one, ports 80 and 443. It has to use the proxy that HTTP_PROXY and HTTPS_PROXY
    name, as the usual libraries do.
    """

    env: Mapping[str, str] = attrs.field(factory=dict, validator=_ENVIRONMENT, repr=False)
    """Environment variables of the function, beside PATH, HOME, LANG and TMPDIR."""

    allow_unsandboxed: bool = attrs.field(default=False, validator=BOOL)
    """Whether the function may run in a process without isolation where there is no sandbox. Of all rights and limits,
    only the time, the memory and the environment are then enforced.
    """

    def __attrs_post_init__(self) -> None:
        if self.memory_mb < MIN_MEMORY_MB:
            raise MisuseError(
                f"Sandbox(memory_mb={self.memory_mb}): give {MIN_MEMORY_MB} or more, so that Python starts"
            )
        for path in (*self.read, *self.write):
            real = path.resolve()  # a link, or ".." may lead there
            if str(real) == "/" or any(str(part) in _KERNEL_FOLDERS[1:] for part in (real, *real.parents)):
                raise MisuseError(
                    f"a sandbox cannot show {path}, which holds more than files: list the folders that are needed"
                )
            if outer := next((folder for folder in self.write if folder.resolve() in real.parents), None):
                raise MisuseError(
                    f"the path {path} of a sandbox is inside {outer}, where the function may replace it: leave it out"
                )

    @property
    def description(self) -> str:
        """The rights, as text for a person."""
        reads = f"reads {', '.join(map(str, self.read)) or 'nothing but the system'}"
        writes = f"writes {', '.join(map(str, self.write)) or 'nothing'}"
        hosts = f"connects to {', '.join(self.hosts)}" if self.hosts else "without network"
        return f"{reads}; {writes}; {hosts}; {self.seconds:g} s; {self.memory_mb} MB"
