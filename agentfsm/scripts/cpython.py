"""The interpreter of this process's Python, in a sandbox, for scripts that need installed packages."""

from __future__ import annotations

from typing import Any

import attrs

from agentfsm.core.errors import MisuseError, ModelUnavailableError
from agentfsm.core.validation import require_type
from agentfsm.core.value import Value
from agentfsm.ports.tool_sandbox import SandboxEnd
from agentfsm.sandbox import Sandbox
from agentfsm.sandbox.process.python_code import MAX_PRINTED_CHARS, run_script
from agentfsm.scripts.interpreter import ScriptCall, ScriptEnd, ScriptSource, ScriptStep


@attrs.frozen(kw_only=True)
class CPython(Value):
    """Python with its packages, in a process with few rights that is started anew after each call of the script.

    The time that `time.time()` returns, `time.sleep` and the numbers of `random` come from the run; those of
    `datetime.now()`, of other packages and of threads do not. A script that makes other calls when it runs again ends
    with an error that names the difference.

    Raises:
        MisuseError: if the sandbox may write files or use the network: a script starts again after each of its calls.
    """

    sandbox: Sandbox = attrs.field(
        factory=Sandbox, kw_only=False, validator=require_type(Sandbox, wanted="a Sandbox of agentfsm.sandbox")
    )
    """Rights and limits of the script, those of one run from its start. Default `Sandbox()`."""

    name = "cpython"

    def __attrs_post_init__(self) -> None:
        if self.sandbox.write or self.sandbox.hosts:
            raise MisuseError(
                "CPython(sandbox): a script runs again from its start after each of its calls, so its sandbox can have "
                "neither write= nor hosts=; give the script tools for these"
            )

    @property
    def description(self) -> str:
        """Text for the model about the rights of a script."""
        return f"The code {self.sandbox.description}."

    async def advance(self, source: ScriptSource) -> ScriptStep:
        """Run a script from its start until it waits or ends.

        Raises:
            ModelUnavailableError: if the sandbox cannot be set up.
        """
        given: dict[str, Any] = attrs.asdict(source)
        outcome = await self.sandbox.run(run_script, [given], {})
        if outcome.end is SandboxEnd.NOT_STARTED:
            raise ModelUnavailableError(f"no script can be run: {outcome.error}")
        if outcome.end is not SandboxEnd.DONE:
            return ScriptStep(calls=(), end=ScriptEnd(error=outcome.error))
        try:
            return _read_step(outcome.value)
        except (TypeError, ValueError, LookupError):
            return ScriptStep(calls=(), end=ScriptEnd(error="the script has changed what runs it, so it was ended"))


def _read_step(found: Any) -> ScriptStep:
    """Return the step that the process has written, which the script may have forged.

    Raises:
        TypeError, ValueError, LookupError: if it is none.
    """
    calls = [
        ScriptCall(tool=str(each["tool"]), arguments=dict(each["arguments"]), line=int(each["line"]))
        for each in found["calls"]
    ]
    error = None if found["end"] is None or found["end"]["error"] is None else str(found["end"]["error"])
    end = None if found["end"] is None else ScriptEnd(value=found["end"]["value"], error=error)
    return ScriptStep(calls=tuple(calls), printed=str(found["printed"])[: 2 * MAX_PRINTED_CHARS], end=end)
