"""`python -m benchmarks graded [RUNS]`: the dialogues of a public benchmark as a suite, and models with known faults.

The data are the multi-turn dialogues of the Berkeley Function Calling Leaderboard, with its classes as tools, as in
`benchmarks dialogues`: `pip install --no-deps bfcl-eval mpmath`. A case is the conversation: each text of the user is a
turn, with the recorded calls that follow it as its path, and the check is the final state of the objects, as the
benchmark itself grades. The models make the recorded calls, except for faults at a known rate. So the table shows which
aspect sees which fault, and how a gate decides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random
from typing import Any

import anyio

from agentfsm import Agent, Limits, Run, RunContext, ToolResult, UserMessage
from agentfsm.context import AllTools
from agentfsm.evals import Case, Suite, Turn, evaluate, gate
from agentfsm.ports.model import Request, to_mutable_json
from agentfsm.testing.models import FunctionModel, Line, say
from agentfsm.testing.models import call as make_call
from agentfsm.tools.tool import Tool, make_tool
from benchmarks.dialogues import Call, Dialogue, build_objects, dialogues, do_call, run_in_order, state_of

# Probability of a fault in each call.
FAULT = 0.1
FAULTS: Mapping[str, Callable[[list[Call], int], list[Call]]] = {
    "none": lambda calls, _at: calls,
    "none, again": lambda calls, _at: calls,
    "a call twice": lambda calls, at: [*calls[: at + 1], *calls[at:]],
    "a call left out": lambda calls, at: [*calls[:at], *calls[at + 1 :]],
    "two calls swapped": lambda calls, at: [*calls[:at], *calls[at : at + 2][::-1], *calls[at + 2 :]],
}


def build_tool(call: Call) -> Tool[..., Any]:
    """Return the tool for calls of a method; the objects are the dependencies of the run."""

    async def make(ctx: RunContext[Any], arguments: dict[str, Any]) -> str:
        return do_call(ctx.deps, Call(call.owner, call.method, to_mutable_json(arguments)))

    return make_tool(make, name=call.tool, description="A method of the benchmark.")


def build_case(dialogue: Dialogue) -> Case:
    """Return the case of a dialogue."""
    _touched, _results, final = run_in_order(dialogue)

    def check(_run: Run, objects: Mapping[str, Any]) -> bool | str:
        return {owner: state_of(one) for owner, one in objects.items()} == final or "another final state"

    paths = [
        [{"tool": each.tool, "arguments": {"arguments": dict(each.arguments)}} for each in calls]
        for _text, calls in dialogue.turns
    ]
    turns = [Turn(text, paths=[path]) for (text, _calls), path in zip(dialogue.turns, paths, strict=True)]
    whole = [each for path in paths for each in path]
    return Case(id=dialogue.id, turns=turns, paths=[whole], check=check, max_steps=len(whole) + len(turns))


def build_model(known: Mapping[str, Dialogue], fault: str, seed: int) -> FunctionModel:
    """Return a model that makes the recorded calls one by one, with faults that differ between runs."""
    chance, scripts = Random(seed), dict[str, list[list[Call]]]()

    def think(request: Request) -> Line | str:
        assert request.run is not None
        which = request.run.header.metadata["eval"]
        script = scripts.get(f"{which['case']} {which['repeat']}")
        if script is None:
            script = scripts[f"{which['case']} {which['repeat']}"] = []
            for _text, recorded in known[which["case"]].turns:
                calls = list(recorded)
                for at in range(len(calls) - 1, -1, -1):
                    if chance.random() < FAULT:
                        calls = FAULTS[fault](calls, at)
                script.append(calls)
        said = [at for at, each in enumerate(request.messages) if isinstance(each, UserMessage)]
        calls, done = script[len(said) - 1], len(request.messages) - said[-1] - 1
        done = sum(isinstance(each, ToolResult) for each in request.messages[-done:]) if done else 0
        if done == len(calls):
            return "Done."
        return say("", make_call(calls[done].tool, arguments=dict(calls[done].arguments)))

    return FunctionModel(think)


async def grade(runs: int) -> None:
    """Print the table."""
    known = {each.id: each for each in dialogues() if not each.is_long and each.calls}
    tools = {call.tool: build_tool(call) for each in known.values() for call in each.calls}
    suite = Suite([build_case(each) for each in known.values()], name="bfcl")
    base = None
    said = sum(len(each.turns) for each in known.values())
    print(f"{len(suite)} dialogues with {said} turns, {runs} runs each, a fault in {FAULT:.0%} of the calls")
    print(f"{'fault':<20}{'outcome':>9}{'tool_path':>11}{'steps':>8}{f'pass^{runs}':>9}  gate")
    for seed, fault in enumerate(FAULTS):
        agent = Agent(
            build_model(known, fault, seed),
            tools=list(tools.values()),
            version=fault,
            selector=AllTools(),
            limits=Limits(turns=200, tool_calls=1_000, tokens=10**9),
        )
        found = await evaluate(
            agent, suite, runs=runs, deps=lambda run: build_objects(known[run.header.metadata["eval"]["case"]])
        )
        base = base or found
        decided = gate(found, against=base, metrics=["outcome", "tool_path"])
        means = "".join(f"{found.mean(name) or 0:>{width}.1%}" for name, width in SHOWN)
        print(f"{fault:<20}{means}{found.pass_hat(runs):>9.1%}  {decided.decision}")


SHOWN = (("outcome", 9), ("tool_path", 11), ("steps", 8))


def main(runs: str = "2") -> int:
    """Run the benchmark."""
    anyio.run(grade, int(runs))
    return 0
