"""The start rules: a call that had started is never told as not made, whatever refuses, changes or replaces it now.

A worker dies in the middle of an effect, and another program continues the run. The table crosses all that may refuse
the call with the declarations of both programs, and with all that can carry out a call.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from itertools import product
from typing import Any, Final

import attrs
import pytest

from agentfsm import Agent, IncompatibleProgramError, Limits, Outcome, PendingKind, Permissions, Run, Runs, Spend
from agentfsm.flow import Flow, step
from agentfsm.guards import Guard, ask, refuse
from agentfsm.testing import call, say
from agentfsm.tools.breaker import Ticket
from agentfsm.tools.queue.call_order import Access
from agentfsm.tools.queue.dispatch import CallThread
from tests.support.changed_programs import (
    BUILDERS,
    DECLARATIONS,
    RERUN,
    Free,
    World,
    build_agent,
    build_agent_step,
    build_function,
    build_step,
    crash,
    make_function,
    make_payer,
)
from tests.support.checks import results_of
from tests.support.failing_stores import CrashingStore

DENYING: Final = re.compile(r"not run\b(?! again)|nothing was|was not (called|made)|never (ran|began)|withheld")


@attrs.frozen(kw_only=True)
class Refusal:
    """A reason for which the second program does not carry out the call again."""

    said: str
    # Words in the question to the person, also of a call whose declarations allow to repeat it.
    first: dict[str, Any] = attrs.field(factory=dict)
    # Options of `pay` in the first program.
    options: dict[str, Any] = attrs.field(factory=dict)
    # In the second.
    fields: dict[str, Any] = attrs.field(factory=dict)
    # Of the second program.
    prepare: Callable[[Agent], Callable[[], object] | None] = lambda _agent: None
    # Called before the run is continued; returns what takes it back.
    kinds: tuple[str, ...] = tuple(BUILDERS)
    is_for_person: bool = False
    # Whether a person decides in any case, also if the outcome could be found out.


def open_circuit(agent: Agent) -> None:
    """Let the last calls of the tool have failed."""
    breaker, now = agent.driver.config.registry.get("pay").breaker, agent.clock.monotonic()
    while isinstance(ticket := breaker.admit(now), Ticket):
        breaker.record_failure(ticket, now)


def block(_agent: Agent) -> Callable[[], object]:
    """Let a thread of the run go on that may not overlap the call; return the function that ends it."""
    thread = CallThread("write", Access(shared=False, keys=None, reason=""))
    thread.mark_abandoned("mine")
    return thread.mark_ended


def fail(_arguments: Any) -> float:
    """Fail, as a function for the cost."""
    raise ValueError("no price")


PAID: Final = {"kinds": ("function", "step")}  # an agent costs what its model costs
REFUSALS: Final = {
    "permission": Refusal(said="not permitted", fields={"permissions": Permissions(deny=("pay",))}),
    "disabled": Refusal(said="not available", options={"enabled": False}),
    "disabled by a function": Refusal(said="not available", options={"enabled": lambda _ctx: False}),
    "validate": Refusal(said="arguments do not fit", options={"validate": lambda _arguments: "no"}),
    "retyped": Refusal(said="parameters of its tool", options={"retyped": True}),
    "open circuit": Refusal(said="not called for a while", prepare=open_circuit),
    "unknown cost": Refusal(said="cost", options={"cost_usd": fail}, fields={"limits": Limits(usd=1.0)}, **PAID),
    "money": Refusal(said="beyond a limit", options={"cost_usd": 5.0}, fields={"limits": Limits(usd=1.0)}, **PAID),
    "spending": Refusal(
        said="beyond a limit", options={"cost_usd": 5.0}, fields={"spend": Spend(per="day", usd=1.0)}, **PAID
    ),
    "thread": Refusal(said="write", options={"timeout_s": 0.001}, prepare=block),
    "guard refuses": Refusal(said="is not run again", fields={"guards": (Guard(refuse("pay")),)}, is_for_person=True),
    "guard asks": Refusal(said="is not run again", fields={"guards": (Guard(ask("pay")),)}, is_for_person=True),
    "approval": Refusal(said="needs an approval", options={"requires_approval": True}),
    "description": Refusal(
        said="needs an approval",
        first={"requires_approval": True},
        options={"requires_approval": True, "description": "Pay, also abroad."},
        kinds=("function", "agent"),
    ),
}


def find_policy(first: str, second: str) -> str:
    """Return the stricter of two declarations, as a rule on what becomes of a call of unknown outcome."""
    one, other = ("rerun" if each in RERUN else "ask" if each == "plain" else each for each in (first, second))
    if other == "function":
        return "function"  # it finds out
    return "ask" if "function" in (one, other) and other == "rerun" else max(one, other, key=POLICIES.index)


POLICIES: Final = ("rerun", "function", "fail", "ask")


def find_results(run: Run) -> dict[str, Any]:
    """Return the results of all calls of a run."""
    closed = () if run.plan is None else run.plan.closed
    entries = [entry.result for entry in (*run.open, *closed) if entry.result is not None]
    return {each.call_id: each for each in (*results_of(run.messages), *entries)}


async def list_denials(world: World, run: Run, call_id: str) -> list[str]:
    """Return where the record denies a call that had started, hides its attempts, or leaves its agent behind."""
    result, runs, wrong = find_results(run).get(call_id), Runs(world.store), []
    if result is not None:
        if result.outcome in (Outcome.SKIPPED, Outcome.REJECTED) or DENYING.search(result.content):
            wrong.append(f"it is told as {result.outcome}: {result.content}")
        wrong += [f"{each.id} is left open" for each in await runs.children("mine") if each.stop_reason is None]
    elif not run.pending:
        wrong.append(f"it has no result, and the run in {run.state} waits for nobody")
    attempts = [each.attempts for each in await runs.audit("mine") if each.call_id == call_id]
    return wrong if attempts and attempts[0] else [*wrong, f"the audit tells of {attempts} attempts"]


def list_surprises(run: Run, call_id: str, policy: str, said: str) -> list[str]:
    """Return what became of the call of a function or a step other than its declarations say."""
    result, items = find_results(run).get(call_id), run.pending
    if (expected := {"fail": Outcome.UNKNOWN, "function": Outcome.DONE}.get(policy)) is not None:
        return [] if result is not None and result.outcome is expected else [f"it is not {expected}: {result}"]
    if result is not None or [each.kind for each in items] != [PendingKind.OUTCOME]:
        return [f"no person is asked about its outcome: {result or items}"]
    return [] if policy == "ask" or said in items[0].error else [f"the reason is {items[0].error!r}"]


async def judge(name: str, kind: str, first: str, second: str) -> list[str]:
    """Continue a run under a program that refuses the call, and return what does not hold then."""
    refusal, world = REFUSALS[name], World()
    call_id = await crash(kind, world, DECLARATIONS[first], refusal.first)
    agent = BUILDERS[kind](world, world.store, DECLARATIONS[second], refusal.options, refusal.fields)
    restore = refusal.prepare(agent)
    try:
        run = await agent.resume("mine")
    finally:
        if restore is not None:
            restore()
    if kind != "agent" and first == "read_only":  # a call without an effect leaves no start
        return []
    wrong = await list_denials(world, run, call_id)
    if kind != "agent":
        policy = find_policy(first, second)
        if refusal.is_for_person or (name, kind, policy) == ("retyped", "function", "function"):
            policy = "ask"  # a function cannot find out with arguments that it cannot take
        wrong += list_surprises(run, call_id, policy, refusal.said)
    if len(world.book) != 1:
        wrong.append(f"the effects are {world.book}")
    return [f"{first} to {second}: {each}" for each in wrong]


TABLE: Final = [(name, kind) for name, refusal in REFUSALS.items() for kind in refusal.kinds]


@pytest.mark.parametrize(("name", "kind"), TABLE)
async def test_a_call_that_had_started_is_told_as_started(name, kind, anyio_backend_name, caplog):
    """A person is asked, with the reason; or the outcome is unknown, or was found. Nothing is repeated or denied."""
    caplog.set_level(logging.CRITICAL, "agentfsm")  # thousands of tracebacks
    every = 1 if os.environ.get("EVERYWHERE") else 5 if kind == "function" else 10
    start = TABLE.index((name, kind)) + 2 * (anyio_backend_name == "trio")  # each row has other pairs
    pairs = list(product(DECLARATIONS, DECLARATIONS))[start % every :: every]
    wrong = [text for pair in pairs for text in await judge(name, kind, *pair)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("kind", ["function", "step"])
async def test_a_call_runs_again_only_if_both_programs_allow_it(kind, anyio_backend_name):
    """Under the key and with the arguments that were sent."""
    every = 1 if os.environ.get("EVERYWHERE") else 2  # a loop has every second pair
    for first, second in list(product(DECLARATIONS, DECLARATIONS))[(anyio_backend_name == "trio") % every :: every]:
        world = World()
        call_id = await crash(kind, world, DECLARATIONS[first], {})
        run = await BUILDERS[kind](world, world.store, DECLARATIONS[second], {}, {}).resume("mine")
        policy = find_policy(first, second)
        assert len(set(world.book)) == 1
        if first == "read_only" and second not in RERUN:
            continue  # a call without an effect leaves no start: it is a new one, or cut off
        assert len(world.book) == (2 if policy == "rerun" else 1), (first, second)
        if policy != "rerun":
            assert await list_denials(world, run, call_id) == list_surprises(run, call_id, policy, "") == []


OTHER_KIND: Final = {"function": build_agent, "agent": build_function, "step": build_agent_step}


@pytest.mark.parametrize("kind", OTHER_KIND)
async def test_another_kind_of_thing_does_not_carry_it_out(kind):
    """A person is asked, whatever is declared, and told which kind it was."""
    for declared in DECLARATIONS:
        if kind != "agent" and declared == "read_only":
            continue
        world = World()
        call_id = await crash(kind, world, DECLARATIONS[declared], {})
        run = await OTHER_KIND[kind](world, world.store, {}, {}, {}).resume("mine")
        assert list_surprises(run, call_id, "asked", "it had started as") == []
        assert (await list_denials(world, run, call_id), len(world.book)) == ([], 1)


@pytest.mark.parametrize("kind", BUILDERS)
async def test_without_its_tool_nothing_changes(kind):
    """The program is refused, at any depth, and the right one goes on."""
    world = World()
    await crash(kind, world, {"idempotent": True}, {})
    before = [(each.id, each.version) for each in await Runs(world.store).list()]
    other = BUILDERS[kind](world, world.store, {}, {"name": "send"} if kind == "agent" else {}, {})
    other = (
        Flow([step(name="other")(make_function(world))], name="shop", store=world.store) if kind == "step" else other
    )
    other = other.with_(tools=[]) if kind == "function" else other
    with pytest.raises(IncompatibleProgramError, match="nothing was changed"):
        await other.resume("mine")
    assert [(each.id, each.version) for each in await Runs(world.store).list()] == before
    run = await BUILDERS[kind](world, world.store, {"idempotent": True}, {}, {}).resume("mine")
    assert (run.is_over, len(set(world.book)), len(world.book)) == (True, 1, 2)


@pytest.mark.parametrize("is_fork", [False, True])
@pytest.mark.parametrize("kind", ["function", "step"])
async def test_a_rerun_that_is_refused_is_decided_on_again(kind, is_fork):
    """A person's word does not make a forbidden call run, nor one of a fork that withholds calls."""
    for declared in DECLARATIONS:
        if declared == "read_only" or (declared in RERUN and not is_fork):
            continue
        world, policy = World(), find_policy(declared, declared)
        call_id = await crash(kind, world, DECLARATIONS[declared], {})
        fields = {} if is_fork else {"permissions": Permissions(deny=("pay",))}
        agent = BUILDERS[kind](world, world.store, DECLARATIONS[declared], {}, fields)
        run = await (agent.finish(await agent.fork("mine", withhold=True)) if is_fork else agent.resume("mine"))
        if run.pending:
            await agent.settle(run.id, call_id, rerun=True)
            run = await agent.resume(run.id)
            policy = "asked" if policy in ("ask", "rerun") else policy
        assert list_surprises(run, call_id, policy, "withholds" if is_fork else "not permitted") == []
        assert (await list_denials(world, run, call_id), len(world.book)) == ([], 1)


WAITING: Final = [name for name, refusal in REFUSALS.items() if "agent" in refusal.kinds]


@pytest.mark.parametrize("name", WAITING)
async def test_the_question_of_an_agent_goes_with_its_call(name):
    """An agent that waits for an approval ends with its call, so that a late approval has no effect."""
    refusal, world = REFUSALS[name], World()
    first = attrs.evolve(world, mortal=CrashingStore(world.store, 10_000, written=False))  # it never acts
    asking = make_payer(first, requires_approval=True).as_tool(**refusal.first)
    boss = Agent(Free(say("", call("pay", query="Ann")), "done"), tools=[asking], store=world.store)
    run = await boss.run("go", id="mine")
    if refusal.first:
        await boss.approve("mine", "t1.0", by="ann")
        run = await boss.resume("mine")
    (item,) = run.pending
    await boss.approve(item.run_id, item.call_id, by="ann")
    other = build_agent(world, world.store, {}, refusal.options, refusal.fields)
    restore = refusal.prepare(other)
    run = await other.resume("mine")
    if restore is not None:
        restore()
    assert (await list_denials(world, run, "t1.0"), world.book) == ([], [])


async def test_the_condition_and_the_key_of_a_started_step_are_those_of_its_start():
    """A changed condition does not skip it, and a changed key does not repeat its effect under another."""
    for order in ({"when": lambda to: to == "Bob"}, {"key": lambda to: f"new-{to}"}):
        world = World()
        await crash("step", world, {"key": lambda to: f"old-{to}"}, {})
        run = await build_step(world, world.store, {"key": lambda to: f"old-{to}", **order}, {}, {}).resume("mine")
        assert (world.book, run.output) == ([("old-Ann", "Ann")] * 2, '{"pay": "paid"}')
        assert [each.key for each in await Runs(world.store).audit("mine") if each.tool == "pay"] == ["old-Ann"]
