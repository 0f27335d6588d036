"""Calls that a person has to allow: asked once, run once, in the order of the calls, and no answer is a no."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from itertools import permutations

import anyio
import pytest

from agentfsm import Agent, ConflictError, Limits, MisuseError, Outcome, PendingKind, Run, RunError, State, tool
from agentfsm.core.calls import Phase
from agentfsm.core.effects import Wait
from agentfsm.core.events import ApprovalAsked, ApprovalGiven, Event, ToolFinished, ToolStarted
from agentfsm.ports import Lease, PendingWrite
from agentfsm.stores import MemoryStore
from agentfsm.testing import ScriptedModel, call, raw_call, say
from tests.support.checks import HANG_S, names, results_of, sound, sound_run, virtually

WEEK_S = 7 * 86_400


class World:
    """Tools that note what they did."""

    def __init__(self, **options: object) -> None:
        """Make the tools; the options are those of the tool that needs approval."""
        self.did: list[str] = []

        async def pay(to: str = "", cents: int = 0) -> str:
            self.did.append(f"pay {to}")
            return f"paid {to}"

        async def read(at: str = "") -> str:
            self.did.append(f"read {at}")
            return f"read {at}"

        async def write(at: str = "") -> str:
            self.did.append(f"write {at}")
            return f"wrote {at}"

        self.tools = [tool(requires_approval=True, **options)(pay), tool(read_only=True)(read), tool(write)]

    def agent(self, store, *lines: object, **options: object) -> Agent:
        """A new agent with these tools."""
        return Agent(ScriptedModel(*lines), tools=self.tools, store=store, **options)


async def test_a_call_that_needs_approval_is_shown_and_not_run(store):
    """The run waits, and says for what: kind, call, tool, exact arguments, and until when."""
    world = World()
    agent = world.agent(store, say("", call("pay", to="Ann", cents=500)))
    run = await agent.run("pay Ann")
    assert (run.state, run.is_waiting, world.did) == (State.ACT, True, [])
    (item,) = run.pending
    assert (item.kind, item.run_id, item.call_id, item.tool) == (PendingKind.APPROVAL, run.id, "t1.0", "pay")
    assert item.arguments == {"to": "Ann", "cents": 500}
    assert item.expires_at == pytest.approx(run.updated_at + WEEK_S, abs=60)
    assert run.effect == Wait(pending=run.pending)
    with pytest.raises(RunError, match=r"approval of pay \(t1\.0\)"):
        _ = run.output
    await sound(agent, run)


async def test_an_approved_call_runs_once_by_whichever_agent_resumes(store):
    """The decision and the resume may come from other agents, on the same store."""
    world = World()
    run = await world.agent(store, say("", call("pay", to="Ann"))).run("pay")
    await world.agent(store).approve(run.id, "t1.0", by="bob")
    other = world.agent(store, say("done", expect="paid Ann"))
    done = await other.resume(run.id)
    assert (done.output, world.did) == ("done", ["pay Ann"])
    assert await other.resume(run.id) == done
    assert world.did == ["pay Ann"]
    (given,) = [event for event in await other.history(run.id) if isinstance(event, ApprovalGiven)]
    assert (given.call_id, given.by) == ("t1.0", "bob")
    await sound(other, done)


async def test_a_rejected_call_is_told_to_the_model(store):
    """It does not run, the model reads why, and the journal says who."""
    world = World()
    run = await world.agent(store, say("", call("pay", to="Ann"))).run("pay")
    other = world.agent(store, say("done", expect="too much"))
    await other.reject(run.id, "t1.0", message="too much", by="bob")
    done = await other.resume(run.id)
    assert (done.output, world.did) == ("done", [])
    (result,) = results_of(done.messages)
    assert (result.outcome, result.call_id) == (Outcome.REJECTED, "t1.0")
    (finished,) = [event for event in await other.history(run.id) if isinstance(event, ToolFinished)]
    assert finished.by == "bob"
    assert done.consecutive_errors == 0
    await sound(other, done)


async def test_all_approvals_of_a_turn_are_asked_at_its_start(store):
    """Before any call runs, so that a person sees everything at once."""
    world = World()
    lines = say("", call("read", at="a"), call("pay", to="Ann"), call("write", at="b"), call("pay", to="Bob"))
    agent = world.agent(store, lines, "done")
    run = await agent.run("go")
    events = names(await agent.history(run.id))
    assert events[:5] == ["Observed", "ToolsChosen", "ApprovalAsked", "ApprovalAsked", "ToolFinished"]
    assert [item.call_id for item in run.pending] == ["t1.1", "t1.3"]
    assert world.did == ["read a"]


async def test_calls_before_the_first_undecided_one_run_and_those_behind_wait(store):
    """The barrier rule: nothing overtakes a call that a person has not decided."""
    world = World()
    lines = say(
        "",
        call("read", at="a"),
        call("write", at="b"),
        call("pay", to="Ann"),
        call("read", at="c"),
        call("pay", to="Bob"),
        call("write", at="d"),
    )
    agent = world.agent(store, lines, "done")
    run = await agent.run("go")
    assert world.did == ["read a", "write b"]
    await agent.approve(run.id, "t1.2")
    run = await agent.resume(run.id)
    assert world.did == ["read a", "write b", "pay Ann", "read c"]
    assert [item.call_id for item in run.pending] == ["t1.4"]
    await agent.reject(run.id, "t1.4")
    run = await agent.resume(run.id)
    assert world.did == ["read a", "write b", "pay Ann", "read c", "write d"]
    assert run.output == "done"
    assert [result.call_id for result in results_of(run.messages)] == [f"t1.{n}" for n in range(6)]
    await sound(agent, run)


async def test_a_result_knows_its_place_in_the_reply_whenever_it_came(store):
    """Also one that a person rejected, and those that ran when the others had their results."""
    world = World()
    lines = say("", call("read"), call("pay", to="Ann"), call("pay", to="Bob"), call("write"))
    agent = world.agent(store, lines, "done")
    run = await agent.run("go")
    await agent.reject(run.id, "t1.1")
    await agent.approve(run.id, "t1.2")
    done = await agent.resume(run.id)
    assert [(result.call_id, result.index) for result in results_of(done.messages)] == [
        (f"t1.{n}", n) for n in range(4)
    ]


@pytest.mark.parametrize("order", list(permutations(range(3))))
async def test_decisions_may_come_in_any_order(store, order):
    """Whoever decides first, the calls run in their own order, each once."""
    world = World()
    agent = world.agent(store, say("", *[call("pay", to=str(n)) for n in range(3)]), "done")
    run = await agent.run("go")
    for number in order:
        if number == 1:
            await agent.reject(run.id, f"t1.{number}")
        else:
            await agent.approve(run.id, f"t1.{number}")
        run = await agent.resume(run.id)
        sound_run(run)
    assert run.output == "done"
    assert world.did == ["pay 0", "pay 2"]
    assert [r.outcome for r in run.calls] == [Outcome.DONE, Outcome.REJECTED, Outcome.DONE]
    await sound(agent, run)


async def test_all_decisions_before_one_resume(store):
    """A person may decide everything, and one resume does it."""
    world = World()
    agent = world.agent(store, say("", *[call("pay", to=str(n)) for n in range(4)]), "done")
    run = await agent.run("go")
    for number in (3, 1, 0, 2):
        await agent.approve(run.id, f"t1.{number}", by="ann")
    run = await agent.resume(run.id)
    assert (run.output, world.did) == ("done", [f"pay {n}" for n in range(4)])


# Decisions that come twice, late or for nothing


async def test_the_first_decision_wins(store):
    """A contrary one is a conflict that shows the first; the same one by the same person is accepted."""
    world = World()
    agent = world.agent(store, say("", call("pay", to="Ann"), call("pay", to="Bob")), "done")
    run = await agent.run("go")
    await agent.approve(run.id, "t1.0", by="ann")
    await agent.approve(run.id, "t1.0", by="ann")
    with pytest.raises(ConflictError, match="ann"):
        await agent.reject(run.id, "t1.0", by="bob")
    await agent.reject(run.id, "t1.1", by="bob")
    with pytest.raises(ConflictError, match="bob"):
        await agent.approve(run.id, "t1.1", by="ann")
    run = await agent.resume(run.id)
    assert world.did == ["pay Ann"]
    given = [event for event in await agent.history(run.id) if isinstance(event, ApprovalGiven)]
    assert [event.by for event in given] == ["ann"]


async def test_racing_approvers_start_a_call_once(store):
    """Ten people and ten workers at the same moment: one effect."""
    world = World()
    agent = world.agent(store, say("", call("pay", to="Ann")), "done")
    run = await agent.run("go")

    async def decide(number: int) -> None:
        with contextlib.suppress(ConflictError, MisuseError):  # too late
            await agent.approve(run.id, "t1.0", by=str(number))
        await agent.resume(run.id)

    with anyio.fail_after(HANG_S):
        async with anyio.create_task_group() as tasks:
            for number in range(10):
                tasks.start_soon(decide, number)
    assert world.did == ["pay Ann"]
    assert (await agent.load(run.id)).output == "done"


@pytest.mark.parametrize("call_id", ["t1.1", "t9.0", "", "nonsense", "t1.0 "])
async def test_a_decision_on_a_call_that_is_not_asked_about_is_misuse(store, call_id):
    """The error says what the run waits for."""
    world = World()
    agent = world.agent(store, say("", call("pay", to="Ann"), call("write", at="x")), "done")
    run = await agent.run("go")
    for decide in (agent.approve, agent.reject):
        with pytest.raises(MisuseError, match=r"approval of t1\.0"):
            await decide(run.id, call_id)


async def test_a_decision_after_the_fact_is_refused(store):
    """A call that has run cannot be rejected any more, and a run that is over takes no decision."""
    world = World()
    agent = world.agent(store, say("", call("pay", to="Ann")), "done")
    run = await agent.run("go")
    await agent.approve(run.id, "t1.0")
    await agent.resume(run.id)
    for decide in (agent.approve, agent.reject):
        with pytest.raises((MisuseError, ConflictError)):
            await decide(run.id, "t1.0")


def test_no_answer_in_time_is_a_no():
    """When the time is up the call is rejected at the next resume, and a late yes is refused."""

    async def play(store, clock):
        world = World(approval_expires_s=3_600)
        agent = world.agent(store, say("", call("pay", to="Ann")), say("done", expect="in time"), clock=clock)
        run = await agent.run("pay")
        assert run.pending[0].expires_at == clock.now() + 3_600
        await anyio.sleep(3_599)
        assert await agent.resume(run.id) == run
        await anyio.sleep(1)
        with pytest.raises(ConflictError, match="time is up"):
            await agent.approve(run.id, "t1.0")
        done = await agent.resume(run.id)
        assert (done.output, world.did) == ("done", [])
        assert [r.outcome for r in done.calls] == [Outcome.REJECTED]
        await sound(agent, done)

    virtually(play)


def test_a_yes_in_time_counts_whenever_the_run_is_resumed():
    """It is the answer that has to come in time, not the worker."""

    async def play(store, clock):
        world = World(approval_expires_s=3_600)
        agent = world.agent(store, say("", call("pay", to="Ann"), call("pay", to="Bob")), "done", clock=clock)
        run = await agent.run("pay")
        await agent.approve(run.id, "t1.0")
        await anyio.sleep(7_200)
        done = await agent.resume(run.id)
        assert (done.output, world.did) == ("done", ["pay Ann"])
        assert [r.outcome for r in done.calls] == [Outcome.DONE, Outcome.REJECTED]

    virtually(play)


def test_an_approval_expires_after_a_week_by_default():
    """A holiday weekend is covered."""

    async def play(store, clock):
        world = World()
        agent = world.agent(store, say("", call("pay")), "done", clock=clock)
        run = await agent.run("pay")
        assert run.pending[0].expires_at == clock.now() + WEEK_S
        await anyio.sleep(WEEK_S - 1)
        await agent.approve(run.id, "t1.0")
        assert (await agent.resume(run.id)).output == "done"

    virtually(play)


# Spent in the append that starts the call


class Spy(MemoryStore):
    """A store that notes which events were appended together."""

    def __init__(self) -> None:
        """Begin with nothing."""
        super().__init__()
        self.appends: list[tuple[list[str], tuple[int, ...]]] = []

    def append(
        self, lease: Lease, run: Run, events: Sequence[Event], *, taken: Sequence[int] = (), final: bool = False
    ) -> PendingWrite:
        """Note, and pass on."""
        self.appends.append((names(events), tuple(taken)))
        return super().append(lease, run, events, taken=taken, final=final)


async def test_an_approval_is_spent_in_the_append_that_starts_its_call():
    """No crash can fall between the two: yes, start and the struck inbox row are one transaction."""
    store, world = Spy(), World()
    agent = world.agent(store, say("", call("pay", to="Ann"), call("pay", to="Bob")), "done")
    run = await agent.run("go")
    assert (["ApprovalAsked", "ApprovalAsked"], ()) in store.appends
    await agent.approve(run.id, "t1.1")
    await agent.approve(run.id, "t1.0")
    rows = {row.item.call_id: row.number for row in await store.inbox(run.id)}
    await agent.resume(run.id)
    starts = [append for append in store.appends if "ToolStarted" in append[0]]
    assert starts == [
        (["ApprovalGiven", "ToolStarted"], (rows["t1.0"],)),
        (["ApprovalGiven", "ToolStarted"], (rows["t1.1"],)),
    ]
    assert await store.inbox(run.id) == ()


async def test_the_journal_tells_the_life_of_an_approved_call_in_order(store):
    """Asked, given, started, finished."""
    world = World()
    agent = world.agent(store, say("", call("pay", to="Ann")), "done")
    run = await agent.run("go")
    await agent.approve(run.id, "t1.0")
    await agent.resume(run.id)
    events = await agent.history(run.id)
    life = [type(event) for event in events if isinstance(event, ApprovalAsked | ApprovalGiven | ToolStarted)]
    assert life == [ApprovalAsked, ApprovalGiven, ToolStarted]
    assert names(events).index("ToolStarted") < names(events).index("ToolFinished")


@pytest.mark.parametrize("options", [{"read_only": True}, {"idempotent": True}, {"concurrency_safe": True}], ids=str)
async def test_any_tool_may_need_approval(store, options):
    """Also one that changes nothing, or may run beside others."""
    world = World(**options)
    agent = world.agent(store, say("", call("pay", to="Ann"), call("pay", to="Bob")), "done")
    run = await agent.run("go")
    assert world.did == []
    await agent.approve(run.id, "t1.0")
    await agent.approve(run.id, "t1.1")
    run = await agent.resume(run.id)
    assert (run.output, sorted(world.did)) == ("done", ["pay Ann", "pay Bob"])
    assert await store.inbox(run.id) == ()
    await sound(agent, run)


# With other arguments


@pytest.mark.parametrize("options", [{}, {"read_only": True}], ids=str)
async def test_a_person_may_change_the_arguments(store, options):
    """What runs, what the model reads of its own call, and what is recorded are the person's arguments."""
    world = World(**options)
    agent = world.agent(store, say("", call("pay", to="Ann", cents=500), call("pay", to="Bob")), "done")
    run = await agent.run("go")
    await agent.approve(run.id, "t1.0", by="eve", arguments={"to": "Änn"})
    await agent.approve(run.id, "t1.1", by="eve")
    done = await agent.resume(run.id)
    assert (done.output, sorted(world.did)) == ("done", ["pay Bob", "pay Änn"])
    assert [record.arguments for record in done.calls] == [{"to": "Änn"}, {"to": "Bob"}]
    assert [asked.arguments for asked in done.messages[1].calls] == ['{"to": "Änn"}', '{"to": "Bob"}']
    first, second = [event for event in await agent.history(run.id) if isinstance(event, ApprovalGiven)]
    assert (first.by, first.arguments, second.arguments) == ("eve", '{"to": "Änn"}', None)
    await sound(agent, done)


@pytest.mark.parametrize(
    "arguments", [{"cents": "much"}, {"whom": "Ann"}, {"cents": float("nan")}, {"to": {1}}], ids=str
)
async def test_a_persons_arguments_have_to_fit(store, arguments):
    """Whoever has the tool is told at once, and has decided nothing yet."""
    world = World()
    agent = world.agent(store, say("", call("pay", to="Ann")), "done")
    run = await agent.run("go")
    with pytest.raises(MisuseError):
        await agent.approve(run.id, "t1.0", arguments=arguments)
    assert await store.inbox(run.id) == ()
    await agent.approve(run.id, "t1.0", arguments={"to": "Bob"})
    assert (await agent.resume(run.id)).output == "done"
    assert world.did == ["pay Bob"]


async def test_arguments_that_nobody_could_check_are_checked_when_the_call_runs(store):
    """An agent without the tool may approve with any arguments: what does not fit does not run, and is asked again."""
    world = World()
    agent = world.agent(store, say("", call("pay", to="Ann")), "done")
    run = await agent.run("go")
    await Agent(ScriptedModel(), store=store).approve(run.id, "t1.0", arguments={"cents": "much"})
    run = await agent.resume(run.id)
    assert (run.is_waiting, world.did) == (True, [])
    assert "cents" in run.pending[0].error
    await agent.reject(run.id, "t1.0")
    await sound(agent, await agent.resume(run.id))


# What a person is shown, and who is asked


async def test_a_tool_says_what_the_call_would_do(store):
    """In words made of the validated arguments, defaults included; where that breaks, the person is asked as well."""
    world = World(describe=lambda a: f"Pays {a.cents} cents to {a.to[0]}.")
    agent = world.agent(store, say("", call("pay", to="Ann"), call("pay")), "done")
    run = await agent.run("go")
    first, second = run.pending
    assert first.description == "Pays 0 cents to A."
    assert "IndexError" in second.description
    assert (await agent.load(run.id)).pending == run.pending


async def test_only_the_calls_that_the_tool_picks_are_asked_about(store):
    """Small ones run at once; where the picking breaks, a person is asked."""
    world = World()
    picked = World().tools[0]

    def large(a) -> bool:
        return len(a.to) > a.cents or 1 / (a.cents - 1) < 0

    world.tools[0] = tool(name="pay", requires_approval=large)(picked.function)
    lines = say("", call("pay", to="Ann", cents=5), call("pay", to="Bob", cents=2), call("pay", cents=1))
    run = await world.agent(store, lines).run("go")
    assert [item.call_id for item in run.pending] == ["t1.1", "t1.2"]
    assert [entry.phase for entry in run.open] == [Phase.FINISHED, Phase.AWAITING_APPROVAL, Phase.AWAITING_APPROVAL]


# Calls that nobody need be asked about


async def test_a_call_that_cannot_run_asks_nobody(store):
    """Bad arguments are answered with their errors at once."""
    world = World()
    lines = say("", call("pay", cents="much"), raw_call("pay", "{"), call("pya"))
    agent = world.agent(store, lines, "done")
    run = await agent.run("go")
    assert run.output == "done"
    assert [r.outcome for r in run.calls] == [Outcome.FAILED] * 3
    assert "ApprovalAsked" not in names(await agent.history(run.id))


async def test_a_withdrawn_tool_asks_nobody(store):
    """A call that will not be run whatever a person says is answered without asking them."""
    world = World()
    agent = world.agent(store, *[say("", call("pay", to="Ann"))] * 9, limits=Limits(turns=9))
    run = await agent.run("go")
    for _ in range(9):
        if run.is_over or "pay" in run.disabled:
            break
        await agent.approve(run.id, run.pending[0].call_id)
        run = await agent.resume(run.id)
    assert "pay" in run.disabled
    assert run.pending == ()
    assert run.is_over


async def test_a_waiting_run_can_be_stepped_through_its_decisions(store):
    """`step` does what one decision allows, and `steps` ends where the next is needed."""
    world = World()
    agent = world.agent(store, say("", call("pay", to="Ann"), call("pay", to="Bob")), "done")
    run = [each async for each in agent.steps(agent.start("go"))][-1]
    assert run.is_waiting
    await agent.approve(run.id, "t1.0")
    seen = [each async for each in agent.steps(run)]
    assert world.did == ["pay Ann"]
    assert seen[-1].is_waiting
    await agent.approve(run.id, "t1.1")
    seen = [each async for each in agent.steps(seen[-1])]
    assert seen[-1].output == "done"
    assert world.did == ["pay Ann", "pay Bob"]
