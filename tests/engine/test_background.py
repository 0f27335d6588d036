"""Background runs: runs of agents that go on after the call that began them."""

import anyio
import attrs
import pytest

from agentfsm import Agent, Limits, MisuseError, Outcome, PendingKind, RunContext, State, StopReason, tool
from agentfsm.core.messages import SystemMessage, ToolResult
from agentfsm.flow import Flow, agent_step
from agentfsm.ports import Filter
from agentfsm.stores import MemoryStore
from agentfsm.testing import FunctionModel, ScriptedModel, call, say
from tests.support.checks import HANG_S, sound_run

DIG = say("", call("dig"))
BEGIN = say("", call("digger", query="Find gold."))
WAIT = say("", call("wait", seconds=60, reason="the digger"))


@attrs.define
class Mine:
    """A place where calls of `dig` wait until they are let go."""

    begun: anyio.Event = attrs.field(factory=anyio.Event)
    go: anyio.Event = attrs.field(factory=anyio.Event)
    effects: int = 0

    @property
    def dig(self):
        """Return the tool."""

        @tool(name="dig")
        async def dig() -> str:
            """Dig for gold."""
            self.begun.set()
            await self.go.wait()
            self.effects += 1
            return "gold"

        return dig


def make_boss(store, *replies, mine=None, tools=(), child=(DIG, "I found gold."), limits=None, **options):
    """Return an agent whose tool `digger` is an agent in the background."""
    dig = (mine or _open_mine()).dig
    digger = Agent(ScriptedModel(*child), tools=[dig], name="digger", **options)
    made = digger.as_tool(background=True)
    return Agent(ScriptedModel(*replies), tools=[made, *tools], name="boss", store=store, limits=limits or Limits())


def _open_mine():
    mine = Mine()
    mine.go.set()
    return mine


def notes(run):
    return [message.text for message in run.messages if isinstance(message, SystemMessage)]


def results(run):
    return {message.call_id: message for message in run.messages if isinstance(message, ToolResult)}


async def reached(agent, run_id, is_there):
    """Return once the run is there."""
    with anyio.fail_after(HANG_S):
        while True:
            if is_there(await agent.load(run_id)):
                return
            await anyio.sleep(0.01)


async def cut_off(boss, mine):
    """Begin a run, and cut it off while its background run digs and its own answer waits for that; return its id."""
    async with anyio.create_task_group() as tasks:
        run_id = (await boss.submit("Get gold.", id="job")).id
        tasks.start_soon(boss.resume, run_id)
        await mine.begun.wait()
        await reached(boss, run_id, lambda run: run.state is State.REFLECT)
        tasks.cancel_scope.cancel()
    return run_id


async def test_the_call_returns_at_once_and_the_result_comes_as_a_message(store):
    """A model goes on while the background run works, waits for it, and reads its result once."""
    mine = Mine()

    @tool
    async def look() -> str:
        """Look whether the background run works, and let it go on."""
        await mine.begun.wait()
        mine.go.set()
        return "it digs"

    boss = make_boss(store, BEGIN, say("", call("look")), WAIT, "We have gold.", mine=mine, tools=[look])
    run = await boss.run("Get gold.")
    sound_run(run)
    assert run.output == "We have gold."
    assert "t1.0" in results(run)["t1.0"].content
    assert notes(run) == ["[Background run t1.0] [digger: done]\nI found gold."]
    assert mine.effects == 1
    child = await boss.load(f"{run.id}.t1.0")
    assert (child.header.parent, child.state) == (run.id, State.DONE)
    assert [each.id for each in await boss.runs.list(Filter(parent=run.id))] == [child.id]
    assert run.usage.tokens == child.usage.tokens + sum(
        event.usage.tokens for event in await boss.history(run.id) if hasattr(event, "usage")
    )
    assert boss.cost(run).children[0].run_id == child.id


async def test_an_answer_is_a_draft_until_the_background_runs_have_ended(store):
    """A run that answers too early waits for its background runs, and answers again when it has read their results."""
    boss = make_boss(store, BEGIN, "Done, I think.", "We have gold.")
    run = await boss.run("Get gold.")
    assert (run.output, run.turn) == ("We have gold.", 3)
    ends = [type(event).__name__ for event in (await boss.history(run.id))[-5:]]
    assert ends == ["ChildReported", "Continued", "Observed", "AnswerDrafted", "Accepted"]


async def test_the_wait_does_not_count_as_active_time(store):
    """A background run may take longer than the seconds of the run that waits for it."""
    mine = Mine()
    boss = make_boss(store, BEGIN, "Too early.", "Done.", mine=mine)
    async with anyio.create_task_group() as tasks:

        async def let_go():
            await mine.begun.wait()
            await anyio.sleep(0.3)
            mine.go.set()

        tasks.start_soon(let_go)
        run = await boss.run("Get gold.")
    child = await boss.load(f"{run.id}.t1.0")
    assert run.duration_s < 0.3 <= child.duration_s


async def test_a_decision_in_a_background_run_is_asked_of_the_parent(store):
    """A run whose background run waits for a person waits as well, shows for what, and goes on after the decision."""
    paid = []

    @tool(requires_approval=True)
    async def pay() -> str:
        """Pay."""
        paid.append(1)
        return "paid"

    clerk = Agent(ScriptedModel(say("", call("pay")), "It is paid."), tools=[pay], name="clerk")
    replies = say("", call("clerk", query="Pay.")), "It will be paid.", "It was paid."
    boss = Agent(ScriptedModel(*replies), tools=[clerk.as_tool(background=True)], name="boss", store=store)
    run = await boss.run("Pay.")
    assert run.is_waiting
    [item] = run.pending
    assert (item.kind, item.run_id, item.tool) == (PendingKind.APPROVAL, f"{run.id}.t1.0", "pay")
    assert (await boss.resume(run.id)).version == run.version  # nothing has changed
    assert not paid
    await boss.approve(item.run_id, item.call_id, by="ann")
    await boss.worker(until_idle=True)
    run = await boss.load(run.id)
    assert (run.output, len(paid)) == ("It was paid.", 1)


async def test_a_fork_has_no_background_runs(store):
    """What they wait for is asked in the origin only; the fork reads at once that it is not known what they did."""

    @tool(requires_approval=True)
    async def pay() -> str:
        """Pay."""
        return "paid"

    clerk = Agent(ScriptedModel(say("", call("pay")), "It is paid."), tools=[pay], name="clerk")
    replies = say("", call("clerk", query="Pay.")), "It will be paid.", "I do not know whether it was paid."
    boss = Agent(ScriptedModel(*replies), tools=[clerk.as_tool(background=True)], name="boss", store=store)
    run = await boss.run("Pay the bill.")
    fork = await boss.fork(run.id)
    assert (len(run.pending), fork.pending, fork.open_background) == (1, (), ())
    fork = await boss.resume(fork.id)
    sound_run(fork)
    assert "is not known here what it did" in notes(fork)[0]
    assert (await boss.load(run.id)).pending == run.pending


async def test_a_worker_takes_over_a_run_with_its_background_run(store):
    """A background run whose process has stopped is finished by the one that continues its parent, with one effect."""
    mine = Mine()
    first = make_boss(store, BEGIN, "Too early.", mine=mine)
    run_id = await cut_off(first, mine)
    assert not mine.effects
    [child] = await first.runs.list(Filter(parent=run_id))
    second = make_boss(store, "We have gold.", mine=_open_mine(), child=("I found gold.",))
    await second.worker(until_idle=True)
    run = await second.load(run_id)
    assert run.is_waiting  # the call that was cut off may have had its effect
    [item] = run.pending
    assert (item.kind, item.run_id) == (PendingKind.OUTCOME, child.id)
    await second.settle(child.id, item.call_id, result="gold", by="ann")
    await second.worker(until_idle=True)
    run = await second.load(run_id)
    assert (run.output, len(notes(run))) == ("We have gold.", 1)


async def test_a_drained_worker_leaves_background_runs_between_two_steps(store):
    """The call in flight ends first, so no outcome is unknown, and another worker finishes both runs."""
    mine = Mine()
    first = make_boss(store, BEGIN, "Too early.", mine=mine)
    run_id = (await first.submit("Get gold.", id="job")).id
    async with anyio.create_task_group() as tasks:

        async def work():
            await first.worker(drain_s=HANG_S)

        tasks.start_soon(work)
        await mine.begun.wait()
        await reached(first, run_id, lambda run: run.state is State.REFLECT)
        tasks.cancel_scope.cancel()
        with anyio.CancelScope(shield=True):
            await anyio.sleep(0.1)  # the drain begins
            mine.go.set()
    child = await first.load(f"{run_id}.t1.0")
    assert (mine.effects, child.is_over) == (1, False)
    second = make_boss(store, "We have gold.", mine=mine, child=("I found gold.",))
    await second.worker(until_idle=True)
    run = await second.load(run_id)
    assert (run.output, mine.effects) == ("We have gold.", 1)
    assert (await second.replay(run_id)).is_faithful


async def test_a_cancelled_run_cancels_its_background_runs(store):
    """The journal of a cancelled run says what its background runs did, and none of them goes on."""
    mine = Mine()
    boss = make_boss(store, BEGIN, "Too early.", mine=mine)
    async with anyio.create_task_group() as tasks:
        run_id = (await boss.submit("Get gold.", id="job")).id
        tasks.start_soon(boss.resume, run_id)
        await mine.begun.wait()
        await boss.cancel(run_id, by="ann")
    run, child = await boss.load(run_id), await boss.load(f"{run_id}.t1.0")
    assert (run.stop_reason, child.stop_reason) == (StopReason.CANCELLED, StopReason.CANCELLED)
    [left] = run.background.values()
    assert left.result.outcome is Outcome.UNKNOWN
    assert "dig" in left.result.content
    assert run.usage.tokens > child.usage.tokens > 0


async def test_a_parked_run_that_is_cancelled_cancels_its_background_runs(store):
    """Also if no program executes them now."""

    @tool(external=True)
    def ask() -> str:
        """Ask."""

    clerk = Agent(ScriptedModel(say("", call("ask"))), tools=[ask], name="clerk")
    replies = say("", call("clerk", query="Pay.")), "Too early."
    boss = Agent(ScriptedModel(*replies), tools=[clerk.as_tool(background=True)], name="boss", store=store)
    run = await boss.run("Pay.")
    assert run.is_waiting
    await boss.runs.cancel(run.id, by="ann")
    run = await boss.load(run.id)
    child = await boss.load(f"{run.id}.t1.0")
    assert (run.stop_reason, child.stop_reason) == (StopReason.CANCELLED, StopReason.CANCELLED)
    assert run.background["t1.0"].result.outcome is Outcome.CANCELLED


async def test_a_run_that_fails_cancels_its_background_runs(store):
    """A limit that ends the parent run ends those in the background, and counts what they have spent."""
    mine = Mine()
    boss = make_boss(store, BEGIN, say("", call("look")), mine=mine, limits=Limits(turns=1))
    run = await boss.run("Get gold.")
    assert (run.state, run.stop_reason) == (State.ERROR, StopReason.MAX_TURNS)
    assert run.background["t1.0"].result is not None
    assert (await boss.load(f"{run.id}.t1.0")).stop_reason is StopReason.CANCELLED


async def test_a_model_cancels_a_background_run(store):
    """What it did comes as a message, as at any other end."""
    mine = Mine()
    cancel = say("", call("cancel_run", run="t1.0", reason="not needed"))
    boss = make_boss(store, BEGIN, cancel, "Bye.", "Bye again.", mine=mine)
    run = await boss.run("Get gold.")
    assert run.state is State.DONE
    assert (await boss.load(f"{run.id}.t1.0")).stop_reason is StopReason.CANCELLED
    assert "cancelled by its caller: not needed" in notes(run)[0]


async def test_a_model_sends_a_message_to_a_background_run(store):
    """The background run reads it before its next request."""
    mine = Mine()
    seen = []

    def think(request):
        seen.append([message.text for message in request.messages])
        return DIG if len(seen) == 1 else "I found gold."

    @tool
    async def let_go() -> str:
        """Let the digger go on."""
        await mine.begun.wait()
        mine.go.set()
        return "ok"

    digger = Agent(FunctionModel(think), tools=[mine.dig], name="digger")
    message = say("", call("message_run", run="t1.0", text="Only gold."), call("message_run", run="t9.9", text="x"))
    model = ScriptedModel(BEGIN, message, say("", call("let_go")), "Bye.", "Bye again.")
    boss = Agent(model, tools=[digger.as_tool(background=True), let_go], name="boss", store=store)
    run = await boss.run("Get gold.")
    assert results(run)["t2.0"].content == "Sent."
    assert "those that go on: t1.0" in results(run)["t2.1"].content
    assert (seen[-1][0], "Only gold." in seen[-1]) == ('{\n  "query": "Find gold."\n}', True)


async def test_a_background_run_spends_from_the_budget_of_its_parent(store):
    """It has no more tokens than the parent run has left."""
    boss = make_boss(
        store, BEGIN, "Too early.", "Done.", child=(DIG, DIG, DIG, DIG, "Gold."), limits=Limits(tool_calls=3)
    )
    run = await boss.run("Get gold.")
    child = await boss.load(f"{run.id}.t1.0")
    assert len([each for each in child.calls if each.outcome is Outcome.DONE]) == 2
    assert run.tool_call_count == 3


async def test_steps_drive_background_runs_only_while_the_run_is_blocked(store):
    """`steps` holds nothing between two steps, and a background run stops between two of its own."""
    boss = make_boss(store, BEGIN, "Too early.", "Done.")
    async for run in boss.steps(boss.start("Get gold.")):
        last = run
    assert last.output == "Done."


async def test_a_pause_stops_background_runs_between_two_steps(store):
    """They go on with the run that began them."""
    mine = Mine()
    boss = make_boss(store, BEGIN, "Too early.", "Done.", mine=mine)
    async with anyio.create_task_group() as tasks:
        run_id = (await boss.submit("Get gold.", id="job")).id
        tasks.start_soon(boss.resume, run_id)
        await mine.begun.wait()
        await boss.pause(run_id, by="ann")
        await reached(boss, run_id, lambda run: run.paused is not None)
        mine.go.set()
    run, child = await boss.load(run_id), await boss.load(f"{run_id}.t1.0")
    assert run.paused is not None
    assert not child.is_over
    assert mine.effects == 1
    assert (await boss.resume(run_id)).output == "Done."
    assert mine.effects == 1


async def test_a_model_that_raises_is_the_result_of_its_run(store):
    """The parent reads that it failed."""
    boss = make_boss(store, BEGIN, "Too early.", "Done.", child=(DIG,))
    run = await boss.run("Get gold.")
    assert run.output == "Done."
    assert "the agent failed (AssertionError)" in notes(run)[0]


async def test_a_deleted_background_run_is_reported_as_unknown(store):
    """A fork has the calls of its origin, and not their background runs."""
    mine = Mine()
    boss = make_boss(store, BEGIN, "Too early.", mine=mine)
    run_id = await cut_off(boss, mine)
    fork = await boss.fork(run_id)
    other = boss.with_(model=ScriptedModel("Done."))
    run = await other.resume(fork.id)
    assert run.output == "Done."
    assert run.background["t1.0"].result.outcome is Outcome.UNKNOWN
    await boss.cancel(run_id)


async def test_agents_without_background_tools_have_no_further_tools():
    """The tools for background runs are there only with a tool that begins some."""
    child = Agent(ScriptedModel("x"), name="child")
    assert Agent(ScriptedModel("x"), tools=[child.as_tool()], store=MemoryStore()).tools.names == ("child",)
    names = Agent(ScriptedModel("x"), tools=[child.as_tool(background=True)], store=MemoryStore()).tools.names
    assert names == ("child", "wait", "message_run", "cancel_run")


@pytest.mark.parametrize("given", ["yes", 1])
def test_background_is_true_or_false(given):
    """Another value is refused."""
    with pytest.raises(Exception, match="background"):
        Agent(ScriptedModel("x"), name="child").as_tool(background=given)


async def test_a_function_in_the_background_is_called_once(store):
    """Its result comes as a message, and its errors do as well."""
    done = []

    @tool(background=True, requires_approval=lambda a: a.cents > 100)
    async def pay(ctx: RunContext[str], to: str, cents: int = 5) -> str:
        """Pay somebody."""
        done.append((ctx.deps, ctx.idempotency_key, to, cents))
        if to == "Bob":
            raise ValueError("Bob has no account")
        return f"paid {to}"

    pays = [
        call("pay", to="Ann"),
        call("pay", to="Bob"),
        call("pay", to="Cid", cents="many"),
        call("pay", to="Dan", cents=900),
    ]
    boss = Agent(
        ScriptedModel(say("", *pays), "Too early.", "Too early.", "Done."), tools=[pay], name="boss", store=store
    )
    assert boss.tools.names == ("wait", "message_run", "cancel_run", "pay")
    run = await boss.run("Pay.", deps="bank")
    assert results(run)["t1.2"].error_type == "invalid_arguments"
    [item] = run.pending
    assert (item.run_id, item.arguments) == (f"{run.id}.t1.3", {"to": "Dan", "cents": 900})
    await boss.reject(item.run_id, item.call_id, message="too much")
    run = await boss.resume(run.id, deps="bank")
    assert run.output == "Done."
    ended = {key: each.result for key, each in run.background.items()}
    assert [(each.outcome, each.tool) for _, each in sorted(ended.items())] == [
        (Outcome.DONE, "pay"),
        (Outcome.FAILED, "pay"),
        (Outcome.REJECTED, "pay"),
    ]
    assert ended["t1.0"].content == "paid Ann"
    assert "Bob has no account" in ended["t1.1"].content
    assert "too much" in ended["t1.3"].content
    assert sorted(each[2] for each in done) == ["Ann", "Bob"]
    assert {each[0] for each in done} == {"bank"}


async def test_a_step_of_a_flow_is_not_in_the_background():
    """Other steps depend on its result."""
    child = Agent(ScriptedModel("x"), name="child")
    with pytest.raises(MisuseError, match="leave out background=True"):
        Flow([agent_step(child, prompt=lambda: "x", background=True)])
