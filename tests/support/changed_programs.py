"""A worker that dies in the middle of an effect, and programs in which another kind of thing has that effect."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Any, Final

import attrs

from agentfsm import Agent, Found, RunContext, Runs, tool
from agentfsm.flow import Flow, agent_step, step
from agentfsm.stores import MemoryStore
from agentfsm.testing import ScriptedModel, call, say
from tests.support.failing_stores import CrashingStore, WorkerKilled


async def find(_ctx: RunContext[Any], _arguments: Any) -> Found:
    """Find out the outcome."""
    return Found("found")


DECLARATIONS: Final[dict[str, dict[str, Any]]] = {
    "plain": {},
    "idempotent": {"idempotent": True},
    "read_only": {"read_only": True},
    "ask": {"on_unknown": "ask"},
    "fail": {"on_unknown": "fail"},
    "rerun": {"on_unknown": "rerun"},
    "function": {"on_unknown": find},
}
# Those that allow to run a call of unknown outcome again.
RERUN: Final = ("idempotent", "read_only", "rerun")


class Free(ScriptedModel):
    """A model whose tokens cost nothing, so that only tools cost money."""

    def cost_usd(self, usage: Any) -> float:
        """Return nothing."""
        return 0.0


@attrs.define(eq=False)
class World:
    """The book of effects, the store, and the process that dies in the middle of the first effect."""

    store: Any = attrs.field(factory=MemoryStore)
    book: list[tuple[str, str]] = attrs.field(factory=list)
    # Keys and arguments of the effects.
    mortal: CrashingStore | None = None

    async def act(self, ctx: RunContext[Any], to: Any) -> str:
        """Have the effect, and die if the process is to."""
        self.book.append((ctx.idempotency_key, to))
        if self.mortal is not None:
            self.mortal.dead = True
            raise WorkerKilled
        return "paid"

    def script(self, name: str, parameter: str, answer: str) -> list[Any]:
        """Return the replies of a model: the first program calls, the second answers."""
        return [answer] if self.mortal is None else [say("", call(name, **{parameter: "Ann"})), answer]


def make_function(world: World, *, retyped: bool = False) -> Callable[..., Any]:
    """Return the function that has the effect."""

    async def pay(ctx: RunContext[Any], to: str) -> str:
        """Pay."""
        return await world.act(ctx, to)

    async def pay_number(ctx: RunContext[Any], to: int) -> str:
        """Pay."""
        return await world.act(ctx, to)

    return pay_number if retyped else pay


def make_payer(world: World, **options: Any) -> Agent:
    """Return an agent that pays, for a call of it."""
    inner = tool(name="send", **options)(make_function(world))
    return Agent(Free(*world.script("send", "to", "paid")), name="pay", tools=[inner], store=world.store)


# Each builds the program whose call `pay` does the work: declared so, with further options of `pay` and of the program.


def build_function(world: World, store: Any, declared: dict[str, Any], more: dict[str, Any], fields: dict[str, Any]):
    """A function as a tool."""
    options = {**declared, **more}
    function = make_function(world, retyped=options.pop("retyped", False))
    made = tool(name="pay", **options)(function)
    return Agent(Free(*world.script("pay", "to", "done")), tools=[made], store=store, **fields)


def build_agent(world: World, store: Any, declared: dict[str, Any], more: dict[str, Any], fields: dict[str, Any]):
    """An agent as a tool; the declarations are those of its own tool, which has the effect."""
    options = dict(more)
    if options.pop("retyped", False):
        properties = {"query": {"type": "integer"}}
        options["parameters"] = {"type": "object", "properties": properties, "required": ["query"]}
    made = make_payer(world, **declared).as_tool(**options)
    return Agent(Free(*world.script("pay", "query", "done")), tools=[made], store=store, **fields)


def build_step(world: World, store: Any, declared: dict[str, Any], more: dict[str, Any], fields: dict[str, Any]):
    """A step of a flow."""
    options = {**declared, **more}
    function = make_function(world, retyped=options.pop("retyped", False))
    made = step(name="pay", **options)(function)
    return Flow([made], name="shop", store=store, **fields)


def build_agent_step(world: World, store: Any, declared: dict[str, Any], more: dict[str, Any], fields: dict[str, Any]):
    """A step of a flow that an agent carries out."""
    made = agent_step(make_payer(world), lambda to: f"Pay {to}", name="pay", **declared, **more)
    return Flow([made], name="shop", store=store, **fields)


BUILDERS: Final = {"function": build_function, "agent": build_agent, "step": build_step}


async def crash(
    kind: str,
    world: World,
    declared: dict[str, Any],
    more: dict[str, Any],
    fields: Mapping[str, Any] = MappingProxyType({}),
) -> str:
    """Run the first program until it dies in the middle of its effect; return the id of the call."""
    world.mortal = CrashingStore(world.store, 10_000, written=False)
    agent = BUILDERS[kind](world, world.mortal, declared, more, dict(fields))
    with suppress(WorkerKilled, BaseExceptionGroup):
        run = await agent.run({"to": "Ann"} if kind == "step" else "go", id="mine")
        (item,) = run.pending  # the first program asks for an approval
        await agent.approve("mine", item.call_id, by="ann")
        await agent.resume("mine")
    assert len(world.book) == 1
    world.mortal = None
    return next(entry.call.id for entry in (await Runs(world.store).load("mine")).open if entry.call.name == "pay")
