"""What a stream tells comes in the order of the journal, however the calls of a turn end."""

from __future__ import annotations

import anyio
import attrs
import pytest

from agentfsm import (
    TABLE,
    Agent,
    Limits,
    ModelRetry,
    ModelUnavailableError,
    Run,
    RunContext,
    StateChanged,
    StreamEvent,
    ToolCall,
    ToolEvent,
    ToolEventType,
    ToolQueue,
    ToolRegistry,
    ToolResult,
    tool,
)
from agentfsm.core.events import Event, ToolFinished, ToolsReturned
from agentfsm.core.inbox import Cancel
from agentfsm.ports import CallChunk, Emit, Model, Reply, Request
from agentfsm.testing import ScriptedModel, call, say
from agentfsm.tools.queue.dispatch import QueueHost
from tests.support.checks import HANG_S

ENDS = {ToolEventType.COMPLETED, ToolEventType.ERROR, ToolEventType.PAUSED}
# The events of the journal that change the state of a run.
MOVES = {kind.__name__ for state, row in TABLE.items() for kind, after in row.items() if after is not state}


@tool(read_only=True)
async def look(at: str = "") -> str:
    """Look; read-only, so it starts while the reply streams."""
    return f"saw {at}"


@tool
async def write(at: str = "") -> str:
    """Write."""
    return f"wrote {at}"


@tool(requires_approval=True)
async def pay() -> str:
    """Pay."""
    return "paid"


@tool(concurrency_safe=True)
async def broken() -> str:
    """Fail."""
    raise ValueError("no luck")


@tool
async def again() -> str:
    """Ask for another try."""
    raise ModelRetry("say more")


@tool(timeout_s=0.001)
async def hang() -> str:
    """Take too long."""
    await anyio.sleep_forever()
    return "never"


@tool(concurrency_safe=True)
async def stop(ctx: RunContext[Agent]) -> str:
    """Have the run cancelled while this call and its neighbours are in flight."""
    await ctx.deps.store.post(ctx.run_id, "cancel", Cancel())
    await anyio.sleep_forever()
    return "never"


@tool(concurrency_safe=True)
async def beside() -> str:
    """Wait until it is cut off."""
    await anyio.sleep_forever()
    return "never"


TOOLS = [look, write, pay, broken, again, hang, stop, beside]
# By name: the calls of the first reply, and options of the agent.
SCENES: dict[str, tuple[list[object], dict[str, object]]] = {
    "done": ([call("write", at="a")], {}),
    "failed": ([call("broken")], {}),
    "asked for another try": ([call("again")], {}),
    "timed out": ([call("hang")], {}),
    "unknown tool": ([call("nobody")], {}),
    "wrong arguments": ([call("write", when="now")], {}),
    "several, one by one": ([call("write", at="a"), call("hang"), call("write", at="b")], {}),
    "several at once": ([call("broken"), call("broken"), call("broken")], {}),
    "early": ([call("look", at="a")], {}),
    "several early": ([call("look", at="a"), call("look", at="b"), call("look", at="c")], {}),
    "early, then others": ([call("look", at="a"), call("write", at="b"), call("look", at="c")], {}),
    "early, then an approval": ([call("look", at="a"), call("pay"), call("write", at="b")], {}),
    "an approval": ([call("write", at="a"), call("pay")], {}),
    "cancelled": ([call("beside"), call("stop"), call("beside")], {}),
    "limit of calls": ([call("write", at="a"), call("write", at="b")], {"limits": Limits(tool_calls=1)}),
    "limit of calls, early": ([call("look", at="a"), call("write", at="b")], {"limits": Limits(tool_calls=1)}),
    "limit of time": ([call("look", at="a"), call("beside"), call("beside")], {"limits": Limits(seconds=0.05)}),
}


async def told(agent: Agent, start: str | Run) -> tuple[list[StreamEvent], Run]:
    """All events of a stream, and the run that it ends with."""
    with anyio.fail_after(HANG_S):
        async with agent.stream(start, deps=agent) as stream:
            return [event async for event in stream], stream.run


def in_stream(events: list[StreamEvent]) -> list[tuple[str, str]]:
    """The changes of state and the results of calls, as a stream has told them."""
    order = []
    for event in events:
        if isinstance(event, StateChanged):
            order.append(("moved by", type(event.event).__name__))
        elif isinstance(event, ToolEvent) and event.result is not None:
            order.append(("result of", event.call_id))
    return order


def in_journal(events: tuple[Event, ...], ids: set[str]) -> list[tuple[str, str]]:
    """The same, as the journal has it: of calls that were in the queue, since others get their results elsewhere."""
    order = []
    for event in events:
        if isinstance(event, ToolFinished) and event.result.call_id in ids:
            order.append(("result of", event.result.call_id))
        elif type(event).__name__ in MOVES:
            order.append(("moved by", type(event).__name__))
    return order


@pytest.mark.parametrize("decision", ["approve", "reject"])
@pytest.mark.parametrize("scene", SCENES)
async def test_a_stream_tells_what_the_journal_says_in_its_order(store, scene, decision):
    """Results and changes of state are in one order in both, and a turn ends after its last call and the drain."""
    calls, options = SCENES[scene]
    agent = Agent(ScriptedModel(say("", *calls), "done"), tools=TOOLS, store=store, **options)
    events, run = await told(agent, "go")
    if run.is_waiting:
        await getattr(agent, decision)(run.id, run.pending[0].call_id)
        more, run = await told(agent, run)
        events += more
    assert run.is_over

    journal = await agent.history(run.id)
    results = {call_id for what, call_id in in_stream(events) if what == "result of"}
    assert in_stream(events) == in_journal(journal, results)

    tools = [event for event in events if isinstance(event, ToolEvent)]
    for call_id in {event.call_id for event in tools} - {""}:
        own = [event.type for event in tools if event.call_id == call_id]
        assert own.count(ToolEventType.STARTED) <= sum(kind in ENDS for kind in own) <= 1
    ends = [n for n, event in enumerate(events) if isinstance(event, ToolEvent) and event.type in ENDS]
    drains = [
        n for n, event in enumerate(events) if isinstance(event, ToolEvent) and event.type is ToolEventType.DRAINED
    ]
    turns = [
        n
        for n, event in enumerate(events)
        if isinstance(event, StateChanged) and isinstance(event.event, ToolsReturned)
    ]
    if turns:
        assert max(ends) < max(drains) < turns[0]


class Breaking(Model):
    """Streams a call and the beginning of another, breaks off when the first has ended, and answers then."""

    name = "breaking"

    def __init__(self) -> None:
        self.asked = 0

    async def reply(self, request: Request, emit: Emit | None = None) -> Reply:
        """Break off once."""
        self.asked += 1
        if self.asked > 1 or emit is None:
            return Reply(text="done")
        for index, name in enumerate(["look", "write"]):
            emit(CallChunk(index=index, name=name, arguments="{}"))
        await anyio.wait_all_tasks_blocked()
        raise ModelUnavailableError("the connection was lost")


async def test_what_a_dropped_reply_had_started_is_told_as_dropped(store):
    """A call that ended before its reply broke off has no result in the journal, so none is told."""
    agent = Agent(Breaking(), tools=TOOLS, store=store, limits=Limits(retry_wait_s=0.001))
    events, run = await told(agent, "go")
    assert run.output == "done"
    kinds = [event.type.value for event in events if isinstance(event, ToolEvent)]
    assert kinds == ["tool_queued", "tool_started", "tool_error"]
    ends = [event for event in events if isinstance(event, ToolEvent) and event.type in ENDS]
    assert [(event.result, event.message) for event in ends] == [(None, "dropped, with the reply that asked for it")]


async def test_the_queue_tells_of_a_result_after_its_host_has_it():
    """The host is where results are kept: what a listener hears is true by then."""
    order: list[tuple[str, str]] = []

    @attrs.define
    class Keeper(QueueHost):
        def on_result(self, result: ToolResult) -> None:
            """Keep it."""
            order.append(("kept", result.call_id))

    def hear(event: StreamEvent) -> None:
        if isinstance(event, ToolEvent) and (event.result is not None or event.type is ToolEventType.DRAINED):
            order.append(("told", event.call_id))

    queue = ToolQueue(ToolRegistry.of([look, write, broken]), host=Keeper(), on_event=hear)
    names = ("look", "broken", "write")
    await queue.execute_all([ToolCall(id=name, name=name, arguments="{}") for name in names])
    assert order == [*((how, name) for name in names for how in ("kept", "told")), ("told", "")]
