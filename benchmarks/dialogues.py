"""`python -m benchmarks dialogues [SEEDS]`: recorded dialogues with stateful tools, run as plans in parallel.

The data are the multi-turn dialogues of the Berkeley Function Calling Leaderboard, and its classes are the tools.
Install both beside agentfsm: `pip install --no-deps bfcl-eval mpmath`.

The recorded calls of each dialogue become the steps of one plan. Which steps depend on each other is found by code: the
calls are run in their order on objects that record which attributes each call reads, sets or changes, and a step
depends on an earlier one if one of the two writes what the other touches. Then agentfsm runs the plan, and each call
waits a random number of times before and after its effect. The results of all calls and the final state of all objects
have to equal those of the serial run, and the order of the effects has to respect the plan. As a control, each dialogue
is also run once without its dependencies, which has to show differences.
"""

from __future__ import annotations

import ast
import copy
import importlib
import inspect
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from typing import Any

import anyio
import attrs
from anyio.lowlevel import checkpoint

from agentfsm import Agent, Limits, Run
from agentfsm.planning import Plan, PlanAsk, PlanRequest, PlanStep
from agentfsm.ports import PlanMaker
from agentfsm.ports.model import to_mutable_json
from agentfsm.testing.models import FunctionModel
from agentfsm.tools.tool import Tool, make_tool

FILES = ("base", "long_context")
PACKAGE = "bfcl_eval.eval_checker.multi_turn_eval.func_source_code"
MODULES = {
    "GorillaFileSystem": "gorilla_file_system",
    "MathAPI": "math_api",
    "MessageAPI": "message_api",
    "TwitterAPI": "posting_api",
    "TicketAPI": "ticket_api",
    "TradingBot": "trading_bot",
    "TravelAPI": "travel_booking",
    "VehicleControlAPI": "vehicle_control",
}
# Fields with the time of day, which is another one in each run.
CLOCKS = frozenset({"_last_modified"})
# Maximum of other tasks that a call lets go first, before and after its effect.
MOST_WAITS = 6


@attrs.frozen
class Call:
    """A recorded call of a method."""

    owner: str
    method: str
    arguments: Mapping[str, Any]

    @property
    def tool(self) -> str:
        """Name of the tool that makes such calls."""
        return f"{self.owner}_{self.method}"


@attrs.frozen
class Dialogue:
    """A recorded dialogue: the initial state of its objects, and what the user says, with the calls that follow."""

    id: str
    config: Mapping[str, Any]
    owners: Sequence[str]
    is_long: bool
    turns: Sequence[tuple[str, Sequence[Call]]]

    @property
    def calls(self) -> list[Call]:
        """All calls in order."""
        return [call for _text, calls in self.turns for call in calls]


@attrs.define
class Touched:
    """What a call has read and written: attributes of its object."""

    reads: set[tuple[str, str]] = attrs.field(factory=set)
    writes: set[tuple[str, str]] = attrs.field(factory=set)

    def conflicts(self, later: Touched) -> bool:
        """Return whether the order of this call and a later one matters."""
        return bool(self.writes & (later.reads | later.writes) or self.reads & later.writes)


def load_class(owner: str) -> type:
    """Return the class of the benchmark that has these methods."""
    found: type = getattr(importlib.import_module(f"{PACKAGE}.{MODULES[owner]}"), owner)
    return found


def dialogues() -> Iterator[Dialogue]:
    """Yield the dialogues whose recorded calls are plain calls with literals."""
    data = files("bfcl_eval") / "data"
    for name in FILES:
        lines = (data / f"BFCL_v4_multi_turn_{name}.json").read_text().splitlines()
        truths = (data / "possible_answer" / f"BFCL_v4_multi_turn_{name}.json").read_text().splitlines()
        answers = {each["id"]: each["ground_truth"] for each in map(json.loads, truths)}
        for given in map(json.loads, lines):
            owners = given["involved_classes"]
            said = ["\n".join(each["content"] for each in turn) for turn in given["question"]]
            calls = [[read_call(text, owners) for text in turn] for turn in answers[given["id"]]]
            turns = [*zip(said, calls, strict=True)]
            yield Dialogue(given["id"], given["initial_config"], owners, name == "long_context", turns)


def read_call(text: str, owners: Sequence[str]) -> Call:
    """Return the call that a line of Python makes."""
    node = ast.parse(text, mode="eval").body
    assert isinstance(node, ast.Call)
    assert isinstance(node.func, ast.Name)
    name = node.func.id
    owner = next(each for each in owners if hasattr(load_class(each), name))
    method = getattr(load_class(owner), name)
    positional = [ast.literal_eval(each) for each in node.args]
    named = {str(each.arg): ast.literal_eval(each.value) for each in node.keywords}
    bound = inspect.signature(method).bind(None, *positional, **named).arguments
    return Call(owner, name, {key: value for key, value in bound.items() if key != "self"})


def build_objects(dialogue: Dialogue, touched: list[Touched] | None = None) -> dict[str, Any]:
    """Return the objects of a dialogue in their initial state; they record in the last of `touched` what is touched."""
    built = {}
    for owner in dialogue.owners:
        kind = load_class(owner)
        one = (kind if touched is None else trace(kind, owner, touched))()
        if hasattr(one, "_load_scenario"):
            config = copy.deepcopy(dialogue.config.get(owner, {}))
            one._load_scenario(config, long_context=dialogue.is_long)  # noqa: SLF001  as the benchmark does
        built[owner] = one
    return built


def trace(kind: type, owner: str, touched: list[Touched]) -> type:
    """Return a subclass that records which attributes of an object are read and set."""

    class Traced(kind):  # type: ignore[misc, valid-type]
        def __getattribute__(self, name: str) -> Any:
            if touched and name != "__dict__" and name in object.__getattribute__(self, "__dict__"):
                touched[-1].reads.add((owner, name))
            return super().__getattribute__(name)

        def __setattr__(self, name: str, value: object) -> None:
            if touched:
                touched[-1].writes.add((owner, name))
            super().__setattr__(name, value)

    return Traced


def state_of(value: Any, seen: tuple[int, ...] = ()) -> Any:
    """Return the whole state of an object as values that can be compared."""
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, dict):
        return {key: state_of(each, (*seen, id(value))) for key, each in value.items()}
    if isinstance(value, list | tuple | set):
        return [state_of(each, (*seen, id(value))) for each in value]
    if hasattr(value, "__dict__"):
        if id(value) in seen:  # a folder knows the one above
            return "above"
        fields = object.__getattribute__(value, "__dict__")
        return {name: state_of(each, (*seen, id(value))) for name, each in fields.items() if name not in CLOCKS}
    return repr(value)


def do_call(objects: Mapping[str, Any], call: Call) -> str:
    """Make a call, and return its result or its error as text."""
    try:
        return repr(getattr(objects[call.owner], call.method)(**copy.deepcopy(dict(call.arguments))))
    except Exception as error:  # noqa: BLE001  recorded calls may fail
        return f"{type(error).__name__}: {error}"


def run_in_order(dialogue: Dialogue) -> tuple[list[Touched], list[str], Any]:
    """Make all calls in their order. Return what each touched, its result, and the final state."""
    touched: list[Touched] = []
    objects = build_objects(dialogue, touched)
    results = []
    for call in dialogue.calls:
        before = {owner: state_of(one) for owner, one in objects.items()}
        touched.append(Touched())
        results.append(do_call(objects, call))
        own = touched.pop()
        for owner, one in objects.items():
            after = state_of(one)
            own.writes |= {(owner, name) for name in after if after[name] != before[owner].get(name)}
        touched.append(own)
    touched.append(Touched())  # what the comparison reads
    return touched[:-1], results, {owner: state_of(one) for owner, one in objects.items()}


def build_plan(dialogue: Dialogue, touched: Sequence[Touched]) -> Plan:
    """Return the plan of the calls: a step waits for those earlier ones with which its order matters."""
    steps = []
    for number, call in enumerate(dialogue.calls, 1):
        after = [each for each in range(1, number) if touched[each - 1].conflicts(touched[number - 1])]
        arguments = {"step": number, "arguments": dict(call.arguments)}
        steps.append(PlanStep(id=number, tool=call.tool, arguments=arguments, after=tuple(after)))
    return Plan(steps=tuple(steps))


@attrs.define
class Recorded(PlanMaker):
    """Returns a plan that was made before."""

    made: Plan
    max_steps: int = 1_000

    def wants(self, run: Run) -> bool:
        """Plan always."""
        return True

    async def plan(self, request: PlanRequest, ask: PlanAsk) -> Plan | None:
        """Return the plan if it has no flaws."""
        flaws = request.find_flaws(self.made)
        assert not flaws, flaws
        return self.made


@attrs.define
class World:
    """The objects of a dialogue, as tools that may overlap."""

    objects: Mapping[str, Any]
    rng: random.Random
    order: list[int] = attrs.field(factory=list)
    results: dict[int, str] = attrs.field(factory=dict)
    running: int = 0
    most: int = 0

    def tool(self, call: Call) -> Tool[..., Any]:
        """Return the tool for calls of this method."""

        async def make(step: int, arguments: dict[str, Any]) -> str:
            self.running += 1
            self.most = max(self.most, self.running)
            await self.wait()
            self.order.append(step)
            self.results[step] = do_call(self.objects, Call(call.owner, call.method, to_mutable_json(arguments)))
            await self.wait()
            self.running -= 1
            return self.results[step]

        return make_tool(make, name=call.tool, description="A method of the benchmark.", concurrency_safe=True)

    async def wait(self) -> None:
        """Let others go first, a random number of times."""
        for _ in range(self.rng.randrange(MOST_WAITS)):
            await checkpoint()


@attrs.define
class Counts:
    """What was seen."""

    dialogues: int = 0
    calls: int = 0
    with_overlap: int = 0
    runs: int = 0
    reordered: int = 0
    most: int = 0
    differing: list[str] = attrs.field(factory=list)
    control: int = 0


async def run_plan(dialogue: Dialogue, plan: Plan, seed: int) -> World:
    """Let agentfsm run a plan on the objects of a dialogue, and return them."""
    world = World(build_objects(dialogue), random.Random(f"{dialogue.id} {seed}"))
    tools = {call.tool: world.tool(call) for call in dialogue.calls}
    agent = Agent(
        FunctionModel(lambda _request: "done"),
        tools=list(tools.values()),
        planner=Recorded(plan),
        limits=Limits(tool_calls=1_000, parallel=64),
    )
    run = await agent.run("go")
    assert run.output == "done"
    return world


async def check(dialogue: Dialogue, seeds: int, counts: Counts) -> None:
    """Run a dialogue as a plan, under some random schedules, and compare with the serial run."""
    touched, results, final = run_in_order(dialogue)
    plan = build_plan(dialogue, touched)

    def is_serial(world: World) -> bool:
        state = {owner: state_of(one) for owner, one in world.objects.items()}
        return [world.results[step.id] for step in plan.steps] == results and state == final

    overlapped = False
    for seed in range(seeds):
        world = await run_plan(dialogue, plan, seed)
        places = {step: place for place, step in enumerate(world.order)}
        is_in_order = all(places[each] < places[step.id] for step in plan.steps for each in step.after)
        if not (is_in_order and len(world.order) == len(plan.steps) and is_serial(world)):
            counts.differing.append(f"{dialogue.id} (seed {seed})")
        counts.runs += 1
        counts.reordered += world.order != sorted(world.order)
        counts.most = max(counts.most, world.most)
        overlapped |= world.most > 1
    loose = Plan(steps=tuple([attrs.evolve(step, after=()) for step in plan.steps]))
    counts.control += not is_serial(await run_plan(dialogue, loose, 0))
    counts.dialogues += 1
    counts.calls += len(dialogue.calls)
    counts.with_overlap += overlapped


async def count(seeds: int) -> Counts:
    """Check all dialogues."""
    counts = Counts()
    for dialogue in dialogues():
        await check(dialogue, seeds, counts)
    return counts


def main(seeds: str = "3") -> int:
    """Print what was seen; 1 if a state or a result differed."""
    counts = anyio.run(count, int(seeds))
    print(f"{counts.dialogues} dialogues with {counts.calls} calls, each as a plan under {seeds} schedules")
    print(f"with calls that overlapped: {counts.with_overlap} dialogues; at most {counts.most} calls at once")
    print(f"with effects in another order than recorded: {counts.reordered} of {counts.runs} runs")
    print(f"with another result or final state than one by one: {len(counts.differing)} runs", *counts.differing[:20])
    print(f"the same for plans without dependencies: {counts.control} of {counts.dialogues} runs")
    return int(bool(counts.differing) or not counts.control)
