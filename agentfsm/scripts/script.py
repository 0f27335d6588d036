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
from agentfsm.agents.subagent import make_agent_tool
from agentfsm.core.errors import MisuseError, ModelError
from agentfsm.core.header import short_hash
from agentfsm.core.limits import Limits
from agentfsm.core.messages import (
    JSON,
    AssistantMessage,
    ErrorType,
    NativeReply,
    Outcome,
    ToolCall,
    ToolResult,
    UserMessage,
)
from agentfsm.core.plans import read_content
from agentfsm.core.run import Run
from agentfsm.core.usage import Usage
from agentfsm.core.validation import COUNT, SECONDS
from agentfsm.core.value import Value
from agentfsm.ports.model import MAX_REPLY_CALLS, Emit, FinishReason, Model, ProposedCall, Reply, Request
from agentfsm.sandbox.process.python_code import SLEEP
from agentfsm.scripts.interpreter import Answer, Interpreter, ScriptCall, ScriptEnd, ScriptSource, ScriptStep
from agentfsm.scripts.monty import Monty
from agentfsm.scripts.stubs import list_parameters, name_in_script, returns_text, write_stub
from agentfsm.tools.queue.result_json import encode_value
from agentfsm.tools.queue.result_text import NO_OUTPUT
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
# Characters of its error.
_MAX_ERROR_CHARS: Final = 4_000
_HASH_DIGITS: Final = 16
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
        MisuseError: if there are no tools, one works in the background, or a name or a number is out of range.
    """
    COUNT.check("Script", "calls", calls)
    SECONDS.check("Script", "timeout_s", timeout_s)
    if not tools:
        raise MisuseError("Script() needs the tools that scripts may call: Script(price, pay)")
    if missing := [each for each in ("name", "description", "advance") if not hasattr(interpreter or Monty, each)]:
        raise MisuseError(f"Script(interpreter={interpreter!r}) is no interpreter: it has no {', '.join(missing)}")
    chosen = Monty() if interpreter is None else interpreter
    registry = ToolRegistry.of(tools)
    if later := [each.name for each in registry if each.background]:
        raise MisuseError(
            f"Script() cannot have {', '.join(later)}: a script reads the results of its calls, and those of a tool in "
            "the background come later. Give it a tool without background=True"
        )
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
    return make_agent_tool(
        agent,
        name=name,
        description=_DESCRIPTION.format(calls=calls, about=about, stubs="\n\n".join(listed)),
        parameters=_CODE,
        prompt=lambda arguments: str(arguments.code) if arguments.code.strip() else "pass",
        turns=calls + 1,
        timeout_s=timeout_s,
        speaks_for_caller=True,
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

    takes_tokens = False
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
        await self.registry.refresh()  # of the sources that the run has fetched
        done = _list_calls(request.run)
        names = {name_in_script(each.name): each for each in request.tools} | {
            each.name: each for each in request.tools
        }
        parameters = {name: list_parameters(each) for name, each in names.items()}
        source = _build_source(request.run, done, parameters, self.calls)
        if not done and (forgotten := _find_forgotten(source)):
            error = f"nothing was run, since these calls are not awaited: {forgotten}"
            return Reply(text=_write_end(ScriptStep(calls=()), ScriptEnd(error=error)), usage=Usage())
        step = await self.interpreter.advance(source)
        new, end = step.calls[len(done) :], step.end
        if end is not None and end.error is not None and len(step.calls) < len(done):
            made = ", ".join(each.call.name for each in done)
            note = f"(when it was run again with the results of its calls, which are done: {made})"
            end = ScriptEnd(error=f"{_shorten(end.error)}\n{note}")
        else:
            _check_calls(step, done)
        if end is None and not new:
            end = ScriptEnd(error="the script waits for something that is no call of a tool")
        elif end is None and len(step.calls) > self.calls:
            line = f"line {step.calls[self.calls].line}"
            end = ScriptEnd(error=f"the script has made {self.calls} calls, which is the maximum; {line} makes another")
        elif end is not None and new and end.error is None:
            unmade = ", ".join(f"{call.tool} in line {call.line}" for call in new)
            end = ScriptEnd(value=end.value, error=f"these calls were not made, since they were not awaited: {unmade}")
        if end is not None:
            return Reply(text=_write_end(step, end), usage=Usage(), finish_reason=FinishReason.STOP)
        new = new[:MAX_REPLY_CALLS]  # the script waits for the others as well, which come next
        proposed = [
            ProposedCall(
                id=f"s{number}",
                name=names[call.tool].name if call.tool in names else call.tool,
                arguments=json.dumps(dict(call.arguments), ensure_ascii=False),
            )
            for number, call in enumerate(new, len(done))
        ]
        known = {
            "started_at": source.started_at,
            "seed": source.seed,
            "calls": [_hash_call(call) for call in new],
            "texts": [self._returns_text(each.name) for each in proposed],
        }
        native = NativeReply(provider=self.name, content=json.dumps(known))
        return Reply(calls=tuple(proposed), usage=Usage(), finish_reason=FinishReason.TOOL_CALLS, native=native)

    def cost_usd(self, usage: Usage) -> float | None:  # noqa: ARG002  an interpreter costs nothing
        """Return 0."""
        return 0.0

    def _returns_text(self, name: str) -> bool:
        """Return whether the function of a tool is annotated to return a text."""
        if name not in self._texts and (tool := self.registry.get(name)) is not None:
            self._texts[name] = returns_text(tool)
        return self._texts.get(name, False)


@attrs.frozen(kw_only=True)
class _DoneCall(Value):
    """A call of the script that has a result."""

    call: ToolCall
    """The call, with the arguments of the person who has edited them, if one has."""

    hash: str
    """Hash of the call as the script has made it."""

    is_text: bool
    """Whether its result is a text."""

    result: ToolResult
    """Its result."""

    def build_answer(self) -> Answer:
        """Return the result as the script reads it."""
        result = self.result
        if result.outcome is not Outcome.DONE:
            is_rejected = result.outcome is Outcome.REJECTED
            kind = "PermissionError" if is_rejected else _ERROR_KINDS.get(result.error_type, "RuntimeError")
            return Answer(error=result.content, error_kind=kind, at=result.completed_at)
        if result.content == NO_OUTPUT:
            return Answer(at=result.completed_at)
        value = result.content if self.is_text else read_content(result.content)
        return Answer(value=value, at=result.completed_at)


def _build_source(
    run: Run[Any], done: Sequence[_DoneCall], parameters: Mapping[str, tuple[str, ...]], max_calls: int
) -> ScriptSource:
    code = next(message.text for message in run.messages if isinstance(message, UserMessage))
    # A fork of the run goes on with what the script began with.
    own: Mapping[str, Any] = {"started_at": run.header.created_at, "seed": run.header.nonce or run.id}
    first = next(map(_read_native, _list_replies(run)), own)
    return ScriptSource(
        code=code,
        parameters=parameters,
        max_calls=max_calls,
        answers=tuple([each.build_answer() for each in done]),
        has_await=_has_await(code),
        started_at=first["started_at"],
        seed=first["seed"],
    )


def _walk(code: str) -> list[ast.AST]:
    """Return the nodes of a script; none if it cannot be parsed, which the interpreter reports."""
    try:
        return [*ast.walk(ast.parse(code))]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []


def _has_await(code: str) -> bool:
    nodes = _walk(code)
    if not nodes:
        return "await " in code
    return any(isinstance(node, ast.Await | ast.AsyncFor | ast.AsyncWith) for node in nodes)


def _find_forgotten(source: ScriptSource) -> str:
    """Return the statements that call a tool and do not await it, though the script awaits others; empty for none.

    The script would not learn that such a call has failed.
    """
    nodes = _walk(source.code) if source.has_await else []
    defined = (ast.FunctionDef, ast.AsyncFunctionDef, ast.alias)
    own = {getattr(node, "asname", None) or node.name for node in nodes if isinstance(node, defined)}
    own |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    calls = [node.value.func for node in nodes if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)]
    names = [each for each in calls if isinstance(each, ast.Name)]
    found = [f"{each.id} in line {each.lineno}" for each in names if each.id in source.parameters.keys() - own]
    return ", ".join(found)


def _list_replies(run: Run[Any]) -> list[AssistantMessage]:
    return [message for message in run.messages if isinstance(message, AssistantMessage) and message.calls]


def _read_native(reply: AssistantMessage) -> Mapping[str, Any]:
    """Return what `ScriptModel` has recorded with its reply.

    Raises:
        ModelError: if it is not there.
    """
    if reply.native is None:
        raise ModelError("the journal of the script has a reply that no script has made")
    found: Mapping[str, Any] = json.loads(reply.native.content)
    return found


def _list_calls(run: Run[Any]) -> list[_DoneCall]:
    """Return the calls of a run with their results, in the order in which the script made them."""
    results = {message.call_id: message for message in run.messages if isinstance(message, ToolResult)}
    return [
        _DoneCall(call=call, hash=made, is_text=is_text, result=results[call.id])
        for reply in _list_replies(run)
        for known in (_read_native(reply),)
        for call, made, is_text in zip(reply.calls, known["calls"], known["texts"], strict=True)
    ]


def _hash_call(call: ScriptCall) -> str:
    return short_hash(json.dumps([call.tool, dict(call.arguments)], sort_keys=True), _HASH_DIGITS)


def _check_calls(step: ScriptStep, done: Sequence[_DoneCall]) -> None:
    """Compare the first calls of a script with those that it had made.

    Raises:
        ModelError: if one differs.
    """
    for number, each in enumerate(done):
        now: ScriptCall | None = step.calls[number] if number < len(step.calls) else None
        if now is not None and _hash_call(now) == each.hash:
            continue
        made = "made no such call"
        if now is not None:
            made = f"called {now.tool}({json.dumps(dict(now.arguments), ensure_ascii=False)}) in line {now.line}"
        raise ModelError(
            f"the script differs from its journal: call {number + 1} was {each.call.name}({each.call.arguments}), and "
            f"when the script was run again, it {made}. What was done remains done, and the script cannot go on"
        )


def _write_end(step: ScriptStep, end: ScriptEnd) -> str:
    """Return the result of a script as the model reads it: what it printed, its value, and its error."""
    value, error = end.value, end.error
    try:
        text = encode_value(value)
    except (TypeError, ValueError, RecursionError) as problem:
        value, text, error = None, "", error or f"the value of the last line cannot be written as JSON: {problem}"
    if len(text) > _MAX_RESULT_CHARS:
        value = None
        error = error or f"the value of the last line has {len(text):,} characters as JSON: return less"
    shown = None if error is None else _shorten(error)
    return encode_value({"printed": step.printed, "result": value, "error": shown})


def _shorten(error: str) -> str:
    """Return the end of an error if it is long: its last line has the exception."""
    dropped = len(error) - _MAX_ERROR_CHARS
    return error if dropped <= 0 else f"[... {dropped} more characters ...]{error[dropped:]}"
