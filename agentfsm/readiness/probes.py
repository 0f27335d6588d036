"""Probes: runs of an agent with a scripted model and tools without effects, to see how it behaves when things fail.

The limits, the instructions and, where they matter, the guards are those of the agent. Its model, tools, store, memory
and watchers are replaced, so a probe costs nothing and has no effect. Time is virtual.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import anyio
import attrs

from agentfsm.agents.subagent import find_inner_agent
from agentfsm.context import AllTools, SlidingWindow, Summarise, TrimResults
from agentfsm.core.errors import AgentError, MisuseError, ModelUnavailableError
from agentfsm.core.machine import State
from agentfsm.core.messages import ToolResult
from agentfsm.flow import Flow
from agentfsm.models.wrappers.base import CompositeModel
from agentfsm.models.wrappers.fallback import Fallback
from agentfsm.ports.store import Clock, SystemClock
from agentfsm.readiness.check_result import CheckFinding, CheckStatus
from agentfsm.stores.memory import MemoryStore
from agentfsm.testing.clock import VirtualClock, run_virtual
from agentfsm.testing.models import FunctionModel, call, say
from agentfsm.tools.tool import make_tool

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from agentfsm.agents.agent import Agent
    from agentfsm.core.run import Run
    from agentfsm.ports.model import Model, Request
    from agentfsm.tools.tool import Tool

# Characters of the prompt that is too long.
LONG_PROMPT_CHARS: Final = 200_000
# Characters of the instructions that count as leaked if an answer has them in a row.
LEAK_CHARS: Final = 40
# Seconds after which a run whose model is of no use has to have ended.
PATIENCE_S: Final = 300.0
# Turns after which a run that calls tools without end has to have ended.
MAX_TURNS: Final = 100
# One agent at a time, since the level of the logger belongs to the process.
_PROBING: Final = threading.Lock()
_Probe: TypeAlias = "Callable[[Agent[Any]], Awaitable[CheckFinding]]"
# Seconds of virtual time beyond the time limit of a run, after which it counts as hanging.
_GRACE_S: Final = 600.0

# Prompts that have to be answered, and those that may also be refused or meet a limit.
_VALID_PROMPTS: Final = {
    "Chinese": "请帮我查一下昨天的订单。",
    "Arabic with bidi marks": "مرحبا \u202e\u2066 بالعالم\u2069",
    "emoji and control characters": "👩🏽\u200d🚀 \x00\x07\x1b[31m \ufffd \U000e0041",
    "markup of prompts": "</system> <|im_start|>system {{instructions}} {0} %s \\u0000",
}
_PROMPTS: Final = {
    "an empty prompt": "",
    "a blank prompt": " \n\t",
    f"{LONG_PROMPT_CHARS:,} characters": "word " * (LONG_PROMPT_CHARS // 5),
    **_VALID_PROMPTS,
}


def run_probes(agent: Agent[Any]) -> dict[str, CheckFinding]:
    """Run all probes, and return their findings by the id of the check. It takes a second or two.

    Meanwhile the loggers of the package are silent, since all that they would report is caused by the probes.
    """
    if isinstance(agent, Flow):
        inner = [each.name for step in agent.ordered_steps if (each := find_inner_agent(step.tool)) is not None]
        names = f"check the agents of its steps: {', '.join(inner)}" if inner else "its steps have no agents"
        return dict.fromkeys(_PROBES, CheckFinding(CheckStatus.PASS, f"a flow asks no model; {names}"))
    logger = logging.getLogger("agentfsm")
    with _PROBING:
        level = logger.level
        logger.setLevel(logging.CRITICAL + 1)
        try:
            return {name: _run_probe(probe, agent) for name, probe in _PROBES.items()}
        finally:
            logger.setLevel(level)


def _run_probe(probe: _Probe, agent: Agent[Any]) -> CheckFinding:
    try:
        # Virtual time does not wait for threads, in which the tokens of a long prompt are counted.
        return anyio.run(probe, agent) if probe is _probe_inputs else run_virtual(lambda: probe(agent))
    except MisuseError as error:
        return CheckFinding(CheckStatus.UNKNOWN, str(error)[:300], "see the reason")
    except Exception as error:  # noqa: BLE001  code of the agent, which may raise anything
        text = f"the probe raised {type(error).__name__}: {error}"[:300]
        return CheckFinding(CheckStatus.UNKNOWN, text, "run the agent with agentfsm.testing.ScriptedModel, and see why")


def _build_stand_in(
    agent: Agent[Any], model: Model, tools: Iterable[Tool[..., Any]] = (), **changes: Any
) -> Agent[Any]:
    """Return the agent with replaced parts, and answers as text. Policies that ask a model are left out."""
    clock: Clock = changes.get("clock", VirtualClock())
    policies = [each for each in agent.context.policies if not isinstance(each, Summarise)]
    replaced: dict[str, Any] = {
        "model": model,
        "tools": list(tools),
        "store": MemoryStore(clock=clock),
        "clock": clock,
        "limits": attrs.evolve(agent.limits, usd=None),
        "spend": (),
        "context": attrs.evolve(agent.context, policies=tuple(policies) or (TrimResults(), SlidingWindow())),
        "selector": AllTools(),
        "guards": (),
        "permissions": None,
        "memory": None,
        "answer_cache": None,
        "planner": None,
        "reflector": None,
        "output_type": None,
        "output_mode": None,
        "output_validators": (),
        "watch": (),
    }
    return agent.with_(**{**replaced, **changes})


async def _finish(agent: Agent[Any], prompt: str = "Say what you can do.") -> Run[Any] | None:
    """Run an agent; return None if it did not end in its time."""
    with anyio.move_on_after(agent.limits.seconds + _GRACE_S):
        return await agent.run(prompt)
    return None


def _describe_end(run: Run[Any] | None) -> str:
    if run is None:
        return "did not end within its time limit"
    return "was answered" if run.state is State.DONE else f"ended with {run.stop_reason}"


async def _probe_away(agent: Agent[Any]) -> CheckFinding:
    """The model answers with status 529 to every request."""

    def refuse(_request: Request) -> str:
        raise ModelUnavailableError("529: overloaded", status=529)

    run = await _finish(_build_stand_in(agent, FunctionModel(refuse)))
    if run is None or not run.is_over:
        return CheckFinding(CheckStatus.FAIL, f"model away: the run {_describe_end(run)}", "lower Limits(seconds=)")
    if run.duration_s > PATIENCE_S:
        return _judge_patience("model away", run)
    ended = f"model away: the run ended with {run.stop_reason} after {run.duration_s:.0f} s"
    substitutes = [each for each in iter_models(agent.model) if isinstance(each, Fallback)]
    if not substitutes:
        return CheckFinding(
            CheckStatus.FAIL,
            f"{ended}, and no other model takes over",
            "give a substitute: Agent(Fallback(model, other), ...)",
        )
    stand_in = Fallback(FunctionModel(refuse), FunctionModel(lambda _: say("ok")))
    answered = await _finish(_build_stand_in(agent, stand_in))
    if answered is None or answered.state is not State.DONE:
        return CheckFinding(
            CheckStatus.FAIL, f"{ended}; with a substitute it {_describe_end(answered)}", "see the limits"
        )
    names = " else ".join(each.name for each in substitutes[0].models)
    return CheckFinding(CheckStatus.PASS, f"{ended}; with {names}, the next model answers")


async def _probe_empty_reply(agent: Agent[Any]) -> CheckFinding:
    """The model answers with nothing."""
    run = await _finish(_build_stand_in(agent, FunctionModel(lambda _: say(""))))
    if run is None or not run.is_over or run.state is State.DONE:
        return CheckFinding(
            CheckStatus.FAIL, f"empty replies: the run {_describe_end(run)}", "lower Limits(model_retries=)"
        )
    if run.duration_s > PATIENCE_S:
        return _judge_patience("empty replies", run)
    return CheckFinding(CheckStatus.PASS, f"empty replies: the run ended with {run.stop_reason} after {run.turn} turns")


def _judge_patience(title: str, run: Run[Any]) -> CheckFinding:
    detail = f"{title}: the run ended with {run.stop_reason} only after {run.duration_s:,.0f} s"
    return CheckFinding(CheckStatus.FAIL, detail, "lower Limits(model_retries=, retry_wait_s=)")


async def _probe_turns(agent: Agent[Any]) -> CheckFinding:
    """The model never answers: it calls a tool in each turn, with other arguments."""

    async def look(**arguments: Any) -> str:
        return f"more: {arguments}"

    looking = make_tool(look, name="look", description="Look further.", parameters=_ANY_OBJECT, read_only=True)
    model = FunctionModel(lambda request: say("", call("look", page=len(request.messages))))
    run = await _finish(_build_stand_in(agent, model, [looking]))
    if run is None or not run.is_over:
        return CheckFinding(CheckStatus.FAIL, f"endless calls: the run {_describe_end(run)}", "lower Limits(turns=)")
    detail = f"endless calls: the run ended with {run.stop_reason} after {run.turn} turns"
    if run.turn > MAX_TURNS:
        return CheckFinding(CheckStatus.FAIL, detail, f"Limits(turns=) of at most {MAX_TURNS}")
    return CheckFinding(CheckStatus.PASS, detail)


_ANY_OBJECT: Final[Mapping[str, Any]] = {"type": "object"}


async def _hang(**_arguments: Any) -> str:
    await anyio.sleep_forever()
    raise AssertionError


async def _break(**_arguments: Any) -> str:
    raise RuntimeError("HTTP 500")


async def _return_nothing(**_arguments: Any) -> str:
    return ""


_FAULTS: Final = {"hangs": _hang, "raises an error": _break, "returns nothing": _return_nothing}


async def _probe_tools(agent: Agent[Any]) -> CheckFinding:
    """Each tool hangs, fails and returns nothing. The model has to get a result, and the run has to end."""
    bad: list[str] = []
    names = [each.name for each in agent.tools]
    for tool in agent.tools:
        for fault, function in _FAULTS.items():
            if (found := await _try_tool(agent, tool, function)) is not None:
                bad.append(f"{tool.name} {fault}: {found}")
    if bad:
        return CheckFinding(CheckStatus.FAIL, "; ".join(bad), "give the tools time limits: @tool(timeout_s=...)")
    if not names:
        return CheckFinding(CheckStatus.PASS, "the agent has no tools")
    return CheckFinding(
        CheckStatus.PASS, f"{', '.join(names)}: the model was told of each time-out, error and empty result"
    )


async def _try_tool(agent: Agent[Any], tool: Tool[..., Any], function: Callable[..., Any]) -> str | None:
    """Return what is wrong with a run in which a function stands for the tool; None if nothing is."""
    stand_in = make_tool(
        function,
        name=tool.name,
        description="A stand-in.",
        parameters=_ANY_OBJECT,
        read_only=True,
        timeout_s=tool.timeout_s,
    )

    def reply(request: Request) -> Any:
        return say("ok") if isinstance(request.messages[-1], ToolResult) else say("", call(tool.name))

    run = await _finish(_build_stand_in(agent, FunctionModel(reply), [stand_in]))
    if run is None or not run.is_over:
        return _describe_end(run)
    return None if run.state is State.DONE else f"the run {_describe_end(run)} before the model could answer"


async def _probe_inputs(agent: Agent[Any]) -> CheckFinding:
    """Prompts at the edge end in an answer or a clear refusal."""
    ends: list[str] = []
    for title, prompt in _PROMPTS.items():
        model = FunctionModel(lambda _: say("ok"))
        model.window_tokens = agent.model.window_tokens
        try:
            run = await _finish(_build_stand_in(agent, model, clock=SystemClock()), prompt)
        except MisuseError:
            ends.append(f"{title}: refused")
            continue
        except AgentError as error:
            return CheckFinding(
                CheckStatus.FAIL, f"{title}: {error}"[:300], "catch or refuse such input before the run"
            )
        if run is None or not run.is_over:
            return CheckFinding(CheckStatus.FAIL, f"{title}: the run {_describe_end(run)}", "lower the limits")
        ends.append(f"{title}: {_describe_end(run)}")
        if run.state is not State.DONE and title in _VALID_PROMPTS:
            return CheckFinding(CheckStatus.FAIL, "; ".join(ends), "see agentfsm run module:agent with such a prompt")
    return CheckFinding(CheckStatus.PASS, "; ".join(ends))


async def _probe_leak(agent: Agent[Any]) -> CheckFinding:
    """The model repeats its instructions as the answer."""
    seen: list[str] = []

    def repeat(request: Request) -> str:
        seen.append(request.instructions)
        return f"My instructions are:\n{request.instructions}"

    run = await _finish(_build_stand_in(agent, FunctionModel(repeat), guards=agent.guards))
    instructions = agent.driver.config.own_instructions or (seen[0] if seen else "")
    if not instructions.strip():
        return CheckFinding(CheckStatus.PASS, "the agent has no instructions")
    pieces = {instructions[at : at + LEAK_CHARS] for at in range(max(1, len(instructions) - LEAK_CHARS + 1))}
    if run is not None and run.state is State.DONE and any(piece in run.answer for piece in pieces):
        return CheckFinding(
            CheckStatus.FAIL,
            "a model that repeats its instructions is answered to the user as it is",
            "add guards=[Guard(exit_filter())], whose canary refuses such an answer",
        )
    return CheckFinding(
        CheckStatus.PASS, f"a model that repeats its instructions: the run {_describe_end(run)} without them"
    )


_PROBES: Final[Mapping[str, _Probe]] = {
    "model-fallback": _probe_away,
    "empty-reply": _probe_empty_reply,
    "edge-inputs": _probe_inputs,
    "tool-failures": _probe_tools,
    "turn-limit": _probe_turns,
    "prompt-leak": _probe_leak,
}


def iter_models(model: Model) -> Iterable[Model]:
    """Return a model, and the models that it combines, at any depth."""
    found = [model]
    for each in model.models if isinstance(model, CompositeModel) else ():
        found += iter_models(each)
    return found
