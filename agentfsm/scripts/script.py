"""The tool that runs scripts: a sub-agent whose model is an interpreter."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Unpack

import anyio
import attrs

from agentfsm.agents.agent import Agent
from agentfsm.core.errors import MisuseError, ModelError
from agentfsm.core.limits import Limits
from agentfsm.core.messages import JSON, AssistantMessage, ErrorType, Outcome, ToolCall, ToolResult, UserMessage
from agentfsm.core.plans import read_content
from agentfsm.core.run import Run
from agentfsm.core.usage import Usage
from agentfsm.core.validation import COUNT, SECONDS
from agentfsm.ports.model import Emit, FinishReason, Model, ProposedCall, Reply, Request
from agentfsm.sandbox.process.python_code import SLEEP
from agentfsm.scripts.interpreter import Answer, Interpreter, ScriptCall, ScriptEnd, ScriptSource, ScriptStep
from agentfsm.scripts.monty import Monty
from agentfsm.scripts.stubs import find_return_hint, list_parameters, write_stub
from agentfsm.tools.queue.result_json import encode_value
from agentfsm.tools.registry import ToolRegistry, ToolSource
from agentfsm.tools.tool import Tool, ToolDeclarations, make_tool

RUN_PYTHON: Final = "run_python"
FIND_TOOLS: Final = "find_tools"
# Characters of stubs in the description, about 2,000 tokens. Beyond, they are found by words.
MAX_STUB_CHARS: Final = 8_000
# Stubs that `find_tools` returns.
_MAX_FOUND: Final = 10
# Characters of the value of a script.
_MAX_RESULT_CHARS: Final = 100_000
MAX_SLEEP_S: Final = 300.0
# For limits that are those of the caller's run.
_UNLIMITED: Final = 10**12

_DESCRIPTION: Final = (
    "Run a Python script that calls tools, instead of calling them one by one. Await the calls, several at once with "
    "asyncio.gather. The value of the last line, if it is an expression, and what the script prints are returned, and "
    "nothing else: return only what you need. A call that fails raises an exception with the reason, which the script "
    "may catch. At most {calls} calls. {about} The tools are:\n\n{stubs}"
)
_FOUND_BY_NAME: Final = "Further tools are found in a script: `await find_tools('words')` returns their signatures."
_CODE: Final[dict[str, JSON]] = {
    "type": "object",
    "properties": {"code": {"type": "string", "description": "The script."}},
    "required": ["code"],
    "additionalProperties": False,
}
# Exceptions of a script for the errors of its calls; others are a RuntimeError.
_ERROR_KINDS: Final[Mapping[ErrorType | None, str]] = {
    ErrorType.ARGUMENTS: "ValueError",
    ErrorType.NOT_PERMITTED: "PermissionError",
    ErrorType.WITHHELD: "PermissionError",
    ErrorType.BLOCKED: "PermissionError",
    ErrorType.TIMEOUT: "TimeoutError",
}


def Script(  # noqa: N802  a declaration of an agent's tools, as the classes beside it
    *tools: Tool[..., Any] | Callable[..., Any] | ToolSource,
    interpreter: Interpreter | None = None,
    name: str = RUN_PYTHON,
    calls: int = 50,
    timeout_s: float = 300.0,
    **options: Unpack[ToolDeclarations],
) -> Tool[..., Any]:
    """Return a tool with which a model runs scripts that call other tools.

    Example: `Agent(model, tools=[price, pay, Script(price, pay)])`.

    Each call of the tool is a run of its own, and each call in the script is a call of that run, with permissions,
    guards, approvals, limits and its place in the journal. After a crash, a pause or an approval the script runs again
    from its start, and finished calls are answered from the journal.

    Args:
        *tools: Tools, plain functions and tool sources that scripts may call.
        interpreter: Interpreter of the scripts. None: `Monty()`.
        name: Name of the tool.
        calls: Maximum of calls of a script, 1 or more.
        timeout_s: Seconds of active time of a script with its calls, above 0.
        **options: Further declarations, as for `tool`.

    Raises:
        MisuseError: if there are no tools, or a name or a number is out of range.
    """
    COUNT.check("Script", "calls", calls)
    SECONDS.check("Script", "timeout_s", timeout_s)
    if not tools:
        raise MisuseError("Script() needs the tools that scripts may call: Script(price, pay)")
    if missing := [each for each in ("name", "description", "advance") if not hasattr(interpreter or Monty, each)]:
        raise MisuseError(f"Script(interpreter={interpreter!r}) is no interpreter: it has no {', '.join(missing)}")
    chosen = Monty() if interpreter is None else interpreter
    registry = ToolRegistry.of(tools)
    stubs = {each.name: write_stub(each) for each in registry}
    has_more = bool(registry.sources) or sum(map(len, stubs.values())) > MAX_STUB_CHARS
    listed = _take(stubs.values(), MAX_STUB_CHARS)
    model = ScriptModel(chosen, registry, calls)
    limits = Limits(
        turns=calls + 1,
        tokens=_UNLIMITED,
        tool_calls=_UNLIMITED,
        seconds=timeout_s,
        errors=calls + 1,  # a script may catch them
        loop_turns=calls + 2,
    )
    own = [_make_sleep(), *([_make_find_tools(registry)] if has_more else [])]
    agent = Agent(model, name=name, tools=[*tools, *own], limits=limits)
    about = f"{chosen.description} {_FOUND_BY_NAME}" if has_more else chosen.description
    return agent.as_tool(
        name=name,
        description=_DESCRIPTION.format(calls=calls, about=about, stubs="\n\n".join(listed)),
        parameters=_CODE,
        prompt=lambda arguments: str(arguments.code),
        turns=calls + 1,
        timeout_s=timeout_s,
        **options,
    )


def _take(stubs: Iterable[str], chars: int) -> list[str]:
    """Return the first stubs, up to a number of characters."""
    taken: list[str] = []
    for stub in stubs:
        if (chars := chars - len(stub)) < 0:
            break
        taken.append(stub)
    return taken


def _make_sleep() -> Tool[..., Any]:
    async def sleep(seconds: float) -> None:
        """Wait.

        Args:
            seconds: Seconds to wait.
        """
        if not 0 <= seconds <= MAX_SLEEP_S:
            raise ValueError(f"a script can wait from 0 to {MAX_SLEEP_S:g} seconds at once")
        await anyio.sleep(seconds)

    return make_tool(sleep, name=SLEEP, read_only=True, poll=True, timeout_s=MAX_SLEEP_S + 10)


def _make_find_tools(registry: ToolRegistry) -> Tool[..., Any]:
    async def find_tools(query: str) -> list[str]:
        """Find tools by words of their names and descriptions.

        Args:
            query: Words, or the name of a tool.
        """
        words = set(re.findall(r"\w+", query.casefold()))
        ranked = [(_count_words(words, each), each) for each in registry if each.name not in (SLEEP, FIND_TOOLS)]
        found = sorted([pair for pair in ranked if pair[0]], key=lambda pair: -pair[0])[:_MAX_FOUND]
        return [write_stub(each) for _count, each in found]

    return make_tool(find_tools, name=FIND_TOOLS, read_only=True)


def _count_words(words: set[str], tool: Tool[..., Any]) -> int:
    in_name = set(re.findall(r"[^\W_]+", tool.name.casefold())) | {tool.name.casefold()}
    return 3 * len(words & in_name) + len(words & set(re.findall(r"\w+", tool.description.casefold())))


@attrs.define(eq=False)
class ScriptModel(Model):
    """A model whose replies are the next calls of the script that its run has as its first message."""

    interpreter: Interpreter
    """Interpreter of the script."""

    registry: ToolRegistry
    """Tools that the script may call."""

    calls: int
    """Maximum of calls of the script."""

    name: str = attrs.field(default=attrs.Factory(lambda self: self.interpreter.name, takes_self=True), init=False)
    window_tokens: int = attrs.field(default=_UNLIMITED, init=False)
    _texts: dict[str, bool] = attrs.field(factory=dict, init=False)
    """Whether the tools with results so far return texts, by name: to read the annotations takes longer than a call."""

    async def reply(self, request: Request, emit: Emit | None = None) -> Reply:  # noqa: ARG002  a script has no stream
        """Run the script from its start with the answers of the run, and return its next calls or its result.

        Raises:
            ModelError: if the script now makes other calls than those that the journal has.
        """
        if request.run is None:
            raise ModelError("a script needs a run, which has its code and its calls")
        done = _list_calls(request.run)
        source = self._build_source(request, request.run, [result for _call, result in done])
        step = await self.interpreter.advance(source)
        new, end = step.calls[len(done) :], step.end
        if end is not None and end.error is not None and len(step.calls) < len(done):
            names = ", ".join(call.name for call, _result in done)
            end = ScriptEnd(
                error=f"{end.error}\n(when it was run again with the results of its calls, which are done: {names})"
            )
        else:
            _check_calls(step, [call for call, _result in done])
        if end is None and not new:
            end = ScriptEnd(error="the script waits for something that is no call of a tool")
        elif end is None and len(step.calls) > self.calls:
            line = f"line {step.calls[self.calls].line}"
            end = ScriptEnd(error=f"the script has made {self.calls} calls, which is the maximum; {line} makes another")
        elif end is not None and new and end.error is None:
            names = ", ".join(f"{call.tool} in line {call.line}" for call in new)
            end = ScriptEnd(value=end.value, error=f"these calls were not made, since they were not awaited: {names}")
        if end is not None:
            return Reply(text=_write_end(step, end), usage=Usage(), finish_reason=FinishReason.STOP)
        proposed = [
            ProposedCall(
                id=f"s{number}", name=call.tool, arguments=json.dumps(dict(call.arguments), ensure_ascii=False)
            )
            for number, call in enumerate(new, len(done))
        ]
        return Reply(calls=tuple(proposed), usage=Usage(), finish_reason=FinishReason.TOOL_CALLS)

    def cost_usd(self, usage: Usage) -> float | None:  # noqa: ARG002  an interpreter costs nothing
        """Return 0."""
        return 0.0

    def _build_source(self, request: Request, run: Run[Any], results: Sequence[ToolResult]) -> ScriptSource:
        code = next(message.text for message in run.messages if isinstance(message, UserMessage))
        return ScriptSource(
            code=code,
            parameters={each.name: list_parameters(each) for each in request.tools},
            answers=tuple([_build_answer(each, is_text=self._returns_text(each.tool)) for each in results]),
            has_await=_has_await(code),
            started_at=run.header.created_at,
            seed=run.header.nonce or run.id,
        )

    def _returns_text(self, name: str) -> bool:
        """Return whether the function of a tool is annotated to return a text."""
        if name not in self._texts and (tool := self.registry.get(name)) is not None:
            self._texts[name] = find_return_hint(tool) is str
        return self._texts.get(name, False)


def _build_answer(result: ToolResult, *, is_text: bool) -> Answer:
    if result.outcome is not Outcome.DONE:
        kind = _ERROR_KINDS.get(result.error_type, "RuntimeError")
        return Answer(error=result.content, error_kind=kind, at=result.completed_at)
    return Answer(value=result.content if is_text else read_content(result.content), at=result.completed_at)


def _has_await(code: str) -> bool:
    try:
        found = ast.walk(ast.parse(code))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return "await " in code
    return any(isinstance(node, ast.Await | ast.AsyncFor | ast.AsyncWith) for node in found)


def _list_calls(run: Run[Any]) -> list[tuple[ToolCall, ToolResult]]:
    """Return the calls of a run with their results, in the order in which the script made them."""
    results = {message.call_id: message for message in run.messages if isinstance(message, ToolResult)}
    replies = [message for message in run.messages if isinstance(message, AssistantMessage)]
    return [(call, results[call.id]) for reply in replies for call in reply.calls]


def _check_calls(step: ScriptStep, done: Sequence[ToolCall]) -> None:
    """Compare the first calls of a script with those in the journal.

    Raises:
        ModelError: if one differs.
    """
    for number, call in enumerate(done):
        now: ScriptCall | None = step.calls[number] if number < len(step.calls) else None
        if now is not None and now.tool == call.name and dict(now.arguments) == json.loads(call.arguments):
            continue
        made = "made no such call"
        if now is not None:
            made = f"called {now.tool}({json.dumps(dict(now.arguments), ensure_ascii=False)}) in line {now.line}"
        raise ModelError(
            f"the script differs from its journal: call {number + 1} was {call.name}({call.arguments}), and when the "
            f"script was run again, it {made}. What was done remains done, and the script cannot go on"
        )


def _write_end(step: ScriptStep, end: ScriptEnd) -> str:
    """Return the result of a script as the model reads it: what it printed, its value, and its error."""
    value, error = end.value, end.error
    try:
        text = encode_value(value)
    except (TypeError, ValueError) as problem:
        value, text, error = None, "", error or f"the value of the last line cannot be written as JSON: {problem}"
    if len(text) > _MAX_RESULT_CHARS:
        value = None
        error = error or f"the value of the last line has {len(text):,} characters as JSON: return less"
    return encode_value({"printed": step.printed, "result": value, "error": error})
