"""Run a module of the tests as an ordinary user. Linux only.

Root's own folders may hold Python and this checkout, and are closed to other users. So root gives the process a mount
namespace, in which the paths that it needs stand in a folder that is open.
"""

import os
import pwd
import stat
import subprocess
import sys
from pathlib import Path

from agentfsm.sandbox.process import syscalls

ROOT = Path(__file__).parent.parent.parent
NEEDED = sorted({Path(sys.prefix).resolve(), Path(sys.base_prefix).resolve(), ROOT})
MINUTE = 60


def run_unprivileged(module, *words):
    """Run `python -m module words` as "nobody", or as this user where that is not root; return its output."""
    done = subprocess.run(
        [sys.executable, "-m", module, *words],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1", "HOME": "/nonexistent"},
        preexec_fn=None if os.geteuid() else _become_nobody,
        capture_output=True,
        text=True,
        check=False,
        timeout=MINUTE,
    )
    assert not done.returncode, done.stderr
    return done.stdout


def _become_nobody():
    syscalls.unshare(syscalls.CLONE_NEWNS)
    syscalls.mount("", "/", "", syscalls.MS_REC | syscalls.MS_PRIVATE)
    for closed in {_find_closed(path) for path in NEEDED} - {None}:
        held = {path: os.open(path, os.O_PATH) for path in NEEDED if closed in path.parents}
        syscalls.mount("tmpfs", str(closed), "tmpfs", 0, "mode=755")
        for path, place in held.items():
            path.mkdir(parents=True, exist_ok=True)
            syscalls.mount(f"/proc/self/fd/{place}", str(path), "", syscalls.MS_BIND | syscalls.MS_REC)
            os.close(place)
    nobody = pwd.getpwnam("nobody")
    os.setgroups([])
    os.setresgid(nobody.pw_gid, nobody.pw_gid, nobody.pw_gid)
    os.setresuid(nobody.pw_uid, nobody.pw_uid, nobody.pw_uid)
    os.chdir(ROOT)


def _find_closed(path):
    """Return the outermost folder around a path that others cannot pass, or None."""
    around = reversed(path.parents)
    return next((folder for folder in around if not folder.stat().st_mode & stat.S_IXOTH), None)
