"""Sandboxes for the functions of tools, and the tool with which a model runs Python code."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import attrs

from agentfsm.core.validation import suggest_fields
from agentfsm.ports.tool_sandbox import SandboxOutcome
from agentfsm.sandbox.function_reference import check_signature, refer_to
from agentfsm.sandbox.process.python_code import run_code
from agentfsm.sandbox.rights import Rights
from agentfsm.sandbox.sandboxed_call import run_function
from agentfsm.tools.tool import Tool, make_tool


@attrs.frozen(kw_only=True)
class Sandbox(Rights):
    """Place for the function of a tool, a process of its own with few rights: `@tool(sandbox=Sandbox())`.

    The function sees the system's programs and libraries, Python with its packages, its own module or package, and of
    all other files only those in `read` and `write`. It has no network but the `hosts`, none of our environment, a
    private /tmp, and cannot start processes.
    """

    def check_function(self, function: Callable[..., Any]) -> None:
        """Check that another process can load the function, and that its arguments can be passed as JSON.

        Raises:
            MisuseError: if not.
        """
        check_signature(function)
        refer_to(function)

    async def run(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> SandboxOutcome:
        """Call the function in the sandbox.

        When this returns, raises or is cancelled, no process of the call is left.
        """
        return await run_function(self, function, args, kwargs)


suggest_fields(Sandbox, timeout="seconds", timeout_s="seconds", allowed_hosts="hosts", allowed_paths="read")


RUN_PYTHON: Final = "run_python"
_DESCRIPTION: Final = """Run Python code and return what it printed, the value of its last line if that is an \
expression, and its error if it raised one. Each call starts anew: no variables or files are kept. {rights}."""


def build_python_tool(sandbox: Sandbox | None = None, *, reads_private: bool = False) -> Tool[..., Any]:
    """Return the tool `run_python`, which runs code that the model writes.

    Without `write` and `hosts` in its sandbox, a call has no effect, so the tool is read-only. With hosts, it is
    labelled as one that sends data out and reads untrusted text.

    Args:
        sandbox: Rights and limits of the code. None: `Sandbox()`.
        reads_private: Whether the files that the code may read are private data.
    """
    rights = Sandbox() if sandbox is None else sandbox
    has_hosts = bool(rights.hosts)
    return make_tool(
        run_code,
        name=RUN_PYTHON,
        description=_DESCRIPTION.format(rights=f"The code {rights.description}"),
        sandbox=rights,
        read_only=not rights.write and not has_hosts,
        reads_private=reads_private,
        reads_untrusted=has_hosts,
        sends_out=has_hosts,
    )
