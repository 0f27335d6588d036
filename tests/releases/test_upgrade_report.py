"""Open runs under another release: each planted change is named, and nothing is done to find it."""

import json

import attrs
import pytest

from agentfsm import Agent, Limits, Permissions, Runs, Settings, tool
from agentfsm.core import events as e
from agentfsm.flow import Flow, step
from agentfsm.guards import Guard, ask
from agentfsm.planning import Planner
from agentfsm.releases import UpgradeReport, UpgradeVerdict, check_upgrade
from agentfsm.scripts import Script
from agentfsm.stores import MemoryStore
from agentfsm.testing import ScriptedModel, call, say
from tests.support.checks import Wrapped


class Readable(Wrapped):
    """A store that notes what is called beside its readers."""

    def __init__(self, inner):
        self.inner, self.called = inner, set()

    def __getattr__(self, name):
        found = getattr(self.inner, name)

        def note(*args, **options):
            self.called.add(name)
            return found(*args, **options)

        return note if callable(found) else found


@tool(requires_approval=True)
async def pay(cents: int) -> str:
    """Pay."""
    return f"paid {cents}"


@tool(name="pay", requires_approval=True)
async def pay_somebody(cents: int, to: str) -> str:
    """Pay."""
    return f"paid {cents} to {to}"


@tool(requires_approval=True, replaces=("pay",))
async def pay_v2(cents: int, currency: str = "EUR") -> str:
    """Pay in a currency."""
    return f"paid {cents} {currency}"


@tool(idempotent=True)
async def book(seat: int) -> str:
    """Book, and never come back."""
    raise KeyboardInterrupt


@attrs.define(eq=False)
class Newer(Wrapped):
    """A store with runs of a newer agentfsm."""

    inner: MemoryStore

    async def runs(self, *args, **options):
        return [attrs.evolve(each, format=99) for each in await self.inner.runs(*args, **options)]


async def foresee(agent, **changes):
    """The report, and its differences as kinds with the texts; the store is only read."""
    way = Readable(agent.store)
    report = await check_upgrade(agent.with_(store=way, **changes))
    assert way.called <= {"read", "runs", "inbox", "now"}
    return report, [(each.kind, each.text) for run in report.runs for each in run.changes]


def ask_for(*calls):
    return ScriptedModel(say("", *calls), "done")


@pytest.fixture
def store():
    return MemoryStore()


async def test_an_agent_with_a_call_that_waits_for_a_person(store):
    """Its requests, its tool, the approval and the permission."""
    agent = Agent(ask_for(call("pay", cents=5)), tools=[pay], name="clerk", instructions="Be kind.", store=store)
    await agent.run("Pay.", id="r1")
    await agent.approve("r1", "t1.0", by="ann")

    report, found = await foresee(agent)
    assert (found, report.runs[0].checked, report.is_smooth) == ([], 1, True)

    report, found = await foresee(agent, instructions="Be short.")
    assert found == [("request", "requests differ: other instructions")]
    assert report.runs[0].changes[0].version == 2
    assert report.is_smooth

    _, found = await foresee(agent, settings=Settings(temperature=0.5))
    assert found == [("request", "requests differ: other limits, settings or policies")]
    _, found = await foresee(agent, limits=Limits(turns=3))
    assert found == [("agent", "other limits, settings or policies")]

    report, found = await foresee(agent, tools=[])
    assert found[1:] == [("tool_gone", "the tool 'pay' of an open call is gone")]
    assert report.verdicts[UpgradeVerdict.REFUSED] == 1

    report, found = await foresee(agent, tools=[pay_somebody])
    fate = "it is not run, and the model is told"
    assert found[1:] == [("arguments", f"the arguments of an open call do not fit 'pay' any more: {fate}")]
    assert not report.is_smooth

    _, found = await foresee(agent, tools=[attrs.evolve(pay, description="Pay at once.")])
    assert [kind for kind, _ in found] == ["request", "approval"]
    assert "the approval does not hold" in found[1][1]

    _, found = await foresee(agent, permissions=Permissions(deny=["pay"]))
    assert [kind for kind, _ in found] == ["request", "permission"]


async def test_a_call_that_was_cut_off(store):
    """Its policy, the parameters and the kind of its tool."""
    agent = Agent(ask_for(call("book", seat=1)), tools=[book], name="clerk", store=store)
    with pytest.raises(KeyboardInterrupt):
        await agent.run("Book.", id="r1")
    helper = Agent(ScriptedModel("done"), name="book").as_tool(parameters=dict(book.parameters), prompt=str)
    changed = {
        "stricter": attrs.evolve(book, on_unknown="ask"),
        "parameters": attrs.evolve(book, parameters={**book.parameters, "title": "other"}),
        "kind": helper,
        "permission": attrs.evolve(book, enabled=False),
        "approval": attrs.evolve(book, requires_approval=True),
    }
    for kind, other in changed.items():
        report, found = await foresee(agent, tools=[other])
        assert [each for each, _ in found if each not in ("request", "agent")] == [kind], found
        assert report.runs[0].verdict is UpgradeVerdict.ATTENTION
    careful = agent.with_(tools=[attrs.evolve(book, on_unknown="fail")])
    with pytest.raises(KeyboardInterrupt):
        await careful.with_(model=ask_for(call("book", seat=1))).run("Book.", id="r2")
    assert (
        "looser",
        "on_unknown of 'book', whose call had started, was 'fail' and is 'rerun' now: that of the start counts",
    ) in (await foresee(agent))[1]


async def test_what_an_earlier_release_has_asked_is_no_difference(store):
    """Only the requests of the release that executes the run now are compared."""
    old = Agent(
        ScriptedModel(say("", call("pay", cents=5)), say("", call("pay", cents=6))),
        tools=[pay],
        name="clerk",
        instructions="Be kind.",
        store=store,
    )
    await old.run("Pay.", id="r1")
    await old.approve("r1", "t1.0")
    new = old.with_(instructions="Be short.")
    await new.resume("r1")
    assert (await foresee(new))[1] == []
    assert [kind for kind, _ in (await foresee(old))[1]] == ["request"]


async def test_a_flow(store):
    """Steps and compensations that are renamed or removed, and an agent in its place."""

    @step(requires_approval=True, read_only=True)
    async def gate() -> str:
        return "open"

    async def refund(charge: str) -> str:
        return charge

    @step(depends_on=["gate"], compensate=refund)
    async def charge(gate: str) -> str:
        return gate

    @step(name="charge", depends_on=["gate"])
    async def charge_more(gate: str, cents: int) -> str:
        return gate

    flow = Flow([gate, charge], name="shop", store=store)
    await flow.run({}, id="f1")
    assert (await foresee(flow))[1] == []
    report, found = await foresee(Flow([gate], name="shop", store=store))
    assert {kind for kind, _ in found} - {"request", "agent"} == {"compensation", "step"}
    assert ("step", "the step 'charge' is gone: it waits for a person, or its program") in found
    _, found = await foresee(Flow([gate, charge_more], name="shop", store=store))
    assert ("arguments", "the arguments of a step do not fit 'charge' any more: the step fails") in found
    report, found = await foresee(Agent(ScriptedModel("done"), name="shop", store=store))
    assert "program" in {kind for kind, _ in found}
    assert report.verdicts[UpgradeVerdict.REFUSED] == 1


async def test_a_plan_under_review(store):
    """A plan whose tools are gone is refused, and one whose tools have changed is shown again."""
    plan = json.dumps({"steps": [{"id": 1, "tool": "pay", "arguments": {"cents": 5}}]})
    agent = Agent(
        ScriptedModel("done"),
        tools=[pay],
        planner=Planner(model=ScriptedModel(plan), review=True),
        name="clerk",
        store=store,
    )
    await agent.run("Pay.", id="r1")
    assert (await foresee(agent))[1] == []
    _, found = await foresee(agent, tools=[])
    assert ("plan_gone", "the tool 'pay' of a plan under review is gone") in found
    _, found = await foresee(agent, tools=[attrs.evolve(pay, description="Pay at once.")])
    assert "approval" in [kind for kind, _ in found]


@pytest.mark.parametrize("background", [False, True])
async def test_sub_agents(store, background):
    """The run of a sub-agent is compared with the sub-agent of the new release, and named."""

    def build(instructions="Be kind.", tools=(pay,), *, has_helper=True):
        helper = Agent(ask_for(call("pay", cents=5)), tools=list(tools), name="helper", instructions=instructions)
        model = ScriptedModel(say("", call("helper", query="Pay.")), "done")
        own = [helper.as_tool(background=background)] if has_helper else []
        return Agent(model, tools=own, name="boss", store=store)

    await build().run("Go.", id="r1")
    assert (await foresee(build()))[1] == []
    report, found = await foresee(build(instructions="Be short."))
    below = [each for each in report.runs[0].changes if each.run_id == "r1.t1.0"]
    assert [(each.kind, each.text) for each in below] == [("request", "requests differ: other instructions")]
    report, found = await foresee(build(tools=()))
    assert ("tool_gone", "the tool 'pay' of an open call is gone") in found
    _, found = await foresee(build(has_helper=False))
    assert "agent_gone" in [kind for kind, _ in found]


async def test_a_script_and_a_result_from_outside(store):
    """The calls of a script are those of a run below; a result from outside needs no arguments."""

    @tool(external=True)
    async def sign(page: int) -> str:
        """Sign."""
        raise AssertionError

    @tool(external=True, name="sign")
    async def sign_somewhere(page: int, where: str) -> str:
        """Sign."""
        raise AssertionError

    calls = (call("run_python", code="pay(cents=5)"), call("sign", page=1))
    agent = Agent(ask_for(*calls), tools=[Script(pay), sign], name="clerk", store=store)
    await agent.run("Pay.", id="r1")
    report, found = await foresee(agent)
    assert (found, report.runs[0].checked) == ([], 2)
    report, _ = await foresee(agent, tools=[Script(pay), sign_somewhere])
    assert report.is_smooth
    await agent.approve("r1.t1.0", "t1.0", arguments={"cents": 4})
    report, found = await foresee(agent, tools=[Script(pay_somebody), sign])
    assert "arguments" in [kind for kind, _ in found]


async def test_an_approval_with_edited_arguments(store):
    """They have to fit as well."""
    agent = Agent(ask_for(call("pay", cents=5)), tools=[pay], name="clerk", store=store)
    await agent.run("Pay.", id="r1")
    await Runs(store).approve("r1", "t1.0", arguments={"cents": 4, "to": "Bob"})
    assert (await foresee(agent))[1] == [
        (
            "approval",
            "the arguments of a call, as a person has edited them, do not fit 'pay': the person is asked again",
        )
    ]


async def test_runs_that_cannot_be_read_are_named(store):
    """A newer format, a broken journal and functions that raise; other runs are not concerned."""

    def settle(run):
        raise ValueError(run.id)

    agent = Agent(ask_for(call("pay", cents=5)), tools=[pay], name="clerk", store=store)
    await agent.run("Pay.", id="r1")
    _, found = await foresee(agent.with_(store=Newer(store)))
    assert found == [("format", "its records have format 99, which a newer agentfsm has written")]
    _, found = await foresee(agent, settings=settle)
    assert found == [("unreadable", "it cannot be compared, since the agent raised ValueError")]


async def test_the_report_counts_and_pages(store):
    """Each difference is counted once for all runs, and the runs come in pages, the worst first."""
    agent = Agent(ask_for(call("pay", cents=5)), tools=[pay], name="clerk", store=store, version="2")
    for number in range(5):
        await agent.with_(model=ask_for(call("pay", cents=5)), version="1").run("Pay.", id=f"r{number}", release="1")
    done = await agent.with_(model=ScriptedModel("It is done.")).run("Nothing.")
    assert done.is_over
    report, _ = await foresee(agent, instructions="Be <b>short</b>.", tools=[pay_v2])
    assert isinstance(report, UpgradeReport)
    assert (len(report.runs), dict(report.releases), report.release) == (5, {"1": 5}, "2")
    document = report.to_dict(limit=2, offset=4)
    assert [len(document["runs"]), document["changed"], document["verdicts"]["attention"]] == [1, 5, 5]
    assert {each["kind"]: each["runs"] for each in document["changes"]} == {"request": 5, "replaced": 5, "approval": 5}
    page = report.to_markdown(limit=2)
    assert "| 5 | attention | go on, and" in page
    assert "Runs 1 to 2 of 5 with a difference:" in page
    assert "r2" not in page.partition("Runs 1 to 2")[2].replace("r2.", "")  # newest first


# Replaced tools.


async def test_a_call_that_has_not_started_goes_on_as_the_tool_that_replaces_its_own(store):
    """A worker records it, for people to see, and the person is asked about the new tool."""
    old = Agent(ask_for(call("pay", cents=5)), tools=[pay], name="clerk", store=store)
    await old.run("Pay.", id="r1")
    await old.approve("r1", "t1.0", by="ann")
    new = old.with_(tools=[pay_v2])
    _, found = await foresee(new)
    assert ("replaced", "open calls and steps of 'pay' go on as 'pay_v2'") in found
    await new.worker(until_idle=True)
    [item] = (await new.load("r1")).pending
    assert (item.tool, item.arguments) == ("pay_v2", {"cents": 5})
    assert [dict(each.renamed) for each in await new.history("r1") if isinstance(each, e.Resumed)] == [
        {"pay": "pay_v2"}
    ]
    await new.approve("r1", "t1.0", by="ann")
    await new.worker(until_idle=True)
    [record] = await new.audit("r1")
    assert (record.tool, record.status, record.approved_by) == ("pay_v2", "done", "ann")


async def test_steps_and_agents_that_replace_others(store):
    """A step with its results and its compensation goes on, and so does the run of an agent in the background."""

    @step(requires_approval=True, read_only=True)
    async def gate() -> str:
        return "open"

    @step(depends_on=["gate"])
    async def charge(gate: str) -> str:
        return gate

    @step(depends_on=["gate"], replaces=("charge",))
    async def charge_card(gate: str) -> str:
        return f"card {gate}"

    @step(depends_on=["charge"])
    async def ship(charge: str) -> str:
        return charge

    @step(name="ship", depends_on=["charge_card"])
    async def ship_card(charge_card: str) -> str:
        return f"shipped {charge_card}"

    old = Flow([gate, charge, ship], name="shop", store=store)
    await old.run({}, id="f1")
    new = Flow([gate, charge_card, ship_card], name="shop", store=store)
    report, _ = await foresee(new)
    assert report.is_smooth
    await old.approve("f1", "p1.1")
    await new.worker(until_idle=True)
    assert json.loads((await new.load("f1")).output) == {"ship": "shipped card open"}

    def build(*replies, **options):
        helper = Agent(ScriptedModel(*replies), tools=[pay], name="helper")
        model = ScriptedModel(say("", call("helper", query="Pay.")), "It works.", "done")
        return Agent(model, tools=[helper.as_tool(background=True, **options)], name="boss", store=store)

    boss = build(say("", call("pay", cents=5)))
    await boss.run("Go.", id="r1")
    other = build("paid", name="clerk", replaces=("helper",)).with_(model=ScriptedModel("done"))
    report, found = await foresee(other)
    assert report.is_smooth, found
    await other.approve("r1.t1.0", "t1.0")
    run = await other.resume("r1")
    assert (run.output, [each.call.name for each in run.background.values()]) == ("done", ["clerk"])


async def test_a_tool_that_is_still_there_keeps_its_calls(store):
    """Both tools may stand side by side, while old runs end."""
    old = Agent(ask_for(call("pay", cents=5)), tools=[pay], name="clerk", store=store)
    await old.run("Pay.", id="r1")
    await old.approve("r1", "t1.0", by="ann")
    both = old.with_(tools=[pay, pay_v2])
    assert "replaced" not in [kind for kind, _ in (await foresee(both))[1]]
    await both.worker(until_idle=True)
    assert [each.tool for each in await both.audit("r1")] == ["pay"]


async def test_a_call_that_had_started_is_never_another_tool(store):
    """It is refused, and so stays with the release that began it."""
    agent = Agent(ask_for(call("book", seat=1)), tools=[book], name="clerk", store=store)
    with pytest.raises(KeyboardInterrupt):
        await agent.run("Book.", id="r1")
    other = attrs.evolve(pay_v2, name="book_v2", replaces=("book",))
    before = await agent.history("r1")
    _, found = await foresee(agent, tools=[other])
    assert ("tool_gone", "the tool 'book' of an open call is gone") in found
    await agent.with_(tools=[other]).worker(until_idle=True)
    assert await agent.history("r1") == before


class KilledError(BaseException):
    """The process is gone."""


class Killing(Wrapped):
    """The way to a store of a process that dies before or after it records the replacement."""

    def __init__(self, inner, moment):
        self.inner, self.moment = inner, moment

    def append(self, lease, run, events, **options):
        is_now = any(isinstance(each, e.Resumed) for each in events)
        if is_now and self.moment == "before":
            raise KilledError
        written = self.inner.append(lease, run, events, **options)
        if is_now:
            raise KilledError
        return written


@pytest.mark.parametrize("moment", ["before", "after"])
async def test_a_process_that_dies_at_the_replacement(store, moment):
    """Whether it is recorded or not, another process goes on as the new tool, and acts once."""
    paid = []

    @tool(replaces=("pay",), name="pay_v2")
    async def pay_once(cents: int) -> str:
        """Pay."""
        paid.append(cents)
        return "paid"

    old = Agent(ask_for(call("pay", cents=5)), tools=[pay], name="clerk", store=store)
    await old.run("Pay.", id="r1")
    await old.approve("r1", "t1.0")
    new = old.with_(tools=[pay_once])
    with pytest.raises(KilledError):
        await new.with_(store=Killing(store, moment)).resume("r1")
    assert paid == []
    store._free_run(store._records["r1"])
    run = await new.resume("r1")
    if run.pending:  # the person had seen the other tool
        await new.approve("r1", "t1.0")
        run = await new.resume("r1")
    assert (run.output, paid) == ("done", [5])
    assert [dict(each.renamed) for each in await new.history("r1") if isinstance(each, e.Resumed)] == [
        {"pay": "pay_v2"}
    ]


async def test_an_approval_that_is_not_asked_for_any_more_is_named():
    """The next call of the tool would start without a person."""
    steps = (say("", call("pay", cents=5)), say("", call("pay", cents=6)), "Done.")
    agent = Agent(ScriptedModel(*steps), tools=[pay], store=MemoryStore())
    run = await agent.run("Pay.")
    for now in (
        attrs.evolve(pay, requires_approval=False),
        attrs.evolve(pay, requires_approval=lambda given: given.cents > 5),
    ):
        [upgrade] = (await check_upgrade(agent.with_(tools=[now]))).runs
        assert [(each.kind, each.call_id) for each in upgrade.changes] == [("unasked", "t1.0")]
    guarded = Agent(ScriptedModel(*steps), tools=[now], guards=[Guard(ask("pay"))], store=agent.store, name="guarded")
    await guarded.run("Pay.")
    [upgrade] = (await check_upgrade(guarded)).runs
    assert (run.is_waiting, upgrade.verdict) == (True, UpgradeVerdict.SAME)


async def test_a_function_that_would_start_a_run_is_not_followed(store):
    """The instructions are asked, and what they ask of another agent is no part of it."""
    agent = Agent(ask_for(call("pay", cents=5)), tools=[pay], store=store)
    await agent.run("Pay.")
    side = Agent(ScriptedModel("Be kind."), name="side", store=MemoryStore())

    async def instruct(_header):
        return (await side.run("How?")).answer

    _, [(kind, text)] = await foresee(agent, instructions=instruct)
    assert (kind, "no function of the agent can start or execute a run here" in text) == ("unreadable", True)
    assert await side.runs.list() == ()
