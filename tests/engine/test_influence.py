"""Four eyes: each deed that shapes a call bars its person from deciding on it, and nothing else does."""

import json
from contextlib import nullcontext

import attrs
import pytest

from agentfsm import Agent, ConflictError, FourEyesError, InputRequired, Question, RunContext, Runs, ask_user, tool
from agentfsm.core.events import ApprovalAsked, ToolFinished
from agentfsm.planning import Plan, Planner
from agentfsm.stores import MemoryStore
from agentfsm.testing import ScriptedModel, call, say
from tests.support.shaped_calls import (
    ASK,
    PAYMENT,
    WAYS,
    build_clerk,
    by_answer_in_a_run_of_a_tool,
    look,
    pay,
    shop,
)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
async def test_a_person_who_has_shaped_a_call_does_not_approve_it(way):
    """Another one does, and the call runs."""
    store = MemoryStore()
    run = await way(store, "eve")
    [item] = run.pending
    runs = Runs(store, four_eyes=True)
    assert item.tool == "pay"
    assert "eve" in {each.person for each in await runs.influence(item.run_id, item.call_id)}
    for person in ("eve", ""):
        with pytest.raises(FourEyesError):
            await runs.approve(item.run_id, item.call_id, by=person, digest=item.digest)
    await runs.approve(item.run_id, item.call_id, by="bob", digest=item.digest)


async def test_an_edit_needs_a_second_approver():
    """The call waits again, with the new arguments; the audit has the model's, the editor's and who approved."""
    agent = shop(MemoryStore())
    run = await agent.run("pay", user="ann")
    runs = attrs.evolve(agent.runs, four_eyes=True)
    edited = {"iban": "FE1", "cents": 9}
    await runs.approve(run.id, "t1.0", by="eve", arguments=edited, digest=run.pending[0].digest)
    with pytest.raises(ConflictError, match="edited already by 'eve'"):
        await runs.approve(run.id, "t1.0", by="bob")
    waiting = await agent.resume(run.id)
    [item] = waiting.pending
    assert (item.arguments, "edited by eve" in item.error) == (edited, True)
    assert item.digest != run.pending[0].digest
    with pytest.raises(ConflictError):  # the call that bob saw is no longer this one
        await runs.approve(run.id, "t1.0", by="bob", digest=run.pending[0].digest)
    for person in ("eve", "ann"):
        with pytest.raises(FourEyesError, match="shaped it"):
            await runs.approve(run.id, "t1.0", by=person)
    await runs.approve(run.id, "t1.0", by="bob", arguments=edited)  # the same arguments are no edit
    done = await agent.resume(run.id)
    assert done.messages[2].content == "paid 9 to FE1"
    [record] = await agent.audit(run.id)
    assert (record.approved_by, dict(record.arguments), dict(record.proposed)) == (
        "bob",
        edited,
        {"iban": "DE1", "cents": 5},
    )
    edits = [each for each in await agent.history(run.id) if isinstance(each, ApprovalAsked) and each.by]
    assert [each.key for each in edits] == [record.key]
    assert (await agent.replay(run.id)).is_faithful


async def test_an_edit_that_does_not_fit_changes_nothing():
    """The call waits with the model's arguments, and the reason."""
    agent = shop(MemoryStore())
    run = await agent.run("pay", user="ann")
    runs = Runs(agent.store, four_eyes=True)  # without the tools, so that the worker finds it
    await runs.approve(run.id, "t1.0", by="eve", arguments={"iban": "FE1"})
    [item] = (await agent.resume(run.id)).pending
    assert "cents" in item.error
    assert item.arguments == {"iban": "DE1", "cents": 5}
    await runs.approve(run.id, "t1.0", by="eve")


async def test_an_edit_in_the_run_of_a_sub_agent():
    """The run above waits for the edited call, and goes on once another person has approved it."""
    store = MemoryStore()
    agent = shop(store, call("clerk", query="Pay DE1"), tools=[build_clerk(PAYMENT).as_tool(timeout_s=600)])
    runs = Runs(store, four_eyes=True)
    run = await agent.run("pay", user="ann")
    [first] = run.pending
    await runs.approve(first.run_id, first.call_id, by="eve", arguments={"iban": "FE1", "cents": 9})
    [item] = (await agent.resume(run.id)).pending
    assert (item.run_id, item.arguments) == (first.run_id, {"iban": "FE1", "cents": 9})
    with pytest.raises(FourEyesError):
        await runs.approve(item.run_id, item.call_id, by="eve")
    await runs.approve(item.run_id, item.call_id, by="bob", digest=item.digest)
    run = await agent.resume(run.id)
    assert [record.result for record in await agent.audit(run.id) if record.run_id == item.run_id] == ["paid 9 to FE1"]


async def test_an_edited_plan_needs_a_second_approver():
    """The editor has shaped its steps, too, and they run as edited."""

    def plan(cents):
        return {"steps": [{"id": 1, "tool": "pay", "arguments": {"iban": "DE1", "cents": cents}}]}

    script = ScriptedModel(json.dumps(plan(5)), say("done"))
    agent = Agent(script, tools=[pay], planner=Planner(review=True), name="shop", store=MemoryStore())
    runs = attrs.evolve(agent.runs, four_eyes=True)
    run = await agent.run("pay", user="ann")
    await runs.approve(run.id, "plan", plan=Plan.from_json(plan(9)), by="eve")
    run = await agent.resume(run.id)
    with pytest.raises(FourEyesError):
        await runs.approve(run.id, "plan", by="eve")
    await runs.approve(run.id, "plan", by="bob")
    [item] = (await agent.resume(run.id)).pending
    assert (item.call_id, item.arguments["cents"]) == ("p1.1", 9)
    assert {each.person for each in await runs.influence(run.id, "p1.1")} == {"ann", "eve"}


async def test_deeds_that_shape_nothing():
    """A bare approval, a rejection without a reason, and an answer that came after the call was written."""
    model = ScriptedModel(say("", PAYMENT), say("", PAYMENT), say("", ASK, PAYMENT), say("done"))
    agent = Agent(model, tools=[pay, look, ask_user], name="shop", store=MemoryStore())
    runs = attrs.evolve(agent.runs, four_eyes=True)
    run = await agent.run("pay", user="ann")
    await runs.reject(run.id, "t1.0", by="eve")
    run = await agent.resume(run.id)
    await runs.approve(run.id, "t2.0", by="eve")
    run = await agent.resume(run.id)
    await runs.answer(run.id, "t3.0", "DE1", by="eve")
    await runs.approve(run.id, "t3.1", by="eve")
    assert (await agent.resume(run.id)).output == "done"


async def test_words_that_no_model_reads_shape_nothing():
    """The reason of a pause, a comment, the name of who cancels a sub-agent, and the reason of the end of a run."""
    store = MemoryStore()
    clerk = build_clerk(ASK).as_tool(timeout_s=600)
    agent = shop(store, call("clerk", query="To whom?"), tools=[clerk])
    runs = Runs(store, four_eyes=True)
    run = await agent.run("pay", user="ann")
    await runs.feedback(run.id, rating=1, comment="SAID", by="eve")
    await runs.cancel(run.pending[0].run_id, by="eve")
    await runs.pause(run.id, by="eve", message="SAID")
    run = await agent.resume(run.id)
    await runs.approve(run.id, run.pending[0].call_id, by="eve")
    assert (await agent.resume(run.id)).output == "done"
    assert "SAID" not in str(agent.model.requests)


async def answered_below(store, session=None):
    """Return an agent whose sub-agent was told by eve whom to pay, and the runs of both."""
    clerk = build_clerk(ASK).as_tool(timeout_s=600)
    script = ScriptedModel(say("", call("clerk", query="To whom?")), say("DE1"), say("", PAYMENT), say("done"))
    agent = Agent(script, tools=[pay, clerk], name="shop", store=store)
    run = await agent.run("whom?", user="ann", session=session)
    [item] = run.pending
    await agent.answer(item.run_id, item.call_id, "DE1", by="eve")
    return agent, await agent.resume(run.id), item.run_id


async def below_an_earlier_run():
    """Delete the run of the sub-agent of the run before."""
    store = MemoryStore()
    agent, _first, child = await answered_below(store, "s")
    run = await agent.run("pay", user="ann", session="s")
    return store, run, child


async def below_the_origin_of_a_fork():
    """Delete the run of the sub-agent of the forked run."""
    store = MemoryStore()
    agent, first, child = await answered_below(store)
    run = await agent.resume((await agent.fork(first.id, at=first.version - 1, prompt="pay", by="ann")).id)
    return store, run, child


async def the_origin_of_a_fork():
    """Delete the forked run itself, with those below it."""
    store, run, _child = await below_the_origin_of_a_fork()
    return store, run, run.header.forked_from


async def above_the_origin_of_a_fork():
    """Delete the run above the forked one, and so that one."""
    store = MemoryStore()
    above = shop(store, call("clerk", query="Pay DE1"), tools=[build_clerk(PAYMENT).as_tool(timeout_s=600)])
    first = await above.run("pay", user="eve")
    clerk = build_clerk(PAYMENT).with_(store=store, name="shop")
    return store, await clerk.resume((await clerk.fork(first.pending[0].run_id, at=1)).id), first.id


async def above_a_run_of_a_tool():
    """Delete the run whose function has started this one."""
    store = MemoryStore()
    clerk = build_clerk(PAYMENT).with_(store=store)

    @tool
    async def hand_on(thing: str) -> str:
        """Start a run that waits, and do not wait for it."""
        return (await clerk.run(thing)).id

    run = await shop(store, call("hand_on", thing="Pay DE1"), tools=[hand_on]).run("pay", user="eve")
    inner = run.messages[2].content
    await Runs(store).reject(run.id, "t2.0", by="eve")
    return store, await clerk.load(inner), run.id


PLACES = (
    below_an_earlier_run,
    below_the_origin_of_a_fork,
    the_origin_of_a_fork,
    above_the_origin_of_a_fork,
    above_a_run_of_a_tool,
)


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
async def test_a_deletion_hides_no_deed(place):
    """While the run is there eve is refused; when it is gone, everybody, who can still reject the call."""
    store, run, needed = await place()
    [item] = run.pending
    runs = Runs(store, four_eyes=True)
    assert "eve" in {each.person for each in await runs.influence(run.id, item.call_id)}
    await runs.delete(needed)
    for person in ("eve", "bob"):
        with pytest.raises(FourEyesError, match="shaped"):
            await runs.approve(run.id, item.call_id, by=person)
    await runs.reject(run.id, item.call_id, by="bob")


@pytest.mark.parametrize("place", [the_origin_of_a_fork, above_a_run_of_a_tool], ids=lambda place: place.__name__)
async def test_an_id_that_is_used_again_hides_no_deed(place):
    """A new run with the id of the deleted one, as a client's key makes it, says nothing of what was done in that."""
    store, run, needed = await place()
    runs = Runs(store, four_eyes=True)
    await runs.delete(needed)
    await shop(store).run("again", id=needed, user="gil")
    with pytest.raises(FourEyesError, match="used again"):
        await runs.approve(run.id, run.pending[0].call_id, by="bob")
    with pytest.raises(FourEyesError, match="used again") if run.header.caller else nullcontext():
        await runs.send(run.id, "to FE1", by="bob")


async def test_a_run_of_a_tool_is_deleted_after_the_run_that_it_works_for():
    """Nothing else says that it was there."""
    store = MemoryStore()
    run = await by_answer_in_a_run_of_a_tool(store, "eve")
    runs = Runs(store, four_eyes=True)
    [inner] = [row.id for row in await runs.list() if row.id != run.id]
    with pytest.raises(ConflictError, match="delete that one first"):
        await runs.delete(inner)
    await runs.delete(run.id)
    await runs.delete(inner)


async def test_a_fork_of_a_fork_knows_its_first_forker():
    """The prompt that it has is that person's."""
    agent = shop(MemoryStore())
    run = await agent.run("pay", user="ann")
    first = await agent.fork(run.id, at=0, prompt="pay 9 to FE1", by="eve")
    second = await agent.fork(first.id, by="ann")
    assert {each.person for each in await agent.runs.influence(second.id, "t1.0")} == {"ann", "eve"}


async def test_an_edit_of_a_fork_hides_no_word():
    """The person whose answer was replaced is barred like the one who replaced it, also in a fork of the fork."""
    store = MemoryStore()
    agent = shop(store, ASK)
    run = await agent.run("pay", user="ann")
    await agent.answer(run.id, "t1.0", "DE1", by="eve")
    run = await agent.resume(run.id)
    history = await agent.history(run.id)
    at, answer = next((number, each) for number, each in enumerate(history, 1) if isinstance(each, ToolFinished))
    fork = await agent.fork(run.id, at=at, edit={at: attrs.evolve(answer, by="bob")}, by="bob")
    waiting = await shop(store).resume(fork.id)
    again = await shop(store).resume((await agent.fork(fork.id, at=at, by="gil")).id)
    for each, names in ((waiting, {"ann", "bob", "eve"}), (again, {"ann", "bob", "eve", "gil"})):
        assert {deed.person for deed in await agent.runs.influence(each.id, each.pending[0].call_id)} == names


async def test_who_has_approved_a_call_says_nothing_to_the_runs_below_it():
    """No input, no edit and no reason: only a bare rejection or cancellation; another person may."""
    store = MemoryStore()
    clerk = build_clerk(PAYMENT).as_tool(timeout_s=600, requires_approval=True)
    agent = shop(store, call("clerk", query="Pay DE1"), tools=[clerk])
    runs = Runs(store, four_eyes=True)
    run = await agent.run("pay", user="ann")
    await runs.approve(run.id, run.pending[0].call_id, by="eve")
    [item] = (await agent.resume(run.id)).pending
    place = item.run_id, item.call_id
    for say_it in (
        runs.send(item.run_id, "to FE1", by="eve"),
        runs.approve(*place, arguments={"iban": "FE1", "cents": 9}, by="eve"),
        runs.reject(*place, message="to FE1", by="eve"),
        runs.decide(reject=[item], message="to FE1", by="eve"),
        runs.cancel(item.run_id, message="to FE1", by="eve"),
    ):
        with pytest.raises(FourEyesError, match="'eve' has approved"):
            await say_it
    await runs.send(item.run_id, "hurry", by="bob")
    await runs.reject(*place, by="eve")
    await runs.cancel(item.run_id, by="eve")


async def test_who_has_approved_a_call_does_not_answer_its_questions():
    """Nor those of a step of a plan that he has approved: the values would be his."""
    store = MemoryStore()

    @tool(requires_approval=True)
    async def transfer(ctx: RunContext[None], cents: int) -> str:
        """Transfer to the account that a person names."""
        if not ctx.answers:
            schema = {"type": "object", "properties": {"iban": {"type": "string"}}, "required": ["iban"]}
            raise InputRequired(Question(key="iban", message="To which account?", schema=schema))
        return f"paid {cents}"

    agent = Agent(ScriptedModel(say("", call("transfer", cents=9)), "ok"), tools=[transfer], store=store)
    run = await agent.run("pay", user="ann")
    runs = Runs(store, four_eyes=True)
    await runs.approve(run.id, "t1.0", by="bob")
    run = await agent.resume(run.id)
    with pytest.raises(FourEyesError, match="'bob' has approved"):
        await runs.answer(run.id, "t1.0", {"iban": "FE1"}, by="bob")
    await runs.answer(run.id, "t1.0", {"iban": "FE1"}, by="eve")
    assert (await agent.resume(run.id)).output == "ok"
