"""Ids that agentfsm derives have reserved forms: no caller chooses one, and each derivation has one."""

from datetime import UTC, datetime

import pytest

from agentfsm import Agent, MisuseError, ToolCall
from agentfsm.core.run_ids import (
    DerivedId,
    build_inner_id,
    build_key_id,
    child_run_id,
    find_reserved_form,
    former_key_id,
    name_extraction,
    scheduled_run_id,
)
from agentfsm.flow import Flow, each, step
from agentfsm.stores import MemoryStore
from agentfsm.testing import ScriptedModel, call, say

CALL = ToolCall(id="t3.0", name="pay", arguments="{}")
AT = datetime(2026, 11, 28, 1, 5, tzinfo=UTC).timestamp()
DERIVED = {
    "schedule": scheduled_run_id("nightly.eu-1", AT),
    "key": build_key_id("order-1", tenant="acme", user="ann"),
    "webhook": build_key_id("evt_1", tenant="acme", user="crm-bot", hook="crm"),
    "webhook before 0.3": DerivedId(former_key_id("evt_1", hook="crm") or ""),
    "call of an agent": child_run_id("order-1", "t3.0"),
    "plan": child_run_id("order-1", "p1"),
    "step of a plan": child_run_id("order-1", "p1.12"),
    "run of a tool": build_inner_id("order-1", CALL, 1),
    "run below one of a schedule": child_run_id(scheduled_run_id("nightly", AT), "t1.0"),
    "run of a tool in a run for a key": build_inner_id(build_key_id("k", tenant=None, user=None), CALL, 2),
    "extraction": name_extraction("order-1"),
}


@pytest.mark.parametrize("form", DERIVED)
async def test_no_caller_takes_a_derived_id(form):
    """`run`, `submit`, `start` and `fork` refuse it as text, and take it from the code that derives it."""
    agent = Agent(ScriptedModel("hello"), name="shop", store=MemoryStore())
    taken = str(DERIVED[form])
    run = await agent.run("hi")
    with pytest.raises(MisuseError, match="which agentfsm derives"):
        agent.start("squat", id=taken)
    for start in (agent.run("squat", id=taken), agent.submit("squat", id=taken), agent.fork(run.id, at=1, id=taken)):
        with pytest.raises(MisuseError, match="which agentfsm derives"):
            await start
    header = agent.start("derived", id=DERIVED[form]).header
    assert (header.id, type(header.id)) == (taken, str)


@pytest.mark.parametrize(
    "run_id",
    ["order-1", "release.v2", "2026-11-28T01:05Z", "a:b", "invoice.p", "x.t1", "user/~ann", "key~1", "nightly:1"],
)
def test_other_ids_are_free(run_id):
    """Only the forms themselves are reserved."""
    assert find_reserved_form(run_id) is None
    assert former_key_id(run_id) == run_id


def test_keys_are_scoped():
    """Equal keys of two tenants, two users, a client and a webhook have different ids; parts cannot be shifted."""
    owners = [("acme", "ann", ""), ("zeta", "ann", ""), ("acme", "bob", ""), ("acme", "ann", "crm"), (None, "ann", "")]
    assert len({build_key_id("k", tenant=tenant, user=user, hook=hook) for tenant, user, hook in owners}) == len(owners)
    assert build_key_id('k", "b', tenant="a", user="u") != build_key_id("b", tenant="a", user='u", "k')


async def test_runs_below_others_have_derived_ids():
    """Sub-agents of calls, and items of a list, each with what it calls; a fork has an id of its own."""
    store = MemoryStore()
    clerk = Agent(ScriptedModel("done"), name="clerk")
    script = ScriptedModel(say("", call("clerk", query="a")), say("done"))
    agent = Agent(script, tools=[clerk.as_tool()], name="shop", store=store)
    run = await agent.run("go", id="r1")

    @step(read_only=True)
    async def double(number: int) -> int:
        """Double a number."""
        return 2 * number

    inner = Flow([double], name="inner")
    flow = Flow([each(inner.as_step(), over="numbers", item="number")], name="outer", store=store)
    done = await flow.run({"numbers": [1, 2]}, id="f1")
    assert done.answer
    below = [row.id for row in await store.runs() if row.parent is not None]
    assert len(below) >= 4
    assert [run_id for run_id in below if find_reserved_form(run_id) is None] == []
    assert find_reserved_form((await agent.fork(run.id, at=2)).id) is None
