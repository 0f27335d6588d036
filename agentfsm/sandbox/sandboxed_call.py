"""One call in a sandbox: start the supervisor, wait for its report, and end it with the call."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

import anyio
import anyio.to_thread

from agentfsm.core.errors import MisuseError, OutcomeUnknownError
from agentfsm.ports.tool_sandbox import SandboxEnd, SandboxOutcome
from agentfsm.sandbox import bubblewrap
from agentfsm.sandbox.egress_proxy import open_proxy
from agentfsm.sandbox.function_reference import FunctionReference, list_import_path, refer_to
from agentfsm.sandbox.levels import (
    BASE_ENVIRONMENT,
    MAX_RESULT_BYTES,
    Isolation,
    build_spec,
    encode_input,
    find_isolation,
    supervisor_command,
)
from agentfsm.sandbox.process import function_call, namespaces, supervisor
from agentfsm.sandbox.rights import Rights

# Seconds in which a supervisor has to end its processes and itself, before it is killed.
_END_S: Final = 10.0
# Characters of a traceback or of printed text in a report.
_MAX_TRACE_CHARS: Final = 8_000
_MAX_REASON_CHARS: Final = 500


async def run_function(
    sandbox: Rights, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> SandboxOutcome:
    """Call a function in a sandbox; see `Sandbox.run`."""
    reference = refer_to(function)
    available = await anyio.to_thread.run_sync(find_isolation)
    may_be_unsandboxed = sandbox.allow_unsandboxed and os.name == "posix"
    isolation = available.isolation or (Isolation.UNSANDBOXED if may_be_unsandboxed else None)
    if isolation is None:
        why = "; ".join(f"{level.value}: {reason}" for level, reason in available.reasons.items())
        return SandboxOutcome(
            end=SandboxEnd.NOT_STARTED,
            level="",
            error=f"there is no sandbox on this machine ({why}). Install bubblewrap, let the container create user "
            "namespaces for an ordinary user, or set allow_unsandboxed=True if the function may run with all rights",
        )
    if missing := [path for path in (*sandbox.read, *sandbox.write) if not path.exists()]:
        return SandboxOutcome(
            end=SandboxEnd.NOT_STARTED, level="", error=f"the path {missing[0]} of the sandbox does not exist"
        )
    spec = build_spec(sandbox, isolation, reference.paths, bubblewrap.find_bubblewrap())
    given = encode_input(spec, _build_request(reference, args, kwargs))
    if spec["proxy_port"]:
        async with open_proxy(sandbox.hosts) as channel:
            report = await _supervise(given, channel.fileno())
    else:
        report = await _supervise(given, -1)
    return _read_report(sandbox, isolation, report)


def _build_request(reference: FunctionReference, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    request = {
        "module": reference.module,
        "file": reference.file,
        "name": reference.name,
        "import_path": list_import_path(reference),
        "args": [*args],
        "kwargs": dict(kwargs),
    }
    try:
        json.dumps(request)
    except (TypeError, ValueError) as error:
        raise MisuseError(f"an argument of {reference.name} cannot be passed to a sandbox as JSON: {error}") from error
    return request


async def _supervise(given: bytes, proxy_fd: int) -> bytes:
    """Run a supervisor and return its report. It is gone when this returns, raises or is cancelled."""
    process = await anyio.open_process(
        [*supervisor_command(), str(proxy_fd)],
        stderr=subprocess.STDOUT,
        cwd="/",
        env=BASE_ENVIRONMENT,
        start_new_session=True,
        pass_fds=() if proxy_fd < 0 else (proxy_fd,),
    )
    assert process.stdin is not None  # noqa: S101  for the type checker: both are pipes
    assert process.stdout is not None  # noqa: S101  as above
    try:
        with suppress(anyio.BrokenResourceError, OSError):  # it has ended; its output shows whether it had started
            await process.stdin.send(given)
        return b"".join([chunk async for chunk in process.stdout])
    except (anyio.BrokenResourceError, OSError) as error:
        raise OutcomeUnknownError(f"the output of the sandbox cannot be read: {error}") from error
    finally:
        # Its input ends, so it kills its processes, and ends when they are gone.
        with anyio.CancelScope(shield=True):
            await process.stdin.aclose()
            with anyio.move_on_after(_END_S) as waiting:
                await process.wait()
            if waiting.cancelled_caught:
                process.kill()
            await process.aclose()


def _read_report(sandbox: Rights, isolation: Isolation, written: bytes) -> SandboxOutcome:
    before, started, reported = written.partition(supervisor.STARTED)
    try:
        report = json.loads(reported)
    except ValueError:
        text = (before + reported).decode("utf-8", "replace").strip()[-_MAX_REASON_CHARS:]
        error = f"the process that watches the sandbox was ended ({text or 'no output'})"
        if not started:
            return SandboxOutcome(end=SandboxEnd.NOT_STARTED, level="", error=f"{error} before the function started")
        return SandboxOutcome(end=SandboxEnd.LOST, level=isolation.value, error=error)
    ready, result = report["result"][:1], report["result"][1:]
    output = report["output"][-_MAX_TRACE_CHARS:]
    if ready != function_call.READY.decode() and report["end"] == "ended":
        reason = (output.strip().splitlines() or ["no reason was given"])[-1]
        error = f"the sandbox could not be set up: {reason}"
        return SandboxOutcome(end=SandboxEnd.NOT_STARTED, level="", error=error, trace=output)
    if report["end"] == "timeout":
        error = f"no result within {sandbox.seconds:g} s, so the function and all that it had started were ended"
        return SandboxOutcome(end=SandboxEnd.TIMED_OUT, level=isolation.value, error=error, trace=output)
    if report["end"] == "result_too_long":
        return _fail(isolation, f"the result has more than {MAX_RESULT_BYTES >> 20} MB as JSON", output)
    try:
        ended = json.loads(result)
        if "error" in ended:
            return _read_error(sandbox, isolation, ended["error"], output)
        return SandboxOutcome(end=SandboxEnd.DONE, level=isolation.value, value=ended["value"])
    except (ValueError, TypeError, LookupError, RecursionError):  # no result, or one that the function has forged
        return _read_death(sandbox, isolation, report["exit_code"], report["cpu_s"], output)


def _fail(isolation: Isolation, error: str, trace: str = "") -> SandboxOutcome:
    return SandboxOutcome(end=SandboxEnd.FAILED, level=isolation.value, error=error, trace=trace)


def _read_death(sandbox: Rights, isolation: Isolation, exit_code: int, cpu_s: float, output: str) -> SandboxOutcome:
    """Return the outcome of a function whose process ended without a result.

    The kernel shows the end by the limit of processor time and by the filter of system calls. It does not show whether
    a process died because of memory that it did not get, so every other death is of unknown cause.
    """
    limit = sandbox.cpu_s or max(1, round(sandbox.seconds))
    number = exit_code - namespaces.SIGNAL_EXIT
    if number == signal.SIGXCPU or (number == signal.SIGKILL and cpu_s >= limit):
        return _fail(isolation, f"the function used more than {limit} s of processor time and was ended", output)
    if number == signal.SIGSYS and isolation is not Isolation.UNSANDBOXED:
        return _fail(isolation, "the function made a system call of another architecture and was ended", output)
    if number > 0:
        known = {each.value: each.name for each in signal.Signals}
        died = f"the process of the function was ended by {known.get(number, f'signal {number}')}"
    else:
        died = f"the process of the function ended with exit code {exit_code} before it returned"
    return SandboxOutcome(end=SandboxEnd.LOST, level=isolation.value, error=died, trace=output)


def _read_error(sandbox: Rights, isolation: Isolation, error: Mapping[str, Any], output: str) -> SandboxOutcome:
    kinds, text = [*map(str, error["kinds"])], str(error["text"])
    trace = (output + str(error["trace"]))[-_MAX_TRACE_CHARS:]
    if "ModelRetry" in kinds:
        return SandboxOutcome(end=SandboxEnd.RETRY, level=isolation.value, error=text, trace=trace)
    reason = f"{kinds[0]}: {text}" if text else str(kinds[0])
    if kinds[0] == "MemoryError":
        reason += f" (the sandbox has {sandbox.memory_mb} MB)"
    if kinds[0] == "PermissionError" and sandbox.write and os.geteuid() == 0:
        reason += " (the agent is root, so the function is user 65534, who needs the right to write there)"
    if kinds[0] == "ModuleNotFoundError":
        reason += " (a sandbox sees Python's packages and the function's own package only: add others to read=)"
    return _fail(isolation, reason, trace)
