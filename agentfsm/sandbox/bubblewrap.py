"""Command lines of bubblewrap, which starts programs in namespaces of their own."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from agentfsm.sandbox.mounts import Mount

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
