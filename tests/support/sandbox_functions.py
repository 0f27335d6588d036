"""Functions that run in sandboxes, and try to get out. The standard library is all that they need."""

import ctypes
import errno
import fcntl
import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Annotated, Literal


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def echo(value: dict) -> dict:
    """Return the argument."""
    return value


def take_many(
    names: dict[str, list[int | None]], mode: Literal["a", "b"], *, size: Annotated[int, "pixels"] = 3
) -> int:
    """Take arguments of many types."""
    return len(names) + len(mode) + size


def outcome(attempt):
    """Return what an attempt led to: the name of its error, or its result as text."""
    try:
        return str(attempt())
    except OSError as error:
        return errno.errorcode.get(error.errno, type(error).__name__) if error.errno else type(error).__name__
    except Exception as error:  # noqa: BLE001  whatever it is
        return type(error).__name__


def try_everything(folder: str, abstract: str, port: int, parent: int) -> dict:
    """Try each way out, and return what each led to.

    `folder` has `read`, `write` and `secret`; `read` has a listening socket; the address and the port are listened to.
    """
    place = Path(folder)
    return {
        "user": os.geteuid(),
        "environment": sorted(os.environ),
        "fork": outcome(os.fork),
        "program": outcome(lambda: subprocess.run(["/bin/true"], check=True)),
        "gigabyte": outcome(lambda: len(bytearray(1 << 30))),
        "shared_memory": outcome(lambda: len(mmap.mmap(-1, 1 << 30))),
        "memfd": outcome(lambda: os.memfd_create("x")),
        "full_tmp": outcome(fill_tmp),
        "secret": outcome((place / "secret").read_text),
        "secret_by_link": outcome(lambda: read_by_link(place)),
        "secret_by_swap": outcome(lambda: read_by_swap(place)),
        "descriptors": outcome(lambda: len([fd for fd in range(256) if outcome(lambda: os.fstat(fd)) != "EBADF"])),  # noqa: B023
        "read": outcome((place / "read" / "note").read_text),
        "write": outcome(lambda: (place / "write" / "new").write_text("x")),
        "write_read": outcome(lambda: (place / "read" / "new").write_text("x")),
        "change_mode": outcome(lambda: (place / "read" / "note").chmod(0o777)),
        "write_system": outcome(lambda: Path("/usr/agentfsm").write_text("x")),
        "write_root": outcome(lambda: Path("/agentfsm").write_text("x")),
        "write_program": outcome(lambda: Path(sys.executable).open("ab").close()),
        "processes": outcome(lambda: [each.name for each in Path("/proc").iterdir() if each.name.isdecimal()]),
        "parent_environment": outcome(lambda: Path(f"/proc/{parent}/environ").read_bytes()),
        "kill_parent": outcome(lambda: os.kill(parent, signal.SIGKILL)),
        "trace_parent": outcome(lambda: call(101, 16, parent, 0, 0)),
        "abstract_socket": outcome(lambda: connect(socket.AF_UNIX, f"\0{abstract}")),
        "file_socket": outcome(lambda: connect(socket.AF_UNIX, str(place / "read" / "socket"))),
        "docker": outcome(lambda: connect(socket.AF_UNIX, "/var/run/docker.sock")),
        "tcp": outcome(lambda: connect(socket.AF_INET, ("127.0.0.1", port))),
        "udp": outcome(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", port))),
        "netlink": outcome(lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)),
        "vsock": outcome(lambda: socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)),
        "dns": outcome(lambda: socket.getaddrinfo("localhost.example", 80)),
        "new_user_namespace": outcome(lambda: call(272, 0x10000000)),
        "keyring": outcome(lambda: call(250, 0, -3, 0)),
        "io_uring": outcome(lambda: call(425, 1, 0)),
        "mount": outcome(lambda: call(165, None, b"/tmp", b"tmpfs", 0, None)),
        "message_queue": outcome(lambda: call(68, 0, 0o1600)),
        "pair": outcome(lambda: len(socket.socketpair())),
        "thread": outcome(start_thread),
    }


def call(number, *arguments):
    """Make a system call of x86-64."""
    result = ctypes.CDLL(None, use_errno=True).syscall(number, *arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), "refused")
    return result


def connect(family, address):
    """Connect a socket."""
    with socket.socket(family) as end:
        end.settimeout(5)
        return end.connect(address) or "connected"


def fill_tmp():
    """Write files to /tmp until there is no room."""
    for number in range(1_000):
        Path.home().joinpath(str(number)).write_bytes(bytes(1 << 20))
    return "no limit"


def read_by_link(place):
    """Read a file by a symbolic link from the folder that may be written."""
    link = place / "write" / "link"
    link.symlink_to(place / "secret")
    return link.read_text()


def read_by_swap(place):
    """Read a file by a folder that becomes a symbolic link."""
    folder = place / "write" / "folder"
    folder.mkdir()
    folder.rmdir()
    folder.symlink_to(place)
    return (folder / "secret").read_text()


def start_thread():
    """Run a thread."""
    done = []
    thread = threading.Thread(target=done.append, args=("ran",))
    thread.start()
    thread.join()
    return done[0]


def fork_bomb() -> int:
    """Start processes that start processes, until none can be started. Return how many the first one started."""
    started = 0
    try:
        while True:
            if not os.fork():
                fork_bomb()
                time.sleep(60)
            started += 1
    except OSError:
        return started


def leave_a_process(lock: str) -> str:
    """Start a process that holds a lock, keeps the output open and never ends, in a session of its own."""
    with hold(lock) as file:
        command = [sys.executable, "-c", "import time; time.sleep(600)"]
        subprocess.Popen(command, start_new_session=True, pass_fds=[file.fileno()])
    return "left"


def sleep(lock: str) -> None:
    """Hold a lock, print, and sleep."""
    with hold(lock):
        sys.stdout.write("going to sleep\n")
        sys.stdout.flush()
        time.sleep(600)


def hold(lock):
    """Lock a file, and write to it when that is done."""
    file = Path(lock).open("w", encoding="ascii")  # noqa: SIM115  the caller closes it
    fcntl.flock(file, fcntl.LOCK_EX)
    file.write("locked")
    file.flush()
    return file


def compute() -> None:
    """Compute for ever."""
    while True:
        pass


def crash() -> None:
    """End the process by a segmentation fault."""
    ctypes.string_at(0)


def take_memory() -> int:
    """Take a gigabyte."""
    return len(bytearray(1 << 30))


def open_many_files() -> int:
    """Open a thousand files."""
    return len([os.open(os.devnull, os.O_RDONLY) for _ in range(1_000)])


def call_otherwise() -> None:
    """Make a system call of the second interface of x86-64."""
    call(0x40000027)


def pay_and_wait(folder: str) -> str:
    """Write into the book that is the effect, and wait for ever the first time."""
    book = Path(folder) / "book"
    with book.open("a") as file:
        file.write("paid\n")
    if book.read_text() == "paid\n":
        time.sleep(600)
    return "paid"


def answer_at_length(chars: int) -> str:
    """Return a long text."""
    return "x" * chars


def fail(message: str) -> None:
    """Raise an error."""
    raise ValueError(message)


def fetch(urls: list) -> list:
    """Fetch URLs, and return the status and the beginning of each answer, or its error."""
    found = []
    for url in urls:
        try:
            with urllib.request.urlopen(url, timeout=5) as response:  # noqa: S310  the test's
                found.append(f"{response.status} {response.read(100).decode()}")
        except urllib.error.HTTPError as error:
            found.append(f"{error.code} {error.read(200).decode().strip()}")
        except OSError as error:
            found.append(str(error))
    return found


def write_note(folder: str) -> int:
    """Write a file."""
    return (Path(folder) / "note").write_text("a note")


def ask_again(city: str) -> str:
    """Ask the model for other arguments."""
    from agentfsm import ModelRetry  # noqa: PLC0415  in the sandbox

    raise ModelRetry(f"no city is called {city}")


def leave_by_exit() -> None:
    """End the process without a result."""
    os._exit(3)


def answer_otherwise() -> object:
    """Return what is no JSON."""
    return {1, 2}


def go_around_the_proxy(port: int) -> dict:
    """Try to connect without the proxy; then leave connections to it open that say nothing."""
    for _ in range(30):
        end = socket.create_connection(("127.0.0.1", 3128), timeout=5)
        end.send(b"CONNECT ")
        KEPT.append(end)
    return {
        "direct": outcome(lambda: connect(socket.AF_INET, ("127.0.0.1", port))),
        "file": outcome(lambda: connect(socket.AF_UNIX, "/var/run/docker.sock")),
        "dns": outcome(lambda: socket.getaddrinfo("example.org", 80)),
    }


KEPT = []


def answer_with_equal_keys() -> object:
    """Return an object whose keys are equal as JSON."""
    return {"rows": {1: "one", "1": "uno"}}
