"""Several calls are decided on together: each as it was shown, each by an event of its own, all of them or a part."""

import attrs
import pytest

from agentfsm import Agent, ConflictError, MisuseError, Outcome, PartlyDoneError, Runs, tool
from agentfsm.core.calls import Phase
from agentfsm.core.events import ApprovalGiven
from agentfsm.core.inbox import Approve, Reject
from agentfsm.stores import MemoryStore
from agentfsm.testing import ScriptedModel, call, say
from tests.support.checks import results_of

pytestmark = pytest.mark.anyio


@tool(requires_approval=True)
async def pay(to: str) -> str:
    """Pay."""
    return f"paid {to}"


def make_clerk(store, *replies, **options):
    script = [say("", *[call("pay", to=name) for name in ("Ann", "Bob", "Eve")]), *replies, "Done."]
    return Agent(ScriptedModel(*script), tools=[pay], store=store, name="clerk", **options)


async def test_all_of_them_or_a_part(store):
    """Two are approved and one is rejected later; each has its own event, with the person and the digest shown."""
    agent = make_clerk(store)
    run = await agent.run("Pay them.")
    first, second, third = run.pending
    await agent.decide(approve=[first, third], by="ann")
    run = await agent.resume(run.id)  # the third starts after the second, as the model has ordered them
    assert [entry.phase for entry in run.open] == [Phase.FINISHED, Phase.AWAITING_APPROVAL, Phase.AWAITING_APPROVAL]
    await Runs(store).decide(reject=[second], message="not him", by="ann")
    run = await agent.resume(run.id)
    assert [each.outcome for each in results_of(run.messages)] == [Outcome.DONE, Outcome.REJECTED, Outcome.DONE]
    given = [event for event in await Runs(store).history(run.id) if isinstance(event, ApprovalGiven)]
    assert [(each.call_id, each.by, each.digest) for each in given] == [
        (item.call_id, "ann", item.digest) for item in (first, third)
    ]


async def test_nothing_is_decided_if_one_is_not_as_shown(store):
    """A digest of another call, a call that was decided, an item twice, or one of no approval: nothing is posted."""
    agent = make_clerk(store)
    run = await agent.run("Pay them.")
    first, second, third = run.pending
    changed = attrs.evolve(second, digest="0" * 32)
    with pytest.raises(ConflictError, match=r"t1\.1 was not approved: it has changed since it was shown"):
        await agent.decide(approve=[first, changed], reject=[third])
    with pytest.raises(MisuseError, match=r"t1\.0 is given twice"):
        await agent.decide(approve=[first], reject=[first])
    with pytest.raises(MisuseError, match=r"does not wait for the approval of 't9\.9'"):
        await agent.decide(approve=[first, attrs.evolve(second, call_id="t9.9")])
    assert await store.inbox(run.id) == ()
    await agent.reject(run.id, third.call_id, by="bob")
    run = await agent.resume(run.id)
    with pytest.raises(ConflictError, match=r"t1\.2 any more: it was decided already by bob"):
        await agent.decide(approve=[first, second, third], by="ann")
    assert await store.inbox(run.id) == ()


async def test_a_decision_in_between():
    """If another person decides on one of them meanwhile, the error says which decisions are recorded."""

    class Interrupted(MemoryStore):
        async def post(self, run_id, key, item, **options):
            if isinstance(item, Approve) and item.call_id == "t1.1" and item.by == "ann":
                await super().post(run_id, key, Reject(call_id="t1.1", by="bob"), **options)
            return await super().post(run_id, key, item, **options)

    store = Interrupted()
    agent = make_clerk(store)
    run = await agent.run("Pay them.")
    with pytest.raises(PartlyDoneError, match=r"on t1\.0 are recorded, those on t1\.1, t1\.2 are not: .*by 'bob'"):
        await agent.decide(approve=run.pending, by="ann")
    assert sorted(row.item.call_id for row in await store.inbox(run.id)) == ["t1.0", "t1.1"]
    await agent.aclose()


async def test_calls_of_sub_agents_are_among_them():
    """The items name their runs, so one decision reaches calls of a caller's run and of the runs below it."""
    clerk = make_clerk(MemoryStore())
    model = ScriptedModel(say("", call("clerk", query="Pay."), call("pay", to="Zoe")), "All paid.")
    boss = Agent(model, tools=[clerk.as_tool(description="Pays."), pay], name="boss")
    run = await boss.run("Pay all.")
    assert {item.run_id for item in run.pending} == {run.id, f"{run.id}.t1.0"}
    await boss.decide(approve=run.pending, by="ann")
    run = await boss.resume(run.id)
    assert run.output == "All paid."
    assert [record.approved_by for record in await boss.audit(run.id) if record.tool == "pay"] == ["ann"] * 4
