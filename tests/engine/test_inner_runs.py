"""Runs that the function of a tool or of a step starts: a repeated call resumes them, and they know their caller."""

from __future__ import annotations

from functools import partial

import anyio
import pytest

from agentfsm import (
    Agent,
    ConflictError,
    InputRequired,
    Label,
    MisuseError,
    Outcome,
    Question,
    RunContext,
    State,
    ToolCall,
    ToolQueue,
    ToolRegistry,
    TransientError,
    tool,
)
from agentfsm.core.run_ids import find_caller
from agentfsm.core.trace_context import child_traceparent
from agentfsm.flow import Flow, step
from agentfsm.ports import Emit, Filter, Model, Reply, Request
from agentfsm.releases import Rollout
from agentfsm.stores import MemoryStore
from agentfsm.testing import ScriptedModel, call, say
from agentfsm.tools.executing_call import ExecutingCall
from tests.support.checks import results_of

BUSY = TransientError("busy", retry_after_s=0.0)


class CountedModel(Model):
    """Answers with the number of its requests, so that a second run would show."""

    name = "counted"

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def reply(self, request: Request, emit: Emit | None = None) -> Reply:
        """Return the number of the request."""
        await anyio.lowlevel.checkpoint()
        self.asked.append(request.messages[-1].text)
        return Reply(text=f"answer {len(self.asked)}")


def helper(store, name="helper", **fields):
    """Return an agent whose runs can be counted, and its model."""
    model = CountedModel()
    return Agent(model, name=name, store=store, **fields), model


def caller(store, *tools, name="go", times=1, **fields):
    """Return an agent that calls one tool, and then says so."""
    replies = [say("", call(name)) for _ in range(times)]
    return Agent(ScriptedModel(*replies, "done"), name="outer", store=store, tools=tools, **fields)


async def inner_runs(store):
    """Return the runs in a store that calls have started, by id."""
    return sorted([row.id for row in await store.runs(Filter()) if find_caller(row.id) is not None])


async def test_a_retried_step_resumes_the_run_that_it_started(store):
    """The second attempt gets the finished answer back, and the model is asked once."""
    agent, model = helper(store)
    attempts = []

    @step(idempotent=True, retry=2)
    async def look() -> str:
        found = await agent.run("Look it up")
        attempts.append(found.id)
        if len(attempts) < 3:
            raise BUSY
        return found.output

    run = await Flow([look], store=store).run({})
    assert run.state is State.DONE
    assert run.output == '{"look": "answer 1"}'
    assert (len(attempts), len(set(attempts)), len(model.asked)) == (3, 1, 1)
    inner = await agent.load(attempts[0])
    assert inner.header.caller == f"{run.id}/p1.1"
    assert find_caller(inner.id) == (run.id, "p1.1")
    assert (inner.header.parent, inner.header.depth) == (None, 0)


async def test_several_runs_of_a_call_are_found_in_their_order(store):
    """Also those of two agents."""
    (one, first), (two, second) = helper(store, "one"), helper(store, "two")
    attempts = []

    @tool(read_only=True)
    async def go() -> str:
        """Go."""
        asked = [(one, "a"), (two, "a"), (one, "b"), (one, "a")]
        attempts.append([(await agent.run(prompt)).id for agent, prompt in asked])
        if len(attempts) == 1:
            raise BUSY
        return "gone"

    run = await caller(store, go).run("x")
    assert results_of(run.messages)[0].outcome is Outcome.DONE
    assert attempts[0] == attempts[1]
    assert len(set(attempts[0])) == 4
    assert (first.asked, second.asked) == (["a", "b", "a"], ["a"])
    assert await inner_runs(store) == sorted(attempts[0])


async def test_a_plain_function_may_start_runs(store):
    """`run_sync` in its thread, with an event loop of its own."""
    agent, model = helper(store)
    ids = []

    @tool(idempotent=True)
    def go() -> str:
        """Go."""
        ids.append(agent.run_sync("in a thread").id)
        if len(ids) == 1:
            raise BUSY
        return "gone"

    run = await caller(store, go).run("x")
    assert results_of(run.messages)[0].text.endswith("gone")
    assert (len(ids), len(set(ids)), len(model.asked)) == (2, 1, 1)
    assert find_caller(ids[0]) == (run.id, "t1.0")


async def by_stream(agent):
    """Start and execute a run by `stream`."""
    async with agent.stream("s") as events:
        async for _ in events:
            pass
    return events.run


async def by_steps(agent):
    """Start and execute a run by `start` and `steps`."""
    async for run in agent.steps(agent.start("s")):
        last = run
    return last


async def by_finish(agent):
    """Start and execute a run by `start` and `finish`."""
    return await agent.finish(agent.start("s"))


async def by_submit(agent):
    """Submit a run, have it executed by a worker, and wait for it."""
    run = await agent.submit("s")
    await agent.worker(until_idle=True)
    return await agent.wait(run.id)


@pytest.mark.parametrize("way", [by_stream, by_steps, by_finish, by_submit])
async def test_each_way_to_start_a_run_resumes_it(store, way):
    """The run is the only one of a call that is made twice, and it is executed once."""
    agent, model = helper(store)
    found = []

    @tool(read_only=True)
    async def go() -> str:
        """Go."""
        found.append(await way(agent))
        if len(found) == 1:
            raise BUSY
        return "gone"

    await caller(store, go).run("x")
    assert [each.state for each in found] == [State.DONE, State.DONE]
    assert found[0].id == found[1].id
    assert len(model.asked) == 1


async def test_a_run_that_waits_is_returned_waiting(store):
    """As ever; when the call is repeated after the answer, the same run has it."""
    model = ScriptedModel(say("", call("pay")), "paid")

    @tool(requires_approval=True)
    async def pay() -> str:
        """Pay."""
        return "paid"

    agent, seen = Agent(model, name="payer", store=store, tools=[pay]), []

    @tool(read_only=True)
    async def go(ctx: RunContext[None]) -> str:
        """Go."""
        run = await agent.run("Pay it")
        seen.append(run)
        if run.is_waiting and not ctx.answers:
            raise InputRequired(Question(key="ok", message="Approved?", schema={"type": "object", "properties": {}}))
        return run.state

    outer = caller(store, go)
    run = await outer.run("x")
    assert run.is_waiting
    await agent.approve(seen[0].id, "t1.0")
    await outer.answer(run.id, "t1.0", {})
    run = await outer.resume(run.id)
    assert results_of(run.messages)[0].content == "done"
    assert seen[0].id == seen[1].id


async def test_a_repeated_call_waits_for_the_worker_that_executes_its_run(store):
    """As `resume` does: the run may be in the hands of a worker of its own agent, or of a thread that was left."""
    may_answer = anyio.Event()

    class SlowModel(CountedModel):
        async def reply(self, request: Request, emit: Emit | None = None) -> Reply:
            await may_answer.wait()
            return await super().reply(request, emit)

    model = SlowModel()
    agent, ids = Agent(model, name="helper", store=store), []
    async with anyio.create_task_group() as tasks:

        @tool(read_only=True)
        async def go() -> str:
            """Go."""
            if not ids:
                ids.append((await agent.submit("x")).id)
                began = anyio.Event()

                async def execute():
                    async with agent.stream(await agent.load(ids[0])) as events:
                        began.set()
                        async for _ in events:
                            pass

                tasks.start_soon(execute)
                await began.wait()
                raise BUSY
            may_answer.set()
            run = await agent.run("x")
            ids.append(run.id)
            return run.output

        run = await caller(store, go).run("x")
    assert results_of(run.messages)[0].content == "answer 1"
    assert (ids[0], len(model.asked)) == (ids[1], 1)


async def test_an_id_that_is_given_is_kept(store):
    """It is the caller's, and so is the choice of what a repeat does; the caller is recorded all the same."""
    agent, model = helper(store)

    @tool
    async def go() -> str:
        """Go."""
        return (await agent.run("hello", id="mine")).output

    outer = caller(store, go, times=2)
    run = await outer.run("x")
    assert [each.content for each in results_of(run.messages)] == ["answer 1", "answer 1"]
    assert (await agent.load("mine")).header.caller == f"{run.id}/t1.0"
    assert len(model.asked) == 1


async def test_another_prompt_is_a_conflict_that_says_what_to_do(store):
    """A repeat that asks something else is not given the answer to the first question, and starts no second run."""
    agent, model = helper(store)
    errors = []

    @tool(read_only=True)
    async def go() -> str:
        """Go."""
        try:
            await agent.run(f"attempt {len(errors)}")
        except ConflictError as error:
            errors.append(str(error))
            return "refused"
        errors.append("")
        raise BUSY

    run = await caller(store, go).run("x")
    assert f"call t1.0 of run {run.id} started it before it was repeated" in errors[1]
    assert "give id=" in errors[1]
    assert len(model.asked) == 1


async def test_a_renamed_agent_is_a_conflict_that_names_both(store):
    """A repeat of the call finds the run of the agent's old name, so the work is not begun a second time."""
    (old, done), (new, never) = helper(store, "payer"), helper(store, "cashier")
    errors = []

    @tool(idempotent=True)
    async def go() -> str:
        """Go."""
        if not done.asked:
            await old.run("pay")
            raise BUSY
        try:
            await new.run("pay")
        except ConflictError as error:
            errors.append(str(error))
        return "refused"

    await caller(store, go).run("x")
    assert "exists with agent 'payer', not 'cashier'" in errors[0]
    assert (done.asked, never.asked) == (["pay"], [])
    assert len(await inner_runs(store)) == 1


async def test_an_early_call_of_a_dropped_reply_leaves_nothing_in_the_way(store):
    """The next reply's call has the same id, and other arguments: its run is another one."""
    agent, model = helper(store)

    @tool(read_only=True)
    async def look(what: str) -> str:
        """Look."""
        return (await agent.run(what)).output

    ids = []
    for what in ("a", "b", "a"):
        run = agent.start("x", id="same")
        one = attempt_at(run, call("look", what=what))
        ids.append(one.next_run_id())
    assert ids[0] == ids[2] != ids[1]
    assert not model.asked


def attempt_at(run, scripted):
    """Return an attempt at a call of a run."""
    made = ToolCall(id="t1.0", name=scripted.name, arguments=scripted.arguments)
    return ExecutingCall(run=run, call=made, own_labels=tuple, on_labels=lambda _: None)


async def test_nobody_can_take_the_id_of_an_inner_run(store):
    """Ids of this form are refused at every start, so a client cannot prepare the answer of a call."""
    agent, _ = helper(store)
    taken = str(attempt_at(agent.start("x", id="r1"), call("look")).next_run_id())
    with pytest.raises(MisuseError, match="has the form of the ids of runs that the call of a tool starts"):
        agent.start("y", id=taken)
    run = await agent.run("z")
    with pytest.raises(MisuseError, match="has the form"):
        await agent.fork(run.id, at=0, id=taken)
    assert find_caller(f"{taken}.t1.0") is None  # that of a sub-agent of the run


async def test_tasks_that_outlive_the_call_are_outside_of_it(store):
    """What a function leaves behind starts runs of its own."""
    agent, _ = helper(store)
    ids, may_start, started = [], anyio.Event(), anyio.Event()

    async def later():
        started.set()
        await may_start.wait()
        ids.append((await agent.run("later")).id)

    async with anyio.create_task_group() as tasks:

        @tool(read_only=True)
        async def go() -> str:
            """Go."""
            tasks.start_soon(later)
            await started.wait()
            return "gone"

        await caller(store, go).run("x", user="ann")
        may_start.set()
    assert find_caller(ids[0]) is None
    assert (await agent.load(ids[0])).header.user is None


async def test_what_the_engine_starts_in_an_inner_run_has_ids_of_its_own(store):
    """A validator of an inner run is not part of the call: it would find other runs when the inner run is resumed."""
    agent, _ = helper(store)
    checked = []

    async def check(answer):
        checked.append((await agent.run("check")).id)
        return answer

    inner = Agent(ScriptedModel("fine"), name="inner", store=store, output_validators=[check])

    @tool(read_only=True)
    async def go() -> str:
        """Go."""
        return (await inner.run("x")).output

    await caller(store, go).run("x")
    assert [find_caller(each) for each in checked] == [None]


async def test_a_queue_without_a_run_is_no_caller():
    """The functions of its calls start runs like any other code."""
    agent, _ = helper(MemoryStore())

    @tool
    async def go() -> str:
        """Go."""
        return (await agent.run("x")).id

    queue = ToolQueue(ToolRegistry.of([go]))
    [result] = await queue.execute_all([ToolCall(id="t1.0", name="go", arguments="{}")])
    assert find_caller(result.content) is None


# Identity and labels.

IDENTITY = {"user": "ann", "roles": ["lead"], "tenant": "acme", "clearance": "internal"}


async def test_the_identity_of_the_caller_is_inherited_unless_given(store):
    """Roles belong to a user, so another user has none of them; the trace continues below the call."""
    agent, _ = helper(store)
    headers = []

    @tool
    async def go() -> str:
        """Go."""
        several = ({}, {"user": "bob"}, {"roles": ()}, {"tenant": "other", "clearance": "public"})
        headers.extend([(await agent.run("x", **given)).header for given in several])
        return "gone"

    run = await caller(store, go).run("x", **IDENTITY, metadata={"a": 1}, release="7")
    found = [(each.user, each.roles, each.tenant, each.clearance) for each in headers]
    assert found == [
        ("ann", ("lead",), "acme", "internal"),
        ("bob", (), "acme", "internal"),
        ("ann", (), "acme", "internal"),
        ("ann", ("lead",), "other", "public"),
    ]
    assert {each.traceparent for each in headers} == {child_traceparent(run.header, "t1.0")}
    assert {(each.release, tuple(each.metadata)) for each in headers} == {("", ())}


async def test_labels_flow_into_an_inner_run_and_out_of_it(store):
    """What the run has read, and what the call has read before; the result has what the inner runs brought in."""

    @tool(read_only=True, reads_private=True)
    async def read_file() -> str:
        """Read."""
        return "secret"

    @tool(read_only=True, reads_untrusted=True)
    async def fetch() -> str:
        """Fetch."""
        return "a page"

    reader = Agent(ScriptedModel(say("", call("fetch")), "read"), name="reader", store=store, tools=[fetch])
    agent, _ = helper(store)
    headers = []

    @tool
    async def go() -> str:
        """Go."""
        headers.append((await reader.run("read it")).header)
        headers.append((await agent.run("think of it", labels=["confidential"])).header)
        return "gone"

    model = ScriptedModel(say("", call("read_file")), say("", call("go")), "done")
    run = await Agent(model, store=store, tools=[read_file, go]).run("x")
    first, second = [{each.label: each for each in header.labels} for header in headers]
    assert set(first) == {Label.PRIVATE}
    assert (first[Label.PRIVATE].run_id, first[Label.PRIVATE].call_id) == (run.id, "t1.0")
    assert set(second) == {Label.PRIVATE, Label.UNTRUSTED, Label.CONFIDENTIAL}
    assert (second[Label.UNTRUSTED].call_id, second[Label.UNTRUSTED].name) == ("t2.0", "go")
    assert results_of(run.messages)[1].labels == (Label.UNTRUSTED, Label.CONFIDENTIAL)
    assert run.labels[Label.UNTRUSTED].call_id == "t2.0"


@pytest.mark.parametrize("way", ["wait", "load", "fork", "history", "audit", "events"])
async def test_labels_come_out_of_a_run_that_a_worker_executed(store, way):
    """Each way to read the run reads it as well as `run` does."""

    @tool(read_only=True, reads_untrusted=True)
    async def fetch() -> str:
        """Fetch."""
        return "a page"

    reader = Agent(ScriptedModel(say("", call("fetch")), "read"), name="reader", store=store, tools=[fetch])

    @tool
    async def go() -> str:
        """Go."""
        run = await reader.submit("read it")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(reader.worker, until_idle=True))
        found = getattr(reader, way)(run.id)
        return str([each async for each in found] if way == "events" else await found)

    run = await caller(store, go).run("x")
    own = (Label.USER_DATA,) if way == "fork" else ()  # the tool has written its prompt
    assert results_of(run.messages)[0].labels == (Label.UNTRUSTED, *own)


async def test_a_rollout_finds_the_arm_of_the_run_again(store):
    """The id is made before the arm is chosen, and a run that is there keeps its release."""
    arms = {name: helper(store, version=name)[0] for name in ("1", "2")}
    rollout, headers = Rollout("try", arms, unit="run"), []
    await rollout.start({"1": 0, "2": 100}, by="ann", reason="a test")

    @tool(read_only=True)
    async def go() -> str:
        """Go."""
        headers.append((await rollout.run("x")).header)
        if len(headers) == 1:
            await rollout.control.set_weights({"1": 100, "2": 0}, by="ann", reason="a test")
            raise BUSY
        return "gone"

    run = await caller(store, go).run("x", user="ann")
    assert results_of(run.messages)[0].content == "gone"
    assert [(each.id, each.release, each.user) for each in headers] == [(headers[0].id, "2", "ann")] * 2
    assert find_caller(headers[0].id) == (run.id, "t1.0")
