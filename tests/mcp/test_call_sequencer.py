"""Calls of several clients at one server: what may overlap does, and the clients take turns."""

import anyio
import pytest
from anyio.lowlevel import checkpoint

from agentfsm.mcp.server.call_sequencer import CallSequencer
from agentfsm.tools.queue.call_order import EXCLUSIVE, READ_ONLY


async def order_of(sequencer, *calls):
    """Let calls (client, access) arrive in this order while the first runs; return the clients as they start."""
    started, gate = [], anyio.Event()

    async def one(client, access):
        async with sequencer.wait_turn(access, client):
            started.append(client)
            await gate.wait()

    async with anyio.create_task_group() as tasks:
        for client, access in calls:
            tasks.start_soon(one, client, access)
            await anyio.wait_all_tasks_blocked()
        at_once = len(started)
        gate.set()
    return at_once, "".join(started)


async def test_a_client_with_many_calls_does_not_hold_up_another():
    """Its 20 wait, and the other's comes after the one in progress; then they take turns."""
    calls = [("a", EXCLUSIVE)] * 20 + [("b", EXCLUSIVE)] * 3
    at_once, order = await order_of(CallSequencer(), *calls)
    assert (at_once, order[:7], len(order)) == (1, "abababa", 23)


async def test_calls_of_one_client_keep_their_order():
    """By their arrival."""
    assert await order_of(CallSequencer(), *[("a", EXCLUSIVE)] * 3) == (1, "aaa")


@pytest.mark.parametrize(("limit", "at_once"), [(1_000, 5), (2, 2)])
async def test_what_may_overlap_runs_together_up_to_the_limit(limit, at_once):
    """The places are shared out by turns as well."""
    calls = [("a", READ_ONLY)] * 4 + [("b", READ_ONLY)]
    found, order = await order_of(CallSequencer(limit), *calls)
    assert found == at_once
    assert order.index("b") in ({4} if limit > 4 else {2, 3})  # two are woken in one round, in any order


async def test_a_call_that_runs_alone_is_not_starved():
    """Those that came later, and could overlap the one in progress, wait for it."""
    calls = [("a", READ_ONLY), ("b", EXCLUSIVE), ("c", READ_ONLY), ("c", READ_ONLY)]
    assert await order_of(CallSequencer(), *calls) == (1, "abcc")


async def test_a_cancelled_call_delays_no_other():
    """Whether it waits or runs."""
    sequencer, started = CallSequencer(), []

    async def one(name, scope):
        with scope:
            async with sequencer.wait_turn(EXCLUSIVE, name):
                started.append(name)
                await anyio.sleep_forever()

    scopes = {name: anyio.CancelScope() for name in "abc"}
    async with anyio.create_task_group() as tasks:
        for name, scope in scopes.items():
            tasks.start_soon(one, name, scope)
            await anyio.wait_all_tasks_blocked()
        for name in "bac":
            scopes[name].cancel()
            await checkpoint()
            await anyio.wait_all_tasks_blocked()
    assert started == ["a", "c"]
    assert not sequencer.is_full
