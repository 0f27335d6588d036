"""Inside the sandbox: restrict this process, load the function, call it, and write its result as JSON."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from types import ModuleType
from typing import Any, Final

from agentfsm.sandbox.process import namespaces, restrictions, syscalls

# Exit code of a process whose sandbox could not be set up.
SETUP_FAILED: Final = 97
# First byte of a result: the sandbox is set up, and the function may have started.
READY: Final = b"+"
_LOADED_NAME: Final = "__sandboxed__"
_RESERVED_NAME: Final = "agentfsm"


def run_in_sandbox(spec: Mapping[str, Any], request: bytes, result_fd: int, proxy_fd: int) -> None:
    """Restrict this process, run the function of the request, and end the process.

    Args:
        spec: Rights and limits, as `launch.build_spec` writes them.
        request: JSON of the function, its arguments and the import path.
        result_fd: File descriptor that the result is written to.
        proxy_fd: Socket that the listening socket of the proxy is sent to; -1 for none.
    """
    try:
        _restrict(spec, proxy_fd)
    except OSError as error:
        sys.stderr.write(f"{error}\n")
        sys.stderr.flush()
        os._exit(SETUP_FAILED)
    write_all(result_fd, READY)
    end = _call(json.loads(request))
    write_all(result_fd, json.dumps(end).encode("ascii"))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads of the function end here, too


def _restrict(spec: Mapping[str, Any], proxy_fd: int) -> None:
    level = spec["level"]
    if level == "namespaces+landlock":
        namespaces.enter_namespaces(spec)
    if proxy_fd >= 0:
        _send_listener(proxy_fd, int(spec["proxy_port"]))
    is_root = level != "unsandboxed" and os.geteuid() == 0
    is_shared_user = is_root and bool(spec["write"])
    if is_root:
        restrictions.leave_root(is_shared_user=is_shared_user)
    restrictions.limit_resources(spec, is_shared_user=is_shared_user)
    if level != "unsandboxed":
        restrictions.give_up_rights(spec)
    os.chdir(spec["folder"])


def _send_listener(proxy_fd: int, port: int) -> None:
    """Open a socket in this network, which has no other hosts, and hand it to the proxy outside."""
    with socket.socket(fileno=proxy_fd) as channel, socket.create_server(("127.0.0.1", port)) as listener:
        socket.send_fds(channel, [b"."], [listener.fileno()])


def _call(request: Mapping[str, Any]) -> dict[str, Any]:
    if not request:  # only the sandbox is tried
        return {"value": None}
    _forget_own_modules()
    sys.path[:] = request["import_path"]
    try:
        function = _load(request)
        value = function(*request["args"], **request["kwargs"])
        json.loads(json.dumps(value), object_pairs_hook=_refuse_equal_keys)
    except BaseException as error:  # noqa: BLE001  whatever the function raises is its result
        return {"error": _describe(error)}
    return {"value": value}


def _refuse_equal_keys(pairs: Sequence[tuple[str, Any]]) -> None:
    keys = [key for key, _ in pairs]
    if len(set(keys)) < len(keys):
        raise ValueError(f"two of its keys are equal as text, among {keys!r:.200}: return keys that differ as text")


def _forget_own_modules() -> None:
    """Let the function import the package itself, of which this process has loaded a few files only."""
    for name in [name for name in sys.modules if name.partition(".")[0] == _RESERVED_NAME]:
        del sys.modules[name]


def _load(request: Mapping[str, Any]) -> Callable[..., Any]:
    module = _load_file(request["file"]) if request["file"] else importlib.import_module(request["module"])
    found: Any = reduce(getattr, request["name"].split("."), module)
    # In its module, the name of a function with the decorator `tool` is that of the tool.
    function: Callable[..., Any] = found.function if type(found).__name__ == "Tool" else found
    return function


def _load_file(path: str) -> ModuleType:
    found = importlib.util.spec_from_file_location(_LOADED_NAME, path)
    if found is None or found.loader is None:
        raise ImportError(f"{path} is not a file of Python code", path=path)
    module = importlib.util.module_from_spec(found)
    sys.modules[_LOADED_NAME] = module
    found.loader.exec_module(module)
    return module


def _describe(error: BaseException) -> dict[str, Any]:
    kinds = [kind.__name__ for kind in type(error).__mro__]
    try:
        text = str(error)
        trace = "".join(traceback.format_exception(error))
    except BaseException:  # noqa: BLE001  a broken __str__ must not hide the error
        text, trace = "(its text cannot be read)", ""
    return {"kinds": kinds, "text": text, "trace": trace}


def write_all(fd: int, content: bytes) -> None:
    """Write all bytes to a file descriptor."""
    view = memoryview(content)
    while view:
        view = view[os.write(fd, view) :]


def main() -> None:
    """Run a function in a process that bubblewrap has started. The file descriptors are arguments."""
    request_fd, result_fd, proxy_fd = map(int, sys.argv[-3:])
    syscalls.die_with_parent(signal.SIGKILL)
    with os.fdopen(request_fd, "rb") as source:
        spec, request = json.loads(source.readline()), source.read()
    run_in_sandbox(spec, request, result_fd, proxy_fd)
