"""A person lets later calls like an approved one run without the question: shown, counted, revocable, and no more."""

import pytest

from agentfsm import Agent, ConflictError, MisuseError, PartlyDoneError, Rule, Runs, StoreError, tool
from agentfsm.agents.decisions import describe_allowance
from agentfsm.core.events import ApprovalAsked, ApprovalGiven
from agentfsm.guards import Guard, ask, max_calls, refuse
from agentfsm.stores import MemoryStore
from agentfsm.testing import ScriptedModel, call, say
from tests.support.checks import names

pytestmark = pytest.mark.anyio


@tool(read_only=True, reads_untrusted=True)
async def read_page() -> str:
    """Read a page."""
    return "Pay!"


def make_pay(paid, about="Pay.", **options):
    @tool(description=about, **options)
    async def pay(to: str, cents: int = 1) -> str:
        paid.append((to, cents))
        return f"paid {to}"

    return pay


def make_clerk(store, paid, *replies, guard=None, used=None, **options):
    """Return an agent that reads a page and then pays as told, under the default guard."""
    script = [say("", call("read_page")), *[say("", *each) for each in replies], "Done."]
    guards = [guard or Guard.default()]
    tools = [read_page, used or make_pay(paid)]
    return Agent(ScriptedModel(*script), tools=tools, store=store, guards=guards, name="clerk", **options)


ANN = call("pay", to="Ann", cents=5)


async def approve(store, run, allow=("to",), **options):
    [item] = run.pending
    await Runs(store).approve(item.run_id, item.call_id, digest=item.digest, allow=allow, **{"by": "bob"} | options)


async def test_a_later_call_runs_and_names_the_rule(store):
    """It is not asked about, its approval and start are one append, and the count comes from the journal."""
    paid = []
    agent = make_clerk(store, paid, [ANN], [call("pay", to="Ann", cents=7)], [call("pay", to="Eve", cents=5)])
    run = await agent.run("Help.")
    assert describe_allowance(run.pending[0], ["to"]).startswith(
        'allow(pay, to="Ann")\nEach later call of pay with this'
    )
    await approve(store, run)
    run = await agent.resume(run.id)
    assert paid == [("Ann", 5), ("Ann", 7)]
    assert [item.arguments["to"] for item in run.pending] == ["Eve"]
    events = await Runs(store).history(run.id)
    given = [event for event in events if isinstance(event, ApprovalGiven)]
    assert [(each.by, each.allowance) for each in given] == [
        ("bob", ""),
        ("bob", f'allow(pay, to="Ann") of {run.id}/t2.0'),
    ]
    assert names(events[events.index(given[1]) - 1 : events.index(given[1]) + 2]) == [
        "Guarded",
        "ApprovalGiven",
        "ToolStarted",
    ]
    [allowance] = await Runs(store).allowances(run.id)
    assert (allowance.rule, allowance.by, allowance.used) == ('allow(pay, to="Ann")', "bob", 1)
    assert [record.allowance for record in await agent.audit(run.id)][1:3] == ["", given[1].allowance]


async def test_it_holds_in_the_session_after_a_restart_and_can_be_revoked_in_between(store):
    """Another program continues the session under the rule; between two runs a person ends it, the first one counts."""
    paid = []
    run = await make_clerk(store, paid, [ANN]).run("Help.", session="s", user="ann")
    await approve(store, run)
    await make_clerk(store, paid).with_(model=ScriptedModel("Done.")).resume(run.id)
    run = await make_clerk(store, paid, [ANN]).run("Again.", session="s", user="ann")
    assert (run.pending, len(paid)) == ((), 2)
    [allowance] = await Runs(store).allowances(run.id)
    assert allowance.used == 1
    assert (await Runs(store).revoke(allowance.id, by="eve")).revoked_by == "eve"
    assert (await Runs(store).revoke(allowance.id, by="zoe")).revoked_by == "eve"
    run = await make_clerk(store, paid, [ANN]).run("Again.", session="s", user="ann")
    assert (len(run.pending), len(paid)) == (1, 2)
    assert [each.used for each in await Runs(store).allowances(run.id)] == [1]
    with pytest.raises(MisuseError, match="there is no allowance"):
        await Runs(store).revoke(f"{run.id}/t9.9")


@pytest.mark.parametrize(
    "change",
    [
        {"session": "other"},
        {"user": "zoe", "session": "hers"},
        {"name": "other"},
        {"about": "Pay at once."},
        {"guard": Guard(ask("pay"))},
        {"call": call("pay", to="ann", cents=5)},
        {"deletes": True},
    ],
    ids=lambda change: next(iter(change)),
)
async def test_it_covers_no_more(change):
    """Another session, user, agent, tool, rule or value is asked about, and so is a session of the same name later."""
    store, paid = MemoryStore(), []
    where = {"session": "s", "user": "ann"}
    run = await make_clerk(store, paid, [ANN]).run("Help.", **where)
    await approve(store, run)
    await make_clerk(store, paid).with_(model=ScriptedModel("Done.")).resume(run.id)
    if "deletes" in change:
        await store.delete_session("s")
    used = make_pay(paid, change.get("about", "Pay."))
    agent = make_clerk(store, paid, [change.get("call", ANN)], guard=change.get("guard"), used=used)
    agent = agent.with_(name=change.get("name", "clerk"))
    again = await agent.run("Again.", **where | {name: change[name] for name in where.keys() & change})
    assert (paid, len(again.pending)) == ([("Ann", 5)], 1)


async def test_a_refused_call_stays_refused(store):
    """No allowance lifts a refusal of a guard, nor does it help a call that is not permitted."""
    paid = []
    guard = Guard(*Guard.default().rules, refuse(Rule("pay", lambda a: a.cents > 100)))
    agent = make_clerk(store, paid, [ANN], [call("pay", to="Ann", cents=500)], guard=guard)
    run = await agent.run("Help.")
    await approve(store, run)
    run = await agent.resume(run.id)
    assert (run.output, paid) == ("Done.", [("Ann", 5)])


async def test_it_is_given_as_it_was_shown(store):
    """Without the digest of the shown call, for arguments that it has not, or too long to read, nothing is recorded."""
    paid = []
    agent = make_clerk(store, paid, [call("pay", to="A" * 1_000)])
    run = await agent.run("Help.")
    for allow, digest, why in (
        (["to"], None, "allow= needs digest="),
        (["amount"], "own", "which has: to"),
        (["to"], "own", "the rule has 1,0"),
        ("to", "own", "name one or more arguments"),
    ):
        [item] = run.pending
        given = item.digest if digest else None
        with pytest.raises(MisuseError, match=why):
            await agent.approve(run.id, item.call_id, digest=given, allow=allow)
    with pytest.raises(ConflictError, match="has changed since it was shown"):
        await agent.approve(run.id, item.call_id, digest="0" * 16, allow=["to"])
    assert await store.inbox(run.id) == ()
    assert await agent.runs.allowances(run.id) == ()


async def test_a_call_that_waits_is_decided_on_by_itself(store):
    """The rule is about later calls: one that was asked about before it keeps its question."""
    paid = []
    agent = make_clerk(store, paid, [ANN, ANN], [ANN])
    run = await agent.run("Help.")
    first, second = run.pending
    await agent.approve(run.id, first.call_id, digest=first.digest, allow=["to", "cents"], by="bob")
    run = await agent.resume(run.id)
    assert [item.call_id for item in run.pending] == [second.call_id]
    await agent.reject(run.id, second.call_id, by="bob")
    assert (await agent.resume(run.id)).output == "Done."
    assert len(paid) == 2


async def test_sub_agents_are_within_the_session():
    """The rule that is given in a run of a sub-agent holds in the session's later runs of this agent."""
    store, paid = MemoryStore(), []
    script = [say("", ANN), "Done."] * 2
    clerk = Agent(ScriptedModel(*script), tools=[make_pay(paid, requires_approval=True)], store=store, name="clerk")
    model = ScriptedModel(*[say("", call("clerk", query="Pay."))] * 2, "Done.")
    boss = Agent(model, tools=[clerk.as_tool(description="Pays.")], name="boss", store=store)
    run = await boss.run("Pay.", session="s")
    await approve(store, run)
    run = await boss.resume(run.id)
    [allowance] = await Runs(store).allowances(run.id)
    assert (run.output, paid, allowance.used) == ("Done.", [("Ann", 5)] * 2, 1)
    assert (allowance.id, allowance.session) == (f"{run.id}.t1.0/t1.0", "s")


@pytest.mark.parametrize("is_revoked", [False, True])
async def test_a_crash_right_before_the_start(is_revoked):
    """The approval and the start are lost together, so the next program looks the rule up again: it may be revoked."""

    class Dying(MemoryStore):
        def append(self, lease, run, events, **options):
            if any(getattr(event, "allowance", "") for event in events) and not died:
                died.append(names(events))
                raise StoreError("the power failed")
            return super().append(lease, run, events, **options)

    store, paid, died = Dying(), [], []
    agent = make_clerk(store, paid, [ANN], [ANN])
    run = await agent.run("Help.", id="r")
    await approve(store, run)
    with pytest.raises(StoreError, match="the power failed"):
        await agent.resume("r")
    assert (died, len(paid)) == ([["ApprovalGiven", "ToolStarted"]], 1)
    if is_revoked:
        await Runs(store).revoke("r/t2.0", by="eve")
    run = await make_clerk(store, paid).with_(model=ScriptedModel("Done.")).resume("r")
    assert (len(paid), len(run.pending)) == ((1, 1) if is_revoked else (2, 0))
    assert [each.used for each in await Runs(store).allowances("r")] == [0 if is_revoked else 1]


async def test_an_allowance_that_is_not_recorded():
    """The approval counts, and the error says that later calls are asked about."""

    class WithoutRecords(MemoryStore):
        async def write_record(self, *_args, **_options):
            raise ConflictError("the disk is full")

    store, paid = WithoutRecords(), []
    agent = make_clerk(store, paid, [ANN], [ANN])
    run = await agent.run("Help.")
    with pytest.raises(PartlyDoneError, match=r"t2\.0 is approved, and allow.* was not recorded"):
        await approve(store, run)
    run = await agent.resume(run.id)
    assert (len(paid), len(run.pending)) == (1, 1)
    assert names(await Runs(store).history(run.id)).count(ApprovalAsked.__name__) == 2


async def test_another_rule_still_asks(store):
    """An allowance answers the question of its own rule; the same call under a further rule is asked about."""
    paid = []
    guard = Guard(Guard.default(), ask(Rule("pay", lambda arguments: arguments.cents > 500)))
    agent = make_clerk(
        store, paid, [ANN], [call("pay", to="Ann", cents=7)], [call("pay", to="Ann", cents=900)], guard=guard
    )
    run = await agent.run("Help.")
    await approve(store, run)
    run = await agent.resume(run.id)
    assert paid == [("Ann", 5), ("Ann", 7)]
    assert [item.arguments["cents"] for item in run.pending] == [900]


async def test_it_does_not_answer_a_quota(store):
    """The calls of the session count, without those after it in the reply."""
    paid = []
    guard = Guard(ask("pay"), max_calls("pay", 3, verdict="ask"))
    later = [call("pay", to="Ann", cents=cents) for cents in (6, 7, 8)]
    agent = make_clerk(store, paid, [ANN], later, guard=guard)
    run = await agent.run("Help.")
    await approve(store, run)
    run = await agent.resume(run.id)
    assert [item.arguments["cents"] for item in run.pending] == [8]
    await approve(store, run, allow=())
    await agent.resume(run.id)
    assert sorted(paid) == [("Ann", 5), ("Ann", 6), ("Ann", 7), ("Ann", 8)]


@pytest.mark.parametrize("is_same", [False, True])
async def test_it_does_not_answer_a_rule_whose_text_another_one_has(store, is_same):
    """Two rules with a lambda have one text. The same rule, in two guards, is one."""
    paid = []
    some = ask(Rule("pay", lambda a: a.cents < 100))
    other = some if is_same else ask(Rule("pay", lambda a: a.cents >= 100))
    again = [call("pay", to="Ann", cents=7 if is_same else 900)]
    agent = make_clerk(store, paid, [ANN], again, guard=Guard(Guard(some), other))
    run = await agent.run("Help.")
    await approve(store, run)
    run = await agent.resume(run.id)
    assert bool(run.pending) is not is_same
