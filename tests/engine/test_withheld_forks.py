"""`fork(withhold=True)`: a run that shows what it would do, and does nothing."""

from __future__ import annotations

import json

import pytest

from agentfsm import Agent, ErrorType, MisuseError, Outcome, Permissions, Settings, State, ask_user, tool, wait
from agentfsm.flow import Flow, StepStatus, agent_step, each, step
from agentfsm.models import HostedMCP, WebSearch
from agentfsm.planning import Plan, Planner, PlanStep
from agentfsm.testing import FunctionModel, ScriptedModel, call, say
from tests.support.checks import results_of

WITHHELD = (Outcome.SKIPPED, ErrorType.WITHHELD)


@pytest.fixture
def paid():
    """The payments that were made."""
    return []


@pytest.fixture
def pay(paid):
    """A tool with an effect."""

    @tool
    async def pay(account: str, cents: int) -> str:
        """Pay."""
        paid.append((account, cents))
        return "paid"

    return pay


@tool(read_only=True)
async def look(order: int) -> str:
    """Look up an order."""
    return f"order {order}: 500 cents"


async def forked(agent, *replies, at=0, **fields):
    """Run the agent's question, fork it at its beginning with other replies, and finish the fork."""
    run = await agent.with_(model=ScriptedModel("nothing to do")).run("go")
    other = agent.with_(model=ScriptedModel(*replies), **fields)
    fork = await other.fork(run.id, at=at, withhold=True)
    assert (await other.load(fork.id)).header.withhold
    return await other.finish(fork)


async def test_a_fork_acts_and_a_withheld_one_says_what_it_would_do(store, paid, pay):
    """The result that the model reads has the call; read-only tools are called; no attempt is recorded."""
    replies = say("", call("look", order=7)), say("", call("pay", account="Ann", cents=50_000)), "Done."
    agent = Agent(ScriptedModel(), store=store, tools=[look, pay])
    run = await forked(agent, *replies)
    looked, withheld = results_of(run.messages)
    assert looked.content == "order 7: 500 cents"
    assert (withheld.outcome, withheld.error_type, withheld.attempts) == (*WITHHELD, 0)
    assert 'withheld: pay({"account": "Ann", "cents": 50000}) would have been called now' in withheld.content
    assert (run.state, paid) == (State.DONE, [])
    assert [record.status for record in await agent.audit(run.id)] == [Outcome.DONE, Outcome.SKIPPED]
    other = agent.with_(model=ScriptedModel(*replies))
    acting = await other.finish(await other.fork(run.id, at=0))  # also a fork of a withheld run
    assert not acting.header.withhold
    assert paid == [("Ann", 50_000)]


async def test_nobody_is_asked_about_a_withheld_call(store, paid):
    """The tool needs an approval, and the run does not wait for one."""

    @tool(requires_approval=True)
    async def pay(cents: int) -> str:
        """Pay."""
        paid.append(cents)
        return "paid"

    run = await forked(Agent(ScriptedModel(), store=store, tools=[pay]), say("", call("pay", cents=5)), "Done.")
    assert (run.state, results_of(run.messages)[0].error_type, paid) == (State.DONE, ErrorType.WITHHELD, [])


async def test_a_refusal_comes_before_it(store, paid, pay):
    """What would not have been called is not said to have been withheld."""
    agent = Agent(ScriptedModel(), store=store, tools=[pay], permissions=Permissions(level="read"))
    run = await forked(agent, say("", call("pay", account="Ann", cents=5), call("pay", account=5)), "Done.")
    assert [each.error_type for each in results_of(run.messages)] == [ErrorType.NOT_PERMITTED, ErrorType.NOT_PERMITTED]
    run = await forked(Agent(ScriptedModel(), store=store, tools=[pay]), say("", call("pay", account="Ann")), "Done.")
    assert results_of(run.messages)[0].error_type is ErrorType.ARGUMENTS
    assert paid == []


async def test_a_plain_function_an_agent_kind_and_an_external_tool_are_withheld(store, paid):
    """All that may act, whatever carries it out; `read_only` is the declaration that counts."""

    @tool(idempotent=True)
    def plain() -> str:
        """Act."""
        paid.append("plain")
        return "did"

    @tool(kind="agent")
    async def own_agent() -> str:
        """Act."""
        paid.append("agent")
        return "did"

    @tool(external=True)
    def deliver() -> str:
        """Have it delivered by a person."""
        raise AssertionError

    tools = [plain, own_agent, deliver]
    calls = [call(name) for name in ("plain", "own_agent", "deliver")]
    run = await forked(Agent(ScriptedModel(), store=store, tools=tools), say("", *calls), "Done.")
    assert {(each.outcome, each.error_type) for each in results_of(run.messages)} == {WITHHELD}
    assert (run.state, paid) == (State.DONE, [])


async def test_questions_to_people_remain(store):
    """`ask_user` and `wait` change nothing."""
    agent = Agent(ScriptedModel(), store=store, tools=[ask_user, wait])
    run = await forked(agent, say("", call("ask_user", question="Which?")))
    assert [item.tool for item in run.pending] == ["ask_user"]
    await agent.answer(run.id, "t1.0", "that one")
    model = ScriptedModel(say("", call("wait", seconds=5, reason="x")))
    run = await agent.with_(model=model).resume(run.id)
    assert [item.tool for item in run.pending] == ["wait"]
    await agent.cancel(run.id)


async def test_the_calls_of_an_agent_below_are_withheld(store, paid, pay):
    """It runs, so that its own work is seen; at each depth."""
    clerk = Agent(ScriptedModel(say("", call("pay", account="Ann", cents=5)), "tried"), name="clerk", tools=[pay])
    chief = Agent(ScriptedModel(say("", call("clerk", query="pay")), "asked"), name="chief", tools=[clerk.as_tool()])
    run = await forked(
        Agent(ScriptedModel(), store=store, tools=[chief.as_tool()]), say("", call("chief", query="x")), "Done."
    )
    assert results_of(run.messages)[0].outcome is Outcome.DONE
    runs = Agent(ScriptedModel(), store=store).runs
    below = await runs.load(f"{run.id}.t1.0.t1.0")
    assert (results_of(below.messages)[0].error_type, below.header.withhold, paid) == (ErrorType.WITHHELD, True, [])


async def test_the_runs_that_a_call_starts_are_withheld(store, paid, pay):
    """A read-only tool that runs an agent does not lead around it."""
    clerk = Agent(ScriptedModel(say("", call("pay", account="Ann", cents=5)), "tried"), store=store, tools=[pay])

    @tool(read_only=True)
    async def go() -> str:
        """Go."""
        return (await clerk.run("pay")).output

    run = await forked(Agent(ScriptedModel(), store=store, tools=[go]), say("", call("go")), "Done.")
    assert (results_of(run.messages)[0].content, paid) == ("tried", [])


async def test_the_runs_that_a_validator_starts_are_withheld(store, paid, pay):
    """It is no call, and its runs are those of the fork all the same; an acting run is not executed in it."""
    clerk = Agent(ScriptedModel(say("", call("pay", account="Ann", cents=5)), "tried"), store=store, tools=[pay])
    other = clerk.with_(model=ScriptedModel("nothing"))
    acting = await other.submit("pay")
    inner = []

    async def check(answer):
        inner.append(await clerk.run("pay"))
        with pytest.raises(MisuseError, match="withholds calls"):
            await other.resume(acting.id)
        with pytest.raises(MisuseError, match="withholds calls"):
            await other.fork(acting.id, at=0)
        return answer

    run = await (agent := Agent(ScriptedModel("nothing to do"), store=store)).run("go")
    agent = agent.with_(model=ScriptedModel("Done."), output_validators=[check])
    await agent.finish(await agent.fork(run.id, at=0, withhold=True))
    assert [(each.header.withhold, each.answer) for each in inner] == [(True, "tried")]
    assert paid == []


async def test_the_steps_of_a_flow_are_withheld(store, paid, pay):
    """Functions, agents, repetitions and compensations; each step says why it has no result."""
    clerk = Agent(ScriptedModel(say("", call("pay", account="Ann", cents=5)), "tried"), name="clerk", tools=[pay])

    @step(read_only=True)
    async def order() -> list[int]:
        return [1, 2]

    @step
    async def undo() -> None:
        paid.append("undone")

    ask = agent_step(clerk, "Pay.", depends_on=[order], compensate=undo)

    @step
    async def load(item: int) -> str:
        paid.append(item)
        return "loaded"

    loads = each(load, order, name="loads")

    @step(depends_on=[ask], idempotent=True)
    async def ship() -> str:
        paid.append("shipped")
        return "shipped"

    flow = Flow([order, ask, loads, ship], store=store)
    run = flow.start({})
    fork = await flow.fork((await flow.submit(run)).id, at=0, withhold=True)
    done = await flow.finish(fork)
    assert paid == []
    assert flow.statuses(done) == {
        "order": StepStatus.SUCCESS,
        "clerk": StepStatus.SUCCESS,
        "loads": StepStatus.FAILED,
        "ship": StepStatus.FAILED,
    }
    assert "step ship failed (skipped: withheld: ship({})" in done.stop_message
    assert "undo" not in done.stop_message.partition("compensated by")[2]


async def test_the_steps_of_a_plan_are_withheld(store, paid, pay):
    """The plan is made and carried out as far as it reads."""
    plan = Plan(
        steps=(
            PlanStep(id=1, tool="look", arguments={"order": 7}),
            PlanStep(id=2, tool="pay", arguments={"account": "Ann", "cents": 5}, after=(1,)),
        )
    )
    agent = Agent(ScriptedModel(), store=store, tools=[look, pay])
    run = await forked(agent, json.dumps(plan.to_json()), "Done.", planner=Planner(replans=0))
    assert [entry.result.outcome for entry in run.plan.steps] == [Outcome.DONE, Outcome.SKIPPED]
    assert paid == []


async def test_open_calls_of_the_forked_run_are_withheld_unless_they_had_started(store, paid, pay):
    """Those that wait for a person are asked about no more; of a started one the outcome is unknown, as in any fork."""

    @tool(external=True)
    def deliver() -> str:
        """Have it delivered by a person."""
        raise AssertionError

    @tool(requires_approval=True)
    async def refund() -> str:
        """Refund."""
        paid.append("refund")
        return "refunded"

    tools = [look, refund, deliver, pay, ask_user]
    calls = [call("refund"), call("deliver"), call("look", order=1), call("ask_user", question="Which?")]
    agent = Agent(ScriptedModel(say("", *calls), "x"), store=store, tools=tools)
    run = await agent.run("go")
    assert len(run.pending) == 3
    other = agent.with_(model=ScriptedModel("Done."))
    fork = await other.finish(await other.fork(run.id, withhold=True))
    assert [item.tool for item in fork.pending] == ["ask_user"]
    await other.answer(fork.id, "t1.3", "this")
    done = await other.resume(fork.id)
    found = {each.tool: each.error_type for each in results_of(done.messages)}
    assert found == {"refund": ErrorType.WITHHELD, "deliver": ErrorType.WITHHELD, "look": None, "ask_user": None}
    assert (done.state, paid) == (State.DONE, [])
    await agent.cancel(run.id)

    agent = agent.with_(model=ScriptedModel(say("", call("pay", account="Ann", cents=5)), "x"))
    run = await agent.run("go")
    started = [type(each).__name__ for each in await agent.history(run.id)].index("ToolStarted") + 1
    fork = await other.fork(run.id, at=started, withhold=True)
    await other.finish(fork)
    await other.settle(fork.id, "t1.0", rerun=True)
    await other.with_(model=ScriptedModel("Done.")).resume(fork.id)
    assert paid == [("Ann", 5)]  # by the forked run


async def test_tools_that_the_provider_executes_are_not_offered_if_they_can_act(store):
    """A search of the web is; the MCP server of a provider is not, since nothing of ours stands before its calls."""
    seen = []

    class Hosting(ScriptedModel):
        def unsupported_hosted_tool(self, _tool):
            return None

        async def reply(self, request, emit=None):
            seen.append([each.name for each in request.hosted_tools])
            return await super().reply(request, emit)

    agent = Agent(
        Hosting("first"), store=store, tools=[WebSearch(), HostedMCP(server="bank", url="https://bank.example/mcp")]
    )
    run = await agent.run("go")
    other = agent.with_(model=Hosting("again"))
    await other.finish(await other.fork(run.id, at=0, withhold=True))
    assert seen == [["web_search", "bank"], ["web_search"]]


async def test_tools_that_agentfsm_does_not_know_cannot_be_withheld(store):
    """Those in the body of a request: the fork is refused, rather than half kept."""
    agent = Agent(ScriptedModel("one"), store=store)
    run = await agent.run("go")
    extra = Settings(extra_body={"tools": [{"type": "mcp"}]})
    with pytest.raises(MisuseError, match="cannot withhold their calls"):
        await agent.with_(settings=extra).fork(run.id, at=0, withhold=True)
    asked = []
    model = FunctionModel(lambda request: asked.append(request) or "two")
    below = Agent(model, name="below", settings=extra)
    other = agent.with_(model=model, settings=lambda _run: extra)
    fork = await other.fork(run.id, at=0, withhold=True)
    with pytest.raises(MisuseError, match="cannot withhold their calls"):
        await other.finish(fork)
    other = agent.with_(model=ScriptedModel(say("", call("below", query="x")), "Done."), tools=[below.as_tool()])
    done = await other.finish(await other.fork(run.id, at=0, withhold=True))
    assert results_of(done.messages)[0].outcome is Outcome.FAILED
    assert asked == []
    with pytest.raises(MisuseError, match=r"withhold='yes'"):
        await agent.fork(run.id, at=0, withhold="yes")
