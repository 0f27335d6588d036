"""Sandboxes for the functions of tools."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from agentfsm.core.validation import suggest_fields
from agentfsm.ports.tool_sandbox import SandboxOutcome
from agentfsm.sandbox.function_reference import check_signature, refer_to
from agentfsm.sandbox.rights import Rights
from agentfsm.sandbox.sandboxed_call import run_function


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
