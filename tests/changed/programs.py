"""Programs as data: what describes an agent or a flow, how one is thrown, and how it is built.

The id of a unit says what it does to the world, and stays when the unit is renamed or becomes another kind of thing.
Names are unique in all programs of a seed, so that a name alone says which effect is meant.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Sequence
from inspect import Parameter, Signature
from random import Random
from typing import TYPE_CHECKING, Any, Final

import attrs

from agentfsm import Agent, Limits, Permissions, RunContext, Settings, Tool, tool
from agentfsm.core.messages import Message
from agentfsm.flow import Flow, Step, agent_step, each, step, until
from agentfsm.guards import Guard, ask, refuse
from agentfsm.planning import Planner
from agentfsm.ports import Request
from agentfsm.testing import FunctionModel, call, say
from agentfsm.testing.models import Line
from agentfsm.tools.breaker import FAILURE_THRESHOLD

if TYPE_CHECKING:
    from tests.changed.change_play import World

# What flows take.
INPUTS: Final = {"order": "o1", "items": ["a", "b", "c"]}
# Repetitions of a loop.
TIMES: Final = 2


@attrs.frozen(kw_only=True)
class Unit:
    """A tool of an agent, or a step of a flow."""

    id: str
    name: str
    body: str = "function"
    # Or "agent", "flow", "each" or "until".
    inner: Program | None = None
    # The agent or the flow.
    item: Unit | None = None
    # The step for each item, or the one that is repeated.
    read_only: bool = False
    idempotent: bool = False
    on_unknown: str = ""
    asks: bool = False
    enabled: bool = True
    valid: bool = True
    # Whether `validate=` lets it pass.
    priced: bool = True
    # Whether its price can be told.
    description: str = "Act."
    parameter: str = "n"
    # Of a function that is a tool of an agent; "m" is an input of a flow that no run has.
    is_down: bool = False
    # Whether its breaker is open.
    rule: str = ""
    # What a guard says: "ask" or "refuse".
    replaces: tuple[str, ...] = ()
    # Names that it had before.
    denied: bool = False
    fails: bool = False
    # Whether it raises in place of its effect.
    after: tuple[str, ...] = ()
    # Ids of the steps whose results it takes.
    join: str = "all_success"
    when: bool | None = None
    key: str = ""
    undo: Unit | None = None
    max_items: int = 10

    @property
    def parts(self) -> tuple[Unit, ...]:
        """The units directly within, its compensation included."""
        own = () if self.inner is None else self.inner.units
        return (*own, *[each for each in (self.item, self.undo) if each is not None])


@attrs.frozen(kw_only=True)
class Program:
    """An agent, or a flow."""

    id: str
    name: str
    is_flow: bool
    units: tuple[Unit, ...]
    plans: str = ""
    # Whether the agent has a planner: "plans", or "reviewed" where a person approves the plan.
    tool_calls: int | None = None
    # The limit.


def walk(units: tuple[Unit, ...]) -> Iterator[Unit]:
    """Yield all units, those within others included."""
    for unit in units:
        yield unit
        yield from walk(unit.parts)


def describe(program: Program, indent: str = "") -> str:
    """Return a program as text, one line for each unit, with what is not the default."""
    limit = "" if program.tool_calls is None else f"tool_calls={program.tool_calls}"
    lines = [f"{indent}{'flow' if program.is_flow else 'agent'} {program.name} {program.plans} {limit}".rstrip()]
    return "\n".join([*lines, *[_describe_unit(unit, indent + "  ") for unit in program.units]])


def _describe_unit(unit: Unit, indent: str) -> str:
    shown = [
        f"{field.name}={getattr(unit, field.name)!r}"
        for field in attrs.fields(Unit)
        if field.name not in ("id", "name", "body", "inner", "item", "undo")
        and getattr(unit, field.name) != field.default
    ]
    lines = [f"{indent}{unit.id} {unit.name}: {unit.body} {' '.join(shown)}".rstrip()]
    lines += [] if unit.inner is None else [describe(unit.inner, indent + "  ")]
    lines += [] if unit.item is None else [_describe_unit(unit.item, f"{indent}  item ")]
    lines += [] if unit.undo is None else [_describe_unit(unit.undo, f"{indent}  undo ")]
    return "\n".join(lines)


# How programs are thrown


@attrs.define
class Names:
    """Hands out ids that no other unit of a seed has."""

    dice: Random
    count: int = 0

    def new(self, letter: str = "u") -> str:
        """Return the next one."""
        self.count += 1
        return f"{letter}{self.count}"


def throw_program(names: Names, *, depth: int = 0, is_flow: bool | None = None) -> Program:
    """Throw an agent or a flow, with what is below it up to three levels deep."""
    dice, made = names.dice, names.new("p")
    is_flow = dice.random() < 0.6 if is_flow is None else is_flow
    units = list[Unit]()
    for _ in range(dice.choice((2, 2, 3) if not depth else (1, 2))):
        unit = throw_unit(names, depth=depth, is_step=is_flow)
        if is_flow and units:
            before = tuple(sorted({dice.choice(units).id for _ in range(dice.choice((0, 1, 1, 2)))}))
            unit = attrs.evolve(unit, after=before, join=dice.choice(JOINS) if before else JOINS[0])
        units.append(unit)
    if is_flow and dice.random() < 0.3:
        units[-1] = attrs.evolve(units[-1], body="function", inner=None, item=None, fails=True, undo=None)
    plans = dice.choice(("", "", "", "plans", "reviewed")) if not is_flow else ""
    return Program(id=made, name=f"{made}n", is_flow=is_flow, units=tuple(units), plans=plans)


JOINS: Final = ("all_success", "all_success", "all_done", "any")


def throw_unit(names: Names, *, depth: int, is_step: bool, bodies: tuple[str, ...] = ()) -> Unit:
    """Throw a tool or a step."""
    dice, made = names.dice, names.new()
    rest = ("agent",) * (depth < 3) + ("flow", "each", "until") * (is_step and depth < 2)
    body = dice.choice(bodies or ("function",) * 4 + rest)
    unit = Unit(id=made, name=f"{made}n", body=body)
    if body in ("agent", "flow"):
        unit = attrs.evolve(unit, inner=throw_program(names, depth=depth + 1, is_flow=body == "flow"))
    elif body in ("each", "until"):
        inside = ("function", "function", "agent") if depth < 2 else ("function",)
        item = throw_unit(names, depth=depth + 1, is_step=True, bodies=inside)
        unit = attrs.evolve(unit, item=attrs.evolve(item, when=None))
    else:
        unit = attrs.evolve(
            unit,
            read_only=dice.random() < 0.15,
            idempotent=dice.random() < 0.4,
            on_unknown=dice.choice(("", "", "", "fail", "ask")),
            key=dice.choice(("", "", "", "k1")) if is_step else "",
        )
    undo = throw_undo(names) if is_step and not unit.read_only and body != "each" and dice.random() < 0.5 else None
    return attrs.evolve(
        unit, asks=dice.random() < 0.2, when=True if is_step and dice.random() < 0.2 else None, undo=undo
    )


def throw_undo(names: Names) -> Unit:
    """Throw a compensation."""
    made = names.new("x")
    return Unit(id=made, name=f"{made}n", idempotent=names.dice.random() < 0.5)


# How programs are built


def build(program: Program, world: World, store: Any = None) -> Agent[Any]:
    """Return the agent or the flow that a description describes."""
    rules = [{"ask": ask, "refuse": refuse}[unit.rule](unit.name) for unit in program.units if unit.rule]
    limits = {} if program.tool_calls is None else {"tool_calls": program.tool_calls}
    options: dict[str, Any] = {
        "name": program.name,
        "permissions": Permissions(deny=[unit.name for unit in program.units if unit.denied]),
        "guards": [Guard(*rules)] if rules else [],
    }
    if store is not None:
        options["store"] = store
    if program.is_flow:
        named = {unit.id: unit.name for unit in program.units}
        flow = Flow([_build_step(unit, world, named) for unit in program.units], **options)
        return flow if not limits else flow.with_(limits=attrs.evolve(flow.limits, **limits))
    return Agent(
        FunctionModel(lambda request: _reply(program, world, request)),
        tools=[_build_tool(unit, world) for unit in program.units],
        limits=Limits(retries_per_tool=0, retries_per_run=0, model_retries=0, seconds=1_000, **limits),
        planner=_build_planner(program, world) if program.plans else None,
        settings=Settings(),
        **options,
    )


def _reply(program: Program, world: World, request: Request) -> Line:
    """Ask for what was never asked for and is not told as done, one or two calls at once; then answer."""
    wanted = _untold(program, world, _tell(request.messages))
    if not wanted:
        return say(f"{program.id}:answer")
    return say("", *[call(unit.name, **_arguments(unit)) for unit in wanted[: 1 + len(program.id) % 2]])


def _tell(messages: Sequence[Message]) -> str:
    """Return the texts of messages, with the names of the calls."""
    calls = [each.name for message in messages for each in getattr(message, "calls", ())]
    return " ".join([*[message.text for message in messages], *calls])


def _untold(program: Program, world: World, told: str) -> list[Unit]:
    """Return the units that a text tells nothing of: neither their names of any program, nor their results."""
    known = {world.ids.get(name) for name in re.findall(r"\b[ux]\d+[a-z]+", told)}
    known |= set(re.findall(r"\b[uxp]\d+(?=:)", told))
    return [unit for unit in program.units if known.isdisjoint({unit.id, unit.inner.id if unit.inner else unit.id})]


def _arguments(unit: Unit) -> dict[str, Any]:
    return {unit.parameter: 1} if unit.body == "function" else {"query": "go"}


# Before the results in the question to a planner.
_RESULTS: Final = '"results": '


def _build_planner(program: Program, world: World) -> Planner:
    """Return a planner that plans what it is not shown as done."""

    def plan(request: Request) -> Line:
        *history, task, question = request.messages
        first = re.search(r'"id": (\d+)', task.text)
        has_failed = "A plan was made before" in task.text  # then the agent itself sees what to do
        wanted = (
            [] if has_failed else _untold(program, world, f"{_tell(history)} {question.text.partition(_RESULTS)[2]}")
        )
        steps = [
            {"id": number, "tool": unit.name, "arguments": _arguments(unit)}
            for number, unit in enumerate(wanted, int(first[1]) if first else 1)
        ]
        return say(json.dumps({"steps": steps}))

    return Planner(model=FunctionModel(plan), replans=1, review=program.plans == "reviewed")


def _declare(unit: Unit) -> dict[str, Any]:
    """Return the options that tools and steps of each kind have."""
    options: dict[str, Any] = {"requires_approval": unit.asks, "enabled": unit.enabled}
    if unit.replaces:
        options["replaces"] = unit.replaces
    if unit.on_unknown and not unit.read_only:
        options["on_unknown"] = unit.on_unknown
    if not unit.valid:
        options["validate"] = lambda _: "it is not what it has to be"
    if unit.body == "function":
        options |= {"read_only": unit.read_only, "idempotent": unit.idempotent and not unit.read_only}
        options |= {} if unit.priced else {"cost_usd": _no_price}
        options["concurrency_safe"] = True
    return options


def _no_price(_arguments: object) -> float:
    raise ValueError("the price list is gone")


def _open_breaker(made: Tool[..., Any], unit: Unit) -> Tool[..., Any]:
    ticket = made.breaker.admit(0.0)
    for _ in range(FAILURE_THRESHOLD if unit.is_down and not isinstance(ticket, float) else 0):
        made.breaker.record_failure(ticket, time.monotonic())
    return made


def _build_tool(unit: Unit, world: World) -> Tool[..., Any]:
    if unit.inner is not None:
        inner = build(unit.inner, world)
        options = {"turns": 20, "timeout_s": 500.0}
        made = inner.as_tool(name=unit.name, description=unit.description, **options, **_declare(unit))
    else:
        function = _signed(unit, world, (unit.parameter,))
        made = tool(name=unit.name, description=unit.description, **_declare(unit))(function)
    return _open_breaker(made, unit)


def _build_step(unit: Unit, world: World, named: dict[str, str], taken: tuple[str, ...] = ()) -> Step:
    """Return a step; `taken` are the first parameters of its function."""
    names = (*taken, *[named[each] for each in unit.after])
    order: dict[str, Any] = {"depends_on": [named[each] for each in unit.after]}
    order |= {} if unit.when is None else {"when": lambda order: unit.when}
    undo = None if unit.undo is None else _build_undo(unit, world, taken)
    options = _declare(unit)
    match unit.body:
        case "function":
            names = names if taken else ("order", *(["m"] if unit.parameter == "m" else []), *names)
            key = (lambda order: f"{order}-{unit.id}-{unit.key}") if unit.key else None
            if taken[:1] == ("item",) and unit.key:
                key = lambda item: f"{item}-{unit.id}-{unit.key}"  # noqa: E731  it reads best in place
            made = step(name=unit.name, join=_join(unit), key=key, compensate=undo, **order, **options)(
                _signed(unit, world, names)
            )
        case "agent":
            assert unit.inner is not None
            prompt = _with_parameters(lambda **_: "go", names) if names else "go"
            agent = build(unit.inner, world)
            made = agent_step(
                agent, prompt, name=unit.name, join=_join(unit), compensate=undo, turns=20, **order, **options
            )
        case "flow":
            assert unit.inner is not None
            flow = build(unit.inner, world)
            assert isinstance(flow, Flow)
            made = flow.as_step(name=unit.name, join=_join(unit), compensate=undo, **order, **options)
        case "each":
            assert unit.item is not None
            item = _build_step(unit.item, world, {}, ("item",))
            made = each(item, over="items", name=unit.name, max_items=unit.max_items, key=str, **order, **options)
        case _:
            assert unit.item is not None
            own = unit.item.name
            repeated = _build_step(attrs.evolve(unit.item, when=None, undo=None), world, {}, (own,))
            done = _with_parameters(lambda **results: f":{TIMES}" in str(results[own]), (own,))
            made = until(
                repeated,
                done,
                times=min(TIMES, unit.max_items),
                on_limit="accept",
                name=unit.name,
                compensate=undo,
                **order,
                **options,
            )
    _open_breaker(made.tool, unit)
    return made


def _join(unit: Unit) -> Any:
    return unit.join if unit.after else "all_success"


def _build_undo(unit: Unit, world: World, taken: tuple[str, ...]) -> Step:
    assert unit.undo is not None
    names = (*[each for each in taken if each == "item"], unit.name)
    return step(name=unit.undo.name, **_declare(unit.undo))(_signed(unit.undo, world, names))


def _signed(unit: Unit, world: World, names: tuple[str, ...]) -> Any:
    """Return the function of a unit with parameters of these names; those of results may be None."""

    async def act(ctx: RunContext[Any], **arguments: Any) -> str:
        return world.act(unit, ctx, arguments)

    act.__name__, act.__doc__ = unit.name, unit.description
    kinds: dict[str, Any] = {"ctx": RunContext[Any], "n": int, "m": int}
    first = Parameter("ctx", Parameter.POSITIONAL_OR_KEYWORD, annotation=RunContext[Any])
    _with_parameters(act, names, kinds, (first,))
    return act


def _with_parameters(
    function: Any, names: tuple[str, ...], kinds: dict[str, Any] | None = None, first: tuple[Parameter, ...] = ()
) -> Any:
    kinds = kinds or {}
    parameters = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, annotation=kinds.get(name, Any)) for name in names]
    function.__signature__ = Signature([*first, *parameters], return_annotation=str)
    function.__annotations__ = {each.name: each.annotation for each in (*first, *parameters)} | {"return": str}
    return function
