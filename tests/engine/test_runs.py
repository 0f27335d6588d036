"""`Runs`: what can be done with the runs of a store that needs no agent, in every store."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import attrs
import pytest

from agentfsm import (
    Agent,
    AssistantMessage,
    ConflictError,
    Filter,
    InputRequired,
    MisuseError,
    Outcome,
    PendingKind,
    Question,
    Run,
    RunContext,
    RunNotFoundError,
    Runs,
    State,
    StopReason,
    ToolCall,
    ask_user,
    tool,
    wait,
)
from agentfsm.core.events import ApprovalAsked, Observed, ToolFinished, ToolsChosen
from agentfsm.core.json_text import round_timestamp
from agentfsm.ports import Clock, Feedback, Lease
from agentfsm.stores import MemoryStore, PostgresStore, RedisStore
from agentfsm.testing import ScriptedModel, call, say
from tests.support.checks import names, results_of, sound
from tests.support.database_servers import empty_schema


class Bank:
    """A tool that pays after an approval, and notes what it paid."""

    def __init__(self) -> None:
        self.paid: list[tuple[str, int]] = []

        @tool(requires_approval=True)
        async def pay(to: str, cents: int = 100) -> str:
            self.paid.append((to, cents))
            return f"paid {cents} to {to}"

        self.tool = pay

    def agent(self, *replies: object, **options: Any) -> Agent:
        """Return an agent with this tool."""
        return Agent(ScriptedModel(*replies), tools=[self.tool], **options)

    async def ask(self, store: Any, run_id: str | None = None, **arguments: Any) -> Run:
        """Return a run that waits for the approval of a payment."""
        return await self.agent(say("", call("pay", **(arguments or {"to": "Ann"}))), store=store).run("go", id=run_id)

    async def resume(self, store: Any, run: Run) -> Run:
        """Go on with a run, as a worker that has the agent does."""
        return await self.agent("done", store=store).resume(run.id)


class StoppedClock(Clock):
    """A clock that stands still."""

    def now(self) -> float:
        """The same moment for ever."""
        return 1_800_000_000.0

    def monotonic(self) -> float:
        """The same moment for ever."""
        return 0.0


# Approvals with edited arguments.


async def test_edited_arguments_that_fit_are_what_runs(store):
    """The client has no tool to validate them against, and the worker that takes up the call has."""
    bank = Bank()
    run = await bank.ask(store)
    await Runs(store).approve(run.id, "t1.0", by="bob", arguments={"to": "Eve", "cents": 5})
    done = await bank.resume(store, run)
    assert (done.output, bank.paid) == ("done", [("Eve", 5)])
    assert names(await Runs(store).history(run.id))[1:6] == [
        "ToolsChosen",
        "ApprovalAsked",
        "ApprovalGiven",
        "ToolStarted",
        "ToolFinished",
    ]


async def test_edited_arguments_that_do_not_fit_are_asked_about_again(store):
    """The call does not run, the question names the error, and a second approval runs the call once."""
    bank, runs = Bank(), Runs(store)
    first = await bank.ask(store)
    await runs.approve(first.id, "t1.0", by="bob", arguments={"cents": "many"})
    again = await bank.resume(store, first)
    (item,) = again.pending
    assert (again.is_waiting, bank.paid) == (True, [])
    assert item.error.startswith("not run as approved by bob: the arguments of pay do not fit:\n- ")
    assert "- to: required, but missing" in item.error
    assert (item.arguments, item.digest) == ({"to": "Ann"}, first.pending[0].digest)
    assert item.expires_at > first.pending[0].expires_at
    assert (await runs.load(first.id)).pending == again.pending
    assert (await bank.resume(store, first)).version == again.version, "it is asked about once"
    await runs.approve(first.id, "t1.0", by="bob", arguments={"to": "Eve"}, digest=item.digest)
    done = await bank.resume(store, first)
    assert (done.output, bank.paid) == ("done", [("Eve", 100)])
    asked = [event for event in await runs.history(first.id) if isinstance(event, ApprovalAsked)]
    assert [event.error for event in asked] == ["", item.error]
    (record,) = await runs.audit(first.id)
    assert (record.approved_by, record.arguments, record.proposed) == (
        "bob",
        {"to": "Eve"},
        {"to": "Ann"},
    )
    await sound(bank.agent(store=store), done)


async def test_a_question_that_was_repeated_may_be_rejected(store):
    """The model reads the rejection, and nothing of the arguments that did not fit."""
    bank, runs = Bank(), Runs(store)
    run = await bank.ask(store)
    await runs.approve(run.id, "t1.0", arguments={"cents": "many"})
    await bank.resume(store, run)
    await runs.reject(run.id, "t1.0", message="too dear")
    (result,) = results_of((await bank.resume(store, run)).messages)
    assert (result.outcome, bank.paid) == (Outcome.REJECTED, [])
    assert "too dear" in result.content
    assert "many" not in result.content


@pytest.mark.parametrize("is_approved", [True, False], ids=["approve", "reject"])
async def test_a_question_of_format_1_that_was_repeated_can_be_decided(store, is_approved):
    """It had no digest, so one post could decide on it for ever; the repeated question has one."""
    bank, runs = Bank(), Runs(store)
    agent = bank.agent("done", store=store)
    proposed = ToolCall(id="t1.0", name="pay", arguments='{"to": "Ann"}', key="old:t1.0")
    asked = ApprovalAsked(call_id="t1.0", expires_at=await store.now() + 60)
    header = attrs.evolve(agent.start("go", id="old").header, nonce="", format=1)
    events = [Observed(), ToolsChosen(message=AssistantMessage(calls=(proposed,))), asked]
    _, lease = await store.create(header, events=events)
    await store.release(lease).wait()
    await runs.approve("old", "t1.0", arguments={"cents": "many"})
    (item,) = (await agent.resume("old")).pending
    assert (item.error != "", item.digest) == (True, bank.tool.digest_call(proposed))
    if is_approved:
        await runs.approve("old", "t1.0", arguments={"to": "Eve"}, digest=item.digest)
    else:
        await runs.reject("old", "t1.0")
    assert (await agent.resume("old")).output == "done"
    assert bank.paid == ([("Eve", 100)] if is_approved else [])


async def test_the_same_misfit_twice_is_asked_about_twice():
    """Also where the clock stands still: each question has its own deadline, and so its own decision."""
    bank, store = Bank(), MemoryStore(clock=StoppedClock())
    runs = Runs(store)
    run = await bank.ask(store)
    for _ in range(3):
        await runs.approve(run.id, "t1.0", arguments={"cents": "many"})
        assert (await bank.resume(store, run)).pending[0].error
    await runs.approve(run.id, "t1.0")
    assert (await bank.resume(store, run)).output == "done"
    assert bank.paid == [("Ann", 100)]


async def test_tools_at_hand_validate_at_once(store):
    """Those of the run's own agent, and of no other."""
    bank = Bank()
    run = await bank.ask(store)
    knows = Runs(store, tools={"agent": bank.agent().tools})
    with pytest.raises(MisuseError, match=r"t1\.0 was not approved"):
        await knows.approve(run.id, "t1.0", arguments={"cents": "many"})
    await Runs(store, tools={"other": bank.agent().tools}).approve(run.id, "t1.0", arguments={"cents": "many"})
    assert (await bank.resume(store, run)).is_waiting


async def test_a_sub_agents_misfit_is_asked_about_through_its_caller(store):
    """The caller waits again, for the repeated question."""
    bank = Bank()
    helper = bank.agent(say("", call("pay", to="Ann")), "helped", name="helper")
    agent = Agent(ScriptedModel(say("", call("helper", query="pay")), "done"), tools=[helper.as_tool()], store=store)
    run = await agent.run("go")
    (item,) = run.pending
    await Runs(store).approve(item.run_id, item.call_id, arguments={"cents": "many"})
    run = await agent.resume(run.id)
    assert "do not fit" in run.pending[0].error
    await Runs(store).approve(item.run_id, item.call_id, arguments={"to": "Eve"})
    assert (await agent.resume(run.id)).output == "done"
    assert bank.paid == [("Eve", 100)]


# The other decisions.


async def test_an_approval_and_a_rejection(store):
    """The first decision counts; the digest binds it to what was shown."""
    bank, runs = Bank(), Runs(store)
    yes, no = await bank.ask(store), await bank.ask(store)
    with pytest.raises(ConflictError, match="it has changed since it was shown"):
        await runs.approve(yes.id, "t1.0", digest="other")
    await runs.approve(yes.id, "t1.0", by="bob", digest=yes.pending[0].digest)
    await runs.reject(no.id, "t1.0", by="bob", message="no")
    assert [(await bank.resume(store, run)).output for run in (yes, no)] == ["done", "done"]
    assert bank.paid == [("Ann", 100)]
    with pytest.raises(ConflictError, match="decided already by bob"):
        await runs.approve(yes.id, "t1.0")


async def test_the_same_decision_by_another_person_is_refused(store):
    """The second person learns who was first; the first one may say it twice."""
    run, runs = await Bank().ask(store), Runs(store)
    for _ in range(2):
        await runs.approve(run.id, "t1.0", by="ann")
    for by in ("bob", ""):
        with pytest.raises(ConflictError, match=r"t1\.0 was approved already by 'ann'"):
            await runs.approve(run.id, "t1.0", by=by)
    [row] = await store.inbox(run.id)
    assert row.item.by == "ann"


async def test_a_call_that_runs_was_not_decided(store):
    """Whatever is decided of it, the error says that it runs; an approval that was given is told."""
    runs, errors = Runs(store), []

    async def decide(run_id: str, *, approved: bool) -> None:
        verbs = [runs.answer(run_id, "t1.0", "x"), runs.settle(run_id, "t1.0", result="x")]
        for verb in [*verbs, runs.approve(run_id, "t1.0"), runs.reject(run_id, "t1.0")]:
            with pytest.raises(ConflictError) as caught:
                await verb
            errors.append(str(caught.value))
        assert ["executes it; wait for its result, or cancel" in each for each in errors] == (
            [True, True, not approved, not approved]
        )
        assert [each for each in errors if "decided already by ann" in each] == (errors[2:] if approved else [])
        errors.clear()

    @tool
    async def work(ctx: RunContext[Any]) -> str:
        await decide(ctx.run_id, approved=False)
        return "worked"

    @tool(requires_approval=True)
    async def ask(ctx: RunContext[Any]) -> str:
        await decide(ctx.run_id, approved=True)
        return "worked"

    for each in (work, ask):
        agent = Agent(ScriptedModel(say("", call(each.name)), "done"), tools=[each], store=store)
        run = await agent.run("go")
        if run.is_waiting:
            await runs.approve(run.id, "t1.0", by="ann")
            run = await agent.resume(run.id)
        assert [result.content for result in results_of(run.messages)] == ["worked"]
        with pytest.raises(ConflictError, match="it has a result already"):
            await runs.settle(run.id, "t1.0", result="x")


async def test_an_answer_to_the_user_and_to_a_tool(store):
    """The result of `ask_user` is text; what a tool asks in its call is an object that fits."""
    got: list[Any] = []

    @tool
    async def book(ctx: RunContext[Any]) -> str:
        if (seat := ctx.answers.get("seat")) is None:
            schema = {"type": "object", "properties": {"row": {"type": "integer"}}, "required": ["row"]}
            raise InputRequired(Question(key="seat", message="Which row?", schema=schema))
        got.append(seat)
        return "booked"

    runs = Runs(store)
    replies = say("", call("ask_user", question="Where to?"), call("book"))
    agent = Agent(ScriptedModel(replies, "done"), tools=[ask_user, book], store=store)
    run = await agent.run("go")
    await runs.answer(run.id, "t1.0", "Lisbon", by="ann")
    run = await agent.resume(run.id)
    with pytest.raises(MisuseError):
        await runs.answer(run.id, "t1.1", {"row": "window"})
    await runs.answer(run.id, "t1.1", {"row": 7}, digest=run.pending[0].digest)
    assert (await agent.resume(run.id)).output == "done"
    assert [result.content for result in results_of((await runs.load(run.id)).messages)] == ["Lisbon", "booked"]
    assert len(got) == 1


async def test_an_outcome_is_settled(store):
    """A fork's open call may have had its effect: a person says what became of it."""
    bank, runs = Bank(), Runs(store)
    run = await bank.ask(store)
    await runs.approve(run.id, "t1.0")
    done = await bank.resume(store, run)
    started = names(await runs.history(run.id)).index("ToolStarted") + 1
    fork = await bank.agent(store=store).fork(done.id, at=started)
    assert [item.kind for item in fork.pending] == [PendingKind.OUTCOME]
    await runs.settle(fork.id, "t1.0", result="paid after all", by="ann")
    assert (await bank.resume(store, fork)).output == "done"
    (finished,) = [event for event in await runs.history(fork.id) if isinstance(event, ToolFinished)]
    assert (finished.result.content, finished.by) == ("paid after all", "ann")
    with pytest.raises(MisuseError, match="exactly one"):
        await runs.settle(fork.id, "t1.0")


async def test_input_is_sent(store):
    """The run reads it; a second input of the same key is the first one."""
    agent, runs = (
        Agent(ScriptedModel(say("", call("wait", seconds=60, reason="x")), "done"), tools=[wait], store=store),
        Runs(store),
    )
    run = await agent.run("go")
    first = await runs.send(run.id, "news", key="n")
    assert await runs.send(run.id, "other news", key="n") == first
    done = await agent.resume(run.id)
    assert [message.text for message in done.messages if "news" in message.text] == ["news"]
    with pytest.raises(ConflictError):
        await runs.send(run.id, "late")
    with pytest.raises(MisuseError):
        await runs.send(run.id, " ")


# Pause and cancel, where no worker drives the run.


async def test_a_pause_holds_at_once(store):
    """The run waits for `resume`, which needs the agent."""
    agent, runs = Agent(ScriptedModel("done"), store=store), Runs(store)
    run = await agent.submit("go")
    await runs.pause(run.id, by="ann", message="look first")
    run = await runs.load(run.id)
    assert [(item.kind, item.description) for item in run.pending] == [(PendingKind.PAUSE, "paused by ann: look first")]
    assert (await agent.resume(run.id)).output == "done"


async def test_a_cancel_holds_at_once(store):
    """Its open call gets a result, so that the history stays valid; a second cancel changes nothing."""
    bank, runs = Bank(), Runs(store)
    run = await bank.ask(store)
    await runs.cancel(run.id, by="ann", message="enough")
    over = await runs.load(run.id)
    assert (over.stop_reason, over.stop_message) == (StopReason.CANCELLED, "cancelled by ann: enough")
    assert [result.outcome for result in results_of(over.messages)] == [Outcome.SKIPPED]
    await runs.cancel(run.id)
    assert (await runs.load(run.id)).version == over.version
    await sound(bank.agent(store=store), over)


@pytest.mark.parametrize("depth", [1, 2])
async def test_a_cancel_ends_the_agents_below(store, depth):
    """Each of their runs is over, and the results say what they did and what it cost."""
    bank, runs = Bank(), Runs(store)
    agent = bank.agent(say("", call("pay", to="Ann")), name="helper", store=store)
    for level in range(depth):
        agent = Agent(ScriptedModel(say("", call(agent.name))), tools=[_as_tool(agent)], name=f"n{level}", store=store)
    run = await agent.run("go")
    below = run.pending[0].run_id
    assert (await runs.root(below)).id == run.id
    await runs.cancel(run.id)
    over = await runs.load(run.id)
    child = await runs.load((await runs.children(run.id))[0].id)
    assert [each.stop_reason for each in (over, child, await runs.load(below))] == [StopReason.CANCELLED] * 3
    (result,) = results_of(over.messages)
    assert (result.outcome, result.child.run_id) == (Outcome.CANCELLED, child.id)
    assert over.usage.tokens == 15 * (depth + 1)


def _as_tool(agent: Agent) -> Any:
    return agent.as_tool(parameters={"type": "object", "properties": {}})


async def test_a_sub_agents_run_is_not_paused(store):
    """Its caller is the one to pause."""
    bank = Bank()
    helper = bank.agent(say("", call("pay", to="Ann")), name="helper")
    run = await Agent(ScriptedModel(say("", call("helper", query="x"))), tools=[helper.as_tool()], store=store).run(
        "go"
    )
    with pytest.raises(MisuseError, match="pause that one"):
        await Runs(store).pause(run.pending[0].run_id)


async def test_a_run_that_is_driven_is_left_to_its_worker(store):
    """The request waits in its inbox."""
    run = await Bank().ask(store)
    lease = await store.lease(run.id)
    await Runs(store).pause(run.id)
    await Runs(store).cancel(run.id)
    assert not (await Runs(store).load(run.id)).is_over
    assert lease.cancelled or await store.inbox(run.id)
    await store.release(lease).wait()


class AbandonedStore(MemoryStore):
    """A store in which each run was left behind by a worker that died."""

    async def lease(self, run_id: str, **options: Any) -> Lease:
        """Take the lease of a run."""
        lease = await super().lease(run_id, **options)
        lease.abandoned = True
        return lease


@pytest.mark.parametrize(("knows", "outcome"), [(False, Outcome.CANCELLED), (True, Outcome.SKIPPED)])
async def test_without_the_tools_a_call_may_have_begun(knows, outcome):
    """A worker died before a call's start was in the journal: only a tool that is known to write has not begun."""

    @tool
    async def write() -> str:
        return "written"

    store = AbandonedStore()
    agent = Agent(ScriptedModel(say("", call("write"))), tools=[write], store=store, pause_before={State.ACT})
    run = await agent.run("go")
    await Runs(store, tools={"agent": agent.tools} if knows else {}).cancel(run.id)
    (result,) = results_of((await Runs(store).load(run.id)).messages)
    assert result.outcome is outcome
    assert ("is not known" in result.content) is not knows


# Reading and removal.


async def test_reading(store):
    """Lists, headers, events, audits and the wait for an outcome."""
    bank, runs = Bank(), Runs(store)
    helper = bank.agent(say("", call("pay", to="Ann")), "helped", name="helper")
    agent = Agent(ScriptedModel(say("", call("helper", query="x")), "done"), tools=[helper.as_tool()], store=store)
    run = await agent.run("go", user="ann")
    child = run.pending[0].run_id
    assert [line.id for line in await runs.list(subagents=False)] == [run.id]
    assert {line.id for line in await runs.list()} == {run.id, child}
    assert [line.id for line in await runs.list(Filter(parent=run.id))] == [child]
    assert [line.id for line in await runs.children(run.id)] == [child]
    assert ((await runs.header(child)).parent, (await runs.root(child)).id) == (run.id, run.id)
    assert await runs.load(run.id) == await agent.load(run.id)
    assert (await runs.load(run.id, at=1)).version == 1
    assert (await runs.wait(run.id)).is_waiting
    await runs.approve(child, "t1.0")
    await agent.resume(run.id)
    assert [item.version async for item in runs.events(run.id, after=2)] == list(
        range(3, len(await runs.history(run.id)) + 1)
    )
    assert [record.tool for record in await runs.audit(run.id)] == ["helper", "pay"]
    assert sorted([record.tool async for record in runs.audits()]) == ["helper", "pay"]
    assert (await runs.wait(run.id)).state is State.DONE


async def test_removal(store):
    """A run goes with the runs below it; a session whole; what is old and over by its age."""
    bank, runs = Bank(), Runs(store)
    helper = bank.agent(say("", call("pay", to="Ann")), name="helper")
    parent = await Agent(ScriptedModel(say("", call("helper", query="x"))), tools=[helper.as_tool()], store=store).run(
        "go"
    )
    for run_id in ("s1", "s2"):
        await Agent(ScriptedModel("done"), store=store).run("go", id=run_id, session="s")
    await Agent(ScriptedModel("done"), store=store).run("go", id="old")
    assert await runs.delete(parent.id) == 2
    with pytest.raises(RunNotFoundError):
        await runs.delete(parent.id)
    with pytest.raises(ConflictError):
        await runs.delete("s1")
    assert await runs.delete_session("s") == 2
    assert await runs.prune(await store.now() + 60) == 1
    assert await runs.list() == ()


@pytest.mark.parametrize("verb", ["load", "history", "header", "root", "audit", "wait", "pause", "cancel", "delete"])
async def test_a_run_that_is_not_there(store, verb):
    """Each verb says so, and what is no id at all is misuse."""
    with pytest.raises(RunNotFoundError):
        await getattr(Runs(store), verb)("nobody")
    with pytest.raises(MisuseError, match="the id of a run"):
        await getattr(Runs(store), verb)(5)


def test_what_is_no_store():
    """It is refused where the client is made."""
    with pytest.raises(MisuseError, match="give a store"):
        Runs("runs.db")  # type: ignore[arg-type]


async def test_the_client_closes_its_store(tmp_path):
    """At the end of its block."""
    store = MemoryStore()
    async with Runs(store) as runs:
        assert await runs.list() == ()


# Servers.


@pytest.fixture(params=["postgres", "redis"])
def server_store(request) -> Iterable[Any]:
    """A store on a server."""
    if request.param == "redis":
        yield RedisStore(request.getfixturevalue("redis_url"), accept_loss="everything")
        return
    url = request.getfixturevalue("shared_postgres")
    with empty_schema(request.getfixturevalue("postgres_desk")) as schema:
        yield PostgresStore(url, schema=schema)


async def test_a_server_serves_the_same(server_store):
    """Approve after a misfit, pause, cancel with an agent below, and delete."""
    bank = Bank()
    async with Runs(server_store) as runs:
        run = await bank.ask(server_store, "asked")
        await runs.approve(run.id, "t1.0", arguments={"cents": "many"})
        assert "do not fit" in (await bank.resume(server_store, run)).pending[0].error
        await runs.approve(run.id, "t1.0", arguments={"to": "Eve"})
        assert (await bank.resume(server_store, run)).output == "done"
        helper = bank.agent(say("", call("pay", to="Ann")), name="helper")
        model = ScriptedModel(say("", call("helper", query="x")))
        run = await Agent(model, tools=[helper.as_tool()], store=server_store).run("go")
        await runs.pause(run.id)
        assert (await runs.load(run.id)).paused is not None
        await runs.cancel(run.id)
        assert [(await runs.load(name)).stop_reason for name in (run.id, f"{run.id}.t1.0")] == [
            StopReason.CANCELLED
        ] * 2
        assert await runs.delete(run.id) == 2
        assert bank.paid == [("Eve", 100)]


async def test_feedback_is_given_on_runs_that_are_over():
    """By the agent or a client; the time is the store's, and a wrong value is named before anything is written."""
    async with Agent(ScriptedModel("Paid."), store=MemoryStore()) as agent:
        run = await agent.run("Pay Bob.")
        await agent.feedback(run.id, rating=1, comment="wrong account", by="ann")
        await agent.runs.feedback(run.id, rating=5)
        first, second = await agent.runs.list_feedback(run.id)
        assert (first.rating, first.comment, first.by, second) == (
            1,
            "wrong account",
            "ann",
            Feedback(rating=5, at=second.at),
        )
        assert run.created_at <= first.at <= second.at <= round_timestamp(await agent.store.now())
        assert (await agent.load(run.id)).version == run.version
        for wrong in ({"rating": 0}, {"rating": True}, {"rating": 4.5}, {"rating": 3, "comment": "x" * 10_001}):
            with pytest.raises(MisuseError, match=r"Feedback\((rating|comment)="):
                await agent.feedback(run.id, **wrong)
        with pytest.raises(RunNotFoundError):
            await agent.feedback("nowhere", rating=3)
        assert len(await agent.runs.list_feedback(run.id)) == 2
