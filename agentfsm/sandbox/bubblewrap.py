"""Command lines of bubblewrap, which starts programs in namespaces of their own, and the files that they see."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

# Programs and libraries, which are world-readable.
_SYSTEM_PATHS: Final = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_SETTINGS_PATHS: Final = (
    *("/etc/alternatives", "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/localtime", "/etc/nsswitch.conf"),
    *("/etc/passwd", "/etc/ca-certificates", "/etc/pki", "/etc/ssl"),
)


class Mount(NamedTuple):
    """A path in a sandbox."""

    kind: str
    """ "read" or "write" for a file or folder that is shown, "link" for a symbolic link."""

    source: str
    """Path outside, or the target of the link."""

    target: str
    """Path in the sandbox."""


def list_system_mounts() -> list[Mount]:
    """Return the system's programs, libraries and settings, as far as this machine has them."""
    found = []
    for name in (*_SYSTEM_PATHS, *_SETTINGS_PATHS):
        path = Path(name)
        if path.is_symlink() and name in _SYSTEM_PATHS:
            found.append(Mount("link", str(path.readlink()), name))
        elif path.exists():
            found.append(Mount("read", str(path.resolve()), name))
    return found


def list_python_paths() -> list[Path]:
    """Return the folders of this Python and of its packages, and its program without symbolic links."""
    return [Path(sys.prefix), Path(sys.base_prefix), Path(sys.exec_prefix), Path(sys.executable).resolve()]


def list_mounts(read: Iterable[Path], write: Iterable[Path]) -> list[Mount]:
    """Return the paths in a sandbox with these rights, outer folders first, so that inner ones are mounted over them.

    A path that is a symbolic link, or lies behind one, is shown where it really is, with a link at the given place.
    """
    system = list_system_mounts()
    wanted = dict.fromkeys(read, "read") | dict.fromkeys(write, "write")
    links: list[Mount] = []
    shown: dict[Path, str] = {}
    for path, kind in wanted.items():
        real = path.resolve()
        if real != path:
            links.append(Mount("link", str(real), str(path)))
        if shown.get(real) != "write":
            shown[real] = kind
    binds: list[Mount] = []
    for path, kind in sorted(shown.items(), key=lambda item: len(item[0].parts)):
        covered = kind == "read" and _is_below(path, [Path(each.target) for each in (*system, *binds)])
        if not covered:
            binds.append(Mount(kind, str(path), str(path)))
    hidden = [Path(each.target) for each in binds]
    links = [link for link in links if not _is_below(Path(link.target), [*map(Path, _SYSTEM_PATHS), *hidden])]
    return [*system, *binds, *links]


def _is_below(path: Path, folders: Iterable[Path]) -> bool:
    return any(path == folder or folder in path.parents for folder in folders)


_PROGRAM: Final = "bwrap"
_OPTIONS: Final = {"read": "--ro-bind", "write": "--bind", "link": "--symlink"}
# Own process, user, host name and network namespaces; killed with the process that starts it; no terminal.
BASE_OPTIONS: Final = ("--unshare-all", "--die-with-parent", "--new-session")
# The same for root, which keeps the right to become another user inside.
ROOT_OPTIONS: Final = (
    *("--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"),
    *("--die-with-parent", "--new-session"),
    *("--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"),
)


def find_bubblewrap() -> str | None:
    """Return the path of the program; None if it is not installed."""
    return shutil.which(_PROGRAM)


def build_mount_options(mounts: Iterable[Mount]) -> list[str]:
    """Return the options that show these paths. Folders around them can be passed by every user."""
    mounts = [*mounts]
    around = {folder for each in mounts for folder in Path(each.target).parents[:-1]}
    folders = [part for folder in sorted(around) for part in ("--perms", "0755", "--dir", str(folder))]
    return [*folders, *(part for each in mounts for part in (_OPTIONS[each.kind], each.source, each.target))]
