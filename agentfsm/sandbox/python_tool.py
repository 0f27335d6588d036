"""A tool with which a model runs Python code in a sandbox."""

from __future__ import annotations

from typing import Any, Final

from agentfsm.sandbox.function_sandbox import Sandbox
from agentfsm.sandbox.process.python_code import run_code
from agentfsm.tools.tool import Tool, make_tool

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
