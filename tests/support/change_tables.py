"""Tables for the docs of what becomes of a run in flight for each change of its program, made by small programs."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import attrs

from agentfsm import (
    Agent,
    ErrorType,
    IncompatibleProgramError,
    Limits,
    Outcome,
    PendingKind,
    Permissions,
    Run,
    RunContext,
    Runs,
    tool,
)
from agentfsm.core.events import ApprovalAsked, ToolStarted
from agentfsm.flow import Flow, each, step
from agentfsm.guards import Guard, allow, ask, refuse
from agentfsm.planning import Planner
from agentfsm.stores import MemoryStore
from agentfsm.testing import ScriptedModel
from agentfsm.tools.breaker import Ticket
from tests.support.changed_programs import Free, World, build_agent, build_function, crash, make_function
from tests.support.checks import Wrapped, results_of
from tests.support.failing_stores import CrashingStore, WorkerKilled

PAGE: Final = Path(__file__).parents[2] / "docs" / "failures" / "changed-code.md"
NONE: Final = "-"


class LateStore(Wrapped):
    """A store whose process is killed right before a call starts."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.is_dead = inner, False

    def append(self, lease: Any, run: Any, events: Any, **options: Any) -> Any:
        """Pass on, until the first start of a call."""
        self.is_dead = self.is_dead or any(
            isinstance(event, ToolStarted) and event.call_id == "t1.0" for event in events
        )
        if self.is_dead:
            raise WorkerKilled
        return self.inner.append(lease, run, events, **options)


@attrs.frozen(kw_only=True)
class Change:
    """A change of the tool `pay` or of its agent between two executions."""

    first: dict[str, Any] = attrs.field(factory=dict)
    # Options of `pay` before the change, beside those of the column.
    options: dict[str, Any] = attrs.field(factory=dict)
    # Its options after the change; None removes one.
    fields: dict[str, Any] = attrs.field(factory=dict)
    # Further fields of the agent.
    was: dict[str, Any] = attrs.field(factory=dict)
    # Fields of the agent before the change.
    remake: Callable[[World, Agent], Any] = lambda _world, agent: agent
    # Function that returns the agent after the change.
    skips: tuple[str, ...] = ()
    # Columns that do not apply.


def open_circuit(_world: World, agent: Agent) -> Agent:
    """Let the last calls of the tool have failed."""
    made: Any = agent.driver.config.registry.get("pay")
    now = agent.clock.monotonic()
    while isinstance(ticket := made.breaker.admit(now), Ticket):
        made.breaker.record_failure(ticket, now)
    return agent


def swap_kind(world: World, agent: Agent) -> Agent:
    """Let `pay` be an agent if it was a function, and the other way round."""
    is_agent = agent.driver.config.registry.get("pay").inner_agent is not None  # type: ignore[union-attr]
    return (build_function if is_agent else build_agent)(world, world.store, {}, {}, {})


@tool(read_only=True)
async def look() -> str:
    """Look."""
    return "nothing"


def plan_nothing(_world: World, agent: Agent) -> Agent:
    """Return the agent with a planner that has no steps to add."""
    return agent.with_(planner=Planner(model=ScriptedModel('{"steps": []}', '{"steps": []}')))


CHANGES: Final = {
    "another tool is added": Change(remake=lambda w, a: a.with_(tools=[*a.driver.config.registry, look])),
    "the tool is removed": Change(remake=lambda w, a: a.with_(tools=[])),
    "the tool is renamed": Change(
        remake=lambda w, a: a.with_(tools=[tool(name="send_money")(make_function(w))]), skips=("sub-agent",)
    ),
    "its parameters change": Change(options={"retyped": True}),
    "`idempotent` is added": Change(first={"idempotent": None}, options={"idempotent": True}, skips=("sub-agent",)),
    "`idempotent` is removed": Change(options={"idempotent": None}, skips=("sub-agent",)),
    "`read_only` is added": Change(
        first={"idempotent": None}, options={"idempotent": None, "read_only": True}, skips=("sub-agent",)
    ),
    '`on_unknown="fail"` is added': Change(options={"on_unknown": "fail"}, skips=("sub-agent",)),
    '`on_unknown="ask"` is removed': Change(
        first={"on_unknown": "ask"}, options={"on_unknown": None}, skips=("sub-agent",)
    ),
    "`requires_approval` is added": Change(options={"requires_approval": True}, skips=("approved",)),
    "`requires_approval` is removed": Change(
        options={"requires_approval": None}, skips=("not started", "cut off", "sub-agent")
    ),
    "its description changes": Change(options={"description": "Pay, also abroad."}),
    "`describe` says another text of it": Change(
        first={"describe": lambda a: "Pay 5."}, options={"describe": lambda a: "Pay 5,000."}
    ),
    "its `cost_usd` is raised": Change(first={"cost_usd": 1.0}, options={"cost_usd": 2.0}, skips=("sub-agent",)),
    "a permission is taken away": Change(fields={"permissions": Permissions(deny=("pay",))}),
    "`enabled=False`": Change(options={"enabled": False}),
    "a guard refuses it": Change(fields={"guards": (Guard(refuse("pay")),)}),
    "a guard asks about it": Change(fields={"guards": (Guard(ask("pay")),)}),
    "a guard that allowed it refuses it": Change(
        was={"guards": (Guard(allow("pay")),)}, fields={"guards": (Guard(refuse("pay")),)}
    ),
    "a guard that allowed it asks about it": Change(
        was={"guards": (Guard(allow("pay")),)}, fields={"guards": (Guard(ask("pay")),)}
    ),
    "a guard that asked about it allows it": Change(
        was={"guards": (Guard(ask("pay")),)},
        fields={"guards": (Guard(allow("pay")),)},
        skips=("not started", "cut off", "sub-agent"),
    ),
    "its circuit is open": Change(remake=open_circuit),
    "a function becomes an agent, or an agent a function": Change(remake=swap_kind),
    "a planner is added": Change(remake=plan_nothing),
    "a limit is lowered": Change(fields={"limits": Limits(turns=1)}),
    "the agent becomes a flow": Change(
        remake=lambda w, a: Flow([step(name="pay")(make_function(w))], name="agent", store=w.store)
    ),
}
STATES: Final = {
    "not started": "call not started",
    "cut off": "call cut off",
    "approved": "call approved, not started",
    "sub-agent": "agent as a tool, cut off",
}


async def try_change(change: Change, state: str) -> str:
    """Execute a run up to a state, continue it under the changed program, and tell in a few words what happened."""
    if state in change.skips:
        return NONE
    world, kind = World(), "agent" if state == "sub-agent" else "function"
    build: Any = build_agent if kind == "agent" else build_function
    common: dict[str, Any] = {} if kind == "agent" else {"idempotent": True}
    if state == "approved":
        common["requires_approval"] = True
    before = {**common, **change.first}
    after = {name: value for name, value in {**before, **change.options}.items() if value is not None}
    before = {name: value for name, value in before.items() if value is not None}
    own = {"idempotent": True} if kind == "agent" else {}
    if state in ("cut off", "sub-agent"):
        await crash(kind, world, own, before, change.was)
    else:
        world.mortal = LateStore(world.store)  # type: ignore[assignment]
        agent = build(world, world.mortal, {}, before, change.was)
        world.mortal = None
        try:
            await agent.run("go", id="mine")
        except (WorkerKilled, BaseExceptionGroup):
            pass
        else:
            await Runs(world.store).approve("mine", "t1.0", by="ann")
    return await tell(world, change.remake(world, build(world, world.store, own, after, change.fields)))


async def tell(world: World, agent: Any) -> str:
    """Continue the run, and return in a few words what becomes of its call."""
    done = len(world.book)
    try:
        run = await agent.resume("mine")
    except IncompatibleProgramError:
        return "refused, nothing changes"
    result = next((each for each in results_of(run.messages) if each.call_id == "t1.0"), None)
    acted = len(world.book) - done
    if run.pending:
        (item,) = run.pending
        events = await Runs(world.store).history("mine")
        asked = sum(isinstance(event, ApprovalAsked) for event in events)
        again = " again" if asked > 1 else ""
        return "a person settles it" if item.kind is PendingKind.OUTCOME else f"a person is asked{again}"
    if acted:
        text = "runs" if not done else "runs again, same key" if len(set(world.book)) == 1 else "runs again, OTHER KEY"
    elif result is None:
        text = "no result"
    elif result.outcome is Outcome.UNKNOWN:
        children = await Runs(world.store).children("mine")
        text = "its run is ended, and its effect told as unknown" if children else "told as unknown"
    elif done:
        text = f"told as {result.outcome}"
    else:
        text = "is not run, and the model is told"
    return text if run.stop_reason == "completed" else f"{text}; the run ends ({run.stop_reason})"


# Flows


@attrs.define(eq=False)
class Shop:
    """The store, and the names and keys of the steps that had an effect."""

    store: MemoryStore = attrs.field(factory=MemoryStore)
    book: list[tuple[str, str]] = attrs.field(factory=list)
    mortal: Any = None
    dies_in: str = ""
    fails_in: str = ""

    def step(self, name: str, *, takes_item: bool = False, **options: Any) -> Any:
        """Return a step that has an effect, in which the process may die."""

        async def work(ctx: RunContext[Any]) -> str:
            self.book.append((name, ctx.idempotency_key))
            if name == self.dies_in:
                self.mortal.dead = True
                raise WorkerKilled
            if name == self.fails_in:
                raise ValueError("no luck")
            return name

        async def work_on(ctx: RunContext[Any], item: str) -> str:
            return await work(ctx)

        return step(name=name, **options)(work_on if takes_item else work)

    def flow(self, **changes: Any) -> Any:
        """Return the flow `gate`, `charge`, `ship`, or a changed one; `gate` and `ship` wait for an approval."""
        charge = {"key": lambda: "order-1", "compensate": "refund", "depends_on": ["gate"], **changes.get("charge", {})}
        name, undo = charge.pop("name", "charge"), charge.pop("compensate")
        ship = {"requires_approval": True, "depends_on": [name], **changes.get("ship", {})}
        if "max_items" in changes:  # a charge for each of two items
            item = self.step("charge", takes_item=True, key=lambda item: item, compensate=self.step(undo))
            made = each(item, over="items", name=name, depends_on=["gate"], parallel=1, max_items=changes["max_items"])
        else:
            made = self.step(name, compensate=self.step(undo) if undo else None, **charge)
        steps = [
            self.step("gate", read_only=True, requires_approval=True),
            made,
            *[self.step(added, read_only=True, depends_on=[name]) for added in changes.get("added", ())],
            self.step("ship", **ship),
        ]
        return Flow(
            [made for made in steps if made.name not in changes.get("removed", ())], name="shop", store=self.store
        )


REMOVED: Final = {"removed": ["charge"], "ship": {"depends_on": ["gate"]}}
FLOW_CHANGES: Final[dict[str, tuple[dict[str, Any], dict[str, Any]]]] = {
    "a step `weigh` is added after `charge`": ({}, {"added": ["weigh"], "ship": {"depends_on": ["charge", "weigh"]}}),
    "`charge` is removed": ({}, REMOVED),
    "`charge` is renamed to `charge_card`": ({}, {"charge": {"name": "charge_card"}}),
    "`when` of `charge` is False now": ({}, {"charge": {"when": lambda: False}}),
    "`key` of `charge` changes": ({}, {"charge": {"key": lambda: "order-2"}}),
    "`join` of `ship` changes": ({}, {"ship": {"join": "any"}}),
    "the compensation `refund` is added": ({"charge": {"compensate": ""}}, {}),
    "`refund` is removed": ({}, {"charge": {"compensate": ""}}),
    "`refund` is renamed to `give_back`": ({}, {"charge": {"compensate": "give_back"}}),
    "`charge` is an `each` over 2 items, and `max_items` is 1 now": ({"max_items": 9}, {"max_items": 1}),
    "the flow becomes an agent": ({}, {"is_agent": True}),
}
FLOW_STATES: Final = {
    "not started": "`charge` not started",
    "cut off": "`charge` cut off",
    "done": "`charge` done, then `ship` fails",
}


async def try_flow_change(before: dict[str, Any], after: dict[str, Any], state: str) -> str:
    """Execute a flow up to a state, continue it as the changed flow, and tell in a few words what happened."""
    shop = Shop(fails_in="ship" if state == "done" else "")
    first: Any = shop.flow(**before)
    await first.run({"items": ["a", "b"]} if before.get("max_items") else {}, id="mine")
    await approve(shop, "gate")
    if state == "cut off":
        shop.dies_in, shop.mortal = "charge", CrashingStore(shop.store, 10_000, written=False)
        with suppress(WorkerKilled, BaseExceptionGroup):
            await first.with_(store=shop.mortal).resume("mine")
        shop.dies_in = ""
    elif state == "done":
        await first.resume("mine")
        await approve(shop, "ship")
    second: Any = Agent(Free("done"), name="shop", store=shop.store) if after.get("is_agent") else shop.flow(**after)
    done = len(shop.book)
    try:
        run = await second.resume("mine")
        if await approve(shop, "ship"):
            run = await second.resume("mine")
    except IncompatibleProgramError:
        return "refused, nothing changes"
    return tell_flow(shop, run, done, has_items="max_items" in before)


async def approve(shop: Shop, name: str) -> bool:
    """Approve a step that waits for it; return whether it does."""
    items = [item for item in (await Runs(shop.store).load("mine")).pending if item.kind is PendingKind.APPROVAL]
    for item in items:
        if item.tool == name:
            await Runs(shop.store).approve("mine", item.call_id, by="ann")
    return any(item.tool == name for item in items)


def tell_flow(shop: Shop, run: Run, done: int, *, has_items: bool) -> str:
    """Return in a few words which steps had their effects since, and what the run waits for."""
    known, texts = shop.book[:done], []
    for name, key in shop.book[done:]:
        is_other = not has_items and name in dict(known)
        again = " again, same key" if (name, key) in known else " again, OTHER KEY" if is_other else ""
        if name != "gate":
            texts.append(f"`{name}` {'fails' if name == shop.fails_in else 'runs'}{again}")
    closed = () if run.plan is None else run.plan.closed
    results = [entry.result for entry in closed if entry.result is not None]
    texts += [f"`{each.tool}` is skipped" for each in results if each.error_type is ErrorType.CONDITION]
    texts += [f"waits for a person about `{item.tool}`" for item in run.pending]
    failed = [result.tool for result in results if result.outcome is Outcome.FAILED and result.tool != shop.fails_in]
    texts += [f"`{name}` fails, since it cannot start" for name in failed]
    return "; ".join(dict.fromkeys(texts)) or "ends"


async def build_flow_table() -> list[list[str]]:
    """Return the rows of the table on flows, its head first."""
    rows = [["change", *FLOW_STATES.values()]]
    for name, (before, after) in FLOW_CHANGES.items():
        rows.append([name, *[await try_flow_change(before, after, state) for state in FLOW_STATES]])
    return rows


async def build_agent_table() -> list[list[str]]:
    """Return the rows of the table on agents, its head first."""
    rows = [["change", *STATES.values()]]
    for name, change in CHANGES.items():
        rows.append([name, *[await try_change(change, state) for state in STATES]])
    return rows


def write_tables(page: str, tables: dict[str, list[list[str]]]) -> str:
    """Return the page with the tables in place of those between its marks."""
    for name, (head, *rows) in tables.items():
        lines = [head, ["---"] * len(head), *rows]
        text = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
        mark = f"<!-- changes of {name} -->"
        pattern = re.compile(f"{mark}\n.*?<!-- /changes -->", re.DOTALL)
        page = pattern.sub(lambda _, text=text, mark=mark: f"{mark}\n{text}\n<!-- /changes -->", page)
    return page


async def build_tables() -> dict[str, list[list[str]]]:
    """Return both tables, by what they are about."""
    return {"an agent": await build_agent_table(), "a flow": await build_flow_table()}
